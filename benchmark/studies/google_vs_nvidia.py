"""Question: does Google's PPO update learn Brax's ant as well as NVIDIA's?

    python benchmark/studies/google_vs_nvidia.py                     # the original size, 30M steps a run: for a GPU
    python benchmark/studies/google_vs_nvidia.py --small             # 512,000 steps, 60 runs: 3 hours on a CPU core
    python benchmark/studies/google_vs_nvidia.py --small --report    # only the tables, from the CSV
    python benchmark/studies/google_vs_nvidia.py --small --seeds 5 --updates google+stored google+normalised google+gae

Answer (google_vs_nvidia_small.csv): at the small size it does not. NVIDIA's ends at 1,152, Google's at 880 (20
seeds each). The last command gives Google's update one of NVIDIA's three differences at a time: with normalised
advantages it reaches 1,294, with stored values 898, with GAE 877. Stored values have 20 seeds, the other two have 5.
The original size has not been run.

The design is that of the published comparison, which found no difference: twenty seeds, eleven evaluations. This one
adds intervals and tests. NVIDIA's update is in it twice, because the comparison's prose (nvidia) and its formula
(google+stored: Brax's advantages, of stored values) differ. A run that has a row in the CSV is skipped, so the study
can be stopped and started again. An evaluation is the mean return of the first episode of each evaluation environment,
with sampled actions. The original divides all rewards of 1,000 steps by the number of episodes that ended in them; its
figures are in tests/golden.json, seed001_results.
"""

import copy
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmark/
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "variants"))

import numpy as np
import ppo_gpu_sim as ppo
import tyro
from report import mean_interval, table
from run_folder import ROOT, installed_versions, machine, read_csv, write_rows
from scipy.stats import mannwhitneyu, ttest_ind

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
FULL = {"total_timesteps": 30_000_000, "eval_episodes": 2048}  # the rest are the defaults of --update
SMALL = {"num_envs": 256, "num_steps": 20, "num_minibatches": 8, "total_timesteps": 512_000, "eval_episodes": 32}
SMALL |= {"compile": False}  # it would not earn back the time that compiling takes
UPDATES = {"google": ppo.GOOGLE, "nvidia": ppo.NVIDIA}
# Google's update with one of NVIDIA's three differences. The first is the formula printed as NVIDIA's.
UPDATES["google+stored"] = ppo.GOOGLE | {"recompute_targets": False}
UPDATES["google+normalised"] = ppo.GOOGLE | {"norm_adv": "minibatch"}
UPDATES["google+gae"] = ppo.GOOGLE | {"advantages": "gae"}
FIELDS = ["update", "seed", "steps", "mean_returns", "versions", "hardware"]  # steps, returns: those of 11 evaluations


@dataclasses.dataclass
class Args:
    small: bool = False  # the reduced size
    seeds: int = 20  # runs of each update, seeds 1, 2, ...
    updates: tuple[Literal[tuple(UPDATES)], ...] = ("google", "nvidia", "google+stored")  # what is trained
    runs_dir: str = "runs/google_vs_nvidia"  # where run folders are made
    device: str = "auto"  # as in ppo_gpu_sim.py
    report: bool = False  # train nothing


