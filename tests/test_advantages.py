"""Advantages: SB3's rollout buffer, and the probe whose every advantage is exactly zero."""

import dataclasses
import json

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ONE, probe, scalars
from probes import CHAIN_GAMMA, CHAIN_VALUES
from stable_baselines3.common.buffers import RolloutBuffer

# test_memory_advantages.py has the probe of a memory.
NO_MEMORY = pytest.mark.parametrize("script", ["ppo_continuous", "ppo_discrete"], indirect=True)


@ONE
@pytest.mark.parametrize("T, lam", [(40, 0.9), (40, 0.0), (40, 1.0), (1, 0.9)])
def test_same_as_sb3_rollout_buffer(script, T, lam):
    """SB3 adds gamma * V(final observation) to the reward of a truncated step and then treats it as done. The next
    value of a terminated step may be anything, even NaN."""
    rng = np.random.default_rng(0)
    N, gamma = 6, 0.98
    rewards, values, next_values = rng.normal(size=(3, T, N)).astype(np.float32)
    last_values = rng.normal(size=N).astype(np.float32)
    terminated, truncated = rng.random((2, T, N)) < 0.15
    ended = terminated | truncated
    box = gym.spaces.Box(-1, 1, (1,))
    buffer = RolloutBuffer(T, box, box, gamma=gamma, gae_lambda=lam, n_envs=N)
    starts = np.ones(N, dtype=np.float32)
    for t in range(T):
        shaped = rewards[t] + gamma * next_values[t] * (truncated[t] & ~terminated[t])
        action = np.zeros((N, 1), np.float32)
        buffer.add(action, action, shaped, starts, torch.tensor(values[t]), torch.zeros(N))
        starts = ended[t].astype(np.float32)
    buffer.compute_returns_and_advantage(torch.tensor(last_values), ended[-1])

    following = np.concatenate([values[1:], last_values[None]])
    following = np.select([terminated, truncated], [np.nan, next_values], following)
    tensors = map(torch.tensor, (rewards, values, following, terminated, truncated))
    advantages, returns = script.compute_gae(*tensors, gamma, lam)
    np.testing.assert_allclose(advantages.numpy(), buffer.advantages, atol=2e-6)
    np.testing.assert_allclose(returns.numpy(), buffer.returns, atol=2e-6)


CHAIN = {"norm_obs": False, "norm_reward": False, "gamma": CHAIN_GAMMA, "num_envs": 4, "num_steps": 6}
CHAIN |= {"recompute_advantages": True, "hidden_sizes": (), "learning_rate": 0.0}


def value_losses_on_the_chain(script, args):
    """Those of eight iterations on the chain, where the critic has the true value of every state: one linear layer,
    whose weights are written into the checkpoint of an iteration before. A value loss is half the mean square of the
    advantages: one that is not zero shows."""
    _, run_dir = script.train(dataclasses.replace(args, total_timesteps=24))
    checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    checkpoint["agent"]["critic.0.weight"] = torch.tensor(CHAIN_VALUES, dtype=torch.float32).unsqueeze(0)
    torch.save(checkpoint, run_dir / "checkpoint.pt")
    script.train(dataclasses.replace(args, total_timesteps=9 * 24), run_dir)
    untrue, *losses = (loss for _, loss in scalars(run_dir)["losses/value_loss"])
    assert untrue > 0.01 and len(losses) == 8
    return losses


@NO_MEMORY
@pytest.mark.parametrize("end", ["terminated", "truncated", "both"])
def test_zero_advantage_probe(script, small_args, end):
    """Episodes end at every position of the rollout, its first and last step included, in four environments that are
    out of step, over eight rollouts: every advantage is zero, in the first epoch and when recomputed."""
    args = small_args(env_id=probe(script, "Chain"), env_kwargs=json.dumps({"end": end}), **CHAIN)
    assert not any(value_losses_on_the_chain(script, args))


@pytest.mark.parametrize("recompute", [False, True])
def test_recomputed_advantages_are_those_of_the_current_critic(script, small_args, minibatches, recompute):
    """With one minibatch an epoch, the critic that gave the advantages is the one that learns: its value loss is half
    their mean square. Without --recompute-advantages this is so in the first epoch only; all get its values."""
    flags = {"num_minibatches": 1, "update_epochs": 3, "recompute_advantages": recompute}
    script.train(small_args(total_timesteps=64, **flags))
    losses = [float(metrics["value_loss"]) for _, (_, metrics) in minibatches]
    expected = [float(0.5 * arguments[-2].square().mean()) for arguments, _ in minibatches]
    values = [arguments[-3].flatten().sort()[0] for arguments, _ in minibatches]
    assert losses[0] == pytest.approx(expected[0], rel=1e-5) and len(losses) == 3
    for loss, expected_loss, epoch_values in zip(losses[1:], expected[1:], values[1:]):
        assert (loss == pytest.approx(expected_loss, rel=1e-5)) == recompute
        assert torch.equal(epoch_values, values[0]) != recompute
