"""Recipes about networks and what they see: image_box, images_with_memory, dict_observations, dict_observations_box,
privileged_critic, layer_norm."""

import dataclasses

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import SMALL

from recipes import TwoSenses, make_agent, small, with_recipes


def test_image_box_shows_images_to_the_nature_cnn(tmp_path, watch):
    """The network is SB3's NatureCNN; channels may be first or last. Images are stored as they are."""
    from stable_baselines3.common.torch_layers import NatureCNN

    module = with_recipes("ppo_continuous", "image_box")
    torch.manual_seed(0)
    last = module.Agent((40, 44, 3), np.zeros(2, np.float32), np.ones(2, np.float32), module.Args())
    first = module.Agent((3, 40, 44), np.zeros(2, np.float32), np.ones(2, np.float32), module.Args())
    first.load_state_dict({k: v for k, v in last.state_dict().items() if "obs_rms" not in k}, strict=False)
    images = np.random.default_rng(0).integers(256, size=(5, 40, 44, 3), dtype=np.uint8)
    pixels, channels_first = torch.from_numpy(images), torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
    np.testing.assert_allclose(last.predict(images), first.predict(channels_first), atol=1e-6)
    np.testing.assert_allclose(last.predict(images)[0], last.predict(images[0]), atol=1e-6)
    with pytest.raises(ValueError, match="40, 44, 3"):
        last.predict(channels_first)
    theirs = NatureCNN(gym.spaces.Box(0, 255, (3, 40, 44), np.uint8))
    weights = dict(zip(theirs.state_dict(), last.encoder.state_dict().values()))
    theirs.load_state_dict(weights)
    torch.testing.assert_close(last.encoder(pixels), theirs(channels_first / 255), rtol=1e-4, atol=1e-5)
    _, log_prob, _, value = last.get_action_and_value(pixels, torch.ones(5, 2))
    (log_prob + value).sum().backward()
    assert all((parameter.grad != 0).any() for parameter in last.parameters())
    torch.testing.assert_close(value, last.get_value(pixels))

    minibatches = watch(module, "ppo_loss")
    few = SMALL | {"num_steps": 8, "total_timesteps": 32}
    module.train(module.Args(env_id="recipes/Picture-v0", runs_dir=str(tmp_path), **few))
    images = minibatches[0][0][2]
    assert images.dtype == torch.uint8 and images.shape == (8, 40, 44, 3)
    assert len(torch.unique(images[:, 0, 0, 0])) > 1 and (images.float().std(dim=(1, 2, 3)) == 0).all()
    with pytest.raises(module.UsageError, match="images of at least 36 x 36"):
        module.train(module.Args(env_id="InvertedPendulum-v4", runs_dir=str(tmp_path)))


def test_images_with_memory(tmp_path, watch):
    """The task is learned, of which memory alone knows the answer. The replay of a rollout equals step by step. The
    gradient reaches the CNN. Images are stored as they are."""
    script = with_recipes("ppo_rnn", "images_with_memory")
    changes = {"num_envs": 16, "num_steps": 8, "total_timesteps": 3840, "num_minibatches": 2, "update_epochs": 4}
    changes |= {"memory_size": 32, "learning_rate": 1e-3, "env_id": "recipes/Flash-v0"}
    rollouts = watch(script, "estimate_advantages")
    args = script.Args(**SMALL | changes, runs_dir=str(tmp_path))
    agent, run_dir = script.train(args)
    assert script.evaluate(script.load_agent(run_dir), args, 20).mean() > 0.9
    images = rollouts[0][0][1][0]
    assert (
        images.dtype == torch.uint8 and images.shape == (9, 16, 3, 36, 40) and 0.2 < images.float().mean() / 255 < 0.3
    )

    torch.manual_seed(0)
    images = torch.randint(256, (6, 4, 3, 36, 40), dtype=torch.uint8)
    starts, first_state = torch.rand(6, 4) < 0.3, torch.randn(4, agent.memory.state_size)
    state, by_step = first_state, []
    for obs, start in zip(images, starts):
        features, state = agent.memory.step(obs, state.masked_fill(start.unsqueeze(-1), 0.0))
        by_step.append(features)
    features = agent.memory.replay(images, starts, first_state)
    torch.testing.assert_close(features, torch.stack(by_step), rtol=1e-4, atol=1e-5)
    gradients = torch.autograd.grad(features.sum(), list(agent.memory.encoder.parameters()))
    assert all((gradient != 0).any() for gradient in gradients)
    with pytest.raises(ValueError, match="3, 36, 40"):
        agent.predict(np.zeros((36, 40, 3), np.uint8))


