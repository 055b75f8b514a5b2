# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.11,<3", "transformers>=5,<6", "numpy>=1.26,<3", "tyro>=1.0,<2", "tensorboard>=2.18,<3",
#     "wandb>=0.22,<1", "tqdm>=4.66,<5", "filelock>=3.13,<5",
# ]
# ///
"""Proximal Policy Optimization (PPO) on a language model, from the scores of a reward model (RLHF), in one file.

    python variants/ppo_rlhf.py                                # the built-in task: no download, minutes on one core
    python variants/ppo_rlhf.py --model A --reward-model B --prompts prompts.txt   # models of transformers
    python variants/ppo_rlhf.py --resume runs/NAME             # go on after Ctrl-C, a kill or a crash
    python variants/ppo_rlhf.py --evaluate runs/NAME           # answers of the trained actor, their scores and KL
    torchrun --nproc-per-node 4 variants/ppo_rlhf.py           # train in four processes, a quarter of the prompts each

Four models, as in DeepSpeed-Chat. Actor and reference begin as the supervised language model; only the actor learns.
Critic and reward model begin as the reward model; only the critic learns. An answer is an episode. A token is an
action, and so is the end-of-sequence token (EOS) that the actor samples.

Choices, where implementations differ:
 1. The reward of a token is -kl_coef * (log_prob - reference's log_prob). The last token of an answer, EOS or the one
    at the limit, gets the clipped score on top. DeepSpeed-Chat puts it one token later if the answer is short.
 2. An answer ends at its first EOS. The padding token plays no part: it may be the EOS (GPT-2).
 3. Advantages by GAE within the answer (gamma 1, lambda 0.95). What follows an answer has the value 0. --norm-adv
    normalises the advantages of each minibatch.
 4. Losses are means over the tokens of a minibatch: a long answer weighs more. Policy and value are clipped.
    Processes weigh the same, however many tokens each has (DeepSpeed).
 5. Actor and critic have an Adam each, with betas (0.9, 0.95). Learning rates fall linearly, without a warm-up.
 6. There is no dropout. Old and new log-probabilities come from the same function, never from `generate` with its
    cache: the probability ratio is 1 in the first minibatch of an iteration.
 7. Log-probabilities, KL and entropy are those at --temperature. --top-k and --top-p restrict the sampling only: the
    losses still use the full distribution.
 8. No answer is dropped. --min-response-length trains on no shorter ones. DeepSpeed-Chat drops those below 2 tokens,
    where an EOS that is the padding does not count.
 9. kl_coef is fixed. --kl-target makes it follow the KL (Ziegler et al. 2019).
10. Trained weights, gradients and optimizers are float32. On CUDA, forward passes run in bfloat16, and frozen models
    store their matrices so. Values and scores stay float32. Logits are rounded to bfloat16. Those of GPT-2 are near
    -100, where its steps are 0.5 (--no-bf16 avoids that).

In reading order: Args, models, advantages and losses, train. The services below `train` hold no PPO.
Shapes: B = answers of a process in an iteration, M = answers of a minibatch, P = longest prompt, R = longest answer,
L = P + R, V = vocabulary; in the losses, (M,) are the trained tokens of a minibatch. Prompts are padded on the left,
answers on the right: all answers begin in column P.
Sibling: ../ppo_continuous.py. Functions that both have are the same text.
"""

import contextlib
import copy
import dataclasses
import json
import math
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import tyro
from filelock import FileLock, Timeout
from torch.nn.utils import clip_grad_norm_
from torch.utils.tensorboard import SummaryWriter
from tqdm.auto import tqdm

__version__ = "1.0.dev0"

try:
    import tokenizers
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
except ImportError as error:
    print(f"ppo_rlhf.py: error: {error}: pip install -r variants/requirements.txt", file=sys.stderr)
    raise SystemExit(2) from None


