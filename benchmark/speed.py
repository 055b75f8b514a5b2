"""Training speed beside other implementations: whole processes, at equal settings, in turn on one machine.

    python -m pip install -r benchmark/requirements.txt            # the case rlhf: also variants/requirements.txt
    python benchmark/speed.py rnn rnn-shared                       # sb3-contrib's RecurrentPPO
    python benchmark/speed.py continuous-1 continuous-8 discrete discrete-64 --cleanrl PATH --leanrl PATH    # and SB3
    python benchmark/speed.py processes processes-humanoid         # all cores: process_envs.py, beside EnvPool
    python benchmark/speed.py atari-8 atari-128 --leanrl PATH      # on a GPU
    taskset -c 0 python benchmark/speed.py atari-cpu --cleanrl PATH         # on one CPU core: ale-py's vector takes all
    python benchmark/speed.py defaults discrete rlhf --before PATH          # beside another commit, checked out at PATH
    python benchmark/speed.py rnn-shared --before PATH --cpu-time           # likewise, on a machine that is not idle

SBX and rejax take part where they are installed. rejax needs no gymnasium: its CartPole is gymnax's, compiled with the
algorithm into one program. python -m pip install sbx-rl rejax "gymnax<0.1"

CleanRL and LeanRL (760837e) need older packages: PATH/.venv is a virtual environment with them. LeanRL's Atari runs
in this environment, with tensordict (leanrl_atari.py). LeanRL runs compiled, and its Atari with CUDA graphs:

    python -m venv .venv
    .venv/bin/pip install torch gymnasium==0.29.1 "mujoco<3" imageio tyro tensorboard "numpy<2.3"
    .venv/bin/pip install ale-py==0.10.2 opencv-python-headless                                       # CleanRL's Atari
    .venv/bin/pip install tensordict==0.10.0 tqdm wandb                                               # LeanRL only

Every contestant trains on one thread (`processes`: on all cores; ale-py's games: on all that it may use), for few steps
and then for many. Its speed is the difference in steps over the difference in time, so that imports and compilation do
not count. The rest of the short run is its start. The first start on a machine, where nothing has been compiled yet, is
measured once. The "simulator" steps the same environments with random actions and learns nothing. Medians over the
repeats are printed; results/speed.csv keeps those of the cases in docs/results.md. The machine should have nothing else
to do.
"""

import dataclasses
import importlib.util
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import tyro
from report import RESULTS, SPEED, table
from run_folder import ROOT, machine, path_of, read_csv, write_rows

FIELDS = ["case", "contestant", "steps_per_second", "ratio", "start_seconds", "first_start_seconds"]
FIELDS += ["repeats", "single_runs", "versions"]
PACKAGES = ("torch", "gymnasium", "mujoco", "ale-py", "stable-baselines3", "sb3-contrib", "sbx-rl")
PACKAGES += ("jax", "rejax", "envpool")

SB3 = """
import sys; sys.path.insert(0, {root!r})
import gymnasium, torch
import benchmark.memory_envs
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize
from {package} import {algorithm}
torch.set_num_threads(1)
envs = make_vec_env(lambda: gymnasium.make({env_id!r}), {envs})
if {normalize}:
    envs = VecNormalize(envs)
{algorithm}({policy!r}, envs, device="cpu", **{settings}).learn({steps})
"""
SB3_ATARI = """
import ale_py, torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import VecFrameStack
torch.set_num_threads(1)
envs = VecFrameStack(make_atari_env("BreakoutNoFrameskip-v4", {envs}), 4)
PPO("CnnPolicy", envs, device="cpu", **{settings}).learn({steps})
"""
CLEANRL_ATARI = """
import runpy, sys
import ale_py  # registers the games
sys.path.insert(0, {checkout!r})
runpy.run_path({checkout!r} + "/cleanrl/ppo_atari.py", run_name="__main__")
"""
REJAX = """
import jax, rejax
algorithm = rejax.get_algo("ppo").create(
    env={env_id!r}, num_envs={envs}, agent_kwargs={{"activation": "tanh"}}, total_timesteps={steps}, **{settings},
    eval_freq={steps}, skip_initial_evaluation=True,
)
jax.block_until_ready(jax.jit(algorithm.train)(jax.random.PRNGKey(1)))
"""
STEPS_AT_RANDOM = """
envs.reset(seed=0)
actions = [envs.action_space.sample() for _ in range(256)]
for step in range({steps} // {envs}):
    envs.step(actions[step % 256])
"""
SIMULATOR = """
import gymnasium
mode = gymnasium.vector.AutoresetMode.SAME_STEP
envs = gymnasium.make_vec({env_id!r}, {envs}, "sync", vector_kwargs={{"autoreset_mode": mode}})
"""
ATARI_SIMULATOR = """
import sys; sys.path.insert(0, {root!r} + "/variants")
import ppo_atari
envs = ppo_atari.make_envs(ppo_atari.Args(env_id={env_id!r}, num_envs={envs}), {envs})
"""


