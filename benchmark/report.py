"""Run folders -> tables and learning curves.

    python benchmark/report.py runs/*                        # report/: any runs, scripts and settings side by side
    python benchmark/report.py runs/A* runs/B* --out DIR     # the same in DIR/
    python benchmark/report.py runs/* --publish mujoco       # into benchmark/results/mujoco.csv
    python benchmark/report.py --publish readme              # README.md, docs/: tables beside published figures, curves

Without --publish nothing in the repository changes.

A run's figure is the mean raw return of its last 100 training episodes (the policy explores), as CleanRL reports it.
Runs that benchmark/run.py made have another one, the mean of episodes that the trained agent plays without exploring
(Atari: with sampled actions).
Intervals are bootstrap intervals of 95% over seeds. `--publish SUITE` takes only that suite's tasks from the folders,
and only runs whose --exp-name is the script's (for mujoco-tuned: `tuned`). A row names only the flags that differed
from the defaults of its day. When defaults change, delete the older rows: they would count as runs with the new ones.
"""

import dataclasses
import re
import statistics
import sys
from pathlib import Path
from typing import Literal

import numpy as np
import suites
import tyro
from run_folder import (
    CURVE_POINTS,
    FIELDS,
    ROOT,
    curve,
    is_finished,
    read_args,
    read_csv,
    summarise,
    write_rows,
)

RESULTS = ROOT / "benchmark" / "results"
PICTURES = ROOT / "docs" / "pictures"
SUITES = ("mujoco", "mujoco-tuned", "mujoco-v5", "breadth", "long", "atari", "atari-short", "memory")  # docs/results.md
PUBLISHABLE = (*(name for name in SUITES if name != "breadth"), *suites.BREADTH)
PEERS = {"sb3-ppo-defaults": "SB3, its defaults", "sb3-ppo-zoo": "SB3, RL Zoo's settings"}  # of results/peers.csv
PEERS |= {"sb3-trpo-zoo": "TRPO, RL Zoo's settings", "cleanrl": "CleanRL's ppo_atari.py"}
SPEED = {
    "continuous-1": "`ppo_continuous.py`, HalfCheetah-v4, 1 x 2048, CleanRL's settings",
    "continuous-8": "`ppo_continuous.py`, HalfCheetah-v4, 8 x 256, CleanRL's settings",
    "defaults": "`ppo_continuous.py`, HalfCheetah-v4, its defaults",
    "discrete": "`ppo_discrete.py`, CartPole-v1, 4 x 128, CleanRL's settings",
    "discrete-64": "`ppo_discrete.py`, CartPole-v1, 64 x 128, CleanRL's settings, minibatches of 2,048",
    "atari-8": "`ppo_atari.py`, ALE/Breakout-v5, 8 x 128, on a GPU",
    "atari-128": "`ppo_atari.py`, ALE/Breakout-v5, 128 x 128, on a GPU",
    "atari-cpu": "`ppo_atari.py`, ALE/Breakout-v5, 8 x 128, on a CPU",
    "rnn": "`ppo_rnn.py`, CartPole without velocities, 4 x 128, default LSTMs of 128 (here one, sb3-contrib: two)",
    "rnn-shared": "the same, one LSTM in both",
}


def group_by(rows, *fields):
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[field] for field in fields), []).append(row)
    return groups


def mean_return(rows, field="last_100_mean"):
    return statistics.fmean(float(row[field]) for row in rows)


def number(value, unit):
    """Text of a figure, with the digits that a figure of the size of `unit` has."""
    digits = 0 if abs(unit) >= 500 else 1 if abs(unit) >= 2 else 2
    return f"{round(float(value), digits) + 0.0:,.{digits}f}"  # + 0.0: no -0.0


def short(env_id):
    """The name of a task in tables and pictures. OneHot/ stays: there our observations are not the task's own."""
    return re.sub(".*:|ALE/|Image/|dm_control/", "", env_id)


def table(columns, rows):
    """Markdown, as lines."""
    lines = ["| " + " | ".join(map(str, cells)) + " |" for cells in (columns, *rows)]
    return [lines[0], "|---" * len(columns) + "|", *lines[1:]]


