"""Runs: same seed, kill and resume, checkpoints, evaluation, Ctrl-C, learning."""

import csv
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import REAL_ENV, ROOT, TESTS, act, flags_of, probe, run, scalars
from torch.utils.tensorboard import SummaryWriter

CHAIN = {"num_steps": 8, "num_minibatches": 2}  # every rollout is one whole episode


def rows(run_dir):
    with open(run_dir / "episodes.csv") as file:
        return list(csv.reader(file))


def assert_same_learner(one, two):
    """Two checkpoints whose every tensor and number is equal to the bit, but for the time they took."""
    assert one["iteration"] == two["iteration"] and one["global_step"] == two["global_step"]
    for name in ("optimizer", "rng_states"):
        torch.testing.assert_close(one[name], two[name], atol=0, rtol=0)
    torch.testing.assert_close(one["agent"].state_dict(), two["agent"].state_dict(), atol=0, rtol=0)


def test_same_seed_same_run(script, small_args):
    """Bit-equal; another seed gives another run, and every environment has a seed of its own."""
    checkpoints = [script.load_checkpoint(script.train(small_args(seed=seed))[1]) for seed in (3, 3, 4)]
    assert_same_learner(checkpoints[0], checkpoints[1])
    assert not torch.equal(checkpoints[0]["agent"].critic[0].weight, checkpoints[2]["agent"].critic[0].weight)


def test_environments_have_different_seeds(script, small_args, minibatches):
    one_step = {"total_timesteps": 32, "num_envs": 32, "num_steps": 1, "num_minibatches": 1, "update_epochs": 1}
    script.train(small_args(env_id=REAL_ENV[script.__name__], norm_obs=False, **one_step))
    assert len(torch.unique(minibatches[0][3], dim=0)) == 32


LONGER = {"ppo_continuous": "Pendulum-v1", "ppo_discrete": "CartPole-v1", "ppo_rnn": "CartPole-v1"}
CASES = {
    "defaults": (8, {}),
    "other": (8, {"desired_kl": 0.01, "anneal_clip": True, "clip_vloss": True}),
    "mid-episode": (40, {"env_id": LONGER}),
    "mid-episode, processes": (8, {"env_id": LONGER, "async_envs": True}),
    "mid-episode, first seed": (16, {"env_id": "FirstSeed"}),
}


@pytest.mark.parametrize("iterations, flags", CASES.values(), ids=CASES)
def test_resumed_equals_uninterrupted(script, small_args, iterations, flags):
    """Cut three times, a run is the whole one to the last bit: weights, optimizer, learning rate, schedules,
    statistics, random numbers, episodes and logs; in mid-episode environments, memory and staggered starts, too."""
    flags = CHAIN | {"env_id": "AlignedChain", "checkpoint_interval": iterations // 4} | flags
    env_id = LONGER[script.__name__] if flags["env_id"] is LONGER else probe(script, flags["env_id"])
    flags |= {"env_id": env_id, "total_timesteps": iterations * 32}
    whole = script.train(small_args(**flags))[1]
    original, args = script.save_checkpoint, small_args(exp_name="half", **flags)

    def save_and_die(run_dir, checkpoint):
        original(run_dir, checkpoint)
        raise KeyboardInterrupt

    script.save_checkpoint = save_and_die
    for cut in (1, 2, 3):
        with pytest.raises(KeyboardInterrupt):
            script.train(args)
        (half,) = (path for path in whole.parent.iterdir() if "half" in path.name)
        saved = script.load_checkpoint(half)
        assert saved["iteration"] == cut * iterations // 4
        assert ("Chain" in args.env_id) == (not saved["unfinished"][0]["lengths"].any())
        args = dataclasses.replace(saved["args"], resume=str(half))
    script.save_checkpoint = original
    script.train(args)
    assert_same_learner(script.load_checkpoint(half), script.load_checkpoint(whole))
    assert [row[:3] for row in rows(half)] == [row[:3] for row in rows(whole)]
    assert len(rows(half)) > 1 or flags.get("async_envs")
    one, two = scalars(half), scalars(whole)
    assert one.keys() == two.keys()
    for key in one.keys() - {"charts/SPS"}:
        assert one[key] == two[key], key


ONE_STEP = ["Entropy", "RandomState", "Twister", "Module"]


@pytest.mark.parametrize("case", [*ONE_STEP, "Noise", "Turns", "too long", "seed", "not asked"])
def test_environments_that_cannot_be_put_back(script, small_args, monkeypatch, capsys, case):
    """The run goes on in new episodes and says so: environments that observe, reward or end otherwise the next time, or
    do not tell the state of their random numbers, an episode too long to be kept. With another seed, or with
    --no-resume-episodes, nothing is played again."""
    env_id = LONGER[script.__name__] if " " in case or case == "seed" else probe(script, case)
    _, run_dir = script.train(small_args(env_id=env_id))
    saved = script.load_checkpoint(run_dir)
    if case == "too long":
        saved["unfinished"][0]["actions"] = saved["unfinished"][0]["actions"][-1:]
        script.save_checkpoint(run_dir, saved | {"args": vars(saved["args"]), "agent": saved["agent"].state_dict()})
    replayed, original = [], script.Replayable.reset

    def reset(member, **options):
        replayed.append(member.to_replay)
        return original(member, **options)

    monkeypatch.setattr(script.Replayable, "reset", reset)
    more = {"resume": str(run_dir), "total_timesteps": 512, "resume_episodes": case != "not asked"}
    capsys.readouterr()
    script.train(dataclasses.replace(saved["args"], **more, seed=2 if case == "seed" else 1))
    assert ("new episodes" in capsys.readouterr().out) == (case not in ("seed", "not asked"))
    assert any(replayed) == (case in ("Entropy", "Noise", "Turns"))
    end = script.load_checkpoint(run_dir)
    assert end["global_step"] == 512 and (end["unfinished"] == [None]) == (case == "not asked")
    if case in ONE_STEP:  # none is lost, none is counted twice
        assert [int(row[0]) for row in rows(run_dir)[1:]] == [step for step in range(4, 513, 4) for _ in range(4)]


def start(script, runs_dir, **args):
    command = [sys.executable, str(ROOT / f"{script}.py"), f"--runs-dir={runs_dir}", *flags_of(**args)]
    return subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a process group of its own, as a job of a terminal
    )


