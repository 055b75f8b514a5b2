"""kill -9, Ctrl-C, another process in the same folder: nothing that was saved is lost."""

import itertools
import os
import shlex
import shutil
import time

import numpy as np
import pytest
from conftest import (
    LONG,
    ONE,
    assert_same_learner,
    checkpointed_step,
    flags_of,
    probe,
    rows,
    scalars,
    start,
    wait_for,
)
from torch.utils.tensorboard import SummaryWriter


@ONE
def test_kill_and_resume(script, tmp_path, main):
    """kill -9 in the middle: every episode up to the checkpoint stays, none is there twice, and the run goes on to its
    end, from Python as from the command line."""
    process = start(script.__name__, tmp_path / "runs", env_id=probe(script), **LONG)
    wait_for(lambda: checkpointed_step(script, tmp_path / "runs") >= 64 * 21, process)
    process.kill()
    process.wait()
    (killed,) = (tmp_path / "runs").iterdir()
    saved = script.load_checkpoint(killed)
    last = saved["global_step"]
    assert last < LONG["total_timesteps"]
    header, *before = rows(killed)
    kept = [row for row in before if int(row[0]) <= last]
    assert len(kept) == last, "rows up to the checkpoint were not on the disk"
    # More rows behind the checkpoint, and what a kill in the middle of a line leaves.
    with (killed / "episodes.csv").open("a") as file:
        file.write(f"{last + 128},-0.5,1,9.9\n{last + 128},-0.")
    (began,) = (int(path.name.split(".")[3]) for path in killed.glob("events*"))
    while time.time() < began + 1:  # TensorBoard sorts a run's files by the second in which they began
        time.sleep(0.05)
    with SummaryWriter(killed) as writer:  # and what TensorBoard may have been told behind the checkpoint
        writer.add_scalar("losses/value_loss", 99.0, last + 1)

    copy = shutil.copytree(killed, tmp_path / "copy")
    assert main(script, "--resume", killed).returncode == 0
    script.train(resume=copy)
    table = rows(killed)
    assert table[: last + 1] == [header, *kept]
    steps = [int(row[0]) for row in table[1:]]
    assert steps == [step for step in range(4, LONG["total_timesteps"] + 1, 4) for _ in range(4)]
    seconds = [float(row[3]) for row in table[1:]]
    assert seconds == sorted(seconds)
    end = script.load_checkpoint(killed)
    assert end["global_step"] == LONG["total_timesteps"] and end["seconds"] > saved["seconds"]
    logged = [step for step, _ in scalars(killed)["losses/value_loss"]]
    assert logged == [64 * iteration for iteration in range(1, 101)]
    returns = np.array([float(row[1]) for row in table[1:]])
    for step, mean in scalars(killed)["charts/last_100_return"]:  # over the checkpoint too
        assert mean == pytest.approx(returns[max(0, step - 100) : step].mean(), rel=1e-4)
    assert_same_learner(end, script.load_checkpoint(copy))
    assert [row[:3] for row in table] == [row[:3] for row in rows(copy)]


@ONE
def test_checkpoints_come_by_time(script, tmp_path):
    """--checkpoint-interval counts seconds: what a kill costs does not depend on how long an iteration takes."""
    args = LONG | {"total_timesteps": 10**8, "checkpoint_interval": 0.3}
    process = start(script.__name__, tmp_path, env_id=probe(script), **args)
    seconds = []

    def seen():
        for path in tmp_path.glob("*/checkpoint.pt"):
            saved = script.load_checkpoint(path.parent)["seconds"]
            if saved not in seconds:
                seconds.append(saved)
        return len(seconds) >= 4

    wait_for(seen, process)
    process.kill()
    process.wait()
    intervals = [two - one for one, two in itertools.pairwise(seconds)]
    assert min(intervals) >= 0.3 and sorted(intervals)[1] < 2  # one of them may have waited for a busy machine


def test_ctrl_c_prints_the_command_that_continues(script, tmp_path, main):
    """Status 130, no traceback; the printed command finishes the run from the last checkpoint, with a module's
    environment too."""
    sizes = {"num_envs": 2, "num_steps": 16, "num_minibatches": 2, "compile": False, "total_timesteps": 32 * 4}
    env_id = f"probes:{probe(script, 'Interrupt')}"
    flags = flags_of(env_id=env_id, runs_dir=tmp_path, checkpoint_interval=0, **sizes)
    stopped = main(script, *flags)
    assert stopped.returncode == 130 and stopped.stderr == ""
    (run_dir,) = tmp_path.iterdir()
    assert script.load_checkpoint(run_dir)["global_step"] == 32 * 2  # it is interrupted in step 88
    command = shlex.split(stopped.stdout.splitlines()[-1].partition("to resume: ")[2])
    assert command[:4] == ["python", os.path.relpath(script.__file__), "--resume", str(run_dir)]
    assert main(script, *command[2:]).returncode == 0
    assert script.load_checkpoint(run_dir)["global_step"] == 32 * 4
