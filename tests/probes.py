"""Small environments with known answers, for the tests. Importing this file registers them, once with Box actions
(box/NAME-v0) and once with MultiDiscrete ones (discrete/NAME-v0)."""

import time

import gymnasium as gym
import numpy as np

# Multiples of 1/16, so that with gamma = 15/16 every sum and product of a probe is exact in float32.
CHAIN_GAMMA = 15 / 16
CHAIN_VALUES = np.random.default_rng(0).integers(-16, 17, size=16) / 16


def two_actions(discrete):
    """Two dimensions: numbers between -1 and 1, or one of 3 choices and one of 2, which are counted from 1."""
    return gym.spaces.MultiDiscrete([3, 2], start=[0, 1]) if discrete else gym.spaces.Box(-1, 1, (2,), np.float32)


class Chain(gym.Env):
    """State k, observed one-hot, is followed by k + 1. The reward V(k) - gamma V(k + 1), or V(k) at a termination,
    makes CHAIN_VALUES the values V of the states under any policy. Episodes take the lengths `lengths` in turn."""

    def __init__(self, discrete, lengths=(3, 5, 2, 7), end="truncated"):
        self.observation_space = gym.spaces.Box(0, 1, (len(CHAIN_VALUES),), np.float64)
        self.action_space = two_actions(discrete)
        self.lengths, self.end, self.episode = lengths, end, -1

    def observe(self):
        return np.eye(len(CHAIN_VALUES))[self.state]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.episode = seed % len(self.lengths)  # the copies of a vector environment differ
        self.episode += 1
        self.state = 0
        return self.observe(), {}

    def step(self, action):
        value = CHAIN_VALUES[self.state]
        self.state += 1
        ended = self.state == self.lengths[self.episode % len(self.lengths)]
        terminated = ended and self.end in ("terminated", "both")
        truncated = ended and self.end in ("truncated", "both")
        reward = value - (0.0 if terminated else CHAIN_GAMMA * CHAIN_VALUES[self.state])
        return self.observe(), reward, terminated, truncated, {}


class Target(gym.Env):
    """One step per episode. Box: the best action is half the observation, and the return is minus the squared distance.
    MultiDiscrete: the observation is drawn from {-1, 0, 1} x {-1, 1}, which tells the right choice in each dimension,
    and the return is minus the number of wrong ones."""

    def __init__(self, discrete):
        self.observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
        self.action_space, self.discrete = two_actions(discrete), discrete

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.target = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        if self.discrete:
            self.target = np.array([np.round(1.5 * self.target[0]), np.sign(self.target[1])], np.float32)
        return self.target.copy(), {}

    def step(self, action):
        assert self.action_space.contains(action), "an action outside its space reached the environment"
        if self.discrete:
            right = [self.target[0] + 1, 1 + (self.target[1] > 0)]
            cost = (action != right).sum()
        else:
            cost = np.square(action - self.target / 2).sum()
        return self.target.copy(), -float(cost), True, False, {}


class Broken(Target):
    """At its 44th step it returns NaN in the reward, raises, or is interrupted. "slow" only has a slow first step."""

    def __init__(self, discrete, where="reward"):
        super().__init__(discrete)
        self.where, self.steps = where, 0

    def step(self, action):
        obs, reward, terminated, truncated, infos = super().step(action)
        self.steps += 1
        if self.steps == 44 and self.where == "reward":
            reward = np.nan
        if self.steps == 44 and self.where == "raise":
            raise RuntimeError("the simulator is lost")
        if self.steps == 44 and self.where == "interrupt":
            raise KeyboardInterrupt
        if self.steps == 1 and self.where == "slow":
            time.sleep(0.5)
        return obs, reward, terminated, truncated, infos


