"""Stable-Baselines3's PPO and sb3-contrib's TRPO on the suites of run.py, measured as our scripts are.

    python benchmark/peers.py --suite box2d               # PPO with its defaults and with RL Zoo's settings
    python benchmark/peers.py --suite mujoco --tasks Hopper-v4 --settings zoo --algorithms ppo trpo --seeds 4
    python benchmark/compare.py benchmark/results/peers.csv:sb3-ppo-zoo benchmark/results/box2d.csv:ppo_discrete

RL Zoo (rl_zoo3) makes the environments and the agent. `zoo` means its settings for the task, or for the nearest task
that it has; `defaults` means the library's defaults. Every run gets the budget of the suite. Figures are measured as
ours are: the mean raw return of the last 100 training episodes, and 10 episodes that the trained agent plays without
exploring. Each run adds a row to --out when it ends. The same command again makes only the runs that are missing.
"""

import argparse
import contextlib
import csv
import dataclasses
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Literal

import numpy as np
import rl_zoo3
import stable_baselines3
import torch
import tyro
import yaml
from rl_zoo3.exp_manager import ExperimentManager
from run_folder import FIELDS, ROOT, curve, falls, installed_versions, load_script, machine, read_csv
from suites import SUITES

MINIGRID = "MiniGrid-Empty-Random-5x5-v0"  # RL Zoo has one setting for MiniGrid; tasks differ in n_steps
NEAREST = {  # our task -> RL Zoo's
    "InvertedPendulum-v4": "InvertedPendulum-v2",
    "InvertedDoublePendulum-v4": "InvertedDoublePendulum-v2",
    "Reacher-v4": "Reacher-v2",
    "MiniGrid-Empty-8x8-v0": MINIGRID,
    "MiniGrid-DoorKey-6x6-v0": "MiniGrid-DoorKey-5x5-v0",
    "MiniGrid-MultiRoom-N2-S4-v0": "MiniGrid-MultiRoom-N4-S5-v0",
    "MiniGrid-MemoryS7-v0": MINIGRID,
}


@dataclasses.dataclass
class Args:  # the comments are what --help prints
    suite: Literal[tuple(SUITES)]  # which tasks
    tasks: tuple[str, ...] = ()  # only these environment ids; none given: all of the suite
    algorithms: tuple[Literal["ppo", "trpo"], ...] = ("ppo",)
    settings: tuple[Literal["defaults", "zoo"], ...] = ("defaults", "zoo")
    seeds: int = 3  # how many seeds of every task
    first_seed: int = 1  # the first of them
    total_timesteps: int | None = None  # environment steps of every run; None: what the suite says
    jobs: int = os.cpu_count()  # runs at once
    out: Path = ROOT / "benchmark" / "results" / "peers.csv"  # where the rows go


def without_wrapper(env_id):
    """MiniGrid's own id of a task in minigrid_envs.py; others as they are."""
    return env_id.removeprefix("Image/").removeprefix("OneHot/")


def hyperparameters(algorithm, settings, env_id):
    """RL Zoo's settings of a task, or the library's defaults. None where RL Zoo has no such task."""
    chosen = {"policy": "MlpPolicy"}
    if settings == "zoo":
        path = Path(rl_zoo3.__file__).parent / "hyperparams" / f"{algorithm}.yml"
        chosen = yaml.safe_load(path.read_text()).get(NEAREST.get(env_id, env_id))
    if chosen and "MiniGrid-" in env_id:
        # Floats: SB3 divides a grid of bytes by 255, and its rollout buffer stores their normalized values as bytes.
        wrappers = [chosen.get("env_wrapper"), {"gymnasium.wrappers.DtypeObservation": {"dtype": "float32"}}]
        chosen["env_wrapper"] = [x for x in wrappers if x]
    return chosen


