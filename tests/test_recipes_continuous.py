"""Recipes for ppo_continuous.py, and two for all scripts: each diff applies, is short, trains, does what it says."""

import dataclasses
import inspect
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import REAL_ENV, SMALL, scalars
from torch.distributions import AffineTransform, Independent, Normal, TanhTransform, TransformedDistribution

from recipes import with_recipes


class TwoViews(gym.Env):
    """The return is what only the critic sees, minus the squared distance of the action from half the policy's view."""

    observation_space = gym.spaces.Dict(
        critic=gym.spaces.Box(-9, 9, (1,), np.float32), policy=gym.spaces.Box(-1, 1, (2,), np.float32)
    )
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.policy = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        self.critic = self.np_random.uniform(-9, 9, 1).astype(np.float32)
        return {"policy": self.policy, "critic": self.critic}, {}

    def step(self, action):
        reward = float(self.critic[0] - np.square(action - self.policy / 2).sum())
        return {"policy": self.policy, "critic": self.critic}, reward, True, False, {}


class Picture(gym.Env):
    """An image whose brightness is the best action; episodes end at a time limit of 5."""

    observation_space = gym.spaces.Box(0, 255, (40, 44, 3), np.uint8)
    action_space = gym.spaces.Box(0, 1, (1,), np.float32)

    def observe(self):
        self.level = self.np_random.integers(256)
        return np.full((40, 44, 3), self.level, np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, action):
        reward = -abs(float(action[0]) - self.level / 255)
        return self.observe(), reward, False, False, {}


gym.register("recipes/TwoViews-v0", TwoViews)
gym.register("recipes/Picture-v0", Picture, max_episode_steps=5)

# name: environment and arguments of the ten iterations
CONTINUOUS = {
    "squashed_gaussian": ("box/Target-v0", {}),
    "gsde": ("InvertedPendulum-v4", {"sde_sample_freq": 4}),
    "beta_policy": ("box/Target-v0", {}),
    "privileged_critic": ("recipes/TwoViews-v0", {}),
    "entropy_schedule": ("InvertedPendulum-v4", {}),
    "image_box": ("recipes/Picture-v0", {"num_steps": 4}),
    "layer_norm": ("InvertedPendulum-v4", {"hidden_sizes": (32, 32)}),
    "popart": ("InvertedPendulum-v4", {}),
    "symmetry_loss": ("Walker2d-v5", {}),
}
ALL_SCRIPTS = ["clip_only_value_loss", "dual_clip"]
PATCHED = [("ppo_continuous", name) for name in CONTINUOUS] + [(s, name) for name in ALL_SCRIPTS for s in REAL_ENV]


@pytest.fixture(scope="session")
def patched(tmp_path_factory):
    """A function that gives a script with a recipe in it, imported once: patched("gsde")"""
    modules = {}

    def get(name, script="ppo_continuous"):
        if (name, script) not in modules:
            modules[name, script] = with_recipes(tmp_path_factory.mktemp(name), script, name)
        return modules[name, script]

    return get


def make_agent(module, obs_size=3, low=(-1.0, -1.0), high=(1.0, 1.0), **args):
    torch.manual_seed(0)
    return module.Agent((obs_size,), np.array(low, np.float32), np.array(high, np.float32), module.Args(**args))


def shake(agent, scale=0.5):
    """Move all weights: the first policy is nearly the same in every state."""
    torch.manual_seed(1)
    for parameter in agent.parameters():
        parameter.data += scale * torch.randn_like(parameter) / math.sqrt(parameter.shape[-1])
    return agent


def minibatch(size=32, obs_size=3, action_size=2):
    torch.manual_seed(2)
    values, advantages, returns = torch.randn(3, size)
    log_probs = torch.full((size,), -2.0)
    return torch.randn(size, obs_size), torch.rand(size, action_size), log_probs, values, advantages, returns


# ------------------------------------------------------------------------------------------------------- every recipe