def wait_for(condition, process, seconds=120):
    for _ in range(int(seconds * 50)):
        if result := condition():
            return result
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    raise TimeoutError


def checkpointed_iteration(script, runs_dir):
    for path in runs_dir.glob("*/checkpoint.pt"):
        return script.load_checkpoint(path.parent)["iteration"]
    return 0


LONG = {"total_timesteps": 16 * 4 * 150, "num_envs": 4, "num_steps": 16, "num_minibatches": 2, "update_epochs": 1}
LONG |= {"compile": False, "checkpoint_interval": 7, "seed": 5}


def test_kill_and_resume(script, tmp_path):
    """kill -9 in the middle: in the end learner and episodes.csv are those of an undisturbed run of the same seed."""
    name = script.__name__
    env_id = "probes:" + probe(script)
    process = start(name, tmp_path / "killed", env_id=env_id, **LONG)
    wait_for(lambda: checkpointed_iteration(script, tmp_path / "killed") >= 21, process)
    process.kill()
    process.wait()
    (killed,) = (tmp_path / "killed").iterdir()
    saved = script.load_checkpoint(killed)
    with open(killed / "episodes.csv", "a") as file:  # what a kill in the middle of a line leaves
        file.write(f"{saved['global_step'] + 64},-0.5,1,9.9\n{saved['global_step'] + 64},-0.")
    with SummaryWriter(killed) as writer:  # and what TensorBoard may have been told before it
        writer.add_scalar("losses/value_loss", 99.0, saved["global_step"] + 1)

    finished = run(name, "--resume", killed)
    assert finished.returncode == 0, finished.stderr
    whole = run(name, f"--runs-dir={tmp_path / 'whole'}", *flags_of(env_id=env_id, **LONG))
    assert whole.returncode == 0, whole.stderr
    (whole,) = (tmp_path / "whole").iterdir()
    resumed_rows, whole_rows = rows(killed), rows(whole)
    assert [row[:3] for row in resumed_rows] == [row[:3] for row in whole_rows]
    steps = [int(row[0]) for row in resumed_rows[1:]]
    assert steps == sorted(steps) and steps[-1] == LONG["total_timesteps"]
    assert all(len(list(group)) == 4 for _, group in itertools.groupby(steps))
    seconds = [float(row[3]) for row in resumed_rows[1:]]
    assert seconds == sorted(seconds)
    end = script.load_checkpoint(killed)
    assert end["global_step"] == LONG["total_timesteps"] and end["iteration"] == 150
    assert_same_learner(end, script.load_checkpoint(whole))
    logged = [step for step, _ in scalars(killed)["losses/value_loss"]]
    assert logged == [64 * iteration for iteration in range(1, 151)]


