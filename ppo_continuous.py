# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.11,<3", "gymnasium[mujoco,classic-control]>=1.4,<2", "mujoco>=3.2,<5", "ale-py>=0.12,<0.13",
#     "numpy>=1.26,<3", "tyro>=1.0,<2", "tensorboard>=2.18,<3", "wandb>=0.22,<1", "tqdm>=4.66,<5",
#     "filelock>=3.13,<5", "moviepy>=2.1,<3", "opencv-python-headless>=4.10,<6",
# ]
# ///
"""Proximal Policy Optimization (PPO) for continuous (Box) actions, in one file.

    python ppo_continuous.py --env-id HalfCheetah-v4     # train; logs and checkpoints go to runs/NAME
    python ppo_continuous.py --resume runs/NAME          # go on after Ctrl-C, a kill or a crash
    python ppo_continuous.py --evaluate runs/NAME        # play episodes with the trained agent
    torchrun --nproc-per-node 2 ppo_continuous.py        # train in two processes, each with half the environments

Choices, where implementations of PPO differ (what each one gains: docs/notes/):
 1. A truncated episode (time limit) is bootstrapped from its final observation. A terminated one is not.
 2. Observations are normalised once, when the policy acts, and stored. The update reads the stored ones, so the
    probability ratio is 1 in the first minibatch. Their mean and variance change between rollouts only, and are saved.
 3. Rewards are divided by the standard deviation of the discounted return. Logged returns are raw.
 4. Values and advantages are computed after the rollout; with --recompute-advantages, again before every later epoch.
 5. The value loss is 0.5 * MSE, clipped only with --clip-vloss. --norm-adv normalises advantages per minibatch.
 6. --target-kl ends an update before the step of a minibatch whose approximate KL exceeds 1.5 times the target
    (SB3). --desired-kl adapts the learning rate (rsl_rl). --kl-coef adds the approximate KL to the loss.
 7. As in OpenAI's baselines: orthogonal initialisation, Adam with eps 1e-5, one gradient norm for all parameters.
 8. The environment gets the action clipped to its bounds. The policy learns from the unclipped action.
 9. Many environments and short rollouts (100 x 20). --stagger-envs shortens first episodes, each to another length.
10. --log-std-min and --log-std-max bound the learned log_std. --anneal-std then scales the standard deviation to 0.

In reading order: Args, agent, advantages and losses, train. The services below `train` hold no PPO.
Shapes: T = num_steps, N = num_envs, B = T * N (batch), M = B / num_minibatches, D = observation size, A = action size.
Step t: the agent sees obs[t] and takes actions[t]. It gets rewards[t], terminations[t], truncations[t].
With the defaults B = 2,000 and M = 80: at most 25 minibatches * 10 epochs = 250 gradient steps per iteration.
Siblings: ppo_continuous.py (Box actions), ppo_discrete.py (Discrete actions, images, Atari), ppo_rnn.py (memory).
"""

import contextlib
import copy
import dataclasses
import inspect
import json
import math
import multiprocessing
import os
import random
import re
import signal
import sys
import time
import warnings
from collections import deque
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import tyro
from filelock import FileLock, Timeout
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters
from torch.utils._pytree import tree_leaves
from torch.utils.tensorboard import SummaryWriter
from tqdm.auto import tqdm


