"""Recipes for ppo_discrete.py, and those about time limits, resuming and ranks: each applies, trains, and does what its
head says."""

import copy
import csv
import dataclasses
import importlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ACTIONS, ROOT, SCRIPTS, SMALL, TESTS, flags_of
from probes import CHAIN_GAMMA, CHAIN_VALUES, Chain

from benchmark import self_play_envs, sparse_envs
from recipes import with_recipes

TEN = SMALL | {"total_timesteps": 640}  # ten iterations


@pytest.fixture
def patched(tmp_path):
    """A function: patched("ppo_discrete", "rnd") is the script with these recipes."""

    def make(script, *names):
        if not names:
            return importlib.import_module(script)
        folder = tmp_path / "-".join([script, *names])
        folder.mkdir()
        return with_recipes(folder, script, *names)

    return make


def flat(agent):
    return torch.cat([parameter.detach().flatten().clone() for parameter in agent.parameters()])


def episodes(run_dir):
    """episodes.csv without the clock"""
    with open(Path(run_dir, "episodes.csv")) as file:
        return [row[:3] for row in csv.reader(file)]


# ---------------------------------------------------------------------------------------------------- every recipe


STACKS = [
    ("ppo_discrete", "Counted-v0", ["time_limits_as_ends", "rnd", "self_play", "shared_parameters"]),
    ("ppo_continuous", "Wanderer-v0", ["time_limits_as_ends", "exact_resume", "cpu_ranks"]),
]


@pytest.mark.parametrize("script, env_id, recipes", STACKS)
def test_they_stack(script, env_id, recipes, patched, tmp_path):
    """Recipes that change other lines apply one on top of the other, in either order, and train ten iterations."""
    patched(script, *reversed(recipes))
    script = patched(script, *recipes)
    _, run_dir = script.train(script.Args(**TEN, env_id=env_id, runs_dir=str(tmp_path)))
    assert script.load_checkpoint(run_dir)["global_step"] == 640


# ---------------------------------------------------------------------------------------------------- time limits


class Ended(Chain):
    """The chain, whose time limit is no truncation but a termination. Rewards are the same."""

    def step(self, action):
        obs, reward, _, truncated, infos = super().step(action)
        return obs, reward, truncated, False, infos


gym.register("box/Ended-v0", Ended, kwargs={"discrete": False})
gym.register("discrete/Ended-v0", Ended, kwargs={"discrete": True})


@pytest.mark.parametrize("name", SCRIPTS)
def test_time_limits_as_ends(name, patched, tmp_path):
    """With the recipe, a run with truncated episodes is that of the script with terminated ones, to the bit; the
    script's own differs. (test_advantages.py has CleanRL's golden vector for terminated episodes.)"""
    runs = []
    for recipes, env in ((["time_limits_as_ends"], "Chain"), ([], "Ended"), ([], "Chain")):
        script = patched(name, *recipes)
        args = script.Args(**TEN, env_id=f"{ACTIONS[name]}/{env}-v0", runs_dir=str(tmp_path))
        agent, run_dir = script.train(args)
        runs.append((flat(agent), episodes(run_dir)))
    recipe, ended, own = runs
    assert torch.equal(recipe[0], ended[0]) and recipe[1] == ended[1] and len(ended[1]) > 100
    assert not torch.equal(recipe[0], own[0])


# ---------------------------------------------------------------------------------------------------- rnd


def test_rnd(patched, tmp_path, watch):
    """Rewards are those of the environment, plus a bonus that is proportional to the predictor's error about what
    followed. Its discounted sums have the deviation bonus_coef. The policy sees the first 7 of the 16 states of the
    chain: the bonus falls for these and not for the others. The target is still that of the beginning, and is in the
    checkpoint."""
    script = patched("ppo_discrete", "rnd")
    settings = {"env_id": "discrete/Chain-v0", "norm_reward": False, "norm_obs": False, "runs_dir": str(tmp_path)}
    # Two rollouts, of which nothing is learned.
    args = script.Args(**SMALL | settings | {"total_timesteps": 128, "update_epochs": 1, "learning_rate": 0.0})
    rollouts = watch(script, "estimate_advantages")
    initial, _ = script.train(args)
    assert len(rollouts) == 2
    sums, total = [], np.zeros(4)
    with torch.no_grad():
        before = initial.get_bonus(torch.eye(16)).numpy()
    for (_, obs, last_obs, _, rewards, *_), _ in rollouts:
        states = torch.cat([obs, last_obs.unsqueeze(0)]).argmax(-1).numpy()  # (17, 4)
        own = CHAIN_VALUES[states[:-1]] - CHAIN_GAMMA * CHAIN_VALUES[states[:-1] + 1]
        for row in before[states[1:]]:  # the sums go on, over the ends of episodes and of rollouts too
            total = row + args.gamma * total
            sums.append(total)
        expected = args.bonus_coef * before[states[1:]] / np.std(sums)
        np.testing.assert_allclose(rewards.numpy() - own, expected, rtol=1e-2)

    args = script.Args(**TEN | settings | {"compile": True, "update_epochs": 8, "learning_rate": 1e-2})
    agent, run_dir = script.train(args)
    loaded = script.load_agent(run_dir)
    for name, weight in initial.rnd_target.state_dict().items():
        assert torch.equal(weight, agent.rnd_target.state_dict()[name])
        assert torch.equal(weight, loaded.rnd_target.state_dict()[name])
    with torch.no_grad():
        after = agent.get_bonus(torch.eye(16)).numpy()
        assert np.array_equal(loaded.get_bonus(torch.eye(16)), after)
    assert (after[:7] < 0.1 * before[:7]).all() and (after[7:] > 0.3 * before[7:]).all()


