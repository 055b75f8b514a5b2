"""Run folders -> tables and learning curves.

    python benchmark/report.py runs/*                        # report/: any runs, scripts and settings side by side
    python benchmark/report.py runs/A* runs/B* --out DIR     # the same in DIR/
    python benchmark/report.py runs/* --publish mujoco       # into results/mujoco.csv and mujoco_curves.csv
    python benchmark/report.py runs/*__tuned__* --publish mujoco-tuned      # runs of run.py --tuned
    python benchmark/report.py --publish random              # results/random.csv: random actions on all tasks of README
    python benchmark/report.py --publish readme              # README.md, docs/: tables beside published figures, curves

Without --publish nothing in the repository changes.

A run's figure is the mean raw return of its last 100 training episodes (the policy explores), as CleanRL reports it.
Runs that benchmark/run.py made have another one, the mean of episodes that the trained agent plays without exploring.
Intervals are bootstrap intervals of 95% over seeds, within each task (Agarwal et al. 2021). Of a suite of run.py only
its own tasks are taken from the folders given. A row remembers which defaults its flags are differences from, in
results/defaults.json: rows of other defaults than the present ones are marked, and never averaged with others.
"""

import csv
import dataclasses
import hashlib
import importlib
import json
import platform
import re
import statistics
import sys
from importlib.metadata import distributions
from operator import itemgetter
from pathlib import Path

import gymnasium as gym
import numpy as np
import suites
import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results"
PICTURES = ROOT / "docs" / "pictures"
FIELDS = ["script", "env_id", "exp_name", "seed", "global_step", "last_100_mean", "best_100_mean", "evaluation"]
FIELDS += ["episodes", "seconds", "solved_at", "flags", "defaults", "versions", "commit", "hardware"]
# Arguments that say where and how a run went, not what it did.
WHERE_AND_HOW = {"env_id", "seed", "exp_name", "runs_dir", "resume", "compile"}
WHERE_AND_HOW |= {"checkpoint_interval", "track", "wandb_project_name", "wandb_entity", "capture_video"}
BEFORE = {"kl_coef": 0.0}  # what runs did that are older than a flag
# Solved: this mean return over 100 episodes. The name without the module that registers the task.
SOLVED = {"CartPole-v1": 490, "Acrobot-v1": -82, "Taxi-v4": 7.5}
SOLVED |= {"CartPoleNoVel-v1": 475, "PendulumNoVel-v1": -250, "popgym-RepeatPreviousEasy-v0": 0.9}
PACKAGES = ("torch", "gymnasium", "mujoco", "ale-py")
SUITES = {
    "mujoco": "**MuJoCo**, `ppo_continuous.py` with its defaults, the same for all tasks. The defaults were chosen "
    "on these tasks, mostly on seeds 1 to 3, in a few cases on seeds up to 5, for Humanoid on seed 1 only. Seeds 6 "
    "to 8 were run after the choice. Seeds 1 to 8 ran on an Intel processor (commits 8d743a9, 123ac2d, aca7fe7) and "
    "again on an AMD one (61e9467), Humanoid on Intel only. The scripts differ by rounding alone. "
    "`mujoco-rounding.csv` has other rounding, `mujoco-avx2.csv` and `mujoco-49c198e.csv` have an earlier script. "
    "The noise falls to 0 over a run (`--anneal-std`); CleanRL's does not. Published figures, except "
    "CleanRL's, are for versions -v2 and -v3 of the tasks. TRPO is sb3-contrib's, evaluated after training",
    "mujoco-tuned": "**MuJoCo, with settings for a task of its own**. They were chosen on seeds from 101 up "
    "(`python benchmark/tune.py`, `benchmark/results/tuning_*.csv`). Seeds 1 to 16 were run once, after the choice, "
    "but for HalfCheetah and Walker2d: other choices ran on their seeds before (`mujoco-halfcheetah.csv`, "
    "`mujoco-dropped.csv`). The command is `python benchmark/run.py --suite mujoco --tuned --seeds 16`. Tasks without "
    "flags have the defaults and seeds 1 to 8",
    "mujoco-v5": "**MuJoCo, versions -v5**, which gymnasium recommends today. The defaults are the same and were not "
    "tuned on these versions. No published PPO figures for -v5 were found. "
    "The runs are of the script before it was rebuilt",
    "classic": "**Classic control**",
    "atari": "**Atari**, raw scores of whole games, no sticky actions. So far there is one run on one CPU core, with "
    "16 minibatches, learning rate 5e-4, clip range 0.2 and the script before it was rebuilt. The published settings "
    "have 4, 2.5e-4 and 0.1",
    "memory": "**Tasks that need a memory**",
}
CURVE_POINTS = 50
SCRIPTS = [path.stem for path in ROOT.glob("ppo_*.py")]
SPEED = {
    "continuous-1": "`ppo_continuous.py`, HalfCheetah-v4, 1 x 2048, CleanRL's settings",
    "continuous-8": "`ppo_continuous.py`, HalfCheetah-v4, 8 x 256, CleanRL's settings",
    "defaults": "`ppo_continuous.py`, HalfCheetah-v4, its defaults",
    "discrete": "`ppo_discrete.py`, CartPole-v1, 4 x 128, CleanRL's settings",
    "atari-8": "`ppo_discrete.py`, ALE/Breakout-v5, 8 x 128, on a GPU",
    "atari-128": "`ppo_discrete.py`, ALE/Breakout-v5, 128 x 128, on a GPU",
    "rnn": "`ppo_rnn.py`, CartPole without velocities, 4 x 128, default LSTMs of 128 (here one, sb3-contrib: two)",
    "rnn-shared": "the same, one LSTM in both",
    "rnn-separate": "the same, two LSTMs in both",
}