DICT_OBSERVATIONS = pytest.mark.parametrize(
    "script, recipe, env_id, steps",
    [
        ("ppo_discrete", "dict_observations", "discrete/TwoSenses-v0", 1280),
        ("ppo_continuous", "dict_observations_box", "box/TwoSenses-v0", 2560),
    ],
)


def two_senses(script, env_id, runs_dir, **changes):
    args = script.Args(
        **SMALL | {"num_envs": 16, "num_steps": 4, "num_minibatches": 1, "update_epochs": 5, "learning_rate": 1e-3}
    )
    return dataclasses.replace(args, env_id=env_id, runs_dir=str(runs_dir), **changes)


@DICT_OBSERVATIONS
def test_image_and_vector_are_both_seen(script, recipe, env_id, steps, tmp_path):
    """Both parts are learned from: one alone would tell half of the bits, and 1/2 is the best return then. The image
    stays as it is, the vector is normalized."""
    script = with_recipes(script, recipe)
    args = two_senses(script, env_id, tmp_path, total_timesteps=steps)
    agent, run_dir = script.train(args)
    assert script.evaluate(script.load_agent(run_dir), args, 40).mean() > 0.8

    env = script.make_env(args)
    flat_rows = np.stack([env.reset(seed=seed)[0] for seed in range(20)])
    rows = torch.from_numpy(flat_rows)
    normalized = agent.normalize_obs(rows)
    dictionaries = gym.make(env_id)
    for seed in range(20):
        obs, _ = dictionaries.reset(seed=seed)
        expected = (obs["vector"] - agent.obs_rms.mean.numpy()) / agent.obs_rms.var.numpy() ** 0.5
        pixels, vector = agent.split(normalized[seed])
        np.testing.assert_allclose(vector, expected, atol=1e-4)
        assert np.array_equal(pixels.reshape(37, 36, 3), obs["image"])
    assert len({row[: 37 * 36 * 3].max().item() > 100 for row in rows}) == 2

    # Another image alone, or another vector alone, changes the probabilities and the value.
    action = torch.ones_like(agent.get_action_and_value(normalized)[0])
    for part in (slice(0, 37 * 36 * 3), slice(37 * 36 * 3, None)):
        other = normalized.clone()
        other[:, part] = normalized.roll(1, 0)[:, part]
        changed = (normalized != other).any(1)
        for i in (1, 3):  # log-probability, value
            before, after = (agent.get_action_and_value(x, action)[i] for x in (normalized, other))
            assert changed.any() and ((before - after).abs() > 1e-4).equal(changed)
    # The value is no sum of a function of the image and one of the vector: these would cancel.
    (pixels, vectors), (other_pixels, other_vectors) = agent.split(normalized), agent.split(normalized.roll(1, 0))
    pairs = [(a, b) for a in (pixels, other_pixels) for b in (vectors, other_vectors)]
    value = [agent.get_value(torch.cat(pair, -1)) for pair in pairs]
    assert (value[0] - value[1] - value[2] + value[3]).abs().max() > 1e-2
    with pytest.raises(ValueError, match=str(37 * 36 * 3 + 3)):
        agent.predict(flat_rows[:, 1:])
    with pytest.raises(script.UsageError, match="a Dict space of image"):
        script.train(dataclasses.replace(args, env_id="box/Target-v0"))


