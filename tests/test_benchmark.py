"""benchmark/: what it measures is what happened."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT, SMALL, flags_of, run
from test_run import wait_for
from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

import ppo_discrete

sys.path.insert(0, str(ROOT / "benchmark"))
sys.path.insert(0, str(ROOT / "benchmark" / "studies"))
import learning
import phases
import report
import run as suites
import speed
import tune

RESULTS = ROOT / "benchmark" / "results"
SWEEPS = sorted((ROOT / "benchmark" / "sweeps").glob("*.yaml"))
QUICK = ["--total-timesteps=4096", "--", "--no-compile", "--update-epochs=1", "--checkpoint-interval=1"]


@pytest.mark.parametrize("name", ["CartPole", "Pendulum", "MountainCar", "Acrobot"])
def test_masked_velocities(name):
    """They read 0 in every observation, positions as they are; the time limit still truncates."""
    import benchmark.memory_envs as memory_envs

    (original,) = (env_id for env_id in memory_envs.VELOCITIES if env_id.startswith(name))
    masked, plain = gym.make(original.replace("-", "NoVel-")), gym.make(original)
    (obs, _), (whole, _) = masked.reset(seed=0), plain.reset(seed=0)
    indices = memory_envs.VELOCITIES[original]
    moved, truncated = False, False
    plain.action_space.seed(0)
    for _ in range(plain.spec.max_episode_steps):
        assert not obs[indices].any() and obs.dtype == whole.dtype
        np.testing.assert_array_equal(np.delete(obs, indices), np.delete(whole, indices))
        moved |= whole[indices].any()
        action = plain.action_space.sample()
        obs, _, terminated, truncated, _ = masked.step(action)
        whole, *_ = plain.step(action)
        if terminated or truncated:
            break
    assert moved and (truncated or name in ("CartPole", "Acrobot"))


def test_masked_environment_from_the_command_line(tmp_path):
    """As README says it, from the root of the repository; evaluation finds the environment again."""
    env_id = "benchmark.memory_envs:CartPoleNoVel-v1"
    finished = run("ppo_rnn", *flags_of(env_id=env_id, runs_dir=tmp_path, **SMALL))
    assert finished.returncode == 0, finished.stderr
    finished = run("ppo_rnn", "--evaluate", next(tmp_path.iterdir()), "--env-id", env_id, "--eval-episodes=2")
    assert finished.returncode == 0 and "mean" in finished.stdout, finished.stderr


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder in place of benchmark/results/ and of docs/pictures/."""
    for module in (report, speed, learning, tune):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(report, "PICTURES", tmp_path / "results")
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


@pytest.fixture(scope="module")
def finished_runs(tmp_path_factory):
    """CartPole with two seeds, as benchmark/run.py trains it: a runs_dir, and what it printed."""
    runs_dir = tmp_path_factory.mktemp("runs")
    done = start_suite(runs_dir).communicate(timeout=300)[0]
    return runs_dir, done


@pytest.fixture
def run_dir(finished_runs, tmp_path):
    """A copy of the run of seed 1, in the folder of the test."""
    (first,) = finished_runs[0].glob("*__ppo_discrete__1__*")
    return shutil.copytree(first, tmp_path / first.name)


def start_suite(runs_dir, *words, flags=(), **environment):
    command = [sys.executable, str(ROOT / "benchmark" / "run.py"), "--suite=classic", "--tasks=CartPole-v1"]
    command += ["--seeds=2", "--jobs=2", "--eval-episodes=1", f"--runs-dir={runs_dir}", *words, *QUICK, *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=os.environ | environment, **pipes)


def run_dirs(runs_dir):
    return sorted(path for path in Path(runs_dir).iterdir() if path.name != "logs")


