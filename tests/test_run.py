"""Runs: same seed, kill and resume, checkpoints, evaluation, Ctrl-C, learning."""

import csv
import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import ClassVar

import gymnasium as gym
import numpy as np
import probes
import pytest
import torch
from conftest import ONE, REAL_ENV, ROOT, SCRIPTS, TESTS, act, flags_of, probe, run, scalars
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter


def rows(run_dir):
    with open(run_dir / "episodes.csv") as file:
        return list(csv.reader(file))


def assert_same_learner(one, two):
    """Two checkpoints whose every tensor and number is equal to the bit, but for the time they took."""
    assert one["global_step"] == two["global_step"]
    torch.testing.assert_close(one["optimizer"], two["optimizer"], atol=0, rtol=0)
    torch.testing.assert_close(one["agent"].state_dict(), two["agent"].state_dict(), atol=0, rtol=0)


def test_same_seed_same_run(script, small_args):
    """Bit-equal; another seed gives another run, and every environment has a seed of its own."""
    checkpoints = [script.load_checkpoint(script.train(small_args(seed=seed))[1]) for seed in (3, 3, 4)]
    assert_same_learner(checkpoints[0], checkpoints[1])
    assert not torch.equal(checkpoints[0]["agent"].critic[0].weight, checkpoints[2]["agent"].critic[0].weight)


class Seeds(probes.Target):
    """Remembers the seeds and the actions of all its copies; shows zeros."""

    seeds: ClassVar = []
    actions: ClassVar = []

    def reset(self, *, seed=None, options=None):
        self.seeds.extend([seed] * (seed is not None))
        return 0 * super().reset(seed=seed, options=options)[0], {}

    def step(self, action):
        self.actions.append(action)
        return 0 * self.target, *super().step(action)[1:]


for name, discrete in (("box", False), ("discrete", True)):
    gym.register(f"{name}/Seeds-v0", Seeds, kwargs={"discrete": discrete})


def test_seeds_of_a_resumed_run(script, small_args):
    """Each environment gets another seed, and a resumed run gets new ones: its episodes are not those of the start. Nor
    is its noise: the same policy, which sees the same, does something else."""
    Seeds.seeds.clear(), Seeds.actions.clear()
    still = {"learning_rate": 1e-30, "anneal_lr": False, "total_timesteps": 64}
    _, run_dir = script.train(small_args(env_id=probe(script, "Seeds"), **still))
    args = script.load_checkpoint(run_dir)["args"]
    script.train(dataclasses.replace(args, resume=str(run_dir), total_timesteps=128))
    assert len(Seeds.seeds) == len(set(Seeds.seeds)) == 8
    assert len(Seeds.actions) == 128 and not np.array_equal(Seeds.actions[:64], Seeds.actions[64:])


