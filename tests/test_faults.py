"""What goes wrong in the middle of a run: nothing that was saved is lost, and the message says what it was. Kills, full
disks, damaged checkpoints and NaN are in test_run.py and test_cli.py; longer tries in benchmark/faults.py."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from conftest import flags_of, probe, run
from test_run import LONG, rows, start, wait_for

FAULTY = LONG | {"checkpoint_interval": 1, "num_envs": 2}
ONE = pytest.mark.parametrize("script", ["ppo_continuous"], indirect=True)


def resume_with_a_good_environment(script, run_dir, tmp_path):
    """The checkpoint of a broken run is whole: it trains on where the environment works."""
    saved = script.load_checkpoint(run_dir)
    assert saved["iteration"] == 300 // FAULTY["num_steps"]
    assert [int(row[0]) for row in rows(run_dir)[1:]][-1] == saved["global_step"]
    saved["args"].env_id = "probes:" + probe(script)
    script.save_checkpoint(run_dir, saved | {"args": vars(saved["args"]), "agent": saved["agent"].state_dict()})
    end = 32 * (saved["iteration"] + 3)
    finished = run(script.__name__, "--resume", run_dir, f"--total-timesteps={end}")
    assert finished.returncode == 0, finished.stderr
    assert script.load_checkpoint(run_dir)["global_step"] == end


@pytest.mark.parametrize(
    "script, name, message",
    [
        ("ppo_continuous", "Infinity", "gave NaN or infinity in step 600; the last checkpoint, if any, is kept"),
        ("ppo_discrete", "Shape", "ValueError: Output array is the wrong shape"),
        ("ppo_discrete", "Type", "TypeError: Cannot cast"),
        ("ppo_rnn", "Raise", "RuntimeError: the simulator is lost"),
    ],
    indirect=["script"],
)
def test_environment_that_breaks(script, tmp_path, name, message):
    """The last line says what it was: the script's own for a number that is not finite, otherwise the environment's."""
    env_id = "probes:" + probe(script, name)
    broken = run(script.__name__, f"--runs-dir={tmp_path}", *flags_of(env_id=env_id, **FAULTY))
    assert broken.returncode == 1 and message in broken.stderr.strip().splitlines()[-1], broken.stderr
    (run_dir,) = tmp_path.iterdir()
    resume_with_a_good_environment(script, run_dir, tmp_path)


def test_asynchronous_environments_that_break(script, tmp_path):
    """Some raise and some do not: none of their processes keeps the run from ending with what was raised."""
    args = FAULTY | {"env_id": "probes:" + probe(script, "Some"), "num_envs": 4, "async_envs": True, "num_steps": 8}
    broken = run(script.__name__, f"--runs-dir={tmp_path}", *flags_of(**args), timeout=60)
    assert broken.returncode == 1 and "the simulator is lost" in broken.stderr, broken.stderr


@ONE
def test_environment_that_hangs(script, tmp_path):
    """The first Ctrl-C waits for the iteration, which never ends; the second ends the run at once."""
    process = start(script.__name__, tmp_path, env_id="probes:" + probe(script, "Hang"), **FAULTY)
    wait_for(lambda: list(tmp_path.glob("*/checkpoint.pt")), process)
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    time.sleep(2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    (run_dir,) = tmp_path.iterdir()
    resume_with_a_good_environment(script, run_dir, tmp_path)


@ONE
def test_run_folder_that_is_removed(script, tmp_path):
    """Code 1, and a line that says so (TensorBoard's thread may print its own error too)."""
    process = start(script.__name__, tmp_path, env_id="probes:" + probe(script), **LONG | {"checkpoint_interval": 1})
    (run_dir,) = wait_for(lambda: [path.parent for path in tmp_path.glob("*/checkpoint.pt")], process)
    run_dir.rename(tmp_path / "elsewhere")
    printed = process.communicate(timeout=60)[0]
    assert process.returncode == 1 and re.search(f"error: cannot write (a checkpoint )?into {run_dir}", printed), (
        printed
    )


@pytest.mark.parametrize("full", ["csv", "tensorboard"])
def test_disk_full_for_logs(script, small_args, monkeypatch, capsys, full):
    """One line, code 1; the checkpoint of the iteration before stays."""
    original, calls = script.write_log, []

    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

        def add_scalar(self, *_):
            self.write("")

    def write_log(run_dir, episodes_file, writer, *rest, **more):
        calls.append(1)
        if len(calls) == 3:
            episodes_file, writer = (Full(), writer) if full == "csv" else (episodes_file, Full())
        original(run_dir, episodes_file, writer, *rest, **more)

    monkeypatch.setattr(script, "write_log", write_log)
    args = small_args(checkpoint_interval=1)
    with pytest.raises(SystemExit, match=r"^1$"):
        script.train(args)
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert "No space left on device" in line
    (run_dir,) = Path(args.runs_dir).iterdir()
    assert script.load_checkpoint(run_dir)["iteration"] == 2


def test_runs_of_the_same_millisecond(script, small_args, monkeypatch):
    """Each has a folder of its own."""
    times = iter([1.0, 1.0, 2.0])
    monkeypatch.setattr(script.time, "time", lambda: next(times))
    first, second = (script.make_run_dir(small_args()) for _ in range(2))
    assert first != second and len(list(first.parent.iterdir())) == 2


@ONE
def test_checkpoint_that_is_code(script, tmp_path, monkeypatch, capsys):
    """A checkpoint that would run a command when it is unpickled is refused, and the command does not run."""
    import torch

    class Command:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'it-ran'}",)

    _, run_dir = script.train(
        script.Args(env_id=probe(script), runs_dir=str(tmp_path), **LONG | {"total_timesteps": 64})
    )
    checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    torch.save(checkpoint | {"iteration": Command()}, run_dir / "checkpoint.pt")
    monkeypatch.setattr("sys.argv", [script.__name__, "--resume", str(run_dir)])
    with pytest.raises(SystemExit, match=r"^2$"):
        script.main()
    assert "is damaged" in capsys.readouterr().err and not Path(tmp_path, "it-ran").exists()
