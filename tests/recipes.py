"""What the tests of recipes/ share: scripts with recipes applied, small runs, agents, environments."""

import functools
import importlib.util
import math
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from conftest import ROOT, SMALL, Policy, rows
from probes import register

from benchmark import self_play_envs

FOLDERS = []  # removed when the tests end
TEN = SMALL | {"total_timesteps": 640}  # ten iterations


def copy_scripts(folder):
    """What recipes are applied to"""
    (folder / "variants").mkdir(parents=True)
    for pattern in ("ppo_*.py", "variants/ppo_*.py"):
        for path in ROOT.glob(pattern):
            shutil.copy(path, folder / path.relative_to(ROOT))


@functools.cache
def with_recipes(script, *names):
    """What `git apply recipes/NAME.diff` makes of a script, in a folder of its own, imported once."""
    if not names:
        return importlib.import_module(script)
    FOLDERS.append(tempfile.TemporaryDirectory())
    folder = Path(FOLDERS[-1].name)
    copy_scripts(folder)
    for name in names:
        subprocess.run(["git", "apply", str(ROOT / "recipes" / f"{name}.diff")], cwd=folder, check=True)
    (path,) = [*folder.glob(f"{script}.py"), *folder.glob(f"variants/{script}.py")]
    spec = importlib.util.spec_from_file_location("_".join([script, *names]), path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def quick_compile(monkeypatch):
    """torch.compile traces functions as ever, and Python runs what it has traced: no kernel is built, which takes ten
    seconds. What cannot be traced fails, and a number that became a constant stays one."""
    original = torch.compile

    def compile(function, fullgraph=False, dynamic=None, **_):
        return original(function, fullgraph=fullgraph, dynamic=dynamic, backend="eager")

    monkeypatch.setattr(torch, "compile", compile)


def flat(agent):
    return torch.cat([parameter.detach().flatten().clone() for parameter in agent.parameters()])


def episodes(run_dir):
    """episodes.csv without the clock"""
    return [row[:3] for row in rows(run_dir)]


def small(module, tmp_path, **changes):
    given = {"env_id": "box/Target-v0", "runs_dir": str(tmp_path / "runs"), "total_timesteps": 640}
    return module.Args(**SMALL | given | changes)


def make_agent(module, obs_size=3, low=(-1.0, -1.0), high=(1.0, 1.0), **args):
    torch.manual_seed(0)
    return module.Agent((obs_size,), np.array(low, np.float32), np.array(high, np.float32), module.Args(**args))


def shake(agent, scale=0.5):
    """Move all weights: the first policy is nearly the same in every state."""
    torch.manual_seed(1)
    for parameter in agent.parameters():
        parameter.data += scale * torch.randn_like(parameter) / math.sqrt(parameter.shape[-1])
    return agent


def minibatch(size=32, obs_size=3, action_size=2):
    torch.manual_seed(2)
    values, advantages, returns = torch.randn(3, size)
    log_probs = torch.full((size,), -2.0)
    return torch.randn(size, obs_size), torch.rand(size, action_size), log_probs, values, advantages, returns


def loss_of(module, log_ratio=None, advantages=None, new_values=None, old_values=None, returns=None, **args):
    """ppo_loss and its metrics; what is not given is 0."""
    given = log_ratio, advantages, new_values, old_values, returns
    zeros = torch.zeros_like(next(x for x in given if x is not None))
    log_ratio, advantages, new_values, old_values, returns = (zeros if x is None else x for x in given)
    args = module.Args(**{"norm_adv": False, "vf_coef": 1.0} | args)
    masks = [] if module.__name__.startswith("ppo_continuous") else [None]
    minibatch = zeros, old_values, advantages, returns
    return module.ppo_loss(Policy(log_ratio, zeros, new_values), args, None, None, *masks, *minibatch)


class TwoViews(gym.Env):
    """The return is what only the critic sees, minus the squared distance of the action from half the policy's view."""

    observation_space = gym.spaces.Dict(
        critic=gym.spaces.Box(-9, 9, (1,), np.float32), policy=gym.spaces.Box(-1, 1, (2,), np.float32)
    )
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.policy = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        self.critic = self.np_random.uniform(-9, 9, 1).astype(np.float32)
        return {"policy": self.policy, "critic": self.critic}, {}

    def step(self, action):
        reward = float(self.critic[0] - np.square(action - self.policy / 2).sum())
        return {"policy": self.policy, "critic": self.critic}, reward, True, False, {}


gym.register("recipes/TwoViews-v0", TwoViews)


class Picture(gym.Env):
    """An image whose brightness is the best action; episodes end at a time limit of 5."""

    observation_space = gym.spaces.Box(0, 255, (40, 44, 3), np.uint8)
    action_space = gym.spaces.Box(0, 1, (1,), np.float32)

    def observe(self):
        self.level = self.np_random.integers(256)
        return np.full((40, 44, 3), self.level, np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, action):
        reward = -abs(float(action[0]) - self.level / 255)
        return self.observe(), reward, False, False, {}


gym.register("recipes/Picture-v0", Picture, max_episode_steps=5)


class Flash(gym.Env):
    """The first image is bright on one side, the second one is dark. Then the side has to be named."""

    observation_space = gym.spaces.Box(0, 255, (3, 36, 40), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.side, self.steps = int(self.np_random.integers(2)), 0
        image = np.zeros((3, 36, 40), np.uint8)
        image[..., 20 * self.side : 20 * self.side + 20] = 255
        return image, {}

    def step(self, action):
        self.steps += 1
        reward = float(self.steps == 2 and action == self.side)
        return np.zeros((3, 36, 40), np.uint8), reward, self.steps == 2, False, {}


gym.register("recipes/Flash-v0", Flash)


class Counted(self_play_envs.TicTacToe):
    """It also asserts that a cell is free, for both players, and remembers its opponents."""

    moves = {1.0: 0, -1.0: 0}  # noqa: RUF012
    players = []  # noqa: RUF012

    def move(self, cell, stone):
        self.moves[stone] += 1
        if stone == -1.0 and all(self.opponent is not player for player in self.players):
            self.players.append(self.opponent)
        return super().move(cell, stone)


gym.register("Counted-v0", Counted)


class Wanderer(gym.Env):
    """Random steps, from its own random numbers, added to the actions."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (2,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.normal(size=2)
        return self.place.astype(np.float32), {}

    def step(self, action):
        self.place += action + self.np_random.normal(size=2)
        return (
            self.place.astype(np.float32),
            -float(np.abs(self.place).sum()),
            bool(np.abs(self.place).max() > 9),
            False,
            {},
        )


gym.register("Wanderer-v0", Wanderer, max_episode_steps=50)


class TwoSenses(gym.Env):
    """One step per episode. The image tells one bit, the vector another one. Discrete: the right one of four actions is
    2 * first + second, and the return is 1 for it. Box: the return is the mean of the two actions, each times 1 or -1
    for its bit."""

    observation_space = gym.spaces.Dict(
        image=gym.spaces.Box(0, 255, (37, 36, 3), np.uint8), vector=gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    )
    last = []  # noqa: RUF012  the final observations of all episodes, which are new ones

    def __init__(self, discrete, end="terminated"):
        self.discrete, self.end = discrete, end
        self.action_space = gym.spaces.Discrete(4) if discrete else gym.spaces.Box(-1, 1, (2,), np.float32)

    def observe(self):
        self.bits = self.np_random.integers(2, size=2)
        image = self.np_random.integers(100, size=(37, 36, 3)) + 100 * self.bits[0]
        return {"image": image.astype(np.uint8), "vector": np.array([1000.0, -5.0, 1.0]) + self.bits[1]}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, action):
        if self.discrete:
            reward = float(action == 2 * self.bits[0] + self.bits[1])
        else:
            reward = float(np.mean(action * (2 * self.bits - 1)))
        self.last.append(self.observe())
        return self.last[-1], reward, self.end == "terminated", self.end == "truncated", {}


register("TwoSenses", TwoSenses)


class ThreeAgents:
    """PettingZoo's parallel interface, written out. Observed are the agent's number k, the time and a number of the
    game, which its seed gives. Agent k earns 10 k for playing action k - 1, otherwise k. The third one leaves after two
    steps. The game ends after four, by a time limit for the first and for good for the second."""

    possible_agents = ["one", "two", "three"]  # noqa: RUF012
    played = []  # noqa: RUF012

    def observation_space(self, name):
        return gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def action_space(self, name):
        return gym.spaces.Discrete(3)

    def observe(self):
        return {x: np.float32([self.possible_agents.index(x) + 1, self.time, self.number]) for x in self.agents}

    def reset(self, seed=None, options=None):
        self.number = (self.number + 0.5 if seed is None else seed) % 10
        self.agents, self.time = list(self.possible_agents), 0
        return self.observe(), {name: {} for name in self.agents}

    def step(self, actions):
        assert list(actions) == self.agents
        self.time += 1
        obs, number = self.observe(), {name: k + 1 for k, name in enumerate(self.possible_agents)}
        rewards = {x: number[x] * (10.0 if action == number[x] - 1 else 1.0) for x, action in actions.items()}
        ended = {"one": False, "two": self.time == 4, "three": self.time == 2}
        truncated = {"one": self.time == 4, "two": False, "three": False}
        flags = [{name: flag[name] for name in self.agents} for flag in (ended, truncated)]
        self.agents = [name for name in self.agents if not ended[name] and not truncated[name]]
        return obs, rewards, *flags, {name: {} for name in obs}


parallel_env = ThreeAgents
GAME = "recipes:parallel_env"