def test_deep_sea():
    """Only the way that goes right in all ten steps finds the reward; each step right costs a thousandth."""
    env = gym.make("DeepSea10-v0")
    for wrong in [None, 0, 5, 9]:
        seen, _ = env.reset()
        total, cells = 0.0, []
        for t in range(10):
            cells.append(int(seen.argmax()))
            seen, reward, terminated, truncated, _ = env.step(int(t != wrong))
            total += reward
            assert terminated == (t == 9) and not truncated
        assert total == pytest.approx(0.99 if wrong is None else -0.009) and not seen.any()
        assert cells[:6] == ([0, 11, 22, 33, 44, 55] if wrong != 0 else [0, 10, 21, 32, 43, 54])
    assert sparse_envs.DeepSea(20).observation_space.shape == (400,)


# ---------------------------------------------------------------------------------------------------- dict_observations


class TwoSenses(gym.Env):
    """One step per episode. The image tells the first bit of the right action of four, the vector the second one."""

    observation_space = gym.spaces.Dict(
        image=gym.spaces.Box(0, 255, (37, 36, 3), np.uint8), vector=gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    )
    action_space = gym.spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.first, self.second = self.np_random.integers(2, size=2)
        image = self.np_random.integers(100, size=(37, 36, 3)) + 100 * self.first
        self.obs = {"image": image.astype(np.uint8), "vector": np.array([1000.0, -5.0, 1.0]) + self.second}
        return self.obs, {}

    def step(self, action):
        return copy.deepcopy(self.obs), float(action == 2 * self.first + self.second), True, False, {}


gym.register("TwoSenses-v0", TwoSenses)


def test_dict_observations(patched, tmp_path):
    """Both parts are learned from: one alone would tell half of the bits, and 1/2 is the best return then. An
    observation is bytes: those of the image as it is, those of the vector normalised."""
    script = patched("ppo_discrete", "dict_observations")
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


# ---------------------------------------------------------------------------------------------------- self_play


class Counted(self_play_envs.TicTacToe):
    """It also asserts that a cell is free, for both players, and remembers its opponents."""

    moves = {1.0: 0, -1.0: 0}  # noqa: RUF012
    players = []  # noqa: RUF012

    def move(self, cell, stone):
        self.moves[stone] += 1
        if stone == -1.0 and all(self.opponent is not player for player in self.players):
            self.players.append(self.opponent)
        return super().move(cell, stone)


gym.register("Counted-v0", Counted)


def test_self_play(patched, tmp_path):
    """Ten iterations: the opponents are the random player, then the agents after 3, 6 and 9 iterations, to the bit, of
    which two are kept. A resumed run meets those two. No move of either side is illegal."""
    script = patched("ppo_discrete", "self_play")
    settings = {"env_id": "Counted-v0", "opponent_interval": 3, "num_opponents": 2, "anneal_lr": False}
    args = script.Args(**TEN | settings, learning_rate=1e-2, runs_dir=str(tmp_path))
    # What a shorter run of the same seed ends with is what the long one has at that time.
    past = [flat(script.train(dataclasses.replace(args, total_timesteps=64 * n))[0]) for n in (3, 6, 9)]

    def met():
        """Which of the past agents the opponents were, in the order of their first moves; None is the random one."""
        found = [player and [torch.equal(flat(player), x) for x in past].index(True) for player in Counted.players]
        return [None if number is None else 3 * number + 3 for number in found]

    Counted.players.clear()
    Counted.moves.update({1.0: 0, -1.0: 0})
    _, run_dir = script.train(args)
    assert Counted.moves[1.0] >= 640 and Counted.moves[-1.0] > 500
    assert list(dict.fromkeys(met())) == [None, 3, 6, 9] and met()[-2:] == [6, 9]
    Counted.players.clear()
    script.train(dataclasses.replace(args, total_timesteps=704, resume=str(run_dir)))
    assert sorted(met()) == [6, 9]