class Limited(gym.Env):
    """A reward of 1 in every step, and no end but that of a time limit."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (2,), np.float32), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 1.0, False, False, {}


gym.register("discrete/Limited-v0", Limited, max_episode_steps=200)


class SameNumbers(probes.Chain):
    """The same random numbers begin when a run starts, and when it is resumed."""

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            torch.manual_seed(0)
        return super().reset(seed=seed)


for name, discrete in (("box", False), ("discrete", True)):
    gym.register(f"{name}/SameNumbers-v0", SameNumbers, kwargs={"discrete": discrete, "lengths": (8,)})


class Stops(list):
    """Stop signals. The same random numbers begin where train reads them, at the end of every iteration."""

    def __iter__(self):
        torch.manual_seed(0)
        return super().__iter__()


@pytest.mark.parametrize("flags", [{}, {"desired_kl": 0.01, "anneal_clip": True, "clip_vloss": True}])
def test_resumed_learner_is_the_uninterrupted_one(script, small_args, flags):
    """Only random numbers and episodes begin anew. Here every rollout is one whole episode, and the same random numbers
    begin behind each iteration: a run that is stopped in each of them is then the whole one to the last bit. Weights,
    optimizer, learning rate, schedules and statistics all have to be there for it, episodes and logs too."""
    flags = {"num_steps": 8, "num_minibatches": 2, "env_id": probe(script, "SameNumbers")} | flags
    _, whole = script.train(small_args(exp_name="whole", **flags), Stops())
    args = small_args(exp_name="half", **flags)
    for step in range(32, 257, 32):
        _, half = script.train(args, Stops([signal.SIGTERM]))
        saved = script.load_checkpoint(half)
        assert saved["global_step"] == step
        args = dataclasses.replace(saved["args"], resume=str(half))
    assert_same_learner(script.load_checkpoint(half), script.load_checkpoint(whole))
    assert len(rows(half)) == 1 + 256 // 8 and [row[:3] for row in rows(half)] == [row[:3] for row in rows(whole)]
    logged = scalars(whole)
    del logged["charts/SPS"]  # runs of one iteration have none
    assert scalars(half) == logged


def test_resume_without_further_steps(script, small_args, capsys):
    """The learner is that of the checkpoint, to the bit; rows and checkpoint stay as they are; a line says why."""
    _, run_dir = script.train(small_args())
    saved = script.load_checkpoint(run_dir)
    before = {name: (run_dir / name).read_bytes() for name in ("checkpoint.pt", "episodes.csv")}
    agent, same_dir = script.train(dataclasses.replace(saved["args"], resume=str(run_dir)))
    assert "step 256 of 256, nothing left to do: raise --total-timesteps" in capsys.readouterr().out
    assert same_dir == run_dir and list(run_dir.parent.iterdir()) == [run_dir]
    torch.testing.assert_close(agent.state_dict(), saved["agent"].state_dict(), atol=0, rtol=0)
    assert before == {name: (run_dir / name).read_bytes() for name in before}


LONGER = {"ppo_continuous": "Pendulum-v1", "ppo_discrete": "CartPole-v1", "ppo_rnn": "CartPole-v1"}


@pytest.mark.parametrize(
    "script, async_envs", [*((name, False) for name in SCRIPTS), ("ppo_continuous", True)], indirect=["script"]
)
def test_resumed_twice_is_the_same_run_twice(script, small_args, async_envs):
    """From copies of one folder, cut in the middle of episodes: the same weights, optimizer, rows and logs."""
    half = {"env_id": LONGER[script.__name__], "async_envs": async_envs, "total_timesteps": 4 * 16 * 10}
    _, run_dir = script.train(small_args(**half))
    copy = shutil.copytree(run_dir, run_dir.parent / "copy")
    for folder in (run_dir, copy):
        args = dataclasses.replace(script.load_checkpoint(folder)["args"], resume=str(folder))
        script.train(dataclasses.replace(args, total_timesteps=4 * 16 * 60))
    assert_same_learner(*(script.load_checkpoint(folder) for folder in (run_dir, copy)))
    assert len(rows(run_dir)) > 4 and [row[:3] for row in rows(run_dir)] == [row[:3] for row in rows(copy)]
    one, two = scalars(run_dir), scalars(copy)
    assert one.keys() == two.keys() and all(one[key] == two[key] for key in one.keys() - {"charts/SPS"})


@pytest.mark.parametrize("flag, rest", [("--num-envs=2", 8), ("--num-steps=32", 2), ("--update-epochs=1", 4)])
def test_resume_with_other_sizes(script, small_args, flag, rest):
    """What is given again applies from the checkpoint on: steps and iterations go on from there to the same end."""
    _, run_dir = script.train(small_args())
    flags = [flag, "--num-minibatches=2", "--total-timesteps=512"]
    args = script.parse_args(flags, default=script.load_checkpoint(run_dir)["args"])
    script.train(dataclasses.replace(args, resume=str(run_dir)))
    steps = [step for step, _ in scalars(run_dir)["losses/value_loss"]]
    assert steps == [64, 128, 192, 256] + [256 + 256 // rest * (i + 1) for i in range(rest)]
    assert script.load_checkpoint(run_dir)["global_step"] == 512
    assert sum(int(row[2]) for row in rows(run_dir)[1:]) == 512  # episodes of one step


def test_resume_with_a_larger_batch_stays_within_the_total(script, small_args):
    _, run_dir = script.train(small_args(total_timesteps=192))
    args = script.load_checkpoint(run_dir)["args"]
    script.train(dataclasses.replace(args, resume=str(run_dir), num_envs=8, total_timesteps=512))
    assert script.load_checkpoint(run_dir)["global_step"] == 192 + 2 * 128


def start(script, runs_dir, environment=None, **args):
    command = [sys.executable, str(ROOT / f"{script}.py"), f"--runs-dir={runs_dir}", *flags_of(**args)]
    return subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(TESTS)} | (environment or {}),
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


def checkpointed_step(script, runs_dir):
    for path in runs_dir.glob("*/checkpoint.pt"):
        return script.load_checkpoint(path.parent)["global_step"]
    return 0


LONG = {"total_timesteps": 16 * 4 * 150, "num_envs": 4, "num_steps": 16, "num_minibatches": 2, "update_epochs": 1}
LONG |= {"compile": False, "checkpoint_interval": 7, "seed": 5}


@ONE
def test_kill_and_resume(script, tmp_path):
    """kill -9 in the middle: every episode up to the checkpoint stays, none is there twice, and the run goes on to its
    end, the same way each time. (test_resumed_twice_is_the_same_run_twice asks every script.)"""
    name = script.__name__
    process = start(name, tmp_path / "runs", env_id="probes:" + probe(script), **LONG)
    wait_for(lambda: checkpointed_step(script, tmp_path / "runs") >= 64 * 21, process)
    process.kill()
    process.wait()
    (killed,) = (tmp_path / "runs").iterdir()
    saved = script.load_checkpoint(killed)
    last = saved["global_step"]
    assert last % (64 * 7) == 0 and last < LONG["total_timesteps"]
    header, *before = [line.split(",") for line in (killed / "episodes.csv").read_text().splitlines()]
    kept = [row for row in before if int(row[0]) <= last]
    assert len(kept) == last, "rows up to the checkpoint were not on the disk"
    # A line that cannot be read, a row behind the checkpoint, and what a kill in the middle of a line leaves.
    lines = [",".join(row) for row in [header, *kept[:9], ["4", "-0."], *kept[9:]]]
    lines += [f"{last + 64},-0.5,1,9.9", f"{last + 64},-0."]
    (killed / "episodes.csv").write_text("\n".join(lines))
    with SummaryWriter(killed) as writer:  # and what TensorBoard may have been told before it
        writer.add_scalar("losses/value_loss", 99.0, last + 1)

    copy = shutil.copytree(killed, tmp_path / "copy")
    finished = run(name, "--resume", killed, f"--env-id=probes:{probe(script)}")
    assert finished.returncode == 0, finished.stderr
    script.train(dataclasses.replace(saved["args"], resume=str(copy)))
    table = rows(killed)
    assert table[: last + 1] == [header, *kept]
    steps = [int(row[0]) for row in table[1:]]
    assert steps == [step for step in range(4, LONG["total_timesteps"] + 1, 4) for _ in range(4)]
    seconds = [float(row[3]) for row in table[1:]]
    assert seconds == sorted(seconds)
    end = script.load_checkpoint(killed)
    assert end["global_step"] == LONG["total_timesteps"] and end["seconds"] > saved["seconds"]
    logged = [step for step, _ in scalars(killed)["losses/value_loss"]]
    assert logged == [64 * iteration for iteration in range(1, 151)]
    assert_same_learner(end, script.load_checkpoint(copy))
    assert [row[:3] for row in table] == [row[:3] for row in rows(copy)]


@pytest.mark.parametrize("script", ["ppo_continuous"], indirect=True)  # Run is the same text in every script
def test_a_run_that_still_goes_on_is_not_resumed(script, tmp_path, main):
    """Two processes in one folder would overwrite each other's rows. The second one ends in one line."""
    name, forever = script.__name__, LONG | {"total_timesteps": 10**8}
    process = start(name, tmp_path, env_id="probes:" + probe(script), **forever)
    wait_for(lambda: checkpointed_step(script, tmp_path) >= 64 * 7, process)
    (run_dir,) = tmp_path.iterdir()
    resume = ["--resume", run_dir, f"--env-id=probes:{probe(script)}"]
    second = main(script, *resume)
    assert second.returncode == 2 and "another process" in second.stderr and len(second.stderr.splitlines()) == 1
    process.kill()
    process.wait()
    steps = [int(row[0]) for row in rows(run_dir)[1:-4]]  # the last rows may be half written
    assert steps == sorted(step for step in range(4, 4 * (len(steps) // 4 + 2), 4) for _ in range(4))[: len(steps)]


@pytest.mark.parametrize("script", ["ppo_continuous"], indirect=True)
def test_nobody_reads_what_it_prints(script, tmp_path):
    """A run whose output is closed, as by `| head -1`, goes on to its end."""
    process = start(script.__name__, tmp_path, env_id="probes:" + probe(script), **LONG)
    process.stdout.readline()
    process.stdout.close()
    process.wait(timeout=120)
    assert checkpointed_step(script, tmp_path) == LONG["total_timesteps"]


@ONE
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
    assert script.load_checkpoint(run_dir)["global_step"] == 64
    finished = run(name, "--resume", run_dir, f"--env-id=probes:{probe(script)}")
    assert finished.returncode == 0, finished.stderr
    assert script.load_checkpoint(run_dir)["global_step"] == 64 * 20
    assert len(rows(run_dir)) == 1 + 64 * 20 and not list(run_dir.glob("*.tmp"))


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
    saved, with the shell's code for that signal. A second one at once, as from torchrun, is the same one again."""
    args = LONG | {"checkpoint_interval": 1000, "async_envs": asynchronous}
    process = start(script.__name__, tmp_path, env_id="probes:" + probe(script), **args)
    wait_for(
        lambda: any(len(rows(path)) > 100 for path in tmp_path.iterdir() if (path / "episodes.csv").exists()), process
    )
    for _ in range(2):
        (os.killpg if signal_number == signal.SIGINT else os.kill)(process.pid, signal_number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + signal_number, output
    (run_dir,) = tmp_path.iterdir()
    assert f"stopped; go on with --resume {run_dir}" in output and "Traceback" not in output
    saved = script.load_checkpoint(run_dir)
    assert 0 < saved["global_step"] < LONG["total_timesteps"] and saved["global_step"] % 64 == 0
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
    assert script.load_checkpoint(run_dir)["global_step"] == 512


def test_run_folder(script, small_args):
    """Everything a run leaves, and what is in it."""
    args = small_args()
    _, run_dir = script.train(args)
    assert run_dir.name.startswith(f"{args.env_id.replace('/', '-')}__{script.__name__}__1__")
    assert json.loads((run_dir / "args.json").read_text()) == vars(args) | {"hidden_sizes": list(args.hidden_sizes)}
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


STAGGERED = [("ppo_continuous", False), ("ppo_continuous", True), ("ppo_discrete", False), ("ppo_rnn", False)]


@pytest.mark.parametrize("script, async_envs", STAGGERED, indirect=["script"])
def test_stagger_envs(script, small_args, async_envs):
    """Four environments whose episodes only end at a limit of 200 steps: the second begins at its step 50, the third at
    100, the fourth at 150. Whole episodes end one after the other, and only those are logged, from their first step
    on. Without staggering all end together."""
    env_id = "discrete/Limited-v0" if script.__name__ == "ppo_discrete" else "Pendulum-v1"
    args = {"env_id": env_id, "num_envs": 4, "num_steps": 50, "total_timesteps": 4 * 450, "async_envs": async_envs}
    for stagger_envs, ends in (True, [200, 250, 300, 350, 400, 450]), (False, [200] * 4 + [400] * 4):
        _, run_dir = script.train(small_args(stagger_envs=stagger_envs, **args))
        table = rows(run_dir)[1:]
        assert [int(row[0]) for row in table] == [4 * end for end in ends] and {row[2] for row in table} == {"200"}
        if env_id.startswith("discrete"):
            assert {row[1] for row in table} == {"200"}


def test_defaults_of_staggering(script):
    assert script.Args().stagger_envs == (script.__name__ == "ppo_continuous")


@pytest.mark.filterwarnings("ignore")  # gymnasium's, about the shared array
@pytest.mark.parametrize("async_envs", [False, True])
def test_final_observation_is_the_last_one(script, small_args, async_envs):
    """Also of an environment that has begun the next episode in the same array. It is what a truncated episode is
    bootstrapped from."""
    envs = script.make_envs(small_args(env_id=probe(script, "OneArray"), async_envs=async_envs), 2)
    envs.reset()
    seen = [envs.step(envs.action_space.sample()) for _ in range(5)]
    envs.close()
    assert seen[4][4]["final_obs"][1].tolist() == [5, 5] and seen[4][0][1].tolist() == [0, 0]


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


def test_evaluate(script, small_args, watch):
    """In a fresh process, from raw observations: the same returns twice, and no statistic moves. Not even the random
    numbers of a GPU are touched for an agent on the CPU: it may be somebody else's."""
    args = small_args(env_id="probes:" + small_args().env_id, total_timesteps=1024)
    agent, run_dir = script.train(args)
    before = (run_dir / "checkpoint.pt").read_bytes()
    flags = ["--evaluate", run_dir, "--env-id", args.env_id, "--eval-episodes=5"]
    outputs = [run(script.__name__, *flags) for _ in range(2)]
    assert outputs[0].returncode == 0, outputs[0].stderr
    assert outputs[0].stdout == outputs[1].stdout and len(outputs[0].stdout.splitlines()[0].split()) == 6
    assert (run_dir / "checkpoint.pt").read_bytes() == before
    state = {name: tensor.clone() for name, tensor in agent.state_dict().items()}
    asked_for_gpus = watch(torch.cuda, "device_count")
    returns = script.evaluate(agent, args.env_id, 5, args.seed)
    assert outputs[0].stdout.splitlines()[0].split()[1:] == [f"{value:.1f}" for value in returns]
    torch.testing.assert_close(agent.state_dict(), state, atol=0, rtol=0)
    torch.manual_seed(0)
    returns, sampled, again = (
        script.evaluate(agent, args.env_id, 50, args.seed, deterministic=deterministic)
        for deterministic in (True, False, False)
    )
    assert not asked_for_gpus
    assert np.array_equal(sampled, again) and not np.array_equal(sampled, returns)
    # Evaluation in between changes nothing of what training draws.
    assert torch.equal(torch.randn(3), torch.randn(3, generator=torch.Generator().manual_seed(0)))


def test_evaluations_are_whole_episodes_of_their_own_seeds(script, small_args):
    """The returns that anybody gets who plays these seeds; what the agent does makes no difference here."""
    agent, _ = script.train(small_args(env_id=probe(script, "Chain")))
    env, expected = gym.make(probe(script, "Chain")), []
    for seed in range(3, 7):
        env.reset(seed=seed)
        rewards, ended = [], False
        while not ended:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            rewards.append(reward)
            ended = terminated or truncated
        expected.append(sum(rewards))
    assert len({*expected}) == 4
    assert script.evaluate(agent, probe(script, "Chain"), 4, 3) == pytest.approx(expected)


def test_speed_leaves_out_the_first_iteration(script, small_args):
    """charts/SPS counts from the end of the first iteration, in which functions are compiled."""
    _, run_dir = script.train(small_args(env_id=probe(script, "Slow"), num_steps=256, total_timesteps=4096))
    *_, speed = EventAccumulator(str(run_dir)).Reload().Scalars("charts/SPS")
    first, *_, last = [float(row[-1]) for row in rows(run_dir)[1:]]  # of the first iteration, of the last one
    assert speed.value == pytest.approx((4096 - 1024) / (last - first), rel=0.1)


def test_loaded_agent_acts_as_the_trained_one(script, small_args):
    agent, run_dir = script.train(small_args(total_timesteps=512))
    loaded = script.load_agent(run_dir)
    raw_obs = np.random.default_rng(0).normal(size=(7, 2)) * 5
    assert np.array_equal(act(loaded, raw_obs), act(agent, raw_obs))
    np.testing.assert_allclose(act(loaded, raw_obs[0]), act(agent, raw_obs)[0], rtol=1e-5)
    space = gym.make(probe(script)).action_space
    assert all(space.contains(action) for action in act(loaded, raw_obs * 1e6))


@pytest.mark.parametrize("script", ["ppo_continuous", "ppo_discrete"], indirect=True)
def test_learns_the_target(script, small_args):
    """The best return is 0, and the policy must find what each observation wants, through both normalisations.
    (test_rnn.py has what a memory must learn.)"""
    args = small_args(
        total_timesteps=16384, num_envs=16, num_steps=32, num_minibatches=8, update_epochs=10, learning_rate=1e-3
    )
    _, run_dir = script.train(args)
    assert script.evaluate(script.load_agent(run_dir), args.env_id, 50, seed=9).mean() > -0.02


LEARNED = {
    "ppo_continuous": ({"learning_rate": 1e-3, "total_timesteps": "6e4"}, 900),  # of 1,000; at random about 6
    "ppo_discrete": ({"learning_rate": 1e-3, "total_timesteps": "1e5"}, 475),  # of 500; at random about 22
}


@pytest.mark.parametrize("script", LEARNED, indirect=True)
def test_learns_to_balance_a_pole(script, tmp_path):
    """A real simulator, compiled, as a user starts it: almost to the time limit at the end. (test_rnn.py has what a
    memory must learn.)"""
    flags, enough = LEARNED[script.__name__]
    # After 6e4 steps of CartPole one seed of eight is still at 320. Which one depends on the processor.
    flags |= {"env_id": REAL_ENV[script.__name__], "num_envs": 16, "num_minibatches": 8, "num_steps": 32}
    finished = run(script.__name__, f"--runs-dir={tmp_path}", *flags_of(**flags))
    assert finished.returncode == 0, finished.stderr
    (run_dir,) = tmp_path.iterdir()
    returns = [float(row[1]) for row in rows(run_dir)[1:]]
    assert np.mean(returns[-10:]) > enough