def test_kill_while_writing_a_checkpoint(script, tmp_path):
    """The process dies with half of its second checkpoint written: the first is whole, and the run goes on from it."""
    name = script.__name__
    flags = flags_of(env_id="probes:" + probe(script), runs_dir=str(tmp_path), **LONG | {"total_timesteps": 64 * 20})
    code = f"""
import os, sys, torch, {name} as script
original, calls = torch.save, []
def half(checkpoint, path):
    original(checkpoint, path)
    calls.append(1)
    if len(calls) == 2:
        os.truncate(path, os.path.getsize(path) // 2)
        os._exit(9)
torch.save = half
sys.argv[1:] = {flags!r}
script.main()
"""
    killed = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}"})
    assert killed.returncode == 9
    (run_dir,) = tmp_path.iterdir()
    assert script.load_checkpoint(run_dir)["iteration"] == 7
    finished = run(name, "--resume", run_dir)
    assert finished.returncode == 0, finished.stderr
    assert script.load_checkpoint(run_dir)["iteration"] == 20


@pytest.mark.parametrize(
    "script, signal_number, asynchronous",
    [
        ("ppo_continuous", signal.SIGINT, True),
        ("ppo_discrete", signal.SIGINT, False),
        ("ppo_rnn", signal.SIGTERM, True),
        ("ppo_continuous", signal.SIGTERM, False),
    ],
    indirect=["script"],
)
def test_interrupt_saves(script, tmp_path, signal_number, asynchronous):
    """Ctrl-C, which a terminal sends to the environments' processes too, and SIGTERM end the run after the iteration,
    saved, with the shell's code for that signal."""
    args = LONG | {"checkpoint_interval": 1000, "async_envs": asynchronous}
    process = start(script.__name__, tmp_path, env_id="probes:" + probe(script), **args)
    wait_for(
        lambda: any(len(rows(path)) > 100 for path in tmp_path.iterdir() if (path / "episodes.csv").exists()), process
    )
    (os.killpg if signal_number == signal.SIGINT else os.kill)(process.pid, signal_number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + signal_number, output
    (run_dir,) = tmp_path.iterdir()
    assert f"--resume {run_dir}" in output and "Traceback" not in output
    saved = script.load_checkpoint(run_dir)
    assert 0 < saved["iteration"] < 150
    assert int(rows(run_dir)[-1][0]) == saved["global_step"]


def test_resume_with_another_learning_rate(script, small_args):
    """What is given again with --resume counts, also where nothing anneals it."""
    _, run_dir = script.train(small_args(anneal_lr=False))
    args = script.parse_args(["--learning-rate=1e-5"], default=script.load_checkpoint(run_dir)["args"])
    args.resume, args.total_timesteps = str(run_dir), 512
    script.train(args)
    rates = [value for _, value in scalars(run_dir)["charts/learning_rate"]]
    assert rates == pytest.approx([script.Args().learning_rate] * 4 + [1e-5] * 4)


def test_resume_of_a_cuda_checkpoint_on_cpu(script, small_args):
    """The optimizer's settings that belong to a device do not travel with the checkpoint."""
    _, run_dir = script.train(small_args())
    checkpoint = torch.load(run_dir / "checkpoint.pt")
    checkpoint["optimizer"]["param_groups"][0]["capturable"] = True
    torch.save(checkpoint, run_dir / "checkpoint.pt")
    args = script.load_checkpoint(run_dir)["args"]
    args.resume, args.total_timesteps = str(run_dir), 512
    script.train(args)
    assert script.load_checkpoint(run_dir)["iteration"] == 8


def test_run_folder(script, small_args):
    """Everything a run leaves, and what is in it."""
    args = small_args()
    _, run_dir = script.train(args)
    assert run_dir.name.startswith(f"{args.env_id.replace('/', '-')}__{script.__name__}__1__")
    assert json.loads((run_dir / "args.json").read_text()) == vars(args)
    assert (run_dir / f"{script.__name__}.py").read_text() == (ROOT / f"{script.__name__}.py").read_text()
    table = rows(run_dir)
    assert table[0] == ["global_step", "episodic_return", "episodic_length", "seconds"]
    assert len(table) == 1 + 256 and {row[2] for row in table[1:]} == {"1"}
    logged = scalars(run_dir)
    returns = [value for _, value in logged["charts/episodic_return"]]
    np.testing.assert_allclose(returns, [float(row[1]) for row in table[1:]], rtol=1e-4)
    assert logged["charts/last_100_return"][-1][1] == pytest.approx(np.mean(returns[-100:]), rel=1e-5)
    assert not list(run_dir.glob("*.tmp"))


def test_asynchronous_environments(script, small_args):
    """--async-envs only changes where the environments run: the learner is the same to the last bit."""
    args = {"env_id": REAL_ENV[script.__name__], "total_timesteps": 256}
    one, two = (script.load_checkpoint(script.train(small_args(async_envs=a, **args))[1]) for a in (False, True))
    assert_same_learner(one, two)


@pytest.mark.parametrize("async_envs", [False, True])
@pytest.mark.parametrize("script", ["ppo_continuous"], indirect=True)
def test_stagger_envs(script, small_args, async_envs):
    """Four environments whose episodes only end at a limit of 200 steps are cut once after 50, 100 and 150, the fourth
    never: whole episodes end one after the other, and only those are logged. Without it they all end together."""
    args = {
        "env_id": "Pendulum-v1",
        "num_envs": 4,
        "num_steps": 50,
        "total_timesteps": 4 * 450,
        "async_envs": async_envs,
    }
    for stagger_envs, ends in (True, [200, 250, 300, 350, 400, 450]), (False, [200] * 4 + [400] * 4):
        _, run_dir = script.train(small_args(stagger_envs=stagger_envs, **args))
        table = rows(run_dir)[1:]
        assert [int(row[0]) for row in table] == [4 * end for end in ends] and {row[2] for row in table} == {"200"}


@pytest.mark.filterwarnings("ignore")  # gymnasium's, about the shared array
@pytest.mark.parametrize("async_envs", [False, True])
def test_final_observation_is_the_last_one(script, small_args, async_envs):
    """Also of an environment that has begun the next episode in the same array. It is what a truncated episode is
    bootstrapped from."""
    envs = script.make_envs(small_args(env_id=probe(script, "OneArray"), async_envs=async_envs), 2)
    if script.__name__ == "ppo_continuous":
        envs.set_attr("steps_left", [3, 0])
    envs.reset()
    seen = [envs.step(envs.action_space.sample()) for _ in range(5)]
    envs.close()
    if script.__name__ == "ppo_continuous":
        assert seen[2][4]["final_obs"][0].tolist() == [3, 3] and seen[2][0][0].tolist() == [0, 0]
    assert seen[4][4]["final_obs"][1].tolist() == [5, 5] and seen[4][0][1].tolist() == [0, 0]


def test_resume_with_other_actions(script, small_args, capsys):
    """A policy is of no use for actions that mean something else now."""
    _, run_dir = script.train(small_args())
    checkpoint = torch.load(run_dir / "checkpoint.pt")
    (name, *_) = (name for name in checkpoint["agent"] if name in ("action_high", "action_start"))
    checkpoint["agent"][name] += 1
    torch.save(checkpoint, run_dir / "checkpoint.pt")
    args = dataclasses.replace(script.load_checkpoint(run_dir)["args"], resume=str(run_dir), total_timesteps=512)
    with pytest.raises(SystemExit, match=r"^2$"):
        script.train(args)
    assert "has other actions now than when" in capsys.readouterr().err


def test_longer_total_stretches_the_schedules(script, small_args):
    """As README says: after --resume the learning rate is where a run of the new length would have it."""
    args = small_args(anneal_lr=True, desired_kl=None, learning_rate=1e-3)
    _, run_dir = script.train(args)
    iterations = args.total_timesteps // (args.num_envs * args.num_steps)
    script.train(dataclasses.replace(args, resume=str(run_dir), total_timesteps=2 * args.total_timesteps))
    rates = [rate for _, rate in scalars(run_dir)["charts/learning_rate"]]
    fractions = [1 - i / iterations for i in range(iterations)]
    fractions += [1 - i / (2 * iterations) for i in range(iterations, 2 * iterations)]
    assert rates == pytest.approx([1e-3 * fraction for fraction in fractions], rel=1e-5)


class Cutter(gym.Wrapper):
    def step(self, action):
        *step, info = self.env.step(action)
        return *step, info | {"cut": True}


def test_episodes_are_logged_whatever_the_environment_says(script, small_args, monkeypatch):
    """Only what --stagger-envs cuts is left out."""
    make_vec = gym.make_vec
    wrap = lambda *args, wrappers=(), **options: make_vec(*args, wrappers=[Cutter, *wrappers], **options)  # noqa: E731
    monkeypatch.setattr(gym, "make_vec", wrap)
    _, run_dir = script.train(small_args(env_id=probe(script, "Chain")))
    assert len(rows(run_dir)) > 10


def test_episodes_span_rollouts(script, small_args):
    """Chain episodes of 3, 5, 2 and 7 steps in rollouts of 4: whole lengths and raw, undiscounted returns."""
    _, run_dir = script.train(
        small_args(env_id=probe(script, "Chain"), num_steps=4, num_envs=1, total_timesteps=136, num_minibatches=1)
    )
    table = rows(run_dir)[1:]
    lengths = [int(row[2]) for row in table]
    assert sorted(lengths[:4]) == [2, 3, 5, 7] and lengths[:4] * 8 == lengths
    assert [int(row[0]) for row in table] == list(itertools.accumulate(lengths))
    from probes import CHAIN_GAMMA, CHAIN_VALUES

    for row in table:
        length = int(row[2])
        rewards = CHAIN_VALUES[:length] - CHAIN_GAMMA * CHAIN_VALUES[1 : length + 1]
        assert float(row[1]) == pytest.approx(rewards.sum(), rel=1e-5)


def test_evaluation_of_an_agent_on_the_cpu_touches_no_gpu(script, small_args, monkeypatch):
    """Not even to keep its random numbers: it may be somebody else's."""
    args = small_args()
    agent, _ = script.train(args)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: pytest.fail("asked a GPU"))
    script.evaluate(agent, args.env_id, 1, args.seed)


