"""The recipe torchrun: several processes train one agent."""

import os

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import scalars
from forks import two_ranks

from recipes import episodes, small, with_recipes

MEMBERS = []  # all environments of this process, in the order in which the vector made them


class Numbered(gym.Env):
    """Environment n of a run, on whichever rank it is, shows the n-th sequence of random observations and rewards,
    whatever is done to it. It keeps its seed and the actions."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,))

    def __init__(self):
        self.actions, self.first_seed = [], None

    def reset(self, *, seed=None, options=None):
        if self.first_seed is None:
            MEMBERS.append(self)
            self.first_seed, self.number = seed, int(os.environ.get("RANK", 0)) * 4 + len(MEMBERS) - 1
            self.rng = np.random.default_rng(self.number)
        return self.observe(), {}

    def observe(self):
        return self.rng.normal([self.number, 5, 100], [1, 3, 7]).astype(np.float32)

    def step(self, action):
        self.actions.append(np.array(action))
        return self.observe(), float(np.float32(self.rng.normal(self.number, 3))), False, False, {}


gym.register("recipes/Numbered-v0", Numbered, max_episode_steps=16)
ARGS = {"env_id": "recipes/Numbered-v0", "num_envs": 8, "num_minibatches": 2, "update_epochs": 3, "gamma": 0.9}
ARGS |= {"total_timesteps": 512, "learning_rate": 1e-2}
ONE_STEP = {"total_timesteps": 128, "num_minibatches": 1, "update_epochs": 1}


def test_two_ranks_train_as_one(tmp_path):
    """They end with the same weights, to the bit: gradients are averaged, and the KL limit ends an update for both in
    the same minibatch. What they show of their environments is what one process shows that has all of them: the
    statistics, and the rows of episodes.csv. Seeds and noise differ. Both take up the checkpoint and go on."""
    script = with_recipes("ppo_continuous", "torchrun")

    def train(rank):
        MEMBERS.clear()
        args = small(script, tmp_path / "two", **ARGS, target_kl=0.01)
        agent, run_dir = script.train(args)
        left = {"agent": agent.state_dict(), "run_dir": str(run_dir), "seeds": [x.first_seed for x in MEMBERS]}
        left["actions"] = torch.from_numpy(np.array([x.actions for x in MEMBERS]))
        torch.save(left, tmp_path / f"rank-{rank}.pt")

    def resume(rank):
        (folder,) = (tmp_path / "two" / "runs").iterdir()
        agent, _ = script.train(small(script, tmp_path, **ARGS | {"total_timesteps": 640}), resume=folder)
        torch.save(agent.state_dict(), tmp_path / f"resumed-{rank}.pt")

    two_ranks(train)
    two_ranks(resume)
    first, second = (torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1))
    torch.testing.assert_close(first["agent"], second["agent"], atol=0, rtol=0)
    resumed = [torch.load(tmp_path / f"resumed-{rank}.pt") for rank in (0, 1)]
    torch.testing.assert_close(*resumed, atol=0, rtol=0)
    assert second["run_dir"] == "None" and len({*first["seeds"], *second["seeds"]}) == 8
    # The first policy is nearly the same noise everywhere. Each rank draws its own.
    noise = [rank["actions"][:, :16].flatten() for rank in (first, second)]
    assert abs(torch.corrcoef(torch.stack(noise))[0, 1]) < 0.6
    (two,) = (tmp_path / "two" / "runs").iterdir()
    assert first["run_dir"] == str(two)
    saved = script.load_checkpoint(two)
    assert saved["global_step"] == 640 and saved["args"]["num_envs"] == 8
    # Of 4 iterations, 3 epochs, 2 minibatches, the limit has ended some; the fifth iteration had none.
    assert 4 <= saved["optimizer"]["state"][0]["step"] - 3 * 2 < 4 * 3 * 2
    assert [step for step, _ in scalars(two)["charts/episodic_return"]] == [128, 256, 384, 512, 640]

    MEMBERS.clear()
    alone, one = script.train(small(script, tmp_path / "one", **ARGS))
    for name in (name for name in alone.state_dict() if "rms" in name):
        torch.testing.assert_close(first["agent"][name], alone.state_dict()[name], rtol=1e-9, atol=0)
    table = episodes(one)
    assert episodes(two)[: len(table)] == table and len(table) == 1 + 4 * 8 - 7  # shortened ones are not logged


def test_two_ranks_take_the_mean_gradient(tmp_path):
    """Adam's first moment is a tenth of the first gradient. The critic's part, which does not depend on actions, equals
    the one of a single process with all environments. The bound holds for the mean: a mean of bounded gradients, which
    point to different sides, would be shorter."""
    script = with_recipes("ppo_continuous", "torchrun")

    def gradient(folder, **changes):
        MEMBERS.clear()
        agent, run_dir = script.train(small(script, tmp_path / folder, **ARGS | ONE_STEP | changes))
        if run_dir:
            sizes = [parameter.numel() for parameter in agent.parameters()]
            names = [name for name, _ in agent.named_parameters()]
            parts = (10 * script.load_checkpoint(run_dir)["optimizer"]["state"][0]["exp_avg"]).split(sizes)
            torch.save(dict(zip(names, parts)), tmp_path / f"{folder}.pt")

    two_ranks(lambda rank: gradient("mean", max_grad_norm=0.0))
    two_ranks(lambda rank: gradient("bounded", max_grad_norm=1e-3))
    gradient("alone", max_grad_norm=0.0)
    mean, bounded, alone = (torch.load(tmp_path / f"{name}.pt") for name in ("mean", "bounded", "alone"))
    critic = [name for name in alone if name.startswith("critic")]
    for name in critic:
        torch.testing.assert_close(mean[name], alone[name], rtol=1e-4, atol=1e-5)
    assert max(alone[name].abs().max() for name in critic) > 1e-2
    norm = torch.cat([part.flatten() for part in bounded.values()]).norm()
    assert norm.item() == pytest.approx(1e-3, rel=1e-3)


def test_what_ranks_cannot_share(tmp_path):
    """One line says what is wrong, before anything is made. One process alone needs no torchrun."""
    script = with_recipes("ppo_continuous", "torchrun")

    def train(rank):
        for changes in ({"num_envs": 7, "num_minibatches": 1}, {"num_envs": 8, "num_minibatches": 128}):
            with pytest.raises(script.UsageError, match="cannot be shared by 2 ranks"):
                script.train(small(script, tmp_path, **ARGS | changes))

    two_ranks(train)
    assert not list(tmp_path.iterdir())
