# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.11,<3", "gymnasium[mujoco]>=1.2.1,<2", "numpy>=1.26,<3", "tyro>=1.0,<2", "tensorboard>=2.18,<3",
#     "wandb>=0.22,<1", "tqdm>=4.66,<5", "filelock>=3.13,<5", "jax>=0.6,<0.12", "brax>=0.14.2,<0.15",
# ]
# ///
"""Proximal Policy Optimization (PPO) for thousands of simulators on one device, with three update rules, in one file.

    python variants/ppo_gpu_sim.py --env-id brax/ant                     # train with rsl_rl's update and settings
    python variants/ppo_gpu_sim.py --env-id brax/ant --update google     # with those of Brax; or nvidia
    python variants/ppo_gpu_sim.py --env-id my_robot:make_envs           # any simulator of tensors, see VectorEnvs
    python variants/ppo_gpu_sim.py --resume runs/NAME                    # go on; also --evaluate runs/NAME
    python variants/ppo_gpu_sim.py --export runs/NAME                    # write the trained actor alone, actor.pt2
    torchrun --nproc-per-node 2 variants/ppo_gpu_sim.py                  # two processes, half of the environments each

Choices, where rsl_rl, Google (the PyTorch notebook of Brax), NVIDIA and this file differ. Most are flags.
 1. A time-out is bootstrapped from the observation that it ended in (--timeouts exact). rsl_rl takes the value before
    the step (current-value). Brax learns nothing from such a step (masked).
 2. Advantages are GAE's: A_t = delta_t + gamma lambda A_{t+1}. Google's are delta_t + gamma A_{t+1}, where A_{t+1} is
    GAE's (--advantages brax).
 3. Google computes advantages and returns again in every minibatch, by the present critic (--recompute-targets).
 4. rsl_rl normalises advantages over the rollout, NVIDIA over a minibatch, Google not at all (--norm-adv).
 5. rsl_rl's minibatches are of single steps, Google's and NVIDIA's of whole unrolls (--unroll-length), at whose end the
    critic bootstraps. This file shuffles in every epoch, rsl_rl once per iteration.
 6. rsl_rl's policy is normal with a learned standard deviation (itself, not its log). Google's and NVIDIA's is squashed
    by tanh, and its scale depends on the state (--policy tanh).
 7. --desired-kl adapts the learning rate in every minibatch by the exact KL of the normal distributions (rsl_rl 5.0).
 8. The statistics of observations change between iterations only: the probability ratio is 1 in the first minibatch, up
    to rounding. Brax's notebook changes them between acting and learning, and clips to +-5.
 9. The gradients of actor and critic are clipped separately (rsl_rl 4.0). Google and NVIDIA do not clip.
10. The critic may see more than the actor: observations {"policy": ..., "critic": ...}, as Isaac Lab gives them.

In reading order: Args, agent, advantages and losses, train. The services below `train` hold no PPO.
Shapes: T = num_steps, N = environments of this process, L = unroll_length (or T), C = N * T / L unrolls, the columns of
a batch (without --unroll-length N * T steps in one row), M = columns of a minibatch, D = observation of the actor,
P = of the critic, A = action.
Sibling: ../ppo_continuous.py. Functions that both have are the same text.
"""

import contextlib
import dataclasses
import importlib
import inspect
import json
import math
import os
import re
import signal
import sys
import time
from collections import deque
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal, Protocol

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import tyro
from filelock import FileLock, Timeout
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils._pytree import tree_leaves
from torch.utils.tensorboard import SummaryWriter
from tqdm.auto import tqdm

__version__ = "1.0.dev0"


@dataclasses.dataclass
class Args:  # the comments are what --help prints
    # --- run
    exp_name: str = Path(__file__).stem  # part of the run folder's name, RUNS_DIR/ENV_ID__EXP_NAME__SEED__TIME
    runs_dir: str = "runs"  # where run folders are made
    seed: int = 1  # seed of networks, noise and simulators
    device: str = "auto"  # cpu, cuda, cuda:1; auto: cuda where there is one
    compile: bool = True  # torch.compile, which needs a C++ compiler: half a minute at the start, then faster
    checkpoint_interval: int = 10  # iterations between checkpoints; the last iteration is always saved
    resume: str | None = None  # run folder to continue; its arguments apply, except those given again
    evaluate: str | None = None  # run folder whose agent plays --eval-episodes episodes, without learning
    export: str | None = None  # run folder whose actor is written to its actor.pt2: raw observation in, action out
    eval_episodes: int = 128  # environments of an evaluation; each plays one episode, which must come to an end
    eval_deterministic: bool = True  # evaluate with the mean action; off: sample actions as in training
    num_evaluations: int = 0  # evaluations spread over the run, and one before it, to evaluations.csv; 0: none
    track: bool = False  # log to Weights & Biases too
    wandb_project_name: str = "ppo"  # project for --track
    wandb_entity: str | None = None  # team for --track; None: your default
    # --- environment
    env_id: str = "brax/ant"  # brax/NAME; MODULE:FUNCTION that makes VectorEnvs; or a gymnasium id with Box actions
    brax_backend: str = "spring"  # physics of brax/NAME: spring, generalized, positional, mjx
    episode_length: int = 1000  # steps after which an episode of brax/NAME is truncated
    total_timesteps: int = 30_000_000  # environment steps of the run, rounded down to whole iterations
    norm_obs: bool = True  # normalise observations by their running mean and standard deviation, clip to +-10
    update: Literal["rsl_rl", "google", "nvidia"] = "rsl_rl"  # sets the defaults below; those shown are rsl_rl's
    num_envs: int = 4096  # environments stepped side by side (N)
    stagger_envs: bool = True  # begin first episodes at a random step, if the simulator allows it; they are not logged
    reward_scale: float = 1.0  # the learner sees rewards times this; logged returns are raw
    # --- PPO
    num_steps: int = 24  # steps of each environment per iteration (T)
    unroll_length: int | None = None  # minibatches of whole unrolls of so many steps (L); None: of single steps
    learning_rate: float = 1e-3  # Adam's learning rate; with --anneal-lr or --desired-kl its initial value
    anneal_lr: bool = False  # lower the learning rate linearly to 0 over the run; needs --desired-kl None
    gamma: float = 0.99  # discount factor, 0 to 1
    gae_lambda: float = 0.95  # 0: one-step TD error (low variance); 1: rewards to the rollout's end, then V (low bias)
    num_minibatches: int = 4  # minibatches per epoch; must divide the steps, or the unrolls, of an iteration
    update_epochs: int = 5  # passes over the batch of an iteration
    timeouts: Literal["exact", "current-value", "masked"] = "exact"  # next value: V(final obs), V(obs before it), none
    advantages: Literal["gae", "brax"] = "gae"  # brax: reward + gamma * next lambda return - value
    recompute_targets: bool = False  # compute advantages and returns again in every minibatch (of unrolls)
    norm_adv: Literal["rollout", "minibatch", "none"] = "rollout"  # where advantages get mean 0 and deviation 1
    clip_coef: float = 0.2  # the probability ratio is clipped to 1 - clip_coef .. 1 + clip_coef
    clip_vloss: bool = True  # value loss: the larger of the new value's error and that of the clipped new value
    vf_clip_coef: float | None = None  # --clip-vloss: how far a new value may be from the old one; None: clip_coef
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 2.0  # weight of the value loss, 0.5 * mean squared error; 2 here is 1 in rsl_rl, without 0.5
    max_grad_norm: float = 1.0  # upper bound on the norms of the actor's and the critic's gradient; 0: none
    target_kl: float | None = None  # end an update at a KL over 1.5 * target_kl; None: never
    desired_kl: float | None = 0.01  # adapt the learning rate to aim at this KL; None: off
    policy: Literal["normal", "tanh"] = "normal"  # distribution of actions; tanh: squashed into the bounds
    init_std: float = 1.0  # initial standard deviation, --policy normal
    hidden_size: int = 256  # width of the hidden layers of actor and critic
    hidden_layers: int = 3  # number of hidden layers
    activation: Literal["elu", "silu", "tanh"] = "elu"  # between the layers