# ---------------------------------------------------------------------------------------------------- shared_parameters


class ThreeAgents:
    """PettingZoo's parallel interface, written out. Observed are the agent's number k, the time and a number of the
    game, which its seed gives. Agent k earns 10 k for playing action k - 1, otherwise k. The third one leaves after two
    steps. The game ends after four, by a time limit for the first and for good for the second."""

    possible_agents = ["one", "two", "three"]  # noqa: RUF012
    played = []  # noqa: RUF012

    def observation_space(self, name):
        return gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def action_space(self, name):
        return gym.spaces.Discrete(3)

    def observe(self):
        return {x: np.float32([self.possible_agents.index(x) + 1, self.time, self.number]) for x in self.agents}

    def reset(self, seed=None, options=None):
        self.number = self.number + 0.5 if seed is None else seed % 1000
        self.agents, self.time = list(self.possible_agents), 0
        return self.observe(), {name: {} for name in self.agents}

    def step(self, actions):
        assert list(actions) == self.agents
        self.time += 1
        obs, number = self.observe(), {name: k + 1 for k, name in enumerate(self.possible_agents)}
        rewards = {x: number[x] * (10.0 if action == number[x] - 1 else 1.0) for x, action in actions.items()}
        ended = {"one": False, "two": self.time == 4, "three": self.time == 2}
        truncated = {"one": self.time == 4, "two": False, "three": False}
        flags = [{name: flag[name] for name in self.agents} for flag in (ended, truncated)]
        self.agents = [name for name in self.agents if not ended[name] and not truncated[name]]
        return obs, rewards, *flags, {name: {} for name in obs}


parallel_env = ThreeAgents
GAME = "test_recipes_discrete:parallel_env"


def test_agents_are_columns(patched):
    """Two games of three agents, as six columns, against what the game's description says."""
    script = patched("ppo_discrete", "shared_parameters")
    envs = script.make_envs(script.Args(env_id=GAME), 6)
    obs, _ = envs.reset(seed=[7, 8, 9, 507, 508, 509])
    assert obs.tolist() == [[k, 0, number] for number in (7, 507) for k in (1, 2, 3)]
    actions = np.array([0, 0, 0, 2, 1, 2])
    for t in range(1, 5):
        obs, rewards, terminated, truncated, infos = envs.step(actions)
        alive = [3] if t <= 2 else []
        assert rewards.tolist() == [10, 2, 3 * (t <= 2), 1, 20, 30 * (t <= 2)]
        expected = [[k, t, x] if k < 3 or alive else [0, 0, 0] for x in (7, 507) for k in (1, 2, 3)]
        if t < 4:
            assert obs.tolist() == expected and not (terminated | truncated).any() and not infos
    assert infos["final_obs"].tolist() == expected
    assert infos["final_obs"][truncated].tolist() == [[1, 4, 7], [1, 4, 507]]
    assert terminated.tolist() == [False, True, True] * 2 and truncated.tolist() == [True, False, False] * 2
    assert obs.tolist() == [[k, 0, x] for x in (7.5, 507.5) for k in (1, 2, 3)]
    with pytest.raises(SystemExit):
        script.make_envs(script.Args(env_id=GAME), 4)


def test_shared_parameters(patched, tmp_path):
    """One network plays all agents, each as it should. The game is worth 4 * 10, 4 * 20 and 2 * 30 to them."""
    script = patched("ppo_discrete", "shared_parameters")
    settings = {"env_id": GAME, "num_envs": 12, "num_steps": 32, "total_timesteps": 3840, "learning_rate": 1e-2}
    _, run_dir = script.train(script.Args(**SMALL | settings, runs_dir=str(tmp_path)))
    assert script.evaluate(script.load_agent(run_dir), GAME, 2, seed=1).tolist() == [60.0, 60.0]
    table = episodes(run_dir)[1:]
    assert len(table) == 12 * 80 and {length for _, _, length in table} == {"4"}


# ---------------------------------------------------------------------------------------------------- exact_resume


