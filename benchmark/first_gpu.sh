#!/usr/bin/env bash
# What to try first on a machine with an NVIDIA GPU: Breakout, beside the games alone. It takes a few minutes.
#
#     bash benchmark/first_gpu.sh             # results/speed.csv is written
#     bash benchmark/first_gpu.sh WHEELS      # without a network: installs every wheel of a folder first, filled by
#         pip download --only-binary=:all: --python-version 3.12 -d WHEELS gymnasium mujoco ale-py tyro tqdm
#     SCALE=0.5 bash benchmark/first_gpu.sh   # a try; nothing is written
#
# LEANRL=PATH adds LeanRL's script for Breakout (its environment: see speed.py). Not part of this, because it takes hours:
#     python benchmark/run.py --suite atari --tasks ALE/Pong-v5 ALE/Breakout-v5 --seeds 3 -- --device cuda
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}

echo "== what is here"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || echo "no nvidia-smi"
gcc --version | head -1  # Triton and torch.compile build with it
if [ $# -gt 0 ]; then
    $PYTHON -m pip install --quiet --no-index --no-deps "$1"/*.whl
fi
$PYTHON - <<'CODE'
import pathlib, sysconfig, torch
header = pathlib.Path(sysconfig.get_paths()["include"], "Python.h")
assert header.exists(), f"{header} is missing: install Python's headers (python3-dev), Triton needs them"
assert torch.cuda.is_available(), "torch sees no GPU"
print("torch", torch.__version__, torch.cuda.get_device_name())
CODE

echo "== Breakout, beside the games alone"
$PYTHON benchmark/speed.py atari-8 atari-128 --repeats 1 --scale "${SCALE:-1}" ${LEANRL:+--leanrl "$LEANRL"}
