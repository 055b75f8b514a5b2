"""variants/ppo_gpu_sim.py: parity with rsl_rl and Brax, what the actor may see, checkpoints, input."""

import dataclasses
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch._dynamo  # before a test replaces torch.randn_like: it looks up functions when imported
import torch_envs
from conftest import ROOT, TESTS, flags_of, golden, scalars
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(ROOT / "variants"))
import ppo_gpu_sim as script

ORACLE = json.loads((TESTS / "gpu_sim_oracle.json").read_text())
# What makes a run small enough for a test, for every update.
SMALL = {"env_id": "torch_envs:drift", "num_envs": 16, "num_steps": 10, "num_minibatches": 4, "update_epochs": 2}
SMALL |= {"total_timesteps": 800, "hidden_size": 16, "compile": False, "device": "cpu"}
UPDATES = list(script.UPDATES)
HAS_BRAX = importlib.util.find_spec("brax") is not None


def make_args(tmp_path, update="rsl_rl", **changes):
    given = script.UPDATES[update] | SMALL | {"update": update, "runs_dir": str(tmp_path / "runs")} | changes
    return script.Args(**given)


def run(*flags, timeout=120):
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "variants" / "ppo_gpu_sim.py"), *map(str, flags)]
    return subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=timeout
    )


def tensors(tree):
    return {name: torch.tensor(value) for name, value in tree.items()}


def test_named_defaults():
    """RSL_RL says what Args says, and the three sets name the same settings."""
    assert script.Args(**script.RSL_RL) == script.Args()
    assert script.RSL_RL.keys() == script.GOOGLE.keys() == script.NVIDIA.keys()
    changed = {name for name, value in script.NVIDIA.items() if value != script.GOOGLE[name]}
    assert changed == {"advantages", "recompute_targets", "norm_adv"}


# ---------------------------------------------------------------------------------------------------- parity


def advantages_of(case, **settings):
    """advantages and returns that the script gives for a golden case"""
    inputs, expected = golden(case)
    truncations = inputs.get("truncations", inputs.get("time_outs")).bool()
    dones = inputs["dones"].bool() if "dones" in inputs else truncations | inputs["terminations"].bool()
    args = script.Args(gamma=inputs["gamma"], gae_lambda=inputs["gae_lambda"], **settings)
    columns = inputs["rewards"], inputs["values"], inputs["last_values"], torch.full_like(inputs["rewards"], math.nan)
    return *script.estimate_targets(args, *columns, dones & ~truncations, truncations), expected


def test_advantages_of_brax():
    advantages, returns, expected = advantages_of("gae_brax", timeouts="masked", advantages="brax")
    torch.testing.assert_close(advantages, expected["advantages"])
    torch.testing.assert_close(returns, expected["vs"])


def test_advantages_of_nvidia():
    advantages, returns, expected = advantages_of("gae_nvidia_variant", timeouts="masked", advantages="gae")
    torch.testing.assert_close(script.normalize_advantages(advantages), expected["advantages"])
    torch.testing.assert_close(returns, expected["vs"])


def test_advantages_of_rsl_rl():
    advantages, returns, expected = advantages_of("gae_rsl_rl_timeouts", timeouts="current-value")
    torch.testing.assert_close(advantages, expected["advantages_raw"])
    torch.testing.assert_close(returns, expected["returns"])
    torch.testing.assert_close(script.normalize_advantages(advantages), expected["advantages_normalised"])


def test_advantages_of_brax_are_those_of_brax():
    """The function that Brax itself calls, where it is installed."""
    losses = pytest.importorskip("brax.training.agents.ppo.losses", reason="Brax is not installed")
    torch.manual_seed(1)
    rewards, values, (last_values, *_) = torch.randn(3, 7, 5)
    ends = torch.rand(7, 5)
    terminations, truncations = ends < 0.15, ends > 0.85
    flags = (x.float().numpy() for x in (truncations, terminations))
    arrays = (x.numpy() for x in (rewards, values, last_values))
    vs, theirs = losses.compute_gae(*flags, *arrays, lambda_=0.9, discount=0.97)
    args = script.Args(gamma=0.97, gae_lambda=0.9, timeouts="masked", advantages="brax")
    advantages, returns = script.estimate_targets(args, rewards, values, last_values, None, terminations, truncations)
    np.testing.assert_allclose(advantages, theirs, atol=1e-5)
    np.testing.assert_allclose(returns, vs, atol=1e-5)


def test_gaussian_kl():
    inputs, expected = golden("gaussian_kl")
    names = "old_mean", "old_std", "new_mean", "new_std"
    torch.testing.assert_close(script.normal_kl(*(inputs[name] for name in names)), expected["exact"])


def make_agent(obs_size=3, critic_obs_size=3, action_size=2, **changes):
    high = np.ones(action_size, np.float32)
    return script.Agent(obs_size, critic_obs_size, -high, high, script.Args(**{"hidden_size": 8} | changes))


def test_tanh_policy(monkeypatch):
    inputs, expected = golden("tanh_gaussian")
    agent = make_agent(policy="tanh").double()
    head = torch.cat([inputs["loc"], inputs["raw_scale"]], dim=-1)
    agent.actor = torch.nn.Identity()
    mean, std = agent.get_mean_and_std(head)
    torch.testing.assert_close(std, expected["scale"])
    monkeypatch.setattr(torch, "randn_like", lambda mean: inputs["noise"])
    log_prob, entropy = agent.get_log_prob_and_entropy(mean, std, inputs["x"])
    torch.testing.assert_close(log_prob, expected["logprob"])
    torch.testing.assert_close(entropy, expected["entropy"])
    torch.testing.assert_close(agent.to_env_action(inputs["x"]), expected["env_action"])


@pytest.mark.parametrize("far", [20.0, -20.0])
def test_tanh_policy_far_out(far):
    """Where 1 - tanh(x)^2 is 0 in float32, its logarithm is -2 |x| + log 4, and gradients are finite."""
    x = torch.tensor([far], requires_grad=True)
    slope = script.log_tanh_slope(x)
    torch.testing.assert_close(slope.item(), -2 * abs(far) + math.log(4))
    slope.backward()
    torch.testing.assert_close(x.grad.item(), -2.0 * np.sign(far))


@pytest.mark.parametrize("case", ["rms_brax_welford", "rms_brax_torch_notebook", "rms_rsl_rl"])
def test_statistics_are_those_of_others(case):
    """But for the count of 1e-4 that they begin with, as in baselines: Brax and rsl_rl begin with 0."""
    inputs, expected = golden(case)
    rms = script.RunningMeanStd((2,))
    for batch in inputs["batches"]:
        rms.update(batch.unsqueeze(0))
    variance = (
        expected["var"] if "var" in expected else expected.get("summed_variance", expected.get("running_variance")) / 5
    )
    torch.testing.assert_close(rms.mean, expected["mean"], atol=1e-9, rtol=3e-5)
    torch.testing.assert_close(rms.var, variance, atol=1e-9, rtol=3e-5)


SETTINGS = {"rsl_rl": {"clip_vloss": True, "vf_coef": 2.0, "clip_coef": 0.2}}
SETTINGS["brax_torch"] = {name: script.GOOGLE[name] for name in ("clip_vloss", "vf_coef", "clip_coef")}


