"""benchmark/report.py: its tables and pictures are of what the runs did."""

import json
import re
import runpy
import shutil
import sys

import compare
import numpy as np
import pytest
import report
import run_folder
from conftest import ROOT

import ppo_discrete

RESULTS = ROOT / "benchmark" / "results"
FIGURES = {"evaluation": 12.5, "commit": "0123abc", "versions": "torch 9", "hardware": "a processor"}  # as run.py's


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder in place of benchmark/results/ and of docs/pictures/."""
    for name in ("RESULTS", "PICTURES"):
        monkeypatch.setattr(report, name, tmp_path / "results")
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


@pytest.fixture(scope="module")
def finished_runs(tmp_path_factory):
    """Folders of two runs of CartPole, seeds 1 and 2, with what benchmark/run.py adds."""
    runs_dir, run_dirs = tmp_path_factory.mktemp("runs"), []
    small = {"env_id": "CartPole-v1", "total_timesteps": 4096, "update_epochs": 1, "compile": False}
    for seed in (1, 2):
        _, run_dir = ppo_discrete.train(ppo_discrete.Args(seed=seed, runs_dir=str(runs_dir), **small))
        (run_dir / "benchmark.json").write_text(json.dumps(FIGURES | {"global_step": 4096}))
        run_dirs.append(run_dir)
    return run_dirs


@pytest.fixture
def run_dir(finished_runs, tmp_path):
    """A copy of the run of seed 1, in the folder of the test."""
    return shutil.copytree(finished_runs[0], tmp_path / finished_runs[0].name)


def write_episodes(run_dir, *episodes):
    """episodes.csv with these (step, return)"""
    rows = "".join(f"{step},{value},{value},1.0\n" for step, value in episodes)
    (run_dir / "episodes.csv").write_text("global_step,episodic_return,episodic_length,seconds\n" + rows)


def test_row_of_a_run(run_dir, tmp_path):
    """The mean of its last 100 episodes, the flags that are not default, its curve; nothing for an unfinished run."""
    episodes = report.read_csv(run_dir / "episodes.csv")
    returns = [float(row["episodic_return"]) for row in episodes]
    row = report.summarise(run_dir)
    assert len(returns) > 100 and row["episodes"] == len(returns)
    assert float(row["last_100_mean"]) == pytest.approx(np.mean(returns[-100:]), abs=0.05)
    assert row["flags"] == "--total-timesteps=4096 --update-epochs=1"
    assert {name: row[name] for name in FIGURES} == {name: str(value) for name, value in FIGURES.items()}
    (run_dir / "benchmark.json").write_text(json.dumps(FIGURES | {"global_step": 2048}))
    assert report.summarise(run_dir)["evaluation"] == ""  # it has learned since

    points = run_folder.curve(run_folder.read_csv(run_dir / "episodes.csv"), row["global_step"])
    step, mean = points[-1]
    assert (step, mean) == (4096, pytest.approx(np.mean(returns[-100:])))
    early = [float(row["episodic_return"]) for row in episodes if int(row["global_step"]) <= 1024]
    before = max(int(row["global_step"]) for row in episodes if int(row["global_step"]) <= 1024)
    at = dict(points)
    assert len(early) < 100 and before > 950 and at[983] == pytest.approx(np.mean(early), rel=0.15)
    np.testing.assert_allclose([float(x) for x in row["curve"].split()], [mean for _, mean in points], rtol=1e-3)

    (run_dir / "checkpoint.pt").rename(tmp_path / "checkpoint.pt")
    with (run_dir / "episodes.csv").open("a") as file:
        file.write("5000,1")  # it is still running, or was killed
    assert report.summarise(run_dir) is None


def test_run_that_was_resumed_with_another_batch_size(run_dir, capsys):
    """It ends below a whole number of batches. The output says that it has ended, and it has a row."""
    args = ppo_discrete.load_args(run_dir)
    args.num_envs, args.total_timesteps = 12, 10_000
    ppo_discrete.train(args, run_dir)
    assert ppo_discrete.load_checkpoint(run_dir)["global_step"] == 4096 + 3 * 12 * 128 < 10_000 // 1536 * 1536
    assert "to evaluate: " in capsys.readouterr().out
    assert report.summarise(run_dir)["global_step"] == 8704


@pytest.mark.parametrize("after", [",1,0", ""], ids=["a decimal comma", "a lost column"])
def test_numbers_that_a_spreadsheet_rewrote(run_dir, finished_runs, tmp_path, main, after):
    """The run is named and left out, never a part of its numbers; then comes the table of the others, and status 1."""
    write_episodes(run_dir, (512, 20.5), (1024, 21.0), (2048, 22.5))
    path = run_dir / "episodes.csv"
    path.write_text(path.read_text().replace(",1.0", after))
    done = main(report, run_dir, finished_runs[1], "--out", tmp_path / "mine")
    assert done.returncode == 1 and f"left out: {run_dir}: it cannot be read" in done.stderr
    assert "| ppo_discrete | CartPole-v1 |" in done.stdout
    assert [row["seed"] for row in run_folder.read_csv(tmp_path / "mine" / "runs.csv")] == ["2"]


def test_publish_keeps_other_runs(finished_runs, run_dir, results, capsys):
    """A run of the same settings and seed takes the place of the one before, another one does not."""
    for paths in ([run_dir], [finished_runs[1]], [run_dir, results / "logs"]):
        report.write_csv("classic", paths)
    assert "It has 2 now, of commits 0123abc" in capsys.readouterr().out
    assert [row["seed"] for row in report.read_csv(results / "classic.csv")] == ["1", "2"]
    for name, paths in (("mujoco", finished_runs), ("classic", [run_dir.parent])):
        with pytest.raises(SystemExit, match="none of these is the folder of a finished run"):
            report.write_csv(name, paths)  # none of its tasks; the folder of the folders


def test_only_runs_under_the_name_of_the_suite_are_published(run_dir, results, capsys):
    """A variant, as of `run.py --exp-name slow -- FLAGS`, is no result of the suite."""
    args = json.loads((run_dir / "args.json").read_text())
    (run_dir / "args.json").write_text(json.dumps(args | {"exp_name": "slow"}))
    with pytest.raises(SystemExit, match="none of these is the folder of a finished run"):
        report.write_csv("classic", [run_dir])
    assert "its --exp-name is slow; --publish classic takes only ppo_discrete" in capsys.readouterr().err


def test_what_is_not_shown_is_named(finished_runs, run_dir, tmp_path, capsys):
    """A mistyped path, and runs of two versions of a script in one row."""
    with (run_dir / "ppo_discrete.py").open("a") as file:
        file.write("# an earlier version\n")
    report.write_report([run_dir, finished_runs[1], tmp_path / "typo"], tmp_path / "report")
    errors = capsys.readouterr().err
    assert f"left out: {tmp_path / 'typo'}: it is not the folder of a run" in errors
    assert "CartPole-v1, ppo_discrete: its runs come from 2 versions of ppo_discrete.py" in errors


def test_trials_of_a_search_are_left_out(run_dir, tmp_path, capsys):
    """Of reports too. A name of the user's that begins alike is none."""
    args = json.loads((run_dir / "args.json").read_text())
    (run_dir / "args.json").write_text(json.dumps(args | {"exp_name": "tune-0123abcd"}))
    with pytest.raises(SystemExit, match="none of these is the folder of a finished run"):
        report.write_report([run_dir], tmp_path / "report")
    assert "a trial of tune.py" in capsys.readouterr().err
    (run_dir / "args.json").write_text(json.dumps(args | {"exp_name": "tune-lr"}))
    report.write_report([run_dir], tmp_path / "report")


