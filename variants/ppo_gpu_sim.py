# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.11,<3", "gymnasium[mujoco]>=1.2.1,<2", "numpy>=1.26,<3", "tyro>=1.0,<2", "tensorboard>=2.18,<3",
#     "wandb>=0.22,<1", "tqdm>=4.66,<5", "filelock>=3.13,<5", "jax>=0.6,<0.12", "brax>=0.14.2,<0.15",
# ]
# ///
"""Proximal Policy Optimization (PPO) for thousands of simulators on one device, with three update rules, in one file.

    python variants/ppo_gpu_sim.py --env-id brax/ant                     # train with rsl_rl's update
    python variants/ppo_gpu_sim.py --env-id brax/ant --update google     # with Brax's; or nvidia
    python variants/ppo_gpu_sim.py --env-id my_robot:make_envs           # any tensor-based simulator, see VectorEnvs
    python variants/ppo_gpu_sim.py --resume runs/NAME                    # continue a run; or --resume latest
    python variants/ppo_gpu_sim.py --evaluate runs/NAME                  # play episodes; or --evaluate latest
    python variants/ppo_gpu_sim.py --export runs/NAME                    # write the actor alone, or --export latest
    torchrun --nproc-per-node 2 variants/ppo_gpu_sim.py                  # two processes, each with half of num_envs

Where rsl_rl, Google (the PyTorch notebook of Brax) and NVIDIA differ, this file has flags:
1. --timeouts: at a time limit, `current-value` bootstraps from V(s_t), of the observation before the last step
   (rsl_rl). `auto` bootstraps from the final observation, or as `current-value` if the simulator gives none. `masked`
   sets the advantage to 0 before --norm-adv (Brax).
2. --advantages: `gae` is GAE. `brax` is r_t + gamma R_{t+1} - V(s_t), where R is the lambda return (Google). With
   --recompute-targets (Google), every minibatch computes them again, with the current critic.
3. --norm-adv: advantages are normalized over the rollout (rsl_rl), over a minibatch (NVIDIA), or not (Google).
4. --unroll-length: a minibatch holds whole unrolls, each bootstrapped at its end. Without it, single steps (rsl_rl).
5. --policy: `normal` has a learned standard deviation, and actions in the simulator's units (rsl_rl), here clipped.
   `tanh` has a state-dependent deviation, and actions squashed into the bounds (Google, NVIDIA).
6. --desired-kl: the learning rate adapts to the exact KL of each minibatch (rsl_rl 5.0).
--update changes the network, gamma and more too: see GOOGLE. Actor and critic have their own gradient clipping (rsl_rl
4.0). Statistics of observations change between rollouts. (rsl_rl's change at every step. Google's change before the
update, so its first ratio is not 1.) The critic may see more than the actor: {"policy": ..., "critic": ...}.
No GPU has run this file yet.

Shapes: T = num_steps, N = environments of this process, B = T * num_envs, the batch of all processes,
L = unroll_length, or T without it, C = N * T / L unrolls. M = columns of a minibatch: C / num_minibatches unrolls, or,
without --unroll-length, T * N / num_minibatches steps. D = observation of the actor, P = of the critic, A = action.
Read ../ppo_continuous.py first: functions of the same name do the same.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import random
import re
import sys
import time
from collections import deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import tyro
from filelock import FileLock, Timeout
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.tensorboard import SummaryWriter
from tqdm.auto import tqdm

__version__ = "1.0.dev0"


@dataclasses.dataclass
class Args:  # the comments are what --help prints
    # --- run
    exp_name: str = Path(__file__).stem  # part of the run folder's name, RUNS_DIR/ENV_ID__EXP_NAME__SEED__TIME
    runs_dir: str = "runs"  # where run folders are made
    seed: int = 1  # seed of networks, noise and simulators
    device: str = "auto"  # cpu, cuda, cuda:1; auto: cuda if there is one
    compile: bool = True  # torch.compile, which needs a C++ compiler: half a minute at the start, then faster
    checkpoint_interval: float = 30.0  # seconds between checkpoints; 0: after every iteration
    eval_episodes: int = 128  # environments of --evaluate; each plays one episode
    eval_deterministic: bool = True  # evaluate with the mean action; off: sample actions as in training
    track: bool = False  # log to Weights & Biases too
    wandb_project_name: str = "ppo"  # project for --track
    wandb_entity: str | None = None  # team for --track; None: your default
    # --- environment
    env_id: str = "brax/ant"  # brax/NAME; MODULE:FUNCTION that makes VectorEnvs; or a gymnasium id with Box actions
    env_kwargs: str = "{}"  # arguments of the simulator, as JSON; brax: '{"backend": "mjx", "episode_length": 500}'
    total_timesteps: int = 30_000_000  # environment steps of the run, rounded down to whole iterations
    num_envs: int = 4096  # number of environments, over all processes
    stagger_envs: bool = True  # give first episodes a random step count, if the simulator can, and do not log them
    norm_obs: bool = True  # normalize observations by their running mean and standard deviation, clip to +-10
    reward_scale: float = 1.0  # the learner sees rewards times this; logged returns are raw
    # --- PPO
    policy: Literal["normal", "tanh"] = "normal"  # distribution of actions; tanh: squashed into the bounds
    init_std: float = 1.0  # initial standard deviation, --policy normal
    hidden_sizes: tuple[int, ...] = (256, 256, 256)  # units per layer of the actor: --hidden-sizes 512 256 128
    critic_hidden_sizes: tuple[int, ...] = ()  # units per layer of the critic; empty: same as the actor
    activation: Literal["elu", "silu", "tanh"] = "elu"  # between the layers
    num_steps: int = 24  # steps of each environment per iteration (T)
    unroll_length: int | None = None  # steps per unroll (L); a minibatch holds whole unrolls. None: single steps
    learning_rate: float = 1e-3  # Adam's learning rate; with --anneal-lr or --desired-kl its initial value
    anneal_lr: bool = False  # lower the learning rate linearly to 0 over the run; needs --desired-kl None
    gamma: float = 0.99  # discount factor, 0 to 1
    gae_lambda: float = 0.95  # lambda of GAE; 0: one-step TD error (low variance); 1: the whole rollout (low bias)
    num_minibatches: int = 4  # minibatches per epoch; must divide the steps (or unrolls) of an iteration
    update_epochs: int = 5  # passes over the batch of an iteration
    # bootstrap at a time limit: auto: V(final_obs), else V(s_t); current-value: V(s_t); masked: advantage 0
    timeouts: Literal["auto", "current-value", "masked"] = "auto"
    advantages: Literal["gae", "brax"] = "gae"  # brax: r_t + gamma R_{t+1} - V(s_t), R: lambda returns
    recompute_targets: bool = False  # compute advantages and returns again in every minibatch (of unrolls)
    norm_adv: Literal["rollout", "minibatch", "none"] = "rollout"  # where advantages get mean 0 and deviation 1
    clip_coef: float = 0.2  # the probability ratio is clipped to 1 - clip_coef .. 1 + clip_coef
    clip_vloss: bool = True  # limit the change of the value too, as OpenAI's baselines does
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 2.0  # weight of the value loss, 0.5 * mean squared error; rsl_rl has 1.0 without the 0.5
    max_grad_norm: float = 1.0  # clip the norms of the actor's and the critic's gradient to this; 0: never
    desired_kl: float | None = 0.01  # adapt the learning rate to aim at this KL; None: off


# For --update NAME. From Python: Args(**UPDATES["google"]). The defaults are rsl_rl's, except --timeouts, --norm-obs,
# --stagger-envs and --total-timesteps. All normalize observations as OpenAI's baselines does.
GOOGLE = dict(
    num_envs=2048, stagger_envs=False, reward_scale=0.1, policy="tanh", hidden_sizes=(64, 64), activation="silu",
    num_steps=80, unroll_length=5, num_minibatches=32, update_epochs=4, learning_rate=3e-4, desired_kl=None, gamma=0.97,
    timeouts="masked", advantages="brax", recompute_targets=True, norm_adv="none", clip_coef=0.3, clip_vloss=False,
    vf_coef=0.5, max_grad_norm=0.0,
)  # fmt: skip
# As the text of a published comparison says. Its formula says --update google --no-recompute-targets.
NVIDIA = GOOGLE | dict(advantages="gae", recompute_targets=False, norm_adv="minibatch")
UPDATES = {"rsl_rl": {}, "google": GOOGLE, "nvidia": NVIDIA}


# =============================================================================================================== agent


class RunningMeanStd(nn.Module):
    """Mean and variance of all rows seen so far. They are buffers, so state_dict and checkpoints contain them."""

    def __init__(self, shape):
        super().__init__()
        # float64: in float32, after millions of rows, new ones would be rounded away.
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def update(self, x):
        """Add the rows of x (..., *shape); under torchrun, the rows of all ranks."""
        x = x.double().reshape(-1, *self.mean.shape)
        mean = average_over_ranks(x.mean(0))
        var = average_over_ranks((x - mean).square().mean(0))
        count = len(x) * (dist.get_world_size() if dist.is_initialized() else 1)
        # Merge old and new rows (Chan et al. 1979): the variance within both groups plus that between their means.
        new_share = count / (self.count + count)
        old_share = 1 - new_share
        delta = mean - self.mean
        self.mean += new_share * delta
        self.var.copy_(old_share * self.var + new_share * var + old_share * new_share * delta.square())
        self.count += count


def mlp(input_size, hidden_sizes, output_size, activation):
    layers = []
    for size in hidden_sizes:  # with torch's initial weights, as in all three systems
        layers += [nn.Linear(input_size, size), {"elu": nn.ELU, "silu": nn.SiLU, "tanh": nn.Tanh}[activation]()]
        input_size = size
    return nn.Sequential(*layers, nn.Linear(input_size, output_size))


def log_tanh_slope(x):
    """log(1 - tanh(x)^2), the logarithm of tanh's derivative, finite even where float32 rounds the latter to 0"""
    return 2 * (math.log(2) - x - nn.functional.softplus(-2 * x))