@dataclasses.dataclass
class Args:  # the comments are what --help prints
    # --- run
    exp_name: str = "ppo_continuous"  # part of the run folder's name, RUNS_DIR/ENV_ID__EXP_NAME__SEED__TIME
    runs_dir: str = "runs"  # where run folders are made
    seed: int = 1  # seed of networks, noise and environments; each environment gets its own
    torch_deterministic: bool = True  # CUDA: only deterministic cuDNN kernels; a CPU always repeats a seed bit for bit
    device: str = "auto"  # cpu, cuda, cuda:1; auto: cuda for minibatches of 4096 and more, otherwise cpu
    compile: bool = True  # torch.compile, which needs a C++ compiler: 10 s at the start, then 2-3 times faster
    checkpoint_interval: int = 10  # iterations between checkpoints; the first and the last are always saved
    resume: str | None = None  # run folder to continue, or latest; its arguments apply, except those given again
    evaluate: str | None = None  # run folder, or latest, whose agent plays --eval-episodes episodes, without learning
    eval_episodes: int = 10  # episodes that --evaluate plays
    eval_deterministic: bool = True  # evaluate with the likeliest action; off: sample actions as in training
    capture_video: bool = False  # record --evaluate, or about ten episodes during training, to RUN_DIR/videos
    track: bool = False  # log to Weights & Biases too
    wandb_project_name: str = "ppo"  # project for --track
    wandb_entity: str | None = None  # team for --track; None: your default
    # --- environment
    env_id: str = "HalfCheetah-v4"  # a gymnasium id with Box actions; observations are flattened into a vector
    env_kwargs: str = "{}"  # arguments of the environment, as JSON: '{"gravity": 5}'
    total_timesteps: int = 1_000_000  # environment steps of the run, rounded down to whole iterations
    num_envs: int = 100  # environments stepped side by side (N)
    stagger_envs: bool = True  # shorten first episodes, each to another length, and do not log these
    async_envs: bool = False  # each environment in its own process: worth it if a step takes a millisecond or more
    norm_obs: bool = True  # normalise observations by their running mean and standard deviation, clip to +-10
    norm_reward: bool = True  # divide rewards by the running standard deviation of the discounted return, clip to +-10
    # --- PPO
    hidden_sizes: tuple[int, ...] = (64, 64)  # units of the tanh layers of actor and of critic (Schulman et al. 2017)
    num_steps: int = 20  # steps of each environment per iteration (T)
    learning_rate: float = 3e-4  # Adam's learning rate; with --anneal-lr or --desired-kl its initial value
    anneal_lr: bool = True  # lower the learning rate linearly to 0 over the run
    gamma: float = 0.99  # discount factor, 0 to 1
    gae_lambda: float = 0.95  # 0: one-step TD error (low variance); 1: rewards to the rollout's end, then V (low bias)
    num_minibatches: int = 25  # minibatches per epoch; must divide num_envs * num_steps (of a process)
    update_epochs: int = 10  # passes over the batch of an iteration
    norm_adv: bool = False  # give the advantages of each minibatch mean 0 and standard deviation 1
    recompute_advantages: bool = True  # compute values, advantages and returns again before every epoch but the first
    clip_coef: float = 0.2  # the probability ratio is clipped to 1 - clip_coef .. 1 + clip_coef
    anneal_clip: bool = False  # lower the clip ranges of policy and value linearly to 0 over the run
    clip_vloss: bool = False  # value loss: of the errors of the new value and of the clipped one, the larger counts
    vf_clip_coef: float | None = None  # --clip-vloss: how far a new value may be from the old one; None: clip_coef
    ent_coef: float = 5e-4  # weight of the entropy bonus
    vf_coef: float = 0.25  # weight of the value loss, which is 0.5 * mean squared error
    kl_coef: float = 0.01  # weight of KL(old, new) in the loss, a pull back to the policy that acted; 0: none
    max_grad_norm: float = 0.5  # upper bound on the norm of the whole gradient; 0: none
    target_kl: float | None = 0.04  # end the update once its approximate KL exceeds 1.5 * target_kl; None: never
    desired_kl: float | None = None  # adapt the learning rate to this KL (try 0.01); --anneal-lr then has no effect
    log_std_init: float = -0.5  # initial log of the policy's standard deviation, moved inside the bounds below
    anneal_std: bool = True  # scale the learned standard deviation by sin(pi/2 * share of the run that is left)
    log_std_min: float | None = -1.5  # lower bound on the learned log_std, before --anneal-std; None: no bound
    log_std_max: float | None = -0.5  # upper bound, raised by log(k) if actions reach +-k, k > 1; None: no bound


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


def layer_init(layer, gain=2**0.5):  # gains of baselines: sqrt(2), 1 for the value, 0.01 for the policy
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(input_size, hidden_sizes, output_size, gain):
    layers = []
    for size in hidden_sizes:
        layers += [layer_init(nn.Linear(input_size, size)), nn.Tanh()]
        input_size = size
    return nn.Sequential(*layers, layer_init(nn.Linear(input_size, output_size), gain))