@DICT_OBSERVATIONS
def test_final_images_and_vectors_of_truncated_episodes(script, recipe, env_id, steps, tmp_path, watch):
    """Every step truncates an episode. Advantages are estimated from its final observation, the image before the
    vector. No observation of the rollout equals it."""
    script = with_recipes(script, recipe)
    estimates = watch(script, "estimate_advantages")
    TwoSenses.last.clear()
    changes = {"total_timesteps": 64, "env_kwargs": '{"end": "truncated"}', "norm_obs": False, "update_epochs": 1}
    script.train(two_senses(script, env_id, tmp_path, **changes))
    [((_, _, _, final_obs, *_), _)] = estimates
    expected = [np.concatenate([obs["image"].ravel(), obs["vector"]]) for obs in TwoSenses.last]
    assert len(expected) == 64 and np.array_equal(final_obs, np.float32(expected))


def test_privileged_critic(tmp_path):
    module = with_recipes("ppo_continuous", "privileged_critic")
    args = module.Args(env_id="recipes/TwoViews-v0", runs_dir=str(tmp_path), **(SMALL | {"total_timesteps": 1280}))
    agent, run_dir = module.train(dataclasses.replace(args, learning_rate=3e-3))
    agent = module.load_agent(run_dir)
    obs = torch.randn(20, 3, requires_grad=True)  # one number of "critic", then two of "policy"
    of_action = torch.autograd.grad(sum(x.sum() for x in agent.get_mean_and_log_std(obs)), obs)[0]
    of_value = torch.autograd.grad(agent.get_value(obs).sum(), obs)[0]
    assert (of_action[:, :1] == 0).all() and (of_action[:, 1:] != 0).all()
    assert (of_value != 0).all()
    raw_obs = np.random.default_rng(0).uniform(-1, 1, (5, 3)).astype(np.float32)
    np.testing.assert_array_equal(agent.predict(raw_obs[:, 1:]), agent.predict(raw_obs))
    with pytest.raises(ValueError, match="not"):
        agent.predict(np.zeros(4))
    with pytest.raises(module.UsageError, match="critic and policy"):
        module.train(dataclasses.replace(args, env_id="InvertedPendulum-v4"))
    # The return is what the critic sees, and the critic has found that out.
    with torch.no_grad():
        raw_obs = torch.cat([torch.arange(-9, 10).unsqueeze(1), torch.zeros(19, 2)], 1)
        values = agent.get_value(agent.normalize_obs(raw_obs))
    assert np.corrcoef(values, np.arange(-9, 10))[0, 1] > 0.95


def test_layer_norm_takes_the_scale_out_of_preactivations():
    agent = make_agent(with_recipes("ppo_continuous", "layer_norm"), hidden_sizes=(16, 16))
    assert agent.actor[0].weight.shape == (16, 3) and agent.critic[-1].in_features == 16
    obs = torch.randn(20, 3)
    before = torch.cat([agent.get_mean_and_log_std(obs)[0] * 100, agent.get_value(obs).unsqueeze(-1)], -1)
    assert before.std(0).min() > 0.01
    with torch.no_grad():
        for network in (agent.actor, agent.critic):
            for layer in [module for module in network if isinstance(module, torch.nn.Linear)][:-1]:
                layer.weight *= 7
                layer.bias *= 7
    after = torch.cat([agent.get_mean_and_log_std(obs)[0] * 100, agent.get_value(obs).unsqueeze(-1)], -1)
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name, recipe", [("ppo_rnn", "images_with_memory"), ("ppo_continuous", "image_box")])
def test_a_native_vector_of_other_images(name, recipe, tmp_path):
    """ale-py's is refused: --evaluate would see other images."""
    script = with_recipes(name, recipe)
    settings = {"env_id": "ale_py:ALE/Pong-v5", "env_kwargs": '{"continuous": true}'}
    with pytest.raises(script.UsageError, match="another observation space in a vector"):
        script.make_envs(small(script, tmp_path, **settings), 2)
