"""Question: how many steps per second does variants/ppo_gpu_sim.py make beside rsl_rl, without a simulator?

    python benchmark/studies/speed_gpu_sim.py      # needs rsl_rl: pip install rsl-rl-lib
    OMP_NUM_THREADS=1 python benchmark/studies/speed_gpu_sim.py --num-envs 256 --iterations 5    # for a CPU thread

Answer (speed_gpu_sim.csv, the last command, three repeats): 12,680 on one CPU thread, 1.31 times rsl_rl's
9,650. The first command needs a GPU and has not been run.

Both sides have the same networks, batch, minibatches and epochs, and take turns. Ours is compiled and writes its
logs; rsl_rl is not compiled, which is its default, and writes none. The first iterations are not timed. The script
uses the GPU where there is one. Rows go to speed_gpu_sim.csv.
"""

import dataclasses
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmark/
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "variants"))

import gymnasium as gym
import ppo_gpu_sim as ppo
import torch
import tyro
from run_folder import installed_versions, machine, read_csv, write_rows

FIELDS = ["num_envs", "num_steps", "ours", "theirs", "ratio", "repeats", "threads", "versions", "hardware"]


@dataclasses.dataclass
class Args:
    num_envs: int = 4096  # environments
    iterations: int = 20  # that are timed, after three that are not
    repeats: int = 3  # turns of each side; the median counts
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


class FreeEnvs:
    """What a robot's simulator returns, from a store of random numbers. Notes when each iteration begins."""

    def __init__(self, num_envs, device, num_steps):
        self.num_envs, self.num_steps, self.steps, self.times = num_envs, num_steps, 0, []
        self.single_action_space = gym.spaces.Box(-float("inf"), float("inf"), (12,))
        self.obs = torch.randn(8, num_envs, 48, device=device)
        self.rewards = torch.randn(8, num_envs, device=device)
        self.ends = torch.rand(8, num_envs, device=device) < 0.01

    def reset(self, seed=None):
        return self.obs[0], {}

    def step(self, actions):
        if self.steps % self.num_steps == 0:
            if self.obs.is_cuda:
                torch.cuda.synchronize()
            self.times.append(time.perf_counter())
        self.steps += 1
        i = self.steps % 8
        return self.obs[i], self.rewards[i], self.ends[i], torch.zeros_like(self.ends[i]), {"final_obs": self.obs[i]}

    def steps_per_second(self):
        """Of the median iteration, without the first three and the one that is cut off at the end"""
        return self.num_envs * self.num_steps / statistics.median(b - a for a, b in pairwise(self.times[3:]))


def ours_without_simulator(args, runs_dir):
    settings = {"num_envs": args.num_envs, "env_id": "free", "runs_dir": runs_dir, "device": args.device}
    ppo_args = ppo.Args(**settings, total_timesteps=args.num_envs * 24 * (args.iterations + 4), checkpoint_interval=1e6)
    envs = FreeEnvs(args.num_envs, torch.device(args.device), ppo_args.num_steps)
    ppo.make_envs = lambda *_: envs
    ppo.train(ppo_args)
    return envs.steps_per_second()


def rsl_rl_without_simulator(args, _):
    from rsl_rl.algorithms import PPO
    from rsl_rl.models import MLPModel
    from rsl_rl.storage import RolloutStorage
    from tensordict import TensorDict

    envs, N, T = FreeEnvs(args.num_envs, torch.device(args.device), 24), args.num_envs, 24

    def group(obs):
        return TensorDict({"policy": obs}, batch_size=[N], device=args.device)

    obs, groups = group(envs.reset()[0]), {"actor": ["policy"], "critic": ["policy"]}
    normal = {"class_name": "rsl_rl.modules.distribution:GaussianDistribution"}
    networks = {"hidden_dims": [256, 256, 256], "activation": "elu", "obs_normalization": True}
    actor = MLPModel(obs, groups, "actor", 12, **networks, distribution_cfg=normal).to(args.device)
    critic = MLPModel(obs, groups, "critic", 1, **networks).to(args.device)
    storage = RolloutStorage("rl", N, T, obs, [12], args.device)
    learner = PPO(actor, critic, storage, device=args.device)
    for _ in range(args.iterations + 4):
        with torch.inference_mode():
            for _ in range(T):
                next_obs, rewards, terminations, truncations, _ = envs.step(learner.act(obs))
                obs = group(next_obs)
                ends = terminations | truncations
                learner.process_env_step(obs, rewards, ends, {"time_outs": truncations.float()})
            learner.compute_returns(obs)
        learner.update()
    return envs.steps_per_second()


def main():
    args = tyro.cli(Args, description=__doc__.split("\n")[0])
    sides = ours_without_simulator, rsl_rl_without_simulator
    with tempfile.TemporaryDirectory() as runs_dir:
        turns = [[measure(args, runs_dir) for measure in sides] for _ in range(args.repeats)]
    ours, theirs = (statistics.median(side) for side in zip(*turns))
    ratio = statistics.median(a / b for a, b in turns)
    print(f"{ours:,.0f} steps/s, theirs {theirs:,.0f}, ratio {ratio:.2f} (turns: {turns})")
    row = {"num_envs": args.num_envs, "num_steps": 24}
    row |= {"ours": round(ours), "theirs": round(theirs), "ratio": round(ratio, 2), "repeats": args.repeats}
    row |= {"threads": torch.get_num_threads(), "versions": installed_versions("torch", "rsl-rl-lib")}
    row |= {"hardware": machine()["hardware"]}
    path = Path(__file__).with_suffix(".csv")
    write_rows(path, FIELDS, [*read_csv(path), row])


if __name__ == "__main__":
    main()