@pytest.mark.parametrize("system", SETTINGS)
def test_total_loss(system):
    inputs, expected = golden("total_loss_by_system")
    settings = {"ent_coef": inputs["ent_coef"], "norm_adv": "rollout"} | SETTINGS[system]
    agent = make_agent(obs_size=1, action_size=1, **settings).double()
    agent.actor = torch.nn.Identity()
    agent.get_value = lambda obs: inputs["new_values"].unsqueeze(0)
    agent.std.data.copy_(inputs["log_std"].exp())
    columns = {"obs": inputs["mean"], "actions": inputs["action"], "log_probs": inputs["old_logprob"]}
    columns |= {"critic_obs": inputs["mean"], "values": inputs["old_values"], "returns": inputs["returns"]}
    columns |= {"means": inputs["old_mean"], "stds": inputs["old_log_std"].exp().expand_as(inputs["old_mean"])}
    advantages = inputs["advantages"]  # only rsl_rl normalises them
    columns |= {"advantages": script.normalize_advantages(advantages) if system == "rsl_rl" else advantages}
    loss, metrics = script.ppo_loss(agent, agent.args, {name: x.unsqueeze(0) for name, x in columns.items()})
    torch.testing.assert_close(loss.item(), expected[system])
    old, new = (
        torch.distributions.Normal(inputs[mean], inputs[log_std].exp())
        for mean, log_std in (("old_mean", "old_log_std"), ("mean", "log_std"))
    )
    forward, backward = (torch.distributions.kl_divergence(*pair).sum(-1).mean() for pair in ((old, new), (new, old)))
    torch.testing.assert_close(metrics["kl"], forward)
    assert abs(forward - backward) > 1e-3


def train_on_record(monkeypatch, args, oracle):
    """The script's train on what the other system saw, from its weights, with its noise and permutations."""

    def layers(state):
        return {name.removeprefix("mlp."): x for name, x in tensors(state).items() if "distribution" not in name}

    class Loaded(script.Agent):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            weights = oracle["weights"]
            self.actor.load_state_dict(layers(weights["actor"]))
            self.critic.load_state_dict(layers(weights["critic"]))
            if "distribution.std_param" in weights["actor"]:
                self.std.data.copy_(torch.tensor(weights["actor"]["distribution.std_param"]))

    monkeypatch.setattr(script, "Agent", Loaded)
    monkeypatch.setattr(script, "make_envs", lambda *_: torch_envs.Replay(oracle["record"]))
    monkeypatch.setattr(torch, "randn_like", torch_envs.wave)
    monkeypatch.setattr(torch, "randperm", lambda n, **_: torch.arange(n))
    agent, run_dir = script.train(args)
    for network, name in ((agent.actor, "actor"), (agent.critic, "critic")):
        after, before = (layers(oracle[when][name]) for when in ("after", "weights"))
        for layer, x in network.state_dict().items():
            assert (after[layer] - before[layer]).abs().max() > 1e-3
            torch.testing.assert_close(x, after[layer], atol=2e-6, rtol=2e-5)
    return agent, scalars(run_dir)


def test_update_of_rsl_rl(tmp_path, monkeypatch):
    """Six steps of its own PPO: time-outs, advantages, clipped value loss, KL and learning rate, gradient clipping."""
    oracle = ORACLE["rsl_rl"]
    settings = {"num_envs": 4, "num_steps": 6, "num_minibatches": 2, "update_epochs": 3, "gamma": 0.97}
    settings |= {"gae_lambda": 0.9, "max_grad_norm": 0.5, "learning_rate": 5e-3, "hidden_layers": 2, "norm_obs": False}
    args = make_args(tmp_path, total_timesteps=24, timeouts="current-value", **settings)
    agent, logged = train_on_record(monkeypatch, args, oracle)
    std = torch.tensor(oracle["after"]["actor"]["distribution.std_param"])
    torch.testing.assert_close(agent.std.data, std, atol=2e-6, rtol=2e-5)
    assert logged["charts/learning_rate"][0][1] == pytest.approx(oracle["learning_rate"], rel=1e-5)
    assert logged["losses/policy_loss"][0][1] == pytest.approx(oracle["losses"]["surrogate"], abs=1e-6)
    assert logged["losses/value_loss"][0][1] == pytest.approx(oracle["losses"]["value"] / 2, rel=1e-5)
    assert logged["losses/entropy"][0][1] == pytest.approx(oracle["losses"]["entropy"], rel=1e-6)


def test_update_of_brax(tmp_path, monkeypatch):
    """Six steps of the notebook's agent: masked time-outs, targets from the current critic, tanh policy, its losses."""
    oracle, losses, original = ORACLE["brax"], [], script.ppo_loss

    def spy(*arguments):
        loss, metrics = original(*arguments)
        losses.append(loss.item())
        return loss, metrics

    monkeypatch.setattr(script, "ppo_loss", spy)
    settings = {"num_envs": 4, "num_steps": 6, "unroll_length": 3, "num_minibatches": 2, "update_epochs": 3}
    args = make_args(
        tmp_path, "google", total_timesteps=24, **settings, learning_rate=5e-3, hidden_size=16, norm_obs=False
    )
    train_on_record(monkeypatch, args, oracle)
    np.testing.assert_allclose(losses, oracle["losses"], atol=1e-6, rtol=1e-5)


# ---------------------------------------------------------------------------------------------------- semantics


@pytest.mark.parametrize("update", UPDATES)
def test_first_ratio_is_one(tmp_path, monkeypatch, update):
    seen = record_calls(monkeypatch, "normal_kl")
    _, run_dir = script.train(make_args(tmp_path, update, update_epochs=1, num_minibatches=1))
    logged = scalars(run_dir)
    for name in ("losses/clipfrac", "losses/approx_kl"):
        assert len(logged[name]) == 5 and max(abs(value) for _, value in logged[name]) < 1e-6, name
    assert len(seen) == 5 and all(kl.abs().max() < 1e-6 for *_, kl in seen)


def record_calls(monkeypatch, name):
    """The arguments of all calls of a function of the script, and what it returned"""
    calls, original = [], getattr(script, name)

    def spy(*arguments, **more):
        calls.append((*arguments, *more.values(), original(*arguments, **more)))
        return calls[-1][-1]

    monkeypatch.setattr(script, name, spy)
    return calls


def is_normalized(advantages):
    return abs(advantages.mean()) < 1e-5 and abs(advantages.std() - 1) < 1e-4


@pytest.mark.parametrize(
    "update, flags, normalized",
    [
        ("rsl_rl", {}, "rollout"),
        ("google", {}, "none"),
        ("nvidia", {}, "minibatch"),
        ("google", {"norm_adv": "minibatch"}, "minibatch"),
        ("nvidia", {"norm_adv": "none"}, "none"),
    ],
)
def test_what_advantages_come_from(tmp_path, monkeypatch, update, flags, normalized):
    """How often they are computed, of what, and over what they are normalised, when the policy loss gets them."""
    targets = record_calls(monkeypatch, "estimate_targets")
    losses = record_calls(monkeypatch, "clipped_policy_loss")
    settings = {"num_steps": 20, "total_timesteps": 16 * 20, "unroll_length": None if update == "rsl_rl" else 5}
    script.train(make_args(tmp_path, update, **settings, **flags))
    given = [advantages for _, advantages, *_ in losses]
    assert len(given) == 8  # two epochs of four minibatches
    assert {x.shape for x in given} == {(1, 80) if update == "rsl_rl" else (5, 16)}
    assert all(is_normalized(x) == (normalized == "minibatch") for x in given)
    epochs = torch.cat(given[:4], dim=1), torch.cat(given[4:], dim=1)
    if normalized != "minibatch":  # which depends on the minibatches
        assert is_normalized(epochs[0]) == (normalized == "rollout")
        same = torch.equal(*(x.flatten().sort().values for x in epochs))
        assert same == (update != "google")  # Google's are those of a critic that has learned since
    assert len(targets) == (9 if update == "google" else 1)


