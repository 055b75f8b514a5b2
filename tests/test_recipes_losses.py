"""Recipes about losses: value and policy clipping, entropy, the scale of returns, symmetry, time limits."""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ACTIONS, SCRIPTS, SMALL
from probes import Chain

from recipes import TEN, episodes, flat, loss_of, make_agent, minibatch, shake, small, with_recipes


def test_value_clipping_is_that_of_sb3():
    """The same value loss, and the same gradient of the last layer, from the same weights and minibatch."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.logger import Logger

    module, size = with_recipes("ppo_continuous", "sb3_clip_ranges"), 64
    options = {"n_steps": size, "batch_size": size, "n_epochs": 1, "max_grad_norm": 1e9, "clip_range_vf": 0.1}
    sb3 = PPO("MlpPolicy", gym.make("box/Target-v0"), device="cpu", **options)
    sb3.set_logger(Logger(None, []))
    agent = make_agent(module, 2, vf_coef=1.0, clip_range_vf=0.1)  # 1.0 * 0.5 * MSE is SB3's 0.5 * MSE
    agent.critic[:4].load_state_dict(sb3.policy.mlp_extractor.value_net.state_dict())
    agent.critic[4].load_state_dict(sb3.policy.value_net.state_dict())
    obs, actions, log_probs, values, advantages, returns = minibatch(size, 2)
    values = agent.get_value(obs).detach() + 0.3 * values  # some new values are inside the range
    rows = {"observations": obs, "actions": actions, "log_probs": log_probs, "values": values}
    for name, tensor in (rows | {"advantages": advantages, "returns": returns}).items():
        setattr(sb3.rollout_buffer, name, tensor.unsqueeze(1).numpy())
    sb3.rollout_buffer.full, sb3.rollout_buffer.generator_ready = True, False
    loss, metrics = module.ppo_loss(agent, agent.args, obs, actions, log_probs, values, advantages, returns)
    loss.backward()
    sb3.train()
    assert metrics["value_loss"].item() == pytest.approx(0.5 * sb3.logger.name_to_value["train/value_loss"], rel=1e-5)
    torch.testing.assert_close(agent.critic[4].weight.grad, sb3.policy.value_net.weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("clip_range_vf", [None, 0.4])
def test_clip_ranges_fall(clip_range_vf, tmp_path, monkeypatch):
    """What the loss gets in the four iterations of a run, and what that does. The settings that are saved do not
    change."""
    module, ranges = with_recipes("ppo_continuous", "sb3_clip_ranges"), []
    original = module.ppo_loss

    def ppo_loss(agent, args, *minibatch):
        ranges.append((float(args.clip_coef), None if clip_range_vf is None else float(args.clip_range_vf)))
        return original(agent, args, *minibatch)

    monkeypatch.setattr(module, "ppo_loss", ppo_loss)
    changes = {"total_timesteps": 256, "clip_range_vf": clip_range_vf, "anneal_clip": True, "clip_coef": 0.2}
    args = small(module, tmp_path, **changes)
    _, run_dir = module.train(args)
    expected = [(0.2 * left, clip_range_vf and 0.4 * left) for left in (1.0, 0.75, 0.5, 0.25)]
    assert list(dict.fromkeys(ranges)) == [pytest.approx(pair) for pair in expected]
    assert module.load_args(run_dir) == args and args.clip_coef == 0.2
    # The range rules the loss: at range 0 a new value counts as the old one.
    _, metrics = loss_of(module, new_values=torch.ones(4), returns=torch.ones(4), clip_range_vf=0.0)
    assert metrics["value_loss"] == 0.5


@pytest.mark.parametrize("script", SCRIPTS)
def test_dual_clip(script):
    """Clip range 0.2, bound 3. By hand, loss of one sample and its derivative by the log ratio, slope * ratio: ratios
    5, 2, 0.1 at advantage -2, and 5, 0.1 at 2."""
    module = with_recipes(script, "dual_clip")
    for ratio, advantage, expected, slope in [
        (5.0, -2.0, 6.0, 0.0),
        (2.0, -2.0, 4.0, 2.0),
        (0.1, -2.0, 1.6, 0.0),
        (5.0, 2.0, -2.4, 0.0),
        (0.1, 2.0, -0.2, -2.0),
    ]:
        log_ratio = torch.tensor([math.log(ratio)], requires_grad=True)
        loss, metrics = loss_of(module, log_ratio, torch.tensor([advantage]), clip_coef=0.2)
        assert metrics["policy_loss"].item() == pytest.approx(expected)
        assert torch.autograd.grad(loss, log_ratio)[0].item() == pytest.approx(slope * ratio, abs=1e-6)
    _, metrics = loss_of(module, torch.tensor([3.0]), torch.tensor([-2.0]), dual_clip=1e9)
    assert metrics["policy_loss"].item() == pytest.approx(2 * math.exp(3))  # without the bound


def test_popart_preserves_values():
    agent = shake(make_agent(with_recipes("ppo_continuous", "popart"), popart_memory=1000))
    obs, returns = torch.randn(100, 3), 50 + 20 * torch.randn(16, 100)
    for scale in (1, 100, 0.1):
        old_values, old_outputs, old_std = agent.get_value(obs), agent.critic(obs), agent.value_std()
        agent.update_value_statistics(scale * returns)
        assert (agent.critic(obs) - old_outputs).abs().max() > 0.1
        unit = max(old_std, agent.value_std())
        torch.testing.assert_close(agent.get_value(obs) / unit, old_values / unit, rtol=0, atol=1e-5)
    state = agent.state_dict()
    assert state["value_rms.mean"] != 0 and state["value_rms.var"] != 1


def test_popart_statistics_are_those_of_recent_returns():
    agent = make_agent(with_recipes("ppo_continuous", "popart"), popart_memory=1600)
    returns = 50 + 20 * torch.randn(16, 100)
    agent.update_value_statistics(returns)
    assert agent.value_rms.mean.item() == pytest.approx(returns.mean().item(), rel=1e-3)
    assert agent.value_rms.var.item() == pytest.approx(returns.var().item(), rel=1e-2)
    for _ in range(9):
        agent.update_value_statistics(returns)
    agent.update_value_statistics(returns + 100)  # as many as are remembered
    assert agent.value_rms.mean.item() == pytest.approx(returns.mean().item() + 50, rel=1e-2)


def test_popart_update_does_not_see_the_scale_of_rewards():
    """Rewards, values and returns 1000 times as large, with their statistics: the same gradient."""
    module = with_recipes("ppo_continuous", "popart")
    gradients = []
    for scale in (1.0, 1000.0):
        agent = shake(make_agent(module, clip_vloss=True, norm_adv=False))
        agent.value_rms.mean.fill_(0.3 * scale)
        agent.value_rms.var.fill_(scale**2)
        obs, actions, log_probs, *rest = minibatch()
        loss, _ = module.ppo_loss(agent, agent.args, obs, actions, log_probs, *(scale * x for x in rest))
        gradients.append(torch.autograd.grad(loss, list(agent.parameters())))
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    assert not module.Args().norm_reward


def test_kl_penalty():
    """Where there is nothing to gain, what is left of the loss has the gradient of torch.distributions' KL divergence
    from the policy that drew the actions."""
    module = with_recipes("ppo_continuous", "kl_penalty")
    torch.manual_seed(0)
    old = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1.0)
    actions = old.sample((500_000,))
    mean, std = parameters = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.3, 0.8)]
    new = torch.distributions.Normal(mean, std)
    loss, _ = loss_of(module, log_ratio=new.log_prob(actions) - old.log_prob(actions), kl_coef=2.0)
    divergence = 2.0 * torch.distributions.kl_divergence(old, new)
    wanted = torch.autograd.grad(divergence, parameters)
    torch.testing.assert_close(torch.autograd.grad(loss, parameters), wanted, atol=0, rtol=0.02)
    torch.testing.assert_close(loss, divergence, atol=0, rtol=0.02)


def test_symmetry_loss_makes_a_policy_symmetric():
    """Through ppo_loss, with everything else in it at weight 0."""
    module = with_recipes("ppo_continuous", "symmetry_loss")
    zero = {"vf_coef": 0.0, "ent_coef": 0.0}
    losses = {}
    for coefficient in (0.0, 1.0):
        agent = shake(make_agent(module, 17, -np.ones(6), np.ones(6), mirror_coef=coefficient, **zero))
        obs, actions, log_probs, values, _, returns = minibatch(200, 17, 6)
        optimizer = torch.optim.Adam(agent.parameters(), 1e-2)
        for _ in range(40):
            batch = obs, actions, log_probs, values, torch.zeros(200), returns
            loss, _ = module.ppo_loss(agent, agent.args, *batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        mean = agent.get_mean_and_log_std(obs)[0]
        difference = agent.get_mean_and_log_std(module.mirror_obs(obs))[0] - module.mirror_action(mean)
        losses[coefficient] = (difference.square().mean() / mean.var(0).mean()).item()
    assert losses[1.0] < 0.1 * losses[0.0]


def test_symmetry_loss_mirrors_walker(tmp_path):
    """The mirrored robot under the mirrored action goes to the mirrored next state, and statistics are symmetric."""
    module = with_recipes("ppo_continuous", "symmetry_loss")
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
    with pytest.raises(module.UsageError, match="the mirror is that of Walker2d-v5"):
        module.train(module.Args(env_id="HalfCheetah-v4", runs_dir=str(tmp_path), **SMALL))  # it has the same shapes


class Ended(Chain):
    """The chain, whose time limit is no truncation but a termination. Rewards are the same."""

    def step(self, action):
        obs, reward, _, truncated, infos = super().step(action)
        return obs, reward, truncated, False, infos


gym.register("box/Ended-v0", Ended, kwargs={"discrete": False})
gym.register("discrete/Ended-v0", Ended, kwargs={"discrete": True})


@pytest.mark.parametrize("name", SCRIPTS)
def test_time_limits_as_ends(name, tmp_path):
    """With the recipe, a run with truncated episodes is that of the script with terminated ones, to the bit; the
    script's own differs."""
    runs = []
    for recipes, env in ((["time_limits_as_ends"], "Chain"), ([], "Ended"), ([], "Chain")):
        script = with_recipes(name, *recipes)
        args = script.Args(**TEN, env_id=f"{ACTIONS[name]}/{env}-v0", runs_dir=str(tmp_path))
        agent, run_dir = script.train(args)
        runs.append((flat(agent), episodes(run_dir)))
    recipe, ended, own = runs
    assert torch.equal(recipe[0], ended[0]) and recipe[1] == ended[1] and len(ended[1]) > 100
    assert not torch.equal(recipe[0], own[0])


