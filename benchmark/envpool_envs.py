"""Gymnasium's MuJoCo tasks in EnvPool's vectors: C++ threads step all environments. EnvPool is optional:

    python -m pip install envpool                                   # 0.7 GB
    python ppo_continuous.py --env-id benchmark.envpool_envs:EnvPool/HalfCheetah-v4

Every MuJoCo task of gymnasium, -v4 and -v5, is registered as EnvPool/NAME. `--env-kwargs '{"num_threads": 1}'` sets
the threads of a run; without it there is one for each core. `--evaluate` and videos use gymnasium's own environment.
"""

import dataclasses
import os
import re
from functools import partial

import gymnasium as gym
import numpy as np

try:
    import envpool
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}: python -m pip install envpool") from None

SAME_STEP = gym.vector.AutoresetMode.SAME_STEP


class EnvPoolVector(gym.vector.VectorEnv):
    """A vector of one task in autoreset mode SAME_STEP. EnvPool itself begins an episode one step later (NEXT_STEP)."""

    def __init__(self, task, num_envs, max_episode_steps, autoreset_mode=SAME_STEP, num_threads=None, **kwargs):
        if autoreset_mode != SAME_STEP:
            raise ValueError(f"EnvPool/{task} has the autoreset mode SAME_STEP only")
        self.metadata = {"autoreset_mode": SAME_STEP}
        self.num_envs, self.max_episode_steps = num_envs, max_episode_steps
        num_threads = num_threads or min(num_envs, len(os.sched_getaffinity(0)))
        # Episodes end here, not in EnvPool: then _elapsed_steps can shorten the first ones (--stagger-envs).
        self.config = {"num_envs": num_envs, "num_threads": num_threads, "max_episode_steps": 2**31 - 1} | kwargs
        self.task, spec = task, envpool.make_spec(task, **self.config)
        self.single_observation_space = spec.gymnasium_observation_space
        self.single_action_space = spec.gymnasium_action_space
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

    @property
    def spec(self):
        return getattr(self, "_spec", None)

    @spec.setter
    def spec(self, spec):  # gymnasium gives the registered one, which does not know the limit of --env-kwargs
        self._spec = dataclasses.replace(spec, max_episode_steps=self.max_episode_steps)

    def set_attr(self, name, values):
        setattr(self, name, np.array(values))

    def reset(self, *, seed=None, options=None):
        """seed: a list with one number for each environment, or the first of these numbers, or None."""
        if not np.iterable(seed):
            seed = np.random.randint(2**30) if seed is None else seed
            seed = range(seed, seed + self.num_envs)
        # EnvPool takes seeds only when it makes its environments.
        self.pool = envpool.make_gymnasium(self.task, **self.config, env_seed=list(seed))
        self._elapsed_steps = np.zeros(self.num_envs, dtype=int)
        return self.pool.reset()[0], {}

    def step(self, actions):
        obs, rewards, terminations, truncations, _ = self.pool.step(actions)
        self._elapsed_steps += 1
        truncations = truncations | (self._elapsed_steps >= self.max_episode_steps)
        ended = np.flatnonzero(terminations | truncations)
        if not len(ended):
            return obs, rewards, terminations, truncations, {}
        final_obs = obs.copy()
        obs[ended] = self.pool.reset(ended.astype(np.int32))[0]
        self._elapsed_steps[ended] = 0
        return obs, rewards, terminations, truncations, {"final_obs": final_obs}

    def close_extras(self, **kwargs):
        if hasattr(self, "pool"):  # after a reset
            self.pool.close()


def make_one(task, num_threads=None, **kwargs):
    """For --evaluate and videos: gymnasium's environment."""
    return gym.make(task, **kwargs)


for task, spec in list(gym.registry.items()):
    if re.search("-v[45]$", task) and str(spec.entry_point).startswith("gymnasium.envs.mujoco"):
        gym.register(
            f"EnvPool/{task}",
            partial(make_one, task),
            vector_entry_point=partial(EnvPoolVector, task),
            max_episode_steps=spec.max_episode_steps,
        )
