"""variants/ppo_gpu_sim.py: advantages, losses and whole updates are those of rsl_rl, Brax and NVIDIA."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
import torch._dynamo  # before a test replaces torch.randn_like: it looks up functions when imported
import torch_envs
from conftest import TESTS, golden, scalars
from gpu_sim import agent_for, env_id_of, make_agent, make_args, script, train_from

ORACLE = json.loads((TESTS / "gpu_sim_oracle.json").read_text())


def tensors(tree):
    return {name: torch.tensor(value) for name, value in tree.items()}


def test_advantages_of_nvidia():
    inputs, expected = golden("gae_nvidia_variant")
    args = script.Args(gamma=inputs["gamma"], gae_lambda=inputs["gae_lambda"], timeouts="masked")
    columns = inputs["rewards"], inputs["values"], inputs["last_values"], torch.full_like(inputs["values"], math.nan)
    terminations, truncations = inputs["terminations"].bool(), inputs["truncations"].bool()
    advantages, returns = script.estimate_targets(args, *columns, terminations & ~truncations, truncations)
    torch.testing.assert_close(script.normalize_advantages(advantages), expected["advantages"])
    torch.testing.assert_close(returns, expected["vs"])


def test_gaussian_kl():
    inputs, expected = golden("gaussian_kl")
    names = "old_mean", "old_std", "new_mean", "new_std"
    torch.testing.assert_close(script.normal_kl(*(inputs[name] for name in names)), expected["exact"])


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


def test_total_loss():
    inputs, expected = golden("total_loss_by_system")
    settings = {"clip_vloss": True, "vf_coef": 0.5, "clip_coef": 0.2, "norm_adv": "minibatch"}  # CleanRL's
    settings["ent_coef"] = inputs["ent_coef"]
    agent = make_agent(obs_size=1, action_size=1, **settings).double()
    agent.actor = torch.nn.Identity()
    agent.get_value = lambda obs: inputs["new_values"].unsqueeze(0)
    agent.std.data.copy_(inputs["log_std"].exp())
    columns = {"obs": inputs["mean"], "actions": inputs["action"], "log_probs": inputs["old_logprob"]}
    columns |= {"critic_obs": inputs["mean"], "values": inputs["old_values"], "returns": inputs["returns"]}
    columns |= {"means": inputs["old_mean"], "stds": inputs["old_log_std"].exp().expand_as(inputs["old_mean"])}
    columns |= {"advantages": inputs["advantages"]}
    loss, metrics = script.ppo_loss(agent, agent.args, {name: x.unsqueeze(0) for name, x in columns.items()})
    torch.testing.assert_close(loss.item(), expected["cleanrl"])
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
    settings |= {
        "gae_lambda": 0.9,
        "max_grad_norm": 0.5,
        "learning_rate": 5e-3,
        "hidden_sizes": (16, 16),
        "norm_obs": False,
    }
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
    settings |= {"learning_rate": 5e-3, "hidden_sizes": (16, 16), "norm_obs": False, "total_timesteps": 24}
    _, logged = train_on_record(make_args(tmp_path, "google", **settings), oracle, tmp_path / "run")
    policy_loss, value_loss, entropy = (logged[f"losses/{name}"] for name in ("policy_loss", "value_loss", "entropy"))
    loss = policy_loss + 0.5 * value_loss - 0.01 * entropy
    assert loss == pytest.approx(np.mean(oracle["losses"]), abs=1e-6, rel=1e-5)
