# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.11,<2.14",
#     "gymnasium[mujoco]>=1.4,<2",
#     "numpy>=1.26,<3",
#     "tyro>=1.0,<2",
#     "tensorboard>=2.18,<3",
#     "wandb>=0.22,<1",
#     "tqdm>=4.66,<5",
#     "jax>=0.6,<0.12",
#     "brax>=0.14.2,<0.15",
# ]
# ///
"""PPO for simulators that run on the device, thousands at once, with the updates of rsl_rl, Google (Brax) and NVIDIA.

    python variants/ppo_gpu_sim.py --env-id brax/ant                      # rsl_rl's update and settings
    python variants/ppo_gpu_sim.py --env-id brax/ant --update google      # those of Brax; or nvidia
    python variants/ppo_gpu_sim.py --env-id my_robot:make_envs            # any simulator of tensors, see VectorEnvs
    python variants/ppo_gpu_sim.py --resume runs/NAME                     # go on; also --evaluate
    python variants/ppo_gpu_sim.py --export runs/NAME                     # the trained actor alone, in one file

--update chooses the defaults of the flags below it (UPDATES). Every one of them can be given by itself, so that a
difference between the systems can be tried alone.

Choices, where these systems differ from each other, and this file from them:
 1. A time-out is bootstrapped from the observation it really ended in (--timeouts exact). rsl_rl adds gamma * V(s_t),
    the value before the step, to the reward (current-value); Brax lets the step teach nothing (masked).
 2. The advantage is GAE's, or, with --advantages brax, reward + gamma * next lambda return - value: one factor lambda
    less. Google computes it, and the returns, anew for every minibatch with the current critic (--recompute-targets);
    NVIDIA once per rollout. The formula printed as NVIDIA's, where the two were compared, is Google's with stored
    values: --update nvidia --advantages brax --norm-adv none.
 3. Advantages are normalised over the rollout (rsl_rl), over a minibatch (NVIDIA), or not at all (Google).
 4. Minibatches are of single steps (rsl_rl), or of whole unrolls of --unroll-length steps (Google, NVIDIA), at whose
    end the critic bootstraps. The permutation is a new one in every epoch; rsl_rl uses one for all of them.
 5. The policy is a normal distribution with a learned standard deviation (itself, not its logarithm: rsl_rl), or
    squashed by tanh with a scale that depends on the state (Google, NVIDIA). --desired-kl adapts the learning rate in
    every minibatch, as rsl_rl does, by the exact KL of the normal distributions, which rsl_rl takes since 5.0.
 6. Observations are normalised with statistics that only move between iterations: in the first minibatch of one, the
    probability ratio is 1, up to rounding. Brax's notebook moves them between acting and learning, and clips to +-5.
 7. The gradients of actor and critic are clipped separately, as in rsl_rl since 4.0; Google and NVIDIA do not clip.
    Networks have torch's default initialisation; Adam has eps 1e-8.
 8. The critic may see more than the actor: observations {"policy": ..., "critic": ...}, as Isaac Lab gives them.
 9. First episodes begin at a random point of their time limit (--stagger-envs), as in rsl_rl's init_at_random_ep_len;
    with Google and NVIDIA all begin at 0. Those that this cuts short teach as others do, and are not logged.

Shapes: T = num_steps, N = num_envs per rank, L = unroll_length (or T), C = T / L * N unrolls side by side,
M = minibatch size in steps, D = size of an observation, P = of the critic's, A = of an action.
Sibling: ppo_continuous.py, whose structure this has. During a rollout only GymEnvs copies anything to the host.
"""

import contextlib
import copy
import csv
import dataclasses
import importlib
import inspect
import itertools
import json
import math
import os
import pickle
import platform
import random
import re
import shutil
import signal
import sys
import time
from collections import deque
from functools import partial
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Literal, Protocol

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# ========================================================================================================= command line


@dataclasses.dataclass
class Args:  # the comments are what --help prints
    # --- run
    exp_name: str = "ppo_gpu_sim"  # part of the run folder's name, RUNS_DIR/ENV_ID__EXP_NAME__SEED__TIME
    runs_dir: str = "runs"  # where run folders are made
    seed: int = 1  # random seed of networks, policy noise and environments
    torch_deterministic: bool = True  # only deterministic cuDNN kernels
    device: str = "auto"  # cpu, cuda, cuda:1; auto: cuda where there is one
    compile: bool = True  # torch.compile: half a minute at the start; off: eager
    checkpoint_interval: int = 10  # iterations between checkpoints; another at the end, on Ctrl-C and SIGTERM
    resume: str | None = None  # run folder to continue; its arguments apply, except those given again
    evaluate: str | None = None  # a run folder: its agent plays, statistics frozen; --eval-*, --seed, --device
    export: str | None = None  # a run folder: writes actor.pt2 there, the actor alone, from raw observation to action
    eval_episodes: int = 128  # episodes of an evaluation, one in each of as many environments
    eval_deterministic: bool = True  # evaluate with the mean action; off: sample actions as in training
    num_evaluations: int = 0  # evenly spread, and one before training, on simulators of their own; evaluations.csv
    track: bool = False  # log to Weights & Biases too
    wandb_project_name: str = "ppo"  # project for --track
    wandb_entity: str | None = None  # team for --track; None: your default
    # --- environment
    env_id: str = "brax/ant"  # brax/NAME; MODULE:FUNCTION that makes VectorEnvs; or a gymnasium id with Box actions
    brax_backend: str = "spring"  # physics of brax/NAME: spring, generalized, positional, mjx
    episode_length: int = 1000  # steps after which an episode of brax/NAME is truncated
    total_timesteps: int = 30_000_000  # environment steps of the run, rounded down to whole iterations
    norm_obs: bool = True  # normalise observations by the mean and standard deviation of earlier rollouts, clip to +-10
    update: Literal["rsl_rl", "google", "nvidia"] = "rsl_rl"  # sets the defaults below; those shown are rsl_rl's
    num_envs: int = 4096  # environments stepped side by side (N)
    stagger_envs: bool = True  # first episodes end early, each at another time; where there is an episode_length_buf
    reward_scale: float = 1.0  # the learner sees rewards times this
    # --- PPO
    num_steps: int = 24  # steps of each environment per iteration (T)
    unroll_length: int | None = None  # minibatches of whole unrolls of so many steps (L); None: of single steps
    learning_rate: float = 1e-3  # Adam's learning rate; with --anneal-lr or --desired-kl its initial value
    anneal_lr: bool = False  # lower the learning rate linearly to 0 over the run
    gamma: float = 0.99  # discount factor, 0 to 1
    gae_lambda: float = 0.95  # 0: one-step TD error (low variance); 1: rewards to the rollout's end (low bias)
    num_minibatches: int = 4  # minibatches per epoch; must divide the steps, or the unrolls, of an iteration
    update_epochs: int = 5  # passes over the batch of an iteration
    timeouts: Literal["exact", "current-value", "masked"] = "exact"  # value of what follows a truncated step
    advantages: Literal["gae", "brax"] = "gae"  # brax: one step to the next lambda return
    recompute_targets: bool = False  # advantages and returns from the current critic in every minibatch (of unrolls)
    norm_adv: Literal["rollout", "minibatch", "none"] = "rollout"  # advantages get mean 0 and deviation 1 over this
    clip_coef: float = 0.2  # nothing is gained by probability ratios beyond 1 - clip_coef .. 1 + clip_coef
    clip_vloss: bool = True  # the larger of the value's error and that of the value clipped to near the old one
    vf_clip_coef: float | None = None  # range of --clip-vloss, in units of the return; None: clip_coef
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 2.0  # weight of the value loss, 0.5 * mean squared error; 2: rsl_rl's 1, which has no 0.5
    max_grad_norm: float = 1.0  # upper bound of the norms of the actor's and the critic's gradient; 0: none
    target_kl: float | None = None  # end an update at a KL over 1.5 * target_kl (read in every minibatch); None: never
    desired_kl: float | None = 0.01  # adapt the learning rate to this KL; None: off
    policy: Literal["normal", "tanh"] = "normal"  # distribution of the actions; tanh: squashed
    init_std: float = 1.0  # standard deviation at the start, --policy normal
    hidden_size: int = 256  # width of the hidden layers of actor and critic
    hidden_layers: int = 3  # number of hidden layers
    activation: Literal["elu", "silu", "tanh"] = "elu"  # between the layers


# What --update changes in the defaults above, which are rsl_rl's. GOOGLE: Brax's notebook training_torch.ipynb.
GOOGLE = {"num_envs": 2048, "num_steps": 80, "unroll_length": 5, "num_minibatches": 32, "update_epochs": 4}
GOOGLE |= {"learning_rate": 3e-4, "desired_kl": None, "gamma": 0.97, "reward_scale": 0.1, "timeouts": "masked"}
GOOGLE |= {"advantages": "brax", "recompute_targets": True, "norm_adv": "none", "clip_coef": 0.3, "clip_vloss": False}
GOOGLE |= {"ent_coef": 0.01, "vf_coef": 0.5, "max_grad_norm": 0.0, "policy": "tanh", "hidden_size": 64}
GOOGLE |= {"hidden_layers": 2, "activation": "silu", "stagger_envs": False}
NVIDIA = GOOGLE | {"advantages": "gae", "recompute_targets": False, "norm_adv": "minibatch"}
UPDATES = {"rsl_rl": {}, "google": GOOGLE, "nvidia": NVIDIA}


