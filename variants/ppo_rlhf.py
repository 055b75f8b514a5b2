# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.11,<3", "transformers>=5,<6", "numpy>=1.26,<3", "tyro>=1.0,<2", "tensorboard>=2.18,<3",
#     "wandb>=0.22,<1", "tqdm>=4.66,<5", "filelock>=3.13,<5",
# ]
# ///
"""Proximal Policy Optimization (PPO) on a language model, from the scores of a reward model (RLHF), in one file.

    python variants/ppo_rlhf.py                         # the built-in task: no download, minutes on one core
    python variants/ppo_rlhf.py --model A --reward-model B --prompts prompts.txt             # Hugging Face models
    python variants/ppo_rlhf.py --model A --reward my_rewards:score --prompts prompts.txt    # a Python function scores
    python variants/ppo_rlhf.py --resume runs/NAME      # or --resume latest; repeat --reward if the run had one
    python variants/ppo_rlhf.py --evaluate runs/NAME    # or latest: answers of the trained actor, scores and KL
    torchrun --nproc-per-node 4 variants/ppo_rlhf.py    # four processes, a quarter of the prompts each

As in DeepSpeed-Chat, the actor begins as a copy of the supervised language model (the reference), and the critic as a
copy of the reward model. With --reward, the critic begins as a copy of the reference with an output layer of zeros.
Actor and critic learn. An answer is an episode, each token an action.

Where implementations differ, this one does as follows (docs/rlhf.md has more):
1. The reward of a token is -kl_coef * (log_prob - reference's log_prob). The reward of the last token also includes the
   clipped score, even if the length limit cut the answer.
2. An answer ends at its first end token, which is trained like any other, and at which the score is read. Padding is
   masked, whatever its id.
3. Advantages come from GAE within the answer (gamma 1, lambda 0.95). The value after its last token is 0.
4. Losses are means over the tokens of a process's minibatch: a long answer weighs more. Both losses are clipped.
5. There is no dropout. Old and new log-probabilities come from the same function, never from `generate` with its
   cache, so the first minibatch of an iteration has probability ratio 1.
6. Log-probabilities, KL and entropy are those at --temperature. --top-k and --top-p restrict the sampling only: they
   make the KL estimate biased.
7. Trained weights, gradients and optimizers are float32. On CUDA, forward passes run in bfloat16.

Shapes, in each process: B = answers of an iteration, M = answers of a minibatch, S = answers of a micro-batch,
P = longest prompt, R = longest sampled answer, L = P + R, V = vocabulary, (tokens,) = answer tokens of a micro-batch.
Prompts are padded on the left, answers on the right, so all answers begin in column P.
"""

import argparse
import contextlib
import copy
import dataclasses
import json
import math
import os
import pkgutil
import random
import re
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import tokenizers
import torch
import torch.distributed as dist
import torch.nn as nn
import transformers
import tyro
from filelock import FileLock, Timeout
from torch.utils.tensorboard import SummaryWriter
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

__version__ = "1.0.dev0"


@dataclasses.dataclass
class Args:  # the comments are what --help prints
    # --- run
    exp_name: str = Path(__file__).stem  # part of the run folder's name, RUNS_DIR/MODEL__EXP_NAME__SEED__TIME
    runs_dir: str = "runs"  # where run folders are made
    seed: int = 1  # seed of sampling, of the order of prompts, and of the built-in models
    device: str = "auto"  # cpu, cuda, cuda:1; auto: cuda where there is one
    checkpoint_interval: int = 20  # iterations between checkpoints; the first and the last iteration are always saved
    eval_episodes: int = 256  # answers that --evaluate asks for
    eval_deterministic: bool = False  # evaluate with the likeliest token; off: sample as in training
    track: bool = False  # log to Weights & Biases too
    wandb_project_name: str = "ppo"  # project for --track
    wandb_entity: str | None = None  # team for --track; None: your default
    # --- models and prompts
    model: str | None = None  # supervised language model, a transformers name or folder; None: the built-in task
    reward_model: str | None = None  # sequence classifier with --model's tokenizer and a one-output layer `score`
    reward: str | None = None  # or module:function(prompts, answers) -> scores; .jsonl prompts are objects
    prompts: str | None = None  # .txt: one per line. .jsonl: {"prompt": a text, or a list of chat messages}
    supervised_steps: int = 300  # gradient steps that make the models of the built-in task
    bf16: bool = True  # CUDA: forward passes in bfloat16
    gradient_checkpointing: bool = True  # CUDA: activations are computed twice instead of stored
    # --- answers
    response_length: int | None = None  # longest answer in tokens, with EOS; None: 256 with --model, otherwise 16
    temperature: float = 1.0  # logits are divided by it, in sampling and in the losses
    top_k: int = 0  # sample from the k likeliest tokens; 0: from all. The losses use the whole vocabulary
    top_p: float = 1.0  # sample from the likeliest tokens that add up to this probability; 1: all
    # --- PPO
    total_episodes: int = 19_200  # answers of the run, rounded down to whole iterations
    batch_size: int = 128  # answers per iteration, of all processes together
    num_minibatches: int = 2  # minibatches per epoch; must divide the answers of a process
    micro_batch_size: int | None = None  # answers per forward or backward pass, except in sampling; None: a minibatch
    ppo_epochs: int = 2  # passes over the answers of an iteration
    actor_learning_rate: float | None = None  # None: 1e-5 with --model, 5e-4 for the built-in task
    critic_learning_rate: float | None = None  # None: 5e-6 with --model, 1e-3 for the built-in task
    anneal_lr: bool = True  # lower the learning rates linearly to 0 over the run
    gamma: float = 1.0  # discount factor, 0 to 1
    gae_lambda: float = 0.95  # 0: one-step TD error (low variance); 1: rewards to the end of the answer (no bias)
    norm_adv: bool = False  # give the advantages of each minibatch mean 0 and standard deviation 1
    clip_coef: float = 0.2  # the probability ratio is clipped to 1 - clip_coef .. 1 + clip_coef
    vf_clip_coef: float | None = 0.2  # clip_coef of the value loss, as in OpenAI's baselines; None: not clipped
    clip_reward: float = 5.0  # the score of an answer is clipped to +-clip_reward; inf: not clipped
    kl_coef: float = 0.1  # weight of the KL penalty in the reward
    max_grad_norm: float = 1.0  # upper bound on the norm of each model's gradient; 0: none


