"""variants/ppo_atari.py under torchrun: several processes train one agent. One process takes one thread."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from test_atari import rows, script, train

MEMBERS = []  # all environments of this process that make_envs keeps


class Numbered(gym.Env):
    """The n-th environment of a run, on whichever rank it is, shows the n-th sequence of random images and rewards,
    whatever is done to it. It keeps its seed and the actions."""

    observation_space = gym.spaces.Box(0, 255, (36, 36, 1), np.uint8)
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        self.first_seed, self.actions = None, []

    def reset(self, *, seed=None, options=None):
        if self.first_seed is None:
            self.first_seed, self.rng = seed, np.random.default_rng(int(os.environ.get("RANK", 0)) * 4 + len(MEMBERS))
            MEMBERS.append(self)
        return self.rng.integers(256, size=(36, 36, 1), dtype=np.uint8), {}

    def step(self, action):
        self.actions.append(int(action))
        self.threads = torch.get_num_threads()
        return self.reset()[0], float(self.rng.integers(-3, 4)), False, False, {}


gym.register("images/Numbered-v0", Numbered, max_episode_steps=5)
SHARED = {"env_id": "images/Numbered-v0", "num_envs": 8, "total_timesteps": 512, "update_epochs": 3, "device": "auto"}
ONE_STEP = {"total_timesteps": 128, "num_minibatches": 1, "update_epochs": 1, "max_grad_norm": 0.0}


@pytest.mark.usefixtures("two_threads")
def test_trains_on_one_thread(tmp_path):
    """And puts the number back."""
    MEMBERS.clear()
    train(tmp_path, env_id="images/Numbered-v0")
    assert {x.threads for x in MEMBERS} == {1}


def worker(out):
    """What a process of torchrun does in the test below."""
    torch.set_num_threads(1)
    agent, run_dir = train(out / "two", **SHARED, target_kl=1e-4, learning_rate=1e-3)
    left = {"agent": agent.state_dict(), "has_folder": run_dir is not None, "seeds": [x.first_seed for x in MEMBERS]}
    torch.save(left | {"actions": [x.actions for x in MEMBERS]}, out / f"rank-{os.environ['RANK']}.pt")
    MEMBERS.clear()
    train(out / "step of two", **SHARED | ONE_STEP)
    MEMBERS.clear()
    if run_dir:
        shutil.copytree(run_dir, out / "resumed")
    torch.distributed.barrier()
    args = script.load_args(out / "resumed")
    args.total_timesteps = 768
    agent, _ = script.train(args, out / "resumed")
    torch.save(agent.state_dict(), out / f"resumed-{os.environ['RANK']}.pt")
    torch.distributed.barrier()  # torchrun would stop rank 0 if rank 1 failed while it leaves
    torch.distributed.destroy_process_group()


def test_two_ranks_train_as_one(tmp_path):
    """They end with the same weights, to the bit: gradients are averaged, and the KL limit ends an update for both in
    the same minibatch. Their seeds and their noise differ. episodes.csv has the rows of one process that has all
    environments. So has the first step: the critic's gradient does not depend on the actions. Both resume the
    checkpoint and stay equal; then one process resumes it alone."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", __file__, tmp_path]
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # pytest's
    done = subprocess.run(list(map(str, torchrun)), capture_output=True, text=True, timeout=200, env=paths)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True) for rank in (0, 1))
    torch.testing.assert_close(first["agent"], second["agent"], atol=0, rtol=0)
    assert (first["has_folder"], second["has_folder"]) == (True, False)
    assert len({*first["seeds"], *second["seeds"]}) == 8
    # The first policy is nearly the same noise everywhere. Each rank draws its own.
    noise = [np.array(rank["actions"])[:, :16].ravel() for rank in (first, second)]
    assert abs(np.corrcoef(noise)[0, 1]) < 0.6
    ((two,), (step_of_two,)) = ((tmp_path / name).iterdir() for name in ("two", "step of two"))
    saved = script.load_checkpoint(two)
    assert 4 <= saved["optimizer"]["state"][0]["step"] < 4 * 3 * 2  # of 4 iterations, 3 epochs, 2 minibatches
    assert saved["global_step"] == 512 and saved["args"]["num_envs"] == 8

    resumed = [torch.load(tmp_path / f"resumed-{rank}.pt", weights_only=True) for rank in (0, 1)]
    torch.testing.assert_close(*resumed, atol=0, rtol=0)
    args = script.load_args(tmp_path / "resumed")
    args.total_timesteps = 1024
    MEMBERS.clear()
    script.train(args, tmp_path / "resumed")
    assert script.load_checkpoint(tmp_path / "resumed")["global_step"] == 1024

    MEMBERS.clear()
    _, one = train(tmp_path / "one", **SHARED)
    assert rows(two) == rows(one) and len(rows(one)) == 8 * (512 // 8 // 5)
    MEMBERS.clear()
    agent, step_of_one = train(tmp_path / "step of one", **SHARED | ONE_STEP)
    moments = [script.load_checkpoint(x)["optimizer"]["state"][0]["exp_avg"] for x in (step_of_two, step_of_one)]
    critic = torch.cat([torch.full((x.numel(),), name.startswith("critic")) for name, x in agent.named_parameters()])
    torch.testing.assert_close(moments[0][critic], moments[1][critic], rtol=1e-4, atol=1e-6)
    assert moments[1][critic].abs().max() > 1e-3


@pytest.mark.parametrize("flags", [["--num-envs=7"], ["--num-envs=6", "--num-steps=4", "--num-minibatches=8"]])
def test_what_ranks_cannot_share(tmp_path, monkeypatch, flags):
    """One line says so, before anything is created. The process group may be the caller's own, without torchrun."""
    ranks = {"is_initialized": True, "get_rank": 0, "get_world_size": 2}
    for name, value in ranks.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    args = script.parse_args([*flags, f"--runs-dir={tmp_path}"], script.Args())
    with pytest.raises(script.UsageError, match="2 processes"):
        script.train(args)
    assert not list(tmp_path.iterdir())


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
