"""Stable-Baselines3's PPO, sb3-contrib's TRPO and CleanRL's Atari on the suites of run.py, measured as our scripts are.

    python benchmark/peers.py --suite box2d               # PPO with its defaults and with RL Zoo's settings
    python benchmark/peers.py --suite mujoco --tasks Hopper-v4 --settings zoo --algorithms ppo trpo --seeds 4
    python benchmark/peers.py --suite atari-short --seeds 1 --cleanrl PATH      # RL Zoo and CleanRL's ppo_atari.py
    python benchmark/compare.py benchmark/results/peers.csv:sb3-ppo-zoo benchmark/results/box2d.csv:ppo_discrete

RL Zoo (rl_zoo3) makes the environments and the agent. `zoo` means its settings for the task, or for the nearest task
that it has; `defaults` means the library's defaults. Every run gets the budget of the suite. Figures are measured as
ours are: the mean raw return of the last 100 training episodes, and 10 episodes that the trained agent plays without
exploring (Atari: with sampled actions). Each run adds a row to --out when it ends. The same command again makes only
the runs that are missing. CleanRL's script runs with its own defaults, from a checkout at PATH that is prepared as in
speed.py. It saves no agent to evaluate.
"""

import argparse
import contextlib
import csv
import dataclasses
import importlib
import json
import multiprocessing
import os
import subprocess
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
from speed import CLEANRL_ATARI, versions_of
from suites import SUITES
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

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
    cleanrl: Path | None = None  # a checkout of CleanRL, to run its ppo_atari.py on Atari's games
    total_timesteps: int | None = None  # environment steps of every run; None: what the suite says
    jobs: int = os.cpu_count()  # runs at once
    out: Path = ROOT / "benchmark" / "results" / "peers.csv"  # where the rows go


def without_wrapper(env_id):
    """MiniGrid's own id of a task in minigrid_envs.py; others as they are."""
    return env_id.removeprefix("Image/").removeprefix("OneHot/")


def atari_id(env_id):
    """The older id of an Atari game: each step is one frame, and wrappers skip frames. Other tasks as they are."""
    game = env_id.removeprefix("ALE/")
    return env_id if game == env_id else game.replace("-v5", "NoFrameskip-v4")


def hyperparameters(algorithm, settings, env_id):
    """RL Zoo's settings of a task, or the library's defaults, which have none for Atari. None where there are none."""
    is_atari = env_id.startswith("ALE/")
    chosen = None if is_atari else {"policy": "MlpPolicy"}
    if settings == "zoo":
        path = Path(rl_zoo3.__file__).parent / "hyperparams" / f"{algorithm}.yml"
        chosen = yaml.safe_load(path.read_text()).get("atari" if is_atari else NEAREST.get(env_id, env_id))
    if chosen and "MiniGrid-" in env_id:
        # Floats: SB3 divides a grid of bytes by 255, and its rollout buffer stores their normalized values as bytes.
        wrappers = [chosen.get("env_wrapper"), {"gymnasium.wrappers.DtypeObservation": {"dtype": "float32"}}]
        chosen["env_wrapper"] = [x for x in wrappers if x]
    return chosen


def figures(episodes, global_step):
    """Episodes, as rows of episodes.csv -> the fields of report.py that follow from them"""
    return {
        "global_step": global_step,
        "last_100_mean": f"{np.mean([float(x['episodic_return']) for x in episodes[-100:]]):.6g}",
        "episodes": len(episodes),
        "curve": " ".join(f"{mean:.4g}" for _, mean in curve(episodes, global_step)),
    }


