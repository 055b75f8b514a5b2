"""The agent: its networks, its distribution, and what it does after loading."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import RNN, act, make_agent, probe


@pytest.mark.parametrize("script", ["ppo_continuous", "ppo_rnn"], indirect=True)
def test_samples_follow_the_stated_distribution(script):
    """torch.distributions as the oracle: the samples' mean and deviation, and their log-probability."""
    torch.manual_seed(0)
    agent = make_agent(script).double()
    for layer in agent.actor[::2]:
        torch.nn.init.normal_(layer.weight, std=0.5)
    torch.nn.init.normal_(agent.log_std, std=0.5)
    obs = torch.randn(1, 3, dtype=torch.float64).expand(200_000, 3)
    with torch.no_grad():
        if script.__name__ == "ppo_rnn":
            mean, log_std = agent.actor(obs), agent.log_std.expand_as(obs)
        else:
            mean, log_std = agent.get_mean_and_log_std(obs)
        action, log_prob, entropy, _ = agent.get_action_and_value(obs)
        again = agent.get_action_and_value(obs, action)
    normal = torch.distributions.Normal(mean, log_std.exp())
    torch.testing.assert_close(log_prob, normal.log_prob(action).sum(-1), atol=1e-9, rtol=0)
    torch.testing.assert_close(entropy, normal.entropy().sum(-1), atol=1e-9, rtol=0)
    torch.testing.assert_close(again[1], log_prob)
    torch.testing.assert_close(action.mean(0) / log_std[0].exp(), mean[0] / log_std[0].exp(), atol=0.015, rtol=0)
    torch.testing.assert_close(action.std(0), log_std[0].exp(), atol=0.0, rtol=0.01)


def test_initialisation(script):
    """Orthogonal rows: gain sqrt 2 inside, 0.01 for the policy, 1 for the value; zero biases; --log-std-init."""
    agent = make_agent(script, obs_size=5, action_size=4)
    if script.__name__ != "ppo_discrete":
        assert (agent.log_std == agent.args.log_std_init).all()
    for network, gain in ((agent.actor, 0.01), (agent.critic, 1.0)):
        for layer, std in zip(network[::2], (2**0.5, 2**0.5, gain)):
            weight = layer.weight if layer.weight.shape[0] <= layer.weight.shape[1] else layer.weight.T
            torch.testing.assert_close(weight @ weight.T, std**2 * torch.eye(len(weight)), atol=1e-5, rtol=1e-5)
            assert not layer.bias.any()
        x = 100 * torch.randn(7, 5)
        torch.testing.assert_close(network(-x), -network(x))  # tanh is odd, and saturates
        assert network(100 * x).abs().max() < 2 * network(x).abs().max()


def test_hidden_sizes(script, small_args):
    """Actor and critic get these layers; a checkpoint remembers them."""
    assert script.parse_args(["--hidden-sizes", "32", "16", "8"]).hidden_sizes == (32, 16, 8)
    _, run_dir = script.train(small_args(hidden_sizes=(32, 16, 8)))
    agent = script.load_agent(run_dir)
    for network in (agent.actor, agent.critic):
        assert [layer.out_features for layer in network[::2]][:3] == [32, 16, 8]


def test_predict_takes_what_environments_give(script):
    """Flipped views of an array, of which torch wants a copy."""
    agent, raw_obs = make_agent(script), np.arange(3.0)
    assert np.array_equal(act(agent, raw_obs[::-1]), act(agent, np.array([2.0, 1.0, 0.0])))


def test_loaded_agent_acts_as_the_trained_one(script, small_args):
    agent, run_dir = script.train(small_args(total_timesteps=512))
    loaded = script.load_agent(run_dir)
    raw_obs = np.random.default_rng(0).normal(size=(7, 2)) * 5
    assert np.array_equal(act(loaded, raw_obs), act(agent, raw_obs))
    np.testing.assert_allclose(act(loaded, raw_obs[0]), act(agent, raw_obs)[0], rtol=1e-5)
    space = gym.make(probe(script)).action_space
    assert all(space.contains(action) for action in act(loaded, raw_obs * 1e6))


@RNN
def test_module_of_a_user_whose_name_begins_like_the_bounds(script, small_args, monkeypatch):
    """`action_rms` is no bound of the action space: a resumed run and load_agent take it like any other module."""

    class Agent(script.Agent):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.action_rms = script.RunningMeanStd(())

    monkeypatch.setattr(script, "Agent", Agent)
    _, run_dir = script.train(small_args(total_timesteps=64))
    checkpoint = torch.load(run_dir / "checkpoint.pt")
    checkpoint["agent"]["action_rms.count"] += 1
    torch.save(checkpoint, run_dir / "checkpoint.pt")
    script.train(small_args(total_timesteps=128), run_dir)
    assert script.load_agent(run_dir).action_rms.count == 1