def to_words(flags):
    return [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in flags.items()]


def ours(script, **flags):
    """The command line of a script of this repository, by the number of steps."""
    program = [sys.executable, str(path_of(script)), "--checkpoint-interval=1000", *to_words(flags)]
    return lambda steps: [*program, f"--total-timesteps={steps}"]


def beside(before, contestants):
    """Our script of a case, beside the same script of another commit, checked out at `before`."""
    (mine,) = (name for name in contestants if name.startswith("ppo_"))
    command, short, long = contestants[mine]

    def earlier(steps):
        python, *words = command(steps)
        return [python, *(word.replace(str(ROOT), str(before)) for word in words)]

    return {"before": (earlier, short, long), mine: (command, short, long)}


def from_checkout(checkout, script, **flags):
    """The command line of a script in CleanRL's or LeanRL's checkout, by the number of steps. Flags have our names."""
    program = [str(checkout / ".venv" / "bin" / "python"), str(checkout / script), "--no-cuda"]
    return lambda steps: [*program, *to_words(flags), f"--total-timesteps={steps}"]


def sb3(env_id, envs, package="stable_baselines3", algorithm="PPO", policy="MlpPolicy", normalize=False, **settings):
    """An algorithm of Stable-Baselines3 or its contributions, settings in its own terms."""
    names = {"root": str(ROOT), "package": package, "algorithm": algorithm, "policy": policy, "normalize": normalize}
    names |= {"env_id": env_id, "envs": envs, "settings": settings}
    return lambda steps: [sys.executable, "-c", SB3.format(steps=steps, **names)]


def sb3_and_sbx(env_id, envs, short, long, **settings):
    contestants = {"SB3": (sb3(env_id, envs, **settings), short, long)}
    if importlib.util.find_spec("sbx"):
        contestants["SBX"] = (sb3(env_id, envs, package="sbx", **settings), short, long)
    return contestants


def rejax(env_id, envs, **settings):
    """rejax's PPO on gymnax's environment, settings in its own terms."""
    return lambda steps: [sys.executable, "-c", REJAX.format(env_id=env_id, envs=envs, steps=steps, settings=settings)]


def simulator(env_id, envs, code=SIMULATOR):
    code += STEPS_AT_RANDOM
    return lambda steps: [sys.executable, "-c", code.format(root=str(ROOT), env_id=env_id, envs=envs, steps=steps)]


def leanrl_atari(checkout, envs):
    """LeanRL's script for Breakout, on the same games as ours."""
    program = [sys.executable, str(ROOT / "benchmark" / "leanrl_atari.py"), str(checkout)]
    program += ["--compile", "--cudagraphs", f"--num-envs={envs}"]
    return lambda steps: [*program, f"--total-timesteps={steps}"]


def atari_case(envs, leanrl):
    """Breakout on a GPU with the published settings, but for the number of environments: minibatches grow with it."""
    flags = {"env_id": "ALE/Breakout-v5", "num_envs": envs, "clip_vloss": True, "device": "cuda"}
    alone = simulator("ALE/Breakout-v5", envs, ATARI_SIMULATOR)
    steps = (16384, 147456) if envs == 8 else (32768, 425984)
    contestants = {"LeanRL": (leanrl_atari(leanrl, envs), *steps)} if leanrl else {}
    return contestants | {"ppo_atari": (ours("ppo_atari", **flags), *steps), "simulator": (alone, *steps)}


