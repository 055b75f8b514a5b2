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
from torch.nn.utils import parameters_to_vector
from torch.overrides import TorchFunctionMode
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


@pytest.fixture(name="script")
def the_script():
    """The script whose calls conftest's `minibatches` records."""
    return script


def env_id_of(make):
    """The --env-id of simulators that make(num_envs, device, seed) makes."""
    torch_envs.of_this_test = make
    return "torch_envs:of_this_test"


def agent_for(envs, args):
    sizes = [x.shape[1] for x in script.split_obs(envs.reset(seed=1)[0])]
    space = envs.single_action_space
    return script.Agent(*sizes, space.low.flatten(), space.high.flatten(), args)


def train_from(agent, args, run_dir):
    """Train this agent: the run goes on from a checkpoint of step 0."""
    optimizer = torch.optim.Adam([parameters_to_vector(agent.parameters()).detach()], torch.tensor(args.learning_rate))
    checkpoint = {"agent": agent.state_dict(), "optimizer": optimizer.state_dict(), "args": vars(args)}
    run_dir.mkdir()
    torch.save(checkpoint | {"global_step": 0, "seconds": 0.0}, run_dir / "checkpoint.pt")
    return script.train(dataclasses.replace(args, resume=str(run_dir)))


def tensors(tree):
    return {name: torch.tensor(value) for name, value in tree.items()}


def test_named_defaults():
    """NVIDIA's settings are Google's but for three."""
    assert script.GOOGLE.keys() == script.NVIDIA.keys()
    changed = {name for name, value in script.NVIDIA.items() if value != script.GOOGLE[name]}
    assert changed == {"advantages", "recompute_targets", "norm_adv"}


# ---------------------------------------------------------------------------------------------------- parity


GOLDEN = {  # case: how the script is set to do the same, and the names of the results
    "gae_brax": ({"timeouts": "masked", "advantages": "brax"}, {"advantages": "advantages", "returns": "vs"}),
    "gae_nvidia_variant": ({"timeouts": "masked"}, {"normalized": "advantages", "returns": "vs"}),
    "gae_rsl_rl_timeouts": (
        {"timeouts": "current-value"},
        {"advantages": "advantages_raw", "returns": "returns", "normalized": "advantages_normalised"},
    ),
}


@pytest.mark.parametrize("case", GOLDEN)
def test_advantages_are_those_of_others(case):
    settings, names = GOLDEN[case]
    inputs, expected = golden(case)
    truncations = inputs.get("truncations", inputs.get("time_outs")).bool()
    dones = inputs["dones"].bool() if "dones" in inputs else truncations | inputs["terminations"].bool()
    args = script.Args(gamma=inputs["gamma"], gae_lambda=inputs["gae_lambda"], **settings)
    columns = inputs["rewards"], inputs["values"], inputs["last_values"], torch.full_like(inputs["rewards"], math.nan)
    advantages, returns = script.estimate_targets(args, *columns, dones & ~truncations, truncations)
    ours = {"advantages": advantages, "returns": returns, "normalized": script.normalize_advantages(advantages)}
    for name, theirs in names.items():
        torch.testing.assert_close(ours[name], expected[theirs])


def test_gaussian_kl():
    inputs, expected = golden("gaussian_kl")
    names = "old_mean", "old_std", "new_mean", "new_std"
    torch.testing.assert_close(script.normal_kl(*(inputs[name] for name in names)), expected["exact"])


def make_agent(obs_size=3, critic_obs_size=3, action_size=2, **changes):
    high = np.ones(action_size, np.float32)
    return script.Agent(obs_size, critic_obs_size, -high, high, script.Args(**{"hidden_size": 8} | changes))


def test_tanh_policy():
    """The entropy is an estimate: its noise is the next of the generator, the slope of tanh there is torch's."""
    inputs, expected = golden("tanh_gaussian")
    agent = make_agent(policy="tanh").double()
    head = torch.cat([inputs["loc"], inputs["raw_scale"]], dim=-1)
    agent.actor = torch.nn.Identity()
    mean, std = agent.get_mean_and_std(head)
    torch.testing.assert_close(std, expected["scale"])
    torch.manual_seed(1)
    log_prob, entropy = agent.get_log_prob_and_entropy(mean, std, inputs["x"])
    torch.testing.assert_close(log_prob, expected["logprob"])
    torch.testing.assert_close(agent.to_env_action(inputs["x"]), expected["env_action"])
    torch.manual_seed(1)
    normal, sample = torch.distributions.Normal(mean, std), mean + std * torch.randn_like(mean)
    log_slope = torch.distributions.TanhTransform().log_abs_det_jacobian(sample, sample.tanh())
    torch.testing.assert_close(entropy, (normal.entropy() + log_slope).sum(-1))


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


