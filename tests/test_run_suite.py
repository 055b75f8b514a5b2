"""benchmark/run.py: suites of runs that are stopped, killed and shared, and end all the same."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import run as suites
import run_folder
import torch
from conftest import ROOT, wait_for

import ppo_discrete

QUICK = ["--no-compile", "--update-epochs=1", "--checkpoint-interval=1", "--eval-episodes=1"]  # for the script


def words_of(runs_dir, *words, steps=4096):
    """The command line of a suite of CartPole."""
    return [
        *("--suite=classic", "--tasks=CartPole-v1", f"--runs-dir={runs_dir}"),
        *(*words, f"--total-timesteps={steps}", "--", *QUICK),
    ]


def run_dirs(runs_dir):
    return sorted(path for path in runs_dir.iterdir() if path.name != "logs")


def times_of(paths):
    return {path: (path / "checkpoint.pt").stat().st_mtime_ns for path in paths}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Not where the developer's own runs are: run.py refuses those of a script that has changed since."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """The finished run of seed 1, not evaluated yet."""
    runs_dir = tmp_path_factory.mktemp("runs")
    (job,) = suites.make_jobs(suites.Args("classic", seeds=1, runs_dir=runs_dir, **ONE_RUN), QUICK)
    return ppo_discrete.train(job.parsed)[1]


@pytest.fixture
def run_dir(finished_run, tmp_path):
    """A copy of it, in the folder of the test."""
    return shutil.copytree(finished_run, tmp_path / finished_run.name)


ONE_RUN = {"tasks": ("CartPole-v1",), "total_timesteps": 4096}


def test_suite_stops_and_goes_on(tmp_path, main, monkeypatch):
    """SIGTERM: the runs stop and say how to continue. Then run.py is killed, but not what it started: the next one,
    here on a machine without git, waits for this orphan, so nothing runs twice. Once more, and nothing is trained."""
    words = words_of(tmp_path, "--seeds=1", steps=20_000)

    def stop_when_saved():
        while not list(tmp_path.glob("*/checkpoint.pt")):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_when_saved, daemon=True).start()
    done = main(suites, *words)
    assert "the same command goes on" in done.stderr and done.returncode == 130
    (run_dir,) = run_dirs(tmp_path)
    (log,) = (tmp_path / "logs").iterdir()
    assert "ppo_discrete.py --resume" in log.read_text().partition("to resume: python ")[2]
    assert run_folder.summarise(run_dir) is None

    command = [sys.executable, str(ROOT / "benchmark" / "run.py"), *words, "--checkpoint-interval=0.5"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    saved = times_of([run_dir])
    wait_for(lambda: times_of([run_dir]) != saved, process)
    process.kill()  # but not what it started
    process.wait()
    monkeypatch.setenv("PATH", "")
    done = main(suites, *words)
    assert "1 of 1 runs have finished" in done.stdout and run_dirs(tmp_path) == [run_dir]
    assert log.read_text().count(": step ") == 2  # the run that was stopped and the orphan print this line once
    assert run_folder.read_args(run_dir)["checkpoint_interval"] == 0.5  # the run that goes on takes such a flag
    row = run_folder.summarise(run_dir)
    assert (row["global_step"], row["commit"]) == (18_432, "") and "torch" in row["versions"] and row["evaluation"]

    saved = times_of([run_dir])
    assert "1 of 1 runs have finished" in main(suites, *words).stdout
    assert times_of(run_dirs(tmp_path)) == saved


def test_evaluation_is_of_the_agent_as_it_is(run_dir, tmp_path):
    """It is not repeated, unless the run has gone on since."""
    record, commit = run_dir / "benchmark.json", "0123abc"

    def evaluation(global_step):
        record.write_text(json.dumps({"evaluation": -1.0, "commit": commit, "global_step": global_step}))
        (job,) = suites.make_jobs(suites.Args("classic", seeds=1, runs_dir=tmp_path, **ONE_RUN), QUICK)
        row, recorded = suites.run_job(job, None, set(), threading.Event()), json.loads(record.read_text())
        assert row["evaluation"] == f"{recorded['evaluation']:.6g}"
        return recorded

    assert evaluation(global_step=4096)["evaluation"] == -1
    found = evaluation(global_step=2048)
    assert found["evaluation"] > 0 and found["commit"] != commit


def test_versions_of_a_script_do_not_mix(run_dir, tmp_path):
    """After an edit, other seeds are refused too: a table would show both versions as one setting. Another name or
    another setting has a row of its own."""
    args = suites.Args("classic", seeds=1, first_seed=2, runs_dir=tmp_path, **ONE_RUN)
    (job,) = suites.make_jobs(args, QUICK)
    with (run_dir / "ppo_discrete.py").open("a") as file:
        file.write("# an earlier version\n")
    with pytest.raises(SystemExit, match=r"ppo_discrete\.py has changed since .*: give another --exp-name"):
        suites.make_jobs(args, QUICK)
    with pytest.raises(RuntimeError, match=r"ppo_discrete\.py has changed since"):  # edited while the suite runs
        suites.run_job(job, None, set(), threading.Event())
    suites.make_jobs(suites.Args("classic", exp_name="after", runs_dir=tmp_path, **ONE_RUN), QUICK)
    suites.make_jobs(suites.Args("classic", runs_dir=tmp_path, **ONE_RUN | {"total_timesteps": 8192}), QUICK)


def test_run_without_a_new_flag_is_another_run(run_dir, tmp_path):
    """It is of an earlier script, which did not have the flag. So it is no result of the flag's value: it runs anew."""
    path = run_dir / "args.json"
    settings = json.loads(path.read_text())
    del settings["clip_coef"]
    path.write_text(json.dumps(settings))
    (job,) = suites.make_jobs(suites.Args("classic", seeds=1, runs_dir=tmp_path, **ONE_RUN), QUICK)
    suites.run_job(job, None, set(), threading.Event())
    assert len(run_dirs(tmp_path)) == 2