# ---------------------------------------------------------------------------------------------------- run folders
def in_order(rows):
    return sorted(rows, key=lambda row: (row["env_id"], row["script"], row["exp_name"], row["flags"], int(row["seed"])))


def summarise_all(run_dirs, suite=""):
    """[(run_dir, row as read from a CSV)] of the finished runs among some folders; of this suite, if one is given. And
    whether a folder could not be read. Says why the others are left out. SystemExit where no run remains."""
    tasks = {(script, env_id) for script, env_id, _ in suites.SUITES.get(suite, [])}
    found, damaged = [], False
    run_dirs = dict.fromkeys(path.resolve() for path in run_dirs)  # a folder named twice counts once
    for run_dir in sorted(run_dirs, key=lambda path: path.name.rpartition("__")[2]):  # by the time in its name
        if run_dir.is_file() or run_dir.name == "logs":  # runs/* has these too, of run.py and tune.py
            continue
        try:
            args = read_args(run_dir) if (run_dir / "args.json").is_file() else {}
            if tasks and args and (args["script"], args.get("env_id")) not in tasks:
                continue
            if not args:
                reason = "it is not the folder of a run"
            elif "env_id" not in args:
                reason = "runs of ppo_rlhf.py have no episodes"
            elif re.fullmatch("tune-[0-9a-f]{8}", args["exp_name"]):
                reason = "a trial of tune.py"
            elif suite and args["exp_name"] != (wanted := "tuned" if suite == "mujoco-tuned" else args["script"]):
                reason = f"its --exp-name is {args['exp_name']}; --publish {suite} takes only {wanted}"
            elif row := summarise(run_dir):
                if row["evaluation"] != "" or not suite:
                    found.append((run_dir, {name: str(value) for name, value in row.items()}))
                    continue
                reason = "it has no evaluation, which run.py makes when a run ends"
            else:
                reason = "no episode has ended" if is_finished(run_dir) else "it has not finished"
        except Exception as error:  # whatever a damaged file gives; the other runs count
            reason = f"it cannot be read: {error!r}"
            damaged = True
        print(f"left out: {run_dir}: {reason}", file=sys.stderr)
    # A seed that ran twice is one seed: the later folder counts.
    settings = ("script", "env_id", "exp_name", "flags", "global_step", "seed")
    latest = {tuple(row[name] for name in settings): run_dir for run_dir, row in found}.values()
    for run_dir, _ in found:
        if run_dir not in latest:
            print(f"left out: {run_dir}: another folder has the same settings and seed", file=sys.stderr)
    found = [(run_dir, row) for run_dir, row in found if run_dir in latest]
    versions = {}
    for run_dir, row in found:
        copy = run_dir / f"{row['script']}.py"
        key = (row["env_id"], row["exp_name"], row["flags"], row["global_step"], copy.name)
        versions.setdefault(key, set()).add(copy.read_text())
    for (env_id, name, *_, script), texts in versions.items():
        if len(texts) > 1:
            print(f"warning: {env_id}, {name}: its runs come from {len(texts)} versions of {script}", file=sys.stderr)
    if not found:
        of_suite = " of this suite" if tasks else ""
        raise SystemExit(f"report.py: error: none of these is the folder of a finished run{of_suite}; runs/* are meant")
    return found, damaged


def label_curves(rows, titles):
    """Gives each row its label: its title, and the flags that tell settings of one title and task apart."""
    flags = {}
    for row, title in zip(rows, titles):
        row["words"] = re.split(r" (?=--)", row["flags"])  # a value may contain spaces
        flags.setdefault((row["env_id"], title), []).append(set(row["words"]))
    for row, title in zip(rows, titles):
        common = set.intersection(*flags[row["env_id"], title])
        row["label"] = " ".join([title, *(flag for flag in row["words"] if flag not in common)]).strip()