@dataclasses.dataclass
class Args:  # the comments are what --help prints
    # --- run
    exp_name: str = Path(__file__).stem  # part of the run folder's name, RUNS_DIR/MODEL__EXP_NAME__SEED__TIME
    runs_dir: str = "runs"  # where run folders are made
    seed: int = 1  # seed of sampling and of the order of prompts; of the built-in task's models too
    device: str = "auto"  # cpu, cuda, cuda:1; auto: cuda where there is one
    checkpoint_interval: int = 20  # iterations between checkpoints; the last iteration is always saved
    resume: str | None = None  # run folder to continue; its arguments apply, except those given again
    evaluate: str | None = None  # run folder whose actor answers --eval-episodes prompts, without learning
    eval_episodes: int = 256  # answers that --evaluate asks for
    eval_deterministic: bool = False  # evaluate with the likeliest token; off: sample as in training
    track: bool = False  # log to Weights & Biases too
    wandb_project_name: str = "ppo"  # project for --track
    wandb_entity: str | None = None  # team for --track; None: your default
    # --- models and prompts
    model: str | None = None  # supervised language model, a transformers name or folder; None: the built-in task
    reward_model: str | None = None  # sequence classifier: --model's tokenizer, one output from a layer `score`
    prompts: str | None = None  # file with a prompt per line, in .jsonl {"prompt": "..."}; no chat template is applied
    supervised_steps: int = 300  # gradient steps that make the models of the built-in task
    bf16: bool = True  # CUDA: forward passes in bfloat16
    gradient_checkpointing: bool = True  # CUDA: activations are computed twice instead of stored
    # --- answers
    response_length: int = 16  # tokens that an answer has at most, EOS included
    min_response_length: int = 1  # shorter answers, EOS included, are scored and not trained on; 1: trained on all
    temperature: float = 1.0  # logits are divided by it, in sampling and everywhere else
    top_k: int = 0  # sample only from the k likeliest tokens, which the losses ignore; 0: from all
    top_p: float = 1.0  # sample only from the likeliest tokens of this total probability, likewise; 1: all
    # --- PPO
    total_episodes: int = 19_200  # answers of the run, rounded down to whole iterations
    batch_size: int = 128  # answers per iteration, of all processes together
    num_minibatches: int = 2  # minibatches per epoch; must divide the answers of a process
    ppo_epochs: int = 2  # passes over the answers of an iteration
    actor_learning_rate: float | None = None  # None: 1e-5 with --model, 5e-4 for the built-in task
    critic_learning_rate: float | None = None  # None: 5e-6 with --model, 1e-3 for the built-in task
    anneal_lr: bool = True  # lower the learning rates linearly to 0 over the run
    gamma: float = 1.0  # discount factor, 0 to 1
    gae_lambda: float = 0.95  # 0: one-step TD error (low variance); 1: rewards to the end of the answer (no bias)
    norm_adv: bool = False  # give the advantages of each minibatch mean 0 and standard deviation 1
    clip_coef: float = 0.2  # the probability ratio is clipped to 1 - clip_coef .. 1 + clip_coef
    vf_clip_coef: float | None = 0.2  # take the larger of the value errors with and without this clip; None: unclipped
    clip_reward: float = 5.0  # the score of an answer is clipped to +-clip_reward
    kl_coef: float = 0.1  # weight of the KL penalty; where it starts with --kl-target
    kl_target: float | None = None  # move kl_coef so that the KL per answer, in nats, nears this (try 6); None: fixed
    kl_horizon: float = 10_000  # answers in which --kl-target may change kl_coef by at most about 20%
    max_grad_norm: float = 1.0  # upper bound on the norm of each model's gradient; 0: none


# ============================================================================================================== models


def join_answers(prompt_ids, prompt_mask, answers, eos_token_id):
    """Prompts (B, P) and answers (B, R) -> sequences and attention mask (B, L), and which tokens of the answers are
    actions (B, R) bool: all up to the first EOS, and this EOS. What follows is padding, whatever its id."""
    is_eos = (answers == eos_token_id).long()
    mask = is_eos.cumsum(-1) - is_eos == 0  # no EOS before this token
    return torch.cat([prompt_ids, answers], 1), torch.cat([prompt_mask, mask.long()], 1), mask


@torch.no_grad()
def generate(actor, tokenizer, prompts, do_sample=True):
    """Answers of the actor to prompts, lists of token ids. -> sequences, attention mask (B, L), mask (B, R)"""
    # Nothing attends to padding: any token will do.
    prompt_ids, prompt_mask = (x.to(actor.device) for x in pad_left(prompts, tokenizer.eos_token_id))
    sequences = actor.generate(prompt_ids, attention_mask=prompt_mask, do_sample=do_sample)
    return join_answers(prompt_ids, prompt_mask, sequences[:, prompt_ids.shape[1] :], tokenizer.eos_token_id)


def model_inputs(sequences, attention_mask):
    """Positions count real tokens: padding on the left moves nothing."""
    position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)  # (B, L); the clamp is for padding
    return {"input_ids": sequences, "attention_mask": attention_mask, "position_ids": position_ids, "use_cache": False}


def gather_log_probs(logits, labels):
    """Log-probabilities (...) of the tokens labels (...) under logits (..., V)."""
    return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def get_log_probs(model, sequences, attention_mask, mask, temperature):
    """Log-probability of every token of the answers (B, R), and the logits that it is from (B, R, V). mask gives R."""
    R = mask.shape[1]
    logits = model(**model_inputs(sequences, attention_mask), logits_to_keep=R + 1).logits
    logits = logits[:, -R - 1 : -1].float() / temperature  # logits at position t are for token t + 1
    return gather_log_probs(logits, sequences[:, -R:]), logits


def score_tokens(model, sequences, attention_mask):
    """The output of the layer `score` of critic or reward model at every token, (B, L)"""
    hidden = model.base_model(**model_inputs(sequences, attention_mask)).last_hidden_state
    with torch.autocast(hidden.device.type, enabled=False):  # bfloat16 would round values of 2 to 4 to 1/64
        return model.score(hidden.float()).squeeze(-1)


def get_values(critic, sequences, attention_mask, mask):
    """Value of the state in which each token of the answers was chosen, (B, R)"""
    return score_tokens(critic, sequences, attention_mask)[:, -mask.shape[1] - 1 : -1]


def get_scores(reward_model, sequences, attention_mask, mask):
    """Score of every answer, read at its last token (EOS, if it was sampled), (B,)"""
    last = mask.sum(-1, keepdim=True) - 1  # (B, 1)
    return score_tokens(reward_model, sequences, attention_mask)[:, -mask.shape[1] :].gather(1, last).squeeze(1)