class Shaped(Target):
    """Observations in a dictionary, actions in a matrix."""

    def __init__(self, discrete):
        super().__init__(discrete)
        self.observation_space = gym.spaces.Dict(a=self.observation_space, b=gym.spaces.Discrete(3))
        box = gym.spaces.Box(-1, 1, (2, 1), np.float32)
        self.action_space = gym.spaces.MultiDiscrete([[2], [3]], start=[[4], [0]]) if discrete else box

    def reset(self, *, seed=None, options=None):
        return {"a": super().reset(seed=seed)[0], "b": 1}, {}

    def step(self, action):
        assert self.action_space.contains(action)
        return {"a": self.target.copy(), "b": 2}, 0.0, False, True, {}


class OtherTypes(Target):
    """Observations that are true or false, actions of 32-bit integers or 64-bit numbers."""

    def __init__(self, discrete):
        super().__init__(discrete)
        self.observation_space = gym.spaces.Box(0, 1, (2,), np.bool_)
        integers, real = gym.spaces.MultiDiscrete([3, 2], np.int32), gym.spaces.Box(-1, 1, (2,), np.float64)
        self.action_space = integers if discrete else real

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0] > 0, {}

    def step(self, action):
        assert self.action_space.contains(action)
        return self.target > 0, 1.0, True, False, {}


class Pair(Target):
    """Two actions at once, in a Tuple."""

    def __init__(self, discrete):
        super().__init__(discrete)
        self.action_space = gym.spaces.Tuple([self.action_space] * 2)


class Whole(Target):
    """Box actions that are integers."""

    def __init__(self, discrete):
        super().__init__(discrete)
        self.action_space = gym.spaces.Box(0, 9, (2,), np.int64)


class OneArray(gym.Env):
    """Counts its steps; all its observations are the same array."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def __init__(self, discrete):
        self.action_space = gym.spaces.Discrete(2) if discrete else gym.spaces.Box(-1, 1, (1,))
        self.obs = np.zeros(2, np.float32)

    def reset(self, *, seed=None, options=None):
        self.obs[:] = 0
        return self.obs, {}

    def step(self, action):
        self.obs += 1
        return self.obs, 0.0, False, bool(self.obs[0] == 5), {}


class Masked(gym.Env):
    """Every state allows other choices, the first of an episode too, and the one that was truncated has none left;
    refuses a forbidden choice. The return is the number of steps in which the highest allowed choices were taken."""

    def __init__(self, form="flat"):
        self.observation_space = gym.spaces.Box(0, 1, (5,), np.float32)
        self.action_space, self.form = gym.spaces.MultiDiscrete([3, 2]), form

    def observe(self):
        self.masks = [self.np_random.integers(0, 2, size, dtype=np.int8) for size in (3, 2)]
        for mask in self.masks:
            mask[self.np_random.integers(len(mask))] = 1
        flat = np.concatenate(self.masks)
        form = {
            "flat": flat,
            "tuple": tuple(self.masks),
            "list": flat.tolist(),
            "lists": [x.tolist() for x in self.masks],
        }
        form |= {"row": flat[None], "short": flat[:-1], "none": flat * 0, "number": 1}
        return flat.astype(np.float32), {"action_mask": form[self.form]}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observe()

    def step(self, action):
        assert all(mask[choice] for mask, choice in zip(self.masks, action)), "a forbidden choice"
        reward = float(all(not mask[choice + 1 :].any() for mask, choice in zip(self.masks, action)))
        self.steps += 1
        obs, infos = self.observe()
        ended = self.steps == 5
        if ended and self.form in ("flat", "tuple", "list"):  # a vector mixes these, but no rows and lists of lists
            infos["action_mask"] = np.zeros(5, np.int8)
        return obs, reward, False, ended, infos


def register(name, environment, **kwargs):
    """As box/NAME-v0 and as discrete/NAME-v0, by their actions."""
    for kind in ("box", "discrete"):
        gym.register(f"{kind}/{name}-v0", environment, kwargs={"discrete": kind == "discrete"} | kwargs)


register("Chain", Chain)
register("AlignedChain", Chain, lengths=(8,))
register("Target", Target)
register("NanReward", Broken)
for where in ("raise", "interrupt", "slow"):
    register(where.title(), Broken, where=where)
for environment in (Shaped, OtherTypes, Pair, Whole, OneArray):
    register(environment.__name__, environment)
gym.register("masks/Masked-v0", Masked)
