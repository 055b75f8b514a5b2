# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.11,<2.14",
#     "transformers>=5,<6",
#     "numpy>=1.26,<3",
#     "tyro>=1.0,<2",
#     "tensorboard>=2.18,<3",
#     "wandb>=0.22,<1",
#     "tqdm>=4.66,<5",
# ]
# ///
"""Proximal Policy Optimization (PPO) on a language model, from the scores of a reward model (RLHF), in one file.

    python variants/ppo_rlhf.py                                # the built-in task: no download, minutes on one core
    python variants/ppo_rlhf.py --model A --reward-model B --prompts prompts.txt   # transformers' models
    python variants/ppo_rlhf.py --resume runs/NAME             # go on after Ctrl-C, a kill or a crash
    python variants/ppo_rlhf.py --evaluate runs/NAME           # answers of the trained actor, their scores and KL
    torchrun --nproc-per-node 4 variants/ppo_rlhf.py           # train in four processes, which share the prompts

Four models, as in DeepSpeed-Chat. Two begin as the supervised language model: the actor, which is trained, and the
reference, which is not. Two begin as the reward model: the critic, which is trained, and the reward model itself, which
is not. An answer is an episode, a token an action, the end-of-sequence token (EOS) too where the actor has sampled it.

The built-in task makes both models first. Then the reward goes from 0.5 to 0.99 (the true score is at most 1) in two to
four minutes on one CPU core, and the KL to the reference stays below 2 nats per answer. With --kl-coef 0 the KL goes
beyond 9, the reward beyond 1: the reward model is fooled, and almost no answer is a sentence any more (task_score).

Choices, where implementations differ:
 1. The reward of a token is -kl_coef * (log_prob - reference's log_prob). The last token of the answer, EOS or the one
    at the limit, gets the clipped score on top. So it is in DeepSpeed-Chat for full answers; for short ones its score
    is one place behind the last unmasked token (on the EOS, where EOS pads), where no loss sees it directly.
 2. What is an action follows from the first EOS, never from the padding token: both may be the same one (GPT-2).
 3. Advantages by GAE within the answer (gamma 1, lambda 0.95), whose end has the value 0. They are not normalised.
 4. Losses are means over the tokens of a minibatch, so that long answers weigh more; policy and value are clipped.
    Processes weigh the same, however many tokens each has (DeepSpeed).
    Actor and critic have an Adam each, with betas (0.9, 0.95); learning rates fall linearly, without a warm-up.
 5. There is no dropout, and old and new log-probabilities are both of the forward pass, never of `generate` with its
    cache: the probability ratio is 1 in the first minibatch of an iteration.
 6. Log-probabilities, KL and entropy are those of the distribution at --temperature, from which tokens are sampled.
    --top-k and --top-p restrict the sampling only: with them the ratio is not that of what was sampled from.
 7. No answer is dropped: the shortest one, an EOS at once, is an action with a score. DeepSpeed-Chat, where such an EOS
    is masked, drops answers below two tokens.
 8. kl_coef is fixed; --kl-target makes it follow the KL (Ziegler et al. 2019).
 9. Weights, gradients and optimisers are float32: with four models of N parameters, 40 N bytes. On CUDA, forward passes
    run in bfloat16, with gradient checkpointing. Values and scores stay float32; logits are rounded to bfloat16, those
    of GPT-2, which are near -100, to 0.5 (--no-bf16 avoids it).

Shapes: B = answers of a process in an iteration, M = minibatch, P = longest prompt, R = longest answer, L = P + R,
V = vocabulary; (M,) in the losses: all actions of a minibatch. Prompts are padded on the left, answers on the right, so
that all answers begin in column P.
Sibling: ../ppo_continuous.py. What both have has the same text.
"""

import contextlib
import copy
import csv
import dataclasses
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
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch.nn.utils import clip_grad_norm_
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

try:
    import tokenizers
    import transformers
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
except ImportError as error:
    reason = str(error).splitlines()[0]
    print(f"ppo_rlhf.py: error: {reason}: pip install -r variants/requirements.txt", file=sys.stderr)
    raise SystemExit(2) from None

# ========================================================================================================= command line