def installed_versions():
    found = {each.name.lower().replace("_", "-"): each.version for each in distributions()}
    return " ".join(
        [f"python {platform.python_version()}", *(f"{name} {found[name]}" for name in PACKAGES if name in found)]
    )


VERSIONS = installed_versions()


def read_csv(path):
    if not path.exists():
        return []
    with open(path) as file:
        return list(csv.DictReader(file))


def write_rows(path, fields, rows):
    path.parent.mkdir(exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def last_step(run_dir):
    """The global step at which the last episode of a run folder ended; 0 without episodes."""
    *_, last = (run_dir / "episodes.csv").read_text().splitlines()[1:] or [""]
    return int(last.split(",")[0]) if last.count(",") == 3 else 0


def rolling_mean(returns, window=100):
    """Mean of the last `window` numbers up to each one, of fewer at the beginning."""
    sums = np.concatenate([[0.0], np.cumsum(returns)])
    first = np.maximum(np.arange(len(returns)) + 1 - window, 0)
    return (sums[1:] - sums[first]) / (np.arange(len(returns)) + 1 - first)


def is_finished(run_dir):
    """Whether the checkpoint of a run folder is that of its last iteration."""
    if not (run_dir / "checkpoint.pt").is_file():
        return False
    args = json.loads((run_dir / "args.json").read_text())
    batch_size = args["num_envs"] * args["num_steps"]
    checkpoint = torch.load(run_dir / "checkpoint.pt", map_location="cpu", weights_only=True)
    return checkpoint["global_step"] >= args["total_timesteps"] // batch_size * batch_size


def script_of(run_dir):
    """Name of the script whose copy is in a run folder, None where there is none, or more than one."""
    scripts = [re.sub(r"^v\d+_", "", path.stem) for path in run_dir.glob("*ppo_*.py")]
    return scripts[0] if len(scripts) == 1 else None


def defaults_of(script, env_id):
    """The present default arguments of a script, those that results depend on."""
    sys.path.insert(0, str(ROOT))
    module = importlib.import_module(script)
    atari = hasattr(module, "is_atari") and module.is_atari(env_id)
    defaults = dataclasses.asdict(module.Args(**(module.ATARI if atari else {})))
    defaults = {name: value for name, value in defaults.items() if name not in WHERE_AND_HOW}
    return json.loads(json.dumps(defaults))  # tuples as lists, as in args.json


def key_of(defaults):
    """What a row says of the defaults of its time, a short hash: results/defaults.json has their values."""
    return hashlib.sha256(json.dumps(defaults, sort_keys=True).encode()).hexdigest()[:8]


def read_defaults():
    path = RESULTS / "defaults.json"
    return json.loads(path.read_text()) if path.exists() else {}


def differ(row, defaults):
    """Whether a row was made with other defaults. A flag that only one side knows does not count, but for BEFORE."""
    known = BEFORE | read_defaults().get(row["defaults"], {})  # nothing for rows from before there was that column
    return any(defaults.get(name, value) != value for name, value in known.items())


def summarise(run_dir):
    """The CSV row of a run folder, or None where the run has not finished or no episode has. `flags` are the arguments
    that differ from the script's present defaults."""
    episodes = read_csv(run_dir / "episodes.csv")
    if not episodes or not is_finished(run_dir):
        return None
    args, script = BEFORE | json.loads((run_dir / "args.json").read_text()), script_of(run_dir)
    defaults = defaults_of(script, args["env_id"])
    changed = [name for name in args if name not in WHERE_AND_HOW and args[name] != defaults.get(name)]
    checkpoint = torch.load(run_dir / "checkpoint.pt", map_location="cpu", weights_only=True)
    means = rolling_mean([float(row["episodic_return"]) for row in episodes])
    whole = min(100, len(means)) - 1  # the first mean of 100 episodes, of all where there are fewer
    solved = np.flatnonzero(means[99:] >= SOLVED.get(args["env_id"].split(":")[-1], np.inf))
    record = run_dir / "benchmark.json"
    record = json.loads(record.read_text()) if record.exists() else {"versions": VERSIONS}
    return {
        "script": script,
        "env_id": args["env_id"],
        "exp_name": args["exp_name"],
        "seed": args["seed"],
        "global_step": checkpoint["global_step"],
        "last_100_mean": f"{means[-1]:.6g}",
        "best_100_mean": f"{means[whole:].max():.6g}",
        "evaluation": f"{record['evaluation']:.6g}" if "evaluation" in record else "",
        "episodes": len(episodes),
        "seconds": f"{checkpoint['seconds']:.0f}",
        "solved_at": episodes[99 + solved[0]]["global_step"] if len(solved) else "",
        "flags": " ".join(f"--{name.replace('_', '-')}={args[name]}" for name in changed),
        "defaults": key_of(defaults),
        "versions": record["versions"],
        "commit": record.get("commit", ""),
        "hardware": record.get("hardware", ""),
    }


def curve(run_dir, global_step):
    """[(step, seconds, mean return of the last 100 episodes)] at CURVE_POINTS even steps of a run, from the first that
    has an episode behind it; between the ends of episodes on straight lines."""
    episodes = read_csv(run_dir / "episodes.csv")
    steps = np.array([int(row["global_step"]) for row in episodes])
    last = np.flatnonzero(np.diff(steps, append=np.inf))  # where environments end in the same step, the last of them
    means = rolling_mean([float(row["episodic_return"]) for row in episodes])
    seconds = np.array([float(row["seconds"]) for row in episodes])
    grid = np.linspace(0, global_step, CURVE_POINTS + 1)[1:]
    grid = grid[grid >= steps[0]]
    return [(round(at), *(np.interp(at, steps[last], y[last]) for y in (seconds, means))) for at in grid]


def write_csv(name, run_dirs):
    """Rows of earlier runs stay, but for those of the same script, task, exp_name, flags and seed."""
    key = ("script", "env_id", "exp_name", "flags", "seed")
    suite = suites.SUITES.get(name.removesuffix("-tuned"), [])
    tasks, found = {(script, env_id) for script, env_id, _ in suite}, []
    for run_dir in run_dirs:
        if (run_dir / "args.json").is_file() and (script := script_of(run_dir)) in SCRIPTS:
            args = json.loads((run_dir / "args.json").read_text())
            if args["exp_name"].startswith("tune-"):  # tune.py's, whose folders may lie beside these
                continue
            env_id = args["env_id"]
            if (not tasks or (script, env_id) in tasks) and (row := summarise(run_dir)):
                found.append((run_dir, row))
    if run_dirs and not found:
        of_suite = f" of the suite {name}" if tasks else ""
        raise SystemExit(f"report.py: error: none of these is the folder of a finished run{of_suite}; runs/* are meant")
    rows, curves = read_csv(RESULTS / f"{name}.csv"), read_csv(RESULTS / f"{name}_curves.csv")
    for run_dir, row in found:
        same = [str(row[field]) for field in key]
        rows = [old for old in rows if [str(old[field]) for field in key] != same] + [row]
        curves = [old for old in curves if [old[field] for field in key] != same]
        for step, seconds, mean in curve(run_dir, row["global_step"]):
            point = {"global_step": step, "seconds": f"{seconds:.0f}", "mean_return": f"{mean:.5g}"}
            curves.append(dict(zip(key, same)) | point)
    for table in (rows, curves):  # points of one run stay in their order
        table.sort(key=lambda row: (row["env_id"], row["script"], row["exp_name"], row["flags"], int(row["seed"])))
    write_rows(RESULTS / f"{name}.csv", FIELDS, rows)
    new = (defaults_of(row["script"], row["env_id"]) for _, row in found)
    known = read_defaults() | {key_of(defaults): defaults for defaults in new}
    (RESULTS / "defaults.json").write_text(json.dumps(known, indent=1) + "\n")
    write_rows(RESULTS / f"{name}_curves.csv", [*key, "global_step", "seconds", "mean_return"], curves)
    print(f"{len(found)} of {len(run_dirs)} runs -> {RESULTS / name}.csv, which has {len(rows)} now")
    # Read back: new rows have numbers where earlier ones have text.
    print(settings_table(read_csv(RESULTS / f"{name}.csv")))


def group_by(rows, *fields):
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[field] for field in fields), []).append(row)
    return groups


