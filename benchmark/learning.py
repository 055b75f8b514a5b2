"""Do they learn the same? Whole runs with the command lines that speed.py times, several seeds of each contestant.

    python benchmark/learning.py --cleanrl PATH --before PATH

PATH of --cleanrl is that of speed.py. PATH of --before is a checkout of this repository from before the work on its
speed, at the last commit without compiled acting (git worktree add PATH a7b3e2c); flags that it does not know are left
out, since what they switch off did not exist. A run's figure is the mean raw return of its last 100 training episodes,
read from its TensorBoard events. Rows are written to results/learning.csv as runs finish, and not run again.
"""

import argparse
import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import report
from report import RESULTS, ROOT
from speed import make_cases, one_thread, versions_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

FIELDS = ["case", "contestant", "seed", "steps", "last_100_mean", "versions"]
STEPS = {"continuous-8": 1_000_000, "discrete": 500_000}


def at(checkout, command):
    """The command line of a script of this repository, for the same script of an older checkout."""
    python, script, *flags = command
    script = Path(script).relative_to(ROOT)
    known = re.findall(r"(?m)^    (\w+): ", (checkout / script).read_text())
    name = re.compile(r"--(?:no-)?([\w-]+)")
    return [python, str(checkout / script), *(f for f in flags if name.match(f)[1].replace("-", "_") in known)]


def last_100_mean(command):
    """Run a training to its end, in a folder of its own -> the mean return of its last 100 episodes."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, env=one_thread(), capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{command} failed:\n{done.stderr[-2000:]}")
        (run_dir,) = Path(folder, "runs").iterdir()
        events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
        name = "charts/episodic_return"
        returns = [event.value for event in events.Scalars(name)] if name in events.Tags()["scalars"] else []
    if len(returns) < 100:
        raise SystemExit(f"{command}: only {len(returns)} episodes, 100 are needed: give more --steps")
    return np.mean(returns[-100:])


def make_jobs(args):
    """(case, contestant, seed) -> command line"""
    jobs = {}
    for case in args.cases:
        contestants = {name: run for name, (run, *_) in make_cases(args.cleanrl)[case].items()}
        for name in [name for name in contestants if name.startswith("ppo_") or name == "CleanRL"]:
            for seed in range(1, args.seeds + 1):
                command = contestants[name](args.steps or STEPS[case]) + [f"--seed={seed}"]
                jobs[case, name, seed] = command
                if args.before and name != "CleanRL":
                    jobs[case, f"{name} before", seed] = at(args.before, command)
    return jobs


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(STEPS), help=f"of {', '.join(STEPS)}; default: all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--steps", type=int, help="of every run, for a try, which is not kept")
    parser.add_argument("--cleanrl", type=Path, help="a checkout of CleanRL, with its virtual environment in .venv")
    parser.add_argument("--before", type=Path, help="an older checkout of this repository")
    args = parser.parse_args()
    if unknown := set(args.cases) - set(STEPS):
        parser.error(f"no such case: {', '.join(unknown)}")
    args.cleanrl, args.before = (path and path.absolute() for path in (args.cleanrl, args.before))
    path = RESULTS / "learning.csv"
    rows = [] if args.steps else report.read_csv(path)
    done = {(row["case"], row["contestant"], int(row["seed"])) for row in rows}
    jobs = {key: command for key, command in make_jobs(args).items() if key not in done}
    with ThreadPoolExecutor(args.jobs) as pool:
        for (case, name, seed), command, figure in zip(jobs, jobs.values(), pool.map(last_100_mean, jobs.values())):
            print(f"{case}, {name}, seed {seed}: {figure:,.1f}", flush=True)
            row = {"case": case, "contestant": name, "seed": seed, "steps": args.steps or STEPS[case]}
            rows.append(row | {"last_100_mean": f"{figure:.1f}", "versions": versions_of(command[0])})
            if not args.steps:
                report.write_rows(path, FIELDS, rows)
    print("\n".join(report.learning_table(rows)))


if __name__ == "__main__":
    main()