def test_evaluate(script, small_args):
    """In a fresh process, from raw observations: the same returns twice, and no statistic moves."""
    args = small_args(env_id="probes:" + small_args().env_id, total_timesteps=1024)
    agent, run_dir = script.train(args)
    before = (run_dir / "checkpoint.pt").read_bytes()
    outputs = [run(script.__name__, "--evaluate", run_dir, "--eval-episodes=5") for _ in range(2)]
    assert outputs[0].returncode == 0, outputs[0].stderr
    assert outputs[0].stdout == outputs[1].stdout and len(outputs[0].stdout.splitlines()[0].split()) == 6
    assert (run_dir / "checkpoint.pt").read_bytes() == before
    state = {name: tensor.clone() for name, tensor in agent.state_dict().items()}
    returns = script.evaluate(agent, args.env_id, 5, args.seed)
    assert outputs[0].stdout.splitlines()[0].split()[1:] == [f"{value:.1f}" for value in returns]
    torch.testing.assert_close(agent.state_dict(), state, atol=0, rtol=0)
    torch.manual_seed(0)
    sampled = script.evaluate(agent, args.env_id, 5, args.seed, deterministic=False)
    assert not np.array_equal(returns, sampled)
    following = torch.randn(3)  # evaluation in between changes nothing of what training draws
    assert np.array_equal(script.evaluate(agent, args.env_id, 5, args.seed, deterministic=False), sampled)
    assert torch.equal(following, torch.randn(3, generator=torch.Generator().manual_seed(0)))


