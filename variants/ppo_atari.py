# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.11,<3", "gymnasium>=1.4,<2", "numpy>=1.26,<3", "tyro>=1.0,<2",
#     "ale-py>=0.12,<0.13", "opencv-python-headless>=4.10,<6",
#     "tensorboard>=2.18,<3", "wandb>=0.22,<1", "tqdm>=4.66,<5", "filelock>=3.13,<5", "moviepy>=2.1,<3",
# ]
# ///
"""Proximal Policy Optimization (PPO) for images and Atari games, in one file: a variant of ppo_discrete.py.

    python variants/ppo_atari.py --env-id ALE/Breakout-v5    # train; logs and checkpoints go to runs/NAME
    python variants/ppo_atari.py --preset cleanrl            # with the hyperparameters of CleanRL's ppo_atari.py
    python variants/ppo_atari.py --resume runs/NAME          # continue from the last checkpoint; or --resume latest
    python variants/ppo_atari.py --evaluate runs/NAME        # play with the trained agent; or --evaluate latest
    torchrun --nproc-per-node 2 variants/ppo_atari.py        # two processes (ranks) train one agent, a GPU each

Where PPO implementations differ, this one does as follows (docs/choices.md compares them):
1. A truncated episode (time limit) is bootstrapped from its final observation. A terminated one is not.
2. Observations are uint8 images, stored as they are. Only Atari's are stacked. Actor and critic share the Nature CNN.
3. Actor and critic learn from the sign of the rewards (--no-clip-reward: from the rewards). Logged returns are raw.
4. Each action dimension has its own softmax. Log-probabilities and entropies are sums over the dimensions.
5. infos["action_mask"] is True for each allowed choice. A forbidden one has probability 0, in the update too.
6. --target-kl: the first minibatch whose KL exceeds 1.5 times the target makes no step and ends the update, as in SB3.
7. Atari games run in ale-py's vector, almost as in OpenAI's baselines: no sticky actions; frame skip 4; 4 stacked
   grey frames of 84 x 84; truncation after 108,000 frames. A lost life counts as a termination, but the game goes on.
   Unlike in baselines, a game starts with FIRE and up to 28 no-ops (29 without FIRE), and after a lost life the policy
   itself must press FIRE. Logs count whole games. For sticky actions (Machado et al. 2018):
   --env-kwargs '{"repeat_action_probability": 0.25}'.
8. Under torchrun, ranks share the environments equally and average their gradients. --norm-adv acts within a rank.
The defaults are those of OpenAI's baselines, but the value loss is not clipped. --preset cleanrl clips it. Items 1,
5, 6 and --recompute-advantages are neither in the paper (Schulman et al. 2017) nor in CleanRL.

Shapes: T = num_steps, N = num_envs / ranks, B = T * num_envs (all ranks), M = T * N / num_minibatches, D = image shape,
K = action dimensions, A = sum of their choices (one Discrete(4): K = 1, A = 4), E = number of truncations in a rollout.
actions[t], taken in obs[t], gives rewards[t]. If that step ends the episode, terminations[t] or truncations[t] is True,
and obs[t + 1] begins the next episode (after a lost life, the game goes on). CleanRL stores the flags as dones[t + 1].
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import random
import re
import shutil
import sys
import time
from collections import deque
from pathlib import Path

import ale_py
import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import tyro
from filelock import FileLock, Timeout
from torch.utils.tensorboard import SummaryWriter
from tqdm.auto import tqdm

__version__ = "1.0.dev0"


@dataclasses.dataclass
class Args:  # the comments are what --help prints
    # --- run
    exp_name: str = Path(__file__).stem  # part of the run folder's name, RUNS_DIR/ENV_ID__EXP_NAME__SEED__TIME
    runs_dir: str = "runs"  # where run folders are made
    seed: int = 1  # random seed; on a CPU, equal seeds give equal runs, to the bit, unless resumed
    torch_deterministic: bool = True  # CUDA: only deterministic cuDNN kernels
    device: str = "auto"  # cpu, cuda or cuda:1; auto: cuda if there is one
    compile: bool = True  # torch.compile: 10 s to start, then faster; needs a C++ compiler
    checkpoint_interval: float = 30.0  # seconds between checkpoints; 0: after every iteration
    eval_episodes: int = 10  # episodes that --evaluate plays, each of at most 30,000 steps
    eval_deterministic: bool = False  # evaluate with the likeliest action; off: sample
    capture_video: bool = False  # save videos of --evaluate, or about ten during training, to RUN_DIR/videos
    track: bool = False  # log to Weights & Biases too
    wandb_project_name: str = "ppo"  # project for --track
    wandb_entity: str | None = None  # team for --track; None: your default
    # --- environment
    env_id: str = "ALE/Breakout-v5"  # a gymnasium id with discrete actions and uint8 images of at least 36 x 36 pixels
    env_kwargs: str = "{}"  # arguments of the environment, as JSON: '{"repeat_action_probability": 0.25}'
    total_timesteps: int = 10_000_000  # steps of the run (in Atari of 4 frames each), rounded down to whole iterations
    num_envs: int = 8  # number of environments, over all ranks
    clip_reward: bool = True  # learn from the sign of the rewards
    # --- PPO
    num_steps: int = 128  # steps of each environment per iteration (T)
    learning_rate: float = 2.5e-4  # Adam's learning rate
    anneal_lr: bool = True  # lower the learning rate linearly to 0 over the run
    gamma: float = 0.99  # discount factor, 0 to 1
    gae_lambda: float = 0.95  # lambda of GAE; 0: one-step TD error (low variance); 1: the whole rollout (low bias)
    num_minibatches: int = 4  # minibatches per epoch; must divide num_steps * (num_envs / ranks)
    update_epochs: int = 4  # passes over the batch of an iteration
    norm_adv: bool = True  # normalize the advantages of each minibatch to mean 0, standard deviation 1
    recompute_advantages: bool = False  # recompute values, advantages and returns before epochs 2, 3, ...
    clip_coef: float = 0.1  # the probability ratio is clipped to 1 - clip_coef .. 1 + clip_coef
    clip_vloss: bool = False  # limit the value's change to clip_coef per update; per epoch with --recompute-advantages
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss, which is 0.5 * mean squared error (SB3: without the 0.5)
    max_grad_norm: float = 0.5  # clip the norm of the gradient (all parameters together) to this; 0: no clipping
    target_kl: float | None = None  # end the update once a minibatch's KL exceeds 1.5 * target_kl; None: never


# Settings for --preset NAME. From Python: Args(**PRESETS["cleanrl"]). The other hyperparameters equal CleanRL's.
PRESETS = {"cleanrl": dict(clip_vloss=True)}


# =============================================================================================================== agent


def layer_init(layer, gain=2**0.5):  # gains of OpenAI's baselines: hidden sqrt(2), value 1, policy 0.01
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class NatureCNN(nn.Module):
    """The convolutional network of Mnih et al. (2015): uint8 images (..., D) -> features (..., 512)."""

    def __init__(self, shape):
        super().__init__()
        self.channels_last = shape[0] != min(shape)  # (height, width, channels); the smallest dimension is channels
        channels, height, width = (shape[2], shape[0], shape[1]) if self.channels_last else shape
        rows, columns = (height - 28) // 8, (width - 28) // 8  # after the three convolutions: 84 -> 7, 36 -> 1
        layers = [layer_init(nn.Conv2d(channels, 32, 8, stride=4)), nn.ReLU()]
        layers += [layer_init(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU()]
        layers += [layer_init(nn.Conv2d(64, 64, 3)), nn.ReLU(), nn.Flatten()]
        self.layers = nn.Sequential(*layers, layer_init(nn.Linear(64 * rows * columns, 512)), nn.ReLU())

    def forward(self, images):
        x = images.movedim(-1, -3) if self.channels_last else images
        x = x.reshape(-1, *x.shape[-3:])
        if not x.is_cuda:  # on a CPU, convolutions take a third less time in this memory order
            x = x.contiguous(memory_format=torch.channels_last)
        return self.layers(x / 255.0).reshape(*images.shape[:-3], 512)


class Agent(nn.Module):
    """Actor and critic: two linear layers on one Nature CNN.

    To use your own network, replace self.encoder: uint8 images (..., D), 0 to 255, (0, D) too -> features (..., 512).
    No dropout, no batch norm: nothing calls `.eval()`."""

    def __init__(self, obs_shape, action_sizes, action_start, args):
        super().__init__()
        self.register_buffer("action_sizes", torch.as_tensor(action_sizes))  # choices in each dimension of an action
        self.register_buffer("action_start", torch.as_tensor(action_start))  # what the environment calls choice 0
        self.sizes = self.action_sizes.flatten().tolist()  # the same as a list of length K; its sum is A
        self.register_buffer("obs_shape", torch.tensor(obs_shape))
        self.encoder = NatureCNN(obs_shape)
        # gain 0.01: outputs start near 0, so the first policy hardly depends on the observation.
        # Actor first: after the critic's one bias, its weights would be misaligned, and CUDA graphs copy such inputs.
        self.actor = layer_init(nn.Linear(512, sum(self.sizes)), gain=0.01)
        self.critic = layer_init(nn.Linear(512, 1), gain=1.0)

    def get_value(self, obs):
        """(..., D) -> (...)"""
        return self.critic(self.encoder(obs)).squeeze(-1)

    def get_log_probs(self, logits, action_mask=None):
        """logits (..., A), action_mask (..., A) bool or None -> list of K log-probabilities (..., size)"""
        if action_mask is not None:  # not -inf: the entropy would be 0 * -inf = NaN
            logits = logits.masked_fill(~action_mask, torch.finfo(logits.dtype).min)
        return [x.log_softmax(-1) for x in logits.split(self.sizes, -1)]

    def get_action_and_value(self, obs, action=None, action_mask=None):
        """obs (..., D), action (..., K) or None to sample one -> action (..., K) and log_prob, entropy, value (...)

        The distribution is written out, because torch.distributions is slower."""
        features = self.encoder(obs)
        log_probs = self.get_log_probs(self.actor(features), action_mask)
        if action is None:  # Gumbel-max: add Gumbel noise, the -log of an exponential, and take the largest
            action = torch.stack([(x - torch.empty_like(x).exponential_().log()).argmax(-1) for x in log_probs], -1)
        log_prob = sum(x.gather(-1, a.unsqueeze(-1)).squeeze(-1) for x, a in zip(log_probs, action.unbind(-1)))
        entropy = sum(-(x.exp() * x).sum(-1) for x in log_probs)  # in nats
        return action, log_prob, entropy, self.critic(features).squeeze(-1)

    def to_env_action(self, action):
        """(..., K), each counted from 0 -> (..., *shape of the action space), counted from the space's start"""
        action = action.reshape(action.shape[:-1] + self.action_start.shape)
        return (action + self.action_start).to(self.action_start.dtype)

    @torch.no_grad()
    def predict(self, raw_obs, deterministic=True, action_mask=None):
        """Image(s), (D,) or (N, D), mask(s) (A,) or (N, A) -> action(s) for the environment, numpy"""
        obs = torch.as_tensor(np.ascontiguousarray(raw_obs), device=self.obs_shape.device)
        if list(obs.shape[-3:]) != self.obs_shape.tolist():
            raise UsageError(f"observations of shape {tuple(obs.shape)}, not (..., {self.obs_shape.tolist()})")
        if action_mask is not None:
            rows = [action_mask] if obs.ndim == 3 else action_mask  # a row may be a tuple: a mask per dimension
            action_mask = torch.as_tensor(np.stack([np.hstack(row) for row in rows]), device=obs.device).bool()
            action_mask = action_mask.reshape(*obs.shape[:-3], -1)
        if deterministic:
            log_probs = self.get_log_probs(self.actor(self.encoder(obs)), action_mask)
            action = torch.stack([x.argmax(-1) for x in log_probs], -1)
        else:
            action = self.get_action_and_value(obs, action_mask=action_mask)[0]
        return self.to_env_action(action).cpu().numpy()[()]  # [()]: one Discrete action is a number, not an array


