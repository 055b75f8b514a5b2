"""--resume: the run goes on as if nothing had been, with its arguments or others."""

import dataclasses
import importlib
import json
import shutil
from pathlib import Path

import gymnasium as gym
import numpy as np
import probes
import pytest
import torch
from conftest import ONE, SCRIPTS, SMALL, assert_one_line, assert_same_learner, flags_of, probe, rows, scalars
from filelock import FileLock, Timeout

probes.register("WholeEpisodes", probes.Chain, lengths=(8,))


def test_resumed_learner_is_the_uninterrupted_one(script, small_args, monkeypatch):
    """Only random numbers and episodes begin anew. Here every rollout is one whole episode, and the same random numbers
    begin behind each iteration: a run that is interrupted after each of them is then the whole one to the last bit.
    Weights, optimizer, learning rate, noise and statistics all have to be there for it, episodes and logs too."""
    interrupted = False

    def begin_the_same_numbers(name):
        original = getattr(script.Run, name)

        def changed(self, *arguments, **named):
            original(self, *arguments, **named)
            torch.manual_seed(0)
            if interrupted and name == "save":
                raise KeyboardInterrupt

        monkeypatch.setattr(script.Run, name, changed)

    begin_the_same_numbers("save"), begin_the_same_numbers("start")
    sizes = {"num_steps": 8, "num_minibatches": 2, "checkpoint_interval": 0}
    _, whole = script.train(small_args(env_id=probe(script, "WholeEpisodes"), exp_name="whole", **sizes))
    args = small_args(env_id=probe(script, "WholeEpisodes"), exp_name="half", **sizes)
    interrupted, half = True, None
    for step in range(32, 257, 32):
        with pytest.raises(KeyboardInterrupt):
            script.train(None if half else args, half)
        (half,) = (path for path in whole.parent.iterdir() if "half" in path.name)
        assert script.load_checkpoint(half)["global_step"] == step
    assert_same_learner(script.load_checkpoint(half), script.load_checkpoint(whole))
    assert len(rows(half)) == 1 + 256 // 8 and [row[:3] for row in rows(half)] == [row[:3] for row in rows(whole)]
    one, two = scalars(whole), scalars(half)
    assert one.keys() == two.keys() and all(one[key] == two[key] for key in one.keys() - {"charts/SPS"})


def test_resume_without_further_steps(script, run_dir, capsys):
    """The learner is the checkpoint's, to the bit. Rows, checkpoint and trained settings stay as they are,
    and a line says why."""
    before = {name: (run_dir / name).read_bytes() for name in ("checkpoint.pt", "episodes.csv", "args.json")}
    agent, same_dir = script.train(dataclasses.replace(script.load_args(run_dir), learning_rate=0.5), run_dir)
    assert "step 256 of 256" in capsys.readouterr().out
    assert same_dir == run_dir and list(run_dir.parent.iterdir()) == [run_dir]
    torch.testing.assert_close(agent.state_dict(), script.load_checkpoint(run_dir)["agent"], atol=0, rtol=0)
    assert before == {name: (run_dir / name).read_bytes() for name in before}