class Agent(nn.Module):
    """Actor and critic, which share no layers, and the statistics of what each of them sees.

    raw_obs come from the simulator; obs are normalized. Nothing that only the critic sees reaches the actor. To use
    your own network, replace self.actor, (..., D) -> (..., A), or (..., 2 * A) with --policy tanh, and self.critic,
    (..., P) -> (..., 1)."""

    def __init__(self, obs_size, critic_obs_size, action_low, action_high, args):
        super().__init__()
        self.args = args
        self.register_buffer("action_low", torch.as_tensor(action_low))  # (A,), of the action space's dtype
        self.register_buffer("action_high", torch.as_tensor(action_high))
        self.obs_rms = RunningMeanStd((obs_size,))
        self.critic_obs_rms = RunningMeanStd((critic_obs_size,))
        outputs = len(action_low) * (2 if args.policy == "tanh" else 1)
        self.actor = mlp(obs_size, args.hidden_sizes, outputs, args.activation)
        self.critic = mlp(critic_obs_size, args.critic_hidden_sizes or args.hidden_sizes, 1, args.activation)
        if args.policy == "normal":
            self.std = nn.Parameter(torch.full((len(action_low),), float(args.init_std)))

    def normalize(self, raw_obs, rms):
        """raw_obs (..., D) or (..., P) of any dtype -> the same shape, float32. rms: obs_rms or critic_obs_rms"""
        if not self.args.norm_obs:
            return raw_obs.float()
        # float64 until the end: float32 loses digits where means are large. 1e-8 and 10 as in baselines.
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
        """All (..., A) -> log_prob, entropy (...). With --policy tanh the action is the one before tanh, and the
        entropy is an estimate from one new sample, as in Brax: the squashed distribution has no closed form. The
        gradient goes through the sample. In Google's notebook it does not, because torch.normal has none."""
        log_prob = -(0.5 * ((action - mean) / std).square() + std.log() + 0.5 * math.log(2 * math.pi))
        entropy = std.log() + 0.5 * math.log(2 * math.pi * math.e)
        if self.args.policy == "tanh":
            sample = mean + std * torch.randn_like(mean)
            log_prob, entropy = log_prob - log_tanh_slope(action), entropy + log_tanh_slope(sample)
        return log_prob.sum(-1), entropy.sum(-1)

    def to_env_action(self, action):
        """(..., A) -> (..., A) within the bounds of the action space, in its dtype"""
        if self.args.policy == "tanh":
            action = self.action_low + (action.tanh() + 1) / 2 * (self.action_high - self.action_low)
        # After tanh too: rounding can pass a bound.
        return action.clamp(self.action_low, self.action_high).to(self.action_low.dtype)

    @torch.no_grad()
    def predict(self, raw_obs, deterministic=True):
        """Raw observations of the actor, (D,) or (N, D) -> action(s) for the environment, (A,) or (N, A), a tensor"""
        raw_obs = torch.as_tensor(raw_obs, device=self.action_low.device)
        mean, std = self.get_mean_and_std(self.normalize(raw_obs, self.obs_rms))
        return self.to_env_action(mean if deterministic else mean + std * torch.randn_like(mean))

    forward = predict  # the name that torch.export asks for


# ================================================================================================ advantages and losses