# ================================================================================================ advantages and losses


def compute_rewards(kl, scores, mask, kl_coef, clip_reward):
    """kl = log_probs - reference's, mask (B, R), scores (B,) -> rewards (B, R): the KL penalty of every token; on the
    last one of the answer the clipped score too; 0 behind it."""
    rewards = (-kl_coef * kl).masked_fill(~mask, 0.0)  # (B, R)
    last = mask.sum(-1, keepdim=True) - 1  # (B, 1)
    return rewards.scatter_add(1, last, scores.clamp(-clip_reward, clip_reward).unsqueeze(-1))


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


def answer_advantages(rewards, values, mask, gamma, gae_lambda):
    """Advantages and returns of the tokens of answers, 0 behind them; all (B, R). An answer is an episode that its last
    token terminates, EOS or not: the score is for the text within the limit, and nothing follows it."""
    values = values.masked_fill(~mask, 0.0)
    next_values = nn.functional.pad(values[:, 1:], (0, 1))  # 0 after the last token
    never = torch.zeros_like(mask)  # no flag is needed: the next value is 0 already
    steps = (x.T for x in (rewards, values, next_values, never, never))  # (R, B)
    advantages, returns = compute_gae(*steps, gamma, gae_lambda)
    return advantages.T, returns.T


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


def apply_gradient(loss, model, optimizer, max_grad_norm):
    """One step of one model on the gradient of its loss, averaged over ranks."""
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:  # some models have parameters that take no part
            average_over_ranks(parameter.grad)
    if max_grad_norm > 0:
        clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()


def adapt_kl_coef(kl_coef, kl, kl_target, kl_horizon, episodes):
    """Raise or lower the coefficient by about 20% at most in kl_horizon answers, in proportion to how far the KL per
    answer is from its target (Ziegler et al. 2019, section 2.2)."""
    error = min(max(kl / kl_target - 1, -0.2), 0.2)  # relative, at most 20%
    return kl_coef * (1 + error * min(episodes / kl_horizon, 1.0))


def explained_variance(values, returns):
    """1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for a constant; NaN if returns are equal."""
    variance = returns.var(correction=0)
    return torch.where(variance > 0, 1 - (returns - values).var(correction=0) / variance, torch.nan)


# =============================================================================================================== train