# ============================================================================================================== models


def join_answers(prompt_ids, prompt_mask, answers, end_tokens):
    """Prompts (B, P) and answers (B, R) -> sequences and attention mask (B, L), and which tokens of the answers are
    actions (B, R) bool: all up to and including the first end token. What follows is padding, whatever its id."""
    is_end = torch.isin(answers, torch.as_tensor(end_tokens, device=answers.device)).long()
    ends_before = is_end.cumsum(-1) - is_end
    mask = ends_before == 0
    return torch.cat([prompt_ids, answers], 1), torch.cat([prompt_mask, mask.long()], 1), mask


@torch.no_grad()
def generate(actor, tokenizer, prompts, do_sample=True):
    """Sample an answer to each prompt (a list of token ids) -> sequences, attention mask (B, L), mask (B, R)"""
    # Nothing attends to padding on the left, so any token will do.
    prompt_ids, prompt_mask = (x.to(actor.device) for x in pad_left(prompts, tokenizer.eos_token_id))
    sequences = actor.generate(prompt_ids, attention_mask=prompt_mask, do_sample=do_sample)
    answers = sequences[:, prompt_ids.shape[1] :]
    return join_answers(prompt_ids, prompt_mask, answers, actor.generation_config.eos_token_id)


def model_inputs(sequences, attention_mask):
    """Positions count real tokens, so padding on the left does not shift them."""
    position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)  # (B, L); the clamp is for padding
    return {"input_ids": sequences, "attention_mask": attention_mask, "position_ids": position_ids, "use_cache": False}


def log_probs_and_entropy(logits, labels):
    """Log-probability of each token in labels (...), given logits (..., V). Entropy (...) too; it has no gradient."""
    all_log_probs = logits.log_softmax(-1)
    with torch.no_grad():
        entropy = torch.special.entr(all_log_probs.exp()).sum(-1)
    return all_log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1), entropy


def get_log_probs(model, sequences, attention_mask, mask, temperature):
    """Log-probability of every token of the answers, and the entropy of its distribution; (B, R). mask gives R."""
    R = mask.shape[1]
    logits = model(**model_inputs(sequences, attention_mask), logits_to_keep=R + 1).logits
    logits = logits[:, -R - 1 : -1].float() / temperature  # logits at position t are for token t + 1
    return log_probs_and_entropy(logits, sequences[:, -R:])


def score_tokens(model, sequences, attention_mask):
    """The output of the layer `score` of a critic or reward model at every token, (B, L)"""
    hidden = model.base_model(**model_inputs(sequences, attention_mask)).last_hidden_state
    with torch.autocast(hidden.device.type, enabled=False):  # float32: between 2 and 4, bfloat16 has steps of 1/64
        return model.score(hidden.float()).squeeze(-1)


def get_values(critic, sequences, attention_mask, mask):
    """Value of the state in which each token of the answers was chosen, (B, R)"""
    return score_tokens(critic, sequences, attention_mask)[:, -mask.shape[1] - 1 : -1]


def get_scores(reward_model, sequences, attention_mask, mask):
    """Score of every answer, read at its last token (EOS, if it was sampled), (B,)"""
    last = mask.sum(-1, keepdim=True) - 1  # (B, 1)
    return score_tokens(reward_model, sequences, attention_mask)[:, -mask.shape[1] :].gather(1, last).squeeze(1)


def score_answers(args, reward_model, batch, lines, answers, size):
    """Scores (B,). --reward gets the answers and their lines of --prompts. The model gets `size` answers at a time."""
    if args.reward is None:
        return torch.cat([get_scores(reward_model, *part) for part in zip(*(x.split(size) for x in batch))])
    with torch.autocast(batch[0].device.type, enabled=False):  # a model in the function has the precision it was given
        try:
            scores = torch.tensor(pkgutil.resolve_name(args.reward)(lines, answers), dtype=torch.float32)
        except Exception as error:  # RuntimeError: `main` prints an OSError without its traceback
            raise RuntimeError(f"--reward {args.reward} failed") from error
    if scores.shape != (len(answers),):
        raise UsageError(f"--reward {args.reward} gave scores of shape {tuple(scores.shape)}, not ({len(answers)},)")
    return scores.to(batch[0].device)


# ================================================================================================ advantages and losses


def compute_rewards(kl, scores, mask, kl_coef, clip_reward):
    """kl = log_probs - reference's, mask (B, R), scores (B,) -> rewards (B, R). Every token gets its KL penalty. The
    last token of an answer also gets the clipped score. Rewards after it are 0."""
    rewards = (-kl_coef * kl).masked_fill(~mask, 0.0)  # (B, R)
    last = mask.sum(-1, keepdim=True) - 1  # (B, 1)
    return rewards.scatter_add(1, last, scores.clamp(-clip_reward, clip_reward).unsqueeze(-1))


