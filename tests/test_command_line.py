"""Command lines: the forms that people and sweeps send, and what happens to bad input."""

import dataclasses
import re

import pytest
from conftest import SCRIPTS, SMALL, assert_one_line, flags_of, probe


def test_switches(script):
    """The forms that people and sweeps send."""
    on = ["--anneal-lr", "--anneal-lr=True", "--anneal-lr=true", "--anneal_lr true"]
    off = ["--no-anneal-lr", "--no-anneal_lr", "--anneal_lr=False", "--anneal_lr=false", "--anneal-lr False"]
    for form in on + off:
        assert script.parse_args(form.split()).anneal_lr is (form in on), form
        assert script.parse_args([*form.split(), "--seed", "7"]).seed == 7, form


def test_integers(script):
    forms = ["--num-envs=1000", "--num_envs 1000", "--num-envs 1e3", "--num_envs=1E+3", "--num-envs=1000.0"]
    for form in [*forms, "--num-envs=0.001M"]:
        value = script.parse_args(form.split()).num_envs
        assert value == 1000 and type(value) is int, form


def test_large_integers_are_exact(script):
    assert script.parse_args(["--total-timesteps=1e10"]).total_timesteps == 10**10
    assert script.parse_args(["--seed", "1234567890123456789"]).seed == 1234567890123456789


def test_values_that_look_like_flags_stay_as_they_are(script):
    args = script.parse_args(["--exp-name", "x--track=True", "--runs-dir=a--seed=1e3", "--seed=1e1"])
    assert (args.exp_name, args.runs_dir, args.seed, args.track) == ("x--track=True", "a--seed=1e3", 10, False)


def test_a_sweep_command_line(script):
    """As `wandb sweep` builds it: every value as --name=value, switches as True and False, None spelled out."""
    line = "--track=True --norm_adv=False --env_id=Swimmer-v4 --learning_rate=0.00031 --target_kl=None"
    args = script.parse_args([*line.split(), "--num_envs=16.0", "--desired_kl=0.01"])
    assert (args.track, args.norm_adv, args.env_id, args.target_kl) == (True, False, "Swimmer-v4", None)
    assert (args.learning_rate, args.num_envs, args.desired_kl) == (0.00031, 16, 0.01)


def test_short_names(script):
    """--env and --lr, as other projects call them; flags that begin alike stay as they are."""
    args = script.parse_args(["--env", "Mine-v0", "--lr=1e-5", "--env-kwargs", "{}"])
    assert (args.env_id, args.learning_rate, args.env_kwargs) == ("Mine-v0", 1e-5, "{}")


def test_defaults_and_overrides(script):
    saved = script.Args(gamma=0.9, num_envs=3, anneal_lr=False)
    args = script.parse_args(["--num-envs", "5"], default=saved)
    assert (args.gamma, args.num_envs, args.anneal_lr) == (0.9, 5, False)
    assert script.parse_args([]) == script.Args()


def test_number_of_environments_alone(script, capsys):
    """--num-envs that the default --num-minibatches does not divide takes the nearest number that does, and says so."""
    default = script.Args.num_minibatches
    num_envs = default + 1 if script.__name__ == "ppo_rnn" else 7
    args = script.Args(num_envs=num_envs, num_steps=3)
    script.check_args(args)
    size = num_envs if script.__name__ == "ppo_rnn" else num_envs * 3
    assert size % args.num_minibatches == 0 and args.num_minibatches != default
    assert abs(args.num_minibatches - default) == min(abs(d - default) for d in range(1, size + 1) if size % d == 0)
    assert f"--num-minibatches {args.num_minibatches}, because the default" in capsys.readouterr().err


