"""What only ppo_discrete.py has: categorical policies, action masks, images, Atari games."""

import json

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import TESTS, flags_of, golden
from torch import nn

import ppo_discrete as script


@pytest.fixture(name="script")
def only_script():
    return script


def policy(sizes):
    """An agent whose observations are its logits."""
    agent = script.Agent((int(sum(sizes)),), {"sizes": np.array(sizes), "start": np.zeros_like(sizes)}, script.Args())
    agent.actor, agent.critic = nn.Identity(), nn.Linear(int(sum(sizes)), 1)
    return agent


# ---------------------------------------------------------------------------------------------------- distribution


@pytest.mark.parametrize("case", ["categorical", "categorical_masked", "multidiscrete_masked"])
def test_golden(case):
    inputs, expected = golden(case)
    action = inputs["action"].long().reshape(len(inputs["logits"]), -1)
    agent = policy([int(n) for n in inputs.get("nvec", [inputs["logits"].shape[-1]])]).double()
    mask = inputs["mask"].bool() if "mask" in inputs else None
    _, log_prob, entropy, _ = agent.get_action_and_value(inputs["logits"], action, mask)
    torch.testing.assert_close(log_prob, expected["logprob"], atol=1e-9, rtol=0)
    torch.testing.assert_close(entropy, expected["entropy"], atol=1e-9, rtol=0)
    log_probs, _ = agent.get_log_probs_and_value(inputs["logits"], mask)
    for name, found in zip(["probs"] if "probs" in expected else ["probs_dim0", "probs_dim1"], log_probs):
        torch.testing.assert_close(found.exp(), expected[name], atol=1e-9, rtol=0)
        if mask is not None:
            assert ((found.exp() == 0) == (expected[name] == 0)).all()  # exactly


@pytest.mark.parametrize("sizes", [[2, 3], [3, 3]])
def test_predict_takes_masks_as_environments_give_them(sizes):
    """A tuple or list with an array for each dimension, or one array; of many environments, one for each."""
    agent = policy(sizes)
    logits = torch.arange(sum(sizes), dtype=torch.float32).numpy()
    masks = tuple(np.array([1] * (n - 1) + [0], np.int8) for n in sizes)
    pair = np.empty(2, object)  # as a vector of environments gathers tuples
    pair[:] = [masks, masks]
    flat = np.hstack(masks)
    for mask, rows in ((masks, pair), (list(masks), [list(masks)] * 2), (flat, np.stack([flat] * 2))):
        assert agent.predict(logits, action_mask=mask).tolist() == [n - 2 for n in sizes]
        assert agent.predict(np.stack([logits] * 2), action_mask=rows).tolist() == [[n - 2 for n in sizes]] * 2


def test_actions_of_unsigned_types():
    """torch cannot add them; the environment gets what its space says."""
    space = gym.spaces.MultiDiscrete([2, 3], dtype=np.uint16, start=[1, 5])
    agent = script.Agent((3,), script.describe_actions(space), script.Args())
    actions = [agent.predict(raw_obs, deterministic=False) for raw_obs in np.random.default_rng(0).normal(size=(50, 3))]
    assert all(space.contains(action) for action in actions) and len({tuple(action) for action in actions}) == 6


def test_masked_choices_have_no_gradient():
    """Neither through the log-probability nor through the entropy; and nothing is NaN."""
    logits = torch.randn(5, 6, requires_grad=True)
    mask = torch.tensor([1, 0, 0, 1, 0, 1]).bool().expand(5, 6)
    action = torch.tensor([[0, 1, 1]]).expand(5, 3)
    _, log_prob, entropy, _ = policy([2, 2, 2]).get_action_and_value(logits, action, mask)
    (gradient,) = torch.autograd.grad((log_prob + entropy).sum(), logits)
    assert (gradient == 0).all()  # one choice is left in each dimension
    mask = torch.tensor([1, 1, 0, 1, 1, 1]).bool().expand(5, 6)
    _, log_prob, entropy, _ = policy([3, 3]).get_action_and_value(logits, action[:, :2], mask)
    (gradient,) = torch.autograd.grad((log_prob + entropy).sum(), logits)
    assert gradient.isfinite().all() and ((gradient == 0) == ~mask).all()


def test_samples_are_never_forbidden():
    """1e5 samples under random masks, also of logits that want nothing but what is forbidden."""
    torch.manual_seed(0)
    sizes, agent = [4, 2, 5], policy([4, 2, 5])
    mask = torch.rand(100_000, 11) < 0.5
    mask[:, [0, 4, 6]] |= ~torch.stack([part.any(-1) for part in mask.split(sizes, -1)], -1)
    logits = torch.where(torch.rand(100_000, 1) < 0.5, 50.0 * ~mask, 3 * torch.randn(100_000, 11))
    action, log_prob, _, _ = agent.get_action_and_value(logits, action_mask=mask)
    for part, choice in zip(mask.split(sizes, -1), action.unbind(-1)):
        assert part.gather(-1, choice.unsqueeze(-1)).all()
    assert log_prob.isfinite().all()
    best = agent.predict(logits, action_mask=mask)
    for part, choice in zip(mask.split(sizes, -1), torch.tensor(best).unbind(-1)):
        assert part.gather(-1, choice.unsqueeze(-1)).all()