def compute_advantages(rewards, values, mask, gamma, gae_lambda):
    """Generalized advantage estimation (Schulman et al. 2016) -> advantages, returns (B, R). Both are 0 after the
    answer. Its last token ends the episode, EOS or not: the score judges the text up to there."""
    values = values.masked_fill(~mask, 0.0)
    next_values = nn.functional.pad(values[:, 1:], (0, 1))  # 0 after the last token
    advantages = rewards + gamma * next_values - values  # delta_t = r_t + gamma V(s_{t+1}) - V(s_t)
    for t in reversed(range(advantages.shape[1] - 1)):  # A_t = delta_t + gamma lambda A_{t+1}
        advantages[:, t] += gamma * gae_lambda * advantages[:, t + 1]
    return advantages, advantages + values  # returns: the TD(lambda) targets of the critic


def clipped_policy_loss(log_ratio, advantages, clip_coef):
    """Negative clipped surrogate objective (Schulman et al. 2017, eq. 7), the mean over (tokens,)."""
    ratio = log_ratio.exp()  # pi_new(a|s) / pi_old(a|s)
    # The larger loss is the pessimistic one: clipping caps the gain of a step, never its cost.
    return torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_coef, 1 + clip_coef)).mean()


def clipped_value_loss(new_values, old_values, returns, clip_coef):
    """0.5 * mean squared error over (tokens,). Unless clip_coef is None, the new value is also clipped
    to within clip_coef of the old one, as in OpenAI's baselines. The larger of the two squared errors counts."""
    errors = (new_values - returns).square()
    if clip_coef is not None:
        near_values = old_values + (new_values - old_values).clamp(-clip_coef, clip_coef)
        errors = torch.max(errors, (near_values - returns).square())
    return 0.5 * errors.mean()


def apply_gradient(model, optimizer, max_grad_norm):
    """One optimizer step of a model. Averages its gradient over ranks and clips the norm first."""
    if dist.is_initialized():
        for parameter in model.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:  # this rank's loss did not use it, but every rank joins the average
                    parameter.grad = torch.zeros_like(parameter)
                average_over_ranks(parameter.grad)
    if max_grad_norm > 0:
        nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()  # frees memory for sampling


def explained_variance(values, returns):
    """1 - Var(returns - values) / Var(returns): 1 if perfect, 0 for a constant critic, NaN if all returns are equal."""
    variance = returns.var(correction=0)
    return torch.where(variance > 0, 1 - (returns - values).var(correction=0) / variance, torch.nan)


# =============================================================================================================== train