def train_all(args, settings, path):
    """Train what has no row in the CSV yet, and add it."""
    envs, make_envs, agent_class, run_class = {}, ppo.make_envs, ppo.Agent, ppo.Run

    def make_once(args, num_envs, device):  # JAX compiles the simulator once, not for every run
        if num_envs not in envs:
            envs[num_envs] = make_envs(args, num_envs, device)
        return copy.copy(envs[num_envs])  # with its own state: training and evaluation may be of one size

    def evaluate(agent, path, step):
        """Add a row to evaluations.csv."""
        device = ppo.start_device(agent.args)[0]
        eval_envs = make_once(agent.args, agent.args.eval_episodes, device)
        returns = ppo.evaluate(agent.to(device), eval_envs, agent.args.seed, agent.args.eval_deterministic)
        write_rows(
            path,
            ["global_step", "mean_return"],
            [*read_csv(path), {"global_step": step, "mean_return": f"{returns.mean():.2f}"}],
        )

    class Run(run_class):
        """Evaluates the new agent, and ten times during the run."""

        def __init__(self, *arguments):
            super().__init__(*arguments)
            runs.append(self)

        def save(self, agent, optimizer, force):  # after every iteration
            super().save(agent, optimizer, force)
            batch_size = self.args.num_envs * self.args.num_steps
            if self.global_step // batch_size * 10 % (self.total_steps // batch_size) < 10:
                evaluate(agent, self.dir / "evaluations.csv", self.global_step)

    class Agent(agent_class):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            evaluate(self, runs[-1].dir / "evaluations.csv", 0)

    ppo.make_envs, ppo.Run, ppo.Agent, runs = make_once, Run, Agent, []
    about = {"versions": installed_versions("torch", "jax", "brax"), "hardware": machine()["hardware"]}
    given = {"env_id": "brax/ant", "device": args.device, "eval_deterministic": False, "runs_dir": args.runs_dir}
    for seed in range(1, args.seeds + 1):
        for update in args.updates:
            rows = read_csv(path)
            if (update, str(seed)) in {(row["update"], row["seed"]) for row in rows}:
                continue
            settings_of_run = UPDATES[update] | settings | given | {"exp_name": update, "seed": seed}
            evaluations = read_csv(ppo.train(ppo.Args(**settings_of_run))[1] / "evaluations.csv")
            steps, returns = ([row[name] for row in evaluations] for name in ("global_step", "mean_return"))
            row = {"update": update, "seed": seed, "steps": " ".join(steps), "mean_returns": " ".join(returns)}
            write_rows(path, FIELDS, [*rows, row | about])


def table_of_evaluations(rows):
    """Markdown: an evaluation a line, mean and 95% interval of each update, tests of what differs from Google's; the
    original."""
    original = json.loads((ROOT / "tests" / "golden.json").read_text())["cases"]
    original = next(case["inputs"] for case in original if case["id"] == "seed001_results")
    columns = ["evaluation", "step", "Google", "NVIDIA", "Welch p", "Mann-Whitney p", "NVIDIA as printed", "Welch p"]
    columns += ["Mann-Whitney p", "original: Google", "NVIDIA", "Welch p"]
    lines = []
    for i in range(11):
        here = {update: scores_of(rows, update, i) for update in Args.updates}
        there = {update: np.array(original[update])[:, i] for update in ("google", "nvidia")}
        step = int(rows[0]["steps"].split()[i])
        cells = [i, f"{step:,}"]
        for update in here:
            low, high = mean_interval(here[update])
            cells.append(f"{here[update].mean():,.0f} ({low:,.0f} to {high:,.0f})")
            if update != "google":
                cells.append(f"{ttest_ind(here['google'], here[update], equal_var=False).pvalue:.2g}")
                cells.append(f"{mannwhitneyu(here['google'], here[update]).pvalue:.2g}")
        cells += [f"{there[update].mean():,.0f} ± {there[update].std(ddof=1):,.0f}" for update in there]
        cells.append(f"{ttest_ind(*there.values(), equal_var=False).pvalue:.2g}")
        lines.append(cells)
    return "\n".join(table(columns, lines))


def table_of_differences(rows):
    """Markdown: a kind of update a line, mean and 95% interval at four evaluations."""
    lines = []
    for update in dict.fromkeys(row["update"] for row in rows):
        cells = [update, len(scores_of(rows, update, 0))]
        for i in (1, 3, 6, 10):
            scores = scores_of(rows, update, i)
            low, high = mean_interval(scores)
            cells.append(f"{scores.mean():,.0f} ({low:,.0f} to {high:,.0f})")
        lines.append(cells)
    return "\n".join(table(["update", "seeds", "evaluation 1", "3", "6", "10"], lines))


def scores_of(rows, update, evaluation):
    return np.array([float(row["mean_returns"].split()[evaluation]) for row in rows if row["update"] == update])


def main():
    args = tyro.cli(Args, description=__doc__.split("\n")[0])
    size = "small" if args.small else "full"
    path = Path(__file__).with_name(f"google_vs_nvidia_{size}.csv")
    if not args.report:
        train_all(args, SMALL if args.small else FULL, path)
    rows = read_csv(path)
    if not rows:
        raise SystemExit(f"google_vs_nvidia.py: error: {path} has no runs")
    if set(Args.updates) <= {row["update"] for row in rows}:
        print(table_of_evaluations(rows), end="\n\n")
    print(table_of_differences(rows))


if __name__ == "__main__":
    main()
