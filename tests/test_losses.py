"""Policy, losses and update: golden vectors, torch's Adam, compiled against eager. SB3 is in test_sb3.py."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from conftest import ACTIONS, MASKS, NO_BOUNDS, golden, make_agent, probe, scalars

EXACT = {"atol": 1e-9, "rtol": 0}


def gradient(function, x):
    x = x.clone().requires_grad_()
    loss = function(x)
    return loss.detach(), torch.autograd.grad(loss, x)[0]


def test_policy_loss(script):
    inputs, expected = golden("policy_loss")
    log_ratio = inputs["new_logprob"] - inputs["old_logprob"]
    loss, grad = gradient(lambda x: script.clipped_policy_loss(x, inputs["advantages"], inputs["clip_coef"]), log_ratio)
    torch.testing.assert_close(loss.item(), expected["loss"], **EXACT)
    torch.testing.assert_close(grad, expected["grad_new_logprob"], **EXACT)


@pytest.mark.parametrize("case, clipped", [("cleanrl_unclipped", False), ("cleanrl_clipped", True)])
def test_value_loss(script, case, clipped):
    inputs, expected = golden("value_loss")
    clip = inputs["clip"] if clipped else None
    loss, grad = gradient(
        lambda x: script.clipped_value_loss(x, inputs["old_values"], inputs["returns"], clip), inputs["new_values"]
    )
    torch.testing.assert_close(loss.item(), expected[case]["loss"], **EXACT)
    torch.testing.assert_close(grad, expected[case]["grad"], **EXACT)


class Policy:
    """Stands in for an agent: gives ppo_loss the log-probabilities, entropy and values of a golden case."""

    def __init__(self, log_probs, entropy, values):
        self.outputs = log_probs, entropy, values

    def get_action_and_value(self, obs, action, *masks):
        return action, *self.outputs


def loss_and_metrics(script, inputs, scale=1.0, **args):
    zeros = torch.zeros_like(inputs["old_logprob"])
    new_log_probs = inputs.get("new_logprob", zeros)
    policy = Policy(new_log_probs, inputs.get("entropy", zeros), inputs.get("new_values", zeros))
    minibatch = [inputs.get(key, zeros) for key in ("old_logprob", "old_values", "advantages", "returns")]
    return script.ppo_loss(policy, script.Args(**args), scale, None, None, *minibatch, *MASKS[script.__name__])


def test_metrics(script):
    inputs, expected = golden("kl_estimators")
    metrics = loss_and_metrics(script, inputs)[1]
    torch.testing.assert_close(metrics["approx_kl"].item(), expected["k3"], **EXACT)
    inputs, expected = golden("policy_loss")
    metrics = loss_and_metrics(script, inputs, clip_coef=inputs["clip_coef"])[1]
    assert metrics["clipfrac"].item() == pytest.approx(expected["clipfrac_ratio"])
    inputs, expected = golden("explained_variance")
    explained = script.explained_variance(inputs["y_pred"], inputs["y_true"])
    wanted = expected["ev"] if isinstance(expected["ev"], float) else float(expected["ev"])
    torch.testing.assert_close(explained.item(), wanted, **EXACT)
    assert script.explained_variance(torch.randn(4), torch.ones(4)).isnan()


def test_total_loss_of_cleanrl(script):
    inputs, expected = golden("total_loss_by_system")
    inputs |= {"new_logprob": expected["new_logprob"], "entropy": expected["entropy"] + 0 * expected["new_logprob"]}
    cleanrl = {"norm_adv": True, "clip_vloss": True, "clip_coef": 0.2, "vf_coef": 0.5, "ent_coef": inputs["ent_coef"]}
    cleanrl["kl_coef"] = 0.0
    loss, _ = loss_and_metrics(script, inputs, **cleanrl)
    torch.testing.assert_close(loss.item(), expected["cleanrl"], **EXACT)


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


def test_kl_penalty(script):
    """Where there is nothing to gain, what is left of the loss has the gradient of torch.distributions' KL divergence
    from the policy that drew the actions."""
    torch.manual_seed(0)
    old = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1.0)
    actions = old.sample((500_000,))
    mean, std = parameters = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.3, 0.8)]
    new = torch.distributions.Normal(mean, std)
    case = {"old_logprob": old.log_prob(actions), "new_logprob": new.log_prob(actions)}
    loss, _ = loss_and_metrics(script, case, kl_coef=2.0)
    divergence = 2.0 * torch.distributions.kl_divergence(old, new)
    wanted = torch.autograd.grad(divergence, parameters)
    torch.testing.assert_close(torch.autograd.grad(loss, parameters), wanted, atol=0, rtol=0.02)
    torch.testing.assert_close(loss, divergence, atol=0, rtol=0.02)


def test_clip_ranges(script):
    """--vf-clip-coef is a range of its own, and --anneal-clip scales both."""
    inputs, _ = golden("value_loss")
    inputs["old_logprob"] = torch.zeros_like(inputs["returns"])
    value_loss = lambda *a, **args: loss_and_metrics(script, inputs, *a, clip_vloss=True, **args)[1]["value_loss"]  # noqa: E731
    wide, narrow = value_loss(clip_coef=0.2), value_loss(clip_coef=0.1)
    assert wide != narrow
    assert value_loss(clip_coef=0.1, vf_clip_coef=0.2) == wide
    assert value_loss(0.5, clip_coef=0.2) == narrow
    assert value_loss(0.5, clip_coef=0.1, vf_clip_coef=0.4) == wide
    inputs, expected = golden("policy_loss")
    clipfrac = lambda *a, **args: loss_and_metrics(script, inputs, *a, **args)[1]["clipfrac"].item()  # noqa: E731
    assert clipfrac(0.5, clip_coef=2 * inputs["clip_coef"]) == pytest.approx(expected["clipfrac_ratio"])


def test_adaptive_learning_rate(script):
    inputs, expected = golden("adaptive_lr")
    cases = inputs["lr_and_kl"]
    for (lr, kl), wanted in zip(cases, expected["lr"]):
        found = script.adapt_learning_rate(lr, kl, inputs["desired_kl"])
        torch.testing.assert_close(found, wanted, atol=1e-15, rtol=1e-12)
    inputs, expected = golden("adaptive_lr_sequence")
    lr = torch.tensor(inputs["lr0"], dtype=torch.float64)
    for kl, wanted in zip(inputs["kl"], expected["lr"]):
        lr = script.adapt_learning_rate(lr, kl, inputs["desired_kl"])
        torch.testing.assert_close(lr, wanted, atol=1e-15, rtol=1e-12)


def test_ratio_is_one_in_the_first_minibatch(script, small_args, minibatches):
    """In every iteration, with moving observation statistics, the first minibatch finds the agent that collected it: no
    ratio leaves the narrowest range of clipping."""
    close = 1e-5 if script.__name__ == "ppo_rnn" else 1e-6  # other kernels replay
    script.train(small_args(total_timesteps=640, clip_coef=close))
    metrics = [metrics for _, (_, metrics) in minibatches]
    assert len(metrics) == 10 * 2 * 4  # iterations, epochs, minibatches
    assert all(first["clipfrac"] == 0 for first in metrics[::8])
    assert metrics[7]["clipfrac"] > 0.9 and metrics[7]["approx_kl"] > 1e-6  # while the last minibatch finds another


def test_steps_are_adams(script, small_args):
    """torch's Adam, with the eps of baselines, on gradients that torch would have clipped: the same weights after each
    of three steps, so small that eps matters. A bound of 0 is no bound, like one that is never reached."""
    flags = {"num_envs": 8, "num_steps": 8, "total_timesteps": 64, "num_minibatches": 1, "vf_coef": 100.0}

    def after(update_epochs, max_grad_norm, learning_rate=1e-2):
        """The weights, and Adam's mean of the gradients, of which each one adds a tenth."""
        changes = {"update_epochs": update_epochs, "max_grad_norm": max_grad_norm, "learning_rate": learning_rate}
        agent, run_dir = script.train(small_args(target_kl=None, **flags | changes))
        mean = script.load_checkpoint(run_dir)["optimizer"]["state"][0]["exp_avg"]
        return torch.nn.utils.parameters_to_vector(agent.parameters()).detach(), mean

    weights, mean = after(1, 0.0, learning_rate=0.0)
    unclipped = 10 * mean
    assert unclipped.norm() > 10 and torch.equal(unclipped, 10 * after(1, 1e9)[1])
    optimizer, before = torch.optim.Adam([weights], lr=1e-2, eps=1e-5), torch.zeros_like(mean)
    for step in (1, 2, 3):
        found, mean = after(step, 1e-3)
        weights.grad = 10 * (mean - 0.9 * before)
        assert weights.grad.norm() == pytest.approx(1e-3, rel=1e-4)
        if step == 1:
            torch.testing.assert_close(weights.grad, unclipped * 1e-3 / unclipped.norm(), atol=1e-9, rtol=1e-4)
        optimizer.step()
        torch.testing.assert_close(found, weights, atol=1e-6, rtol=1e-5)
        before = mean