def atari_cpu_case(cleanrl):
    """Breakout with CleanRL's settings, 8 x 128, on a CPU, where LeanRL's compiled script fails (torch 2.14)."""
    settings = {"n_steps": 128, "batch_size": 256, "n_epochs": 4, "learning_rate": 2.5e-4, "ent_coef": 0.01}
    settings |= {"clip_range": 0.1, "clip_range_vf": 0.1}
    flags = {"env_id": "ALE/Breakout-v5", "clip_vloss": True, "device": "cpu"}

    def sb3_atari(steps):
        return [sys.executable, "-c", SB3_ATARI.format(envs=8, settings=settings, steps=steps)]

    def cleanrl_atari(steps):
        program = [str(cleanrl / ".venv" / "bin" / "python"), "-c", CLEANRL_ATARI.format(checkout=str(cleanrl))]
        return [*program, "--no-cuda", "--env-id=BreakoutNoFrameskip-v4", f"--total-timesteps={steps}"]

    steps = (1024, 13312)
    contestants = {"SB3": (sb3_atari, *steps)}
    contestants |= {"CleanRL": (cleanrl_atari, *steps)} if cleanrl else {}
    contestants["ppo_atari"] = (ours("ppo_atari", **flags), *steps)
    return contestants | {"simulator": (simulator("ALE/Breakout-v5", 8, ATARI_SIMULATOR), 1024, 132096)}


def rnn_case(shared):
    """4 x 128 steps, LSTM of 128, 4 minibatches of 128 steps, 4 epochs. Ours is shared by actor and critic;
    nothing is normalised but advantages."""
    flags = {"num_envs": 4, "num_steps": 128, "num_minibatches": 4, "update_epochs": 4, "recompute_advantages": False}
    flags |= {"memory_size": 128, "env_id": "benchmark.memory_envs:CartPoleNoVel-v1"}
    flags |= {"norm_obs": False, "norm_reward": False}
    policy = {"lstm_hidden_size": 128, "enable_critic_lstm": not shared, "shared_lstm": shared}
    settings = {"n_steps": 128, "batch_size": 128, "n_epochs": 4, "policy_kwargs": policy}
    names = {"package": "sb3_contrib", "algorithm": "RecurrentPPO", "policy": "MlpLstmPolicy"}
    peer = sb3("CartPoleNoVel-v1", 4, **names, **settings)
    return {"sb3-contrib": (peer, 4096, 16384), "ppo_rnn": (ours("ppo_rnn", **flags), 8192, 106496)}


def processes_case(task, short, long):
    """The default settings. process_envs.py has a process for each core, EnvPool, where it is installed, a thread."""
    contestants = {"one process": (ours("ppo_continuous", env_id=task), short, long)}
    if importlib.util.find_spec("envpool"):
        native = f"benchmark.envpool_envs:EnvPool/{task}"
        contestants["EnvPool"] = (ours("ppo_continuous", env_id=native), short, long)
    in_processes = ours("ppo_continuous", env_id=f"benchmark.process_envs:{task}")
    return contestants | {"ppo_continuous in processes": (in_processes, short, long)}


