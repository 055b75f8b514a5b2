"""The agent: its distribution, its statistics, and what it does with them."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import NO_BOUNDS, act, golden, make_agent, probe
from probes import CHAIN_GAMMA, CHAIN_VALUES


@pytest.mark.parametrize(
    "script, case",
    [("ppo_continuous", "gaussian"), ("ppo_continuous", "gaussian_log_std_clamp"), ("ppo_rnn", "gaussian")],
    indirect=["script"],
)
def test_gaussian(script, case):
    """log_prob and entropy of given means and log_stds, which the network is made to put out."""
    inputs, expected = golden(case)
    bounds = {name: inputs.get(name) for name in ("log_std_min", "log_std_max")} if case != "gaussian" else {}
    mean, log_std = inputs["mean"], inputs["log_std"]
    agent = make_agent(
        script, action_size=mean.shape[-1], log_std_init=0.0, **NO_BOUNDS[script.__name__] | bounds
    ).double()
    agent.actor = torch.nn.Identity()
    agent.log_std.data = log_std.clone()
    agent.critic = torch.nn.Linear(mean.shape[-1], 1).double()
    _, log_prob, entropy, value = agent.get_action_and_value(mean, inputs["action"])
    torch.testing.assert_close(log_prob, expected["logprob"], atol=1e-9, rtol=0)
    torch.testing.assert_close(
        entropy, torch.as_tensor(expected["entropy"], dtype=torch.float64).expand(len(mean)), atol=1e-9, rtol=0
    )
    assert value.shape == log_prob.shape
    if case == "gaussian_log_std_clamp":
        entropy[0].backward()
        torch.testing.assert_close(agent.log_std.grad, expected["dentropy_dlog_std"], atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    "script, args",
    [("ppo_continuous", {"log_std_max": -1.0}), ("ppo_rnn", {})],
    indirect=["script"],
)
def test_samples_follow_the_stated_distribution(script, args):
    """torch.distributions as the oracle: the samples' mean and deviation, and their log-probability."""
    torch.manual_seed(0)
    agent = make_agent(script, **args)
    for layer in agent.actor[::2]:
        torch.nn.init.normal_(layer.weight, std=0.5)
    obs = torch.randn(1, 3).expand(200_000, 3)
    with torch.no_grad():
        if script.__name__ == "ppo_rnn":
            mean, log_std = agent.get_logits_or_mean(obs), agent.log_std.expand_as(obs)
        else:
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


def test_statistics_keep_their_digits(script):
    """One feature that never changes, far from 0, and one of variance 4 around it: after many rollouts the variances
    are still those, and what is normalised is a number."""
    rms = script.RunningMeanStd((2,))
    rows = torch.tensor([[1e8, 1e8 - 2], [1e8, 1e8 + 2]], dtype=torch.float64).expand(50, 2, 2)
    for _ in range(1600):
        rms.update(rows)
    assert rms.count.item() == pytest.approx(160_000)
    # 1e-4 rows of 0 and variance 1 were there before all others: 1e-4 / 160,000 of (1e8)^2.
    start = 1e-4 / rms.count.item() * 1e16
    torch.testing.assert_close(rms.var - start, torch.tensor([0.0, 4.0]).double(), atol=0.1, rtol=0)
    agent = make_agent(script, obs_size=2)
    agent.obs_rms.load_state_dict(rms.state_dict())
    assert agent.normalize_obs(rows).isfinite().all()


def test_sparse_rewards_are_normalised(script):
    """Returns of 0 at first, of a million later in the same rollout."""
    rewards = torch.zeros(128, 4)
    rewards[100] = torch.tensor([1e6, -7e5, 3e5, 9e5])
    rms, running = script.RunningMeanStd(()), torch.zeros(4, dtype=torch.float64)
    normalised = script.normalize_rewards(rms, running, rewards, torch.zeros(128, 4, dtype=torch.bool), 0.99)
    assert normalised.isfinite().all() and (normalised != 0).sum() == 4


def test_predict_takes_what_environments_give(script):
    """Flipped views of an array, of which torch wants a copy."""
    agent, raw_obs = make_agent(script), np.arange(3.0)
    assert np.array_equal(act(agent, raw_obs[::-1]), act(agent, np.array([2.0, 1.0, 0.0])))


@pytest.mark.parametrize("rollout", [1, 20, 200])
def test_reward_normalisation_of_sb3(script, rollout):
    """VecNormalize on the same random rewards, 200 steps, 5 environments: its deviation at the end of a rollout divides
    all rewards of the rollout."""
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
    rms, running = script.RunningMeanStd(()), torch.zeros(5, dtype=torch.float64)
    for start in range(0, 200, rollout):
        raw, ends = rewards[start : start + rollout], ended[start : start + rollout]
        for _ in range(rollout):
            _, last_of_sb3, _, _ = sb3.step_wait()
        ours = script.normalize_rewards(rms, running, torch.tensor(raw), torch.tensor(ends), 0.97).numpy()
        np.testing.assert_allclose(ours[-1], last_of_sb3, atol=1e-7)
        np.testing.assert_allclose(ours, raw / np.sqrt(sb3.ret_rms.var + 1e-8), atol=1e-7)
        np.testing.assert_allclose(running, sb3.returns, atol=1e-7)


