"""Question: does torch.compile give the gradients of eager mode?

    OMP_NUM_THREADS=1 python benchmark/studies/compiled_gradients.py    # writes results/compiled_gradients.csv

Answer (results/compiled_gradients.csv): with the options of the scripts yes. With realize_opcount_threshold=1, which
the scripts had until 2026-11-25, the gradient of image networks lacks the policy's part for some sizes, without an
error.

A row has the network, the minibatch, and the largest error of a parameter's gradient, divided by the largest entry of
that gradient: with the options of the scripts, and with that option.
"""

import importlib
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmark/
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the scripts

import numpy as np
import torch
from report import RESULTS, installed_versions, write_rows

VECTOR, IMAGE = (17,), (4, 84, 84)
SIZES = [("ppo_continuous", VECTOR, 64, size, rows) for size in (64, 128, 256, 512) for rows in (64, 80, 256)]
SIZES += [("ppo_discrete", VECTOR, 64, size, rows) for size in (64, 256) for rows in (128, 256)]
SIZES += [("ppo_discrete", IMAGE, 64, 64, rows) for rows in (64, 128, 256)]
SIZES += [("ppo_rnn", shape, memory, 64, 128) for shape in (VECTOR, IMAGE) for memory in (128, 256, 512)]


def largest_error(script, shape, memory, size, rows, options):
    module = importlib.import_module(script)
    torch.manual_seed(0)
    torch._dynamo.reset()
    args = module.Args(hidden_sizes=(size, size), **{"hidden_size": memory} if script == "ppo_rnn" else {})
    bounds = np.full(6, -1, np.float32), np.full(6, 1, np.float32)
    discrete = {"sizes": np.array(6), "start": np.array(0)}
    agent = module.Agent(shape, *(bounds if script == "ppo_continuous" else [discrete]), args)
    obs = torch.randint(0, 256, (rows, *shape), dtype=torch.uint8) if shape == IMAGE else torch.randn(rows, *shape)
    if script == "ppo_rnn":  # features of the memory
        obs = 0.1 * torch.randn(rows, memory)
    with torch.no_grad():
        actions, log_probs, _, values = agent.get_action_and_value(obs)
    batch = [obs, actions, log_probs + 0.01 * torch.randn(rows), values, torch.randn(rows), torch.randn(rows)]
    batch += [] if script == "ppo_continuous" else [torch.ones(rows, 6, dtype=torch.bool)]
    heads = ("actor", "critic") if script == "ppo_rnn" else ""
    parameters = [parameter for name, parameter in agent.named_parameters() if name.startswith(heads)]
    clip_scale = torch.ones(())

    def gradients(obs, *rest):
        loss, metrics = module.ppo_loss(agent, args, clip_scale, obs, *rest)
        return torch.autograd.grad(loss, [obs, *parameters] if obs.requires_grad else parameters), metrics

    batch[0].requires_grad_(script == "ppo_rnn")
    options = {"fallback_random": True, "cpp_wrapper": True, "cpp.vec_isa_ok": True} | options
    compiled = torch.compile(gradients, fullgraph=True, dynamic=False, options=options)
    pairs = zip(gradients(*batch)[0], compiled(*batch)[0])
    return max(((found - right).abs().max() / right.abs().max()).item() for right, found in pairs)


def main():
    torch._dynamo.config.trace_autograd_ops = True
    rows = []
    for script, shape, memory, size, minibatch in SIZES:
        errors = [
            largest_error(script, shape, memory, size, minibatch, o) for o in ({}, {"realize_opcount_threshold": 1})
        ]
        network = "Nature CNN" if shape == IMAGE else f"{size} {size}"
        network += f", memory of {memory}" if script == "ppo_rnn" else ""
        row = {"script": script, "network": network, "minibatch": minibatch, "error": f"{errors[0]:.0e}"}
        rows.append(row | {"error_with_the_option": f"{errors[1]:.0e}", "versions": installed_versions()})
        print(*itertools.islice(rows[-1].values(), 5), flush=True)
    write_rows(RESULTS / "compiled_gradients.csv", list(rows[0]), rows)


if __name__ == "__main__":
    main()