def test_growing_discount(watch, tmp_path):
    """From 0.9 the horizon of 10 steps doubles in each of three iterations, for rewards and advantages."""
    module = with_recipes("ppo_continuous", "growing_discount")
    scaled, estimated = watch(module, "normalize_rewards"), watch(module, "estimate_advantages")
    module.train(small(module, tmp_path, gamma=0.9, gamma_final=0.9875, total_timesteps=192, update_epochs=1))
    expected = pytest.approx([0.9, 0.95, 0.975])
    assert [arguments[-1] for arguments, _ in scaled] == expected
    assert [arguments[-2] for arguments, _ in estimated] == expected
    with pytest.raises(module.UsageError, match="--gamma-final must be at least gamma"):
        module.train(small(module, tmp_path, gamma=0.9999))  # it would fall


def test_reuse(watch, tmp_path):
    """Alone, the new rollout trains as in the script. With two more, the old ones are weighted by how likely the
    present policy would have acted so: exactly 1 for the new one."""
    plain, module = with_recipes("ppo_continuous"), with_recipes("ppo_continuous", "reuse")
    own, _ = plain.train(small(plain, tmp_path))
    alone, _ = module.train(small(module, tmp_path, reuse=1))
    torch.testing.assert_close(flat(alone), flat(own), atol=1e-5, rtol=0)
    estimated = watch(module, "estimate_advantages")
    module.train(small(module, tmp_path, learning_rate=0.01, total_timesteps=4 * 64, update_epochs=1))
    calls = [arguments for arguments, _ in estimated]
    assert len(calls) == 4 * 3
    obs, weights = ([arguments[i] for arguments in calls] for i in (1, 7))
    for last in (8, 11):  # the third and the fourth iteration
        torch.testing.assert_close(weights[last], torch.ones_like(weights[last]))
        assert all((weights[k] - 1).abs().max() > 0.01 for k in (last - 1, last - 2))
    assert torch.equal(obs[11 - 1], obs[8]) and torch.equal(obs[11 - 2], obs[8 - 1])