def run(algorithm, settings, task, seed, budget, about):
    """Train once -> a row of figures, with the fields of report.py. about: commit, versions and hardware"""
    torch.set_num_threads(1)
    module, _, env_id = task.rpartition(":")
    if module:  # its import registers the task
        importlib.import_module(module)
    if settings == "zoo":  # RL Zoo wraps MiniGrid itself
        env_id = without_wrapper(env_id)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        settings_file = Path(folder, "settings.yml")
        chosen = hyperparameters(algorithm, settings, env_id) | {"n_timesteps": budget}
        settings_file.write_text(yaml.dump({env_id: chosen}))
        options = {"eval_freq": -1, "seed": seed, "verbose": 0, "log_interval": -1}
        with contextlib.redirect_stdout(nowhere):
            experiment = ExperimentManager(
                argparse.Namespace(), algorithm, env_id, folder, config=str(settings_file), device="cpu", **options
            )
            model, _ = experiment.setup_experiment()
            start = time.monotonic()
            experiment.learn(model)
            seconds = time.monotonic() - start
            if model.num_timesteps < budget:  # RL Zoo goes on after Ctrl-C
                raise RuntimeError("stopped")
            eval_env = experiment.create_envs(1, eval_env=True, no_log=True)
            stable_baselines3.common.vec_env.sync_envs_normalization(model.env, eval_env)
            eval_env.seed(seed)
            evaluation, _ = stable_baselines3.common.evaluation.evaluate_policy(model, eval_env, n_eval_episodes=10)
        episodes = []  # as rows of episodes.csv
        for monitor in Path(experiment.save_path).glob("*.monitor.csv"):
            length = 0
            for row in csv.DictReader(monitor.read_text().splitlines()[1:]):  # the first line is a comment
                length += int(row["l"])
                step = length * experiment.n_envs
                episodes.append({"global_step": step, "episodic_return": row["r"], "episodic_length": row["l"]})
        episodes.sort(key=lambda episode: episode["global_step"])
        return {
            "script": f"sb3-{algorithm}",
            "env_id": task,
            "exp_name": f"sb3-{algorithm}-{settings}",
            "seed": seed,
            "global_step": model.num_timesteps,
            "last_100_mean": f"{np.mean([float(x['episodic_return']) for x in episodes[-100:]]):.6g}",
            "evaluation": f"{evaluation:.6g}",
            "episodes": len(episodes),
            "falls": falls(task, "{}", episodes, model.num_timesteps),
            "seconds": f"{seconds:.0f}",
            "flags": json.dumps(chosen),
            "curve": " ".join(f"{mean:.4g}" for _, mean in curve(episodes, model.num_timesteps)),
            **about,
        }


def main(args):
    done = {  # run -> its budget
        (row["exp_name"], row["env_id"], int(row["seed"])): json.loads(row["flags"])["n_timesteps"]
        for row in read_csv(args.out)
    }
    jobs, tasks = [], [task for _, task, _ in SUITES[args.suite]]
    if unknown := set(args.tasks) - set(tasks):
        raise SystemExit(f"--tasks: there is no {', '.join(sorted(unknown))} among {', '.join(tasks)}")
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for script, task, flags in SUITES[args.suite]:
            if args.tasks and task not in args.tasks:
                continue
            budget = args.total_timesteps or load_script(script).parse_args(flags.split()).total_timesteps
            for algorithm in args.algorithms:
                for settings in args.settings:
                    name = f"sb3-{algorithm}-{settings}"
                    if not hyperparameters(algorithm, settings, without_wrapper(task.split(":")[-1])):
                        print(f"{name} {task}: RL Zoo has no settings")
                    elif (name, task, seed) not in done:
                        jobs.append((algorithm, settings, task, seed, budget))
                    elif done[name, task, seed] != budget:
                        raise SystemExit(f"{args.out} has {name} {task} with another budget: give another --out")
    jobs = list(dict.fromkeys(jobs))  # a task is in a suite twice where two of our scripts train it
    print(f"{len(jobs)} runs are missing", flush=True)
    spawn = multiprocessing.get_context("spawn")
    failed = 0
    packages = "torch", "gymnasium", "mujoco", "stable-baselines3", "sb3-contrib", "rl-zoo3"
    about = machine() | {"versions": installed_versions(*packages)}
    with ProcessPoolExecutor(args.jobs, spawn) as pool:
        futures = {pool.submit(run, *job, about): job for job in jobs}
        for number, future in enumerate(as_completed(futures), 1):
            try:
                row, is_new = future.result(), not args.out.exists()
            except Exception as error:  # the other runs go on
                print(f"failed: {futures[future]}: {error!r}", file=sys.stderr)
                failed += 1
                continue
            with open(args.out, "a", newline="") as file:
                writer = csv.DictWriter(file, FIELDS, restval="", lineterminator="\n")
                if is_new:
                    writer.writeheader()
                writer.writerow(row)
            name = f"{row['exp_name']} {row['env_id']} seed {row['seed']}"
            print(f"[{number}/{len(jobs)}] {name}: {row['last_100_mean']}, {row['seconds']} s", flush=True)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n")[0]))
