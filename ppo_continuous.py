# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.11,<2.14",
#     "gymnasium[mujoco]>=1.4,<2",
#     "mujoco>=3.2,<5",
#     "ale-py>=0.12,<0.13",
#     "numpy>=1.26,<3",
#     "tyro>=1.0,<2",
#     "tensorboard>=2.18,<3",
#     "wandb>=0.22,<1",
#     "tqdm>=4.66,<5",
#     "moviepy>=2.1,<3",
#     "opencv-python-headless>=4.10,<6",
# ]
# ///
"""Proximal Policy Optimization (PPO) for continuous (Box) actions, in one file.

    python ppo_continuous.py --env-id HalfCheetah-v4     # train: logs, episodes.csv and checkpoint.pt go to runs/NAME
    python ppo_continuous.py --resume runs/NAME          # go on after Ctrl-C, a kill or a crash
    python ppo_continuous.py --evaluate runs/NAME        # play episodes with the trained policy
    torchrun --nproc-per-node 4 ppo_continuous.py        # train in four processes, which share the environments

Choices, where implementations of PPO differ:
 1. A truncated episode (time limit) is bootstrapped from the observation it really ended in; a terminated one is not.
 2. Observations are normalised once, when the policy acts on them, and stored normalised: in the first minibatch of an
    iteration the probability ratio is 1, up to rounding. The statistics are part of the agent and its checkpoints.
 3. Rewards are divided by the running standard deviation of the discounted return; that return restarts from 0 after
    every episode (baselines, SB3). Logged returns are raw.
 4. The critic runs after the rollout, over all of it at once, and again before every epoch but the first
    (--recompute-advantages), so that no advantage is more than an epoch old.
 5. Actions are clipped to their bounds for the environment only; log-probabilities are those of the unclipped actions.
 6. The value loss is 0.5 * MSE, unclipped (--clip-vloss clips it); advantages are not normalised unless --norm-adv.
 7. --target-kl ends an update at the first minibatch whose approximate KL exceeds 1.5 times the target, before its
    step (SB3). --desired-kl adapts the learning rate in every minibatch (as rsl_rl does, but with the approximate KL).
    --kl-coef adds the approximate KL to the loss. Adam gives small gradients the same step size as large ones: where
    advantages are almost 0, noise would otherwise move the policy as far as a signal does.
 8. Orthogonal initialisation; Adam with eps 1e-5; one gradient norm over all parameters; a new permutation every epoch.
 9. What carries the results (benchmark/NOTES.md): many environments with short rollouts (100 x 20) whose episodes do
    not all end together (--stagger-envs); a KL limit that binds only where updates are far too large, and a weak pull
    back to the policy that acted (--kl-coef); little noise: a learned standard deviation between exp(-1.5) and
    exp(-0.5), times a factor that falls from 1 to 0 along a cosine (--log-std-min, --log-std-max, --anneal-std).
    README.md has the flags that give CleanRL's settings.

To read the algorithm: Agent, compute_gae, ppo_loss, then train. What lies between serves runs: processes, compilation,
run folders, evaluation.
Shapes: T = num_steps, N = num_envs, B = T * N (batch), M = minibatch size, D = observation size, A = action size.
Siblings: ppo_discrete.py (Discrete actions, images), ppo_rnn.py (memory). `diff` shows what changes there.
"""

import contextlib
import copy
import csv
import dataclasses
import inspect
import itertools
import json
import math
import multiprocessing
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
from operator import itemgetter
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import tyro
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# ========================================================================================================= command line


