"""What test_ranks.py starts in each of two processes: it trains, and leaves what this rank has and did in
OUT/rank-R.pt."""

import importlib
import os
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

MEMBERS = []  # all environments of this process


class Numbered(gym.Env):
    """The n-th environment of a run, on whichever rank it is, shows the n-th sequence of random observations and
    rewards, whatever is done to it. It keeps its seed and the actions."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def __init__(self, discrete):
        self.action_space = gym.spaces.Discrete(2) if discrete else gym.spaces.Box(-1, 1, (1,))
        self.number = int(os.environ.get("RANK", 0)) * 4 + len(MEMBERS)  # 4 environments a rank
        self.rng, self.first_seed, self.actions = np.random.default_rng(self.number), None, []
        MEMBERS.append(self)

    def observe(self):
        return self.rng.normal([self.number, 5, 100], [1, 3, 7]).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        self.first_seed = self.first_seed or seed
        return self.observe(), {}

    def step(self, action):
        self.actions.append(np.array(action))
        return self.observe(), float(np.float32(self.rng.normal(self.number, 3))), False, False, {}


for name, discrete in (("box", False), ("discrete", True)):
    gym.register(f"{name}/Numbered-v0", Numbered, kwargs={"discrete": discrete}, max_episode_steps=16)


def train(name, out, flags):
    script = importlib.import_module(name)
    agent, run_dir = script.train(script.parse_args(flags))
    left = {"agent": agent.state_dict(), "has_folder": run_dir is not None}
    left |= {"seeds": [x.first_seed for x in MEMBERS], "actions": np.array([x.actions for x in MEMBERS])}
    torch.save(left, Path(out) / f"rank-{os.environ['RANK']}.pt")