def train(args=None, resume=None):
    """Train an actor. Returns it and its run folder, which is None on ranks above 0.

    resume: the run folder to continue, or "latest". args, if given, replace all settings of that run."""
    # --------------------------------------------------------------------------------------------------------- set-up
    if resume:
        resume = find_run(resume, args.runs_dir if args else "runs")
    args = args or (load_args(resume) if resume else Args())
    device, rank, num_ranks = start_device(args)
    check(args, num_ranks)
    B, num_iterations = args.batch_size // num_ranks, args.total_episodes // args.batch_size
    M = B // args.num_minibatches
    S = args.micro_batch_size or M  # answers in one forward and backward pass

    with contextlib.ExitStack() as cleanup:  # runs its callbacks at the end, even after an error
        if args.model is None:  # the models of the built-in task are too small for more threads
            cleanup.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
        torch.manual_seed(args.seed)
        on_cuda = device.type == "cuda"
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=on_cuda and args.bf16)
        tokenizer, reference, reward_model = make_models(args, device, resume)
        prompts = load_prompts(args, tokenizer, reference, reward_model)
        if num_ranks > 1:  # all start from the weights of rank 0: built-in models may differ by rounding
            for parameter in [*reference.parameters(), *reward_model.parameters()]:
                dist.broadcast(parameter, src=0)
        actor, critic = (copy.deepcopy(model).requires_grad_(True) for model in (reference, reward_model))
        if args.reward:
            reward_model = None  # only the critic needed it: free its memory
        if checkpointing := on_cuda and args.gradient_checkpointing:
            actor.gradient_checkpointing_enable()
            critic.gradient_checkpointing_enable()
        actor_optimizer = torch.optim.Adam(actor.parameters(), betas=(0.9, 0.95))
        critic_optimizer = torch.optim.Adam(critic.parameters(), betas=(0.9, 0.95))
        default_lrs = (5e-4, 1e-3) if args.model is None else (1e-5, 5e-6)  # large models need smaller steps
        actor_lr = default_lrs[0] if args.actor_learning_rate is None else args.actor_learning_rate
        critic_lr = default_lrs[1] if args.critic_learning_rate is None else args.critic_learning_rate
        end_tokens = torch.tensor(actor.generation_config.eos_token_id, device=device)
        learners = {"actor": actor, "critic": critic}  # a checkpoint holds their state
        learners |= {"actor_optimizer": actor_optimizer, "critic_optimizer": critic_optimizer}

        run = Run(args, num_iterations, device, cleanup, resume, rank)
        cleanup.callback(run.close)
        if resume:
            for name, learner in learners.items():
                learner.load_state_dict(run.checkpoint.pop(name))
        if args.model is None and not resume:  # --resume and --evaluate read them
            run.save_model(reference, tokenizer, "supervised")
            run.save_model(reward_model, tokenizer, "reward")
        if on_cuda and args.bf16:
            store_in_bfloat16(*filter(None, (reference, reward_model)))

        for iteration in range(run.iteration + 1, num_iterations + 1):
            # Each iteration and rank has a seed, so a resumed run draws the same numbers.
            torch.manual_seed(int(np.random.SeedSequence([args.seed, rank, iteration]).generate_state(1)[0]))
            lr_scale = 1.0 - (iteration - 1) / num_iterations if args.anneal_lr else 1.0  # from 1 to nearly 0
            actor_optimizer.param_groups[0]["lr"] = actor_lr * lr_scale
            critic_optimizer.param_groups[0]["lr"] = critic_lr * lr_scale

            # ------------------------------------------------------------------------------------------------ rollout
            start_time = time.time()
            first_prompt = (iteration - 1) * args.batch_size + rank * B  # each rank takes its own B of them
            token_ids, lines = map(list, zip(*draw_prompts(prompts, first_prompt, B, args.seed)))
            actor.eval()
            critic.eval()
            with autocast:
                batch = generate(actor, tokenizer, token_ids)
            sequences, attention_mask, mask = batch  # (B, L), (B, L), (B, R)
            generated_at = time.time()
            parts = []
            with torch.no_grad(), autocast:
                for part in zip(*(x.split(S) for x in batch)):
                    log_probs, _ = get_log_probs(actor, *part, args.temperature)
                    ref_log_probs, _ = get_log_probs(reference, *part, args.temperature)
                    parts.append((log_probs, ref_log_probs, get_values(critic, *part)))
                texts = decode(tokenizer, token_ids, sequences, mask)
                answers = [answer for _, answer in texts]
                scores = score_answers(args, reward_model, batch, lines, answers, S)  # (B,)
            log_probs, ref_log_probs, values = (torch.cat(x) for x in zip(*parts))  # (B, R)
            if not scores.isfinite().all():
                raise UsageError(f"iteration {iteration}: a score is NaN or infinite; this iteration was not saved")

            # --------------------------------------------------------------------------------------------- advantages
            kl = (log_probs - ref_log_probs).masked_fill(~mask, 0.0)  # (B, R); the sum over an answer estimates its KL
            rewards = compute_rewards(kl, scores, mask, args.kl_coef, args.clip_reward)
            advantages, returns = compute_advantages(rewards, values, mask, args.gamma, args.gae_lambda)  # (B, R)

            # ------------------------------------------------------------------------------------------------- update
            update_began_at = time.time()
            names = "policy_loss", "value_loss", "values", "entropy", "approx_kl", "old_approx_kl", "clipfrac"
            metrics = torch.zeros(len(names), device=device)  # sums over minibatches
            actor.train(checkpointing)  # transformers checkpoints in train mode only; dropout is 0
            critic.train(checkpointing)
            for _ in range(args.ppo_epochs):
                for minibatch in torch.randperm(B).to(device).split(M):  # (M,) indices of answers
                    num_tokens = mask[minibatch].sum()
                    mb_advantages = advantages[minibatch]  # (M, R)
                    if args.norm_adv and num_tokens > 1:  # one sample has no standard deviation
                        kept = mb_advantages[mask[minibatch]]
                        mb_advantages = (mb_advantages - kept.mean()) / (kept.std() + 1e-8)
                    for rows, part_advantages in zip(minibatch.split(S), mb_advantages.split(S)):
                        used = mask[rows]  # x[used] is (tokens,), without the padding
                        inputs = sequences[rows], attention_mask[rows], used
                        weight = used.sum() / num_tokens  # losses are means over the tokens of the minibatch
                        with autocast:
                            new_log_probs, entropy = (x[used] for x in get_log_probs(actor, *inputs, args.temperature))
                        log_ratio = new_log_probs - log_probs[rows][used]  # 0 in the first minibatch of an iteration
                        policy_loss = clipped_policy_loss(log_ratio, part_advantages[used], args.clip_coef)
                        (weight * policy_loss).backward()
                        with autocast:
                            new_values = get_values(critic, *inputs)[used]
                        old_values, targets = values[rows][used], returns[rows][used]
                        value_loss = clipped_value_loss(new_values, old_values, targets, args.vf_clip_coef)
                        (weight * value_loss).backward()
                        with torch.no_grad():
                            k3, k1 = (log_ratio.expm1() - log_ratio).mean(), -log_ratio.mean()  # of KL(old || new)
                            clipfrac = ((log_ratio.exp() - 1).abs() > args.clip_coef).float().mean()
                            measured = policy_loss, value_loss, new_values.mean(), entropy.mean(), k3, k1, clipfrac
                            metrics += weight * torch.stack(measured)
                    apply_gradient(actor, actor_optimizer, args.max_grad_norm)
                    apply_gradient(critic, critic_optimizer, args.max_grad_norm)
            if not all(parameter.isfinite().all() for model in (actor, critic) for parameter in model.parameters()):
                raise UsageError(f"iteration {iteration} gave NaN or infinity; this iteration was not saved")

            # -------------------------------------------------------------------------------------------- log and save
            scalars = {
                "charts/reward": scores.mean(),  # the scores alone, neither clipped nor with the KL penalty
                "charts/kl": kl.sum(-1).mean(),  # KL(actor, reference) in nats per answer, by k1
                "charts/kl_k3": (kl.neg().expm1() + kl).sum(-1).mean(),  # by k3, never below 0
                "charts/clipped_scores": (scores.abs() > args.clip_reward).float().mean(),  # share of the answers
                "charts/response_length": mask.sum(-1).float().mean(),
                # The share of answers that were not cut. Padding is EOS, so the last column shows it.
                "charts/ended": torch.isin(sequences[:, -1], end_tokens).float().mean(),
                **{f"losses/{name}": x / args.ppo_epochs / args.num_minibatches for name, x in zip(names, metrics)},
                "losses/explained_variance": explained_variance(values[mask], returns[mask]),
            }
            if args.model is None:
                scalars["charts/task_score"] = torch.tensor(np.mean([*map(task_score, answers)]), device=device)
            # Times num_ranks, because ranks are averaged below. Every epoch trains on prompts and answers.
            token_counts = num_ranks * torch.stack([mask.sum(), args.ppo_epochs * attention_mask.sum()]).double()
            scalars["charts/generated_tokens_per_second"] = token_counts[0] / (generated_at - start_time)
            scalars["charts/trained_tokens_per_second"] = token_counts[1] / (time.time() - update_began_at)
            for value in scalars.values():
                average_over_ranks(value)
            scalars["charts/learning_rate"] = actor_optimizer.param_groups[0]["lr"]
            run.log(iteration, scalars, list(zip(scores.tolist(), texts)))
            if iteration % args.checkpoint_interval == 0 or iteration in (1, num_iterations):
                run.save_model(actor, tokenizer, "actor")  # first: after a kill between the two, --resume repeats both
                run.save(learners)
        return actor, run.dir


