"""Run folders -> a small CSV in benchmark/results/ -> the table in README.md.

    python benchmark/report.py mujoco runs/*     # benchmark/results/mujoco.csv: a row for every finished run
    python benchmark/report.py classic runs/*    # benchmark/results/classic.csv
    python benchmark/report.py memory runs/*     # benchmark/results/memory.csv
    python benchmark/report.py --readme          # README.md: their tables, beside published figures

A run's figure is the mean raw return of its last 100 training episodes (the policy explores), as CleanRL reports it.
"""

import csv
import dataclasses
import importlib
import json
import platform
import re
import statistics
import sys
from importlib.metadata import version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results"
FIELDS = [
    "script",
    "env_id",
    "exp_name",
    "seed",
    "global_step",
    "last_100_mean",
    "best_100_mean",
    "episodes",
    "seconds",
]
FIELDS += ["solved_at", "flags", "versions"]
SOLVED = {"CartPole-v1": 490, "Acrobot-v1": -82, "Taxi-v4": 7.5}  # mean return of 100 episodes
PACKAGES = ("torch", "gymnasium", "mujoco", "ale-py")
TABLES = {
    "mujoco": "MuJoCo, `ppo_continuous.py` with its default settings",
    "classic": "Classic control, `ppo_discrete.py` with its default settings (CleanRL: 500,000 steps)",
}
SPEED = {
    "continuous-1": "`ppo_continuous.py`, HalfCheetah-v4, 1 x 2048, CleanRL's settings",
    "continuous-8": "`ppo_continuous.py`, HalfCheetah-v4, 8 x 256, CleanRL's settings",
    "defaults": "`ppo_continuous.py`, HalfCheetah-v4, its defaults",
    "discrete": "`ppo_discrete.py`, CartPole-v1, 4 x 128, CleanRL's settings",
    "rnn": "`ppo_rnn.py`, CartPole without velocities, 4 x 128, LSTM of 128 as by default: one here, two there",
    "rnn-shared": "the same with one LSTM on both sides",
    "rnn-separate": "the same with two LSTMs on both sides",
}
VERSIONS = " ".join([f"python {platform.python_version()}", *(f"{name} {version(name)}" for name in PACKAGES)])


def summarise(run_dir):
    """The CSV row of a run folder, or None where the run has not finished. `flags` are the arguments that differ from
    the script's present defaults."""
    sys.path.insert(0, str(ROOT))
    args = json.loads((run_dir / "args.json").read_text())
    (script,) = (path.stem for path in run_dir.glob("*ppo_*.py"))
    module = importlib.import_module(re.sub(r"^v\d+_", "", script))
    atari = args["env_id"].startswith("ALE/") and hasattr(module, "ATARI")
    defaults = dataclasses.asdict(module.Args(**(module.ATARI if atari else {})))
    # Where and how the run went, not what it did.
    ignored = {
        "env_id",
        "seed",
        "exp_name",
        "runs_dir",
        "num_threads",
        "resume",
        "checkpoint_interval",
        "compile",
        "track",
    }
    changed = [name for name in args if args[name] != defaults.get(name) and name not in ignored]
    flags = [f"--{name.replace('_', '-')}={args[name]}" for name in changed]
    with open(run_dir / "episodes.csv") as file:
        episodes = list(csv.DictReader(file))
    returns = [float(row["episodic_return"]) for row in episodes]
    batch_size = args["num_envs"] * args["num_steps"]
    wanted = args["total_timesteps"] // batch_size * batch_size
    if not (run_dir / "checkpoint.pt").is_file():
        return None
    done = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    if done["global_step"] < wanted or not returns:
        return None
    window = min(100, len(returns))
    means = [statistics.fmean(returns[i - window : i]) for i in range(window, len(returns) + 1)]
    solved = SOLVED.get(args["env_id"], float("inf"))
    solved_at = [episodes[i + window - 1]["global_step"] for i, mean in enumerate(means) if mean >= solved]
    return {
        "script": re.sub(r"^v\d+_", "", script),
        "env_id": args["env_id"],
        "exp_name": args["exp_name"],
        "seed": args["seed"],
        "global_step": done["global_step"],
        "last_100_mean": f"{means[-1]:.1f}",
        "best_100_mean": f"{max(means):.1f}",
        "episodes": len(returns),
        "seconds": f"{done['seconds']:.0f}",
        "solved_at": solved_at[0] if solved_at else "",
        "flags": " ".join(flags),
        "versions": VERSIONS,
    }


def write_csv(name, run_dirs):
    """Rows of earlier runs stay, but for those of the same script, task, exp_name and seed."""
    new = [row for row in map(summarise, run_dirs) if row]
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.csv"
    old = list(csv.DictReader(path.open())) if path.exists() else []
    names = ("script", "env_id", "exp_name", "seed")
    rows = list({tuple(str(row[name]) for name in names): row for row in old + new}.values())
    rows.sort(key=lambda row: (row["env_id"], row["script"], row["exp_name"], int(row["seed"])))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    print(f"{len(new)} of {len(run_dirs)} runs -> {path.relative_to(ROOT)}, which has {len(rows)} now")
    print(table(rows))


