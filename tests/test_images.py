"""Observations that are images: which ones the Nature CNN reads, and what it learns."""

import gymnasium as gym
import numpy as np
import probes
import pytest
import torch
from conftest import DISCRETE, probe


@DISCRETE
@pytest.mark.parametrize("name", ["Last", "First"])
def test_images(script, small_args, rollouts, name):
    """Channels first or last: stored as bytes, learned, saved, loaded, evaluated. The final observations that the
    critic sees are those that the environment ended in."""
    agent, run_dir = script.train(small_args(env_id=f"images/{name}-v0", total_timesteps=1024, update_epochs=4))
    (_, obs, _, final_obs, *_), _ = rollouts[0]
    assert obs.dtype == final_obs.dtype == torch.uint8 and (final_obs == 7).all() and len(final_obs) == 64
    assert script.evaluate(script.load_agent(run_dir), f"images/{name}-v0", 20, 0).mean() == 1
    assert agent.obs_rms.count.item() == pytest.approx(1e-4)


@DISCRETE
def test_channel_order_does_not_matter(script):
    """The same weights on the same picture, its channels first or last."""
    first, last = script.NatureCNN((3, 40, 48)), script.NatureCNN((40, 48, 3))
    last.load_state_dict(first.state_dict())
    image = torch.randint(0, 256, (2, 5, 3, 40, 48), dtype=torch.uint8)
    features = first(image)
    assert features.shape == (2, 5, 512)
    torch.testing.assert_close(features, last(image.movedim(-3, -1)))
    torch.testing.assert_close(features[0, 0], first(image[0, 0]), atol=1e-5, rtol=1e-4)


@DISCRETE
def test_network_of_mnih_et_al(script):
    """84 x 84 x 4 -> 32 of 8 x 8 / 4 -> 64 of 4 x 4 / 2 -> 64 of 3 x 3 -> 512; pixels from 0 to 1."""
    network = script.NatureCNN((4, 84, 84))
    shapes = [tuple(layer.weight.shape) for layer in network.layers if hasattr(layer, "weight")]
    assert shapes == [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (512, 3136)]
    seen = []
    network.layers.register_forward_pre_hook(lambda layers, inputs: seen.append(inputs[0]))
    network(torch.full((1, 4, 84, 84), 255, dtype=torch.uint8))
    assert (seen[0] == 1).all()


@DISCRETE
@pytest.mark.parametrize("name, size", [("Small", 7 * 48 * 3), ("Middle", 40 * 3 * 48)])
def test_what_is_no_image_is_flattened(script, small_args, name, size):
    """7 x 48 pixels are too few for the network, and channels in the middle are none: vectors."""
    agent, _ = script.train(small_args(env_id=f"images/{name}-v0", total_timesteps=64))
    assert not agent.sees_images and agent.obs_rms.mean.shape == (size,)
    assert agent.obs_rms.count.item() == pytest.approx(64, abs=1e-3)


@DISCRETE
def test_images_through_the_wrappers_of_gymnasium(script, small_args):
    """An environment registered with wrappers, as README shows it: grey, 84 x 84, the last four frames."""
    wrappers = (
        gym.wrappers.GrayscaleObservation.wrapper_spec(),
        gym.wrappers.ResizeObservation.wrapper_spec(shape=(84, 84)),
        gym.wrappers.FrameStackObservation.wrapper_spec(stack_size=4),
    )
    if "images/Wrapped-v0" not in gym.registry:
        gym.register("images/Wrapped-v0", probes.Images, kwargs={"shape": (120, 100, 3)}, additional_wrappers=wrappers)
    agent, _ = script.train(small_args(env_id="images/Wrapped-v0", total_timesteps=64))
    assert agent.sees_images and agent.obs_rms.mean.shape == (4, 84, 84)
    assert script.evaluate(agent, "images/Wrapped-v0", 2, 0).shape == (2,)


class Drawn(probes.Target):
    """Its observations are images, which are too small for the CNN."""

    def __init__(self, discrete):
        super().__init__(discrete)
        self.observation_space = gym.spaces.Box(0, 255, (4, 4, 3), np.uint8)

    def reset(self, **options):
        super().reset(**options)
        return self.observation_space.sample(), {}

    def step(self, action):
        _, *rest = super().step(action)
        return self.observation_space.sample(), *rest


probes.register("Drawn", Drawn)


def test_images_that_are_flattened(script, small_args, capsys):
    envs = script.make_envs(small_args(env_id=probe(script, "Drawn")), 2)
    assert envs.single_observation_space.shape == (48,)
    assert "images are flattened, see docs/your-environment.md" in capsys.readouterr().err
