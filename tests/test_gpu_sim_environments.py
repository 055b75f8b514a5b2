"""variants/ppo_gpu_sim.py: simulators like those of Isaac Lab, gymnasium, Brax; observations of actor and critic."""

import collections
import importlib.util
import math
import re

import numpy as np
import pytest
import torch
import torch_envs
from conftest import ROOT, assert_one_line, flags_of
from gpu_sim import Narrow, agent_for, env_id_of, make_args, script


def test_environments_like_those_of_isaac_lab(tmp_path):
    """Groups of observations in buffers that are written over by every step, and no final observation: what is learned
    is the same as from new tensors."""

    class Isaac(torch_envs.Drift):
        buffers = None

        def observe(self):
            obs = super().observe()
            if self.buffers is None:
                self.buffers = obs
            for name, x in self.buffers.items():
                x.copy_(obs[name])
            return self.buffers

    agents = []
    for kind in (Isaac, torch_envs.Drift):
        settings = {"env_id": env_id_of(lambda *_, kind=kind: kind(*_, final_obs=False)), "timeouts": "current-value"}
        agents.append(script.train(make_args(tmp_path, **settings))[0])
    torch.testing.assert_close(agents[0].state_dict(), agents[1].state_dict(), atol=0, rtol=0)


def test_example_of_the_docs(tmp_path):
    """The Python block of docs/gpu_sim.md is an environment that learns."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "gpu_sim.md").read_text(), re.S)
    namespace = {}
    exec(block, namespace)
    settings = {"env_id": env_id_of(namespace["make_envs"]), "num_envs": 64, "hidden_sizes": (32, 32)}
    _, run_dir = script.train(make_args(tmp_path, **settings, num_steps=24, update_epochs=5, total_timesteps=45_000))
    returns = np.loadtxt(run_dir / "episodes.csv", delimiter=",", skiprows=1)[:, 1]
    assert returns[:50].mean() < 50 and returns[-50:].mean() > 120


class SometimesFinal(torch_envs.Drift):
    """Gives final observations in the steps that end an episode only."""

    def step(self, actions):
        *results, infos = super().step(actions)
        return *results, infos if (results[2] | results[3]).any() else {}


@pytest.mark.parametrize("kind", ["always", "sometimes", "never"])
def test_timeouts_auto(tmp_path, capsys, kind):
    """Time-outs are exact if the simulator gives final observations. Otherwise the value before the step stands for
    them, as with --timeouts current-value, and one line says so."""
    makes = {"always": torch_envs.Drift, "sometimes": SometimesFinal}
    makes["never"] = lambda *given: torch_envs.Drift(*given, final_obs=False)
    env_id, settings = env_id_of(makes[kind]), {"num_steps": 60, "total_timesteps": 16 * 120}
    auto, _ = script.train(make_args(tmp_path, env_id=env_id, **settings))
    lines = [line for line in capsys.readouterr().out.splitlines() if "final_obs" in line]
    line = f"{env_id} gave no final_obs at a time limit: continuing with --timeouts current-value"
    assert lines == [line] * (kind == "never")
    current_value, _ = script.train(make_args(tmp_path, env_id=env_id, timeouts="current-value", **settings))
    exact, _ = script.train(make_args(tmp_path, env_id=env_id_of(torch_envs.Drift), **settings))
    for other, is_equal in ((current_value, kind == "never"), (exact, kind != "never")):
        assert torch.equal(auto.actor[0].weight, other.actor[0].weight) == is_equal


class Done(torch_envs.Drift):
    """Returns `done` in place of terminations."""

    def step(self, actions):
        obs, rewards, terminations, truncations, infos = super().step(actions)
        return obs, rewards, terminations | truncations, truncations, infos


def test_time_limits_that_are_terminations_too(tmp_path, capsys):
    """They count as terminations, and a line says so, once. With other terminations nothing is said."""
    for kind in (Done, torch_envs.Drift):
        script.train(make_args(tmp_path, env_id=env_id_of(kind), num_steps=60, total_timesteps=16 * 120))
        assert capsys.readouterr().out.count("all truncations are terminations too") == (kind is Done)


class Named(torch_envs.Drift):
    """Hands over observations as a test wants them."""

    pack = staticmethod(lambda obs: obs)

    def observe(self):
        return self.pack(super().observe())


def test_mappings_as_observations(tmp_path):
    """Any mapping is taken, such as the TensorDict of rsl_rl and mjlab, and what is learned is the same."""
    packs = [dict, collections.UserDict]
    if importlib.util.find_spec("tensordict"):
        packs.append(lambda obs: importlib.import_module("tensordict").TensorDict(obs, batch_size=[16]))
    agents = []
    for pack in packs:
        make = type("Packed", (Named,), {"pack": staticmethod(pack)})
        agents.append(script.train(make_args(tmp_path, env_id=env_id_of(make), total_timesteps=160))[0])
    for agent in agents[1:]:
        torch.testing.assert_close(agent.state_dict(), agents[0].state_dict(), atol=0, rtol=0)


@pytest.mark.parametrize(
    "pack, given",
    [
        (lambda obs: {"state": obs["policy"]}, "{'state': [16, 2]}"),
        (lambda obs: {"policy": {"position": obs["policy"]}}, "{'policy': 'dict'}"),
        (lambda obs: obs["policy"].reshape(16, 1, 2), "{'policy': [16, 1, 2]}"),
        (lambda obs: obs["policy"].numpy(), "{'policy': 'ndarray'}"),
    ],
)
def test_other_observations_are_named(tmp_path, main, pack, given):
    """One line says what came and what is needed."""
    make = type("Packed", (Named,), {"pack": staticmethod(pack)})
    flags = flags_of(num_envs=16, num_steps=10, device="cpu", compile=False, runs_dir=tmp_path)
    refused = main(script, "--env-id", env_id_of(make), *flags)
    needed = 'observations must be tensors, (N, D) or {"policy": (N, D), "critic": (N, P)}'
    assert_one_line(refused, f"{needed}, not {given}")


def test_simulators_with_networks(tmp_path):
    """Nothing is kept of the graph behind their observations, which would grow from step to step."""

    class Actuated(torch_envs.Drift):
        gain = torch.nn.Parameter(torch.ones(()))

        def step(self, actions):
            obs, rewards, *rest = super().step(actions * self.gain)
            assert not rewards.requires_grad
            return obs, rewards * self.gain, *rest

    script.train(make_args(tmp_path, env_id=env_id_of(Actuated)))


class Timed(torch_envs.Drift):
    """With what --stagger-envs needs. Nothing terminates."""

    max_episode_length = 50

    @property
    def episode_length_buf(self):
        return self.steps

    @episode_length_buf.setter
    def episode_length_buf(self, steps):
        self.steps = steps

    def step(self, actions):
        obs, rewards, *ends, infos = super().step(torch.zeros_like(actions))
        return obs, rewards, *ends, infos

    def start(self, where):
        super().start(where)
        self.wind = torch.zeros_like(self.wind)


@pytest.mark.parametrize("update", ["rsl_rl", "google"])
def test_stagger_envs(tmp_path, update, capsys):
    """rsl_rl's episodes end at many different times, and those that began late are not logged; Google's all at once."""
    _, run_dir = script.train(make_args(tmp_path, update, env_id=env_id_of(Timed), total_timesteps=16 * 150))
    rows = [line.split(",") for line in (run_dir / "episodes.csv").read_text().splitlines()[1:]]
    assert {row[2] for row in rows} == {"50"}
    ends = [int(row[0]) // 16 for row in rows]
    assert len(ends) == (48 if update == "google" else 32)  # in 150 steps; what is left of the first, then two
    if update == "google":
        assert set(ends) == {50, 100, 150}
    else:
        assert min(ends) > 50 and len(set(ends)) > 16
    script.train(make_args(tmp_path, update))  # a simulator that cannot
    assert ("no episode_length_buf, so --stagger-envs does nothing" in capsys.readouterr().out) == (update == "rsl_rl")


@pytest.mark.filterwarnings("ignore")  # gymnasium's, about the shared array
def test_final_observation_is_the_last_one(tmp_path):
    """Also of an environment that has begun the next episode in the same array, while the other one goes on."""
    envs = script.make_envs(make_args(tmp_path, env_id="box/OneArray-v0"), 2, torch.device("cpu"))
    envs.reset()
    envs.envs.envs[0].unwrapped.obs[:] = 2  # two steps ahead
    for _ in range(3):
        obs, _, _, truncations, infos = envs.step(torch.zeros(2, 1))
    assert truncations.tolist() == [True, False] and obs.tolist() == [[0, 0], [3, 3]]
    assert infos["final_obs"][0].tolist() == [5, 5]


@pytest.mark.parametrize("update", ["rsl_rl", "google"])
def test_bounds_of_double_precision(tmp_path, update):
    """Actions stay inside, however far out the policy wants to go. A minibatch may be one step."""
    one_step = {"num_minibatches": 160, "norm_adv": "minibatch", "total_timesteps": 160} if update == "rsl_rl" else {}
    agent, _ = script.train(make_args(tmp_path, update, env_id="box/Narrow-v0", **one_step))
    space = Narrow.action_space
    for far in (-100.0, -9.0, -5.0, 0.0, 5.0, 9.0, 100.0):
        action = agent.to_env_action(torch.full((2,), far)).numpy()
        assert space.contains(action)
        if abs(far) == 100:
            np.testing.assert_array_equal(action, space.low if far < 0 else space.high)


@pytest.mark.parametrize("what", ["rewards", "obs"])
def test_nan(tmp_path, what):
    """It ends in one line, and never gets into statistics or weights."""

    class Broken(torch_envs.Drift):
        count = 0

        def step(self, actions):
            obs, rewards, *others = super().step(actions)
            self.count += 1
            if self.count == 25:
                (rewards if what == "rewards" else obs["policy"])[3] = math.nan
            return obs, rewards, *others

    named = "the rewards" if what == "rewards" else "the observations"
    with pytest.raises(script.UsageError, match=f"NaN or infinity in {named}"):
        script.train(make_args(tmp_path, env_id=env_id_of(Broken), checkpoint_interval=0))
    (run_dir,) = (tmp_path / "runs").iterdir()
    checkpoint = script.load_checkpoint(run_dir)
    assert checkpoint["global_step"] == 2 * 160
    assert all(torch.isfinite(x).all() for x in checkpoint["agent"].values())


def test_evaluation_ends_with_the_first_episode():
    """What a simulator gives afterwards, NaN too, does not count."""

    class Diverges(torch_envs.Drift):
        ended = torch.zeros(16, dtype=torch.bool)

        def step(self, actions):
            obs, rewards, terminations, truncations, infos = super().step(actions)
            rewards = torch.where(self.ended, math.nan, torch.ones(16))
            self.ended = self.ended | terminations | truncations
            return obs, rewards, terminations, truncations, infos

    envs = Diverges(16, torch.device("cpu"), 1)
    returns = script.evaluate(agent_for(envs, script.Args()), envs, seed=1)
    assert np.isfinite(returns).all() and len(set(returns)) > 1


@pytest.fixture
def brax_cart():
    """The name of an environment of Brax without physics, which compiles in no time. A cart drifts away from 0, faster
    and faster, unless the action stops it. Where it has gone too far the episode terminates; each step earns 1."""
    pytest.importorskip("brax", reason="Brax is not installed: environments of Brax are not tested")
    import jax
    from brax.envs import register_environment
    from brax.envs.base import Env, State

    class Cart(Env):
        observation_size, action_size, backend = 1, 1, None

        def __init__(self, backend, force=0.0):
            assert backend == "spring"  # the default
            self.force = force

        def reset(self, rng):
            return State(None, jax.random.uniform(rng, (1,), minval=-0.05, maxval=0.05), *jax.numpy.zeros(2))

        def step(self, state, action):
            obs = 1.2 * state.obs + self.force * action
            return state.replace(obs=obs, reward=1.0, done=jax.numpy.where(abs(obs[0]) > 0.2, 1.0, 0.0))

    register_environment("cart", Cart)
    return "brax/cart"


def test_brax(tmp_path, brax_cart):
    """Shapes, ends, observations before and after the restart; then it is learned from."""
    kwargs = '{"episode_length": 30, "force": 0.05}'
    args = make_args(tmp_path, "google", env_id=brax_cart, num_envs=64, env_kwargs=kwargs)
    envs = script.make_envs(args, 64, torch.device("cpu"))
    first, _ = envs.reset(seed=1)
    first = first.clone()
    ended = {"terminations": 0, "truncations": 0}
    obs = first
    for _ in range(60):
        actions = torch.full((64, 1), -1.0)
        actions[:32] = -4 * obs[:32]
        obs, rewards, terminations, truncations, infos = envs.step(actions)
        ends = terminations | truncations
        assert rewards.shape == (64,) and terminations.dtype == truncations.dtype == torch.bool
        assert not (terminations & truncations).any()
        torch.testing.assert_close(obs[ends], first[ends])
        torch.testing.assert_close(infos["final_obs"][~ends], obs[~ends])
        assert (infos["final_obs"][terminations].abs() > 0.2).all()
        ended["terminations"] += terminations.sum().item()
        ended["truncations"] += truncations.sum().item()
    assert min(ended.values()) > 10
    envs.reset(seed=1)
    envs.episode_length_buf = torch.arange(64.0) % 30
    cuts = torch.stack([envs.step(torch.zeros(64, 1))[3] for _ in range(3)])
    assert (cuts.nonzero()[:, 1] % 30).tolist() == [29, 29, 28, 28, 27, 27]  # each after what is left of its 30 steps
    settings = {"num_envs": 64, "num_steps": 20, "learning_rate": 3e-3, "total_timesteps": 64 * 20 * 15}
    settings |= {"hidden_sizes": (32, 32), "env_id": env_id_of(lambda *_: envs)}  # JAX has compiled it
    agent, _ = script.train(make_args(tmp_path, "google", **settings))
    assert script.evaluate(agent, envs, seed=3).mean() > 25
