"""What goes wrong in the middle of a run: nothing that was saved is lost, and the message says what it was. Kills,
damaged checkpoints and NaN are in test_run.py and test_cli.py; longer tries in benchmark/studies/faults.py."""

import os
import signal
import sys
import time

import pytest
import torch
from conftest import ONE, flags_of, probe, run
from test_run import LONG, rows, start, wait_for

FAULTY = LONG | {"checkpoint_interval": 1, "num_envs": 2}


def resume_with_a_good_environment(script, run_dir, main):
    """The checkpoint of a broken run is whole: it trains on where the environment works."""
    saved = script.load_checkpoint(run_dir)
    assert saved["global_step"] == 600 // 32 * 32
    assert [int(row[0]) for row in rows(run_dir)[1:]][-1] == saved["global_step"]
    end = saved["global_step"] + 96
    finished = main(script, "--resume", run_dir, f"--env-id=probes:{probe(script)}", f"--total-timesteps={end}")
    assert finished.returncode == 0, finished.stderr
    assert script.load_checkpoint(run_dir)["global_step"] == end


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
    process = start(script.__name__, tmp_path, env_id="probes:" + probe(script, "Hang"), **FAULTY)
    wait_for(lambda: list(tmp_path.glob("*/checkpoint.pt")), process)
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    time.sleep(2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
    (run_dir,) = tmp_path.iterdir()
    resume_with_a_good_environment(script, run_dir, main)


@ONE
def test_asynchronous_environments_that_hang(script, tmp_path):
    """The second Ctrl-C ends their processes too, though they do not answer."""
    args = FAULTY | {"async_envs": True, "checkpoint_interval": 1}
    process = start(script.__name__, tmp_path, env_id="probes:" + probe(script, "Hang"), **args)
    wait_for(lambda: list(tmp_path.glob("*/checkpoint.pt")), process)
    time.sleep(2)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(2)
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
    process = start(script.__name__, tmp_path / "runs", {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "empty")}, **args)
    wait_for(lambda: list(tmp_path.glob("empty/**/*.cpp")), process)  # a kernel goes to the C++ compiler
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(1.5)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    printed = process.communicate(timeout=30)[0]
    assert process.returncode == 128 + signal.SIGINT
    assert not list(tmp_path.glob("runs/*/checkpoint.pt"))
    assert len(printed.splitlines()) == 1, printed  # the line of the start


def test_checkpoint_that_names_a_module(script, tmp_path, main):
    """A stranger's checkpoint does not choose which module of this machine is imported; who asks for that module may.
    `this` stands for one: no test needs it."""
    args = script.Args(env_id=probe(script), runs_dir=str(tmp_path), **LONG | {"total_timesteps": 64})
    _, run_dir = script.train(args)
    checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    checkpoint["args"] |= {"env_id": f"this:{args.env_id}", "eval_episodes": 1}
    torch.save(checkpoint, run_dir / "checkpoint.pt")
    for flag in ("--resume", "--evaluate"):
        sys.modules.pop("this", None)
        refused = main(script, flag, run_dir)
        assert refused.returncode == 2 and f"if you trust it, add --env-id this:{args.env_id}" in refused.stderr
        assert "this" not in sys.modules
        assert main(script, flag, run_dir, f"--env-id=this:{args.env_id}").returncode == 0
        assert "this" in sys.modules
