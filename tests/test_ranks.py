"""torchrun: several processes train as one."""

import os
import socket
import subprocess
import sys

import numpy as np
import pytest
import ranks
import torch
from conftest import ACTIONS, DISCRETE, ONE, ROOT, TESTS, Started, flags_of, probe, rows, run_main, wait_for

SETTINGS = {"total_timesteps": 512, "num_envs": 8, "num_steps": 16, "num_minibatches": 2, "update_epochs": 3}
SETTINGS |= {"compile": False, "learning_rate": 1e-2}


def torchrun(script, **flags):
    """The real command line, as a user starts it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command += [str(ROOT / f"{script.__name__}.py"), *flags_of(**flags)]
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, **pipes)


def two_ranks(function, *arguments):
    """function(*arguments) in two processes, as torchrun starts them. -> exit code, output of both"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test"}
    environments = [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    processes = [Started(function, *arguments, environment=environment) for environment in environments]
    printed = "".join(process.communicate()[0] for process in processes)
    return max(process.returncode for process in processes), printed


def test_two_ranks_train_as_one(script, tmp_path):
    """They end with the same weights, to the bit: gradients are averaged, and the KL limit ends an update for both in
    the same minibatch. What they show of their environments is what one process shows that has all of them: the
    statistics, and the rows of episodes.csv. Their seeds and their noise differ."""
    settings = SETTINGS | {"env_id": f"{ACTIONS[script.__name__]}/Numbered-v0", "gamma": 0.9, "stagger_envs": True}
    flags = flags_of(**settings, target_kl=0.01, runs_dir=tmp_path / "two")
    code, printed = two_ranks(ranks.train, script.__name__, str(tmp_path), flags)
    assert code == 0, printed
    first, second = (torch.load(tmp_path / f"rank-{rank}.pt", weights_only=False) for rank in (0, 1))
    torch.testing.assert_close(first["agent"], second["agent"], atol=0, rtol=0)
    assert (first["has_folder"], second["has_folder"]) == (True, False)
    assert len({*first["seeds"], *second["seeds"]}) == 8
    # The first policy is nearly the same noise everywhere. Each rank draws its own.
    noise = [rank["actions"][:, :16].ravel() for rank in (first, second)]
    assert abs(np.corrcoef(noise)[0, 1]) < 0.6
    (two,) = (tmp_path / "two").iterdir()
    steps = max(state["step"] for state in script.load_checkpoint(two)["optimizer"]["state"].values())
    assert 4 <= steps < 4 * 3 * 2  # of 4 iterations, 3 epochs, 2 minibatches: the limit has ended some

    ranks.MEMBERS.clear()
    alone, one = script.train(script.Args(**settings, runs_dir=str(tmp_path / "one")))
    for name in (name for name in alone.state_dict() if "rms" in name):
        torch.testing.assert_close(first["agent"][name], alone.state_dict()[name], rtol=1e-9, atol=0)
    table, expected = ([row[:3] for row in rows(run_dir)] for run_dir in (two, one))
    assert table == expected and len(table) == 1 + 4 + 7 * 3  # only environment 0 has a whole first episode


@ONE
def test_two_ranks_take_the_mean_gradient(script, tmp_path):
    """Their first step is that of one process with all environments. Adam's first moment is a tenth of its gradient,
    and the critic's part of that does not depend on the actions."""
    settings = SETTINGS | {"env_id": f"ranks:{ACTIONS[script.__name__]}/Numbered-v0", "total_timesteps": 128}
    settings |= {"num_minibatches": 1, "update_epochs": 1, "max_grad_norm": 0.0}
    code, printed = two_ranks(run_main, script.__name__, flags_of(**settings, runs_dir=tmp_path / "two"))
    assert code == 0, printed
    ranks.MEMBERS.clear()
    script.train(script.Args(**settings, runs_dir=str(tmp_path / "one")))
    moments = []
    for folder in ("two", "one"):
        saved = script.load_checkpoint(next((tmp_path / folder).iterdir()))
        parameters = saved["agent"].named_parameters()
        critic = torch.cat([torch.full((x.numel(),), name.startswith("critic")) for name, x in parameters])
        moments.append(saved["optimizer"]["state"][0]["exp_avg"][critic])
    torch.testing.assert_close(*moments, rtol=1e-4, atol=1e-6)
    assert moments[1].abs().max() > 1e-3


@ONE
def test_a_rank_dies(script, tmp_path, main):
    """The job ends with an error, not in a wait for ever. Its checkpoint is whole: one process goes on from it."""
    settings = SETTINGS | {"total_timesteps": 16_384, "checkpoint_interval": 1, "learning_rate": 1e-3}
    env_id = f"probes:{probe(script)}"
    process = torchrun(script, **settings, env_id=env_id, runs_dir=tmp_path)
    wait_for(lambda: list(tmp_path.glob("*/checkpoint.pt")), process)
    (run_dir,) = tmp_path.iterdir()
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(children[1]), 9)
    printed = process.communicate(timeout=100)[0]
    assert process.returncode, printed
    saved = script.load_checkpoint(run_dir)["global_step"]
    assert list(tmp_path.iterdir()) == [run_dir] and 0 < saved < 16_384
    alone = main(script, "--resume", run_dir, "--env-id", env_id, f"--total-timesteps={saved + 256}")
    assert alone.returncode == 0, alone.stderr
    assert script.load_checkpoint(run_dir)["global_step"] == saved + 256
    steps = [int(row[0]) for row in rows(run_dir)[1:]]
    assert steps == [step for step in range(8, saved + 257, 8) for _ in range(8)]  # episodes of one step


@DISCRETE
def test_two_ranks_resume(script, tmp_path):
    """Both take up the learner of one process; they share its environments from then on."""
    args = script.Args(**SETTINGS, env_id=probe(script), runs_dir=str(tmp_path))
    _, run_dir = script.train(args)
    flags = ["--resume", str(run_dir), "--total-timesteps=1024"]
    code, printed = two_ranks(run_main, script.__name__, flags)
    assert code == 0, printed
    saved = script.load_checkpoint(run_dir)
    assert saved["global_step"] == 1024 and float(saved["agent"].obs_rms.count) == pytest.approx(1024)
    steps = [int(row[0]) for row in rows(run_dir)[1:]]
    assert steps == [step for step in range(8, 1025, 8) for _ in range(8)]


@ONE
def test_what_ranks_cannot_share(script, tmp_path):
    flags = flags_of(num_envs=7, env_id=probe(script), runs_dir=tmp_path)
    code, printed = two_ranks(run_main, script.__name__, flags)
    assert code == 2 and "--num-envs 7 must be a multiple of the 2 processes of torchrun" in printed
    assert not list(tmp_path.iterdir())


@ONE
def test_a_signal_to_the_job(script, tmp_path):
    """What torchrun gets goes to all ranks; they finish the iteration together and save it."""
    settings = SETTINGS | {"total_timesteps": 10**7, "checkpoint_interval": 10**6}
    process = torchrun(script, **settings, env_id=f"probes:{probe(script)}", runs_dir=tmp_path)
    wait_for(lambda: any(len(path.read_text()) > 1000 for path in tmp_path.glob("*/episodes.csv")), process)
    process.terminate()
    printed = process.communicate(timeout=100)[0]
    assert process.returncode and "stopped; go on with --resume" in printed
    (run_dir,) = tmp_path.iterdir()
    saved = script.load_checkpoint(run_dir)
    assert 0 < saved["global_step"] < 10**7 and saved["global_step"] % (8 * 16) == 0
