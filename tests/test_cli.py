"""Command lines: the forms that people and sweeps send, and what happens to bad input."""

import re
import time
from pathlib import Path

import pytest
import torch
from conftest import SCRIPTS, SMALL, flags_of, probe, run

SWITCHES = [
    ("--anneal-lr", True),
    ("--no-anneal-lr", False),
    ("--no-anneal_lr", False),
    ("--anneal-lr=True", True),
    ("--anneal_lr=False", False),
    ("--anneal-lr=true", True),
    ("--anneal_lr=false", False),
    ("--anneal-lr False", False),
    ("--anneal_lr true", True),
]


@pytest.mark.parametrize("form, value", SWITCHES)
def test_switches(script, form, value):
    assert script.parse_args(form.split()).anneal_lr is value
    assert script.parse_args([*form.split(), "--seed", "7"]).seed == 7


@pytest.mark.parametrize(
    "form", ["--num-envs=1000", "--num_envs 1000", "--num-envs 1e3", "--num_envs=1E+3", "--num-envs=1000.0"]
)
def test_integers(script, form):
    value = script.parse_args(form.split()).num_envs
    assert value == 1000 and type(value) is int


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
    "unknown environment": ({"env_id": "NoSuchEnv-v0"}, "NoSuchEnv"),
    "malformed environment": ({"env_id": "no such env!"}, "no such env!"),
    "module not installed": ({"env_id": "nomodule:NoSuchEnv-v0"}, "nomodule"),
    "environment of another mujoco": ({"env_id": "Hopper-v3"}, "Hopper-v3"),
    "not a number of environments": ({"num_envs": "1.2.3"}, None),
    "fraction of an environment": ({"num_envs": 1.5}, None),
    "empty name": ({"env_id": ":"}, "--env-id :"),
    "no vector to see": ({"env_id": "probes:box/Words-v0"}, "cannot be flattened"),
    "indivisible batch": ({"num_minibatches": 7}, "--num-minibatches 7 must divide num_envs"),
    "negative size": ({"num_envs": -1}, "--num-envs must be at least 1, not -1"),
    "zero size": ({"num_steps": 0}, "--num-steps must be at least 1, not 0"),
    "too short": ({"total_timesteps": 63}, "--total-timesteps 63"),
    "not a probability": ({"gamma": 1.5}, "--gamma must be between 0 and 1, not 1.5"),
    "NaN": ({"learning_rate": "nan"}, "--learning-rate must be a finite number"),
    "negative": ({"clip_coef": -0.1}, "--clip-coef must not be negative"),
    "negative penalty": ({"kl_coef": -0.1}, "--kl-coef must not be negative"),
    "negative seed": ({"seed": -1}, "--seed must not be negative"),
    "huge seed": ({"seed": 2**63}, "--seed must be below 2**63"),
    "no such device": ({"device": "tpu9"}, "--device tpu9"),
    "no CUDA": ({"device": "cuda:77"}, "--device cuda:77"),
    "nothing to resume": ({"resume": "nowhere"}, "nowhere/checkpoint.pt"),
    "nothing to evaluate": ({"evaluate": "nowhere"}, "nowhere/checkpoint.pt"),
}
BAD_FOR = {
    "ppo_continuous": {
        "wrong action space": ({"env_id": "CartPole-v1"}, "CartPole-v1 has Discrete actions: use ppo_discrete.py"),
        "above its bound": ({"log_std_init": 0.1, "log_std_max": 0}, "--log-std-init 0.1 is above --log-std-max 0.0"),
        "below its bound": ({"log_std_init": -2, "log_std_min": -1}, "--log-std-init -2.0 is below --log-std-min -1.0"),
        "integers in a Box": ({"env_id": "box/Whole-v0"}, "a Box of real numbers is needed"),
    },
    "ppo_discrete": {
        "wrong action space": ({"env_id": "Pendulum-v1"}, "Pendulum-v1 has Box actions: use ppo_continuous.py"),
        "no such game": ({"env_id": "ALE/NoGame-v5"}, "NoGame"),
        "game of another name": ({"env_id": "PongNoFrameskip-v4"}, "ALE/NAME-v5"),
        "game of an older name": ({"env_id": "ale_py:Pong-v4"}, "ALE/NAME-v5"),
    },
    "ppo_rnn": {
        "columns that cannot be cut": (
            {"num_minibatches": 8, "num_steps": 32},
            "--num-minibatches 8 must divide num_envs = 4",
        ),
        "no such cell": ({"cell": "rnn"}, None),
        "above its bound": ({"log_std_init": 0.1, "log_std_max": 0}, "--log-std-init 0.1 is above --log-std-max 0.0"),
        "below its bound": ({"log_std_init": -2, "log_std_min": -1}, "--log-std-init -2.0 is below --log-std-min -1.0"),
        "integers in a Box": ({"env_id": "box/Whole-v0"}, "a Box of real numbers is needed"),
    },
}
CASES = [(name, case) for name in SCRIPTS for case in [*BAD, *BAD_FOR[name]]]


