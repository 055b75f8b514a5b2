"""Recipes about runs: exact_resume, cpu_ranks, init_from, evaluate_while_training."""

import csv
import dataclasses
import os
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SMALL, scalars
from forks import two_ranks

from recipes import TEN, episodes, small, with_recipes


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
def test_exact_resume(env_id, tmp_path, capsys):
    """The run that was killed in its eighth iteration, and went on from the checkpoint of the sixth, ends with the same
    agent and the same episodes as one that was not. Without the recipe it does not. The chain counts its episodes, and
    does not repeat itself: the run goes on with new ones."""
    settings = {"env_id": env_id, "checkpoint_interval": 3, "stagger_envs": True, "recompute_advantages": False}
    for recipes in (["exact_resume"], []):
        script = with_recipes("ppo_continuous", *recipes)
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


def test_cpu_ranks(tmp_path, monkeypatch):
    """Through shared memory, and without a call of gloo, two ranks end with the same weights and statistics to the bit;
    gloo's are the same within rounding. Nothing is left in /dev/shm."""
    scripts = {"gloo": with_recipes("ppo_continuous"), "shared": with_recipes("ppo_continuous", "cpu_ranks")}
    dist, counts = torch.distributed, {"gloo": 0, "shared": 0}

    def count(owner, name, kind):
        original = getattr(owner, name)

        def counted(*given):
            counts[kind] += 1
            return original(*given)

        monkeypatch.setattr(owner, name, counted)

    def train(rank):
        dist.init_process_group("gloo")
        monkeypatch.setattr(dist, "init_process_group", lambda *_: None)  # both runs are in this one
        monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
        count(dist, "all_reduce", "gloo")
        count(scripts["shared"].SharedMemory, "average", "shared")
        found = {}
        for kind, script in scripts.items():
            counts.update(gloo=0, shared=0)
            args = script.Args(**TEN, env_id="box/Target-v0", learning_rate=1e-2, runs_dir=str(tmp_path / kind))
            agent, _ = script.train(args)
            found[kind] = counts.copy(), agent.state_dict()
        torch.save(found, tmp_path / f"rank-{rank}.pt")

    before = shared_files()
    two_ranks(train)
    assert shared_files() <= before
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1)]
    for found in ranks:
        (gloo_counts, gloo), (counts, agent) = found["gloo"], found["shared"]
        assert gloo_counts["gloo"] > 100 and counts == {"gloo": 0, "shared": gloo_counts["gloo"]}
        for name, value in agent.items():
            assert torch.equal(value, ranks[0]["shared"][1][name])
            torch.testing.assert_close(value, gloo[name], rtol=1e-4, atol=1e-5)


def shared_files():
    return {path.name for path in Path("/dev/shm").glob("tmp*")}


def test_a_dead_rank():
    """Nobody waits for it for ever; others that are only slow are waited for."""
    script = with_recipes("ppo_continuous", "cpu_ranks")
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


def test_init_from(tmp_path):
    """A new run begins with the weights and statistics of another, and with an optimizer that has made no step."""
    module = with_recipes("ppo_continuous", "init_from")
    first, run_dir = module.train(small(module, tmp_path))
    still = {"learning_rate": 0.0, "anneal_lr": False, "norm_obs": False, "norm_reward": False}
    second, new_dir = module.train(small(module, tmp_path, init_from=str(run_dir), total_timesteps=64, **still))
    assert new_dir != run_dir
    for name, tensor in second.state_dict().items():
        if name != "log_std_shift":
            torch.testing.assert_close(tensor, first.state_dict()[name], msg=name)
    state = torch.load(new_dir / "checkpoint.pt")["optimizer"]["state"][0]
    assert state["step"] <= SMALL["num_minibatches"] * SMALL["update_epochs"]


def test_evaluate_while_training(tmp_path):
    """The means are those of the saved agents; best.pt is the best of them; nothing that is learned changes."""
    module = with_recipes("ppo_continuous", "evaluate_while_training")
    args = small(module, tmp_path, eval_interval=3, eval_episodes=5)
    agent, run_dir = module.train(args)
    rows = list(csv.DictReader((run_dir / "evaluations.csv").open()))
    assert [int(row["global_step"]) for row in rows] == [3 * 64, 6 * 64, 9 * 64, 640]
    means = [float(row["mean_return"]) for row in rows]
    assert [value for _, value in scalars(run_dir)["charts/eval_return"]] == pytest.approx(means, rel=1e-5)
    last = module.evaluate(agent, args.env_id, 5, 10_000 + args.seed).mean()
    assert last == pytest.approx(means[-1], rel=1e-5)
    best = module.evaluate(module.load_agent(run_dir / "best.pt"), args.env_id, 5, 10_000 + args.seed).mean()
    assert best == pytest.approx(max(means), rel=1e-5)
    plain = with_recipes("ppo_continuous")
    other, _ = plain.train(small(plain, tmp_path))
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, agent.state_dict()[name]), name