def train(args, stop_signals=()):
    """Train an actor. Returns it and its run folder, which is None on ranks above 0.

    stop_signals: a list that a signal handler appends to. The iteration under way is then the last, and is saved."""
    # --------------------------------------------------------------------------------------------------------- set-up
    rank, num_ranks = 0, 1
    if dist.is_torchelastic_launched():  # by torchrun: this is process `rank` of num_ranks
        rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    check_args(args, num_ranks)
    B, num_iterations = args.batch_size // num_ranks, args.total_episodes // args.batch_size
    M = B // args.num_minibatches

    torch.manual_seed(args.seed)
    device = start_device(args)
    on_cuda = device.type == "cuda"
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=on_cuda and args.bf16)
    tokenizer, reference, reward_model = make_models(args, device)
    prompts = load_prompts(args, tokenizer, reference, reward_model)
    for parameter in [*reference.parameters(), *reward_model.parameters()]:
        average_over_ranks(parameter)  # equal on all ranks: processors may round the built-in models differently
    actor, critic = (copy.deepcopy(model).requires_grad_(True) for model in (reference, reward_model))
    checkpointing = on_cuda and args.gradient_checkpointing
    if checkpointing:
        actor.gradient_checkpointing_enable()
        critic.gradient_checkpointing_enable()
    actor_optimizer = torch.optim.Adam(actor.parameters(), betas=(0.9, 0.95))
    critic_optimizer = torch.optim.Adam(critic.parameters(), betas=(0.9, 0.95))
    actor_lr, critic_lr = args.actor_learning_rate, args.critic_learning_rate
    if actor_lr is None:  # large trained models need smaller steps
        actor_lr = 5e-4 if args.model is None else 1e-5
    if critic_lr is None:
        critic_lr = 1e-3 if args.model is None else 5e-6
    learners = {"actor": actor, "critic": critic}  # a checkpoint holds their state
    learners |= {"actor_optimizer": actor_optimizer, "critic_optimizer": critic_optimizer}
    last_iteration, seconds, kl_coef = restore(args, learners) if args.resume else (0, 0.0, args.kl_coef)

    run = Run(args, rank, last_iteration, seconds, device)
    if args.model is None and not args.resume:  # --resume and --evaluate read them
        run.save_model(reference, tokenizer, "supervised")
        run.save_model(reward_model, tokenizer, "reward")
    if on_cuda and args.bf16:
        store_in_bfloat16(reference, reward_model)

    for iteration in range(last_iteration + 1, num_iterations + 1):
        # A seed for every iteration: a resumed run draws the same numbers. Other ranks draw others.
        torch.manual_seed(int(np.random.SeedSequence([args.seed, rank, iteration]).generate_state(1)[0]))
        remaining = 1.0 - (iteration - 1) / num_iterations  # 1 in the first iteration, above 0 in the last
        actor_optimizer.param_groups[0]["lr"] = actor_lr * (remaining if args.anneal_lr else 1.0)
        critic_optimizer.param_groups[0]["lr"] = critic_lr * (remaining if args.anneal_lr else 1.0)

        # ---------------------------------------------------------------------------------------------------- rollout
        start_time = time.time()
        place = (iteration - 1) * args.batch_size + rank * B  # ranks share the prompts of an iteration
        iteration_prompts = draw_prompts(prompts, place, B, args.seed)
        actor.eval(), critic.eval()
        with autocast:
            sequences, attention_mask, mask = generate(actor, tokenizer, iteration_prompts)  # (B, L), (B, L), (B, R)
        rollout_time = time.time()
        # In minibatches, as in the update, to need no more memory.
        parts = []
        with torch.no_grad(), autocast:
            for part in zip(*(x.split(M) for x in (sequences, attention_mask, mask))):
                log_probs, ref_log_probs = (get_log_probs(x, *part, args.temperature)[0] for x in (actor, reference))
                values, scores = get_values(critic, *part), get_scores(reward_model, *part)
                parts.append((log_probs, ref_log_probs, values, scores))
        log_probs, ref_log_probs, values, scores = (torch.cat(x) for x in zip(*parts))  # scores (B,), others (B, R)
        if not scores.isfinite().all():
            fail(f"iteration {iteration}: --reward-model gave NaN or infinity; the last checkpoint is kept")

        # ------------------------------------------------------------------------------------------------- advantages
        kl = (log_probs - ref_log_probs).masked_fill(~mask, 0.0)  # summed per answer, its mean estimates the KL
        rewards = compute_rewards(kl, scores, mask, kl_coef, args.clip_reward)
        advantages, returns = answer_advantages(rewards, values, mask, args.gamma, args.gae_lambda)  # (B, R)
        trained = mask & (mask.sum(-1, keepdim=True) >= args.min_response_length)  # (B, R)

        # ----------------------------------------------------------------------------------------------------- update
        update_time, all_metrics = time.time(), []
        actor.train(checkpointing), critic.train(checkpointing)  # gradient checkpointing needs that mode; dropout is 0
        for _ in range(args.ppo_epochs):
            permutation = torch.randperm(B).to(device)
            tensors = (sequences, attention_mask, mask, trained, log_probs, values, advantages, returns)
            b_tensors = [x[permutation] for x in tensors]  # (B, ...)
            for minibatch in zip(*(x.split(M) for x in b_tensors)):  # (M, ...)
                mb_inputs, mb_trained = minibatch[:3], minibatch[3]
                # Only trained tokens count, in losses as in metrics: (tokens,)
                mb_log_probs, mb_values, mb_advantages, mb_returns = (x[mb_trained] for x in minibatch[4:])
                if args.norm_adv and len(mb_advantages) > 1:  # one sample has no standard deviation
                    mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
                with autocast:
                    new_log_probs, logits = get_log_probs(actor, *mb_inputs, args.temperature)
                log_ratio = new_log_probs[mb_trained] - mb_log_probs  # 0 in the first minibatch of an iteration
                policy_loss = clipped_policy_loss(log_ratio, mb_advantages, args.clip_coef)
                apply_gradient(policy_loss, actor, actor_optimizer, args.max_grad_norm)
                with autocast:
                    new_values = get_values(critic, *mb_inputs)[mb_trained]
                value_loss = clipped_value_loss(new_values, mb_values, mb_returns, args.vf_clip_coef)
                apply_gradient(value_loss, critic, critic_optimizer, args.max_grad_norm)
                with torch.no_grad():
                    policy = torch.distributions.Categorical(logits=logits[mb_trained], validate_args=False)
                    metrics = {
                        "policy_loss": policy_loss,
                        "value_loss": value_loss,
                        "values": new_values.mean(),
                        "entropy": policy.entropy().mean(),
                        # Two estimates of KL(old, new): k3, never below 0, and k1.
                        "approx_kl": (log_ratio.expm1() - log_ratio).mean(),
                        "old_approx_kl": -log_ratio.mean(),
                        "clipfrac": (log_ratio.expm1().abs() > args.clip_coef).float().mean(),
                    }
                all_metrics.append({name: metric.detach() for name, metric in metrics.items()})
        if not all(parameter.isfinite().all() for model in (actor, critic) for parameter in model.parameters()):
            fail(f"the update of iteration {iteration} gave NaN or infinity; the last checkpoint is kept")

        # ------------------------------------------------------------------------------------------------ log and save
        ended = (mask & (sequences[:, -mask.shape[1] :] == tokenizer.eos_token_id)).any(-1)
        scalars = {
            "charts/reward": scores.mean(),
            "charts/kl": kl.sum(-1).mean(),  # KL(actor, reference) in nats per answer, by k1
            "charts/kl_k3": (kl.neg().expm1() + kl).sum(-1).mean(),  # by k3: of less variance, never below 0
            "charts/response_length": mask.sum(-1).float().mean(),
            "charts/ended": ended.float().mean(),  # share of answers that end with EOS
            **{f"losses/{name}": torch.stack([m[name] for m in all_metrics]).mean() for name in metrics},
            "losses/explained_variance": explained_variance(values[mask], returns[mask]),
        }
        texts = decode(tokenizer, iteration_prompts, sequences, mask)
        if args.model is None:
            task_scores = [task_score(answer) for _, answer in texts]
            scalars["charts/task_score"] = torch.tensor(np.mean(task_scores), device=device)
        # Times num_ranks, because the loop below takes the mean. The update also counts prompts, once per epoch.
        num_tokens = num_ranks * torch.stack([mask.sum(), args.ppo_epochs * attention_mask.sum()]).double()
        times = rollout_time - start_time, time.time() - update_time
        scalars["charts/generated_tokens_per_second"] = num_tokens[0] / times[0]
        scalars["charts/trained_tokens_per_second"] = num_tokens[1] / times[1]
        for value in scalars.values():
            average_over_ranks(value)
        scalars["charts/kl_coef"], scalars["charts/learning_rate"] = kl_coef, actor_optimizer.param_groups[0]["lr"]
        if args.kl_target is not None:
            kl = scalars["charts/kl"].item()
            kl_coef = adapt_kl_coef(kl_coef, kl, args.kl_target, args.kl_horizon, args.batch_size)
        run.log(iteration, scalars, list(zip(scores.tolist(), texts))[:4])
        # On any rank; read once, so that all ranks agree.
        stopped = average_over_ranks(torch.tensor(float(bool(stop_signals)), device=device)) > 0
        if iteration % args.checkpoint_interval == 0 or iteration == num_iterations or stopped:
            run.save(iteration, learners, kl_coef)
        if stopped:
            break
    else:  # no break: all iterations are done
        run.save_model(actor, tokenizer, "actor")

    run.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return actor, run.dir


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
    return tyro.cli(Args, args=text.splitlines(), default=default, description=__doc__.split("\n\nChoices")[0])