def assert_one_line(finished, message, code=2):
    assert finished.returncode == code, finished.stderr
    errors = [line for line in finished.stderr.splitlines() if "error:" in line]
    assert len(errors) == 1 and message in errors[0], finished.stderr
    assert "Traceback" not in finished.stderr


def call_main(script, flags, monkeypatch, capsys):
    """main() in this process, which is much faster than a new one; SystemExit's code and what was printed."""
    monkeypatch.setattr("sys.argv", [script.__name__, *map(str, flags)])
    with pytest.raises(SystemExit) as exit:
        script.main()

    class Finished:
        returncode, stderr = exit.value.code, capsys.readouterr().err

    return Finished


@pytest.mark.parametrize("script, case", CASES, indirect=["script"])
def test_bad_input(script, case, tmp_path, monkeypatch, capsys):
    changes, message = (BAD | BAD_FOR[script.__name__])[case]
    flags = flags_of(**{"env_id": probe(script), "runs_dir": tmp_path / "runs"} | SMALL | changes)
    finished = call_main(script, flags, monkeypatch, capsys)
    if message is None:  # tyro's own words, in a box
        assert finished.returncode == 2 and "Traceback" not in finished.stderr
    else:
        assert_one_line(finished, message)
    assert not (tmp_path / "runs").exists()


def test_bad_input_in_a_process_of_its_own(script, tmp_path):
    """One line and no more on stderr, exit code 2, no run folder."""
    finished = run(script.__name__, "--env-id", "HalfCheeta-v4", f"--runs-dir={tmp_path / 'runs'}")
    assert_one_line(finished, "HalfCheeta")
    assert len(finished.stderr.splitlines()) == 1 and not (tmp_path / "runs").exists()
    assert run(script.__name__, "--no-such-flag").returncode == 2
    assert run(script.__name__, "--num-envs", "many").returncode == 2


def test_runs_dir_that_cannot_be_written(script, small_args, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    flags = flags_of(**vars(small_args()) | {"runs_dir": tmp_path / "file", "resume": None})
    flags = [flag for flag in flags if not flag.endswith("=None")]
    assert_one_line(call_main(script, flags, monkeypatch, capsys), "--runs-dir")


@pytest.fixture
def run_dir(script, small_args):
    return script.train(small_args())[1]


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:1000]),
    "flipped": lambda path: path.write_bytes(b"\0" * 64 + path.read_bytes()[64:]),
    "text": lambda path: path.write_text("hello"),
    "another program's": lambda path: torch.save({"model": torch.zeros(3)}, path),
    "a pickle that would run code": lambda path: torch.save({"script": print}, path),
    "not a dictionary": lambda path: torch.save(torch.zeros(3), path),
    "of another agent": lambda path: torch.save(
        torch.load(path) | {"agent": {"critic.0.weight": torch.zeros(3)}}, path
    ),
    "of another version": lambda path: torch.save(torch.load(path) | {"args": {"no_such_argument": 1}}, path),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
def test_damaged_checkpoint(script, run_dir, flag, damage, monkeypatch, capsys):
    DAMAGE[damage](run_dir / "checkpoint.pt")
    files = {path: path.read_bytes() for path in run_dir.iterdir()}
    assert_one_line(call_main(script, [flag, run_dir], monkeypatch, capsys), "checkpoint.pt")
    assert files == {path: path.read_bytes() for path in run_dir.iterdir()}


def test_checkpoint_of_another_script(script, run_dir, monkeypatch, capsys):
    path = run_dir / "checkpoint.pt"
    torch.save(torch.load(path) | {"script": "ppo_other"}, path)
    assert_one_line(call_main(script, ["--resume", run_dir], monkeypatch, capsys), "ppo_other.py")


@pytest.mark.parametrize("flag", ["--num-envs=8", "--no-norm-obs"])
def test_resume_with_what_cannot_change(script, run_dir, flag, monkeypatch, capsys):
    finished = call_main(script, ["--resume", run_dir, flag], monkeypatch, capsys)
    assert_one_line(finished, flag.replace("no-", "").split("=")[0])


@pytest.mark.parametrize("flag", ["--env-id=CartPole-v1", "--no-norm-obs", "--gamma=0.5"])
def test_evaluate_takes_no_flags_of_training(script, run_dir, flag, monkeypatch, capsys):
    finished = call_main(script, ["--evaluate", run_dir, flag], monkeypatch, capsys)
    assert_one_line(finished, "not " + flag.replace("no-", "").split("=")[0])