@dataclasses.dataclass
class Args:  # the comments are what --help prints
    # --- run
    exp_name: str = "ppo_continuous"  # part of the run folder's name, RUNS_DIR/ENV_ID__EXP_NAME__SEED__TIME
    runs_dir: str = "runs"  # where run folders are made
    seed: int = 1  # random seed of networks, policy noise and environments (each environment gets its own)
    torch_deterministic: bool = True  # deterministic cuDNN kernels only; a CPU repeats a seed bit for bit anyway
    device: str = "auto"  # cpu, cuda, cuda:1; auto: cuda for minibatches of 4096 and more, otherwise cpu
    compile: bool = True  # torch.compile: takes 10 s (30 s the first time on a machine), then 2-3 times faster
    checkpoint_interval: int = 10  # iterations between checkpoints; another at the end, on Ctrl-C and SIGTERM
    resume: str | None = None  # run folder to continue; its arguments apply, except those given again
    resume_episodes: bool = True  # --resume plays unfinished episodes again to go on in them; off: new episodes
    evaluate: str | None = None  # run folder whose agent plays, unchanged; takes --eval-*, --seed, --capture-video
    eval_episodes: int = 10  # episodes that --evaluate plays
    eval_deterministic: bool = True  # evaluate with the mean action; off: sample actions as in training
    capture_video: bool = False  # record --evaluate, or an evaluation at every tenth of training, to RUN_DIR/videos
    track: bool = False  # log to Weights & Biases too
    wandb_project_name: str = "ppo"  # project for --track
    wandb_entity: str | None = None  # team for --track; None: your default
    # --- environment
    env_id: str = "HalfCheetah-v4"  # a gymnasium id with Box actions; observations are flattened into a vector
    total_timesteps: int = 1_000_000  # environment steps of the run, rounded down to whole iterations
    num_envs: int = 100  # environments stepped side by side (N)
    stagger_envs: bool = True  # cut one early episode of each (not logged), so that time limits do not coincide
    async_envs: bool = False  # each environment in its own process: worth it if a step takes a millisecond or more
    norm_obs: bool = True  # normalise observations by their running mean and standard deviation, clip to +-10
    norm_reward: bool = True  # divide rewards by the running standard deviation of the discounted return, clip to +-10
    # --- PPO
    num_steps: int = 20  # steps of each environment per iteration (T)
    learning_rate: float = 3e-4  # Adam's learning rate; with --anneal-lr or --desired-kl its initial value
    anneal_lr: bool = True  # lower the learning rate linearly to 0 over the run
    gamma: float = 0.99  # discount factor, 0 to 1
    gae_lambda: float = 0.95  # 0: one-step TD error (low variance); 1: rewards to the rollout's end, then V (low bias)
    num_minibatches: int = 25  # minibatches per epoch; must divide num_envs * num_steps
    update_epochs: int = 10  # passes over the batch of an iteration
    norm_adv: bool = False  # give the advantages of each minibatch mean 0 and standard deviation 1
    recompute_advantages: bool = True  # compute values, advantages and returns again before every epoch but the first
    clip_coef: float = 0.2  # no further gain from a probability ratio outside 1 - clip_coef .. 1 + clip_coef
    anneal_clip: bool = False  # lower the clip ranges of policy and value linearly to 0 over the run
    clip_vloss: bool = False  # value loss: the larger of the error and that of the value clipped to near the old one
    vf_clip_coef: float | None = None  # range of --clip-vloss, in units of the (normalised) return; None: clip_coef
    ent_coef: float = 5e-4  # weight of the entropy bonus
    vf_coef: float = 0.25  # weight of the value loss, which is 0.5 * mean squared error
    kl_coef: float = 0.01  # weight of KL(old, new) in the loss, a pull back to the policy that acted; 0: none
    max_grad_norm: float = 0.5  # upper bound on the norm of the whole gradient; 0: none
    target_kl: float | None = 0.04  # end an update at an approximate KL over 1.5 * target_kl; None: never
    desired_kl: float | None = None  # adapt the learning rate to aim at this KL (try 0.01); --anneal-lr is then off
    log_std_init: float = -0.5  # initial log of the policy's standard deviation, in units of the action
    anneal_std: bool = True  # scale the learned standard deviation by a cosine from 1 to 0 over the run
    state_dependent_std: bool = False  # log_std from the policy network; off: one learned value per action dimension
    log_std_min: float | None = -1.5  # lower bound on the learned log_std, before --anneal-std; None: none
    log_std_max: float | None = -0.5  # upper bound on it, plus max(0, log(largest |action|)); None: none


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
        elif field.type is int:  # 1e6, 64.0
            number = r"(\d+\.\d*|\d+(?:\.\d*)?[eE]\+?\d+)\0"
            line = re.sub(flag + number, lambda m: m[0].replace(m[1], f"{float(m[1]):.17g}"), line)
    return tyro.cli(Args, args=line.split("\0")[:-1], default=default, description=__doc__.split("\n")[0])