def fail(message, code=2):
    """Exit with one line. Code 2: bad input, and nothing has been written; code 1: something broke during the run."""
    print(f"{Path(__file__).name}: error: {message}", file=sys.stderr)
    raise SystemExit(code)


def count_ranks():
    """Number of processes that torchrun has started, each with its share of every batch; 1 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1


def parse_args(argv=None, default=None):
    """Command line -> Args. Takes what `wandb sweep` sends too: --x=True, --x=false, --x False; 1e6 for an integer."""
    # Joined by a character that no word can contain, so that one pattern sees a flag and its value.
    line = "".join(word + "\0" for word in (sys.argv[1:] if argv is None else argv))
    for field in dataclasses.fields(Args):
        flag = r"(?<![^\0])--" + field.name.replace("_", "[-_]") + r"[=\0]"
        if field.type is bool:
            line = re.sub(rf"{flag}(?i:true)\0", f"--{field.name}\0", line)
            line = re.sub(rf"{flag}(?i:false)\0", f"--no-{field.name}\0", line)
        elif field.type in (int, int | None):  # 1e6, 64.0
            number = r"(\d+\.\d*|\d+(?:\.\d*)?[eE]\+?\d+)\0"
            line = re.sub(flag + number, lambda m: m[0].replace(m[1], f"{float(m[1]):.17g}"), line)
    parse = partial(tyro.cli, Args, args=line.split("\0")[:-1], description=__doc__.split("\n")[0])
    args = parse(default=default)
    # Each update has defaults of its own: what the command line says is read once more, on top of them.
    return args if default is not None else parse(default=Args(**UPDATES[args.update]))


def check_args(args):
    """Refuse arguments that cannot work, before anything is created."""
    for field in dataclasses.fields(args):
        value, flag = getattr(args, field.name), "--" + field.name.replace("_", "-")
        if field.name in ("resume", "evaluate", "export") and value == "":  # a shell variable that is not set
            fail(f"{flag} is empty: give a run folder")
        if field.type in (int, int | None) and value is not None:
            if field.name not in ("seed", "num_evaluations") and value < 1:
                fail(f"{flag} must be at least 1, not {value}")
            if value >= 2**63:
                fail(f"{flag} must be below 2**63, not {value}")
        if field.type in (float, float | None) and value is not None and not math.isfinite(value):
            fail(f"{flag} must be a finite number, not {value}")
        if field.name in ("gamma", "gae_lambda") and not 0 <= value <= 1:
            fail(f"{flag} must be between 0 and 1, not {value}")
        not_negative = field.name.endswith(("seed", "_evaluations", "_rate", "clip_coef", "_norm", "_kl"))
        if not_negative and value is not None and value < 0:
            fail(f"{flag} must not be negative, not {value}")
    if args.init_std <= 0:
        fail(f"--init-std must be above 0, not {args.init_std}")
    if args.num_envs % (num_ranks := count_ranks()):
        fail(f"--num-envs {args.num_envs} must be a multiple of the {num_ranks} processes of torchrun")
    if args.num_steps % (args.unroll_length or 1):
        fail(f"--unroll-length {args.unroll_length} must divide --num-steps {args.num_steps}")
    pieces = args.num_envs // num_ranks * args.num_steps // (args.unroll_length or 1)
    if pieces % args.num_minibatches:
        kind = "unrolls" if args.unroll_length else "steps"
        fail(f"--num-minibatches {args.num_minibatches} must divide the {pieces} {kind} of an iteration")
    if args.anneal_lr and args.desired_kl is not None:
        fail("--anneal-lr does not go with --desired-kl, which moves the learning rate too: give --desired-kl None")
    if args.recompute_targets and not args.unroll_length:
        fail("--recompute-targets needs minibatches of whole unrolls: give --unroll-length")
    if args.recompute_targets and args.norm_adv == "rollout":
        fail("--recompute-targets does not go with --norm-adv rollout: use minibatch or none")
    if args.recompute_targets and args.timeouts == "exact":
        fail("--recompute-targets does not go with --timeouts exact: use masked or current-value")
    if args.total_timesteps < (batch_size := args.num_envs * args.num_steps):
        fail(f"--total-timesteps {args.total_timesteps} is below num_envs * num_steps = {batch_size}")
    if num_ranks > 1 and args.device.startswith("cuda:"):
        fail(f"--device {args.device} under torchrun: give cuda, of which each process takes one of its own")
    try:
        torch.zeros(1, dtype=torch.float64, device="cpu" if args.device == "auto" else args.device).item()
    except (RuntimeError, AssertionError, TypeError) as error:
        fail(f"--device {args.device} cannot be used: {str(error).splitlines()[0]}")


# ========================================================================================================= environments


class VectorEnvs(Protocol):
    """What this file needs of simulators: gymnasium's vector environment, but of tensors that stay on the device.

    Observations are a tensor (N, D), or {"policy": (N, D), "critic": (N, P)} where the critic sees other things than
    the actor. An environment whose episode has ended starts the next one within the same step, and returns its first
    observation. Environments of Isaac Lab are of this kind: --env-id MODULE:FUNCTION names a function that makes them,
    as function(num_envs, device, seed). Under torchrun all ranks make theirs with the same seed: it is the seed of
    `reset` that differs."""

    num_envs: int
    single_action_space: gym.spaces.Box  # one without bounds is fine with --policy normal

    def reset(self, seed=None):
        """-> observations, infos. For --stagger-envs, which otherwise changes nothing, an environment also has
        max_episode_length and, to be set after a reset, episode_length_buf (N,), the steps of the present episodes."""

    def step(self, actions):
        """actions (N, A) -> observations, rewards (N,), terminations and truncations (N,) bool, infos.

        infos["final_obs"] is, as observations are, what was observed after this very step; it is read where the episode
        was truncated, by --timeouts exact. Isaac Lab does not give it: use --timeouts current-value there."""


class BraxEnvs:
    """Environments of Brax (JAX) on the device. Tensors share the memory of JAX's arrays. As Brax does it, an
    environment starts all its episodes in the state that its first one began with."""

    def __init__(self, name, num_envs, device, backend, episode_length):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take the whole GPU
        try:
            import jax
            from brax import envs
            from brax.envs.wrappers.training import AutoResetWrapper, EpisodeWrapper, VmapWrapper
        except ImportError as error:
            fail(f"--env-id brax/{name} needs Brax and JAX: pip install -r variants/requirements.txt ({error})")

        class KeepFinalObs(envs.Wrapper):
            """Puts the observation aside before AutoResetWrapper replaces it."""

            def reset(self, rng):
                state = self.env.reset(rng)
                state.info["final_obs"] = state.obs
                return state

            def step(self, state, action):
                state = self.env.step(state, action)
                state.info["final_obs"] = state.obs
                return state

        try:
            env = envs.get_environment(name, backend=backend)
        except (KeyError, ValueError, AssertionError) as error:
            fail(f"there is no Brax environment {name!r} with the backend {backend!r}: {type(error).__name__} {error}")
        env = AutoResetWrapper(KeepFinalObs(EpisodeWrapper(VmapWrapper(env), episode_length, action_repeat=1)))
        self.num_envs, self.max_episode_length = num_envs, episode_length
        self.single_action_space = gym.spaces.Box(-1.0, 1.0, (env.action_size,))
        self.jax, self.jit_reset, self.jit_step = jax, jax.jit(env.reset), jax.jit(env.step)
        try:
            self.jax_device = jax.devices("cpu" if device.type == "cpu" else "gpu")[device.index or 0]
        except (RuntimeError, IndexError):  # what pip takes by itself is the JAX for CPUs
            fail(f"JAX does not see the device {device}: pip install 'jax[cuda13]' (or cuda12), or --device cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)  # only its tensors can be handed to JAX

    def reset(self, seed=None):
        keys = self.jax.random.split(self.jax.random.PRNGKey(seed % 2**32), self.num_envs)
        self.state = self.jit_reset(self.jax.device_put(keys, self.jax_device))
        return torch.from_dlpack(self.state.obs), {}

    @property
    def episode_length_buf(self):
        return torch.from_dlpack(self.state.info["steps"])

    @episode_length_buf.setter
    def episode_length_buf(self, steps):
        self.state.info["steps"] = self.jax.dlpack.from_dlpack(steps)

    def step(self, actions):
        self.state = self.jit_step(self.state, self.jax.dlpack.from_dlpack(actions.contiguous()))
        read = self.state.obs, self.state.reward, self.state.done, self.state.info["truncation"]
        obs, rewards, done, truncations = (torch.from_dlpack(x) for x in read)
        truncations = truncations.bool()
        infos = {"final_obs": torch.from_dlpack(self.state.info["final_obs"])}
        return obs, rewards, done.bool() & ~truncations, truncations, infos


class VectorMember(gym.Wrapper):
    """An environment as one of a vector. Final observations are copied: an environment that reuses one array would
    overwrite the last of an episode with the first of the next at the reset. Only infos that a script reads are passed
    on: the vector cannot collect infos that change type or shape, and takes one called final_obs for its own.
    A seed reaches the global generators too, from which some environments draw."""

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed % 2**32)
        obs, info = self.env.reset(seed=seed, options=options)
        return obs, self.select(info)

    def select(self, info):
        return {name: info[name] for name in ("action_mask", "cut_by_stagger") if name in info}

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        info = self.select(info)
        return copy.deepcopy(obs) if terminated or truncated else obs, reward, terminated, truncated, info


class GymEnvs:
    """Vector of gymnasium environments, whose arrays are copied to the device and back in every step."""

    def __init__(self, env_id, num_envs, device):
        same_step = gym.vector.AutoresetMode.SAME_STEP
        make = partial(gym.make_vec, env_id, num_envs, "sync", vector_kwargs={"autoreset_mode": same_step})
        try:
            self.envs = make(wrappers=[VectorMember])
            obs_space = self.envs.single_observation_space
            if not isinstance(obs_space, gym.spaces.Box) or len(obs_space.shape) != 1:
                self.envs.close()
                self.envs = make(wrappers=[VectorMember, gym.wrappers.FlattenObservation])
        except (gym.error.Error, ImportError, NotImplementedError, ValueError) as error:
            fail(f"--env-id {env_id}: {error}")
        if self.envs.metadata["autoreset_mode"] != same_step:
            fail(f"{env_id} has no autoreset mode SAME_STEP: its final observations would be lost")
        if not isinstance(self.envs.single_observation_space, gym.spaces.Box):
            fail(f"{env_id} has observations that cannot be flattened into a vector of one size")
        self.num_envs, self.device = num_envs, device
        self.single_action_space = self.envs.single_action_space

    def tensor(self, x):
        return torch.as_tensor(x, dtype=torch.float32, device=self.device)

    def reset(self, seed=None):
        seeds = np.random.SeedSequence(seed).generate_state(self.num_envs)
        obs, _ = self.envs.reset(seed=seeds.tolist())
        return self.tensor(obs), {}

    def step(self, actions):
        actions = actions.cpu().numpy().astype(self.envs.action_space.dtype).reshape(self.envs.action_space.shape)
        obs, rewards, terminations, truncations, infos = self.envs.step(actions)
        final_obs = obs.copy()
        if "final_obs" in infos:
            final_obs[infos["_final_obs"]] = np.stack(infos["final_obs"][infos["_final_obs"]])
        ends = (torch.from_numpy(x).to(self.device) for x in (terminations, truncations))
        return self.tensor(obs), self.tensor(rewards), *ends, {"final_obs": self.tensor(final_obs)}


def make_envs(args, num_envs, device):
    """VectorEnvs of --env-id."""
    if args.env_id.startswith("brax/"):
        envs = BraxEnvs(args.env_id[5:], num_envs, device, args.brax_backend, args.episode_length)
    elif re.fullmatch(r"[\w.]+:\w+", args.env_id):  # gymnasium's own MODULE:NAME-v0 has a hyphen
        module, function = args.env_id.split(":")
        sys.path.append(os.getcwd())
        try:
            make = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            fail(f"--env-id {args.env_id}, MODULE:FUNCTION: {error}")
        envs = make(num_envs, device, args.seed)
    else:
        envs = GymEnvs(args.env_id, num_envs, device)
    space = envs.single_action_space
    if not isinstance(space, gym.spaces.Box) or space.dtype.kind != "f":
        fail(f"{args.env_id} has {type(space).__name__} actions: a Box of real numbers is needed")
    if args.policy == "tanh" and not space.is_bounded():
        fail(f"{args.env_id} has actions without bounds: use --policy normal")
    return envs


def check_envs(env_id, num_envs, of_reset, of_step):
    """Refuse a simulator whose `reset` and `step` do not return what VectorEnvs says."""

    def check(name, x, *, rows_only, dtype=None):
        wanted = f"{'(N,)' if rows_only else '(N, size)'}, N = {num_envs}" + (f", {dtype}" if dtype else "")
        if not isinstance(x, torch.Tensor):
            fail(f"{env_id}: {name} are of type {type(x).__name__}, not a tensor {wanted}")
        if x.dim() != (1 if rows_only else 2) or len(x) != num_envs or dtype not in (None, x.dtype):
            fail(f"{env_id}: {name} are a tensor {tuple(x.shape)}, {x.dtype}, not {wanted}")

    if not (isinstance(of_reset, tuple) and len(of_reset) == 2 and isinstance(of_step, tuple) and len(of_step) == 5):
        names = "observations, infos", "observations, rewards, terminations, truncations, infos"
        fail(f"{env_id} does not return ({names[0]}) from reset and ({names[1]}) from step")
    (first_obs, _), (obs, rewards, terminations, truncations, infos) = of_reset, of_step
    all_obs = {"observations of reset": first_obs, "observations of step": obs}
    if "final_obs" in infos:
        all_obs["final observations"] = infos["final_obs"]
    for name, groups in all_obs.items():
        if isinstance(groups, dict) and "policy" not in groups:
            fail(f'{env_id}: {name} are groups {list(groups)}, without "policy"')
        for x in split_obs(groups):
            if x is not None:
                check(name, x, rows_only=False)
    check("rewards", rewards, rows_only=True)
    check("terminations", terminations, rows_only=True, dtype=torch.bool)
    check("truncations", truncations, rows_only=True, dtype=torch.bool)


def split_obs(obs):
    """Observations of VectorEnvs -> what the actor sees (N, D), what the critic sees (N, P) or None for the same."""
    return (obs["policy"], obs.get("critic")) if isinstance(obs, dict) else (obs, None)


# ================================================================================================================ agent


class RunningMeanStd(nn.Module):
    """Mean and variance of all rows seen so far; buffers, so that state_dict includes them."""

    def __init__(self, shape):
        super().__init__()
        # float64: in float32, a sum over millions of rows would swallow the digits of the next one.
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        # Small, so that the first rows outweigh the mean of 0 and the variance of 1, which are placeholders.
        # Not a scalar: torch.compile (2.13, CPU) silently drops in-place changes of 0-dimensional float64 tensors.
        self.register_buffer("count", torch.tensor([1e-4], dtype=torch.float64))

    def update(self, x):
        """T updates at once, each with N rows: x (T, N, size) of any dtype -> the variance after each, (T, size)"""
        x = x.double()
        center = x.mean((0, 1))  # sums of squares around 0 would lose digits
        x, mean = x - center, self.mean - center
        counts = self.count + x.shape[1] * torch.arange(1, len(x) + 1, device=x.device).unsqueeze(-1)  # (T, 1)
        means = (mean * self.count + x.sum(1).cumsum(0)) / counts  # (T, size)
        squares = (self.var + mean.square()) * self.count + x.square().sum(1).cumsum(0)
        variances = (squares / counts - means.square()).clamp(min=0)  # rounding can give < 0
        self.mean.copy_(center + means[-1])
        self.var.copy_(variances[-1])
        self.count.copy_(counts[-1])
        return variances

    def sums(self, center):
        """Count, sum and sum of squares of (row - center) over all rows seen, stacked: (3, size)"""
        mean = self.mean - center
        return torch.stack([torch.ones_like(mean), mean, self.var + mean.square()]) * self.count

    def pool(self, center, before):
        """Under torchrun: add what the other ranks saw since all ranks were last equal. center and before: the mean and
        sums(mean) of that time; sums around 0 would lose the digits of the variance."""
        if not dist.is_initialized():
            return
        news = self.sums(center) - before
        average_over_ranks(news)
        counts, sums, squares = before + dist.get_world_size() * news
        mean = sums / counts
        self.count.copy_(counts.flatten()[:1])
        self.mean.copy_(center + mean)
        self.var.copy_((squares / counts - mean.square()).clamp(min=0))


def mlp(input_size, output_size, args):
    activation = {"elu": nn.ELU, "silu": nn.SiLU, "tanh": nn.Tanh}[args.activation]
    sizes = [input_size] + [args.hidden_size] * args.hidden_layers
    hidden = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), activation())]
    return nn.Sequential(*hidden, nn.Linear(sizes[-1], output_size))


class Agent(nn.Module):
    """Actor and critic, without shared layers, and the statistics of what they see.

    Methods take observations that `normalize_obs`, or for the critic `normalize_critic_obs`, has normalised, except
    `predict`, which takes them as they come. critic_obs_size is None where the critic sees what the actor sees."""

    def __init__(self, obs_size, critic_obs_size, action_low, action_high, args):
        super().__init__()
        self.args = args
        action_size = len(action_low)
        self.register_buffer("action_low", torch.as_tensor(action_low, dtype=torch.float32))  # (A,)
        self.register_buffer("action_high", torch.as_tensor(action_high, dtype=torch.float32))  # (A,)
        self.obs_rms = RunningMeanStd((obs_size,))
        self.critic_obs_rms = RunningMeanStd((critic_obs_size,)) if critic_obs_size else None
        self.actor = mlp(obs_size, 2 * action_size if args.policy == "tanh" else action_size, args)
        self.critic = mlp(critic_obs_size or obs_size, 1, args)
        if args.policy == "normal":
            self.std = nn.Parameter(torch.full((action_size,), float(args.init_std)))

    def normalize(self, rms, raw_obs):
        if not self.args.norm_obs:
            return raw_obs.float()
        return ((raw_obs.double() - rms.mean) / (rms.var + 1e-8).sqrt()).clamp(-10, 10).float()

    def normalize_obs(self, raw_obs):
        """(..., D) of any number type -> (..., D) float32"""
        return self.normalize(self.obs_rms, raw_obs)

    def normalize_critic_obs(self, raw_obs):
        """(..., P) of any number type -> (..., P) float32"""
        return self.normalize(self.critic_obs_rms or self.obs_rms, raw_obs)

    def get_value(self, critic_obs):
        """(..., P) -> (...)"""
        return self.critic(critic_obs).squeeze(-1)

    def get_mean_and_std(self, obs):
        """(..., D) -> mean, std (..., A) of the normal distribution, before tanh"""
        if self.args.policy == "normal":
            mean = self.actor(obs)
            return mean, self.std.clamp(1e-6, 1e6).expand_as(mean)  # a step of Adam could take it below 0
        mean, scale = self.actor(obs).chunk(2, dim=-1)
        return mean, F.softplus(scale) + 1e-3

    def get_log_prob_and_entropy(self, mean, std, action):
        """All (..., A) -> (...). action is that before tanh; the entropy of tanh's is estimated from one new sample."""
        log_prob = -(0.5 * ((action - mean) / std).square() + std.log() + 0.5 * math.log(2 * math.pi))
        entropy = std.log() + 0.5 * math.log(2 * math.pi * math.e)
        if self.args.policy == "tanh":
            sample = mean + std * torch.randn_like(mean)
            log_prob, entropy = log_prob - log_tanh_slope(action), entropy + log_tanh_slope(sample)
        return log_prob.sum(-1), entropy.sum(-1)

    def bound(self, action):
        """Action of the policy (..., A) -> action for the environment"""
        if self.args.policy == "tanh":
            return self.action_low + (action.tanh() + 1) / 2 * (self.action_high - self.action_low)
        return action.clamp(self.action_low, self.action_high)

    @torch.no_grad()
    def predict(self, raw_obs, deterministic=True):
        """Raw observations of the actor, (D,) or (N, D) -> action(s) within bounds, (A,) or (N, A), as a tensor"""
        obs = self.normalize_obs(torch.as_tensor(raw_obs, device=self.obs_rms.mean.device))
        mean, std = self.get_mean_and_std(obs)
        return self.bound(mean if deterministic else mean + std * torch.randn_like(mean))


