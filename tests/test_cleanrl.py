"""CleanRL: the same first iteration from the same weights, and --preset cleanrl."""

import json

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import DISCRETE, TESTS

from recipes import with_recipes


class Replay(gym.vector.VectorEnv):
    """Plays a recorded rollout, whatever the actions are; `actions`, if given, are what it must get."""

    actions = None

    def __init__(self, num_envs, autoreset_mode):
        self.num_envs, self.metadata = num_envs, {"autoreset_mode": autoreset_mode}

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self.obs[0], {}

    def step(self, given):
        t, self.t = self.t, self.t + 1
        assert self.actions is None or (given == self.actions[t]).all()
        return self.obs[t + 1], self.rewards[t], self.terminations[t], self.truncations[t], {}


def register(env_id, spaces, obs, rewards, terminations, truncations, actions=None):
    recorded = {"single_observation_space": spaces[0], "single_action_space": spaces[1], "obs": obs, "rewards": rewards}
    recorded |= {"terminations": terminations, "truncations": truncations, "actions": actions}
    gym.register(env_id, vector_entry_point=type("Recorded", (Replay,), recorded))


def shuffle_as_cleanrl(monkeypatch, size):
    """The permutations of np.random.shuffle, each of the one before."""
    order, rng = np.arange(size), np.random.RandomState(1)

    def next_order(_):
        rng.shuffle(order)
        return torch.tensor(order)

    monkeypatch.setattr(torch, "randperm", next_order)


@DISCRETE
def test_first_iteration_of_cleanrl(script, minibatches, monkeypatch, tmp_path):
    """From the same weights, on the same rollout, in the same order of samples: the losses of all 16 minibatches and
    the weights after them are those that CleanRL's ppo.py computed."""
    expected = json.loads((TESTS / "cleanrl.json").read_text())
    T, N, rng = 32, 4, np.random.RandomState(0)
    obs, actions = rng.normal(size=(T + 1, N, 4)).astype(np.float32), rng.randint(0, 2, (T, N))
    rewards, terminations = rng.normal(size=(T, N)).astype(np.float32), rng.rand(T, N) < 0.1
    weights = {}
    for name, shape in zip(
        ("critic.0", "critic.2", "critic.4", "actor.0", "actor.2", "actor.4"),
        ((64, 4), (64, 64), (1, 64), (64, 4), (64, 64), (2, 64)),
    ):
        weights[f"{name}.weight"] = torch.tensor(rng.normal(size=shape).astype(np.float32) / shape[1] ** 0.5)
        weights[f"{name}.bias"] = torch.tensor(rng.normal(size=shape[0]).astype(np.float32) * 0.1)

    spaces = gym.spaces.Box(-9, 9, (4,)), gym.spaces.Discrete(2)
    register("cleanrl/Replay-v0", spaces, obs, rewards, terminations, np.zeros((T, N), bool), actions)

    class SameWeights(script.Agent):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            assert not self.load_state_dict(weights, strict=False).unexpected_keys
            self.acted = 0

        def get_action_and_value(self, obs, action=None, action_mask=None):
            if action is None:
                action = torch.tensor(actions[self.acted]).unsqueeze(-1)
                self.acted += 1
            return super().get_action_and_value(obs, action, action_mask)

    monkeypatch.setattr(script, "Agent", SameWeights)
    shuffle_as_cleanrl(monkeypatch, T * N)
    flags = f"--num-steps {T} --total-timesteps {T * N} --env-id cleanrl/Replay-v0 --no-compile --runs-dir {tmp_path}"
    agent, _ = script.train(script.parse_args(flags.split(), script.Args(**script.PRESETS["cleanrl"])))
    assert len(minibatches) == len(expected["minibatches"]) == 16
    for (_, (_, ours)), theirs in zip(minibatches, expected["minibatches"]):
        assert {name: ours[name].item() for name in theirs} == pytest.approx(theirs, abs=1e-6)
    for name in ("actor.4.weight", "critic.4.weight"):
        torch.testing.assert_close(agent.state_dict()[name], torch.tensor(expected[name]), atol=1e-6, rtol=0)