def write_csv(name, run_dirs):
    """Rows of earlier runs stay, but for those of the same script, task, exp_name, flags and seed. -> whether a run
    folder could not be read"""
    found, damaged = summarise_all(run_dirs, name)
    new = [row for _, row in found]
    rows = {}
    for row in read_csv(RESULTS / f"{name}.csv") + new:
        rows[tuple(row[field] for field in ("script", "env_id", "exp_name", "flags", "seed"))] = row
    rows = in_order(rows.values())
    by_task(rows, f"{name}.csv")
    write_rows(RESULTS / f"{name}.csv", FIELDS, rows)
    commits = ", ".join(dict.fromkeys(row["commit"] or "unknown" for row in rows))
    print(f"{len(new)} runs -> {RESULTS / name}.csv. It has {len(rows)} now, of commits {commits}")
    print("\n".join(settings_table(rows)))
    return damaged


def write_report(run_dirs, folder):
    """Tables and curves of any runs, in a folder of the user's. -> whether a run folder could not be read"""
    found, damaged = summarise_all(run_dirs)
    rows = [row for _, row in found]
    write_rows(folder / "runs.csv", FIELDS, in_order(rows))
    lines = settings_table(in_order(rows))
    (folder / "runs.md").write_text("\n".join(lines) + "\n")
    label_curves(rows, [" ".join(dict.fromkeys((row["exp_name"], row["script"]))) for row in rows])
    runs = []
    for run_dir, row in found:
        steps, means = np.array(curve(read_csv(run_dir / "episodes.csv"), int(row["global_step"]), 50)).T
        runs.append((row, steps / 1e3, means))
    draw_curves(runs, folder / "runs.png")
    print("\n".join(lines))
    print(f"{folder}/runs.md, runs.csv, runs.png")
    return damaged


def settings_table(rows):
    """Markdown: mean, standard deviation and the single seeds, for each task, setting and name."""
    lines = []
    by = ("exp_name", "script", "env_id", "flags", "global_step")
    for (name, script, env_id, flags, _), group in group_by(rows, *by).items():
        values = [float(row["last_100_mean"]) for row in group]
        unit = max(map(abs, values))
        cells = [name, script, env_id, flags or "defaults", len(values), number(statistics.fmean(values), unit)]
        cells += [number(statistics.stdev(values), unit) if len(values) > 1 else ""]
        cells += [", ".join(number(value, unit) for value in values)]
        lines.append(cells)
    columns = ["name", "script", "task", "flags", "seeds", "mean", "standard deviation", "single runs"]
    return table(columns, lines)


# ------------------------------------------------------------------------------------------------------ statistics
def mean_interval(values):
    """95% interval of the mean over seeds, which are drawn anew with replacement: (seeds, ...) -> (2, ...)"""
    draws = np.random.default_rng(0).integers(len(values), size=(10_000, len(values)))
    return np.percentile(np.asarray(values)[draws].mean(1), [2.5, 97.5], axis=0)


def mean_and_band(runs, grid):
    """The mean over runs (x, y) at each x of the grid, and its 95% bootstrap interval. A run that ended earlier keeps
    its last value."""
    values = np.array([np.interp(grid, x, y) for x, y in runs])
    return values.mean(0), mean_interval(values)


# ---------------------------------------------------------------------------------------------------------- tables
def read_published():
    """{(env_id, column): row} of figures that others have published"""
    return {(row["env_id"], row["column"]): row for row in read_csv(ROOT / "benchmark" / "published.csv")}


def equal(steps, others):
    """Whether two numbers of steps differ by less than a twentieth."""
    return 0.95 < int(steps) / int(others) < 1.05


def read_peers(suite):
    """{exp_name: {env_id: rows}} of peers.py's runs on a suite's tasks. Only those with our steps (within 5%), and with
    as many seeds as ours or at least three"""
    ours = by_env_id(suite)
    peers = {name: {} for name in PEERS}
    for (name, env_id), rows in group_by(read_csv(RESULTS / "peers.csv"), "exp_name", "env_id").items():
        rows = [row for row in rows if env_id in ours and equal(row["global_step"], ours[env_id][0]["global_step"])]
        if len(rows) != len({row["seed"] for row in rows}):
            raise SystemExit(f"results/peers.csv has a seed twice for {name} {env_id}")
        wanted = min(3, len(ours.get(env_id, [])))
        if name in PEERS and rows and len(rows) >= wanted:  # no table has a column for TRPO with its defaults
            peers[name][env_id] = rows
        elif name in PEERS and rows:
            print(f"left out of {suite}: {name} {env_id} has {len(rows)} of {wanted} seeds", file=sys.stderr)
    return peers