BAD = {
    "unknown environment": ({"env_id": "NoSuchEnv-v0"}, "--env-id NoSuchEnv-v0: "),
    "malformed environment": ({"env_id": "no such env!"}, "--env-id no such env!: "),
    "module not installed": ({"env_id": "nomodule:NoSuchEnv-v0"}, "--env-id nomodule:NoSuchEnv-v0: "),
    "environment of another mujoco": ({"env_id": "Hopper-v3"}, "--env-id Hopper-v3: "),
    "not a number of environments": ({"num_envs": "1.2.3"}, None),
    "no such flag": ({"no_such_flag": 1}, None),
    "fraction of an environment": ({"num_envs": 1.5}, None),
    "indivisible batch": ({"num_minibatches": 7}, "--num-minibatches 7 must divide a batch of 64, as [2, 4, 8] do"),
    "negative size": ({"num_envs": -1}, "--num-envs must be a finite number from 1 to inf, not -1"),
    "zero size": ({"num_steps": 0}, "--num-steps must be a finite number from 1 to inf, not 0"),
    "no epochs": ({"update_epochs": 0}, "--update-epochs must be a finite number from 1 to inf, not 0"),
    "no checkpoints": ({"checkpoint_interval": 0}, "--checkpoint-interval must be a finite number from 1"),
    "too short": ({"total_timesteps": 63}, "--total-timesteps 63 is below num_envs * num_steps = 64"),
    "not a fraction": ({"gamma": 1.5}, "--gamma must be a finite number from 0 to 1, not 1.5"),
    "negative fraction": ({"gae_lambda": -0.5}, "--gae-lambda must be a finite number from 0 to 1, not -0.5"),
    "NaN": ({"learning_rate": "nan"}, "--learning-rate must be a finite number from 0 to inf, not nan"),
    "infinity": ({"target_kl": "inf"}, "--target-kl must be a finite number from 0 to inf, not inf"),
    "minus infinity": ({"ent_coef": "-inf"}, "--ent-coef must be a finite number from -inf to inf, not -inf"),
    "negative": ({"clip_coef": -0.1}, "--clip-coef must be a finite number from 0 to inf, not -0.1"),
    "negative seed": ({"seed": -1}, "--seed must be a finite number from 0 to inf, not -1"),
    "nothing to resume": ({"resume": "nowhere"}, "nowhere/checkpoint.pt is missing"),
    "nothing to evaluate": ({"evaluate": "nowhere"}, "nowhere/checkpoint.pt is missing"),
}


INTEGERS = {"integers in a Box": ({"env_id": "box/Whole-v0"}, "a Box of floats is needed")}


BAD_FOR = {
    "ppo_continuous": {
        "wrong action space": ({"env_id": "CartPole-v1"}, "CartPole-v1 has actions Discrete(2): a Box"),
        "several choices": ({"env_id": "discrete/Target-v0"}, "(Discrete: use ppo_discrete.py)"),
        **INTEGERS,
    },
    "ppo_discrete": {
        "wrong action space": ({"env_id": "Pendulum-v1"}, "(Box: use ppo_continuous.py)"),
        "no such game": ({"env_id": "ALE/NoGame-v5"}, "--env-id ALE/NoGame-v5: "),
        "game of another name": ({"env_id": "PongNoFrameskip-v4"}, "Atari games are called ALE/NAME-v5 here"),
    },
    "ppo_rnn": {
        "columns that cannot be cut": (
            {"num_minibatches": 8, "num_steps": 32},
            "--num-minibatches 8 must divide num_envs = 4, as [1, 2, 4] do",
        ),
        "indivisible batch": ({"num_minibatches": 3}, "--num-minibatches 3 must divide num_envs = 4, as [1, 2, 4] do"),
        "no such cell": ({"cell": "rnn"}, None),
        **INTEGERS,
    },
}


CASES = [(name, case) for name in SCRIPTS for case in [*BAD, *BAD_FOR[name]]]


@pytest.mark.parametrize("script, case", CASES, indirect=["script"])
def test_bad_input(script, case, tmp_path, main):
    changes, message = (BAD | BAD_FOR[script.__name__])[case]
    flags = flags_of(**{"env_id": probe(script), "runs_dir": tmp_path / "runs"} | SMALL | changes)
    finished = main(script, *flags)
    if message is None:  # tyro's own words, in a box
        assert finished.returncode == 2 and "Traceback" not in finished.stderr
    else:
        assert_one_line(finished, message)
        assert len(finished.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_bad_input_of_train(script, tmp_path):
    """A notebook gets a ValueError with the line."""
    args = script.Args(runs_dir=str(tmp_path), **{"env_id": "NoSuch-v0"} | SMALL)
    with pytest.raises(ValueError, match=r"^--env-id NoSuch-v0: .* doesn't exist"):
        script.train(args)


def test_help(script, main):
    """It begins with what the script is and with its commands, and says something about every flag."""
    finished = main(script, "--help")
    assert finished.returncode == 0
    head, options = finished.stdout.split(" options ")
    for flags in ("--env-id", "--resume runs/NAME", "--evaluate runs/NAME"):
        assert f"python {script.__name__}.py {flags}" in head
    shown = re.split(r"\n\W (?=--)", options)[1:]
    flags = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(script.Args)}
    assert {entry.split()[0].strip(",") for entry in shown} == flags
    for entry in shown:  # beside the flag, its type and its default
        explanation = re.sub(r"--\S+|\{.*?\}|\(default.*", "", entry, flags=re.S)
        assert len(re.findall(r"[a-z]{2,}", explanation)) >= 2, entry