def continuous_case(envs, steps, cleanrl, leanrl=None):
    """CleanRL's settings; observations and rewards are normalised by all."""
    flags = {"env_id": "HalfCheetah-v4", "num_envs": envs, "num_steps": steps, "num_minibatches": 32}
    flags |= {"update_epochs": 10, "norm_adv": True, "clip_vloss": True, "vf_coef": 0.5, "ent_coef": 0}
    flags_of_ours = {"target_kl": None, "log_std_init": 0, "log_std_min": -20, "anneal_std": False}
    flags_of_ours |= {"stagger_envs": False}
    mine = ours("ppo_continuous", **flags | flags_of_ours, recompute_advantages=False)
    settings = {"n_steps": steps, "batch_size": envs * steps // 32, "n_epochs": 10, "normalize": True}
    contestants = sb3_and_sbx("HalfCheetah-v4", envs, 8192, 40960, **settings)
    if cleanrl:
        peer = from_checkout(cleanrl, "cleanrl/ppo_continuous_action.py", **flags)
        contestants["CleanRL"] = (peer, 8192, 40960)
    if leanrl:
        peer = from_checkout(leanrl, "leanrl/ppo_continuous_action_torchcompile.py", compile=True, **flags)
        contestants["LeanRL"] = (peer, 8192, 73728)
    contestants["ppo_continuous"] = (mine, 16384, 147456)
    return contestants | {"simulator": (simulator("HalfCheetah-v4", envs), 8192, 139264)}


def discrete_case(envs, cleanrl):
    """CleanRL's ppo.py, 4 or more environments: 128 steps, 4 minibatches, 4 epochs; only advantages are normalised."""
    flags = {"env_id": "CartPole-v1", "num_envs": envs, "num_steps": 128, "num_minibatches": 4, "update_epochs": 4}
    flags |= {"learning_rate": 2.5e-4, "ent_coef": 0.01, "clip_vloss": True}
    settings = {"n_steps": 128, "batch_size": 32 * envs, "n_epochs": 4, "learning_rate": 2.5e-4, "ent_coef": 0.01}
    long = 73728 if envs < 64 else 401408  # 64 are faster
    contestants = sb3_and_sbx("CartPole-v1", envs, 8192, long, **settings)
    if importlib.util.find_spec("rejax"):
        settings = {"num_steps": 128, "num_minibatches": 4, "num_epochs": 4, "learning_rate": 2.5e-4, "ent_coef": 0.01}
        contestants["rejax"] = (rejax("CartPole-v1", envs, **settings), 131072, 4325376)
    if cleanrl:
        contestants["CleanRL"] = (from_checkout(cleanrl, "cleanrl/ppo.py", **flags), 8192, long)
    mine = ours("ppo_discrete", **flags, norm_obs=False, norm_reward=False, norm_adv=True, target_kl=None)
    return contestants | {
        "ppo_discrete": (mine, 16384, 278528 if envs < 64 else 802816),
        "simulator": (simulator("CartPole-v1", envs), 8192, 278528 if envs < 64 else 802816),
    }


def rlhf_case():
    """The built-in task. A step is an answer: generated, scored, and trained on twice."""
    program = [sys.executable, str(ROOT / "variants" / "ppo_rlhf.py"), "--checkpoint-interval=1000"]
    return {"ppo_rlhf": (lambda answers: [*program, f"--total-episodes={answers}"], 1280, 12800)}


def make_cases(cleanrl=None, leanrl=None):
    """Contestants of each case, with the two numbers of steps that they train for; CleanRL and LeanRL where there is a
    checkout. LeanRL unrolls GAE to compile it, which takes minutes for 256 steps already: not tried with 2,048."""
    mine = (ours("ppo_continuous"), 16000, 146000)
    return {
        "atari-8": atari_case(8, leanrl),
        "atari-128": atari_case(128, leanrl),
        "atari-cpu": atari_cpu_case(cleanrl),
        "continuous-1": continuous_case(1, 2048, cleanrl),
        "continuous-8": continuous_case(8, 256, cleanrl, leanrl),
        "discrete": discrete_case(4, cleanrl),
        "discrete-64": discrete_case(64, cleanrl),
        "processes": processes_case("HalfCheetah-v4", 16000, 306000),
        "processes-humanoid": processes_case("Humanoid-v4", 16000, 86000),
        "rlhf": rlhf_case(),
        "rnn": rnn_case(shared=False),
        "rnn-shared": rnn_case(shared=True),
        "defaults": {"ppo_continuous": mine, "simulator": (simulator("HalfCheetah-v4", 100), 8000, 138000)},
    }


def seconds(command, cache, cpu_time=False):
    """Time of a command, which runs in an empty folder; what it compiles is kept in the folder `cache`."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment |= {"WANDB_MODE": "offline", "TORCHINDUCTOR_CACHE_DIR": cache}  # LeanRL logs to wandb only
    environment |= {"TORCHINDUCTOR_CUDAGRAPH_OR_ERROR": "1"}  # on a GPU ours must not train without graphs unseen

    def now():
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime if cpu_time else time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        start = now()
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{command} failed:\n{done.stderr[-2000:]}")
        return now() - start


def versions_of(python):
    """What a contestant runs on: CleanRL and LeanRL have packages, and so a simulator, of their own."""
    code = f"""import contextlib, platform
from importlib.metadata import PackageNotFoundError, version
print("python", platform.python_version(), end="")
for name in {PACKAGES}:
    with contextlib.suppress(PackageNotFoundError):
        print("", name, version(name), end="")"""
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def measure(case, contestants, repeats, cpu_time=False):
    """A CSV row for each contestant of a case; ratios are this repository's speed to theirs, run by run."""
    singles = {name: [] for name in contestants}
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: f"{folder}/{i}" for i, name in enumerate(contestants)}  # none finds what another has compiled
        firsts = {
            name: seconds(command(short), caches[name], cpu_time) for name, (command, short, _) in contestants.items()
        }
        for repeat in range(repeats):
            for name, (command, short, long) in contestants.items():
                brief, whole = (seconds(command(steps), caches[name], cpu_time) for steps in (short, long))
                speed = (long - short) / (whole - brief)
                singles[name].append((speed, brief - short / speed))
                start = singles[name][-1][1]
                print(f"{case} {repeat + 1}/{repeats} {name}: {speed:,.0f} steps/s, {start:.1f} s to start", flush=True)
    (mine,) = (name for name in contestants if name.startswith("ppo_"))
    rows = []
    for name, runs in singles.items():
        speed, start = (statistics.median(column) for column in zip(*runs))
        first_start = firsts[name] - contestants[name][1] / speed
        ratio = statistics.median(own[0] / other[0] for own, other in zip(singles[mine], runs))
        row = {"case": case, "contestant": name, "steps_per_second": f"{speed:.0f}", "start_seconds": f"{start:.1f}"}
        row |= {"first_start_seconds": f"{first_start:.1f}", "ratio": f"{ratio:.2f}", "repeats": repeats}
        row |= {"single_runs": " ".join(f"{speed:.0f}" for speed, _ in runs)}
        versions = versions_of(contestants[name][0](contestants[name][1])[0])
        rows.append(row | {"versions": f"{machine()['hardware']}; {versions}"})
    return rows


