import csv
import importlib
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import probes  # noqa: F401
import pytest
import torch
from processes import Started, kill_what_is_left, run_last_block, run_main, wait_for  # noqa: F401
from tensorboard.summary.writer import event_file_writer
from torch.utils._pytree import tree_map_only

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parent.parent
TESTS = Path(__file__).parent
torch.set_num_threads(1)
# TensorBoard reads files in the order of their names, which end in a second and a counter of this process: 10 is before
# 9 where two runs begin in one second, as they only do here.
event_file_writer._global_uid = event_file_writer.AtomicCounter(1000)
SCRIPTS = ["ppo_continuous", "ppo_discrete", "ppo_rnn"]
# For services that are the same text in all scripts, and take long to try.
ONE = pytest.mark.parametrize("script", SCRIPTS[:1], indirect=True)
DISCRETE = pytest.mark.parametrize("script", ["ppo_discrete"], indirect=True)
RNN = pytest.mark.parametrize("script", ["ppo_rnn"], indirect=True)
BOX = pytest.mark.parametrize("script", ["ppo_continuous", "ppo_rnn"], indirect=True)
# A run that lasts long enough to be stopped or killed.
LONG = {"total_timesteps": 64 * 100, "num_envs": 4, "num_steps": 16, "num_minibatches": 2, "update_epochs": 1}
LONG |= {"compile": False, "checkpoint_interval": 0, "seed": 5}
# What makes a run small enough for a test.
SMALL = {
    "total_timesteps": 256,
    "num_envs": 4,
    "num_steps": 16,
    "num_minibatches": 4,
    "update_epochs": 2,
    "compile": False,
}
ACTIONS = {"ppo_continuous": "box", "ppo_discrete": "discrete", "ppo_rnn": "box"}  # test_memory.py has the other kind
REAL_ENV = {"ppo_continuous": "InvertedPendulum-v4", "ppo_discrete": "CartPole-v1", "ppo_rnn": "InvertedPendulum-v5"}


def probe(script, name="Target"):
    """The probe environment of that name whose actions the script can take."""
    return f"{ACTIONS[script.__name__]}/{name}-v0"


@pytest.fixture(params=SCRIPTS)
def script(request):
    """Every reference script, as an imported module."""
    return importlib.import_module(request.param)


@pytest.fixture
def small_args(script, tmp_path):
    """A function that gives Args of a run that takes a second: small_args(gamma=0.9)."""

    def make(**changes):
        runs_dir = str(tmp_path / "runs")
        return script.Args(**({"env_id": probe(script), "runs_dir": runs_dir} | SMALL | changes))

    return make


FINISHED = {}  # run folders, by script; nothing changes them


@pytest.fixture
def run_dir(script, small_args, tmp_path, tmp_path_factory):
    """A finished small run. Each test has a copy of the same one."""
    name = script.__name__
    if name not in FINISHED:
        _, FINISHED[name] = script.train(small_args(runs_dir=str(tmp_path_factory.mktemp("finished"))))
    return Path(shutil.copytree(FINISHED[name], tmp_path / "runs" / FINISHED[name].name))


@pytest.fixture
def watch(monkeypatch):
    """watch(owner, "name"): from now on the calls of owner.name, as [(arguments, result), ...]; eager mode only.

    Tensors are copies: what the script later writes in place does not change them."""

    def copy(tree):
        return tree_map_only(torch.Tensor, lambda x: x.detach().clone(), tree)

    def watch(owner, name):
        original, calls = getattr(owner, name), []

        def watched(*arguments, **named):
            copies = copy(arguments)
            result = original(*arguments, **named)
            calls.append((copies, copy(result)))
            return result

        monkeypatch.setattr(owner, name, watched)
        return calls

    return watch


@pytest.fixture
def minibatches(script, watch):
    """The calls of the script's ppo_loss, from now on: what each minibatch of the update saw."""
    return watch(script, "ppo_loss")


@pytest.fixture
def main(monkeypatch, capsys):
    """main(script, *flags): the command line in this process, which is much faster than in a new one. Gives the exit
    status and what was printed. An error that the script leaves to Python is raised."""

    def call(script, *flags):
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, flags)])
        monkeypatch.setattr(sys, "path", [*sys.path])  # the script appends the current folder
        capsys.readouterr()  # what was printed before
        status = 0
        try:
            run_last_block(script)
        except SystemExit as exit:
            status = 0 if exit.code is None else exit.code
        stdout, stderr = capsys.readouterr()
        return SimpleNamespace(returncode=status, stdout=stdout, stderr=stderr)

    return call