def cut_unrolls(x, L):
    """(T, N, ...) -> (L, C, ...): unrolls of L steps side by side. Column u * N + n is unroll u of environment n."""
    return x.unflatten(0, (-1, L)).transpose(0, 1).flatten(1, 2)


def compute_gae(rewards, values, next_values, terminations, truncations, gamma, gae_lambda):
    """Generalized advantage estimation (Schulman et al. 2016). Tensors (T, N) -> advantages, returns (T, N).

    terminations[t] and truncations[t], bool, say whether and how transition t ended its episode. next_values[t] is the
    value of the observation after transition t. After a truncation that is the episode's final observation."""
    next_values = next_values.masked_fill(terminations, 0.0)
    deltas = rewards + gamma * next_values - values  # delta_t = r_t + gamma V(s_{t+1}) - V(s_t)
    # Both kinds of end stop the sum: what comes after belongs to the next episode.
    decays = (gamma * gae_lambda) * (~(terminations | truncations)).to(deltas.dtype)
    advantages = deltas.clone()
    for t in reversed(range(len(deltas) - 1)):  # A_t = delta_t + gamma lambda A_{t+1}, or delta_t at an end
        advantages[t].addcmul_(decays[t], advantages[t + 1])
    return advantages, advantages + values  # returns: the TD(lambda) targets of the critic


def estimate_targets(args, rewards, values, last_values, timeout_values, terminations, truncations):
    """Tensors (L, C) -> advantages, returns (L, C). last_values (C,): V after the last step of each unroll.
    timeout_values, read where truncations is True: V of the observation after the step, or its substitute."""
    if args.timeouts == "masked":  # reward V(s_t), next value 0: this makes delta_t and A_t 0, and the return V(s_t)
        rewards = torch.where(truncations, values, rewards)
        timeout_values = torch.zeros_like(values)

    def one_step_later(x):  # (L, C), values or returns
        x = torch.where(truncations, timeout_values, torch.cat([x[1:], last_values.unsqueeze(0)]))
        return x.masked_fill(terminations, 0.0)

    ends, discounts = (terminations, truncations), (args.gamma, args.gae_lambda)
    advantages, returns = compute_gae(rewards, values, one_step_later(values), *ends, *discounts)
    if args.advantages == "brax":  # r_t + gamma R_{t+1} - V(s_t), with R = returns
        advantages = rewards + args.gamma * one_step_later(returns) - values
    return advantages, returns


def normalize_advantages(advantages):
    """Mean 0 and standard deviation 1, over a rollout (rsl_rl) or a minibatch (NVIDIA)"""
    if advantages.numel() == 1:  # one sample has no standard deviation
        return advantages
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)


def normal_kl(old_mean, old_std, new_mean, new_std):
    """KL(old || new) of normal distributions with independent dimensions, all (..., A) -> (...)"""
    return ((new_std / old_std).log() + (old_std**2 + (old_mean - new_mean) ** 2) / (2 * new_std**2) - 0.5).sum(-1)


def ppo_loss(agent, args, minibatch):
    """Loss of a minibatch, and its metrics by name. minibatch: {name: tensor}, (L, M, ...) with --unroll-length (but
    last_critic_obs (1, M, P)), otherwise (1, M, ...)."""
    mean, std = agent.get_mean_and_std(minibatch["obs"])
    new_log_probs, entropy = agent.get_log_prob_and_entropy(mean, std, minibatch["actions"])
    log_ratio = new_log_probs - minibatch["log_probs"]  # 0 in the first minibatch of an iteration, up to rounding
    ratio = log_ratio.exp()  # pi_new(a|s) / pi_old(a|s)
    if args.recompute_targets:  # with the current critic; its V(s_t) also stands for the values after time limits
        critic_obs = torch.cat([minibatch["critic_obs"], minibatch["last_critic_obs"]])  # (L + 1, M, P)
        new_values = agent.get_value(critic_obs)
        last_values, new_values = new_values[-1].detach(), new_values[:-1]
        values, ends = new_values.detach(), (minibatch["terminations"], minibatch["truncations"])
        advantages, returns = estimate_targets(args, minibatch["rewards"], values, last_values, values, *ends)
    else:
        new_values = agent.get_value(minibatch["critic_obs"])
        advantages, returns = minibatch["advantages"], minibatch["returns"]

    # Clipped surrogate objective (Schulman et al. 2017, eq. 7). The larger loss is the pessimistic one: clipping caps
    # what a change of the policy gains, never what it costs.
    if args.norm_adv == "minibatch":
        advantages = normalize_advantages(advantages)
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = torch.max(-advantages * ratio, -advantages * clipped_ratio).mean()

    value_errors = (new_values - returns).square()
    if args.clip_vloss:  # keep the new value within clip_coef of the old one; use the larger error
        old_values = minibatch["values"]
        near_values = old_values + (new_values - old_values).clamp(-args.clip_coef, args.clip_coef)
        value_errors = torch.max(value_errors, (near_values - returns).square())
    value_loss = 0.5 * value_errors.mean()

    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy.mean()
    metrics = {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy.mean(),
        "approx_kl": (log_ratio.expm1() - log_ratio).mean(),  # k3 of http://joschu.net/blog/kl-approx.html, never < 0
        # Exact, of the normal distributions. Squashing by tanh does not change it.
        "kl": normal_kl(minibatch["means"], minibatch["stds"], mean, std).mean(),
        "clipfrac": ((ratio - 1).abs() > args.clip_coef).float().mean(),
    }
    return loss, {name: metric.detach() for name, metric in metrics.items()}


def adapt_learning_rate(learning_rate, kl, desired_kl):
    """The new learning rate: divided by 1.5 if the KL is above twice desired_kl, multiplied by 1.5 if it is below half.
    Tensors in and out. The bounds 1e-5 and 1e-2 are rsl_rl's."""
    lower = (learning_rate / 1.5).clamp(min=1e-5)
    higher = (learning_rate * 1.5).clamp(max=1e-2)
    return torch.where(kl > 2 * desired_kl, lower, torch.where(kl < desired_kl / 2, higher, learning_rate))


def explained_variance(values, returns):
    """1 - Var(returns - values) / Var(returns): 1 if perfect, 0 for a constant critic, NaN if all returns are equal."""
    variance = returns.var(correction=0)
    return torch.where(variance > 0, 1 - (returns - values).var(correction=0) / variance, torch.nan)


# =============================================================================================================== train