def test_report_of_a_run(finished_runs, tmp_path, results, capsys):
    """The row of a run: the mean of its last 100 episodes, the flags that are not default; nothing for an unfinished
    run; a run of the same settings and seed takes the place of the one before, another one does not."""
    run_dir, other = run_dirs(finished_runs[0])
    episodes = report.read_csv(run_dir / "episodes.csv")
    returns = [float(row["episodic_return"]) for row in episodes]
    row = report.summarise(run_dir)
    assert len(returns) > 100 and row["episodes"] == len(returns)
    assert float(row["last_100_mean"]) == pytest.approx(np.mean(returns[-100:]), abs=0.05)
    hundreds = [np.mean(returns[i : i + 100]) for i in range(len(returns) - 99)]
    assert float(row["best_100_mean"]) == pytest.approx(max(hundreds), abs=0.05)
    assert row["flags"] == "--total-timesteps=4096 --update-epochs=1"
    step, _, mean = report.curve(run_dir, row["global_step"])[-1]
    assert (step, mean) == (4096, pytest.approx(np.mean(returns[-100:])))
    early = [float(row["episodic_return"]) for row in episodes if int(row["global_step"]) <= 1024]
    at = {step: mean for step, _, mean in report.curve(run_dir, 4096)}
    before = max(int(row["global_step"]) for row in episodes if int(row["global_step"]) <= 1024)
    assert len(early) < 100 and before > 1000 and at[1065] == pytest.approx(np.mean(early), rel=0.15)

    for paths in ([run_dir], [other], [run_dir, tmp_path / "logs"]):
        report.write_csv("some", paths)
    (line,) = (line for line in capsys.readouterr().out.splitlines()[-3:] if "CartPole-v1" in line)  # both are in it
    assert line.count("| 2 |") == 1
    assert len(report.read_csv(results / "some.csv")) == 2
    points = report.read_csv(results / "some_curves.csv")
    assert len(points) == len({(point["seed"], point["global_step"]) for point in points}) > report.CURVE_POINTS
    checkpoint = (run_dir / "checkpoint.pt").rename(tmp_path / "checkpoint.pt")
    assert report.summarise(run_dir) is None
    checkpoint.rename(run_dir / "checkpoint.pt")


def test_tables_and_pictures(finished_runs, results):
    """What README gets is what the runs did, beside the published figure; curves end where the table says."""
    report.write_csv("classic", run_dirs(finished_runs[0]))
    report.draw_curves("classic")
    rows = report.read_csv(results / "classic.csv")
    values = [float(row["last_100_mean"]) for row in rows]
    (line,) = (line for line in report.suite_table("classic") if "CartPole-v1" in line)
    low, high = sorted(values)
    assert f"{np.mean(values):.1f} | {low:.1f} to {high:.1f} | 2 |" in line
    assert "490.0 at 500,000 | 500.0† at 100,000" in line
    assert f"| {np.mean([float(row['evaluation']) for row in rows]):.1f} |" in line
    assert all(row["versions"] and row["commit"] and row["hardware"] for row in rows)
    for name, paths in (("mujoco", run_dirs(finished_runs[0])), ("some", [finished_runs[0]])):
        with pytest.raises(SystemExit, match="none of these is the folder of a finished run"):
            report.write_csv(name, paths)  # none of its tasks; the folder of the folders
    pictures = [(results / name).read_bytes() for name in ("classic.png", "classic_time.png")]
    assert all(picture.startswith(b"\x89PNG") and len(picture) > 10_000 for picture in pictures)


