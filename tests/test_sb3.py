"""Stable-Baselines3 and sb3-contrib learn from the scripts' rollouts: the same weights, metrics and actions."""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import scalars
from sb3_contrib import MaskablePPO, RecurrentPPO
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3 import PPO
from stable_baselines3.common.logger import Logger

ITERATIONS, EPOCHS, MINIBATCHES, N, T = 3, 2, 2, 4, 16
SETTINGS = {
    "num_envs": N,
    "num_steps": T,
    "total_timesteps": ITERATIONS * N * T,
    "update_epochs": EPOCHS,
    "num_minibatches": MINIBATCHES,
    "clip_coef": 0.1,
    "vf_coef": 1.0,  # of half the squared error
    "ent_coef": 0.01,
    "max_grad_norm": 0.5,
    "norm_adv": True,
    # What SB3 does not do.
    "recompute_advantages": False,
    "anneal_lr": False,
    "target_kl": None,
    "norm_obs": False,
    "norm_reward": False,
}
ORACLES = {  # class, its policy, environment; settings of the script, and of the policy
    "ppo_continuous": (PPO, "MlpPolicy", "box/Chain-v0", {"anneal_std": False}, {}),
    "ppo_discrete": (MaskablePPO, "MlpPolicy", "masks/Masked-v0", {}, {}),
    "ppo_rnn": (
        RecurrentPPO,
        "MlpLstmPolicy",
        "box/Chain-v0",
        # sb3-contrib stops the critic's gradient before a shared memory. So the value loss has no weight.
        {"memory_size": 8, "vf_coef": 0.0},
        {"lstm_hidden_size": 8, "shared_lstm": True, "enable_critic_lstm": False},
    ),
}


def parameters_of_both(agent, policy):
    """[(ours, theirs), ...]"""
    modules = [(agent.actor[:4], policy.mlp_extractor.policy_net), (agent.actor[4], policy.action_net)]
    modules += [(agent.critic[:4], policy.mlp_extractor.value_net), (agent.critic[4], policy.value_net)]
    if hasattr(agent, "memory"):
        modules += [(agent.memory.cell, policy.lstm_actor)]
    pairs = [pair for ours, theirs in modules for pair in zip(ours.parameters(), theirs.parameters(), strict=True)]
    return pairs + ([(agent.log_std, policy.log_std)] if hasattr(agent, "log_std") else [])


def batch_of_sb3(arguments, replay):
    """What ppo_loss was given, and the arguments of the replay before it, as the oracle names and orders them."""
    names = ["observations", "actions", "action_masks", "old_log_prob", "old_values", "advantages", "returns"]
    if len(arguments) < len(names) + 2:
        names.remove("action_masks")
    batch = dict(zip(names, arguments[2:]))
    if replay:  # rows (T, n) in the order of time; sb3-contrib has one environment after the other
        _, obs, starts, state = replay
        batch |= {"observations": obs, "episode_starts": starts.float(), "mask": torch.ones(starts.shape)}
        batch = {name: x.transpose(0, 1).flatten(0, 1) for name, x in batch.items()}
        state = state.unsqueeze(0).chunk(2, -1)
        batch["lstm_states"] = RNNStates(state, state)
    return SimpleNamespace(**batch)


def test_whole_updates(script, small_args, minibatches, watch):
    """Three iterations with two epochs of two minibatches each: with masks, and with memories whose episodes span
    rollouts. The oracle begins with the same weights and is given the same minibatches."""
    oracle, policy, env_id, our_settings, their_settings = ORACLES[script.__name__]
    settings = SETTINGS | our_settings | {"env_id": env_id}
    untrained, _ = script.train(small_args(**settings, learning_rate=0.0))
    minibatches.clear()
    replays = watch(script.Memory, "replay") if oracle is RecurrentPPO else []
    agent, run_dir = script.train(small_args(**settings, learning_rate=3e-3))
    replays = [arguments for arguments, _ in replays if arguments[1].shape[1] < N]  # those of whole rollouts are others
    losses = [arguments for arguments, _ in minibatches]
    batches = [batch_of_sb3(*pair) for pair in zip(losses, replays or [None] * len(losses), strict=True)]

    sb3 = oracle(
        policy,
        gym.make(env_id),
        n_steps=N * T,
        batch_size=N * T // MINIBATCHES,
        n_epochs=EPOCHS,
        learning_rate=3e-3,
        clip_range=0.1,
        vf_coef=0.5 * settings["vf_coef"],  # of the squared error
        ent_coef=0.01,
        policy_kwargs=their_settings,
        device="cpu",
    )
    sb3.set_logger(Logger(None, []))
    with torch.no_grad():
        for ours, theirs in parameters_of_both(untrained, sb3.policy):
            theirs.copy_(ours)
    logged = {name.removeprefix("losses/"): rows for name, rows in scalars(run_dir).items() if "losses/" in name}
    kls = [metrics["approx_kl"] for _, (_, metrics) in minibatches]
    for i in range(ITERATIONS):
        own = slice(i * EPOCHS * MINIBATCHES, (i + 1) * EPOCHS * MINIBATCHES)
        first, last = batches[own][:MINIBATCHES], batches[own][MINIBATCHES:]
        epochs = iter([first, last])
        values, returns = (torch.cat([getattr(x, name) for x in first]).numpy() for name in ("old_values", "returns"))
        buffer = {"get": lambda batch_size, epochs=epochs: next(epochs), "values": values, "returns": returns}
        sb3.rollout_buffer = SimpleNamespace(**buffer)
        sb3.train()
        theirs = {name.removeprefix("train/"): value for name, value in sb3.logger.name_to_value.items()}
        ours = {name: rows[i][1] for name, rows in logged.items()}
        assert ours["policy_loss"] == pytest.approx(theirs["policy_gradient_loss"], abs=1e-6)
        assert ours["value_loss"] == pytest.approx(0.5 * theirs["value_loss"], rel=1e-5)
        assert ours["entropy"] == pytest.approx(-theirs["entropy_loss"], rel=1e-5)
        assert ours["clipfrac"] == pytest.approx(theirs["clip_fraction"], rel=1e-5)
        assert ours["explained_variance"] == pytest.approx(theirs["explained_variance"], abs=1e-5)
        # SB3 logs the mean of the last epoch.
        assert np.mean(kls[own][MINIBATCHES:]) == pytest.approx(theirs["approx_kl"], rel=1e-3)
    for (ours, theirs), (before, _) in zip(*(parameters_of_both(x, sb3.policy) for x in (agent, untrained))):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
        learns = settings["vf_coef"] > 0 or all(ours is not parameter for parameter in agent.critic.parameters())
        assert not learns or (ours - before).abs().max() > 1e-3

    rng, state, their_state = np.random.default_rng(0), None, None
    for _ in range(5):  # a memory goes on from the state that it returned
        obs = rng.normal(size=(8, *agent.obs_rms.mean.shape)).astype(np.float32)
        if oracle is RecurrentPPO:
            ours, state = agent.predict(obs, state)
            theirs, their_state = sb3.predict(obs, their_state, deterministic=True)
        elif oracle is MaskablePPO:
            masks = rng.integers(0, 2, (8, 5)) | np.array([1, 0, 0, 0, 1])  # one choice is left in each dimension
            ours = agent.predict(obs, action_mask=masks)
            theirs, _ = sb3.predict(obs, deterministic=True, action_masks=masks)
        else:
            ours, (theirs, _) = agent.predict(obs), sb3.predict(obs, deterministic=True)
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
