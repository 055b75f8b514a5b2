"""torchrun: several processes train as one."""

import csv
import os
import platform
import random
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from conftest import REAL_ENV, ROOT, TESTS, flags_of, probe

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
SETTINGS = {"total_timesteps": 512, "num_envs": 8, "num_steps": 16, "num_minibatches": 2, "update_epochs": 3}
SETTINGS |= {"compile": False, "learning_rate": 1e-2, "norm_obs": True, "norm_reward": True}


def start(*command, **more):
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*TORCHRUN, *map(str, command)], env=environment, **pipes, **more)


@pytest.mark.parametrize(
    "script, shared_memory",
    [("ppo_continuous", True), ("ppo_continuous", False), ("ppo_discrete", True), ("ppo_rnn", True)],
    indirect=["script"],
)
def test_two_ranks_train_as_one(script, tmp_path, monkeypatch, shared_memory):
    """After every update both have the same parameters and statistics, to the bit, and these are those of all that both
    have seen; their environments differ; gradients are averaged; the KL limit ends an update for both in the same
    minibatch, though one of them alone would have gone on."""
    if not shared_memory:
        monkeypatch.setenv("WITHOUT_SHARED_MEMORY", "1")
    flags = flags_of(**SETTINGS, target_kl=0.01, env_id=f"probes:{probe(script)}", runs_dir=tmp_path / "runs")
    process = start(TESTS / "ranks.py", script.__name__, tmp_path, *flags)
    printed = process.communicate(timeout=200)[0]
    assert process.returncode == 0, printed
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1)]
    assert len(ranks[0]["parameters"]) == 4
    for name in ("parameters", "gradients"):
        assert len(ranks[0][name]) == len(ranks[1][name])
        assert all(torch.equal(*pair) for pair in zip(*(rank[name] for rank in ranks)))
    assert not torch.equal(ranks[0]["parameters"][0], ranks[0]["parameters"][-1])
    assert 4 < len(ranks[0]["gradients"]) < 4 * 6 and ranks[0]["kls"] == ranks[1]["kls"]
    own = [torch.stack(rank["own_gradients"]) for rank in ranks]
    assert not torch.equal(*own)
    torch.testing.assert_close(torch.stack(ranks[0]["gradients"]), (own[0] + own[1]) / 2)

    for one, other in zip(*(rank["statistics"] for rank in ranks)):
        assert all(torch.equal(*pair) for a, b in zip(one, other) for pair in zip(a, b))
    seen = [torch.cat(rank["observations"]) for rank in ranks]
    everything = torch.cat(seen).double()
    (mean, variance, count), (_, _, returns) = ranks[0]["statistics"][-1]
    assert float(count) == pytest.approx(len(everything)) and float(returns) == pytest.approx(512)
    torch.testing.assert_close(mean, everything.mean(0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(variance, everything.var(0, correction=0), atol=1e-5, rtol=1e-4)
    assert not torch.equal(*seen)

    (run_dir,) = (tmp_path / "runs").iterdir()
    with open(run_dir / "episodes.csv") as file:
        rows = list(csv.DictReader(file))
    steps = [int(row["global_step"]) for row in rows]
    assert steps == sorted(steps) and sum(int(row["episodic_length"]) for row in rows) > 400  # of both


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="what SharedMemory is for")
@pytest.mark.parametrize("script", ["ppo_continuous"], indirect=True)
def test_shared_memory(script, monkeypatch):
    """Messages of any length, kind and pace: all get all, also who reads late. A rank that has ended is noticed."""
    meeting, store = threading.Barrier(3), torch.distributed.HashStore()
    monkeypatch.setattr(script.dist, "barrier", meeting.wait)
    monkeypatch.setattr(script.SharedMemory, "row_bytes", 800)

    def message_of(rank, number):
        length = random.Random(number).randrange(1, 100)
        return np.random.default_rng([number, rank]).random(length, (np.float32, np.float64)[number % 2])

    wrong = []  # asserted at the end: the others would wait for a thread that fails

    def talk(rank):
        memory, pace = script.SharedMemory(store, rank, 3), random.Random(rank)
        for number in range(200):
            time.sleep(pace.random() * 1e-3)
            rows = memory.exchange(message_of(rank, number))
            time.sleep(pace.random() * 1e-3)
            for other in range(3):
                expected = message_of(other, number)
                wrong.append(not np.array_equal(rows[other, : len(expected)], expected))
        return memory

    with ThreadPoolExecutor(3) as pool:
        memory, *_ = pool.map(talk, range(3))
    assert len(wrong) == 3 * 200 * 3 and not any(wrong)
    gone = subprocess.Popen(["true"])
    gone.wait()
    memory.processes[1] = gone.pid

    def give_up(*_):
        raise TimeoutError("waits for ever for a rank that has ended")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(30)
    with pytest.raises(SystemExit, match=r"^1$"):
        script.talk_to_ranks(memory.exchange, np.zeros(1))
    signal.alarm(0)


def test_seeds_are_those_of_one_process(script, small_args, tmp_path, monkeypatch):
    """Ranks split the environments of a single process, its seeds, and when each first episode is cut."""
    seeds, first_ends = [], []

    class Stop(Exception):
        pass

    def make_envs(args, num_envs):
        envs = original(args, num_envs)

        def reset(seed):
            seeds.append(list(seed))
            if hasattr(args, "stagger_envs"):
                first_ends.append(list(envs.get_attr("steps_left")))
            raise Stop

        envs.reset = reset
        return envs

    original = script.make_envs
    monkeypatch.setattr(script, "make_envs", make_envs)
    monkeypatch.setattr(script, "join_ranks", lambda device: None)
    for ranks in (1, 2):
        for rank in range(ranks):
            monkeypatch.setattr(script, "count_ranks", lambda ranks=ranks: ranks)
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("LOCAL_RANK", str(rank))
            with pytest.raises(Stop):
                script.train(small_args(num_envs=8, env_id=REAL_ENV[script.__name__]))
    assert len(set(seeds[0])) == 8 and seeds[1] + seeds[2] == seeds[0]
    if first_ends:
        assert first_ends[0] == [125, 250, 375, 500, 625, 750, 875, 1000] == first_ends[1] + first_ends[2]


def wait_for(condition, seconds=100):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    "script, restarts",
    [("ppo_continuous", 0), ("ppo_rnn", 1)],
    indirect=["script"],
)
def test_a_rank_dies(script, tmp_path, restarts):
    """The job ends with an error, not in a wait for ever. With --max-restarts it goes on from its checkpoint, in the
    same folder and in mid-episode, and ends as an undisturbed job does, to the bit. The checkpoint of two ranks resumes
    on one process, which says so."""
    settings = SETTINGS | {"total_timesteps": 8_192, "checkpoint_interval": 1, "learning_rate": 1e-3}
    settings["env_id"] = "CartPole-v1" if restarts else f"probes:{probe(script)}"
    runs_dir = tmp_path / "runs"
    process = start(
        f"--max-restarts={restarts}", ROOT / f"{script.__name__}.py", *flags_of(**settings, runs_dir=runs_dir)
    )
    wait_for(lambda: list(runs_dir.glob("*/checkpoint.pt")))
    (run_dir,) = runs_dir.iterdir()
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    begun = torch.load(run_dir / "checkpoint.pt", weights_only=True)["global_step"]
    os.kill(int(children[1]), 9)
    printed = process.communicate(timeout=150)[0]
    assert (process.returncode == 0) == bool(restarts), printed
    assert list(runs_dir.iterdir()) == [run_dir]
    checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    assert len(checkpoint["rng_states"]) == 2 and begun < 8_000
    if restarts:
        assert checkpoint["global_step"] == 8_192
        undisturbed = start(ROOT / f"{script.__name__}.py", *flags_of(**settings, runs_dir=tmp_path / "undisturbed"))
        printed = undisturbed.communicate(timeout=150)[0]
        (whole,) = (tmp_path / "undisturbed").iterdir()
        agent = torch.load(whole / "checkpoint.pt", weights_only=True)["agent"]
        assert all(torch.equal(x, agent[name]) for name, x in checkpoint["agent"].items())
        one, other = (list(csv.reader((path / "episodes.csv").open())) for path in (run_dir, whole))
        assert len(one) > 100 and [row[:3] for row in one] == [row[:3] for row in other]
    else:
        assert checkpoint["global_step"] < 8_192
        command = [sys.executable, str(ROOT / f"{script.__name__}.py"), "--resume", str(run_dir)]
        path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
        alone = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
        assert alone.returncode == 0, alone.stderr
        assert re.search("was of 2 ranks, not 1: new random numbers", alone.stdout)
        assert torch.load(run_dir / "checkpoint.pt", weights_only=True)["global_step"] == 8_192


