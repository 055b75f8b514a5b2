"""Actions of every type and shape: what the policy stores, and what reaches the environment."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import BOX, DISCRETE


@BOX
def test_stored_actions_are_not_clipped(script, small_args, minibatches):
    """The probe refuses an action outside its bounds; what the update sees reaches beyond them."""
    script.train(small_args(log_std_init=0.5))
    assert torch.cat([arguments[3] for arguments, _ in minibatches]).abs().max() > 1.5


class Half(gym.Env):
    """Actions of 16-bit numbers between 0.5 and 1, and none other."""

    observation_space, action_space = gym.spaces.Box(-9, 9, (1,), np.float32), gym.spaces.Box(0.5, 1, (2,), np.float16)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return np.zeros(1, np.float32), -1.0, True, False, {}


gym.register("box/Half-v0", Half)


@BOX
def test_half_actions(script, small_args):
    args = small_args(env_id="box/Half-v0")
    agent, _ = script.train(args)
    script.evaluate(agent, args, 1)


@BOX
def test_actions_in_units_of_their_bounds(script):
    """-1, 0 and 1 are the lower bound, the middle and the upper bound; beyond them an action is clipped. Where a bound
    is infinite, or as good as that, the action is passed on as it is, clipped at the finite one."""
    largest = np.finfo(np.float32).max
    low, high = [-1, 0, 2, -np.inf, -3, -largest], [1, 1000, 2.01, np.inf, np.inf, largest]
    space = gym.spaces.Box(np.array(low, np.float32), np.array(high, np.float32))
    agent = bounded_agent(script, space)
    for action, expected in [
        (-1, [-1, 0, 2, -1, -1, -1]),
        (0, [0, 500, 2.005, 0, 0, 0]),
        (1, [1, 1000, 2.01, 1, 1, 1]),
        (0.5, [0.5, 750, 2.0075, 0.5, 0.5, 0.5]),
        (-7, [-1, 0, 2, -7, -3, -7]),
        (7, [1, 1000, 2.01, 7, 7, 7]),
    ]:
        given = agent.to_env_action(torch.full((3, 6), float(action)))
        torch.testing.assert_close(given, torch.tensor([expected] * 3, dtype=torch.float32), rtol=1e-6, atol=1e-6)
        assert all(space.contains(row) for row in given.numpy())
    standard = bounded_agent(script, gym.spaces.Box(-1, 1, (6,), np.float32))
    actions = torch.randn(500, 6).clamp(-1, 1)
    assert torch.equal(standard.to_env_action(actions), actions)


def bounded_agent(script, space):
    bounds = {"action_low": space.low, "action_high": space.high}
    actions = [bounds] if script.__name__ == "ppo_rnn" else bounds.values()
    return script.Agent((1,), *actions, script.Args())


@DISCRETE
def test_discrete_that_does_not_start_at_zero(script, small_args):
    """The environment sees 5, 6, 7; a single action is a plain number, as env.step wants it."""

    class Start(gym.Env):
        observation_space, action_space = gym.spaces.Discrete(4), gym.spaces.Discrete(3, start=5)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return 0, {}

        def step(self, action):
            assert action in (5, 6, 7)
            return 1, float(action == 7), True, False, {}

    if "discrete/Start-v0" not in gym.registry:
        gym.register("discrete/Start-v0", Start)
    agent, run_dir = script.train(small_args(env_id="discrete/Start-v0", total_timesteps=1024, learning_rate=1e-2))
    obs = np.eye(4)[[0, 0]]
    for actor in (agent, script.load_agent(run_dir)):
        assert actor.predict(obs).tolist() == [7, 7] and {actor.predict(obs[0]): "can be a key"}[7]


class Switches(gym.Env):
    """Three switches (MultiBinary). The return of the only step is the number of those that are as observed."""

    observation_space = gym.spaces.Box(0, 1, (3,), np.float32)
    action_space = gym.spaces.MultiBinary(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.wanted = self.np_random.integers(0, 2, 3)
        return self.wanted.astype(np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return self.wanted.astype(np.float32), float((action == self.wanted).sum()), True, False, {}


gym.register("Switches-v0", Switches)


@pytest.mark.parametrize("script", ["ppo_discrete", "ppo_rnn"], indirect=True)
def test_multibinary_actions(script, small_args):
    """Each switch is a choice of two; it is learned, and the trained agent acts."""
    sizes = {"num_envs": 16, "num_steps": 16, "update_epochs": 8, "total_timesteps": 256 * 6}
    _, run_dir = script.train(small_args(env_id="Switches-v0", learning_rate=1e-2, anneal_lr=False, **sizes))
    assert script.evaluate(script.load_agent(run_dir), script.load_args(run_dir), 50).mean() > 2.2
