"""benchmark/: suites know their runs, and reports read them."""

import dataclasses
import json
import sys

import pytest
import torch
from conftest import ROOT, SMALL, flags_of, run

sys.path.insert(0, str(ROOT / "benchmark"))
import run as suites

PACKAGES = {"box2d": "Box2D", "minatar": "minatar", "minigrid": "minigrid", "dm_control": "dm_control"}
PACKAGES |= {"popgym": "popgym"}
TASKS = [(suite, env_id) for suite in PACKAGES for _, env_id, _ in suites.SUITES[suite]]


def test_a_suite_knows_its_runs(tmp_path):
    """Names that begin alike: `slow`, seed 1, is not the run of `slow__1`."""

    def job(exp_name):
        args = suites.Args("classic", seeds=1, tasks=("CartPole-v1",), total_timesteps=4096)
        args = dataclasses.replace(args, exp_name=exp_name, runs_dir=str(tmp_path))
        return suites.make_jobs(args)[0]

    folder = tmp_path / "CartPole-v1__slow__1__1__1795377113.372"
    folder.mkdir()
    (folder / "checkpoint.pt").touch()
    (folder / "args.json").write_text(json.dumps({"script": "ppo_discrete", **vars(job("slow__1").parsed)}))
    assert suites.find_run(job("slow__1")) == folder and suites.find_run(job("slow")) is None


@pytest.mark.parametrize("suite, env_id", TASKS)
def test_task_of_an_optional_package(suite, env_id, tmp_path, main):
    """Two iterations with the suite's own command."""
    pytest.importorskip(PACKAGES[suite])
    flags = flags_of(**SMALL | {"total_timesteps": 128})
    (job,) = suites.make_jobs(suites.Args(suite, seeds=1, tasks=(env_id,), runs_dir=str(tmp_path)), flags)
    finished = main(suites.load_script(job.script), *job.arguments)
    assert finished.returncode == 0, finished.stderr
    checkpoint = torch.load(suites.find_run(job) / "checkpoint.pt", weights_only=True)
    assert checkpoint["global_step"] == 128


@pytest.mark.parametrize(
    "name, task",
    [
        ("ppo_discrete", "minatar_envs:MinAtar/Breakout-v1"),
        ("ppo_discrete", "minigrid_envs:Image/MiniGrid-FourRooms-v0"),
        ("ppo_continuous", "envpool_envs:EnvPool/HalfCheetah-v4"),
    ],
)
def test_package_is_not_installed(name, task, tmp_path):
    """The last line says what to install."""
    package = task.partition("_")[0]
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError(\"No module named '{package}'\")")
    finished = run(name, f"--env-id=benchmark.{task}", PYTHONPATH=f"{tmp_path}:{ROOT}")
    line = finished.stderr.splitlines()[-1]
    assert finished.returncode == 1 and f"No module named '{package}': python -m pip install" in line
