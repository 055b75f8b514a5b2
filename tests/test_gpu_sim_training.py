"""variants/ppo_gpu_sim.py: what minibatches hold, what each setting does, and that all three updates learn."""

import dataclasses

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch_envs
from conftest import scalars
from gpu_sim import UPDATES, agent_for, env_id_of, make_agent, make_args, script, train_from
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from recipes import quick_compile


@pytest.mark.parametrize("update", ["rsl_rl", "google"])
def test_first_ratio_is_one(tmp_path, update, watch):
    """The policy of the first epoch is the one that acted. That of the second one is not."""
    minibatches = watch(script, "ppo_loss")
    script.train(make_args(tmp_path, update, update_epochs=2, num_minibatches=1, clip_coef=1e-4, learning_rate=3e-3))
    assert len(minibatches) == 10

    def of_epoch(epoch, name):
        return [metrics[name].item() for _, (_, metrics) in minibatches[epoch::2]]

    for name in ("kl", "approx_kl", "clipfrac"):
        assert max(map(abs, of_epoch(0, name))) < 1e-7
    assert min(of_epoch(1, "clipfrac")) > 0.5
    assert np.mean(of_epoch(1, "approx_kl")) == pytest.approx(np.mean(of_epoch(1, "kl")), rel=0.5)  # the latter exact


@pytest.mark.parametrize("unroll_length, norm_adv", [(None, "rollout"), (5, "none")])
def test_shuffling(tmp_path, unroll_length, norm_adv, watch):
    """Each epoch sees everything once, in an order of its own; unrolls stay whole, in their order. What belongs to a
    step stays with it. Advantages have mean 0 and deviation 1 over the rollout if asked for, not over a minibatch."""
    minibatches = watch(script, "ppo_loss")
    script.train(make_args(tmp_path, total_timesteps=160, unroll_length=unroll_length, norm_adv=norm_adv))
    batches = [minibatch for (_, _, minibatch), _ in minibatches]
    actions = [minibatch["actions"].squeeze(-1) for minibatch in batches]
    first, second = torch.cat(actions[:4], dim=1), torch.cat(actions[4:], dim=1)  # (L or 1, columns)
    assert first.shape == ((unroll_length, 32) if unroll_length else (1, 160))
    assert first.unique().numel() == 160 and not torch.equal(first, second)
    advantages = [minibatch["advantages"] for minibatch in batches]
    epochs = [torch.cat(advantages[i : i + 4], dim=1) for i in (0, 4)]
    rows = [sorted(map(tuple, torch.cat(pair).T.tolist())) for pair in zip((first, second), epochs)]
    assert rows[0] == rows[1]  # the same columns
    for minibatch in batches:  # actor and critic see the same numbers, and normalise them alike
        torch.testing.assert_close(minibatch["critic_obs"][..., :2], minibatch["obs"])

    def is_normalized(x):
        return abs(x.mean()) < 1e-5 and abs(x.std() - 1) < 1e-4

    assert is_normalized(epochs[0]) == (norm_adv == "rollout") and not any(map(is_normalized, advantages))


def test_learning_rate_of_desired_kl(tmp_path, monkeypatch):
    """The first minibatch leaves it: its KL is 0 but for rounding, 5e-8 where a network gives the standard deviations
    and compiled code compares them with those of eager code. A resumption goes on from where it was, or from the rate
    that is given."""
    original = script.normal_kl
    monkeypatch.setattr(script, "normal_kl", lambda *distributions: original(*distributions) + 5e-8)

    def last_rate(args, resume=None):
        _, run_dir = script.train(args, resume)
        return run_dir, script.load_checkpoint(run_dir)["optimizer"]["param_groups"][0]["lr"].item()

    args = make_args(tmp_path, total_timesteps=160)
    run_dir, rate = last_rate(args)
    assert abs(rate / args.learning_rate - 1) > 0.1
    again = {"update_epochs": 1, "num_minibatches": 1}
    assert last_rate(dataclasses.replace(args, **again, total_timesteps=320), run_dir) == (run_dir, rate)
    other = dataclasses.replace(args, **again, total_timesteps=480, learning_rate=1e-5)
    assert last_rate(other, run_dir) == (run_dir, pytest.approx(1e-5))