# Args has the settings of rsl_rl, which itself has --timeouts current-value. Those of Brax's notebook:
GOOGLE = {"num_envs": 2048, "num_steps": 80, "unroll_length": 5, "num_minibatches": 32, "update_epochs": 4}
GOOGLE |= {"learning_rate": 3e-4, "desired_kl": None, "gamma": 0.97, "reward_scale": 0.1, "timeouts": "masked"}
GOOGLE |= {"advantages": "brax", "recompute_targets": True, "norm_adv": "none", "clip_coef": 0.3, "clip_vloss": False}
GOOGLE |= {"vf_coef": 0.5, "max_grad_norm": 0.0, "stagger_envs": False}
GOOGLE |= {"policy": "tanh", "hidden_size": 64, "hidden_layers": 2, "activation": "silu"}
# NVIDIA's text describes this update. A formula in that text differs: --update google --no-recompute-targets.
NVIDIA = GOOGLE | {"advantages": "gae", "recompute_targets": False, "norm_adv": "minibatch"}
UPDATES = {"rsl_rl": {}, "google": GOOGLE, "nvidia": NVIDIA}


# =============================================================================================================== agent


class RunningMeanStd(nn.Module):
    """Mean and variance of all rows seen so far, in buffers: state_dict, and so every checkpoint, has them."""

    def __init__(self, shape):
        super().__init__()
        # float64: in float32, after millions of rows, the next ones would be rounded away.
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        # A tiny prior count: the first batch replaces the initial mean and variance.
        self.register_buffer("count", torch.tensor(1e-4, dtype=torch.float64))

    def update(self, x):
        """Add the rows of x (..., *shape); under torchrun, the rows of all ranks."""
        x = x.double().reshape(-1, *self.mean.shape)
        mean = average_over_ranks(x.mean(0))
        var = average_over_ranks((x - mean).square().mean(0))
        count = len(x) * (dist.get_world_size() if dist.is_initialized() else 1)
        # Merges old and new rows (Chan et al. 1979): the variance within both groups plus that between their means.
        new_share = count / (self.count + count)
        old_share = 1 - new_share
        delta = mean - self.mean
        self.mean += new_share * delta
        self.var.copy_(old_share * self.var + new_share * var + old_share * new_share * delta.square())
        self.count += count


def mlp(input_size, output_size, args):
    # torch's default initialisation, as in all three systems.
    activation = {"elu": nn.ELU, "silu": nn.SiLU, "tanh": nn.Tanh}[args.activation]
    sizes = [input_size] + [args.hidden_size] * args.hidden_layers
    hidden = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), activation())]
    return nn.Sequential(*hidden, nn.Linear(sizes[-1], output_size))


def log_tanh_slope(x):
    """log(1 - tanh(x)^2), the logarithm of tanh's derivative, finite even where float32 rounds the latter to 0"""
    return 2 * (math.log(2) - x - nn.functional.softplus(-2 * x))


class Agent(nn.Module):
    """Actor and critic, which share no layers, and the statistics of what each of them sees.

    `predict` takes raw observations of the actor. All other methods take observations that `normalize` has normalised.
    Nothing that only the critic sees reaches the actor."""

    def __init__(self, obs_size, critic_obs_size, action_low, action_high, args):
        super().__init__()
        self.args = args
        self.register_buffer("action_low", torch.as_tensor(action_low))  # (A,), of the number type of the action space
        self.register_buffer("action_high", torch.as_tensor(action_high))
        action_size = len(action_low)
        self.obs_rms = RunningMeanStd((obs_size,))
        self.critic_obs_rms = RunningMeanStd((critic_obs_size,))
        if args.policy == "normal":
            self.std = nn.Parameter(torch.full((action_size,), float(args.init_std)))
        self.actor = mlp(obs_size, 2 * action_size if args.policy == "tanh" else action_size, args)
        self.critic = mlp(critic_obs_size, 1, args)

    def normalize(self, raw_obs, rms):
        """(..., D) with obs_rms, (..., P) with critic_obs_rms, of any number type -> the same shape, float32"""
        if not self.args.norm_obs:
            return raw_obs.float()
        # float64 until the end: means far from 0 would cost float32 its digits. 1e-8 and 10 are those of baselines.
        return ((raw_obs.double() - rms.mean) / (rms.var + 1e-8).sqrt()).clamp(-10, 10).float()

    def get_value(self, critic_obs):
        """(..., P) -> (...)"""
        return self.critic(critic_obs).squeeze(-1)

    def get_mean_and_std(self, obs):
        """(..., D) -> mean, std (..., A) of the normal distribution, before tanh"""
        if self.args.policy == "normal":
            mean = self.actor(obs)
            return mean, self.std.clamp(1e-6, 1e6).expand_as(mean)  # a step of Adam could take it below 0
        mean, scale = self.actor(obs).chunk(2, dim=-1)
        return mean, nn.functional.softplus(scale) + 1e-3

    def get_log_prob_and_entropy(self, mean, std, action):
        """All (..., A) -> log_prob, entropy (...). With --policy tanh the action is that before tanh, and the entropy
        is an estimate from one new sample, as in Brax: that of the squashed distribution has no formula."""
        log_prob = -(0.5 * ((action - mean) / std).square() + std.log() + 0.5 * math.log(2 * math.pi))
        entropy = std.log() + 0.5 * math.log(2 * math.pi * math.e)
        if self.args.policy == "tanh":
            sample = mean + std * torch.randn_like(mean)
            log_prob, entropy = log_prob - log_tanh_slope(action), entropy + log_tanh_slope(sample)
        return log_prob.sum(-1), entropy.sum(-1)

    def to_env_action(self, action):
        """(..., A) -> (..., A) within the bounds of the action space, in its number type"""
        if self.args.policy == "tanh":
            action = self.action_low + (action.tanh() + 1) / 2 * (self.action_high - self.action_low)
        # Behind tanh too: rounding can pass a bound.
        return action.clamp(self.action_low, self.action_high).to(self.action_low.dtype)

    @torch.no_grad()
    def predict(self, raw_obs, deterministic=True):
        """Raw observations of the actor, (D,) or (N, D) -> action(s) for the environment, (A,) or (N, A), a tensor"""
        raw_obs = torch.as_tensor(raw_obs, device=self.action_low.device)
        mean, std = self.get_mean_and_std(self.normalize(raw_obs, self.obs_rms))
        return self.to_env_action(mean if deterministic else mean + std * torch.randn_like(mean))

    forward = predict  # torch.export asks for this name