def test_report_of_any_runs(finished_runs, tmp_path, main):
    """Without --publish the tables and curves go into a folder of the user's, and nothing in the repository changes."""
    before = {path: path.read_bytes() for path in [*report.RESULTS.iterdir(), ROOT / "README.md"]}
    command = [sys.executable, "benchmark/report.py", *run_dirs(finished_runs[0]), "--out", tmp_path / "mine"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert {path: path.read_bytes() for path in before} == before
    names = {path.name for path in (tmp_path / "mine").iterdir()}
    assert names == {"runs.csv", "runs_curves.csv", "runs.md", "defaults.json", "runs.png", "runs_time.png"}
    assert (tmp_path / "mine" / "runs.md").read_text().count("CartPole-v1") == 1
    assert "error: name run folders" in main(report).returncode


def test_readme_has_the_tables_of_the_results():
    """No figure between its markers, and none of docs/results.md, is older than results/, or written by hand."""
    page = (ROOT / "README.md").read_text()
    assert report.results_page() == (ROOT / "docs" / "results.md").read_text()
    assert report.fill_page(page) == page
    assert report.fill_page(re.sub(r"\| \*\*\d", "| **", page)) == page  # all figures of its tables


@pytest.mark.parametrize("tool, package", [("report", "matplotlib"), ("tune", "optuna")])
def test_tools_need_more_requirements(tmp_path, tool, package):
    """Of benchmark/requirements.txt; where they are missing one line says so."""
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('no {package}')")
    finished = run(f"benchmark/{tool}", "--publish=readme", PYTHONPATH=str(tmp_path))
    message = f"{tool}.py: error: no {package}: python -m pip install -r benchmark/requirements.txt\n"
    assert (finished.returncode, finished.stderr) == (1, message)


def test_solved_where_a_module_registers_the_task(run_dir):
    """`solved_at` is the step of the first episode with which a hundred have the mean that solves the task."""
    args = json.loads((run_dir / "args.json").read_text()) | {"env_id": "benchmark.memory_envs:CartPoleNoVel-v1"}
    (run_dir / "args.json").write_text(json.dumps(args))
    returns = [400] * 100 + [500] * 100
    rows = "".join(f"{8 * i},{value},{value},1.0\n" for i, value in enumerate(returns))
    (run_dir / "episodes.csv").write_text("global_step,episodic_return,episodic_length,seconds\n" + rows)
    row = report.summarise(run_dir)
    assert row["solved_at"] == str(8 * 174)  # 25 of 400, 75 of 500
    assert "| 1392 |" in report.settings_table([{name: str(value) for name, value in row.items()}])


def test_runs_of_few_episodes(run_dir, results):
    """Two good episodes solve nothing, and the table says how few they are. Runs of tune.py are no runs of a suite."""
    header, *_ = (run_dir / "episodes.csv").read_text().splitlines()
    (run_dir / "episodes.csv").write_text(f"{header}\n1000,500,500,1.0\n1004,500,500,1.0\n")
    report.write_csv("classic", [run_dir])
    (row,) = report.read_csv(results / "classic.csv")
    assert (row["last_100_mean"], row["solved_at"]) == ("500", "")
    assert "CartPole-v1, `ppo_discrete.py --update-epochs=1` (of 2 episodes)" in "".join(report.suite_table("classic"))
    args = json.loads((run_dir / "args.json").read_text())
    (run_dir / "args.json").write_text(json.dumps(args | {"exp_name": "tune-0123abcd"}))
    with pytest.raises(SystemExit, match="none of these is the folder of a finished run"):
        report.write_csv("classic", [run_dir])


def test_summary_is_of_whole_runs_with_default_settings(results):
    """What other settings or fewer steps make of a task gets a row, but does not count in the means over tasks."""
    shutil.copytree(RESULTS, results, dirs_exist_ok=True)
    rows = [row for row in report.read_csv(RESULTS / "mujoco.csv") if row["env_id"] in ("Hopper-v4", "Ant-v4")]
    slow = [row | {"flags": "--learning-rate=0.0001", "last_100_mean": "0"} for row in rows]
    short = {"flags": "--total-timesteps=20000", "global_step": "20000", "last_100_mean": "0"}
    tables = []
    for more in ([], slow + [row | short for row in rows]):
        report.write_rows(results / "mujoco.csv", report.FIELDS, rows + more)
        tables.append(report.suite_table("mujoco"))
    (summary,) = (line for line in tables[0] if line.startswith("On a scale from random actions"))
    assert summary in tables[1] and sum("learning-rate" in line for line in tables[1]) == 2


def test_results_of_other_defaults(finished_runs, results):
    """Are named as such in the table, and never averaged with those of the present ones. A flag that was not there yet
    counts only where BEFORE says what runs did without it."""
    report.write_csv("classic", run_dirs(finished_runs[0]))
    rows = report.read_csv(results / "classic.csv")
    ((key, present),) = report.read_defaults().items()
    without = {name: value for name, value in present.items() if name != "kl_coef"}
    known = {key: present, "other": present | {"clip_coef": 0.1}, "later": present | {"a_new_flag": 1}}
    known |= {"earlier": without, "penalty": present | {"kl_coef": 0.5}}
    (results / "defaults.json").write_text(json.dumps(known))

    def table(*defaults):
        """That of two runs which had these defaults."""
        of = [row | {"defaults": name, "commit": "abc"} for row, name in zip(rows, defaults)]
        report.write_rows(results / "classic.csv", report.FIELDS, of)
        return "".join(report.suite_table("classic"))

    for second in (key, "later", "earlier"):
        assert "defaults of commit" not in table(key, second)
    assert "(defaults of commit abc)" in table("other", "other")
    for first, second in ((key, "other"), (key, ""), ("penalty", "earlier")):  # "" from before there was that column
        with pytest.raises(SystemExit, match="different defaults"):
            table(first, second)


def test_intervals():
    """Of normal scores the interval is mean +- 1.96 standard errors, within each task; outliers do not move the IQM."""
    scores = [np.random.default_rng(i).normal(10 * i, 1, 100) for i in range(2)]
    low, high = report.bootstrap_interval(scores, lambda tasks: np.mean([task.mean() for task in tasks]))
    assert (high - low) / 2 == pytest.approx(1.96 / 200**0.5, rel=0.1)
    assert report.interquartile_mean([np.array([0, 1, 2, 1e6]), np.array([-1e6, 1, 2, 3])]) == 1.5


def test_suite_goes_on(finished_runs):
    """Started again it leaves finished runs alone; one that was killed with its run.py resumes in its own folder, here
    on a machine without git."""
    runs_dir, printed = finished_runs
    assert "2 of 2 runs have finished" in printed
    before = {path: (path / "checkpoint.pt").stat().st_mtime_ns for path in run_dirs(runs_dir)}
    assert len(before) == 2 and all((path / "benchmark.json").exists() for path in before)
    again = start_suite(runs_dir).communicate(timeout=100)[0]
    assert "2 of 2 runs have finished" in again
    assert before == {path: (path / "checkpoint.pt").stat().st_mtime_ns for path in run_dirs(runs_dir)}

    more = ["--exp-name=killed", "--seeds=1"]
    longer = ["--total-timesteps=60000"]
    process = start_suite(runs_dir, *more, flags=longer)
    wait_for(lambda: list(runs_dir.glob("*__killed__*/checkpoint.pt")), process)
    (run_dir,) = runs_dir.glob("*__killed__*")
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    process.kill()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    process.wait()
    assert report.summarise(run_dir) is None
    done = start_suite(runs_dir, *more, flags=longer, PATH="").communicate(timeout=300)[0]
    assert "1 of 1 runs have finished" in done and list(runs_dir.glob("*__killed__*")) == [run_dir]
    row = report.summarise(run_dir)
    assert (row["global_step"], row["commit"]) == (59_392, "") and "torch" in row["versions"]


def test_evaluation_is_of_the_agent_as_it_is(run_dir, tmp_path):
    """It is not repeated, unless the run has gone on since, or another number of episodes is wanted."""
    record, commit = run_dir / "benchmark.json", "0123abc"

    def evaluation(eval_episodes):
        what = {"tasks": ("CartPole-v1",), "total_timesteps": 4096, "runs_dir": tmp_path}
        (job,) = suites.make_jobs(suites.Args("classic", seeds=1, eval_episodes=eval_episodes, **what), QUICK[2:])
        assert suites.run_job(job)["evaluation"] == f"{json.loads(record.read_text())['evaluation']:.6g}"
        return json.loads(record.read_text())

    def claim(value):
        record.write_text(json.dumps(json.loads(record.read_text()) | {"evaluation": value, "commit": commit}))

    claim(-1.0)
    assert evaluation(eval_episodes=1)["evaluation"] == -1
    found = evaluation(eval_episodes=2)
    assert found["evaluation"] > 0 and found["eval_episodes"] == 2 and found["commit"] == commit
    claim(-1.0)
    after = record.stat().st_mtime + 10
    os.utime(run_dir / "checkpoint.pt", (after, after))
    found = evaluation(eval_episodes=2)
    assert found["evaluation"] > 0 and found["commit"] != commit


def test_suite_stops_and_waits_for_orphans(tmp_path):
    """SIGTERM: the runs are saved. A suite beside the orphan of another waits for it, and trains nothing twice."""
    flags = ["--total-timesteps=60000"]
    process = start_suite(tmp_path, "--seeds=1", flags=flags)
    wait_for(lambda: list(tmp_path.glob("*/checkpoint.pt")), process)
    process.send_signal(signal.SIGTERM)
    assert "the same command goes on" in process.communicate(timeout=100)[0] and process.returncode == 130
    (run_dir,) = run_dirs(tmp_path)
    assert "stopped; go on with --resume" in next((tmp_path / "logs").iterdir()).read_text()

    process = start_suite(tmp_path, "--seeds=1", flags=flags)
    saved = (run_dir / "checkpoint.pt").stat().st_mtime_ns
    wait_for(lambda: (run_dir / "checkpoint.pt").stat().st_mtime_ns != saved, process)
    process.kill()  # but not what it started
    process.wait()
    done = start_suite(tmp_path, "--seeds=1", flags=flags).communicate(timeout=300)[0]
    assert "1 of 1 runs have finished" in done and run_dirs(tmp_path) == [run_dir]
    log = next((tmp_path / "logs").iterdir()).read_text()
    assert log.count(", on cpu\n") == 2  # the run that was stopped and the orphan, which each print this line once


def test_suite_names_what_failed(run_dir, tmp_path, main):
    """The others finish; the exit status is 1; a flag that no run could take is refused before the first one."""
    torch.save({"global_step": 0}, run_dir / "checkpoint.pt")  # an unfinished run, as far as run.py can see
    words = ["--suite=classic", "--tasks=CartPole-v1", "--seeds=2", "--eval-episodes=1", f"--runs-dir={tmp_path}"]
    for flag in ("--num-minibatches=7", "--no-such-flag=1"):
        assert main(suites, *words, *QUICK, flag).returncode == 2
    for flag in ("--seed=7", "--runs-dir=elsewhere"):
        assert "are what run.py gives each run" in main(suites, *words, *QUICK, flag).returncode
    assert run_dirs(tmp_path) == [run_dir]
    finished = main(suites, *words, *QUICK)
    assert finished.returncode == 1 and "1 of 2 runs have finished" in finished.stdout
    assert re.search("failed: ppo_discrete CartPole-v1 seed 1: .*is missing, damaged.*exit status 2", finished.stderr)
    (other,) = {*run_dirs(tmp_path)} - {run_dir}
    assert report.summarise(other)["seed"] == 2


@pytest.mark.parametrize("suite", suites.SUITES)
def test_shards_are_the_whole(suite):
    """Each run is in exactly one of them."""
    args = suites.Args(suite, seeds=2)
    whole = [str(job) for job in suites.make_jobs(args)]
    parts = [str(job) for i in (1, 2, 3) for job in suites.make_jobs(suites.Args(suite, seeds=2, shard=f"{i}/3"))]
    assert len(whole) == 2 * len(suites.SUITES[suite]) == len(set(whole)) and sorted(parts) == sorted(whole)
    for shard in ("0/3", "4/3", "3", "a/b"):
        with pytest.raises(SystemExit, match="shard"):
            suites.make_jobs(suites.Args(suite, shard=shard))


def test_tuned_settings_are_those_of_the_file():
    """Tasks of tuned.yaml have its flags, others those of the suite; flags after -- come last; the name says tuned."""
    tuned = suites.make_jobs(suites.Args("mujoco", seeds=1, tuned=True), ["--gamma=0.5"])
    plain = {job.env_id: job for job in suites.make_jobs(suites.Args("mujoco", seeds=1), ["--gamma=0.5"])}
    assert [job.env_id for job in tuned] == [*plain] and plain.keys() > set(suites.TUNED)
    for job in tuned:
        script = suites.load_script(job.script)
        wanted = vars(script.parse_args([*suites.TUNED.get(job.env_id, "").split(), "--gamma=0.5"]))
        other = report.WHERE_AND_HOW
        assert {k: v for k, v in vars(job.parsed).items() if k not in other} == {
            k: v for k, v in wanted.items() if k not in other
        }
        assert job.parsed.exp_name == "tuned" and plain[job.env_id].parsed.exp_name == "ppo_continuous"
        if job.env_id in suites.TUNED:
            assert job.words != plain[job.env_id].words
    (named,) = suites.make_jobs(suites.Args("mujoco", seeds=1, tuned=True, tasks=("Ant-v4",), exp_name="mine"))
    assert named.parsed.exp_name == "mine"


def test_search_lists_what_it_begins_with():
    """A value that is missing in the list of its parameter ends the search when its trial begins."""
    search = yaml.safe_load((ROOT / "benchmark" / "tuned_search.yaml").read_text())
    settings = [setting for trials in search["begin_with"].values() for setting in trials]
    assert settings and not [
        (name, value)
        for setting in settings
        for name, value in setting.items()
        if value not in search["parameters"][name]["values"]
    ]


def test_more_seeds_go_on_where_the_first_ended():
    whole = suites.make_jobs(suites.Args("classic", seeds=5))
    parts = [suites.make_jobs(suites.Args("classic", seeds=n, first_seed=first)) for first, n in ((1, 2), (3, 3))]
    assert [str(job) for job in parts[0] + parts[1]] == [str(job) for job in whole]


def test_suites_without_runs_are_refused():
    for name in ("seeds", "first_seed", "jobs"):
        with pytest.raises(SystemExit, match=f"--{name.replace('_', '-')} must be at least 1"):
            suites.make_jobs(suites.Args("classic", **{name: 0}))


def test_ray_cluster_loses_a_node(tmp_path):
    """Two nodes on this machine, one is killed in the middle: all runs finish, each in one folder."""
    pytest.importorskip("ray", reason="ray is not installed (it is not in tests/requirements.txt)")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        node = cluster.add_node(num_cpus=1)
        process = start_suite(tmp_path, f"--ray={cluster.address}", flags=["--total-timesteps=60000"])
        wait_for(lambda: len(list(tmp_path.glob("*/checkpoint.pt"))) == 2, process)
        cluster.remove_node(node, allow_graceful=False)
        done = process.communicate(timeout=300)[0]
    finally:
        cluster.shutdown()
    assert "2 of 2 runs have finished" in done, done
    assert [report.summarise(path)["global_step"] for path in run_dirs(tmp_path)] == [59_392] * 2


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_sweeps(path):
    """Every end of every range, in the words that wandb's agent sends, is taken by the script; so are the default
    settings, which the search begins with."""
    sweep = yaml.safe_load(path.read_text())
    script = suites.load_script(Path(sweep["program"]).stem)
    assert path.stem == script.__name__ and sweep["metric"]["name"] == "charts/last_100_return"
    specs = sweep["parameters"]
    ends = {
        name: spec.get("values") or [spec[key] for key in ("value", "min", "max") if key in spec]
        for name, spec in specs.items()
    }
    for form in ("args", "args_no_equals"):
        for i in range(max(map(len, ends.values()))):
            chosen = {name: values[min(i, len(values) - 1)] for name, values in ends.items()}
            args = script.parse_args(
                create_sweep_command_args({"args": {k: {"value": v} for k, v in chosen.items()}})[form]
            )
            assert {name: getattr(args, name) for name in chosen} == chosen
            script.check_args(args)
    defaults = vars(script.Args())
    for name, spec in specs.items():
        if "values" in spec:
            assert defaults[name] in spec["values"]
        elif "min" in spec:
            assert spec["min"] <= defaults[name] <= spec["max"]


def test_tune(tmp_path, results, main):
    """Two workers make one study; its first trial has the defaults, the second what the file begins with; a score is
    the figure of the run; the same command has nothing left to do."""
    small = yaml.safe_load((ROOT / "benchmark" / "sweeps" / "ppo_discrete.yaml").read_text())
    small["parameters"] = {name: small["parameters"][name] for name in ("env_id", "gamma", "learning_rate")}
    small["parameters"] |= {
        "compile": {"value": False},
        "update_epochs": {"value": 1},
        "env_id": {"value": "CartPole-v1"},
    }
    small["begin_with"] = {"CartPole-v1": [{"gamma": 0.98}]}
    (tmp_path / "sweep.yaml").write_text(yaml.dump(small))
    words = [str(tmp_path / "sweep.yaml"), "--study=s", f"--runs-dir={tmp_path}", "--total-timesteps=4096"]
    words += ["--trials=2", "--seeds=1"]
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'benchmark')!r}); import report, pathlib, tune; "
    code += f"tune.RESULTS = pathlib.Path({str(results)!r}); tune.main()"
    workers = [subprocess.Popen([sys.executable, "-c", code, *words]) for _ in range(2)]
    assert [worker.wait(timeout=300) for worker in workers] == [0, 0]
    rows = report.read_csv(results / "tuning_s.csv")
    complete = [row for row in rows if row["state"] == "COMPLETE"]
    assert 2 <= len(complete) <= 3
    assert not list(tmp_path.glob("*/benchmark.json"))  # nothing was evaluated: a score does not need it
    assert "the best is" in main(tune, *words).stdout and report.read_csv(results / "tuning_s.csv") == rows
    default = ppo_discrete.Args()
    begun = [(float(row["gamma"]), float(row["learning_rate"])) for row in rows[:2]]
    assert begun == [(default.gamma, default.learning_rate), (0.98, default.learning_rate)]
    for row in complete:
        assert float(row["score"]) == pytest.approx(float(row["CartPole-v1 seed 101"]), rel=1e-3)
    assert "began with other tasks, seeds, steps or parameters" in main(tune, *words, "--seeds=2").returncode
    # On another machine there is the table, but no study: it has nothing left to do either.
    words[2] = f"--runs-dir={tmp_path / 'elsewhere'}"
    assert "the best is" in main(tune, *words).stdout
    again, ended = report.read_csv(results / "tuning_s.csv"), ("COMPLETE", "PRUNED")
    trials = [{name: row[name] for name in rows[0] if name != "trial"} for row in again if row["state"] in ended]
    assert trials == [{name: row[name] for name in rows[0] if name != "trial"} for row in rows if row["state"] in ended]
    assert not list((tmp_path / "elsewhere").glob("CartPole*"))
    words[2] = f"--runs-dir={tmp_path / 'third'}"
    assert "is of other tasks or seeds" in main(tune, *words, "--first-seed=7").returncode


