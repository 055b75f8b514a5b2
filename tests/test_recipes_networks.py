"""Recipes about networks and what they see: image_box, dict_observations, privileged_critic, layer_norm."""

import copy
import dataclasses

import gymnasium as gym
import numpy as np
import torch
from conftest import SMALL

import ppo_discrete
from recipes import make_agent, with_recipes


def test_image_box_shows_images_to_the_nature_cnn(tmp_path, watch):
    module = with_recipes("ppo_continuous", "image_box")
    torch.manual_seed(0)
    last = module.Agent((40, 44, 3), np.zeros(2, np.float32), np.ones(2, np.float32), module.Args())
    first = module.Agent((3, 40, 44), np.zeros(2, np.float32), np.ones(2, np.float32), module.Args())
    first.load_state_dict({k: v for k, v in last.state_dict().items() if "obs_rms" not in k}, strict=False)
    images = np.random.default_rng(0).integers(256, size=(5, 40, 44, 3), dtype=np.uint8)
    np.testing.assert_allclose(last.predict(images), first.predict(images.transpose(0, 3, 1, 2)), atol=1e-6)
    np.testing.assert_allclose(last.predict(images)[0], last.predict(images[0]), atol=1e-6)
    pixels, theirs = torch.from_numpy(images), ppo_discrete.NatureCNN((40, 44, 3))
    theirs.load_state_dict(last.encoder.state_dict())
    torch.testing.assert_close(last.encoder(pixels), theirs(pixels))  # the network of the other script
    _, log_prob, _, value = last.get_action_and_value(torch.from_numpy(images), torch.ones(5, 2))
    (log_prob + value).sum().backward()
    assert all((parameter.grad != 0).any() for parameter in last.parameters())
    torch.testing.assert_close(value, last.get_value(torch.from_numpy(images)))

    minibatches = watch(module, "ppo_loss")
    small = SMALL | {"num_steps": 8, "total_timesteps": 32}
    module.train(module.Args(env_id="recipes/Picture-v0", runs_dir=str(tmp_path), **small))
    images = minibatches[0][0][3]
    assert images.dtype == torch.uint8 and images.shape == (8, 40, 44, 3)
    assert len(torch.unique(images[:, 0, 0, 0])) > 1 and (images.float().std(dim=(1, 2, 3)) == 0).all()


def test_dict_observations(tmp_path):
    """Both parts are learned from: one alone would tell half of the bits, and 1/2 is the best return then. An
    observation is bytes: those of the image as it is, those of the vector normalised."""
    script = with_recipes("ppo_discrete", "dict_observations")
    args = script.Args(
        env_id="TwoSenses-v0",
        total_timesteps=640,
        num_envs=16,
        num_steps=4,
        num_minibatches=1,
        update_epochs=5,
        compile=False,
    )
    args.runs_dir = str(tmp_path)
    agent, run_dir = script.train(args)
    returns = script.evaluate(script.load_agent(run_dir), "TwoSenses-v0", 40, seed=5)
    assert returns.mean() > 0.8

    env = script.make_evaluation_env("TwoSenses-v0", "{}", False)
    packed, pixels = [env.reset(seed=seed)[0] for seed in range(20)], []
    for seed, row in enumerate(packed):
        obs, _ = TwoSenses().reset(seed=seed)
        pixels.append(obs["image"])
        vector, image = agent.unpack(torch.from_numpy(row))
        assert np.array_equal(vector, np.float32(obs["vector"])) and np.array_equal(image, obs["image"])
        vector, image = agent.unpack(agent.normalize_obs(torch.from_numpy(row)))
        expected = (obs["vector"] - agent.obs_rms.mean.numpy()) / agent.obs_rms.var.numpy() ** 0.5
        np.testing.assert_allclose(vector, expected, atol=1e-4)
        assert np.array_equal(image, obs["image"])
    assert len({image.max() > 100 for image in pixels}) == 2

    # Another image alone, or another vector alone, changes the logits and the value.
    one = agent.normalize_obs(torch.from_numpy(np.stack(packed)))
    assert one.dtype == torch.uint8 and one.shape == (20, 37 * 36 * 3 + 3 * 4)
    for part in (slice(0, 12), slice(12, None)):
        other = one.clone()
        other[:, part] = one.roll(1, 0)[:, part]
        changed = (one != other).any(1)
        for before, after in zip(agent.get_log_probs_and_value(one), agent.get_log_probs_and_value(other)):
            before, after = (x[0] if isinstance(x, list) else x.unsqueeze(-1) for x in (before, after))
            assert changed.any() and ((before - after).abs().amax(1) > 1e-4).equal(changed)

    # Without a break for torch.compile; bytes become numbers there too.
    whole = torch.compile(lambda x: agent.get_value(agent.normalize_obs(x)), fullgraph=True, backend="aot_eager")
    rows = torch.from_numpy(np.stack(packed))
    torch.testing.assert_close(whole(rows), agent.get_value(agent.normalize_obs(rows)))


def test_privileged_critic(tmp_path):
    module = with_recipes("ppo_continuous", "privileged_critic")
    args = module.Args(env_id="recipes/TwoViews-v0", runs_dir=str(tmp_path), **(SMALL | {"total_timesteps": 1280}))
    agent, run_dir = module.train(dataclasses.replace(args, learning_rate=3e-3))
    agent = module.load_agent(run_dir)
    obs = torch.randn(20, 3, requires_grad=True)  # "policy", then "critic", whatever the order in the space
    of_action = torch.autograd.grad(sum(x.sum() for x in agent.get_mean_and_log_std(obs)), obs)[0]
    of_value = torch.autograd.grad(agent.get_value(obs).sum(), obs)[0]
    assert (of_action[:, 2:] == 0).all() and (of_action[:, :2] != 0).all()
    assert (of_value != 0).all()
    raw_obs = np.random.default_rng(0).uniform(-1, 1, (5, 3)).astype(np.float32)
    np.testing.assert_array_equal(agent.predict(raw_obs[:, :2]), agent.predict(raw_obs))
    # The return is what the critic sees, and the critic has found that out.
    with torch.no_grad():
        raw_obs = torch.cat([torch.zeros(19, 2), torch.arange(-9, 10).unsqueeze(1)], 1)
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
