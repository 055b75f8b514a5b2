"""The loss and the update: ratio 1, KL limit, Adam, permutations. Golden vectors are in test_golden.py."""

import numpy as np
import pytest
import torch
from conftest import scalars


@pytest.mark.parametrize("script", ["ppo_continuous", "ppo_discrete"], indirect=True)
def test_ratio_is_one_in_the_first_minibatch(script, small_args, minibatches):
    """In every iteration, with moving observation statistics, the first minibatch finds the agent that collected it: no
    ratio leaves the narrowest range of clipping. test_memory.py has this for ppo_rnn.py."""
    script.train(small_args(total_timesteps=640, clip_coef=1e-6))
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
    flags["vf_coef"] = 1e30  # the squares of this gradient are beyond float32
    assert 10 * after(1, 1e-3)[1].norm() == pytest.approx(1e-3, rel=1e-4)


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
    """Every sample once per epoch, in a new order every time. The learning rate falls linearly: the first iteration has
    all of it, the last a part that is not zero (as in CleanRL). The explained variance is that of the critic before the
    update."""
    # 16 environments: ppo_rnn deals them out whole, and 4 of them would come in the same order now and then.
    flags = {"num_envs": 16, "num_steps": 4, "num_minibatches": 4, "update_epochs": 3, "recompute_advantages": True}
    args = small_args(total_timesteps=256, **flags)
    _, run_dir = script.train(args)
    actions, values, returns = ([arguments[i].flatten() for arguments, _ in minibatches] for i in (3, -3, -1))
    epochs = [torch.cat(actions[i : i + 4]) for i in range(0, 12, 4)]
    for epoch in epochs[1:]:
        assert not torch.equal(epoch, epochs[0])
        torch.testing.assert_close(epoch.flatten().sort()[0], epochs[0].flatten().sort()[0])
    logged = {key: [value for _, value in rows] for key, rows in scalars(run_dir).items()}
    assert logged["charts/learning_rate"] == pytest.approx([args.learning_rate * f for f in (1, 0.75, 0.5, 0.25)])
    first, last = (
        script.explained_variance(torch.cat(values[i : i + 4]), torch.cat(returns[i : i + 4])) for i in (0, 8)
    )
    assert logged["losses/explained_variance"][0] == pytest.approx(float(first), rel=1e-5)
    assert logged["losses/explained_variance"][0] != pytest.approx(float(last), rel=1e-3)
