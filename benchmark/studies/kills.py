"""Question: does a run that is killed at random moments end as one that was only stopped at the same checkpoints?

    python benchmark/studies/kills.py                    # 10 runs of six scripts, 3 kills each
    python benchmark/studies/kills.py --only ppo_rnn     # the runs of one script

A checkpoint is saved in every iteration. SIGKILL comes at a random moment, at a start too, and --resume follows; after
the kills the run goes on to its end. A second run is resumed at the same checkpoints without a kill: it is interrupted
right after it has saved them. Compares every tensor and number of the last checkpoint, the rows of episodes.csv or
metrics.csv, and the points of TensorBoard, all but times. The exit status is 1 if anything differs.
"""

import csv
import dataclasses
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "variants")]
SMALL = "--no-compile --num-envs=4 --num-steps=16 --num-minibatches=2 --update-epochs=2 --total-timesteps=12800"
ATARI = "--no-compile --device=cpu --num-envs=2 --num-steps=8 --num-minibatches=2 --total-timesteps=1600"
SIM = "--no-compile --device=cpu --num-envs=8 --num-steps=8 --hidden-sizes=[16] --total-timesteps=6400"
RLHF = "--device=cpu --supervised-steps=5 --batch-size=4 --num-minibatches=1 --response-length=4 --total-episodes=120"
RUNS = [
    ("ppo_continuous", f"{SMALL} --env-id=Pendulum-v1"),
    ("ppo_continuous", f"{SMALL} --env-id=InvertedPendulum-v4 --preset=cleanrl"),
    ("ppo_discrete", f"{SMALL} --env-id=CartPole-v1"),
    ("ppo_discrete", f"{SMALL} --env-id=Acrobot-v1 --no-norm-obs"),
    ("ppo_rnn", f"{SMALL} --env-id=CartPole-v1"),
    ("ppo_rnn", f"{SMALL} --env-id=Pendulum-v1 --cell=gru"),
    ("ppo_atari", f"{ATARI} --env-id=ALE/Breakout-v5"),
    ("ppo_atari", f"{ATARI} --env-id=ALE/Pong-v5"),
    ("ppo_gpu_sim", f"{SIM} --env-id=Pendulum-v1"),
    ("ppo_rlhf", RLHF),
]
NOT_COMPARED = ("/seconds", "/episodes_size", "/metrics_size", "/args/runs_dir", "/args/resume")  # times and folders
TIMES = ("seconds", "charts/SPS", "Perf/", "per_second")  # in names of columns and of metrics


@dataclasses.dataclass
class Args:  # the comments are what --help prints
    only: str | None = None  # the runs of this script
    kills: int = 3  # in every run
    seed: int = 1  # of the runs, and of the moments