HARD = {
    "norm_adv": True,
    "recompute_advantages": True,
    "clip_vloss": True,
    "vf_clip_coef": 0.1,
    "anneal_clip": True,
    "desired_kl": 0.01,
    "max_grad_norm": 0.1,
    "kl_coef": 0.1,
}


@pytest.mark.parametrize("flags", [{}, HARD], ids=["defaults", "other choices"])
def test_compiled_equals_eager(script, small_args, flags):
    """After 24 minibatch updates in 3 iterations the whole learner, its statistics and its optimizer are those of eager
    mode, and they have changed. (The trap: a compiled function that leaves a tensor as it was, without an error.)"""
    # A memory learns nothing of its own past where an episode has one step, as in the usual probe.
    env, obs_size = ("Chain", 16) if script.__name__ == "ppo_rnn" else ("Target", 2)
    learners = {}
    for compile in (False, True):
        args = small_args(compile=compile, total_timesteps=3 * 64, env_id=probe(script, env), **flags)
        agent, run_dir = script.train(args)
        learners[compile] = agent.state_dict(), script.load_checkpoint(run_dir)["optimizer"], scalars(run_dir)
    eager, compiled = learners[False], learners[True]
    torch.testing.assert_close(compiled[0], eager[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(compiled[1], eager[1], atol=1e-5, rtol=1e-4)
    for key in eager[2]:
        if key != "charts/SPS":
            np.testing.assert_allclose(
                np.array(compiled[2][key]), np.array(eager[2][key]), atol=1e-4, rtol=1e-3, err_msg=key
            )
    torch.manual_seed(1)
    hidden = {"hidden_size": agent.args.hidden_size} if hasattr(agent.args, "hidden_size") else {}
    actions = [3, 2] if ACTIONS[script.__name__] == "discrete" else 2
    fresh = make_agent(script, obs_size, actions, **flags, **hidden).state_dict()
    assert all(fresh[name].shape == tensor.shape for name, tensor in eager[0].items())
    assert fresh.keys() == eager[0].keys()
    constant = [] if getattr(agent.args, "anneal_std", False) else ["log_std_shift"]
    for name, tensor in fresh.items():
        if not name.startswith("action_") and name not in constant:
            assert not torch.equal(tensor, compiled[0][name]), f"{name} did not change"


def test_target_kl_stops_before_the_step(script, small_args, minibatches):
    """SB3's rule: an update ends at the first KL over 1.5 times the target, without its step. A limit just below a KL
    that is larger than those before it ends the update there, one just above it does not."""
    flags = {"total_timesteps": 64, "num_minibatches": 2, "update_epochs": 3, "learning_rate": 1e-2}

    def update(target_kl):
        """The KLs of an update, the number of its steps, and the KL that is logged."""
        minibatches.clear()
        _, run_dir = script.train(small_args(target_kl=target_kl, **flags))
        steps = script.load_checkpoint(run_dir)["optimizer"]["state"][0]["step"]
        kls = [float(metrics["approx_kl"]) for _, (_, metrics) in minibatches]
        return [0.0, *kls[1:]], steps, scalars(run_dir)["losses/approx_kl"][0][1]

    kls, _, _ = update(None)
    largest = int(np.argmax(kls[:4]))  # another epoch would follow
    assert update(0.999 * kls[largest] / 1.5) == (
        kls[: largest + 1],
        largest,
        pytest.approx(np.mean(kls[: largest + 1])),
    )
    further, steps, _ = update(1.001 * kls[largest] / 1.5)
    assert len(kls) == 6 and len(further) > largest + 1 and steps > largest > 0


def test_permutations_annealing_and_explained_variance(script, small_args, minibatches):
    """Every sample once per epoch, in a new order every time; learning rate and clip range fall linearly, the first
    iteration having all of them and the last a part that is not zero (as in CleanRL). The explained variance is that of
    the critic before the update."""
    # 16 environments: ppo_rnn deals them out whole, and 4 of them would come in the same order now and then.
    flags = {"num_envs": 16, "num_steps": 4, "num_minibatches": 4, "update_epochs": 3, "recompute_advantages": True}
    args = small_args(total_timesteps=256, anneal_clip=True, **flags)
    _, run_dir = script.train(args)
    clip_scales, actions, values, returns = ([arguments[i] for arguments, _ in minibatches] for i in (2, 4, 6, 8))
    epochs = [torch.cat(actions[i : i + 4]) for i in range(0, 12, 4)]
    for epoch in epochs[1:]:
        assert not torch.equal(epoch, epochs[0])
        torch.testing.assert_close(epoch.flatten().sort()[0], epochs[0].flatten().sort()[0])
    assert clip_scales == [1] * 12 + [0.75] * 12 + [0.5] * 12 + [0.25] * 12
    logged = {key: [value for _, value in rows] for key, rows in scalars(run_dir).items()}
    assert logged["charts/learning_rate"] == pytest.approx([args.learning_rate * f for f in (1, 0.75, 0.5, 0.25)])
    first, last = (
        script.explained_variance(torch.cat(values[i : i + 4]), torch.cat(returns[i : i + 4])) for i in (0, 8)
    )
    assert logged["losses/explained_variance"][0] == pytest.approx(float(first), rel=1e-5)
    assert logged["losses/explained_variance"][0] != pytest.approx(float(last), rel=1e-3)


@pytest.mark.parametrize("script", ["ppo_continuous"], indirect=True)
@pytest.mark.parametrize("learned", [{}, {"log_std_min": -1.0, "log_std_max": None}])
def test_anneal_std(script, small_args, minibatches, learned):
    """With nothing learned the actions spread as --log-std-init says in the first iteration, then along a quarter of a
    cosine, below the lower bound too; an evaluation that samples spreads like the last iteration."""
    flags = {"learning_rate": 0.0, "num_minibatches": 1, "update_epochs": 1, "anneal_std": True, "log_std_init": -1.0}
    flags |= {"num_envs": 64, "num_steps": 32} | learned
    _, run_dir = script.train(small_args(total_timesteps=3 * 2048, **flags))
    spreads = [float(actions.std()) for (_, _, _, _, actions, *_), _ in minibatches]
    assert spreads == pytest.approx([math.exp(-1) * part for part in (1, 0.75**0.5, 0.5)], rel=0.06)
    agent = script.load_agent(run_dir)
    raw_obs = torch.zeros(4096, agent.obs_rms.mean.shape[0])
    sampled = agent.predict(raw_obs, deterministic=False)
    assert sampled.std() == pytest.approx(math.exp(-1) / 2, rel=0.06)
    assert agent.log_std_shift == pytest.approx(math.log(1 / 2))
    flags = {"resume": str(run_dir), "anneal_std": False, "total_timesteps": 4 * 2048}
    agent, _ = script.train(dataclasses.replace(script.load_checkpoint(run_dir)["args"], **flags))
    assert agent.log_std_shift == 0  # whole again, as the learning rate is with --no-anneal-lr


@pytest.mark.parametrize("script", ["ppo_continuous"], indirect=True)
def test_log_std_stays_where_it_has_a_gradient(script, small_args):
    """An entropy bonus drives what is learned over its bound; it is brought back, and comes down again without it."""
    flags = {"log_std_init": -1.0, "log_std_min": -1.5, "log_std_max": -1.0, "learning_rate": 0.02, "anneal_lr": False}
    flags |= {"env_id": probe(script), "num_envs": 4, "num_steps": 16, "target_kl": None, "max_grad_norm": 0.0}
    agent, run_dir = script.train(small_args(ent_coef=10.0, total_timesteps=640, checkpoint_interval=1, **flags))
    assert (agent.log_std > -1.1).all()
    flags = {"resume": str(run_dir), "ent_coef": -10.0, "total_timesteps": 1280}
    agent, _ = script.train(dataclasses.replace(script.load_checkpoint(run_dir)["args"], **flags))
    assert (agent.log_std < -1.4).all()


@pytest.mark.parametrize("script", ["ppo_continuous", "ppo_rnn"], indirect=True)
def test_actions_of_double_precision(script):
    """float64 bounds leave the policy in float32: under torchrun its KL is averaged together with the gradient."""
    agent = make_agent(script)
    agent.action_low, agent.action_high = agent.action_low.double(), 2 * agent.action_high.double()
    assert {x.dtype for x in agent.get_action_and_value(torch.randn(8, 3))} == {torch.float32}


@pytest.mark.parametrize("script", ["ppo_continuous"], indirect=True)
def test_upper_bound_of_log_std_follows_the_reach_of_actions(script):
    """Up to the bound where actions end at 1 or before, further where they go further, up or down; nothing is known of
    infinity, or of the largest number, which some environments give in its place."""
    agent = make_agent(script, action_size=6, log_std_init=0.0, log_std_max=0.5)
    agent.action_high.copy_(torch.tensor([0.4, 1.0, 3.0, 0.0, math.inf, torch.finfo().max]))
    agent.action_low.copy_(torch.tensor([-0.4, -1.0, 0.0, -3.0, -math.inf, torch.finfo().min]))
    agent.log_std.data.fill_(9.0)
    _, log_std = agent.get_mean_and_log_std(torch.zeros(1, 3))
    far = 0.5 + math.log(3.0)
    torch.testing.assert_close(log_std[0].detach(), torch.tensor([0.5, 0.5, far, far, 0.5, 0.5]))


def test_desired_kl_moves_the_learning_rate(script, small_args):
    """A KL far below the desired one drives the learning rate up to its bound, one far above it drives it down."""
    for desired_kl, low, high in [(10.0, 0.0099, 0.0101), (1e-6, 0.9e-5, 1e-4)]:
        _, run_dir = script.train(small_args(total_timesteps=640, desired_kl=desired_kl))
        assert low <= scalars(run_dir)["charts/learning_rate"][-1][1] <= high


def test_desired_kl_goes_on_from_a_new_learning_rate(script, small_args):
    """--desired-kl goes on with the learning rate that it has come to, unless another one is given. In the first
    minibatch of an iteration, here its only one, the agent is still the same: its KL is rounding, and counts as 0."""
    flags = {"desired_kl": 0.01, "num_minibatches": 1, "update_epochs": 1, "total_timesteps": 128}
    # One environment, for other products of matrices in acting than in learning; little noise, which enlarges rounding.
    flags |= {"num_envs": 1} if script.__name__ == "ppo_discrete" else {"num_envs": 1, "log_std_init": -6.0}
    _, run_dir = script.train(small_args(learning_rate=1e-4, **flags, **NO_BOUNDS[script.__name__]))
    for steps, given, expected in [(192, {}, 1e-4), (256, {"learning_rate": 2e-4}, 2e-4), (320, {}, 2e-4)]:
        args = script.load_checkpoint(run_dir)["args"]
        script.train(dataclasses.replace(args, resume=str(run_dir), total_timesteps=steps, **given))
        logged = scalars(run_dir)
        assert logged["charts/learning_rate"][-1][1] == pytest.approx(expected)
        assert not any(kl for _, kl in logged["losses/approx_kl"])


def test_compiled_functions_refuse_other_shapes_and_types():
    """They are called without torch's guards: what they were not compiled for has to be an error, no wrong number."""
    import ppo_continuous

    weight, x = torch.randn(4, 3), torch.randn(8, 4)
    function = ppo_continuous.compiled(lambda x: (x @ weight).tanh(), ppo_continuous.Args(), x.device)
    torch.testing.assert_close(function(x), (x @ weight).tanh())
    torch.testing.assert_close(function(2 * x), (2 * x @ weight).tanh())
    for other in (x[:5], torch.randn(9, 4), x.double(), torch.randn(4, 8).T):
        with pytest.raises(RuntimeError):
            function(other)


def test_compiled_gradient_that_is_wrong():
    """A function that gives another result when it is compiled: torch.compile has done that to a gradient."""
    import ppo_continuous

    def gradient(x, factor):
        return x * (factor if torch.compiler.is_compiling() else 1.0), {}

    x, device = torch.randn(8), torch.device("cpu")
    for factor in (1.001, 0.9):
        function = ppo_continuous.compiled(lambda x: gradient(x, factor), ppo_continuous.Args(), device, check=True)  # noqa: B023
        if factor > 1:
            torch.testing.assert_close(function(x)[0], 1.001 * x)
        else:
            with pytest.raises(ValueError, match=r"gives a wrong gradient for these sizes: use --no-compile"):
                function(x)
