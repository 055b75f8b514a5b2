"""Recipes about distributions of actions: squashed_gaussian, gsde, beta_policy, state_dependent_std."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import golden
from torch.distributions import AffineTransform, Independent, Normal, TanhTransform, TransformedDistribution

from recipes import make_agent, quick_compile, shake, small, with_recipes


def test_state_dependent_std(tmp_path):
    """log_std follows the state, from log_std_init on, and learns."""
    module = with_recipes("ppo_continuous", "state_dependent_std")
    agent, _ = module.train(small(module, tmp_path, learning_rate=0.01))
    _, log_std = agent.get_mean_and_log_std(torch.randn(8, 2))
    assert log_std.std(0).min() > 0
    agent = module.Agent((3,), -np.ones(3, np.float32), np.ones(3, np.float32), module.Args(log_std_init=-1.0))
    obs = torch.randn(8, 3)
    torch.testing.assert_close(agent.get_mean_and_log_std(obs)[1].detach(), torch.full((8, 3), -1.0), rtol=0, atol=0.1)
    agent.get_action_and_value(obs)[2].mean().backward()  # the entropy rises by one with every log_std
    torch.testing.assert_close(agent.actor[-1].bias.grad, torch.tensor([0.0] * 3 + [1.0] * 3))


def test_state_dependent_std_gives_the_golden_numbers():
    """Log-probability and entropy of actions whose log_std differs from state to state (golden.json)."""
    module, (inputs, expected) = (
        with_recipes("ppo_continuous", "state_dependent_std"),
        golden("gaussian_state_dependent"),
    )
    args = module.Args(log_std_init=0.0)
    agent = module.Agent((6,), -np.ones(3, np.float32), np.ones(3, np.float32), args).double()
    agent.actor, agent.critic = torch.nn.Identity(), torch.nn.Linear(6, 1).double()  # the output is the observation
    outputs = torch.cat([inputs["mean"], inputs["log_std"]], 1)
    _, log_prob, entropy, _ = agent.get_action_and_value(outputs, inputs["action"])
    torch.testing.assert_close(log_prob, expected["logprob"], rtol=0, atol=1e-9)
    torch.testing.assert_close(entropy, expected["entropy"], rtol=0, atol=1e-9)


def test_squashed_gaussian_has_the_exact_density():
    """That of tanh of the sample, which is in units of the bounds, as torch.distributions computes it."""
    low, high = (-2.0, -1.0), (3.0, 0.5)
    agent = shake(make_agent(with_recipes("ppo_continuous", "squashed_gaussian"), low=low, high=high))
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
    in_units = log_prob.double() - ((high - low) / 2).log().sum()  # of the environment
    torch.testing.assert_close(in_units, reference.log_prob(env_action), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(agent.to_env_action(before_tanh).double(), env_action, rtol=0, atol=1e-6)
    assert ((agent.to_env_action(before_tanh) >= low) & (agent.to_env_action(before_tanh) <= high)).all()
    with torch.no_grad():
        obs = obs[:1].expand(50_000, 3)
        _, log_prob, _, _ = agent.get_action_and_value(obs)
        _, _, entropy, _ = agent.get_action_and_value(obs, torch.zeros(50_000, 2))  # of the policy, not of this action
    assert -log_prob.mean().item() == pytest.approx(entropy.mean().item(), abs=0.03)


def test_squashed_gaussian_entropy_pulls_back_from_the_bounds():
    agent = make_agent(with_recipes("ppo_continuous", "squashed_gaussian"))
    agent.actor[-1].bias.data.copy_(torch.tensor([2.0, -2.0]))
    agent.get_action_and_value(torch.randn(500, 3))[2].mean().backward()
    assert agent.actor[-1].bias.grad[0] < -0.5 and agent.actor[-1].bias.grad[1] > 0.5


def test_gsde_noise_is_a_function_of_the_state():
    """Within one matrix: equal states, equal noise; and it is the features times a matrix of deviation sigma."""
    agent = shake(make_agent(with_recipes("ppo_continuous", "gsde")))
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


def test_gsde_log_prob_is_that_of_the_noise_over_all_matrices():
    agent = shake(make_agent(with_recipes("ppo_continuous", "gsde")), 1.0)
    with torch.no_grad():
        agent.log_std += 0.5
        agent.update_std(0.5)
        for obs in torch.randn(3, 1, 3):
            obs = obs.expand(20000, 3)
            actions = agent.explore(obs, torch.randn(20000, 64, 2))
            empirical = Independent(Normal(actions.mean(0), actions.std(0)), 1)
            log_prob = agent.get_action_and_value(obs, actions)[1]
            torch.testing.assert_close(log_prob.mean(), empirical.log_prob(actions).mean(), rtol=0, atol=0.02)
            difference = log_prob - empirical.log_prob(actions)
            assert difference.std() < 0.1
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


def test_gsde_matrices_stay_for_some_steps(tmp_path, monkeypatch):
    """In an environment that stands still, an action changes in every fourth step, and only there; compiled."""
    quick_compile(monkeypatch)
    module = with_recipes("ppo_continuous", "gsde")
    changes = {"env_id": "recipes/Still-v0", "sde_sample_freq": 4, "norm_obs": False, "compile": True}
    with pytest.raises(Enough):  # within the first rollout: only acting is compiled
        module.train(small(module, tmp_path, **changes))
    actions = np.array(Still.actions).reshape(12, 4, 2)  # step, environment
    same = np.isclose(actions[1:], actions[:-1], atol=1e-6).all(axis=(1, 2))
    assert same.tolist() == [(t + 1) % 4 != 0 for t in range(11)]
    assert len({tuple(action) for action in actions[0].round(6)}) == 4  # environments have matrices of their own


def test_beta_policy_has_the_exact_density():
    """That of Beta(alpha, beta) from -1 to 1, which are the bounds."""
    low, high = (-2.0, -1.0), (3.0, 0.5)
    agent = shake(make_agent(with_recipes("ppo_continuous", "beta_policy"), low=low, high=high), 1.0)
    obs = torch.randn(500, 3)
    with torch.no_grad():
        distribution = agent.get_distribution(obs)
        alpha, beta = distribution.concentration1, distribution.concentration0
        assert (alpha > 1).all() and (beta > 1).all() and alpha.std() > 0.1
        action, log_prob, entropy, _ = agent.get_action_and_value(obs)
        env_action = agent.to_env_action(action)
        assert torch.equal(agent.get_action_and_value(obs, action)[1], log_prob)  # ratio 1
    low, high = torch.tensor([low, high])
    assert (env_action >= low).all() and (env_action <= high).all()
    beta_distribution = Independent(torch.distributions.Beta(alpha, beta), 1)
    reference = TransformedDistribution(beta_distribution, [AffineTransform(-1.0, 2.0, event_dim=1)])
    torch.testing.assert_close(log_prob.double(), reference.log_prob(action.double()), rtol=1e-5, atol=1e-5)
    with torch.no_grad():  # the entropy, by samples of one state
        samples = agent.get_action_and_value(obs[:1].expand(50000, 3))[1]
    assert -samples.mean() == pytest.approx(entropy[0].item(), abs=0.03)


@pytest.mark.parametrize("remaining", [1.0, 0.3, 0.001])
def test_beta_policy_integrates_to_one_and_keeps_its_peak(remaining):
    module = with_recipes("ppo_continuous", "beta_policy")
    agent = shake(make_agent(module, low=[-2.0], high=[3.0], norm_obs=False), 1.0)
    agent.update_std(remaining)
    grid = torch.linspace(-1 + 1e-6, 1 - 1e-6, 200001).unsqueeze(-1)
    env_action = agent.to_env_action(grid).squeeze(-1)
    assert env_action[0] == pytest.approx(-2, abs=1e-4) and env_action[-1] == pytest.approx(3, abs=1e-4)
    with torch.no_grad():
        density = agent.get_action_and_value(torch.ones(200001, 3), grid)[1].exp()
        entropy = agent.get_action_and_value(torch.ones(1, 3), grid[:1])[2].item()
    action = grid.squeeze(-1)
    assert torch.trapezoid(density, action) == pytest.approx(1, abs=2e-3)
    assert torch.trapezoid(-density * density.clamp(min=1e-30).log(), action) == pytest.approx(entropy, abs=5e-3)
    assert agent.predict(np.ones(3))[0] == pytest.approx(env_action[density.argmax()].item(), abs=2e-3)
    peak, deviations = agent.predict(np.ones(3)), []
    for narrow in (remaining / 10, remaining / 20):  # half the deviation, the same peak
        agent.update_std(narrow)
        np.testing.assert_allclose(agent.predict(np.ones(3)), peak, atol=1e-5)
        deviations.append(agent.get_distribution(torch.ones(3)).stddev.item())
    assert deviations[1] == pytest.approx(deviations[0] / 2, rel=0.05)