def test_sampled_frequencies():
    """Each dimension has a softmax of its own: the golden case of rl4burn's error, and random logits with a mask,
    against torch.distributions. 200,000 samples: the standard deviation of a frequency is below 0.0012."""
    torch.manual_seed(0)
    inputs, expected = golden("rl4burn_multidiscrete_sampling_bug")
    logits = inputs["logits"].float().expand(200_000, 5)
    action = policy([2, 3]).get_action_and_value(logits)[0]
    for k, size in enumerate((2, 3)):
        frequencies = action[:, k].bincount(minlength=size) / len(action)
        torch.testing.assert_close(frequencies.double(), expected[f"correct_dim{k}"], atol=0.006, rtol=0)
    logits, mask = torch.randn(9), torch.tensor([1, 1, 0, 1, 1, 1, 0, 1, 1]).bool()
    action, log_prob, entropy, _ = policy([4, 5]).get_action_and_value(
        logits.expand(200_000, 9), action_mask=mask.expand(200_000, 9)
    )
    oracles = [
        torch.distributions.Categorical(logits=part.masked_fill(~allowed, -torch.inf))
        for part, allowed in zip(logits.split([4, 5]), mask.split([4, 5]))
    ]
    for k, oracle in enumerate(oracles):
        frequencies = action[:, k].bincount(minlength=len(oracle.probs)) / len(action)
        torch.testing.assert_close(frequencies, oracle.probs, atol=0.006, rtol=0)
    torch.testing.assert_close(log_prob, sum(oracle.log_prob(action[:, k]) for k, oracle in enumerate(oracles)))
    probabilities = [oracle.probs[oracle.probs > 0] for oracle in oracles]
    torch.testing.assert_close(entropy[0], -sum((p * p.log()).sum() for p in probabilities))


# ---------------------------------------------------------------------------------------------------- masks


class Masked(gym.Env):
    """Every state allows other choices, the first of an episode too, and the one that was truncated has none left;
    refuses a forbidden choice. The return is the number of steps in which the highest allowed choices were taken."""

    def __init__(self, form="flat"):
        self.observation_space = gym.spaces.Box(0, 1, (5,), np.float32)
        self.action_space, self.form = gym.spaces.MultiDiscrete([3, 2]), form

    def observe(self):
        self.masks = [self.np_random.integers(0, 2, size, dtype=np.int8) for size in (3, 2)]
        for mask in self.masks:
            mask[self.np_random.integers(len(mask))] = 1
        flat = np.concatenate(self.masks)
        form = {
            "flat": flat,
            "tuple": tuple(self.masks),
            "list": flat.tolist(),
            "lists": [x.tolist() for x in self.masks],
        }
        form |= {"row": flat[None], "short": flat[:-1], "none": flat * 0, "number": 1}
        return flat.astype(np.float32), {"action_mask": form[self.form]}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observe()

    def step(self, action):
        assert all(mask[choice] for mask, choice in zip(self.masks, action)), "a forbidden choice"
        reward = float(all(not mask[choice + 1 :].any() for mask, choice in zip(self.masks, action)))
        self.steps += 1
        obs, infos = self.observe()
        ended = self.steps == 5
        if ended and self.form in ("flat", "tuple", "list"):  # a vector mixes these, but no rows and lists of lists
            infos["action_mask"] = np.zeros(5, np.int8)
        return obs, reward, False, ended, infos


gym.register("masks/Masked-v0", Masked)


@pytest.mark.parametrize(
    "form, async_envs", [*((form, False) for form in ("flat", "tuple", "list", "lists", "row")), ("tuple", True)]
)
def test_masks_reach_the_environment(small_args, form, async_envs):
    """Over rollouts and episodes, in training and in evaluation: the environment refuses what it forbids."""
    env_kwargs = json.dumps({"form": form})
    agent, _ = script.train(small_args(env_id="masks/Masked-v0", env_kwargs=env_kwargs, async_envs=async_envs))
    for deterministic in (True, False):
        script.evaluate(agent, "masks/Masked-v0", 5, 0, deterministic)


def test_without_masks_the_environment_is_not_obeyed(small_args):
    with pytest.raises(AssertionError, match="a forbidden choice"):
        script.train(small_args(env_id="masks/Masked-v0", mask_actions=False))