class Agent(nn.Module):
    """Actor and critic, which share no layers, and the statistics of observations and returns.

    `normalize_obs` and `predict` take raw observations, all other methods normalised ones."""

    def __init__(self, obs_shape, action_low, action_high, args):
        super().__init__()
        self.args = args
        self.register_buffer("action_low", torch.as_tensor(action_low))  # shaped as an action
        self.register_buffer("action_high", torch.as_tensor(action_high))
        action_size = self.action_low.numel()
        self.obs_rms = RunningMeanStd(obs_shape)
        self.return_rms = RunningMeanStd(())
        self.register_buffer("log_std_shift", torch.zeros(1))  # log of --anneal-std's factor
        self.critic = mlp(obs_shape[0], args.hidden_sizes, 1, gain=1.0)
        # gain 0.01: means start near 0 everywhere, so the first policy is the same noise in every state.
        self.actor = mlp(obs_shape[0], args.hidden_sizes, action_size, gain=0.01)
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
        mean = self.actor(obs)
        return mean, (self.clamp_log_std(self.log_std) + self.log_std_shift).expand_as(mean)

    def clamp_log_std(self, log_std):
        """The learned log_std (..., A) between --log-std-min and --log-std-max. The upper bound grows with the largest
        |action| above 1: noise that is large for a range of 1 is small for a range of 3."""
        if self.args.log_std_min is not None:
            log_std = log_std.clamp(min=self.args.log_std_min)
        if self.args.log_std_max is not None:
            reach = torch.max(self.action_high, -self.action_low).clamp(min=1.0).flatten()
            reach = reach.where(reach < 1e30, 1.0)  # unbounded: infinity, or the largest float
            log_std = log_std.clamp(max=self.args.log_std_max + reach.log().to(log_std.dtype))
        return log_std

    @torch.no_grad()
    def anneal_std(self, remaining):
        """--anneal-std scales the standard deviation by sin(pi/2 * remaining): 1 at the start, near 0 at the end.
        Its log is added to the bounded log_std. This also moves the learned log_std back inside its bounds."""
        self.log_std_shift.fill_(math.log(math.sin(math.pi / 2 * remaining)) if self.args.anneal_std else 0.0)
        self.log_std.copy_(self.clamp_log_std(self.log_std))  # outside its bounds its gradient is 0

    def get_action_and_value(self, obs, action=None):
        """obs (..., D), action (..., A) or None to sample one -> action (..., A) and log_prob, entropy, value (...)

        The normal distribution is written out: torch.distributions would cost more than these networks do."""
        mean, log_std = self.get_mean_and_log_std(obs)
        if action is None:
            action = mean + log_std.exp() * torch.randn_like(mean)
        z = (action - mean) / log_std.exp()
        log_prob = -(0.5 * z.square() + log_std + 0.5 * math.log(2 * math.pi)).sum(-1)
        # Entropy of the unclipped normal distribution, in nats. It depends on log_std alone.
        entropy = (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)
        return action, log_prob, entropy, self.get_value(obs)

    def to_env_action(self, action):
        """(..., A) -> (..., *shape of the action space), clipped to its bounds"""
        action = action.reshape(action.shape[:-1] + self.action_low.shape)
        return action.clamp(self.action_low, self.action_high).to(self.action_low.dtype)

    @torch.no_grad()
    def predict(self, raw_obs, deterministic=True):
        """Raw observation(s), flat, (D,) or (N, D) -> action(s) for the environment, numpy"""
        obs = self.normalize_obs(torch.as_tensor(np.ascontiguousarray(raw_obs), device=self.obs_rms.mean.device))
        action = self.get_mean_and_log_std(obs)[0] if deterministic else self.get_action_and_value(obs)[0]
        return self.to_env_action(action).cpu().numpy()


# ================================================================================================ advantages and losses


def normalize_rewards(return_rms, discounted_returns, rewards, ended, gamma):
    """rewards (T, N) / standard deviation of the discounted return, clipped to +-10 -> (T, N)

    discounted_returns (N,): the running return G_t = r_t + gamma * G_{t-1} of each environment, as in baselines. It
    restarts from 0 where ended (T, N), bool. It and return_rms change in place. No mean is subtracted."""
    all_returns = torch.empty_like(rewards, dtype=torch.float64)  # (T, N)
    for reward, end, row in zip(rewards, ended, all_returns):
        row.copy_(discounted_returns.mul_(gamma).add_(reward))
        # After the copy: the return with the last reward of an episode counts (SB3).
        discounted_returns.masked_fill_(end, 0.0)
    return_rms.update(all_returns)
    return (rewards / (return_rms.var + 1e-8).sqrt()).clamp(-10, 10).to(rewards.dtype)


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


