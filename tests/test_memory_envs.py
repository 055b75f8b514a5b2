"""benchmark/memory_envs.py: tasks without velocities."""

import gymnasium as gym
import numpy as np
import pytest

from benchmark import memory_envs


@pytest.mark.parametrize("name", ["CartPole", "Pendulum"])
def test_masked_velocities(name):
    """They read 0 in every observation, positions as they are; the time limit still truncates."""
    (original,) = (env_id for env_id in memory_envs.VELOCITIES if env_id.startswith(name))
    masked, plain = gym.make(original.replace("-", "NoVel-")), gym.make(original)
    (obs, _), (whole, _) = masked.reset(seed=0), plain.reset(seed=0)
    indices = memory_envs.VELOCITIES[original]
    moved, truncated = False, False
    plain.action_space.seed(0)
    for _ in range(plain.spec.max_episode_steps):
        assert not obs[indices].any() and obs.dtype == whole.dtype
        np.testing.assert_array_equal(np.delete(obs, indices), np.delete(whole, indices))
        moved |= whole[indices].any()
        action = plain.action_space.sample()
        obs, _, terminated, truncated, _ = masked.step(action)
        whole, *_ = plain.step(action)
        if terminated or truncated:
            break
    assert moved and (truncated or name == "CartPole")