def peer_cell(rows, unit):
    """The mean of the last 100 training episodes and, in brackets, of the evaluations; then the number of seeds"""
    evaluated = [row for row in rows if row["evaluation"]]
    evaluated = f"{number(mean_return(evaluated, 'evaluation'), unit)}; " if evaluated else ""
    return f"{number(mean_return(rows), unit)} ({evaluated}{len(rows)})"


def files_of(name):
    """The CSV files of a suite."""
    names = suites.BREADTH if name == "breadth" else [name]
    return [RESULTS / f"{name}.csv" for name in names if (RESULTS / f"{name}.csv").exists()]


def by_task(rows, source):
    """{(env_id, script): rows, one per seed}. SystemExit where a task has several settings: tables show one."""
    groups = group_by(rows, "env_id", "script")
    for (env_id, _), group in groups.items():
        if len({(row["exp_name"], row["flags"], row["global_step"]) for row in group}) > 1:
            text = "publish only the run folders of one, and delete the rows of the others"
            raise SystemExit(f"{source}: {env_id} would have several settings: {text}")
        if len(group) != len({row["seed"] for row in group}):
            raise SystemExit(f"{source} has a seed twice for {env_id}")
    return groups


def read_suite(name):
    """{(env_id, script): rows, one per seed}, in the order of published.csv, where -v5 counts as -v4."""
    rows = [row for path in files_of(name) for row in read_csv(path)]
    order = [env_id for env_id, _ in read_published()]
    order += [env_id.replace("-v4", "-v5") for env_id in order] + [row["env_id"] for row in rows]
    rows.sort(key=lambda row: order.index(row["env_id"]))
    return by_task(rows, f"results/{name}.csv")


def by_env_id(suite):
    """{env_id: rows} of a suite; of two scripts that train a task, the last"""
    return {env_id: rows for (env_id, _), rows in read_suite(suite).items()}


def settings_of(row):
    """Text: the flags of a run but --total-timesteps"""
    return re.sub(r" ?--total-timesteps=\d+", "", row["flags"]).strip()


def suite_table(name):
    """Markdown: a suite beside Stable-Baselines3 measured here and beside published figures."""
    published = read_published()
    suite = read_suite(name)
    if not suite:
        raise SystemExit(f"benchmark/results/ has no runs of {name}")
    headers = {"cleanrl": "CleanRL (published)", "highest": "highest PPO found", "trpo": "TRPO"}
    headers = {name: text for name, text in headers.items() if any((env_id, name) in published for env_id, *_ in suite)}
    peers = {peer: tasks for peer, tasks in read_peers(name).items() if tasks}
    columns = ["task", "steps", "last 100 episodes", "95% interval", "runs", "evaluated"]
    columns += ["steps/s"] * (name == "breadth")
    lines = []
    for (env_id, script), rows in suite.items():
        settings, steps = settings_of(rows[0]), rows[0]["global_step"]
        values = np.array([float(row["last_100_mean"]) for row in rows])
        low, high = mean_interval(values)
        unit = np.abs(values).max()
        task = short(env_id)
        if not name.startswith("mujoco") or settings:
            task += f", `{script}.py{' ' * bool(settings)}{settings}`"
        cells = [task, f"{int(steps):,}", number(values.mean(), unit)]
        cells += [f"{number(low, unit)} to {number(high, unit)}" if len(values) > 1 else "", len(values)]
        cells += [number(mean_return(rows, "evaluation"), unit)]
        if name == "breadth":
            cells.append(f"{statistics.median(int(steps) / float(row['seconds']) for row in rows):,.0f}")
        cells += [peer_cell(tasks[env_id], unit) if env_id in tasks else "" for tasks in peers.values()]
        for column in headers:
            row = published.get((env_id, column))
            cells.append(f"{number(row['mean_return'], unit)}{row['mark']}" if row else "")
            if row and not equal(steps, row["steps"]):
                cells[-1] += f" at {int(row['steps']):,}"
        lines.append(cells)
    lines = table([*columns, *(f"{PEERS[peer]} (evaluated; seeds)" for peer in peers), *headers.values()], lines)
    files = [path.name for path in files_of(name)] + ["peers.csv"] * bool(peers)
    files = ", ".join(f"benchmark/results/{file}" for file in files)
    return lines + ["", f"Single runs, with the versions of packages: {files}."]