def test_resume_of_a_finished_run_changes_nothing(script, run_dir, monkeypatch):
    before = script.load_checkpoint(run_dir), (run_dir / "episodes.csv").read_text()
    monkeypatch.setattr("sys.argv", [script.__name__, "--resume", str(run_dir)])
    script.main()
    after = script.load_checkpoint(run_dir), (run_dir / "episodes.csv").read_text()
    torch.testing.assert_close(after[0]["agent"].state_dict(), before[0]["agent"].state_dict(), atol=0, rtol=0)
    assert after[1] == before[1]


@pytest.mark.parametrize("where", ["Obs", "Reward"])
def test_environment_that_returns_nan(script, small_args, where, capsys):
    """One line, code 1; the checkpoint of the last good iteration stays, and it can be resumed."""
    args = small_args(env_id=probe(script, f"Nan{where}"), total_timesteps=64 * 40, checkpoint_interval=1)
    with pytest.raises(SystemExit) as exit:
        script.train(args)
    error = capsys.readouterr().err
    assert exit.value.code == 1 and re.search(r"Nan\S+ gave NaN or infinity in step 1200", error), error
    (run_dir,) = Path(args.runs_dir).iterdir()
    saved = script.load_checkpoint(run_dir)
    assert saved["iteration"] == 300 // args.num_steps
    assert all(tensor.isfinite().all() for tensor in saved["agent"].state_dict().values())


def test_disk_full(script, small_args, monkeypatch, capsys):
    """The second checkpoint cannot be written: one line, code 1, and the first is still there."""
    original, calls = torch.save, []

    def full(checkpoint, path):
        calls.append(1)
        if len(calls) == 2:
            path.write_bytes(b"half of it")
            raise OSError(28, "No space left on device")
        original(checkpoint, path)

    monkeypatch.setattr(torch, "save", full)
    args = small_args(checkpoint_interval=1)
    with pytest.raises(SystemExit) as exit:
        script.train(args)
    assert exit.value.code == 1 and "No space left on device" in capsys.readouterr().err
    (run_dir,) = Path(args.runs_dir).iterdir()
    assert script.load_checkpoint(run_dir)["iteration"] == 1


def test_without_a_compiler(script, tmp_path):
    """No C++ compiler: said once, and the run goes on in eager mode."""
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "CXX": "/no/such/compiler"}
    flags = flags_of(env_id="probes:" + probe(script), runs_dir=tmp_path / "runs", **SMALL | {"compile": True})
    finished = run(script.__name__, *flags, **cache)
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr.count("--compile does not work here") == 1 and "Traceback" not in finished.stderr


def test_wandb(script, small_args, tmp_path, monkeypatch):
    """--track, offline: the run's own folder holds a wandb run with the metrics."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    _, run_dir = script.train(small_args(track=True))
    (record,) = (run_dir / "wandb").glob("offline-run-*/run-*.wandb")
    keys = (b"losses/value_loss", b"charts/last_100_return", b"charts/learning_rate")
    for _ in range(300):  # wandb's own process writes the file, on a busy machine seconds later
        if all(key in record.read_bytes() for key in keys):
            return
        time.sleep(0.1)
    raise AssertionError("wandb's file lacks metrics")


# What draws without a display.
DRAWN = {"ppo_continuous": "InvertedPendulum-v4", "ppo_discrete": "ALE/Breakout-v5", "ppo_rnn": "InvertedPendulum-v4"}


def test_video(script, tmp_path):
    """--capture-video in training and in evaluation, on a simulator that can draw."""
    flags = flags_of(env_id=DRAWN[script.__name__], runs_dir=tmp_path, **SMALL | {"total_timesteps": 128})
    finished = run(script.__name__, "--capture-video", *flags, MUJOCO_GL="egl")
    assert finished.returncode == 0, finished.stderr
    (run_dir,) = tmp_path.iterdir()
    assert len(list((run_dir / "videos").glob("*.mp4"))) == 2
    finished = run(script.__name__, "--evaluate", run_dir, "--eval-episodes=1", "--capture-video", MUJOCO_GL="egl")
    assert finished.returncode == 0, finished.stderr
    videos = list((run_dir / "videos").glob("*.mp4"))
    assert len(videos) == 3 and all(path.stat().st_size > 1000 for path in videos)


def test_video_of_what_cannot_be_drawn(script, small_args, tmp_path, monkeypatch, capsys):
    flags = flags_of(env_id=probe(script), runs_dir=tmp_path / "none", capture_video=True, **SMALL)
    assert_one_line(call_main(script, flags, monkeypatch, capsys), "--capture-video")
    assert not (tmp_path / "none").exists()
    _, run_dir = script.train(small_args())
    assert_one_line(
        call_main(script, ["--evaluate", run_dir, "--capture-video"], monkeypatch, capsys), "--capture-video"
    )
