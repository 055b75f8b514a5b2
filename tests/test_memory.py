"""ppo_rnn.py: the state of its memory between steps, rollouts and episodes, and the replay in the update."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from conftest import SMALL, assert_same_learner
from torch import nn

import ppo_rnn as script

BOTH_CELLS = pytest.mark.parametrize("cell", ["lstm", "gru"])


@pytest.fixture
def args(tmp_path):
    return lambda **changes: script.Args(**{"runs_dir": str(tmp_path), "memory_size": 8} | SMALL | changes)


def make_agent(kind="discrete", obs_size=3, **changes):
    """An agent with actions of two dimensions, whose memory and policy are not small."""
    torch.manual_seed(0)
    high = np.ones(2, np.float32)
    action = {"action_low": -high, "action_high": high}
    if kind == "discrete":
        action = {"action_sizes": np.array([3, 2]), "action_start": np.array([0, 1])}
    agent = script.Agent((obs_size,), action, script.Args(**{"memory_size": 8} | changes))
    for parameter in agent.parameters():
        nn.init.normal_(parameter, std=0.5)
    return agent


def starts_at(T, n, *places):
    starts = torch.zeros(T, n, dtype=torch.bool)
    for place in places:
        starts[place] = True
    return starts


T, n = 13, 4


STARTS = {
    "none": starts_at(T, n),
    "first and last step": starts_at(T, n, 0, T - 1),
    "every environment at once": starts_at(T, n, 5),
    "one environment, two in a row": starts_at(T, n, (6, 2), (7, 2)),
    "every step": starts_at(T, n, slice(None)),
    "often": torch.rand(T, n, generator=torch.Generator().manual_seed(1)) < 0.4,
    "seldom": torch.rand(T, n, generator=torch.Generator().manual_seed(2)) < 0.08,
}


def step_by_step(agent, obs, starts, state):
    """Features of a rollout as acting has them: one time step after the other."""
    features = []
    for t in range(len(obs)):
        state = torch.where(starts[t].unsqueeze(1), 0.0, state)
        output, state = agent.memory.step(obs[t], state)
        features.append(output)
    return torch.stack(features)


@BOTH_CELLS
@pytest.mark.parametrize("where", STARTS)
def test_replay_is_step_by_step(where, cell):
    """Log-probabilities, values and the gradients of both, in all parameters and in the state before the rollout."""
    agent, starts = make_agent(cell=cell), STARTS[where]
    obs, actions = torch.randn(T, n, 3), torch.randint(2, (T, n, 2))
    state = torch.randn(n, agent.memory.state_size, requires_grad=True)
    weights = torch.randn(3, T, n)  # another weight for every number, so that none can stand in for another
    results = []
    for features in (agent.memory.replay(obs, starts, state), step_by_step(agent, obs, starts, state)):
        _, log_prob, entropy, value = agent.get_action_and_value(features, actions)
        assert log_prob.shape == value.shape == (T, n)
        loss = (weights * torch.stack([log_prob, entropy, value])).sum() / (T * n)
        parameters = [*agent.parameters(), state]
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        assert any(gradient.abs().max() > 0.01 for gradient in gradients)
        results.append((log_prob, value, entropy, *gradients))
    for replayed, stepped in zip(*results):
        torch.testing.assert_close(replayed, stepped, atol=1e-5, rtol=1e-5)


@BOTH_CELLS
def test_a_kernel_that_moves_its_weights(cell, args, monkeypatch):
    """As cuDNN's does: it puts the weights that it gets into memory of its own. All weights still train."""

    def move(kernel):
        for weight in kernel.parameters():
            weight.data = weight.data.clone()

    _, expected = script.train(args(cell=cell))
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", move)
    _, moved = script.train(args(cell=cell))
    assert_same_learner(*(script.load_checkpoint(run_dir) for run_dir in (expected, moved)))


