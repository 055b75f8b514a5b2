"""Environments that raise, hang or return nonsense: the message says what it was, and the last checkpoint is whole."""

import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ONE, ROOT, TESTS, flags_of, probe, run

FAULTY = {"total_timesteps": 9600, "num_envs": 2, "num_steps": 16, "num_minibatches": 2, "update_epochs": 1, "seed": 5}
FAULTY |= {"compile": False, "checkpoint_interval": 1}
LAST = 600 // 32 * 32  # the last checkpoint: these environments break in step 600


def start(script, runs_dir, environment=None, **args):
    """The script in a process group of its own, as a job of a terminal."""
    command = [sys.executable, str(ROOT / f"{script.__name__}.py"), f"--runs-dir={runs_dir}", *flags_of(**args)]
    variables = os.environ | {"PYTHONPATH": str(TESTS)} | (environment or {})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=variables, start_new_session=True, **pipes)


def wait_for(condition, process):
    for _ in range(120 * 50):
        if result := condition():
            return result
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    raise TimeoutError


def has_reached_the_fault(script, runs_dir):
    paths = list(runs_dir.glob("*/checkpoint.pt"))
    return paths and script.load_checkpoint(paths[0].parent)["global_step"] == LAST


def resume_with_a_good_environment(script, run_dir, main):
    """The checkpoint of a broken run is whole: it trains on where the environment works."""
    assert script.load_checkpoint(run_dir)["global_step"] == LAST
    assert int((run_dir / "episodes.csv").read_text().splitlines()[-1].split(",")[0]) == LAST
    flags = [f"--env-id=probes:{probe(script)}", f"--total-timesteps={LAST + 96}"]
    finished = main(script, "--resume", run_dir, *flags)
    assert finished.returncode == 0, finished.stderr
    assert script.load_checkpoint(run_dir)["global_step"] == LAST + 96


@pytest.mark.parametrize(
    "script, name, message",
    [
        ("ppo_continuous", "Infinity", "returned NaN or infinity in step 600; the last checkpoint is kept"),
        ("ppo_discrete", "Shape", "ValueError: Output array is the wrong shape"),
        ("ppo_rnn", "Raise", "RuntimeError: the simulator is lost"),
    ],
    indirect=["script"],
)
def test_environment_that_breaks(script, tmp_path, main, name, message):
    """The last line says what it was: the script's own for a number that is not finite, otherwise the environment's."""
    env_id = "probes:" + probe(script, name)
    broken = run(script.__name__, f"--runs-dir={tmp_path}", *flags_of(env_id=env_id, **FAULTY))
    assert broken.returncode == (2 if name == "Infinity" else 1), broken.stderr
    assert message in broken.stderr.strip().splitlines()[-1], broken.stderr
    (run_dir,) = tmp_path.iterdir()
    resume_with_a_good_environment(script, run_dir, main)


@ONE
def test_asynchronous_environments_that_break(script, tmp_path):
    """Some raise and some do not: none of their processes keeps the run from ending with what was raised."""
    args = FAULTY | {"env_id": "probes:" + probe(script, "Some"), "num_envs": 4, "async_envs": True, "num_steps": 8}
    broken = run(script.__name__, f"--runs-dir={tmp_path}", *flags_of(**args), timeout=60)
    assert broken.returncode == 1 and "the simulator is lost" in broken.stderr, broken.stderr


@ONE
def test_environment_that_hangs(script, tmp_path, main):
    """The first Ctrl-C waits for the iteration, which never ends; the second ends the run at once. One within a
    second of the first is still the first: a terminal and torchrun may send it twice."""
    process = start(script, tmp_path, env_id="probes:" + probe(script, "Hang"), **FAULTY)
    wait_for(lambda: has_reached_the_fault(script, tmp_path), process)
    for pause in (0.2, 1.2):
        process.send_signal(signal.SIGINT)
        time.sleep(pause)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
    (run_dir,) = tmp_path.iterdir()
    resume_with_a_good_environment(script, run_dir, main)


@ONE
def test_asynchronous_environments_that_hang(script, tmp_path):
    """The second Ctrl-C ends their processes too, though they do not answer."""
    process = start(script, tmp_path, env_id="probes:" + probe(script, "Hang"), **FAULTY | {"async_envs": True})
    wait_for(lambda: has_reached_the_fault(script, tmp_path), process)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(1.2)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
    with pytest.raises(ProcessLookupError):  # no process of the group is left
        os.killpg(process.pid, 0)


@ONE
def test_ctrl_c_while_kernels_are_built(script, tmp_path):
    """The first one waits for the end of the iteration, the second one ends the run at once, without a traceback."""
    args = FAULTY | {"compile": True, "env_id": "probes:" + probe(script)}
    process = start(script, tmp_path / "runs", {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "empty")}, **args)
    wait_for(lambda: list(tmp_path.glob("empty/**/*.cpp")), process)  # a kernel goes to the C++ compiler
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(1.2)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    printed = process.communicate(timeout=30)[0]
    assert process.returncode == 128 + signal.SIGINT
    assert not list(tmp_path.glob("runs/*/checkpoint.pt"))
    assert len(printed.splitlines()) == 1, printed  # the line of the start
