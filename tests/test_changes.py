"""The diffs of docs/your-environment.md, applied to ppo_continuous.py: each does what the page says."""

import importlib.util
import re
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT, SMALL, scalars

PAGE = (ROOT / "docs" / "your-environment.md").read_text()
DIFFS = {
    title: diff for title, diff in re.findall(r"^### (.*?)\n(?:(?!^###).)*?^```diff\n(.*?)^```", PAGE, re.M | re.S)
}


class Levels(gym.Env):
    """Succeeds in every episode. It remembers the levels that episodes began with."""

    observation_space = action_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    level, seen = 0, []

    def __init__(self, length=1):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.level_of_episode = 0, self.level
        return self.observation_space.sample(), {}

    def step(self, action):
        self.steps += 1
        self.seen.append(self.level_of_episode)
        info = {"is_success": True, "level": self.level_of_episode}
        return self.observation_space.sample(), 1.0, self.steps == self.length, False, info


gym.register("changes/Levels-v0", Levels)


@pytest.fixture
def changed(request, tmp_path):
    """The script with the diff of a heading, imported."""
    text = (ROOT / "ppo_continuous.py").read_text()
    for hunk in re.split(r"^@@.*\n", DIFFS[request.param], flags=re.M)[1:]:
        old, new = ("".join(line[1:] for line in hunk.splitlines(True) if line[0] in " " + sign) for sign in "-+")
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = tmp_path / "changed.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("changed", path)
    module = sys.modules["changed"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(script, tmp_path, resume=None, **changes):
    args = {"env_id": "changes/Levels-v0", "runs_dir": str(tmp_path / "runs")} | SMALL | changes
    return script.train(script.Args(**args), resume)


@pytest.mark.parametrize("changed", ["A rollout metric"], indirect=True)
def test_metric(changed, tmp_path):
    _, run_dir = train(changed, tmp_path)
    assert [step for step, value in scalars(run_dir)["charts/action_size"] if value > 0] == [64, 128, 192, 256]


@pytest.mark.parametrize("changed", ["A loss term that needs the rewards"], indirect=True)
def test_loss_term(changed, tmp_path):
    """The head learns the reward, which is always the same."""
    _, run_dir = train(changed, tmp_path, learning_rate=0.01, norm_reward=False, total_timesteps=640)
    errors = [value for _, value in scalars(run_dir)["losses/reward_loss"]]
    assert errors[0] > 0.1 > 0.01 > errors[-1]


@pytest.mark.parametrize("changed", ["A schedule"], indirect=True)
def test_schedule(changed, tmp_path, monkeypatch):
    """The coefficient of each minibatch; 8 minibatches are an iteration."""
    seen, original = [], changed.ppo_loss

    def ppo_loss(agent, args, *minibatch):
        seen.append(args.ent_coef.item())
        return original(agent, args, *minibatch)

    monkeypatch.setattr(changed, "ppo_loss", ppo_loss)
    train(changed, tmp_path, target_kl=None, ent_coef=0.4)
    assert seen == pytest.approx(np.repeat([0.4, 0.3, 0.2, 0.1], 8))


@pytest.mark.parametrize("changed", ["A curriculum, saved in the checkpoint"], indirect=True)
def test_curriculum(changed, tmp_path):
    """One level more after each iteration; a resumed run goes on from its level, after the episodes of its reset."""
    Levels.seen.clear()
    agent, run_dir = train(changed, tmp_path)
    assert [*dict.fromkeys(Levels.seen)] == [0, 1, 2, 3] and agent.level == 4
    Levels.seen.clear()
    train(changed, tmp_path, resume=run_dir, total_timesteps=320)
    assert [*dict.fromkeys(Levels.seen)] == [0, 4]
    assert torch.load(run_dir / "checkpoint.pt", weights_only=True)["agent"]["level"] == 5


@pytest.mark.parametrize("changed", ["A curriculum, saved in the checkpoint"], indirect=True)
def test_curriculum_ignores_episodes_of_the_level_before(changed, tmp_path):
    """An episode is as long as a rollout of 16 environments. After two rollouts the level rises. The episodes of the
    third one began before that, so they do not count."""
    sizes = {"num_envs": 16, "num_steps": 4, "env_kwargs": '{"length": 4}'}
    agent, _ = train(changed, tmp_path, **sizes)
    assert agent.level == 1
