"""Advantages: golden vectors, SB3's rollout buffer, and the probe whose every advantage is exactly zero."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ONE, golden, probe, without_memory
from probes import CHAIN_GAMMA, CHAIN_VALUES
from stable_baselines3.common.buffers import RolloutBuffer


def gae(script, inputs, lam=None, final_values=None):
    """compute_gae on a golden case, its next values built from `values`, `last_values` and the final values."""
    values = inputs["values"]
    terminations = inputs.get("terminations", inputs.get("dones", torch.zeros_like(values))).bool()
    truncations = inputs.get("truncations", torch.zeros_like(values)).bool()
    next_values = torch.cat([values[1:], inputs["last_values"][None]])
    if final_values is not None:
        next_values = torch.where(truncations, final_values, next_values)
    lam = inputs["gae_lambda"] if lam is None else lam
    return script.compute_gae(inputs["rewards"], values, next_values, terminations, truncations, inputs["gamma"], lam)


@pytest.mark.parametrize("case", ["gae_no_dones", "gae_done_is_terminal", "gae_truncation_bootstrap"])
def test_golden(script, case):
    inputs, expected = golden(case)
    advantages, returns = gae(script, inputs, final_values=inputs.get("final_values"))
    torch.testing.assert_close(advantages, expected["advantages"], atol=1e-9, rtol=0)
    torch.testing.assert_close(returns, expected["returns"], atol=1e-9, rtol=0)


def test_golden_lambdas_and_single_step(script):
    inputs, expected = golden("gae_lambda_0_and_1")
    torch.testing.assert_close(gae(script, inputs, lam=0.0)[0], expected["advantages_lambda0"], atol=1e-9, rtol=0)
    advantages, returns = gae(script, inputs, lam=1.0)
    torch.testing.assert_close(advantages, expected["advantages_lambda1"], atol=1e-9, rtol=0)
    torch.testing.assert_close(returns, expected["discounted_returns"], atol=1e-9, rtol=0)
    inputs, expected = golden("gae_T1")
    advantages, _ = gae(script, inputs, final_values=inputs["final_values"])
    torch.testing.assert_close(advantages, expected["advantages"], atol=1e-9, rtol=0)


def test_same_as_sb3_rollout_buffer(script):
    """SB3 adds gamma * V(final observation) to the reward of a truncated step and then treats it as done."""
    rng = np.random.default_rng(0)
    T, N, gamma, lam = 40, 6, 0.98, 0.9
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
    following = np.where(truncated, next_values, following)
    tensors = map(torch.tensor, (rewards, values, following, terminated, truncated))
    advantages, returns = script.compute_gae(*tensors, gamma, lam)
    np.testing.assert_allclose(advantages.numpy(), buffer.advantages, atol=2e-6)
    np.testing.assert_allclose(returns.numpy(), buffer.returns, atol=2e-6)


def test_environments_do_not_mix(script):
    """Permuting the environments permutes the advantages; a terminated step's next value may be anything, even NaN."""
    torch.manual_seed(0)
    rewards, values, next_values = torch.randn(3, 12, 5)
    terminations, truncations = torch.rand(2, 12, 5) < 0.2
    order = torch.randperm(5)
    one, _ = script.compute_gae(rewards, values, next_values, terminations, truncations, 0.9, 0.8)
    shuffled = [x[:, order] for x in (rewards, values, next_values, terminations, truncations)]
    two, _ = script.compute_gae(*shuffled, 0.9, 0.8)
    torch.testing.assert_close(one[:, order], two, rtol=0, atol=0)
    three, _ = script.compute_gae(
        rewards, values, next_values.masked_fill(terminations, torch.nan), terminations, truncations, 0.9, 0.8
    )
    torch.testing.assert_close(one, three, rtol=0, atol=0)


def advantages_of_a_run_on_the_chain(script, args, monkeypatch):
    """All advantages that train() computes on the chain when its critic gives the true value of every state."""
    original, found = script.compute_gae, []

    def spy(*arguments):
        result = original(*arguments)
        found.append(result[0].clone())
        return result

    without_memory(script, args, monkeypatch)  # test_rnn.py has the probe of a real one
    values = torch.tensor(CHAIN_VALUES, dtype=torch.float32)
    monkeypatch.setattr(script, "compute_gae", spy)
    # The zero keeps the critic in the graph: its parameters still have a gradient.
    monkeypatch.setattr(script.Agent, "get_value", lambda self, obs: obs @ values + 0 * self.critic(obs).squeeze(-1))
    script.train(args)
    assert len(found) == args.total_timesteps // (args.num_envs * args.num_steps) * args.update_epochs
    return torch.stack(found)