@BOTH_CELLS
def test_reset_is_exact(cell):
    """Nothing of the time before a start comes through it, however large states and weights are: neither values nor
    gradients."""
    agent = make_agent(cell=cell)
    for parameter in agent.memory.parameters():
        parameter.data *= 30
    obs, starts, state = 10 * torch.randn(T, n, 3), STARTS["every environment at once"], torch.randn(n, 16)[:, :8]
    state = 100 * state.repeat(1, agent.memory.state_size // 8)
    states = [x.requires_grad_() for x in (state, torch.zeros_like(state))]
    one, two = (agent.memory.replay(obs, starts, x)[5:] for x in states)
    assert torch.equal(one, two)
    assert not torch.autograd.grad(one.sum(), states[0])[0].any()


def test_initialisation_of_the_memory():
    """Orthogonal weights, zero biases."""
    cell = script.Agent((3,), {"action_low": np.zeros(1), "action_high": np.ones(1)}, script.Args()).memory.cell
    for weight in (cell.weight_ih, cell.weight_hh):
        torch.testing.assert_close(weight.T @ weight, torch.eye(weight.shape[1]), atol=1e-5, rtol=0)
    assert not cell.bias_ih.any() and not cell.bias_hh.any()


@BOTH_CELLS
def test_replay_of_a_rollout_with_its_ends(cell):
    """Features of observations, last and final observations, against a loop that steps aside for every final one."""
    agent = make_agent(cell=cell)
    truncations = STARTS["often"]
    ended = truncations | STARTS["seldom"]
    starts = torch.cat([torch.zeros_like(ended[:1]), ended])
    obs, final_obs = torch.randn(T + 1, n, 3), torch.randn(int(truncations.sum()), 3)
    first = state = torch.randn(n, agent.memory.state_size)
    features, finals, final_states = [], [], []
    for t in range(T + 1):
        state = torch.where(starts[t].unsqueeze(1), 0.0, state)
        output, state = agent.memory.step(obs[t], state)
        features.append(output)
        for column in truncations[t].nonzero().flatten() if t < T else ():
            final_states.append(state[column])
            finals.append(agent.memory.step(final_obs[len(finals)][None], state[column][None])[0][0])
    found = script.replay_rollout(agent.memory, obs, starts, first, final_obs, torch.stack(final_states))
    for one, two in zip(found, (torch.stack(features[:-1]), features[-1], torch.stack(finals))):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


@pytest.fixture
def seen(watch):
    """What train() passes to, and gets from, the functions that matter: {name: [(arguments, result), ...]}"""
    owners = dict.fromkeys(["ppo_loss", "replay_rollout", "estimate_advantages"], script)
    owners |= {"step": script.Memory, "randperm": torch}
    return {name: watch(owner, name) for name, owner in owners.items()}


CHAIN = {"num_steps": 6, "num_minibatches": 2, "total_timesteps": 24 * 5}


@pytest.mark.parametrize("env_id, cell", [("box/Chain-v0", "lstm"), ("masks/Masked-v0", "gru")])
def test_ratio_is_one_in_the_first_minibatch(args, seen, env_id, cell):
    """In every iteration, with episodes that span rollouts and end anywhere in them, moving observation statistics,
    masks, and columns in a new order. Clipped is every ratio that is further from 1 than 1e-5: none in the
    first minibatch, some in the fourth."""
    flags = {"env_id": env_id, "cell": cell}
    script.train(args(**flags, learning_rate=0.01, clip_coef=1e-5, **CHAIN))
    clipped = [metrics["clipfrac"].item() for _, (_, metrics) in seen["ppo_loss"]]
    assert len(clipped) == 5 * 2 * 2  # iterations, epochs, minibatches
    assert not any(clipped[::4]) and all(clipped[3::4])


@pytest.mark.parametrize("cell, end", [("lstm", "truncated"), ("gru", "terminated")])
def test_state_is_carried_and_reset(args, seen, cell, end):
    """Through five rollouts: the state that a step finds is that which the step before it left, to the bit, with zeros
    exactly where an episode starts, whatever was bootstrapped in between; and every rollout knows the state it began
    with. A checkpoint lies in the middle of episodes; the resumed run starts new ones, without memory."""
    settings = {"env_id": "discrete/Chain-v0", "cell": cell, "norm_obs": False}
    settings["env_kwargs"] = json.dumps({"end": end, "lengths": [3, 5, 2, 7, 1, 6]})

    def states(num_steps):
        """The state before every step, if it is as it should be"""
        calls = [call for call in seen["step"] if len(call[0][1]) == SMALL["num_envs"] and call[0][1].any()]
        obs, before = (torch.stack([arguments[i] for arguments, _ in calls]) for i in (1, 2))
        after = torch.stack([state for _, (_, state) in calls])
        starts = obs[:, :, :1] == 1  # the chain shows its state one-hot
        assert len(before) == num_steps and starts[0].all() and starts.any(0).all() and not starts.all(0).any()
        expected = after.roll(1, 0).masked_fill(starts, 0.0)
        assert torch.equal(before, expected)
        return before

    _, run_dir = script.train(args(**settings | CHAIN))
    before = states(30)
    first_states = [arguments[3] for arguments, _ in seen["replay_rollout"][:: SMALL["update_epochs"]]]
    assert torch.equal(torch.stack(first_states), before[::6]) and before[6:].any()
    seen["step"].clear()
    script.train(args(**settings | CHAIN | {"total_timesteps": 24 * 10}), run_dir)
    states(30)


def test_a_gpu_computes_the_replay_in_full_precision(args, monkeypatch):
    """TF32, which cuDNN uses by default, rounds the weights of reset rows: the state would not be zero behind them."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    script.train(args(total_timesteps=64))
    assert not torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("env_id, cell", [("box/Chain-v0", "lstm"), ("discrete/Chain-v0", "gru")])
def test_update_by_columns(args, seen, env_id, cell):
    """An epoch has every environment once, in a new order. A minibatch has all steps of its environments, in the
    order of time. The gradient of all parameters is that of the same loss behind a loop over single steps, from the
    state before the rollout to the last step, without any cut but at episode starts: Adam's running mean has it."""
    settings = {"env_id": env_id, "cell": cell, "max_grad_norm": 0.0} | CHAIN
    agent, run_dir = script.train(args(**settings | {"learning_rate": 0.01}))
    mean = script.load_checkpoint(run_dir)["optimizer"]["state"][0]["exp_avg"]
    for calls in seen.values():
        calls.clear()
    # The agent stays as it is now: everything can be computed again behind the run.
    settings |= {"learning_rate": 0.0, "total_timesteps": 24 * 9}
    agent, _ = script.train(args(**settings), run_dir)
    orders = [order for _, order in seen["randperm"]]
    assert len(orders) == 4 * 2 and len({tuple(order.tolist()) for order in orders}) > 4
    for number, (arguments, _) in enumerate(list(seen["ppo_loss"])):
        epoch, half = divmod(number, 2)
        columns = orders[epoch].split(2)[half]
        (_, obs, starts, first_state, *_), (features, _, _) = seen["replay_rollout"][epoch]
        for rows, whole in zip(arguments[6:9], seen["estimate_advantages"][epoch][1]):
            assert torch.equal(rows, whole[:, columns])
        torch.testing.assert_close(arguments[2], features[:, columns], atol=1e-6, rtol=0)
        stepped = step_by_step(agent, obs[:-1, columns], starts[:-1, columns], first_state[columns])
        loss, _ = script.ppo_loss(*arguments[:2], stepped, *arguments[3:])
        gradient = torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(agent.parameters()))])
        mean = 0.9 * mean + 0.1 * gradient
    assert number == 15 and first_state.any(1).all()
    found = script.load_checkpoint(run_dir)["optimizer"]["state"][0]["exp_avg"]
    torch.testing.assert_close(found, mean, atol=1e-6, rtol=1e-4)


