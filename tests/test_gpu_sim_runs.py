"""variants/ppo_gpu_sim.py: run folders, resuming, evaluations, export, ranks, the command line."""

import dataclasses
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch_envs
from conftest import ROOT, flags_of, scalars
from forks import two_ranks
from gpu_sim import SMALL, env_id_of, make_args, script


class Remembering(torch_envs.Drift):
    """Remembers the seeds of its resets, and since the last one what it was given and what it gave. Whatever the seed,
    it starts in the same way."""

    def reset(self, seed=None):
        self.last_seed, (obs, infos) = seed, super().reset(7)
        self.obs, self.actions, self.rewards, self.ends = [obs], [], [], []
        return obs, infos

    def step(self, actions):
        obs, rewards, terminations, truncations, infos = super().step(actions)
        self.obs.append(obs)
        self.actions.append(actions)
        self.rewards.append(rewards)
        self.ends.append(terminations | truncations)
        return obs, rewards, terminations, truncations, infos


@pytest.fixture
def remembering():
    return Remembering(16, torch.device("cpu"), seed=1)


def test_episodes_and_statistics(tmp_path, remembering):
    """episodes.csv has every finished episode once, where it ended, with its raw return and length, whatever
    --reward-scale. Statistics have seen every observation that was acted on once, the first too, the last not yet."""
    settings = {"reward_scale": 0.1, "total_timesteps": 4000}
    agent, run_dir = script.train(make_args(tmp_path, env_id=env_id_of(lambda *_: remembering), **settings))
    header, *rows = (line.split(",") for line in (run_dir / "episodes.csv").read_text().splitlines())
    assert header == ["global_step", "episodic_return", "episodic_length", "seconds"]
    rewards, expected, begun = torch.stack(remembering.rewards), [], [0] * 16
    for t, ends in enumerate(remembering.ends, start=1):
        for n in ends.nonzero().flatten().tolist():
            expected.append([16 * t, rewards[begun[n] : t, n].sum().item(), t - begun[n]])
            begun[n] = t
    assert len(expected) > 50
    np.testing.assert_allclose([[float(x) for x in row[:3]] for row in rows], expected, atol=1e-4, rtol=1e-4)
    for group, rms in (("policy", agent.obs_rms), ("critic", agent.critic_obs_rms)):
        everything = torch.cat([obs[group] for obs in remembering.obs[:-1]]).double()
        assert len(everything) == 4000 == pytest.approx(rms.count.item())
        torch.testing.assert_close(rms.mean, everything.mean(0), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(rms.var, everything.var(0, correction=0), atol=1e-4, rtol=1e-4)


def stop_after_one_iteration(args, monkeypatch):
    """As Ctrl-C in the second iteration. -> the run folder"""
    save, run_dirs = script.Run.save, []

    def save_once(run, *arguments, **options):
        if run_dirs:
            raise KeyboardInterrupt
        run_dirs.append(run.dir)
        save(run, *arguments, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(script.Run, "save", save_once)
        script.train(args)
    return run_dirs[0]


def test_resume(tmp_path, monkeypatch):
    """The learner is that of the checkpoint, to the last bit. Two resumptions of one checkpoint are the same run."""
    args = make_args(tmp_path, seed=3, anneal_lr=True, desired_kl=None)
    run_dir = stop_after_one_iteration(args, monkeypatch)
    saved = script.load_checkpoint(run_dir)
    assert saved["global_step"] == 160
    first_rows = (run_dir / "episodes.csv").read_text()[: saved["episodes_size"]].splitlines()
    with open(run_dir / "episodes.csv", "a") as file:  # what a kill may leave behind
        file.write("320,1.5,10,3.0\n160,1.5,7\n160,x")
    copy = tmp_path / "runs" / "copy"
    shutil.copytree(run_dir, copy)
    agent, _ = script.train(dataclasses.replace(args, total_timesteps=160), run_dir)  # no step is left to do
    torch.testing.assert_close(agent.state_dict(), saved["agent"], atol=0, rtol=0)
    assert (run_dir / "episodes.csv").read_text().splitlines() == first_rows

    one, other = (script.train(args, path)[0] for path in (run_dir, copy))
    assert not torch.equal(one.actor[0].weight, agent.actor[0].weight)
    for name, x in one.state_dict().items():
        assert torch.equal(x, other.state_dict()[name]), name
    assert one.obs_rms.count.item() == pytest.approx(800)
    for path in (run_dir, copy):
        assert script.load_checkpoint(path)["global_step"] == 800
        rates = [value for _, value in scalars(path)["charts/learning_rate"]]
        assert rates == pytest.approx([1e-3, 0.8e-3, 0.6e-3, 0.4e-3, 0.2e-3])
    rows, others = ((path / "episodes.csv").read_text().splitlines() for path in (run_dir, copy))
    steps = [int(row.split(",")[0]) for row in rows[1:]]
    assert rows[: len(first_rows)] == first_rows and steps == sorted(steps) and steps[-1] > 160
    assert [row.rsplit(",", 1)[0] for row in rows] == [row.rsplit(",", 1)[0] for row in others]


def test_seeds(tmp_path, remembering):
    """A resumption gets new numbers, for simulators as for noise. So does another seed."""
    settings = {"total_timesteps": 160, "learning_rate": 1e-30, "desired_kl": None, "norm_obs": False}
    args = make_args(tmp_path, env_id=env_id_of(lambda *_: remembering), **settings)

    def numbers(args, resume=None):
        _, run_dir = script.train(args, resume)
        return run_dir, torch.tensor([*remembering.actions[0][:3, 0], remembering.last_seed])

    run_dir, first = numbers(args)
    _, resumed = numbers(dataclasses.replace(args, total_timesteps=320), run_dir)
    (_, other), (_, again) = numbers(dataclasses.replace(args, seed=2)), numbers(args)
    assert torch.equal(first, again) and (first != resumed).all() and (first != other).all()


def test_export(tmp_path, monkeypatch, main):
    """The file alone, without this project and without a critic, gives the actions of the agent, for any number of
    observations. A line says what ONNX needs."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for update in ("rsl_rl", "google"):
        agent, run_dir = script.train(make_args(tmp_path, update))
        path, obs = run_dir / "actor.pt2", 2 * torch.randn(5, 2)
        lines = main(script, "--export", "latest", "--runs-dir", tmp_path / "runs").stdout.splitlines()
        assert lines == [str(path), "for actor.onnx: pip install onnx onnxscript"]
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "ppo_gpu_sim", None)  # as if it were not installed
            actor = torch.export.load(path).module()
        actions = actor(obs)
        torch.testing.assert_close(actions, agent.predict(obs), atol=1e-6, rtol=1e-5)
        names = list(actor.state_dict())
        assert "actor.0.weight" in names and not any("critic" in name for name in names)


def test_export_onnx(tmp_path, main):
    """One file with named inputs and outputs, equal to the agent."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: no ONNX file is read")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed: no ONNX file is written")
    for update in ("rsl_rl", "google"):
        agent, run_dir = script.train(make_args(tmp_path, update))
        exported = main(script, "--export", run_dir)
        assert exported.stdout.splitlines() == [str(run_dir / "actor.pt2"), str(run_dir / "actor.onnx")]
        assert {path.name for path in run_dir.glob("actor*")} == {"actor.pt2", "actor.onnx"}
        session = onnxruntime.InferenceSession(run_dir / "actor.onnx")
        for num_robots in (1, 5):
            obs = 3 * torch.randn(num_robots, 2)
            (actions,) = session.run(["actions"], {"observations": obs.numpy()})
            torch.testing.assert_close(torch.from_numpy(actions), agent.predict(obs), atol=1e-5, rtol=0)


def test_two_ranks(tmp_path, monkeypatch):
    """As torchrun starts them: one run folder, the same weights on both, episodes of both, the statistics of what both
    observed. Both take up the checkpoint and stay equal."""
    made = []
    monkeypatch.setattr(torch_envs, "drift", lambda *given: made.append((given[2], Remembering(*given))) or made[-1][1])

    def train(rank):
        agent, _ = script.train(make_args(tmp_path))
        ((seed, envs),) = made
        seen = torch.cat([obs["policy"] for obs in envs.obs[:-1]]), torch.stack(envs.ends).sum()
        torch.save([agent.state_dict(), *seen, seed, envs.last_seed], tmp_path / f"rank-{rank}")

    def resume(rank):
        (run_dir,) = (tmp_path / "runs").iterdir()
        agent, _ = script.train(make_args(tmp_path, total_timesteps=1600), run_dir)
        torch.save(agent.state_dict(), tmp_path / f"resumed-{rank}")

    two_ranks(train)
    (one, obs, ends, *seeds), (other, other_obs, other_ends, *other_seeds) = (
        torch.load(tmp_path / f"rank-{rank}") for rank in (0, 1)
    )
    torch.testing.assert_close(one["obs_rms.mean"], torch.cat([obs, other_obs]).double().mean(0), atol=1e-6, rtol=0)
    assert all(seed != other for seed, other in zip(seeds, other_seeds))  # of the simulators, of their last reset
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert one["obs_rms.count"].item() == pytest.approx(800)  # what both have seen
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert script.load_checkpoint(run_dir)["global_step"] == 800
    steps = [int(row.split(",")[0]) for row in (run_dir / "episodes.csv").read_text().splitlines()[1:]]
    assert steps == sorted(steps) and len(steps) == ends + other_ends
    two_ranks(resume)
    resumed = [torch.load(tmp_path / f"resumed-{rank}") for rank in (0, 1)]
    torch.testing.assert_close(*resumed, atol=0, rtol=0)


def test_interrupt_and_resume_latest(tmp_path, main):
    """Ctrl-C costs what came after the last checkpoint; --resume latest goes on from there."""
    # Long iterations: a signal that meets TensorBoard's queue can keep its thread waiting for two minutes.
    sizes = {"total_timesteps": 10**8, "hidden_sizes": 16, "num_steps": 1000}
    flags = flags_of(**SMALL | sizes, runs_dir=tmp_path / "runs")
    command = [sys.executable, ROOT / "variants" / "ppo_gpu_sim.py", *flags, "--checkpoint-interval=0"]
    # A shell may have started the tests in the background, where Ctrl-C is ignored; children inherit that.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, cwd=ROOT / "tests", preexec_fn=heed)
    end = time.monotonic() + 60
    while not list(tmp_path.glob("runs/*/checkpoint.pt")):
        assert time.monotonic() < end
        time.sleep(0.05)
    (run_dir,) = (tmp_path / "runs").iterdir()
    refused = main(script, "--resume", run_dir, "--env-id", SMALL["env_id"], "--total-timesteps=16000")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert refused.returncode == 2 and f"another process is training in {run_dir}" in refused.stderr
    saved = script.load_checkpoint(run_dir)["global_step"]
    assert 0 < saved < 10**8 and saved % 16_000 == 0
    words = "--resume=latest", "--runs-dir", tmp_path / "runs", "--env-id", SMALL["env_id"]
    finished = main(script, *words, f"--total-timesteps={saved + 32_000}")
    assert finished.returncode == 0, finished.stderr
    assert f"python {os.path.relpath(script.__file__)} --evaluate {run_dir}" in finished.stdout
    assert script.load_checkpoint(run_dir)["global_step"] == saved + 32_000


def test_command_line(tmp_path, main):
    """The forms that sweeps send; an evaluation says the same twice."""
    flags = ["--runs-dir", tmp_path, "--num-steps=10", "--num-envs=8", "--num_minibatches=2", "--total_timesteps=1e2"]
    main(script, "--update=google", "--env-id", "torch_envs:drift", "--compile=False", "--norm_obs=True", *flags)
    (run_dir,) = tmp_path.iterdir()
    args = json.loads((run_dir / "args.json").read_text())
    assert args["gamma"] == 0.97 and args["num_steps"] == 10
    words = "--evaluate", run_dir, "--eval-episodes=8"
    # A checkpoint does not choose what is imported.
    refused = main(script, *words)
    assert refused.returncode == 2 and "add --env-id torch_envs:drift" in refused.stderr
    first, second = (main(script, *words, "--env-id=torch_envs:drift") for _ in range(2))
    assert first == second and first.stdout.startswith("8 episodes: mean ") and first.returncode == 0


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--env-id", "nothing:make"], "No module named 'nothing'"),
        (["--env-id", "CartPole-v1"], "has actions Discrete"),
        (["--env-id", "NoSuchEnv-v0"], "NoSuchEnv"),
        (["--unroll-length", "7"], "--unroll-length must divide --num-steps 10"),
        (["--recompute-targets"], "needs --unroll-length"),
        (["--num-minibatches", "7"], "must divide 160 steps or unrolls: choose one of [1, 2, 4, 5"),
        (["--update", "google", "--timeouts", "auto"], "no --timeouts auto"),
        (["--update", "google", "--norm-adv", "rollout"], "no --norm-adv rollout"),
        (["--update", "google", "--env-id", "torch_envs:unbounded"], "--policy normal"),
        (["--env-id", "torch_envs:one"], "torch_envs:one made 1 environments instead of 16"),
        (["--anneal-lr"], "--desired-kl None"),
        (["--resume", "latest"], "no run of ppo_gpu_sim.py"),
        (["--export", "latest"], "no run of ppo_gpu_sim.py"),
    ],
)
def test_wrong_input(tmp_path, flags, words, main):
    """One line, and no run folder."""
    defaults = ["--env-id", "torch_envs:drift", "--num-envs", "16", "--num-steps", "10", "--runs-dir", tmp_path]
    refused = main(script, *defaults, "--no-compile", *flags)
    assert refused.returncode == 2
    last = refused.stderr.splitlines()[-1]
    assert last.startswith("ppo_gpu_sim.py: error: ") and words in last
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("critic", [[], ["--critic_hidden_sizes=[24]"]])
def test_hidden_sizes(tmp_path, main, critic):
    """As a user and as wandb gives them; the critic has the actor's unless it gets its own."""
    flags = flags_of(**SMALL | {"total_timesteps": 160, "runs_dir": tmp_path})
    flags = [flag for flag in flags if not flag.startswith("--hidden")]
    assert main(script, *flags, "--hidden-sizes", "16", "8", *critic).returncode == 0
    (run_dir,) = tmp_path.iterdir()
    agent = script.load_agent(run_dir)
    sizes = [[layer.out_features for layer in network[::2]] for network in (agent.actor, agent.critic)]
    assert sizes == [[16, 8, 1], [24, 1] if critic else [16, 8, 1]]


class GlobalNoise(gym.Env):
    """Draws from the global generators of Python, numpy and torch."""

    observation_space, action_space = gym.spaces.Box(-9, 9, (3,)), gym.spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        return np.float32([random.random(), np.random.random(), torch.rand(()).item()]), {}

    def step(self, action):
        return self.reset()[0], float(action[0]), False, random.random() < 0.1, {}


gym.register("box/GlobalNoise-v0", GlobalNoise)


def test_global_generators(tmp_path):
    """Same seed, same weights; another seed, other observations."""
    agents = []
    for seed in (1, 1, 2):
        torch.rand(3), np.random.random(), random.random()
        agents.append(script.train(make_args(tmp_path, env_id="box/GlobalNoise-v0", seed=seed))[0])
    one, same, other = (agent.obs_rms.mean for agent in agents)
    torch.testing.assert_close(agents[0].state_dict(), agents[1].state_dict(), atol=0, rtol=0)
    assert torch.equal(one, same) and (one != other).all()