# ================================================================================================ advantages and losses


def log_tanh_slope(x):
    """log(1 - tanh(x)^2), the logarithm of tanh's derivative, finite even where float32 rounds the latter to 0"""
    return 2 * (math.log(2) - x - F.softplus(-2 * x))


def normal_kl(old_mean, old_std, new_mean, new_std):
    """KL(old || new) of normal distributions with independent dimensions, all (..., A) -> (...)"""
    return ((new_std / old_std).log() + (old_std**2 + (old_mean - new_mean) ** 2) / (2 * new_std**2) - 0.5).sum(-1)


def compute_gae(rewards, values, next_values, terminations, truncations, gamma, gae_lambda):
    """Generalized advantage estimation (Schulman et al. 2016). All (T, N) -> advantages, returns (T, N).

    terminations[t] and truncations[t], bool, say whether and how transition t ended its episode; with both set it
    terminated. next_values[t] is the value of the observation that really followed transition t: the final observation
    where the episode was truncated; it may be anything where the episode terminated."""
    # Filled, not multiplied by 0: the value of what follows a terminal state may be NaN.
    next_values = next_values.masked_fill(terminations, 0.0)
    deltas = rewards + gamma * next_values - values  # delta_t = r_t + gamma V(s_{t+1}) - V(s_t)
    # Both kinds of end stop the sum: what comes after belongs to the next episode.
    decays = (gamma * gae_lambda) * (~(terminations | truncations)).to(deltas.dtype)
    advantages = deltas.clone()  # A_t = delta_t + gamma lambda A_{t+1}, where the episode goes on
    advantage_rows, decay_rows = advantages.unbind(), decays.unbind()  # views: indexing (T, N) tensors costs more
    for t in reversed(range(len(deltas) - 1)):
        advantage_rows[t].addcmul_(decay_rows[t], advantage_rows[t + 1])
    return advantages, advantages + values  # returns: the TD(lambda) targets of the critic