@pytest.mark.parametrize("unroll_length", [None, 5])
def test_shuffling(tmp_path, monkeypatch, unroll_length):
    """Each epoch sees everything once, in an order of its own; unrolls stay whole, in their order."""
    losses = record_calls(monkeypatch, "ppo_loss")
    script.train(make_args(tmp_path, total_timesteps=160, unroll_length=unroll_length))
    actions = [minibatch["actions"].squeeze(-1) for _, _, minibatch, _ in losses]
    first, second = torch.cat(actions[:4], dim=1), torch.cat(actions[4:], dim=1)  # (L or 1, columns)
    assert first.shape == ((unroll_length, 32) if unroll_length else (1, 160))
    assert first.unique().numel() == 160 and not torch.equal(first, second)
    rows = [sorted(map(tuple, epoch.T.tolist())) for epoch in (first, second)]
    assert rows[0] == rows[1]  # the same columns
    columns = sorted(range(first.shape[1]), key=lambda i: first[0, i])
    assert columns != list(range(len(columns)))


def test_clipping_of_values(tmp_path, monkeypatch):
    """--vf-clip-coef, or else --clip-coef, or with --no-clip-vloss none"""
    for flags, expected in (
        ({"clip_coef": 0.3}, 0.3),
        ({"vf_clip_coef": 0.7}, 0.7),
        ({"vf_clip_coef": 0.7, "clip_vloss": False}, None),
    ):
        losses = record_calls(monkeypatch, "clipped_value_loss")
        script.train(make_args(tmp_path, total_timesteps=160, **flags))
        assert {clip_coef for *_, clip_coef, _ in losses} == {expected}


def test_target_kl(tmp_path, monkeypatch):
    """The minibatch in which the KL is too high takes no step; the first one, whose KL is 0, does."""
    losses = record_calls(monkeypatch, "ppo_loss")
    agent, _ = script.train(make_args(tmp_path, total_timesteps=160, target_kl=1e-12, desired_kl=None))
    assert len(losses) == 2
    once, _ = script.train(make_args(tmp_path, total_timesteps=160, num_minibatches=1, update_epochs=1))
    assert not torch.equal(agent.actor[0].weight, once.actor[0].weight)
    losses.clear()
    script.train(make_args(tmp_path, total_timesteps=160, target_kl=1e3))
    assert len(losses) == 8


@pytest.mark.parametrize("anneal_lr", [False, True])
def test_learning_rate(tmp_path, anneal_lr):
    """Linear from --learning-rate towards 0, or constant: as logged, and as Adam has it in the end."""
    settings = {"learning_rate": 1e-3, "desired_kl": None, "anneal_lr": anneal_lr}
    _, run_dir = script.train(make_args(tmp_path, **settings))
    rates = [value for _, value in scalars(run_dir)["charts/learning_rate"]]
    expected = [1e-3, 0.8e-3, 0.6e-3, 0.4e-3, 0.2e-3] if anneal_lr else [1e-3] * 5
    assert rates == pytest.approx(expected)
    last = script.load_checkpoint(run_dir)["optimizer"]["param_groups"][0]["lr"].item()
    assert last == pytest.approx(expected[-1])


def test_normalised_observations_are_bounded():
    """An outlier must not throw a network off."""
    agent = make_agent(critic_obs_size=4)
    for rms, size in ((agent.obs_rms, 3), (agent.critic_obs_rms, 4)):
        far = torch.full((2, size), 1e6) * torch.tensor([[1.0], [-1.0]])
        assert agent.normalize(far, rms).tolist() == [[10.0] * size, [-10.0] * size]


@pytest.mark.parametrize("update", ["rsl_rl", "google"])
def test_compiled_is_eager(tmp_path, update):
    """Weights, statistics and logs after 40 steps."""
    runs = [script.train(make_args(tmp_path, update, compile=compile)) for compile in (False, True)]
    (eager, eager_log), (compiled, compiled_log) = ((agent.state_dict(), scalars(path)) for agent, path in runs)
    for name, x in eager.items():
        torch.testing.assert_close(compiled[name], x, atol=1e-4, rtol=1e-3, msg=name)
    for name, values in eager_log.items():
        if name != "charts/SPS":
            np.testing.assert_allclose(compiled_log[name], values, atol=1e-4, rtol=1e-3, err_msg=name)


class Settled(torch_envs.Drift):
    """Each reward is what the value falls by: V(s) - 0.9 V(s'), V = 10 + slope * position, 0 after termination. Half of
    the environments say truncated too where they terminate."""

    slope = 3.0

    def __init__(self, num_envs, device, seed):
        super().__init__(num_envs, device, seed, privileged=False)

    def value(self, obs):
        return 10.0 + self.slope * obs[..., 0]

    def step(self, actions):
        before = self.value(self.observe())
        obs, _, terminations, truncations, infos = super().step(actions)
        rewards = before - 0.9 * self.value(infos["final_obs"]) * ~terminations
        truncations = truncations | (terminations & (torch.arange(self.num_envs) % 2 == 0))
        return obs, rewards, terminations, truncations, infos


def settled(num_envs, device, seed):
    return Settled(num_envs, device, seed)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("timeouts", ["exact", "current-value", "masked"])
@pytest.mark.parametrize("advantages", ["gae", "brax"])
def test_advantages_are_zero_for_a_true_critic(tmp_path, monkeypatch, timeouts, advantages, recompute):
    """Whatever ends an episode, and wherever an unroll is cut."""
    if recompute and timeouts == "exact":
        pytest.skip("refused")
    slope = 0.0 if timeouts == "current-value" else 3.0  # which is exact where the value does not change
    monkeypatch.setattr(Settled, "slope", slope)
    monkeypatch.setattr(torch_envs, "settled", settled, raising=False)
    true_value = lambda self, obs: 10.0 + slope * obs[..., 0] + 0.0 * self.critic(obs).squeeze(-1)  # noqa: E731
    monkeypatch.setattr(script.Agent, "get_value", true_value)
    original, seen = script.estimate_targets, []

    def spy(args, rewards, values, last_values, timeout_values, terminations, truncations):
        assert not (terminations & truncations).any()  # if both, it terminated
        seen.append(original(args, rewards, values, last_values, timeout_values, terminations, truncations))
        return seen[-1]

    monkeypatch.setattr(script, "estimate_targets", spy)
    settings = {"gamma": 0.9, "timeouts": timeouts, "advantages": advantages, "recompute_targets": recompute}
    settings |= {"env_id": "torch_envs:settled", "norm_obs": False, "unroll_length": 5 if recompute else None}
    settings["norm_adv"] = "none" if recompute else "rollout"
    script.train(make_args(tmp_path, total_timesteps=16 * 60, num_steps=60, **settings))
    assert seen and max(advantage.abs().max() for advantage, _ in seen) < 2e-5


