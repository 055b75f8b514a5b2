"""--stagger-envs: first episodes of different lengths."""

import gymnasium as gym
import numpy as np
import pytest
from conftest import rows


class Limited(gym.Env):
    """A reward of 1 in every step, and no end but that of a time limit."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (2,), np.float32), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 1.0, False, False, {}


gym.register("discrete/Limited-v0", Limited, max_episode_steps=200)


STAGGERED = [("ppo_continuous", False), ("ppo_continuous", True), ("ppo_discrete", False), ("ppo_rnn", False)]


@pytest.mark.parametrize("script, async_envs", STAGGERED, indirect=["script"])
def test_stagger_envs(script, small_args, async_envs):
    """Four environments whose episodes only end at a limit of 200 steps: the second begins at its step 50, the third at
    100, the fourth at 150. Whole episodes end one after the other, and only those are logged, from their first step
    on. Without staggering all end together."""
    env_id = "discrete/Limited-v0" if script.__name__ == "ppo_discrete" else "Pendulum-v1"
    args = {"env_id": env_id, "num_envs": 4, "num_steps": 50, "total_timesteps": 4 * 450, "async_envs": async_envs}
    for stagger_envs, ends in (True, [200, 250, 300, 350, 400, 450]), (False, [200] * 4 + [400] * 4):
        _, run_dir = script.train(small_args(stagger_envs=stagger_envs, **args))
        table = rows(run_dir)[1:]
        assert [int(row[0]) for row in table] == [4 * end for end in ends] and {row[2] for row in table} == {"200"}
        if env_id.startswith("discrete"):
            assert {row[1] for row in table} == {"200"}


def test_defaults_of_staggering(script):
    assert script.Args().stagger_envs == (script.__name__ == "ppo_continuous")