def breadth_table():
    """Markdown: how many tasks of each suite are at or above Stable-Baselines3 measured here, and published figures.
    SB3's defaults count only where ours are defaults too. Published evaluations without exploration (marks * and †) are
    compared with ours. Where the suite `long` has a task with the published number of steps, its runs count."""
    highest = {env_id: row for (env_id, column), row in read_published().items() if column == "highest"}
    lines, long = [], by_env_id("long")
    for name in suites.BREADTH:
        ours, peers = by_env_id(name), read_peers(name)
        counts = []
        for peer in list(PEERS)[:2]:
            tasks = [x for x in peers[peer] if peer == "sb3-ppo-zoo" or not settings_of(ours[x][0])]
            counts.append([mean_return(ours[x]) >= mean_return(peers[peer][x]) for x in tasks])
        counts.append([])
        for env_id in ours.keys() & highest.keys():
            field = "evaluation" if highest[env_id]["mark"] in ("*", "†") else "last_100_mean"
            rows = long.get(env_id, ours[env_id])
            if not equal(rows[0]["global_step"], highest[env_id]["steps"]):
                rows = ours[env_id]
            counts[-1].append(mean_return(rows, field) >= float(highest[env_id]["mean_return"]))
        cells = [f"{sum(count)} of {len(count)}" if count else "" for count in counts]
        cells[-1] = cells[-1] or "none known"
        if ours:
            lines.append([name, len(ours), *cells])
    columns = ["suite", "tasks", *list(PEERS.values())[:2], "highest PPO found"]
    return table(columns, lines)


def speed_table():
    """Markdown: steps per second of this repository, and how many times those of others that is."""
    rows = {(row["case"], row["contestant"]): row for row in read_csv(RESULTS / "speed.csv")}
    others = {"SB3, sb3-contrib": ("SB3", "sb3-contrib")}
    others |= {name: (name,) for name in ("CleanRL", "LeanRL", "SBX", "rejax")}
    columns = ["script, task, environments x steps", "steps/s", "startup", "first startup on a machine"]
    columns += [*others, "of simulators alone"]
    lines = []
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
        lines.append([*cells, f"{float(alone['ratio']):.0%}" if alone else ""])
    where = "All figures, with the versions of packages where they were recorded: benchmark/results/speed.csv."
    return [*table(columns, lines), "", where]


