"""Training speed beside other implementations: whole processes, at equal settings, in turn on one machine.

    python -m pip install -r benchmark/requirements.txt
    python benchmark/speed.py rnn --repeats 3        # ppo_rnn.py and sb3-contrib's RecurrentPPO
    python benchmark/speed.py discrete continuous    # SB3's PPO

Every contestant trains twice, briefly and longer, one thread each. The difference of the two is its speed without what
comes before the first step (imports, compilation); what is left is that start. Medians over the repeats, written to
benchmark/results/speed.csv. The machine should have nothing else to do.
"""

import argparse
import csv
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import distributions

from report import RESULTS, ROOT

FIELDS = ["case", "contestant", "steps_per_second", "start_seconds", "steps_per_second_1m", "ratio", "repeats"]
FIELDS += ["single_runs", "versions"]
PACKAGES = ("torch", "gymnasium", "mujoco", "stable-baselines3", "sb3-contrib")

SB3 = """
import sys; sys.path.insert(0, {root!r})
import gymnasium, torch
import benchmark.memory_envs
from stable_baselines3.common.env_util import make_vec_env
from {package} import {algorithm}
torch.set_num_threads(1)
envs = make_vec_env(lambda: gymnasium.make({env_id!r}), {envs})
{algorithm}({policy!r}, envs, device="cpu", **{settings}).learn({steps})
"""


def ours(script, **flags):
    """The command line of a script of this repository."""

    def command(steps, runs_dir):
        words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        fixed = [f"--total-timesteps={steps}", f"--runs-dir={runs_dir}", "--checkpoint-interval=1000"]
        return [sys.executable, str(ROOT / f"{script}.py"), *words, *fixed]

    return command


def sb3(package, algorithm, policy, env_id, envs, **settings):
    """The same for an algorithm of Stable-Baselines3 and its contributions, settings in its own terms."""

    def command(steps, runs_dir):
        names = {"package": package, "algorithm": algorithm, "policy": policy, "env_id": env_id, "envs": envs}
        return [sys.executable, "-c", SB3.format(root=str(ROOT), settings=settings, steps=steps, **names)]

    return command


def rnn_case(separate):
    """4 x 128 steps, LSTM of 128, 4 minibatches of 128 steps, 4 epochs; a memory for both or one each."""
    flags = {"num_envs": 4, "num_steps": 128, "num_minibatches": 4, "update_epochs": 4, "recompute_advantages": False}
    flags |= {"hidden_size": 128, "separate_critic_rnn": separate, "env_id": "benchmark.memory_envs:CartPoleNoVel-v1"}
    policy = {"lstm_hidden_size": 128, "enable_critic_lstm": separate, "shared_lstm": not separate}
    settings = {"n_steps": 128, "batch_size": 128, "n_epochs": 4, "policy_kwargs": policy}
    peer = sb3("sb3_contrib", "RecurrentPPO", "MlpLstmPolicy", "CartPoleNoVel-v1", 4, **settings)
    return {"sb3-contrib": (peer, 4096, 16384), "ppo_rnn": (ours("ppo_rnn", **flags), 8192, 106496)}


def mlp_case(script, env_id, envs, steps, minibatches, epochs):
    flags = {"env_id": env_id, "num_envs": envs, "num_steps": steps, "num_minibatches": minibatches}
    flags |= {"update_epochs": epochs, "recompute_advantages": False}
    settings = {"n_steps": steps, "batch_size": envs * steps // minibatches, "n_epochs": epochs}
    peer = sb3("stable_baselines3", "PPO", "MlpPolicy", env_id, envs, **settings)
    return {"SB3": (peer, 8192, 32768), script: (ours(script, **flags), 16384, 147456)}


# Contestants, peers first, with the numbers of steps that they train for.
CASES = {
    "rnn": rnn_case(separate=True),
    "rnn-shared": rnn_case(separate=False),
    "discrete": mlp_case("ppo_discrete", "CartPole-v1", 4, 128, 4, 4),
    "continuous": mlp_case("ppo_continuous", "HalfCheetah-v4", 8, 256, 32, 10),
}


def seconds(command):
    start = time.perf_counter()
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command} failed:\n{done.stderr[-2000:]}")
    return time.perf_counter() - start


def measure(case, repeats, runs_dir):
    """A CSV row for each contestant of a case."""
    singles = {name: [] for name in CASES[case]}
    for repeat in range(repeats):
        for name, (command, short, long) in CASES[case].items():
            brief, whole = (seconds(command(steps, runs_dir)) for steps in (short, long))
            speed = (long - short) / (whole - brief)
            singles[name].append((speed, brief - short / speed))
            print(f"{case} {repeat + 1}/{repeats} {name}: {speed:,.0f} steps/s, {singles[name][-1][1]:.1f} s to start")
    installed = {each.name.lower().replace("_", "-"): each.version for each in distributions()}
    packages = " ".join(f"{name} {installed[name]}" for name in PACKAGES if name in installed)
    peer = next(iter(singles))
    rows = []
    for name, runs in singles.items():
        speed, start = (statistics.median(column) for column in zip(*runs))
        ratio = statistics.median(mine[0] / other[0] for mine, other in zip(runs, singles[peer]))
        row = {"case": case, "contestant": name, "steps_per_second": f"{speed:.0f}", "start_seconds": f"{start:.1f}"}
        row |= {"steps_per_second_1m": f"{1e6 / (start + 1e6 / speed):.0f}", "ratio": f"{ratio:.2f}"}
        row |= {"repeats": repeats, "single_runs": " ".join(f"{speed:.0f}" for speed, _ in runs)}
        rows.append(row | {"versions": f"{platform.machine()} python {platform.python_version()} {packages}"})
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--runs-dir", default="runs")
    args = parser.parse_args()
    path = RESULTS / "speed.csv"
    rows = list(csv.DictReader(path.open())) if path.exists() else []
    for case in args.cases:
        new = measure(case, args.repeats, args.runs_dir)
        rows = [row for row in rows if row["case"] != case] + new
        for row in new:
            print("| " + " | ".join(str(row[field]) for field in FIELDS[:-1]) + " |")
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(sorted(rows, key=lambda row: row["case"]))


if __name__ == "__main__":
    main()