# ================================================================================================ advantages and losses


def cut_unrolls(x, L):
    """(T, N, ...) -> (L, C, ...): unrolls of L steps side by side. Column u * N + n is unroll u of environment n."""
    return x.unflatten(0, (-1, L)).transpose(0, 1).flatten(1, 2)


def compute_gae(rewards, values, next_values, terminations, truncations, gamma, gae_lambda):
    """Generalized advantage estimation (Schulman et al. 2016). All (T, N) -> advantages, returns (T, N).

    terminations[t] and truncations[t], bool, say whether and how transition t ended its episode. If both are set, it
    terminated. next_values[t] is the value of the observation after transition t. After a truncation this is the final
    observation of the episode. After a termination next_values[t] is not used."""
    # 0 after a termination, even if next_values is NaN there: NaN * 0 would be NaN.
    next_values = next_values.masked_fill(terminations, 0.0)
    deltas = rewards + gamma * next_values - values  # delta_t = r_t + gamma V(s_{t+1}) - V(s_t)
    # Both kinds of end stop the sum: what comes after belongs to the next episode.
    decays = (gamma * gae_lambda) * (~(terminations | truncations)).to(deltas.dtype)
    advantages = deltas.clone()  # below: A_t = delta_t + gamma lambda A_{t+1}, unless transition t ended the episode
    advantage_rows, decay_rows = advantages.unbind(), decays.unbind()  # views: indexing (T, N) tensors costs more
    for t in reversed(range(len(deltas) - 1)):
        advantage_rows[t].addcmul_(decay_rows[t], advantage_rows[t + 1])
    return advantages, advantages + values  # returns: the TD(lambda) targets of the critic


def estimate_targets(args, rewards, values, last_values, timeout_values, terminations, truncations):
    """advantages, returns (L, C) of unrolls. Inputs are (L, C). last_values (C,): V of the observation after an unroll.
    timeout_values: V of the final observation of a truncated step; only --timeouts exact reads them."""
    if args.timeouts == "current-value":  # rsl_rl: V(s_t) for V(s_{t+1})
        timeout_values = values
    elif args.timeouts == "masked":  # Brax: reward V(s_t), next value 0: no error, no advantage (before --norm-adv)
        rewards = torch.where(truncations, values, rewards)
        timeout_values = torch.zeros_like(values)
    next_values = torch.where(truncations, timeout_values, torch.cat([values[1:], last_values.unsqueeze(0)]))
    ends = terminations, truncations
    advantages, returns = compute_gae(rewards, values, next_values, *ends, args.gamma, args.gae_lambda)
    if args.advantages == "brax":  # r_t + gamma R_{t+1} - V(s_t), R the lambda return, is delta_t + gamma A_{t+1}
        next_returns = torch.where(truncations, timeout_values, torch.cat([returns[1:], last_values.unsqueeze(0)]))
        advantages = rewards + args.gamma * next_returns.masked_fill(terminations, 0.0) - values
    return advantages, returns


def normalize_advantages(advantages):
    """Mean 0 and standard deviation 1, over a rollout (rsl_rl) or a minibatch (NVIDIA)"""
    if advantages.numel() == 1:  # one sample has no standard deviation
        return advantages
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)


def clipped_policy_loss(log_ratio, advantages, clip_coef):
    """Negative clipped surrogate objective (Schulman et al. 2017, eq. 7), the mean over (M,)."""
    ratio = log_ratio.exp()  # pi_new(a|s) / pi_old(a|s)
    # The larger loss is the pessimistic one: clipping caps the gain of a step, never its cost.
    return torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_coef, 1 + clip_coef)).mean()


def clipped_value_loss(new_values, old_values, returns, clip_coef=None):
    """0.5 * mean squared error over (M,). With clip_coef (OpenAI's baselines), the new value is also clipped
    to within clip_coef of the old one. Of the two squared errors the larger counts."""
    errors = (new_values - returns).square()
    if clip_coef is not None:
        near_values = old_values + (new_values - old_values).clamp(-clip_coef, clip_coef)
        errors = torch.max(errors, (near_values - returns).square())
    return 0.5 * errors.mean()


def normal_kl(old_mean, old_std, new_mean, new_std):
    """KL(old || new) of normal distributions with independent dimensions, all (..., A) -> (...)"""
    return ((new_std / old_std).log() + (old_std**2 + (old_mean - new_mean) ** 2) / (2 * new_std**2) - 0.5).sum(-1)


def ppo_loss(agent, args, minibatch):
    """Loss of a minibatch, and its metrics by name. minibatch: {name: tensor}, all (L, M, ...) with --unroll-length,
    otherwise (1, M, ...)."""
    mean, std = agent.get_mean_and_std(minibatch["obs"])
    new_log_probs, entropy = agent.get_log_prob_and_entropy(mean, std, minibatch["actions"])
    log_ratio = new_log_probs - minibatch["log_probs"]  # 0 in the first minibatch of an iteration, up to rounding
    if args.recompute_targets:  # Google: by the critic that this very minibatch trains
        critic_obs = torch.cat([minibatch["critic_obs"], minibatch["last_critic_obs"]])  # (L + 1, M, P)
        new_values = agent.get_value(critic_obs)
        last_values, new_values = new_values[-1].detach(), new_values[:-1]
        ends = minibatch["terminations"], minibatch["truncations"]
        steps = minibatch["rewards"], new_values.detach(), last_values, None, *ends
        advantages, returns = estimate_targets(args, *steps)
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
        # Exact, of the normal distributions. Squashing by tanh does not change it.
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
    """1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for a constant; NaN if returns are equal."""
    variance = returns.var(correction=0)
    return torch.where(variance > 0, 1 - (returns - values).var(correction=0) / variance, torch.nan)


# =============================================================================================================== train


