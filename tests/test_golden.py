"""Golden vectors: numbers that other implementations, or arithmetic by hand, gave (golden.json)."""

import itertools
import math

import pytest
import torch
from conftest import RNN, golden, loss_and_metrics, make_agent, policy

EXACT = {"atol": 1e-9, "rtol": 0}


def gradient(function, x):
    x = x.clone().requires_grad_()
    loss = function(x)
    return loss.detach(), torch.autograd.grad(loss, x)[0]


def test_policy_loss(script):
    inputs, expected = golden("policy_loss")
    args = {"clip_coef": inputs["clip_coef"], "ent_coef": 0.0, "norm_adv": False}
    loss, grad = gradient(
        lambda x: loss_and_metrics(script, inputs | {"new_logprob": x}, **args)[0], inputs["new_logprob"]
    )
    torch.testing.assert_close(loss.item(), expected["loss"], **EXACT)
    torch.testing.assert_close(grad, expected["grad_new_logprob"], **EXACT)


@pytest.mark.parametrize("case, clipped", [("cleanrl_unclipped", False), ("cleanrl_clipped", True)])
def test_value_loss(script, case, clipped):
    inputs, expected = golden("value_loss")
    inputs["old_logprob"] = torch.zeros_like(inputs["returns"])
    args = {"clip_coef": inputs["clip"], "clip_vloss": clipped, "vf_coef": 1.0, "norm_adv": False}
    loss, grad = gradient(
        lambda x: loss_and_metrics(script, inputs | {"new_values": x}, **args)[0], inputs["new_values"]
    )
    torch.testing.assert_close(loss.item(), expected[case]["loss"], **EXACT)
    torch.testing.assert_close(grad, expected[case]["grad"], **EXACT)


def test_metrics(script):
    inputs, expected = golden("kl_estimators")
    metrics = loss_and_metrics(script, inputs)[1]
    torch.testing.assert_close(metrics["approx_kl"].item(), expected["k3"], **EXACT)
    torch.testing.assert_close(metrics["old_approx_kl"].item(), expected["k1"], **EXACT)
    inputs, expected = golden("policy_loss")
    metrics = loss_and_metrics(script, inputs, clip_coef=inputs["clip_coef"])[1]
    assert metrics["clipfrac"].item() == pytest.approx(expected["clipfrac_ratio"])
    inputs, expected = golden("explained_variance")
    explained = script.explained_variance(inputs["y_pred"], inputs["y_true"])
    torch.testing.assert_close(explained.item(), expected["ev"], **EXACT)
    assert script.explained_variance(torch.randn(4), torch.ones(4)).isnan()


def test_advantage_normalisation(script):
    """With ratio 1 the policy loss is minus the mean advantage, its gradient minus the advantages / M."""
    inputs, expected = golden("adv_norm")
    x = inputs["x"]
    log_probs = torch.zeros_like(x, requires_grad=True)
    case = {"old_logprob": torch.zeros_like(x), "new_logprob": log_probs, "advantages": x}
    loss, _ = loss_and_metrics(script, case, norm_adv=True, ent_coef=0.0)
    torch.testing.assert_close(-torch.autograd.grad(loss, log_probs)[0] * len(x), expected["torch_minibatch"], **EXACT)
    case = {"old_logprob": torch.zeros(1), "advantages": torch.tensor([3.0])}
    assert loss_and_metrics(script, case, norm_adv=True)[1]["policy_loss"] == -3.0  # one sample: left as it is


