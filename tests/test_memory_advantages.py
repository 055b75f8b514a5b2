"""ppo_rnn.py: with a memory whose values are known, every advantage is zero."""

import json
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import RNN, scalars

pytestmark = RNN
GAMMA = 15 / 16


class Recall(gym.Env):
    """The first observation of an episode shows a number, the others nothing of it. The value of every state is a
    function of that number under any policy: the reward is V - gamma V, or V at a termination."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float64)

    def __init__(self, discrete=True, lengths=(3, 5, 2, 7), end="truncated", cell="lstm"):
        self.action_space = gym.spaces.Discrete(2) if discrete else gym.spaces.Box(-1, 1, (2,), np.float32)
        self.lengths, self.end, self.cell, self.episode = lengths, end, cell, -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.episode = seed % len(self.lengths)
        self.episode += 1
        self.steps = 0
        number = self.np_random.choice([-1, 1]) * self.np_random.uniform(0.3, 1)
        self.value = math.tanh(number) if self.cell == "gru" else math.tanh(math.tanh(number))
        return np.array([number, 1.0]), {}

    def step(self, action):
        self.steps += 1
        ended = self.steps == self.lengths[self.episode % len(self.lengths)]
        terminated, truncated = (ended and self.end in (end, "both") for end in ("terminated", "truncated"))
        reward = self.value if terminated else (1 - GAMMA) * self.value
        return np.array([self.np_random.uniform(-1, 1), 0.0]), reward, terminated, truncated, {}


gym.register("memory/Recall-v0", Recall)


def teach(agent):
    """Now the first unit of its memory keeps the first number of an episode, and the critic reads it: the true value of
    every state. All gates are shut or open for good, but for the one that lets the number in."""
    memory = agent.memory
    gates = [memory.cell.weight_ih.data, memory.cell.bias_ih.data]
    memory.cell.weight_hh.data.zero_()
    if memory.is_lstm:
        entry, keep, content, out = zip(*(x.chunk(4) for x in gates))
        entry[0].copy_(torch.tensor([0.0, 2e4])), entry[1].fill_(-1e4)  # open where the second number is 1
        keep[0].zero_(), keep[1].fill_(1e4)
        out[0].zero_(), out[1].fill_(1e4)
    else:
        reset, keep, content = zip(*(x.chunk(3) for x in gates))
        reset[0].zero_()
        keep[0].copy_(torch.tensor([0.0, -2e4])), keep[1].fill_(1e4)
    content[0].copy_(torch.tensor([1.0, 0.0])), content[1].zero_()
    agent.critic[0].weight.data.copy_(torch.eye(1, agent.args.memory_size)), agent.critic[0].bias.data.zero_()


@pytest.mark.parametrize("end", ["terminated", "truncated", "both"])
@pytest.mark.parametrize("discrete, cell", [(True, "lstm"), (False, "gru")])
def test_zero_advantage_probe(script, small_args, end, discrete, cell):
    """The values depend on what was seen at the episode's start only. Episodes end at every position of the rollout, in
    four environments that are out of step: every return is its value, in the first epoch and when recomputed."""
    settings = {"norm_obs": False, "norm_reward": False, "gamma": GAMMA, "num_steps": 6, "num_minibatches": 2}
    settings |= {"cell": cell, "hidden_sizes": (), "memory_size": 8, "learning_rate": 0.0}
    settings |= {"env_kwargs": json.dumps({"discrete": discrete, "cell": cell, "end": end})}
    agent, run_dir = script.train(small_args(env_id="memory/Recall-v0", total_timesteps=24, **settings))
    teach(agent)
    checkpoint = torch.load(run_dir / "checkpoint.pt") | {"agent": agent.state_dict()}
    torch.save(checkpoint, run_dir / "checkpoint.pt")
    script.train(small_args(env_id="memory/Recall-v0", total_timesteps=9 * 24, **settings), run_dir)
    logged = scalars(run_dir)
    errors = [loss for step, loss in logged["losses/value_loss"] if step > 24]
    assert len(errors) == 8 and max(errors) < 1e-14  # of 48 numbers: none is further from 0 than 1e-6
    assert all(share > 0.999999 for step, share in logged["losses/explained_variance"] if step > 24)