@pytest.mark.parametrize("flag, rest", [("--num-envs=2", 8), ("--num-steps=32", 2)])
def test_resume_with_other_sizes(script, run_dir, main, flag, rest):
    """What is given again applies from the checkpoint on: steps and iterations go on from there to the same end."""
    flags = [flag, "--num-minibatches=2", "--total-timesteps=512"]
    assert main(script, "--resume", run_dir, *flags).returncode == 0
    steps = [step for step, _ in scalars(run_dir)["losses/value_loss"]]
    assert steps == [64, 128, 192, 256] + [256 + 256 // rest * (i + 1) for i in range(rest)]
    assert script.load_checkpoint(run_dir)["global_step"] == 512
    assert sum(int(row[2]) for row in rows(run_dir)[1:]) == 512  # episodes of one step


def test_resume_with_a_larger_batch_stays_within_the_total(script, run_dir):
    args = dataclasses.replace(script.load_args(run_dir), num_envs=24, total_timesteps=1100)
    script.train(args, run_dir)  # 256 steps are 2/3 of a new batch, and the total has room for two
    assert script.load_checkpoint(run_dir)["global_step"] == 256 + 384


@ONE
def test_a_resumed_run_that_is_stopped_keeps_its_new_settings(script, run_dir):
    """Its first iteration is saved, so the printed command goes on with them. Here the fourth iteration fails."""
    args = dataclasses.replace(script.load_args(run_dir), learning_rate=1e-5, total_timesteps=512)
    env_kwargs = json.dumps({"runs_dir": str(run_dir.parent)})
    args = dataclasses.replace(args, env_id=probe(script, "Watching"), env_kwargs=env_kwargs)
    with pytest.raises(RuntimeError, match="the simulator is lost"):
        script.train(args, resume=run_dir)
    assert script.load_checkpoint(run_dir)["global_step"] == 320
    assert script.load_args(run_dir).learning_rate == 1e-5


def test_resume_with_other_arguments(script, run_dir, main):
    """What is given again applies, everything else stays as it was. The learning rate is where a run of the new length
    would have it."""
    before = script.load_args(run_dir)
    changes = {"total_timesteps": 512, "gamma": 0.5, "learning_rate": 1e-5, "norm_obs": False}
    main(script, "--resume", run_dir, *flags_of(**changes))
    assert script.load_args(run_dir) == dataclasses.replace(before, **changes)
    assert script.load_checkpoint(run_dir)["global_step"] == 512
    saved = json.loads((run_dir / "args.json").read_text())
    about = {"script": script.__name__, "version": script.__version__}
    assert saved == about | json.loads(json.dumps(vars(script.load_args(run_dir))))
    main(script, "--resume", run_dir, "--total-timesteps=640", "--no-anneal-lr")
    rates = [rate for _, rate in scalars(run_dir)["charts/learning_rate"]]
    expected = [before.learning_rate * left for left in (1, 3 / 4, 2 / 4, 1 / 4)]
    expected += [1e-5 * left for left in (4 / 8, 3 / 8, 2 / 8, 1 / 8, 1, 1)]
    assert rates == pytest.approx(expected, rel=1e-5)


class Wider(gym.Wrapper):
    """Actions of the same shape in another space."""

    def __init__(self, env, space):
        super().__init__(env)
        self.action_space = space


def wider(discrete):
    spaces = gym.spaces.MultiDiscrete([3, 2], start=[0, 0]), gym.spaces.Box(-2, 2, (2,), np.float32)
    return Wider(probes.Target(discrete), spaces[0] if discrete else spaces[1])


probes.register("Wider", wider)


def test_other_actions_than_the_checkpoints(script, run_dir, main):
    """Other bounds, or another first choice: the policy's actions would mean something else. Refused in one line."""
    before = {path: path.read_bytes() for path in run_dir.iterdir()}
    others = [probe(script, "Wider")]
    if script.__name__ == "ppo_rnn":  # which takes both kinds
        others += ["discrete/Target-v0" if probe(script).startswith("box") else "box/Target-v0"]
    for env_id in others:
        refused = main(script, "--resume", run_dir, f"--env-id={env_id}", "--total-timesteps=512")
        assert_one_line(refused, f"{env_id} has another action_")
    assert before == {path: path.read_bytes() for path in run_dir.iterdir()}
    assert main(script, "--resume", run_dir, "--total-timesteps=512").returncode == 0


OTHER_NETWORKS = {"ppo_rnn": [["--cell=gru"], ["--memory-size=64"]]}
SMALLER, FEWER, MORE = (["--hidden-sizes", *sizes.split()] for sizes in ("32 32", "64", "64 64 64"))


def test_other_network_than_the_checkpoints(script, run_dir, main):
    """Other observations, or other layers: torch names the tensor, and nothing in the folder changes."""
    before = {path: path.read_bytes() for path in run_dir.iterdir()}
    observations = [f"--env-id={probe(script, 'Chain')}"]
    for flags in [observations, *OTHER_NETWORKS.get(script.__name__, [SMALLER, FEWER, MORE])]:
        with pytest.raises(RuntimeError, match=r"size mismatch for|Missing key|Unexpected key"):
            main(script, "--resume", run_dir, *flags)
        assert before == {path: path.read_bytes() for path in run_dir.iterdir()}
    assert_one_line(main(script, "--evaluate", run_dir, *observations), "observations of shape (16,), not (..., 2)")


@ONE
def test_latest(script, small_args, run_dir, main, tmp_path, monkeypatch):
    """The newest checkpoint among the runs of this script in --runs-dir, or in ./runs, wherever these were made."""
    args = small_args(seed=2)
    folders = [run_dir, script.train(args)[1]]
    other = importlib.import_module(SCRIPTS[SCRIPTS.index(script.__name__) - 1])
    other.train(other.Args(env_id=probe(other), runs_dir=args.runs_dir, **SMALL | {"total_timesteps": 64}))
    for flags in (["--evaluate=latest", "--eval-episodes=1"], ["--resume", "latest", "--total-timesteps=320"]):
        assert main(script, *flags, f"--runs-dir={args.runs_dir}").returncode == 0
    script.train(dataclasses.replace(args, total_timesteps=512), resume="latest")
    assert [script.load_checkpoint(folder)["global_step"] for folder in folders] == [256, 512]
    copy = shutil.copytree(run_dir, tmp_path / "elsewhere" / "runs" / run_dir.name)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(script, "--resume=latest", "--total-timesteps=320").returncode == 0
    assert script.train(resume="latest")[1].resolve() == script.find_run("latest").resolve() == copy
    assert [script.load_checkpoint(folder)["global_step"] for folder in (copy, *folders)] == [320, 256, 512]
    message = f"no run of {script.__name__}.py in nowhere: name a run folder, or add --runs-dir"
    for flag in ("--resume=latest", "--evaluate=latest"):
        assert_one_line(main(script, flag, "--runs-dir=nowhere"), message)


@ONE
def test_a_locked_folder_stays_as_it_is(script, run_dir, main, monkeypatch):
    """Another process is training there. The second one ends in one line, before it changes anything, or reads a
    checkpoint that the other one replaces in the meantime."""
    args = script.load_args(run_dir)
    with FileLock(run_dir / "lock"):
        before = {path: path.read_bytes() for path in run_dir.iterdir()}
        refused = main(script, "--resume", run_dir, "--total-timesteps=512")
        assert_one_line(refused, f"another process is training in {run_dir}")
        with monkeypatch.context() as patch, pytest.raises(ValueError, match="another process"):
            patch.setattr(torch, "load", lambda *a, **k: pytest.fail("the checkpoint was read"))
            script.train(args, run_dir)
        assert before == {path: path.read_bytes() for path in run_dir.iterdir()}
    assert main(script, "--resume", run_dir, "--total-timesteps=512").returncode == 0


class Watching(probes.Target):
    """Tries to take the lock of the run that it belongs to, then fails."""

    def __init__(self, discrete, runs_dir):
        super().__init__(discrete)
        self.runs_dir, self.steps = Path(runs_dir), 0

    def step(self, action):
        self.steps += 1
        (run_dir,) = self.runs_dir.iterdir()
        with pytest.raises(Timeout):
            FileLock(run_dir / "lock").acquire(timeout=0)
        if self.steps == 60:
            raise RuntimeError("the simulator is lost")
        return super().step(action)


probes.register("Watching", Watching)


@ONE
def test_a_run_holds_its_lock(script, small_args, tmp_path):
    """While it trains, and no longer than that, however it ends; the same process can go on with it."""
    env_kwargs = json.dumps({"runs_dir": str(tmp_path / "runs")})
    with pytest.raises(RuntimeError, match="the simulator is lost") as failed:
        script.train(small_args(env_id=probe(script, "Watching"), env_kwargs=env_kwargs, checkpoint_interval=0))
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert script.load_checkpoint(run_dir)["global_step"] == 192
    for steps in (192, 256):
        assert script.load_checkpoint(run_dir)["global_step"] == steps
        with FileLock(run_dir / "lock", timeout=0):
            pass
        script.train(resume=run_dir)  # while the traceback is still there, as in a notebook
    assert failed.value.__traceback__ is not None
