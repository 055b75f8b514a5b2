"""Question: does a change of a script leave every number as it was?

    python benchmark/studies/same_numbers.py 96e7618 0ead2c9 ppo_continuous --env-id Hopper-v4 --total-timesteps 40000

Trains the script of both commits with these flags, in eager mode. Compares the tensors of the last checkpoint (weights
and statistics) and all rows of episodes.csv but their seconds. The exit status is 1 if anything differs.

Answer for 96e7618 and 0ead2c9, which restructured the scripts: after 40,000 steps of HalfCheetah-v4, Hopper-v4,
InvertedPendulum-v4, CartPole-v1 and Taxi-v4 (which has action masks), nothing differs. After 20,000 steps ppo_rnn.py
differs by 6e-8 on benchmark.memory_envs:CartPoleNoVel-v1 and by 4e-6 on CartPole-v1, with equal episodes. Its recurrent
weights were renamed; these are listed, not compared.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def train(commit, script, flags):
    """-> the agent's tensors by name, and the rows of episodes.csv without their seconds"""
    with tempfile.TemporaryDirectory() as folder:
        tree, runs = Path(folder, "tree"), Path(folder, "runs")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, commit], cwd=ROOT, check=True)
        try:
            command = [sys.executable, f"{script}.py", *flags, "--no-compile", f"--runs-dir={runs}"]
            subprocess.run(command, cwd=tree, check=True, stdout=subprocess.DEVNULL)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
        (run_dir,) = runs.iterdir()
        agent = torch.load(run_dir / "checkpoint.pt", weights_only=True)["agent"]
        return agent, [row.rsplit(",", 1)[0] for row in (run_dir / "episodes.csv").read_text().splitlines()]


def main(before, after, script, *flags):
    (old, old_episodes), (new, new_episodes) = train(before, script, flags), train(after, script, flags)
    only_one = sorted(old.keys() ^ new.keys())
    differences = {  # .equal: inf - inf is NaN
        name: 0.0 if old[name].equal(new[name]) else (old[name].double() - new[name].double()).abs().max().item()
        for name in sorted(old.keys() & new.keys())
    }
    largest = max(differences, key=differences.get)
    print(f"{len(differences)} tensors, the largest difference is {differences[largest]:.3g} ({largest})")
    print(f"{len(old_episodes) - 1} and {len(new_episodes) - 1} episodes, equal: {old_episodes == new_episodes}")
    print(f"in one commit alone: {', '.join(only_one) or 'nothing'}")
    return int(differences[largest] > 0 or old_episodes != new_episodes or bool(only_one))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