@pytest.fixture
def known_numbers(monkeypatch):
    """As where the oracle was made: noise that depends on the shape only, and no shuffling."""
    monkeypatch.setattr(torch, "randn_like", torch_envs.wave)
    monkeypatch.setattr(torch, "randperm", lambda n, **_: torch.arange(n))


def train_on_record(args, oracle, run_dir):
    """The script's train on what the other system saw, from its weights."""

    def layers(state):
        return {name.removeprefix("mlp."): x for name, x in tensors(state).items() if "distribution" not in name}

    envs, weights = torch_envs.Replay(oracle["record"]), oracle["weights"]
    agent = agent_for(envs, args)
    agent.actor.load_state_dict(layers(weights["actor"]))
    agent.critic.load_state_dict(layers(weights["critic"]))
    if args.policy == "normal":
        agent.std.data.copy_(torch.tensor(weights["actor"]["distribution.std_param"]))
    args = dataclasses.replace(args, env_id=env_id_of(lambda *_: envs))
    agent, _ = train_from(agent, args, run_dir)
    for network, name in ((agent.actor, "actor"), (agent.critic, "critic")):
        after, before = (layers(oracle[when][name]) for when in ("after", "weights"))
        for layer, x in network.state_dict().items():
            assert (after[layer] - before[layer]).abs().max() > 1e-3
            torch.testing.assert_close(x, after[layer], atol=2e-6, rtol=2e-5)
    return agent, {name: values[0][1] for name, values in scalars(run_dir).items()}


def test_update_of_rsl_rl(tmp_path, known_numbers):
    """Six steps of its own PPO: time-outs, advantages, clipped value loss, KL and learning rate, gradient clipping."""
    oracle = ORACLE["rsl_rl"]
    settings = {"num_envs": 4, "num_steps": 6, "num_minibatches": 2, "update_epochs": 3, "gamma": 0.97}
    settings |= {"gae_lambda": 0.9, "max_grad_norm": 0.5, "learning_rate": 5e-3, "hidden_layers": 2, "norm_obs": False}
    args = make_args(tmp_path, total_timesteps=24, timeouts="current-value", **settings)
    agent, logged = train_on_record(args, oracle, tmp_path / "run")
    std = torch.tensor(oracle["after"]["actor"]["distribution.std_param"])
    torch.testing.assert_close(agent.std.data, std, atol=2e-6, rtol=2e-5)
    assert logged["charts/learning_rate"] == pytest.approx(oracle["learning_rate"], rel=1e-5)
    assert logged["losses/policy_loss"] == pytest.approx(oracle["losses"]["surrogate"], abs=1e-6)
    assert logged["losses/value_loss"] == pytest.approx(oracle["losses"]["value"] / 2, rel=1e-5)
    assert logged["losses/entropy"] == pytest.approx(oracle["losses"]["entropy"], rel=1e-6)


def test_update_of_brax(tmp_path, known_numbers):
    """Six steps of the notebook's agent: masked time-outs, targets from the current critic, tanh policy, its losses."""
    oracle = ORACLE["brax"]
    settings = {"num_envs": 4, "num_steps": 6, "unroll_length": 3, "num_minibatches": 2, "update_epochs": 3}
    settings |= {"learning_rate": 5e-3, "hidden_size": 16, "norm_obs": False, "total_timesteps": 24}
    _, logged = train_on_record(make_args(tmp_path, "google", **settings), oracle, tmp_path / "run")
    policy_loss, value_loss, entropy = (logged[f"losses/{name}"] for name in ("policy_loss", "value_loss", "entropy"))
    loss = policy_loss + 0.5 * value_loss - 0.01 * entropy
    assert loss == pytest.approx(np.mean(oracle["losses"]), abs=1e-6, rel=1e-5)


# ---------------------------------------------------------------------------------------------------- semantics


