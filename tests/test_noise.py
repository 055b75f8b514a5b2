"""The noise of Box actions: --anneal-std, --log-std-min, --log-std-max."""

import math

import pytest
import torch
from conftest import ONE, probe, scalars

pytestmark = ONE


@pytest.mark.parametrize("learned", [{}, {"log_std_min": -1.0, "log_std_max": 20.0}])
def test_anneal_std(script, small_args, minibatches, learned):
    """With nothing learned the actions spread as --log-std-init says in the first iteration, then along a quarter of a
    cosine, below the lower bound too; an evaluation that samples spreads like the last iteration."""
    flags = {"learning_rate": 0.0, "num_minibatches": 1, "update_epochs": 1, "anneal_std": True, "log_std_init": -1.0}
    flags |= {"num_envs": 64, "num_steps": 32, "norm_obs": False} | learned
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


def test_log_std_stays_where_it_has_a_gradient(script, small_args):
    """An entropy bonus drives what is learned over its bound; it is brought back, and comes down again without it."""
    flags = {"log_std_init": -1.0, "log_std_min": -1.5, "log_std_max": -1.0, "learning_rate": 0.02, "anneal_lr": False}
    flags |= {"env_id": probe(script), "num_envs": 4, "num_steps": 16, "target_kl": None, "max_grad_norm": 0.0}
    agent, run_dir = script.train(small_args(ent_coef=10.0, total_timesteps=640, **flags))
    assert (agent.log_std > -1.1).all()
    args = script.load_args(run_dir)
    args.ent_coef, args.total_timesteps = -10.0, 1280
    agent, _ = script.train(args, run_dir)
    assert (agent.log_std < -1.4).all()


def test_bounds_of_log_std(script, small_args):
    """What is drawn stays within them, wherever the learned number is."""
    for log_std, expected in ((-9.0, -1.5), (9.0, -0.5)):
        agent, _ = script.train(small_args(total_timesteps=64, log_std_min=-1.5, log_std_max=-0.5, anneal_std=False))
        agent.log_std.data.fill_(log_std)
        torch.manual_seed(0)
        action, *_ = agent.get_action_and_value(torch.zeros(4096, 2))
        assert action.std(0).log().tolist() == pytest.approx([expected] * 2, abs=0.05)