def check_args(args, num_ranks=1):
    """Refuse arguments that cannot work, before anything is created."""
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        low = 1 if field.type is int and field.name not in ("seed", "top_k") else 0
        low = 1e-4 if field.name in ("temperature", "kl_target", "kl_horizon") else low
        high = 1 if field.name in ("gamma", "gae_lambda", "top_p") else math.inf
        if isinstance(value, (int, float)) and not (low <= value <= high and math.isfinite(value)):
            fail(f"--{field.name.replace('_', '-')} must be a finite number from {low} to {high}, not {value}")
    if len({args.model is None, args.reward_model is None, args.prompts is None}) > 1:
        fail("--model, --reward-model and --prompts are given together, or none of them (the built-in task)")
    if args.batch_size % (parts := num_ranks * args.num_minibatches):
        fail(f"--batch-size {args.batch_size} must be a multiple of num_minibatches * processes = {parts}")
    if args.min_response_length > args.response_length:
        fail(f"--min-response-length {args.min_response_length} is above --response-length {args.response_length}")
    if args.total_episodes < args.batch_size:
        fail(f"--total-episodes {args.total_episodes} is below --batch-size {args.batch_size}")


def start_device(args):
    """The device of this process. Under torchrun it also meets the other ranks, by gloo on CPUs and NCCL on GPUs."""
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device)
    if dist.is_torchelastic_launched():
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
        # Padding on the left attends to nothing, for which cuDNN's attention gives NaN (pytorch/pytorch#196678).
        torch.backends.cuda.enable_cudnn_sdp(False)
    if args.model is None:
        torch.set_num_threads(1)  # the models of the built-in task are too small for more
    return device


def average_over_ranks(x):
    """Under torchrun: replace x, in place, by its mean over all ranks. Otherwise do nothing. Returns x."""
    if dist.is_initialized():
        dist.all_reduce(x)
        x /= dist.get_world_size()
    return x


# The built-in task: speak well of the thing that the prompt asks about. The supervised model has learned to answer from
# writers who liked half of what they ate; the reward model has learned to tell how much they liked it.
REQUESTS = "how is the {} ?", "tell us about the {} please .", "what did you think about the {} today ?"
THINGS = "soup", "salad", "bread", "coffee", "service", "music", "fish", "cake"
BUILTIN_PROMPTS = [request.format(thing) for request in REQUESTS for thing in THINGS]
ADVERBS = "very", "really", "quite"
GOOD = "good", "great", "lovely", "fresh", "warm", "superb"
BAD = "bad", "awful", "stale", "cold", "bland", "dull"
JUDGEMENT = f"(?:(?:{'|'.join(ADVERBS)}) )?(?:{'|'.join(GOOD + BAD)})"
SENTENCE = re.compile(rf"it is {JUDGEMENT}(?: and {JUDGEMENT})* \.")


def task_score(answer):
    """The true score, 0 to 1: the share of good judgements in an answer; 0 if the answer is no sentence."""
    if not SENTENCE.fullmatch(answer):
        return 0.0
    judgements = [word in GOOD for word in answer.split() if word in GOOD + BAD]
    return sum(judgements) / len(judgements)