def table(rows):
    """Markdown: mean, standard deviation and the single seeds, for each task and setting."""
    groups = {}
    for row in rows:
        groups.setdefault((row["script"], row["env_id"], row["flags"]), []).append(row)
    lines = ["| script | task | flags | seeds | mean | standard deviation | single runs | solved at step |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for (script, env_id, flags), group in groups.items():
        values = [float(row["last_100_mean"]) for row in group]
        digits = 0 if abs(values[0]) >= 500 else 1
        mean, spread = statistics.fmean(values), statistics.pstdev(values)
        singles = ", ".join(f"{value:,.{digits}f}" for value in values)
        solved = ", ".join(row.get("solved_at") or "-" for row in group) if env_id in SOLVED else ""
        cells = [
            script,
            env_id,
            flags or "defaults",
            len(values),
            f"{mean:,.{digits}f}",
            f"{spread:,.{digits}f}",
            singles,
            solved,
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def memory_table():
    """Tasks that need a memory, by script and flags, the policies without one too."""
    with open(RESULTS / "memory.csv") as file:
        rows = list(csv.DictReader(file))
    lines = ["Tasks that need a memory: mean return of the last 100 training episodes.", ""]
    lines += ["| task | steps | script and flags | mean | seeds |", "|---|---|---|---|---|"]
    groups = {}
    for row in rows:
        flags = re.sub(r"--total-timesteps=\d+ ?", "", row["flags"])
        key = (
            re.sub(".*:", "", row["env_id"]),
            f"{int(row['global_step']):,}",
            f"`{row['script']}.py {flags}".strip() + "`",
        )
        groups.setdefault(key, []).append(float(row["last_100_mean"]))
    for key, values in groups.items():
        mean, spread = statistics.fmean(values), statistics.pstdev(values)
        lines.append("| " + " | ".join([*key, f"**{mean:,.1f}** ± {spread:,.1f}", str(len(values))]) + " |")
    versions = ", ".join(dict.fromkeys(row["versions"] for row in rows))
    return lines + ["", f"Measured with {versions}; single runs: benchmark/results/memory.csv.", ""]


def speed_table():
    """Steps per second of this repository, and how many times those of others that is."""
    with open(RESULTS / "speed.csv") as file:
        rows = {(row["case"], row["contestant"]): row for row in csv.DictReader(file)}
    lines = [
        "Speed, one CPU thread each, without the start: environment steps per second, and the ratio to others at the"
    ]
    lines[0] += " same settings, run in turn on one machine; in the last column, to the environments alone."
    lines += [
        "",
        "| script, task, environments x steps | steps/s | start | SB3, sb3-contrib | CleanRL | environments alone |",
    ]
    lines += ["|---|---|---|---|---|---|"]
    for case, title in SPEED.items():
        (mine,) = (row for (name, contestant), row in rows.items() if name == case and contestant.startswith("ppo_"))
        start = f"{float(mine['start_seconds']):.0f} s (first {float(mine['first_start_seconds']):.0f} s)"
        cells = [title, f"{int(mine['steps_per_second']):,}", start]
        for names in (("SB3", "sb3-contrib"), ("CleanRL",)):
            ratios = [rows[case, name]["ratio"] for name in names if (case, name) in rows]
            cells.append(f"**{float(ratios[0]):.1f}** x" if ratios else "")
        alone = rows.get((case, "simulator"))
        cells.append(f"{float(alone['ratio']):.0%}" if alone else "")
        lines.append("| " + " | ".join(cells) + " |")
    versions = ", ".join(dict.fromkeys(row["versions"] for row in rows.values()))
    return lines + ["", f"Measured with {versions}; `python benchmark/speed.py`.", ""]


def write_readme():
    """Default runs of each of TABLES beside the rows of published.csv, between README's markers."""
    with open(ROOT / "benchmark" / "published.csv") as file:
        published = {(row["env_id"], row["column"]): row for row in csv.DictReader(file)}
    lines = []
    for name, title in TABLES.items():
        with open(RESULTS / f"{name}.csv") as file:
            rows = [row for row in csv.DictReader(file) if not re.sub(r"--total-timesteps=\d+", "", row["flags"])]
        lines += [f"{title}: mean return of the last 100 training episodes, ± standard deviation over seeds.", ""]
        lines += ["| task | steps | this repository | seeds | CleanRL | highest PPO figure found |"]
        lines += ["|---|---|---|---|---|---|"]
        for env_id in dict.fromkeys(row["env_id"] for row in rows):
            ours = [row for row in rows if row["env_id"] == env_id]
            values = [float(row["last_100_mean"]) for row in ours]
            mean, spread = statistics.fmean(values), statistics.pstdev(values)
            digits = 0 if abs(mean) >= 1000 else 1
            deviation = f" ± {spread:,.{digits}f}" if len(values) > 1 else ""
            cells = [env_id, f"{int(ours[0]['global_step']):,}", f"**{mean:,.{digits}f}**{deviation}"]
            cells += [f"{len(values)}"]
            for column in ("cleanrl", "highest"):
                row = published.get((env_id, column))
                cells.append(f"{float(row['mean_return']):,.{digits}f}{row['mark']}" if row else "")
            lines.append("| " + " | ".join(cells) + " |")
        versions = ", ".join(dict.fromkeys(row["versions"] for row in rows))
        lines += ["", f"Measured with {versions}; single runs: benchmark/results/{name}.csv.", ""]
    lines += memory_table() + speed_table()
    lines += [
        "Sources and protocols: benchmark/published.csv. *: mean over seeds of each run's best evaluation, not of its"
    ]
    lines[-1] += " last episodes. †: a single run, evaluated without exploration."
    readme = ROOT / "README.md"
    start, end = "<!-- results: written by `python benchmark/report.py --readme` -->\n", "<!-- end of results -->"
    before, rest = readme.read_text().split(start)
    readme.write_text(before + start + "\n".join(lines) + "\n" + end + rest.split(end)[1])


if __name__ == "__main__":
    if sys.argv[1:] == ["--readme"]:
        write_readme()
    elif len(sys.argv) > 2:
        write_csv(sys.argv[1], [Path(path) for path in sys.argv[2:]])
    else:
        raise SystemExit(__doc__)
