"""Two settings beside each other, task by task: did a change move what is learned?

    git show COMMIT:benchmark/results/mujoco.csv > before.csv
    python benchmark/compare.py before.csv benchmark/results/mujoco.csv
    python benchmark/compare.py runs.csv:plain runs.csv:slow     # the rows of one --exp-name each

The files are what report.py writes. Without a name, runs of the same script and flags are compared.

For each task: the mean over seeds of the last 100 training episodes, and the 95% interval (Welch) of the difference. If
the interval contains 0, the runs do not show a change. Falls: episodes that end before the time limit, per 1,000 steps
of the last fifth of a run. Low: runs below half of the mean of their setting, where that is above 0.
Then: tasks that are lower by more than one standard error, with the difference in standard errors.
Last line, if a task has a published figure: the mean of those tasks' differences, each divided by the size of the
highest published figure (published.csv); its standard error; the ratio of the two.
"""

import csv
import math
import statistics
import sys
import warnings
from collections import defaultdict
from pathlib import Path

from scipy.stats import ttest_ind

PUBLISHED = Path(__file__).parent / "published.csv"


def read(source):
    """FILE or FILE:EXP_NAME -> {(script, task, flags): rows}, with script and flags "" for a named setting"""
    path, _, exp_name = (source, "", "") if Path(source).exists() or ":" not in source else source.rpartition(":")
    settings = defaultdict(list)
    with open(path) as file:
        for row in csv.DictReader(file):
            if exp_name in ("", row["exp_name"]):
                key = ("", row["env_id"], "") if exp_name else (row["script"], row["env_id"], row["flags"])
                rows = settings[key]
                if rows and row["exp_name"] != rows[0]["exp_name"]:
                    sys.exit(f"{source} has several settings: choose one, as in {path}:{rows[0]['exp_name']}")
                if rows and (row["script"], row["flags"]) != (rows[0]["script"], rows[0]["flags"]):
                    sys.exit(f"{source} has {row['env_id']} of several scripts or flags: give each an --exp-name")
                if any(row["seed"] == other["seed"] for other in rows):
                    sys.exit(f"{source} has seed {row['seed']} of {row['env_id']} twice")
                rows.append(row)
    return settings


def main(before, after):
    warnings.filterwarnings("ignore", "Precision loss")  # scipy, where all seeds have the same return
    sources, before, after = (before, after), read(before), read(after)
    if not before.keys() & after.keys():
        sys.exit("no task has runs of both; without names: of the same script and flags")
    for source, one, other in zip(sources, (before, after), (after, before)):
        if alone := sorted(one.keys() - other.keys()):
            print(f"only in {source}: {', '.join(' '.join(key).strip() for key in alone)}")
    with open(PUBLISHED) as file:
        published = {row["env_id"]: row["mean_return"] for row in csv.DictReader(file) if row["column"] == "highest"}
    print(f"{'task':28} {'seeds':>7} {'before':>9} {'after':>9} {'95% of the difference':>23} {'falls':>13} {'low':>5}")
    gains, variances, falling = [], [], []
    for key in sorted(before.keys() & after.keys()):
        pair = before[key], after[key]
        old, new = ([float(row["last_100_mean"]) for row in rows] for rows in pair)
        if min(len(old), len(new)) == 1:
            print(f"{key[1]:28} {len(old):>3} {len(new):>3} left out: one seed has no interval")
            continue
        interval = ttest_ind(new, old, equal_var=False).confidence_interval()
        difference = statistics.fmean(new) - statistics.fmean(old)
        variance = sum(statistics.variance(returns) / len(returns) for returns in (old, new))
        falls = [[float(row["falls"]) for row in rows if row.get("falls")] for rows in pair]
        falls = " ".join(f"{statistics.fmean(numbers):6.2f}" if numbers else f"{'-':>6}" for numbers in falls)
        halves = [statistics.fmean(runs) / 2 for runs in (old, new)]  # where returns are negative, no run is low
        low = " ".join(str(sum(x < half for x in runs)) if half > 0 else "0" for runs, half in zip((old, new), halves))
        digits = 1 if max(map(abs, old + new)) >= 2 else 4  # returns between 0 and 1 differ late
        means = f"{statistics.fmean(old):9.{digits}f} {statistics.fmean(new):9.{digits}f}"
        text = f"{interval.low:+.{digits}f} to {interval.high:+.{digits}f}"
        print(f"{key[1].split(':')[-1]:28} {len(old):>3} {len(new):>3} {means} {text:>23} {falls:>13} {low:>5}")
        steps = [int(row["global_step"]) for rows in pair for row in rows]
        if min(steps) < 0.95 * max(steps):
            print(f"  unlike runs: from {min(steps):,} to {max(steps):,} steps")
        if difference < -(variance**0.5):
            errors = difference / variance**0.5 if variance else -math.inf  # all seeds may be equal
            falling.append(f"{key[1]} ({errors:.1f})")
        if key[1] in published:
            size = abs(float(published[key[1]]))
            gains.append(difference / size)
            variances.append(variance / size**2)
    print(f"lower by more than one standard error: {', '.join(falling) or 'no task'}")
    if gains:
        gain, error = statistics.fmean(gains), sum(variances) ** 0.5 / len(gains)
        text = f"{gain:+.4f}, standard error {error:.4f}, ratio {gain / (error or 1):+.1f}"
        print(f"normalized mean over {len(gains)} tasks: {text}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
