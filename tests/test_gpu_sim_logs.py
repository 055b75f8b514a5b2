"""variants/ppo_gpu_sim.py: what is logged: the simulator's numbers, times, the policy's standard deviation."""

import dataclasses
import re
import time

import pytest
import torch
import torch_envs
from conftest import scalars
from gpu_sim import env_id_of, make_args, script


class Logging(torch_envs.Drift):
    """Gives numbers as legged_gym and Isaac Lab do: tensors that the next step overwrites, plain numbers, vectors; some
    of them only where an episode ends."""

    terms, count = torch.zeros(2), 0

    def step(self, actions):
        *results, infos = super().step(actions)
        self.count += 1
        self.terms.fill_(self.count)
        log = {
            "Episode_Reward/alive": self.terms[0],
            "Curriculum/level": 3.5,
            "Metrics/both": self.terms + torch.arange(2),
        }
        if self.count % 4 == 0:
            log["Episode_Termination/time_out"] = self.count
        return *results, infos | {"log": log, "episode": {"rew_tracking": torch.tensor(2 * self.count)}}


def test_simulator_log(tmp_path):
    """One point per name and iteration: the mean over its steps. Names without a group get rsl_rl's, Episode."""
    _, run_dir = script.train(make_args(tmp_path, env_id=env_id_of(Logging), total_timesteps=320))
    logged = scalars(run_dir)
    expected = {"Episode_Reward/alive": (5.5, 15.5), "Curriculum/level": (3.5, 3.5), "Metrics/both": (6.0, 16.0)}
    expected |= {"Episode_Termination/time_out": (6.0, 16.0), "Episode/rew_tracking": (11.0, 31.0)}
    for name, (first, second) in expected.items():
        assert logged[name] == [(160, pytest.approx(first)), (320, pytest.approx(second))], name


def test_times(tmp_path, capsys):
    """Seconds of collecting and learning, in the log and on the console."""

    class Slow(torch_envs.Drift):
        def step(self, actions):
            time.sleep(0.02)
            return super().step(actions)

    _, run_dir = script.train(make_args(tmp_path, env_id=env_id_of(Slow), total_timesteps=320))
    logged = scalars(run_dir)
    printed = re.findall(r"collecting (\S+) s, learning (\S+) s", capsys.readouterr().out)
    for i, name in enumerate(("Perf/collection_time", "Perf/learning_time")):
        seconds = [value for _, value in logged[name]]
        assert [f"{x:.2f}" for x in seconds] == [times[i] for times in printed] and len(seconds) == 2
        assert min(seconds) > (0.2 if i == 0 else 0.0)
    both = sum(logged[name][1][1] for name in ("Perf/collection_time", "Perf/learning_time"))
    assert both <= 160 / logged["charts/SPS"][1][1]


def test_policy_std(tmp_path):
    """The logged figure is the mean standard deviation of the policy that acted. --desired-kl None: a constant rate."""
    args = make_args(tmp_path, init_std=0.7, total_timesteps=160, learning_rate=0.01, desired_kl=None)
    agent, run_dir = script.train(args)
    script.train(dataclasses.replace(args, total_timesteps=320), run_dir)
    logged = [value for _, value in scalars(run_dir)["charts/policy_std"]]
    assert logged == pytest.approx([0.7, agent.std.mean().item()], rel=1e-6) and abs(logged[1] - 0.7) > 0.01
    assert [rate for _, rate in scalars(run_dir)["charts/learning_rate"]] == pytest.approx([0.01, 0.01])