def estimate_targets(args, rewards, values, last_values, timeout_values, terminations, truncations):
    """advantages, returns (L, C) of unrolls. All (L, C), but last_values (C,), the values of what came after the last
    step. timeout_values: values of what truncated steps really led to; only --timeouts exact reads them."""
    if args.timeouts == "masked":  # such a step was worth what the critic said: no advantage, no error
        rewards = torch.where(truncations, values, rewards)
        timeout_values = torch.zeros_like(values)
    elif args.timeouts == "current-value":
        timeout_values = values
    next_values = torch.cat([values[1:], last_values.unsqueeze(0)])
    next_values = torch.where(truncations, timeout_values, next_values)
    advantages, returns = compute_gae(
        rewards, values, next_values, terminations, truncations, args.gamma, args.gae_lambda
    )
    if args.advantages == "brax":  # r_t + gamma R_{t+1} - V(s_t), where R is V after a time-out and the last step
        next_returns = torch.cat([returns[1:], last_values.unsqueeze(0)])
        next_returns = torch.where(truncations, timeout_values, next_returns).masked_fill(terminations, 0.0)
        advantages = rewards + args.gamma * next_returns - values
    return advantages, returns


def normalize_advantages(advantages):
    """Mean 0 and standard deviation 1"""
    if advantages.numel() == 1:  # one sample has no standard deviation
        return advantages
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)


def clipped_policy_loss(log_ratio, advantages, clip_coef):
    """Negative clipped surrogate objective (Schulman et al. 2017, eq. 7), the mean over (M,)."""
    ratio = log_ratio.exp()  # pi_new(a|s) / pi_old(a|s)
    # The larger of two losses is the pessimistic one: clipping removes what a step would gain, never what it costs.
    return torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_coef, 1 + clip_coef)).mean()


def clipped_value_loss(new_values, old_values, returns, clip_coef=None):
    """0.5 * mean squared error over (M,). With clip_coef, per sample the larger of the squared error and that of the
    new value clipped to within clip_coef of the old one (baselines)."""
    errors = (new_values - returns).square()
    if clip_coef is not None:
        near_values = old_values + (new_values - old_values).clamp(-clip_coef, clip_coef)
        errors = torch.max(errors, (near_values - returns).square())
    return 0.5 * errors.mean()


def ppo_loss(agent, args, minibatch):
    """Loss of a minibatch, a dictionary of tensors (L, M / L, ...) or (1, M, ...), and its metrics by name."""
    mean, std = agent.get_mean_and_std(minibatch["obs"])
    new_log_probs, entropy = agent.get_log_prob_and_entropy(mean, std, minibatch["actions"])
    log_ratio = new_log_probs - minibatch["log_probs"]  # 0 in the first minibatch of an iteration, up to rounding
    if args.recompute_targets:
        new_values = agent.get_value(torch.cat([minibatch["critic_obs"], minibatch["last_critic_obs"]]))
        new_values, last_values = new_values[:-1], new_values[-1].detach()
        ends = minibatch["terminations"], minibatch["truncations"]
        values = new_values.detach()
        advantages, returns = estimate_targets(args, minibatch["rewards"], values, last_values, None, *ends)
    else:
        new_values = agent.get_value(minibatch["critic_obs"])
        advantages, returns = minibatch["advantages"], minibatch["returns"]
    if args.norm_adv == "minibatch":
        advantages = normalize_advantages(advantages)
    vf_clip_coef = None
    if args.clip_vloss:
        vf_clip_coef = args.clip_coef if args.vf_clip_coef is None else args.vf_clip_coef
    policy_loss = clipped_policy_loss(log_ratio, advantages, args.clip_coef)
    value_loss = clipped_value_loss(new_values, minibatch["values"], returns, vf_clip_coef)
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy.mean()
    metrics = {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy.mean(),
        "approx_kl": (log_ratio.expm1() - log_ratio).mean(),  # k3 of http://joschu.net/blog/kl-approx.html, never < 0
        "kl": normal_kl(minibatch["means"], minibatch["stds"], mean, std).mean(),
        "clipfrac": (log_ratio.expm1().abs() > args.clip_coef).float().mean(),
    }
    return loss, {name: metric.detach() for name, metric in metrics.items()}


