"""ppo_rnn.py: the state of its memory between steps, rollouts and episodes, and the replay in the update."""

import dataclasses

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


T, n = 13, 4
STARTS = {  # of episodes: (T, n)
    "none": torch.zeros(T, n, dtype=torch.bool),
    "seldom": torch.rand(T, n, generator=torch.Generator().manual_seed(2)) < 0.08,
    "often": torch.rand(T, n, generator=torch.Generator().manual_seed(1)) < 0.4,  # also in the first and the last step
    "every step": torch.ones(T, n, dtype=torch.bool),
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
        assert torch.autograd.grad(value.sum(), agent.memory.cell.weight_ih, retain_graph=True)[0].any()
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
    obs, starts = 10 * torch.randn(T, n, 3), (torch.arange(T) == 5).unsqueeze(1).expand(T, n)
    state = torch.randn(n, 8)
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


@pytest.mark.parametrize("env_id, cell", [("box/Chain-v0", "lstm"), ("masks/Masked-v0", "gru")])
def test_ratio_is_one_in_the_first_minibatch(args, watch, env_id, cell):
    """In every iteration, with episodes that span rollouts and end anywhere in them, moving observation statistics,
    masks, and columns in a new order. Clipped is every ratio that is further from 1 than 1e-5: none in the
    first minibatch, some in the fourth."""
    minibatches, sizes = watch(script, "ppo_loss"), {"num_steps": 6, "num_minibatches": 2, "total_timesteps": 24 * 5}
    script.train(args(env_id=env_id, cell=cell, learning_rate=0.01, clip_coef=1e-5, **sizes))
    clipped = [metrics["clipfrac"].item() for _, (_, metrics) in minibatches]
    assert len(clipped) == 5 * 2 * 2  # iterations, epochs, minibatches
    assert not any(clipped[::4]) and all(clipped[3::4])


def test_a_gpu_computes_the_replay_in_full_precision(args, monkeypatch):
    """TF32, which cuDNN uses by default, rounds the weights of reset rows: the state would not be zero behind them."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    script.train(args(total_timesteps=64))
    assert not torch.backends.cudnn.allow_tf32


@BOTH_CELLS
@pytest.mark.parametrize("kind", ["discrete", "box"])
def test_predict_carries_the_state(kind, cell):
    """One observation or many: the state goes in and comes out, None stands for the start of an episode."""
    agent = make_agent(kind, cell=cell, norm_obs=False)
    obs, state = torch.randn(5, 2, 3), None
    alone = None
    for t in range(5):
        action, state = agent.predict(obs[t].numpy(), state)
        first, alone = agent.predict(obs[t, 0].numpy(), alone)
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


def test_matrices_of_discrete_actions(args):
    """Trained, saved, loaded, evaluated, both ways of acting."""
    settings = args(env_id="discrete/Shaped-v0", total_timesteps=128)
    _, run_dir = script.train(settings)
    for settings.eval_deterministic in (True, False):
        assert script.evaluate(script.load_agent(run_dir), settings, 3).shape == (3,)