@dataclasses.dataclass
class Args:  # the comments are what --help prints
    # --- run
    exp_name: str = "ppo_rlhf"  # part of the run folder's name, RUNS_DIR/MODEL__EXP_NAME__SEED__TIME
    runs_dir: str = "runs"  # where run folders are made
    seed: int = 1  # random seed of sampling and of the order of prompts; of the built-in task's models too
    device: str = "auto"  # cpu, cuda, cuda:1; auto: cuda where there is one
    checkpoint_interval: int = 20  # iterations between checkpoints; another at the end, on Ctrl-C and SIGTERM
    resume: str | None = None  # run folder to continue; its arguments apply, except those given again
    evaluate: str | None = None  # a run folder: its actor answers; --eval-*, --seed, --prompts, --device, --batch-size
    eval_episodes: int = 256  # answers that --evaluate asks for
    eval_deterministic: bool = False  # evaluate with the likeliest token; off: sample as in training
    track: bool = False  # log to Weights & Biases too
    wandb_project_name: str = "ppo"  # project for --track
    wandb_entity: str | None = None  # team for --track; None: your default
    # --- models and prompts
    model: str | None = None  # supervised language model, a transformers name or folder; None: the built-in task
    reward_model: str | None = None  # sequence classifier with one output, its layer `score`, and --model's tokenizer
    prompts: str | None = None  # file with a prompt per line, in .jsonl {"prompt": "..."}; no chat template is applied
    supervised_steps: int = 300  # gradient steps that make the models of the built-in task
    bf16: bool = True  # forward passes in bfloat16 on CUDA
    gradient_checkpointing: bool = True  # on CUDA: activations are computed twice instead of stored
    # --- answers
    response_length: int = 16  # tokens that an answer has at most, EOS included
    temperature: float = 1.0  # logits are divided by it, in sampling and everywhere else
    top_k: int = 0  # sample only from the k likeliest tokens, which the losses ignore; 0: from all
    top_p: float = 1.0  # sample only from the likeliest tokens of this total probability, likewise; 1: all
    # --- PPO
    total_episodes: int = 12_800  # answers of the run, rounded down to whole iterations
    batch_size: int = 128  # answers per iteration, of all processes together
    num_minibatches: int = 2  # minibatches per epoch; must divide the answers of a process
    ppo_epochs: int = 2  # passes over the answers of an iteration
    actor_learning_rate: float | None = None  # None: 1e-5 with --model, 5e-4 for the built-in task
    critic_learning_rate: float | None = None  # None: 5e-6 with --model, 1e-3 for the built-in task
    anneal_lr: bool = True  # lower the learning rates linearly to 0 over the run
    gamma: float = 1.0  # discount factor, 0 to 1
    gae_lambda: float = 0.95  # 0: one-step temporal difference (low variance); 1: discounted return (no bias)
    clip_coef: float = 0.2  # no further gain from a probability ratio outside 1 - clip_coef .. 1 + clip_coef
    vf_clip_coef: float | None = 0.2  # take the larger of the value errors with and without this clip; None: unclipped
    clip_reward: float = 5.0  # the score of an answer is clipped to +-clip_reward
    kl_coef: float = 0.1  # weight of the KL penalty; where it starts with --kl-target
    kl_target: float | None = None  # move kl_coef so that the KL per answer, in nats, nears this (try 6); None: fixed
    kl_horizon: float = 10_000  # answers in which --kl-target may change kl_coef by at most about 20%
    max_grad_norm: float = 1.0  # upper bound of the norm of each model's gradient; 0: none


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


def get_device(args):
    """What --device asks for; auto: cuda where there is one. Under torchrun each process has a GPU of its own."""
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device)
    if device.type == "cuda" and device.index is None and count_ranks() > 1:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return device


