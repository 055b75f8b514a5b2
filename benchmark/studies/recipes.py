"""Question: what does a recipe change?

    python benchmark/studies/recipes.py                   # all that have a case below, three seeds: hours on a CPU
    python benchmark/studies/recipes.py gsde dual_clip    # these; a run with a row of this commit is not repeated
    python benchmark/studies/recipes.py --write           # Result lines of recipes/*.diff, and their table

Answer (recipes.csv): recipes/README.md has it, recipe by recipe. Three seeds show that a recipe learns, and
large effects. They do not show small ones: seeds of one setting of HalfCheetah differ by 2,500.

A run's figure is the mean raw return of its last 100 training episodes. The script as it is runs with the same flags.
"""

import dataclasses
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmark/

import numpy as np
import tyro
from run_folder import ROOT, machine, read_csv, write_rows
from speed import one_thread

TABLE = Path(__file__).with_suffix(".csv")
FIELDS = ["recipe", "script", "env_id", "seed", "flags", "steps", "last_100_mean", "versions", "commit", "hardware"]
# Recipe: the script, the flags of both runs, the flags of the recipe alone.
CASES = dict.fromkeys(
    ["squashed_gaussian", "beta_policy", "popart", "dual_clip", "time_limits_as_ends", "state_dependent_std"],
    ("ppo_continuous", "--env-id HalfCheetah-v4", ""),
)
CASES["gsde"] = ("ppo_continuous", "--env-id HalfCheetah-v4", "--sde-sample-freq 4")
CASES["layer_norm"] = ("ppo_continuous", "--env-id HalfCheetah-v4 --hidden-sizes 256 256", "")
CASES["sb3_clip_ranges"] = ("ppo_continuous", "--env-id HalfCheetah-v4", "--clip-range-vf 0.2 --anneal-clip")
CASES["symmetry_loss"] = ("ppo_continuous", "--env-id Walker2d-v5", "")
SPARSE = "--env-id benchmark.sparse_envs:DeepSea20-v0 --total-timesteps 100000 --no-norm-reward --norm-adv"
SPARSE += " --update-epochs 4 --ent-coef 0 --target-kl None"
CASES["rnd"] = ("ppo_discrete", SPARSE, "")


@dataclasses.dataclass
class Args:
    recipes: tyro.conf.Positional[tuple[str, ...]] = tuple(CASES)  # which ones
    seeds: int = 3  # runs of each, seeds 1, 2, ...
    jobs: int = 1  # runs at a time, one thread each
    write: bool = False  # train nothing, write the Result lines


def train(job, about):
    """A row: a whole training by a script with a recipe, or by the script as it is where recipe is ''. about: commit,
    versions and hardware"""
    recipe, script, flags, seed = job
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(ROOT / f"{script}.py", folder)
        if recipe:
            only = f"--include={script}.py"
            command = ["git", "apply", only, str(ROOT / "recipes" / f"{recipe}.diff")]
            subprocess.run(command, cwd=folder, check=True)
        command = [
            sys.executable,
            f"{folder}/{script}.py",
            *flags.split(),
            f"--seed={seed}",
            f"--runs-dir={folder}/runs",
        ]
        subprocess.run(command, cwd=ROOT, env=one_thread(), check=True, capture_output=True)
        (run_dir,) = Path(folder, "runs").iterdir()
        episodes = read_csv(run_dir / "episodes.csv")
        steps = int(episodes[-1]["global_step"])
    figure = np.mean([float(row["episodic_return"]) for row in episodes[-100:]])
    env_id, rest = re.fullmatch(r"--env-id (\S+) ?(.*)", flags).groups()
    row = {"recipe": recipe, "script": script, "env_id": env_id, "seed": seed, "flags": rest, "steps": steps}
    return row | {"last_100_mean": f"{figure:.6g}"} | about