@torch.no_grad()
def estimate_advantages(agent, obs, last_obs, final_obs, rewards, terminations, truncations, gamma, gae_lambda):
    """values, advantages, returns (T, N) of a rollout, by the agent's present critic.

    obs (T, N, ...); last_obs (N, ...) came after the last step; final_obs (E, ...) are the last observations of the E
    truncated episodes, in the order of truncations.nonzero(). In ppo_rnn.py they hold features, not observations."""
    values = agent.get_value(obs)  # (T, N)
    next_values = torch.cat([values[1:], agent.get_value(last_obs).unsqueeze(0)])  # (T, N)
    # After a truncated step, values[t + 1] belongs to the next episode. s_{t+1} is the final observation.
    next_values[truncations] = agent.get_value(final_obs)
    return values, *compute_gae(rewards, values, next_values, terminations, truncations, gamma, gae_lambda)


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
    # An unbiased estimate of KL(old, new), with an unbiased gradient. The mean of -log_ratio would vary more.
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
    B, M = T * N, T * N // args.num_minibatches
    num_iterations = args.total_timesteps // (T * args.num_envs)

    torch.manual_seed(args.seed)  # networks start equal on all ranks
    envs = make_envs(args, N)
    obs_shape, action_space = envs.single_observation_space.shape, envs.single_action_space
    device = start_device(args, is_large=M >= 4096)
    agent = Agent(obs_shape, action_space.low, action_space.high, args).to(device)
    # One vector holds all parameters, and each of them is a view of it. One norm and one Adam step serve all layers. Do
    # not move or replace a parameter from here on (.to, assign=True): Adam would not reach it.
    flat_parameters = parameters_to_vector(agent.parameters()).detach()
    vector_to_parameters(flat_parameters, agent.parameters())
    flat_parameters.grad = torch.zeros_like(flat_parameters)
    average_over_ranks(flat_parameters)  # equal on all ranks: processors may round the first weights differently
    # Tensors, to be changed in place (fill_, copy_): the compiled functions below see no other change.
    lr, clip_scale = torch.tensor(args.learning_rate, device=device), torch.ones((), device=device)
    optimizer = torch.optim.Adam([flat_parameters], lr, eps=1e-5, foreach=False, capturable=device.type == "cuda")
    adam_step = inspect.unwrap(torch.optim.Adam.step)  # without its hooks, which torch.compile cannot trace
    global_step, seconds = restore(args.resume, agent, optimizer) if args.resume else (0, 0.0)
    # Every rank and every resumption has seeds of its own, for noise, permutations and environments.
    seeds = np.random.SeedSequence([args.seed, rank, global_step]).generate_state(1 + N) >> 1  # 31 bits, for ale-py
    noise_seed, *env_seeds = seeds.tolist()
    torch.manual_seed(noise_seed)

    @torch.no_grad()
    @partial(compiled, args=args, device=device)
    def act(raw_obs):
        """raw_obs (N, D) -> obs (N, D), actions (N, A), log_probs (N,), actions for the environments"""
        obs = agent.normalize_obs(raw_obs)
        # Entropy and value are not used: compiled, they are not computed either.
        action, log_prob, _, _ = agent.get_action_and_value(obs)
        return obs, action, log_prob, agent.to_env_action(action)

    @partial(compiled, args=args, device=device, check=True)
    def compute_gradient(*minibatch):
        """tensors (M, ...) -> the gradient of ppo_loss as one vector, metrics"""
        loss, metrics = ppo_loss(agent, args, clip_scale, *minibatch)
        gradients = torch.autograd.grad(loss, list(agent.parameters()))
        return torch.cat([gradient.flatten() for gradient in gradients]), metrics

    @torch.no_grad()
    @partial(compiled, args=args, device=device)
    def apply_gradient(gradient, approx_kl):
        flat_parameters.grad.copy_(gradient)  # torch.compile refuses an assignment here
        if args.max_grad_norm > 0:
            clip_grad_norm_(flat_parameters, args.max_grad_norm, foreach=False)
        if args.desired_kl is not None:
            lr.copy_(adapt_learning_rate(lr, approx_kl, args.desired_kl))
        adam_step(optimizer)

    # -------------------------------------------------------------------------------------------------------- storage
    obs = torch.zeros(T, N, *obs_shape, device=device)  # as the policy saw them, normalised
    actions = torch.zeros(T, N, action_space.low.size, device=device)  # as the policy chose them, not clipped
    log_probs = torch.zeros(T, N, device=device)
    # Filled step by step in numpy. They go to the device after the rollout.
    step_rewards = np.zeros((T, N), np.float32)
    step_terminations, step_truncations = np.zeros((T, N), bool), np.zeros((T, N), bool)
    discounted_returns = torch.zeros(N, dtype=torch.float64, device=device)  # for normalize_rewards
    episode_returns, episode_lengths = np.zeros(N), np.zeros(N, dtype=int)

    run = Run(args, rank, num_iterations, global_step, seconds, device)
    next_obs, infos = envs.reset(seed=env_seeds)  # raw
    # --stagger-envs brings the time limits of the first episodes forward, each by another amount. Otherwise all would
    # end together, and a batch would hold one phase of the episode.
    elapsed_steps = np.zeros(N, dtype=int)
    if args.stagger_envs and envs.spec.max_episode_steps and hasattr(envs, "set_attr"):
        elapsed_steps = (rank * N + np.arange(N)) * envs.spec.max_episode_steps // args.num_envs
        envs.set_attr("_elapsed_steps", elapsed_steps.tolist())  # of gymnasium.wrappers.TimeLimit
    shortened = elapsed_steps > 0  # bool (N,): first episodes that end early; they are not logged

    first_iteration = math.ceil(global_step / (T * args.num_envs)) + 1  # --resume may come with another batch size
    for iteration in range(first_iteration, num_iterations + 1):
        remaining = 1.0 - (iteration - 1) / num_iterations  # 1 in the first iteration, above 0 in the last
        if args.desired_kl is None:
            lr.fill_(args.learning_rate * (remaining if args.anneal_lr else 1.0))
        clip_scale.fill_(remaining if args.anneal_clip else 1.0)
        agent.anneal_std(remaining)

        # ---------------------------------------------------------------------------------------------------- rollout
        episodes, all_raw_obs, raw_final_obs = [], [], []
        for t in range(T):
            all_raw_obs.append(next_obs.copy())  # an environment's own vector may reuse its array
            obs[t], actions[t], log_probs[t], env_actions = act(torch.from_numpy(next_obs).to(device))
            next_obs, reward, terminated, truncated, infos = envs.step(env_actions.cpu().numpy())
            truncated = truncated & ~terminated  # with both set it terminated
            step_rewards[t], step_terminations[t], step_truncations[t] = reward, terminated, truncated
            global_step += args.num_envs
            if not (np.isfinite(reward).all() and np.isfinite(next_obs).all()):
                fail(f"{args.env_id} returned NaN or infinity in step {global_step}; the last checkpoint is kept")
            if truncated.any():  # next_obs belongs to the next episode already
                raw_final_obs.extend(infos["final_obs"][truncated])
            episode_returns += reward
            episode_lengths += 1
            for n in np.flatnonzero(terminated | truncated):
                if not shortened[n]:
                    numbers = infos["final_info"]["numbers"][n][0] if "numbers" in infos.get("final_info", ()) else {}
                    episodes.append((global_step, episode_returns[n], episode_lengths[n], numbers))
                episode_returns[n], episode_lengths[n], shortened[n] = 0, 0, False

        # ------------------------------------------------------------------------------------------------- advantages
        steps = (step_rewards, step_terminations, step_truncations)  # (T, N)
        rewards, terminations, truncations = (torch.from_numpy(x).to(device) for x in steps)
        if args.norm_reward:
            ended = terminations | truncations
            rewards = normalize_rewards(agent.return_rms, discounted_returns, rewards, ended, args.gamma)
        last_obs = agent.normalize_obs(torch.from_numpy(next_obs).to(device))  # (N, D)
        # (E, D), E truncated episodes, by step and then by environment: the order of truncations.nonzero()
        raw_final_obs = np.array(raw_final_obs, next_obs.dtype).reshape(-1, *obs_shape)
        final_obs = agent.normalize_obs(torch.from_numpy(raw_final_obs).to(device))
        rollout = (obs, last_obs, final_obs, rewards, terminations, truncations, args.gamma, args.gae_lambda)
        values, advantages, returns = estimate_advantages(agent, *rollout)  # (T, N); not compiled, because E changes
        # Before the update: the critic has not learned from these returns yet.
        scalars = {"losses/explained_variance": explained_variance(values, returns)}
        if args.norm_obs:  # for the next rollout: this one is normalised already
            agent.obs_rms.update(torch.from_numpy(np.stack(all_raw_obs)).to(device))

        # ----------------------------------------------------------------------------------------------------- update
        all_metrics, stop_update = [], False
        for epoch in range(args.update_epochs):
            if epoch > 0 and args.recompute_advantages:  # --clip-vloss then clips around the new values
                values, advantages, returns = estimate_advantages(agent, *rollout)
            permutation = torch.randperm(B).to(device)
            tensors = (obs, actions, log_probs, values, advantages, returns)
            b_tensors = [x.flatten(0, 1)[permutation] for x in tensors]  # (B, ...)
            for minibatch in zip(*(x.split(M) for x in b_tensors)):  # (M, ...)
                gradient, metrics = compute_gradient(*minibatch)
                if not all_metrics:  # the first KL is 0: --desired-kl must not act on its rounding error
                    metrics["approx_kl"].zero_()
                average_over_ranks(gradient)
                average_over_ranks(metrics["approx_kl"])  # ranks stop, or change lr, together
                all_metrics.append(metrics)
                if args.target_kl is not None and metrics["approx_kl"].item() > 1.5 * args.target_kl:
                    stop_update = True  # before this minibatch's step
                    break
                apply_gradient(gradient, metrics["approx_kl"])
            if stop_update:
                break
        if not flat_parameters.isfinite().all():
            fail(f"the update of iteration {iteration} gave NaN or infinity; the last checkpoint is kept")

        # ------------------------------------------------------------------------------------------------ log and save
        scalars |= {f"losses/{name}": torch.stack([m[name] for m in all_metrics]).mean() for name in all_metrics[0]}
        for value in scalars.values():
            average_over_ranks(value)
        scalars["charts/learning_rate"] = lr
        run.log(global_step, gather_from_ranks(episodes), scalars)
        stopped = any(gather_from_ranks(list(stop_signals)))  # on any rank; read once, so that all ranks agree
        if iteration % args.checkpoint_interval == 0 or iteration in (1, num_iterations) or stopped:
            run.save(agent, optimizer)
        if args.capture_video and rank == 0 and (iteration == 1 or iteration % math.ceil(num_iterations / 10) == 0):
            evaluate(agent, args.env_id, 1, args.seed, args.eval_deterministic, run.dir, f"step-{global_step}")
        if stopped:
            break

    envs.close()
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
    text = re.sub(r"(?m)^--env(?=[=\n])", "--env-id", re.sub(r"(?m)^--lr(?=[=\n])", "--learning-rate", text))
    text = re.sub(r"(?im)^--([^=\n]+)[=\n]true$", r"--\1", text)
    text = re.sub(r"(?im)^--([^=\n]+)[=\n]false$", r"--no-\1", text)
    whole_number = r"(?m)^(--[^=\n]+[=\n])(\d+\.0*|\d+\.?\d*([eE]\+?\d+|M))$"
    text = re.sub(whole_number, lambda match: f"{match[1]}{float(match[2].replace('M', 'e6')):.17g}", text)
    return tyro.cli(Args, args=text.splitlines(), default=default, description=__doc__.split("\n\nChoices")[0])


