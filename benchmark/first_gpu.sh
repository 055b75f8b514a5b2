#!/usr/bin/env bash
# What to try first on a machine with an NVIDIA GPU, in four parts. Logs and figures go to the folder $OUT.
#
#     bash benchmark/first_gpu.sh run        # 7 minutes: does everything run on CUDA, and how fast?
#     bash benchmark/first_gpu.sh compare    # 6 minutes: rsl_rl; the same weights by graphs? TF32, the order in memory
#     bash benchmark/first_gpu.sh lean       # 7 minutes: Breakout, ours beside LeanRL; LEANRL=PATH, a checkout at 760837e
#     bash benchmark/first_gpu.sh learn      # 9 minutes (SECONDS_TO_LEARN=500): Pong, with 64 games
#
# Together they need half an hour. A part that is cut short leaves its log, and `learn` its episodes, in $OUT.
#
# Without a network, WHEELS=FOLDER first installs the wheels of a folder into ./site. These commands fill it with 25 MB,
# for Python 3.12 and a machine that has torch with CUDA, numpy, opencv, imageio and transformers:
#     FOR="--only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64"
#     FOR="$FOR --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64"
#     pip download $FOR -d WHEELS gymnasium==1.4.0 ale-py==0.12.1 mujoco==4.0.0 mujoco-core==4.0.0 tyro filelock tqdm \
#         tensorboard
#     pip download $FOR -d WHEELS --no-deps rsl-rl-lib==5.5.1 tensordict==0.10.0 "pyvers<0.2" orjson importlib-metadata \
#         zipp                                               # --no-deps: not torch
#     rm WHEELS/{numpy,pillow,grpcio,mujoco_studio}-*        # 43 MB that nothing here imports
# Goals on an H100: Breakout with 8 games above 6,809 steps/s (LeanRL's own figure) and above LeanRL here, with 128 games
# above 18,000; ppo_gpu_sim.py's learner above rsl_rl's; Pong above 20 within ten minutes.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3} OUT=$(realpath -m "${OUT:-gpu}") DEVICE=${DEVICE:-cuda} SHARE=${SHARE:-1} # SHARE=0.1: try `run`
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore PYTHONPATH=$PWD/site:${PYTHONPATH:-}
export TORCHINDUCTOR_CUDAGRAPH_OR_ERROR=1 # a call that cannot be a CUDA graph fails instead of running without one
RUNS=$(mktemp -d) # run folders are large: only that of `learn` is in $OUT, so that a kill leaves its episodes
mkdir -p "$OUT"
exec > >(tee -a "$OUT/${1:-run}.log") 2>&1
LOGGER=$!
if [ -n "${WHEELS:-}" ] && [ ! -d site ]; then
    $PYTHON -m pip install --quiet --no-index --no-deps --no-compile --target site "$WHEELS"/*.whl || exit 1
fi

part() { echo "=== $(date +%T) $*"; }
median() { sort -n | awk '{x[NR] = $1} END {if (NR) print "median: " x[int((NR + 1) / 2)] " steps/s"}'; }
steps() { $PYTHON -c "print(int($1 * $SHARE))"; }
# Run a training; print the end of its output, and the median of its printed steps/s without the first quarter.
train() {
    local rc=0
    timeout 200 $PYTHON "$@" --runs-dir "$RUNS" > "$RUNS/log" 2>&1 || rc=$?
    tail -n $((rc ? 60 : 8)) "$RUNS/log"
    grep -oE '[0-9,]+ steps/s' "$RUNS/log" | tr -cd '0-9\n' | tail -n 15 | median
    echo "exit code $rc (124: stopped after 200 s)"
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
    part HalfCheetah, on the GPU and on the CPU
    train ppo_continuous.py --device "$DEVICE" --total-timesteps "$(steps 40000)"
    train ppo_continuous.py --total-timesteps "$(steps 40000)"
    part CartPole with memory
    train ppo_rnn.py --env-id CartPole-v1 --device "$DEVICE" --total-timesteps "$(steps 40960)"
    part simulators on the device # its many short episodes cost more than learning: for speed see compare
    PYTHONPATH=tests:$PYTHONPATH train variants/ppo_gpu_sim.py --env-id torch_envs:drift --device "$DEVICE" \
        --total-timesteps "$(steps 4000000)"
    part language model
    train variants/ppo_rlhf.py --device "$DEVICE" --total-episodes "$(steps 1280)"
    cp "$RUNS"/*rlhf*/metrics.csv "$OUT" || failed=1
    ;;