@pytest.mark.parametrize("script, name", PATCHED)
def test_trains_resumes_and_loads(patched, tmp_path, script, name):
    """Ten iterations and two more after a resumption. The ratio of every first minibatch is 1: none is clipped, though
    clipping begins 1e-4 from it. The saved agent acts."""
    module = patched(name, script)
    env_id, changes = CONTINUOUS.get(name, (REAL_ENV[script], {"clip_vloss": True, "vf_clip_coef": 0.2}))
    args = module.Args(env_id=env_id, runs_dir=str(tmp_path), **(SMALL | {"checkpoint_interval": 3} | changes))
    steps = 10 * args.num_envs * args.num_steps
    first = {"clip_coef": 1e-4, "num_minibatches": 1, "update_epochs": 1, "total_timesteps": steps}
    _, run_dir = module.train(dataclasses.replace(args, **first))
    assert [share for _, share in scalars(run_dir)["losses/clipfrac"]] == [0.0] * 10
    resumed = dataclasses.replace(args, resume=str(run_dir), total_timesteps=steps * 12 // 10)
    agent, run_dir = module.train(resumed)
    assert scalars(run_dir)["losses/approx_kl"][-1][1] > 0
    loaded = module.load_agent(run_dir)
    for key, value in agent.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[key], value, rtol=0, atol=0, equal_nan=True)
    assert len(module.evaluate(loaded, env_id, 1, seed=1)) == 1


# -------------------------------------------------------------------------------------------------- squashed_gaussian


