"""Corners that somebody turns some day: odd environments, folders, arguments."""

import dataclasses
import importlib
import json
import random
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ONE, REAL_ENV, ROOT, probe

TALK = {  # infos that a vector of environments cannot gather: what the n-th one is
    "none": lambda n: None if n % 3 else 3,
    "sizes": lambda n: np.zeros(1 + n % 3),
    "kinds": lambda n: {"a": 1} if n % 2 else 1,
    "large": lambda n: 10**30,
}


class Talkative(gym.Env):
    """Episodes of five steps; observes how many it has made. Infos of many kinds, that of reset is called final_obs."""

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
        return obs, 1.0, False, self.steps == 5, info


class GlobalNumbers(gym.Env):
    """Observes what numpy's global generator gives, and Python's."""

    observation_space = gym.spaces.Box(0, 1, (2,))

    def __init__(self, discrete):
        self.action_space = gym.spaces.Discrete(2) if discrete else gym.spaces.Box(-1, 1, (1,))

    def observe(self):
        return np.array([np.random.random(), random.random()], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, action):
        self.steps = getattr(self, "steps", 0) + 1
        return self.observe(), np.random.random(), False, self.steps % 5 == 0, {}


class BothEnds(gym.Env):
    """Every third step terminates and truncates at once; nothing is observed there."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def __init__(self, discrete):
        self.action_space = gym.spaces.Discrete(2) if discrete else gym.spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        end = self.steps == 3
        return np.full(2, np.nan if end else self.steps, np.float32), 1.0, end, end, {}


for name, discrete in (("box", False), ("discrete", True)):
    gym.register(f"{name}/BothEnds-v0", BothEnds, kwargs={"discrete": discrete})
    gym.register(f"{name}/Talkative-v0", Talkative, kwargs={"discrete": discrete})
    gym.register(f"{name}/GlobalNumbers-v0", GlobalNumbers, kwargs={"discrete": discrete})


def test_both_flags_at_once(script, small_args):
    """The episode has terminated: its last observation does not matter, not even NaN."""
    _, run_dir = script.train(small_args(env_id=probe(script, "BothEnds"), recompute_advantages=True))
    state = script.load_checkpoint(run_dir)["agent"].state_dict()
    assert all(tensor.isfinite().all() for name, tensor in state.items() if not name.startswith("action_"))


@pytest.mark.parametrize("async_envs", [False, True])
def test_infos_that_nothing_reads(script, small_args, async_envs):
    """Stop no run, and do not replace the observation in which an episode ended."""
    envs = script.make_envs(small_args(env_id=probe(script, "Talkative"), async_envs=async_envs), 3)
    envs.reset(seed=[1, 2, 3])
    for _ in range(5):
        *_, infos = envs.step(envs.action_space.sample())
    envs.close()
    assert [obs.tolist() for obs in infos["final_obs"]] == [[5, 5]] * 3


@pytest.mark.parametrize("async_envs", [False, True])
def test_environments_that_draw_from_the_global_generators(script, small_args, async_envs):
    """The same seed gives the same run, and each environment has numbers of its own."""
    runs = []
    for seed in (1, 1, 2):
        args = small_args(env_id=probe(script, "GlobalNumbers"), async_envs=async_envs, seed=seed)
        agent, run_dir = script.train(args)
        returns = [line.split(",")[1] for line in (run_dir / "episodes.csv").read_text().splitlines()[1:]]
        runs.append((returns, agent.state_dict()))
    (first, state), (second, same_state), (other, _) = runs
    assert len(first) == len(set(first)) > 40 and first == second != other
    torch.testing.assert_close(state, same_state, atol=0, rtol=0)


def test_evaluation_has_noise_of_its_own(script, small_args):
    """Whatever the environment draws from, an evaluation repeats itself. It leaves the policy's noise as it was."""
    env_id = probe(script, "GlobalNumbers")
    agent, _ = script.train(small_args(env_id=env_id))
    torch.manual_seed(7)
    expected = torch.rand(())
    torch.manual_seed(7)
    returns = script.evaluate(agent, env_id, 3, seed=1, deterministic=False)
    assert torch.rand(()) == expected
    np.testing.assert_array_equal(returns, script.evaluate(agent, env_id, 3, seed=1, deterministic=False))
    assert len(set(returns)) == 3 and (returns != script.evaluate(agent, env_id, 3, seed=2)).any()


