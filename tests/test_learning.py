"""Environments with a known best return are learned."""

import gymnasium as gym
import numpy as np
import pytest
from conftest import RNN


@pytest.mark.parametrize("script", ["ppo_continuous", "ppo_discrete"], indirect=True)
def test_learns_the_target(script, small_args):
    """The best return is 0, and the policy must find what each observation wants, through both normalisations."""
    args = small_args(total_timesteps=4096, num_envs=16, update_epochs=8, learning_rate=5e-3, seed=9)
    _, run_dir = script.train(args)
    assert script.evaluate(script.load_agent(run_dir), args, 50).mean() > -0.02


@pytest.mark.parametrize(
    "script, env_id, enough",
    [
        ("ppo_continuous", "InvertedPendulum-v4", 900),  # of 1,000; at random about 6
        ("ppo_discrete", "CartPole-v1", 475),  # of 500; at random about 22
    ],
    indirect=["script"],
)
def test_learns_to_balance_a_pole(script, small_args, env_id, enough):
    """A real simulator: almost to the time limit at the end. (Each of the seeds 1 to 6 gets there.)"""
    settings = {"total_timesteps": 40_000, "num_envs": 8, "num_steps": 64, "update_epochs": 6, "learning_rate": 2e-3}
    args = small_args(env_id=env_id, **settings)
    agent, _ = script.train(args)
    assert script.evaluate(agent, args, 5).mean() > enough


class Cue(gym.Env):
    """The first observation says which action is right in the last of four steps."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, discrete=True):
        self.discrete = discrete
        self.action_space = gym.spaces.Discrete(2) if discrete else gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue, self.steps = int(self.np_random.integers(2)), 0
        return np.array([2 * self.cue - 1, 0], np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.steps += 1
        reward, last = 0.0, self.steps == 4
        if last:
            error = abs(action - self.cue) if self.discrete else abs(action[0] - (self.cue - 0.5))
            reward = 1.0 - float(error)
        return np.array([0, self.steps / 4], np.float32), reward, last, False, {}


gym.register("memory/Cue-v0", Cue)
gym.register("memory/BoxCue-v0", Cue, kwargs={"discrete": False})


@RNN
@pytest.mark.parametrize("env_id, enough", [("memory/Cue-v0", 0.99), ("memory/BoxCue-v0", 0.9)])
def test_learns_to_remember(script, small_args, env_id, enough):
    """Evaluation with the trained memory gets (nearly) all there is; a policy without memory cannot get more than half
    (Discrete) or 0.5 (Box, always 0)."""
    sizes = {"num_envs": 16, "num_minibatches": 2, "update_epochs": 6, "memory_size": 16, "total_timesteps": 256 * 30}
    args = small_args(env_id=env_id, learning_rate=1e-2, **sizes)
    _, run_dir = script.train(args)
    assert script.evaluate(script.load_agent(run_dir), args, 50).mean() > enough