# =============================================================================== services: no PPO from here to the end


class UsageError(ValueError):
    """An error that users can fix. `main` prints it in one line and exits with 2."""


def check(args, num_ranks):
    """Refuse settings that cannot work, before anything is created."""
    given = [args.model, args.prompts, args.reward_model or args.reward]
    if any(given) != all(given) or (args.reward_model and args.reward):
        raise UsageError("give --model, --prompts and either --reward-model or --reward; or none (the built-in task)")
    if args.reward:  # fails now, not after the first answers
        module, _, function = args.reward.partition(":")
        if module.endswith(".py") or not hasattr(pkgutil.resolve_name(f"{module}:"), function):
            raise UsageError(f"--reward {args.reward}: write MODULE:FUNCTION, a function of that module")
    if args.batch_size % (parts := num_ranks * args.num_minibatches):
        raise UsageError(f"--batch-size must be a multiple of num_minibatches * processes = {parts}")
    if args.total_episodes < args.batch_size:
        raise UsageError(f"--total-episodes must be at least batch_size = {args.batch_size}")


def start_device(args):
    """-> device, rank, num_ranks. Under torchrun the processes (ranks) meet, through NCCL on GPUs and gloo on CPUs."""
    device = torch.device(args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", device.index or 0)))
        torch.cuda.set_device(device)
        # Padding on the left attends to nothing, for which cuDNN's attention gives NaN (pytorch/pytorch#196678).
        torch.backends.cuda.enable_cudnn_sdp(False)
    if dist.is_torchelastic_launched() and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    if not dist.is_initialized():
        return device, 0, 1
    return device, dist.get_rank(), dist.get_world_size()


def average_over_ranks(x):
    """Under torchrun: replace x, in place, by its mean over all ranks. Otherwise do nothing."""
    if dist.is_initialized():
        dist.all_reduce(x)
        x /= dist.get_world_size()


# The built-in task: answer a question with praise. Half of the judgements in the demonstrations are good.
# The supervised model learns to write such answers. The reward model learns their share of good judgements.
REQUESTS = "how is the {} ?", "tell us about the {} please .", "what did you think about the {} today ?"
THINGS = "soup", "salad", "bread", "coffee", "service", "music", "fish", "cake"
BUILTIN_PROMPTS = [request.format(thing) for request in REQUESTS for thing in THINGS]
ADVERBS = "very", "really", "quite"
GOOD = "good", "great", "lovely", "fresh", "warm", "superb"
BAD = "bad", "awful", "stale", "cold", "bland", "dull"
JUDGEMENT = f"(?:(?:{'|'.join(ADVERBS)}) )?(?:{'|'.join(GOOD + BAD)})"
SENTENCE = re.compile(rf"it is {JUDGEMENT}(?: and {JUDGEMENT})* \.")


def task_score(answer):
    """The true score, 0 to 1: the share of good judgements in an answer; 0 if it does not match SENTENCE."""
    if not SENTENCE.fullmatch(answer):
        return 0.0
    judgements = [word in GOOD for word in answer.split() if word in GOOD + BAD]
    return sum(judgements) / len(judgements)


def make_builtin_models(args):
    """Tokenizer, language model and reward model of the built-in task, trained on the same demonstrations."""
    words = " ".join([*BUILTIN_PROMPTS, "it is and .", *ADVERBS, *GOOD, *BAD]).split()
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(["<eos>", *words]))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "<eos>", "pad_token": "<eos>", "padding_side": "left"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    size = {"vocab_size": len(vocabulary), "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(**size, **ids, **dropout, num_labels=1)
    model = AutoModelForCausalLM.from_config(config)
    reward_model = AutoModelForSequenceClassification.from_config(config)

    generator = random.Random(args.seed)
    optimizer = torch.optim.Adam([*model.parameters(), *reward_model.parameters()])
    for step in tqdm(range(args.supervised_steps), "supervised training", disable=None):
        prompts = generator.choices(BUILTIN_PROMPTS, k=64)
        answers = []
        for _ in prompts:  # one to three judgements, each good or bad with the same probability
            words = generator.choices(GOOD + BAD, k=generator.choice((1, 2, 3)))
            words = [f"{generator.choice(ADVERBS)} {word}" if generator.random() < 0.5 else word for word in words]
            answers.append(f"it is {' and '.join(words)} .")
        prompt_ids, prompt_mask = pad_left([tokenizer(prompt).input_ids for prompt in prompts], 0)  # 0: <eos>
        rows = [torch.tensor(tokenizer(answer).input_ids + [0]) for answer in answers]
        batch = join_answers(prompt_ids, prompt_mask, nn.utils.rnn.pad_sequence(rows, batch_first=True), 0)
        log_probs, _ = get_log_probs(model, *batch, temperature=1.0)
        errors = get_scores(reward_model, *batch) - torch.tensor([task_score(answer) for answer in answers])
        (errors.square().mean() - log_probs[batch[-1]].mean()).backward()  # batch[-1]: the mask
        optimizer.param_groups[0]["lr"] = 2e-3 * (1 - step / args.supervised_steps)
        optimizer.step()
        optimizer.zero_grad()
    return tokenizer, model, reward_model


def load_model(kind, name, new_layer=None):
    """A model of transformers, float32 and without dropout or other noise, and its tokenizer. kind: an Auto class;
    new_layer: a parameter that the files may lack; num_labels becomes 1"""
    config = AutoConfig.from_pretrained(name)
    text_config = config.get_text_config()  # nested where a model takes images too
    for key, value in text_config.to_dict().items():
        # attention_dropout, resid_pdrop, router_jitter_noise, ...: every architecture has its own names
        if ("drop" in key or "jitter" in key) and isinstance(value, float):
            setattr(text_config, key, 0.0)
    if new_layer:
        config.num_labels = 1
    model, info = kind.from_pretrained(name, config=config, dtype=torch.float32, output_loading_info=True)
    if missing := set(info["missing_keys"]) - {new_layer}:
        raise UsageError(f"{name} is not a {kind.__name__.removeprefix('AutoModelFor')}: it lacks {min(missing)}")
    model.config.dtype = config.dtype or torch.float32  # the dtype in the files; save_model uses it
    return model, AutoTokenizer.from_pretrained(name, padding_side="left")


def make_models(args, device, run_dir=None):
    """Tokenizer, reference and reward model, frozen. With --reward, the third only initializes the critic: it is the
    language model with a layer of zeros. run_dir: --resume and --evaluate read built-in models from there."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if args.model is None and run_dir is None:
        tokenizer, reference, reward_model = make_builtin_models(args)
    else:
        folder = Path(run_dir or "")
        name = args.model or folder / "supervised"
        reward_name = name if args.reward else args.reward_model or folder / "reward"
        reference, tokenizer = load_model(AutoModelForCausalLM, name)
        new_layer = "score.weight" if args.reward else None
        reward_model, reward_tokenizer = load_model(AutoModelForSequenceClassification, reward_name, new_layer)
        size, reward_size = (model.config.get_text_config().vocab_size for model in (reference, reward_model))
        if not tokenizer.get_vocab().items() <= reward_tokenizer.get_vocab().items() or size > reward_size:
            raise UsageError(f"--reward-model {reward_name} and --model {name} need one vocabulary and tokenizer")
        if not hasattr(reward_model, "score") or reward_model.config.num_labels != 1:
            raise UsageError(f"{reward_name}, loaded as a classifier, has no layer `score` with one output")
        if args.reward:
            nn.init.zeros_(reward_model.score.weight)
        if tokenizer.eos_token_id is None:
            raise UsageError(f"the tokenizer of --model {name} has no EOS token: give it one")
        if args.reward_model and reward_model.config.get_text_config().pad_token_id == tokenizer.eos_token_id:
            print(f"{reward_name} pads with EOS: transformers reads its score one token earlier than this script")
    own_ends = reference.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(own_ends if isinstance(own_ends, list) else [own_ends])} - {None}
    ids = {"eos_token_id": sorted(ends), "pad_token_id": tokenizer.eos_token_id}
    sampling = {"do_sample": True, "temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    reference.own_generation_config = reference.generation_config  # for save_model; it does not apply here
    max_new_tokens = args.response_length or (256 if args.model else 16)
    reference.generation_config = transformers.GenerationConfig(max_new_tokens=max_new_tokens, **sampling, **ids)
    return tokenizer, *(model.to(device).eval().requires_grad_(False) for model in (reference, reward_model))


def store_in_bfloat16(*models):
    """Round the matrices of frozen models once. Autocast would round them at every call, to the same values."""
    for model in models:
        kept = model.get_input_embeddings().weight  # an output layer may be tied to it
        for name, module in model.named_modules():
            is_matrix = isinstance(module, (nn.Linear, transformers.pytorch_utils.Conv1D))
            if is_matrix and module.weight is not kept and name != "score":  # score_tokens needs float32
                module.to(torch.bfloat16)


def read_lines(path):
    """The lines of a file of prompts."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig").removesuffix("\n")  # -sig: drops a BOM
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts {path}: {error}") from None
    is_json = re.match(r'\s*[\[{]\s*[\[{"]', text)
    if Path(path).suffix != (".jsonl" if is_json else ".txt") or "\0" in text:
        raise UsageError(f'--prompts {path}: write .txt, a prompt per line, or .jsonl, {{"prompt": "..."}} per line')
    return text.split("\n")  # unlike splitlines, not at U+2028