def test_tuned_settings_are_published_alone(run_dir, results, monkeypatch):
    monkeypatch.setitem(report.suites.SUITES, "mujoco-tuned", [("ppo_discrete", "CartPole-v1", "--exp-name tuned")])
    args = json.loads((run_dir / "args.json").read_text())
    with pytest.raises(SystemExit, match="none of these is the folder of a finished run"):
        report.write_csv("mujoco-tuned", [run_dir])
    (run_dir / "args.json").write_text(json.dumps(args | {"exp_name": "tuned"}))
    report.write_csv("mujoco-tuned", [run_dir])
    with pytest.raises(SystemExit, match="none of these is the folder of a finished run"):
        report.write_csv("classic", [run_dir])


def test_peers_have_as_many_steps_and_different_seeds(results, capsys):
    """Shorter runs of Stable-Baselines3 stand in no column, and no seed counts twice. A single seed is too few: one
    line says so."""
    shutil.copytree(RESULTS, results, dirs_exist_ok=True)
    rows = report.read_csv(RESULTS / "peers.csv")
    assert "SB3, its defaults" in report.suite_table("breadth")[0]
    report.write_rows(results / "peers.csv", report.FIELDS, [row | {"global_step": "9000"} for row in rows])
    assert "SB3" not in report.suite_table("breadth")[0]
    capsys.readouterr()
    cartpole = next(row for row in rows if row["env_id"] == "CartPole-v1")
    report.write_rows(results / "peers.csv", report.FIELDS, [cartpole])
    assert "SB3" not in report.suite_table("breadth")[0]
    assert f"left out of breadth: {cartpole['exp_name']} CartPole-v1 has 1 of 3 seeds" in capsys.readouterr().err
    report.write_rows(results / "peers.csv", report.FIELDS, [*rows, cartpole])
    with pytest.raises(SystemExit, match=r"peers\.csv has a seed twice for"):
        report.suite_table("breadth")


