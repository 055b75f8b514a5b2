"""benchmark/speed.py times what it says."""

import shutil
import sys
from pathlib import Path

import pytest
import speed
import torch
from conftest import ROOT

import ppo_discrete

RESULTS = ROOT / "benchmark" / "results"


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder in place of benchmark/results/."""
    monkeypatch.setattr(speed, "RESULTS", tmp_path / "results")
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
    assert "torch " + torch.__version__.split("+")[0] in slow["versions"]


def test_cpu_time_does_not_count_waiting(tmp_path):
    command = [sys.executable, "-c", "import time; time.sleep(0.5)"]
    assert speed.seconds(command, str(tmp_path)) > 0.5 > 0.3 > speed.seconds(command, str(tmp_path), cpu_time=True)


def test_speed_beside_another_commit(tmp_path, monkeypatch):
    """The same command lines, but for the folder of the script. A script in the current folder is not meant."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ppo_discrete.py").touch()
    case = speed.beside(Path("/elsewhere"), speed.make_cases()["discrete"])
    assert list(case) == ["before", "ppo_discrete"]
    before, mine = (run(100) for run, *_ in case.values())
    assert before[1] == "/elsewhere/ppo_discrete.py" and mine[1] == str(ROOT / "ppo_discrete.py")
    assert before[:1] + before[2:] == mine[:1] + mine[2:]


def test_speed_drops_no_peer_in_silence(results, main):
    shutil.copy(RESULTS / "speed.csv", results)
    finished = main(speed, "discrete")
    lost = str(finished.returncode).partition(" for discrete: install it, give its path or delete its row")[0]
    assert lost in [f"speed.py: error: speed.csv has {peer}" for peer in ("SBX", "rejax", "CleanRL")]


def test_speed_commands_run(tmp_path, main, monkeypatch):
    """`seconds` raises where a command fails."""
    monkeypatch.chdir(tmp_path)
    cases = speed.make_cases()["discrete"]
    assert main(ppo_discrete, *cases["ppo_discrete"][0](512)[2:], "--no-compile").returncode == 0
    for contestant in ("SB3", "simulator"):
        speed.seconds(cases[contestant][0](512), str(tmp_path))


def test_a_command_that_fails_is_named(tmp_path):
    with pytest.raises(SystemExit, match="failed"):
        speed.seconds([sys.executable, "-c", "raise ValueError"], str(tmp_path))