def test_normalised_observations_are_bounded():
    """An outlier must not throw a network off."""
    agent = make_agent(critic_obs_size=4)
    for rms, size in ((agent.obs_rms, 3), (agent.critic_obs_rms, 4)):
        far = torch.full((2, size), 1e6) * torch.tensor([[1.0], [-1.0]])
        assert agent.normalize(far, rms).tolist() == [[10.0] * size, [-10.0] * size]


@pytest.mark.parametrize("update", ["rsl_rl", "google"])
def test_compiled_is_eager(tmp_path, update, monkeypatch):
    """Weights, statistics and logs after 40 steps. Google's is only traced: building its kernels takes long."""
    if update == "google":
        quick_compile(monkeypatch)
    runs = [script.train(make_args(tmp_path, update, hidden_sizes=(16,), compile=compile)) for compile in (False, True)]
    (eager, eager_log), (compiled, compiled_log) = ((agent.state_dict(), scalars(path)) for agent, path in runs)
    for name, x in eager.items():
        torch.testing.assert_close(compiled[name], x, atol=1e-4, rtol=1e-3, msg=name)
    for name, values in eager_log.items():
        if name != "charts/SPS" and not name.startswith("Perf/"):
            np.testing.assert_allclose(compiled_log[name], values, atol=1e-4, rtol=1e-3, err_msg=name)


class Settled(torch_envs.Drift):
    """Each reward is what the value falls by: V(s) - 0.9 V(s'), V = 10 + slope * position, 0 after termination. Half of
    the environments say truncated too where they terminate."""

    def __init__(self, num_envs, slope):
        super().__init__(num_envs, torch.device("cpu"), seed=1, privileged=False)
        self.slope = slope

    def value(self, obs):
        return 10.0 + self.slope * obs[..., 0]

    def step(self, actions):
        before = self.value(self.observe())
        obs, _, terminations, truncations, infos = super().step(actions)
        rewards = before - 0.9 * self.value(infos["final_obs"]) * ~terminations
        truncations = truncations | (terminations & (torch.arange(self.num_envs) % 2 == 0))
        return obs, rewards, terminations, truncations, infos


@pytest.mark.parametrize("timeouts", ["auto", "current-value", "masked", "current-value again", "masked again"])
@pytest.mark.parametrize("advantages", ["gae", "brax"])
def test_advantages_are_zero_for_a_true_critic(tmp_path, timeouts, advantages, watch):
    """Whatever ends an episode, and wherever an unroll is cut; again: when every minibatch computes them again."""
    minibatches = watch(script, "ppo_loss")
    timeouts, _, again = timeouts.partition(" ")
    slope = 0.0 if timeouts == "current-value" else 3.0  # which is exact where the value does not change
    settings = {"gamma": 0.9, "timeouts": timeouts, "advantages": advantages, "recompute_targets": bool(again)}
    settings |= {"norm_obs": False, "unroll_length": 5 if again else None, "norm_adv": "none", "hidden_sizes": (16,)}
    settings |= {"learning_rate": 0.0, "desired_kl": None, "total_timesteps": 16 * 60, "num_steps": 60}
    envs = Settled(16, slope)
    args = make_args(tmp_path, env_id=env_id_of(lambda *_: envs), **settings)
    agent = agent_for(envs, args)
    for parameter in agent.critic.parameters():
        parameter.data.zero_()
    first, _, last = agent.critic  # between them an ELU, which changes no positive number
    first.weight.data[0, 0], first.bias.data[0] = 1.0, 4.0
    last.weight.data[0, 0], last.bias.data[0] = slope, 10.0 - 4.0 * slope
    train_from(agent, args, tmp_path / "run")
    assert len(minibatches) == 8
    for (_, _, minibatch), (_, metrics) in minibatches:
        torch.testing.assert_close(agent.get_value(minibatch["critic_obs"]), envs.value(minibatch["critic_obs"]))
        assert minibatch["advantages"].abs().max() < 2e-5
        assert metrics["value_loss"] < 2e-10 and abs(metrics["policy_loss"]) < 2e-5
        if again:
            assert not (minibatch["terminations"] & minibatch["truncations"]).any()  # if both, it terminated


