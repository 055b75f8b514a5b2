"""benchmark/: what it measures is what happened."""

import csv
import sys

import gymnasium as gym
import numpy as np
import pytest
from conftest import ROOT, SMALL, run

import ppo_discrete

sys.path.insert(0, str(ROOT / "benchmark"))
import report
import speed


@pytest.mark.parametrize("name", ["CartPole", "Pendulum", "MountainCar", "Acrobot"])
def test_masked_velocities(name):
    """They read 0 in every observation, positions as they are; the time limit still truncates."""
    import benchmark.memory_envs as memory_envs

    (original,) = (env_id for env_id in memory_envs.VELOCITIES if env_id.startswith(name))
    masked, plain = gym.make(original.replace("-", "NoVel-")), gym.make(original)
    (obs, _), (whole, _) = masked.reset(seed=0), plain.reset(seed=0)
    indices = memory_envs.VELOCITIES[original]
    moved, truncated = False, False
    plain.action_space.seed(0)
    for _ in range(plain.spec.max_episode_steps):
        assert not obs[indices].any() and obs.dtype == whole.dtype
        np.testing.assert_array_equal(np.delete(obs, indices), np.delete(whole, indices))
        moved |= whole[indices].any()
        action = plain.action_space.sample()
        obs, _, terminated, truncated, _ = masked.step(action)
        whole, *_ = plain.step(action)
        if terminated or truncated:
            break
    assert moved and (truncated or name in ("CartPole", "Acrobot"))


def test_masked_environment_from_the_command_line(tmp_path):
    """As README says it, from the root of the repository; evaluation finds the environment again."""
    small = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    env_id = "benchmark.memory_envs:CartPoleNoVel-v1"
    finished = run("ppo_rnn", "--env-id", env_id, "--runs-dir", tmp_path, *small)
    assert finished.returncode == 0, finished.stderr
    finished = run("ppo_rnn", "--evaluate", next(tmp_path.iterdir()), "--eval-episodes=2")
    assert finished.returncode == 0 and "mean" in finished.stdout, finished.stderr


def test_report_of_a_run(tmp_path, monkeypatch):
    """The row of a run: the mean of its last 100 episodes, the flags that are not default; nothing for an unfinished
    run; a run of the same task, name and seed takes the place of the one before."""
    flags = {"total_timesteps": 4096, "compile": False, "update_epochs": 1, "gamma": 0.9}
    _, run_dir = ppo_discrete.train(ppo_discrete.Args(runs_dir=str(tmp_path), **flags))
    with open(run_dir / "episodes.csv") as file:
        returns = [float(row["episodic_return"]) for row in csv.DictReader(file)]
    row = report.summarise(run_dir)
    assert len(returns) > 100 and row["episodes"] == len(returns)
    assert float(row["last_100_mean"]) == pytest.approx(np.mean(returns[-100:]), abs=0.05)
    assert row["flags"] == "--total-timesteps=4096 --gamma=0.9 --update-epochs=1"
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    for _ in range(2):
        report.write_csv("some", [run_dir])
    assert len((tmp_path / "results" / "some.csv").read_text().splitlines()) == 2
    (run_dir / "checkpoint.pt").unlink()
    assert report.summarise(run_dir) is None


def test_speed_is_that_of_the_steps_in_between(monkeypatch):
    """A process that needs 3 s to start and 1 s for 500 steps: 500 steps/s, whatever the start takes."""
    contestants = {"slow": (lambda steps: (3, steps / 250), 500, 1000)}
    contestants["ppo_fast"] = (lambda steps: (3, steps / 500), 1000, 4000)
    monkeypatch.setattr(speed, "seconds", lambda command, cache: sum(command))
    slow, fast = speed.measure("case", contestants, 3)
    assert (slow["steps_per_second"], slow["first_start_seconds"], slow["ratio"]) == ("250", "3.0", "2.00")
    assert (fast["steps_per_second"], fast["start_seconds"], fast["ratio"]) == ("500", "3.0", "1.00")
    assert fast["steps_per_second_1m"] == "499"  # 2,003 s for a million


@pytest.mark.parametrize("contestant", ["SB3", "ppo_discrete", "simulator"])
def test_speed_commands_run(contestant, tmp_path):
    command, *_ = speed.make_cases()["discrete"][contestant]
    assert speed.seconds(command(512) + ["--no-compile"] * (contestant == "ppo_discrete"), str(tmp_path)) > 0
    with pytest.raises(SystemExit, match="failed"):
        speed.seconds([sys.executable, "-c", "raise ValueError"], str(tmp_path))