def find_run(name, runs_dir):
    """The run folder that --resume and --evaluate name: its path, a file in it, or latest."""
    if name == "latest":
        name = max(Path(runs_dir).glob("*/checkpoint.pt"), key=os.path.getmtime, default="latest")
    return str(Path(name).parent if Path(name).suffix == ".pt" else name)


def check_args(args, num_ranks=1):
    """Refuse arguments that cannot work, before anything is created."""
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        low = 1 if field.type is int and field.name != "seed" else 0
        low = -math.inf if field.name.startswith(("ent_coef", "log_std")) else low
        high = 1 if field.name in ("gamma", "gae_lambda") else math.inf
        if isinstance(value, (int, float)) and not (low <= value <= high and math.isfinite(value)):
            fail(f"--{field.name.replace('_', '-')} must be a finite number from {low} to {high}, not {value}")
    if args.num_envs % num_ranks:
        fail(f"--num-envs {args.num_envs} must be a multiple of the {num_ranks} processes of torchrun")
    if args.total_timesteps < (batch_size := args.num_envs * args.num_steps):
        fail(f"--total-timesteps {args.total_timesteps} is below num_envs * num_steps = {batch_size}")
    size = batch_size // num_ranks
    nearest = sorted((d for d in range(1, size + 1) if size % d == 0), key=lambda d: abs(d - args.num_minibatches))
    if size % args.num_minibatches and args.num_minibatches != Args.num_minibatches:
        fail(f"--num-minibatches {args.num_minibatches} must divide a batch of {size}, as {sorted(nearest[:3])} do")
    if size % args.num_minibatches:  # the default
        args.num_minibatches = nearest[0]
        print(f"--num-minibatches {nearest[0]}, because the default does not divide a batch of {size}", file=sys.stderr)


