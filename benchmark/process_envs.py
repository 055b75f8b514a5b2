"""Any gymnasium task in several processes, one for each core. Each steps its share of the environments:

    python ppo_continuous.py --env-id benchmark.process_envs:HalfCheetah-v4 --env-kwargs '{"num_workers": 4}'

`num_workers` counts the main process too. Weights are those of the ordinary run to the last bit, if environments draw
from their own `np_random`. `--evaluate` and videos use the plain environment. For Linux and macOS. Importing this file
changes every task that is registered by then. A module with a task of its own, `--env-id my_module:Mine-v0`, imports
`use_processes` from here, and calls `use_processes("Mine-v0")` after gym.register.
"""

import contextlib
import dataclasses
import mmap
import os
import random
import subprocess
import sys
import tempfile
import traceback
from functools import partial
from multiprocessing.connection import Connection, Pipe

import gymnasium as gym
import numpy as np


def make_env(spec, kwargs):
    """One environment, whose observations are vectors."""
    env = gym.make(spec, **kwargs)
    space = env.observation_space
    if space.dtype == np.uint8 and len(space.shape) > 1 and np.prod(space.shape) > 1000:  # the scripts refuse it too
        raise gym.error.Error(f"{spec.id} has images")
    return env if isinstance(space, gym.spaces.Box) and len(space.shape) == 1 else gym.wrappers.FlattenObservation(env)


def flat_mask(mask):
    """A copy of a mask, or of a tuple of masks, one for each dimension of the action."""
    return mask.flatten() if isinstance(mask, np.ndarray) else np.hstack(mask)


class Share:
    """The n environments of one process. `rows` (n,) is shared memory. Other results are (environment, name, value)."""

    envs = ()

    def make(self, numbers, spec, kwargs, row_type, memory):
        """numbers (n,): which of all N environments these are. memory: the descriptor of a file with N rows"""
        self.numbers, self.envs = numbers, [make_env(spec, kwargs) for _ in numbers]
        self.rows = np.ndarray(len(numbers), row_type, mmap.mmap(memory, 0), offset=numbers[0] * row_type.itemsize)

    def set_attr(self, values, name):
        for env, value in zip(self.envs, values):
            env.set_wrapper_attr(name, value)

    def reset(self, seeds, options):
        """seeds (n,), numbers or None -> action masks"""
        found = []
        for n, env, row, seed in zip(self.numbers, self.envs, self.rows, seeds):
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed % 2**32)
                if "torch" in sys.modules:  # an import for this alone would cost each process seconds and 0.5 GB
                    sys.modules["torch"].manual_seed(seed)
            row["obs"], info = env.reset(seed=seed, options=options)
            if "action_mask" in info:
                found.append((n, "action_mask", flat_mask(info["action_mask"])))
        return found

    def step(self, actions):
        """actions (n, *shape of an action) -> action masks; at the end of an episode, its last observation and info"""
        found = []
        for n, env, row, action in zip(self.numbers, self.envs, self.rows, actions):
            obs, reward, terminated, truncated, info = env.step(action)
            row["reward"], row["terminated"], row["truncated"] = np.asarray(reward).item(), terminated, truncated
            if terminated or truncated:
                numbers = {}
                for name, value in info.items():
                    with contextlib.suppress(Exception):  # not a number
                        numbers[name] = float(value)
                found += [(n, "final_obs", np.array(obs)), (n, "numbers", [numbers])]
                obs, info = env.reset()
            np.copyto(row["obs"], obs, casting="same_kind")  # as a plain vector: floats are no integers
            if "action_mask" in info:
                found.append((n, "action_mask", flat_mask(info["action_mask"])))
        return found

    def close(self):
        for env in self.envs:
            env.close()


def work(pipe):
    """What a worker process does until the main process closes its end of the pipe (a descriptor) or dies."""
    with contextlib.suppress(ImportError):  # as in the scripts: else mujoco 4 prints a warning for each HalfCheetah
        import mujoco

        mujoco.set_mju_user_warning(lambda text: None if "deprecated" in text else print(text, file=sys.stderr))
    connection = Connection(pipe)
    with contextlib.closing(Share()) as share, contextlib.suppress(ConnectionError):  # when `send` finds no reader
        while True:
            try:
                method, *arguments = connection.recv()
                reply = getattr(share, method)(*arguments), None
            except Exception:
                reply = None, f"failed:\n{traceback.format_exc()}"
            connection.send(reply)


