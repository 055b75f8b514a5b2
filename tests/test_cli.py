"""Command lines: the forms that people and sweeps send, and what happens to bad input."""

import dataclasses
import importlib
import json
import os
import re
import shutil
from pathlib import Path

import gymnasium as gym
import numpy as np
import probes
import pytest
import torch
from conftest import ONE, SCRIPTS, SMALL, flags_of, probe, run, scalars


def test_switches(script):
    """The forms that people and sweeps send."""
    on = ["--anneal-lr", "--anneal-lr=True", "--anneal-lr=true", "--anneal_lr true"]
    off = ["--no-anneal-lr", "--no-anneal_lr", "--anneal_lr=False", "--anneal_lr=false", "--anneal-lr False"]
    for form in on + off:
        assert script.parse_args(form.split()).anneal_lr is (form in on), form
        assert script.parse_args([*form.split(), "--seed", "7"]).seed == 7, form


def test_integers(script):
    forms = ["--num-envs=1000", "--num_envs 1000", "--num-envs 1e3", "--num_envs=1E+3", "--num-envs=1000.0"]
    for form in [*forms, "--num-envs=0.001M"]:
        value = script.parse_args(form.split()).num_envs
        assert value == 1000 and type(value) is int, form


def test_large_integers_are_exact(script):
    assert script.parse_args(["--total-timesteps=1e10"]).total_timesteps == 10**10
    assert script.parse_args(["--seed", "1234567890123456789"]).seed == 1234567890123456789


def test_values_that_look_like_flags_stay_as_they_are(script):
    args = script.parse_args(["--exp-name", "x--track=True", "--runs-dir=a--seed=1e3", "--seed=1e1"])
    assert (args.exp_name, args.runs_dir, args.seed, args.track) == ("x--track=True", "a--seed=1e3", 10, False)


def test_a_sweep_command_line(script):
    """As `wandb sweep` builds it: every value as --name=value, switches as True and False, None spelled out."""
    line = "--track=True --norm_adv=False --env_id=Swimmer-v4 --learning_rate=0.00031 --target_kl=None"
    args = script.parse_args([*line.split(), "--num_envs=16.0", "--desired_kl=0.01"])
    assert (args.track, args.norm_adv, args.env_id, args.target_kl) == (True, False, "Swimmer-v4", None)
    assert (args.learning_rate, args.num_envs, args.desired_kl) == (0.00031, 16, 0.01)


def test_defaults_and_overrides(script):
    saved = script.Args(gamma=0.9, num_envs=3, anneal_lr=False)
    args = script.parse_args(["--num-envs", "5"], default=saved)
    assert (args.gamma, args.num_envs, args.anneal_lr) == (0.9, 5, False)
    assert script.parse_args([]) == script.Args()


