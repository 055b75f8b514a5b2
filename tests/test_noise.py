"""The noise of Box actions: --anneal-std, --log-std-min."""

import math

import pytest
import torch
from conftest import ONE, scalars

pytestmark = ONE


def test_anneal_std(script, small_args, minibatches):
    """With nothing learned the actions spread as --log-std-init says in the first iteration, then along a quarter of a
    cosine; an evaluation that samples spreads like the last iteration."""
    flags = {"learning_rate": 0.0, "num_minibatches": 1, "update_epochs": 1, "anneal_std": True, "log_std_init": -1.0}
    flags |= {"num_envs": 64, "num_steps": 32, "norm_obs": False}
    _, run_dir = script.train(small_args(total_timesteps=3 * 2048, **flags))
    expected = [math.exp(-1) * part for part in (1, 0.75**0.5, 0.5)]
    spreads = [float(actions.std()) for (_, _, _, actions, *_), _ in minibatches]
    assert spreads == pytest.approx(expected, rel=0.06)
    assert [value for _, value in scalars(run_dir)["charts/policy_std"]] == pytest.approx(expected)
    agent = script.load_agent(run_dir)
    sampled = agent.predict(torch.zeros(4096, 2), deterministic=False)
    assert sampled.std() == pytest.approx(math.exp(-1) / 2, rel=0.06)
    args = script.load_args(run_dir)
    args.anneal_std, args.total_timesteps = False, 4 * 2048
    agent, _ = script.train(args, run_dir)  # whole again, as the learning rate is with --no-anneal-lr
    assert agent.predict(torch.zeros(4096, 2), deterministic=False).std() == pytest.approx(math.exp(-1), rel=0.06)


def test_log_std_stays_above_its_bound(script, small_args):
    """A negative entropy bonus drives log_std below --log-std-min. The next iteration begins on the bound."""
    flags = {"learning_rate": 0.02, "max_grad_norm": 0.0, "target_kl": None, "ent_coef": -10.0}
    args = small_args(total_timesteps=640, log_std_init=-1.0, log_std_min=-1.2, **flags)
    _, run_dir = script.train(args)
    args.total_timesteps, args.learning_rate = 704, 0.0
    agent, _ = script.train(args, run_dir)
    assert agent.log_std.tolist() == pytest.approx([-1.2] * len(agent.log_std))