@pytest.mark.parametrize("norm_obs", [False, True])
def test_update_sees_the_masks_of_acting(small_args, minibatches, norm_obs):
    """In the first minibatch of every iteration no ratio leaves the narrowest range of clipping, with masks that differ
    from state to state; and the masks it has are those that the observations, which show them, had."""
    script.train(small_args(env_id="masks/Masked-v0", norm_obs=norm_obs, clip_coef=1e-5))
    assert len(minibatches) == 4 * 2 * 4  # iterations, epochs, minibatches
    for (_, _, _, mb_obs, *_, mb_masks), _ in minibatches:
        assert mb_masks.any() and not mb_masks.all()
        if not norm_obs:
            assert torch.equal(mb_masks, mb_obs.bool())
    metrics = [metrics for _, (_, metrics) in minibatches]
    assert all(first["clipfrac"] == 0 for first in metrics[::8])
    assert metrics[7]["approx_kl"] > 1e-6  # while the last minibatch finds another agent


def test_learns_under_masks(small_args):
    """The optimum is known: the highest allowed choices in all five steps."""
    settings = {"num_envs": 16, "num_steps": 32, "update_epochs": 10, "learning_rate": 3e-3, "total_timesteps": 16_000}
    agent, _ = script.train(small_args(env_id="masks/Masked-v0", **settings))
    assert script.evaluate(agent, "masks/Masked-v0", 50, 0).mean() > 4.9


@pytest.mark.parametrize(
    "form, message",
    [("short", "has 4 entries, the actions need 5"), ("number", "has 1 entries"), ("none", "forbids every")],
)
def test_impossible_masks(main, tmp_path, form, message):
    flags = flags_of(env_id="masks/Masked-v0", env_kwargs=json.dumps({"form": form}), runs_dir=tmp_path, compile=False)
    failed = main(script, *flags)
    assert failed.returncode == 2 and message in failed.stderr


def test_masks_of_some_environments_only():
    infos = {"action_mask": np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0]]), "_action_mask": np.array([True, False, True])}
    masks = script.read_action_masks(infos, 3, [3])
    assert masks.tolist() == [[True, False, True], [True] * 3, [False, True, False]]
    assert script.read_action_masks({}, 2, [2, 3]).all()


def test_discrete_that_does_not_start_at_zero(small_args):
    """The environment sees 5, 6, 7; a single action is a plain number, as env.step wants it."""

    class Start(gym.Env):
        observation_space, action_space = gym.spaces.Discrete(4), gym.spaces.Discrete(3, start=5)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return 0, {}

        def step(self, action):
            assert action in (5, 6, 7)
            return 1, float(action == 7), True, False, {}

    if "discrete/Start-v0" not in gym.registry:
        gym.register("discrete/Start-v0", Start)
    agent, run_dir = script.train(small_args(env_id="discrete/Start-v0", total_timesteps=4096, learning_rate=3e-3))
    obs = np.eye(4)[[0, 0]]
    for actor in (agent, script.load_agent(run_dir)):
        assert actor.predict(obs).tolist() == [7, 7] and {actor.predict(obs[0]): "can be a key"}[7]


# ---------------------------------------------------------------------------------------------------- images


class Images(gym.Env):
    """A picture that is bright on the side that has to be chosen."""

    def __init__(self, shape=(40, 48, 3)):
        self.observation_space = gym.spaces.Box(0, 255, shape, np.uint8)
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.side = int(self.np_random.integers(2))
        image = np.zeros(self.observation_space.shape, np.uint8)
        bright = slice(24 * self.side, 24 * self.side + 24)
        image[(..., bright) if image.shape[0] == 3 else (slice(None), bright)] = 255
        return image, {}

    def step(self, action):
        image = np.full(self.observation_space.shape, 7, np.uint8)
        return image, float(action == self.side), False, True, {}


gym.register("images/Last-v0", Images)
gym.register("images/First-v0", Images, kwargs={"shape": (3, 40, 48)})
gym.register("images/Small-v0", Images, kwargs={"shape": (7, 48, 3)})
gym.register("images/Middle-v0", Images, kwargs={"shape": (40, 3, 48)})


@pytest.mark.parametrize("name", ["Last", "First"])
def test_images(small_args, rollouts, name):
    """Channels first or last: stored as bytes, learned, saved, loaded, evaluated. The final observations that the
    critic sees are those that the environment ended in."""
    agent, run_dir = script.train(small_args(env_id=f"images/{name}-v0", total_timesteps=1024, update_epochs=4))
    (_, obs, _, final_obs, *_), _ = rollouts[0]
    assert obs.dtype == final_obs.dtype == torch.uint8 and (final_obs == 7).all() and len(final_obs) == 64
    assert script.evaluate(script.load_agent(run_dir), f"images/{name}-v0", 20, 0).mean() == 1
    assert agent.obs_rms.count.item() == pytest.approx(1e-4)