def test_squashed_gaussian_has_the_exact_density(patched):
    low, high = (-2.0, -1.0), (3.0, 0.5)
    agent = shake(make_agent(patched("squashed_gaussian"), low=low, high=high))
    obs, (low, high) = torch.randn(400, 3), torch.tensor([low, high]).double()
    with torch.no_grad():
        mean, log_std = agent.get_mean_and_log_std(obs)
        before_tanh = agent.get_action_and_value(obs)[0]
        before_tanh[:20] *= 8  # far out, where 1 - tanh^2 is 0 in float32, or exp overflows
        before_tanh[0] = -60
        log_prob = agent.get_action_and_value(obs, before_tanh)[1]
    # The caches save an inverse of tanh, which would lose these digits.
    transforms = [TanhTransform(cache_size=1), AffineTransform((low + high) / 2, (high - low) / 2, cache_size=1)]
    normal = Independent(Normal(mean.double(), log_std.double().exp()), 1)
    reference = TransformedDistribution(normal, transforms)
    env_action = before_tanh.double()
    for transform in reference.transforms:
        env_action = transform(env_action)
    torch.testing.assert_close(log_prob.double(), reference.log_prob(env_action), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(agent.to_env_action(before_tanh).double(), env_action, rtol=0, atol=1e-6)
    assert ((agent.to_env_action(before_tanh) >= low) & (agent.to_env_action(before_tanh) <= high)).all()


def test_squashed_gaussian_integrates_to_one(patched):
    """The density over what the environment gets, by sums of it over the interval."""
    agent = shake(make_agent(patched("squashed_gaussian"), low=[-2.0], high=[3.0], log_std_min=None, log_std_max=None))
    agent.log_std.data.fill_(0.3)
    before_tanh = torch.linspace(-9, 9, 20001).unsqueeze(-1)
    with torch.no_grad():
        density = agent.get_action_and_value(torch.ones(20001, 3), before_tanh)[1].exp()
        entropy = agent.get_action_and_value(torch.ones(20001, 3), before_tanh)[2].mean()
    action = agent.to_env_action(before_tanh).squeeze(-1)
    assert action[0] == pytest.approx(-2, abs=1e-5) and action[-1] == pytest.approx(3, abs=1e-5)
    assert torch.trapezoid(density, action) == pytest.approx(1, abs=1e-3)
    assert torch.trapezoid(-density * density.clamp(min=1e-30).log(), action) == pytest.approx(entropy.item(), abs=0.03)


def test_squashed_gaussian_entropy_pulls_back_from_the_bounds(patched):
    agent = make_agent(patched("squashed_gaussian"))
    agent.actor[-1].bias.data.copy_(torch.tensor([2.0, -2.0]))
    agent.get_action_and_value(torch.randn(500, 3))[2].mean().backward()
    assert agent.actor[-1].bias.grad[0] < -0.5 and agent.actor[-1].bias.grad[1] > 0.5


# --------------------------------------------------------------------------------------------------------------- gsde


def test_gsde_noise_is_a_function_of_the_state(patched):
    """Within one matrix: equal states, equal noise; and it is the features times a matrix of deviation sigma."""
    agent = shake(make_agent(patched("gsde"), log_std_min=None, log_std_max=None))
    with torch.no_grad():
        obs, matrix = torch.randn(50, 3), torch.randn(64, 2)
        matrices = matrix.expand(50, 64, 2)
        noise = agent.explore(obs, matrices) - agent.get_mean_and_log_std(obs)[0]
        order = torch.randperm(50)
        again = agent.explore(obs[order], matrices) - agent.get_mean_and_log_std(obs[order])[0]
        torch.testing.assert_close(again, noise[order])
        torch.testing.assert_close(noise, agent.actor[:4](obs) @ (agent.log_std.exp() * matrix), rtol=1e-3, atol=1e-4)
        near = agent.explore(obs + 1e-3, matrices) - agent.get_mean_and_log_std(obs + 1e-3)[0]
        assert (near - noise).abs().max() < 0.02 * noise.abs().max()


@pytest.mark.parametrize("bounds", [(None, None), (-1.5, -0.5)])
def test_gsde_log_prob_is_that_of_the_noise_over_all_matrices(patched, bounds):
    agent = shake(make_agent(patched("gsde"), log_std_min=bounds[0], log_std_max=bounds[1]), 1.0)
    with torch.no_grad():
        agent.log_std += 0.5
        agent.anneal_std(0.5)
        for obs in torch.randn(3, 1, 3):
            obs = obs.expand(20000, 3)
            actions = agent.explore(obs, torch.randn(20000, 64, 2))
            empirical = Independent(Normal(actions.mean(0), actions.std(0)), 1)
            log_prob = agent.get_action_and_value(obs, actions)[1]
            torch.testing.assert_close(log_prob.mean(), empirical.log_prob(actions).mean(), rtol=0, atol=0.02)
            difference = log_prob - empirical.log_prob(actions)
            assert difference.std() < 0.1
    features = agent.actor[:-1](torch.randn(5, 3))
    features.retain_grad()
    log_std = agent.get_mean_and_log_std(torch.randn(5, 3))[1]
    gradients = torch.autograd.grad(log_std.sum(), [agent.actor[0].weight, agent.log_std], allow_unused=True)
    assert gradients[0] is None and (gradients[1] != 0).all()  # learned through sigma alone


class Enough(Exception):
    pass


class Still(gym.Env):
    """Nothing changes. It remembers the actions, and ends the run at the 49th."""

    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Box(-9, 9, (2,), np.float32)
    actions = []  # noqa: RUF012

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.full(3, 0.5, np.float32), {}

    def step(self, action):
        if len(self.actions) == 48:
            raise Enough
        self.actions.append(action.copy())
        return np.full(3, 0.5, np.float32), 0.0, False, False, {}


gym.register("recipes/Still-v0", Still)


def test_gsde_matrices_stay_for_some_steps(patched, tmp_path):
    """In an environment that stands still, an action changes in every fourth step, and only there; compiled."""
    module = patched("gsde")
    args = module.Args("still", str(tmp_path), env_id="recipes/Still-v0", sde_sample_freq=4, norm_obs=False)
    with pytest.raises(Enough):  # within the first rollout: only acting is compiled
        module.train(dataclasses.replace(args, **SMALL | {"compile": True}))
    actions = np.array(Still.actions).reshape(12, 4, 2)  # step, environment
    same = np.isclose(actions[1:], actions[:-1], atol=1e-6).all(axis=(1, 2))
    assert same.tolist() == [(t + 1) % 4 != 0 for t in range(11)]
    assert len({tuple(action) for action in actions[0].round(6)}) == 4  # environments have matrices of their own


# -------------------------------------------------------------------------------------------------------- beta_policy


def test_beta_policy_has_the_exact_density(patched):
    low, high = (-2.0, -1.0), (3.0, 0.5)
    agent = shake(make_agent(patched("beta_policy"), low=low, high=high), 1.0)
    obs = torch.randn(500, 3)
    with torch.no_grad():
        distribution = agent.get_distribution(obs)
        alpha, beta = distribution.concentration1, distribution.concentration0
        assert (alpha > 1).all() and (beta > 1).all() and alpha.std() > 0.1
        action, log_prob, entropy, _ = agent.get_action_and_value(obs)
        env_action = agent.to_env_action(action)
    low, high = torch.tensor([low, high])
    assert (env_action >= low).all() and (env_action <= high).all()
    affine = AffineTransform(low, high - low, event_dim=1)
    reference = TransformedDistribution(Independent(torch.distributions.Beta(alpha.float(), beta.float()), 1), [affine])
    torch.testing.assert_close(log_prob, reference.log_prob(env_action), rtol=1e-3, atol=1e-3)
    with torch.no_grad():  # the entropy, by samples of one state
        samples = agent.get_action_and_value(obs[:1].expand(50000, 3))[1]
    assert -samples.mean() == pytest.approx(entropy[0].item(), abs=0.03)


@pytest.mark.parametrize("remaining", [1.0, 0.3, 0.001])
def test_beta_policy_integrates_to_one_and_keeps_its_peak(patched, remaining):
    agent = shake(make_agent(patched("beta_policy"), low=[-2.0], high=[3.0], norm_obs=False), 1.0)
    agent.anneal_std(remaining)
    grid = torch.linspace(1e-6, 1 - 1e-6, 200001).unsqueeze(-1)
    env_action = agent.to_env_action(grid).squeeze(-1)
    assert env_action[0] == pytest.approx(-2, abs=1e-4) and env_action[-1] == pytest.approx(3, abs=1e-4)
    with torch.no_grad():
        density = agent.get_action_and_value(torch.ones(200001, 3), grid)[1].exp()
        entropy = agent.get_action_and_value(torch.ones(1, 3), grid[:1])[2].item()
    assert torch.trapezoid(density, env_action) == pytest.approx(1, abs=2e-3)
    assert torch.trapezoid(-density * density.clamp(min=1e-30).log(), env_action) == pytest.approx(entropy, abs=5e-3)
    assert agent.predict(np.ones(3))[0] == pytest.approx(env_action[density.argmax()].item(), abs=2e-3)
    peak, deviations = agent.predict(np.ones(3)), []
    for narrow in (remaining / 10, remaining / 20):  # half the deviation, the same peak
        agent.anneal_std(narrow)
        np.testing.assert_allclose(agent.predict(np.ones(3)), peak, atol=1e-5)
        deviations.append(agent.get_distribution(torch.ones(3)).stddev.item())
    assert deviations[1] == pytest.approx(deviations[0] / 2, rel=0.05)


# -------------------------------------------------------------------------------------------------- privileged_critic


def test_privileged_critic(patched, tmp_path):
    module = patched("privileged_critic")
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


# --------------------------------------------------------------------------------------------------- entropy_schedule


def test_entropy_schedule_reaches_the_gradient(patched, tmp_path):
    """Nothing is learned: all runs have the same rollouts, and their gradients differ by the entropy bonus alone. The
    derivative of the entropy by each log_std is 1. Adam's running mean has the gradients, eager and compiled."""
    module = patched("entropy_schedule")

    def running_mean(compile, ent_coef, ent_coef_final):
        small = SMALL | {"compile": compile, "update_epochs": 1, "num_minibatches": 1, "max_grad_norm": 0.0}
        free = {"learning_rate": 0.0, "anneal_std": False, "log_std_max": None, "log_std_init": 0.0}
        bonus = {"ent_coef": ent_coef, "ent_coef_final": ent_coef_final}
        args = module.Args(env_id="box/Target-v0", runs_dir=str(tmp_path), **(small | free | bonus))
        agent, run_dir = module.train(args)
        mean = module.load_checkpoint(run_dir)["optimizer"]["state"][0]["exp_avg"]
        parts = mean.split([parameter.numel() for parameter in agent.parameters()])
        return dict(zip(dict(agent.named_parameters()), parts))["log_std"], scalars(run_dir)["charts/ent_coef"]

    without, _ = running_mean(False, 0.0, 0.0)
    coefficients = [0.8, 0.65, 0.5, 0.35]  # of four iterations; 0.2 comes after the last one
    expected = sum(0.1 * 0.9 ** (3 - i) * coefficient for i, coefficient in enumerate(coefficients))
    for compile in (False, True):
        mean, logged = running_mean(compile, 0.8, 0.2)
        torch.testing.assert_close(without - mean, torch.full((2,), expected), rtol=1e-4, atol=1e-6)
        assert [coefficient for _, coefficient in logged] == pytest.approx(coefficients)


# ---------------------------------------------------------------------------------------------------------- image_box


def test_image_box_shows_images_to_the_nature_cnn(patched, tmp_path, watch):
    import ppo_discrete

    module = patched("image_box")
    assert inspect.getsource(module.NatureCNN) == inspect.getsource(ppo_discrete.NatureCNN)
    torch.manual_seed(0)
    last = module.Agent((40, 44, 3), np.zeros(2, np.float32), np.ones(2, np.float32), module.Args())
    first = module.Agent((3, 40, 44), np.zeros(2, np.float32), np.ones(2, np.float32), module.Args())
    first.load_state_dict({k: v for k, v in last.state_dict().items() if "obs_rms" not in k}, strict=False)
    images = np.random.default_rng(0).integers(256, size=(5, 40, 44, 3), dtype=np.uint8)
    np.testing.assert_allclose(last.predict(images), first.predict(images.transpose(0, 3, 1, 2)), atol=1e-6)
    np.testing.assert_allclose(last.predict(images)[0], last.predict(images[0]), atol=1e-6)
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


# --------------------------------------------------------------------------------------------------------- layer_norm


def test_layer_norm_takes_the_scale_out_of_preactivations(patched):
    agent = make_agent(patched("layer_norm"), hidden_sizes=(16, 16))
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


# ------------------------------------------------------------------------------------------------------------- popart


def test_popart_preserves_values(patched):
    agent = shake(make_agent(patched("popart"), popart_memory=1000))
    obs, returns = torch.randn(100, 3), 50 + 20 * torch.randn(16, 100)
    for scale in (1, 100, 0.1):
        old_values, old_outputs, old_std = agent.get_value(obs), agent.critic(obs), agent.value_std()
        agent.update_value_statistics(scale * returns)
        assert (agent.critic(obs) - old_outputs).abs().max() > 0.1
        unit = max(old_std, agent.value_std())
        torch.testing.assert_close(agent.get_value(obs) / unit, old_values / unit, rtol=0, atol=1e-5)
    state = agent.state_dict()
    assert state["value_rms.mean"] != 0 and state["value_rms.var"] != 1


def test_popart_statistics_are_those_of_recent_returns(patched):
    agent = make_agent(patched("popart"), popart_memory=1600)
    returns = 50 + 20 * torch.randn(16, 100)
    agent.update_value_statistics(returns)
    assert agent.value_rms.mean.item() == pytest.approx(returns.mean().item(), rel=1e-3)
    assert agent.value_rms.var.item() == pytest.approx(returns.var().item(), rel=1e-2)
    for _ in range(9):
        agent.update_value_statistics(returns)
    agent.update_value_statistics(returns + 100)  # as many as are remembered
    assert agent.value_rms.mean.item() == pytest.approx(returns.mean().item() + 50, rel=1e-2)


def test_popart_update_does_not_see_the_scale_of_rewards(patched):
    """Rewards, values and returns 1000 times as large, with their statistics: the same gradient."""
    module = patched("popart")
    gradients = []
    for scale in (1.0, 1000.0):
        agent = shake(make_agent(module, clip_vloss=True, vf_clip_coef=0.2))
        agent.value_rms.mean.fill_(0.3 * scale)
        agent.value_rms.var.fill_(scale**2)
        obs, actions, log_probs, *rest = minibatch()
        loss, _ = module.ppo_loss(agent, agent.args, 1.0, obs, actions, log_probs, *(scale * x for x in rest))
        gradients.append(torch.autograd.grad(loss, list(agent.parameters())))
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    assert not module.Args().norm_reward


# ------------------------------------------------------------------------------------------------------ symmetry_loss


def test_symmetry_loss_of_a_symmetric_policy_is_zero(patched):
    module = patched("symmetry_loss")
    agent = shake(make_agent(module, 17, -np.ones(6), np.ones(6)))
    obs = torch.randn(64, 17)
    torch.testing.assert_close(module.mirror_obs(module.mirror_obs(obs)), obs)
    assert not torch.equal(module.mirror_obs(obs), obs)
    assert module.mirror_loss(agent, obs) > 1e-3

    class Symmetric(torch.nn.Module):
        def __init__(self, network):
            super().__init__()
            self.network = network

        def forward(self, obs):
            return self.network(obs) + module.mirror_action(self.network(module.mirror_obs(obs)))

    agent.actor = Symmetric(agent.actor)
    assert agent.get_mean_and_log_std(obs)[0].std() > 0.1
    assert module.mirror_loss(agent, obs) < 1e-10


def test_symmetry_loss_makes_a_policy_symmetric(patched):
    """Through ppo_loss, with everything else in it at weight 0."""
    module = patched("symmetry_loss")
    zero = {"vf_coef": 0.0, "ent_coef": 0.0, "kl_coef": 0.0}
    losses = {}
    for coefficient in (0.0, 1.0):
        agent = shake(make_agent(module, 17, -np.ones(6), np.ones(6), mirror_coef=coefficient, **zero))
        obs, actions, log_probs, values, _, returns = minibatch(200, 17, 6)
        optimizer = torch.optim.Adam(agent.parameters(), 1e-2)
        for _ in range(40):
            batch = obs, actions, log_probs, values, torch.zeros(200), returns
            loss, _ = module.ppo_loss(agent, agent.args, 1.0, *batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        mean = agent.get_mean_and_log_std(obs)[0]
        difference = agent.get_mean_and_log_std(module.mirror_obs(obs))[0] - module.mirror_action(mean)
        losses[coefficient] = (difference.square().mean() / mean.var(0).mean()).item()
    assert losses[1.0] < 0.1 * losses[0.0]


def test_symmetry_loss_mirrors_walker(patched, tmp_path):
    """The mirrored robot under the mirrored action goes to the mirrored next state, and statistics are symmetric."""
    module = patched("symmetry_loss")
    env = gym.make("Walker2d-v5").unwrapped
    random = np.random.default_rng(0)
    for _ in range(20):
        env.reset()
        qpos, qvel = env.init_qpos + random.uniform(-0.2, 0.2, 9), random.uniform(-1, 1, 9)
        action = random.uniform(-1, 1, 6)
        following = []
        for mirrored in (False, True):
            legs = [0, 1, 2, 6, 7, 8, 3, 4, 5] if mirrored else list(range(9))
            env.set_state(qpos[legs], qvel[legs])
            act = module.mirror_action(torch.from_numpy(action)).numpy() if mirrored else action
            following.append(torch.from_numpy(env.step(act)[0]))
        torch.testing.assert_close(module.mirror_obs(following[0]), following[1], rtol=1e-6, atol=1e-6)
    args = module.Args(env_id="Walker2d-v5", runs_dir=str(tmp_path), **SMALL)
    rms = module.train(args)[0].obs_rms
    torch.testing.assert_close(module.mirror_obs(rms.mean), rms.mean)
    torch.testing.assert_close(module.mirror_obs(rms.var), rms.var)  # signs are all +1 here
    assert rms.mean.abs().min() > 0


# ------------------------------------------------------------------------------------ clip_only_value_loss, dual_clip


@pytest.mark.parametrize("script", REAL_ENV)
def test_clip_only_value_loss(patched, script):
    """Old value 0 and range 0.2. By hand: new value 1 counts as 0.2; its error to -1 is 1.2, to 0.3 it is 0.1."""
    loss = patched("clip_only_value_loss", script).clipped_value_loss
    new = torch.tensor([1.0, 1.0, 0.1], requires_grad=True)
    value = loss(new, torch.zeros(3), torch.tensor([-1.0, 0.3, 0.6]), 0.2)
    assert value.item() == pytest.approx(0.5 * (1.44 + 0.01 + 0.25) / 3)
    gradient = torch.autograd.grad(value, new)[0]
    torch.testing.assert_close(gradient, torch.tensor([0.0, 0.0, -0.5 / 3]))
    assert loss(new, torch.zeros(3), torch.tensor([0.0, 0.0, 0.1])).item() == pytest.approx(1 / 3)


def test_clip_only_value_loss_is_that_of_sb3(patched):
    from stable_baselines3 import PPO
    from stable_baselines3.common.logger import Logger

    module, size = patched("clip_only_value_loss"), 64
    options = {"n_steps": size, "batch_size": size, "n_epochs": 1, "max_grad_norm": 1e9, "clip_range_vf": 0.2}
    sb3 = PPO("MlpPolicy", gym.make("box/Target-v0"), device="cpu", **options)
    sb3.set_logger(Logger(None, []))
    agent = make_agent(module, 2, clip_vloss=True, vf_clip_coef=0.2, vf_coef=1.0)  # 1.0 * 0.5 * MSE is SB3's 0.5 * MSE
    agent.critic[:4].load_state_dict(sb3.policy.mlp_extractor.value_net.state_dict())
    agent.critic[4].load_state_dict(sb3.policy.value_net.state_dict())
    obs, actions, log_probs, values, advantages, returns = minibatch(size, 2)
    values = agent.get_value(obs).detach() + 0.3 * values  # some new values are inside the range
    rows = {"observations": obs, "actions": actions, "log_probs": log_probs, "values": values}
    for name, tensor in (rows | {"advantages": advantages, "returns": returns}).items():
        setattr(sb3.rollout_buffer, name, tensor.unsqueeze(1).numpy())
    sb3.rollout_buffer.full, sb3.rollout_buffer.generator_ready = True, False
    minibatch_of_all = obs, actions, log_probs, values, advantages, returns
    loss, metrics = module.ppo_loss(agent, agent.args, 1.0, *minibatch_of_all)
    loss.backward()
    sb3.train()
    assert metrics["value_loss"].item() == pytest.approx(0.5 * sb3.logger.name_to_value["train/value_loss"], rel=1e-5)
    torch.testing.assert_close(agent.critic[4].weight.grad, sb3.policy.value_net.weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("script", REAL_ENV)
def test_dual_clip(patched, script):
    """Clip range 0.2, bound 3. By hand, -loss of each sample: ratios 5, 2, 0.1 at advantage -2, and 5, 0.1 at 2."""
    loss = patched("dual_clip", script).clipped_policy_loss
    for ratio, advantage, expected, slope in [
        (5.0, -2.0, 6.0, 0.0),
        (2.0, -2.0, 4.0, 2.0),
        (0.1, -2.0, 1.6, 0.0),
        (5.0, 2.0, -2.4, 0.0),
        (0.1, 2.0, -0.2, -2.0),
    ]:
        log_ratio = torch.tensor([math.log(ratio)], requires_grad=True)
        value = loss(log_ratio, torch.tensor([advantage]), 0.2, 3.0)
        assert value.item() == pytest.approx(expected)
        gradient = torch.autograd.grad(value, log_ratio)[0].item()  # by the logarithm: slope * ratio
        assert gradient == pytest.approx(slope * ratio, abs=1e-6)
    log_ratio = torch.tensor([10.0, 1000.0], requires_grad=True)
    value = loss(log_ratio, torch.tensor([-2.0, -2.0]), 0.2, 3.0)
    value.backward()
    assert value.item() == pytest.approx(6.0) and (log_ratio.grad == 0).all()
    assert loss(torch.tensor([10.0]), torch.tensor([-2.0]), 0.2, 1e9).item() > 1000  # without the bound
    assert patched("dual_clip", script).Args().dual_clip == 3.0