def test_loaded_agent_acts_as_the_trained_one(script, small_args):
    agent, run_dir = script.train(small_args(total_timesteps=512))
    loaded = script.load_agent(run_dir)
    raw_obs = np.random.default_rng(0).normal(size=(7, 2)) * 5
    assert np.array_equal(act(loaded, raw_obs), act(agent, raw_obs))
    np.testing.assert_allclose(act(loaded, raw_obs[0]), act(agent, raw_obs)[0], rtol=1e-5)
    space = gym.make(probe(script)).action_space
    assert all(space.contains(action) for action in act(loaded, raw_obs * 1e6))


def test_learns_the_target(script, small_args):
    """The best return is 0, and the policy must find what each observation wants, through both normalisations."""
    args = small_args(
        total_timesteps=16384, num_envs=16, num_steps=32, num_minibatches=8, update_epochs=10, learning_rate=1e-3
    )
    _, run_dir = script.train(args)
    assert script.evaluate(script.load_agent(run_dir), args.env_id, 50, seed=9).mean() > -0.02


LEARNED = {
    "ppo_continuous": ({"learning_rate": 1e-3, "total_timesteps": "6e4"}, 900),  # of 1,000; at random about 6
    "ppo_discrete": ({"learning_rate": 1e-3, "total_timesteps": "6e4"}, 475),  # of 500; at random about 22
}


@pytest.mark.parametrize("script", LEARNED, indirect=True)
def test_learns_to_balance_a_pole(script, tmp_path):
    """A real simulator, compiled, as a user starts it: almost to the time limit at the end. (test_rnn.py has what a
    memory must learn.)"""
    flags, enough = LEARNED[script.__name__]
    flags |= {"env_id": REAL_ENV[script.__name__], "num_envs": 16, "num_minibatches": 8, "num_steps": 32}
    finished = run(script.__name__, f"--runs-dir={tmp_path}", *flags_of(**flags))
    assert finished.returncode == 0, finished.stderr
    (run_dir,) = tmp_path.iterdir()
    returns = [float(row[1]) for row in rows(run_dir)[1:]]
    assert np.mean(returns[-10:]) > enough