def work(script, words, stop_at):
    """In a process of its own: the script's command line, which is interrupted when it has saved the checkpoint of
    step `stop_at`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    torch.set_num_threads(1)
    replace, module = os.replace, __import__(script)

    def replace_and_stop(source, target):
        replace(source, target)
        if Path(target).name == "checkpoint.pt" and step_of(Path(target).parent) == stop_at:
            raise KeyboardInterrupt

    os.replace = replace_and_stop
    sys.argv = [f"{script}.py", *words]
    module.main()


def read(run_dir):
    return torch.load(run_dir / "checkpoint.pt", map_location="cpu", weights_only=True)


def step_of(run_dir):
    saved = read(run_dir)
    return saved["global_step"] if "global_step" in saved else saved["iteration"]


def begin(script, flags, runs_dir, stop_at=None):
    """Start a run in an empty folder, or resume the one that is in it. -> its process"""
    checkpoints = list(runs_dir.glob("*/checkpoint.pt"))
    words = [*flags.split(), f"--runs-dir={runs_dir}"]
    if checkpoints:
        words = ["--resume", str(checkpoints[0].parent)]
    newest = max((path.stat().st_mtime for path in runs_dir.glob("*/events*")), default=0)
    time.sleep(max(0, int(newest) + 2 - time.time()))  # TensorBoard sorts the files of a run by their second
    process = CONTEXT.Process(target=work, args=(script, words, stop_at))
    process.start()
    return process


def finish(script, flags, runs_dir):
    """Resume a run to its end."""
    process = begin(script, flags, runs_dir)
    process.join()
    if process.exitcode:
        raise SystemExit(f"{script}: --resume failed, exit status {process.exitcode}")


def newest_checkpoint(runs_dir):
    return max((path.stat().st_mtime for path in runs_dir.glob("*/checkpoint.pt")), default=0)


def kill_at_random(script, flags, runs_dir, kills, rng):
    """Kill a run, resume it, kill it again, ...; then let it end. -> the steps of the checkpoints left"""
    steps = []
    while len(steps) < kills:
        process = begin(script, flags, runs_dir)
        # The first kill needs a checkpoint, to resume from. Of the others, a third may come before the next checkpoint.
        before = newest_checkpoint(runs_dir)
        at_a_start = steps and rng.random() < 1 / 3
        while process.is_alive() and not at_a_start and newest_checkpoint(runs_dir) == before:
            time.sleep(0.01)
        process.join(rng.uniform(0, 2))
        if not process.is_alive():
            raise SystemExit(f"{script}: it ended after {len(steps)} kills, exit status {process.exitcode}")
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        (run_dir,) = runs_dir.iterdir()
        steps.append(step_of(run_dir))
    finish(script, flags, runs_dir)
    return steps


def stop_at_checkpoints(script, flags, runs_dir, steps):
    for step in dict.fromkeys(steps):  # a kill at a start leaves the checkpoint that was there
        begin(script, flags, runs_dir, step).join()
        (run_dir,) = runs_dir.iterdir()
        if step_of(run_dir) != step:
            raise SystemExit(f"{script}: stopped at {step_of(run_dir)}, not {step}")
    finish(script, flags, runs_dir)


def flatten(tree, name=""):
    if isinstance(tree, dict):
        return {key: x for part, value in tree.items() for key, x in flatten(value, f"{name}/{part}").items()}
    if isinstance(tree, (list, tuple)):
        return flatten(dict(enumerate(tree)), name)
    return {name: tree.tolist() if isinstance(tree, torch.Tensor) else tree}


def contents(run_dir):
    """{name: text} of the last checkpoint, the rows and TensorBoard, without times and folders"""
    saved = {name: x for name, x in flatten(read(run_dir)).items() if name not in NOT_COMPARED}
    names = [name for name in ("episodes.csv", "metrics.csv") if (run_dir / name).exists()]
    with open(run_dir / names[0]) as file:
        rows = [{k: x for k, x in row.items() if not any(t in k for t in TIMES)} for row in csv.DictReader(file)]
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not any(t in tag for t in TIMES)]
    points = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}
    found = {f"checkpoint{name}": x for name, x in saved.items()} | {
        f"TensorBoard {tag}": x for tag, x in points.items()
    }
    return {name: str(x) for name, x in (found | {"rows": rows}).items()}, len(rows), step_of(run_dir)


def main():
    args = tyro.cli(Args, description=__doc__.split("\n")[0])
    rng, different, count = np.random.default_rng(args.seed), 0, 0
    for script, flags in RUNS:
        if args.only not in (None, script):
            continue
        interval = 0 if isinstance(__import__(script).Args().checkpoint_interval, float) else 1  # seconds or iterations
        flags += f" --seed={args.seed} --checkpoint-interval={interval}"
        with tempfile.TemporaryDirectory() as folder:
            killed, stopped = Path(folder, "killed"), Path(folder, "stopped")
            killed.mkdir(), stopped.mkdir()
            steps = kill_at_random(script, flags, killed, args.kills, rng)
            stop_at_checkpoints(script, flags, stopped, steps)
            (one, rows, last), (two, *_) = (contents(next(path.iterdir())) for path in (killed, stopped))
        wrong = [name for name in one | two if one.get(name) != two.get(name)]
        different, count = different + bool(wrong), count + len(steps)
        text = f"differs in {', '.join(wrong[:5])}" if wrong else "equal"
        print(f"{script} {flags.split()[-3]}: kills left steps {steps} of {last}, {rows} rows: {text}", flush=True)
    print(f"{count} kills, {different} runs differ")
    raise SystemExit(different > 0)


CONTEXT = multiprocessing.get_context("forkserver")

if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # for the server, which imports the scripts once
    CONTEXT.set_forkserver_preload([*{script for script, _ in RUNS}])
    main()