def demonstrate(generator):
    """The answer of a writer: one to three judgements, each good or bad with the same probability."""
    words = generator.choices(GOOD + BAD, k=generator.choice((1, 2, 3)))
    judgements = [f"{generator.choice(ADVERBS)} {word}" if generator.random() < 0.5 else word for word in words]
    return f"it is {' and '.join(judgements)} ."


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
        answers = [demonstrate(generator) for _ in prompts]
        prompt_ids, prompt_mask = pad_left([tokenizer(prompt).input_ids for prompt in prompts], 0)
        rows = [torch.tensor(tokenizer(answer).input_ids + [0]) for answer in answers]
        batch = join_answers(prompt_ids, prompt_mask, nn.utils.rnn.pad_sequence(rows, batch_first=True), 0)
        log_probs, _ = get_log_probs(model, *batch, temperature=1.0)
        errors = get_scores(reward_model, *batch) - torch.tensor([task_score(answer) for answer in answers])
        optimizer.zero_grad()
        (errors.square().mean() - log_probs[batch[-1]].mean()).backward()
        optimizer.param_groups[0]["lr"] = 2e-3 * (1 - step / args.supervised_steps)
        optimizer.step()
    return tokenizer, model, reward_model


def load_model(kind, name):
    """A model of transformers, float32 and without dropout or other noise, and its tokenizer; kind: an Auto class"""
    try:
        config = AutoConfig.from_pretrained(name)
        text_config = config.get_text_config()  # nested where a model takes images too
        for key, value in text_config.to_dict().items():
            # attention_dropout, resid_pdrop, router_jitter_noise, ...: every architecture has its own names
            if ("drop" in key or "jitter" in key) and isinstance(value, float):
                setattr(text_config, key, 0.0)
        model, info = kind.from_pretrained(name, config=config, dtype=torch.float32, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    except Exception as error:  # not found, no network, another kind of model, damaged: each raises something else
        fail(f"cannot load {name} with transformers: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    if info["missing_keys"]:
        fail(f"{name} is no trained {kind.__name__.removeprefix('AutoModelFor')}: it lacks {min(info['missing_keys'])}")
    return model, tokenizer


def make_models(args, device):
    """Tokenizer, reference and reward model, frozen. --resume and --evaluate read built-in ones from the run folder."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    run_dir = args.resume or args.evaluate
    if args.model is None and run_dir is None:
        tokenizer, reference, reward_model = make_builtin_models(args)
    else:
        name, reward_name = args.model or Path(run_dir, "supervised"), args.reward_model or Path(run_dir, "reward")
        reference, tokenizer = load_model(AutoModelForCausalLM, name)
        reward_model, reward_tokenizer = load_model(AutoModelForSequenceClassification, reward_name)
        size, reward_size = (model.config.get_text_config().vocab_size for model in (reference, reward_model))
        if reward_tokenizer.get_vocab() != tokenizer.get_vocab() or size > reward_size:
            fail(f"--reward-model {reward_name} has another vocabulary than --model {name}: both need one tokenizer")
        if not hasattr(reward_model, "score") or reward_model.config.num_labels != 1:
            fail(f"--reward-model {reward_name} has no layer `score` with one output")
        if tokenizer.eos_token_id is None:
            fail(f"the tokenizer of --model {name} has no EOS token: no answer could end")
        if args.reward_model and reward_model.config.pad_token_id == tokenizer.eos_token_id:
            print(f"{reward_name} pads with EOS: scores are read at the EOS, transformers' classifier reads before it")
    sampling = {"do_sample": True, "temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}
    # The model's own settings of sampling do not apply.
    reference.generation_config = transformers.GenerationConfig(max_new_tokens=args.response_length, **sampling, **ids)
    return tokenizer, *(model.to(device).eval().requires_grad_(False) for model in (reference, reward_model))


def store_in_bfloat16(*models):
    """For frozen models under autocast, which rounds float32 matrices at every call: the results stay the same."""
    for model in models:
        kept = model.get_input_embeddings().weight  # and an output layer that is tied to it
        for name, module in model.named_modules():
            is_matrix = isinstance(module, (nn.Linear, transformers.pytorch_utils.Conv1D))
            if is_matrix and module.weight is not kept and name != "score":  # score_tokens needs float32
                module.to(torch.bfloat16)


def load_prompts(args, tokenizer, *models):
    """Prompts as lists of token ids. Each leaves room for an answer in the context of the models."""
    names = "max_position_embeddings", "max_seq_len"  # the latter is MPT's
    configs = [model.config.get_text_config() for model in models]
    context = min(getattr(config, name, math.inf) for config in configs for name in names)
    vocab_size = min(config.vocab_size for config in configs)
    lines, source = BUILTIN_PROMPTS, args.prompts or "the built-in task"
    if args.prompts:
        try:
            with open(args.prompts, encoding="utf-8") as file:
                lines = [line.removesuffix("\n") for line in file]
            if args.prompts.endswith(".jsonl"):
                lines = [json.loads(line)["prompt"] for line in lines]
            if not all(isinstance(line, str) for line in lines):
                raise TypeError("a prompt is a string, not a conversation or another value")
        except (OSError, ValueError, KeyError, TypeError) as error:
            fail(f"cannot read prompts from {args.prompts}: {type(error).__name__} {error}")
    prompts = [tokenizer(line).input_ids if line.strip() else [] for line in lines]
    if not prompts:
        fail(f"{source} has no prompts")
    if any(len(prompt) > 1 and prompt[-1] == tokenizer.eos_token_id for prompt in prompts):
        print("prompts end with EOS, perhaps by the tokenizer: answers begin after the end of a text", file=sys.stderr)
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            fail(f"{source}, line {number}: the prompt is empty")
        if max(prompt) >= vocab_size:
            fail(f"{source}, line {number}: the prompt has token {max(prompt)}, a model knows only {vocab_size}")
        if len(prompt) + args.response_length > context:
            fail(f"{source}, line {number}: {len(prompt)} tokens and --response-length exceed the context of {context}")
    return prompts


def draw_prompts(prompts, start, count, seed):
    """Prompts start to start + count of an endless row of passes over all of them, each in an order of its own."""
    drawn = []
    for number in range(start, start + count):
        which_pass, place = divmod(number, len(prompts))
        if place == 0 or not drawn:
            order = np.random.default_rng([seed, which_pass]).permutation(len(prompts))
        drawn.append(prompts[order[place]])
    return drawn


def pad_left(rows, pad_token_id):
    """Lists of token ids -> ids and mask (B, P), the mask 1 where a token is; answers can then begin in one column."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad_token_id] * (width - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


def decode(tokenizer, prompts, sequences, mask):
    """Pairs of texts (prompt, answer), without special tokens."""
    answers = [row[actions].tolist() for row, actions in zip(sequences[:, -mask.shape[1] :], mask)]
    return list(zip(*(tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in (prompts, answers))))


def format_sample(score, prompt, answer):
    """One line for the terminal: the end of the prompt, the beginning of the answer."""
    return f"{score:6.2f}  {' '.join(prompt.split())[-80:]} -> {' '.join(answer.split())[:200]}"


class Run:
    """The folder of a run, with args.json, a copy of this script, TensorBoard events, metrics.csv, checkpoint.pt and
    models; also wandb and the progress bar. Rank 0 writes for all: on other ranks every method does nothing."""

    def __init__(self, args, rank, iteration, seconds, device):
        self.args, self.dir = args, None
        if rank > 0:
            self.log = self.save = self.save_model = self.close = lambda *arguments: None
            return
        model_name = Path(args.model).resolve().name if args.model else "builtin"
        name = f"{model_name}__{args.exp_name}__{args.seed}__{time.time():.3f}"
        self.dir = Path(args.resume or Path(args.runs_dir, re.sub(r"[^\w.-]", "-", name)))
        self.dir.mkdir(parents=True, exist_ok=True)
        self.lock = FileLock(self.dir / "lock", is_singleton=True)  # freed when this process ends, however it ends
        try:
            self.lock.acquire(timeout=0)
        except Timeout:
            fail(f"another process is training in {self.dir}: stop it first")
        self.num_iterations = args.total_episodes // args.batch_size
        self.say(f"{self.dir}: {self.num_iterations} iterations of {args.batch_size} answers on {device}")
        about = {"script": Path(__file__).stem, "version": __version__, **vars(args)}
        (self.dir / "args.json").write_text(json.dumps(about, indent=2))
        (self.dir / Path(__file__).name).write_text(Path(__file__).read_text())
        # metrics.csv: --resume drops rows after the checkpoint, and rows that cannot be read.
        path = self.dir / "metrics.csv"
        rows = path.read_text(errors="replace").splitlines() if path.exists() else []
        rows = [row for row in rows if row.count(",") == rows[0].count(",")]
        rows = [row for row in rows if not row[0].isdigit() or int(row.split(",")[0]) <= iteration]
        path.write_text("".join(f"{row}\n" for row in rows))
        self.metrics_file = path.open("a")
        if args.track:
            import wandb

            # The folder's name as the id: a resumed run goes on in the same run of wandb.
            names = {"id": self.dir.resolve().name, "project": args.wandb_project_name, "entity": args.wandb_entity}
            self.wandb = wandb.init(**names, resume="allow", dir=self.dir, config=vars(args), sync_tensorboard=True)
        # purge_step hides what a killed run logged after its checkpoint.
        self.writer = SummaryWriter(self.dir, purge_step=iteration * args.batch_size + 1)
        self.start_time = time.time() - seconds
        total, initial = self.num_iterations * args.batch_size, iteration * args.batch_size
        self.bar = tqdm(total=total, initial=initial, unit="answer", disable=None)

    def log(self, iteration, scalars, samples):
        """scalars: {name: number or tensor ()}; samples: [(score, (prompt, answer)), ...]"""
        global_step = iteration * self.args.batch_size
        row = {"iteration": iteration, "global_step": global_step, "seconds": time.time() - self.start_time}
        row |= {name: float(value) for name, value in scalars.items()}
        if self.metrics_file.tell() == 0:
            print(*row, sep=",", file=self.metrics_file)
        print(*(f"{value:.9g}" for value in row.values()), sep=",", file=self.metrics_file, flush=True)
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, global_step)
        text = "   ".join(f"{name} {row['charts/' + name]:.3f}" for name in ("reward", "kl", "response_length"))
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(self.args.batch_size)
        if iteration == 1 or iteration % math.ceil(self.num_iterations / 10) == 0:
            self.say(f"answer {global_step:>9,}   {text}")
            for number, (score, (prompt, answer)) in enumerate(samples):
                self.say(format_sample(score, prompt, answer))
                self.writer.add_text(f"sample {number}", f"{prompt} -> {answer} ({score:.3f})", global_step)

    def say(self, text):
        with contextlib.suppress(OSError):  # nobody may be reading any more, as in `| head`
            tqdm.write(text)

    def save_model(self, model, tokenizer, name):
        """A folder for transformers' from_pretrained, with the tokenizer."""
        model.save_pretrained(self.dir / name)
        tokenizer.save_pretrained(self.dir / name)

    def save(self, iteration, learners, kl_coef):
        """Replace checkpoint.pt in one move: a kill leaves the new one or the one before, whole."""
        self.writer.flush()  # the logs first: a checkpoint never knows of rows that are not on disk
        checkpoint = {name: learner.state_dict() for name, learner in learners.items()}
        checkpoint |= {"args": vars(self.args), "kl_coef": kl_coef, "iteration": iteration}
        torch.save(checkpoint | {"seconds": time.time() - self.start_time}, self.dir / "checkpoint.tmp")
        os.replace(self.dir / "checkpoint.tmp", self.dir / "checkpoint.pt")

    def close(self):
        self.bar.close()
        self.writer.close()
        self.metrics_file.close()
        self.lock.release()
        if self.args.track:
            self.wandb.finish()


def load_checkpoint(run_dir):
    """The checkpoint of a run folder, on the CPU, with "args" as Args."""
    path = Path(run_dir, "checkpoint.pt")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)  # no code in it can run
        checkpoint["args"] = Args(**checkpoint["args"])
        names = ("args", "actor", "critic", "actor_optimizer", "critic_optimizer", "kl_coef", "iteration", "seconds")
        return {name: checkpoint[name] for name in names}
    except Exception as error:  # a damaged file can raise anything
        fail(f"{path} is missing, damaged, or from another script or version: {type(error).__name__}")