def test_a_suite_knows_its_runs(tmp_path):
    """Names that begin alike: `slow`, seed 1, is not the run of `slow__1`."""
    sys.path.insert(0, str(ROOT / "benchmark"))
    import run as suites

    def job(exp_name):
        args = suites.Args("classic", seeds=1, tasks=("CartPole-v1",), total_timesteps=4096)
        args = dataclasses.replace(args, exp_name=exp_name, runs_dir=str(tmp_path))
        return suites.make_jobs(args)[0]

    folder = tmp_path / "CartPole-v1__slow__1__1__1795377113.372"
    folder.mkdir()
    (folder / "checkpoint.pt").touch()
    (folder / "args.json").write_text(json.dumps(vars(job("slow__1").parsed)))
    assert suites.find_run(job("slow__1")) == folder and suites.find_run(job("slow")) is None
    with pytest.raises(SystemExit, match="--eval-episodes must be a finite number"):
        suites.make_jobs(suites.Args("classic", eval_episodes=0))


@ONE
def test_figures_of_returns_between_0_and_1(tmp_path, script, small_args):
    """Keep the digits that tell settings apart (report.py, and tune.py, which maximises this)."""
    sys.path.insert(0, str(ROOT / "benchmark"))
    import report

    _, run_dir = script.train(small_args(env_id=REAL_ENV[script.__name__], compile=False))
    rows = "".join(f"{n},{int(n % 100 < 74)},1,1.0\n" for n in range(100))
    (run_dir / "episodes.csv").write_text("global_step,episodic_return,episodic_length,seconds\n" + rows)
    assert float(report.summarise(run_dir)["last_100_mean"]) == 0.74


class Half(gym.Env):
    """Actions of 16-bit numbers between 0.5 and 1, and none other."""

    observation_space, action_space = gym.spaces.Box(-9, 9, (1,), np.float32), gym.spaces.Box(0.5, 1, (2,), np.float16)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return np.zeros(1, np.float32), -1.0, True, False, {}


gym.register("box/Half-v0", Half)


@pytest.mark.parametrize("script", ["ppo_continuous", "ppo_rnn"], indirect=True)
def test_half_actions(script, small_args):
    agent, _ = script.train(small_args(env_id="box/Half-v0"))
    script.evaluate(agent, "box/Half-v0", 1, 0)


@pytest.mark.parametrize("changes", [{}, {"norm_adv": "minibatch", "num_minibatches": 32}], ids=["first", "one row"])
def test_gpu_sim_with_bounds_above_0_and_minibatches_of_one_step(tmp_path, changes):
    sys.path.insert(0, str(ROOT / "variants"))
    sim = importlib.import_module("ppo_gpu_sim")
    small = {"num_envs": 4, "num_steps": 8, "num_minibatches": 2, "hidden_size": 8, "compile": False}
    sim.train(sim.Args(env_id="box/Half-v0", runs_dir=str(tmp_path), total_timesteps=64, **small | changes))


def test_report_passes_over_other_folders(tmp_path):
    """Run folders of scripts with other names, and what else has an args.json."""
    sys.path.insert(0, str(ROOT / "benchmark"))
    import report

    (tmp_path / "args.json").write_text("{}")
    for scripts in ([], ["mine.py"], ["ppo_discrete.py", "ppo_discrete_old.py"]):
        for name in scripts:
            (tmp_path / name).touch()
        with pytest.raises(SystemExit, match="none of these"):
            report.write_csv("some", [tmp_path])