def train(args=None, resume=None):
    """Train an agent. Returns it and its run folder, which is None on ranks above 0.

    resume: the run folder to continue, or "latest". args, if given, replace all settings of that run."""
    # --------------------------------------------------------------------------------------------------------- set-up
    resume = resume and find_run(resume, (args or Args()).runs_dir)
    args = args or (load_args(resume) if resume else Args())
    check(args)
    device, rank, num_ranks = start_device(args)
    T, N = args.num_steps, args.num_envs // num_ranks  # this process has N of the environments
    B = T * args.num_envs
    L = args.unroll_length or T
    M = N * T // (args.unroll_length or 1) // args.num_minibatches  # columns of a minibatch: unrolls or single steps
    num_iterations = args.total_timesteps // B

    envs = make_envs(args, N, device)
    # envs.reset and envs.step without gradients: if a simulator contains networks, their graph would grow step by step.
    reset, step = torch.no_grad()(envs.reset), torch.no_grad()(envs.step)
    with contextlib.ExitStack() as cleanup:  # runs its callbacks at the end, even after an error
        run = Run(args, num_iterations * B, cleanup, resume)
        global_step = run.global_step  # above 0 after --resume
        # Every rank and resumption has its own seeds: one for networks, noise and permutations, one for simulators.
        noise_seed, env_seed = np.random.default_rng([args.seed, global_step, rank]).integers(2**30, size=2).tolist()
        for seed_generator in (random.seed, np.random.seed, torch.manual_seed):  # simulators may draw from them
            seed_generator(env_seed)
        next_obs, next_critic_obs = split_obs(reset(seed=env_seed)[0])
        torch.manual_seed(noise_seed)

        low, high = envs.single_action_space.low.flatten(), envs.single_action_space.high.flatten()
        agent = Agent(next_obs.shape[1], next_critic_obs.shape[1], low, high, args).to(device)
        # Adam is faster on one vector, so each parameter becomes a view of it. Modules made later do not learn.
        # Matrices come first: if layer widths are multiples of 4, each is aligned to 16 bytes, as fast kernels need.
        parameters = sorted(agent.parameters(), key=lambda parameter: -parameter.dim())
        flat_parameters = parameters_to_vector(parameters).detach()
        vector_to_parameters(flat_parameters, parameters)
        if num_ranks > 1:
            dist.broadcast(flat_parameters, src=0)  # all ranks start with the weights of rank 0
        # Their gradients are views too, so that clip_grad_norm_ can clip the actor's part and the critic's.
        flat_parameters.grad = torch.zeros_like(flat_parameters)
        for parameter, part in zip(parameters, flat_parameters.grad.split([x.numel() for x in parameters])):
            parameter.grad = part.view_as(parameter)
        not_critic = [parameter for name, parameter in agent.named_parameters() if not name.startswith("critic.")]
        lr = torch.tensor(args.learning_rate, device=device)  # --desired-kl changes it without waiting for the device
        optimizer = torch.optim.Adam([flat_parameters], lr, eps=1e-8, fused=True)
        run.start(agent, optimizer)
        cleanup.callback(run.close)
        if resume:
            if args.learning_rate == run.checkpoint["args"]["learning_rate"]:  # else the user gave a new one
                lr.copy_(optimizer.param_groups[0]["lr"])
            optimizer.param_groups[0]["lr"] = lr  # loading put another tensor there

        @torch.no_grad()
        def act(raw_obs):
            """raw_obs (N, D) -> actions of the policy (N, A), actions for the environments (N, A)"""
            mean, std = agent.get_mean_and_std(agent.normalize(raw_obs, agent.obs_rms))
            action = mean + std * torch.randn_like(mean)
            return action, agent.to_env_action(action)

        def compute_gradient(minibatch):
            """{name: tensor} -> the gradient of ppo_loss as one vector, and metrics"""
            loss, metrics = ppo_loss(agent, args, minibatch)
            gradients = torch.autograd.grad(loss, parameters)
            return torch.cat([x.flatten() for x in gradients]), metrics

        # Before you change args.ent_coef or another number during the run, read `compiled`.
        act, compute_gradient = compiled(act, args, device), compiled(compute_gradient, args, device)

        # ---------------------------------------------------------------------------------------------------- storage
        # On the device. The last row of raw_critic_obs is the observation after the last step.
        raw_obs = torch.zeros(T, *next_obs.shape, device=device)  # (T, N, D)
        raw_critic_obs = torch.zeros(T + 1, *next_critic_obs.shape, device=device)  # (T + 1, N, P)
        raw_final_obs = torch.zeros(T, *next_critic_obs.shape, device=device)  # (T, N, P), for the critic
        actions = torch.zeros(T, N, len(low), device=device)  # as the policy chose them: not clipped, before tanh
        rewards = torch.zeros(T, N, device=device)
        terminations, truncations, has_final_obs = torch.zeros(3, T, N, dtype=torch.bool, device=device)
        episode_returns, episode_lengths = np.zeros(N), np.zeros(N, dtype=int)
        shortened = np.zeros(N, dtype=bool)  # True during a staggered first episode, which is not logged
        # Without staggering, all environments reach the time limit together, and a batch covers one phase.
        if args.stagger_envs and not hasattr(envs, "episode_length_buf"):
            print(f"{args.env_id} has no episode_length_buf, so --stagger-envs does nothing")
        elif args.stagger_envs:
            envs.episode_length_buf = torch.randint_like(envs.episode_length_buf, int(envs.max_episode_length))
            shortened[:] = True

        timeouts, warned = args.timeouts, False
        for iteration in range(math.ceil(global_step / B) + 1, num_iterations + 1):  # ceil: --resume may change B
            remaining = 1.0 - (iteration - 1) / num_iterations  # 1 in the first iteration, above 0 in the last
            if args.desired_kl is None:
                lr.fill_(args.learning_rate * (remaining if args.anneal_lr else 1.0))

            # ------------------------------------------------------------------------------------------------ rollout
            start_time, simulator_logs = time.monotonic(), []
            for t in range(T):  # nothing here may read a tensor's value: that would wait for the device
                raw_obs[t], raw_critic_obs[t] = next_obs, next_critic_obs
                actions[t], env_actions = act(raw_obs[t])
                # A copy: simulators may keep it, and the next replay of a CUDA graph overwrites the original.
                observed, rewards[t], terminations[t], truncations[t], infos = step(env_actions.clone())
                next_obs, next_critic_obs = split_obs(observed)
                has_final_obs[t] = "final_obs" in infos
                raw_final_obs[t] = split_obs(infos.get("final_obs", observed))[1]
                simulator_logs.append(read_log(infos))
            raw_critic_obs[T] = next_critic_obs
            both = terminations & truncations
            if not warned and both.sum() > 1 and torch.equal(both, truncations):
                warned = True
                print(f"{args.env_id}: all truncations are terminations too: none is bootstrapped; see docs/gpu_sim.md")
            truncations &= ~terminations  # if both are set, it terminated
            episodes = []
            for step_rewards, episode_over in zip(rewards.cpu().numpy(), (terminations | truncations).cpu().numpy()):
                global_step += args.num_envs
                episode_returns += step_rewards
                episode_lengths += 1
                for n in np.flatnonzero(episode_over & ~shortened):
                    length = int(episode_lengths[n])
                    episodes.append({"step": global_step, "return": float(episode_returns[n]), "length": length})
                episode_returns[episode_over], episode_lengths[episode_over], shortened[episode_over] = 0, 0, False
            rollout_end = time.monotonic()

            # --------------------------------------------------------------------------------------------- advantages
            # Weights and statistics are still those of the rollout: one pass gives the values of all its steps.
            with torch.no_grad():
                obs = agent.normalize(raw_obs, agent.obs_rms)  # (T, N, D)
                critic_obs = agent.normalize(raw_critic_obs, agent.critic_obs_rms)  # (T + 1, N, P)
                means, stds = agent.get_mean_and_std(obs)  # (T, N, A)
                log_probs, _ = agent.get_log_prob_and_entropy(means, stds, actions)
                values = agent.get_value(critic_obs)  # (T + 1, N)
                timeout_values = values[:T].clone()  # --timeouts current-value
                if timeouts == "auto":
                    known = truncations & has_final_obs  # (T, N): their final observation is given
                    final_obs = agent.normalize(raw_final_obs[known], agent.critic_obs_rms)
                    timeout_values[known] = agent.get_value(final_obs)
                    if not torch.equal(known, truncations):
                        timeouts = "current-value"
                        print(f"{args.env_id} gave no final_obs at a time limit: continuing with --timeouts {timeouts}")
            steps = {"rewards": args.reward_scale * rewards, "values": values[:T], "timeout_values": timeout_values}
            steps |= {"terminations": terminations, "truncations": truncations}
            steps = {name: cut_unrolls(x, L) for name, x in steps.items()}  # (L, C)
            # Rows L, 2 L, ..., T are what came after each unroll.
            advantages, returns = estimate_targets(args, last_values=values[L::L].flatten(), **steps)
            # Before the update: the critic has not learned from these returns yet.
            scalars = {"losses/explained_variance": explained_variance(steps["values"], returns)}
            if args.norm_adv == "rollout":
                advantages = normalize_advantages(advantages)
            batch = {"obs": obs, "critic_obs": critic_obs[:T], "actions": actions, "log_probs": log_probs}
            batch |= {"means": means, "stds": stds}
            batch = {name: cut_unrolls(x, L) for name, x in batch.items()}  # (L, C, ...)
            batch |= {"values": steps["values"], "advantages": advantages, "returns": returns}
            if args.recompute_targets:  # what estimate_targets needs once more
                batch |= {name: steps[name] for name in ("rewards", "terminations", "truncations")}
                batch["last_critic_obs"] = critic_obs[L::L].flatten(0, 1).unsqueeze(0)  # (1, C, P)
            if not args.unroll_length:
                batch = {name: x.flatten(0, 1).unsqueeze(0) for name, x in batch.items()}  # (1, T * N, ...)
            if args.norm_obs:  # for the next rollout: this one is normalized already
                agent.obs_rms.update(raw_obs)
                agent.critic_obs_rms.update(raw_critic_obs[:T])

            # ------------------------------------------------------------------------------------------------- update
            all_metrics = []
            for _ in range(args.update_epochs):
                for columns in torch.randperm(M * args.num_minibatches, device=device).split(M):
                    minibatch = {name: x[:, columns] for name, x in batch.items()}  # (L, M, ...) or (1, M, ...)
                    gradient, metrics = compute_gradient(minibatch)
                    metrics = {name: average_over_ranks(metric) for name, metric in metrics.items()}
                    all_metrics.append(metrics)
                    flat_parameters.grad.copy_(average_over_ranks(gradient))
                    if args.max_grad_norm > 0:
                        nn.utils.clip_grad_norm_(not_critic, args.max_grad_norm)
                        nn.utils.clip_grad_norm_(agent.critic.parameters(), args.max_grad_norm)
                    if args.desired_kl is not None and len(all_metrics) > 1:  # the first KL is 0, up to rounding
                        lr.copy_(adapt_learning_rate(lr, metrics["kl"], args.desired_kl))
                    optimizer.step()
            checked = {"observations": raw_obs, "critic observations": raw_critic_obs, "rewards": rewards}
            for name, x in {**checked, "weights": flat_parameters}.items():
                if not x.isfinite().all():
                    raise UsageError(f"NaN or infinity in the {name}: training stopped; this iteration was not saved")

            # -------------------------------------------------------------------------------------------- log and save
            for name in all_metrics[0]:  # means over the minibatches
                scalars[f"losses/{name}"] = torch.stack([metrics[name] for metrics in all_metrics]).mean()
            scalars |= {"charts/learning_rate": lr, "charts/policy_std": stds.mean()}
            scalars["Perf/collection_time"] = rollout_end - start_time
            scalars["Perf/learning_time"] = time.monotonic() - rollout_end
            for name in {name for numbers in simulator_logs for name in numbers}:
                scalars[name] = torch.stack([x[name].to(device) for x in simulator_logs if name in x]).mean()
            run.log(global_step, gather_from_ranks(episodes), scalars)
            run.save(agent, optimizer, force=iteration == num_iterations)
        return agent, run.dir


