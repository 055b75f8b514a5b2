"""The noise of Box actions: --anneal-std, --log-std-min, --log-std-max."""

import dataclasses
import math

import pytest
import torch
from conftest import make_agent, probe


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