class Grouped(gym.Env):
    """Observations of two groups, (1, 2) and (3,). The last number of the second is the privileged one."""

    def __init__(self, privileged=0.0, names=("policy", "critic")):
        boxes = gym.spaces.Box(-9, 9, (1, 2), np.float32), gym.spaces.Box(-9, 9, (3,), np.float64)
        self.observation_space = gym.spaces.Dict(dict(zip(names, boxes)))
        self.action_space, self.names, self.privileged = gym.spaces.Box(-1, 1, (1, 1)), names, privileged

    def observe(self):
        seen = self.np_random.normal(size=2).astype(np.float32)
        return dict(zip(self.names, (seen[None], np.append(seen, self.privileged))))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, action):
        return self.observe(), float(action.sum()), False, False, {}


gym.register("box/Grouped-v0", Grouped, max_episode_steps=7)


def drift_groups(privileged):
    torch.manual_seed(1)
    seen = torch.randn(5, 2)
    return {"policy": seen, "critic": torch.cat([seen, privileged], dim=1)}


def gymnasium_groups(privileged):
    """What GymEnvs gives for environments with these privileged numbers."""
    rows = []
    for number in privileged.flatten().tolist():
        gym.register("box/OneGrouped-v0", Grouped, kwargs={"privileged": number})
        rows.append(script.GymEnvs("box/OneGrouped-v0", 1, torch.device("cpu")).reset(seed=1)[0])
        del gym.registry["box/OneGrouped-v0"]
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.parametrize("groups", [drift_groups, gymnasium_groups])
@pytest.mark.parametrize("update", ["rsl_rl", "google"])
def test_privileged_observations_reach_the_critic_only(groups, update):
    """d action / d privileged is exactly 0, for simulators of tensors and for Dicts of gymnasium; d value is not."""
    agent = make_agent(2, 3, **script.UPDATES[update] | {"hidden_size": 8})

    def act_and_judge(privileged):
        obs, critic_obs = script.split_obs(groups(privileged))
        assert obs.shape == (5, 2) and critic_obs.shape == (5, 3)
        mean, std = agent.get_mean_and_std(agent.normalize(obs, agent.obs_rms))
        value = agent.get_value(agent.normalize(critic_obs, agent.critic_obs_rms))
        return torch.cat([mean, std, agent.predict(obs)], dim=1), value

    zeros = torch.zeros(5, 1)
    (action, value), (other_action, other_value) = act_and_judge(zeros), act_and_judge(zeros + 0.5)
    assert torch.equal(action, other_action) and (value != other_value).all()
    if groups is drift_groups:
        privileged = zeros.clone().requires_grad_()
        obs, critic_obs = script.split_obs(groups(privileged))
        action = agent.to_env_action(agent.get_mean_and_std(agent.normalize(obs, agent.obs_rms))[0])
        assert torch.autograd.grad(action.sum(), privileged, allow_unused=True) == (None,)
        (slope,) = torch.autograd.grad(
            agent.get_value(agent.normalize(critic_obs, agent.critic_obs_rms)).sum(), privileged
        )
        assert (slope != 0).all()


@pytest.mark.parametrize("names, sizes", [(("policy", "critic"), (2, 3)), (("position", "speed"), (5, 5))])
def test_gymnasium_groups(tmp_path, monkeypatch, names, sizes):
    """Only "policy" and "critic" are groups; other Dicts are one vector for both. Final observations are their own."""
    monkeypatch.setitem(gym.registry, "box/Grouped-v0", gym.spec("box/Grouped-v0"))
    gym.spec("box/Grouped-v0").kwargs["names"] = names
    agent, _ = script.train(make_args(tmp_path, env_id="box/Grouped-v0"))
    assert (len(agent.obs_rms.mean), len(agent.critic_obs_rms.mean)) == sizes
    envs = script.GymEnvs("box/Grouped-v0", 2, torch.device("cpu"))
    envs.reset(seed=1)
    for _ in range(7):
        obs, _, _, truncations, infos = envs.step(torch.zeros(2, 1))
    assert truncations.all() and obs.keys() == infos["final_obs"].keys()
    for group, final in zip(script.split_obs(obs), script.split_obs(infos["final_obs"])):
        assert group.shape == final.shape and (group != final)[:, 0].all()


def test_minibatches_of_actor_and_critic(tmp_path, monkeypatch):
    original = script.ppo_loss

    def spy(agent, args, minibatch):  # both groups begin with the same numbers, and are normalised alike
        torch.testing.assert_close(minibatch["critic_obs"][..., :2], minibatch["obs"])
        return original(agent, args, minibatch)

    monkeypatch.setattr(script, "ppo_loss", spy)
    script.train(make_args(tmp_path))


@pytest.mark.parametrize("update", ["rsl_rl", "google"])
def test_export(tmp_path, update):
    """The file alone, without this project and without a critic, gives the actions of the agent, for any number of
    observations: the mean action, of observations normalised by the statistics of the run, within the bounds."""
    agent, run_dir = script.train(make_args(tmp_path, update, total_timesteps=160 if update == "rsl_rl" else 800))
    obs = 2 * torch.randn(5, 2)
    path = script.export_actor(run_dir)
    code = "import sys, json, torch; actor = torch.export.load(sys.argv[1]).module()\n"
    code += "print(json.dumps([actor(torch.tensor(json.loads(sys.argv[2]))).tolist(), [*actor.state_dict()]]))"
    alone = subprocess.run(
        [sys.executable, "-c", code, path, str(obs.tolist())], capture_output=True, text=True, cwd=tmp_path
    )
    actions, names = json.loads(alone.stdout)
    torch.testing.assert_close(torch.tensor(actions), agent.predict(obs), atol=1e-6, rtol=1e-5)
    mean = agent.actor(((obs - agent.obs_rms.mean) / agent.obs_rms.var.sqrt()).float())[:, :1]
    expected = mean.clamp(-1, 1) if update == "rsl_rl" else mean.tanh()
    torch.testing.assert_close(torch.tensor(actions), expected.detach(), atol=1e-5, rtol=1e-4)
    assert "actor.0.weight" in names and not any("critic" in name for name in names)


# ---------------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize("update", UPDATES)
def test_learns(tmp_path, update):
    """Random actions get about -10; standing still in the middle 50."""
    settings = {"num_envs": 128, "num_steps": 20, "learning_rate": 2e-3, "update_epochs": 4, "desired_kl": None}
    settings |= {"hidden_size": 32, "total_timesteps": 128 * 20 * 40, "ent_coef": 0.0, "seed": 3}
    agent, _ = script.train(make_args(tmp_path, update, **settings))
    returns = script.evaluate(agent, torch_envs.drift(64, torch.device("cpu"), 7), seed=7)
    assert returns.mean() > 38