@pytest.mark.parametrize("script", ["ppo_discrete", "ppo_rnn"], indirect=True)
@pytest.mark.parametrize("case", ["categorical", "categorical_masked", "multidiscrete_masked"])
def test_categorical(script, case):
    """Log-probability and entropy of given logits, and the probability of every action: exactly 0 where masked."""
    inputs, expected = golden(case)
    logits, mask = inputs["logits"], inputs["mask"].bool() if "mask" in inputs else None
    sizes = [int(n) for n in inputs.get("nvec", [logits.shape[-1]])]
    agent = policy(script, sizes).double()
    action = inputs["action"].long().reshape(len(logits), -1)
    _, log_prob, entropy, _ = agent.get_action_and_value(logits, action, mask)
    torch.testing.assert_close(log_prob, expected["logprob"], atol=1e-9, rtol=0)
    torch.testing.assert_close(entropy, expected["entropy"], atol=1e-9, rtol=0)
    probabilities = [expected[name] for name in (["probs"] if len(sizes) == 1 else ["probs_dim0", "probs_dim1"])]
    for choices in itertools.product(*map(range, sizes)):
        action = torch.tensor(choices).expand(len(logits), -1)
        found = agent.get_action_and_value(logits, action, mask)[1].exp()
        wanted = math.prod(p[:, choice] for p, choice in zip(probabilities, choices))
        torch.testing.assert_close(found, wanted, atol=1e-9, rtol=0)
        assert ((found == 0) == (wanted == 0)).all()


@RNN
def test_memory_that_is_reset(script):
    """Outputs and final state of an LSTM whose state is reset before some of the steps."""
    inputs, expected = golden("lstm_done_reset")
    memory = script.Memory("lstm", 2, 2).double()
    weights = {name: inputs[name] for name in ("weight_ih", "weight_hh", "bias_ih")}
    memory.cell.load_state_dict(weights | {"bias_hh": torch.zeros(8)})
    x, starts = inputs["x"], inputs["dones_before"].bool()
    state = torch.cat([inputs["h0"], inputs["c0"]], -1)
    torch.testing.assert_close(memory.replay(x, starts, state), expected["outputs"], atol=1e-9, rtol=0)
    for t in range(len(x)):
        output, state = memory.step(x[t], torch.where(starts[t].unsqueeze(1), 0.0, state))
        torch.testing.assert_close(output, expected["outputs"][t], atol=1e-9, rtol=0)
    torch.testing.assert_close(state, torch.cat([expected["h_final"], expected["c_final"]], -1), atol=1e-9, rtol=0)


def test_running_statistics(script):
    inputs, expected = golden("rms_gym_sb3")
    agent = make_agent(script, obs_size=2)
    first = inputs["batches"][0]
    agent.obs_rms.update(first.unsqueeze(0))  # the first batch is taken exactly
    torch.testing.assert_close(agent.obs_rms.mean, first.mean(0), **EXACT)
    torch.testing.assert_close(agent.obs_rms.var, first.var(0, correction=0), **EXACT)
    agent = make_agent(script, obs_size=2)
    agent.obs_rms.count.fill_(1e-4)  # with which gymnasium and SB3 begin
    for batch, after in zip(inputs["batches"], expected["after_each"]):
        agent.obs_rms.update(batch.unsqueeze(0))
        torch.testing.assert_close(agent.obs_rms.mean, after["mean"], atol=1e-7, rtol=0)
        torch.testing.assert_close(agent.obs_rms.var, after["var"], atol=1e-7, rtol=1e-12)
        torch.testing.assert_close(agent.obs_rms.count.item(), after["count"], atol=1e-7, rtol=0)
    normalised = agent.normalize_obs(inputs["batches"][-1])
    torch.testing.assert_close(normalised.double(), expected["normalised_B3"], atol=1e-6, rtol=0)
    assert normalised.dtype == torch.float32
    assert agent.normalize_obs(torch.full((2,), 1e9, dtype=torch.float64)).tolist() == [10, 10]


@pytest.mark.parametrize("script", ["ppo_discrete", "ppo_rnn"], indirect=True)
def test_sampled_frequencies(script):
    """Each dimension has a softmax of its own. 200,000 samples: a frequency's standard deviation is below 0.0012."""
    torch.manual_seed(0)
    inputs, expected = golden("categorical")
    logits = inputs["logits"].float().flatten().expand(200_000, 12)
    action = policy(script, [4, 4, 4]).get_action_and_value(logits)[0]
    for k, probs in enumerate(expected["probs"]):
        frequencies = action[:, k].bincount(minlength=4) / len(action)
        torch.testing.assert_close(frequencies.double(), probs, atol=0.006, rtol=0)