@pytest.mark.parametrize("update", UPDATES)
def test_learns(tmp_path, update):
    """Random actions get about -10; standing still in the middle 50."""
    settings = {"num_envs": 128, "num_steps": 20, "learning_rate": 2e-3, "update_epochs": 4, "desired_kl": None}
    settings |= {"hidden_sizes": (32, 32, 32), "total_timesteps": 128 * 20 * 40, "ent_coef": 0.0, "seed": 3}
    agent, _ = script.train(make_args(tmp_path, update, **settings))
    returns = script.evaluate(agent, torch_envs.drift(64, torch.device("cpu"), 7), seed=7)
    assert returns.mean() > 38


@pytest.mark.parametrize("update", ["rsl_rl", "google"])
def test_no_step_waits_for_the_device(tmp_path, update):
    """Between two steps of a rollout nothing asks for a tensor's numbers, which on a GPU would wait for it."""
    calls = []

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function.overloadpacket.__name__
            if name in ("index", "index_put", "index_put_") and any(
                x is not None and x.dtype == torch.bool for x in args[1]
            ):
                name = "nonzero"  # how many rows a mask selects is such a number
            calls.append(name)
            return function(*args, **(kwargs or {}))

    class Methods(TorchFunctionMode):  # what moves a tensor to the host is no operator where it is there already
        def __torch_function__(self, function, types, args=(), kwargs=None):
            calls.append(function.__name__)
            return function(*args, **(kwargs or {}))

    class Counted(torch_envs.Drift):
        numbers = torch.ones(16)

        def step(self, actions):
            calls.append("step")
            *results, infos = super().step(actions)
            return *results, infos | {"log": {"Episode_Reward/alive": self.numbers[0], "Curriculum/level": 3.5}}

    with Operators(), Methods():
        script.train(make_args(tmp_path, update, env_id=env_id_of(Counted), update_epochs=1))
    waits = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"}
    waits |= {"cpu", "numpy", "tolist", "item", "__array__"}
    between = " ".join(calls).split(" step ")[1:-1]  # what follows each step
    waiting = [bool(waits & set(names.split())) for names in between]
    assert len(waiting) == 49  # five rollouts of ten, but for what follows the very last step
    assert [i for i, waits in enumerate(waiting) if waits] == [9, 19, 29, 39]  # the last of each rollout


def test_matrices_are_aligned(tmp_path):
    """Each begins at a multiple of 16 bytes of one vector, whatever the numbers of actions and observations: else the
    GPU's fast kernels cannot be used."""
    zeros = {name: torch.zeros(9, 4).tolist() for name in ("rewards", "dones", "time_outs")}
    envs = torch_envs.Replay({"obs": torch.zeros(9, 4, 5).tolist()} | zeros)
    envs.single_action_space = gym.spaces.Box(-1.0, 1.0, (3,))
    settings = {"num_envs": 4, "num_steps": 5, "num_minibatches": 2, "unroll_length": None, "recompute_targets": False}
    settings |= {"hidden_sizes": (12, 8), "critic_hidden_sizes": (20,), "total_timesteps": 20, "norm_adv": "minibatch"}
    agent, _ = script.train(make_args(tmp_path, env_id=env_id_of(lambda *_: envs), **settings))
    for name, parameter in agent.named_parameters():
        assert parameter.dim() < 2 or parameter.storage_offset() % 4 == 0, name