def test_speed_is_that_of_the_steps_in_between(monkeypatch):
    """A process that needs 3 s to start and 1 s for 500 steps: 500 steps/s, whatever the start takes."""
    contestants = {"slow": (lambda steps: (sys.executable, 3, steps / 250), 500, 1000)}
    contestants["ppo_fast"] = (lambda steps: (sys.executable, 3, steps / 500), 1000, 4000)
    monkeypatch.setattr(speed, "seconds", lambda command, cache, cpu_time: sum(command[1:]))
    slow, fast = speed.measure("case", contestants, 3)
    assert (slow["steps_per_second"], slow["first_start_seconds"], slow["ratio"]) == ("250", "3.0", "2.00")
    assert (fast["steps_per_second"], fast["start_seconds"], fast["ratio"]) == ("500", "3.0", "1.00")
    assert fast["steps_per_second_1m"] == "499"  # 2,003 s for a million
    assert f"torch {torch.__version__}" in slow["versions"]


def test_cpu_time_does_not_count_waiting(tmp_path):
    command = [sys.executable, "-c", "import time; time.sleep(1)"]
    assert speed.seconds(command, str(tmp_path)) > 1 > 0.7 > speed.seconds(command, str(tmp_path), cpu_time=True)


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
    assert finished.returncode == 2 and "speed.csv has CleanRL for discrete: give its path too" in finished.stderr


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
    episodes = report.read_csv(next(tmp_path.iterdir()) / "episodes.csv")
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
    report.write_rows(results / "learning.csv", learning.FIELDS, [rows[i] for i in (0, 1, 3, 4, 5)])
    for new in (["discrete, CleanRL, seed 3: 3.0"], []):
        lines = main(learning, "discrete", "--seeds=3", f"--cleanrl={tmp_path}").stdout.splitlines()
        assert [line for line in lines if "seed " in line] == new
        assert lines[-2].endswith("| CleanRL | 500,000 | 2.00 | 1.00 to 3.00 | 1.00, 2.00, 3.00 |")
    found = report.read_csv(results / "learning.csv")
    key = ("case", "contestant", "seed", "steps", "last_100_mean")
    assert sorted([row[name] for name in key] for row in found) == [[str(row[name]) for name in key] for row in rows]


