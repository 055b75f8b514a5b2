"""Environments: their spaces, arguments, infos, vectors and processes."""

import json
import re
from typing import ClassVar

import gymnasium as gym
import numpy as np
import probes
import pytest
import torch
from conftest import ONE, SMALL, assert_one_line, flags_of, probe, rows, scalars


@pytest.mark.parametrize("name", ["Shaped", "OtherTypes", "Bytes"])
def test_other_spaces(script, small_args, name):
    """Dictionaries, booleans and many bytes become a vector; actions take the shape and the type of their space."""
    env_id = probe(script, name)
    _, run_dir = script.train(small_args(env_id=env_id))
    assert script.evaluate(script.load_agent(run_dir), script.load_args(run_dir), 2).shape == (2,)


class Bytes(probes.Target):
    """A long vector of bytes, which is no image: MiniGrid's FlatObsWrapper gives 2,835 of them."""

    def __init__(self, discrete):
        super().__init__(discrete)
        self.observation_space = gym.spaces.Box(0, 255, (2000,), np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, True, False, {}


probes.register("Bytes", Bytes)


# What no chart can show. None of it ends a run.
NO_NUMBERS = {
    "text": "solved",
    "none": None,
    "dictionary": {"a": 1},
    "list": [1, 2],
    "array": np.zeros(3),
    "duration": np.timedelta64(5, "s"),
    "date": np.datetime64("2020-01-01"),
    "huge": 10**400,
    "complex": 1j,
    "function": print,
}


class Adjustable(probes.Target):
    """Rewards of `bonus` more; its infos say how the episode went."""

    def __init__(self, discrete, bonus=0):
        super().__init__(discrete)
        self.bonus = bonus

    def step(self, action):
        obs, reward, *rest, _ = super().step(action)
        reward += self.bonus
        infos = {"is_success": True, "paid": np.float32(reward), "name": "x"} | NO_NUMBERS
        return obs, reward, *rest, infos


probes.register("Adjustable", Adjustable)


def test_env_kwargs_and_info_metrics(script, small_args, main):
    """--env-kwargs reach the environments of training and of evaluation. Numbers in the last info of an episode are
    logged as info/NAME, their mean over the episodes of an iteration; nothing else of it is, or ends the run."""
    args = small_args(env_id=probe(script, "Adjustable"), env_kwargs='{"bonus": 100}')
    _, run_dir = script.train(args)
    logged = scalars(run_dir)
    assert {name for name in logged if name.startswith("info/")} == {"info/is_success", "info/paid"}
    np.testing.assert_allclose(logged["info/paid"], logged["charts/episodic_return"])  # episodes of one step
    assert all(value > 50 for _, value in logged["charts/episodic_return"])
    means = []
    for kwargs in ([], ['--env-kwargs={"bonus": 1000}']):
        printed = main(script, f"--evaluate={run_dir}", *kwargs).stdout
        means.append(float(re.findall(r"mean (\S+),", printed)[-1]))
    assert 50 < means[0] < 150 and means[1] - means[0] == pytest.approx(900, abs=1)


TALK = {  # infos that a vector of environments cannot gather: what the n-th one is
    "none": lambda n: None if n % 3 else 3,
    "sizes": lambda n: np.zeros(1 + n % 3),
    "kinds": lambda n: {"a": 1} if n % 2 else 1,
    "large": lambda n: 10**30,
}


class Talkative(gym.Env):
    """Episodes of five steps; observes how many it has made. Infos of many kinds, that of reset is called final_obs.
    The reward is an array of one number."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def __init__(self, discrete):
        self.action_space = gym.spaces.Discrete(2) if discrete else gym.spaces.Box(-1, 1, (1,))
        self.count = 0

    def observe(self):
        self.count += 1
        return np.full(2, self.steps, np.float32), {kind: talk(self.count) for kind, talk in TALK.items()}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count += 0 if seed is None else seed
        self.steps = 0
        obs, info = self.observe()
        return obs, info | {"final_obs": np.full(2, 77.0)}

    def step(self, action):
        self.steps += 1
        obs, info = self.observe()
        return obs, np.full((1, 1)[: self.steps % 3], 1.0), False, self.steps == 5, info


probes.register("Talkative", Talkative)


@pytest.mark.filterwarnings("ignore")  # gymnasium's, about the shared array
@pytest.mark.parametrize("name", ["Talkative", "OneArray"])
def test_final_observation_is_the_last_one(script, small_args, name):
    """Whatever infos there are, and if the next episode has begun in the same array. It is what a truncated episode is
    bootstrapped from."""
    envs = script.make_envs(small_args(env_id=probe(script, name)), 3)
    envs.reset(seed=[1, 2, 3])
    for _ in range(5):
        obs, *_, infos = envs.step(envs.action_space.sample())
    envs.close()
    assert [x.tolist() for x in infos["final_obs"]] == [[5, 5]] * 3 and not obs.any()


def test_a_reward_in_an_array(script, small_args):
    """Of one number, whatever its shape: it is taken, in training and in evaluation."""
    args = small_args(env_id=probe(script, "Talkative"))
    _, run_dir = script.train(args)
    assert {(row[1], row[2]) for row in rows(run_dir)[1:] if int(row[0]) > 64} == {("5", "5")}
    assert script.evaluate(script.load_agent(run_dir), args, 2).tolist() == [5, 5]


class Mission(gym.spaces.Space):
    """A space that gymnasium does not know, such as MiniGrid's sentences."""


class Space(probes.Target):
    """Only has a space of observations, of that name."""

    SPACES: ClassVar = {
        "image": gym.spaces.Box(0, 255, (40, 48, 3), np.uint8),
        "image and vector": gym.spaces.Dict(
            camera=gym.spaces.Box(0, 255, (3, 40, 48), np.uint8), arm=gym.spaces.Box(-1, 1)
        ),
        "empty": gym.spaces.Box(-1, 1, (0,), np.float32),
        "mission": gym.spaces.Dict(image=gym.spaces.Box(0, 1, (4,)), mission=Mission()),
        "sequence": gym.spaces.Sequence(gym.spaces.Discrete(3)),
        "graph": gym.spaces.Graph(gym.spaces.Discrete(3), None),
    }

    def __init__(self, discrete, space):
        super().__init__(discrete)
        self.observation_space = self.SPACES[space]


probes.register("Space", Space)


@ONE
@pytest.mark.parametrize("space", Space.SPACES)
def test_observations_that_are_no_vector(script, tmp_path, main, space):
    """One line names the space and says what helps; nothing is made."""
    flags = flags_of(env_id=probe(script, "Space"), env_kwargs=json.dumps({"space": space}), runs_dir=tmp_path, **SMALL)
    refused = main(script, *flags)
    assert_one_line(refused, f"{Space.SPACES[space]}: wrap it (MiniGrid: ImgObsWrapper); see docs")
    assert not list(tmp_path.iterdir())


class Native(gym.vector.VectorEnv):
    """A vector that an environment brings along. It returns all observations in one array."""

    def __init__(self, num_envs, autoreset_mode, member="box/Chain-v0", max_episode_steps=None):
        self.envs = gym.make_vec(member, num_envs, "sync", vector_kwargs={"autoreset_mode": autoreset_mode})
        self.single_observation_space = self.envs.single_observation_space
        self.single_action_space, self.metadata = self.envs.single_action_space, dict(self.envs.metadata)
        self.num_envs = num_envs

    def reset(self, *, seed=None, options=None):
        self.obs, infos = self.envs.reset(seed=seed)
        return self.obs, infos

    def step(self, actions):
        self.obs[:], *rest = self.envs.step(actions)
        return self.obs, *rest


for kind in ("box", "discrete"):
    gym.register(f"{kind}/Reusing-v0", vector_entry_point=Native, kwargs={"member": f"{kind}/Chain-v0"})


gym.register("native/Shaped-v0", vector_entry_point=Native, kwargs={"member": "box/Shaped-v0"})
gym.register("native/Limited-v0", vector_entry_point=Native, kwargs={"member": "box/Chain-v0"}, max_episode_steps=40)


def deaf(num_envs, autoreset_mode):
    return Native(num_envs, gym.vector.AutoresetMode.NEXT_STEP)


gym.register("native/Deaf-v0", vector_entry_point=deaf)


@ONE
def test_a_vector_with_another_autoreset_mode(script, small_args, main):
    """A vector that ignores the mode it is asked for would train on transitions from one episode to the next."""
    refused = main(script, *flags_of(**vars(small_args(env_id="native/Deaf-v0")) | {"hidden_sizes": "[64, 64]"}))
    assert_one_line(refused, "native/Deaf-v0: its vector must have autoreset_mode SAME_STEP, and say so in")


@ONE
def test_a_vector_that_is_not_flat(script, small_args, main):
    """Refused in one line, as ALE's games are."""
    refused = main(script, *flags_of(**vars(small_args(env_id="native/Shaped-v0")) | {"hidden_sizes": "[64, 64]"}))
    assert_one_line(refused, "native/Shaped-v0 has Dict(")
    assert "flatten it" in refused.stderr


def test_a_vector_may_reuse_its_array(script, small_args):
    """The run is the same, to the bit, as that of the same environments in gymnasium's vector."""
    states = [script.train(small_args(env_id=probe(script, name)))[0].state_dict() for name in ("Chain", "Reusing")]
    torch.testing.assert_close(states[1], states[0], atol=0, rtol=0)


@ONE
def test_a_vector_that_cannot_be_staggered(script, small_args, capsys):
    """A line says that --stagger-envs does nothing."""
    script.train(small_args(env_id="native/Limited-v0", stagger_envs=True))
    assert "makes a vector of its own without set_attr, so --stagger-envs does nothing" in capsys.readouterr().out