def adapt_learning_rate(learning_rate, approx_kl, desired_kl):
    """The new learning rate: / 1.5 above twice the desired KL, * 1.5 below half of it (rsl_rl). A KL of 0, that of the
    first minibatch of an iteration, says nothing and changes nothing. Tensors in and out."""
    # rsl_rl's bounds, so that no streak of minibatches can shut it down or blow it up.
    lower = (learning_rate / 1.5).clamp(min=1e-5)
    higher = (learning_rate * 1.5).clamp(max=1e-2)
    too_small = (approx_kl < desired_kl / 2) & (approx_kl > 1e-9)
    return torch.where(approx_kl > 2 * desired_kl, lower, torch.where(too_small, higher, learning_rate))


def explained_variance(values, returns):
    """1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for a constant; NaN for equal returns."""
    variance = returns.var(correction=0)
    return torch.where(variance > 0, 1 - (returns - values).var(correction=0) / variance, torch.nan)


# ========================================================================================= several processes (torchrun)


class SharedMemory:
    """Exchange between ranks that compute on the CPU of one machine: averaging the gradient of a small network takes
    0.05 ms, and 1.5 ms with gloo, whose threads have to wake each other.

    Every rank writes its message into its own row, then the message's number into `numbers`, and waits until all have
    done so. Two sets of rows are used in turn: a rank that has read all may write its next message while another still
    reads this one. Needs a processor whose stores are seen in program order, as those of x86 are."""

    row_bytes = 2**26  # longer messages go through gloo; pages are only allocated when they are written to

    @staticmethod
    def is_possible(device):
        one_machine = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
        return device.type == "cpu" and one_machine and sys.platform == "linux" and platform.machine() == "x86_64"

    def __init__(self, store, rank, num_ranks):
        self.rank, self.number = rank, 0
        if rank == 0:
            self.file = os.memfd_create("ppo")  # a file without a name, gone with the last process that has it
            os.ftruncate(self.file, 4096 * num_ranks + 2 * num_ranks * self.row_bytes)
            store.set("shared memory", f"/proc/{os.getpid()}/fd/{self.file}")
        path = store.get("shared memory").decode()
        self.numbers, self.processes = np.asarray(np.memmap(path, np.int64, "r+", shape=(2, num_ranks)))
        rows = np.memmap(path, np.uint8, "r+", offset=4096 * num_ranks, shape=(2, num_ranks, self.row_bytes))
        self.rows = np.asarray(rows)
        self.processes[rank] = os.getpid()
        dist.barrier()

    def exchange(self, *message):
        """message: arrays of one dtype, M elements in all -> (num_ranks, at least M): row k begins with the message of
        rank k."""
        self.number += 1
        rows = self.rows[self.number % 2].view(message[0].dtype)
        np.concatenate(message, out=rows[self.rank, : sum(x.size for x in message)], casting="no")
        self.numbers[self.rank] = self.number
        for tries in itertools.count(1):
            if self.numbers.min() >= self.number:
                return rows
            os.sched_yield()
            if tries % 2**18 == 0:
                for process in self.processes:
                    os.kill(process, 0)  # ProcessLookupError if it has ended


shared_memory = None  # a SharedMemory, where join_ranks can make one


def join_ranks(device):
    """Meet the other processes (ranks) of torchrun: gloo on CPU, NCCL on CUDA."""
    global shared_memory
    store, rank, num_ranks = next(dist.rendezvous("env://"))
    # After a restart by torchrun, the store still has the addresses of the dead processes (pytorch/pytorch#135712).
    store = dist.PrefixStore("restart " + os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)
    if SharedMemory.is_possible(device):
        shared_memory = SharedMemory(store, rank, num_ranks)


def talk_to_ranks(collective, *arguments):
    """Call what waits for other ranks; if one of them has died, exit with one line."""
    try:
        return collective(*arguments)
    except (RuntimeError, ProcessLookupError) as error:
        fail(f"another rank of torchrun has ended: {str(error).splitlines()[0]}", code=1)


def average_over_ranks(*tensors):
    """Under torchrun: replace tensors of one dtype, in place, by their means over all ranks. Otherwise do nothing."""
    if not dist.is_initialized():
        return
    if shared_memory and sum(x.nbytes for x in tensors) <= shared_memory.row_bytes:
        arrays, start = [x.view(-1).numpy() for x in tensors], 0
        rows = talk_to_ranks(shared_memory.exchange, *arrays)
        for array in arrays:
            np.divide(rows[:, start : start + array.size].sum(0), len(rows), out=array)
            start += array.size
    else:
        message = torch.cat([x.flatten() for x in tensors])
        talk_to_ranks(dist.all_reduce, message)
        message /= dist.get_world_size()
        for x, part in zip(tensors, message.split([x.numel() for x in tensors])):
            x.copy_(part.view_as(x))


def gather_from_ranks(value, small=True):
    """Under torchrun: a list of the values of all ranks. Otherwise [value]. small: sure to fit into shared memory."""
    if not dist.is_initialized():
        return [value]
    if shared_memory and small:
        message = np.frombuffer(pickle.dumps(value), np.uint8)
        return [pickle.loads(row) for row in talk_to_ranks(shared_memory.exchange, message)]
    values = [None] * dist.get_world_size()
    talk_to_ranks(dist.all_gather_object, values, value)
    return values


# ================================================================================= compilation, run folders, evaluation


def make_compiler(args, device):
    """torch.compile as a decorator; one that changes nothing without --compile or where compiling does not work.

    A function is compiled at its first call. From then on, numbers it closes over are constants and tensors may only
    change in place: torch's guards, which would check this at every call, cost as much as these networks. Arguments of
    another shape are still an error. more_on_cpu: further options of torch.compile, for CPUs only."""
    options = {"fallback_random": True}  # the random numbers of eager mode
    options["cpp_wrapper"] = device.type == "cpu"  # C++ in place of Python between the kernels
    torch._dynamo.config.trace_autograd_ops = True  # allows torch.autograd.grad in compiled functions
    torch._dynamo.config.enable_aot_compile = True  # off by default in torch 2.11

    def compiled(function, **more_on_cpu):
        more = more_on_cpu if device.type == "cpu" else {}
        program = None

        def call(*arguments):
            nonlocal program
            if program is None:
                whole = torch.compile(function, fullgraph=True, dynamic=False, options=options | more)
                program = whole.aot_compile((arguments, {}))
                program.disable_guard_check()
            return program(*arguments)

        return call

    if args.compile:
        try:
            compiled(lambda x: x + 1)(torch.zeros(8, device=device))
            return compiled
        except Exception as error:  # most often there is no C++ compiler
            what = f"{type(error).__name__}: {str(error).strip()[:200]}"
            print(f"--compile does not work here, going on without it: {what}", file=sys.stderr)
    return lambda function, **more_on_cpu: function


def run_name(args):
    """How the name of a run's folder begins: all but its time."""
    return re.sub(r"[^\w.-]", "-", f"{args.env_id}__{args.exp_name}__{args.seed}__")


def make_run_dir(args):
    """A new folder for the run, with a copy of this script."""
    try:
        Path(args.runs_dir).mkdir(parents=True, exist_ok=True)
        while True:
            name = f"{run_name(args)}{time.time():.3f}"
            with contextlib.suppress(FileExistsError):  # another run began in this millisecond
                Path(args.runs_dir, name).mkdir()
                break
        shutil.copy(__file__, Path(args.runs_dir, name))  # the code that made these results
    except OSError as error:
        fail(f"cannot make a run folder in --runs-dir {args.runs_dir}: {error}")
    return Path(args.runs_dir, name)


def find_last_run(args):
    """The run folder that a restart by torchrun continues: the newest with this environment, name and seed, if it has a
    checkpoint, the same arguments, and steps left to do; otherwise None."""
    path = max(Path(args.runs_dir).glob(f"{run_name(args)}*"), default=None)
    if path is None or not (path / "checkpoint.pt").is_file():
        return None
    checkpoint, batch_size = load_checkpoint(path), args.num_envs * args.num_steps
    same = dataclasses.replace(checkpoint["args"], resume=None) == args
    return str(path) if same and checkpoint["global_step"] + batch_size <= args.total_timesteps else None