STUDIES = sorted((ROOT / "benchmark" / "studies").glob("*.py"))


def test_studies_start_anywhere_and_say_what_they_found(tmp_path):
    """Question, command and answer open each; the imports need no current folder."""
    for path in STUDIES:
        text = ast.get_docstring(ast.parse(path.read_text()))
        order = rf"Question: .*\?$.*^ .*python benchmark/studies/{path.name} .*^Answer \(results/"
        assert re.match(order, text, re.M | re.S), path
    code = "import runpy, sys; before = sys.path[:]\n"
    code += "for path in sys.argv[1:]:\n"
    code += "    sys.path[:] = before; [sys.modules.pop(name, None) for name in ('report', 'run', 'speed', 'suites')]\n"
    code += "    runpy.run_path(path)"
    subprocess.run([sys.executable, "-c", code, *map(str, STUDIES)], cwd=tmp_path, check=True)


def test_answers_of_the_studies():
    """Their figures are those of results/."""

    def figures(study, *answers):
        text = " ".join(ast.get_docstring(ast.parse((STUDIES[0].parent / f"{study}.py").read_text())).split())
        for answer in answers:
            assert answer in text, answer

    def mean(rows, column, **which):
        found = [float(row[column]) for row in rows if all(row[name] == value for name, value in which.items())]
        return np.mean(found)

    rows = report.read_csv(report.RESULTS / "phases.csv")
    of = {
        case: {
            row["phase"]: float(row["microseconds"]) for row in rows if row["case"] == case and row["script"] == mine
        }
        for case, mine in (("defaults", "ppo_continuous"), ("continuous-8", "ppo_continuous"))
    }
    whole, part = of["defaults"], of["continuous-8"]
    text = f"takes {sum(whole.values()):,.0f} us: the simulators {whole['simulators']:,.0f}, the gradients"
    figures("phases", f"{text} {whole['gradients']:,.0f}.")
    figures("phases", f"{sum(part.values()):.0f} us: {part['simulators']:.0f} and {part['gradients']:.0f}.")
    rows = report.read_csv(report.RESULTS / "learning.csv")
    for task, case, mine in (
        ("HalfCheetah", "continuous-8", "ppo_continuous"),
        ("CartPole", "discrete", "ppo_discrete"),
    ):
        ours, theirs = (mean(rows, "last_100_mean", case=case, contestant=name) for name in (mine, "CleanRL"))
        figures("learning", f"{task} {ours:,.0f}, CleanRL {theirs:,.0f}.")
    rows = {(row["fault"], row["script"]): row["outcome"] for row in report.read_csv(report.RESULTS / "faults.csv")}
    trained, refused = (
        sum(int(re.search(rf"(\d+) {word}", text)[1]) for (fault, _), text in rows.items() if fault == "flags")
        for word in ("trained", "refused")
    )
    assert {fault for fault, _ in rows} == {"flags", "kills", "memory"}
    figures("faults", f"Of {trained + refused:,} command lines {trained:,} train, {refused} are refused")
    for script in ("ppo_continuous", "ppo_discrete"):
        early, late = re.findall(r"(\d+) MB", rows["memory", script])
        figures("faults", script, early, late)
    rows = report.read_csv(report.RESULTS / "google_vs_nvidia_small.csv")
    ends = {update: mean(rows, "mean_return", update=update, evaluation="10") for update in {r["update"] for r in rows}}
    figures("google_vs_nvidia", f"NVIDIA's ends at {ends['nvidia']:,.0f}, Google's at {ends['google']:,.0f} (20 seeds")
    text = f"reaches {ends['google+normalised']:,.0f}, with stored values {ends['google+stored']:.0f}, with GAE"
    figures("google_vs_nvidia", f"{text} {ends['google+gae']:.0f}.")
    scores = [
        sorted(float(row["task_score"]) for row in report.read_csv(report.RESULTS / "rlhf.csv") if row["kl_coef"] == kl)
        for kl in ("0.1", "0.0")
    ]
    low, _, high = scores[0]
    figures("rlhf_plot", f"{low:.3f} to {high:.3f}.", f"ends at {scores[1][2]:.3f}.")
    (row,) = report.read_csv(report.RESULTS / "speed_gpu_sim.csv")
    text = f"{int(row['ours']):,} on one CPU thread, {row['ratio']} times rsl_rl's {int(row['theirs']):,}."
    figures("speed_gpu_sim", text)