@pytest.mark.parametrize("update", UPDATES)
def test_first_ratio_is_one(tmp_path, update, minibatches):
    """The policy of the first minibatch is the one that acted. Without --num-minibatches > 1 it is the only one."""
    script.train(make_args(tmp_path, update, update_epochs=1, num_minibatches=1))
    assert len(minibatches) == 5
    for _, (_, metrics) in minibatches:
        assert all(abs(metrics[name]) < 1e-7 for name in ("kl", "approx_kl", "clipfrac"))


def test_settings_of_the_loss():
    """Values are clipped to --vf-clip-coef, or else --clip-coef, or with --no-clip-vloss not at all. Advantages are
    taken as they are, or normalised over the minibatch, or computed again by the present critic."""
    agent, sizes = make_agent(), {"obs": 3, "critic_obs": 3, "actions": 2, "means": 2}
    minibatch = {name: torch.randn(5, 12, size) for name, size in sizes.items()} | {"stds": torch.ones(5, 12, 2)}
    old_values, advantages, returns, rewards, log_ratio = torch.randn(5, 5, 12)
    policy = agent.get_mean_and_std(minibatch["obs"])
    log_probs = agent.get_log_prob_and_entropy(*policy, minibatch["actions"])[0].detach() - log_ratio
    minibatch |= {"values": old_values, "advantages": advantages, "returns": returns, "log_probs": log_probs}
    ends = torch.rand(5, 12)
    minibatch |= {"rewards": rewards, "terminations": ends < 0.1, "truncations": ends > 0.9}
    minibatch["last_critic_obs"] = torch.randn(1, 12, 3)
    values, last_values = (agent.get_value(minibatch[name]).detach() for name in ("critic_obs", "last_critic_obs"))
    google = {"recompute_targets": True, "timeouts": "masked", "advantages": "brax"}
    steps = rewards, values, last_values[0], None, minibatch["terminations"], minibatch["truncations"]
    again, new_returns = script.estimate_targets(script.Args(**google), *steps)
    seen = set()
    for flags, vf_clip_coef, expected in (
        ({"clip_coef": 0.3}, 0.3, (advantages, returns)),
        ({"vf_clip_coef": 0.7}, 0.7, (advantages, returns)),
        ({"vf_clip_coef": 0.7, "clip_vloss": False, "norm_adv": "none"}, None, (advantages, returns)),
        ({"norm_adv": "minibatch"}, 0.2, (script.normalize_advantages(advantages), returns)),
        (google, 0.2, (again, new_returns)),
        (google | {"norm_adv": "minibatch"}, 0.2, (script.normalize_advantages(again), new_returns)),
    ):
        args = script.Args(**flags)
        _, metrics = script.ppo_loss(agent, args, minibatch)
        policy_loss = script.clipped_policy_loss(log_ratio, expected[0], args.clip_coef)
        value_loss = script.clipped_value_loss(values, old_values, expected[1], vf_clip_coef)
        torch.testing.assert_close(metrics["policy_loss"], policy_loss)
        torch.testing.assert_close(metrics["value_loss"], value_loss)
        seen.add((policy_loss.item(), value_loss.item()))
    assert len(seen) == 6


@pytest.mark.parametrize("unroll_length, norm_adv", [(None, "rollout"), (5, "none")])
def test_shuffling(tmp_path, unroll_length, norm_adv, minibatches):
    """Each epoch sees everything once, in an order of its own; unrolls stay whole, in their order. What belongs to a
    step stays with it. Advantages have mean 0 and deviation 1 over the rollout if asked for, not over a minibatch."""
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
    columns = sorted(range(first.shape[1]), key=lambda i: first[0, i])
    assert columns != list(range(len(columns)))
    for minibatch in batches:  # actor and critic see the same numbers, and normalise them alike
        torch.testing.assert_close(minibatch["critic_obs"][..., :2], minibatch["obs"])

    def is_normalized(x):
        return abs(x.mean()) < 1e-5 and abs(x.std() - 1) < 1e-4

    assert is_normalized(epochs[0]) == (norm_adv == "rollout") and not any(map(is_normalized, advantages))