# =============================================================================== services: no PPO from here to the end


class UsageError(ValueError):
    """An error that users can fix. `main` prints it in one line and exits with 2."""


def check(args):
    """Refuse settings that cannot work, before anything is created."""
    batch_size = args.num_envs * args.num_steps
    if args.total_timesteps < batch_size:
        raise UsageError(f"--total-timesteps must be at least num_envs * num_steps = {batch_size}")
    if args.num_steps % (args.unroll_length or 1):
        raise UsageError(f"--unroll-length must divide --num-steps {args.num_steps}")
    columns = batch_size // (args.unroll_length or 1)
    if columns % args.num_minibatches:
        divisors = [n for n in range(1, columns + 1) if columns % n == 0]
        raise UsageError(f"--num-minibatches must divide {columns} steps or unrolls: choose one of {divisors}")
    if args.anneal_lr and args.desired_kl is not None:
        raise UsageError("--anneal-lr and --desired-kl both set the learning rate: add --desired-kl None")
    if args.recompute_targets and (args.timeouts == "auto" or args.norm_adv == "rollout" or not args.unroll_length):
        raise UsageError("--recompute-targets needs --unroll-length, no --timeouts auto and no --norm-adv rollout")


def start_device(args):
    """-> device, rank, num_ranks. Under torchrun the processes (ranks) meet, through NCCL on GPUs and gloo on CPUs."""
    device = torch.device(args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", device.index or 0)))
        torch.cuda.set_device(device)  # JAX takes only tensors of the current device
        torch.set_float32_matmul_precision("high")  # TF32: faster, with 10-bit mantissas
    if dist.is_torchelastic_launched() and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    if not dist.is_initialized():
        return device, 0, 1
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    columns = args.num_envs // num_ranks * args.num_steps // (args.unroll_length or 1)
    if args.num_envs % num_ranks or columns % args.num_minibatches:
        raise UsageError(f"{num_ranks} processes cannot share --num-envs {args.num_envs} or their minibatches equally")
    return device, rank, num_ranks


def average_over_ranks(x):
    """The mean over all ranks. A copy, because the next replay of a CUDA graph overwrites x."""
    x = x.clone()
    if dist.is_initialized():
        dist.all_reduce(x)
        x /= dist.get_world_size()
    return x


def gather_from_ranks(episodes):
    """The episodes of all ranks, in the order of their steps."""
    if not dist.is_initialized():
        return episodes
    lists = [None] * dist.get_world_size()
    dist.all_gather_object(lists, episodes)
    return sorted((x for part in lists for x in part), key=lambda episode: episode["step"])


def compiled(function, args, device):
    """torch.compile, unless --no-compile. It compiles again for each new value of a number that the function reads,
    such as args.ent_coef, and fails at the ninth. A tensor may change: see "A schedule" in docs/your-environment.md."""
    torch.compiler.reset()  # forget what an earlier `train` compiled; this one compiles nothing until the rollout
    torch._dynamo.config.trace_autograd_ops = True  # allows torch.autograd.grad in compiled functions
    # fallback_random: draw as eager mode does. cpp_wrapper: call the kernels from C++. vec_isa_ok: skip a self-test.
    options = {"fallback_random": True, "cpp_wrapper": device.type == "cpu", "cpp.vec_isa_ok": True}
    options["triton.cudagraphs"] = device.type == "cuda"  # on a GPU, all kernels of a call are one CUDA graph
    # Not dynamic: torch 2.14 computed a wrong loss when a number varied.
    return torch.compile(function, fullgraph=True, dynamic=False, options=options) if args.compile else function


class VectorEnvs:
    """What this file needs of simulators: gymnasium's vector environment, but with tensors that stay on the device, as
    in Isaac Lab. --env-id MODULE:FUNCTION names a function(num_envs, device, seed, **env_kwargs) that makes them.
    reset(seed) -> observations, infos
    step(actions (N, A)) -> observations, rewards (N,), terminations (N,) bool, truncations (N,) bool, infos

    Observations are a tensor (N, D) or a mapping {"policy": (N, D), "critic": (N, P)}. `step` resets ended environments
    and returns their first observations. Optional: infos["final_obs"], the last observations, N rows in the same form,
    read where truncated. infos["log"] and ["episode"] are {name: number}. --stagger-envs writes step counts below
    max_episode_length to episode_length_buf (N,); `step` must continue from them. docs/gpu_sim.md has an example."""

    num_envs: int
    single_action_space: gym.spaces.Box  # of any shape, actions come flat; without bounds only for --policy normal


def split_obs(obs):
    """Observations of VectorEnvs -> what the actor sees (N, D), what the critic sees (N, P)"""
    groups = obs if isinstance(obs, Mapping) else {"policy": obs}
    policy = groups.get("policy")
    critic = groups.get("critic", policy)
    if not all(torch.is_tensor(x) and x.dim() == 2 for x in (policy, critic)):
        given = {name: list(x.shape) if torch.is_tensor(x) else type(x).__name__ for name, x in groups.items()}
        raise UsageError(f'observations must be tensors, (N, D) or {{"policy": (N, D), "critic": (N, P)}}, not {given}')
    return policy, critic


def read_log(infos):
    """The numbers that a simulator logs, such as reward terms, under rsl_rl's names: {name: tensor ()}"""
    numbers = {**infos.get("episode", {}), **infos.get("log", {})}.items()
    return {name if "/" in name else f"Episode/{name}": torch.as_tensor(x).float().mean() for name, x in numbers}


class BraxEnvs:
    """Brax (JAX). Tensors share memory with its arrays. An environment begins every episode in the same state."""

    def __init__(self, name, num_envs, device, backend="spring", episode_length=1000, **kwargs):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take the whole GPU
        import jax
        from brax import envs
        from brax.envs.wrappers.training import AutoResetWrapper, EpisodeWrapper, VmapWrapper

        try:
            self.jax_device = jax.devices("cpu" if device.type == "cpu" else "gpu")[device.index or 0]
        except RuntimeError:
            raise UsageError('JAX sees no GPU: python -m pip install "jax[cuda13]", or add --device cpu') from None
        env = envs.get_environment(name, backend=backend, **kwargs)

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


class GymEnvs:
    """A vector of gymnasium environments as VectorEnvs. Every step copies observations to the device, actions back."""

    def __init__(self, env_id, num_envs, device, **kwargs):
        # Flattening also copies. Otherwise an environment could overwrite its final observation when it resets.
        kwargs["wrappers"] = [gym.wrappers.FlattenObservation]
        kwargs["vector_kwargs"] = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
        self.envs = gym.make_vec(env_id, num_envs, "sync", **kwargs)
        self.num_envs, self.single_action_space = num_envs, self.envs.single_action_space
        self.tensor = partial(torch.as_tensor, device=device)

    def reset(self, seed=None):
        return self.tensor(self.envs.reset(seed=seed)[0]), {}  # environment n gets seed + n

    def step(self, actions):
        env_actions = actions.cpu().numpy().reshape(self.envs.action_space.shape)
        obs, rewards, terminations, truncations, infos = self.envs.step(env_actions)
        final_obs, ended = obs.copy(), terminations | truncations
        if ended.any():  # obs belong to the next episode already
            final_obs[ended] = np.stack(infos["final_obs"][ended])
        return *map(self.tensor, (obs, rewards, terminations, truncations)), {"final_obs": self.tensor(final_obs)}


def make_envs(args, num_envs, device):
    kwargs = json.loads(args.env_kwargs)
    if args.env_id.startswith("brax/"):
        envs = BraxEnvs(args.env_id[5:], num_envs, device, **kwargs)
    elif re.fullmatch(r"[\w.]+:\w+", args.env_id):  # gymnasium's own MODULE:NAME-v0 has a hyphen
        module, function = args.env_id.split(":")
        rank = dist.get_rank() if dist.is_initialized() else 0  # each process seeds its simulators differently
        envs = getattr(importlib.import_module(module), function)(num_envs, device, args.seed + 1000 * rank, **kwargs)
    else:
        envs = GymEnvs(args.env_id, num_envs, device, **kwargs)
    if envs.num_envs != num_envs:
        raise UsageError(f"{args.env_id} made {envs.num_envs} environments instead of {num_envs}")
    action_space = envs.single_action_space
    if not isinstance(action_space, gym.spaces.Box) or action_space.dtype.kind != "f":
        raise UsageError(f"{args.env_id} has actions {action_space}: use ppo_discrete.py")
    if args.policy == "tanh" and not action_space.is_bounded():
        raise UsageError(f"{args.env_id} has actions without bounds: use --policy normal")
    return envs


class Run:
    """A run's folder (args.json, script, TensorBoard, episodes.csv, checkpoint.pt), W&B and the progress bar."""

    def __init__(self, args, total_steps, cleanup, resume=None):
        name = re.sub(r"[^\w.-]", "-", f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time():.3f}")
        self.args, self.total_steps = args, total_steps
        if dist.is_initialized() and dist.get_rank() > 0:  # only rank 0 writes: here log, save and close do nothing
            self.dir, self.checkpoint = None, load_checkpoint(resume) if resume else {}
            self.global_step = self.checkpoint.get("global_step", 0)
            self.log = self.save = self.close = lambda *arguments, **options: None
            return
        self.dir = Path(resume or Path(args.runs_dir, name)).expanduser()
        try:  # the lock is released when `train` or the process ends, however it ends
            self.dir.mkdir(parents=True, exist_ok=True)
            cleanup.enter_context(FileLock(self.dir / "lock", timeout=0))
        except Timeout:
            raise UsageError(f"another process is training in {self.dir}") from None
        self.checkpoint = load_checkpoint(self.dir) if resume else {}
        self.global_step = self.checkpoint.get("global_step", 0)

    def start(self, agent, optimizer):
        """With --resume, load the checkpoint into agent and optimizer. Then open the logs, on rank 0."""
        args, state = self.args, self.checkpoint.get("agent")
        if state:
            for name, x in agent.named_buffers(recurse=False):  # load_state_dict would overwrite these without a word
                if name.startswith("action_") and not (name in state and state[name].equal(x.cpu())):
                    raise UsageError(f"{args.env_id} has another {name} than the checkpoint in {self.dir}")
            agent.load_state_dict(state)
            optimizer.load_state_dict(self.checkpoint["optimizer"])
        if self.dir is None:
            return
        if self.global_step <= self.total_steps - args.num_envs * args.num_steps:  # an iteration remains
            about = {"script": Path(__file__).stem, "version": __version__, **vars(args)}
            (self.dir / "args.json").write_text(json.dumps(about, indent=2))
            (self.dir / Path(__file__).name).write_text(Path(__file__).read_text())
        if args.track:
            import wandb

            folder = self.dir.resolve()
            options = {"resume": "allow", "reinit": "create_new", "dir": folder, "save_code": True}
            names = {"name": folder.name, "project": args.wandb_project_name, "entity": args.wandb_entity}
            run_id = self.checkpoint.get("wandb_id") or folder.name  # in a sweep, W&B chooses the id
            self.wandb = wandb.init(id=run_id, **names, **options, config=vars(args))
        # Logs newer than the checkpoint: purge_step hides TensorBoard's, episodes.csv is cut below, W&B keeps its own.
        self.writer = SummaryWriter(self.dir, purge_step=self.global_step + 1)
        rows = "".join(f"|{name}|{value}|\n" for name, value in vars(args).items())
        self.writer.add_text("hyperparameters", "|param|value|\n|-|-|\n" + rows)
        if state:
            os.truncate(self.dir / "episodes.csv", self.checkpoint["episodes_size"])
        self.episodes_file = (self.dir / "episodes.csv").open("a", newline="\n")
        if not state:
            self.episodes_file.write("global_step,episodic_return,episodic_length,seconds\n")
        self.recent_returns = deque(self.checkpoint.get("recent_returns", []), maxlen=100)
        self.start_time = time.monotonic() - self.checkpoint.get("seconds", 0.0)
        self.last_log, self.last_save = time.monotonic(), -math.inf  # the first iteration is saved
        compiling = ", compiling" if args.compile else ""
        print(f"{self.dir}: step {self.global_step:,} of {self.total_steps:,}{compiling}", flush=True)
        self.bar = tqdm(total=self.total_steps, initial=self.global_step, unit="step", unit_scale=True, disable=None)

    def log(self, global_step, episodes, scalars):
        """Log an iteration. episodes: dicts of step, return, length. scalars: {name: number or tensor ()}"""
        now, text = time.monotonic(), "no whole episode yet"
        for x in episodes:
            self.episodes_file.write(f"{x['step']},{x['return']:.6g},{x['length']},{now - self.start_time:.2f}\n")
            self.recent_returns.append(x["return"])
        if episodes:
            scalars["charts/episodic_return"] = np.mean([x["return"] for x in episodes])
            scalars["charts/episodic_length"] = np.mean([x["length"] for x in episodes])
        if self.recent_returns:
            scalars["charts/last_100_return"] = np.mean(self.recent_returns)
            text = f"return {scalars['charts/last_100_return']:.1f}"
        scalars["charts/SPS"] = (global_step - self.global_step) / (now - self.last_log)
        scalars = {name: float(value) for name, value in scalars.items()}
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, global_step)
        if self.args.track:
            self.wandb.log(scalars | {"global_step": global_step}, step=global_step)
        text += "   collecting {Perf/collection_time:.2f} s, learning {Perf/learning_time:.2f} s".format(**scalars)
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(global_step - self.global_step)
        if self.bar.disable and global_step * 20 // self.total_steps > self.global_step * 20 // self.total_steps:
            print(f"step {global_step:>10,}   {text}   {scalars['charts/SPS']:,.0f} steps/s", flush=True)  # 20 per run
        self.last_log, self.global_step = now, global_step

    def save(self, agent, optimizer, force):
        """Write checkpoint.pt if the interval has passed, or if forced. A kill while writing leaves the old file."""
        if not force and time.monotonic() - self.last_save < self.args.checkpoint_interval:
            return
        self.episodes_file.flush()  # logs first: a checkpoint must not count episodes that are not on disk
        self.writer.flush()
        self.last_save = time.monotonic()
        checkpoint = {
            "agent": agent.state_dict(),
            "optimizer": optimizer.state_dict(),
            "args": vars(self.args),
            "global_step": self.global_step,
            "seconds": self.last_save - self.start_time,
            "episodes_size": self.episodes_file.tell(),
            "recent_returns": list(self.recent_returns),
            "wandb_id": self.wandb.id if self.args.track else None,
        }
        torch.save(checkpoint, self.dir / "checkpoint.tmp")
        os.replace(self.dir / "checkpoint.tmp", self.dir / "checkpoint.pt")

    def close(self):
        self.bar.close()
        self.writer.close()
        self.episodes_file.close()
        if self.args.track:
            self.wandb.finish()
        if self.recent_returns:
            print(f"mean return of the last {len(self.recent_returns)} episodes: {np.mean(self.recent_returns):.1f}")
        script = os.path.relpath(__file__)
        env_id = f" --env-id {self.args.env_id}" if ":" in self.args.env_id else ""
        finished = self.global_step > self.total_steps - self.args.num_envs * self.args.num_steps
        word = "evaluate" if finished else "resume"
        if (self.dir / "checkpoint.pt").exists():
            print(f"to {word}: python {script} --{word} {self.dir}{env_id}")