@pytest.mark.parametrize("script", ["ppo_continuous", "ppo_rnn"], indirect=True)
def test_stored_actions_are_not_clipped(script, small_args, minibatches):
    """The probe refuses an action outside its bounds; what the update sees reaches beyond them."""
    script.train(small_args(log_std_init=0.5, **NO_BOUNDS[script.__name__]))
    assert torch.cat([arguments[4] for arguments, _ in minibatches]).abs().max() > 1.5


def test_without_normalisation_there_are_no_statistics(script, small_args):
    agent, _ = script.train(small_args(norm_obs=False, norm_reward=False))
    assert agent.obs_rms.count.item() == agent.return_rms.count.item() == pytest.approx(1e-4)
    raw = torch.full((2, 2), 3.0, dtype=torch.float64)
    assert torch.equal(agent.normalize_obs(raw), raw.float())


# Four environments in step, episodes of the states 0 to 7 whatever the policy does, rollouts of 12 steps: every rollout
# has some states twice, and other ones than the rollout before.
ALIGNED = {"num_envs": 4, "num_steps": 12, "gamma": CHAIN_GAMMA, "update_epochs": 1}


def aligned_rows(num_rollouts):
    """T = 12 * num_rollouts: observations that the policy acts on, (T, 4, 16), and discounted returns, (T, 4)"""
    states = np.arange(12 * num_rollouts) % 8
    discounted_return, returns = 0.0, []
    for state in states:
        reward = CHAIN_VALUES[state] - CHAIN_GAMMA * CHAIN_VALUES[state + 1]
        discounted_return = reward + CHAIN_GAMMA * discounted_return * (state > 0)
        returns.append([discounted_return] * 4)
    return np.eye(16)[states][:, None].repeat(4, 1), np.array(returns)


def statistics_of_sb3(rows):
    """SB3's RunningMeanStd after one update with all rows (T, N, ...)."""
    from stable_baselines3.common.running_mean_std import RunningMeanStd

    rms = RunningMeanStd(epsilon=1e-4, shape=rows.shape[2:])
    if len(rows):
        rms.update(rows.reshape(-1, *rows.shape[2:]))
    return rms


def test_statistics_and_what_they_normalise(script, small_args, rollouts):
    """All observations of a rollout, those after its last step and final ones too, are normalised by the statistics of
    the rollouts before; in the first rollout by mean 0 and variance 1. The statistics are merged once per rollout, and
    equal those of SB3, which sees the raw rows of all rollouts at once."""
    agent, run_dir = script.train(small_args(env_id=probe(script, "AlignedChain"), total_timesteps=48 * 5, **ALIGNED))
    assert len(rollouts) == 5
    raw, _ = aligned_rows(6)
    for i, ((_, obs, last_obs, final_obs, *_), _) in enumerate(rollouts):
        rms = statistics_of_sb3(raw[: 12 * i])
        expected = lambda x, rms=rms: np.clip((x - rms.mean) / np.sqrt(rms.var + 1e-8), -10, 10)  # noqa: E731
        assert len(np.unique(obs.reshape(48, 16), axis=0)) == 8
        np.testing.assert_allclose(obs, expected(raw[12 * i : 12 * i + 12]), atol=1e-5)
        np.testing.assert_allclose(last_obs, expected(raw[12 * i + 12]), atol=1e-5)
        num_ends = (12 * i + 12) // 8 - 12 * i // 8
        np.testing.assert_allclose(final_obs, expected(np.eye(16)[[8] * 4 * num_ends]), atol=1e-5)
    for name, rows in zip(("obs_rms", "return_rms"), aligned_rows(5)):
        theirs = statistics_of_sb3(rows)
        for ours in (getattr(agent, name), getattr(script.load_agent(run_dir), name)):
            assert ours.mean.shape == ours.var.shape == rows.shape[2:] and ours.count.shape == ()
            np.testing.assert_allclose(ours.mean.numpy(), theirs.mean, atol=1e-9)
            np.testing.assert_allclose(ours.var.numpy(), theirs.var, atol=1e-9)
            assert ours.count.item() == pytest.approx(theirs.count)


@pytest.mark.parametrize("name", ["Shaped", "Integers", "OtherTypes"])
def test_other_spaces(script, small_args, name):
    """Dictionaries, integers and booleans become a vector, actions take the shape and the type of their space."""
    env_id = probe(script, name)
    _, run_dir = script.train(small_args(env_id=env_id))
    assert script.evaluate(script.load_agent(run_dir), env_id, 2, seed=0).shape == (2,)
