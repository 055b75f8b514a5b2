#!/usr/bin/env bash
# What to try first on a machine with an NVIDIA GPU, in three parts. Logs and figures go to the folder $OUT.
#
#     bash benchmark/first_gpu.sh run        # 7 minutes: does everything run on CUDA, and how fast?
#     bash benchmark/first_gpu.sh compare    # 8 minutes: rsl_rl and LeanRL on this card; the same weights by graphs?
#     bash benchmark/first_gpu.sh learn      # 9 minutes (SECONDS_TO_LEARN=540): Pong, with 64 games
#
# With LEANRL=PATH, a checkout of LeanRL at 760837e, `compare` also times LeanRL. Without a network, WHEELS=FOLDER first
# installs the wheels of a folder into ./site. This fills it, for Python 3.12, with 53 MB. The machine has a torch with
# CUDA, and numpy:
#     FOR="--only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64"
#     FOR="$FOR --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64"
#     pip download $FOR -d WHEELS gymnasium==1.4.0 ale-py==0.12.1 mujoco==4.0.0 mujoco-core==4.0.0 tyro filelock tqdm \
#         tensorboard transformers
#     pip download $FOR -d WHEELS --no-deps rsl-rl-lib==5.5.1 tensordict==0.10.0 "pyvers<0.2" orjson importlib-metadata \
#         zipp                                               # --no-deps: not torch
#     rm WHEELS/{numpy,pillow,grpcio,mujoco_studio}-*        # 43 MB that nothing here imports
# Goals on an H100: Breakout with 8 games above 6,809 steps/s (LeanRL's own figure) and above LeanRL here, with 128 games
# above 18,000; ppo_gpu_sim.py's learner above rsl_rl's; Pong above 20 within ten minutes.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3} OUT=$(realpath -m "${OUT:-gpu}") DEVICE=${DEVICE:-cuda} SHARE=${SHARE:-1} # SHARE=0.1: a try
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore PYTHONPATH=$PWD/site:${PYTHONPATH:-}
RUNS=$(mktemp -d) # run folders are large; what is worth keeping is copied to $OUT
mkdir -p "$OUT"
exec > >(tee -a "$OUT/${1:-run}.log") 2>&1
if [ -n "${WHEELS:-}" ] && [ ! -d site ]; then
    $PYTHON -m pip install --quiet --no-index --no-deps --no-compile --target site "$WHEELS"/*.whl || exit 1
fi

part() { echo "=== $(date +%T) $*"; }
steps() { $PYTHON -c "print(int($1 * $SHARE))"; }
# The end of a training's output: some lines, among them its steps/s, or 60 if it failed.
train() {
    local rc=0
    timeout 150 $PYTHON "$@" --runs-dir "$RUNS" > "$RUNS/log" 2>&1 || rc=$?
    tail -n $((rc ? 60 : 8)) "$RUNS/log"
    echo "exit code $rc (124: stopped after 150 s)"
    ((rc == 0)) || failed=1
}
failed=0

case ${1:-} in
run)
    part machine
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    lscpu | grep -E "Model name|^CPU\(s\)"
    $PYTHON -c "import torch, gymnasium, ale_py, mujoco
print('torch', torch.__version__, 'gymnasium', gymnasium.__version__, 'ale-py', ale_py.__version__)"
    part Breakout, 8 games
    train variants/ppo_atari.py --device "$DEVICE" --total-timesteps "$(steps 204800)"
    part Breakout, 128 games
    train variants/ppo_atari.py --device "$DEVICE" --num-envs 128 --total-timesteps "$(steps 819200)"
    part resumed
    train variants/ppo_atari.py --resume latest --total-timesteps "$(steps 983040)"
    part HalfCheetah
    train ppo_continuous.py --device "$DEVICE" --total-timesteps "$(steps 40000)"
    part CartPole with memory
    train ppo_rnn.py --env-id CartPole-v1 --device "$DEVICE" --total-timesteps "$(steps 40960)"
    part simulators on the device
    PYTHONPATH=tests:$PYTHONPATH train variants/ppo_gpu_sim.py --env-id torch_envs:drift --device "$DEVICE" \
        --total-timesteps "$(steps 4000000)"
    part language model
    train variants/ppo_rlhf.py --device "$DEVICE" --total-episodes "$(steps 1280)"
    cp "$RUNS"/*/metrics.csv "$OUT"
    ;;
compare)
    part learner of ppo_gpu_sim.py beside rsl_rl
    if timeout 120 $PYTHON benchmark/studies/speed_gpu_sim.py --repeats 1 --device "$DEVICE"; then
        cp benchmark/studies/speed_gpu_sim.csv "$OUT"
    else
        failed=1
    fi
    # Without TF32 on either side. On a CPU the two differ by at most 3e-8.
    part weights after one iteration, with CUDA graphs and without compilation
    export NVIDIA_TF32_OVERRIDE=0
    for flag in --compile --no-compile; do
        train variants/ppo_atari.py --device "$DEVICE" --total-timesteps 1024 "--exp-name=one$flag" $flag
    done
    unset NVIDIA_TF32_OVERRIDE
    (cd variants && $PYTHON -c "import glob, ppo_atari
a, b = (ppo_atari.load_agent(glob.glob(f'$RUNS/*one--{flag}__*')[-1]) for flag in ('compile', 'no-compile'))
for (name, x), y in zip(a.named_parameters(), b.parameters()):
    print(f'{name:16} size {x.abs().max():.2e}, differs by {(x - y).abs().max():.2e}')") || failed=1
    for case in atari-8 atari-128; do
        part "$case: ours, LeanRL, the games alone"
        speed="timeout 200 $PYTHON benchmark/speed.py $case --repeats 1 --scale $SHARE"
        { [ -n "${LEANRL:-}" ] && $speed --leanrl "$LEANRL"; } || $speed || failed=1
    done
    ;;
learn)
    part Pong, 64 games
    timeout -s INT "${SECONDS_TO_LEARN:-540}" $PYTHON variants/ppo_atari.py --env-id ALE/Pong-v5 --device "$DEVICE" \
        --num-envs 64 --num-minibatches 16 --total-timesteps 8_000_000 --checkpoint-interval 20 --runs-dir "$RUNS"
    (($? == 0 || $? == 124)) || failed=1 # 124: stopped in time
    gzip -c "$RUNS"/*Pong*/episodes.csv > "$OUT/pong_episodes.csv.gz"
    $PYTHON -c "import glob, torch
saved = torch.load(glob.glob('$RUNS/*Pong*/checkpoint.pt')[0], map_location='cpu')
torch.save({key: saved[key] for key in saved if key != 'optimizer'}, '$OUT/pong_agent.pt')  # to evaluate, not to resume"
    ;;
*)
    echo "usage: bash benchmark/first_gpu.sh run|compare|learn"
    exit 2
    ;;
esac
exit $failed