def find_run(name, runs_dir="runs"):
    """The path of a run folder. "latest" is this script's run with the newest checkpoint."""
    if name != "latest":
        return Path(name).expanduser()
    paths = Path(runs_dir).expanduser().glob("*/checkpoint.pt")
    paths = [path for path in paths if path.with_name(Path(__file__).name).exists()]
    if not paths:
        raise UsageError(f"no run of {Path(__file__).name} in {runs_dir}: name a run folder, or add --runs-dir")
    return max(paths, key=os.path.getmtime).parent


def load_checkpoint(run_dir):
    """The checkpoint, on the CPU. weights_only: loading runs no code."""
    return torch.load(Path(run_dir, "checkpoint.pt"), map_location="cpu", weights_only=True)


def load_args(run_dir):
    """The settings of a run."""
    return Args(**load_checkpoint(run_dir)["args"])


def load_agent(run_dir):
    """The trained agent of a run folder: load_agent("runs/NAME").predict(raw_obs) is an action."""
    state = load_checkpoint(run_dir)["agent"]
    sizes = len(state["obs_rms.mean"]), len(state["critic_obs_rms.mean"])
    agent = Agent(*sizes, state["action_low"], state["action_high"], load_args(run_dir))
    agent.load_state_dict(state)
    return agent


