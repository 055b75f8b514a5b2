"""Question: do CUDA graphs change a run, and what does a step or a minibatch still cost the CPU?

    python benchmark/studies/cuda_graphs.py                      # on a GPU: writes results/cuda_graphs.csv
    python benchmark/studies/cuda_graphs.py --counter PATH       # likewise, counted by a program that runs a script

Answer (results/cuda_graphs.csv): not run on a GPU yet. On a CUDA runtime whose kernels do nothing, a step is one
graph, and one wait for the actions. A minibatch is two graphs, and no wait without --target-kl. tests/test_cuda.py
replays recorded functions on a CPU: the run stays the same to the bit.

A row has what the CPU does for one more step of all environments, or for one more minibatch: the difference of two
runs, divided. `waits` are synchronisations, and uploads from memory that is not pinned. On a GPU the weights after
three iterations with `record` are compared with those without.
"""

import ast
import dataclasses
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmark/

import torch
import tyro
from report import RESULTS, ROOT, installed_versions, write_rows

ITERATIONS = 3
SCRIPTS = [("ppo_discrete", "ALE/Breakout-v5"), ("ppo_discrete", "CartPole-v1"), ("ppo_continuous", "HalfCheetah-v4")]
RNN = ("ppo_rnn", "CartPole-v1")  # its kernel needs a real cuDNN
# Runs a script as torch's profiler sees it, and prints calls of the CUDA runtime by name.
PROFILED = """
import collections, importlib, sys
import torch
sys.path.insert(0, {root!r})
sys.argv = sys.argv[1:]
script = importlib.import_module({script!r})
if not {graphs}:
    script.record = lambda function, args, device: lambda *tensors: function(*(x.to(device) for x in tensors))
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
    script.main()
calls = collections.Counter(event.name for event in profile.events() if event.name.startswith("cu"))
print("in all:", dict(calls))
"""
NAMES = {
    "graphs": ["graph", "cudaGraphLaunch"],
    "kernels": ["kernel", "gemm", "cudnn", "triton", "cudaLaunchKernel", "cuLaunchKernel", "cuLaunchKernelEx"],
    "copies": ["d2d", "h2d", "d2h", "memset", "cudaMemcpyAsync", "cudaMemsetAsync"],
    "waits": ["sync", "h2d_pageable", "cudaStreamSynchronize", "cudaDeviceSynchronize"],  # a copy back has one
}


def count(script, counter, graphs=True, **flags):
    """{"graphs", "kernels", ...} of a whole run, and the weights that it ends with"""
    with tempfile.TemporaryDirectory() as folder:
        flags |= {"total_timesteps": ITERATIONS * flags["num_envs"] * flags["num_steps"], "runs_dir": folder}
        words = ["--device=cuda", *(f"--{name.replace('_', '-')}={value}" for name, value in flags.items())]
        code = PROFILED.format(root=str(ROOT), script=script, graphs=graphs)
        program = [counter, ROOT / f"{script}.py"] if counter else ["-c", code, script]
        done = subprocess.run([sys.executable, *program, *words], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{script} {words} failed:\n{done.stderr[-3000:]}")
        (checkpoint,) = Path(folder).glob("*/checkpoint.pt")
        weights = torch.load(checkpoint, map_location="cpu", weights_only=True)["agent"]
    calls = ast.literal_eval(done.stdout.split("in all: ")[-1])
    if not calls:
        raise SystemExit("torch's profiler has seen no call of CUDA: give a --counter")
    return {kind: sum(calls.get(name, 0) for name in names) for kind, names in NAMES.items()}, weights


@dataclasses.dataclass
class Args:
    counter: Path | None = None  # runs a script, then prints its calls: "in all: {name: number}"


def main():
    args = tyro.cli(Args, description=__doc__.split("\n")[0])
    rows = []
    for script, env_id in SCRIPTS + [RNN] * (not args.counter):
        flags = {"env_id": env_id, "num_envs": 8, "num_steps": 16, "num_minibatches": 4, "update_epochs": 2}
        flags |= {"target_kl": None}
        once, weights = count(script, args.counter, **flags)
        longer, _ = count(script, args.counter, **flags | {"num_steps": 32})
        finer, _ = count(script, args.counter, **flags | {"num_minibatches": 8})
        same = "not compared"
        if not args.counter:
            _, others = count(script, None, graphs=False, **flags)
            same = all(torch.equal(weights[name], others[name]) for name in weights)
        for unit, more, number in (("step", longer, ITERATIONS * 16), ("minibatch", finer, ITERATIONS * 2 * 4)):
            row = {"script": script, "env_id": env_id, "unit": unit}
            row |= {kind: f"{(more[kind] - once[kind]) / number:.2f}" for kind in NAMES}
            device = "none: kernels do nothing" if args.counter else torch.cuda.get_device_name()
            row |= {"same weights": same, "gpu": device, "versions": installed_versions()}
            rows.append(row)
            print(*list(row.values())[:-1], sep="\t", flush=True)
    write_rows(RESULTS / "cuda_graphs.csv", rows[0].keys(), rows)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
