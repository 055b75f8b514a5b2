"""Environments in several processes: benchmark/process_envs.py. Runs are processes of their own, because an import of
the module changes every registered task."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import (
    LONG,
    ONE,
    SMALL,
    Started,
    assert_same_learner,
    checkpointed_step,
    flags_of,
    probe,
    rows,
    scalars,
    start,
    wait_for,
)
from processes import run_main

TAXI = max(task for task in gym.registry if task.startswith("Taxi-v"))


def finish(process):
    """What it printed, if it ended without an error."""
    output = process.communicate()[0]
    assert process.returncode == 0, output
    return output


def workers(pid):
    """The processes that this one has started, by id."""
    command = ["ps", "-o", "pid=", "--ppid", str(pid)]
    return subprocess.run(command, capture_output=True, text=True).stdout.split()


def all_gone(pids):
    return not any(Path("/proc", pid).exists() for pid in pids)


@pytest.mark.parametrize(
    "script, task, kwargs, sizes",
    [
        ("ppo_continuous", "HalfCheetah-v4", {}, {"num_steps": 64, "stagger_envs": True}),
        ("ppo_continuous", "box/Shaped-v0", {}, {"num_steps": 2, "stagger_envs": True}),
        ("ppo_continuous", "Pendulum-v1", {"max_episode_steps": 40}, {"num_steps": 16, "stagger_envs": True}),
        ("ppo_discrete", TAXI, {}, {"num_steps": 16}),
        ("ppo_rnn", "masks/Masked-v0", {"form": "tuple"}, {"num_steps": 4}),
    ],
    indirect=["script"],
)
def test_weights_are_those_of_the_ordinary_run(script, tmp_path, small_args, task, kwargs, sizes):
    """After 20 iterations, to the last bit, and all logs: with three processes for four environments, first episodes
    that are cut short, truncations, masks, and observations that are no vectors."""
    sizes = SMALL | {"update_epochs": 1} | sizes
    sizes["total_timesteps"] = 20 * sizes["num_envs"] * sizes["num_steps"]
    in_three = {"env_id": f"benchmark.process_envs:{task}", "env_kwargs": json.dumps(kwargs | {"num_workers": 3})}
    process = start(script.__name__, tmp_path / "three", **in_three, **sizes)
    wait_for(lambda: len(workers(process.pid)) == 2, process)
    _, run_dir = script.train(small_args(env_id=task, env_kwargs=json.dumps(kwargs), **sizes))
    finish(process)
    (other_dir,) = (tmp_path / "three").iterdir()
    assert_same_learner(script.load_checkpoint(run_dir), script.load_checkpoint(other_dir))
    table, other_table = rows(run_dir), rows(other_dir)
    assert [row[:3] for row in table] == [row[:3] for row in other_table] and len(table) > 2
    logged, other = scalars(run_dir), scalars(other_dir)
    assert logged.pop("charts/SPS") and other.pop("charts/SPS") and logged == other


def train_here(folder, script, flags):
    """As from the command line in that folder, with modules of the user's; torch has used its threads before."""
    os.chdir(folder)
    torch.set_num_threads(2)
    torch.rand(500, 500) @ torch.rand(500, 500)
    run_main(script, flags)


MINE = """
import random
import sys

import gymnasium as gym
import numpy as np
import torch
from benchmark.process_envs import use_processes


class Mine(gym.Env):
    observation_space, action_space = gym.spaces.Box(-9, 9, (8,)), gym.spaces.Box(-1, 1, (1,))
    bonus = 1.0

    def __init__(self, fails=False):
        self.net, self.fails = torch.nn.Linear(256, 256), fails

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.steps = torch.zeros(256, 256), 0
        return np.zeros(8, np.float32), {}

    @torch.no_grad()
    def step(self, action):
        self.steps += 1
        self.x = self.net(self.x).tanh()
        if self.fails and "ppo_continuous" not in sys.modules:  # in a worker
            raise ConnectionError("the simulator is lost")
        return self.x[0, : self.observation_space.shape[0]].numpy(), self.bonus, self.steps == 20, False, {}


class Dice(Mine):
    observation_space = gym.spaces.Box(0, 1, (3,), np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset()
        return np.array([random.random(), np.random.rand(), torch.rand(()).item()]), {}


gym.register("Mine-v0", Mine)
shifted = gym.wrappers.RescaleObservation.wrapper_spec(min_obs=10.0, max_obs=11.0)
gym.register("Dice-v0", Dice, additional_wrappers=(shifted,))
skipping = gym.wrappers.MaxAndSkipObservation.wrapper_spec(skip=2)
gym.register("Skipping-v0", Mine, max_episode_steps=8, additional_wrappers=(skipping,))


class Wrong(Mine):
    observation_space = gym.spaces.Box(0, 9, (8,), np.int64)


gym.register("Wrong-v0", Wrong)
for name in ("Dice", "Mine", "Skipping", "Wrong"):
    use_processes(f"{name}-v0")
"""


