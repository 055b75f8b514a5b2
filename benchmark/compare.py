"""Two files of results beside each other, task by task: did a change move what is learned?

    git show COMMIT:benchmark/results/mujoco.csv > before.csv
    python benchmark/compare.py before.csv benchmark/results/mujoco.csv
    python benchmark/compare.py BEFORE/runs.csv AFTER/runs.csv     # of report.py runs/... --out BEFORE, and AFTER

Prints the mean over seeds of the last 100 training episodes in both files, and the 95% interval (Welch) of the
difference of the means. An interval that holds 0 shows no change.
"""

import csv
from collections import defaultdict
from pathlib import Path

import tyro
from scipy.stats import ttest_ind


def read(path):
    """{(script, task, flags): returns of its seeds}"""
    runs = defaultdict(list)
    with open(path) as file:
        for row in csv.DictReader(file):
            task = row["env_id"].removeprefix("benchmark.envpool_envs:EnvPool/")  # beside gymnasium's
            flags = row["flags"].removeprefix('--env-kwargs={"num_threads":1}')
            runs[row["script"], task, flags].append(float(row["last_100_mean"]))
    return runs


def main(before: Path, after: Path, /):
    before, after = read(before), read(after)
    print(f"{'task':28} {'seeds':>9} {'before':>9} {'after':>9}   95% interval of the difference")
    for key in sorted(before.keys() & after.keys()):
        old, new = before[key], after[key]
        interval = ttest_ind(new, old, equal_var=False).confidence_interval()
        means = f"{sum(old) / len(old):9.1f} {sum(new) / len(new):9.1f}"
        print(f"{key[1]:28} {len(old):>4} {len(new):>4} {means}   {interval.low:+.1f} to {interval.high:+.1f}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__.split("\n")[0])