def check_args(args):
    """Refuse arguments that cannot work, before anything is created."""
    for field in dataclasses.fields(args):
        value, flag = getattr(args, field.name), "--" + field.name.replace("_", "-")
        if field.name in ("resume", "evaluate") and value == "":  # a shell variable that is not set
            fail(f"{flag} is empty: give a run folder")
        if field.type is int and field.name not in ("seed", "top_k") and value < 1:
            fail(f"{flag} must be at least 1, not {value}")
        if field.type is int and value >= 2**63:
            fail(f"{flag} must be below 2**63, not {value}")
        if field.type in (float, float | None) and value is not None and not math.isfinite(value):
            fail(f"{flag} must be a finite number, not {value}")
        if field.name in ("gamma", "gae_lambda", "top_p") and not 0 <= value <= 1:
            fail(f"{flag} must be between 0 and 1, not {value}")
        if field.name == "temperature" and 0 < value < 1e-4:  # logits divided by it would be infinite
            fail(f"{flag} must be at least 0.0001, not {value}")
        if field.name in ("temperature", "kl_target", "kl_horizon") and value is not None and value <= 0:
            fail(f"{flag} must be above 0, not {value}")
        not_negative = ("seed", "_rate", "_coef", "_norm", "top_k", "clip_reward")
        if field.name.endswith(not_negative) and value is not None and value < 0:
            fail(f"{flag} must not be negative, not {value}")
    if len({args.model is None, args.reward_model is None, args.prompts is None}) > 1:
        fail("--model, --reward-model and --prompts are given together, or none of them (the built-in task)")
    if args.evaluate:  # sizes that pass what follows, of which only the device matters
        args = dataclasses.replace(args, batch_size=args.total_episodes, num_minibatches=1)
    if args.batch_size % (num_ranks := count_ranks()):
        fail(f"--batch-size {args.batch_size} must be a multiple of the {num_ranks} processes of torchrun")
    if (batch_size := args.batch_size // num_ranks) % args.num_minibatches:
        fail(f"--num-minibatches {args.num_minibatches} must divide the {batch_size} answers of a process")
    if args.total_episodes < args.batch_size:
        fail(f"--total-episodes {args.total_episodes} is below --batch-size {args.batch_size}")
    if num_ranks > 1 and args.device.startswith("cuda:"):
        fail(f"--device {args.device} under torchrun: give cuda, of which each process takes one of its own")
    try:
        torch.zeros(1, device=get_device(args)).item()
    except (RuntimeError, AssertionError, TypeError) as error:
        fail(f"--device {args.device} cannot be used: {str(error).splitlines()[0]}")


# ================================================================================================ built-in task, models

# The built-in task: speak well of what the prompt asks about. The supervised model has learned to answer from writers
# who liked half of what they ate; the reward model has learned to tell how much they liked it.
REQUESTS = "how is the {} ?", "tell us about the {} please .", "what did you think about the {} today ?"
THINGS = "soup", "salad", "bread", "coffee", "service", "music", "fish", "cake"
BUILTIN_PROMPTS = [request.format(thing) for request in REQUESTS for thing in THINGS]
ADVERBS = "very", "really", "quite"
GOOD = "good", "great", "lovely", "fresh", "warm", "superb"
BAD = "bad", "awful", "stale", "cold", "bland", "dull"
JUDGEMENT = f"(?:(?:{'|'.join(ADVERBS)}) )?(?:{'|'.join(GOOD + BAD)})"
SENTENCE = re.compile(rf"it is {JUDGEMENT}(?: and {JUDGEMENT})* \.")


def task_score(answer):
    """What the built-in reward model learns to tell, 0 to 1: which share of the judgements in an answer is good; 0 if
    the answer is no sentence. The best possible is 1, for "it is good ." and many others."""
    if not SENTENCE.fullmatch(answer):
        return 0.0
    judgements = [word in GOOD for word in answer.split() if word in GOOD + BAD]
    return sum(judgements) / len(judgements)


def demonstrate(generator):
    """What a writer answers: one to three judgements, each good or bad with the same probability."""
    words = generator.choices(GOOD + BAD, k=generator.choice((1, 2, 3)))
    judgements = [f"{generator.choice(ADVERBS)} {word}" if generator.random() < 0.5 else word for word in words]
    return f"it is {' and '.join(judgements)} ."


def make_builtin_models(args):
    """Tokenizer, language model and reward model of the built-in task, trained here on the same demonstrations: the one
    imitates them, the other learns their scores, each by supervised learning."""
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
        batch = join_answers(prompt_ids, prompt_mask, torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), 0)
        log_probs, _ = get_log_probs(model, *batch, temperature=1.0)
        errors = get_scores(reward_model, *batch) - torch.tensor([task_score(answer) for answer in answers])
        optimizer.zero_grad()
        (errors.square().mean() - log_probs[batch[-1]].mean()).backward()
        optimizer.param_groups[0]["lr"] = 2e-3 * (1 - step / args.supervised_steps)
        optimizer.step()
    return tokenizer, model, reward_model