class VectorMember(gym.Wrapper):
    """One environment of a vector. Of its infos it passes on the numbers at the end of an episode, for the metrics
    info/NAME. Merging more infos takes longer than many a simulator."""

    def reset(self, *, seed=None, options=None):
        if seed is not None:  # for environments that draw from the global generators
            random.seed(seed)
            np.random.seed(seed)
        return self.env.reset(seed=seed, options=options)[0], {}

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        if not (terminated or truncated):
            return obs, reward, terminated, truncated, {}
        numbers = {name: float(x) for name, x in info.items() if isinstance(x, (int, float, np.number, np.bool_))}
        # A copy, because the environment may reuse its array. In a list, because gymnasium would merge a dict.
        return copy.deepcopy(obs), reward, terminated, truncated, {"numbers": [numbers]}


def make_envs(args, num_envs):
    """A vector of num_envs environments in autoreset mode SAME_STEP: the step that ends an episode returns the first
    observation of the next one, and the final observation in infos["final_obs"]."""
    same_step, mode = gym.vector.AutoresetMode.SAME_STEP, "async" if args.async_envs else "sync"
    # Workers are forked: they inherit main's signal handlers, so Ctrl-C does not end them within an iteration.
    options = {"autoreset_mode": same_step} | ({"context": "fork"} if args.async_envs else {})
    try:
        kwargs = json.loads(args.env_kwargs)
        make = partial(gym.make_vec, args.env_id, num_envs, mode, vector_kwargs=options, **kwargs)
        try:  # the environment's own vector, in native threads: few have one, and not all of these know SAME_STEP
            envs = gym.make_vec(args.env_id, num_envs, "vector_entry_point", autoreset_mode=same_step, **kwargs)
        except (gym.error.Error, TypeError):
            envs = make(wrappers=[VectorMember])
        obs_space = envs.single_observation_space
        if not (isinstance(obs_space, gym.spaces.Box) and len(obs_space.shape) == 1):  # flattening takes time
            envs.close()
            envs = make(wrappers=[VectorMember, gym.wrappers.FlattenObservation])
            if len(obs_space.shape or ()) == 3:
                print(f"{args.env_id}: images are flattened, see docs/your-environment.md", file=sys.stderr)
    except (gym.error.Error, ImportError, NotImplementedError, TypeError, ValueError) as error:
        fail(f"--env-id {args.env_id}: {error}")
    if envs.metadata["autoreset_mode"] != same_step:
        fail(f"--env-id {args.env_id}: its vector begins the next episode in the next step, SAME_STEP is needed")
    if args.stagger_envs and not hasattr(envs, "set_attr"):
        print(f"{args.env_id}: first episodes are not staggered, its vector has no set_attr", file=sys.stderr)
    action_space = envs.single_action_space
    if not isinstance(action_space, gym.spaces.Box) or action_space.dtype.kind != "f":
        fail(f"{args.env_id} has actions {action_space}: a Box of floats is needed (Discrete: use ppo_discrete.py)")
    return envs


