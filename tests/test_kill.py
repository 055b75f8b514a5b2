"""kill -9, another process in the same folder, closed output: nothing that was saved is lost."""

import dataclasses
import os
import shutil
import time

from conftest import (
    LONG,
    ONE,
    Started,
    assert_same_learner,
    checkpointed_step,
    flags_of,
    probe,
    rows,
    scalars,
    start,
    wait_for,
)
from processes import die_with_half_a_checkpoint
from torch.utils.tensorboard import SummaryWriter


@ONE
def test_kill_and_resume(script, tmp_path, main):
    """kill -9 in the middle: every episode up to the checkpoint stays, none is there twice, and the run goes on to its
    end, the same way each time. (test_resumed_twice_is_the_same_run_twice asks every script.)"""
    process = start(script.__name__, tmp_path / "runs", env_id=probe(script), **LONG)
    wait_for(lambda: checkpointed_step(script, tmp_path / "runs") >= 64 * 21, process)
    process.kill()
    process.wait()
    (killed,) = (tmp_path / "runs").iterdir()
    saved = script.load_checkpoint(killed)
    last = saved["global_step"]
    assert last % (64 * 7) == 0 and last < LONG["total_timesteps"]
    header, *before = [line.split(",") for line in (killed / "episodes.csv").read_text().splitlines()]
    kept = [row for row in before if int(row[0]) <= last]
    assert len(kept) == last, "rows up to the checkpoint were not on the disk"
    # A line that cannot be read, a row behind the checkpoint, and what a kill in the middle of a line leaves.
    lines = [",".join(row) for row in [header, *kept[:9], ["4", "-0."], *kept[9:]]]
    lines += [f"{last + 64},-0.5,1,9.9", f"{last + 64},-0."]
    (killed / "episodes.csv").write_text("\n".join(lines))
    time.sleep(1)  # TensorBoard sorts a run's files by the second in which they began
    with SummaryWriter(killed) as writer:  # and what TensorBoard may have been told before it
        writer.add_scalar("losses/value_loss", 99.0, last + 1)

    copy = shutil.copytree(killed, tmp_path / "copy")
    assert main(script, "--resume", killed).returncode == 0
    script.train(dataclasses.replace(saved["args"], resume=str(copy)))
    table = rows(killed)
    assert table[: last + 1] == [header, *kept]
    steps = [int(row[0]) for row in table[1:]]
    assert steps == [step for step in range(4, LONG["total_timesteps"] + 1, 4) for _ in range(4)]
    seconds = [float(row[3]) for row in table[1:]]
    assert seconds == sorted(seconds)
    end = script.load_checkpoint(killed)
    assert end["global_step"] == LONG["total_timesteps"] and end["seconds"] > saved["seconds"]
    logged = [step for step, _ in scalars(killed)["losses/value_loss"]]
    assert logged == [64 * iteration for iteration in range(1, 151)]
    assert_same_learner(end, script.load_checkpoint(copy))
    assert [row[:3] for row in table] == [row[:3] for row in rows(copy)]


@ONE
def test_kill_while_writing_a_checkpoint(script, tmp_path, main):
    """The process dies with half of its second checkpoint written: the first is whole, and the run goes on from it."""
    flags = flags_of(env_id=probe(script), runs_dir=str(tmp_path), **LONG | {"total_timesteps": 64 * 20})
    process = Started(die_with_half_a_checkpoint, script.__name__, flags)
    process.wait()
    assert process.returncode == 9
    (run_dir,) = tmp_path.iterdir()
    assert script.load_checkpoint(run_dir)["global_step"] == 64
    assert main(script, "--resume", run_dir).returncode == 0
    assert script.load_checkpoint(run_dir)["global_step"] == 64 * 20
    assert len(rows(run_dir)) == 1 + 64 * 20 and not list(run_dir.glob("*.tmp"))


@ONE
def test_a_run_that_still_goes_on_is_not_resumed(script, tmp_path, main):
    """Two processes in one folder would overwrite each other's rows. The second one ends in one line."""
    process = start(script.__name__, tmp_path, env_id=probe(script), **LONG | {"total_timesteps": 10**8})
    wait_for(lambda: checkpointed_step(script, tmp_path) >= 64 * 7, process)
    (run_dir,) = tmp_path.iterdir()
    second = main(script, "--resume", run_dir)
    assert second.returncode == 2 and "another process" in second.stderr and len(second.stderr.splitlines()) == 1
    process.kill()
    process.wait()
    steps = [int(row[0]) for row in rows(run_dir)[1:-4]]  # the last rows may be half written
    assert steps == sorted(step for step in range(4, 4 * (len(steps) // 4 + 2), 4) for _ in range(4))[: len(steps)]


@ONE
def test_nobody_reads_what_it_prints(script, tmp_path):
    """A run whose output is closed, as by `| head -1`, goes on to its end."""
    pipe, runs = tmp_path / "pipe", tmp_path / "runs"
    os.mkfifo(pipe)
    process = start(script.__name__, runs, output=str(pipe), env_id=probe(script), **LONG)
    with open(pipe) as output:
        output.readline()
    process.wait()
    assert checkpointed_step(script, runs) == LONG["total_timesteps"]
