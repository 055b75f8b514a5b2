"""benchmark/: suites know their runs, and reports read them."""

import dataclasses
import json
import sys

import pytest
from conftest import ONE, REAL_ENV, ROOT


def test_a_suite_knows_its_runs(tmp_path):
    """Names that begin alike: `slow`, seed 1, is not the run of `slow__1`."""
    sys.path.insert(0, str(ROOT / "benchmark"))
    import run as suites

    def job(exp_name):
        args = suites.Args("classic", seeds=1, tasks=("CartPole-v1",), total_timesteps=4096)
        args = dataclasses.replace(args, exp_name=exp_name, runs_dir=str(tmp_path))
        return suites.make_jobs(args)[0]

    folder = tmp_path / "CartPole-v1__slow__1__1__1795377113.372"
    folder.mkdir()
    (folder / "checkpoint.pt").touch()
    (folder / "args.json").write_text(json.dumps({"script": "ppo_discrete", **vars(job("slow__1").parsed)}))
    assert suites.find_run(job("slow__1")) == folder and suites.find_run(job("slow")) is None
    with pytest.raises(SystemExit, match="--eval-episodes must be at least 1"):
        suites.make_jobs(suites.Args("classic", eval_episodes=0))


@ONE
def test_figures_of_returns_between_0_and_1(tmp_path, script, small_args):
    """Keep the digits that tell settings apart (report.py, and tune.py, which maximises this)."""
    sys.path.insert(0, str(ROOT / "benchmark"))
    import report

    _, run_dir = script.train(small_args(env_id=REAL_ENV[script.__name__], compile=False))
    rows = "".join(f"{n},{int(n % 100 < 74)},1,1.0\n" for n in range(100))
    (run_dir / "episodes.csv").write_text("global_step,episodic_return,episodic_length,seconds\n" + rows)
    assert float(report.summarise(run_dir)["last_100_mean"]) == 0.74


def test_report_passes_over_other_folders(tmp_path):
    """Run folders of scripts with other names, and what else has an args.json."""
    sys.path.insert(0, str(ROOT / "benchmark"))
    import report

    (tmp_path / "args.json").write_text("{}")
    for scripts in ([], ["mine.py"], ["ppo_discrete.py", "ppo_discrete_old.py"]):
        for name in scripts:
            (tmp_path / name).touch()
        with pytest.raises(SystemExit, match="none of these"):
            report.write_csv("some", [tmp_path])
