"""torchrun: several processes train as one."""

import csv
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import ACTIONS, ONE, ROOT, TESTS, flags_of, probe, run

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
SETTINGS = {"total_timesteps": 512, "num_envs": 8, "num_steps": 16, "num_minibatches": 2, "update_epochs": 3}
SETTINGS |= {"compile": False, "learning_rate": 1e-2}
GAMMA, TARGET_KL = 0.9, 0.01


def start(*command):
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*TORCHRUN, *map(str, command)], env=environment, **pipes)


def moments(rows):
    """Mean and variance of all rows, behind a count of 1e-4 of rows with mean 0 and variance 1."""
    count = len(rows) + 1e-4
    mean = rows.sum(0) / count
    return mean, ((rows - mean) ** 2).sum(0) / count + 1e-4 * (1 + mean**2) / count


def discounted_returns(rewards, ends):
    """Those of one environment, step by step, each with what was before it in its episode."""
    returns, value = [], 0.0
    for reward, end in zip(rewards, ends):
        value = reward + GAMMA * value
        returns.append(value)
        value = 0.0 if end else value
    return returns


def test_two_ranks_train_as_one(script, tmp_path):
    """After every update both have the same weights, to the bit. Their statistics are those of all that both have seen,
    their environments differ, gradients are averaged, and the KL limit ends an update for both in the same
    minibatch."""
    env_id = f"{ACTIONS[script.__name__]}/Recorded-v0"
    flags = flags_of(
        **SETTINGS, env_id=env_id, gamma=GAMMA, target_kl=TARGET_KL, stagger_envs=True, runs_dir=tmp_path / "runs"
    )
    process = start(TESTS / "ranks.py", script.__name__, tmp_path, *flags)
    printed = process.communicate(timeout=200)[0]
    assert process.returncode == 0, printed
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=False) for rank in (0, 1)]

    one, other = (rank["weights"] for rank in ranks)
    assert len(one) == len(other) == 4
    torch.testing.assert_close(one, other, atol=0, rtol=0)
    assert not torch.equal(one[0]["actor.0.weight"], one[3]["actor.0.weight"])

    # Each had gradients of its own, from data of its own; both took the mean of the two.
    assert len(ranks[0]["averaged"]) == len(ranks[1]["averaged"])
    size, gradients = sum(weights.numel() for weights in one[0].values()), 0
    for (own, mean), (other_own, other_mean) in zip(*(rank["averaged"] for rank in ranks)):
        assert torch.equal(mean, other_mean)
        torch.testing.assert_close(mean, (own + other_own) / 2)
        gradients += own.numel() == size and not torch.equal(own, other_own)
    assert gradients == len(ranks[0]["kls"])

    assert ranks[0]["minibatches"] == ranks[1]["minibatches"]
    kls, first, stopped = np.mean([rank["kls"] for rank in ranks], axis=0), 0, 0
    for end in ranks[0]["minibatches"]:
        update, first = kls[first:end], end
        assert update[0] < 1e-6 and (update[:-1] <= 1.5 * TARGET_KL).all()
        assert update[-1] > 1.5 * TARGET_KL or len(update) == 6
        stopped += len(update) < 6
    assert stopped and ranks[0]["kls"][1:] != ranks[1]["kls"][1:]

    # The first policy is nearly the same noise everywhere. Each rank draws its own.
    noise = [rank["actions"][:, :16].ravel() for rank in ranks]
    assert abs(np.corrcoef(noise)[0, 1]) < 0.6

    members = [member for rank in ranks for member in rank["members"]]
    assert len({seed for seed, *_ in members}) == len(members) == 8
    rows = np.concatenate([obs for _, obs, _, _ in members]).astype(np.float64)
    returns = np.concatenate([discounted_returns(rewards, ends) for _, _, rewards, ends in members])
    assert len(rows) == len(returns) == 512
    for rank in ranks:
        for name, expected in (("obs_rms", rows), ("return_rms", returns)):
            mean, variance = moments(expected)
            np.testing.assert_allclose(rank["agent"][f"{name}.mean"], mean, rtol=1e-9)
            np.testing.assert_allclose(rank["agent"][f"{name}.var"], variance, rtol=1e-9)
            assert float(rank["agent"][f"{name}.count"]) == pytest.approx(512)

    # Eight environments at eight steps of the limit of 16. Of the first episodes only that of environment 0 is whole.
    assert [int(np.argmax(ends)) + 1 for _, _, _, ends in members] == [16, 14, 12, 10, 8, 6, 4, 2]
    assert [rank["has_folder"] for rank in ranks] == [True, False]
    (run_dir,) = (tmp_path / "runs").iterdir()
    with open(run_dir / "episodes.csv") as file:
        table = list(csv.DictReader(file))
    steps = [int(row["global_step"]) for row in table]
    assert steps == sorted(steps) and {row["episodic_length"] for row in table} == {"16"}
    whole = [sum(rewards[48:][:16]) for _, _, rewards, ends in members[:1]]  # the last episode of environment 0
    assert len(table) == 4 + 7 * 3 and float(table[-1]["episodic_return"]) == pytest.approx(whole[0], rel=1e-4)


