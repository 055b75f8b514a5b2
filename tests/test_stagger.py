"""--stagger-envs: first episodes of different lengths."""

import gymnasium as gym
import numpy as np
import pytest
from conftest import rows


class Limited(gym.Env):
    """A reward of 1 in every step, and no end but that of a time limit."""

    observation_space = action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 1.0, False, False, {}


gym.register("box/Limited-v0", Limited, max_episode_steps=40)
gym.register("box/Unlimited-v0", Limited)


@pytest.mark.parametrize("script", ["ppo_continuous"], indirect=True)
def test_stagger_envs(script, small_args):
    """Four environments whose episodes only end at a limit of 40 steps: the second begins at its step 10, the third at
    20, the fourth at 30. Whole episodes end one after the other, and only those are logged, from their first step on.
    Without staggering all end together."""
    args = {"env_id": "box/Limited-v0", "num_envs": 4, "num_steps": 15, "total_timesteps": 4 * 90}
    for stagger_envs, ends in (True, [40, 50, 60, 70, 80, 90]), (False, [40] * 4 + [80] * 4):
        _, run_dir = script.train(small_args(stagger_envs=stagger_envs, **args))
        table = rows(run_dir)[1:]
        assert [int(row[0]) for row in table] == [4 * end for end in ends]
        assert {(row[1], row[2]) for row in table} == {("40", "40")}


@pytest.mark.parametrize("script", ["ppo_continuous"], indirect=True)
def test_a_time_limit_that_is_not_registered(script, small_args, capsys):
    """A line says how to name it."""
    args = {"env_id": "box/Unlimited-v0", "stagger_envs": True, "num_envs": 4, "num_steps": 15, "total_timesteps": 360}
    script.train(small_args(**args))
    assert """add --env-kwargs '{"max_episode_steps": 1000}'""" in capsys.readouterr().out
    _, run_dir = script.train(small_args(**args, env_kwargs='{"max_episode_steps": 40}'))
    assert [int(row[0]) for row in rows(run_dir)[1:]] == [4 * end for end in (40, 50, 60, 70, 80, 90)]
    assert "--env-kwargs" not in capsys.readouterr().out