def export_actor(run_dir):
    """Write RUN_DIR/actor.pt2 and, with onnxscript, actor.onnx: raw obs (N, D) float32 -> mean actions (N, A)"""
    agent, path = load_agent(run_dir), Path(run_dir, "actor")
    agent.critic = agent.critic_obs_rms = None
    example, rows = torch.zeros(2, len(agent.obs_rms.mean)), {0: torch.export.Dim("N", min=1)}
    program = torch.export.export(agent, (example,), dynamic_shapes=(rows,))
    torch.export.save(program, path.with_suffix(".pt2"))
    print(path.with_suffix(".pt2"))
    if importlib.util.find_spec("onnxscript"):
        names = {"input_names": ["observations"], "output_names": ["actions"]}
        torch.onnx.export(program, f=path.with_suffix(".onnx"), **names, external_data=False, verbose=False)
        print(path.with_suffix(".onnx"))
    else:
        print("for actor.onnx: pip install onnx onnxscript")


@torch.no_grad()
def evaluate(agent, envs, seed, deterministic=True):
    """The return of each environment's first episode, (N,). The agent does not change."""
    running = torch.ones(envs.num_envs, dtype=torch.bool, device=agent.action_low.device)
    episodic_returns = torch.zeros_like(running, dtype=torch.float32)
    devices = {x.device for x in agent.parameters() if x.is_cuda}  # fork_rng's default is every GPU
    with torch.random.fork_rng(devices), contextlib.ExitStack() as cleanup:  # leave training's random numbers alone
        cleanup.callback(random.setstate, random.getstate())
        cleanup.callback(np.random.set_state, np.random.get_state())
        for seed_generator in (random.seed, np.random.seed, torch.manual_seed):
            seed_generator(seed)
        obs, _ = envs.reset(seed=seed)
        for t in range(30_000):  # a good policy might never end an episode
            if t % 50 == 0 and not running.any():  # not in every step: it waits for the device
                break
            obs, rewards, terminations, truncations, _ = envs.step(agent.predict(split_obs(obs)[0], deterministic))
            episodic_returns += torch.where(running, rewards, 0.0)  # what comes after the end may be NaN
            running &= ~(terminations.bool() | truncations.bool())  # simulators also give 0 and 1
    if running.any():
        print(f"{running.sum()} episodes are cut after 30,000 steps")
    return episodic_returns.cpu().numpy()