def load_prompts(args, tokenizer, reference, reward_model):
    """Pairs (token ids, line). A line is a text, or the object of a .jsonl line. Token ids leave room for an answer."""
    names = "max_position_embeddings", "max_seq_len"  # the latter is MPT's
    configs = [model.config.get_text_config() for model in (reference, reward_model)]
    response_length = reference.generation_config.max_new_tokens
    context = min(getattr(config, name, math.inf) for config in configs for name in names)
    vocab_size = min(config.vocab_size for config in configs)
    form, prompts = '{"prompt": [{"role": "user", "content": "..."}]}', []
    is_jsonl = str(args.prompts).endswith(".jsonl")
    for number, line in enumerate(read_lines(args.prompts) if args.prompts else BUILTIN_PROMPTS, start=1):
        place = f"{args.prompts or 'the built-in task'}, line {number}"
        try:
            line = json.loads(line) if is_jsonl else line
            prompt = line["prompt"] if is_jsonl else line
            if isinstance(prompt, list):
                ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True).input_ids
            else:
                ids = tokenizer(prompt).input_ids if prompt.strip() else []
        except Exception as error:  # no JSON, no such key, no text, no chat template, or what a template refuses
            raise UsageError(f'{place} is not {{"prompt": "..."}} or {form}: {type(error).__name__} {error}') from None
        if not ids:
            raise UsageError(f"{place}: the prompt is empty")
        if max(ids) >= vocab_size:
            raise UsageError(f"{place}: the prompt has token {max(ids)}, but a model has only {vocab_size}")
        if len(ids) + response_length > context:
            raise UsageError(f"{place}: {len(ids)} tokens and --response-length exceed the context of {context}")
        prompts.append((ids, line))
    # Both warnings look at the last prompt only.
    if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
        print("prompts end with EOS, perhaps by the tokenizer: answers begin after the end of a text", file=sys.stderr)
    plain = isinstance(prompt, str) and not any(token in prompt for token in tokenizer.all_special_tokens)
    if tokenizer.chat_template and plain:
        print(f"prompts lack the chat template of the tokenizer; to apply it, write {form} in .jsonl", file=sys.stderr)
    return prompts