# ================================================================================================ advantages and losses


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


@torch.no_grad()
def estimate_advantages(agent, obs, last_obs, final_obs, rewards, terminations, truncations, gamma, gae_lambda):
    """values, advantages, returns (T, N) of a rollout, with the current critic.

    obs (T, N, ...). last_obs (N, ...) follows the last step. final_obs (E, ...) are the final observations of the E
    truncated episodes, in the order of truncations.nonzero()."""
    values = agent.get_value(obs)  # (T, N)
    next_values = torch.cat([values[1:], agent.get_value(last_obs).unsqueeze(0)])  # (T, N)
    # At an end, next_values[t] is the next episode's. Truncated: V(final observation). Terminated: compute_gae uses 0.
    next_values[truncations] = agent.get_value(final_obs)
    return values, *compute_gae(rewards, values, next_values, terminations, truncations, gamma, gae_lambda)


def ppo_loss(agent, args, mb_obs, mb_actions, mb_masks, mb_log_probs, mb_values, mb_advantages, mb_returns):
    """Loss of a minibatch, and its metrics by name. Tensors mb_... are (M, ...)."""
    _, new_log_probs, entropy, new_values = agent.get_action_and_value(mb_obs, mb_actions, mb_masks)
    log_ratio = new_log_probs - mb_log_probs  # 0, up to rounding, in the first minibatch of an iteration
    ratio = log_ratio.exp()  # pi_new(a|s) / pi_old(a|s)

    if args.norm_adv and mb_advantages.numel() > 1:  # one sample has no standard deviation
        mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
    # Clipped surrogate objective (Schulman et al. 2017, eq. 7). The larger loss counts: clipping limits what a
    # change of the policy can gain, never what it can lose.
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = torch.max(-mb_advantages * ratio, -mb_advantages * clipped_ratio).mean()

    value_errors = (new_values - mb_returns).square()
    if args.clip_vloss:  # keep the new value within clip_coef of mb_values; use the larger error
        near_values = mb_values + (new_values - mb_values).clamp(-args.clip_coef, args.clip_coef)
        value_errors = torch.max(value_errors, (near_values - mb_returns).square())
    value_loss = 0.5 * value_errors.mean()

    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy.mean()
    metrics = {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy.mean(),
        # Two unbiased estimates of KL(old || new), from http://joschu.net/blog/kl-approx.html.
        "approx_kl": (log_ratio.expm1() - log_ratio).mean(),  # k3, never < 0
        "old_approx_kl": -log_ratio.mean(),  # k1, noisier
        "clipfrac": ((ratio - 1).abs() > args.clip_coef).float().mean(),
    }
    return loss, {name: metric.detach() for name, metric in metrics.items()}