def load_model(kind, name):
    """A transformers model, float32 and without dropout or other noise, and its tokenizer; kind is one of the Auto
    classes."""
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
    """Tokenizer, reference and reward model, frozen, on the device: those of --model and --reward-model, or of the
    built-in task, from the run folder if there is one already."""
    # Padding on the left attends to nothing, for which cuDNN's attention gives NaN (pytorch/pytorch#196678).
    torch.backends.cuda.enable_cudnn_sdp(False)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # for what allocates without asking, as kernels of some models do
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    run_dir = args.resume or args.evaluate
    if args.model is None:
        torch.set_num_threads(1)  # the models of the built-in task are too small for more
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
            text = "scores are read at the EOS that ends an answer, where transformers' own classifier reads before it"
            print(f"--reward-model {reward_name} pads with EOS: {text}")
    # A pad token may have been added without a row of the embedding; nothing attends to padding, so any token will do.
    if tokenizer.pad_token is None or tokenizer.pad_token_id >= reference.config.get_text_config().vocab_size:
        tokenizer.pad_token = tokenizer.eos_token
    reference.generation_config = transformers.GenerationConfig(  # whatever else the model's own asks for is dropped
        max_new_tokens=args.response_length,
        do_sample=True,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return tokenizer, *(model.to(device).eval().requires_grad_(False) for model in (reference, reward_model))


# ================================================================================================== prompts and answers


def load_prompts(args, tokenizer, *models):
    """Prompts as lists of token ids, each of which leaves room for an answer in what the models can see."""
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
    if any(len(prompt) > 1 and prompt[-1] == tokenizer.eos_token_id for prompt in prompts):
        print("prompts end with EOS, perhaps by the tokenizer: answers begin after the end of a text", file=sys.stderr)
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            fail(f"{source}, line {number}: the prompt is empty")
        if max(prompt) >= vocab_size:
            fail(f"{source}, line {number}: the prompt has token {max(prompt)}, a model knows only {vocab_size}")
        if len(prompt) + args.response_length > context:
            limit = f"--response-length {args.response_length} are more than the {context} that the models can see"
            fail(f"{source}, line {number}: the {len(prompt)} tokens of the prompt and {limit}")
    if not prompts:
        fail(f"{source} has no prompts")
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


def join_answers(prompt_ids, prompt_mask, answers, eos_token_id):
    """Prompts (B, P) and answers (B, R) -> sequences and attention mask (B, L), and which tokens of the answers are
    actions (B, R) bool: all up to the first EOS, which is one. What follows is padding, whatever its id."""
    is_eos = (answers == eos_token_id).long()
    mask = is_eos.cumsum(-1) - is_eos == 0
    return torch.cat([prompt_ids, answers], 1), torch.cat([prompt_mask, mask.long()], 1), mask


@torch.no_grad()
def generate(actor, tokenizer, prompts, do_sample=True):
    """Answers of the actor to prompts, lists of token ids. -> sequences, attention mask (B, L), mask (B, R)"""
    prompt_ids, prompt_mask = (x.to(actor.device) for x in pad_left(prompts, tokenizer.pad_token_id))
    try:
        sequences = actor.generate(prompt_ids, attention_mask=prompt_mask, do_sample=do_sample)
    except RuntimeError as error:
        if "probability tensor" not in str(error):
            raise
        fail("the actor's probabilities are NaN or infinity; the last checkpoint, if any, is kept", code=1)
    return join_answers(prompt_ids, prompt_mask, sequences[:, prompt_ids.shape[1] :], tokenizer.eos_token_id)


def decode(tokenizer, prompts, sequences, mask):
    """Pairs of texts (prompt, answer), without special tokens."""
    answers = [row[actions].tolist() for row, actions in zip(sequences[:, -mask.shape[1] :], mask)]
    return list(zip(*(tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in (prompts, answers))))


def format_sample(score, prompt, answer):
    """One line for the terminal: the end of the prompt, the beginning of the answer."""
    return f"{score:6.2f}  {' '.join(prompt.split())[-80:]} -> {' '.join(answer.split())[:200]}"


def model_inputs(sequences, attention_mask):
    """Positions count real tokens: padding on the left moves nothing."""
    position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    return {"input_ids": sequences, "attention_mask": attention_mask, "position_ids": position_ids, "use_cache": False}


# ================================================================================================ advantages and losses


def gather_log_probs(logits, labels):
    """Log-probabilities (...) of the tokens labels (...) under logits (..., V)."""
    return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def get_log_probs(model, sequences, attention_mask, mask, temperature):
    """Log-probability of every token of the answers (B, R), and the logits that it is from (B, R, V)."""
    R = mask.shape[1]
    logits = model(**model_inputs(sequences, attention_mask)).logits
    logits = logits[:, -R - 1 : -1].float() / temperature  # those at a token are of the next one
    return gather_log_probs(logits, sequences[:, -R:]), logits


def score_tokens(model, sequences, attention_mask):
    """What the layer `score` of critic or reward model says at every token, (B, L)"""
    hidden = model.base_model(**model_inputs(sequences, attention_mask)).last_hidden_state
    with torch.autocast(hidden.device.type, enabled=False):  # bfloat16 would round values of 2 to 4 to 1/64
        return model.score(hidden.float()).squeeze(-1)


def get_values(critic, sequences, attention_mask, mask):
    """Value of the state in which each token of the answers was chosen, (B, R)"""
    return score_tokens(critic, sequences, attention_mask)[:, -mask.shape[1] - 1 : -1]


def get_scores(reward_model, sequences, attention_mask, mask):
    """Score of every answer, read at its last token (EOS, if it was sampled), (B,)"""
    last = mask.sum(-1, keepdim=True) - 1
    return score_tokens(reward_model, sequences, attention_mask)[:, -mask.shape[1] :].gather(1, last).squeeze(1)


def compute_rewards(kl, scores, mask, kl_coef, clip_reward):
    """kl = log_probs - reference's, mask (B, R), scores (B,) -> rewards (B, R): the KL penalty of every token; on the
    last one of the answer the clipped score too; 0 behind it."""
    rewards = (-kl_coef * kl).masked_fill(~mask, 0.0)
    last = mask.sum(-1, keepdim=True) - 1
    return rewards.scatter_add(1, last, scores.clamp(-clip_reward, clip_reward).unsqueeze(-1))


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


def answer_advantages(rewards, values, mask, gamma, gae_lambda):
    """Advantages and returns of the tokens of answers, 0 behind them; all (B, R). An answer is an episode that its last
    token terminates, EOS or not: the score is for what was said within the limit, and nothing follows it."""
    values = values.masked_fill(~mask, 0.0)
    next_values = torch.nn.functional.pad(values[:, 1:], (0, 1))  # 0 where an answer ends: no flag has to say so again
    never = torch.zeros_like(mask)
    steps = (x.T for x in (rewards, values, next_values, never, never))  # (R, B)
    advantages, returns = compute_gae(*steps, gamma, gae_lambda)
    return advantages.T, returns.T


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


def adapt_kl_coef(kl_coef, kl, kl_target, kl_horizon, episodes):
    """Raise or lower the coefficient by about 20% at most in kl_horizon answers, in proportion to how far the KL per
    answer is from its target (Ziegler et al. 2019, section 2.2)."""
    error = min(max(kl / kl_target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * min(episodes / kl_horizon, 1.0))


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


def apply_gradient(loss, model, optimizer, max_grad_norm):
    """One step of one model on the gradient of its loss, averaged over ranks."""
    optimizer.zero_grad()
    loss.backward()
    average_over_ranks(*[p.grad for p in model.parameters() if p.grad is not None])
    if max_grad_norm > 0:
        clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()


# ============================================================================================== run folders, evaluation


def make_run_folder(args):
    """A new folder for the run, with a copy of this script."""
    try:
        Path(args.runs_dir).mkdir(parents=True, exist_ok=True)
        while True:
            model_name = Path(args.model).resolve().name if args.model else "builtin"
            name = re.sub(r"[^\w.-]", "-", f"{model_name}__{args.exp_name}__{args.seed}__{time.time():.3f}")
            with contextlib.suppress(FileExistsError):  # another run began in this millisecond
                Path(args.runs_dir, name).mkdir()
                break
        shutil.copy(__file__, Path(args.runs_dir, name))  # the code that made these results
    except OSError as error:
        fail(f"cannot make a run folder in --runs-dir {args.runs_dir}: {error}")
    return Path(args.runs_dir, name)


def open_metrics(run_dir, iteration):
    """metrics.csv, open for appending, without the rows a killed run left after its checkpoint."""
    path = run_dir / "metrics.csv"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    (run_dir / "metrics.tmp").write_text("".join(lines[: 1 + iteration]))  # a header, and a row for every iteration
    os.replace(run_dir / "metrics.tmp", path)
    return path.open("a", newline="")


def write_metrics(run_dir, metrics_file, writer, row, samples, flush):
    """Add the row of an iteration, {key: number}, to metrics.csv, and it and samples, (score, (prompt, answer)), to
    TensorBoard, flushed before a checkpoint: what comes before is on disk, what comes after is purged on --resume."""
    try:
        table = csv.writer(metrics_file, lineterminator="\n")
        if metrics_file.tell() == 0:
            table.writerow(row)
        table.writerow([f"{value:.9g}" for value in row.values()])
        metrics_file.flush()
        for name, value in row.items():
            if "/" in name:
                writer.add_scalar(name, value, row["global_step"])
        for number, (score, (prompt, answer)) in enumerate(samples):
            writer.add_text(f"sample {number}", f"{prompt} -> {answer} ({score:.3f})", row["global_step"])
        if flush:
            writer.flush()
    except OSError as error:
        fail(f"cannot write into {run_dir}; the last checkpoint, if any, is kept: {error}", code=1)


def save_model(model, tokenizer, folder):
    """For transformers' from_pretrained, with the tokenizer."""
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except (OSError, SafetensorError) as error:
        fail(f"cannot write {folder}: {error}", code=1)


def save_checkpoint(run_dir, checkpoint):
    """Replace checkpoint.pt atomically: a kill or a full disk leaves the new one or the one before, whole."""
    try:
        torch.save(checkpoint, run_dir / "checkpoint.tmp")
        os.replace(run_dir / "checkpoint.tmp", run_dir / "checkpoint.pt")
    except (OSError, RuntimeError) as error:
        fail(f"cannot write a checkpoint into {run_dir}, the one before is kept: {error}", code=1)


def load_checkpoint(run_dir):
    """The checkpoint of a run folder, "args" in it as Args, on the CPU. Only tensors and plain values are read: no code
    in it can run."""
    path = Path(run_dir, "checkpoint.pt")
    if not path.is_file():
        fail(f"there is no {path}: give a run folder")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        script = str(checkpoint["script"])
        if script == "ppo_rlhf" and checkpoint.keys() >= {"actor", "critic", "optimizers", "rng_states", "kl_coef"}:
            return checkpoint | {"args": Args(**checkpoint["args"])}
    except Exception as error:  # a damaged file can raise anything
        fail(f"{path} is damaged, or of another version: {type(error).__name__}")
    fail(f"{path} is from {script}.py")


def restore(run_dir, *pairs):
    """Each (module or optimizer, state) gets its state."""
    try:
        for module, state in pairs:
            module.load_state_dict(state)
    except (RuntimeError, ValueError, KeyError) as error:
        fail(f"{run_dir}/checkpoint.pt is damaged, or of another model: {type(error).__name__}")


@torch.no_grad()
def evaluate(run_dir, args):
    """Answers of a run's actor to the first eval_episodes prompts (over and over, if they are fewer), as pairs of texts
    (prompt, answer), with their scores and KL to the reference, (E,) both. A minibatch's rows are made at once."""
    checkpoint, device = load_checkpoint(run_dir), get_device(args)
    tokenizer, reference, reward_model = make_models(args, device)
    prompts = load_prompts(args, tokenizer, reference, reward_model)
    actor = copy.deepcopy(reference)
    restore(run_dir, (actor, checkpoint["actor"]))
    torch.manual_seed(args.seed)
    texts, scores, kls, rows = [], [], [], max(1, args.batch_size // args.num_minibatches)
    for start in range(0, args.eval_episodes, rows):
        some = [prompts[n % len(prompts)] for n in range(start, min(start + rows, args.eval_episodes))]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda" and args.bf16):
            sequences, _, mask = answers = generate(actor, tokenizer, some, do_sample=not args.eval_deterministic)
            log_probs, ref_log_probs = (get_log_probs(x, *answers, args.temperature)[0] for x in (actor, reference))
            scores.append(get_scores(reward_model, *answers))
        kls.append((log_probs - ref_log_probs).masked_fill(~mask, 0.0).sum(-1))
        texts += decode(tokenizer, some, sequences, mask)
    return texts, torch.cat(scores), torch.cat(kls)


# ============================================================================================================= training


def train(args, stop_signals=()):
    """Train an actor; return it and its run folder (None on ranks of torchrun above 0). Bad input prints
    one line and raises SystemExit.

    stop_signals: a list to which signal handlers append. Once it is not empty, the iteration under way is the last: it
    is finished and saved."""
    # ------------------------------------------------------------------------------------------------ setup
    check_args(args)
    num_ranks = count_ranks()
    rank = int(os.environ["RANK"]) if num_ranks > 1 else 0
    B, num_iterations = args.batch_size // num_ranks, args.total_episodes // args.batch_size
    M = B // args.num_minibatches
    device = get_device(args)
    if num_ranks > 1:
        join_ranks(device)
    on_cuda = device.type == "cuda"
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=on_cuda and args.bf16)
    torch.manual_seed(args.seed)

    checkpoint = load_checkpoint(args.resume) if args.resume else None
    for name in ("model", "reward_model", "prompts", "batch_size") if checkpoint else ():
        old, new = getattr(checkpoint["args"], name), getattr(args, name)
        if old != new:
            fail(f"--{name.replace('_', '-')} {new}: {args.resume} began with {old}, which cannot change")
    tokenizer, reference, reward_model = make_models(args, device)
    prompts = load_prompts(args, tokenizer, reference, reward_model)
    if dist.is_initialized():  # the same to the last bit, even from different machines
        for tensor in [*reference.parameters(), *reward_model.parameters()]:
            talk_to_ranks(dist.broadcast, tensor, 0)

    actor, critic = (copy.deepcopy(model).requires_grad_(True) for model in (reference, reward_model))
    checkpointing = on_cuda and args.gradient_checkpointing
    if checkpointing:
        try:
            actor.gradient_checkpointing_enable()
            critic.gradient_checkpointing_enable()
        except ValueError as error:
            fail(f"{str(error).splitlines()[0]} Use --no-gradient-checkpointing")
    default_rates = (5e-4, 1e-3) if args.model is None else (1e-5, 5e-6)
    rates = zip((args.actor_learning_rate, args.critic_learning_rate), default_rates)
    base_rates = [default if rate is None else rate for rate, default in rates]
    optimizers = [torch.optim.Adam(model.parameters(), betas=(0.9, 0.95)) for model in (actor, critic)]
    actor_optimizer, critic_optimizer = optimizers
    if rank > 0:  # the models are those of all ranks, answers and permutations their own
        torch.manual_seed(int(np.random.SeedSequence([args.seed, rank]).generate_state(1)[0]))

    iteration, seconds_before, kl_coef = 0, 0.0, args.kl_coef
    if checkpoint:
        states = checkpoint["actor"], checkpoint["critic"], *checkpoint["optimizers"]
        restore(args.resume, *zip((actor, critic, *optimizers), states))
        if len(checkpoint["rng_states"]) == num_ranks:
            rng_state, cuda_rng_state = checkpoint["rng_states"][rank]
            torch.set_rng_state(rng_state)
            if on_cuda and cuda_rng_state is not None:
                torch.cuda.set_rng_state(cuda_rng_state, device)
        elif rank == 0:
            print(f"{args.resume} was of {len(checkpoint['rng_states'])} ranks, not {num_ranks}: new random numbers")
        iteration, seconds_before = checkpoint["iteration"], checkpoint["seconds"]
        if args.kl_target is not None and args.kl_coef == checkpoint["args"].kl_coef:  # not if another one is given
            kl_coef = checkpoint["kl_coef"]
        del checkpoint, states  # 24 bytes per parameter of one model

    # All arguments have been checked by now, except the login of --track. From here on the run exists on disk.
    run_dir = None
    if rank == 0:  # the others write nothing
        run_dir = Path(args.resume) if args.resume else make_run_folder(args)
        print(f"{run_dir}: {num_iterations} iterations of {args.batch_size} answers on {device}", flush=True)
        if args.model is None and not args.resume:
            for name, model in (("supervised", reference), ("reward", reward_model)):
                save_model(model, tokenizer, run_dir / name)
        (run_dir / "args.tmp").write_text(json.dumps(vars(args), indent=2))
        os.replace(run_dir / "args.tmp", run_dir / "args.json")
        metrics_file = open_metrics(run_dir, iteration)
        writer = SummaryWriter(run_dir, purge_step=iteration * args.batch_size + 1)
        if args.track:
            import wandb

            name = run_dir.resolve().name  # Path(".") has none
            run = {"name": name, "id": name, "resume": "allow", "dir": run_dir, "config": vars(args)}
            try:
                wandb.init(project=args.wandb_project_name, entity=args.wandb_entity, **run)
            except wandb.errors.Error as error:
                fail(f"--track: {error}", code=1)

    start_time = time.time()
    progress = {"total": num_iterations * args.batch_size, "initial": iteration * args.batch_size, "unit": "answer"}
    progress = tqdm(**progress, disable=None if rank == 0 else True)

    while iteration < num_iterations:
        iteration += 1
        remaining = 1.0 - (iteration - 1) / num_iterations  # 1 in the first iteration, above 0 in the last
        for optimizer, rate in zip(optimizers, base_rates):
            optimizer.param_groups[0]["lr"] = rate * (remaining if args.anneal_lr else 1.0)

        # -------------------------------------------------------------------------------------------- rollout
        started = time.time()
        first = (iteration - 1) * args.batch_size + rank * B  # ranks share the prompts of one process
        iteration_prompts = draw_prompts(prompts, first, B, args.seed)
        actor.eval(), critic.eval()
        with autocast:
            sequences, attention_mask, mask = generate(actor, tokenizer, iteration_prompts)  # (B, L), (B, L), (B, R)
        num_generated, generated = mask.sum().item(), time.time()
        # As many rows at once as in the update, and all by the models' forward pass: what `generate` computes with its
        # cache may differ in the last digits, and in bfloat16 in the first ones.
        parts = []
        with torch.no_grad(), autocast:
            for answers in zip(*(x.split(M) for x in (sequences, attention_mask, mask))):
                log_probs, ref_log_probs = (get_log_probs(x, *answers, args.temperature)[0] for x in (actor, reference))
                values, scores = get_values(critic, *answers), get_scores(reward_model, *answers)
                parts.append((log_probs, ref_log_probs, values, scores))
        log_probs, ref_log_probs, values, scores = (torch.cat(x) for x in zip(*parts))  # scores (B,), others (B, R)
        if not scores.isfinite().all():
            fail(f"iteration {iteration}: --reward-model gave NaN or infinity; the last checkpoint, if any, is kept", 1)

        # -------------------------------------------------------------------------------------------- advantages
        kl = (log_probs - ref_log_probs).masked_fill(~mask, 0.0)  # summed per answer, its mean estimates the KL
        rewards = compute_rewards(kl, scores, mask, kl_coef, args.clip_reward)
        advantages, returns = answer_advantages(rewards, values, mask, args.gamma, args.gae_lambda)

        # -------------------------------------------------------------------------------------------- update
        rolled_out, all_metrics = time.time(), []
        actor.train(checkpointing), critic.train(checkpointing)  # checkpointing needs that mode; no dropout in either
        for _ in range(args.ppo_epochs):
            # Shuffle the batch, then cut it into minibatches (mb_, M rows).
            permutation = torch.randperm(B).to(device)  # drawn on the CPU: the same one on every device
            batch = [x[permutation] for x in (sequences, attention_mask, mask, log_probs, values, advantages, returns)]
            for mb_sequences, mb_attention_mask, mb_mask, *old in zip(*(x.split(M) for x in batch)):
                mb_answers = mb_sequences, mb_attention_mask, mb_mask
                # Only actions count, in losses as in metrics, each as much as any other.
                mb_log_probs, mb_values, mb_advantages, mb_returns = (x[mb_mask] for x in old)  # (actions,)
                with autocast:
                    new_log_probs, logits = get_log_probs(actor, *mb_answers, args.temperature)
                log_ratio = new_log_probs[mb_mask] - mb_log_probs  # 0 in the first minibatch
                policy_loss = clipped_policy_loss(log_ratio, mb_advantages, args.clip_coef)
                apply_gradient(policy_loss, actor, actor_optimizer, args.max_grad_norm)
                with autocast:
                    new_values = get_values(critic, *mb_answers)[mb_mask]
                value_loss = clipped_value_loss(new_values, mb_values, mb_returns, args.vf_clip_coef)
                apply_gradient(value_loss, critic, critic_optimizer, args.max_grad_norm)
                with torch.no_grad():
                    policy = torch.distributions.Categorical(logits=logits[mb_mask], validate_args=False)
                    metrics = {
                        "policy_loss": policy_loss,
                        "value_loss": value_loss,
                        "values": new_values.mean(),
                        "entropy": policy.entropy().mean(),
                        "approx_kl": (log_ratio.expm1() - log_ratio).mean(),  # k3, to the actor that answered
                        "clipfrac": (log_ratio.expm1().abs() > args.clip_coef).float().mean(),
                    }
                all_metrics.append({name: metric.detach() for name, metric in metrics.items()})

        # -------------------------------------------------------------------------------------------- log
        losses = {f"losses/{name}": torch.stack([m[name] for m in all_metrics]).mean() for name in metrics}
        scalars = {
            "charts/reward": scores.mean(),
            "charts/kl": kl.sum(-1).mean(),
            "charts/response_length": mask.sum(-1).float().mean(),
            "charts/ended": (mask & (sequences[:, -mask.shape[1] :] == tokenizer.eos_token_id)).any(-1).float().mean(),
            **losses,
            "losses/explained_variance": explained_variance(values[mask], returns[mask]),
        }
        average_over_ranks(*scalars.values())
        scalars = {name: value.item() for name, value in scalars.items()}
        num_trained, updated = attention_mask.sum().item() * args.ppo_epochs, time.time()
        scalars["charts/kl_coef"] = kl_coef
        if args.kl_target is not None:
            kl_coef = adapt_kl_coef(kl_coef, scalars["charts/kl"], args.kl_target, args.kl_horizon, args.batch_size)
        # stop_signals is read once: a signal that comes later waits for the next iteration.
        rng_state = torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_cuda else None
        speeds = num_generated / (generated - started), num_trained / (updated - rolled_out)
        gathered = gather_from_ranks((list(stop_signals), rng_state, speeds))
        stopped_by = [number for numbers, _, _ in gathered for number in numbers]
        if rank > 0:  # rank 0 writes for all
            if stopped_by:
                break
            continue
        row = {"iteration": iteration, "global_step": iteration * args.batch_size}
        row |= {"seconds": seconds_before + time.time() - start_time} | scalars
        row["charts/learning_rate"] = actor_optimizer.param_groups[0]["lr"]
        row["charts/generated_tokens_per_second"] = sum(generating for _, _, (generating, _) in gathered)
        row["charts/trained_tokens_per_second"] = sum(training for _, _, (_, training) in gathered)
        # Weights too: losses come before the last step, and a loss may be finite where its gradient is not.
        weights = itertools.chain(actor.parameters(), critic.parameters())
        if not all(math.isfinite(scalars[name]) for name in losses) or not all(w.isfinite().all() for w in weights):
            fail(f"the update of iteration {iteration} gave NaN or infinity; the last checkpoint, if any, is kept", 1)
        texts = decode(tokenizer, iteration_prompts, sequences, mask)
        if args.model is None:
            row["charts/task_score"] = np.mean([task_score(answer) for _, answer in texts])
        saving = iteration % args.checkpoint_interval == 0 or iteration == num_iterations or bool(stopped_by)
        showing = iteration == 1 or iteration % math.ceil(num_iterations / 10) == 0
        samples = list(zip(scores.tolist(), texts))[:4] if showing else []
        write_metrics(run_dir, metrics_file, writer, row, samples, flush=saving)
        if args.track:
            wandb.log(row, step=row["global_step"])
        summary = "   ".join(f"{name} {row['charts/' + name]:.3f}" for name in ("reward", "kl", "response_length"))
        progress.set_postfix_str(summary, refresh=False)
        progress.update(args.batch_size)
        if showing:  # ten times, also where there is no terminal
            tqdm.write(f"answer {row['global_step']:>9,}   {summary}")
            for score, pair in samples:
                tqdm.write(format_sample(score, *pair))

        # -------------------------------------------------------------------------------------------- checkpoint
        if saving:
            save_checkpoint(
                run_dir,
                {
                    "script": "ppo_rlhf",
                    "args": vars(args),
                    "actor": actor.state_dict(),
                    "critic": critic.state_dict(),
                    "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                    "kl_coef": kl_coef,
                    "rng_states": [rng_state for _, rng_state, _ in gathered],
                    "iteration": iteration,
                    "seconds": row["seconds"],
                },
            )
        if stopped_by:
            break

    for resource in (progress, *([writer, metrics_file] if rank == 0 else [])):
        resource.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank > 0:
        return actor, None
    if args.track:
        wandb.finish()
    if iteration < num_iterations:
        print(f"stopped; go on with --resume {run_dir}", file=sys.stderr)
        raise SystemExit(128 + stopped_by[0])
    save_model(actor, tokenizer, run_dir / "actor")
    print(f"{run_dir}/actor: the trained model, for transformers' from_pretrained")
    return actor, run_dir


def main():
    args = parse_args()
    if args.evaluate:
        saved = load_checkpoint(args.evaluate)["args"]
        saved.resume = None
        args = parse_args(default=saved)
        check_args(args)
        takes = ("evaluate", "eval_episodes", "eval_deterministic", "seed", "prompts", "device", "batch_size")
        for name in vars(args):
            if name not in takes and getattr(args, name) != getattr(saved, name):
                fail(f"--evaluate takes --eval-*, --seed, --prompts, not --{name.replace('_', '-')}")
        texts, scores, kls = evaluate(args.evaluate, args)
        for score, pair in list(zip(scores, texts))[:8]:
            print(format_sample(score, *pair))
        print(f"{len(texts)} answers: mean reward {scores.mean():.3f}, KL to the reference {kls.mean():.3f}")
        if args.model is None:
            print(f"mean task score {np.mean([task_score(answer) for _, answer in texts]):.3f}")
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
        fail("torchrun has started the ranks again: go on with --resume RUN_DIR", code=1)
    if args.resume:
        args = parse_args(default=dataclasses.replace(load_checkpoint(args.resume)["args"], resume=args.resume))
    train(args, stop_signals)
    if count_ranks() > 1:  # without Python's own end, in which a thread of torch.distributed now and then aborts
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