class Wanderer(gym.Env):
    """Random steps, from its own random numbers, added to the actions."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (2,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.normal(size=2)
        return self.place.astype(np.float32), {}

    def step(self, action):
        self.place += action + self.np_random.normal(size=2)
        return (
            self.place.astype(np.float32),
            -float(np.abs(self.place).sum()),
            bool(np.abs(self.place).max() > 9),
            False,
            {},
        )


gym.register("Wanderer-v0", Wanderer, max_episode_steps=50)


class Killed(Exception):
    pass


class Kill:
    """Stop signals, which `train` reads behind every iteration. The eighth reading ends the run as a crash does."""

    readings = 0

    def __iter__(self):
        self.readings += 1
        if self.readings == 8:
            raise Killed
        return iter(())


@pytest.mark.parametrize("env_id", ["InvertedPendulum-v4", "Wanderer-v0", "box/Chain-v0"])
def test_exact_resume(env_id, patched, tmp_path, capsys):
    """The run that was killed in its eighth iteration, and went on from the checkpoint of the sixth, ends with the same
    agent and the same episodes as one that was not. Without the recipe it does not. The chain counts its episodes, and
    does not repeat itself: the run goes on with new ones."""
    settings = {"env_id": env_id, "checkpoint_interval": 3, "stagger_envs": True, "recompute_advantages": False}
    for recipes in (["exact_resume"], []):
        script = patched("ppo_continuous", *recipes)
        args = script.Args(**TEN | settings, runs_dir=str(tmp_path / f"runs{len(recipes)}"))
        whole, run_dir = script.train(args)
        args.runs_dir += "-killed"
        with pytest.raises(Killed):
            script.train(args, Kill())
        (other_dir,) = Path(args.runs_dir).iterdir()
        assert script.load_checkpoint(other_dir)["global_step"] == 6 * 64
        resumed, _ = script.train(dataclasses.replace(args, resume=str(other_dir)))
        states = [agent.state_dict() for agent in (whole, resumed)]
        equal = all(torch.equal(value, states[1][name]) for name, value in states[0].items())
        exact = recipes != [] and env_id != "box/Chain-v0"
        assert equal == exact and (episodes(run_dir) == episodes(other_dir)) == exact
        assert ("new episodes" in capsys.readouterr().out) == (recipes != [] and env_id == "box/Chain-v0")


# ---------------------------------------------------------------------------------------------------- cpu_ranks

RANK = """
import importlib, os, sys, torch
import probes

def counted(function, name):
    def call(*arguments):
        counts[name] += 1
        return function(*arguments)
    return call

torch.distributed.all_reduce, found = counted(torch.distributed.all_reduce, "gloo"), []
torch.distributed.destroy_process_group = lambda: None  # both runs in one process group
for folder in sys.argv[1:3]:
    sys.path.insert(0, folder)
    script = importlib.import_module("ppo_continuous")
    counts = {"gloo": 0, "shared": 0}
    if hasattr(script, "SharedMemory"):
        script.SharedMemory.average = counted(script.SharedMemory.average, "shared")
    agent, _ = script.train(script.parse_args(sys.argv[3:]))
    found.append([counts, agent.state_dict()])
    torch.distributed.init_process_group = lambda *arguments: None
    del sys.modules["ppo_continuous"]
torch.save(found, f"rank-{os.environ['RANK']}.pt")
"""


def test_cpu_ranks(patched, tmp_path):
    """Through shared memory, and without a call of gloo, two ranks end with the same weights and statistics to the bit;
    gloo's are the same within rounding. Nothing is left in /dev/shm."""
    before = set(os.listdir("/dev/shm"))
    folder = Path(patched("ppo_continuous", "cpu_ranks").__file__).parent
    (tmp_path / "rank.py").write_text(RANK)
    flags = flags_of(**TEN, env_id="box/Target-v0", learning_rate=1e-2)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "rank.py"]
    environment = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 100}
    done = subprocess.run([*command, ROOT, folder, *flags], **options)
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1)]
    for (gloo_counts, gloo), (counts, agent) in ranks:
        assert gloo_counts["gloo"] > 100 and counts == {"gloo": 0, "shared": gloo_counts["gloo"]}
        for name, value in agent.items():
            assert torch.equal(value, ranks[0][1][1][name])
            torch.testing.assert_close(value, gloo[name], rtol=1e-4, atol=1e-5)
    assert set(os.listdir("/dev/shm")) <= before


def test_a_dead_rank(patched):
    """Nobody waits for it for ever; others that are only slow are waited for."""
    script = patched("ppo_continuous", "cpu_ranks")
    gone = subprocess.Popen(["true"])
    gone.wait()
    memory = object.__new__(script.SharedMemory)
    memory.rank, memory.number, memory.rows = 0, 0, np.zeros((2, 2, 16), np.uint8)
    memory.numbers, memory.processes = np.zeros(2, np.int64), np.array([os.getpid(), gone.pid])
    with pytest.raises(ProcessLookupError):
        memory.average(torch.ones(2))
    memory.number, memory.processes[1] = 0, os.getpid()
    memory.rows[1, 1, :8].view(np.float32)[:] = [3.0, 7.0]
    threading.Timer(0.3, lambda: memory.numbers.fill(1)).start()
    x = torch.ones(2)
    memory.average(x)
    assert x.tolist() == [2.0, 4.0]
