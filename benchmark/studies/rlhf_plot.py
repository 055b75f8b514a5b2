"""Question: does variants/ppo_rlhf.py need its KL penalty?

    for seed in 1 2 3; do for kl_coef in 0.1 0; do
        OMP_NUM_THREADS=1 python variants/ppo_rlhf.py --seed $seed --kl-coef $kl_coef --runs-dir runs/rlhf
    done; done
    python benchmark/studies/rlhf_plot.py collect runs/rlhf    # writes rlhf_plot.csv
    python benchmark/studies/rlhf_plot.py draw                 # rlhf_plot.csv -> docs/pictures/rlhf.svg

Answer (rlhf_plot.csv, the built-in task, three seeds each): yes. With the penalty the task score ends at 0.944
to 0.959. Without it the reward is as high, and the task score ends at 0.000.
"""

import json
import sys
from itertools import groupby
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmark/

from report import PICTURES, save_figure
from run_folder import read_csv, write_rows

TABLE = Path(__file__).with_suffix(".csv")
EVERY = 4  # iterations in a point of a curve
LAST = 10  # iterations that count as the end of a run
KL_BOUND = 2.0  # nats per answer, what ppo_rlhf.py promises for its defaults
PANELS = {
    "reward": "reward model's score",
    "task_score": "what it should tell (task score)",
    "kl": "KL to the reference",
}


def collect(runs_dir):
    """A row for every few iterations of every run."""
    rows = []
    for path in sorted(Path(runs_dir).glob("*/metrics.csv")):
        args = json.loads((path.parent / "args.json").read_text())
        table = [{name: float(value) for name, value in row.items()} for row in read_csv(path)]
        if len(table) < args["total_episodes"] // args["batch_size"] or args["model"] is not None:
            print(f"left out: {path.parent}: it has not ended, or it trained another task", file=sys.stderr)
            continue
        columns = {name: [row[f"charts/{name}"] for row in table] for name in PANELS}
        setting = {"kl_coef": args["kl_coef"], "seed": args["seed"]}
        ends = ", ".join(f"{name} {values[0]:.3f} to {mean(values[-LAST:]):.3f}" for name, values in columns.items())
        print(", ".join(f"{name} {value}" for name, value in setting.items()) + f": {ends}")
        for i in range(0, len(table), EVERY):
            point = {name: round(mean(values[i : i + EVERY]), 3) for name, values in columns.items()}
            rows.append(setting | {"global_step": int(table[i]["global_step"])} | point)
    if not rows:
        raise SystemExit(f"rlhf_plot.py: error: {runs_dir} has no run of ppo_rlhf.py's built-in task")
    rows.sort(key=lambda row: (-row["kl_coef"], row["seed"]))
    write_rows(TABLE, list(rows[0]), rows)


def draw():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [{name: float(value) for name, value in row.items()} for row in read_csv(TABLE)]
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    for (name, title), axis in zip(PANELS.items(), axes):
        for color, (kl_coef, of_setting) in enumerate(groupby(rows, key=lambda row: row["kl_coef"])):
            for number, (_, points) in enumerate(groupby(of_setting, key=lambda row: row["seed"])):
                points = [(row["global_step"], max(row[name], 0.02) if name == "kl" else row[name]) for row in points]
                label = f"--kl-coef {kl_coef:g}" if number == 0 else None
                axis.plot(*zip(*points), color=f"C{color}", linewidth=1.2, label=label)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("answers")
        axis.set_xticks(range(0, 20_001, 5000))
        axis.grid(alpha=0.3)
    axes[2].set_yscale("log")
    axes[2].set_ylabel("nats per answer")
    axes[2].axhline(KL_BOUND, color="0.4", linestyle="--", linewidth=1)
    axes[1].axhline(0.9, color="0.4", linestyle="--", linewidth=1)
    axes[0].legend(fontsize=8)
    save_figure(figure, PICTURES / "rlhf.svg")


if __name__ == "__main__":
    commands = {"collect": collect, "draw": draw}
    if sys.argv[1:2] and sys.argv[1] in commands:
        commands[sys.argv[1]](*sys.argv[2:])
    else:
        sys.exit(__doc__)