def train(args, stop_signals=()):
    """Train an agent. Returns it and its run folder, which is None on ranks above 0.

    stop_signals: a list that a signal handler appends to. The iteration under way is then the last, and is saved."""
    # --------------------------------------------------------------------------------------------------------- set-up
    rank, num_ranks = 0, 1
    if dist.is_torchelastic_launched():  # by torchrun: this is process `rank` of num_ranks
        rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    check_args(args, num_ranks)
    T, N = args.num_steps, args.num_envs // num_ranks  # this process has N of the environments
    L = args.unroll_length or T
    C = N * T // (args.unroll_length or 1)  # columns of the batch: unrolls, or single steps
    num_iterations = args.total_timesteps // (T * args.num_envs)

    device = start_device(args)
    envs = make_envs(args, N, device)
    eval_envs = make_envs(args, args.eval_episodes, device) if args.num_evaluations and rank == 0 else None
    # A simulator may contain networks: without no_grad their graph would grow from step to step.
    reset, step = torch.no_grad()(envs.reset), torch.no_grad()(envs.step)
    first_obs, _ = reset(seed=args.seed)  # for its sizes; training begins with another seed
    obs_size, critic_obs_size = (x.shape[1] for x in split_obs(first_obs))
    action_space = envs.single_action_space
    torch.manual_seed(args.seed)  # networks start equal on all ranks, whatever simulators drew
    agent = Agent(obs_size, critic_obs_size, action_space.low.flatten(), action_space.high.flatten(), args).to(device)
    # All parameters become views of one vector, the critic's behind the actor's: one Adam step serves all layers.
    # Do not move or replace a parameter from here on (.to, assign=True): Adam would not reach it.
    flat_parameters = parameters_to_vector(agent.parameters()).detach()
    vector_to_parameters(flat_parameters, agent.parameters())
    flat_parameters.grad = torch.zeros_like(flat_parameters)
    average_over_ranks(flat_parameters)  # equal on all ranks: processors may round the first weights differently
    critic_size = sum(parameter.numel() for parameter in agent.critic.parameters())
    # A tensor: torch.compile freezes Python numbers, and the functions below are compiled (see `compiled`).
    lr = torch.tensor(args.learning_rate, device=device)
    optimizer = torch.optim.Adam([flat_parameters], lr, eps=1e-8, foreach=False, capturable=device.type == "cuda")
    adam_step = inspect.unwrap(torch.optim.Adam.step)  # without its hooks, which torch.compile cannot trace
    global_step, seconds = restore(args.resume, agent, optimizer) if args.resume else (0, 0.0)
    # Every rank and every resumption has seeds of its own, for noise, permutations and simulators.
    noise_seed, env_seed = np.random.SeedSequence([args.seed, rank, global_step]).generate_state(2).tolist()
    torch.manual_seed(noise_seed)

    @torch.no_grad()
    @partial(compiled, args=args, device=device)
    def act(raw_obs):
        """raw_obs (N, D) -> actions of the policy (N, A), actions for the environments (N, A)"""
        mean, std = agent.get_mean_and_std(agent.normalize(raw_obs, agent.obs_rms))
        action = mean + std * torch.randn_like(mean)
        return action, agent.to_env_action(action)

    @partial(compiled, args=args, device=device)
    def compute_gradient(minibatch):
        """{name: tensor} -> the gradient of ppo_loss as one vector, metrics"""
        loss, metrics = ppo_loss(agent, args, minibatch)
        gradients = torch.autograd.grad(loss, list(agent.parameters()))
        return torch.cat([gradient.flatten() for gradient in gradients]), metrics

    @torch.no_grad()
    @partial(compiled, args=args, device=device)
    def apply_gradient(gradient, kl):
        flat_parameters.grad.copy_(gradient)  # torch.compile refuses an assignment here
        if args.max_grad_norm > 0:
            for part in flat_parameters.grad.split([len(gradient) - critic_size, critic_size]):  # as clip_grad_norm_
                part.mul_((args.max_grad_norm / (part.norm() + 1e-6)).clamp(max=1.0))
        if args.desired_kl is not None:
            lr.copy_(adapt_learning_rate(lr, kl, args.desired_kl))
        adam_step(optimizer)

    # -------------------------------------------------------------------------------------------------------- storage
    # All on the device; one row of observations more than steps, for what came after the last step.
    raw_obs = torch.zeros(T + 1, N, obs_size, device=device)
    raw_critic_obs = torch.zeros(T + 1, N, critic_obs_size, device=device)
    raw_final_obs = torch.zeros(T if args.timeouts == "exact" else 0, N, critic_obs_size, device=device)
    actions = torch.zeros(T, N, len(agent.action_low), device=device)  # as the policy chose them, not bounded
    rewards, returns_so_far, lengths_so_far = torch.zeros(3, T, N, device=device)
    terminations, truncations, logged_ends = torch.zeros(3, T, N, dtype=torch.bool, device=device)
    episode_returns, episode_lengths = torch.zeros(2, N, device=device)

    run = Run(args, rank, num_iterations, global_step, seconds, device)
    if eval_envs and global_step == 0:
        log_evaluation(run, evaluate(agent, eval_envs, args.seed, args.eval_deterministic))
    next_obs, next_critic_obs = split_obs(reset(seed=env_seed)[0])
    shortened = torch.zeros(N, dtype=torch.bool, device=device)  # first episodes that end early; they are not logged
    # Random first steps: else all time limits fall in the same step, and a batch holds one phase of the episode.
    if args.stagger_envs and hasattr(envs, "episode_length_buf"):
        envs.episode_length_buf = torch.randint_like(envs.episode_length_buf, int(envs.max_episode_length))
        shortened.fill_(True)

    first_iteration = math.ceil(global_step / (T * args.num_envs)) + 1  # --resume may come with another batch size
    for iteration in range(first_iteration, num_iterations + 1):
        remaining = 1.0 - (iteration - 1) / num_iterations  # 1 in the first iteration, above 0 in the last
        if args.desired_kl is None:
            lr.fill_(args.learning_rate * (remaining if args.anneal_lr else 1.0))

        # ---------------------------------------------------------------------------------------------------- rollout
        for t in range(T):  # nothing here may read a number of a tensor: that would wait for the device
            raw_obs[t], raw_critic_obs[t] = next_obs, next_critic_obs
            actions[t], env_actions = act(raw_obs[t])
            observed, rewards[t], terminations[t], truncations[t], infos = step(env_actions)
            truncations[t] &= ~terminations[t]  # if both, it terminated
            next_obs, next_critic_obs = split_obs(observed)
            if args.timeouts == "exact":
                if "final_obs" not in infos:
                    fail(f"{args.env_id} gives no final_obs: use --timeouts current-value (or masked)")
                raw_final_obs[t] = split_obs(infos["final_obs"])[1]  # for the critic
            episode_returns += rewards[t]
            episode_lengths += 1
            returns_so_far[t], lengths_so_far[t] = episode_returns, episode_lengths
            ended = terminations[t] | truncations[t]
            logged_ends[t] = ended & ~shortened
            shortened &= ~ended
            episode_returns.masked_fill_(ended, 0.0)
            episode_lengths.masked_fill_(ended, 0.0)
        raw_obs[T], raw_critic_obs[T] = next_obs, next_critic_obs
        if not all(x.isfinite().all() for x in (rewards, raw_obs, raw_critic_obs)):
            fail(f"{args.env_id} returned NaN or infinity in iteration {iteration}; the last checkpoint is kept")

        # ------------------------------------------------------------------------------------------------- advantages
        # Weights and statistics are still those of the rollout: one pass gives the values that a pass per step would.
        with torch.no_grad():
            obs = agent.normalize(raw_obs[:T], agent.obs_rms)  # (T, N, D)
            critic_obs = agent.normalize(raw_critic_obs, agent.critic_obs_rms)  # (T + 1, N, P)
            means, stds = agent.get_mean_and_std(obs)  # (T, N, A)
            log_probs, _ = agent.get_log_prob_and_entropy(means, stds, actions)
            values = agent.get_value(critic_obs)  # (T + 1, N)
            timeout_values = torch.zeros_like(rewards)
            if args.timeouts == "exact":
                final_obs = agent.normalize(raw_final_obs[truncations], agent.critic_obs_rms)
                timeout_values[truncations] = agent.get_value(final_obs)
        steps = {"rewards": args.reward_scale * rewards, "values": values[:T], "timeout_values": timeout_values}
        steps |= {"terminations": terminations, "truncations": truncations}
        steps = {name: cut_unrolls(x, L) for name, x in steps.items()}  # (L, C)
        # Rows L, 2 L, ..., T are what came after each unroll.
        advantages, returns = estimate_targets(args, last_values=values[L::L].flatten(), **steps)
        if args.norm_adv == "rollout":
            advantages = normalize_advantages(advantages)
        batch = {"obs": obs, "critic_obs": critic_obs[:T], "actions": actions, "log_probs": log_probs}
        batch |= {"means": means, "stds": stds}
        batch = {name: cut_unrolls(x, L) for name, x in batch.items()}  # (L, C, ...)
        batch |= {"values": steps["values"], "advantages": advantages, "returns": returns}
        if args.recompute_targets:  # what estimate_targets needs once more
            batch |= {name: steps[name] for name in ("rewards", "terminations", "truncations")}
            batch["last_critic_obs"] = critic_obs[L::L].flatten(0, 1).unsqueeze(0)  # (1, C, P)
        if args.unroll_length is None:
            batch = {name: x.flatten(0, 1).unsqueeze(0) for name, x in batch.items()}  # (1, T * N, ...)
        if args.norm_obs:  # for the next rollout: this one is normalised already
            agent.obs_rms.update(raw_obs[:T])
            agent.critic_obs_rms.update(raw_critic_obs[:T])

        # ----------------------------------------------------------------------------------------------------- update
        all_metrics, stop_update = [], False
        for _ in range(args.update_epochs):
            permutation = torch.randperm(C, device=device)
            b_tensors = [x[:, permutation] for x in batch.values()]
            for minibatch in zip(*(x.split(C // args.num_minibatches, dim=1) for x in b_tensors)):  # (L or 1, M, ...)
                gradient, metrics = compute_gradient(dict(zip(batch, minibatch)))
                if not all_metrics:  # first minibatch: the KL is 0, and rounding must not change the learning rate
                    metrics["kl"].zero_()
                average_over_ranks(gradient)
                average_over_ranks(metrics["kl"])  # ranks stop, or change lr, together
                all_metrics.append(metrics)
                if args.target_kl is not None and metrics["kl"].item() > 1.5 * args.target_kl:
                    stop_update = True  # before this minibatch's step
                    break
                apply_gradient(gradient, metrics["kl"])
            if stop_update:
                break
        if not flat_parameters.isfinite().all():
            fail(f"the update of iteration {iteration} gave NaN or infinity; the last checkpoint is kept")

        # ------------------------------------------------------------------------------------------------ log and save
        scalars = {f"losses/{name}": torch.stack([m[name] for m in all_metrics]).mean() for name in all_metrics[0]}
        scalars["losses/explained_variance"] = explained_variance(batch["values"], batch["returns"])
        scalars["charts/noise_std"] = stds.mean()
        for value in scalars.values():
            average_over_ranks(value)
        scalars["charts/learning_rate"] = lr
        end_steps = global_step + args.num_envs * (logged_ends.nonzero()[:, 0] + 1)
        columns = end_steps, returns_so_far[logged_ends], lengths_so_far[logged_ends].long()
        episodes = [(*episode, {}) for episode in zip(*(x.tolist() for x in columns))]
        global_step += T * args.num_envs
        run.log(global_step, gather_from_ranks(episodes), scalars)
        if eval_envs and iteration * args.num_evaluations % num_iterations < args.num_evaluations:  # evenly spread
            log_evaluation(run, evaluate(agent, eval_envs, args.seed, args.eval_deterministic))
        stopped = any(gather_from_ranks(list(stop_signals)))  # on any rank; read once, so that all ranks agree
        if iteration % args.checkpoint_interval == 0 or iteration == num_iterations or stopped:
            run.save(agent, optimizer)
        if stopped:
            break

    run.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return agent, run.dir


# =============================================================================== services: no PPO from here to the end


class Failure(ValueError, SystemExit):  # callers of `train` can catch a ValueError; a command ends with status 2
    code = 2


def fail(message):
    print(f"{Path(__file__).name}: error: {message}", file=sys.stderr)
    raise Failure(message)


def parse_args(argv=None, default=None):
    """Command line -> Args. Takes what `wandb sweep` sends too, as --x=True and --x False; 1e6 and 1M are integers."""
    # One word a line, so that ^ and $ are its ends: --x=True -> --x, --x=False -> --no-x, 1e6 and 1M -> 1000000.
    text = "\n".join(sys.argv[1:] if argv is None else argv)
    text = re.sub(r"(?im)^--([^=\n]+)[=\n]true$", r"--\1", text)
    text = re.sub(r"(?im)^--([^=\n]+)[=\n]false$", r"--no-\1", text)
    whole_number = r"(?m)^(--[^=\n]+[=\n])(\d+\.0*|\d+\.?\d*([eE]\+?\d+|M))$"
    text = re.sub(whole_number, lambda match: f"{match[1]}{float(match[2].replace('M', 'e6')):.17g}", text)
    parse = partial(tyro.cli, Args, args=text.splitlines(), description=__doc__.split("\n\nChoices")[0])
    args = parse(default=default)
    if default is None:  # the defaults of --update, and the command line once more on top of them
        return parse(default=Args(**UPDATES[args.update]))
    if args.update != default.update:
        fail(f"--update {args.update} sets the defaults of new runs; this run began with {default.update}")
    return args


def check_args(args, num_ranks=1):
    """Refuse arguments that cannot work, before anything is created."""
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        low = 1 if field.type in (int, int | None) and field.name not in ("seed", "num_evaluations") else 0
        low = {"ent_coef": -math.inf, "reward_scale": -math.inf, "init_std": 1e-6}.get(field.name, low)
        high = 1 if field.name in ("gamma", "gae_lambda") else math.inf
        if isinstance(value, (int, float)) and not (low <= value <= high and math.isfinite(value)):
            fail(f"--{field.name.replace('_', '-')} must be a finite number from {low} to {high}, not {value}")
    if args.num_envs % num_ranks:
        fail(f"--num-envs {args.num_envs} must be a multiple of the {num_ranks} processes of torchrun")
    if args.num_steps % (args.unroll_length or 1):
        fail(f"--unroll-length {args.unroll_length} must divide --num-steps {args.num_steps}")
    if args.total_timesteps < (batch_size := args.num_envs * args.num_steps):
        fail(f"--total-timesteps {args.total_timesteps} is below num_envs * num_steps = {batch_size}")
    if (size := batch_size // num_ranks // (args.unroll_length or 1)) % args.num_minibatches:
        nearest = sorted((d for d in range(1, size + 1) if size % d == 0), key=lambda d: abs(d - args.num_minibatches))
        fail(f"--num-minibatches {args.num_minibatches} must divide {size} steps or unrolls as {sorted(nearest[:3])}")
    if args.anneal_lr and args.desired_kl is not None:
        fail("--anneal-lr does not go with --desired-kl, which moves the learning rate too: give --desired-kl None")
    if args.recompute_targets and (not args.unroll_length or args.timeouts == "exact" or args.norm_adv == "rollout"):
        fail("--recompute-targets needs --unroll-length, and neither --timeouts exact nor --norm-adv rollout")


class VectorEnvs(Protocol):
    """What this file needs of simulators: gymnasium's vector environment, but of tensors that stay on the device, as in
    Isaac Lab. --env-id MODULE:FUNCTION names a function(num_envs, device, seed) that makes them.
    reset(seed) -> observations, infos
    step(actions (N, A)) -> observations, rewards (N,), terminations (N,) bool, truncations (N,) bool, infos

    Observations are a tensor (N, D), or {"policy": (N, D), "critic": (N, P)}. The step that ends an episode returns the
    first observation of the next one. --timeouts exact needs infos["final_obs"], which Isaac Lab does not give.
    --stagger-envs needs max_episode_length, and sets episode_length_buf (N,), the steps of the present episodes."""

    num_envs: int
    single_action_space: gym.spaces.Box  # one without bounds is fine with --policy normal


def split_obs(obs):
    """Observations of VectorEnvs -> what the actor sees (N, D), what the critic sees (N, P)"""
    return (obs["policy"], obs.get("critic", obs["policy"])) if isinstance(obs, dict) else (obs, obs)


class BraxEnvs:
    """Environments of Brax (JAX). Tensors share the memory of its arrays. Each environment restarts as it began."""

    def __init__(self, name, num_envs, device, backend, episode_length):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take the whole GPU
        try:
            import jax
            from brax import envs
            from brax.envs.wrappers.training import AutoResetWrapper, EpisodeWrapper, VmapWrapper

            env = envs.get_environment(name, backend=backend)
            # JAX for CPUs comes with variants/requirements.txt. For a GPU: pip install "jax[cuda13]" (or cuda12).
            self.jax_device = jax.devices("cpu" if device.type == "cpu" else "gpu")[device.index or 0]
        except (ImportError, KeyError, ValueError, AssertionError, RuntimeError) as error:
            fail(f"--env-id brax/{name}: {type(error).__name__} {error}; needed: Brax, and JAX for {device.type}")

        def keep_final_obs(function, *arguments):  # before AutoResetWrapper replaces it
            state = function(*arguments)
            return state.replace(info=state.info | {"final_obs": state.obs})

        env = EpisodeWrapper(VmapWrapper(env), episode_length, action_repeat=1)
        env.reset, env.step = partial(keep_final_obs, env.reset), partial(keep_final_obs, env.step)
        env = AutoResetWrapper(env)
        self.num_envs, self.max_episode_length = num_envs, episode_length
        self.single_action_space = gym.spaces.Box(-1.0, 1.0, (env.action_size,))
        self.jax, self.jit_reset, self.jit_step = jax, jax.jit(env.reset), jax.jit(env.step)

    def reset(self, seed=None):
        keys = self.jax.random.split(self.jax.random.PRNGKey(seed), self.num_envs)
        self.state = self.jit_reset(self.jax.device_put(keys, self.jax_device))
        self.episode_length_buf = torch.from_dlpack(self.state.info["steps"])
        return torch.from_dlpack(self.state.obs), {}

    def step(self, actions):
        self.state.info["steps"] = self.jax.dlpack.from_dlpack(self.episode_length_buf)
        self.state = self.jit_step(self.state, self.jax.dlpack.from_dlpack(actions.contiguous()))
        info = [self.state.info[name] for name in ("truncation", "final_obs", "steps")]
        arrays = self.state.obs, self.state.reward, self.state.done, *info
        obs, rewards, done, truncations, final_obs, self.episode_length_buf = map(torch.from_dlpack, arrays)
        return obs, rewards, done.bool() & ~truncations.bool(), truncations.bool(), {"final_obs": final_obs}


def group_observations(env):
    """A gymnasium environment with observations {"policy": vector}, and "critic" beside it if it has these groups."""
    space, transform = env.observation_space, gym.wrappers.TransformObservation
    if not isinstance(space, gym.spaces.Dict) or "policy" not in space.spaces:
        space = gym.spaces.Dict({"policy": space})
        env = transform(env, lambda obs: {"policy": obs}, space)
    flat_space = gym.spaces.Dict({name: gym.spaces.flatten_space(group) for name, group in space.items()})
    # flatten copies: the environment may begin the next episode in the array that it returned.
    return transform(env, lambda obs: {name: gym.spaces.flatten(space[name], obs[name]) for name in space}, flat_space)


class GymEnvs:
    """A vector of gymnasium environments as VectorEnvs. Its arrays are copied to the device and back in every step."""

    def __init__(self, env_id, num_envs, device):
        options = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
        try:
            self.envs = gym.make_vec(env_id, num_envs, "sync", vector_kwargs=options, wrappers=[group_observations])
        except (gym.error.Error, ImportError, NotImplementedError, TypeError, ValueError) as error:
            fail(f"--env-id {env_id}: {error}")
        self.num_envs, self.single_action_space = num_envs, self.envs.single_action_space
        self.tensor = partial(torch.as_tensor, device=device)

    def reset(self, seed=None):
        obs, _ = self.envs.reset(seed=seed)  # environment n gets seed + n
        return {name: self.tensor(x) for name, x in obs.items()}, {}

    def step(self, actions):
        obs, *others, infos = self.envs.step(actions.cpu().numpy().reshape(self.envs.action_space.shape))
        rewards, terminations, truncations = (self.tensor(x) for x in others)
        obs = {name: self.tensor(x) for name, x in obs.items()}
        final_obs = {name: x.clone() for name, x in obs.items()}
        for n in np.flatnonzero(others[1] | others[2]):  # obs[n] belongs to the next episode already
            for name, x in final_obs.items():
                x[n] = self.tensor(infos["final_obs"][n][name])
        return obs, rewards.float(), terminations, truncations, {"final_obs": final_obs}


def make_envs(args, num_envs, device):
    if args.env_id.startswith("brax/"):
        envs = BraxEnvs(args.env_id[5:], num_envs, device, args.brax_backend, args.episode_length)
    elif re.fullmatch(r"[\w.]+:\w+", args.env_id):  # gymnasium's own MODULE:NAME-v0 has a hyphen
        module, function = args.env_id.split(":")
        sys.path.append(os.getcwd())
        try:
            make = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            fail(f"--env-id {args.env_id}, MODULE:FUNCTION: {error}")
        rank = dist.get_rank() if dist.is_initialized() else 0  # each process makes other simulators
        envs = make(num_envs, device, args.seed + 1000 * rank)
    else:
        envs = GymEnvs(args.env_id, num_envs, device)
    action_space = envs.single_action_space
    if not isinstance(action_space, gym.spaces.Box) or action_space.dtype.kind != "f":
        fail(f"{args.env_id} has actions {action_space}: a Box of floats is needed (Discrete: use ppo_discrete.py)")
    if args.policy == "tanh" and not action_space.is_bounded():
        fail(f"{args.env_id} has actions without bounds: use --policy normal")
    return envs


def start_device(args):
    """The device of this process. Under torchrun it also meets the other ranks, by gloo on CPUs and NCCL on GPUs."""
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device)
    if dist.is_torchelastic_launched():
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # JAX takes only tensors of the current device
        torch.set_float32_matmul_precision("high")  # TF32, several times as fast
    return device


def average_over_ranks(x):
    """Under torchrun: replace x, in place, by its mean over all ranks. Otherwise do nothing. Returns x."""
    if dist.is_initialized():
        dist.all_reduce(x)
        x /= dist.get_world_size()
    return x


def gather_from_ranks(items):
    """Under torchrun: the lists of all ranks, joined. Otherwise the list as it is."""
    if not dist.is_initialized():
        return items
    lists = [None] * dist.get_world_size()
    dist.all_gather_object(lists, items)
    return [item for items in lists for item in items]


def compiled(function, args, device, check=False):
    """Compile the function at its first call; --no-compile returns it unchanged. Python numbers become constants: write
    what changes into tensors. torch's guards, which would notice a changed number, are off: they take too long."""
    torch._dynamo.config.trace_autograd_ops = True  # allows torch.autograd.grad in compiled functions
    torch._dynamo.config.enable_aot_compile = True  # off by default in torch 2.11
    # torch puts random parts into ids. Without them its cache on disk finds what an earlier run has compiled.
    torch._dynamo.output_graph.unique_id = lambda name, **_: torch._dynamo.bytecode_transformation.unique_id(name)
    options = {"fallback_random": True}  # the random numbers of eager mode
    if device.type == "cpu":
        options["cpp_wrapper"] = True  # C++ in place of Python between the kernels
        options["cpp.vec_isa_ok"] = True  # else torch tests the CPU's vector instructions for a second
    programs = []

    def call(*arguments):
        if not programs:
            whole = torch.compile(function, fullgraph=True, dynamic=False, options=options)
            programs.append(whole.aot_compile((arguments, {})))
            programs[0].disable_guard_check()
            if check:  # torch.compile has been seen to leave out a part of a gradient, for some sizes and options
                gradients = (tree_leaves(version(*arguments)[0]) for version in (function, programs[0]))
                right, found = (torch.cat([gradient.flatten() for gradient in leaves]) for leaves in gradients)
                if (found - right).norm() > 0.01 * right.norm():
                    fail("torch.compile gives a wrong gradient for these sizes: use --no-compile")
        return programs[0](*arguments)

    return call if args.compile else function


class Run:
    """The folder of a run, with args.json, a copy of this script, TensorBoard events, episodes.csv and checkpoint.pt;
    also wandb and the progress bar. Rank 0 writes for all: on other ranks every method does nothing."""

    def __init__(self, args, rank, num_iterations, global_step, seconds, device):
        self.args, self.dir, self.global_step = args, None, global_step
        if rank > 0:
            self.log = self.save = self.close = lambda *arguments: None
            return
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time():.3f}"
        self.dir = Path(args.resume or Path(args.runs_dir, re.sub(r"[^\w.-]", "-", name)))
        self.dir.mkdir(parents=True, exist_ok=True)
        self.lock = FileLock(self.dir / "lock", is_singleton=True)  # freed when this process ends, however it ends
        try:
            self.lock.acquire(timeout=0)
        except Timeout:
            fail(f"another process is training in {self.dir}: stop it first")
        self.total_steps = num_iterations * args.num_steps * args.num_envs
        what = f"on {device}" if global_step < self.total_steps else "nothing left to do: raise --total-timesteps"
        self.say(f"{self.dir}: step {global_step:,} of {self.total_steps:,}, {what}")
        about = {"script": Path(__file__).stem, "version": __version__, **vars(args)}
        (self.dir / "args.json").write_text(json.dumps(about, indent=2))
        (self.dir / Path(__file__).name).write_text(Path(__file__).read_text())
        # episodes.csv: --resume drops rows after the checkpoint, and rows that cannot be read.
        path = self.dir / "episodes.csv"
        rows = path.read_text(errors="replace").splitlines() if path.exists() else []
        is_row = re.compile(r"(\d+),-?[\d.]+(e[+-]\d+)?,\d+,[\d.]+").fullmatch
        rows = [row for row in rows if (match := is_row(row)) and int(match[1]) <= global_step]
        self.recent_returns = deque([float(row.split(",")[1]) for row in rows], maxlen=100)
        path.write_text("\n".join(["global_step,episodic_return,episodic_length,seconds", *rows, ""]))
        self.episodes_file = path.open("a")
        if args.track:
            import wandb

            # The folder's name as the id: a resumed run goes on in the same run of wandb.
            names = {"id": self.dir.resolve().name, "project": args.wandb_project_name, "entity": args.wandb_entity}
            self.wandb = wandb.init(**names, resume="allow", dir=self.dir, config=vars(args), sync_tensorboard=True)
        # purge_step hides what a killed run logged after its checkpoint.
        self.writer = SummaryWriter(self.dir, purge_step=global_step + 1)
        self.start_time, self.first_log = time.time() - seconds, None
        self.bar = tqdm(total=self.total_steps, initial=global_step, unit="step", unit_scale=True, disable=None)
        self.bar.set_postfix_str("compiling" if args.compile else "")

    def log(self, global_step, episodes, scalars):
        """episodes: (global_step, return, length, numbers of its last info); scalars: {name: number or tensor ()}"""
        now, text = time.time(), "no episode has ended yet"
        for name in {name for *_, numbers in episodes for name in numbers}:
            scalars[f"info/{name}"] = np.mean([numbers[name] for *_, numbers in episodes if name in numbers])
        for step, episodic_return, episodic_length, _ in sorted(episodes, key=lambda episode: episode[0]):
            self.episodes_file.write(f"{step},{episodic_return:.6g},{episodic_length},{now - self.start_time:.2f}\n")
            self.writer.add_scalar("charts/episodic_return", episodic_return, step)
            self.writer.add_scalar("charts/episodic_length", episodic_length, step)
            self.recent_returns.append(float(f"{episodic_return:.6g}"))  # the digits that --resume finds
        if self.recent_returns:
            scalars["charts/last_100_return"] = np.mean(self.recent_returns)
            text = f"return {scalars['charts/last_100_return']:.1f}"
        if self.first_log:  # counted from the end of the first iteration, in which functions are compiled
            scalars["charts/SPS"] = (global_step - self.first_log[1]) / (now - self.first_log[0])
            text += f"   {scalars['charts/SPS']:,.0f} steps/s"
        self.first_log = self.first_log or (now, global_step)
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, global_step)
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(global_step - self.global_step)
        if self.bar.disable and global_step * 20 // self.total_steps > self.global_step * 20 // self.total_steps:
            self.say(f"step {global_step:>10,}   {text}")  # without a terminal: 20 lines, no bar
        self.global_step = global_step

    def say(self, text):
        with contextlib.suppress(OSError):  # nobody may be reading any more, as in `| head`
            print(text, flush=True)

    def save(self, agent, optimizer):
        """Replace checkpoint.pt in one move: a kill leaves the new one or the one before, whole."""
        self.episodes_file.flush()  # the logs first: a checkpoint never knows of episodes that are not on disk
        self.writer.flush()
        checkpoint = {"agent": agent.state_dict(), "optimizer": optimizer.state_dict(), "args": vars(self.args)}
        checkpoint |= {"global_step": self.global_step, "seconds": time.time() - self.start_time}
        torch.save(checkpoint, self.dir / "checkpoint.tmp")
        os.replace(self.dir / "checkpoint.tmp", self.dir / "checkpoint.pt")

    def close(self):
        self.bar.close()
        self.writer.close()
        self.episodes_file.close()
        self.lock.release()
        if self.args.track:
            self.wandb.finish()
        if count := len(self.recent_returns):
            self.say(f"mean return of the last {count} episodes: {np.mean(self.recent_returns):.1f}   {self.dir}")


def log_evaluation(run, returns):
    """Append a row to evaluations.csv. Rows that a killed run left behind, from this step on, are dropped."""
    path, whole_row = run.dir / "evaluations.csv", r"\d+,-?[\d.]+,[\d.]+,[\d.]+"
    rows = path.read_text(errors="replace").splitlines() if path.exists() else []
    rows = [row for row in rows if re.fullmatch(whole_row, row) and int(row.split(",")[0]) < run.global_step]
    rows.append(f"{run.global_step},{returns.mean():.2f},{returns.std():.2f},{time.time() - run.start_time:.2f}")
    path.write_text("\n".join(["global_step,mean_return,std_return,seconds", *rows, ""]))
    run.writer.add_scalar("charts/eval_return", returns.mean(), run.global_step)


def load_checkpoint(run_dir):
    """The checkpoint of a run folder, on the CPU, with "args" as Args and "agent" as the trained Agent."""
    path = Path(run_dir, "checkpoint.pt")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)  # no code in it can run
        args, state = Args(**checkpoint["args"]), checkpoint["agent"]
        sizes = len(state["obs_rms.mean"]), len(state["critic_obs_rms.mean"])
        agent = Agent(*sizes, state["action_low"], state["action_high"], args)
        agent.load_state_dict(state)
        rest = {key: checkpoint[key] for key in ("optimizer", "global_step", "seconds")}
    except Exception as error:  # a damaged file can raise anything
        fail(f"{path} is missing, damaged, or from another script or version: {type(error).__name__}")
    return {"args": args, "agent": agent, **rest}


