"""Recipes about exploration and several players: rnd, self_play, shared_parameters."""

import dataclasses

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import SMALL
from probes import CHAIN_GAMMA, CHAIN_VALUES

from benchmark import sparse_envs
from recipes import GAME, TEN, Counted, episodes, flat, quick_compile, with_recipes


def test_rnd(tmp_path, watch, monkeypatch):
    """Rewards are those of the environment, plus a bonus that is proportional to the predictor's error about what
    followed. Its discounted sums have the deviation bonus_coef. The policy sees the first 7 of the 16 states of the
    chain: the bonus falls for these and not for the others. The target is still that of the beginning, and is in the
    checkpoint."""
    script = with_recipes("ppo_discrete", "rnd")
    settings = {"env_id": "discrete/Chain-v0", "norm_reward": False, "norm_obs": False, "runs_dir": str(tmp_path)}
    # Two rollouts, of which nothing is learned.
    args = script.Args(**SMALL | settings | {"total_timesteps": 128, "update_epochs": 1, "learning_rate": 0.0})
    rollouts = watch(script, "estimate_advantages")
    initial, _ = script.train(args)
    assert len(rollouts) == 2
    sums, total = [], np.zeros(4)
    with torch.no_grad():
        before = initial.get_bonus(torch.eye(16)).numpy()
    for (_, obs, last_obs, _, rewards, *_), _ in rollouts:
        states = torch.cat([obs, last_obs.unsqueeze(0)]).argmax(-1).numpy()  # (17, 4)
        own = CHAIN_VALUES[states[:-1]] - CHAIN_GAMMA * CHAIN_VALUES[states[:-1] + 1]
        for row in before[states[1:]]:  # the sums go on, over the ends of episodes and of rollouts too
            total = row + args.gamma * total
            sums.append(total)
        expected = args.bonus_coef * before[states[1:]] / np.std(sums)
        np.testing.assert_allclose(rewards.numpy() - own, expected, rtol=1e-2)

    quick_compile(monkeypatch)
    args = script.Args(**TEN | settings | {"compile": True, "update_epochs": 8, "learning_rate": 1e-2})
    agent, run_dir = script.train(args)
    loaded = script.load_agent(run_dir)
    for name, weight in initial.rnd_target.state_dict().items():
        assert torch.equal(weight, agent.rnd_target.state_dict()[name])
        assert torch.equal(weight, loaded.rnd_target.state_dict()[name])
    with torch.no_grad():
        after = agent.get_bonus(torch.eye(16)).numpy()
        assert np.array_equal(loaded.get_bonus(torch.eye(16)), after)
    assert (after[:7] < 0.1 * before[:7]).all() and (after[7:] > 0.3 * before[7:]).all()


def test_deep_sea():
    """Only the way that goes right in all ten steps finds the reward; each step right costs a thousandth."""
    env = gym.make("DeepSea10-v0")
    for wrong in [None, 0, 5, 9]:
        seen, _ = env.reset()
        total, cells = 0.0, []
        for t in range(10):
            cells.append(int(seen.argmax()))
            seen, reward, terminated, truncated, _ = env.step(int(t != wrong))
            total += reward
            assert terminated == (t == 9) and not truncated
        assert total == pytest.approx(0.99 if wrong is None else -0.009) and not seen.any()
        assert cells[:6] == ([0, 11, 22, 33, 44, 55] if wrong != 0 else [0, 10, 21, 32, 43, 54])
    assert sparse_envs.DeepSea(20).observation_space.shape == (400,)


def test_self_play(tmp_path):
    """Ten iterations: the opponents are the random player, then the agents after 3, 6 and 9 iterations, to the bit, of
    which two are kept. A resumed run meets those two. No move of either side is illegal."""
    script = with_recipes("ppo_discrete", "self_play")
    settings = {"env_id": "Counted-v0", "opponent_interval": 3, "num_opponents": 2, "anneal_lr": False}
    args = script.Args(**TEN | settings, learning_rate=1e-2, runs_dir=str(tmp_path))
    # What a shorter run of the same seed ends with is what the long one has at that time.
    past = [flat(script.train(dataclasses.replace(args, total_timesteps=64 * n))[0]) for n in (3, 6, 9)]

    def met():
        """Which of the past agents the opponents were, in the order of their first moves; None is the random one."""
        found = [player and [torch.equal(flat(player), x) for x in past].index(True) for player in Counted.players]
        return [None if number is None else 3 * number + 3 for number in found]

    Counted.players.clear()
    Counted.moves.update({1.0: 0, -1.0: 0})
    _, run_dir = script.train(args)
    assert Counted.moves[1.0] >= 640 and Counted.moves[-1.0] > 500
    assert list(dict.fromkeys(met())) == [None, 3, 6, 9] and sorted(met()[-2:]) == [6, 9]
    Counted.players.clear()
    script.train(dataclasses.replace(args, total_timesteps=704), resume=run_dir)
    assert sorted(met()) == [6, 9]

    # Of more opponents than environments, the newest play.
    args = dataclasses.replace(args, opponent_interval=1, num_opponents=8)
    newest, run_dir = script.train(args)
    Counted.players.clear()
    script.train(dataclasses.replace(args, total_timesteps=704), resume=run_dir)
    assert len(Counted.players) == args.num_envs
    assert any(torch.equal(flat(player), flat(newest)) for player in Counted.players)


def test_agents_are_columns():
    """Two games of three agents, as six columns, against what the game's description says."""
    script = with_recipes("ppo_discrete", "shared_parameters")
    envs = script.make_envs(script.Args(env_id=GAME), 6)
    obs, _ = envs.reset(seed=7)
    assert obs.tolist() == [[k, 0, number] for number in (7, 8) for k in (1, 2, 3)]
    actions = np.array([0, 0, 0, 2, 1, 2])
    for t in range(1, 5):
        obs, rewards, terminated, truncated, infos = envs.step(actions)
        alive = [3] if t <= 2 else []
        assert rewards.tolist() == [10, 2, 3 * (t <= 2), 1, 20, 30 * (t <= 2)]
        expected = [[k, t, x] if k < 3 or alive else [0, 0, 0] for x in (7, 8) for k in (1, 2, 3)]
        if t < 4:
            assert obs.tolist() == expected and not (terminated | truncated).any() and not infos
    assert infos["final_obs"].tolist() == expected
    assert infos["final_obs"][truncated].tolist() == [[1, 4, 7], [1, 4, 8]]
    assert terminated.tolist() == [False, True, True] * 2 and truncated.tolist() == [True, False, False] * 2
    assert obs.tolist() == [[k, 0, x] for x in (7.5, 8.5) for k in (1, 2, 3)]
    with pytest.raises(script.UsageError, match="a multiple of the 3 agents"):
        script.make_envs(script.Args(env_id=GAME), 4)


def test_shared_parameters(tmp_path):
    """One network plays all agents, each as it should. The game is worth 4 * 10, 4 * 20 and 2 * 30 to them."""
    script = with_recipes("ppo_discrete", "shared_parameters")
    settings = {"env_id": GAME, "num_envs": 12, "num_steps": 32, "total_timesteps": 3840}
    settings |= {"learning_rate": 1e-2, "target_kl": None}  # to be quick
    args = script.Args(**SMALL | settings, runs_dir=str(tmp_path))
    _, run_dir = script.train(args)
    assert script.evaluate(script.load_agent(run_dir), args, 2).tolist() == [60.0, 60.0]
    table = episodes(run_dir)[1:]
    assert len(table) == 12 * 80 and {length for _, _, length in table} == {"4"}