def test_target_kl(tmp_path, minibatches):
    """The minibatch in which the KL is too high takes no step and ends the update; the first one, whose KL is 0, takes
    its step."""
    for target_kl, seen, steps in ((1e-12, 2, 1), (1e3, 8, 8)):
        minibatches.clear()
        _, run_dir = script.train(make_args(tmp_path, total_timesteps=160, target_kl=target_kl, desired_kl=None))
        assert len(minibatches) == seen
        assert script.load_checkpoint(run_dir)["optimizer"]["state"][0]["step"] == steps


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


@pytest.mark.parametrize("timeouts", ["exact", "current-value", "masked", "current-value again", "masked again"])
@pytest.mark.parametrize("advantages", ["gae", "brax"])
def test_advantages_are_zero_for_a_true_critic(tmp_path, timeouts, advantages, minibatches):
    """Whatever ends an episode, and wherever an unroll is cut; again: when every minibatch computes them again."""
    timeouts, _, again = timeouts.partition(" ")
    slope = 0.0 if timeouts == "current-value" else 3.0  # which is exact where the value does not change
    settings = {"gamma": 0.9, "timeouts": timeouts, "advantages": advantages, "recompute_targets": bool(again)}
    settings |= {"norm_obs": False, "unroll_length": 5 if again else None, "norm_adv": "none", "hidden_layers": 1}
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


class Grouped(gym.Env):
    """Observations of two groups, (1, 2) and (3,). The last number of the second is the privileged one: how often the
    environment began."""

    def __init__(self, names=("policy", "critic")):
        boxes = gym.spaces.Box(-9, 9, (1, 2), np.float32), gym.spaces.Box(-9, 9, (3,), np.float64)
        self.observation_space = gym.spaces.Dict(dict(zip(names, boxes)))
        self.action_space, self.names, self.episodes = gym.spaces.Box(-1, 1, (1, 1)), names, 0

    def observe(self):
        seen = self.np_random.normal(size=2).astype(np.float32)
        return dict(zip(self.names, (seen[None], np.append(seen, self.episodes))))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episodes += 1
        return self.observe(), {}

    def step(self, action):
        return self.observe(), float(action.sum()), False, False, {}


gym.register("box/Grouped-v0", Grouped, max_episode_steps=7)
gym.register("box/TwoParts-v0", Grouped, kwargs={"names": ("position", "speed")}, max_episode_steps=7)


@pytest.mark.parametrize("update", ["rsl_rl", "google"])
def test_privileged_observations_reach_the_critic_only(update):
    """If they change, the policy stays as it was, to the bit; the values do not."""
    agent, envs = make_agent(2, 3, **script.UPDATES[update] | {"hidden_size": 8}), gym_envs("box/Grouped-v0", 5)
    results = []
    for _ in range(2):
        obs, critic_obs = script.split_obs(envs.reset(seed=1)[0])
        assert obs.shape == (5, 2) and critic_obs.shape == (5, 3)
        mean, std = agent.get_mean_and_std(agent.normalize(obs, agent.obs_rms))
        value = agent.get_value(agent.normalize(critic_obs, agent.critic_obs_rms))
        results.append((torch.cat([mean, std, agent.predict(obs)], dim=1), value))
    (action, value), (other_action, other_value) = results
    assert torch.equal(action, other_action) and (value != other_value).all()


def gym_envs(env_id, num_envs):
    return script.GymEnvs(env_id, num_envs, torch.device("cpu"))


@pytest.mark.parametrize("env_id, sizes", [("box/Grouped-v0", (2, 3)), ("box/TwoParts-v0", (5, 5))])
def test_gymnasium_groups(tmp_path, env_id, sizes):
    """Only "policy" and "critic" are groups; other Dicts are one vector for both. Final observations are their own."""
    agent, _ = script.train(make_args(tmp_path, env_id=env_id))
    assert (len(agent.obs_rms.mean), len(agent.critic_obs_rms.mean)) == sizes
    envs = gym_envs(env_id, 2)
    envs.reset(seed=1)
    for _ in range(7):
        obs, _, _, truncations, infos = envs.step(torch.zeros(2, 1))
    assert truncations.all() and obs.keys() == infos["final_obs"].keys()
    for group, final in zip(script.split_obs(obs), script.split_obs(infos["final_obs"])):
        assert group.shape == final.shape and (group != final)[:, 0].all()


