"""benchmark/speed.py times what it says, and benchmark/studies/learning.py tells what those commands learn."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT

import ppo_discrete

sys.path.insert(0, str(ROOT / "benchmark"))
sys.path.insert(0, str(ROOT / "benchmark" / "studies"))
import learning
import run_folder
import speed

RESULTS = ROOT / "benchmark" / "results"


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder in place of benchmark/results/."""
    for module in (speed, learning):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


def test_speed_is_that_of_the_steps_in_between(monkeypatch):
    """A process that needs 3 s to start and 1 s for 500 steps: 500 steps/s, whatever the start takes."""
    contestants = {"slow": (lambda steps: (sys.executable, 3, steps / 250), 500, 1000)}
    contestants["ppo_fast"] = (lambda steps: (sys.executable, 3, steps / 500), 1000, 4000)
    monkeypatch.setattr(speed, "seconds", lambda command, cache, cpu_time: sum(command[1:]))
    slow, fast = speed.measure("case", contestants, 3)
    assert (slow["steps_per_second"], slow["first_start_seconds"], slow["ratio"]) == ("250", "3.0", "2.00")
    assert (fast["steps_per_second"], fast["start_seconds"], fast["ratio"]) == ("500", "3.0", "1.00")
    assert fast["steps_per_second_1m"] == "499"  # 2,003 s for a million
    assert "torch " + torch.__version__.split("+")[0] in slow["versions"]


def test_cpu_time_does_not_count_waiting(tmp_path):
    command = [sys.executable, "-c", "import time; time.sleep(0.5)"]
    assert speed.seconds(command, str(tmp_path)) > 0.5 > 0.3 > speed.seconds(command, str(tmp_path), cpu_time=True)


def test_speed_beside_another_commit():
    """The same command lines, but for the folder of the script."""
    case = speed.beside(Path("/elsewhere"), speed.make_cases()["discrete"])
    assert list(case) == ["before", "ppo_discrete"]
    before, mine = (run(100) for run, *_ in case.values())
    assert before[1] == "/elsewhere/ppo_discrete.py" and mine[1] == str(ROOT / "ppo_discrete.py")
    assert before[:1] + before[2:] == mine[:1] + mine[2:]


def test_speed_drops_no_peer_in_silence(results, main):
    shutil.copy(RESULTS / "speed.csv", results)
    finished = main(speed, "discrete")
    lost = finished.stderr.partition(" for discrete: install it or give its path")[0]
    assert finished.returncode == 2 and "speed.csv has " in lost and "CleanRL" in lost


@pytest.mark.parametrize("contestant", ["SB3", "ppo_discrete", "simulator"])
def test_speed_commands_run(contestant, tmp_path):
    command, *_ = speed.make_cases()["discrete"][contestant]
    assert speed.seconds(command(512) + ["--no-compile"] * (contestant == "ppo_discrete"), str(tmp_path)) > 0
    with pytest.raises(SystemExit, match="failed"):
        speed.seconds([sys.executable, "-c", "raise ValueError"], str(tmp_path))


def test_learning_is_that_of_the_timed_command(tmp_path, main):
    """The figure is that of a run of the same command line in episodes.csv."""
    contestant, _, _ = speed.make_cases()["discrete"]["ppo_discrete"]
    command = [*contestant(4096), "--no-compile", "--no-norm-adv"]
    figure = learning.last_100_mean(command)
    main(ppo_discrete, *command[2:], f"--runs-dir={tmp_path}")
    episodes = run_folder.read_csv(next(tmp_path.iterdir()) / "episodes.csv")
    assert figure == pytest.approx(np.mean([float(row["episodic_return"]) for row in episodes[-100:]]), rel=1e-6)
    with pytest.raises(SystemExit, match=r"only .* episodes, 100 are needed"):
        learning.last_100_mean([*contestant(512), "--no-compile"])


# In place of CleanRL's ppo.py: the return of every episode is the last digit of the last flag.
PEER = """import sys
from torch.utils.tensorboard import SummaryWriter
with SummaryWriter("runs/peer") as writer:
    for step in range(100):
        writer.add_scalar("charts/episodic_return", float(sys.argv[-1][-1]), step)
"""


def test_learning_runs_each_seed_once(tmp_path, results, main):
    """A call with more seeds adds those, of the contestant that lacks them; the next call has nothing to do."""
    jobs = learning.make_jobs(learning.Args(("discrete",), seeds=3, cleanrl=tmp_path))
    assert list(jobs) == [("discrete", name, seed) for name in ("CleanRL", "ppo_discrete") for seed in (1, 2, 3)]
    for (_, name, seed), command in jobs.items():
        assert command[1].endswith("ppo.py" if name == "CleanRL" else "ppo_discrete.py")
        assert command[-2:] == ["--total-timesteps=500000", f"--seed={seed}"]

    python, peer = Path(jobs["discrete", "CleanRL", 3][0]), tmp_path / "cleanrl" / "ppo.py"
    for path, text in ((python, f'#!/bin/sh\nexec {sys.executable} "$@"\n'), (peer, PEER)):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    python.chmod(0o755)
    rows = [dict(zip(learning.FIELDS, (*key, 500_000, f"{key[-1]}.0", ""))) for key in jobs]
    run_folder.write_rows(results / "learning.csv", learning.FIELDS, [rows[i] for i in (0, 1, 3, 4, 5)])
    for new in (["discrete, CleanRL, seed 3: 3.0"], []):
        lines = main(learning, "discrete", "--seeds=3", f"--cleanrl={tmp_path}").stdout.splitlines()
        assert [line for line in lines if "seed " in line] == new
        assert lines[-2].endswith("| CleanRL | 500,000 | 2.00 | 1.00 to 3.00 | 1.00, 2.00, 3.00 |")
    found = run_folder.read_csv(results / "learning.csv")
    key = ("case", "contestant", "seed", "steps", "last_100_mean")
    assert sorted([row[name] for name in key] for row in found) == [[str(row[name]) for name in key] for row in rows]
