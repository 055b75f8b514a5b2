"""What test_ranks.py starts under torchrun: trains, and leaves what each rank saw and had in OUT/rank-R.pt.

torchrun --nproc-per-node 2 tests/ranks.py SCRIPT OUT FLAGS
"""

import importlib
import os
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
name, out, *flags = sys.argv[1:]
script = importlib.import_module(name)
record = {"observations": [], "parameters": [], "statistics": [], "gradients": [], "own_gradients": [], "kls": []}
agents = []


def spy(owner, name, before=None, after=None):
    original = getattr(owner, name)

    def spied(*arguments, **options):
        if before:
            before(*arguments)
        result = original(*arguments, **options)
        if after:
            after(*arguments)
        return result

    setattr(owner, name, spied)


def is_end_of_iteration(value):
    return isinstance(value, tuple) and isinstance(value[0], list)  # episodes and signals


def after_iteration():
    (agent,) = agents
    record["parameters"].append(torch.cat([p.detach().flatten() for p in agent.parameters()]))
    rms = [(x.mean.clone(), x.var.clone(), x.count.clone()) for x in (agent.obs_rms, agent.return_rms)]
    record["statistics"].append(rms)


def is_gradient(tensors):
    return len(tensors) == 2  # a gradient and the KL of its minibatch


def before_average(*tensors):
    if is_gradient(tensors):
        record["own_gradients"].append(tensors[0].clone())


def after_average(*tensors):
    if is_gradient(tensors):
        record["gradients"].append(tensors[0].clone())
        record["kls"].append(float(tensors[1]))


def before_update(rms, x):
    if rms is agents[0].obs_rms:  # not the statistics of returns
        record["observations"].append(x[0].clone())


if "WITHOUT_SHARED_MEMORY" in os.environ:  # as on several machines
    script.SharedMemory.is_possible = lambda device: False
spy(script.Agent, "__init__", after=lambda agent, *_: agents.append(agent))
spy(script.RunningMeanStd, "update", before=before_update)
spy(script, "average_over_ranks", before=before_average, after=after_average)
spy(script, "gather_from_ranks", before=lambda value: after_iteration() if is_end_of_iteration(value) else None)
script.train(script.parse_args(flags))
torch.save(record, Path(out) / f"rank-{os.environ['RANK']}.pt")
