"""A copied, renamed script: from the copy to a plot of several seeds beside the original."""

import re
import shutil

import compare
import pytest
import report as reports
import run as suites
import run_folder
from conftest import ROOT, SMALL, flags_of

import ppo_continuous

ENVIRONMENT = """
import atexit
import gymnasium as gym
import numpy as np


class Point(gym.Env):
    observation_space = gym.spaces.Box(-9, 9, (2,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), float(action[0]), False, False, {}


gym.register("Point-v0", Point, max_episode_steps=10)
atexit.register(print, "an evaluation's last line")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A project with a copy of ppo_continuous.py, whose --gae-lambda has another default, and an environment."""
    text = (ROOT / "ppo_continuous.py").read_text()
    assert text.count("gae_lambda: float = 0.95") == 1
    (tmp_path / "my_ppo.py").write_text(text.replace("gae_lambda: float = 0.95", "gae_lambda: float = 0.9"))
    (tmp_path / "my_envs.py").write_text(ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_from_the_copy_to_the_plot(folder, main, capsys):
    """run.py trains the copy, report.py draws its seeds beside the original's, compare.py prints the difference. Each
    has the label of its file. A second call trains nothing; a damaged run is named and left out."""
    flags = ["--env-ids=my_envs:Point-v0", "--", "--eval-episodes=1", *flags_of(**SMALL)]
    assert main(suites, "--script=my_ppo.py", "--seeds=1", *flags).returncode == 0
    mine = run_folder.load_script(folder / "my_ppo.py")
    for script, seed in ((mine, 2), (ppo_continuous, 1), (ppo_continuous, 2)):
        words = ["--env-id=my_envs:Point-v0", "--eval-episodes=1", f"--seed={seed}", *flags_of(**SMALL)]
        assert main(script, *words).returncode == 0
    runs = sorted(folder.glob("runs/my_envs-Point-v0__*"))
    assert len(runs) == 4
    again = main(suites, "--script=my_ppo.py", "--seeds=1", *flags)
    assert "1 of 1 runs have finished" in again.stdout and sorted(folder.glob("runs/my_envs-Point-v0__*")) == runs
    path = folder / "my_ppo.py"
    text = path.read_text()
    for edited in (text + "# a change\n", text.replace("    seed: int", "    mine: int = 0\n    seed: int", 1)):
        path.write_text(edited)  # the runs there are would pass for runs of it
        changed = main(suites, "--script=my_ppo.py", "--seeds=1", *flags)
        assert "my_ppo.py has changed since " in str(changed.returncode)
    path.write_text(text)

    report = main(reports, *folder.glob("runs/*"))
    assert (report.returncode, report.stderr) == (0, "")
    rows = run_folder.read_csv(folder / "report" / "runs.csv")
    assert [(row["script"], row["exp_name"], row["seed"]) for row in rows] == [
        *(("my_ppo", "my_ppo", seed) for seed in "12"),
        *(("ppo_continuous", "ppo_continuous", seed) for seed in "12"),
    ]
    assert all("--num-envs=4" in row["flags"] and "gae-lambda" not in row["flags"] for row in rows)
    assert (folder / "report" / "runs.png").stat().st_size > 10_000
    capsys.readouterr()
    compare.main("report/runs.csv:ppo_continuous", "report/runs.csv:my_ppo")
    assert re.search(r"Point-v0 +2   2 .* to ", capsys.readouterr().out)
    with pytest.raises(SystemExit, match="no task has runs of both"):
        compare.main("report/runs.csv:ppo_continuous", "report/runs.csv:my_pppo")

    (runs[0] / "checkpoint.pt").write_bytes(b"PK")
    (runs[1] / "episodes.csv").write_text("global_step,episodic_return,episodic_length,seconds\n")
    report = main(reports, *runs)
    assert report.returncode == 1 and len(run_folder.read_csv(folder / "report" / "runs.csv")) == 2
    assert f"{runs[0]}: it cannot be read" in report.stderr and f"{runs[1]}: no episode has ended" in report.stderr


def test_what_run_refuses(folder, main):
    """In one line each."""
    wanted = "give either --suite NAME, or --script FILE and --env-ids ID ..."
    for words in (["--seeds=1"], ["--script=my_ppo.py"], ["--suite=classic", "--script=my_ppo.py", "--env-ids=A-v0"]):
        assert main(suites, *words).returncode == wanted
    assert main(suites, "--script=your_ppo.py", "--env-ids=A-v0").returncode == "there is no script your_ppo.py"


def test_same_name_in_another_folder(folder):
    """Two files that are called ppo_continuous.py are two scripts."""
    shutil.copy(folder / "my_ppo.py", folder / "ppo_continuous.py")
    lambdas = [
        run_folder.load_script(path).Args().gae_lambda
        for path in (ROOT / "ppo_continuous.py", folder / "ppo_continuous.py")
    ]
    assert lambdas == [0.95, 0.9]