@pytest.fixture
def offline_wandb(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def make_agent(script, obs_size=3, action_size=3, **args):
    """An agent for vectors, with actions in [-1, 1], or with two choices in each dimension; action_size may also be the
    list of their numbers. Actor and critic of a recurrent one read features of obs_size numbers."""
    if script.__name__ == "ppo_rnn":
        high = np.ones(action_size, np.float32)
        args = {"memory_size": obs_size} | args
        return script.Agent((obs_size,), {"action_low": -high, "action_high": high}, script.Args(**args))
    if ACTIONS[script.__name__] == "box":
        high = np.ones(action_size, np.float32)
        return script.Agent((obs_size,), -high, high, script.Args(**args))
    sizes = np.full(action_size, 2) if isinstance(action_size, int) else np.array(action_size)
    return script.Agent((obs_size,), sizes, np.zeros_like(sizes), script.Args(**args))


def policy(script, sizes):
    """An agent whose observations are the logits of its actions, which have these numbers of choices."""
    size, sizes = int(sum(sizes)), np.array(sizes)
    if script.__name__ == "ppo_rnn":
        actions = {"action_sizes": sizes, "action_start": np.zeros_like(sizes)}
        agent = script.Agent((size,), actions, script.Args(memory_size=size))
    else:
        agent = script.Agent((size,), sizes, np.zeros_like(sizes), script.Args())
    agent.actor, agent.critic = torch.nn.Identity(), torch.nn.Linear(size, 1)
    return agent


def act(agent, raw_obs, **named):
    """What the agent does at the start of an episode."""
    action = agent.predict(raw_obs, **named)
    return action[0] if isinstance(action, tuple) else action  # behind it is the state of a memory


def golden(name):
    """A case of golden.json: (inputs, expected), lists turned into float64 tensors."""
    case = next(case for case in json.loads((TESTS / "golden.json").read_text())["cases"] if case["id"] == name)

    def tensors(tree):
        if isinstance(tree, dict):
            return {key: tensors(value) for key, value in tree.items()}
        try:
            return torch.tensor(tree, dtype=torch.float64) if isinstance(tree, list) else tree
        except (TypeError, ValueError):
            return [tensors(value) for value in tree]

    return tensors(case["inputs"]), tensors(case["expected"])


def flags_of(**args):
    """{"num_envs": 4, "compile": False} -> ["--num-envs=4", "--no-compile"]"""
    flags = []
    for name, value in args.items():
        name = name.replace("_", "-")
        flags.append(f"--{'' if value else 'no-'}{name}" if isinstance(value, bool) else f"--{name}={value}")
    return flags


def start(script, runs_dir, environment=None, **args):
    """The script's command line in a new process: start("ppo_rnn", tmp_path, num_envs=4)."""
    flags = [f"--runs-dir={runs_dir}", *flags_of(**args)]
    return Started(run_main, script, flags, environment=environment)


@pytest.fixture(autouse=True)
def no_process_is_left():
    yield
    kill_what_is_left()


def scalars(run_dir):
    """TensorBoard scalars of a run folder: {key: [(step, value), ...]}"""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
    events.Reload()
    return {key: [(event.step, event.value) for event in events.Scalars(key)] for key in events.Tags()["scalars"]}


def rows(run_dir):
    with open(run_dir / "episodes.csv") as file:
        return list(csv.reader(file))


def assert_same_learner(one, two):
    """Two checkpoints whose every tensor and number is equal to the bit, but for the time they took."""
    assert one["global_step"] == two["global_step"]
    torch.testing.assert_close(one["optimizer"], two["optimizer"], atol=0, rtol=0)
    torch.testing.assert_close(one["agent"], two["agent"], atol=0, rtol=0)


def checkpointed_step(script, runs_dir):
    for path in runs_dir.glob("*/checkpoint.pt"):
        return script.load_checkpoint(path.parent)["global_step"]
    return 0


def assert_one_line(finished, message, code=2):
    assert finished.returncode == code, finished.stderr
    errors = [line for line in finished.stderr.splitlines() if "error:" in line]
    assert len(errors) == 1 and message in errors[0], finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.fixture
def two_threads():
    """torch has two threads, before a test and after it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    left = torch.get_num_threads()
    torch.set_num_threads(threads)
    assert left == 2


class Policy:
    """Stands in for an agent: gives ppo_loss the log-probabilities, entropy and values of a golden case."""

    def __init__(self, log_probs, entropy, values):
        self.outputs = log_probs, entropy, values

    def get_action_and_value(self, obs, action, *masks):
        return action, *self.outputs


def loss_and_metrics(script, inputs, **args):
    zeros = torch.zeros_like(inputs["old_logprob"])
    new_log_probs = inputs.get("new_logprob", zeros)
    policy = Policy(new_log_probs, inputs.get("entropy", zeros), inputs.get("new_values", zeros))
    minibatch = [inputs.get(key, zeros) for key in ("old_logprob", "old_values", "advantages", "returns")]
    masks = [] if script.__name__ == "ppo_continuous" else [None]
    return script.ppo_loss(policy, script.Args(**args), None, None, *masks, *minibatch)