compare)
    part learner of ppo_gpu_sim.py beside rsl_rl
    if timeout 150 $PYTHON benchmark/studies/speed_gpu_sim.py --repeats 1 --device "$DEVICE"; then
        cp benchmark/studies/speed_gpu_sim.csv "$OUT"
    else
        failed=1
    fi
    # Without TF32 and without inductor's channels_last, so that both sides compute alike. On a CPU they differ by at most
    # 3e-8. Differences above 1e-4 mean an error, such as a graph that reads old memory.
    part weights after one iteration, with CUDA graphs and without compilation
    export NVIDIA_TF32_OVERRIDE=0 TORCHINDUCTOR_LAYOUT_OPTIMIZATION=0
    for flag in --compile --no-compile; do
        train variants/ppo_atari.py --device "$DEVICE" --total-timesteps 1024 "--exp-name=one$flag" $flag
    done
    unset NVIDIA_TF32_OVERRIDE TORCHINDUCTOR_LAYOUT_OPTIMIZATION
    (cd variants && $PYTHON -c "import glob, ppo_atari
a, b = (ppo_atari.load_agent(glob.glob(f'$RUNS/*one--{flag}__*')[-1]) for flag in ('compile', 'no-compile'))
for (name, x), y in zip(a.named_parameters(), b.parameters()):
    print(f'{name:16} size {x.abs().max():.2e}, differs by {(x - y).abs().max():.2e}')") || failed=1
    part Breakout, 8 games, without TF32
    NVIDIA_TF32_OVERRIDE=0 train variants/ppo_atari.py --device "$DEVICE" --total-timesteps "$(steps 102400)"
    part Breakout, 8 games, images in the order of PyTorch, not channels_last as inductor chooses
    TORCHINDUCTOR_LAYOUT_OPTIMIZATION=0 train variants/ppo_atari.py --device "$DEVICE" --total-timesteps "$(steps 102400)"
    ;;
lean)
    for games in 8 128; do
        total=$(steps $((games == 8 ? 163840 : 491520)))
        part "LeanRL, $games games; each of its figures is the speed of ten iterations"
        timeout 200 $PYTHON benchmark/leanrl_atari.py "$LEANRL" --compile --cudagraphs --num-envs="$games" \
            --total-timesteps="$total" > "$RUNS/lean" 2>&1 ||
            { echo "exit code $? (124: stopped after 200 s)" && tail -n 60 "$RUNS/lean" && failed=1; }
        grep -aoE "speed: +[0-9.]+" "$RUNS/lean" | uniq | tr -cd '0-9.\n' | median
        part "ours, $games games"
        train variants/ppo_atari.py --preset cleanrl --device "$DEVICE" --num-envs "$games" --total-timesteps "$total"
    done
    ;;
learn)
    part Pong, 64 games
    timeout -k 15 -s INT "${SECONDS_TO_LEARN:-500}" $PYTHON variants/ppo_atari.py --env-id ALE/Pong-v5 --device "$DEVICE" \
        --num-envs 64 --num-minibatches 16 --total-timesteps 8_000_000 --checkpoint-interval 20 --runs-dir "$OUT/runs"
    (($? == 0 || $? == 124)) || failed=1 # 124: stopped in time
    $PYTHON -c "import glob, torch
saved = torch.load(sorted(glob.glob('$OUT/runs/*Pong*/checkpoint.pt'))[-1], map_location='cpu')
torch.save({key: saved[key] for key in saved if key != 'optimizer'}, '$OUT/pong_agent.pt')  # to evaluate, not to resume" ||
        failed=1
    rm -f "$OUT"/runs/*Pong*/{checkpoint.pt,checkpoint.tmp,lock,ppo_atari.py} # large, or known
    ;;
*)
    echo "usage: bash benchmark/first_gpu.sh run|compare|lean|learn"
    exit 2
    ;;
esac
exec >&- 2>&- # the log gets its last lines
wait "$LOGGER"
exit $failed
