"""Ctrl-C and SIGTERM."""

import os
import signal

import pytest
from conftest import LONG, probe, rows, start, wait_for


@pytest.mark.parametrize(
    "script, signal_number, asynchronous",
    [
        ("ppo_continuous", signal.SIGINT, True),
        ("ppo_discrete", signal.SIGINT, False),
        ("ppo_rnn", signal.SIGTERM, True),
        ("ppo_continuous", signal.SIGTERM, False),
    ],
    indirect=["script"],
)
def test_interrupt_saves(script, tmp_path, signal_number, asynchronous):
    """Ctrl-C, which a terminal sends to the environments' processes too, and SIGTERM end the run after the iteration,
    saved, with the shell's code for that signal. A second one at once, as from torchrun, is the same one again."""
    args = LONG | {"checkpoint_interval": 1000, "async_envs": asynchronous}
    process = start(script.__name__, tmp_path, env_id=probe(script), **args)
    wait_for(
        lambda: any(len(rows(path)) > 100 for path in tmp_path.iterdir() if (path / "episodes.csv").exists()), process
    )
    for _ in range(2):
        (os.killpg if signal_number == signal.SIGINT else os.kill)(process.pid, signal_number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + signal_number, output
    (run_dir,) = tmp_path.iterdir()
    assert f"stopped; go on with --resume {run_dir}" in output and "Traceback" not in output
    saved = script.load_checkpoint(run_dir)
    assert 0 < saved["global_step"] < LONG["total_timesteps"] and saved["global_step"] % 64 == 0
    assert int(rows(run_dir)[-1][0]) == saved["global_step"]
