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
record = {"observations": [], "parameters": [], "statistics": [], "gradients": [], "kls": []}
agents = []


def spy(owner, name, before=None, after=None):
    original = getattr(owner, name)

    def spied(*arguments):
        if before:
            before(*arguments)
        result = original(*arguments)
        if after:
            after(*arguments)
        return result

    setattr(owner, name, spied)


def after_iteration(*_):
    (agent,) = agents
    record["parameters"].append(torch.cat([p.detach().flatten() for p in agent.parameters()]))
    rms = [(x.mean.clone(), x.var.clone(), x.count.clone()) for x in (agent.obs_rms, agent.return_rms)]
    record["statistics"].append(rms)


def averaged(*tensors):
    if len(tensors) > 1:  # a gradient and the metrics of its minibatch
        record["gradients"].append(tensors[0].clone())
        record["kls"].append(float(tensors[4]))


spy(script.Agent, "__init__", after=lambda agent, *_: agents.append(agent))
spy(script.RunningMeanStd, "update", before=lambda _, x: record["observations"].append(x.clone()))
spy(script, "average_over_ranks", after=averaged)
record["own_gradients"] = []
spy(
    script, "average_over_ranks", before=lambda *x: record["own_gradients"].append(x[0].clone()) if len(x) > 1 else None
)
spy(script, "gather_from_ranks", before=after_iteration)
script.train(script.parse_args(flags))
torch.save(record, Path(out) / f"rank-{os.environ['RANK']}.pt")