def load_agent(run_dir):
    """The trained agent of a run folder, with its statistics: load_agent("runs/NAME").predict(obs) is an action."""
    return load_checkpoint(run_dir)["agent"]


def export_actor(run_dir):
    """Write RUN_DIR/actor.pt2, which needs no code of this file: torch.export.load(path).module()(raw_obs), (N, D)
    float32, is an action (N, A), on the CPU (torch.export.passes.move_to_device_pass moves it). It has no critic."""
    agent, path = load_agent(run_dir), Path(run_dir, "actor.pt2")
    agent.critic = agent.critic_obs_rms = None
    example, rows = torch.zeros(2, len(agent.obs_rms.mean)), {0: torch.export.Dim("N", min=1)}
    torch.export.save(torch.export.export(agent, (example,), dynamic_shapes=(rows,)), path)
    return path


def restore(run_dir, agent, optimizer):
    """--resume: give agent and optimizer the state of the checkpoint. -> its global_step and seconds"""
    checkpoint = load_checkpoint(run_dir)
    agent.load_state_dict(checkpoint["agent"].state_dict())
    # Load Adam's moments. Keep its options, which depend on this device.
    group, saved = optimizer.param_groups[0], checkpoint["optimizer"]["param_groups"][0]
    optimizer.load_state_dict(checkpoint["optimizer"] | {"param_groups": optimizer.state_dict()["param_groups"]})
    optimizer.param_groups[0]["lr"] = group["lr"]  # the tensor that apply_gradient changes, not a copy
    if agent.args.learning_rate == checkpoint["args"].learning_rate:  # for --desired-kl; a new rate begins anew
        group["lr"].copy_(saved["lr"])
    return checkpoint["global_step"], checkpoint["seconds"]