def parse_args(words, default=None):
    """Command line -> Args. Takes `wandb sweep`'s forms too: --anneal_lr=True, --hidden_sizes=[64, 64], --seed=1e6"""
    default, argv = default or Args(), []
    for word in words:
        flag, _, value = word.partition("=") if word.startswith("--") else ("", "", word)
        current = getattr(default, flag[2:].replace("-", "_"), None)
        if isinstance(current, bool) and value in ("True", "False"):
            word = flag if value == "True" else f"--no-{flag[2:]}"
        elif isinstance(current, int) and re.fullmatch(r"\d+\.0|\d+e\+?\d+", value):
            word = f"{flag}={float(value):.0f}"
        elif isinstance(current, (tuple, list)) and value.startswith("["):
            argv += [flag, *value.strip("[]").replace(",", " ").split()]
            continue
        argv.append(word)
    return tyro.cli(Args, args=argv, default=default, description=__doc__.split("\n\nWhere")[0])


def main():
    sys.path.append(os.getcwd())  # for --env-id my_module:make_envs
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    one_of = parser.add_mutually_exclusive_group()
    one_of.add_argument("--update", choices=UPDATES)
    one_of.add_argument("--resume")
    one_of.add_argument("--evaluate")
    one_of.add_argument("--export")
    command, words = parser.parse_known_args()
    run_dir = command.resume or command.evaluate or command.export
    if run_dir:
        run_dir = find_run(run_dir, parse_args(words).runs_dir)  # --runs-dir may be among the words
    args = parse_args(words, load_args(run_dir) if run_dir else Args(**UPDATES[command.update or "rsl_rl"]))
    if command.export:
        return export_actor(run_dir)
    if run_dir and ":" in args.env_id and not any(args.env_id in word for word in words):  # importing runs code
        raise UsageError(f"the checkpoint names a module: if you trust it, add --env-id {args.env_id}")
    if not command.evaluate:
        train(args, run_dir)
        if dist.is_initialized():
            dist.destroy_process_group()
        return
    device, *_ = start_device(args)
    envs = make_envs(args, args.eval_episodes, device)
    returns = evaluate(load_agent(run_dir).to(device), envs, args.seed, args.eval_deterministic)
    print(f"{len(returns)} episodes: mean {returns.mean():.6g}, standard deviation {returns.std():.6g}")


if __name__ == "__main__":
    try:
        main()
    except (UsageError, ImportError, gym.error.UnregisteredEnv, gym.error.DependencyNotInstalled) as error:
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
