"""--desired-kl: the adaptive learning rate of rsl_rl."""

import dataclasses

import pytest
import torch
from conftest import NO_BOUNDS, golden, scalars


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