def start_device(args, is_large):
    """The device of this process. Under torchrun it also meets the other ranks, by gloo on CPUs and NCCL on GPUs."""
    auto_device = "cuda" if is_large and torch.cuda.is_available() else "cpu"
    device = torch.device(auto_device if args.device == "auto" else args.device)
    if dist.is_torchelastic_launched():
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    if not is_large:
        torch.set_num_threads(1)  # more would not help such small networks
    torch.backends.cudnn.deterministic = args.torch_deterministic
    torch.backends.cudnn.allow_tf32 = False  # TF32 has 10 bits: the first minibatch's ratio would not be 1
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
        (self.dir / "args.json").write_text(json.dumps(vars(args), indent=2))
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


def load_checkpoint(run_dir):
    """The checkpoint of a run folder, on the CPU, with "args" as Args and "agent" as the trained Agent."""
    path = Path(run_dir, "checkpoint.pt")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)  # no code in it can run
        args, state = Args(**checkpoint["args"]), checkpoint["agent"]
        agent = Agent(state["obs_rms.mean"].shape, state["action_low"], state["action_high"], args)
        agent.load_state_dict(state)
        rest = {key: checkpoint[key] for key in ("optimizer", "global_step", "seconds")}
    except Exception as error:  # a damaged file can raise anything
        fail(f"{path} is missing, damaged, or from another script or version: {type(error).__name__}")
    return {"args": args, "agent": agent, **rest}


