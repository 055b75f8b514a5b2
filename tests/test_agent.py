"""The agent: its distribution, its statistics, and what it does with them."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import act, golden, make_agent, probe


@pytest.mark.parametrize("case", ["gaussian", "gaussian_log_std_clamp", "gaussian_state_dependent"])
@pytest.mark.parametrize("script", ["ppo_continuous", "ppo_rnn"], indirect=True)
def test_gaussian(script, case):
    """log_prob and entropy of given means and log_stds, which the network is made to put out."""
    inputs, expected = golden(case)
    state_dependent = case == "gaussian_state_dependent"
    bounds = {name: inputs.get(name) for name in ("log_std_min", "log_std_max")}
    mean, log_std = inputs["mean"], inputs["log_std"]
    agent = make_agent(
        script, action_size=mean.shape[-1], state_dependent_std=state_dependent, log_std_init=0.0, **bounds
    )
    agent.double()
    if state_dependent:
        agent.actor = torch.nn.Identity()
        outputs = torch.cat([mean, log_std], -1)
    else:
        agent.actor = torch.nn.Identity()
        outputs = mean
        agent.log_std.data = log_std.clone()
    agent.critic = torch.nn.Linear(outputs.shape[-1], 1).double()
    _, log_prob, entropy, value = agent.get_action_and_value(outputs, inputs["action"])
    torch.testing.assert_close(log_prob, expected["logprob"], atol=1e-9, rtol=0)
    torch.testing.assert_close(
        entropy, torch.as_tensor(expected["entropy"], dtype=torch.float64).expand(len(mean)), atol=1e-9, rtol=0
    )
    assert value.shape == log_prob.shape
    if case == "gaussian_log_std_clamp":
        entropy[0].backward()
        torch.testing.assert_close(agent.log_std.grad, expected["dentropy_dlog_std"], atol=1e-9, rtol=0)


@pytest.mark.parametrize("args", [{}, {"state_dependent_std": True}, {"log_std_max": -1.0}, {"log_std_min": 0.3}])
@pytest.mark.parametrize("script", ["ppo_continuous", "ppo_rnn"], indirect=True)
def test_samples_follow_the_stated_distribution(script, args):
    """torch.distributions as the oracle: the samples' mean and deviation, and their log-probability."""
    torch.manual_seed(0)
    agent = make_agent(script, **args)
    for layer in agent.actor[::2]:
        torch.nn.init.normal_(layer.weight, std=0.5)
    obs = torch.randn(1, 3).expand(200_000, 3)
    with torch.no_grad():
        mean, log_std = agent.get_mean_and_log_std(obs)
        action, log_prob, entropy, _ = agent.get_action_and_value(obs)
        again = agent.get_action_and_value(obs, action)
    normal = torch.distributions.Normal(mean, log_std.exp())
    torch.testing.assert_close(log_prob, normal.log_prob(action).sum(-1), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(entropy, normal.entropy().sum(-1))
    torch.testing.assert_close(again[1], log_prob)
    torch.testing.assert_close((action.mean(0) - mean[0]) / log_std[0].exp(), torch.zeros(3), atol=0.015, rtol=0)
    torch.testing.assert_close(action.std(0), log_std[0].exp(), atol=0.0, rtol=0.01)


def test_initialisation(script):
    """Orthogonal rows: gain sqrt 2 inside, 0.01 for the policy, 1 for the value; zero biases."""
    agent = make_agent(script, obs_size=5, action_size=4)
    for network, gain in ((agent.actor, 0.01), (agent.critic, 1.0)):
        for layer, std in zip(network[::2], (2**0.5, 2**0.5, gain)):
            weight = layer.weight if layer.weight.shape[0] <= layer.weight.shape[1] else layer.weight.T
            torch.testing.assert_close(weight @ weight.T, std**2 * torch.eye(len(weight)), atol=1e-5, rtol=1e-5)
            assert not layer.bias.any()


@pytest.mark.parametrize("script", ["ppo_continuous", "ppo_rnn"], indirect=True)
def test_initial_log_std(script):
    assert (make_agent(script).log_std == script.Args().log_std_init).all()
    wide = make_agent(script, state_dependent_std=True, log_std_init=-1.5)
    torch.testing.assert_close(
        wide.get_mean_and_log_std(torch.randn(2, 3))[1], torch.full((2, 3), -1.5), atol=0.1, rtol=0
    )


def test_running_statistics(script):
    inputs, expected = golden("rms_gym_sb3")
    agent = make_agent(script, obs_size=2)
    for batch, after in zip(inputs["batches"], expected["after_each"]):
        agent.obs_rms.update(batch.unsqueeze(0))
        torch.testing.assert_close(agent.obs_rms.mean, after["mean"], atol=1e-7, rtol=0)
        torch.testing.assert_close(agent.obs_rms.var, after["var"], atol=1e-7, rtol=1e-12)
        torch.testing.assert_close(agent.obs_rms.count.item(), after["count"], atol=1e-7, rtol=0)
    normalised = agent.normalize_obs(inputs["batches"][-1])
    torch.testing.assert_close(normalised.double(), expected["normalised_B3"], atol=1e-6, rtol=0)
    assert normalised.dtype == torch.float32
    assert agent.normalize_obs(torch.full((2,), 1e9, dtype=torch.float64)).tolist() == [10, 10]


def test_pooled_statistics_keep_their_digits(script, monkeypatch):
    """Eight ranks that see one feature that never changes, far from 0, and one of variance 4 around it: after many
    rollouts the variances are still those, and what is normalised is a number."""
    monkeypatch.setattr(script.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(script.dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(script, "average_over_ranks", lambda news: None)  # all ranks see the same
    agent = make_agent(script, obs_size=2)
    rows = torch.tensor([[1e8, 1e8 - 2], [1e8, 1e8 + 2]], dtype=torch.float64).expand(50, 2, 2)
    for _ in range(200):
        center, before = agent.obs_rms.mean.clone(), agent.obs_rms.sums(agent.obs_rms.mean)
        agent.obs_rms.update(rows)
        agent.obs_rms.pool(center, before)
    assert agent.obs_rms.count.item() == pytest.approx(200 * 8 * 100)
    # 1e-4 rows of 0 and variance 1 were there before all others: 1e-4 / 160,000 of (1e8)^2.
    start = 1e-4 / agent.obs_rms.count.item() * 1e16
    torch.testing.assert_close(agent.obs_rms.var - start, torch.tensor([0.0, 4.0]).double(), atol=0.1, rtol=0)
    assert agent.normalize_obs(rows).isfinite().all()


def test_sparse_rewards_are_normalised(script):
    """Returns of 0 at first, of a million later in the same rollout."""
    rewards = torch.zeros(128, 4)
    rewards[100] = torch.tensor([1e6, -7e5, 3e5, 9e5])
    rms, running = script.RunningMeanStd((1,)), torch.zeros(4, dtype=torch.float64)
    normalised = script.normalize_rewards(rms, running, rewards, torch.zeros(128, 4, dtype=torch.bool), 0.99)
    assert normalised.isfinite().all() and (normalised != 0).sum() == 4


def test_predict_takes_what_environments_give(script):
    """Flipped views of an array, of which torch wants a copy."""
    agent, raw_obs = make_agent(script), np.arange(3.0)
    assert np.array_equal(act(agent, raw_obs[::-1]), act(agent, np.array([2.0, 1.0, 0.0])))


@pytest.mark.parametrize("rollout", [6, 3, 1])
def test_reward_normalisation(script, rollout):
    """However the steps are cut into rollouts."""
    inputs, expected = golden("reward_norm_sb3")
    rms, running = script.RunningMeanStd((1,)), torch.zeros(2, dtype=torch.float64)
    normalised = [
        script.normalize_rewards(rms, running, rewards, ended.bool(), inputs["gamma"])
        for rewards, ended in zip(inputs["rewards"].split(rollout), inputs["dones"].split(rollout))
    ]
    torch.testing.assert_close(torch.cat(normalised), expected["normalised"], atol=1e-7, rtol=0)
    torch.testing.assert_close(rms.var.item(), float(expected["var_after_each"][-1]), atol=1e-7, rtol=0)
    torch.testing.assert_close(running, expected["returns_before_reset"][-1], atol=1e-7, rtol=0)


def test_reward_normalisation_of_sb3(script):
    """VecNormalize on the same random rewards, 200 steps, 5 environments."""
    from stable_baselines3.common.vec_env import VecNormalize

    rng = np.random.default_rng(0)
    rewards, ended = rng.normal(2, 3, (200, 5)), rng.random((200, 5)) < 0.05

    class Rewards:  # the least that VecNormalize wants of a vector environment
        num_envs, render_mode = 5, None
        observation_space, action_space = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Box(-1, 1, (1,))

        def step_wait(self):
            self.t = getattr(self, "t", -1) + 1
            return np.zeros((5, 1)), rewards[self.t], ended[self.t], [{} for _ in range(5)]

    sb3 = VecNormalize(Rewards(), norm_obs=False, gamma=0.97)
    sb3.returns = np.zeros(5)
    theirs = np.stack([sb3.step_wait()[1] for _ in range(200)])
    rms, running = script.RunningMeanStd((1,)), torch.zeros(5, dtype=torch.float64)
    ours = script.normalize_rewards(rms, running, torch.tensor(rewards), torch.tensor(ended), 0.97)
    np.testing.assert_allclose(ours.numpy(), theirs, atol=1e-6)


@pytest.mark.parametrize("script", ["ppo_continuous", "ppo_rnn"], indirect=True)
def test_stored_actions_are_not_clipped(script, small_args, minibatches):
    """The probe refuses an action outside its bounds; what the update sees reaches beyond them."""
    script.train(small_args(log_std_init=0.5, log_std_max=None))
    assert torch.cat([minibatch[4] for minibatch in minibatches]).abs().max() > 1.5


def test_statistics_see_every_observation_once(script, small_args):
    """After k iterations of B steps the observation statistics have k * B rows; so do those of the return."""
    agent, _ = script.train(small_args())
    assert agent.obs_rms.count.item() == pytest.approx(256, abs=1e-3)
    assert agent.return_rms.count.item() == pytest.approx(256, abs=1e-3)
    off, _ = script.train(small_args(norm_obs=False, norm_reward=False))
    assert off.obs_rms.count.item() == off.return_rms.count.item() == pytest.approx(1e-4)
    raw = torch.full((2, 2), 3.0, dtype=torch.float64)
    assert torch.equal(off.normalize_obs(raw), raw.float())


@pytest.mark.parametrize("name", ["Shaped", "Integers", "OtherTypes"])
def test_other_spaces(script, small_args, name):
    """Dictionaries, integers and booleans become a vector, actions take the shape and the type of their space."""
    env_id = probe(script, name)
    _, run_dir = script.train(small_args(env_id=env_id))
    assert script.evaluate(script.load_agent(run_dir), env_id, 2, seed=0).shape == (2,)
