"""Question: where does the time of a training go?

    OMP_NUM_THREADS=1 python benchmark/studies/phases.py discrete continuous-1 continuous-8 defaults rnn

Answer (results/phases.csv, one run each, before the scripts were rebuilt). With the defaults on HalfCheetah a step of
the 100 environments takes 7,619 us: the simulators 4,402, the gradients 1,715. At 8 x 256 it takes 604 us: 304 and 152.

A training with the command line of speed.py runs in this process, with clocks around the functions that its loop calls.
The scripts are not changed. Time between two of these functions counts for what the loop does there. The figures are
microseconds per step of all environments, over the second half of the iterations:

    simulators             envs.step
    acting                 act: normalising, network, noise
    storing, checks        the rest of the rollout: storing, NaN, returns of episodes
    values and advantages  estimate_advantages, normalize_rewards
    gradients              compute_gradient; in ppo_rnn.py compute_head_gradients
    memory, forwards       only in ppo_rnn.py: the replay of a minibatch, and of the rollout for the values
    memory, backwards      only in ppo_rnn.py: from the gradient of the features to those of the weights
    Adam's steps           apply_gradient
    shuffling              the rest of the update: statistics, permutation, gathering, minibatches, the KL limit
    log                    metrics, episodes.csv, TensorBoard, checkpoint

Two more figures are printed. One is the time of the gradient's matrix products, one after another and nothing else. The
other is the time of a compiled function of six arguments that adds 1 to the first. Each clock costs 0.1 to 0.2 us. The
machine should have nothing else to do.
"""

import dataclasses
import importlib.util
import itertools
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmark/

import report
import torch
import tyro
from report import RESULTS, ROOT
from speed import make_cases

FIELDS = ["case", "script", "phase", "microseconds", "versions"]
# The functions that get a clock: what they are, and what the loop does after one of them and before the next.
PHASES = {
    "act": ("acting", "storing, checks"),
    "step": ("simulators", "storing, checks"),
    "normalize_rewards": ("values and advantages", "values and advantages"),
    "estimate_advantages": ("values and advantages", "shuffling"),
    "compute_gradient": ("gradients", "shuffling"),
    "replay": ("memory, forwards", "shuffling"),
    "compute_head_gradients": ("gradients", "memory, backwards"),
    "apply_gradient": ("Adam's steps", "shuffling"),
    "gather_from_ranks": ("log", "log"),  # called twice in an iteration, when its update is over
}
ROWS = list(dict.fromkeys(itertools.chain(*PHASES.values())))


def load(script):
    """A script as a module of its own, so that the clocks stay in it."""
    sys.path.insert(0, str(ROOT))  # for benchmark.memory_envs
    spec = importlib.util.spec_from_file_location(f"phases_{len(sys.modules)}", script)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def put_clocks(module):
    """Clocks around what the loop of a script calls -> the list that they fill: name, start and end of each call"""
    calls = []

    def clocked(name, function):
        def call(*arguments):
            start = time.perf_counter()
            result = function(*arguments)
            calls.extend((name, start, time.perf_counter()))  # no tuples: their number would call the garbage collector
            return result

        return call

    for name in ("normalize_rewards", "estimate_advantages", "gather_from_ranks"):
        setattr(module, name, clocked(name, getattr(module, name)))
    if hasattr(module.Agent, "replay"):
        module.Agent.replay = clocked("replay", module.Agent.replay)
    make_envs, compiled = module.make_envs, module.compiled

    def make_clocked_envs(*arguments):
        envs = make_envs(*arguments)
        envs.step = clocked("step", envs.step)
        return envs

    module.make_envs = make_clocked_envs
    module.compiled = lambda function, **given: clocked(function.__name__, compiled(function, **given))
    return calls


