"""Suites of training runs, task x seed, as many at once as there are cores (or, for Atari, GPUs).

    python benchmark/run.py --suite classic                        # seeds 1 to 5 of each task, into runs/
    python benchmark/run.py --suite mujoco --seeds 3 --tasks Hopper-v4 Ant-v4
    python benchmark/run.py --suite mujoco --first-seed 6          # five more, 6 to 10
    python benchmark/run.py --suite mujoco --exp-name slow -- --learning-rate 1e-4   # after --: for the scripts
    python benchmark/run.py --script my_ppo.py --env-ids Hopper-v4 my_module:Mine-v0 --seeds 3    # a copy of a script
    python benchmark/report.py runs/* --publish mujoco        # then put them into benchmark/results/mujoco.csv

The same command again goes on where it was stopped, however that happened: runs that have finished are left alone, the
others resume from their checkpoint. After an edit of a script or of an environment, give another --exp-name or
--runs-dir; run.py notices only the script's. Two commands may work on one --runs-dir: a run's log is locked while it
trains or plays, and the other command waits. To share the work, give each command its own --tasks, or --first-seed and
--seeds.
When a run fails the others go on; it is named at the end, and the exit status is 1.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
import tyro
from run_folder import (
    WHERE_AND_HOW,
    flags_of,
    is_finished,
    load_checkpoint,
    load_script,
    machine,
    path_of,
    read_args,
    read_record,
    summarise,
)
from suites import SUITES


@dataclasses.dataclass
class Args:  # the comments are what --help prints
    suite: Literal[tuple(SUITES)] | None = None  # which tasks of the repository
    script: Path | None = None  # or a script of yours, a copy of one of ours
    env_ids: tuple[str, ...] = ()  # the tasks for --script
    seeds: int = 5  # how many seeds of every task
    first_seed: int = 1  # the first of them
    tasks: tuple[str, ...] = ()  # only these environment ids; none given: all of the suite
    total_timesteps: int | None = None  # environment steps of every run; None: the suite's, or the script's
    exp_name: str | None = None  # name of these settings in run folders and tables; None: the suite's, or the script's
    runs_dir: str = "runs"  # where run folders are made and looked for
    jobs: int | None = None  # runs at once; None: a run per GPU for Atari where there is one, a run per core otherwise


@dataclasses.dataclass(frozen=True)
class Job:
    script: Path
    env_id: str
    seed: int
    words: tuple[str, ...]  # the other arguments
    runs_dir: Path
    evaluate: bool = True  # tune.py does not need it

    def __str__(self):
        return f"{self.script.stem} {self.env_id} seed {self.seed}"

    @property
    def arguments(self):
        return ["--env-id", self.env_id, "--seed", str(self.seed), "--runs-dir", str(self.runs_dir), *self.words]

    @cached_property
    def parsed(self):
        """The script's own Args of this run."""
        return load_script(self.script).parse_args(self.arguments)

    @property
    def name(self):
        """What its run folders begin with, before the time."""
        return re.sub(r"[^\w.-]", "-", f"{self.env_id}__{self.parsed.exp_name}__{self.seed}")