def test_export(tmp_path):
    """The file alone, without this project and without a critic, gives the actions of the agent, for any number of
    observations: the mean action, of observations normalised by the statistics of the run, within the bounds."""
    agents, run_dirs = zip(*(script.train(make_args(tmp_path, update)) for update in ("rsl_rl", "google")))
    obs = 2 * torch.randn(5, 2)
    code = "import sys, json, torch; obs = torch.tensor(json.loads(sys.argv[1]))\n"
    code += "actors = [torch.export.load(path).module() for path in sys.argv[2:]]\n"
    code += "print(json.dumps([[actor(obs).tolist(), [*actor.state_dict()]] for actor in actors]))"
    command = [sys.executable, "-c", code, str(obs.tolist()), *map(script.export_actor, run_dirs)]
    alone = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    for agent, (actions, names) in zip(agents, json.loads(alone.stdout)):
        actions = torch.tensor(actions)
        torch.testing.assert_close(actions, agent.predict(obs), atol=1e-6, rtol=1e-5)
        mean = agent.actor(((obs - agent.obs_rms.mean) / agent.obs_rms.var.sqrt()).float())[:, :1].detach()
        expected = mean.clamp(-1, 1) if agent.args.policy == "normal" else mean.tanh()
        torch.testing.assert_close(actions, expected, atol=1e-5, rtol=1e-4)
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


class Remembering(torch_envs.Drift):
    """Remembers the seeds of its resets, and since the last one what it was given and what it gave. Whatever the seed,
    it starts in the same way."""

    def reset(self, seed=None):
        self.last_seed, (obs, infos) = seed, super().reset(7)
        self.obs, self.actions, self.rewards, self.ends = [obs], [], [], []
        return obs, infos

    def step(self, actions):
        obs, rewards, terminations, truncations, infos = super().step(actions)
        self.obs.append(obs)
        self.actions.append(actions)
        self.rewards.append(rewards)
        self.ends.append(terminations | truncations)
        return obs, rewards, terminations, truncations, infos


@pytest.fixture
def remembering():
    return Remembering(16, torch.device("cpu"), seed=1)