def test_suite_names_what_failed(run_dir, tmp_path, main):
    """The others finish; the exit status is 1; a flag that no run could take is refused before the first one."""
    torch.save({"global_step": 0}, run_dir / "checkpoint.pt")  # an unfinished run, as far as run.py can see
    words = words_of(tmp_path, "--seeds=2")
    assert "--num-minibatches must divide" in main(suites, *words, "--num-minibatches=7").returncode
    assert main(suites, *words, "--no-such-flag=1").returncode == 2
    for flag in ("--seed=7", "--runs-dir=elsewhere"):
        assert "run.py itself sets --env-id, --seed and --runs-dir" in main(suites, *words, flag).returncode
    assert run_dirs(tmp_path) == [run_dir]
    finished = main(suites, *words)
    assert finished.returncode == 1 and "1 of 2 runs have finished" in finished.stdout
    assert re.search("failed: ppo_discrete CartPole-v1 seed 1: KeyError: .*exit status 1", finished.stderr)
    (other,) = {*run_dirs(tmp_path)} - {run_dir}
    assert run_folder.summarise(other)["seed"] == 2


@pytest.mark.parametrize("suite", suites.SUITES)
def test_scripts_take_the_flags_of_every_suite(suite):
    jobs = [str(job) for job in suites.make_jobs(suites.Args(suite, seeds=1))]
    assert len(jobs) == len(suites.SUITES[suite]) == len(set(jobs))


def test_suites_without_runs_are_refused():
    for name in ("seeds", "first_seed", "jobs"):
        with pytest.raises(SystemExit, match=f"--{name.replace('_', '-')} must be at least 1"):
            suites.make_jobs(suites.Args("classic", **{name: 0}))


def test_seeds_are_those_that_are_asked_for():
    jobs = suites.make_jobs(suites.Args("classic", seeds=2, first_seed=6, tasks=("CartPole-v1",)))
    assert [job.seed for job in jobs] == [6, 7]


def test_damaged_run(run_dir, tmp_path, main):
    """It is named. The exit status says so, too."""
    path = run_dir / "args.json"
    path.write_text(path.read_text()[:100])
    done = main(suites, *words_of(tmp_path, "--seeds=1"))
    assert done.returncode == 1 and "0 of 1 runs have finished" in done.stdout
    assert f"failed: ppo_discrete CartPole-v1 seed 1: {path} is damaged" in done.stderr
