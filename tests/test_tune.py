"""Searches for settings: benchmark/tune.py, and wandb's files in benchmark/sweeps/."""

import fcntl
import shutil
from pathlib import Path

import optuna
import pytest
import run_folder
import tune
import yaml
from conftest import ROOT
from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

import ppo_discrete

SWEEPS = sorted((ROOT / "benchmark" / "sweeps").glob("*.yaml"))


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_sweeps(path):
    """Every end of every range, in the words that wandb's agent sends, is taken by the script; so are the default
    settings, which the search begins with."""
    sweep = yaml.safe_load(path.read_text())
    script = run_folder.load_script(Path(sweep["program"]).stem)
    assert path.stem == script.__name__ and sweep["metric"]["name"] == "charts/last_100_return"
    specs = sweep["parameters"]
    ends = {
        name: spec.get("values") or [spec[key] for key in ("value", "min", "max") if key in spec]
        for name, spec in specs.items()
    }
    for i in range(max(map(len, ends.values()))):
        chosen = {name: values[min(i, len(values) - 1)] for name, values in ends.items()}
        sent = create_sweep_command_args({"args": {name: {"value": value} for name, value in chosen.items()}})
        args = script.parse_args(sent["args"])
        assert {name: getattr(args, name) for name in chosen} == chosen
        script.check(args)
    defaults = vars(script.Args())
    for name, spec in specs.items():
        if "values" in spec:
            assert defaults[name] in spec["values"]
        elif "min" in spec:
            assert spec["min"] <= defaults[name] <= spec["max"]


def test_tune(tmp_path, main):
    """The first trial has the defaults; a score is the figure of the run; the same command has nothing left to do."""
    small = yaml.safe_load((ROOT / "benchmark" / "sweeps" / "ppo_discrete.yaml").read_text())
    small["parameters"] = {name: small["parameters"][name] for name in ("env_id", "gamma", "learning_rate")}
    small["parameters"] |= {
        "compile": {"value": False},
        "update_epochs": {"values": [1, 2]},  # without the default, as the range below
        "max_grad_norm": {"min": "1e-1", "max": "2e-1"},  # as YAML reads numbers without a decimal point
        "env_id": {"value": "CartPole-v1"},
        "env_kwargs": {"value": '{"sutton_barto_reward": false}'},
        "hidden_sizes": {"values": ["[64, 64]", "[8, 8]"]},
    }
    (tmp_path / "sweep.yaml").write_text(yaml.dump(small))
    runs_dir, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    words = [str(tmp_path / "sweep.yaml"), "--study=s", "--total-timesteps=2048", "--trials=2", "--seeds=1"]
    printed = main(tune, *words, f"--runs-dir={runs_dir}").stdout
    assert "the best is" in printed and " --env-id=CartPole-v1" in printed and " --total-timesteps=2048" in printed
    rows = run_folder.read_csv(runs_dir / "s.csv")
    assert [row["state"] for row in rows] == ["COMPLETE", "COMPLETE"]
    assert not list(runs_dir.glob("*/benchmark.json"))  # nothing was evaluated: a score does not need it
    default = ppo_discrete.Args()
    assert (float(rows[0]["gamma"]), float(rows[0]["learning_rate"])) == (default.gamma, default.learning_rate)
    for row in rows:
        assert float(row["score"]) == pytest.approx(float(row["CartPole-v1 seed 101"]), rel=1e-3)
    assert "began with another script" in main(tune, *words, f"--runs-dir={runs_dir}", "--seeds=2").returncode
    # The same command has nothing left to do, nor has it on another machine that has the file of the study.
    elsewhere.mkdir()
    shutil.copy(runs_dir / "s.db", elsewhere)
    assert "the best is" in main(tune, *words, f"--runs-dir={elsewhere}").stdout
    assert run_folder.read_csv(elsewhere / "s.csv") == rows and not list(elsewhere.glob("CartPole*"))


def write_sweep(folder, **changes):
    """A file in W&B's own shortest form, and its script beside it, which is no script of this repository."""
    shutil.copy(ROOT / "ppo_discrete.py", folder / "my_ppo.py")
    parameters = {
        "gamma": {"min": 0.9, "max": 0.99},
        "update_epochs": {"min": 1, "max": 2},
        "compile": {"value": False},
    }
    (folder / "sweep.yaml").write_text(yaml.dump({"program": "my_ppo.py", "parameters": parameters | changes}))
    return folder / "sweep.yaml"


def test_killed_worker(tmp_path, main):
    """SIGKILL leaves a trial that is running. Started again, at once, the search goes on with its settings."""
    (tmp_path / "runs").mkdir()
    study = optuna.create_study(storage=f"sqlite:///{tmp_path}/runs/s.db", study_name="s", direction="maximize")
    killed = study.ask()
    settings = {
        "gamma": killed.suggest_float("gamma", 0.9, 0.99),
        "update_epochs": killed.suggest_int("update_epochs", 1, 2),
    }
    path = tmp_path / "runs" / "s.workers"
    with open(path, "w") as other, open(path, "w") as mine:  # while another worker lives, the trial may be its own
        fcntl.flock(other, fcntl.LOCK_SH)
        tune.retry_killed_trials(study, mine)
        assert [trial.state.name for trial in study.trials] == ["RUNNING"]
    sweep = write_sweep(tmp_path, env_id={"values": ["CartPole-v1", "MountainCar-v0"]})
    words = [sweep, "--study=s", "--trials=1", "--no-defaults", f"--runs-dir={tmp_path}/runs"]
    assert "name one with --env-id" in main(tune, *words).returncode
    words.append("--env-id=MountainCar-v0")
    assert "the best is" in main(tune, *words, "--total-timesteps=4096").stdout
    failed, complete = run_folder.read_csv(tmp_path / "runs" / "s.csv")
    assert (failed["state"], complete["state"]) == ("FAIL", "COMPLETE")
    assert {name: float(complete[name]) for name in settings} == settings
    assert float(complete["score"]) == float(complete["MountainCar-v0 seed 101"]) == -200


def test_edit_of_the_script_ends_a_search(tmp_path, main):
    sweep = write_sweep(tmp_path)
    with open(tmp_path / "my_ppo.py", "a") as file:  # it edits itself at the end of a run
        file.write('if __name__ == "__main__":\n    open(__file__, "a").write("# edited")\n')
    words = [sweep, "--study=s", "--trials=2", "--seeds=1", "--total-timesteps=2048", f"--runs-dir={tmp_path}/runs"]
    assert "only 1 of 2 trials have finished" in main(tune, *words).returncode


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"gama": {"value": 1}}, "the script has no parameter gama"),
        ({"seed": {"values": [1, 2]}}, "remove seed: tune.py has --first-seed"),
        ({"gamma": {"min": 0.9}}, "gamma needs value, values, or min and max"),
        ({"gamma": {"min": 0, "max": 1, "distribution": "q_normal"}}, "gamma: the distribution q_normal is not known"),
    ],
)
def test_what_cannot_be_searched(tmp_path, main, changes, message):
    """Refused before a study is made: its name stays free."""
    refused = main(tune, write_sweep(tmp_path, **changes), "--study=s", f"--runs-dir={tmp_path}/runs")
    assert message in refused.returncode and not (tmp_path / "runs").exists()


def test_results_of_a_mistyped_study(tmp_path, main):
    refused = main(tune, write_sweep(tmp_path), "--study=typo", "--trials=0", f"--runs-dir={tmp_path}/runs")
    assert "--trials 0: there is no " in refused.returncode and not (tmp_path / "runs").exists()
