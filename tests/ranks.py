"""What test_ranks.py starts under torchrun: trains, and leaves what this rank saw and had in OUT/rank-R.pt.

torchrun --nproc-per-node 2 tests/ranks.py SCRIPT OUT FLAGS
"""

import importlib
import os
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
MEMBERS = []  # all environments of this process


class Recorded(gym.Env):
    """Random observations and rewards, other ones for every seed, until a time limit. It keeps all of them."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def __init__(self, discrete):
        self.action_space = gym.spaces.Discrete(2) if discrete else gym.spaces.Box(-1, 1, (1,))
        self.first_seed, self.obs, self.actions, self.rewards, self.ends = None, [], [], [], []
        MEMBERS.append(self)

    def observe(self):
        self.current = self.np_random.normal([-1, 5, 100], [1, 3, 7]).astype(np.float32)
        return self.current

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.first_seed = self.first_seed or seed
        if self.ends:
            self.ends[-1] = True
        return self.observe(), {}

    def step(self, action):
        self.obs.append(self.current)  # what the policy saw
        self.actions.append(np.array(action))
        self.rewards.append(float(np.float32(self.np_random.normal(2, 3))))
        self.ends.append(False)
        return self.observe(), self.rewards[-1], False, False, {}


for name, discrete in (("box", False), ("discrete", True)):
    gym.register(f"{name}/Recorded-v0", Recorded, kwargs={"discrete": discrete}, max_episode_steps=16)


def main():
    name, out, *flags = sys.argv[1:]
    script = importlib.import_module(name)
    agents, record = [], {"averaged": [], "kls": [], "weights": [], "minibatches": []}

    def spy(owner, name, note):
        """Let note(result, *arguments) see what a function returns."""
        original = getattr(owner, name)

        def spied(*arguments):
            result = original(*arguments)
            note(result, *arguments)
            return result

        setattr(owner, name, spied)

    def note_loss(result, *_):  # one call for a minibatch
        record["kls"].append(float(result[1]["approx_kl"]))

    def average_over_ranks(x):  # in place
        own = x.clone()
        record["averaged"].append((own, original(x).clone()))
        return x

    def note_iteration(*_):  # the first call behind every update
        (agent,) = agents
        if record["minibatches"][-1:] == [len(record["kls"])]:
            return
        record["weights"].append({name: parameter.detach().clone() for name, parameter in agent.named_parameters()})
        record["minibatches"].append(len(record["kls"]))

    spy(script.Agent, "__init__", lambda _, agent, *__: agents.append(agent))
    spy(script, "ppo_loss", note_loss)
    spy(script, "gather_from_ranks", note_iteration)
    original, script.average_over_ranks = script.average_over_ranks, average_over_ranks
    agent, run_dir = script.train(script.parse_args(flags))
    record |= {"agent": agent.state_dict(), "has_folder": run_dir is not None}
    record["actions"] = np.array([x.actions for x in MEMBERS])
    record["members"] = [(x.first_seed, np.array(x.obs), np.array(x.rewards), np.array(x.ends)) for x in MEMBERS]
    torch.save(record, Path(out) / f"rank-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