def try_the_vector(folder):
    """What a script does not show."""
    sys.path.append(str(folder))
    options = {"num_envs": 4, "vectorization_mode": "vector_entry_point"}
    with pytest.raises(ValueError, match="SAME_STEP"):
        gym.make_vec("mine:Dice-v0", **options, autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP)
    envs = gym.make_vec("Dice-v0", **options, num_workers=4)
    assert envs.metadata["autoreset_mode"] == gym.vector.AutoresetMode.SAME_STEP
    obs, _ = envs.reset(seed=7)
    again, _ = envs.reset(seed=[7, 8, 9, 7])
    assert len(np.unique(obs)) == obs.size == 12 and obs in envs.observation_space
    assert np.array_equal(obs[:3], again[:3]) and np.array_equal(obs[0], again[3])
    assert obs.min() >= 10 and 10 <= gym.make("Dice-v0").reset()[0].min() <= 11
    for bonus in (3.0, [3.0] * 4):
        envs.set_attr("bonus", bonus)
        assert envs.step(envs.action_space.sample())[1].tolist() == [3.0] * 4
    env = gym.make("Skipping-v0")
    env.reset()
    assert [env.step(env.action_space.sample())[3] for _ in range(4)] == [False, False, False, True]  # 8 steps of 8
    wrong = gym.make_vec("Wrong-v0", **options, num_workers=1)
    wrong.reset()
    with pytest.raises(TypeError, match="Cannot cast"):  # its observations are no integers
        wrong.step(wrong.action_space.sample())
    pids = workers(os.getpid())[:3]  # the fourth is the one that lists them
    envs.close()
    assert len(pids) == 3 and all_gone(pids)
    gym.make_vec("Dice-v0", **options, num_workers=1).reset()
    assert len(workers(os.getpid())) == 1


def test_seeds_and_processes(tmp_path):
    """Environments that draw from the global generators differ. They are wrapped as their registration says, and take
    attributes. `num_workers` counts the main process; `close` ends the others."""
    (tmp_path / "mine.py").write_text(MINE)
    finish(Started(try_the_vector, tmp_path))


@ONE
def test_own_task_that_uses_torch(script, tmp_path):
    """It is a module in the current folder. The run trains, resumes, and is evaluated."""
    (tmp_path / "mine.py").write_text(MINE)
    flags = flags_of(env_id="mine:Mine-v0", env_kwargs='{"num_workers": 2}', **SMALL)
    finish(Started(train_here, tmp_path, script.__name__, flags))
    (run_dir,) = (tmp_path / "runs").iterdir()
    finish(Started(train_here, tmp_path, script.__name__, [f"--resume={run_dir}", *flags, "--total-timesteps=512"]))
    assert script.load_checkpoint(run_dir)["global_step"] == 512
    flags = [f"--evaluate={run_dir}", "--env-id=mine:Mine-v0", "--eval-episodes=2"]
    assert "returns: 20.0 20.0" in finish(Started(train_here, tmp_path, script.__name__, flags))


@ONE
def test_environment_that_fails_in_a_worker(script, tmp_path):
    """The run ends with its traceback; the last line says what it was."""
    (tmp_path / "mine.py").write_text(MINE)
    flags = flags_of(env_id="mine:Mine-v0", env_kwargs='{"num_workers": 2, "fails": true}', **SMALL)
    process = Started(train_here, tmp_path, script.__name__, flags)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 1 and "raise ConnectionError" in output
    assert output.strip().splitlines()[-1] == "ConnectionError: the simulator is lost"


@ONE
@pytest.mark.parametrize("end", ["worker is killed", "main process is killed", "Ctrl-C"])
def test_end_of_a_run(script, tmp_path, end):
    """Nothing hangs, no process is left, and only an error of the user's concern is printed."""
    env_id = f"benchmark.process_envs:{probe(script)}"
    args = LONG | {"total_timesteps": 10**8, "env_kwargs": '{"num_workers": 3}'}
    # Few checkpoints: a signal that meets TensorBoard's queue can keep its thread waiting for two minutes.
    args["checkpoint_interval"] = 0.5
    process = start(script.__name__, tmp_path, env_id=env_id, **args)
    wait_for(lambda: checkpointed_step(script, tmp_path) >= 64 * 3, process)
    pids = workers(process.pid)
    assert len(pids) == 2
    if end == "worker is killed":
        os.kill(int(pids[0]), signal.SIGKILL)
    elif end == "main process is killed":
        process.kill()
    else:
        os.killpg(process.pid, signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    for _ in range(500):
        if all_gone(pids):
            break
        time.sleep(0.02)
    assert all_gone(pids)
    if end == "worker is killed":
        assert process.returncode == 1 and output.count("Traceback") == 1
        last = output.strip().splitlines()[-1]
        assert last == "RuntimeError: a worker process of the environments died with exit status -9"
    else:
        assert "Traceback" not in output and process.returncode == (130 if end == "Ctrl-C" else -9)