BAD = {
    "unknown environment": ({"env_id": "NoSuchEnv-v0"}, "--env-id NoSuchEnv-v0: "),
    "malformed environment": ({"env_id": "no such env!"}, "--env-id no such env!: "),
    "module not installed": ({"env_id": "nomodule:NoSuchEnv-v0"}, "--env-id nomodule:NoSuchEnv-v0: "),
    "environment of another mujoco": ({"env_id": "Hopper-v3"}, "--env-id Hopper-v3: "),
    "not a number of environments": ({"num_envs": "1.2.3"}, None),
    "no such flag": ({"no_such_flag": 1}, None),
    "fraction of an environment": ({"num_envs": 1.5}, None),
    "indivisible batch": ({"num_minibatches": 7}, "--num-minibatches 7 must divide a batch of 64, as [2, 4, 8] do"),
    "negative size": ({"num_envs": -1}, "--num-envs must be a finite number from 1 to inf, not -1"),
    "zero size": ({"num_steps": 0}, "--num-steps must be a finite number from 1 to inf, not 0"),
    "no epochs": ({"update_epochs": 0}, "--update-epochs must be a finite number from 1 to inf, not 0"),
    "no checkpoints": ({"checkpoint_interval": 0}, "--checkpoint-interval must be a finite number from 1"),
    "too short": ({"total_timesteps": 63}, "--total-timesteps 63 is below num_envs * num_steps = 64"),
    "not a fraction": ({"gamma": 1.5}, "--gamma must be a finite number from 0 to 1, not 1.5"),
    "negative fraction": ({"gae_lambda": -0.5}, "--gae-lambda must be a finite number from 0 to 1, not -0.5"),
    "NaN": ({"learning_rate": "nan"}, "--learning-rate must be a finite number from 0 to inf, not nan"),
    "infinity": ({"target_kl": "inf"}, "--target-kl must be a finite number from 0 to inf, not inf"),
    "minus infinity": ({"ent_coef": "-inf"}, "--ent-coef must be a finite number from -inf to inf, not -inf"),
    "negative": ({"clip_coef": -0.1}, "--clip-coef must be a finite number from 0 to inf, not -0.1"),
    "negative seed": ({"seed": -1}, "--seed must be a finite number from 0 to inf, not -1"),
    "nothing to resume": ({"resume": "nowhere"}, "nowhere/checkpoint.pt is missing"),
    "nothing to evaluate": ({"evaluate": "nowhere"}, "nowhere/checkpoint.pt is missing"),
}
INTEGERS = {"integers in a Box": ({"env_id": "box/Whole-v0"}, "a Box of floats is needed")}
BAD_FOR = {
    "ppo_continuous": {
        "wrong action space": ({"env_id": "CartPole-v1"}, "CartPole-v1 has actions Discrete(2): a Box"),
        "several choices": ({"env_id": "discrete/Target-v0"}, "(Discrete: use ppo_discrete.py)"),
        **INTEGERS,
    },
    "ppo_discrete": {
        "wrong action space": ({"env_id": "Pendulum-v1"}, "(Box: use ppo_continuous.py)"),
        "no such game": ({"env_id": "ALE/NoGame-v5"}, "--env-id ALE/NoGame-v5: "),
        "game of another name": ({"env_id": "PongNoFrameskip-v4"}, "Atari games are called ALE/NAME-v5 here"),
    },
    "ppo_rnn": {
        "columns that cannot be cut": (
            {"num_minibatches": 8, "num_steps": 32},
            "--num-minibatches 8 must divide num_envs = 4, as [1, 2, 4] do",
        ),
        "indivisible batch": ({"num_minibatches": 3}, "--num-minibatches 3 must divide num_envs = 4, as [1, 2, 4] do"),
        "no such cell": ({"cell": "rnn"}, None),
        **INTEGERS,
    },
}
CASES = [(name, case) for name in SCRIPTS for case in [*BAD, *BAD_FOR[name]]]


def assert_one_line(finished, message, code=2):
    assert finished.returncode == code, finished.stderr
    errors = [line for line in finished.stderr.splitlines() if "error:" in line]
    assert len(errors) == 1 and message in errors[0], finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize("script, case", CASES, indirect=["script"])
def test_bad_input(script, case, tmp_path, main):
    changes, message = (BAD | BAD_FOR[script.__name__])[case]
    flags = flags_of(**{"env_id": probe(script), "runs_dir": tmp_path / "runs"} | SMALL | changes)
    finished = main(script, *flags)
    if message is None:  # tyro's own words, in a box
        assert finished.returncode == 2 and "Traceback" not in finished.stderr
    else:
        assert_one_line(finished, message)
    assert not (tmp_path / "runs").exists()


def test_bad_input_of_train(script, tmp_path):
    """A notebook gets a ValueError with the line."""
    args = script.Args(runs_dir=str(tmp_path), **{"env_id": "NoSuch-v0"} | SMALL)
    with pytest.raises(ValueError, match=r"^--env-id NoSuch-v0: .* doesn't exist"):
        script.train(args)


