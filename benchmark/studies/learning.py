"""Question: do the command lines that speed.py times learn as much as CleanRL's?

    python benchmark/studies/learning.py --cleanrl PATH

Answer (results/learning.csv, five seeds each, before the scripts were rebuilt): yes, within the noise of five seeds.
HalfCheetah 2,484, CleanRL 2,035. CartPole 500, CleanRL 490.

PATH is a checkout of CleanRL, as for speed.py. A run's figure is the mean raw return of its last 100 training episodes:
from episodes.csv, CleanRL's from its TensorBoard events. Rows are written to results/learning.csv as runs finish;
docs/results.md has them. A run that has its row is not repeated.
"""

import dataclasses
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmark/

import numpy as np
import tyro
from report import RESULTS, learning_table
from run_folder import read_csv, write_rows
from speed import make_cases, one_thread, versions_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

FIELDS = ["case", "contestant", "seed", "steps", "last_100_mean", "versions"]
STEPS = {"continuous-8": 1_000_000, "discrete": 500_000}


def last_100_mean(command):
    """Run a training to its end, in a folder of its own -> the mean return of its last 100 episodes."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, env=one_thread(), capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{command} failed:\n{done.stderr[-2000:]}")
        (run_dir,) = Path(folder, "runs").iterdir()
        returns = [float(row["episodic_return"]) for row in read_csv(run_dir / "episodes.csv")]
        if not returns:  # CleanRL's
            events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
            name = "charts/episodic_return"
            returns = [event.value for event in events.Scalars(name)] if name in events.Tags()["scalars"] else []
    if len(returns) < 100:
        raise SystemExit(f"{command}: only {len(returns)} episodes, 100 are needed: give more --steps")
    return np.mean(returns[-100:])


@dataclasses.dataclass
class Args:
    cases: tyro.conf.Positional[tuple[Literal[tuple(STEPS)], ...]] = tuple(STEPS)  # which ones
    seeds: int = 5  # runs of each contestant
    jobs: int = 2  # runs at a time, one thread each
    steps: int | None = None  # of every run, for a try, which is not kept
    cleanrl: Path | None = None  # a checkout of CleanRL, with its virtual environment in .venv


def make_jobs(args):
    """(case, contestant, seed) -> command line"""
    jobs = {}
    for case in args.cases:
        contestants = {name: run for name, (run, *_) in make_cases(args.cleanrl)[case].items()}
        for name in [name for name in contestants if name.startswith("ppo_") or name == "CleanRL"]:
            for seed in range(1, args.seeds + 1):
                jobs[case, name, seed] = contestants[name](args.steps or STEPS[case]) + [f"--seed={seed}"]
    return jobs


def main():
    args = tyro.cli(Args, description=__doc__.split("\n")[0])
    args.cleanrl = args.cleanrl and args.cleanrl.absolute()
    path = RESULTS / "learning.csv"
    rows = [] if args.steps else read_csv(path)
    done = {(row["case"], row["contestant"], int(row["seed"])) for row in rows}
    jobs = {key: command for key, command in make_jobs(args).items() if key not in done}
    with ThreadPoolExecutor(args.jobs) as pool:
        for (case, name, seed), command, figure in zip(jobs, jobs.values(), pool.map(last_100_mean, jobs.values())):
            print(f"{case}, {name}, seed {seed}: {figure:,.1f}", flush=True)
            row = {"case": case, "contestant": name, "seed": seed, "steps": args.steps or STEPS[case]}
            rows.append(row | {"last_100_mean": f"{figure:.1f}", "versions": versions_of(command[0])})
            if not args.steps:
                write_rows(path, FIELDS, rows)
    print("\n".join(learning_table(rows)))


if __name__ == "__main__":
    main()