def test_episodes(tmp_path, monkeypatch):
    """Every finished episode once, where it ended, with its raw return and length, whatever --reward-scale."""
    seen = []

    class Spy(torch_envs.Drift):
        def reset(self, seed=None):
            seen.clear()
            self.count, self.begun, self.returns = 0, torch.zeros(16), torch.zeros(16)
            return super().reset(seed)

        def step(self, actions):
            obs, rewards, terminations, truncations, infos = super().step(actions)
            self.count += 1
            self.returns += rewards
            for n in (terminations | truncations).nonzero().flatten().tolist():
                seen.append([16 * self.count, self.returns[n].item(), self.count - self.begun[n].item()])
                self.returns[n], self.begun[n] = 0.0, self.count
            return obs, rewards, terminations, truncations, infos

    monkeypatch.setattr(torch_envs, "spy", Spy, raising=False)
    _, run_dir = script.train(make_args(tmp_path, env_id="torch_envs:spy", reward_scale=0.1, total_timesteps=4000))
    header, *rows = (line.split(",") for line in (run_dir / "episodes.csv").read_text().splitlines())
    assert header == ["global_step", "episodic_return", "episodic_length", "seconds"]
    assert len(seen) > 50
    np.testing.assert_allclose([[float(x) for x in row[:3]] for row in rows], seen, atol=1e-4, rtol=1e-4)


class Timed(torch_envs.Drift):
    """With what --stagger-envs needs. Nothing terminates."""

    max_episode_length = 50

    @property
    def episode_length_buf(self):
        return self.steps

    @episode_length_buf.setter
    def episode_length_buf(self, steps):
        self.steps = steps

    def step(self, actions):
        obs, rewards, *ends, infos = super().step(torch.zeros_like(actions))
        return obs, rewards, *ends, infos

    def start(self, where):
        super().start(where)
        self.wind = torch.zeros_like(self.wind)