def test_help(script, main):
    """Begins with what the script is and with its commands."""
    finished = main(script, "--help")
    assert finished.returncode == 0
    head, _ = finished.stdout.split(" options ")
    for flags in ("--env-id", "--resume runs/NAME", "--evaluate runs/NAME"):
        assert f"python {script.__name__}.py {flags}" in head


@ONE
def test_bad_input_in_a_process_of_its_own(script, tmp_path):
    """One line and no more on stderr, exit code 2, no run folder."""
    finished = run(script.__name__, "--env-id", "HalfCheeta-v4", f"--runs-dir={tmp_path / 'runs'}")
    assert_one_line(finished, "HalfCheeta")
    assert len(finished.stderr.splitlines()) == 1 and not (tmp_path / "runs").exists()


@pytest.fixture
def run_dir(script, small_args):
    return script.train(small_args())[1]


class Command:
    """It runs when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path.with_name('it-ran')}",)


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:1000]),
    "flipped": lambda path: path.write_bytes(b"\0" * 64 + path.read_bytes()[64:]),
    "text": lambda path: path.write_text("hello"),
    "another program's": lambda path: torch.save({"model": torch.zeros(3)}, path),
    "a pickle that would run code": lambda path: torch.save(torch.load(path) | {"seconds": Command(path)}, path),
    "not a dictionary": lambda path: torch.save(torch.zeros(3), path),
    "of another agent": lambda path: torch.save(
        torch.load(path) | {"agent": {"critic.0.weight": torch.zeros(3)}}, path
    ),
    "without its optimizer": lambda path: torch.save(
        {key: value for key, value in torch.load(path).items() if key != "optimizer"}, path
    ),
    "of another version": lambda path: torch.save(torch.load(path) | {"args": {"no_such_argument": 1}}, path),
}


def test_damaged_checkpoint(script, run_dir, main):
    """It is refused in one line. Nothing in the folder changes: a command in the checkpoint does not run either."""
    path = run_dir / "checkpoint.pt"
    whole = path.read_bytes()
    for name, damage in DAMAGE.items():
        path.write_bytes(whole)
        damage(path)
        files = {path: path.read_bytes() for path in run_dir.iterdir()}
        for flag in ("--resume", "--evaluate"):
            assert_one_line(main(script, flag, run_dir), "checkpoint.pt is missing, damaged, or")
            assert files == {path: path.read_bytes() for path in run_dir.iterdir()}, name


def test_checkpoint_of_another_script(script, tmp_path, main):
    name = SCRIPTS[SCRIPTS.index(script.__name__) - 1]
    other = importlib.import_module(name)
    _, run_dir = other.train(other.Args(env_id=probe(other), runs_dir=str(tmp_path), **SMALL))
    for flag in ("--resume", "--evaluate"):
        message = "checkpoint.pt is missing, damaged, or from another script or version"
        assert_one_line(main(script, flag, run_dir), message)


def test_resume_with_other_arguments(script, run_dir, main):
    """What is given again applies, everything else stays as it was."""
    before = script.load_checkpoint(run_dir)["args"]
    main(script, "--resume", run_dir, "--total-timesteps=512", "--gamma=0.5", "--num_envs=8", "--no-norm-obs")
    saved = script.load_checkpoint(run_dir)
    changes = {"resume": str(run_dir), "total_timesteps": 512, "gamma": 0.5, "num_envs": 8, "norm_obs": False}
    assert saved["args"] == dataclasses.replace(before, **changes) and saved["global_step"] == 512
    assert json.loads((run_dir / "args.json").read_text()) == json.loads(json.dumps(vars(saved["args"])))


def test_evaluate_with_other_arguments(script, run_dir, main):
    """Those of the run apply, except those given again. Nothing is trained or written."""

    def evaluate(*flags):
        finished = main(script, "--evaluate", run_dir, "--eval-episodes=20", *flags)
        return finished.stdout.splitlines()[-2].removeprefix("returns: ")

    files = {path: path.read_bytes() for path in run_dir.iterdir()}
    agent, saved = script.load_agent(run_dir), script.load_checkpoint(run_dir)["args"]

    def expected(env_id, seed, deterministic):
        return " ".join(f"{x:.1f}" for x in script.evaluate(agent, env_id, 20, seed, deterministic))

    first = evaluate()
    assert first == expected(saved.env_id, saved.seed, saved.eval_deterministic)
    assert first != evaluate("--seed=9") == expected(saved.env_id, 9, saved.eval_deterministic)
    assert first != evaluate("--no-eval-deterministic") == expected(saved.env_id, saved.seed, False)
    assert first != evaluate(f"--env-id={probe(script, 'Shifted')}", "--gamma=0.5", "--num-envs=1")
    assert files == {path: path.read_bytes() for path in run_dir.iterdir()}


def test_latest(script, small_args, main):
    """--resume latest and --evaluate latest mean the newest checkpoint in --runs-dir; a file in the folder will do."""
    args = small_args()
    folders = [script.train(dataclasses.replace(args, seed=seed))[1] for seed in (1, 2)]
    for flags in (["--evaluate=latest", "--eval-episodes=1"], ["--resume", "latest", "--total-timesteps=512"]):
        assert main(script, *flags, f"--runs-dir={args.runs_dir}").returncode == 0
    steps = [script.load_checkpoint(folder)["global_step"] for folder in folders]
    assert steps == [256, 512]
    printed = main(script, f"--evaluate={folders[0]}/checkpoint.pt", "--eval-episodes=3").stdout
    assert len(re.findall(r"returns: .*", printed)[-1].split()) == 4
    assert_one_line(main(script, "--resume=latest", "--runs-dir=nowhere"), "latest/checkpoint.pt is missing")


@ONE
def test_latest_of_a_copied_run(script, small_args, tmp_path):
    """It is that of --runs-dir, here ./runs, not of the folder that the run was made in."""
    _, run_dir = script.train(small_args())
    copy = shutil.copytree(run_dir, tmp_path / "elsewhere" / "runs" / run_dir.name)
    script.train(small_args(seed=2))
    flags = ["--resume=latest", "--total-timesteps=512", f"--env-id=probes:{probe(script)}"]
    assert run(script.__name__, *flags, cwd=tmp_path / "elsewhere").returncode == 0
    assert [script.load_checkpoint(folder)["global_step"] for folder in (copy, run_dir)] == [512, 256]


def test_number_of_environments_alone(script, capsys):
    """--num-envs that the default --num-minibatches does not divide takes the nearest number that does, and says so."""
    default = script.Args.num_minibatches
    num_envs = default + 1 if script.__name__ == "ppo_rnn" else 7
    args = script.Args(num_envs=num_envs, num_steps=3)
    script.check_args(args)
    size = num_envs if script.__name__ == "ppo_rnn" else num_envs * 3
    assert size % args.num_minibatches == 0 and args.num_minibatches != default
    assert abs(args.num_minibatches - default) == min(abs(d - default) for d in range(1, size + 1) if size % d == 0)
    assert f"--num-minibatches {args.num_minibatches}, because the default" in capsys.readouterr().err


def test_short_names(script):
    """--env and --lr, as other projects call them; flags that begin alike stay as they are."""
    args = script.parse_args(["--env", "Mine-v0", "--lr=1e-5", "--env-kwargs", "{}"])
    assert (args.env_id, args.learning_rate, args.env_kwargs) == ("Mine-v0", 1e-5, "{}")


def test_no_warning_of_an_old_version(tmp_path):
    """HalfCheetah-v4 is the default, because results are published for it."""
    finished = run("ppo_continuous", *flags_of(**SMALL | {"env_id": "HalfCheetah-v4", "runs_dir": str(tmp_path)}))
    assert (finished.returncode, finished.stderr) == (0, "")


class Drawn(probes.Target):
    """Its observations are images, which are too small for the CNN."""

    def __init__(self, discrete):
        super().__init__(discrete)
        self.observation_space = gym.spaces.Box(0, 255, (4, 4, 3), np.uint8)

    def reset(self, **options):
        super().reset(**options)
        return self.observation_space.sample(), {}

    def step(self, action):
        _, *rest = super().step(action)
        return self.observation_space.sample(), *rest


def test_images_that_are_flattened(script, small_args, capsys):
    envs = script.make_envs(small_args(env_id=probe(script, "Drawn")), 2)
    assert envs.single_observation_space.shape == (48,)
    assert "images are flattened, see docs/your-environment.md" in capsys.readouterr().err


class Adjustable(probes.Target):
    """Rewards of `bonus` more; its infos say how the episode went."""

    def __init__(self, discrete, bonus=0):
        super().__init__(discrete)
        self.bonus = bonus

    def step(self, action):
        obs, reward, *rest, _ = super().step(action)
        return obs, reward + self.bonus, *rest, {"is_success": True, "bonus": np.float32(self.bonus), "name": "x"}


@pytest.mark.parametrize("async_envs", [False, True])
def test_env_kwargs_and_info_metrics(script, small_args, main, async_envs):
    """--env-kwargs reach the environments of training and of evaluation. Numbers in the last info of an episode are
    logged as info/NAME, nothing else of it is."""
    args = small_args(env_id=probe(script, "Adjustable"), env_kwargs='{"bonus": 100}', async_envs=async_envs)
    _, run_dir = script.train(args)
    logged = scalars(run_dir)
    assert {name for name in logged if name.startswith("info/")} == {"info/is_success", "info/bonus"}
    assert {value for _, value in logged["info/bonus"]} == {100.0}
    assert all(value > 50 for _, value in logged["charts/episodic_return"])
    means = []
    for kwargs in ([], ['--env-kwargs={"bonus": 1000}']):
        printed = main(script, f"--evaluate={run_dir}", *kwargs).stdout
        means.append(float(re.findall(r"mean (\S+),", printed)[-1]))
    assert 50 < means[0] < 150 and means[1] - means[0] == pytest.approx(900, abs=1)
    if not async_envs:
        for text, message in (("{", "Expecting property name"), ('{"no_such": 1}', "no_such")):
            flags = f"--env-id={args.env_id}", f"--env-kwargs={text}", "--num-envs=4"
            assert_one_line(main(script, *flags), message)


@ONE
def test_module_in_the_current_folder(script, tmp_path):
    """--env-id my_module:Mine-v0 works from the folder of my_module, wherever the script lies."""
    lines = ["import gymnasium, probes", "gymnasium.register('Mine-v0', probes.Target, kwargs={'discrete': False})"]
    (tmp_path / "my_module.py").write_text("\n".join(lines))
    finished = run(script.__name__, "--env-id=my_module:Mine-v0", *flags_of(**SMALL), cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr


def test_hidden_sizes(script, small_args):
    """Actor and critic get these layers; a checkpoint remembers them."""
    assert script.parse_args(["--hidden-sizes", "32", "16", "8"]).hidden_sizes == (32, 16, 8)
    _, run_dir = script.train(small_args(hidden_sizes=(32, 16, 8)))
    agent = script.load_agent(run_dir)
    for network in (agent.actor, agent.critic):
        assert [layer.out_features for layer in network[::2]][:3] == [32, 16, 8]


class Switches(gym.Env):
    """Three switches (MultiBinary). The return of the only step is the number of those that are as observed."""

    observation_space = gym.spaces.Box(0, 1, (3,), np.float32)
    action_space = gym.spaces.MultiBinary(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.wanted = self.np_random.integers(0, 2, 3)
        return self.wanted.astype(np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return self.wanted.astype(np.float32), float((action == self.wanted).sum()), True, False, {}


gym.register("Switches-v0", Switches)


@pytest.mark.parametrize("script", ["ppo_discrete", "ppo_rnn"], indirect=True)
def test_multibinary_actions(script, small_args):
    """Each switch is a choice of two; it is learned, and the trained agent acts."""
    sizes = {"num_envs": 16, "num_steps": 16, "update_epochs": 10, "total_timesteps": 256 * 8}
    _, run_dir = script.train(small_args(env_id="Switches-v0", learning_rate=5e-3, anneal_lr=False, **sizes))
    assert script.evaluate(script.load_agent(run_dir), "Switches-v0", 50, 0).mean() > 2.2


class Shifted(probes.Target):
    """Rewards of 1 more."""

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, reward + 1, *rest


class NanReset(probes.Target):
    """Observes NaN: at its 10th reset, or at its first one."""

    def __init__(self, discrete, number):
        super().__init__(discrete)
        self.number = number

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        self.number -= 1
        return obs * np.nan if self.number == 0 else obs, info

    def step(self, action):  # not the one above, which refuses NaN
        return self.target.copy(), 0.0, True, False, {}


for name, discrete in (("box", False), ("discrete", True)):
    gym.register(f"{name}/Drawn-v0", Drawn, kwargs={"discrete": discrete})
    gym.register(f"{name}/Adjustable-v0", Adjustable, kwargs={"discrete": discrete})
    gym.register(f"{name}/Shifted-v0", Shifted, kwargs={"discrete": discrete})
    gym.register(f"{name}/NanFirst-v0", NanReset, kwargs={"discrete": discrete, "number": 1})
    gym.register(f"{name}/NanReset-v0", NanReset, kwargs={"discrete": discrete, "number": 10})


@pytest.mark.parametrize(
    "name, where", [("NanFirst", ""), ("NanReset", "NanReset-v0 returned NaN or infinity in step 36")]
)
def test_environment_that_resets_to_nan(script, small_args, name, where, capsys):
    """One line, code 2, no checkpoint."""
    args = small_args(env_id=probe(script, name), norm_obs=False)
    with pytest.raises(SystemExit) as exit:
        script.train(args)
    (error,) = capsys.readouterr().err.splitlines()
    assert exit.value.code == 2 and "NaN or infinity" in error and where in error
    assert not list(Path(args.runs_dir).glob("*/checkpoint.pt"))


@pytest.mark.parametrize("where, interval, kept", [("Obs", 7, 64 * 14), ("Reward", 100, 64)])
def test_environment_that_returns_nan(script, small_args, where, interval, kept, capsys):
    """One line, code 2; the last checkpoint before it stays, and it can be resumed. The first iteration leaves one,
    whatever the interval."""
    args = small_args(env_id=probe(script, f"Nan{where}"), total_timesteps=64 * 40, checkpoint_interval=interval)
    with pytest.raises(SystemExit) as exit:
        script.train(args)
    error = capsys.readouterr().err
    assert exit.value.code == 2 and re.search(r"Nan\S+ returned NaN or infinity in step 1200", error), error
    (run_dir,) = Path(args.runs_dir).iterdir()
    saved = script.load_checkpoint(run_dir)
    assert saved["global_step"] == kept
    assert all(tensor.isfinite().all() for tensor in saved["agent"].state_dict().values())


def test_weights_that_are_not_finite_are_not_saved(script, small_args, capsys):
    """A resumed run that diverges ends in one line, code 2, and leaves the checkpoint as it was."""
    _, run_dir = script.train(small_args())
    before = (run_dir / "checkpoint.pt").read_bytes()
    more = {"learning_rate": 1e38, "max_grad_norm": 0.0, "total_timesteps": 1024, "checkpoint_interval": 1}
    with pytest.raises(SystemExit) as exit:
        script.train(small_args(resume=str(run_dir), anneal_lr=False, target_kl=None, **more))
    assert exit.value.code == 2 and "gave NaN or infinity; the last checkpoint is kept" in capsys.readouterr().err
    assert (run_dir / "checkpoint.pt").read_bytes() == before


@ONE
def test_wandb(script, small_args, offline_wandb):
    """--track, offline: the run folder holds a wandb run of its name, also if the folder is resumed by another path. It
    has the metrics and the arguments, complete when train returns: another run may follow in this process."""
    _, run_dir = script.train(small_args())
    (run_dir / "sub").mkdir()
    resume = {"resume": f"{run_dir}/sub/..", "total_timesteps": 512}
    script.train(small_args(track=True, wandb_project_name="hill", **resume))
    (record,) = (run_dir / "wandb").glob("offline-run-*/run-*.wandb")
    assert record.name == f"run-{run_dir.name}.wandb"
    content = record.read_bytes()
    for key in ("losses/value_loss", "charts/last_100_return", "charts/learning_rate", "global_step", "gamma", "hill"):
        assert key.encode() in content, key
    # Each of the 4 new iterations is there, not only the last one.
    assert content.count(b"losses/value_loss") >= 4


# What draws without a display.
DRAWN = {"ppo_continuous": "Pendulum-v1", "ppo_discrete": "ALE/Breakout-v5", "ppo_rnn": "CartPole-v1"}


def test_video(script, small_args, main):
    """--capture-video in training and in evaluation, on a simulator that can draw."""
    # Sampled actions: the likeliest ones of a new agent may never start a game of Breakout.
    changes = {"capture_video": True, "eval_deterministic": False, "total_timesteps": 128}
    _, run_dir = script.train(small_args(env_id=DRAWN[script.__name__], **changes))
    assert len(list((run_dir / "videos").glob("*.mp4"))) == 2
    finished = main(script, "--evaluate", run_dir, "--eval-episodes=1", "--capture-video")
    assert finished.returncode == 0, finished.stderr
    videos = list((run_dir / "videos").glob("*.mp4"))
    assert len(videos) == 3 and all(path.stat().st_size > 1000 for path in videos)


class Native(gym.vector.VectorEnv):
    """A vector that an environment brings along, in the autoreset mode that is asked for or in another. It returns all
    observations in one array."""

    def __init__(self, num_envs, autoreset_mode, mode=None, member="box/Chain-v0"):
        options = {"autoreset_mode": mode or autoreset_mode}
        self.envs = gym.make_vec(member, num_envs, "sync", vector_kwargs=options)
        self.single_observation_space = self.envs.single_observation_space
        self.single_action_space, self.metadata = self.envs.single_action_space, dict(self.envs.metadata)
        self.num_envs = num_envs

    def reset(self, *, seed=None, options=None):
        self.obs, infos = self.envs.reset(seed=seed)
        return self.obs, infos

    def step(self, actions):
        self.obs[:], *rest = self.envs.step(actions)
        return self.obs, *rest


for kind in ("box", "discrete"):
    gym.register(f"{kind}/Reusing-v0", vector_entry_point=Native, kwargs={"member": f"{kind}/Chain-v0"})
gym.register("native/SameStep-v0", vector_entry_point=Native)
gym.register("native/NextStep-v0", vector_entry_point=Native, kwargs={"mode": gym.vector.AutoresetMode.NEXT_STEP})


@ONE
def test_environment_with_a_vector_of_its_own(script, small_args, capsys):
    """One that restarts in the next step is refused. One without set_attr trains, not staggered."""
    with pytest.raises(ValueError, match="its vector begins the next episode in the next step, SAME_STEP is needed"):
        script.train(small_args(env_id="native/NextStep-v0"))
    args = small_args(env_id="native/SameStep-v0", stagger_envs=True)
    _, run_dir = script.train(args)
    assert "first episodes are not staggered, its vector has no set_attr" in capsys.readouterr().err
    assert len((run_dir / "episodes.csv").read_text().splitlines()) > 40


def test_a_vector_may_reuse_its_array(script, small_args):
    """The run is the same, to the bit, as that of the same environments in gymnasium's vector."""
    states = [script.train(small_args(env_id=probe(script, name)))[0].state_dict() for name in ("Chain", "Reusing")]
    torch.testing.assert_close(states[1], states[0], atol=0, rtol=0)