def headline():
    """Markdown: MuJoCo, the suites beyond it, and speed, beside others' figures, for README."""
    published = read_published()
    suite = by_env_id("mujoco")
    zoo = read_peers("mujoco")["sb3-ppo-zoo"]
    columns = ["task (1M steps)", "last 100 episodes", "95% interval", "runs", "evaluated"]
    columns += ["SB3, RL Zoo's settings (evaluated; seeds)", "CleanRL (published)", "highest PPO found"]
    lines = []
    for env_id, rows in suite.items():
        values = np.array([float(row["last_100_mean"]) for row in rows])
        low, high = mean_interval(values)
        unit = np.abs(values).max()
        cells = [number(values.mean(), unit), f"{number(low, unit)} to {number(high, unit)}", len(rows)]
        cells += [number(mean_return(rows, "evaluation"), unit)]
        cells += [peer_cell(zoo[env_id], unit) if env_id in zoo else ""]
        for column in ("cleanrl", "highest"):
            row = published.get((env_id, column))
            mark = row["mark"].replace("*", "\\*") if row else ""
            cells.append(number(row["mean_return"], unit) + mark if row else "")
        lines.append([env_id, *cells])
    cases = {"continuous-8": "HalfCheetah-v4, 8 x 256", "discrete": "CartPole-v1, 4 x 128"}
    speed = {(row["case"], row["contestant"]): row for row in read_csv(RESULTS / "speed.csv")}
    others = ["SB3", "CleanRL", "LeanRL", "SBX"]
    timings = []
    for case, title in cases.items():
        ours = speed.get((case, "ppo_continuous")) or speed[case, "ppo_discrete"]
        steps = [speed.get((case, name), {"steps_per_second": ""})["steps_per_second"] for name in others]
        timings.append([title, *(f"{int(x):,}" if x else "" for x in (ours["steps_per_second"], *steps))])
    text = "Environment steps per second on one CPU thread, at equal settings, startup not counted ([more]"
    text += "(docs/results.md#speed)). SBX and rejax use JAX."
    if rejax := speed.get(("discrete", "rejax")):
        text += f" rejax runs CartPole in JAX too, and reaches {int(rejax['steps_per_second']):,}."
    return [
        *table(columns, lines),
        "",
        "Beyond MuJoCo, each cell is the number of tasks on which our mean is at least the column's score, out of the "
        "tasks that have one. SB3's columns compare training scores. *SB3, its defaults* leaves out tasks for which we "
        "changed our own defaults. "
        "Published evaluations are compared with our evaluations. Some published scores took more steps, some fewer "
        "([all figures](docs/results.md#beyond-mujoco)).",
        "",
        *breadth_table(),
        "",
        text,
        "",
        *table(["task, environments x steps", "this repository", *others], timings),
    ]


# -------------------------------------------------------------------------------------------------------- pictures
def save_figure(figure, path):
    """SVG: text stays text, the same numbers give the same file, and decimals that nobody sees are cut off."""
    import matplotlib

    if path.suffix != ".svg":
        return figure.savefig(path, dpi=200)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "curves", "font.sans-serif": ["DejaVu Sans"]}):
        figure.savefig(path, metadata={"Date": None})
    text = re.sub(r">[^<]*<|(\d\d\.\d|\.\d\d)\d+", lambda found: found[1] or found[0], path.read_text())  # >labels<
    path.write_text(re.sub(r"\s+", " ", text).replace("> <", "><") + "\n")


# label: (column of published.csv, line style)
OTHERS = {"CleanRL (published)": ("cleanrl", ":"), "highest PPO found": ("highest", "--")}


