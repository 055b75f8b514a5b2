"""Environments whose reward is found by exploring only, for recipes/rnd.diff.

python ppo_discrete.py --env-id benchmark.sparse_envs:DeepSea20-v0 --total-timesteps 300000
"""

import gymnasium as gym
import numpy as np


class DeepSea(gym.Env):
    """A square of size x size (Osband et al. 2019). Each step goes down a row, and left or right. A step right costs
    0.01 / size; the one that ends in the lower right corner, after a whole episode of steps right, gives 1.
    A random policy gets there once in 2**size episodes. Observed is the cell, one-hot, as in bsuite; the right action
    is the same in every cell."""

    def __init__(self, size):
        self.size = size
        self.observation_space = gym.spaces.Box(0, 1, (size * size,), np.float32)
        self.action_space = gym.spaces.Discrete(2)

    def observe(self):
        obs = np.zeros((self.size, self.size), np.float32)
        if self.row < self.size:  # below the last row there is nothing
            obs[self.row, self.column] = 1
        return obs.flatten()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.row = self.column = 0
        return self.observe(), {}

    def step(self, action):
        found = action == 1 and self.row == self.column == self.size - 1
        reward = float(found) - (0.01 / self.size if action == 1 else 0.0)
        self.row += 1
        self.column = min(max(self.column + (1 if action == 1 else -1), 0), self.size - 1)
        return self.observe(), reward, self.row == self.size, False, {}


for size in (10, 20):
    gym.register(f"DeepSea{size}-v0", DeepSea, kwargs={"size": size})