def make_jobs(args, flags=()):
    """All runs of a suite with these flags, seed by seed, so that a suite that is cut short has some of every task."""
    for name in ("seeds", "first_seed", "jobs"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise SystemExit(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    if (args.suite is None) == (args.script is None) or (args.script is None) != (not args.env_ids):
        raise SystemExit("give either --suite NAME, or --script FILE and --env-ids ID ...")
    suite = [(args.script, env_id, "") for env_id in args.env_ids] or SUITES[args.suite]
    tasks = [task for task in suite if not args.tasks or task[1] in args.tasks]
    if unknown := set(args.tasks) - {env_id for _, env_id, _ in tasks}:
        known = ", ".join(env_id for _, env_id, _ in suite)
        raise SystemExit(f"--tasks: there is no {', '.join(sorted(unknown))} among {known}")
    jobs, more = [], ["--exp-name", args.exp_name] if args.exp_name else []
    more += ["--total-timesteps", str(args.total_timesteps)] if args.total_timesteps is not None else []
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for script, env_id, own_flags in tasks:
            words = (*own_flags.split(), *more, *flags)
            jobs.append(Job(path_of(script), env_id, seed, words, Path(args.runs_dir).absolute()))
            parsed = jobs[-1].parsed
            try:
                load_script(script).check(parsed)
            except ValueError as error:
                raise SystemExit(f"{jobs[-1]}: {error}") from None
            if (parsed.env_id, parsed.seed, parsed.runs_dir) != (env_id, seed, str(jobs[-1].runs_dir)):
                raise SystemExit("after --: run.py itself sets --env-id, --seed and --runs-dir")
    for job in jobs:
        if run_dir := made_by_another_version(job):
            text = f"{job.script.name} has changed since {run_dir}: give another --exp-name or --runs-dir"
            raise SystemExit(f"{text}, or delete its runs")
    return jobs


def made_by_another_version(job):
    """A run, of any seed, that another version of the script has made; or None. A table would have one row for both."""
    names = {"script": job.script.stem, "env_id": job.env_id, "exp_name": job.parsed.exp_name}
    for run_dir in job.runs_dir.glob(f"{job.name.rpartition('__')[0]}__*"):
        with contextlib.suppress(OSError, ValueError):  # damaged: run_job names it
            copy, args = run_dir / job.script.name, read_args(run_dir)
            changed = (run_dir / "checkpoint.pt").is_file() and copy.read_text() != job.script.read_text()
            if changed and names.items() <= args.items():
                settings = json.loads(json.dumps(vars(job.parsed)))  # tuples as lists, as in args.json
                if flags_of(settings, job.script) == flags_of(args, copy):
                    return run_dir
    return None


def find_run(job):
    """The newest run folder with the arguments of a job and with a checkpoint, or None."""
    # Names of folders are not enough: that of `slow`, seed 1, is how `slow__1` begins.
    other = WHERE_AND_HOW - {"script", "env_id", "exp_name", "seed"}
    wanted = {name: value for name, value in vars(job.parsed).items() if name not in other}
    wanted = json.loads(json.dumps(wanted | {"script": job.script.stem}))  # tuples as lists, as in args.json
    for run_dir in sorted(job.runs_dir.glob(f"{job.name}__*"), reverse=True):
        if (run_dir / "checkpoint.pt").is_file() and wanted.items() <= read_args(run_dir).items():
            return run_dir
    return None


class Stopped(Exception):
    pass


def run_job(job, gpu, children, stop):
    """Train, or go on, or do nothing where that has been done; then evaluate. Returns the row of the report, None where
    no episode has ended.

    Raises RuntimeError with the last line of the log when the script fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
    script = [sys.executable, str(job.script)]
    (job.runs_dir / "logs").mkdir(parents=True, exist_ok=True)
    path = job.runs_dir / "logs" / f"{job.script.stem}__{job.name}.log"  # a suite may have a task twice

    def call(*words):
        """Run the script. It inherits the log, and with it the lock: an orphan goes on holding its run."""
        if stop.is_set():
            raise Stopped
        begin = log.tell()
        # A session of its own: Ctrl-C reaches it once, through us.
        child = subprocess.Popen([*script, *words], stdout=log, stderr=log, env=environment, start_new_session=True)
        children.add(child)
        if stop.is_set():  # asked for just now, when this child was not yet among them
            child.terminate()
        code = child.wait()
        children.discard(child)
        if stop.is_set():
            raise Stopped
        lines = path.read_bytes()[begin:].decode(errors="replace").strip().splitlines() or ["no output"]
        if code:
            raise RuntimeError(f"{lines[-1]} (exit status {code}, {path})")
        return lines

    with open(path, "ab") as log:
        while True:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:  # another process is at it; what it leaves undone is ours
                if stop.wait(1):
                    raise Stopped from None
        run_dir, facts = find_run(job), machine()  # before the run: the commit may change meanwhile
        if run_dir is None or not is_finished(run_dir):
            if other := made_by_another_version(job):  # edited while the suite runs
                raise RuntimeError(f"{job.script.name} has changed since {other}")
            resume = ["--resume", str(run_dir)] if run_dir else []
            call(*resume, *job.arguments)  # also to a run that goes on: --track or --no-compile may be new
            run_dir = find_run(job)
        step = load_checkpoint(run_dir)["global_step"]
        if job.evaluate and not read_record(run_dir, step):
            lines = call("--evaluate", str(run_dir), "--env-id", job.env_id)
            means = re.findall(r"mean (\S+), standard deviation", "\n".join(lines))  # other lines may follow it
            if not means:
                raise RuntimeError(f"{path} has no mean of the evaluation")
            facts |= {"evaluation": float(means[-1]), "global_step": step}
            (run_dir / "benchmark.json").write_text(json.dumps(facts, indent=2))
    return summarise(run_dir)


def run_here(jobs, at_once, gpus):
    """Run jobs side by side, each on the next of the GPUs, if any. Returns those that failed, with their errors."""
    children, stop, failed = set(), threading.Event(), {}
    slots = queue.SimpleQueue()
    for slot in range(at_once):
        slots.put(gpus[slot % len(gpus)] if gpus else None)

    def work(job):
        gpu = slots.get()
        try:
            return run_job(job, gpu, children, stop)
        finally:
            slots.put(gpu)

    def request_stop(number, frame):
        stop.set()
        for child in list(children):
            child.send_signal(signal.SIGINT)  # also for SIGTERM, so that the script says how to continue

    before = {number: signal.signal(number, request_stop) for number in (signal.SIGINT, signal.SIGTERM)}
    with ThreadPoolExecutor(at_once) as pool:
        futures = {pool.submit(work, job): job for job in jobs}
        for ended, future in enumerate(as_completed(futures), 1):
            job = futures[future]
            try:
                text = "finished, but no episode has ended"
                if row := future.result():
                    text = f"{row['last_100_mean']} in the last episodes, {row['evaluation']} evaluated, "
                    text += f"{row['seconds']} s"
            except Stopped:
                continue
            except Exception as error:
                failed[job], text = error, f"failed: {error}"
            print(f"[{ended}/{len(jobs)}] {job}: {text}", flush=True)
    for number, handler in before.items():
        signal.signal(number, handler)
    if stop.is_set():
        print("stopped; the same command goes on", file=sys.stderr)
        raise SystemExit(130)
    return failed


def main():
    words = sys.argv[1:]
    words, flags = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    args = tyro.cli(Args, args=words, description=__doc__.split("\n")[0])
    jobs = make_jobs(args, flags)
    gpus = []
    if any(job.parsed.device != "cpu" for job in jobs) and torch.cuda.is_available():
        gpus = [str(i) for i in range(torch.cuda.device_count())]
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(gpus)).split(",")
    start = time.time()
    # Of the machine's cores a job of a scheduler may have a few.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(f"{len(jobs)} runs; their output goes to {args.runs_dir}/logs", flush=True)
    failed = run_here(jobs, args.jobs or len(gpus) or cores, gpus)
    print(f"{len(jobs) - len(failed)} of {len(jobs)} runs have finished, after {time.time() - start:,.0f} s")
    for job, error in failed.items():
        print(f"failed: {job}: {error}", file=sys.stderr)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
