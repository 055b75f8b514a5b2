"""The same seed gives the same run, to the bit; environments and resumed runs have seeds of their own."""

import random
from typing import ClassVar

import gymnasium as gym
import numpy as np
import probes
import torch
from conftest import assert_same_learner, probe


def test_same_seed_same_run(script, small_args, run_dir):
    """Bit-equal to a run of the same seed, another one with another seed."""
    folders = [run_dir, *(script.train(small_args(seed=seed))[1] for seed in (1, 2))]
    checkpoints = [script.load_checkpoint(folder) for folder in folders]
    assert_same_learner(checkpoints[0], checkpoints[1])
    assert not torch.equal(*(checkpoints[i]["agent"]["critic.0.weight"] for i in (0, 2)))


class Seeds(probes.Target):
    """Remembers the seeds and the actions of all its copies; shows zeros."""

    seeds: ClassVar = []
    actions: ClassVar = []

    def reset(self, *, seed=None, options=None):
        self.seeds.extend([seed] * (seed is not None))
        return 0 * super().reset(seed=seed, options=options)[0], {}

    def step(self, action):
        self.actions.append(action)
        return 0 * self.target, *super().step(action)[1:]


probes.register("Seeds", Seeds)


def test_seeds_of_a_resumed_run(script, small_args):
    """Each environment gets another seed, and a resumed run gets new ones: its episodes are not those of the start. Nor
    is its noise: the same policy, which sees the same, does something else."""
    Seeds.seeds.clear(), Seeds.actions.clear()
    still = {"learning_rate": 1e-30, "anneal_lr": False, "total_timesteps": 64}
    if script.__name__ == "ppo_continuous":
        still["anneal_std"] = False
    _, run_dir = script.train(small_args(env_id=probe(script, "Seeds"), **still))
    args = script.load_args(run_dir)
    args.total_timesteps = 128
    script.train(args, run_dir)
    assert len(Seeds.seeds) == len(set(Seeds.seeds)) == 8
    assert len(Seeds.actions) == 128 and not np.array_equal(Seeds.actions[:64], Seeds.actions[64:])


class GlobalNumbers(gym.Env):
    """Observes what the global generators of numpy, Python and torch give."""

    observation_space = gym.spaces.Box(0, 1, (3,))

    def __init__(self, discrete):
        self.action_space = gym.spaces.Discrete(2) if discrete else gym.spaces.Box(-1, 1, (1,))

    def observe(self):
        return np.array([np.random.random(), random.random(), torch.rand(()).item()], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), {}


probes.register("GlobalNumbers", GlobalNumbers)


def test_every_environment_has_a_seed_of_its_own(script, small_args):
    """For each of the three generators."""
    envs = script.make_envs(small_args(env_id=probe(script, "GlobalNumbers")), 4)
    one, two, other = (envs.reset(seed=seed)[0].copy() for seed in (5, 5, 50))
    envs.close()
    assert one.shape == (4, 3) and len(np.unique(np.concatenate([one, other]))) == 24
    np.testing.assert_array_equal(one, two)


class Drawn(probes.Target):
    """Draws from every global generator while it is made, and remembers what."""

    drawn: ClassVar = []

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.drawn.append((np.random.random(), random.random(), torch.rand(()).item()))


probes.register("Drawn", Drawn)


def test_what_environments_draw_while_they_are_made(script, small_args):
    """Each environment something else, every run and every evaluation of a seed the same."""
    args, both = small_args(env_id=probe(script, "Drawn"), total_timesteps=64), []
    for _ in range(2):
        Drawn.drawn.clear()
        random.seed(), np.random.seed(), torch.seed()  # from the operating system
        agent, _ = script.train(args)
        random.seed(), np.random.seed(), torch.seed()
        script.evaluate(agent, args, 1)
        both.append(np.array(Drawn.drawn))
    np.testing.assert_array_equal(*both)
    assert len(np.unique(both[0][: args.num_envs])) == 3 * args.num_envs
