"""benchmark/peers.py: rows of Stable-Baselines3's runs, beside ours."""

import csv
import subprocess
import sys

import pytest
from conftest import ROOT

pytest.importorskip("rl_zoo3")


def test_rows_of_other_libraries(tmp_path):
    out = tmp_path / "peers.csv"
    words = ["--suite", "classic", "--tasks", "Acrobot-v1", "--seeds", "1", "--total-timesteps", "9000", "--out", out]
    command = [sys.executable, ROOT / "benchmark" / "peers.py", *words]
    subprocess.run(command, check=True)
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert {row["exp_name"] for row in rows} == {"sb3-ppo-defaults", "sb3-ppo-zoo"}
    for row in rows:
        assert int(row["global_step"]) >= 9000
        assert -500 <= float(row["last_100_mean"]) < -100  # raw: RL Zoo normalizes Acrobot's rewards
        assert -500 <= float(row["evaluation"]) < -50
    again = subprocess.run(command, check=True, capture_output=True, text=True)
    assert list(csv.DictReader(out.read_text().splitlines())) == rows
    assert "sb3-ppo" not in again.stdout
    subprocess.run([*command, "--total-timesteps", "20000"], check=True)  # another budget is another run
    assert len(list(csv.DictReader(out.read_text().splitlines()))) == 4


def test_atari(tmp_path):
    pytest.importorskip("ale_py")
    out = tmp_path / "peers.csv"
    words = ["--suite", "atari-short", "--tasks", "ALE/Breakout-v5", "--seeds", "1", "--out", out]
    words += ["--total-timesteps", "2048"]
    subprocess.run([sys.executable, ROOT / "benchmark" / "peers.py", *words], check=True)
    (row,) = csv.DictReader(out.read_text().splitlines())
    assert row["exp_name"] == "sb3-ppo-zoo"
    assert 1 <= int(row["episodes"]) <= 16  # whole games, not lives
    assert len(row["curve"].split()) > 5  # steps of four frames: else the first game would end after the last step