@dataclasses.dataclass
class Args:
    cases: tyro.conf.Positional[tuple[Literal[tuple(make_cases())], ...]]  # what is timed
    repeats: int = 3  # runs of every contestant; fewer than 3: nothing is written
    scale: float = 1.0  # of the numbers of steps, which must stay whole iterations; other than 1: nothing is written
    cleanrl: Path | None = None  # a checkout of CleanRL, with its virtual environment in .venv
    leanrl: Path | None = None  # a checkout of LeanRL, likewise
    before: Path | None = None  # a checkout of an earlier commit: the only other contestant
    cpu_time: bool = False  # with --before: CPU seconds, for a machine with other things to do


def main():
    args = tyro.cli(Args, description=__doc__.split("\n")[0])
    if args.cpu_time and not args.before:
        raise SystemExit("speed.py: error: --cpu-time goes with --before")
    checkouts = [path and path.absolute() for path in (args.cleanrl, args.leanrl)]
    cases = make_cases(*checkouts)
    if args.before:
        cases = {case: beside(args.before.absolute(), cases[case]) for case in args.cases}
    path = RESULTS / "speed.csv"
    written = set() if args.before or args.scale != 1 or args.repeats < 3 else SPEED.keys() & {*args.cases}
    for row in read_csv(path):
        if row["case"] in written and row["contestant"] not in cases[row["case"]]:
            lost = f"{row['contestant']} for {row['case']}"
            raise SystemExit(f"speed.py: error: {path.name} has {lost}: install it, give its path or delete its row")
    for case in args.cases:
        scaled = {name: (run, *(int(n * args.scale) for n in steps)) for name, (run, *steps) in cases[case].items()}
        new = measure(case, scaled, args.repeats, args.cpu_time)
        print("\n".join(table(FIELDS[:-1], [[row[field] for field in FIELDS[:-1]] for row in new])))
        if case in written:
            rows = [row for row in read_csv(path) if row["case"] != case] + new
            write_rows(path, FIELDS, sorted(rows, key=lambda row: row["case"]))


if __name__ == "__main__":
    main()