def test_phases_are_those_of_the_loop(tmp_path):
    """A loop whose simulators and whose log are slow by so much: there the time is found, and nowhere else."""
    script, (contestant, _, _) = phases.load(ROOT / "ppo_discrete.py"), speed.make_cases()["discrete"]["ppo_discrete"]
    make_envs, log = script.make_envs, script.Run.log

    def make_slow_envs(*arguments):
        envs = make_envs(*arguments)
        step = envs.step
        envs.step = lambda actions: (time.sleep(0.005), step(actions))[1]
        return envs

    script.make_envs = make_slow_envs
    script.Run.log = lambda *arguments: (time.sleep(0.256), log(*arguments))[1]  # 128 steps
    found, lines = phases.profile([*contestant(4 * 512), "--no-compile"], script, tmp_path)
    assert found["simulators"] > 5_000 and 2_000 < found["log"] < 5_000
    assert len(found) == 8 and all(0 < us < 2_000 for phase, us in found.items() if phase not in ("simulators", "log"))
    assert "one gradient of 128 rows" in lines[0] and "GFLOPS" in lines[1]
    with pytest.raises(SystemExit, match="something of the training loop: give it a phase"):
        phases.microseconds(["something", 0.0, 1.0])


def test_figures_of_the_language_model():
    """docs/rlhf.md tells what results/rlhf.csv has."""
    rows, page = report.read_csv(report.RESULTS / "rlhf.csv"), report.ROOT / "docs" / "rlhf.md"
    with_penalty = [row for row in rows if row["kl_coef"] == "0.1"]
    assert f"rises from 0.5 to {min(float(row['reward']) for row in with_penalty):.2f}" in page.read_text()
    assert {f"{float(row['reward_at_start']):.1f}" for row in with_penalty} == {"0.5"}
    assert max(float(row["highest_kl"]) for row in with_penalty) < 2 and "below 2 nats" in page.read_text()