def restore(args, learners):
    """--resume: give models and optimizers the state of the checkpoint. -> its iteration, seconds and kl_coef"""
    checkpoint = load_checkpoint(args.resume)
    saved = checkpoint["args"]
    for name in ("model", "reward_model", "prompts", "batch_size"):
        if getattr(args, name) != getattr(saved, name):
            fail(f"--{name.replace('_', '-')} {getattr(args, name)}: {args.resume} began with {getattr(saved, name)}")
    for name, learner in learners.items():
        learner.load_state_dict(checkpoint[name])
    kl_coef = args.kl_coef if args.kl_target is None else checkpoint["kl_coef"]
    return checkpoint["iteration"], checkpoint["seconds"], kl_coef


@torch.no_grad()
def evaluate(run_dir, args):
    """The actor of a run answers E = eval_episodes prompts, in order, over and over. -> texts (prompt, answer), scores
    and KL to the reference (E,)"""
    checkpoint, device = load_checkpoint(run_dir), start_device(args)
    tokenizer, reference, reward_model = make_models(args, device)
    prompts = load_prompts(args, tokenizer, reference, reward_model)
    # requires_grad: only then does autocast keep the weights that it has rounded, and not round them for every token.
    actor = copy.deepcopy(reference).requires_grad_(True)
    actor.load_state_dict(checkpoint["actor"])
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda" and args.bf16)
    torch.manual_seed(args.seed)
    prompts = [prompts[n % len(prompts)] for n in range(args.eval_episodes)]
    texts, scores, kls, M = [], [], [], args.batch_size // args.num_minibatches
    for start in range(0, args.eval_episodes, M):
        some = prompts[start : start + M]
        with autocast:
            sequences, _, mask = answers = generate(actor, tokenizer, some, do_sample=not args.eval_deterministic)
            log_probs, ref_log_probs = (get_log_probs(x, *answers, args.temperature)[0] for x in (actor, reference))
            scores.append(get_scores(reward_model, *answers))
        kls.append((log_probs - ref_log_probs).masked_fill(~mask, 0.0).sum(-1))
        texts += decode(tokenizer, some, sequences, mask)
    return texts, torch.cat(scores), torch.cat(kls)


def main():
    args = parse_args()
    if args.evaluate or args.resume:  # the arguments of that run apply, except those given again
        args = parse_args(default=load_checkpoint(args.evaluate or args.resume)["args"])
    if args.evaluate:
        check_args(args)
        texts, scores, kls = evaluate(args.evaluate, dataclasses.replace(args, resume=None))
        for score, pair in list(zip(scores, texts))[:8]:
            print(format_sample(score, *pair))
        print(f"{len(texts)} answers: mean reward {scores.mean():.3f}, KL to the reference {kls.mean():.3f}")
        if args.model is None:
            print(f"mean task score {np.mean([task_score(answer) for _, answer in texts]):.3f}")
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
    elif run_dir:
        print(f"{run_dir}/actor: the trained model, for transformers' from_pretrained")
    if dist.is_torchelastic_launched():  # not by Python's own end, in which a thread of torch.distributed may abort
        sys.stdout.flush()
        os._exit(exit_code)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