def test_channel_order_does_not_matter():
    """The same weights on the same picture, its channels first or last."""
    first, last = script.NatureCNN((3, 40, 48)), script.NatureCNN((40, 48, 3))
    last.load_state_dict(first.state_dict())
    image = torch.randint(0, 256, (2, 5, 3, 40, 48), dtype=torch.uint8)
    features = first(image)
    assert features.shape == (2, 5, 512)
    torch.testing.assert_close(features, last(image.movedim(-3, -1)))
    torch.testing.assert_close(features[0, 0], first(image[0, 0]), atol=1e-5, rtol=1e-4)


def test_network_of_mnih_et_al():
    """84 x 84 x 4 -> 32 of 8 x 8 / 4 -> 64 of 4 x 4 / 2 -> 64 of 3 x 3 -> 512; pixels from 0 to 1."""
    network = script.NatureCNN((4, 84, 84))
    shapes = [tuple(layer.weight.shape) for layer in network.layers if hasattr(layer, "weight")]
    assert shapes == [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (512, 3136)]
    seen = []
    network.layers.register_forward_pre_hook(lambda layers, inputs: seen.append(inputs[0]))
    network(torch.full((1, 4, 84, 84), 255, dtype=torch.uint8))
    assert (seen[0] == 1).all()


@pytest.mark.parametrize("name, size", [("Small", 7 * 48 * 3), ("Middle", 40 * 3 * 48)])
def test_what_is_no_image_is_flattened(small_args, name, size):
    """7 x 48 pixels are too few for the network, and channels in the middle are none: vectors."""
    agent, _ = script.train(small_args(env_id=f"images/{name}-v0", total_timesteps=64))
    assert not agent.sees_images and agent.obs_rms.mean.shape == (size,)
    assert agent.obs_rms.count.item() == pytest.approx(64, abs=1e-3)


def test_images_through_the_wrappers_of_gymnasium(small_args):
    """An environment registered with wrappers, as README shows it: grey, 84 x 84, the last four frames."""
    wrappers = (
        gym.wrappers.GrayscaleObservation.wrapper_spec(),
        gym.wrappers.ResizeObservation.wrapper_spec(shape=(84, 84)),
        gym.wrappers.FrameStackObservation.wrapper_spec(stack_size=4),
    )
    if "images/Wrapped-v0" not in gym.registry:
        gym.register("images/Wrapped-v0", Images, kwargs={"shape": (120, 100, 3)}, additional_wrappers=wrappers)
    agent, _ = script.train(small_args(env_id="images/Wrapped-v0", total_timesteps=64))
    assert agent.sees_images and agent.obs_rms.mean.shape == (4, 84, 84)
    assert script.evaluate(agent, "images/Wrapped-v0", 2, 0).shape == (2,)


# ---------------------------------------------------------------------------------------------------- CleanRL


def test_first_iteration_of_cleanrl(minibatches, monkeypatch, tmp_path):
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

    class Replay(gym.vector.VectorEnv):
        single_observation_space, single_action_space = gym.spaces.Box(-9, 9, (4,)), gym.spaces.Discrete(2)

        def __init__(self, num_envs, autoreset_mode):
            self.num_envs, self.metadata = num_envs, {"autoreset_mode": autoreset_mode}

        def reset(self, *, seed=None, options=None):
            self.t = 0
            return obs[0], {}

        def step(self, given):
            assert (given == actions[self.t]).all()
            self.t += 1
            return obs[self.t], rewards[self.t - 1], terminations[self.t - 1], np.zeros(N, bool), {}

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

    order, shuffle = np.arange(T * N), np.random.RandomState(1)

    def next_order(size):
        shuffle.shuffle(order)
        return torch.tensor(order)

    gym.register("cleanrl/Replay-v0", vector_entry_point=Replay)
    monkeypatch.setattr(script, "Agent", SameWeights)
    monkeypatch.setattr(torch, "randperm", next_order)
    flags = "--clip-vloss --no-norm-obs --no-norm-reward --update-epochs 4 --num-minibatches 4 --learning-rate 2.5e-4"
    flags += f" --ent-coef 0.01 --num-envs {N} --num-steps {T} --total-timesteps {T * N}"
    flags += f" --env-id cleanrl/Replay-v0 --no-compile --runs-dir {tmp_path}"
    agent, _ = script.train(script.parse_args(flags.split()))
    assert len(minibatches) == len(expected["minibatches"]) == 16
    for (_, (_, ours)), theirs in zip(minibatches, expected["minibatches"]):
        assert {name: value.item() for name, value in ours.items()} == pytest.approx(theirs, abs=1e-6)
    for name in ("actor.4.weight", "critic.4.weight"):
        torch.testing.assert_close(agent.state_dict()[name], torch.tensor(expected[name]), atol=1e-6, rtol=0)