def check_args(args):
    """Refuse arguments that cannot work, before anything is created."""
    for field in dataclasses.fields(args):
        value, flag = getattr(args, field.name), "--" + field.name.replace("_", "-")
        if field.name in ("resume", "evaluate") and value == "":  # a shell variable that is not set
            fail(f"{flag} is empty: give a run folder")
        if field.type is int and field.name != "seed" and value < 1:
            fail(f"{flag} must be at least 1, not {value}")
        if field.type is int and value >= 2**63:
            fail(f"{flag} must be below 2**63, not {value}")
        if field.type in (float, float | None) and value is not None and not math.isfinite(value):
            fail(f"{flag} must be a finite number, not {value}")
        if field.name in ("gamma", "gae_lambda") and not 0 <= value <= 1:
            fail(f"{flag} must be between 0 and 1, not {value}")
        not_negative = field.name.endswith(("seed", "_rate", "clip_coef", "kl_coef", "_norm", "_kl"))
        if not_negative and value is not None and value < 0:
            fail(f"{flag} must not be negative, not {value}")
    if args.num_envs % (num_ranks := count_ranks()):
        fail(f"--num-envs {args.num_envs} must be a multiple of the {num_ranks} processes of torchrun")
    if (rank_batch_size := args.num_envs // num_ranks * args.num_steps) % args.num_minibatches:
        of_rank = " of each process" if num_ranks > 1 else ""
        fail(f"--num-minibatches {args.num_minibatches} must divide num_envs * num_steps = {rank_batch_size}{of_rank}")
    if args.log_std_min is not None and args.log_std_init < args.log_std_min:
        fail(f"--log-std-init {args.log_std_init} is below --log-std-min {args.log_std_min}")
    # clamp_log_std may raise this bound by the reach of the actions, unknown before there is an environment.
    if args.log_std_max is not None and args.log_std_init > args.log_std_max:
        fail(f"--log-std-init {args.log_std_init} is above --log-std-max {args.log_std_max}")
    if args.total_timesteps < (batch_size := args.num_envs * args.num_steps):
        fail(f"--total-timesteps {args.total_timesteps} is below num_envs * num_steps = {batch_size}")
    if num_ranks > 1 and args.device.startswith("cuda:"):
        fail(f"--device {args.device} under torchrun: give cuda, of which each process takes one of its own")
    try:
        # In float64, which the statistics need: mps, which has none, is refused here.
        torch.zeros(1, dtype=torch.float64, device="cpu" if args.device == "auto" else args.device).item()
    except (RuntimeError, AssertionError, TypeError) as error:
        fail(f"--device {args.device} cannot be used: {str(error).splitlines()[0]}")


# ========================================================================================================= environments


def quiet_mujoco():
    """Without this mujoco prints a deprecation warning and writes MUJOCO_LOG.TXT for every HalfCheetah it makes."""
    try:
        import mujoco

        mujoco.set_mju_user_warning(lambda text: None if "deprecated" in text else print(text, file=sys.stderr))
    except (ImportError, AttributeError):
        pass


class StaggeredStart(gym.Wrapper):
    """Truncates one episode, after `steps_left` steps. Environments that start together and end only by a time limit
    would otherwise stay in step for ever, and every batch would come from one phase of the episode."""

    steps_left = 0  # counts down; from 0, no cut

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.steps_left -= 1
        if self.steps_left == 0 and not (terminated or truncated):
            return obs, reward, False, True, info | {"cut_by_stagger": True}
        return obs, reward, terminated, truncated, info


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


class Replayable(VectorMember):
    """Can play an unfinished episode again, for --resume to go on in it."""

    origin = None  # of this episode: its seed, or the state of the environment's random numbers when it began
    to_replay = None  # origin and actions of the episode that the next reset plays again, instead of a new one
    replayed_return = 0.0  # the sum of its rewards; NaN if it ended sooner than before

    def reset(self, *, seed=None, options=None):
        self.origin, actions = self.to_replay or (seed, ())
        self.to_replay, self.replayed_return = None, 0.0
        numbers = getattr(self.np_random, "bit_generator", None)
        if isinstance(self.origin, int):
            seed = self.origin
        elif self.origin is not None:
            numbers.state = self.origin
        elif isinstance(numbers, np.random.PCG64):  # gymnasium's; load_checkpoint would refuse the state of others
            self.origin = numbers.state
        obs, info = super().reset(seed=seed, options=options)
        for action in actions:
            obs, reward, terminated, truncated, info = self.step(action)
            self.replayed_return += float(reward)
            if terminated or truncated:
                self.replayed_return = math.nan
                break
        return obs, info


def make_envs(args, num_envs):
    """Vector of num_envs environments. The step that ends an episode returns the first observation of the next one, and
    the last one in infos["final_obs"] (autoreset mode SAME_STEP)."""
    quiet_mujoco()
    # NEXT_STEP, gymnasium's default, puts a step that ignores its action between two episodes.
    same_step = gym.vector.AutoresetMode.SAME_STEP
    options = {"autoreset_mode": same_step}
    if args.async_envs and sys.platform == "linux":
        # Whatever Python's default: forked workers inherit main's signal handlers, and finish the iteration on Ctrl-C.
        options["context"] = "fork"
    make = partial(gym.make_vec, args.env_id, num_envs, "async" if args.async_envs else "sync", vector_kwargs=options)
    try:
        envs = make(wrappers=[StaggeredStart, Replayable])
        obs_space = envs.single_observation_space
        # Only where observations are not vectors already: FlattenObservation costs time in every step.
        if not isinstance(obs_space, gym.spaces.Box) or len(obs_space.shape) != 1:
            envs.close()
            envs = make(wrappers=[StaggeredStart, Replayable, gym.wrappers.FlattenObservation])
    except (gym.error.Error, ImportError, NotImplementedError, TypeError, ValueError) as error:
        fail(f"--env-id {args.env_id}: {error}")
    if envs.metadata["autoreset_mode"] != same_step:
        fail(f"{args.env_id} has no autoreset mode SAME_STEP: its final observations would be lost")
    if not isinstance(envs.single_observation_space, gym.spaces.Box):
        fail(f"{args.env_id} has observations that cannot be flattened into a vector of one size")
    if not isinstance(envs.single_action_space, gym.spaces.Box) or envs.single_action_space.dtype.kind != "f":
        kind = type(envs.single_action_space).__name__
        hint = "use ppo_discrete.py" if "Discrete" in kind else "a Box of real numbers is needed"
        fail(f"{args.env_id} has {kind} actions: {hint}")
    return envs


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


def layer_init(layer, gain=2**0.5):  # gains of baselines: sqrt(2), 1 for the value, 0.01 for the policy
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(input_size, output_size, gain):
    # Two tanh layers of 64, as in Schulman et al. (2017).
    hidden = [layer_init(nn.Linear(input_size, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh()]
    return nn.Sequential(*hidden, layer_init(nn.Linear(64, output_size), gain))


class Agent(nn.Module):
    """Actor and critic, without shared layers, and the statistics of observations and returns.

    Methods take observations that `normalize_obs` has normalised, except `predict`, which takes raw ones."""

    def __init__(self, obs_size, action_low, action_high, args):
        super().__init__()
        self.args = args
        action_size = len(action_low)
        self.register_buffer("action_low", torch.as_tensor(action_low))  # (A,)
        self.register_buffer("action_high", torch.as_tensor(action_high))  # (A,)
        self.obs_rms = RunningMeanStd((obs_size,))
        self.return_rms = RunningMeanStd((1,))
        self.register_buffer("log_std_shift", torch.zeros(1))  # log of --anneal-std's factor
        self.critic = mlp(obs_size, 1, gain=1.0)
        # gain 0.01: the mean starts close to 0 everywhere, so that the first policy is the same noise in every state.
        self.actor = mlp(obs_size, 2 * action_size if args.state_dependent_std else action_size, gain=0.01)
        if not args.state_dependent_std:
            self.log_std = nn.Parameter(torch.full((action_size,), float(args.log_std_init)))

    def normalize_obs(self, raw_obs):
        """(..., D) of any number type -> (..., D) float32"""
        if not self.args.norm_obs:
            return raw_obs.float()
        # float64 until the end: means far from 0 would cost float32 its digits. 1e-8 and 10 are those of baselines.
        return ((raw_obs.double() - self.obs_rms.mean) / (self.obs_rms.var + 1e-8).sqrt()).clamp(-10, 10).float()

    def get_value(self, obs):
        """(..., D) -> (...)"""
        return self.critic(obs).squeeze(-1)

    def get_mean_and_log_std(self, obs):
        """(..., D) -> mean (..., A), log_std (..., A)"""
        if self.args.state_dependent_std:
            mean, log_std = self.actor(obs).chunk(2, dim=-1)
            log_std = log_std + self.args.log_std_init
            # Straight-through: a clamp has no gradient outside its bounds, and log_std would never come back.
            log_std = log_std + (self.clamp_log_std(log_std) - log_std).detach()
        else:
            mean = self.actor(obs)
            log_std = self.clamp_log_std(self.log_std).expand_as(mean)
        return mean, log_std + self.log_std_shift

    def clamp_log_std(self, log_std):
        """The learned log_std (..., A), clamped to --log-std-min and --log-std-max. The largest std is scaled by the
        largest |action| where that exceeds 1: noise that is large for a range of 1 is small for one of 3."""
        if self.args.log_std_min is not None:
            log_std = log_std.clamp(min=self.args.log_std_min)
        if self.args.log_std_max is not None:
            reach = torch.max(self.action_high, -self.action_low).clamp(min=1.0)
            reach = reach.where(reach < 1e30, 1.0)  # unbounded: infinity, or the largest float
            log_std = log_std.clamp(max=self.args.log_std_max + reach.log().to(log_std.dtype))
        return log_std

    def get_action_and_value(self, obs, action=None):
        """obs (..., D), action (..., A) or None to sample one -> action (..., A) and log_prob, entropy, value (...).

        The normal distribution is written out: torch.distributions would cost more than these networks do."""
        mean, log_std = self.get_mean_and_log_std(obs)
        if action is None:
            action = mean + log_std.exp() * torch.randn_like(mean)
        z = (action - mean) / log_std.exp()
        log_prob = -(0.5 * z.square() + log_std + 0.5 * math.log(2 * math.pi)).sum(-1)
        # Of the unclipped normal distribution, in nats; a function of log_std alone.
        entropy = (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)
        return action, log_prob, entropy, self.get_value(obs)

    @torch.no_grad()
    def predict(self, raw_obs, deterministic=True):
        """Raw observation(s), flat, (D,) or (N, D) -> action(s) within their bounds, flat, (A,) or (N, A), numpy."""
        raw_obs = np.ascontiguousarray(raw_obs) if isinstance(raw_obs, np.ndarray) else raw_obs  # no negative strides
        obs = self.normalize_obs(torch.as_tensor(raw_obs, device=self.obs_rms.mean.device))
        action = self.get_mean_and_log_std(obs)[0] if deterministic else self.get_action_and_value(obs)[0]
        return action.clamp(self.action_low, self.action_high).to(self.action_low.dtype).cpu().numpy()


# ================================================================================================ advantages and losses


def normalize_rewards(return_rms, discounted_returns, rewards, ended, gamma):
    """rewards (T, N) / standard deviation of the discounted returns up to that step, clipped to +-10 -> (T, N).

    discounted_returns (N,), G_t = r_t + gamma * G_{t-1}, restarts from 0 after an end and carries over to the next
    rollout. It and return_rms are updated here. ended (T, N) bool. As in baselines and SB3: no mean is subtracted."""
    all_returns = torch.empty_like(rewards, dtype=torch.float64)  # (T, N)
    for reward, end, row in zip(rewards, ended, all_returns):
        row.copy_(discounted_returns.mul_(gamma).add_(reward))
        # After the copy: the return with the last reward of an episode counts (SB3).
        discounted_returns.masked_fill_(end, 0.0)
    variances = return_rms.update(all_returns.unsqueeze(-1))  # (T, 1)
    return (rewards / (variances + 1e-8).sqrt()).clamp(-10, 10).to(rewards.dtype)


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


@torch.no_grad()
def estimate_advantages(agent, obs, last_obs, final_obs, rewards, terminations, truncations, gamma, gae_lambda):
    """values, advantages, returns (T, N) of a rollout, by the agent's present critic.

    obs (T, N, ...); last_obs (N, ...) came after the last step; final_obs (E, ...) are the last observations of the E
    truncated episodes, in the order of truncations.nonzero(). With a memory (ppo_rnn.py): features of all these."""
    values = agent.get_value(obs)  # (T, N)
    next_values = torch.cat([values[1:], agent.get_value(last_obs).unsqueeze(0)])  # (T, N)
    # The row after a truncated step is the first of another episode; V(s_{t+1}) is that of the final observation.
    next_values[truncations] = agent.get_value(final_obs)
    return values, *compute_gae(rewards, values, next_values, terminations, truncations, gamma, gae_lambda)


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


def ppo_loss(agent, args, clip_scale, mb_obs, mb_actions, mb_log_probs, mb_values, mb_advantages, mb_returns):
    """Loss of a minibatch, and its metrics by name. clip_scale: the factor of --anneal-clip."""
    _, new_log_probs, entropy, new_values = agent.get_action_and_value(mb_obs, mb_actions)
    log_ratio = new_log_probs - mb_log_probs  # 0 in the first minibatch of an iteration: the agent is still the same
    if args.norm_adv and len(mb_advantages) > 1:  # one sample has no standard deviation
        mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
    clip_coef, vf_clip_coef = clip_scale * args.clip_coef, None
    if args.clip_vloss:
        vf_clip_coef = clip_coef if args.vf_clip_coef is None else clip_scale * args.vf_clip_coef
    policy_loss = clipped_policy_loss(log_ratio, mb_advantages, clip_coef)
    value_loss = clipped_value_loss(new_values, mb_values, mb_returns, vf_clip_coef)
    # Unbiased for KL(old, new), as the mean of -log_ratio is, with less variance; so is its gradient, for --kl-coef.
    approx_kl = (log_ratio.expm1() - log_ratio).mean()  # k3 of http://joschu.net/blog/kl-approx.html, never < 0
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy.mean() + args.kl_coef * approx_kl
    metrics = {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy.mean(),
        "approx_kl": approx_kl,
        "clipfrac": (log_ratio.expm1().abs() > clip_coef).float().mean(),
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
        if script == "ppo_continuous":
            args = Args(**checkpoint["args"])
            agent = Agent(len(state["obs_rms.mean"]), state["action_low"], state["action_high"], args)
            agent.load_state_dict(state)
            return checkpoint | {"args": args, "agent": agent}
    except Exception as error:  # a damaged file can raise anything
        fail(f"{path} is damaged, or of another version: {type(error).__name__}")
    fail(f"{path} is from {script}.py")


def load_agent(run_dir):
    """The trained agent of a run folder, with its statistics: load_agent("runs/NAME").predict(obs) is an action."""
    return load_checkpoint(run_dir)["agent"]


def make_evaluation_env(env_id, draw):
    """One environment; with `draw`, one that has been seen to render."""
    quiet_mujoco()
    try:
        env = gym.wrappers.FlattenObservation(gym.make(env_id, **({"render_mode": "rgb_array"} if draw else {})))
        env.reset()
        if draw:
            env.render()
        return env
    except Exception as error:  # no such environment; no display, no library that draws, nothing to draw
        hint = " to draw for --capture-video (for mujoco try MUJOCO_GL=egl)" if draw else ""
        fail(f"cannot make {env_id}{hint}: {error}")


def evaluate(agent, env_id, episodes, seed, deterministic=True, video_dir=None, name="evaluation", longest=10**5):
    """The returns (episodes,) of whole episodes in a new environment. The agent and its statistics do not change. An
    episode is cut after `longest` steps: without a time limit a deterministic policy may go on for ever."""
    env = make_evaluation_env(env_id, draw=video_dir is not None)
    if video_dir:
        options = {"name_prefix": name, "disable_logger": True, "video_length": min(longest, 10_000)}
        env = gym.wrappers.RecordVideo(env, str(video_dir), lambda episode: True, **options)
    devices = [agent.obs_rms.mean.device] if agent.obs_rms.mean.device.type == "cuda" else []
    with torch.random.fork_rng(devices):  # training's random numbers go on as if there had been no evaluation
        torch.manual_seed(seed)
        episodic_returns = np.zeros(episodes)
        for episode in range(episodes):
            obs, _ = env.reset(seed=seed + episode)
            for _ in range(longest):
                action = agent.predict(obs, deterministic).reshape(env.action_space.shape)
                obs, reward, terminated, truncated, _ = env.step(action)
                episodic_returns[episode] += reward
                if terminated or truncated:
                    break
            else:
                print(f"{env_id}: an episode of the evaluation was cut after {longest} steps", file=sys.stderr)
    env.close()
    return episodic_returns


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


def replay_episodes(envs, unfinished):
    """--resume: play the unfinished episodes of a checkpoint again -> next_obs, infos as they were. next_obs is None
    where that cannot be: no such episodes, one too long to be kept, environments that do not repeat themselves."""
    if unfinished is None:
        return None, {}
    lengths, actions = unfinished["lengths"].tolist(), unfinished["actions"].numpy()  # actions (steps, N, ...)
    if max(lengths) <= len(actions) and None not in unfinished["origins"]:
        envs.reset(seed=unfinished["seeds"])  # for what environments make of their first seed alone
        # Copies: an environment may write into its action.
        played = [actions[len(actions) - length :, n].copy() for n, length in enumerate(lengths)]
        envs.set_attr("to_replay", list(zip(unfinished["origins"], played)))
        next_obs, infos = envs.reset()
        same_returns = np.array_equal(envs.get_attr("replayed_return"), unfinished["returns"])
        if same_returns and np.array_equal(next_obs, unfinished["next_obs"].numpy()):
            return next_obs, infos
    print("the environments cannot be put back to where they were: new episodes")
    return None, {}


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
    B, num_iterations = T * N, args.total_timesteps // (T * args.num_envs)
    auto_device = "cuda" if torch.cuda.is_available() and B // args.num_minibatches >= 4096 else "cpu"
    device = torch.device(auto_device if args.device == "auto" else args.device)
    if num_ranks > 1:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            if device.index >= torch.cuda.device_count():
                fail(f"torchrun started more processes here than there are GPUs ({torch.cuda.device_count()})")
        join_ranks(device)
    torch.set_num_threads(1)  # these networks are too small for more
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.manual_seed(args.seed)

    envs = make_envs(args, N)
    if args.capture_video:
        make_evaluation_env(args.env_id, draw=True).close()
    obs_size, action_space = envs.single_observation_space.shape[0], envs.single_action_space
    agent = Agent(obs_size, action_space.low.reshape(-1), action_space.high.reshape(-1), args).to(device)
    # All parameters become views of one vector: one norm and one Adam step for all, instead of one for every layer.
    # From here on nothing may give them other storage (.to, load_state_dict(assign=True)): they would no longer learn.
    parameters = list(agent.parameters())
    flat_parameters = parameters_to_vector(parameters).detach()
    vector_to_parameters(flat_parameters, parameters)
    flat_parameters.grad = torch.zeros_like(flat_parameters)
    on_cuda = device.type == "cuda"
    lr = torch.tensor(args.learning_rate, device=device)  # a number would be a constant of the compiled step
    optimizer = torch.optim.Adam([flat_parameters], lr, eps=1e-5, foreach=False, capturable=on_cuda)
    adam_step = inspect.unwrap(torch.optim.Adam.step)  # without its hooks, which torch.compile cannot trace
    # A tensor for the same reason. A new schedule in the loop needs one too: compiled, numbers in args are constants.
    clip_scale = torch.ones((), device=device)
    if rank > 0:  # networks begin equal on all ranks; noise and permutations differ
        torch.manual_seed(int(np.random.SeedSequence([args.seed, rank]).generate_state(1)[0]))

    iteration, global_step, seconds_before, unfinished = 0, 0, 0.0, None
    if args.resume:
        fixed = "env_id", "num_envs", "num_steps", "norm_obs", "state_dependent_std", "log_std_init"
        checkpoint = restore_run(args, fixed, agent, optimizer, rank, num_ranks)
        lr = optimizer.param_groups[0]["lr"]  # a new tensor, made by load_state_dict
        iteration, global_step, seconds_before = (checkpoint[key] for key in ("iteration", "global_step", "seconds"))
        same = len(checkpoint["rng_states"]) == num_ranks and checkpoint["args"].seed == args.seed
        if args.resume_episodes and same and iteration < num_iterations:
            unfinished = checkpoint.get("unfinished", [None] * num_ranks)[rank]

    if len(set(gather_from_ranks(iteration))) > 1:
        fail("ranks would begin in different iterations: all machines need the same --runs-dir, on a shared disk")
    if dist.is_initialized():  # the same to the last bit, even from different machines
        talk_to_ranks(dist.broadcast, flat_parameters, 0)

    compiled = make_compiler(args, device)

    @torch.no_grad()
    @compiled
    def act(raw_obs, obs_row, action_row, log_prob_row):
        """raw_obs (N, D) -> actions for the environments (N, A). What the update needs, obs (N, D), action (N, A) and
        log_prob (N,), is written into the given rows of the rollout."""
        if args.norm_obs:
            # Counted before it is normalised, once for each step; final observations are never counted.
            agent.obs_rms.update(raw_obs.unsqueeze(0))
        obs = agent.normalize_obs(raw_obs)
        # Entropy and value are not used: compiled, they are not computed either.
        action, log_prob, _, _ = agent.get_action_and_value(obs)
        obs_row.copy_(obs), action_row.copy_(action), log_prob_row.copy_(log_prob)
        return action.clamp(agent.action_low, agent.action_high).to(agent.action_low.dtype)

    # Not one call with apply_gradient: between them ranks average, and --target-kl decides whether the step is taken.
    @compiled
    def compute_gradient(*minibatch):
        loss, metrics = ppo_loss(agent, args, clip_scale, *minibatch)
        # One vector, as flat_parameters is: ranks average it, Adam takes its step with it.
        return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, parameters)]), metrics

    # On a CPU, scalars become tensors. Otherwise Adam's bias corrections are computed again for every 16 parameters.
    @torch.no_grad()
    @partial(compiled, realize_opcount_threshold=1)
    def apply_gradient(gradient, approx_kl):
        flat_parameters.grad.copy_(gradient)  # torch.compile refuses an assignment here
        if args.max_grad_norm > 0:
            clip_grad_norm_(flat_parameters, args.max_grad_norm, foreach=False)
        if args.desired_kl is not None:
            lr.copy_(adapt_learning_rate(lr, approx_kl, args.desired_kl))
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
    obs = torch.zeros(T, N, obs_size, device=device)
    actions = torch.zeros(T, N, len(agent.action_low), device=device)
    log_probs = torch.zeros(T, N, device=device)
    # Rewards and ends are collected in numpy and go to the device once per rollout.
    step_rewards = np.zeros((T, N), np.float32)
    step_terminations, step_truncations = np.zeros((T, N), bool), np.zeros((T, N), bool)
    discounted_returns = torch.zeros(N, dtype=torch.float64, device=device)
    episode_returns, episode_lengths, no_cuts = np.zeros(N), np.zeros(N, dtype=int), np.zeros(N, bool)

    # A resumed run goes on in its unfinished episodes. A new one, and one that cannot, begins new ones.
    seeds = np.random.SeedSequence([args.seed, global_step]).generate_state(args.num_envs)
    seeds = seeds[rank * N : (rank + 1) * N].tolist()
    if unfinished:  # what is played again counts steps_left down again
        envs.set_attr("steps_left", (unfinished["steps_left"] + unfinished["lengths"]).tolist())
    next_obs, _ = replay_episodes(envs, unfinished)
    action_log = []  # actions of every step since the oldest of the unfinished episodes began, each (N, ...)
    if next_obs is not None:
        seeds, action_log = unfinished["seeds"], list(unfinished["actions"].numpy())
        episode_returns, episode_lengths = unfinished["returns"].numpy(), unfinished["lengths"].numpy()
        discounted_returns.copy_(unfinished["discounted_returns"])
    else:
        # Environment i is cut after (i + 1) / num_envs of the limit: the ends are spread evenly over an episode.
        limit = envs.spec.max_episode_steps if args.stagger_envs else None
        first_ends = np.ceil(np.linspace(0, limit or 0, args.num_envs + 1)[1:]).astype(int)
        envs.set_attr("steps_left", first_ends[rank * N : (rank + 1) * N].tolist())
        next_obs, _ = envs.reset(seed=seeds)
    start_time, start_step = time.time(), global_step
    total, hidden = num_iterations * T * args.num_envs, True if rank > 0 else None  # None: hidden without a terminal
    progress = tqdm(total=total, initial=global_step, unit="step", unit_scale=True, disable=hidden)
    statistics = agent.obs_rms, agent.return_rms

    while iteration < num_iterations:
        iteration += 1
        remaining = 1.0 - (iteration - 1) / num_iterations  # 1 in the first iteration, above 0 in the last
        # In place (fill_), here and below: compiled functions hold these tensors.
        if args.desired_kl is None:
            lr.fill_(args.learning_rate * (remaining if args.anneal_lr else 1.0))
        if args.anneal_clip:
            clip_scale.fill_(remaining)
        # This factor falls from 1 to 0 like cos(pi/2 * progress), progress = 1 - remaining. It is kept out of log_std:
        # Adam and the bounds see only what is learned.
        agent.log_std_shift.fill_(math.log(math.sin(math.pi / 2 * remaining)) if args.anneal_std else 0.0)
        if hasattr(agent, "log_std"):  # beyond its bounds it would get no gradient and stay there
            agent.log_std.data.copy_(agent.clamp_log_std(agent.log_std))

        # -------------------------------------------------------------------------------------------- rollout
        # The statistics are equal on all ranks here; in the rollout each rank updates its own.
        sums_before = [(rms.mean.clone(), rms.sums(rms.mean)) for rms in statistics]
        episodes, final_obs = [], [obs[0, :0]]  # 0 rows: torch.cat needs one tensor at least
        for t in range(T):
            env_actions = act(torch.from_numpy(next_obs).to(device), obs[t], actions[t], log_probs[t]).cpu().numpy()
            env_actions = env_actions.reshape(envs.action_space.shape)
            action_log.append(env_actions.copy())  # an environment may write into its action
            next_obs, reward, terminated, truncated, infos = envs.step(env_actions)
            step_rewards[t], step_terminations[t], step_truncations[t] = reward, terminated, truncated

            global_step += args.num_envs
            episode_returns += reward
            episode_lengths += 1
            if not (np.isfinite(reward).all() and np.isfinite(next_obs).all()):
                fail(
                    f"{args.env_id} gave NaN or infinity in step {global_step}; the last checkpoint, if any, is kept", 1
                )
            if truncated.any():
                raw_final_obs = torch.from_numpy(np.stack(infos["final_obs"][truncated]))
                # Step by step, environment by environment: the order of truncations.nonzero().
                final_obs.append(agent.normalize_obs(raw_final_obs.to(device)))
            for n in np.flatnonzero(terminated | truncated):
                if not infos["final_info"].get("cut_by_stagger", no_cuts)[n]:
                    seconds = seconds_before + time.time() - start_time
                    episodes.append((global_step, episode_returns[n], episode_lengths[n], seconds))
                episode_returns[n] = episode_lengths[n] = 0

        # -------------------------------------------------------------------------------------------- advantages
        steps = (step_rewards, step_terminations, step_truncations)
        rewards, terminations, truncations = (torch.from_numpy(x).to(device) for x in steps)
        if args.norm_reward:
            ended = terminations | truncations
            rewards = normalize_rewards(agent.return_rms, discounted_returns, rewards, ended, args.gamma)
        # For bootstrapping only: the next rollout counts and normalises this observation again.
        last_obs = agent.normalize_obs(torch.from_numpy(next_obs).to(device))
        rollout = (obs, last_obs, torch.cat(final_obs), rewards, terminations, truncations, args.gamma, args.gae_lambda)
        # Not compiled: the number of final observations differs between rollouts.
        values, advantages, returns = estimate_advantages(agent, *rollout)
        # From before the update: explained_variance is that of a critic that has not seen these returns.
        old_values, old_returns = values, returns

        # Only now: normalize_obs above used what this rank itself had seen, as acting did.
        for rms, before in zip(statistics, sums_before):
            rms.pool(*before)

        # -------------------------------------------------------------------------------------------- update
        all_metrics = []
        for epoch in range(args.update_epochs):
            if epoch > 0 and args.recompute_advantages:  # values too: --clip-vloss then stays near the new ones
                values, advantages, returns = estimate_advantages(agent, *rollout)
            # Shuffle the whole flattened batch (b_, B rows), then cut it into minibatches (mb_, M rows).
            permutation = torch.randperm(B).to(device)  # drawn on the CPU: the same one on every device
            b_tensors = [x.flatten(0, 1)[permutation] for x in (obs, actions, log_probs, values, advantages, returns)]
            for minibatch in zip(*(x.split(B // args.num_minibatches) for x in b_tensors)):
                gradient, metrics = compute_gradient(*minibatch)
                if not all_metrics:  # no step yet: the KL is 0, and --desired-kl would follow rounding
                    metrics["approx_kl"].zero_()
                # The KL too: all ranks must stop, or adapt the learning rate, in the same minibatch.
                average_over_ranks(gradient, metrics["approx_kl"])
                all_metrics.append(metrics)
                stop_update = args.target_kl is not None and metrics["approx_kl"].item() > 1.5 * args.target_kl
                if stop_update:  # before this minibatch's step
                    break
                apply_gradient(gradient, metrics["approx_kl"])
            if stop_update:
                break

        # -------------------------------------------------------------------------------------------- log
        scalars = {f"losses/{name}": torch.stack([m[name] for m in all_metrics]).mean() for name in all_metrics[0]}
        scalars["losses/explained_variance"] = explained_variance(old_values, old_returns)
        average_over_ranks(*scalars.values())
        # stop_signals is read once: a signal that comes later waits for the next iteration.
        episodes, stopped_by = zip(*gather_from_ranks((episodes, list(stop_signals))))
        episodes = sorted(itertools.chain(*episodes), key=itemgetter(0))
        stopped_by = list(itertools.chain(*stopped_by))
        saving = iteration % args.checkpoint_interval == 0 or iteration == num_iterations or bool(stopped_by)
        kept = min(episode_lengths.max(), 10**5, 2**25 // env_actions.nbytes)  # at most 10**5 steps and 32 MB
        del action_log[: -max(1, kept)]  # np.stack needs one
        if saving:
            rng_state = torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_cuda else None
            unfinished = None
            if args.resume_episodes:
                unfinished = {
                    "seeds": seeds,
                    "origins": list(envs.get_attr("origin")),
                    "actions": torch.from_numpy(np.stack(action_log)),
                    "next_obs": torch.from_numpy(next_obs),
                    "lengths": torch.from_numpy(episode_lengths),
                    "returns": torch.from_numpy(episode_returns),
                    "discounted_returns": discounted_returns.cpu(),
                    "steps_left": torch.tensor(envs.get_attr("steps_left")),
                }
            rng_states, all_unfinished = zip(*gather_from_ranks((rng_state, unfinished), small=False))
        if rank > 0:  # rank 0 writes for all
            if stopped_by:
                break
            continue
        scalars = {name: value.item() for name, value in scalars.items()}
        # explained_variance is left out: it is NaN where all returns are equal.
        if not all(math.isfinite(scalars[f"losses/{name}"]) for name in all_metrics[0]):
            fail(f"the update of iteration {iteration} gave NaN or infinity; the last checkpoint, if any, is kept", 1)
        scalars["charts/learning_rate"] = lr.item()
        scalars["charts/SPS"] = (global_step - start_step) / (time.time() - start_time)
        # Rounded as in episodes.csv, from which --resume reads them.
        recent_returns.extend(float(f"{episodic_return:.6g}") for _, episodic_return, _, _ in episodes)
        if recent_returns:
            scalars["charts/last_100_return"] = np.mean(recent_returns)
        write_log(run_dir, episodes_file, writer, episodes, scalars, global_step, flush=saving)
        if args.track:
            # wandb takes one value per step: means over the episodes of the iteration.
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
        # After the log: a checkpoint never knows of episodes that are not on disk.
        if saving:
            checkpoint = {
                "script": "ppo_continuous",
                "args": vars(args),
                "agent": agent.state_dict(),
                "optimizer": optimizer.state_dict(),
                "rng_states": list(rng_states),  # one of each rank
                "unfinished": list(all_unfinished),  # episodes, of each rank
                "iteration": iteration,
                "global_step": global_step,
                "seconds": seconds_before + time.time() - start_time,
            }
            save_checkpoint(run_dir, checkpoint)
        if args.capture_video and iteration % math.ceil(num_iterations / 10) == 0:
            videos, name = run_dir / "videos", f"step-{global_step}"
            evaluate(agent, args.env_id, 1, args.seed, args.eval_deterministic, videos, name)
        if stopped_by:
            break

    envs.close()
    progress.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank > 0:
        return agent, None
    writer.close()
    episodes_file.close()
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
    if args.evaluate:
        check_args(args)
        checkpoint = load_checkpoint(args.evaluate)
        agent, args = checkpoint["agent"], parse_args(default=checkpoint["args"])
        takes = ("evaluate", "eval_episodes", "eval_deterministic", "seed", "capture_video")
        for name in vars(args):
            if name not in takes and getattr(args, name) != getattr(checkpoint["args"], name):
                fail(f"--evaluate takes --eval-*, --seed and --capture-video, not --{name.replace('_', '-')}")
        video_dir = Path(args.evaluate, "videos") if args.capture_video else None
        returns = evaluate(agent, args.env_id, args.eval_episodes, args.seed, args.eval_deterministic, video_dir)
        print("returns:", *(f"{episodic_return:.1f}" for episodic_return in returns))
        print(f"mean {returns.mean():.6g}, standard deviation {returns.std():.6g}")
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
    try:
        train(args, stop_signals)
    finally:  # after an error: workers of --async-envs have inherited request_stop and would not end by SIGTERM
        for worker in multiprocessing.active_children():
            worker.kill()
    if count_ranks() > 1:  # without Python's own end, in which a thread of torch.distributed now and then aborts
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