class ProcessVector(gym.vector.VectorEnv):
    """N environments of one task, in autoreset mode SAME_STEP. The main process steps the last share of them."""

    def __init__(self, spec, num_envs, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP, num_workers=None, **kwargs):
        if autoreset_mode != gym.vector.AutoresetMode.SAME_STEP:
            raise ValueError(f"{spec.id} in processes has the autoreset mode SAME_STEP only")
        self.num_envs, self.metadata = num_envs, {"autoreset_mode": autoreset_mode}
        with make_env(spec, kwargs) as env:
            self.single_observation_space, self.single_action_space = env.observation_space, env.action_space
            self.max_episode_steps = env.spec.max_episode_steps
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        obs = ("obs", self.single_observation_space.dtype, self.single_observation_space.shape)
        row_type = np.dtype([obs, ("reward", float), ("terminated", bool), ("truncated", bool)], align=True)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        shares = min(num_workers or cores, num_envs)
        self.share, self.workers, self.bounds = Share(), [], [num_envs * i // shares for i in range(shares + 1)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        with tempfile.TemporaryFile() as memory:
            memory.truncate(num_envs * row_type.itemsize)
            self.rows = np.ndarray(num_envs, row_type, mmap.mmap(memory.fileno(), 0))
            # Not multiprocessing's processes: a fork hangs where an environment uses torch and torch's threads exist
            # already; "spawn" and "forkserver" import the script again: 5 s and 0.7 GB. These take 0.8 s and 0.06 GB.
            # A new session: Ctrl-C is for the main process only. One thread: the other cores are taken.
            for _ in range(shares - 1):
                connection, other_end = Pipe()
                command = [sys.executable, "-c", f"from {__name__} import work; work({other_end.fileno()})"]
                options = {"env": environment, "pass_fds": [other_end.fileno(), memory.fileno()]}
                self.workers.append((connection, subprocess.Popen(command, start_new_session=True, **options)))
                other_end.close()
            self.call_shares("make", range(num_envs), spec, kwargs, row_type, memory.fileno())

    def call_shares(self, method, values, *arguments):
        """Call a method of every share with its part of the values (N,) -> what they return, a list"""
        *parts, own_part = [values[first:last] for first, last in zip(self.bounds, self.bounds[1:])]
        with contextlib.suppress(ConnectionError):  # a worker died: receiving says so
            for (connection, _), part in zip(self.workers, parts):
                connection.send((method, part, *arguments))
        results = [getattr(self.share, method)(own_part, *arguments)]
        for connection, process in self.workers:
            try:
                result, error = connection.recv()
            except (EOFError, ConnectionError):
                result, error = None, f"died with exit status {process.wait()}"
            if error:
                raise RuntimeError(f"a worker process of the environments {error}")
            results.append(result)
        return results

    def set_attr(self, name, values):
        """values: a list with one for each environment, or one for all"""
        values = values if isinstance(values, list | tuple) else [values] * self.num_envs
        self.call_shares("set_attr", values, name)

    @property
    def spec(self):
        return getattr(self, "_spec", None)

    @spec.setter
    def spec(self, spec):  # gymnasium gives the registered one, which does not know the limit of --env-kwargs
        self._spec = dataclasses.replace(spec, max_episode_steps=self.max_episode_steps)

    def reset(self, *, seed=None, options=None):
        """seed: a list with one number for each environment, or the first of these numbers, or None."""
        if not np.iterable(seed):
            seed = [None] * self.num_envs if seed is None else range(seed, seed + self.num_envs)
        infos = self.gather(self.call_shares("reset", seed, options))
        return self.rows["obs"].copy(), infos

    def step(self, actions):
        infos = self.gather(self.call_shares("step", actions))
        if "numbers" in infos:
            infos["final_info"] = {name: infos.pop(name) for name in ("numbers", "_numbers")}
        return *(self.rows[name].copy() for name in ("obs", "reward", "terminated", "truncated")), infos

    def gather(self, results):
        """What the shares return -> infos in gymnasium's form: values (N,), and the bool (N,) of who gave one"""
        infos = {}
        for n, name, value in (item for result in results for item in result):
            infos.setdefault(name, np.full(self.num_envs, None))[n] = value
            infos.setdefault(f"_{name}", np.zeros(self.num_envs, bool))[n] = True
        return infos

    def close_extras(self, **kwargs):
        self.share.close()
        for connection, _ in self.workers:
            connection.close()
        for _, process in self.workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
            process.kill()  # a step that never returns


def make_one(spec, num_workers=None, **kwargs):
    """For --evaluate and videos: the plain environment. gym.make adds its time limit outside. If the registration has
    wrappers, which might skip steps, the limit inside them counts."""
    return gym.make(spec, **({} if spec.additional_wrappers else {"max_episode_steps": -1}) | kwargs)


def use_processes(task):
    """From now on, several processes step the vectors of a registered task."""
    spec = gym.registry[task]
    entry_points = {"entry_point": partial(make_one, spec), "vector_entry_point": partial(ProcessVector, spec)}
    # `spec` has the wrappers already. A second time they would wrap twice, and gymnasium would make no vector.
    gym.registry[task] = dataclasses.replace(spec, kwargs={}, additional_wrappers=(), **entry_points)


for task in gym.registry:
    use_processes(task)