def open_episodes(run_dir, global_step):
    """episodes.csv, open for appending, and its returns; rows a killed run left after its checkpoint are dropped."""
    path, header = run_dir / "episodes.csv", ["global_step", "episodic_return", "episodic_length", "seconds"]
    rows = [row for row in csv.reader(path.open()) if len(row) == 4 and row != header] if path.exists() else []
    rows = [row for row in rows if int(row[0]) <= global_step]
    with open(run_dir / "episodes.tmp", "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header] + rows)
    os.replace(run_dir / "episodes.tmp", path)
    return path.open("a", newline=""), [float(row[1]) for row in rows]


def write_log(run_dir, episodes_file, writer, episodes, scalars, global_step, flush):
    """Append an iteration's episodes and scalars to episodes.csv and TensorBoard. `flush` before a checkpoint: what it
    covers is then on disk, and what comes after it --resume drops."""
    try:
        for step, episodic_return, episodic_length, seconds in episodes:
            row = step, f"{episodic_return:.6g}", episodic_length, f"{seconds:.2f}"
            csv.writer(episodes_file, lineterminator="\n").writerow(row)
            writer.add_scalar("charts/episodic_return", episodic_return, step)
            writer.add_scalar("charts/episodic_length", episodic_length, step)
        for name, value in scalars.items():
            writer.add_scalar(name, value, global_step)
        episodes_file.flush()
        if flush:
            writer.flush()
    except OSError as error:
        fail(f"cannot write into {run_dir}; the last checkpoint, if any, is kept: {error}", code=1)


def save_checkpoint(run_dir, checkpoint):
    """Replace checkpoint.pt atomically: a kill or a full disk leaves the new one or the one before, whole."""
    try:
        torch.save(checkpoint, run_dir / "checkpoint.tmp")
        os.replace(run_dir / "checkpoint.tmp", run_dir / "checkpoint.pt")
    except (OSError, RuntimeError) as error:
        fail(f"cannot write a checkpoint into {run_dir}, the one before is kept: {error}", code=1)


def load_checkpoint(run_dir):
    """The checkpoint of a run folder, on the CPU, with "args" as Args and "agent" as the trained Agent. Only tensors
    and plain values are read: no code in it can run."""
    path = Path(run_dir, "checkpoint.pt")
    if not path.is_file():
        fail(f"there is no {path}: give a run folder")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        script, state = str(checkpoint["script"]), checkpoint["agent"]
        if script == "ppo_gpu_sim":
            args = Args(**checkpoint["args"])
            critic_obs_size = len(state["critic_obs_rms.mean"]) if "critic_obs_rms.mean" in state else None
            sizes = len(state["obs_rms.mean"]), critic_obs_size
            agent = Agent(*sizes, state["action_low"], state["action_high"], args)
            agent.load_state_dict(state)
            return checkpoint | {"args": args, "agent": agent}
    except Exception as error:  # a damaged file can raise anything
        fail(f"{path} is damaged, or of another version: {type(error).__name__}")
    fail(f"{path} is from {script}.py")


def load_agent(run_dir):
    """The trained agent of a run folder, with its statistics: load_agent("runs/NAME").predict(obs) is an action."""
    return load_checkpoint(run_dir)["agent"]


def export_actor(run_dir):
    """Write RUN_DIR/actor.pt2: torch.export.load(path).module()(raw_obs), (N, D) float32, is an action (N, A), on the
    CPU (torch.export.passes.move_to_device_pass(program, "cuda") moves it). It needs no code of this file and has no
    critic, so what only the critic sees is not needed."""

    class Actor(nn.Module):
        def __init__(self, agent):
            super().__init__()
            self.agent = agent

        def forward(self, raw_obs):
            return self.agent.bound(self.agent.get_mean_and_std(self.agent.normalize_obs(raw_obs))[0])

    agent = load_agent(run_dir)
    agent.critic = agent.critic_obs_rms = None
    example = torch.zeros(2, len(agent.obs_rms.mean))
    rows = torch.export.Dim("N", min=1)
    program = torch.export.export(Actor(agent), (example,), dynamic_shapes=({0: rows},))
    torch.export.save(program, Path(run_dir, "actor.pt2"))
    return Path(run_dir, "actor.pt2")


@torch.no_grad()
def evaluate(agent, envs, seed, deterministic=True, longest=10**5):
    """Returns (N,) of the first episode of each environment. The agent stays as it is, statistics included. Episodes
    are cut after `longest` steps: without a time limit they may go on for ever."""
    devices = [agent.obs_rms.mean.device] if agent.obs_rms.mean.device.type == "cuda" else []
    with torch.random.fork_rng(devices):  # training's random numbers go on as if there had been no evaluation
        torch.manual_seed(seed)
        obs, _ = envs.reset(seed=seed)
        running = torch.ones(envs.num_envs, dtype=torch.bool, device=agent.obs_rms.mean.device)
        episodic_returns = torch.zeros(envs.num_envs, device=agent.obs_rms.mean.device)
        for t in range(1, longest + 1):
            obs, rewards, terminations, truncations, _ = envs.step(agent.predict(split_obs(obs)[0], deterministic))
            episodic_returns = episodic_returns + torch.where(running, rewards, 0.0)  # what comes later may be NaN
            running &= ~(terminations | truncations)
            if t % 50 == 0 and not running.any():  # not in every step: asking waits for the device
                break
        if running.any():
            cut = int(running.sum())
            print(f"{cut} episodes of the evaluation were cut after {longest} steps", file=sys.stderr)
        return episodic_returns.cpu().numpy()


def restore_run(args, fixed, agent, optimizer, rank, num_ranks):
    """--resume: give agent, optimizer and random numbers the state of the checkpoint; return it. fixed: names of the
    arguments that cannot change."""
    checkpoint = load_checkpoint(args.resume)
    for name in fixed:
        old, new = getattr(checkpoint["args"], name), getattr(args, name)
        if old != new:
            fail(f"--{name.replace('_', '-')} {new}: {args.resume} began with {old}, which cannot change")
    state = checkpoint["agent"].state_dict()
    for name, tensor in agent.state_dict().items():
        if name.startswith("action_") and not (name in state and torch.equal(state[name], tensor.cpu())):
            fail(f"{args.env_id} has other actions now than when {args.resume} began")
        if name.endswith("obs_rms.mean") and not (name in state and state[name].shape == tensor.shape):
            fail(f"{args.env_id} has other observations now than when {args.resume} began")
    agent.load_state_dict(state)
    lr = optimizer.param_groups[0]["lr"]
    (group,) = checkpoint["optimizer"]["param_groups"]
    if args.learning_rate == checkpoint["args"].learning_rate:  # otherwise --desired-kl goes on from the new one
        lr.copy_(group["lr"])
    group |= {"capturable": lr.is_cuda, "lr": lr}  # the checkpoint may be from another device
    optimizer.load_state_dict(checkpoint["optimizer"])
    if len(checkpoint["rng_states"]) == num_ranks:
        rng_state, cuda_rng_state = checkpoint["rng_states"][rank]
        torch.set_rng_state(rng_state)
        if lr.is_cuda and cuda_rng_state is not None:
            torch.cuda.set_rng_state(cuda_rng_state, lr.device)
    elif rank == 0:
        ranks = len(checkpoint["rng_states"])
        print(f"{args.resume} was of {ranks} ranks, not {num_ranks}: new random numbers, new episodes")
    return checkpoint


# ============================================================================================================= training


def train(args, stop_signals=()):
    """Train an agent; return it and its run folder (None on ranks above 0). Bad input: one line, then SystemExit.

    stop_signals: a list to which signal handlers append. Once it is not empty, the iteration under way is the last: it
    is finished and saved."""
    # ------------------------------------------------------------------------------------------------ setup
    check_args(args)
    num_ranks = count_ranks()
    rank = int(os.environ["RANK"]) if num_ranks > 1 else 0
    T, N = args.num_steps, args.num_envs // num_ranks
    L = args.unroll_length or T
    num_iterations = args.total_timesteps // (T * args.num_envs)
    auto_device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(auto_device if args.device == "auto" else args.device)
    if num_ranks > 1:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            if device.index >= torch.cuda.device_count():
                fail(f"torchrun started more processes here than there are GPUs ({torch.cuda.device_count()})")
        join_ranks(device)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.manual_seed(args.seed)

    envs = make_envs(args, N, device)
    eval_envs = make_envs(args, args.eval_episodes, device) if args.num_evaluations and rank == 0 else None
    # A simulator may contain networks: without no_grad their graph would grow from step to step.
    reset, step = torch.no_grad()(envs.reset), torch.no_grad()(envs.step)
    action_space = envs.single_action_space
    of_reset = reset(seed=args.seed)
    zeros = np.clip(0.0, action_space.low, action_space.high).reshape(-1)  # or the nearest within the bounds
    first_action = torch.as_tensor(zeros, dtype=torch.float32, device=device)
    of_step = step(first_action.repeat(N, 1))  # one step, to see what it returns
    check_envs(args.env_id, N, of_reset, of_step)
    sizes = [x if x is None else x.shape[1] for x in split_obs(of_reset[0])]
    if args.timeouts == "exact" and "final_obs" not in of_step[-1]:
        fail(f"{args.env_id} gives no final_obs: use --timeouts current-value (or masked)")
    agent = Agent(*sizes, action_space.low.reshape(-1), action_space.high.reshape(-1), args).to(device)
    # The parameters of actor and critic become views of one vector each: one norm and one Adam step for all its layers.
    critic_parameters = list(agent.critic.parameters())
    actor_parameters = [p for name, p in agent.named_parameters() if not name.startswith("critic.")]
    parameters, flat_parameters = actor_parameters + critic_parameters, []
    for part in (actor_parameters, critic_parameters):
        flat = parameters_to_vector(part).detach()
        vector_to_parameters(flat, part)
        flat.grad = torch.zeros_like(flat)
        flat_parameters.append(flat)
    # A tensor, because a number would be a constant of the compiled step.
    lr, on_cuda = torch.tensor(args.learning_rate, device=device), device.type == "cuda"
    optimizer = torch.optim.Adam(flat_parameters, lr, eps=1e-8, foreach=False, capturable=on_cuda)
    adam_step = inspect.unwrap(torch.optim.Adam.step)  # without its hooks, which torch.compile cannot trace
    if rank > 0:  # networks begin equal on all ranks; noise and permutations differ
        torch.manual_seed(int(np.random.SeedSequence([args.seed, rank]).generate_state(1)[0]))

    iteration, global_step, seconds_before, evaluations = 0, 0, 0.0, []
    if args.resume:
        # --update is one of them: given with --resume it would change none of the other arguments.
        fixed = "env_id", "update", "num_envs", "num_steps", "norm_obs", "init_std"
        fixed += "policy", "hidden_size", "hidden_layers", "activation"
        checkpoint = restore_run(args, fixed, agent, optimizer, rank, num_ranks)
        lr = optimizer.param_groups[0]["lr"]  # a new tensor, made by load_state_dict
        iteration, global_step, seconds_before = (checkpoint[key] for key in ("iteration", "global_step", "seconds"))
        evaluations = checkpoint["evaluations"]

    if dist.is_initialized():  # the same to the last bit, even from different machines
        for flat in flat_parameters:
            talk_to_ranks(dist.broadcast, flat, 0)

    compiled = make_compiler(args, device)

    @torch.no_grad()
    @compiled
    def act(raw_obs):
        """(N, D) -> actions of the policy (N, A), actions for the environments (N, A)"""
        mean, std = agent.get_mean_and_std(agent.normalize_obs(raw_obs))
        action = mean + std * torch.randn_like(mean)
        return action, agent.bound(action)

    @compiled
    def compute_gradients(minibatch):
        loss, metrics = ppo_loss(agent, args, minibatch)
        gradients = [gradient.flatten() for gradient in torch.autograd.grad(loss, parameters)]
        split = len(actor_parameters)
        return torch.cat(gradients[:split]), torch.cat(gradients[split:]), metrics

    # On a CPU, scalars become tensors. Otherwise Adam's bias corrections are computed again for every 16 parameters.
    @torch.no_grad()
    @partial(compiled, realize_opcount_threshold=1)
    def apply_gradients(actor_gradient, critic_gradient, kl):
        for flat, gradient in zip(flat_parameters, (actor_gradient, critic_gradient)):
            flat.grad.copy_(gradient)  # torch.compile refuses an assignment here
            if args.max_grad_norm > 0:
                clip_grad_norm_(flat, args.max_grad_norm, foreach=False)
        if args.desired_kl is not None:
            lr.copy_(adapt_learning_rate(lr, kl, args.desired_kl))
        adam_step(optimizer)

    # All arguments have been checked by now, except the login of --track. From here on the run exists on disk.
    run_dir = None
    if rank == 0:  # the others write nothing
        run_dir = Path(args.resume) if args.resume else make_run_dir(args)
        print(f"{run_dir}: {num_iterations} iterations of {args.num_envs} x {T} steps on {device}", flush=True)
        try:
            if iteration < num_iterations:  # otherwise nothing is done with these arguments
                (run_dir / "args.tmp").write_text(json.dumps(vars(args), indent=2))
                os.replace(run_dir / "args.tmp", run_dir / "args.json")
            episodes_file, earlier_returns = open_episodes(run_dir, global_step)
            # purge_step hides what a killed run logged after its checkpoint.
            writer = SummaryWriter(run_dir, purge_step=global_step + 1)
        except OSError as error:
            fail(f"cannot write into {run_dir}: {error}", code=1)
        recent_returns = deque(earlier_returns, maxlen=100)
        if args.track:
            import wandb

            # The folder's name as the id: a resumed run goes on in the same run of wandb.
            name = run_dir.resolve().name  # Path(".") has none
            run = {"name": name, "id": name, "resume": "allow", "dir": run_dir, "config": vars(args)}
            try:
                wandb.init(project=args.wandb_project_name, entity=args.wandb_entity, **run)
            except wandb.errors.Error as error:
                fail(f"--track: {error}", code=1)

    # ------------------------------------------------------------------------------------------------ storage
    # All on the device; one row of observations more than steps, for what came after the last step.
    raw_obs = torch.zeros(T + 1, N, sizes[0], device=device)
    raw_critic_obs = raw_obs if sizes[1] is None else torch.zeros(T + 1, N, sizes[1], device=device)
    raw_final_obs = torch.zeros_like(raw_critic_obs[:T]) if args.timeouts == "exact" else None
    actions = torch.zeros(T, N, len(agent.action_low), device=device)
    rewards, ended_returns, ended_lengths = torch.zeros(3, T, N, device=device)
    terminations, truncations = torch.zeros(2, T, N, dtype=torch.bool, device=device)
    episode_returns, episode_lengths = torch.zeros(2, N, device=device)

    # A resumed run cannot put its simulators back where they were: it starts new episodes, with another seed.
    env_seed = int(np.random.SeedSequence([args.seed, global_step, rank]).generate_state(1)[0])
    next_obs, next_critic_obs = split_obs(reset(seed=env_seed)[0])
    # Environments that begin together and end by a time limit would stay in step: a rollout would see one phase only.
    begun_late = torch.zeros(N, dtype=torch.bool, device=device)  # whose first episode the time limit ends too soon
    cut_short = torch.zeros(T, N, dtype=torch.bool, device=device)
    if args.stagger_envs and hasattr(envs, "episode_length_buf"):
        envs.episode_length_buf = torch.randint_like(envs.episode_length_buf, int(envs.max_episode_length))
        begun_late.fill_(True)
    start_time, start_step = time.time(), global_step
    progress = {"total": num_iterations * T * args.num_envs, "initial": global_step, "unit": "step", "unit_scale": True}
    progress = tqdm(**progress, disable=None if rank == 0 else True)
    statistics = {agent.obs_rms: raw_obs} | ({agent.critic_obs_rms: raw_critic_obs} if sizes[1] else {})

    def log_evaluation():
        returns = evaluate(agent, eval_envs, args.seed, args.eval_deterministic)
        seconds = seconds_before + time.time() - start_time
        evaluations.append([global_step, *(round(float(x), 2) for x in (returns.mean(), returns.std(), seconds))])
        rows = [["global_step", "mean_return", "std_return", "seconds"], *evaluations]
        with open(run_dir / "evaluations.tmp", "w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
        os.replace(run_dir / "evaluations.tmp", run_dir / "evaluations.csv")

    if eval_envs and not evaluations:
        log_evaluation()
        start_time = time.time()  # SPS leaves it out: it may have compiled the simulator

    while iteration < num_iterations:
        iteration += 1
        if args.desired_kl is None:
            lr.fill_(args.learning_rate * (1.0 - (iteration - 1) / num_iterations if args.anneal_lr else 1.0))

        # -------------------------------------------------------------------------------------------- rollout
        for t in range(T):
            raw_obs[t] = next_obs
            if raw_critic_obs is not raw_obs:
                raw_critic_obs[t] = next_critic_obs
            actions[t], env_actions = act(raw_obs[t])
            obs_groups, rewards[t], terminations[t], truncated, infos = step(env_actions)
            next_obs, next_critic_obs = split_obs(obs_groups)
            truncations[t] = truncated & ~terminations[t]
            if raw_final_obs is not None:
                policy_obs, critic_obs = split_obs(infos["final_obs"])
                raw_final_obs[t] = policy_obs if critic_obs is None else critic_obs  # for the critic only

            episode_returns += rewards[t]
            episode_lengths += 1
            ended = terminations[t] | truncations[t]
            ended_returns[t], ended_lengths[t] = episode_returns, episode_lengths
            cut_short[t] = begun_late & truncations[t]
            begun_late.masked_fill_(ended, False)
            episode_returns.masked_fill_(ended, 0.0)
            episode_lengths.masked_fill_(ended, 0.0)
        raw_obs[T] = next_obs
        if raw_critic_obs is not raw_obs:
            raw_critic_obs[T] = next_critic_obs
        if not all(torch.isfinite(x).all() for x in (rewards, raw_obs, raw_critic_obs)):
            fail(
                f"{args.env_id} gave NaN or infinity in iteration {iteration}; the last checkpoint, if any, is kept", 1
            )

        # -------------------------------------------------------------------------------------------- advantages
        # Weights and statistics are still those of the rollout: one pass over all steps, in place of one in each.
        with torch.no_grad():
            obs, critic_obs = agent.normalize_obs(raw_obs[:T]), agent.normalize_critic_obs(raw_critic_obs)
            means, stds = agent.get_mean_and_std(obs)
            log_probs, _ = agent.get_log_prob_and_entropy(means, stds, actions)
            values = agent.get_value(critic_obs)
            timeout_values = torch.zeros_like(rewards)
            if raw_final_obs is not None:
                timeout_values[truncations] = agent.get_value(agent.normalize_critic_obs(raw_final_obs[truncations]))
        rollout = {"obs": obs, "critic_obs": critic_obs[:T], "actions": actions, "log_probs": log_probs, "means": means}
        rollout |= {"stds": stds, "values": values[:T], "rewards": rewards * args.reward_scale}
        rollout |= {"terminations": terminations, "truncations": truncations, "timeout_values": timeout_values}
        # (T, N, ...) -> (L, C, ...): unrolls of L steps side by side. Rows L::L are what came after each of them.
        batch = {name: x.unflatten(0, (-1, L)).transpose(0, 1).flatten(1, 2) for name, x in rollout.items()}
        last_values = values[L::L].flatten()
        names = "rewards", "values", "terminations", "truncations", "timeout_values"
        targets = estimate_targets(args, last_values=last_values, **{name: batch[name] for name in names})
        batch["advantages"], batch["returns"] = targets
        if args.norm_adv == "rollout":
            batch["advantages"] = normalize_advantages(batch["advantages"])
        scalars = {"losses/explained_variance": explained_variance(batch["values"], batch["returns"])}
        if args.unroll_length:
            batch["last_critic_obs"] = critic_obs[L::L].flatten(0, 1).unsqueeze(0)
        else:  # single steps: unrolls of length one
            batch = {name: x.flatten(0, 1).unsqueeze(0) for name, x in batch.items()}
        columns = batch["obs"].shape[1]  # C unrolls, or T * N single steps

        # -------------------------------------------------------------------------------------------- update
        all_metrics = []
        for _ in range(args.update_epochs):
            # Shuffle all columns at once, then cut them into minibatches.
            permutation = torch.randperm(columns, device=device)
            parts = [x[:, permutation].split(columns // args.num_minibatches, dim=1) for x in batch.values()]
            for minibatch in zip(*parts):
                *gradients, metrics = compute_gradients(dict(zip(batch, minibatch)))
                if not all_metrics:  # the KL of the policy and itself: rounding must not move the learning rate
                    metrics["kl"].zero_()
                # The KL too: all ranks must stop, or adapt the learning rate, in the same minibatch.
                average_over_ranks(*gradients, metrics["kl"])
                all_metrics.append(metrics)
                stop_update = args.target_kl is not None and metrics["kl"].item() > 1.5 * args.target_kl
                if stop_update:  # before this minibatch's step
                    break
                apply_gradients(*gradients, metrics["kl"])
            if stop_update:
                break

        # The statistics move now, for the next rollout: what was collected and learned from was normalised alike.
        for rms, raw in statistics.items():
            before = rms.mean.clone(), rms.sums(rms.mean)
            rms.update(raw[:T].flatten(0, 1).unsqueeze(0))
            rms.pool(*before)

        # -------------------------------------------------------------------------------------------- log
        scalars |= {f"losses/{name}": torch.stack([m[name] for m in all_metrics]).mean() for name in metrics}
        scalars |= {"charts/learning_rate": lr, "charts/noise_std": stds.mean()}
        average_over_ranks(*scalars.values())
        # stop_signals is read once: a signal that comes later waits for the next iteration.
        rng_state = torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_cuda else None
        seconds = seconds_before + time.time() - start_time
        step_of_end, env_of_end = ((terminations | truncations) & ~cut_short).nonzero(as_tuple=True)
        columns_of_csv = (
            global_step + args.num_envs * (step_of_end + 1),
            ended_returns[step_of_end, env_of_end],
            ended_lengths[step_of_end, env_of_end].long(),
        )
        episodes = [(*row, seconds) for row in zip(*(x.tolist() for x in columns_of_csv))]
        global_step += args.num_envs * T
        episodes, stopped_by, rng_states = zip(*gather_from_ranks((episodes, list(stop_signals), rng_state)))
        episodes = sorted(itertools.chain(*episodes), key=itemgetter(0))
        stopped_by = list(itertools.chain(*stopped_by))
        if rank > 0:  # rank 0 writes for all
            if stopped_by:
                break
            continue
        scalars = {name: value.item() for name, value in scalars.items()}
        if not math.isfinite(sum(value for name, value in scalars.items() if name != "losses/explained_variance")):
            fail(f"the update of iteration {iteration} gave NaN or infinity; the last checkpoint, if any, is kept", 1)
        scalars["charts/SPS"] = (global_step - start_step) / (time.time() - start_time)
        # Evaluations due by now, and before this iteration: evenly spread, the last one after the last iteration.
        due, earlier = (i * args.num_evaluations // num_iterations for i in (iteration, iteration - 1))
        if due > earlier:
            log_evaluation()
            scalars["charts/eval_return"] = evaluations[-1][1]
        # Rounded as in episodes.csv, from which --resume reads them.
        recent_returns.extend(float(f"{episodic_return:.6g}") for _, episodic_return, _, _ in episodes)
        if recent_returns:
            scalars["charts/last_100_return"] = np.mean(recent_returns)
        saving = iteration % args.checkpoint_interval == 0 or iteration == num_iterations or bool(stopped_by)
        write_log(run_dir, episodes_file, writer, episodes, scalars, global_step, flush=saving)
        if args.track:
            if episodes:
                scalars["charts/episodic_return"] = np.mean([episodic_return for _, episodic_return, _, _ in episodes])
                scalars["charts/episodic_length"] = np.mean([episodic_length for _, _, episodic_length, _ in episodes])
            wandb.log(scalars, step=global_step)
        mean_return = scalars.get("charts/last_100_return", math.nan)
        progress.set_postfix_str(f"return {mean_return:.1f}", refresh=False)
        progress.update(T * args.num_envs)
        if progress.disable and iteration % math.ceil(num_iterations / 20) == 0:  # without a terminal: about 20 lines
            sps = scalars["charts/SPS"]
            print(f"step {global_step:>10,}   return {mean_return:10.1f}   {sps:9,.0f} steps/s", flush=True)

        # -------------------------------------------------------------------------------------------- checkpoint
        if saving:
            save_checkpoint(
                run_dir,
                {
                    "script": "ppo_gpu_sim",
                    "args": vars(args),
                    "agent": agent.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "rng_states": list(rng_states),
                    "evaluations": evaluations,
                    "iteration": iteration,
                    "global_step": global_step,
                    "seconds": seconds_before + time.time() - start_time,
                },
            )
        if stopped_by:
            break

    for resource in (progress, *([writer, episodes_file] if rank == 0 else [])):
        resource.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank > 0:
        return agent, None
    if args.track:
        wandb.finish()
    if iteration < num_iterations:
        print(f"stopped; go on with --resume {run_dir}", file=sys.stderr)
        raise SystemExit(128 + stopped_by[0])
    mean_return = np.mean(recent_returns) if recent_returns else math.nan
    print(f"mean return of the last {len(recent_returns)} episodes: {mean_return:.1f}   {run_dir}")
    return agent, run_dir


def main():
    args = parse_args()
    if args.export:
        print(export_actor(args.export))
        return
    if args.evaluate:
        check_args(args)
        checkpoint = load_checkpoint(args.evaluate)
        agent, args = checkpoint["agent"], parse_args(default=checkpoint["args"])
        takes = ("evaluate", "eval_episodes", "eval_deterministic", "seed", "device")
        for name in vars(args):
            if name not in takes and getattr(args, name) != getattr(checkpoint["args"], name):
                fail(f"--evaluate takes --eval-*, --seed and --device, not --{name.replace('_', '-')}")
        check_args(args)  # again: the device may be that of the checkpoint
        auto_device = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(auto_device if args.device == "auto" else args.device)
        envs = make_envs(args, args.eval_episodes, device)
        returns = evaluate(agent.to(device), envs, args.seed, args.eval_deterministic)
        print(f"{len(returns)} episodes: mean {returns.mean():.1f}, standard deviation {returns.std():.1f}")
        return
    # Ctrl-C and SIGTERM (a preempted job) let the iteration finish and be saved; a second one, more than a second
    # later, ends the run at once (a scheduler and a launcher may each send one at the same time).
    stop_signals, times = [], []

    def request_stop(number, frame):
        stop_signals.append(number)
        times.append(time.monotonic())
        if times[-1] - times[0] > 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, request_stop)
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0 and not args.resume:
        args.resume = find_last_run(args)  # restarted by torchrun --max-restarts: a rank had died
    if args.resume:
        args = parse_args(default=dataclasses.replace(load_checkpoint(args.resume)["args"], resume=args.resume))
    train(args, stop_signals)
    if count_ranks() > 1:  # without Python's own end, in which a thread of torch.distributed now and then aborts
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