@pytest.mark.parametrize("script", ["ppo_continuous"], indirect=True)
@pytest.mark.parametrize(
    "flags, words",
    [
        ({"num_envs": 7}, "--num-envs 7 must be a multiple of the 2 processes of torchrun"),
        ({"device": "cuda:0"}, "--device cuda:0 under torchrun: give cuda"),
    ],
)
def test_what_ranks_cannot_share(script, tmp_path, flags, words):
    flags = flags_of(**flags, env_id=f"probes:{probe(script)}", runs_dir=tmp_path)
    process = start(ROOT / f"{script.__name__}.py", *flags)
    printed = process.communicate(timeout=100)[0]
    assert process.returncode and words in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", ["ppo_continuous"], indirect=True)
def test_ranks_must_begin_together(script, tmp_path):
    """One rank finds a checkpoint, the other, on a machine with a disk of its own, none: refused, not waited for."""
    flags = flags_of(**SETTINGS, env_id=f"probes:{probe(script)}", runs_dir=tmp_path)
    _, run_dir = script.train(script.parse_args(flags))
    command = [sys.executable, str(ROOT / f"{script.__name__}.py"), *map(str, flags)]
    resume = f"[ $RANK = 0 ] && set -- --resume {shlex.quote(str(run_dir))}"
    process = start("--no-python", "sh", "-c", f'{resume}; exec {shlex.join(command)} "$@"')
    printed = process.communicate(timeout=100)[0]
    assert process.returncode and "ranks would begin in different iterations" in printed
    assert list(tmp_path.iterdir()) == [run_dir]


@pytest.mark.parametrize("script", ["ppo_continuous"], indirect=True)
def test_a_signal_to_the_job(script, tmp_path):
    """What torchrun gets goes to all ranks; they finish the iteration together and save it."""
    settings = SETTINGS | {"total_timesteps": 10**7, "checkpoint_interval": 10**6}
    flags = flags_of(**settings, env_id=f"probes:{probe(script)}", runs_dir=tmp_path)
    process = start(ROOT / f"{script.__name__}.py", *flags)
    wait_for(lambda: any(len(path.read_text()) > 1000 for path in tmp_path.glob("*/episodes.csv")))
    process.terminate()
    process.communicate(timeout=100)
    assert process.returncode
    (checkpoint,) = tmp_path.glob("*/checkpoint.pt")
    saved = torch.load(checkpoint, weights_only=True)
    assert saved["global_step"] == saved["iteration"] * 8 * 16 and len(saved["rng_states"]) == 2