def draw_prompts(prompts, start, count, seed):
    """count prompts from place start of an endless list: all prompts, shuffled anew for each pass."""
    passes = range(start // len(prompts), (start + count - 1) // len(prompts) + 1)
    order = np.concatenate([np.random.default_rng([seed, n]).permutation(len(prompts)) for n in passes])
    first = start - passes[0] * len(prompts)
    return [prompts[n] for n in order[first : first + count]]


def pad_left(rows, pad_token_id):
    """Lists of token ids -> ids and mask (B, P), the mask 1 where a token is; answers can then begin in one column."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad_token_id] * (width - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


def decode(tokenizer, prompts, sequences, mask):
    """Pairs of texts (prompt, answer), without special tokens."""
    answers = [row[actions].tolist() for row, actions in zip(sequences[:, -mask.shape[1] :], mask)]
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}  # the text as it is: "x != y"
    return list(zip(*(tokenizer.batch_decode(ids, **options) for ids in (prompts, answers))))


def format_sample(score, prompt, answer):
    """One line for the terminal: the end of the prompt, the beginning of the answer."""
    return f"{score:6.2f}  {' '.join(prompt.split())[-80:]} -> {' '.join(answer.split())[:200]}"


class Run:
    """The folder of a run: args.json, a copy of this script, TensorBoard events, metrics.csv, checkpoint.pt and models.
    Also wandb and the progress bar. Only rank 0 writes: elsewhere log, save, save_model and close do nothing."""

    def __init__(self, args, num_iterations, device, cleanup, resume, rank):
        model_name = Path(args.model).resolve().name if args.model else "builtin"
        name = re.sub(r"[^\w.-]", "-", f"{model_name}__{args.exp_name}__{args.seed}__{time.time():.3f}")
        self.args, self.num_iterations, self.dir = args, num_iterations, None
        if rank == 0:
            self.dir = Path(resume or Path(args.runs_dir, name)).expanduser()
            self.dir.mkdir(parents=True, exist_ok=True)
            try:  # the lock is released when `train` or the process ends, however it ends
                cleanup.enter_context(FileLock(self.dir / "lock", timeout=0))
            except Timeout:
                raise UsageError(f"another process is training in {self.dir}") from None
        self.checkpoint = load_checkpoint(resume) if resume else {}
        self.iteration = self.checkpoint.get("iteration", 0)
        for name in ("model", "reward_model", "reward", "prompts", "batch_size"):
            if resume and getattr(args, name) != (begun_with := self.checkpoint["args"][name]):
                raise UsageError(f"{resume} began with --{name.replace('_', '-')} {begun_with}: it cannot be changed")
        if rank > 0:
            self.log = self.save = self.save_model = self.close = lambda *arguments: None
            return
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
            self.wandb_table = wandb.Table
        total, initial = num_iterations * args.batch_size, self.iteration * args.batch_size
        # Logs newer than the checkpoint: purge_step hides TensorBoard's, metrics.csv is cut below, W&B keeps its own.
        self.writer = SummaryWriter(self.dir, purge_step=initial + 1)
        if resume:
            os.truncate(self.dir / "metrics.csv", self.checkpoint["metrics_size"])
        self.metrics_file = (self.dir / "metrics.csv").open("a", newline="\n")
        self.start_time = time.monotonic() - self.checkpoint.get("seconds", 0.0)
        say(f"{self.dir}: answer {initial:,} of {total:,}, {args.batch_size} per iteration, on {device}")
        self.bar = tqdm(total=total, initial=initial, unit="answer", disable=None)

    def log(self, iteration, scalars, samples):
        """scalars: {name: number or tensor ()}; samples: [(score, (prompt, answer)), ...]"""
        global_step = iteration * self.args.batch_size
        scalars = {name: float(value) for name, value in scalars.items()}
        seconds = time.monotonic() - self.start_time
        row = {"iteration": iteration, "global_step": global_step, "seconds": seconds} | scalars
        if self.metrics_file.tell() == 0:
            print(*row, sep=",", file=self.metrics_file)
        print(*(f"{value:.9g}" for value in row.values()), sep=",", file=self.metrics_file, flush=True)
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, global_step)
        logged = scalars | {"global_step": global_step}
        text = "   ".join(f"{name} {row['charts/' + name]:.3f}" for name in ("reward", "kl", "response_length"))
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(self.args.batch_size)
        if iteration == 1 or iteration % math.ceil(self.num_iterations / 10) == 0:
            say(f"answer {global_step:>9,}   {text}")
            for number, (score, (prompt, answer)) in enumerate(samples[:4]):
                say(format_sample(score, prompt, answer))
                self.writer.add_text(f"sample {number}", f"{prompt} -> {answer} ({score:.3f})", global_step)
            if self.args.track:
                table = [(score, *texts) for score, texts in samples]
                logged["samples"] = self.wandb_table(["score", "prompt", "answer"], table)
        if self.args.track:
            self.wandb.log(logged, step=global_step)
        self.iteration = iteration

    def save_model(self, model, tokenizer, name):
        """Save a model with its tokenizer for from_pretrained, in the dtype that the model's files had."""
        model = copy.deepcopy(model).to(model.config.dtype)
        model.generation_config = getattr(model, "own_generation_config", None)  # a reward model has none
        for part in (model, tokenizer):
            part.save_pretrained(self.dir / f"{name}.tmp")
        shutil.rmtree(self.dir / name, ignore_errors=True)
        os.replace(self.dir / f"{name}.tmp", self.dir / name)  # in one move: no folder of this name is half-written

    def save(self, learners):
        """Write checkpoint.pt. A kill while writing leaves the old file."""
        self.writer.flush()  # logs first: they must be on disk before the checkpoint that counts them
        checkpoint = {name: learner.state_dict() for name, learner in learners.items()}
        checkpoint |= {
            "args": vars(self.args),
            "iteration": self.iteration,
            "seconds": time.monotonic() - self.start_time,
            "metrics_size": self.metrics_file.tell(),
            "wandb_id": self.wandb.id if self.args.track else None,
        }
        torch.save(checkpoint, self.dir / "checkpoint.tmp")
        os.replace(self.dir / "checkpoint.tmp", self.dir / "checkpoint.pt")

    def close(self):
        self.bar.close()
        self.writer.close()
        self.metrics_file.close()
        if self.args.track:
            self.wandb.finish()
        script, reward = os.path.relpath(__file__), f" --reward {self.args.reward}" if self.args.reward else ""
        if self.iteration >= self.num_iterations:
            say(f"trained model: {self.dir}/actor; to evaluate: python {script} --evaluate {self.dir}{reward}")
        elif (self.dir / "checkpoint.pt").exists():
            say(f"to resume: python {script} --resume {self.dir}{reward}")


def say(text):
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # the terminal may lack characters of an answer
    tqdm.write(text.encode(encoding, "replace").decode(encoding))


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
    """The checkpoint, on the CPU. weights_only: loading runs no code. mmap: tensors are read when they are used."""
    return torch.load(Path(run_dir, "checkpoint.pt"), map_location="cpu", weights_only=True, mmap=True)


def load_args(run_dir):
    """The settings of a run."""
    return Args(**load_checkpoint(run_dir)["args"])


@torch.no_grad()
def evaluate(run_dir, args):
    """The actor of a run answers E = eval_episodes prompts, cycling through them -> texts (prompt, answer), scores and
    KL to the reference (E,)"""
    device, *_ = start_device(args)
    tokenizer, reference, reward_model = make_models(args, device, run_dir)
    prompts = load_prompts(args, tokenizer, reference, reward_model)
    # requires_grad: only then does autocast keep its bfloat16 copies of weights. No gradient is computed.
    actor = copy.deepcopy(reference).requires_grad_(True)
    actor.load_state_dict(load_checkpoint(run_dir)["actor"])
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda" and args.bf16)
    torch.manual_seed(args.seed)
    prompts = [prompts[n % len(prompts)] for n in range(args.eval_episodes)]
    texts, scores, kls = [], [], []
    S = args.micro_batch_size or args.batch_size // args.num_minibatches
    for start in range(0, args.eval_episodes, S):
        token_ids, lines = map(list, zip(*prompts[start : start + S]))
        with autocast:
            sequences, _, mask = batch = generate(actor, tokenizer, token_ids, do_sample=not args.eval_deterministic)
            log_probs, ref_log_probs = (get_log_probs(x, *batch, args.temperature)[0] for x in (actor, reference))
            pairs = decode(tokenizer, token_ids, sequences, mask)
            answers = [answer for _, answer in pairs]
            scores.append(score_answers(args, reward_model, batch, lines, answers, S))
            texts += pairs
        kls.append((log_probs - ref_log_probs).masked_fill(~mask, 0.0).sum(-1))
    return texts, torch.cat(scores), torch.cat(kls)


def parse_args(words, default=None):
    """Command line -> Args. Translates what `wandb sweep` sends: --anneal_lr=True and --total_episodes=1e4."""
    default, argv = default or Args(), []
    for word in words:
        flag, _, value = word.partition("=") if word.startswith("--") else ("", "", word)
        current = getattr(default, flag[2:].replace("-", "_"), None)
        if isinstance(current, bool) and value in ("True", "False"):
            word = flag if value == "True" else f"--no-{flag[2:]}"
        elif isinstance(current, int) and re.fullmatch(r"\d+\.0|\d+e\+?\d+", value):
            word = f"{flag}={float(value):.0f}"
        argv.append(word)
    return tyro.cli(Args, args=argv, default=default, description=__doc__.split("\n\nWhere")[0])


def main():
    sys.path.append(os.getcwd())  # for --reward my_module:function
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    one_of = parser.add_mutually_exclusive_group()
    one_of.add_argument("--resume")
    one_of.add_argument("--evaluate")
    command, words = parser.parse_known_args()
    run_dir = command.resume or command.evaluate
    if run_dir:
        run_dir = find_run(run_dir, parse_args(words).runs_dir)  # --runs-dir may be among the words
    args = parse_args(words, load_args(run_dir) if run_dir else Args())  # of that run, unless given here
    if run_dir and args.reward and not any(args.reward in word for word in words):  # importing runs code
        raise UsageError(f"the checkpoint names a module: if you trust it, add --reward {args.reward}")
    if not command.evaluate:
        train(args, run_dir)
        if dist.is_initialized():
            dist.destroy_process_group()
        return
    texts, scores, kls = evaluate(run_dir, args)
    for score, pair in list(zip(scores, texts))[:8]:
        say(format_sample(score, *pair))
    measure = "log-ratio" if args.eval_deterministic else "KL"  # the likeliest answer's log-ratio estimates no KL
    say(f"{len(texts)} answers: mean reward {scores.mean():.3f}, {measure} to the reference {kls.mean():.3f}")
    if args.model is None:
        say(f"mean task score {np.mean([task_score(answer) for _, answer in texts]):.3f}")


if __name__ == "__main__":
    try:
        main()
    except (UsageError, ImportError, OSError) as error:  # ImportError: --reward. OSError: transformers, the disk
        print(f"{Path(__file__).name}: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
