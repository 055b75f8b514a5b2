"""Command lines: the forms that people and sweeps send, and what happens to bad input."""

import dataclasses
import re
from pathlib import Path

import pytest
from conftest import ONE, SCRIPTS, SMALL, assert_one_line, flags_of, probe


@ONE
def test_switches(script):
    """As people type them, and as `wandb sweep` sends them."""
    on = ["--anneal-lr", "--anneal_lr", "--anneal-lr=True", "--anneal_lr=True"]
    off = ["--no-anneal-lr", "--no-anneal_lr", "--anneal-lr=False", "--anneal_lr=False"]
    for form in on + off:
        assert script.parse_args([*form.split(), "--seed", "7"]).anneal_lr is (form in on), form


@ONE
def test_integers(script):
    for form in ("--num-envs=1000", "--num_envs 1000", "--num-envs=1e3", "--num_envs=1e+3", "--num-envs=1000.0"):
        value = script.parse_args(form.split()).num_envs
        assert value == 1000 and type(value) is int, form
    args = script.parse_args(["--total-timesteps=1e10", "--seed", "1234567890123456789"])
    assert (args.total_timesteps, args.seed) == (10**10, 1234567890123456789)  # exactly


@ONE
def test_lists(script):
    """A sweep sends a list as one word with brackets."""
    saved = script.Args(hidden_sizes=[8, 8])  # as from a notebook
    for words in (["--hidden_sizes=[64, 32]"], ["--hidden-sizes=[64,32]"], ["--hidden-sizes", "64", "32"]):
        for default in (None, saved):
            assert script.parse_args([*words, "--seed=3"], default).hidden_sizes == (64, 32), words


@ONE
@pytest.mark.parametrize(
    "text", ["10M", "1e3", "true", "True", "", "x--track=True", "[1, 2]", "two words", "1\n2", "None"]
)
def test_text_arrives_as_it_was_given(script, text):
    """Whatever it looks like, in one word or in two."""
    for words in ([f"--exp-name={text}"], ["--exp-name", text]):
        args = script.parse_args([*words, "--seed=1e1"])
        assert (args.exp_name, args.seed, args.track) == (text, 10, False)


def test_preset(script, main, tmp_path):
    """The command line and Python say the same, and what is given beside the preset counts."""
    small = {"env_id": probe(script), "total_timesteps": 64, "num_steps": 64, "num_minibatches": 1, "num_envs": 1}
    small |= {"compile": False, "gamma": 0.9}
    finished = main(script, "--preset=cleanrl", *flags_of(runs_dir=tmp_path, **small))
    assert finished.returncode == 0, finished.stderr
    (run_dir,) = tmp_path.iterdir()
    assert script.load_args(run_dir) == script.Args(runs_dir=str(tmp_path), **script.PRESETS["cleanrl"] | small)
    assert "not allowed with" in main(script, "--preset=cleanrl", f"--resume={run_dir}").stderr


BAD = {  # in one script, which stands for all
    "not a number of environments": ({"num_envs": "1.2.3"}, None),
    "fraction of an environment": ({"num_envs": "4.5"}, None),
    "no such flag": ({"no_such_flag": 1}, None),
    "abbreviation": ({"pres": "cleanrl"}, None),
    "several choices": ({"env_id": "discrete/Target-v0"}, "use ppo_discrete.py"),
}
EACH = {"unknown environment": ({"env_id": "NoSuchEnv-v0"}, "Environment `NoSuchEnv` doesn't exist")}
EACH |= {"a Tuple of actions": ({"env_id": "box/Pair-v0"}, "Tuple(")}
EACH |= {"too short": ({"total_timesteps": 63}, "--total-timesteps must be at least num_envs * num_steps = 64")}
BATCH = "must divide num_envs * num_steps = 64: choose one of [1, 2, 4, 8, 16, 32, 64]"
CUT = EACH | {"indivisible batch": ({"num_minibatches": 7}, BATCH)}
WHOLE = {"integers in a Box": ({"env_id": "box/Whole-v0"}, "Box(0, 9, (2,), int64)")}
OTHER = {"wrong action space": ({"env_id": "CartPole-v1"}, "CartPole-v1 has actions Discrete(2): use ppo_disc")}
BAD_FOR = {
    "ppo_continuous": BAD | CUT | WHOLE | OTHER,
    "ppo_discrete": CUT | {"wrong action space": ({"env_id": "Pendulum-v1"}, "Box: ppo_continuous.py")},
    "ppo_rnn": {
        "columns that cannot be cut": (
            {"num_minibatches": 8, "num_steps": 32},
            "must divide num_envs = 4: choose one of [1, 2, 4]",
        ),
        "no such cell": ({"cell": "rnn"}, None),
        **EACH,
        **WHOLE,
    },
}
CASES = [(name, case) for name in SCRIPTS for case in BAD_FOR[name]]


@pytest.mark.parametrize("script, case", CASES, indirect=["script"])
def test_bad_input(script, case, tmp_path, main):
    changes, message = BAD_FOR[script.__name__][case]
    flags = flags_of(**{"env_id": probe(script), "runs_dir": tmp_path / "runs"} | SMALL | changes)
    finished = main(script, *flags)
    if message is None:  # in the words of tyro or argparse
        assert finished.returncode == 2 and "Traceback" not in finished.stderr
    else:
        assert_one_line(finished, message)
        assert finished.stderr.startswith(f"{script.__name__}.py: error: ") and len(finished.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@ONE
def test_home_in_runs_dir(script, main, tmp_path, monkeypatch):
    """No shell replaces ~ behind =."""
    monkeypatch.setenv("HOME", str(tmp_path))
    flags = flags_of(**{"env_id": probe(script)} | SMALL | {"total_timesteps": 64})
    assert main(script, *flags, "--runs-dir=~/runs").returncode == 0
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert main(script, "--evaluate=latest", "--runs-dir=~/runs", "--eval-episodes=1").returncode == 0
    home = Path("~", "runs", run_dir.name)
    assert main(script, f"--resume={home}", "--total-timesteps=128").returncode == 0
    assert script.load_checkpoint(run_dir)["global_step"] == 128


def test_help(script, main):
    """It begins with what the script is and with its commands, and says something about every flag."""
    finished = main(script, "--help")
    assert finished.returncode == 0
    head, options = finished.stdout.split(" options ")
    for flags in ("--env-id", "--preset cleanrl", "--resume runs/NAME", "--evaluate runs/NAME"):
        assert f"python {script.__name__}.py {flags}" in head
    shown = re.split(r"\n\W (?=--)", options)[1:]
    flags = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(script.Args)}
    assert {entry.split()[0].strip(",") for entry in shown} == flags
    for entry in shown:  # beside the flag, its type and its default
        explanation = re.sub(r"--\S+|\{.*?\}|\(default.*", "", entry, flags=re.S)
        assert len(re.findall(r"[a-z]{2,}", explanation)) >= 2, entry