def key(row):
    flags = f"--env-id {row['env_id']} {row['flags']}".strip()
    return row["recipe"], row["script"], flags, int(row["seed"]), row["commit"]


def sentence(recipe, rows):
    """The measured result of a recipe, as one sentence; None where rows are missing."""
    script, flags, own_flags = CASES[recipe]
    sides = (recipe, f"{flags} {own_flags}".strip()), ("", flags)
    found = [[row for row in rows if key(row)[:3] == (name, script, line)] for name, line in sides]
    commits = {row["commit"] for row in found[0]} & {row["commit"] for row in found[1]}
    # Like with like: both sides are of one commit, the last that has both.
    newest = [row["commit"] for row in rows if row["commit"] in commits][-1:]
    found = [[row for row in side if row["commit"] in newest] for side in found]
    if not all(found):
        return None

    def numbers(rows):
        values = [float(row["last_100_mean"]) for row in rows]
        style = ",.0f" if max(map(abs, values)) >= 10 else ".2f"
        texts = [f"{round(value, 2) + 0.0:{style}}" for value in [np.mean(values), *values]]  # + 0.0: never -0.00
        return f"{texts[0]} ({' '.join(texts[1:])})"

    first = found[0][0]
    task = first["env_id"].split(":")[-1]
    steps, seeds = round(int(first["steps"]), -4), len(found[0])
    head = f"{task}, {steps:,} steps, seeds 1 to {seeds}, mean of the last 100 returns: "
    measured = f" Measured with the script of commit {first['commit']}." if first["commit"] else ""
    return head + f"{numbers(found[0])}, without it {numbers(found[1])}.{measured}"


def write_results(rows):
    """The Result of every measured recipe. What a hand has written behind it stays."""
    for recipe in CASES:
        path = ROOT / "recipes" / f"{recipe}.diff"
        if (text := sentence(recipe, rows)) is None:
            print(f"{recipe}: {TABLE.name} has no commit with runs both with and without it; its Result stays")
            continue
        head, diff = re.split(r"(?=^diff --git )", path.read_text(), maxsplit=1, flags=re.M)
        rest, result = re.split(r"^Result: ", head.rstrip("\n"), maxsplit=1, flags=re.M)
        remark = " ".join(result.split())
        remark = re.sub(
            r"^.*?, without it .*?\)\. ?(Measured with the script of commit \S+ ?)?|^not measured.*", "", remark
        )
        words, lines = f"Result: {text} {remark}".split(), [""]
        for word in words:
            if len(lines[-1]) + len(word) >= 120:
                lines.append("")
            lines[-1] = f"{lines[-1]} {word}".strip()
        path.write_text(rest + "\n".join(lines) + "\n\n" + diff)
    subprocess.run([sys.executable, str(ROOT / "recipes" / "refresh.py"), "--table"], check=True)


def main():
    args = tyro.cli(Args, description=__doc__.split("\n")[0])
    rows = read_csv(TABLE)
    if args.write:
        return write_results(rows)
    done = {key(row) for row in rows}
    sides = [("", script, flags) for script, flags, _ in map(CASES.get, args.recipes)]
    sides += [(name, CASES[name][0], f"{CASES[name][1]} {CASES[name][2]}".strip()) for name in args.recipes]
    about = machine()
    about["commit"] = about["commit"].removesuffix("-dirty")  # rows of this study make it dirty
    jobs = [(*side, seed) for seed in range(1, args.seeds + 1) for side in dict.fromkeys(sides)]
    with ThreadPoolExecutor(args.jobs) as pool:
        for row in pool.map(partial(train, about=about), [job for job in jobs if (*job, about["commit"]) not in done]):
            rows.append(row)
            write_rows(TABLE, FIELDS, [{name: row[name] for name in FIELDS} for row in rows])
            print(row["recipe"] or row["script"], row["env_id"], row["seed"], row["last_100_mean"], flush=True)


if __name__ == "__main__":
    main()