def test_table_and_picture_of_a_suite(finished_runs, results):
    """What docs/results.md gets is what the runs did, beside the published figure."""
    report.write_csv("classic", finished_runs)
    report.draw_suite("classic")
    values = [float(row["last_100_mean"]) for row in report.read_csv(results / "classic.csv")]
    (line,) = (line for line in report.suite_table("classic") if "CartPole-v1" in line)
    low, high = sorted(values)
    assert f"{np.mean(values):.1f} | {low:.1f} to {high:.1f} | 2 | 12.5 |" in line
    assert "490.0 at 500,000 | 500.0† at 100,000" in line
    picture = (results / "classic.svg").read_text()
    for text in ("CartPole-v1 (2 runs)", "steps (thousands)", "ppo_discrete.py"):
        assert f">{text}</text>" in picture
    assert "highest PPO found" not in picture  # it is from more than ten times the steps of these runs
    rows = [row | {"global_step": "20000"} for row in report.read_csv(results / "classic.csv")]
    report.write_rows(results / "classic.csv", report.FIELDS, rows)
    report.draw_suite("classic")
    assert ">highest PPO found</text>" in (results / "classic.svg").read_text()


def test_report_of_any_runs(finished_runs, tmp_path, main):
    """Without --publish the tables and curves go into a folder of the user's, and nothing in the repository changes."""
    before = {path: path.read_bytes() for path in [*RESULTS.iterdir(), ROOT / "README.md"]}
    done = main(report, *finished_runs, finished_runs[0], "--out", tmp_path / "mine")  # a folder twice counts once
    assert done.returncode == 0, done.stderr
    assert {path: path.read_bytes() for path in before} == before
    names = {path.name for path in (tmp_path / "mine").iterdir()}
    assert names == {"runs.csv", "runs.md", "runs.png"}
    (line,) = (line for line in (tmp_path / "mine" / "runs.md").read_text().splitlines() if "CartPole-v1" in line)
    assert "| 2 |" in line and line in done.stdout
    picture = (tmp_path / "mine" / "runs.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    assert "error: name run folders" in main(report).returncode
    assert "takes no run folders" in main(report, *finished_runs, "--publish", "readme").returncode


def test_pages_have_the_tables_of_the_results():
    """No figure between the markers of README and of docs/results.md is older than results/, or written by hand."""
    pages = report.make_pages()
    assert [path.name for path in pages] == ["README.md", "results.md"]
    assert pages == {path: path.read_text() for path in pages}
    rows = [f"| {name}-v4 " for name in ("HalfCheetah", "Humanoid", "InvertedDoublePendulum")]
    for path, text in pages.items():
        assert all(row in text for row in rows)
        blocks = {name: ["1 | 2"] for name in re.findall(r"<!-- end of (\S+) -->", text)}
        emptied = report.fill_page(text, blocks)
        assert emptied.count("1 | 2") == len(blocks) and "| HalfCheetah" not in emptied, path


def test_a_suite_without_results(results):
    """Nothing is published in its place."""
    with pytest.raises(SystemExit, match="has no runs of long"):
        report.suite_table("long")


def test_a_seed_counts_once(results):
    rows = report.read_csv(RESULTS / "mujoco.csv")
    report.write_rows(results / "mujoco.csv", report.FIELDS, [*rows, rows[0]])
    with pytest.raises(SystemExit, match="has a seed twice for Ant-v4"):
        report.suite_table("mujoco")


def test_a_task_has_one_setting(results, run_dir):
    """Tables and peers' figures are for one. Runs of the same task with other steps are refused, not written."""
    rows = report.read_csv(RESULTS / "classic.csv")
    report.write_rows(results / "classic.csv", report.FIELDS, rows)
    with pytest.raises(SystemExit, match=r"classic\.csv: CartPole-v1 would have several settings: publish only"):
        report.write_csv("classic", [run_dir])
    assert report.read_csv(results / "classic.csv") == rows


def test_labels_of_lists():
    """A value with spaces is one part of a label, and every part of it counts."""
    rows = [{"env_id": "A", "flags": f"--hidden-sizes={sizes} --seed=1"} for sizes in ([64, 64, 64], [64, 64, 64, 64])]
    report.label_curves(rows, ["deep", "deep"])
    labels = ["deep --hidden-sizes=[64, 64, 64]", "deep --hidden-sizes=[64, 64, 64, 64]"]
    assert [row["label"] for row in rows] == labels


def test_a_seed_that_ran_twice_counts_once(finished_runs, run_dir, tmp_path, capsys):
    """A second row would be equal to the bit, and make intervals too narrow. The later folder counts."""
    report.write_report([*finished_runs, run_dir], tmp_path / "report")
    rows = report.read_csv(tmp_path / "report" / "runs.csv")
    assert [row["seed"] for row in rows] == ["1", "2"]
    assert f"left out: {finished_runs[0]}: another folder has the same settings and seed" in capsys.readouterr().err


def test_falls_of_a_changed_time_limit():
    episodes = [{"global_step": "1000", "episodic_length": "100"}] * 9
    assert run_folder.falls("Pendulum-v1", "{}", episodes, 1000) == "45"
    assert run_folder.falls("benchmark.process_envs:Pendulum-v1", "{}", episodes, 1000) == "45"
    assert run_folder.falls("Pendulum-v1", '{"max_episode_steps": 100}', episodes, 1000) == "0"


def test_interval():
    """Of normal scores it is mean +- 1.96 standard errors."""
    low, high = report.mean_interval(np.random.default_rng(0).normal(0, 1, 100))
    assert (high - low) / 2 == pytest.approx(1.96 / 100**0.5, rel=0.1)


@pytest.mark.parametrize("tool, package", [("report", "matplotlib"), ("tune", "optuna")])
def test_tools_need_more_requirements(finished_runs, tmp_path, monkeypatch, tool, package):
    """Of benchmark/requirements.txt; where they are missing one line says so."""
    monkeypatch.setitem(sys.modules, package, None)  # import fails
    monkeypatch.setattr(sys, "argv", [f"{tool}.py", str(finished_runs[0]), f"--out={tmp_path}"])
    message = f"{tool}.py: error: .*{package}.*: python -m pip install -r benchmark/requirements.txt"
    with pytest.raises(SystemExit, match=message):
        runpy.run_path(str(ROOT / "benchmark" / f"{tool}.py"), run_name="__main__")


def test_compare_two_settings(tmp_path, capsys):
    """Two files, or two names in one file. Of each task the means and an interval of the difference, which contains 0
    where nothing has changed; then the tasks that fall, and the mean over tasks in units of published figures."""
    rows = [row for row in report.read_csv(RESULTS / "mujoco.csv") if row["env_id"] in ("Hopper-v4", "Reacher-v4")]
    rows = [row | {"exp_name": "plain", "falls": ""} for row in rows]  # as rows of older scripts
    shift = {"Hopper-v4": 3000, "Reacher-v4": -41}
    other = [
        row | {"exp_name": "other", "last_100_mean": float(row["last_100_mean"]) + shift[row["env_id"]], "falls": 0.5}
        for row in rows
    ]
    report.write_rows(tmp_path / "one.csv", report.FIELDS, rows)
    report.write_rows(tmp_path / "other.csv", report.FIELDS, other)
    report.write_rows(tmp_path / "both.csv", report.FIELDS, rows + other)

    def lines(before, after):
        compare.main(str(tmp_path / before), str(tmp_path / after))
        _, *tasks, falling, mean = capsys.readouterr().out.splitlines()
        return [re.split(r"  +", line) for line in tasks], falling, mean

    ((hopper, _), falling, mean) = lines("one.csv", "one.csv")
    low, high = map(float, hopper[5].split(" to "))
    assert hopper[3] == hopper[4] and low < 0 < high
    assert falling.endswith("no task") and "2 tasks: +0.0000" in mean
    ((hopper, _), falling, mean) = named = lines("both.csv:plain", "both.csv:other")
    low, high = map(float, hopper[5].split(" to "))
    assert float(hopper[4]) - float(hopper[3]) == pytest.approx(3000, abs=0.2) and 0 < low < 3000 < high
    assert hopper[6:8] == ["-", "0.50"]
    assert "Reacher-v4" in falling and "Hopper" not in falling
    returns = [5000, 5200, 4800, -300]
    rows = [row | {"last_100_mean": x, "global_step": 1000} for row, x in zip(rows[:4], returns)]
    report.write_rows(tmp_path / "low.csv", report.FIELDS, rows)
    (((*_, low),), _, _) = lines("low.csv", "low.csv")
    assert low == "1 1"
    fractions = [row | {"last_100_mean": x} for row, x in zip(rows, (0.961, 0.958, 0.959, 0.96))]
    report.write_rows(tmp_path / "fractions.csv", report.FIELDS, fractions)
    assert lines("fractions.csv", "fractions.csv")[0][0][3] == "0.9595"
    report.write_rows(tmp_path / "long.csv", report.FIELDS, [row | {"global_step": 2000} for row in rows])
    for name, x in (("high", 500), ("lower", 200)):  # no variance
        report.write_rows(tmp_path / f"{name}.csv", report.FIELDS, [row | {"last_100_mean": x} for row in rows])
    assert rows[0]["env_id"] in lines("high.csv", "lower.csv")[1]
    assert lines("low.csv", "long.csv")[0][1] == ["", "unlike runs: from 1,000 to 2,000 steps"]
    assert "-4.45" in mean  # Hopper gains 3,000 / 2,761, Reacher loses 41 / 4.1: (1.09 - 10) / 2
    assert lines("one.csv", "other.csv") == named
    report.write_rows(tmp_path / "mixed.csv", report.FIELDS, [rows[0], rows[1] | {"flags": "--gamma=0.9"}])
    with pytest.raises(SystemExit, match=f"several settings: choose one, as in {tmp_path}/both.csv:plain"):
        compare.main(f"{tmp_path}/both.csv", f"{tmp_path}/one.csv")
    with pytest.raises(SystemExit, match="of several scripts or flags"):
        compare.main(f"{tmp_path}/mixed.csv:plain", f"{tmp_path}/one.csv")

    # What is not compared is named.
    report.write_rows(tmp_path / "hopper.csv", report.FIELDS, [row for row in other if row["env_id"] == "Hopper-v4"])
    compare.main(str(tmp_path / "one.csv"), str(tmp_path / "hopper.csv"))
    assert f"only in {tmp_path}/one.csv: ppo_continuous Reacher-v4" in capsys.readouterr().out
    report.write_rows(tmp_path / "alone.csv", report.FIELDS, rows[:1])
    compare.main(str(tmp_path / "alone.csv"), str(tmp_path / "low.csv"))
    assert "1   4 left out: one seed has no interval" in capsys.readouterr().out
    report.write_rows(tmp_path / "twice.csv", report.FIELDS, rows + rows[:1])
    with pytest.raises(SystemExit, match=f"has seed {rows[0]['seed']} of {rows[0]['env_id']} twice"):
        compare.main(str(tmp_path / "twice.csv"), str(tmp_path / "low.csv"))