def draw_curves(runs, path):
    """A panel for each task: the mean over seeds with its 95% interval, for each label. `runs` is [(row, x, y)]; x
    counts thousands of steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    published, tasks = read_published(), {}
    for row, x, y in runs:
        tasks.setdefault(row["env_id"], {}).setdefault(row["label"], []).append((x, y))
    columns = min(3 if len(tasks) < 13 else 5, len(tasks))
    height = -(-len(tasks) // columns)
    size = max(5, 11 * columns / 3), 2.9 * height + 0.6
    figure, axes = plt.subplots(height, columns, figsize=size, squeeze=False, layout="constrained")
    legend = {}  # label -> line; a setting has one color in all panels
    for axis in axes.flat[len(tasks) :]:
        axis.axis("off")
    for axis, (env_id, settings) in zip(axes.flat, tasks.items()):
        for label, curves in settings.items():
            color = legend[label].get_color() if label in legend else f"C{len(legend.keys() - {*OTHERS})}"
            points = max(len(x) for x, _ in curves)
            grid = np.linspace(max(x[0] for x, _ in curves), max(x[-1] for x, _ in curves), points)
            mean, band = mean_and_band(curves, grid)
            marker = "." if points == 1 else ""  # a run whose first episodes ended at its very end
            (legend[label],) = axis.plot(grid, mean, color=color, linewidth=2, marker=marker)
            axis.fill_between(grid, *band, color=color, alpha=0.2, linewidth=0)
        for text, (column, style) in OTHERS.items():
            row = published.get((env_id, column))
            if row and int(row["steps"]) <= 1e4 * grid[-1]:  # not from more than ten times our steps
                legend[text] = axis.axhline(float(row["mean_return"]), color="0.4", linestyle=style, linewidth=1.2)
        counts = sorted({len(curves) for curves in settings.values()})
        count = (" or " if len(counts) == 2 else " to ").join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        axis.set_title(f"{short(env_id).removeprefix('popgym-')} ({count} run{'s' * (count != '1')})", fontsize=10)
        axis.set_xlim(left=0)
        axis.locator_params(nbins=4)
        axis.grid(alpha=0.25)
    for axis in axes[:, 0]:
        axis.set_ylabel("return, last 100 episodes")
    for axis in axes.flat[len(tasks) - columns : len(tasks)]:  # the lowest of each column
        axis.set_xlabel("steps (thousands)")
    lines = sorted(legend.items(), key=lambda item: item[0] in OTHERS)
    labels, lines = zip(*lines)
    figure.legend(lines, labels, loc="outside lower center", ncols=min(len(labels), columns), fontsize=10)
    save_figure(figure, path)
    plt.close(figure)


def draw_suite(name):
    """docs/pictures/NAME.svg, from the last column of results/NAME.csv"""
    rows = [row | {"label": f"{row['script']}.py"} for group in read_suite(name).values() for row in group]
    for peer, tasks in read_peers(name).items():
        rows += [row | {"label": PEERS[peer]} for found in tasks.values() for row in found]
    runs = []
    for row in rows:
        means = np.array(row["curve"].split(), float)
        runs.append((row, np.linspace(0, int(row["global_step"]) / 1e3, CURVE_POINTS + 1)[-len(means) :], means))
    draw_curves(runs, PICTURES / f"{name}.svg")


# ----------------------------------------------------------------------------------------------------- repository
def fill_page(page, blocks):
    """A page with these lines between the markers of each block's name."""
    for name, lines in blocks.items():
        start = f"<!-- {name}: written by `python benchmark/report.py --publish readme` -->\n"
        end = f"<!-- end of {name} -->"
        before, rest = page.split(start)
        page = before + start + "\n".join(lines) + "\n" + end + rest.split(end)[1]
    return page


def make_pages():
    """{path: text} of README.md and docs/results.md with today's results."""
    blocks = {name: suite_table(name) for name in SUITES}
    blocks["speed"] = speed_table()
    blocks = {name: ["", *lines, ""] for name, lines in blocks.items()}
    pages = {ROOT / "README.md": {"results": headline()}, ROOT / "docs" / "results.md": blocks}
    return {path: fill_page(path.read_text(), blocks) for path, blocks in pages.items()}


def write_readme():
    """Tables and pictures of all suites."""
    for path, text in make_pages().items():
        path.write_text(text)
    for name in SUITES:
        draw_suite(name)


@dataclasses.dataclass
class Args:
    runs: tyro.conf.Positional[tuple[Path, ...]] = ()  # run folders
    out: Path = Path("report")  # where tables and curves go
    publish: Literal[(*PUBLISHABLE, "readme")] | None = None  # write this part of the repository instead of --out


def main():
    args = tyro.cli(Args, description=__doc__.split("\n")[0])
    if args.publish == "readme" and args.runs:
        raise SystemExit("report.py: error: --publish readme takes no run folders: first publish them in a suite")
    elif args.publish == "readme":
        write_readme()
    elif not args.runs:
        raise SystemExit("report.py: error: name run folders, as in: python benchmark/report.py runs/*")
    else:
        sys.exit(write_csv(args.publish, args.runs) if args.publish else write_report(args.runs, args.out))


if __name__ == "__main__":
    try:
        main()
    except ModuleNotFoundError as error:
        message = f"report.py: error: {error}: python -m pip install -r benchmark/requirements.txt"
        raise SystemExit(message) from None