def test_first_iteration_of_cleanrls_continuous_script(watch, monkeypatch, tmp_path):
    """--preset cleanrl and the recipe time_limits_as_ends give what CleanRL's ppo_continuous_action.py computed from
    the same weights, rollout and order of samples: advantages, losses, and the weights after 320 minibatches."""
    script = with_recipes("ppo_continuous", "time_limits_as_ends")
    expected = json.loads((TESTS / "cleanrl_continuous.json").read_text())
    T, N, D, A, rng = 512, 1, 5, 3, np.random.RandomState(0)
    obs, noise = rng.normal(size=(T + 1, N, D)).astype(np.float32), rng.normal(size=(T, N, A)).astype(np.float32)
    rewards = rng.normal(size=(T, N)).astype(np.float32)
    terminations, truncations = rng.rand(T, N) < 0.02, rng.rand(T, N) < 0.02
    weights = {}
    for name, output_size in (("critic", 1), ("actor", A)):
        for layer, shape in ((0, (64, D)), (2, (64, 64)), (4, (output_size, 64))):
            weight = rng.normal(size=shape).astype(np.float32) / shape[1] ** 0.5
            weights[f"{name}.{layer}.weight"] = torch.tensor(weight)
            weights[f"{name}.{layer}.bias"] = torch.tensor(rng.normal(size=shape[0]).astype(np.float32) * 0.1)
    weights["log_std"] = torch.tensor(rng.normal(size=A).astype(np.float32) * 0.1)

    spaces = gym.spaces.Box(-9, 9, (D,)), gym.spaces.Box(-1, 1, (A,))
    register("cleanrl/ReplayBox-v0", spaces, obs, rewards, terminations, truncations)

    class SameWeights(script.Agent):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            assert not self.load_state_dict(weights, strict=False).unexpected_keys
            self.acted = 0

        def get_action_and_value(self, obs, action=None):
            if action is None:
                action = self.get_mean_and_log_std(obs)[0] + 0.5 * torch.tensor(noise[self.acted])
                self.acted += 1
            return super().get_action_and_value(obs, action)

    monkeypatch.setattr(script, "Agent", SameWeights)
    shuffle_as_cleanrl(monkeypatch, T * N)
    rollouts, minibatches = watch(script, "estimate_advantages"), watch(script, "ppo_loss")
    # CleanRL normalizes in wrappers of the environment: the recorded observations and rewards are normalized already.
    flags = f"--no-norm-obs --no-norm-reward --num-steps {T} --total-timesteps {T}"
    flags += f" --env-id cleanrl/ReplayBox-v0 --no-compile --runs-dir {tmp_path}"
    agent, _ = script.train(script.parse_args(flags.split(), script.Args(**script.PRESETS["cleanrl"])))
    ((_, (_, advantages, _)),) = rollouts
    torch.testing.assert_close(advantages.flatten(), torch.tensor(expected["advantages"]), atol=1e-5, rtol=0)
    assert len(minibatches) == 320
    for (_, (_, ours)), theirs in zip(minibatches[31::32], expected["minibatches"], strict=True):
        assert {name: ours[name].item() for name in theirs} == pytest.approx(theirs, abs=1e-5)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(agent.state_dict()[name], torch.tensor(weight), atol=1e-5, rtol=0)


# CleanRL's defaults (commit fe8d8a0) in the names of Args: what its three scripts have in common, and what not.
CLEANRL = {"seed": 1, "anneal_lr": True, "gamma": 0.99, "gae_lambda": 0.95, "norm_adv": True, "clip_vloss": True}
CLEANRL |= {"vf_coef": 0.5, "max_grad_norm": 0.5, "target_kl": None, "recompute_advantages": False}
CLASSIC = {"env_id": "CartPole-v1", "total_timesteps": 500_000, "num_envs": 4, "num_steps": 128}
CLASSIC |= {"learning_rate": 2.5e-4, "num_minibatches": 4, "update_epochs": 4, "clip_coef": 0.2, "ent_coef": 0.01}
CLASSIC |= {"norm_obs": False, "norm_reward": False}
MUJOCO = {"env_id": "HalfCheetah-v4", "total_timesteps": 1_000_000, "num_envs": 1, "num_steps": 2048}
MUJOCO |= {"learning_rate": 3e-4, "num_minibatches": 32, "update_epochs": 10, "clip_coef": 0.2, "ent_coef": 0.0}
MUJOCO |= {"norm_obs": True, "norm_reward": True, "log_std_init": 0.0, "anneal_std": False, "stagger_envs": False}
LSTM = CLASSIC | {"num_envs": 8, "clip_coef": 0.1, "memory_size": 128, "hidden_sizes": ()}
SETTINGS = {"ppo_continuous": MUJOCO, "ppo_discrete": CLASSIC, "ppo_rnn": LSTM}


def test_preset_gives_cleanrls_settings(script):
    args = vars(script.Args(**script.PRESETS["cleanrl"]))
    wanted = CLEANRL | SETTINGS[script.__name__]
    assert {name: args[name] for name in wanted} == wanted