@pytest.mark.parametrize("update", ["rsl_rl", "google"])
def test_stagger_envs(tmp_path, monkeypatch, update):
    """rsl_rl's episodes end at many different times, and those that began late are not logged; Google's all at once."""
    monkeypatch.setattr(torch_envs, "timed", Timed, raising=False)
    settings = {"env_id": "torch_envs:timed", "total_timesteps": 16 * 150}
    _, run_dir = script.train(make_args(tmp_path, update, **settings))
    rows = [line.split(",") for line in (run_dir / "episodes.csv").read_text().splitlines()[1:]]
    assert {row[2] for row in rows} == {"50"}
    ends = [int(row[0]) // 16 for row in rows]
    assert len(ends) == (48 if update == "google" else 32)  # in 150 steps; what is left of the first, then two
    if update == "google":
        assert set(ends) == {50, 100, 150}
    else:
        assert min(ends) > 50 and len(set(ends)) > 16


def test_statistics_have_seen_what_was_acted_on(tmp_path, monkeypatch):
    """Every observation once, the first included, the last not yet, nothing of the step that only looks at infos."""
    seen = []

    class Spy(torch_envs.Drift):
        def reset(self, seed=None):
            seen.clear()
            obs, infos = super().reset(seed)
            seen.append(obs)
            return obs, infos

        def step(self, actions):
            obs, *others = super().step(actions)
            seen.append(obs)
            return obs, *others

    monkeypatch.setattr(torch_envs, "spy", lambda *_: Spy(*_, privileged=False), raising=False)
    agent, _ = script.train(make_args(tmp_path, env_id="torch_envs:spy"))
    everything = torch.stack(seen[:-1]).flatten(0, 1).double()
    assert len(everything) == 800 == pytest.approx(agent.obs_rms.count.item())
    torch.testing.assert_close(agent.obs_rms.mean, everything.mean(0), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(agent.obs_rms.var, everything.var(0, correction=0), atol=1e-4, rtol=1e-4)


def test_first_minibatch_leaves_the_learning_rate(tmp_path, monkeypatch):
    """Its KL is 0 but for rounding: 5e-8 where a network gives the standard deviations and compiled code compares them
    with those of eager code."""
    original = script.normal_kl
    monkeypatch.setattr(script, "normal_kl", lambda *distributions: original(*distributions) + 5e-8)
    settings = {"update_epochs": 1, "num_minibatches": 1, "desired_kl": 0.01, "total_timesteps": 160}
    _, run_dir = script.train(make_args(tmp_path, "google", **settings))
    assert script.load_checkpoint(run_dir)["optimizer"]["param_groups"][0]["lr"].item() == pytest.approx(3e-4)


def test_resume_with_another_learning_rate(tmp_path):
    """--desired-kl, rsl_rl's, goes on from it; otherwise from where it was."""
    settings = {"update_epochs": 1, "num_minibatches": 1, "desired_kl": 0.01}  # of which the first changes nothing
    args = make_args(tmp_path, total_timesteps=160, **settings)
    _, run_dir = script.train(args)
    for steps, given, expected in [(320, {}, args.learning_rate), (480, {"learning_rate": 1e-5}, 1e-5)]:
        args = dataclasses.replace(args, resume=str(run_dir), total_timesteps=steps, **given)
        script.train(args)
        found = script.load_checkpoint(run_dir)["optimizer"]["param_groups"][0]["lr"].item()
        assert found == pytest.approx(expected)


def test_simulators_with_networks(tmp_path, monkeypatch):
    """Nothing is kept of the graph behind their observations, which would grow from step to step."""

    class Actuated(torch_envs.Drift):
        gain = torch.nn.Parameter(torch.ones(()))

        def step(self, actions):
            obs, rewards, *rest = super().step(actions * self.gain)
            assert not rewards.requires_grad
            return obs, rewards * self.gain, *rest

    monkeypatch.setattr(torch_envs, "actuated", Actuated, raising=False)
    script.train(make_args(tmp_path, env_id="torch_envs:actuated"))


@pytest.mark.filterwarnings("ignore")  # gymnasium's, about the shared array
def test_final_observation_is_the_last_one(tmp_path):
    """Also of an environment that has begun the next episode in the same array."""
    envs = script.make_envs(make_args(tmp_path, env_id="box/OneArray-v0"), 2, torch.device("cpu"))
    envs.reset()
    for _ in range(5):
        obs, _, _, truncations, infos = envs.step(torch.zeros(2, 1))
    assert truncations.all() and (infos["final_obs"]["policy"] == 5).all() and not obs["policy"].any()


class Narrow(gym.Env):
    """Bounds of 64-bit numbers that 32 bits cannot hold: the nearest ones are outside."""

    observation_space = gym.spaces.Box(-9, 9, (1,), np.float32)
    action_space = gym.spaces.Box(np.array([0.1, -0.7]), np.array([0.3, 0.7]), dtype=np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action):
        assert action.dtype == np.float64 and self.action_space.contains(action), action
        return np.ones(1, np.float32), 1.0, True, False, {}


gym.register("box/Narrow-v0", Narrow)


@pytest.mark.parametrize("update", ["rsl_rl", "google"])
def test_bounds_of_double_precision(tmp_path, update):
    """Actions stay inside, however far out the policy wants to go."""
    agent, _ = script.train(make_args(tmp_path, update, env_id="box/Narrow-v0"))
    space = Narrow.action_space
    for far in (-100.0, -9.0, -5.0, 0.0, 5.0, 9.0, 100.0):
        action = agent.to_env_action(torch.full((2,), far)).numpy()
        assert space.contains(action)
        if abs(far) == 100:
            np.testing.assert_array_equal(action, space.low if far < 0 else space.high)


@pytest.mark.parametrize("update", UPDATES)
def test_no_step_waits_for_the_device(tmp_path, monkeypatch, update):
    """Between two steps of a rollout nothing asks for a tensor's numbers, which on a GPU would wait for it."""
    calls = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function.overloadpacket.__name__
            if name in ("index", "index_put", "index_put_") and any(
                x is not None and x.dtype == torch.bool for x in args[1]
            ):
                name = "nonzero"  # how many rows a mask selects is such a number
            calls.append(name)
            return function(*args, **(kwargs or {}))

    # What moves a tensor to the host leaves no trace where it is there already.
    def recorded(name, original):
        def method(*arguments, **more):
            calls.append(name)
            return original(*arguments, **more)

        return method

    to_host = {"cpu", "numpy", "tolist", "item", "__array__"}
    for name in to_host:
        monkeypatch.setattr(torch.Tensor, name, recorded(name, getattr(torch.Tensor, name)))

    class Spy(torch_envs.Drift):
        def step(self, actions):
            calls.append("step")
            return super().step(actions)

    monkeypatch.setattr(torch_envs, "spy", Spy, raising=False)
    args = make_args(tmp_path, update, env_id="torch_envs:spy", update_epochs=1)
    with Record():
        script.train(args)
    waits = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"} | to_host
    between = " ".join(calls).split("step")[1:-1]  # what follows each step
    waiting = [bool(waits & set(names.split())) for names in between]
    assert len(waiting) == 49  # five rollouts of ten, but for what follows the very last step
    assert [i for i, waits in enumerate(waiting) if waits] == [9, 19, 29, 39]  # the last of each rollout


def test_resume(tmp_path):
    """The learner is that of the checkpoint, to the last bit. Two resumptions of one checkpoint are the same run."""
    args = make_args(tmp_path, checkpoint_interval=2, seed=3, anneal_lr=True, desired_kl=None)
    agent, run_dir = script.train(args, stop_signals=[(2, 0.0)])  # one iteration, which is saved
    saved = script.load_checkpoint(run_dir)
    assert saved["global_step"] == 160
    first_rows = (run_dir / "episodes.csv").read_text().splitlines()
    with open(run_dir / "episodes.csv", "a") as file:  # what a kill may leave behind
        file.write("320,1.5,10,3.0\n160,1.5,7\n160,x")
    copy = tmp_path / "runs" / "copy"
    shutil.copytree(run_dir, copy)
    again = dataclasses.replace(args, resume=str(run_dir), total_timesteps=160)
    unchanged, _ = script.train(again)  # no step is left to do
    for name, x in agent.state_dict().items():
        assert torch.equal(x, saved["agent"].state_dict()[name]) and torch.equal(x, unchanged.state_dict()[name]), name
    assert (run_dir / "episodes.csv").read_text().splitlines() == first_rows

    one, other = (script.train(dataclasses.replace(args, resume=str(path)))[0] for path in (run_dir, copy))
    assert not torch.equal(one.actor[0].weight, agent.actor[0].weight)
    for name, x in one.state_dict().items():
        assert torch.equal(x, other.state_dict()[name]), name
    assert one.obs_rms.count.item() == pytest.approx(800)
    for path in (run_dir, copy):
        assert script.load_checkpoint(path)["global_step"] == 800
        rates = [value for _, value in scalars(path)["charts/learning_rate"]]
        assert rates == pytest.approx([1e-3, 0.8e-3, 0.6e-3, 0.4e-3, 0.2e-3])
    rows, others = ((path / "episodes.csv").read_text().splitlines() for path in (run_dir, copy))
    steps = [int(row.split(",")[0]) for row in rows[1:]]
    assert rows[: len(first_rows)] == first_rows and steps == sorted(steps) and steps[-1] > 160
    assert [row.rsplit(",", 1)[0] for row in rows] == [row.rsplit(",", 1)[0] for row in others]


def test_seeds(tmp_path, monkeypatch):
    """A resumption gets new numbers, for simulators as for noise. So does another seed."""
    seen = []

    class Seeded(torch_envs.Drift):
        def reset(self, seed=None):
            seen.append(seed)
            return super().reset(7)  # what differs is the noise

        def step(self, actions):
            if len(seen) % 2 == 0 and not isinstance(seen[-1], torch.Tensor):
                seen[-1] = torch.cat([actions[:3, 0], torch.tensor([float(seen[-1])])])
            return super().step(actions)

    monkeypatch.setattr(torch_envs, "seeded", Seeded, raising=False)
    args = make_args(tmp_path, env_id="torch_envs:seeded", total_timesteps=160, learning_rate=1e-9, desired_kl=None)
    _, run_dir = script.train(args)
    script.train(dataclasses.replace(args, resume=str(run_dir), total_timesteps=320))
    script.train(dataclasses.replace(args, seed=2))
    script.train(args)
    first, resumed, other, again = seen[1::2]
    assert torch.equal(first, again) and (first != resumed).all() and (first != other).all()


def test_resume_with_another_update_is_refused(tmp_path, capsys):
    """It would leave all the settings that --update chooses as they were, and say nothing."""
    args = make_args(tmp_path)
    assert script.parse_args(["--update", "rsl_rl", "--seed", "2"], default=args) == dataclasses.replace(args, seed=2)
    with pytest.raises(SystemExit, match="--update google"):
        script.parse_args(["--update", "google"], default=args)
    assert "--update google" in capsys.readouterr().err


def test_noise_std(tmp_path):
    """The logged figure is the mean standard deviation of the policy that acted."""
    args = make_args(tmp_path, init_std=0.7, total_timesteps=160, learning_rate=0.01, desired_kl=None)
    agent, run_dir = script.train(args)
    script.train(dataclasses.replace(args, resume=str(run_dir), total_timesteps=320))
    logged = [value for _, value in scalars(run_dir)["charts/noise_std"]]
    assert logged == pytest.approx([0.7, agent.std.mean().item()], rel=1e-6) and abs(logged[1] - 0.7) > 0.01
    _, run_dir = script.train(make_args(tmp_path, "google", env_id="box/Narrow-v0", total_timesteps=160, num_steps=10))
    agent = script.load_agent(run_dir)
    torch.manual_seed(1)  # the first agent once more
    first = script.Agent(1, 1, agent.action_low, agent.action_high, agent.args)
    expected = first.get_mean_and_std(torch.ones(1, 1))[1].mean().item()
    assert scalars(run_dir)["charts/noise_std"][0][1] == pytest.approx(expected, rel=1e-5)


def test_evaluations_during_training(tmp_path):
    """Ten and the one before, and training goes on as without them."""
    plain, _ = script.train(make_args(tmp_path, total_timesteps=3200))
    settings = {"total_timesteps": 3200, "num_evaluations": 10, "eval_episodes": 8, "eval_deterministic": False}
    agent, run_dir = script.train(make_args(tmp_path, **settings))
    rows = (run_dir / "evaluations.csv").read_text().splitlines()
    assert rows[0] == "global_step,mean_return,std_return,seconds"
    assert [int(row.split(",")[0]) for row in rows[1:]] == [320 * i for i in range(11)]
    assert torch.equal(agent.actor[0].weight, plain.actor[0].weight)
    logged = [(step, f"{value:.2f}") for step, value in scalars(run_dir)["charts/eval_return"]]
    assert logged == [(int(row[0]), row[1]) for row in (row.split(",") for row in rows[1:])]
    with open(run_dir / "evaluations.csv", "a") as file:
        file.write("3520,1.0,1.0,1.0\n3520,1")  # of a run that was killed after its checkpoint
    args = dataclasses.replace(script.load_checkpoint(run_dir)["args"], resume=str(run_dir), total_timesteps=3680)
    script.train(args)
    resumed = (run_dir / "evaluations.csv").read_text().splitlines()
    assert resumed[: len(rows)] == rows and [row.split(",")[0] for row in resumed[len(rows) :]] == ["3360", "3680"]


def test_commands_of_the_pages_parse():
    pages = (ROOT / "docs" / "gpu_sim.md", ROOT / "docs" / "notes" / "gpu_sim.md")
    text = script.__doc__ + "".join(page.read_text() for page in pages)
    commands = re.findall(r"python variants/ppo_gpu_sim\.py([^\n#&`]*)", text)
    assert len(commands) >= 9
    for command in commands:
        script.check_args(script.parse_args(command.split()))


def test_two_ranks(tmp_path):
    """Under torchrun: one run folder, the same weights on both, episodes of both."""
    program = f"""import sys, os; sys.path[:0] = ['{ROOT / "variants"}', '{TESTS}']
import ppo_gpu_sim as script, torch, torch_envs
seeds, reset = [], torch_envs.Drift.reset
torch_envs.Drift.reset = lambda self, seed: (seeds.append(seed), reset(self, seed))[1]
torch_envs.drift = lambda *arguments: seeds.append(arguments[2]) or torch_envs.Drift(*arguments)
agent, _ = script.train(script.parse_args())
torch.save([agent.state_dict(), seeds], '{tmp_path}/rank-' + os.environ['RANK'])
os._exit(0)  # as the script's main: in Python's own end a thread of torch.distributed may abort"""
    (tmp_path / "program.py").write_text(program)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    flags = flags_of(**SMALL, runs_dir=tmp_path / "runs", checkpoint_interval=1)
    done = subprocess.run([*torchrun, tmp_path / "program.py", *flags], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (one, seeds), (other, other_seeds) = (torch.load(tmp_path / f"rank-{rank}") for rank in (0, 1))
    assert seeds[0] != other_seeds[0] and seeds[-1] != other_seeds[-1]  # of the simulators, of their last reset
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert one["obs_rms.count"].item() == pytest.approx(800)  # what both have seen
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert script.load_checkpoint(run_dir)["global_step"] == 800
    ends = [int(row.split(",")[0]) for row in (run_dir / "episodes.csv").read_text().splitlines()[1:]]
    assert ends == sorted(ends) and len(ends) > 16


def test_command_line(tmp_path, monkeypatch, capsys):
    """The forms that sweeps send; an evaluation says the same twice."""
    flags = ["--runs-dir", tmp_path, "--num-steps=10", "--num-envs=8", "--num_minibatches=2", "--total_timesteps=1e2"]
    train = run("--update=google", "--env-id", "torch_envs:drift", "--compile=False", "--norm_obs=True", *flags)
    assert train.returncode == 0, train.stderr
    (run_dir,) = tmp_path.iterdir()
    args = json.loads((run_dir / "args.json").read_text())
    assert args["gamma"] == 0.97 and args["num_steps"] == 10
    words = ["ppo_gpu_sim.py", "--evaluate", str(run_dir), "--eval-episodes=8"]
    monkeypatch.setattr(sys, "argv", words)
    # A checkpoint does not choose what is imported.
    with pytest.raises(SystemExit, match="add --env-id torch_envs:drift"):
        script.main()
    assert "add --env-id torch_envs:drift" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*words, "--env-id=torch_envs:drift"])
    script.main()
    script.main()
    first, second = capsys.readouterr().out.splitlines()
    assert first == second and first.startswith("8 episodes: mean ")


def test_sigterm_and_resume(tmp_path):
    """The iteration under way is finished and saved; the same command line with --resume goes on from there."""
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    flags = flags_of(**SMALL | {"total_timesteps": 10**8}, runs_dir=tmp_path)
    command = [sys.executable, str(ROOT / "variants" / "ppo_gpu_sim.py"), *flags]
    environment, pipes = os.environ | {"PYTHONPATH": path}, {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, env=environment, text=True, **pipes)
    end = time.monotonic() + 60
    while not any(len(path.read_text()) > 1000 for path in tmp_path.glob("*/episodes.csv")):
        assert time.monotonic() < end
        time.sleep(0.05)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    (run_dir,) = tmp_path.iterdir()
    assert process.returncode == 143 and f"stopped; go on with --resume {run_dir}" in errors
    saved = script.load_checkpoint(run_dir)["global_step"]
    assert 0 < saved < 10**8 and saved % 160 == 0
    resumed = run("--resume", run_dir, "--env-id", SMALL["env_id"], f"--total-timesteps={saved + 320}")
    assert resumed.returncode == 0, resumed.stderr
    assert script.load_checkpoint(run_dir)["global_step"] == saved + 320


def test_matrix_products_on_cuda(monkeypatch):
    """TF32 is several times as fast as float32, and exact enough; a CPU keeps float32."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    before = torch.get_float32_matmul_precision()
    try:
        script.start_device(script.Args(device="cpu"))
        assert torch.get_float32_matmul_precision() == "highest"
        script.start_device(script.Args(device="cuda"))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--env-id", "brax/nothing"], "nothing" if HAS_BRAX else "variants/requirements.txt"),
        (["--env-id", "nothing:make"], "MODULE:FUNCTION"),
        (["--env-id", "torch_envs:nothing"], "nothing"),
        (["--env-id", "CartPole-v1"], "has actions Discrete"),
        (["--env-id", "NoSuchEnv-v0"], "NoSuchEnv"),
        (["--unroll-length", "7"], "--unroll-length 7 must divide --num-steps 10"),
        (["--unroll-length", "0"], "--unroll-length must be"),
        (["--recompute-targets"], "needs --unroll-length"),
        (["--num-minibatches", "7"], "must divide 160 steps or unrolls as [4, 5, 8]"),
        (["--update", "google", "--timeouts", "exact"], "neither --timeouts exact"),
        (["--update", "google", "--norm-adv", "rollout"], "nor --norm-adv rollout"),
        (["--update", "google", "--env-id", "torch_envs:unbounded"], "--policy normal"),
        (["--anneal-lr"], "--desired-kl None"),
        (["--init-std", "0"], "--init-std"),
        (["--gamma", "1.5"], "from 0 to 1"),
        (["--desired-kl=-1"], "from 0 to inf"),
        (["--num-evaluations=-1"], "from 0 to inf"),
        (["--resume", "nowhere"], "checkpoint.pt is missing"),
        (["--export", "nowhere"], "checkpoint.pt is missing"),
    ],
)
def test_wrong_input(tmp_path, capsys, monkeypatch, flags, words):
    """One line, and no run folder."""
    unbounded = torch_envs.Replay({"obs": [[[0.0]]], "critic_obs": [[[0.0]]]})
    monkeypatch.setattr(torch_envs, "unbounded", lambda *_: unbounded, raising=False)
    defaults = ["--env-id", "torch_envs:drift", "--num-envs", "16", "--num-steps", "10", "--runs-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["ppo_gpu_sim.py", *defaults, "--no-compile", *flags])
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("ppo_gpu_sim.py: error: ") and words in lines[-1]
    assert not list(tmp_path.iterdir())


def test_simulator_without_final_observations(tmp_path, capsys, monkeypatch):
    """Isaac Lab's are of this kind: one line names the flag."""
    monkeypatch.setattr(torch_envs, "no_final_obs", lambda *_: torch_envs.Drift(*_, final_obs=False), raising=False)
    with pytest.raises(SystemExit, match="gives no final_obs"):
        script.train(make_args(tmp_path, env_id="torch_envs:no_final_obs"))
    (line,) = capsys.readouterr().err.splitlines()
    assert "torch_envs:no_final_obs gives no final_obs: use --timeouts current-value" in line


@pytest.mark.parametrize("what", ["rewards", "obs"])
def test_nan(tmp_path, capsys, monkeypatch, what):
    """It ends in one line, and never gets into statistics or weights."""

    class Broken(torch_envs.Drift):
        count = 0

        def step(self, actions):
            obs, rewards, *others = super().step(actions)
            self.count += 1
            if self.count == 25:
                (rewards if what == "rewards" else obs["policy"])[3] = math.nan
            return obs, rewards, *others

    monkeypatch.setattr(torch_envs, "broken", Broken, raising=False)
    with pytest.raises(SystemExit) as stopped:
        script.train(make_args(tmp_path, env_id="torch_envs:broken", checkpoint_interval=1))
    assert stopped.value.code == 2 and "NaN" in capsys.readouterr().err
    (run_dir,) = (tmp_path / "runs").iterdir()
    checkpoint = script.load_checkpoint(run_dir)
    assert checkpoint["global_step"] == 2 * 160
    assert all(torch.isfinite(x).all() for x in checkpoint["agent"].state_dict().values())


def drift_agent(envs):
    sizes = [x.shape[1] for x in script.split_obs(envs.reset(seed=1)[0])]
    space = envs.single_action_space
    return script.Agent(*sizes, space.low.flatten(), space.high.flatten(), script.Args())


def test_evaluation_ends_with_the_first_episode():
    """What a simulator gives afterwards, NaN too, does not count."""

    class Diverges(torch_envs.Drift):
        ended = torch.zeros(16, dtype=torch.bool)

        def step(self, actions):
            obs, rewards, terminations, truncations, infos = super().step(actions)
            rewards = torch.where(self.ended, math.nan, torch.ones(16))
            self.ended = self.ended | terminations | truncations
            return obs, rewards, terminations, truncations, infos

    envs = Diverges(16, torch.device("cpu"), 1)
    returns = script.evaluate(drift_agent(envs), envs, seed=1)
    assert np.isfinite(returns).all() and len(set(returns)) > 1


# ---------------------------------------------------------------------------------------------------- environments


def test_environments_like_those_of_isaac_lab(tmp_path, monkeypatch):
    """Groups of observations in buffers that are written over by every step, and no final observation."""

    class Isaac(torch_envs.Drift):
        buffers = None

        def observe(self):
            obs = super().observe()
            if self.buffers is None:
                self.buffers = obs
            for name, x in self.buffers.items():
                x.copy_(obs[name])
            return self.buffers

    seen, original = [], script.ppo_loss

    def spy(agent, args, minibatch):
        seen.append(minibatch["obs"])
        return original(agent, args, minibatch)

    monkeypatch.setattr(script, "ppo_loss", spy)
    settings = {"env_id": "torch_envs:isaac", "timeouts": "current-value", "norm_obs": False}
    for make in (lambda *_: Isaac(*_, final_obs=False), lambda *_: torch_envs.Drift(*_, final_obs=False)):
        monkeypatch.setattr(torch_envs, "isaac", make, raising=False)
        script.train(make_args(tmp_path, **settings))
    half = len(seen) // 2
    assert all(torch.equal(one, other) for one, other in zip(seen[:half], seen[half:]))


def test_gymnasium(tmp_path):
    """A vector of gymnasium environments, its final observations where they belong."""
    envs = script.GymEnvs("InvertedPendulum-v4", 3, torch.device("cpu"))
    obs, _ = envs.reset(seed=1)
    for _ in range(200):
        obs, _, terminations, _, infos = envs.step(torch.ones(3, 1))
        if terminations.any():
            break
    n = terminations.nonzero()[0]
    obs, final_obs = obs["policy"], infos["final_obs"]["policy"]
    assert final_obs[n, 1].abs() > 0.2 > 0.05 > obs[n, 1].abs()  # fallen; upright again
    script.train(make_args(tmp_path, env_id="InvertedPendulum-v4"))


def test_brax(tmp_path, monkeypatch):
    """Shapes, ends, observations before and after the restart; then it is learned from."""
    pytest.importorskip("brax", reason="Brax is not installed: environments of Brax are not tested")
    args = make_args(tmp_path, "google", env_id="brax/inverted_pendulum", num_envs=64, episode_length=30)
    envs = script.make_envs(args, 64, torch.device("cpu"))
    first, _ = envs.reset(seed=1)
    first = first.clone()
    ended = {"terminations": 0, "truncations": 0}
    for _ in range(60):
        actions = torch.full((64, 1), -1.0)
        actions[:32] = 0.02 * torch.randn(32, 1)
        obs, rewards, terminations, truncations, infos = envs.step(actions)
        ends = terminations | truncations
        assert rewards.shape == (64,) and terminations.dtype == truncations.dtype == torch.bool
        assert not (terminations & truncations).any()
        torch.testing.assert_close(obs[ends], first[ends])
        torch.testing.assert_close(infos["final_obs"][~ends], obs[~ends])
        assert (infos["final_obs"][terminations, 1].abs() > 0.2).all()
        ended["terminations"] += terminations.sum().item()
        ended["truncations"] += truncations.sum().item()
    assert min(ended.values()) > 10
    envs.reset(seed=1)
    envs.episode_length_buf = torch.arange(64.0) % 30
    cuts = torch.stack([envs.step(torch.zeros(64, 1))[3] for _ in range(3)])
    assert (cuts.nonzero()[:, 1] % 30).tolist() == [29, 29, 28, 28, 27, 27]  # each after what is left of its 30 steps
    monkeypatch.setattr(script, "make_envs", lambda *_: envs)  # JAX has compiled it
    settings = {"num_envs": 64, "num_steps": 20, "learning_rate": 1e-3, "total_timesteps": 64 * 20 * 30}
    agent, _ = script.train(make_args(tmp_path, "google", env_id="brax/inverted_pendulum", **settings, hidden_size=32))
    assert script.evaluate(agent, envs, seed=3).mean() > 25


@pytest.mark.parametrize("small", [False, True])
def test_google_vs_nvidia_starts(tmp_path, monkeypatch, small):
    """Every update of both sizes has settings that the script takes."""
    pytest.importorskip("scipy")
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # both are put back: importing it changes them
    monkeypatch.syspath_prepend(ROOT / "benchmark")
    monkeypatch.syspath_prepend(ROOT / "benchmark" / "studies")
    import report

    monkeypatch.setattr(report, "PACKAGES", report.PACKAGES)
    import google_vs_nvidia as experiment

    monkeypatch.setattr(script, "make_envs", script.make_envs)  # which train_all replaces
    started = []

    def train(args):
        script.check_args(args)
        started.append(args)
        return None, tmp_path

    monkeypatch.setattr(script, "train", train)
    args = experiment.Args(seeds=1, updates=tuple(experiment.UPDATES), runs_dir=str(tmp_path), device="cpu")
    experiment.train_all(args, experiment.SMALL if small else experiment.FULL)
    assert [each.total_timesteps for each in started] == [512_000 if small else 30_000_000] * len(experiment.UPDATES)