@torch.no_grad()
def evaluate(agent, envs, seed, deterministic=True):
    """Returns (N,) of the first episode of each environment. The agent and its statistics do not change."""
    device = agent.action_low.device
    running = torch.ones(envs.num_envs, dtype=torch.bool, device=device)
    episodic_returns, t = torch.zeros(envs.num_envs, device=device), 0
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        obs, _ = envs.reset(seed=seed)
        while t % 50 or running.any():  # not asked in every step: that waits for the device
            obs, rewards, terminations, truncations, _ = envs.step(agent.predict(split_obs(obs)[0], deterministic))
            episodic_returns += torch.where(running, rewards, 0.0)  # what comes after the end may be NaN
            running &= ~(terminations | truncations)
            t += 1
    return episodic_returns.cpu().numpy()


def main():
    args = parse_args()
    if args.export:
        print(export_actor(args.export))
        return
    if args.evaluate or args.resume:  # the arguments of that run apply, except those given again
        checkpoint, env_id = load_checkpoint(args.evaluate or args.resume), args.env_id
        args = parse_args(default=checkpoint["args"])
        if ":" in args.env_id and args.env_id != env_id:  # importing a module runs its code
            fail(f"the checkpoint names the environment of a module: if you trust it, add --env-id {args.env_id}")
    if args.evaluate:
        device = start_device(args)
        envs = make_envs(args, args.eval_episodes, device)
        returns = evaluate(checkpoint["agent"].to(device), envs, args.seed, args.eval_deterministic)
        print(f"{len(returns)} episodes: mean {returns.mean():.6g}, standard deviation {returns.std():.6g}")
        return
    stop_signals = []

    def request_stop(number, frame):
        """Ctrl-C, and SIGTERM of a preempted job: the iteration under way is finished and saved. A second one ends the
        run at once, unless it comes within a second: a terminal and torchrun send the same one twice."""
        if stop_signals and time.monotonic() > stop_signals[0][1] + 1:
            raise SystemExit(128 + number)
        stop_signals.append((number, time.monotonic()))

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, request_stop)
    _, run_dir = train(args, stop_signals)
    exit_code = 128 + stop_signals[0][0] if stop_signals and run_dir else 0
    if exit_code:
        print(f"stopped; go on with --resume {run_dir}", file=sys.stderr)
    if dist.is_torchelastic_launched():  # not by Python's own end, in which a thread of torch.distributed may abort
        os._exit(exit_code)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