def test_predict_takes_masks_as_environments_give_them():
    """A tuple or list with an array for each dimension, or one array; of many environments, a row for each. The action
    is of the type of its space."""
    agent, raw_obs = make_agent(), np.zeros(3)
    agent.action_start = agent.action_start.to(torch.uint16)
    masks = np.array([0, 0, 1], np.int8), np.array([1, 0], np.int8)
    for mask in (masks, list(masks), np.hstack(masks)):
        action, _ = agent.predict(raw_obs, action_mask=mask)
        assert action.tolist() == [2, 1] and action.dtype == np.uint16
        actions, _ = agent.predict(np.stack([raw_obs] * 2), action_mask=[np.hstack(mask)] * 2)
        assert actions.tolist() == [[2, 1]] * 2


@BOTH_CELLS
@pytest.mark.parametrize("kind", ["discrete", "box"])
def test_predict_carries_the_state(kind, cell):
    """One observation or many: the state goes in and comes out, None stands for the start of an episode."""
    agent = make_agent(kind, cell=cell, norm_obs=False)
    obs, state = torch.randn(5, 2, 3), None
    features = step_by_step(agent, obs, starts_at(5, 2, 0), torch.zeros(2, agent.memory.state_size))
    alone = None
    for t in range(5):
        action, state = agent.predict(obs[t].numpy(), state)
        first, alone = agent.predict(obs[t, 0].numpy(), alone)
        if kind == "discrete":
            expected = torch.stack([x.argmax(-1) for x in agent.get_log_probs(features[t])], -1) + torch.tensor([0, 1])
        else:
            expected = agent.actor(features[t]).clamp(-1, 1)
        np.testing.assert_allclose(action, expected.detach().numpy(), atol=1e-5)
        np.testing.assert_allclose(first, action[0], atol=1e-5)
    state[np.array([True, False])] = 0  # as README says, for environments whose episode has ended
    action, _ = agent.predict(obs[0].numpy(), state)
    np.testing.assert_allclose(action[0], agent.predict(obs[0, 0].numpy())[0], atol=1e-5)


@BOTH_CELLS
def test_every_episode_of_an_evaluation_starts_without_memory(cell):
    """Each return is that of the same episode evaluated alone. Memory that is not thrown away would change it."""
    agent = make_agent("box", obs_size=2, cell=cell)
    args = script.Args(env_id="box/Target-v0")
    together = script.evaluate(agent, dataclasses.replace(args, seed=3), 5)
    alone = [script.evaluate(agent, dataclasses.replace(args, seed=3 + i), 1).item() for i in range(5)]
    assert together.tolist() == alone


@pytest.mark.parametrize("env_id", ["masks/Masked-v0", "discrete/Shaped-v0"])
def test_other_environments(args, env_id):
    """Masks and matrices of actions: trained, saved, loaded, evaluated, both ways of acting."""
    settings = args(env_id=env_id, total_timesteps=128)
    _, run_dir = script.train(settings)
    for deterministic in (True, False):
        settings.eval_deterministic = deterministic
        assert script.evaluate(script.load_agent(run_dir), settings, 3).shape == (3,)