def run_cleanrl(checkout, task, seed, budget, about):
    """Train with CleanRL's ppo_atari.py, in a process of its own -> a row of figures."""
    python = checkout / ".venv" / "bin" / "python"
    program = [python, "-c", CLEANRL_ATARI.format(checkout=str(checkout)), "--no-cuda", "--env-id", atari_id(task)]
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        command = [*program, f"--seed={seed}", f"--total-timesteps={budget}"]
        environ = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=folder, env=environ, stdout=subprocess.DEVNULL, check=True)
        seconds = time.monotonic() - start
        (run_dir,) = Path(folder, "runs").iterdir()
        events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()  # 0: all of them
    returns = events.Scalars("charts/episodic_return")  # raw, of whole games
    episodes = [{"global_step": event.step, "episodic_return": event.value} for event in returns]
    git = ["git", "-C", checkout, "describe", "--always"]
    commit = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    return {
        "script": "cleanrl",
        "env_id": task,
        "exp_name": "cleanrl",
        "seed": seed,
        "seconds": f"{seconds:.0f}",
        "flags": json.dumps({"n_timesteps": budget}),
        **figures(episodes, events.Scalars("charts/SPS")[-1].step),
        **about,
        "versions": f"{versions_of(python)} cleanrl {commit}",
    }


def run(algorithm, settings, task, seed, budget, about):
    """Train once -> a row of figures, with the fields of report.py. about: commit, versions and hardware"""
    torch.set_num_threads(1)
    module, _, env_id = task.rpartition(":")
    if module:  # its import registers the task
        importlib.import_module(module)
    if settings == "zoo":  # RL Zoo wraps MiniGrid itself
        env_id = without_wrapper(env_id)
    chosen = hyperparameters(algorithm, settings, env_id) | {"n_timesteps": budget}
    frames = 4 if env_id.startswith("ALE/") else 1  # of a step: the monitor counts frames
    env_id = atari_id(env_id)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        settings_file = Path(folder, "settings.yml")
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
            evaluation, _ = stable_baselines3.common.evaluation.evaluate_policy(
                model, eval_env, n_eval_episodes=10, deterministic=not task.startswith("ALE/")
            )
        episodes = []  # as rows of episodes.csv
        for monitor in Path(experiment.save_path).glob("*.monitor.csv"):
            length = 0
            for row in csv.DictReader(monitor.read_text().splitlines()[1:]):  # the first line is a comment
                length += int(row["l"]) // frames
                step = min(length * experiment.n_envs, model.num_timesteps)  # Atari's lengths include no-ops and FIRE
                episodes.append({"global_step": step, "episodic_return": row["r"], "episodic_length": row["l"]})
        episodes.sort(key=lambda episode: episode["global_step"])
        return {
            "script": f"sb3-{algorithm}",
            "env_id": task,
            "exp_name": f"sb3-{algorithm}-{settings}",
            "seed": seed,
            "evaluation": f"{evaluation:.6g}",
            "falls": falls(task, "{}", episodes, model.num_timesteps),
            "seconds": f"{seconds:.0f}",
            "flags": json.dumps(chosen),
            **figures(episodes, model.num_timesteps),
            **about,
        }


def main(args):
    done = {
        (row["exp_name"], row["env_id"], int(row["seed"]), json.loads(row["flags"])["n_timesteps"])
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
            if args.cleanrl and task.startswith("ALE/"):
                jobs.append(("cleanrl", run_cleanrl, (args.cleanrl.resolve(), task, seed, budget)))
            for algorithm in args.algorithms:
                for settings in args.settings:
                    name = f"sb3-{algorithm}-{settings}"
                    if not hyperparameters(algorithm, settings, without_wrapper(task.split(":")[-1])):
                        print(f"{name} {task}: no settings are known")
                    else:
                        jobs.append((name, run, (algorithm, settings, task, seed, budget)))
    jobs = list(dict.fromkeys(jobs))  # a task is in a suite twice where two of our scripts train it
    jobs = [(name, function, words) for name, function, words in jobs if (name, *words[-3:]) not in done]
    print(f"{len(jobs)} runs are missing", flush=True)
    spawn = multiprocessing.get_context("spawn")
    failed = 0
    packages = "torch", "gymnasium", "mujoco", "stable-baselines3", "sb3-contrib", "rl-zoo3", "ale-py", "minigrid"
    about = machine() | {"versions": installed_versions(*packages)}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as cleanup:
        pool = ProcessPoolExecutor(args.jobs, spawn)
        cleanup.callback(pool.shutdown, cancel_futures=True)  # after Ctrl-C no run begins
        futures = {pool.submit(function, *words, about): words for _, function, words in jobs}
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
