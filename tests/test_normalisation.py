"""Observations and rewards are normalised by running statistics."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ONE, make_agent, probe
from probes import CHAIN_GAMMA, CHAIN_VALUES


def test_statistics_keep_their_digits(script):
    """One feature that never changes, far from 0, and one of variance 4 around it: after many rollouts the variances
    are still those, and what is normalised is a number."""
    rms = script.RunningMeanStd((2,))
    rows = torch.tensor([[1e8, 1e8 - 2], [1e8, 1e8 + 2]], dtype=torch.float64).expand(50, 2, 2)
    for _ in range(1600):
        rms.update(rows)
    assert rms.count.item() == pytest.approx(160_000)
    torch.testing.assert_close(rms.var, torch.tensor([0.0, 4.0]).double(), atol=1e-6, rtol=0)
    agent = make_agent(script, obs_size=2)
    agent.obs_rms.load_state_dict(rms.state_dict())
    assert agent.normalize_obs(rows).isfinite().all()


@ONE
@pytest.mark.parametrize("rollout", [1, 20, 200])
def test_reward_normalisation_of_sb3(script, rollout):
    """VecNormalize on the same random rewards, 200 steps, 5 environments: its deviation at the end of a rollout divides
    all rewards of the rollout. One reward is so large that it is clipped."""
    from stable_baselines3.common.vec_env import VecNormalize

    rng = np.random.default_rng(0)
    rewards, ended = rng.normal(2, 3, (200, 5)), rng.random((200, 5)) < 0.05
    rewards[150, 2] = 1e4

    class Rewards:  # the least that VecNormalize wants of a vector environment
        num_envs, render_mode = 5, None
        observation_space, action_space = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Box(-1, 1, (1,))

        def step_wait(self):
            self.t = getattr(self, "t", -1) + 1
            return np.zeros((5, 1)), rewards[self.t], ended[self.t], [{} for _ in range(5)]

    sb3 = VecNormalize(Rewards(), norm_obs=False, gamma=0.97)
    sb3.returns = np.zeros(5)
    rms, running = script.RunningMeanStd(()), torch.zeros(5, dtype=torch.float64)
    rms.count.fill_(1e-4)  # with which SB3 begins
    for start in range(0, 200, rollout):
        raw, ends = rewards[start : start + rollout], ended[start : start + rollout]
        for _ in range(rollout):
            sb3.step_wait()
        ours = script.normalize_rewards(rms, running, torch.tensor(raw), torch.tensor(ends), 0.97).numpy()
        np.testing.assert_allclose(ours, sb3.normalize_reward(raw), atol=1e-6)
        if start <= 150 < start + rollout:
            assert ours.max() == 10
        np.testing.assert_allclose(running, sb3.returns, atol=1e-7)


def test_without_normalisation_there_are_no_statistics(script, small_args):
    agent, _ = script.train(small_args(norm_obs=False, norm_reward=False))
    assert agent.obs_rms.count.item() == agent.return_rms.count.item() == 0
    raw = torch.full((2, 2), 3.0, dtype=torch.float64)
    assert torch.equal(agent.normalize_obs(raw), raw.float())


# Four environments in step, episodes of the states 0 to 7 whatever the policy does, rollouts of 12 steps: every rollout
# has some states twice, and other ones than the rollout before.
ALIGNED = {"num_envs": 4, "num_steps": 12, "gamma": CHAIN_GAMMA, "gae_lambda": 0.8, "update_epochs": 1}


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

    rms = RunningMeanStd(epsilon=0, shape=rows.shape[2:])
    if len(rows):
        rms.update(rows.reshape(-1, *rows.shape[2:]))
    return rms


def test_statistics_and_what_they_normalise(script, small_args, watch):
    """All observations of a rollout, those after its last step and final ones too, are normalised by the statistics of
    the rollouts before; in the first rollout by mean 0 and variance 1. The statistics are merged once per rollout, and
    equal those of SB3, which sees the raw rows of all rollouts at once. Advantages are those of the normalised rewards,
    with --gamma and --gae-lambda."""
    rollouts, normalized_rewards = watch(script, "estimate_advantages"), watch(script, "normalize_rewards")
    agent, run_dir = script.train(small_args(env_id=probe(script, "AlignedChain"), total_timesteps=48 * 5, **ALIGNED))
    assert len(rollouts) == 5
    raw, _ = aligned_rows(6)
    oracle = script.load_agent(run_dir)  # test_golden.py checks its normalize_obs
    for i, ((_, obs, *rest), _) in enumerate(rollouts):
        last_obs, final_obs = rest[:2]
        assert torch.equal(rest[-5], normalized_rewards[i][1]) and rest[-2:] == [CHAIN_GAMMA, 0.8]
        if script.__name__ == "ppo_rnn":  # one tensor holds obs and last_obs
            (*obs, last_obs), _, _, final_obs, _ = obs
            obs = torch.stack(obs)
        rms = statistics_of_sb3(raw[: 12 * i])
        oracle.obs_rms.mean.copy_(torch.from_numpy(rms.mean))
        oracle.obs_rms.var.copy_(torch.from_numpy(rms.var))
        num_ends = (12 * i + 12) // 8 - 12 * i // 8
        assert len(np.unique(obs.reshape(48, 16), axis=0)) == 8
        raw_rows = raw[12 * i : 12 * i + 12], raw[12 * i + 12], np.eye(16)[[8] * 4 * num_ends]
        for normalized, raw_obs in zip((obs, last_obs, final_obs), raw_rows):
            np.testing.assert_allclose(normalized, oracle.normalize_obs(torch.from_numpy(raw_obs)), atol=1e-5)
    for name, rows in zip(("obs_rms", "return_rms"), aligned_rows(5)):
        theirs = statistics_of_sb3(rows)
        for ours in (getattr(agent, name), getattr(script.load_agent(run_dir), name)):
            assert ours.mean.shape == ours.var.shape == rows.shape[2:] and ours.count.shape == ()
            np.testing.assert_allclose(ours.mean.numpy(), theirs.mean, atol=1e-9)
            np.testing.assert_allclose(ours.var.numpy(), theirs.var, atol=1e-9)
            assert ours.count.item() == pytest.approx(theirs.count)