CHAIN = {"norm_obs": False, "norm_reward": False, "gamma": CHAIN_GAMMA, "num_envs": 4, "num_steps": 6}
CHAIN |= {"recompute_advantages": True}


@pytest.mark.parametrize("gae_lambda", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("end", ["terminated", "truncated", "both"])
def test_zero_advantage_probe(script, small_args, monkeypatch, end, gae_lambda):
    """Episodes end at every position of the rollout, its first and last step included, in four environments that are
    out of step, over eight rollouts: every advantage is zero, in the first epoch and when recomputed."""
    monkeypatch.setitem(gym.registry[probe(script, "Chain")].kwargs, "end", end)
    args = small_args(env_id=probe(script, "Chain"), gae_lambda=gae_lambda, total_timesteps=8 * 24, **CHAIN)
    advantages = advantages_of_a_run_on_the_chain(script, args, monkeypatch)
    assert advantages.abs().max() < 1e-6


@ONE
def test_zero_advantage_probe_of_an_environments_own_vector(script, small_args, monkeypatch):
    """Through `vector_entry_point`. The environment could not be made in any other way."""
    same_step = gym.vector.AutoresetMode.SAME_STEP

    def make_chains(num_envs, autoreset_mode):
        assert autoreset_mode == same_step
        return gym.make_vec("box/Chain-v0", num_envs, "sync", vector_kwargs={"autoreset_mode": same_step})

    gym.register("native/Chain-v0", vector_entry_point=make_chains)
    args = small_args(env_id="native/Chain-v0", total_timesteps=8 * 24, **CHAIN)
    advantages = advantages_of_a_run_on_the_chain(script, args, monkeypatch)
    assert advantages.abs().max() < 1e-6


@pytest.mark.parametrize(
    "mistake", ["truncation taken as termination", "value of the next episode's first observation"]
)
def test_zero_advantage_probe_sees_mistakes(script, small_args, monkeypatch, mistake):
    """The same probe, run on the two mistakes that it is there for."""
    monkeypatch.setitem(gym.registry[probe(script, "Chain")].kwargs, "end", "truncated")
    gae, estimate = script.compute_gae, script.estimate_advantages
    if mistake == "truncation taken as termination":
        wrong = lambda r, v, nv, term, trunc, *rest: gae(r, v, nv, term | trunc, trunc, *rest)  # noqa: E731
        monkeypatch.setattr(script, "compute_gae", wrong)
    else:
        first = torch.eye(len(CHAIN_VALUES))[0]
        wrong = lambda agent, obs, last, final, *rest: estimate(agent, obs, last, first.expand_as(final), *rest)  # noqa: E731
        monkeypatch.setattr(script, "estimate_advantages", wrong)
    args = small_args(env_id=probe(script, "Chain"), total_timesteps=8 * 24, **CHAIN)
    assert advantages_of_a_run_on_the_chain(script, args, monkeypatch).abs().max() > 0.1


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("script", ["ppo_continuous", "ppo_discrete"], indirect=True)
def test_recomputed_advantages_are_those_of_the_current_critic(script, small_args, minibatches, recompute):
    """In the second epoch of an iteration the values that the update gets are the critic's own at its start; without
    --recompute-advantages they are those of the first epoch."""
    original, critics = script.estimate_advantages, []

    def spy(agent, *rollout):
        critics.append({name: tensor.clone() for name, tensor in agent.critic.state_dict().items()})
        return original(agent, *rollout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "estimate_advantages", spy)
        args = small_args(total_timesteps=64, recompute_advantages=recompute)
        agent, _ = script.train(args)
    assert len(critics) == (args.update_epochs if recompute else 1)
    epochs = [minibatches[i : i + args.num_minibatches] for i in range(0, 8, args.num_minibatches)]
    for epoch, critic in zip(epochs, critics * 2):
        agent.critic.load_state_dict(critic)
        for (_, _, _, mb_obs, _, _, mb_values, *_), _ in epoch:
            torch.testing.assert_close(agent.get_value(mb_obs), mb_values, atol=1e-6, rtol=1e-5)
