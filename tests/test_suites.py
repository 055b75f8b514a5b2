"""benchmark/: suites know their runs, and reports read them."""

import dataclasses
import json
import sys

import pytest
import run as suites
import torch
from conftest import SMALL, flags_of

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
    "script, task",
    [
        ("ppo_discrete", "minatar_envs:MinAtar/Breakout-v1"),
        ("ppo_discrete", "minigrid_envs:Image/MiniGrid-FourRooms-v0"),
        ("ppo_continuous", "envpool_envs:EnvPool/HalfCheetah-v4"),
    ],
    indirect=["script"],
)
def test_package_is_not_installed(script, task, tmp_path, monkeypatch, main):
    """The error says what to install."""
    module = task.partition(":")[0]
    package = module.removesuffix("_envs")
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError(\"No module named '{package}'\")")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [x for x in sys.modules if x.partition(".")[0] == package or x == f"benchmark.{module}"]:
        monkeypatch.delitem(sys.modules, name)  # imported by another test
    with pytest.raises(ModuleNotFoundError, match=f"^No module named '{package}': python -m pip install"):
        main(script, f"--env-id=benchmark.{task}")