def explained_variance(values, returns):
    """1 - Var(returns - values) / Var(returns): 1 if perfect, 0 for a constant critic, NaN if all returns are equal."""
    variance = returns.var(correction=0)
    return torch.where(variance > 0, 1 - (returns - values).var(correction=0) / variance, torch.nan)


# =============================================================================================================== train


def train(args=None, resume=None):
    """Train an agent. Return it and its run folder.

    resume: the run folder to continue, or "latest". args, if given, replace all settings of that run."""
    # --------------------------------------------------------------------------------------------------------- set-up
    if resume:
        resume = find_run(resume, args.runs_dir if args else "runs")
    args = args or (load_args(resume) if resume else Args())
    vars(args).update({k: v.item() for k, v in vars(args).items() if hasattr(v, "item")})  # no numpy in checkpoints
    check(args)
    device, rank, num_ranks = start_device(args)
    T, N = args.num_steps, args.num_envs // num_ranks  # this process has N of the environments
    B, M = T * args.num_envs, T * N // args.num_minibatches  # batch of all ranks, minibatch of this one
    num_iterations = args.total_timesteps // B

    with contextlib.ExitStack() as cleanup:  # runs its callbacks at the end, even after an error
        cleanup.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # more threads pay only on idle cores: docs/notes/speed.md
        seed_generators(args.seed)  # some environments draw numbers while they are made
        envs = make_envs(args, N)
        cleanup.callback(envs.close)
        run = Run(args, num_iterations * B, cleanup, resume)
        global_step = run.global_step  # above 0 after --resume
        # With global_step, a resumed run repeats no random numbers. noise_seed: networks, noise and permutations.
        noise_seed, env_seed = np.random.default_rng([args.seed, global_step, rank]).integers(2**30, size=2).tolist()
        raw_next_obs, infos = envs.reset(seed=env_seed)  # environment i gets env_seed + i
        torch.manual_seed(noise_seed)  # after reset, in which VectorMember seeds torch

        obs_shape = envs.single_observation_space.shape
        agent = Agent(obs_shape, *choices(envs.single_action_space), args).to(device)
        # Adam is faster on one vector: each parameter becomes a view of flat_parameters, which alone gets a gradient.
        # Give flat_parameters to an optimizer, not agent.parameters(). Modules made below this line are not trained.
        parameters = list(agent.parameters())
        flat_parameters = nn.utils.parameters_to_vector(parameters).detach()
        nn.utils.vector_to_parameters(flat_parameters, parameters)
        if num_ranks > 1:
            dist.broadcast(flat_parameters, src=0)  # all ranks start with the weights of rank 0
        optimizer = torch.optim.Adam([flat_parameters], args.learning_rate, eps=1e-5, fused=True)
        run.start(agent, optimizer)
        cleanup.callback(run.close)

        @torch.no_grad()
        def act(obs, action_mask):
            """obs (N, D), mask (N, A) -> actions (N, K), log_probs (N,), the environments' actions"""
            # torch.compile removes the unused entropy and value. All values are computed at once, after the rollout.
            action, log_prob, _, _ = agent.get_action_and_value(obs, action_mask=action_mask)
            return action, log_prob, agent.to_env_action(action)

        def compute_gradient(*minibatch):
            """a minibatch -> gradient of ppo_loss as one vector, and metrics"""
            loss, metrics = ppo_loss(agent, args, *minibatch)
            gradients = torch.autograd.grad(loss, parameters)
            gradient = torch.cat([x.flatten() for x in gradients])
            return gradient, metrics

        act, compute_gradient = compiled(act, args, device), compiled(compute_gradient, args, device)

        # ---------------------------------------------------------------------------------------------------- storage
        obs = torch.zeros(T, N, *obs_shape, dtype=torch.uint8, device=device)
        actions = torch.zeros(T, N, len(agent.sizes), dtype=torch.int64, device=device)  # as the policy counts, from 0
        action_masks = torch.zeros(T, N, sum(agent.sizes), dtype=torch.bool, device=device)  # True: allowed
        log_probs = torch.zeros(T, N, device=device)
        # numpy arrays, which are faster to fill step by step. They go to the device after the rollout.
        step_rewards = np.zeros((T, N), np.float32)  # raw
        step_terminations, step_truncations = np.zeros((T, N), bool), np.zeros((T, N), bool)
        episode_returns, episode_lengths = np.zeros(N), np.zeros(N, dtype=int)
        frame_numbers = np.zeros(N, dtype=int)  # of each game, one step ago; from ale-py

        for iteration in range(math.ceil(global_step / B) + 1, num_iterations + 1):  # ceil: --resume may change B
            remaining = 1.0 - (iteration - 1) / num_iterations  # 1 in the first iteration, above 0 in the last
            optimizer.param_groups[0]["lr"] = args.learning_rate * (remaining if args.anneal_lr else 1.0)

            # ------------------------------------------------------------------------------------------------ rollout
            episodes, raw_final_obs = [], []
            for t in range(T):
                obs[t].copy_(torch.from_numpy(raw_next_obs), non_blocking=True)  # need not wait for the copy
                action_masks[t] = read_masks(infos, agent.sizes).to(device) if "action_mask" in infos else True
                actions[t], log_probs[t], env_actions = act(obs[t], action_masks[t])
                raw_next_obs, reward, terminated, truncated, infos = envs.step(env_actions.cpu().numpy())
                truncated = truncated & ~terminated  # if both are set, it counts as terminated
                step_rewards[t], step_terminations[t], step_truncations[t] = reward, terminated, truncated
                global_step += args.num_envs
                if truncated.any():  # SAME_STEP: raw_next_obs begins the next episode; infos has the final observation
                    raw_final_obs.extend(infos["final_obs"][truncated])
                episode_returns += reward
                episode_lengths += 1
                episode_over = terminated | truncated
                if "episode_frame_number" in infos:  # Atari, where `terminated` may be a lost life
                    # For logs only: a new game restarts the count, a lost life does not.
                    episode_over &= infos["episode_frame_number"] < frame_numbers
                    frame_numbers = infos["episode_frame_number"]
                for i in np.flatnonzero(episode_over):
                    final_info = infos.get("final_info", {})
                    info = final_info["numbers"][i][0] if "numbers" in final_info else {}  # [0]: VectorMember's list
                    episode = {"step": global_step, "return": episode_returns[i], "length": episode_lengths[i]}
                    episodes.append(episode | {"info": info})
                episode_returns[episode_over], episode_lengths[episode_over] = 0, 0

            # --------------------------------------------------------------------------------------------- advantages
            steps = (step_rewards, step_terminations, step_truncations)  # (T, N)
            rewards, terminations, truncations = (torch.from_numpy(x).to(device) for x in steps)
            if args.clip_reward:
                rewards = rewards.sign()
            last_obs = torch.from_numpy(raw_next_obs).to(device)  # (N, D)
            raw_final_obs = np.array(raw_final_obs, raw_next_obs.dtype).reshape(-1, *obs_shape)  # (E, D), E truncations
            final_obs = torch.from_numpy(raw_final_obs).to(device)
            gae_args = (rewards, terminations, truncations, args.gamma, args.gae_lambda)
            values, advantages, returns = estimate_advantages(agent, obs, last_obs, final_obs, *gae_args)  # (T, N)
            # Measured before the critic learns from these returns.
            scalars = {"losses/explained_variance": explained_variance(values, returns)}

            # ------------------------------------------------------------------------------------------------- update
            all_metrics, stop_update = [], False
            for epoch in range(args.update_epochs):
                if epoch > 0 and args.recompute_advantages:
                    values, advantages, returns = estimate_advantages(agent, obs, last_obs, final_obs, *gae_args)
                permutation = torch.randperm(T * N).to(device)
                tensors = (obs, actions, action_masks, log_probs, values, advantages, returns)  # as ppo_loss takes them
                b_tensors = [x.flatten(0, 1)[permutation] for x in tensors]  # (T * N, ...)
                for minibatch in zip(*(x.split(M) for x in b_tensors)):  # (M, ...)
                    gradient, metrics = average_over_ranks(*compute_gradient(*minibatch))
                    all_metrics.append(metrics)
                    if args.target_kl is not None and metrics["approx_kl"].item() > 1.5 * args.target_kl:
                        stop_update = True  # no step for this minibatch, but its metrics are logged
                        break
                    flat_parameters.grad = gradient
                    if args.max_grad_norm > 0:
                        nn.utils.clip_grad_norm_(flat_parameters, args.max_grad_norm)
                    optimizer.step()
                if stop_update:
                    break
            weights = flat_parameters.cpu().numpy()
            for name, x in {"rewards": step_rewards, "weights": weights}.items():
                if not np.isfinite(x).all():
                    raise UsageError(f"NaN or infinity in the {name}: training stopped; this iteration was not saved")

            # -------------------------------------------------------------------------------------------- log and save
            for name in all_metrics[0]:  # means over the minibatches
                scalars[f"losses/{name}"] = torch.stack([metrics[name] for metrics in all_metrics]).mean()
            scalars["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
            run.log(global_step, gather_from_ranks(episodes), scalars)
            run.save(agent, optimizer, force=iteration == num_iterations)
            if args.capture_video and rank == 0 and (iteration == 1 or iteration % math.ceil(num_iterations / 10) == 0):
                evaluate(agent, args, episodes=1, video_dir=run.dir / "videos", name=f"step-{global_step}")
        return agent, run.dir


# =============================================================================== services: no PPO from here to the end


class UsageError(ValueError):
    """An error that users can fix. `main` prints it in one line and exits with 2."""


def check(args):
    """Refuse settings that cannot work, before anything is created."""
    compilers = ((os.environ.get("CXX") or "g++").split()[0], "clang++", "cl")
    if args.compile and not any(map(shutil.which, compilers)):
        raise UsageError("torch.compile needs a C++ compiler: install g++, or add --no-compile")
    batch_size = args.num_envs * args.num_steps
    if args.total_timesteps < batch_size:
        raise UsageError(f"--total-timesteps must be at least num_envs * num_steps = {batch_size}")
    if batch_size % args.num_minibatches:
        divisors = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
        raise UsageError(f"--num-minibatches must divide num_envs * num_steps = {batch_size}: choose one of {divisors}")


def start_device(args):
    """-> device, rank, num_ranks. Under torchrun, connect the processes (ranks): NCCL for GPUs, gloo for CPUs."""
    device = torch.device(args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", device.index or 0)))
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32, as in cuDNN: faster, mantissas of 10 bits
        torch.backends.cudnn.deterministic = args.torch_deterministic
    if dist.is_torchelastic_launched() and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    if not dist.is_initialized():
        return device, 0, 1
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if args.num_envs % num_ranks or (args.num_envs // num_ranks * args.num_steps) % args.num_minibatches:
        raise UsageError(f"{num_ranks} processes cannot share --num-envs {args.num_envs} or their minibatches equally")
    return device, rank, num_ranks


def average_over_ranks(gradient, metrics):
    """The means over all ranks, in one message. Returns copies, because a CUDA graph overwrites its outputs."""
    message = torch.cat([gradient, torch.stack(list(metrics.values()))])
    if dist.is_initialized():
        dist.all_reduce(message)
        message /= dist.get_world_size()
    gradient, means = message.split([len(gradient), len(metrics)])
    return gradient, dict(zip(metrics, means.clone()))  # clone: else the metrics would keep the gradient in memory


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


def seed_generators(seed):
    """Seed the global generators of Python, numpy and torch, which some environments use."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class VectorMember(gym.Wrapper):
    """One environment of a vector. step drops infos, except masks and an episode's last numbers: merging whole infos
    can cost more than the step."""

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            seed_generators(seed)
        obs, info = self.env.reset(seed=seed, options=options)
        return obs, self.keep_mask(info)

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        reward = np.asarray(reward).item()  # some environments return an array of one number
        if not (terminated or truncated):
            return obs, reward, terminated, truncated, self.keep_mask(info)
        numbers = {}
        for name, value in info.items():
            with contextlib.suppress(Exception):  # not a number
                numbers[name] = float(value)
        # Copy obs: the reset may overwrite it. A list around numbers: gymnasium would merge a bare dict.
        return np.array(obs), reward, terminated, truncated, {"numbers": [numbers]}

    def keep_mask(self, info):  # hstack: for a tuple of masks, one for each dimension of the action
        join = np.ravel if isinstance(info.get("action_mask"), np.ndarray) else np.hstack
        return {"action_mask": join(info["action_mask"])} if "action_mask" in info else {}


def make_env(args, **kwargs):
    """One environment. Atari games use it for --evaluate and videos: the frames are those of ale-py's vector."""
    if "ALE/" in args.env_id:
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner
        kwargs = {"frameskip": 4, "repeat_action_probability": 0.0} | json.loads(args.env_kwargs) | kwargs
        frame_skip, kwargs["frameskip"] = kwargs["frameskip"], 1  # the wrapper skips frames, not the game
        env = gym.wrappers.AtariPreprocessing(gym.make(args.env_id, **kwargs), frame_skip=frame_skip)
        return VectorMember(gym.wrappers.FrameStackObservation(env, 4, padding_type="zero"))
    env = gym.make(args.env_id, **json.loads(args.env_kwargs) | kwargs)
    space = env.observation_space
    if isinstance(env.unwrapped, ale_py.AtariEnv) and space == env.unwrapped.observation_space:  # not preprocessed
        raise UsageError(f"{args.env_id}: use the id ALE/NAME-v5")
    return VectorMember(env)


def make_envs(args, num_envs):
    """A vector of environments in autoreset mode SAME_STEP: the step that ends an episode returns the first observation
    of the next one, and the final observation in infos["final_obs"]."""
    if args.capture_video and "rgb_array" not in make_env(args).metadata.get("render_modes", []):
        raise UsageError(f"{args.env_id} cannot record videos: its metadata has no render mode rgb_array")
    options = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    kwargs = json.loads(args.env_kwargs)
    if "ALE/" in args.env_id:  # a lost life is `terminated`, but the game continues
        make_env(args).close()  # fails now if evaluation cannot take these env_kwargs
        kwargs = {"repeat_action_probability": 0.0, "reward_clipping": False, "life_loss_info": True} | kwargs
    try:  # the environment's own vector, if it has one with this mode: it is faster, and skips make_env
        envs = gym.make_vec(args.env_id, num_envs, "vector_entry_point", **options, **kwargs)
    except (gym.error.Error, TypeError) as error:
        if "ALE/" in args.env_id:
            raise UsageError(f"{args.env_id}, --env-kwargs {args.env_kwargs}: {error}") from error
        envs = gym.vector.SyncVectorEnv([lambda: make_env(args)] * num_envs, **options)
    if envs.metadata.get("autoreset_mode") != gym.vector.AutoresetMode.SAME_STEP:  # it ignored the option
        raise UsageError(f"{args.env_id}: its vector must have autoreset_mode SAME_STEP, and say so in its metadata")
    space = envs.single_observation_space
    # Channels are the smallest number, first or last. So shape[1] and the second smallest are rows or columns.
    if space.dtype != np.uint8 or len(space.shape) != 3 or min(space.shape[1], sorted(space.shape)[1]) < 36:
        raise UsageError(f"{args.env_id} has no uint8 images of at least 36 x 36 pixels, but {space}")
    choices(envs.single_action_space)  # rejects others
    return envs


def choices(space):
    """Choices in each action dimension, and what the environment calls choice 0"""
    if isinstance(space, gym.spaces.MultiBinary):
        return np.full(space.shape, 2), np.zeros(space.shape, space.dtype)
    if isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
        sizes = space.n if isinstance(space, gym.spaces.Discrete) else space.nvec
        return sizes, space.start
    raise UsageError(f"actions {space}: Discrete, MultiDiscrete or MultiBinary is needed. Box: ppo_continuous.py")


def read_masks(infos, sizes):
    """infos["action_mask"] of a vector of environments -> (N, A) bool. Where it is missing, every choice is allowed."""
    given = infos["_action_mask"]  # bool (N,), from gymnasium: the environments that gave one
    masks = torch.ones(len(given), sum(sizes), dtype=torch.bool)
    masks[torch.from_numpy(given)] = torch.from_numpy(np.stack(infos["action_mask"][given]).astype(bool))
    if not all(mask.any(-1).all() for mask in masks.split(sizes, -1)):
        raise UsageError('infos["action_mask"] forbids every choice in some dimension of the action')
    return masks


class Run:
    """A run's folder (args.json, script, TensorBoard, episodes.csv, checkpoint.pt), W&B and the progress bar."""

    def __init__(self, args, total_steps, cleanup, resume=None):
        name = re.sub(r"[^\w.-]", "-", f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time():.3f}")
        self.args, self.total_steps = args, total_steps
        if dist.is_initialized() and dist.get_rank() > 0:  # only rank 0 writes: here log, save and close do nothing
            self.dir = None
            self.checkpoint = load_checkpoint(resume) if resume else {}
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
        """With --resume, load the checkpoint into agent and optimizer. Then open the logs."""
        args, state = self.args, self.checkpoint.get("agent")
        if state:
            for name, x in agent.named_buffers(recurse=False):  # load_state_dict would overwrite these without a word
                if not (name in state and state[name].equal(x.cpu())):
                    raise UsageError(f"{args.env_id} has another {name} than the checkpoint in {self.dir}")
            agent.load_state_dict(state)
            optimizer.load_state_dict(self.checkpoint["optimizer"])
        if self.dir is None:  # ranks above 0
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
        """Log an iteration. episodes: dicts of step, return, length, info. scalars: {name: number or tensor ()}"""
        now, text = time.monotonic(), "no whole episode yet"
        for x in episodes:
            self.episodes_file.write(f"{x['step']},{x['return']:.6g},{x['length']},{now - self.start_time:.2f}\n")
            self.recent_returns.append(float(x["return"]))
        if episodes:
            scalars["charts/episodic_return"] = np.mean([x["return"] for x in episodes])
            scalars["charts/episodic_length"] = np.mean([x["length"] for x in episodes])
        for name in {name for x in episodes for name in x["info"]}:
            scalars[f"info/{name}"] = np.mean([x["info"][name] for x in episodes if name in x["info"]])
        if self.recent_returns:
            scalars["charts/last_100_return"] = np.mean(self.recent_returns)
            text = f"return {scalars['charts/last_100_return']:.1f}"
        scalars["charts/SPS"] = (global_step - self.global_step) / (now - self.last_log)
        scalars = {name: float(value) for name, value in scalars.items()}
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, global_step)
        if self.args.track:
            self.wandb.log(scalars | {"global_step": global_step}, step=global_step)
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
            self.wandb.save(self.dir.resolve() / "videos" / "*.mp4", base_path=self.dir.resolve())
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
    agent = Agent(state["obs_shape"].tolist(), state["action_sizes"], state["action_start"], load_args(run_dir))
    agent.load_state_dict(state)
    return agent


def evaluate(agent, args, episodes, video_dir=None, name="evaluation"):
    """Play episodes in a new environment -> returns (episodes,). The agent does not change."""
    episodic_returns = np.zeros(episodes)
    devices = {x.device for x in agent.parameters() if x.is_cuda}  # fork_rng's default is every GPU
    with torch.random.fork_rng(devices), contextlib.ExitStack() as cleanup:  # leave training's random numbers alone
        cleanup.callback(random.setstate, random.getstate())
        cleanup.callback(np.random.set_state, np.random.get_state())
        seed_generators(args.seed)
        env = make_env(args, render_mode="rgb_array") if video_dir else make_env(args)
        env = gym.wrappers.TimeLimit(env, 30_000)  # a good policy might never end an episode
        if video_dir:
            env = gym.wrappers.RecordVideo(env, str(video_dir), lambda _: True, name_prefix=name, disable_logger=True)
        cleanup.enter_context(env)  # closes it, which writes the last video
        for episode in range(episodes):
            obs, info = env.reset(seed=args.seed + episode)
            if "ALE/" in args.env_id and env.unwrapped.get_action_meanings()[1] == "FIRE":
                obs, *_ = env.step(1)  # FIRE, for 4 frames; ale-py's vector presses it for 1, before the no-ops
            terminated = truncated = False
            while not (terminated or truncated):
                action = agent.predict(obs, args.eval_deterministic, info.get("action_mask"))
                obs, reward, terminated, truncated, info = env.step(action)
                episodic_returns[episode] += reward
    return episodic_returns


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
    sys.path.append(os.getcwd())  # for --env-id my_module:Mine-v0
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    one_of = parser.add_mutually_exclusive_group()
    one_of.add_argument("--preset", choices=PRESETS)
    one_of.add_argument("--resume")
    one_of.add_argument("--evaluate")
    command, words = parser.parse_known_args()
    run_dir = command.resume or command.evaluate
    if run_dir:
        run_dir = find_run(run_dir, parse_args(words).runs_dir)  # --runs-dir may be among the words
    args = parse_args(words, default=load_args(run_dir) if run_dir else Args(**PRESETS.get(command.preset, {})))
    if run_dir and ":" in args.env_id and not any(args.env_id in word for word in words):  # importing runs code
        raise UsageError(f"the checkpoint names a module: if you trust it, add --env-id {args.env_id}")
    if not command.evaluate:
        train(args, run_dir)
        if dist.is_initialized():
            dist.destroy_process_group()
        return
    video_dir = run_dir / "videos" if args.capture_video else None
    returns = evaluate(load_agent(run_dir), args, args.eval_episodes, video_dir)
    print("returns:", *(f"{episodic_return:.1f}" for episodic_return in returns))
    print(f"mean {returns.mean():.6g}, standard deviation {returns.std():.6g}")


if __name__ == "__main__":
    try:
        main()
    except (UsageError, gym.error.UnregisteredEnv, gym.error.DependencyNotInstalled) as error:
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
