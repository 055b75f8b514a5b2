"""Question: what do the metrics of a run that learns look like?

    python ppo_continuous.py --env-id HalfCheetah-v4 --total-timesteps 300000 --runs-dir runs/metrics
    python ppo_discrete.py --env-id CartPole-v1 --runs-dir runs/metrics
    python benchmark/studies/metrics.py runs/metrics/*    # writes metrics.csv

Answer (metrics.csv, one run each): on HalfCheetah approx_kl is 0.010 to 0.015 and clipfrac 0.15 to 0.23 (5% and 95%
of the iterations). On CartPole they begin with 0.001 to 0.02 and 0.008 to 0.28. Once it is solved, both fall to
nearly 0, and explained_variance may be below 0: there the returns hardly differ.

A row has the quantiles of one metric over the iterations of one part of a run: its first tenth, the middle, its last
tenth. docs/metrics.md has healthy ranges that contain these quantiles.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmark/

import numpy as np
from run_folder import summarise, write_rows
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

PARTS = {"first tenth": (0, 0.1), "middle": (0.1, 0.9), "last tenth": (0.9, 1)}
QUANTILES = {"lowest": 0, "q05": 0.05, "median": 0.5, "q95": 0.95, "highest": 1}
FIELDS = ["script", "env_id", "seed", "steps", "settings", "key", "part", "values", *QUANTILES]


def rows_of(run_dir):
    """The rows of a finished run: every metric, part by part."""
    summary = summarise(run_dir)
    if summary is None:
        raise SystemExit(f"metrics.py: error: {run_dir} is not the folder of a finished run")
    about = {name: summary[name] for name in ("script", "env_id", "seed")}
    about |= {"steps": summary["global_step"], "settings": summary["flags"] or "defaults"}
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    for key in sorted(events.Tags()["scalars"]):
        shares = np.array([event.step / summary["global_step"] for event in events.Scalars(key)])
        values = np.array([event.value for event in events.Scalars(key)])
        for part, (begin, end) in PARTS.items():
            chosen = values[(shares > begin) & (shares <= end)]
            if len(chosen):
                found = dict(zip(QUANTILES, (f"{x:.4g}" for x in np.quantile(chosen, list(QUANTILES.values())))))
                yield about | {"key": key, "part": part, "values": len(chosen)} | found


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    rows = [row for path in sys.argv[1:] for row in rows_of(Path(path))]
    path = Path(__file__).with_suffix(".csv")
    write_rows(path, FIELDS, rows)
    print(f"{len(rows)} rows -> {path}")


if __name__ == "__main__":
    main()