def settings_table(rows):
    """Markdown: mean, standard deviation and the single seeds, for each task, setting and name."""
    lines = ["| name | task | flags | seeds | mean | standard deviation | single runs | solved at step |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    fields = "exp_name", "env_id", "flags", "global_step", "defaults"
    for (name, env_id, flags, *_), group in group_by(rows, *fields).items():
        values = [float(row["last_100_mean"]) for row in group]
        cells = [name, env_id, flags or "defaults", len(values), number(statistics.fmean(values), values[0])]
        cells += [number(statistics.stdev(values), values[0]) if len(values) > 1 else ""]
        cells += [", ".join(number(value, values[0]) for value in values)]
        cells += [", ".join(row["solved_at"] or "-" for row in group) if env_id.split(":")[-1] in SOLVED else ""]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def bootstrap_interval(scores, statistic, resamples=10_000):
    """95% interval of statistic([scores of a task, ...]), seeds drawn anew with replacement within each task."""
    rng = np.random.default_rng(0)
    draws = [statistic([rng.choice(task, len(task)) for task in scores]) for _ in range(resamples)]
    return np.percentile(draws, [2.5, 97.5])


def interquartile_mean(scores):
    """Mean of the middle half of all runs on all tasks (Agarwal et al. 2021)."""
    from scipy.stats import trim_mean  # here: run.py, which imports this file, does without

    return trim_mean(np.concatenate(scores), 0.25)


def speed_table():
    """Steps per second of this repository, and how many times those of others that is."""
    with open(RESULTS / "speed.csv") as file:
        rows = {(row["case"], row["contestant"]): row for row in csv.DictReader(file)}
    lines = ["**Speed** on one CPU thread per process, without the startup: environment steps per second, and their"]
    lines[0] += " ratio to those of others at the same settings. The contestants of a row ran in turn on one machine;"
    lines[0] += (
        " different rows may be of different machines. The last column compares with the simulators alone, which"
    )
    lines[0] += " take random actions."
    others = {"SB3, sb3-contrib": ("SB3", "sb3-contrib"), "CleanRL": ("CleanRL",), "LeanRL": ("LeanRL",)}
    others = {title: names for title, names in others.items() if any(name in names for _, name in rows)}
    columns = [
        "script, task, environments x steps",
        "steps/s",
        "startup",
        "first startup on a machine",
        *others,
        "of simulators alone",
    ]
    lines += ["", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for case, title in SPEED.items():
        if not any(name == case for name, _ in rows):
            continue
        (mine,) = (row for (name, contestant), row in rows.items() if name == case and contestant.startswith("ppo_"))
        starts = (f"{float(mine[kind]):.0f} s" for kind in ("start_seconds", "first_start_seconds"))
        cells = [title, f"{int(mine['steps_per_second']):,}", *starts]
        for names in others.values():
            ratios = [rows[case, name]["ratio"] for name in names if (case, name) in rows]
            cells.append(f"{float(ratios[0]):.1f} x" if ratios else "")
        alone = rows.get((case, "simulator"))
        cells.append(f"{float(alone['ratio']):.0%}" if alone else "")
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "The scripts of this table are those before the rebuild. The present ones are as fast:"]
    lines[-1] += " see [the notes](notes/speed.md)."
    versions = []
    for row in rows.values():
        peer = row["contestant"] in ("CleanRL", "LeanRL")  # which need packages of their own
        versions.append(f"{row['contestant']} with {row['versions']}" if peer else row["versions"])
    versions = ", ".join(dict.fromkeys(versions))
    return lines + ["", f"Measured with {versions}; `python benchmark/speed.py`.", ""]


def learning_table(rows):
    """Markdown: returns at the settings of the speed table, from the rows of studies/learning.py."""
    rows = [row for row in rows if not row["contestant"].endswith(" before")]  # docs/notes/speed.md has these
    lines = ["| settings | contestant | steps | last 100 episodes | 95% interval | single runs |", "|---" * 6 + "|"]
    for (case, name), group in group_by(rows, "case", "contestant").items():
        returns = [float(row["last_100_mean"]) for row in sorted(group, key=lambda row: int(row["seed"]))]
        low, high = (number(x, returns[0]) for x in bootstrap_interval([returns], lambda scores: np.mean(scores[0])))
        singles = ", ".join(number(x, returns[0]) for x in returns)
        cells = [SPEED[case], name, f"{int(group[0]['steps']):,}", number(np.mean(returns), returns[0])]
        lines.append("| " + " | ".join([*cells, f"{low} to {high}", singles]) + " |")
    return lines


def play_at_random(env_id, steps=100_000, episodes=100):
    """Mean return of random actions, over that many episodes or steps, whichever is less; illegal ones are masked."""
    env = gym.make(env_id)
    env.action_space.seed(0)
    returns, taken = [], 0
    while len(returns) < episodes and taken < steps:
        _, info = env.reset(seed=len(returns))
        returns.append(0.0)
        ended = False
        while not ended:
            mask = {"mask": info["action_mask"]} if "action_mask" in info else {}
            _, reward, terminated, truncated, info = env.step(env.action_space.sample(**mask))
            returns[-1] += float(reward)
            taken += 1
            ended = terminated or truncated
    return {"env_id": env_id, "mean_return": f"{statistics.fmean(returns):.4g}", "episodes": len(returns)}


def write_random():
    sys.path.insert(0, str(ROOT))  # for benchmark.memory_envs
    suites = [name for name in SUITES if name != "atari"]  # whose protocol gym.make does not follow
    tasks = dict.fromkeys(row["env_id"] for name in suites for row in read_csv(RESULTS / f"{name}.csv"))
    rows = [play_at_random(env_id) | {"versions": VERSIONS} for env_id in tasks]
    write_rows(RESULTS / "random.csv", ["env_id", "mean_return", "episodes", "versions"], rows)


def read_suite(name):
    """{(env_id, script, flags, steps): rows of different runs}, in the order of published.csv (-v5 as -v4 there)."""
    rows = read_csv(RESULTS / f"{name}.csv")
    order = [row["env_id"] for row in read_csv(ROOT / "benchmark" / "published.csv")]
    order += [env_id.replace("-v4", "-v5") for env_id in order] + [row["env_id"] for row in rows]
    rows.sort(key=lambda row: order.index(row["env_id"]))
    for row in rows:
        row.setdefault("defaults", "")  # of a file from before there was that column
        row["settings"] = re.sub(r" ?--total-timesteps=\d+", "", row["flags"]).strip()
    groups = group_by(rows, "env_id", "script", "settings", "global_step")
    for key, group in groups.items():
        if len(group) != len({(row["exp_name"], row["seed"]) for row in group}):
            raise SystemExit(f"results/{name}.csv has a seed twice for {', '.join(key)}")
        first = BEFORE | read_defaults().get(group[0]["defaults"], {})
        if any(differ(row, first) or bool(row["defaults"]) != bool(group[0]["defaults"]) for row in group):
            raise SystemExit(f"results/{name}.csv mixes different defaults for {', '.join(key)}: delete the older rows")
    return groups


def number(value, unit):
    """Text of a figure, with the digits that a figure of the size of `unit` has."""
    return f"{float(value):,.{0 if abs(unit) >= 500 else 1 if abs(unit) >= 2 else 2}f}"


def suite_table(name):
    """Markdown: a suite beside published figures, and, where these are known, its interquartile mean."""
    published = {(row["env_id"], row["column"]): row for row in read_csv(ROOT / "benchmark" / "published.csv")}
    random = {row["env_id"]: float(row["mean_return"]) for row in read_csv(RESULTS / "random.csv")}
    suite = read_suite(name)
    headers = {"cleanrl": "CleanRL", "highest": "highest PPO found", "trpo": "TRPO"}
    headers = {
        column: text for column, text in headers.items() if any((task[0], column) in published for task in suite)
    }
    evaluated = any(row["evaluation"] for rows in suite.values() for row in rows)
    lines = [f"{SUITES[name]}."]
    columns = ["task", "steps", "last 100 episodes", "95% interval", "runs", *["evaluated"] * evaluated]
    columns += headers.values()
    lines += ["", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    scores, names = [], []
    for (env_id, script, settings, steps), rows in suite.items():
        values = np.array([float(row["last_100_mean"]) for row in rows])
        low, high = bootstrap_interval([values], np.mean) if len(values) > 1 else (np.nan, np.nan)
        evaluations = [float(row["evaluation"]) for row in rows if row["evaluation"]]
        unit = np.abs(values).max()
        task = re.sub(".*[:/]", "", env_id)
        if not name.startswith("mujoco") or settings:
            task += f", `{script}.py{' ' * bool(settings)}{settings}`"
        if (episodes := min(int(row["episodes"]) for row in rows)) < 100:
            task += f" (of {episodes} episodes)"
        if differ(rows[0], defaults_of(script, env_id)):
            task += f" (defaults of commit {rows[0]['commit']})"
        cells = [task, f"{int(steps):,}", number(values.mean(), unit)]
        cells += [f"{number(low, unit)} to {number(high, unit)}" if len(values) > 1 else "", str(len(values))]
        if evaluated:
            cells += [number(np.mean(evaluations), unit) if len(evaluations) == len(values) else ""]
        for column in headers:
            row = published.get((env_id, column))
            cells.append(f"{number(row['mean_return'], unit)}{row['mark']}" if row else "")
            if row and not 0.95 < int(steps) / int(row["steps"]) < 1.05:  # one has had more than the other
                cells[-1] += f" at {int(row['steps']):,}"
        lines.append("| " + " | ".join(cells) + " |")
        whole_run = 0.95 < int(steps) / float(published.get((env_id, "highest"), {"steps": "inf"})["steps"]) < 1.05
        if not settings and whole_run and env_id in random and not differ(rows[0], defaults_of(script, env_id)):
            highest = float(published[env_id, "highest"]["mean_return"])
            scores.append((values - random[env_id]) / (highest - random[env_id]))
            names.append(task)
    if name == "mujoco" and scores:
        low, high = bootstrap_interval(scores, interquartile_mean, 2000)
        means = [score.mean() for score in scores]
        text = "On a scale from random actions (0) to the highest PPO figure found (1), our mean over tasks is"
        text += f" {np.mean(means):.2f}. The lowest task is {names[np.argmin(means)]} with {min(means):.2f}. The"
        text += f" interquartile mean uses the middle half of all runs. It is {interquartile_mean(scores):.2f}"
        lines += ["", f"{text} (95%: {low:.2f} to {high:.2f})."]
    rows = [row for rows in suite.values() for row in rows]
    versions = ", ".join(dict.fromkeys(row["versions"] for row in rows))
    lines += ["", f"Measured with {versions}; single runs: benchmark/results/{name}.csv."]
    if (PICTURES / f"{name}.png").exists():
        lines += ["", f"![Learning curves: {name}](pictures/{name}.png)", ""]
        lines += [f"The same over wall time: [{name}_time.png](pictures/{name}_time.png)."]
    return lines + [""]


def mean_and_band(runs, grid):
    """The mean over runs (x, y) at each x of the grid, and its 95% bootstrap interval. A run that ended earlier keeps
    its last value."""
    values = np.array([np.interp(grid, *run.T) for run in runs])
    draws = np.random.default_rng(0).integers(len(runs), size=(1000, len(runs)))
    return values.mean(0), np.percentile(values[draws].mean(1), [2.5, 97.5], axis=0)


def draw_curves(name):
    """docs/pictures/NAME.png and NAME_time.png: for each task and setting the mean over seeds with its 95% interval."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    published = {(row["env_id"], row["column"]): row for row in read_csv(ROOT / "benchmark" / "published.csv")}
    suite = read_suite(name)
    order = list(dict.fromkeys(env_id for env_id, *_ in suite))
    key = itemgetter("script", "env_id", "exp_name", "flags", "seed")
    runs = {key(row) for rows in suite.values() for row in rows}
    points = [point for point in read_csv(RESULTS / f"{name}_curves.csv") if key(point) in runs]
    tasks = group_by(points, "env_id")
    order = [env_id for env_id in order if (env_id,) in tasks]
    if not order:
        return
    columns = min(3, len(order))
    height = -(-len(order) // columns)
    for x, unit, scale, suffix in (("global_step", "steps (thousands)", 1e3, ""), ("seconds", "minutes", 60, "_time")):
        size = max(5, 11 * columns / 3), 2.9 * height + 0.6
        figure, axes = plt.subplots(height, columns, figsize=size, squeeze=False, layout="constrained")
        legend = {}  # label -> line; a setting has one color in all panels
        for axis in axes.flat[len(order) :]:
            axis.axis("off")
        for axis, env_id in zip(axes.flat, order):
            settings, seeds = group_by(tasks[env_id,], "script", "flags"), set()
            for (script, flags), points in settings.items():
                others = [set(other.split()) for name, other in settings if name == script]
                own = [flag for flag in flags.split() if not all(flag in other for other in others)]
                runs = [
                    np.array([[float(p[x]) / scale, float(p["mean_return"])] for p in run])
                    for run in group_by(points, "seed", "exp_name").values()
                ]
                label = " ".join([f"{script}.py", *own])
                color = legend[label].get_color() if label in legend else f"C{len(legend)}"
                grid = np.linspace(max(run[0, 0] for run in runs), max(run[-1, 0] for run in runs), CURVE_POINTS)
                mean, band = mean_and_band(runs, grid)
                (legend[label],) = axis.plot(grid, mean, color=color, linewidth=2)
                axis.fill_between(grid, *band, color=color, alpha=0.2, linewidth=0)
                seeds.add(len(runs))
            for column, style, text in (("cleanrl", ":", "CleanRL"), ("highest", "--", "highest PPO found")):
                if row := published.get((env_id, column)):
                    height_of = float(row["mean_return"])
                    legend[text] = axis.axhline(height_of, color="0.4", linestyle=style, linewidth=1.2)
            count = " to ".join(map(str, sorted({min(seeds), max(seeds)})))
            axis.set_title(f"{re.sub('.*[:/]|popgym-', '', env_id)} ({count} run{'s' * (count != '1')})", fontsize=11)
            axis.set_xlim(left=0)
            axis.grid(alpha=0.25)
        for axis in axes[:, 0]:
            axis.set_ylabel("return, last 100 episodes")
        for axis in axes.flat[len(order) - columns : len(order)]:  # the lowest of each column
            axis.set_xlabel(unit)
        lines = sorted(legend.items(), key=lambda item: item[0] in ("CleanRL", "highest PPO found"))
        labels, lines = zip(*lines)
        figure.legend(lines, labels, loc="outside lower center", ncols=min(len(labels), columns), fontsize=10)
        figure.savefig(PICTURES / f"{name}{suffix}.png", dpi=200)
        plt.close(figure)


def headline():
    """Markdown: MuJoCo beside CleanRL and the highest PPO figure found, and speed beside others, for README."""
    published = {(row["env_id"], row["column"]): row for row in read_csv(ROOT / "benchmark" / "published.csv")}
    tuned = {env_id: rows for (env_id, _, settings, _), rows in read_suite("mujoco-tuned").items() if settings}
    columns = ["task, 1M steps", "ours, last 100 episodes", "95% interval", "runs", "own settings", "CleanRL"]
    columns += ["highest PPO found"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for (env_id, *_), rows in read_suite("mujoco").items():
        values = np.array([float(row["last_100_mean"]) for row in rows])
        low, high = bootstrap_interval([values], np.mean)
        unit = np.abs(values).max()
        cells, marks, means = [number(values.mean(), unit)], [""], [values.mean()]
        own = [float(row["last_100_mean"]) for row in tuned.get(env_id, [])]
        cells.append(number(np.mean(own), unit) if own else "")
        marks.append(f" ({len(own)} runs)" if own else "")
        means.append(np.mean(own) if own else -np.inf)
        for column in ("cleanrl", "highest"):
            row = published.get((env_id, column))
            cells.append(number(row["mean_return"], unit) if row else "")
            marks.append(row["mark"].replace("*", "\\*") if row else "")
            means.append(float(row["mean_return"]) if row else -np.inf)
        best = cells[np.argmax(means)]
        cells = [f"**{cell}**" if cell == best else cell for cell in cells]
        cells = [cell + mark for cell, mark in zip(cells, marks)]
        cells = [env_id, cells[0], f"{number(low, unit)} to {number(high, unit)}", len(rows), *cells[1:]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    others = ("SB3", "sb3-contrib", "CleanRL", "LeanRL")
    rows = [row for row in read_csv(RESULTS / "speed.csv") if row["case"] not in ("continuous-8-ranks", "rnn")]
    ratios = [float(row["ratio"]) for row in rows if row["contestant"] in others]
    text = (
        f"Speed at equal settings, one CPU thread: {min(ratios):.1f} to {max(ratios):.1f} times the steps per second of"
    )
    return [*lines, "", f"{text} CleanRL, LeanRL, SB3 and sb3-contrib (`benchmark/results/speed.csv`)."]


def results_page():
    """docs/results.md: all suites, speed, and what the settings of the speed table learn."""
    blocks = ["# Results", "", "Written by `python benchmark/report.py --publish readme`.", ""]
    blocks += ["- *Last 100 episodes* is the mean raw return of the last 100 training episodes, averaged over runs."]
    blocks += [
        "- *95% interval* is a bootstrap interval over runs. With few runs it is too narrow: with three, it goes from"
    ]
    blocks[-1] += " the lowest run to the highest."
    blocks += [
        "- *Evaluated* is the mean of ten episodes of the trained agent without exploration (Atari: sampled actions)."
    ]
    blocks += [
        "- Sources and protocols of published figures are in `benchmark/published.csv`. Figures that could only be"
    ]
    blocks[-1] += " read off plots are left out."
    blocks += [
        "- \\*: the source reports its best evaluation during training, not its last one. Some sources take the best"
    ]
    blocks[-1] += " of each seed and then the mean, others the best mean over seeds."
    blocks += ["- †: a single run, evaluated without exploration.", ""]
    first, *others = [name for name in SUITES if (RESULTS / f"{name}.csv").exists()]
    blocks += [*suite_table(first), *speed_table()]
    for name in others:
        blocks += suite_table(name)
    text = "**What the settings of the speed table learn**, measured with the scripts before they were rebuilt"
    text += " (`python benchmark/studies/learning.py`)."
    return "\n".join([*blocks, text, "", *learning_table(read_csv(RESULTS / "learning.csv")), ""])


def fill_page(page):
    """README with today's results between its markers."""
    start, end = (
        "<!-- results: written by `python benchmark/report.py --publish readme` -->\n",
        "<!-- end of results -->",
    )
    before, rest = page.split(start)
    return before + start + "\n".join(headline()) + "\n" + end + rest.split(end)[1]


def write_readme():
    """Tables and pictures of all suites."""
    for name in SUITES:
        if (RESULTS / f"{name}.csv").exists():
            draw_curves(name)
    (ROOT / "docs" / "results.md").write_text(results_page())
    readme = ROOT / "README.md"
    readme.write_text(fill_page(readme.read_text()))


@dataclasses.dataclass
class Args:
    runs: tyro.conf.Positional[tuple[Path, ...]] = ()  # run folders
    out: Path = Path("report")  # where tables and curves go
    publish: str | None = None  # write into the repository instead: a name in benchmark/results/, random, or readme


def write_report(run_dirs, folder):
    """Tables and curves of any runs, in a folder of the user's."""
    global RESULTS, PICTURES
    folder.mkdir(parents=True, exist_ok=True)
    RESULTS = PICTURES = folder
    for old in ("runs.csv", "runs_curves.csv"):
        (folder / old).unlink(missing_ok=True)
    write_csv("runs", run_dirs)
    (folder / "runs.md").write_text(settings_table(read_csv(folder / "runs.csv")) + "\n")
    draw_curves("runs")
    print(f"{folder}/runs.md, runs.csv; curves: runs.png over steps, runs_time.png over minutes")


def main():
    args = tyro.cli(Args, description=__doc__.split("\n")[0])
    if args.publish == "random":
        write_random()
    elif args.publish == "readme":
        write_readme()
    elif not args.runs:
        raise SystemExit("report.py: error: name run folders, as in: python benchmark/report.py runs/*")
    elif args.publish:
        write_csv(args.publish, args.runs)
    else:
        write_report(args.runs, args.out)


if __name__ == "__main__":
    try:
        main()
    except ModuleNotFoundError as error:
        message = f"report.py: error: {error}: python -m pip install -r benchmark/requirements.txt"
        raise SystemExit(message) from None