def load_agent(run_dir):
    """The trained agent of a run folder, with its statistics: load_agent("runs/NAME").predict(obs) is an action."""
    return load_checkpoint(run_dir)["agent"]


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


def evaluate(agent, env_id, episodes, seed, deterministic=True, video_of=None, name="evaluation"):
    """The returns (episodes,) of whole episodes in a new environment. The agent and its statistics do not change.
    video_of: a run folder, for videos of the episodes in its folder videos"""
    options = json.loads(agent.args.env_kwargs) | ({"render_mode": "rgb_array"} if video_of else {})
    env = VectorMember(gym.make(env_id, **options))
    env = gym.wrappers.FlattenObservation(env)
    if video_of:
        env = gym.wrappers.RecordVideo(env, f"{video_of}/videos", lambda _: True, name_prefix=name, disable_logger=True)
    episodic_returns = np.zeros(episodes)
    device = agent.obs_rms.mean.device
    # Evaluation has noise of its own: that of training stays as it is.
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for episode in range(episodes):
            obs, _ = env.reset(seed=seed + episode)
            terminated = truncated = False
            while not (terminated or truncated):
                obs, reward, terminated, truncated, _ = env.step(agent.predict(obs, deterministic))
                episodic_returns[episode] += reward
    env.close()
    return episodic_returns


def main():
    with contextlib.suppress(ImportError):  # else mujoco warns, and writes MUJOCO_LOG.TXT, for every HalfCheetah
        import mujoco

        mujoco.set_mju_user_warning(lambda text: None if "deprecated" in text else print(text, file=sys.stderr))
    warnings.filterwarnings("ignore", ".*is out of date")  # HalfCheetah-v4 is what results are published for
    sys.path.append(os.getcwd())  # for --env-id my_module:Mine-v0
    args = parse_args()
    args.resume, args.evaluate = (name and find_run(name, args.runs_dir) for name in (args.resume, args.evaluate))
    if args.evaluate or args.resume:  # the arguments of that run apply, except those given again
        given, checkpoint = args, load_checkpoint(args.evaluate or args.resume)
        args = dataclasses.replace(parse_args(default=checkpoint["args"]), resume=given.resume, evaluate=given.evaluate)
        if ":" in args.env_id and args.env_id != given.env_id:  # importing a module runs its code
            fail(f"the checkpoint names the environment of a module: if you trust it, add --env-id {args.env_id}")
    if args.evaluate:
        checkpoint["agent"].args = args  # for --env-kwargs
        options = args.eval_episodes, args.seed, args.eval_deterministic, args.evaluate if args.capture_video else None
        returns = evaluate(checkpoint["agent"], args.env_id, *options)
        print("returns:", *(f"{episodic_return:.1f}" for episodic_return in returns))
        print(f"mean {returns.mean():.6g}, standard deviation {returns.std():.6g}")
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
    try:
        _, run_dir = train(args, stop_signals)
    finally:  # workers of --async-envs have inherited request_stop and would not end by SIGTERM
        for worker in multiprocessing.active_children():
            worker.kill()
    exit_code = 128 + stop_signals[0][0] if stop_signals and run_dir else 0
    if exit_code:
        print(f"stopped; go on with --resume {run_dir}", file=sys.stderr)
    if dist.is_torchelastic_launched():  # not by Python's own end, in which a thread of torch.distributed may abort
        os._exit(exit_code)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