def microseconds(calls):
    """The calls of a training -> {phase: microseconds per step of all environments}, second half of the iterations"""
    calls = list(zip(calls[::3], calls[1::3], calls[2::3]))
    if unknown := {name for name, _, _ in calls} - set(PHASES):
        raise SystemExit(f"{', '.join(unknown)} of the training loop: give it a phase in PHASES")
    ends = [index for index, (name, _, _) in enumerate(calls) if name == "gather_from_ranks"][1::2]
    calls = calls[ends[len(ends) // 2 - 1] : ends[-1] + 1]
    seconds, steps = dict.fromkeys(ROWS, 0.0), sum(name == "step" for name, _, _ in calls)
    for (name, _, end), (following, start, following_end) in itertools.pairwise(calls):
        seconds[PHASES[name][1]] += start - end
        seconds[PHASES[following][0]] += following_end - start
    return {phase: 1e6 * total / steps for phase, total in seconds.items() if total}


def best_time(function, rounds=20, calls=200):
    """Microseconds of one call, in the best of some rounds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        times.append((time.perf_counter() - start) / calls)
    return 1e6 * min(times)


def matrix_products(agent, rows):
    """The matrix products of a gradient over some rows -> their number of operations, and a function that does them"""
    pairs, first_layers = [], (agent.actor[0], agent.critic[0])
    for layer in agent.modules():
        if isinstance(layer, torch.nn.Linear):
            x, y = torch.randn(rows, layer.in_features), torch.randn(rows, layer.out_features)
            pairs += [(x, layer.weight.t()), (y.t(), x)]
            if layer not in first_layers:  # observations need no gradient
                pairs.append((y, layer.weight))
    outs = [torch.empty(a.shape[0], b.shape[1]) for a, b in pairs]
    operations = sum(2 * a.shape[0] * a.shape[1] * b.shape[1] for a, b in pairs)

    @torch.no_grad()
    def products():
        for (a, b), out in zip(pairs, outs):
            torch.mm(a, b, out=out)

    return operations, products


def profile(command, module, folder):
    """Train by a command line of speed.py -> the time of each phase, and lines about one gradient"""
    args = module.parse_args([*command[2:], f"--runs-dir={folder}"])
    calls = put_clocks(module)
    agent, _ = module.train(args)
    phases = microseconds(calls)
    rows = args.num_envs * args.num_steps // args.num_minibatches
    updates = calls.count("apply_gradient") / calls.count("step")
    gradient, adam = (phases[phase] / updates for phase in ("gradients", "Adam's steps"))
    lines = [f"one gradient of {rows} rows: {gradient:.0f} us; one step of Adam: {adam:.0f} us"]
    if not hasattr(agent, "replay") and not any(isinstance(layer, torch.nn.Conv2d) for layer in agent.modules()):
        operations, products = matrix_products(agent, rows)
        alone = best_time(products)
        lines.append(f"its matrix products alone: {alone:.0f} us, {operations / alone / 1e3:.0f} GFLOPS")
    if args.compile:
        nothing = module.compiled(lambda *minibatch: minibatch[0] + 1, args=args, device=torch.device("cpu"))
        minibatch = [torch.zeros(8) for _ in range(6)]
        lines.append(f"a compiled function that adds 1: {best_time(lambda: nothing(*minibatch)):.0f} us")
    return phases, lines


CASES = {case: all_of for case, all_of in make_cases().items() if not case.endswith("ranks")}


@dataclasses.dataclass
class Args:
    cases: tyro.conf.Positional[tuple[Literal[tuple(CASES)], ...]]  # which ones
    steps: int | None = None  # of environments, for a try, which is not kept


def main():
    args = tyro.cli(Args, description=__doc__.split("\n")[0])
    path = RESULTS / "phases.csv"
    rows, columns = report.read_csv(path), {}
    for case in args.cases:
        ((contestant, _, steps),) = (run for name, run in CASES[case].items() if name.startswith("ppo_"))
        command = contestant(args.steps or steps)
        script = Path(command[1]).stem
        with tempfile.TemporaryDirectory() as folder:
            columns[case], lines = profile(command, load(command[1]), folder)
        print("\n".join([f"{case}:", *lines]), flush=True)
        rows = [row for row in rows if (row["case"], row["script"]) != (case, script)]
        for phase, time_of_it in columns[case].items():
            row = {"case": case, "script": script, "phase": phase, "microseconds": f"{time_of_it:.1f}"}
            rows.append(row | {"versions": report.VERSIONS})
    if not args.steps:
        report.write_rows(path, FIELDS, sorted(rows, key=lambda row: (row["case"], row["script"])))
    print("\n| us per step of all environments | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 1))
    for phase in ROWS:
        print(f"| {phase} | " + " | ".join(f"{column.get(phase, 0):,.0f}" for column in columns.values()) + " |")
    print("| all | " + " | ".join(f"{sum(column.values()):,.0f}" for column in columns.values()) + " |")


if __name__ == "__main__":
    main()