def test_episodes_and_statistics(tmp_path, remembering):
    """episodes.csv has every finished episode once, where it ended, with its raw return and length, whatever
    --reward-scale. Statistics have seen every observation that was acted on once, the first included, the last not yet,
    nothing of the step that only looks at infos."""
    settings = {"reward_scale": 0.1, "total_timesteps": 4000}
    agent, run_dir = script.train(make_args(tmp_path, env_id=env_id_of(lambda *_: remembering), **settings))
    header, *rows = (line.split(",") for line in (run_dir / "episodes.csv").read_text().splitlines())
    assert header == ["global_step", "episodic_return", "episodic_length", "seconds"]
    rewards, expected, begun = torch.stack(remembering.rewards), [], [0] * 16
    for t, ends in enumerate(remembering.ends, start=1):
        for n in ends.nonzero().flatten().tolist():
            expected.append([16 * t, rewards[begun[n] : t, n].sum().item(), t - begun[n]])
            begun[n] = t
    assert len(expected) > 50
    np.testing.assert_allclose([[float(x) for x in row[:3]] for row in rows], expected, atol=1e-4, rtol=1e-4)
    for group, rms in (("policy", agent.obs_rms), ("critic", agent.critic_obs_rms)):
        everything = torch.cat([obs[group] for obs in remembering.obs[:-1]]).double()
        assert len(everything) == 4000 == pytest.approx(rms.count.item())
        torch.testing.assert_close(rms.mean, everything.mean(0), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(rms.var, everything.var(0, correction=0), atol=1e-4, rtol=1e-4)


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
def test_stagger_envs(tmp_path, update):
    """rsl_rl's episodes end at many different times, and those that began late are not logged; Google's all at once."""
    _, run_dir = script.train(make_args(tmp_path, update, env_id=env_id_of(Timed), total_timesteps=16 * 150))
    rows = [line.split(",") for line in (run_dir / "episodes.csv").read_text().splitlines()[1:]]
    assert {row[2] for row in rows} == {"50"}
    ends = [int(row[0]) // 16 for row in rows]
    assert len(ends) == (48 if update == "google" else 32)  # in 150 steps; what is left of the first, then two
    if update == "google":
        assert set(ends) == {50, 100, 150}
    else:
        assert min(ends) > 50 and len(set(ends)) > 16


def test_learning_rate_of_desired_kl(tmp_path, monkeypatch):
    """The first minibatch leaves it: its KL is 0 but for rounding, 5e-8 where a network gives the standard deviations
    and compiled code compares them with those of eager code. A resumption goes on from where it was, or from the rate
    that is given."""
    original = script.normal_kl
    monkeypatch.setattr(script, "normal_kl", lambda *distributions: original(*distributions) + 5e-8)

    def last_rate(args):
        _, run_dir = script.train(args)
        return run_dir, script.load_checkpoint(run_dir)["optimizer"]["param_groups"][0]["lr"].item()

    args = make_args(tmp_path, total_timesteps=160)
    run_dir, rate = last_rate(args)
    assert abs(rate / args.learning_rate - 1) > 0.1
    again = {"resume": str(run_dir), "update_epochs": 1, "num_minibatches": 1}
    assert last_rate(dataclasses.replace(args, **again, total_timesteps=320)) == (run_dir, rate)
    other = dataclasses.replace(args, **again, total_timesteps=480, learning_rate=1e-5)
    assert last_rate(other) == (run_dir, pytest.approx(1e-5))


def test_simulators_with_networks(tmp_path):
    """Nothing is kept of the graph behind their observations, which would grow from step to step."""

    class Actuated(torch_envs.Drift):
        gain = torch.nn.Parameter(torch.ones(()))

        def step(self, actions):
            obs, rewards, *rest = super().step(actions * self.gain)
            assert not rewards.requires_grad
            return obs, rewards * self.gain, *rest

    script.train(make_args(tmp_path, env_id=env_id_of(Actuated)))


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
        def step(self, actions):
            calls.append("step")
            return super().step(actions)

    with Operators(), Methods():
        script.train(make_args(tmp_path, update, env_id=env_id_of(Counted), update_epochs=1))
    waits = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"}
    waits |= {"cpu", "numpy", "tolist", "item", "__array__"}
    between = " ".join(calls).split(" step ")[1:-1]  # what follows each step
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


def test_seeds(tmp_path, remembering):
    """A resumption gets new numbers, for simulators as for noise. So does another seed."""
    settings = {"total_timesteps": 160, "learning_rate": 1e-9, "desired_kl": None}
    args = make_args(tmp_path, env_id=env_id_of(lambda *_: remembering), **settings)

    def numbers(args):
        _, run_dir = script.train(args)
        return run_dir, torch.tensor([*remembering.actions[0][:3, 0], remembering.last_seed])

    run_dir, first = numbers(args)
    _, resumed = numbers(dataclasses.replace(args, resume=str(run_dir), total_timesteps=320))
    (_, other), (_, again) = numbers(dataclasses.replace(args, seed=2)), numbers(args)
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


def test_command_line(tmp_path, main):
    """The forms that sweeps send; an evaluation says the same twice."""
    flags = ["--runs-dir", tmp_path, "--num-steps=10", "--num-envs=8", "--num_minibatches=2", "--total_timesteps=1e2"]
    main(script, "--update=google", "--env-id", "torch_envs:drift", "--compile=False", "--norm_obs=True", *flags)
    (run_dir,) = tmp_path.iterdir()
    args = json.loads((run_dir / "args.json").read_text())
    assert args["gamma"] == 0.97 and args["num_steps"] == 10
    words = "--evaluate", run_dir, "--eval-episodes=8"
    # A checkpoint does not choose what is imported.
    refused = main(script, *words)
    assert refused.returncode == 2 and "add --env-id torch_envs:drift" in refused.stderr
    first, second = (main(script, *words, "--env-id=torch_envs:drift") for _ in range(2))
    assert first == second and first.stdout.startswith("8 episodes: mean ") and first.returncode == 0


def test_sigterm_and_resume(tmp_path, main):
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
    main(script, "--resume", run_dir, "--env-id", SMALL["env_id"], f"--total-timesteps={saved + 320}")
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
def test_wrong_input(tmp_path, flags, words, main):
    """One line, and no run folder."""
    defaults = ["--env-id", "torch_envs:drift", "--num-envs", "16", "--num-steps", "10", "--runs-dir", tmp_path]
    refused = main(script, *defaults, "--no-compile", *flags)
    assert refused.returncode == 2
    last = refused.stderr.splitlines()[-1]
    assert last.startswith("ppo_gpu_sim.py: error: ") and words in last
    assert not list(tmp_path.iterdir())


def test_simulator_without_final_observations(tmp_path, capsys):
    """Isaac Lab's are of this kind: one line names the flag."""
    with pytest.raises(SystemExit, match="gives no final_obs"):
        script.train(make_args(tmp_path, env_id=env_id_of(lambda *_: torch_envs.Drift(*_, final_obs=False))))
    (line,) = capsys.readouterr().err.splitlines()
    assert "torch_envs:of_this_test gives no final_obs: use --timeouts current-value" in line


@pytest.mark.parametrize("what", ["rewards", "obs"])
def test_nan(tmp_path, capsys, what):
    """It ends in one line, and never gets into statistics or weights."""

    class Broken(torch_envs.Drift):
        count = 0

        def step(self, actions):
            obs, rewards, *others = super().step(actions)
            self.count += 1
            if self.count == 25:
                (rewards if what == "rewards" else obs["policy"])[3] = math.nan
            return obs, rewards, *others

    with pytest.raises(SystemExit) as stopped:
        script.train(make_args(tmp_path, env_id=env_id_of(Broken), checkpoint_interval=1))
    assert stopped.value.code == 2 and "NaN" in capsys.readouterr().err
    (run_dir,) = (tmp_path / "runs").iterdir()
    checkpoint = script.load_checkpoint(run_dir)
    assert checkpoint["global_step"] == 2 * 160
    assert all(torch.isfinite(x).all() for x in checkpoint["agent"].state_dict().values())


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
    returns = script.evaluate(agent_for(envs, script.Args()), envs, seed=1)
    assert np.isfinite(returns).all() and len(set(returns)) > 1


# ---------------------------------------------------------------------------------------------------- environments


def test_environments_like_those_of_isaac_lab(tmp_path):
    """Groups of observations in buffers that are written over by every step, and no final observation: what is learned
    is the same as from new tensors."""

    class Isaac(torch_envs.Drift):
        buffers = None

        def observe(self):
            obs = super().observe()
            if self.buffers is None:
                self.buffers = obs
            for name, x in self.buffers.items():
                x.copy_(obs[name])
            return self.buffers

    agents = []
    for kind in (Isaac, torch_envs.Drift):
        settings = {"env_id": env_id_of(lambda *_, kind=kind: kind(*_, final_obs=False)), "timeouts": "current-value"}
        agents.append(script.train(make_args(tmp_path, **settings))[0])
    torch.testing.assert_close(agents[0].state_dict(), agents[1].state_dict(), atol=0, rtol=0)


def test_gymnasium(tmp_path):
    """A vector of gymnasium environments, its final observations where they belong."""
    envs = gym_envs("InvertedPendulum-v4", 3)
    obs, _ = envs.reset(seed=1)
    for _ in range(200):
        obs, _, terminations, _, infos = envs.step(torch.ones(3, 1))
        if terminations.any():
            break
    n = terminations.nonzero()[0]
    obs, final_obs = obs["policy"], infos["final_obs"]["policy"]
    assert final_obs[n, 1].abs() > 0.2 > 0.05 > obs[n, 1].abs()  # fallen; upright again
    script.train(make_args(tmp_path, env_id="InvertedPendulum-v4"))


def test_brax(tmp_path):
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
    settings = {"num_envs": 64, "num_steps": 20, "learning_rate": 1e-3, "total_timesteps": 64 * 20 * 30}
    settings |= {"hidden_size": 32, "env_id": env_id_of(lambda *_: envs)}  # JAX has compiled it
    agent, _ = script.train(make_args(tmp_path, "google", **settings))
    assert script.evaluate(agent, envs, seed=3).mean() > 25


def test_google_vs_nvidia_starts(tmp_path):
    """Every update of both sizes has settings that the script takes: it ends at the device, which torch does not know.
    In a process of its own, since the study changes what it imports."""
    pytest.importorskip("scipy")
    program = f"""import sys; sys.path.insert(0, {str(ROOT / "benchmark" / "studies")!r})
import google_vs_nvidia as study
for settings in (study.SMALL, study.FULL):
    for update in study.UPDATES:
        try:
            study.train_all(study.Args(seeds=1, updates=(update,), runs_dir="nowhere", device="none"), settings)
        except RuntimeError as error:
            print(error)"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.count("device string: none") == 10, done.stderr