def wait_for(condition, seconds=100):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@ONE
def test_a_rank_dies(script, tmp_path):
    """The job ends with an error, not in a wait for ever. Its checkpoint is whole: one process goes on from it."""
    settings = SETTINGS | {"total_timesteps": 16_384, "checkpoint_interval": 1, "learning_rate": 1e-3}
    env_id = f"probes:{probe(script)}"
    process = start(ROOT / f"{script.__name__}.py", *flags_of(**settings, env_id=env_id, runs_dir=tmp_path))
    wait_for(lambda: list(tmp_path.glob("*/checkpoint.pt")))
    (run_dir,) = tmp_path.iterdir()
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(children[1]), 9)
    printed = process.communicate(timeout=100)[0]
    assert process.returncode, printed
    saved = script.load_checkpoint(run_dir)["global_step"]
    assert list(tmp_path.iterdir()) == [run_dir] and 0 < saved < 16_384
    alone = run(script.__name__, "--resume", run_dir, "--env-id", env_id, f"--total-timesteps={saved + 256}")
    assert alone.returncode == 0, alone.stderr
    assert script.load_checkpoint(run_dir)["global_step"] == saved + 256
    with open(run_dir / "episodes.csv") as file:
        steps = [int(row["global_step"]) for row in csv.DictReader(file)]
    assert steps == [step for step in range(8, saved + 257, 8) for _ in range(8)]  # episodes of one step


@pytest.mark.parametrize("script", ["ppo_discrete"], indirect=True)
def test_two_ranks_resume(script, tmp_path):
    """Both take up the learner of one process; they share its environments from then on."""
    args = script.Args(**SETTINGS, env_id=f"probes:{probe(script)}", runs_dir=str(tmp_path))
    _, run_dir = script.train(args)
    process = start(
        ROOT / f"{script.__name__}.py", "--resume", run_dir, "--env-id", args.env_id, "--total-timesteps=1024"
    )
    printed = process.communicate(timeout=100)[0]
    assert process.returncode == 0, printed
    saved = script.load_checkpoint(run_dir)
    assert saved["global_step"] == 1024 and float(saved["agent"].obs_rms.count) == pytest.approx(1024)
    with open(run_dir / "episodes.csv") as file:
        steps = [int(row["global_step"]) for row in csv.DictReader(file)]
    assert steps == [step for step in range(8, 1025, 8) for _ in range(8)]


@pytest.mark.parametrize("script", ["ppo_continuous"], indirect=True)
def test_what_ranks_cannot_share(script, tmp_path):
    flags = flags_of(num_envs=7, env_id=f"probes:{probe(script)}", runs_dir=tmp_path)
    process = start(ROOT / f"{script.__name__}.py", *flags)
    printed = process.communicate(timeout=100)[0]
    assert process.returncode and "--num-envs 7 must be a multiple of the 2 processes of torchrun" in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", ["ppo_continuous"], indirect=True)
def test_a_signal_to_the_job(script, tmp_path):
    """What torchrun gets goes to all ranks; they finish the iteration together and save it."""
    settings = SETTINGS | {"total_timesteps": 10**7, "checkpoint_interval": 10**6}
    flags = flags_of(**settings, env_id=f"probes:{probe(script)}", runs_dir=tmp_path)
    process = start(ROOT / f"{script.__name__}.py", *flags)
    wait_for(lambda: any(len(path.read_text()) > 1000 for path in tmp_path.glob("*/episodes.csv")))
    process.terminate()
    printed = process.communicate(timeout=100)[0]
    assert process.returncode and "stopped; go on with --resume" in printed
    (run_dir,) = tmp_path.iterdir()
    saved = script.load_checkpoint(run_dir)
    assert 0 < saved["global_step"] < 10**7 and saved["global_step"] % (8 * 16) == 0
