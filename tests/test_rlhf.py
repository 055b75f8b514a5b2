"""variants/ppo_rlhf.py: the arithmetic of DeepSpeed-Chat, padding, the four models, runs, bad input."""

import copy
import csv
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TESTS, flags_of, golden, scalars

transformers = pytest.importorskip(
    "transformers", reason="variants/ppo_rlhf.py is not tested: pip install -r variants/requirements.txt"
)
sys.path.insert(0, str(ROOT / "variants"))
import ppo_rlhf  # noqa: E402

EOS = 0  # of the built-in tokenizer, which pads with it too
SMALL = {"supervised_steps": 2, "total_episodes": 32, "batch_size": 8, "num_minibatches": 2, "response_length": 6}
ORACLE = json.loads((TESTS / "rlhf_oracle.json").read_text())


def save(model, tokenizer, folder):
    """As users have it, for --model or --reward-model."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of a tiny language model and a tiny reward model, with random weights and dropout, as users have them,
    and a file with prompts of several lengths."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    tokenizer, *models = ppo_rlhf.make_builtin_models(ppo_rlhf.Args(supervised_steps=1))
    for model, name in zip(models, ("model", "reward")):
        for parameter in model.parameters():  # away from the small numbers that they start with
            parameter.data.normal_(0, 0.2)
        model.config.attn_pdrop = model.config.resid_pdrop = model.config.embd_pdrop = 0.1
        save(model, tokenizer, folder / name)
    (folder / "prompts.txt").write_text("\n".join(ppo_rlhf.BUILTIN_PROMPTS[::3]) + "\n")
    return folder


@pytest.fixture
def small_args(folders, tmp_path):
    """A function that gives Args of a run that takes a second: small_args(gamma=0.9)."""

    def make(**changes):
        names = {"model": folders / "model", "reward_model": folders / "reward", "prompts": folders / "prompts.txt"}
        names = {name: str(path) for name, path in names.items()} | {"runs_dir": str(tmp_path / "runs")}
        return ppo_rlhf.Args(**(names | {"actor_learning_rate": 1e-3} | SMALL | changes))

    return make


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """The built-in task, for ten seconds: (actor, run folder)"""
    settings = {"supervised_steps": 150, "total_episodes": 64 * 16, "batch_size": 64}
    return ppo_rlhf.train(ppo_rlhf.Args(**settings, runs_dir=str(tmp_path_factory.mktemp("runs"))))


@pytest.fixture
def models(small_args):
    """Tokenizer, language model and reward model of the folders."""
    return ppo_rlhf.make_models(small_args(), torch.device("cpu"))


@pytest.fixture
def calls(watch):
    """{name of a function of the script: its calls from now on, [(arguments, result), ...]}"""
    names = ["make_models", "generate", "get_log_probs", "get_scores", "compute_rewards", "answer_advantages"]
    names += ["clipped_policy_loss", "clipped_value_loss", "apply_gradient"]
    return {name: watch(ppo_rlhf, name) for name in names}


def rows(run_dir):
    with open(run_dir / "metrics.csv") as file:
        return list(csv.DictReader(file))


def assert_same_learner(one, two):
    for name in ("actor", "critic", "actor_optimizer", "critic_optimizer", "kl_coef", "iteration"):
        torch.testing.assert_close(one[name], two[name], atol=0, rtol=0)


# ------------------------------------------------------------------------------------------------ arithmetic


def test_gather_log_probs():
    inputs, expected = golden("gather_log_probs")
    log_probs = ppo_rlhf.gather_log_probs(inputs["logits"], inputs["labels"].long())
    torch.testing.assert_close(log_probs, expected["logprobs"], atol=1e-9, rtol=0)


def advantages_of(kl, values, scores, mask, gamma=1.0, gae_lambda=0.95):
    rewards = ppo_rlhf.compute_rewards(kl, scores, mask, kl_coef=0.1, clip_reward=5.0)
    return rewards, *ppo_rlhf.answer_advantages(rewards, values, mask, gamma, gae_lambda)


def test_rewards_and_advantages():
    inputs, expected = golden("rlhf_masked_textbook")
    mask = inputs["mask"].bool()
    results = advantages_of(inputs["kl_logratio"], inputs["values"], inputs["score"], mask)
    for result, name in zip(results, ("rewards", "advantages", "returns")):
        torch.testing.assert_close(result, expected[name], atol=1e-9, rtol=0)
    assert results[1][mask].mean().item() == pytest.approx(expected["masked_mean_adv"])


def test_the_original_puts_the_score_behind_a_short_answer():
    """DeepSpeed-Chat's numbers come out of these functions if a short answer is one token longer than what is trained,
    and the score on that token. Its advantages differ from those of this script for the short answer only, as do those
    of a version that does not zero what follows."""
    inputs, expected = golden("rlhf_deepspeed")
    start = inputs["prompt_len"] - 1
    kl = (inputs["logprobs"] - inputs["ref_logprobs"])[:, start:]
    values, mask = inputs["values"][:, start:], inputs["attention_mask"][:, start + 1 :].bool()
    longer = torch.cat([mask[:, :1], mask[:, :-1]], 1)  # the full answer stays as it is
    rewards, advantages, returns = advantages_of(kl, values, inputs["reward_score"], longer)
    torch.testing.assert_close(rewards, expected["rewards"][:, start:], atol=1e-9, rtol=0)
    torch.testing.assert_close(advantages, expected["advantages"], atol=1e-9, rtol=0)
    torch.testing.assert_close(returns, expected["returns"], atol=1e-9, rtol=0)

    new_log_probs, new_values = (inputs[name].requires_grad_() for name in ("new_logprobs", "new_values"))
    log_ratio = (new_log_probs - inputs["logprobs"])[:, start:]
    actor_loss = ppo_rlhf.clipped_policy_loss(log_ratio[mask], advantages[mask], 0.2)
    critic_loss = ppo_rlhf.clipped_value_loss(new_values[:, start:][mask], values[mask], returns[mask], 0.2)
    (actor_loss + critic_loss).backward()
    assert actor_loss.item() == pytest.approx(expected["actor_loss"], abs=1e-9)
    assert critic_loss.item() == pytest.approx(expected["critic_loss"], abs=1e-9)
    torch.testing.assert_close(new_log_probs.grad, expected["grad_actor_new_logprobs"], atol=1e-9, rtol=0)
    torch.testing.assert_close(new_values.grad, expected["grad_critic_new_values"], atol=1e-9, rtol=0)

    _, ours, _ = advantages_of(kl, values, inputs["reward_score"], mask)
    for others in (advantages, golden("rlhf_without_zeroing")[1]["advantages"]):
        torch.testing.assert_close(ours[1], others[1], atol=1e-9, rtol=0)
        assert ((ours[0] - others[0]).abs()[mask[0]] > 0.05).all()


class Fixed:
    """Stands for a model: whatever it is asked, it answers with these numbers. As an actor logits (B, L, V), as a
    critic or a reward model one number for every token (B, L)."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __call__(self, **inputs):
        return SimpleNamespace(logits=self.numbers)

    def base_model(self, **inputs):
        return SimpleNamespace(last_hidden_state=self.numbers.unsqueeze(-1))

    def score(self, hidden):
        return hidden


def one_update(inputs, eos, more=0):
    """What the script makes of an experience and an update of the oracle's. more: tokens that count as part of an
    answer although they are not trained."""
    tensors = {name: torch.tensor(value) for name, value in inputs.items()}
    P, prompts = inputs["prompt_length"], tensors["sequences"][:, : inputs["prompt_length"]]
    prompt_mask = (prompts != inputs["pad"]).long()
    answers = ppo_rlhf.join_answers(prompts, prompt_mask, tensors["sequences"][:, P:], eos)
    mask = answers[-1]
    experience = {
        "log_probs": ppo_rlhf.get_log_probs(Fixed(tensors["logits"]), *answers, 1.0)[0],
        "ref_log_probs": ppo_rlhf.get_log_probs(Fixed(tensors["ref_logits"]), *answers, 1.0)[0],
        "values": ppo_rlhf.get_values(Fixed(tensors["values"]), *answers),
        "scores": ppo_rlhf.get_scores(Fixed(tensors["token_scores"]), *answers),
    }
    longer = torch.cat([mask[:, :1]] * more + [mask[:, : mask.shape[1] - more]], 1)
    kl = experience["log_probs"] - experience["ref_log_probs"]
    rewards, advantages, returns = advantages_of(kl, experience["values"], experience["scores"], longer)
    new_logits, new_values = (tensors[name].requires_grad_() for name in ("new_logits", "new_values"))
    new_log_probs, _ = ppo_rlhf.get_log_probs(Fixed(new_logits), *answers, 1.0)
    actor_loss = ppo_rlhf.clipped_policy_loss(
        (new_log_probs - experience["log_probs"])[mask], advantages[mask], clip_coef=0.2
    )
    values = ppo_rlhf.get_values(Fixed(new_values), *answers)
    critic_loss = ppo_rlhf.clipped_value_loss(values[mask], experience["values"][mask], returns[mask], 0.2)
    (actor_loss + critic_loss).backward()
    losses = {"actor_loss": actor_loss, "critic_loss": critic_loss}
    gradients = {"gradient_logits": new_logits.grad, "gradient_values": new_values.grad}
    return experience | {"rewards": rewards, "advantages": advantages, "returns": returns} | losses | gradients


def response_only(name, numbers, prompt_length):
    """The oracle has some numbers for the prompt too."""
    numbers = torch.tensor(numbers)
    return numbers[:, prompt_length - 1 :] if name in ("log_probs", "ref_log_probs", "values") else numbers


def test_update_is_that_of_deepspeed_chat_for_full_answers():
    """Its own code, called once (see "recipe" in rlhf_oracle.json): an experience, rewards, advantages, both losses
    and their gradients."""
    inputs, expected = ORACLE["full"]["inputs"], ORACLE["full"]["outputs"]
    ours = one_update(inputs, eos=1)
    for name, numbers in expected.items():
        numbers = response_only(name, numbers, inputs["prompt_length"])
        torch.testing.assert_close(ours[name], numbers, atol=1e-5, rtol=1e-5, check_dtype=False)


def test_update_differs_from_deepspeed_chat_for_short_answers():
    """The score is the same, its place is not: later advantages of the two short answers differ, everything of the full
    one is equal. With the original's place for it, all is equal."""
    inputs, expected = ORACLE["short"]["inputs"], ORACLE["short"]["outputs"]
    ours, theirs = one_update(inputs, eos=1), one_update(inputs, eos=1, more=1)
    torch.testing.assert_close(ours["scores"], torch.tensor(expected["scores"]))
    advantages = torch.tensor(expected["advantages"])
    torch.testing.assert_close(ours["advantages"][1], advantages[1])
    assert abs(ours["advantages"][0, 2] - advantages[0, 2]) > 0.05
    assert abs(ours["advantages"][2, 1] - advantages[2, 1]) > 0.05
    for name in ("rewards", "advantages", "returns", "actor_loss", "critic_loss", "gradient_logits", "gradient_values"):
        torch.testing.assert_close(theirs[name], torch.tensor(expected[name]), atol=1e-5, rtol=1e-5, check_dtype=False)


def test_adaptive_kl_coefficient():
    inputs, expected = golden("rlhf_lm_human_preferences")
    kl_coef = ppo_rlhf.adapt_kl_coef(
        inputs["kl_coef"],
        expected["mean_kl"],
        inputs["kl_target"],
        inputs["kl_horizon"],
        inputs["batch_size_for_kl"],
    )
    assert kl_coef == pytest.approx(expected["kl_coef_after_update"], abs=1e-12)
    assert ppo_rlhf.adapt_kl_coef(0.1, 9.0, 6.0, 100, 50) == pytest.approx(0.11)  # an error of 50% counts as 20%
    assert ppo_rlhf.adapt_kl_coef(0.1, 6.6, 6.0, 100, 50) == pytest.approx(0.105)
    assert ppo_rlhf.adapt_kl_coef(0.1, 0.0, 6.0, 20, 128) == pytest.approx(0.08)  # never below 0, which rewards KL


# ------------------------------------------------------------------------------------------------ tokens


@pytest.mark.parametrize("pad", [EOS, 9])
def test_where_an_answer_ends(pad):
    """EOS in the middle, at the end, at once, and none within the limit: the score is read at the last action and lands
    on it, whatever the padding is."""
    answers = torch.tensor([[5, 6, EOS, pad], [5, 6, 7, EOS], [EOS, pad, pad, pad], [5, 6, 7, 8]])
    prompts, prompt_mask = torch.full((4, 2), 3), torch.ones(4, 2, dtype=torch.long)
    batch = _, attention_mask, mask = ppo_rlhf.join_answers(prompts, prompt_mask, answers, EOS)
    assert mask.sum(-1).tolist() == [3, 4, 1, 4]
    assert attention_mask.sum(-1).tolist() == [5, 6, 3, 6]
    numbered = Fixed(torch.arange(6.0).repeat(4, 1))
    scores = ppo_rlhf.get_scores(numbered, *batch)
    assert scores.tolist() == [4, 5, 2, 5]  # the places of 6 tokens, EOS included
    assert ppo_rlhf.get_values(numbered, *batch)[0].tolist() == [1, 2, 3, 4]  # before each of the answer's 4 tokens
    rewards = ppo_rlhf.compute_rewards(torch.zeros(4, 4), scores, mask, 0.1, 4.5)
    expected = torch.tensor([[0, 0, 4, 0], [0, 0, 0, 4.5], [2, 0, 0, 0], [0, 0, 0, 4.5]])
    assert torch.equal(rewards, expected)


def test_left_padding_changes_no_answer(models):
    """Prompts of several lengths, together and one by one: the same likeliest answers."""
    tokenizer, model, _ = models
    prompts = [tokenizer(prompt).input_ids for prompt in ppo_rlhf.BUILTIN_PROMPTS[::5]]
    assert len({len(prompt) for prompt in prompts}) > 1
    sequences, _, mask = ppo_rlhf.generate(model, tokenizer, prompts, do_sample=False)
    together = ppo_rlhf.decode(tokenizer, prompts, sequences, mask)
    for prompt, pair in zip(prompts, together):
        sequences, _, mask = ppo_rlhf.generate(model, tokenizer, [prompt], do_sample=False)
        assert ppo_rlhf.decode(tokenizer, [prompt], sequences, mask) == [pair]


def test_log_probs_are_those_of_what_is_sampled_from(small_args):
    """At a temperature, with a cache and left padding: the numbers of transformers' own `generate`."""
    tokenizer, model, _ = ppo_rlhf.make_models(small_args(temperature=0.6), torch.device("cpu"))
    prompts = [tokenizer(prompt).input_ids for prompt in ppo_rlhf.BUILTIN_PROMPTS[::5]]
    torch.manual_seed(0)
    answers = sequences, _, mask = ppo_rlhf.generate(model, tokenizer, prompts)
    with torch.no_grad():
        log_probs, _ = ppo_rlhf.get_log_probs(model, *answers, temperature=0.6)
    torch.manual_seed(0)
    prompt_ids, prompt_mask = ppo_rlhf.pad_left(prompts, EOS)
    options = {"output_scores": True, "return_dict_in_generate": True}
    generated = model.generate(prompt_ids, attention_mask=prompt_mask, **options)
    assert torch.equal(generated.sequences, sequences)
    sampled = model.compute_transition_scores(sequences, generated.scores, normalize_logits=True)
    torch.testing.assert_close(log_probs[mask], sampled[mask], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("flags", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}])
def test_sampling_flags(small_args, models, flags):
    """Each of them, at its extreme, leaves only the likeliest token."""
    tokenizer, model, _ = models
    prompts = [tokenizer(prompt).input_ids for prompt in ppo_rlhf.BUILTIN_PROMPTS]
    likeliest, *_ = ppo_rlhf.generate(model, tokenizer, prompts, do_sample=False)
    sampled, *_ = ppo_rlhf.generate(model, tokenizer, prompts)
    assert likeliest.shape == sampled.shape and not torch.equal(likeliest, sampled)
    _, model, _ = ppo_rlhf.make_models(small_args(**flags), torch.device("cpu"))
    sampled, *_ = ppo_rlhf.generate(model, tokenizer, prompts)
    assert torch.equal(likeliest, sampled)


def test_padding_changes_no_loss_and_no_gradient(small_args, monkeypatch):
    """One whole iteration, with more padding on the left, on the right and on both sides."""
    original, pad = ppo_rlhf.generate, torch.nn.functional.pad

    def padded(*arguments):
        sequences, attention_mask, mask = original(*arguments)
        both = left, right
        return pad(sequences, both, value=EOS), pad(attention_mask, both), pad(mask, (0, right))

    monkeypatch.setattr(ppo_rlhf, "generate", padded)
    one_step = {"total_episodes": 8, "num_minibatches": 1, "ppo_epochs": 1, "max_grad_norm": 0.0}
    runs = []
    for left, right in ((0, 0), (3, 0), (0, 4), (7, 2)):  # noqa: B007
        _, run_dir = ppo_rlhf.train(small_args(**one_step))
        row = {name: float(x) for name, x in rows(run_dir)[0].items() if "second" not in name}
        saved, learned = ppo_rlhf.load_checkpoint(run_dir), [row["losses/policy_loss"], row["losses/value_loss"]]
        for name in ("actor_optimizer", "critic_optimizer"):  # Adam's mean is now a tenth of the gradient
            learned += [10 * state["exp_avg"] for state in saved[name]["state"].values()]
        runs.append((row, learned))
    for row, learned in runs[1:]:
        torch.testing.assert_close(learned, runs[0][1], atol=1e-5, rtol=1e-4)
        assert row == pytest.approx(runs[0][0], rel=1e-3, abs=1e-5)


def test_every_prompt_in_every_pass():
    """Whatever the size of the batches, and however many ranks share them."""
    prompts = [[n] for n in range(10)]
    whole = ppo_rlhf.draw_prompts(prompts, 0, 40, seed=1)
    for first in (0, 10, 20, 30):
        assert sorted(whole[first : first + 10]) == prompts
    assert whole[:10] != whole[10:20]
    parts = [ppo_rlhf.draw_prompts(prompts, first, 8, seed=1) for first in range(0, 40, 8)]
    assert [prompt for part in parts for prompt in part] == whole != ppo_rlhf.draw_prompts(prompts, 0, 40, seed=2)


# ------------------------------------------------------------------------------------------------ the four models


def test_ratio_is_one_in_the_first_minibatch(small_args, calls):
    """And the old log-probabilities and advantages stay what they are in later epochs."""
    ppo_rlhf.train(small_args(temperature=0.7, ppo_epochs=3))
    given = [arguments for arguments, _ in calls["clipped_policy_loss"]]
    ratios, advantages = [log_ratio.abs().max() for log_ratio, *_ in given], [mb for _, mb, _ in given]
    assert len(ratios) == 4 * 3 * 2
    for first, (arguments, (estimated, _)) in zip(range(0, len(ratios), 6), calls["answer_advantages"]):
        assert ratios[first] < 1e-5 and all(ratio > 1e-4 for ratio in ratios[first + 1 : first + 6])
        epochs = [torch.cat(advantages[i : i + 2]).sort().values for i in range(first, first + 6, 2)]
        expected = estimated[arguments[2]].sort().values  # of the mask
        assert all(torch.equal(epoch, expected) for epoch in epochs)  # as they came, all of them
    # In minibatches of their own in every epoch.
    sets = [tuple(sorted(advantages[i].tolist())) for i in range(0, len(advantages), 2)]
    assert len(set(sets)) == len(sets)


def test_four_models(small_args, models, calls):
    """Two frozen ones, which stay as they were to the bit; two trained ones, which start as these, share nothing with
    them or each other, and take their steps in turn. Their Adam is DeepSpeed-Chat's."""
    actor, run_dir = ppo_rlhf.train(small_args(temperature=0.7))
    assert float(rows(run_dir)[0]["charts/kl"]) == 0  # the actor still is the reference
    ((_, (_, *frozen)),) = calls["make_models"]
    for model, fresh in zip(frozen, models[1:]):
        torch.testing.assert_close(model.state_dict(), fresh.state_dict(), atol=0, rtol=0)
        assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
        assert all(module.p == 0 for module in model.modules() if isinstance(module, torch.nn.Dropout))
    trained = [model for (_, model, *_), _ in calls["apply_gradient"]]
    assert trained[0] is actor and trained == trained[:2] * (len(trained) // 2)
    storages = [{p.data_ptr() for p in model.parameters()} for model in (*trained[:2], *frozen)]
    assert sum(map(len, storages)) == len(set.union(*storages))
    for model, fresh in zip(trained, models[1:]):
        before = fresh.state_dict()
        assert all(not torch.equal(x, before[name]) for name, x in model.named_parameters() if "weight" in name)
    checkpoint = ppo_rlhf.load_checkpoint(run_dir)
    for name in ("actor_optimizer", "critic_optimizer"):
        (group,) = checkpoint[name]["param_groups"]
        assert group["betas"] == (0.9, 0.95) and not group["weight_decay"]


def test_values_and_scores_are_not_rounded(models):
    """With forward passes in bfloat16 they still differ by less than its steps."""
    _, _, reward_model = models
    tokens = torch.randint(4, 20, (8, 6))
    answers = ppo_rlhf.join_answers(tokens[:, :2], torch.ones_like(tokens[:, :2]), tokens[:, 2:], EOS)
    with torch.autocast("cpu", torch.bfloat16):
        for function in (ppo_rlhf.get_values, ppo_rlhf.get_scores):
            numbers = function(reward_model, *answers)
            assert numbers.dtype == torch.float32 and (numbers != numbers.bfloat16()).any()


def test_gradients_stay_apart(models):
    """A step of one model leaves the gradient of the other alone. Its own has the norm that is allowed, 0: any."""
    _, model, reward_model = models
    for module in (model, reward_model):
        module.requires_grad_(True)
    tokens = torch.tensor([[4, 5, 6, 7]])
    answers = ppo_rlhf.join_answers(tokens[:, :2], torch.ones_like(tokens[:, :2]), tokens[:, 2:], EOS)
    losses = {
        model: lambda: ppo_rlhf.get_log_probs(model, *answers, 1.0)[0].sum(),
        reward_model: lambda: ppo_rlhf.get_values(reward_model, *answers).sum(),
    }
    for module, other in ((model, reward_model), (reward_model, model)):
        before = [p.grad for p in other.parameters()]
        optimizer, norms = torch.optim.Adam(module.parameters()), []
        for bound in (0.0, 0.01):
            ppo_rlhf.apply_gradient(losses[module](), module, optimizer, bound)
            norms.append(torch.cat([p.grad.flatten() for p in module.parameters()]).norm().item())
        assert all(p.grad is grad for p, grad in zip(other.parameters(), before))
        assert norms[0] > 0.02 and norms[1] == pytest.approx(0.01, rel=1e-3)


def test_trained_actor_loads_with_transformers(learned):
    """With its tokenizer, from the run folder, and says the same."""
    actor, run_dir = learned
    loaded = transformers.AutoModelForCausalLM.from_pretrained(run_dir / "actor")
    tokenizer = transformers.AutoTokenizer.from_pretrained(run_dir / "actor")
    batch = tokenizer(["how is the soup ?", "tell us about the cake please ."], return_tensors="pt", padding=True)
    assert batch.attention_mask[0].tolist() == [0, 0, 1, 1, 1, 1, 1]  # shorter prompts are padded on the left
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch).logits, actor.eval()(**batch).logits, atol=0, rtol=0)
    answers = tokenizer.batch_decode(loaded.generate(**batch, do_sample=False), skip_special_tokens=True)
    assert answers[0].startswith("how is the soup ? it is ")


# ------------------------------------------------------------------------------------------------ runs


def test_learns_the_builtin_task(learned):
    """Rewards, and what they stand for, go up; the KL to the reference stays small."""
    _, run_dir = learned
    table = [{name: float(value) for name, value in row.items()} for row in rows(run_dir)]
    for name, gain in (("charts/reward", 0.25), ("charts/task_score", 0.1)):
        begin, end = table[0][name], sum(row[name] for row in table[-4:]) / 4
        assert end > begin + gain, (name, begin, end)
    assert 0.2 < table[-1]["charts/kl"] < 2
    assert table[-1]["losses/explained_variance"] > 0.2


SETTINGS = {  # none of them a default
    "gamma": 0.9,
    "gae_lambda": 0.8,
    "clip_coef": 0.3,
    "vf_clip_coef": 0.4,
    "clip_reward": 0.5,
    "kl_coef": 0.6,
    "max_grad_norm": 0.01,
    "actor_learning_rate": 2e-3,
    "critic_learning_rate": 3e-3,
    "anneal_lr": True,
}
OFF = {"anneal_lr": False, "vf_clip_coef": None, "max_grad_norm": 0.0}


@pytest.mark.parametrize("settings", [SETTINGS, SETTINGS | OFF], ids=["on", "off"])
def test_settings_reach_what_they_set(small_args, calls, settings):
    _, run_dir = ppo_rlhf.train(small_args(**settings, num_minibatches=1, ppo_epochs=1))
    for function, *names in (  # what it is given last
        ("compute_rewards", "kl_coef", "clip_reward"),
        ("answer_advantages", "gamma", "gae_lambda"),
        ("clipped_policy_loss", "clip_coef"),
        ("clipped_value_loss", "vf_clip_coef"),
        ("apply_gradient", "max_grad_norm"),
    ):
        given = [arguments[-len(names) :] for arguments, _ in calls[function]]
        assert given == [tuple(settings[name] for name in names)] * (8 if function == "apply_gradient" else 4)
    remaining = (1, 0.75, 0.5, 0.25) if settings["anneal_lr"] else (1, 1, 1, 1)
    logged = [float(row["charts/learning_rate"]) for row in rows(run_dir)]
    assert logged == pytest.approx([2e-3 * share for share in remaining])
    checkpoint = ppo_rlhf.load_checkpoint(run_dir)
    last = [checkpoint[name]["param_groups"][0]["lr"] for name in ("actor_optimizer", "critic_optimizer")]
    assert last == pytest.approx([2e-3 * remaining[-1], 3e-3 * remaining[-1]])


def test_metrics(small_args, calls):
    """What is logged of one iteration, from what its functions saw."""
    small = {"total_episodes": 256, "batch_size": 256, "num_minibatches": 4, "actor_learning_rate": 3e-3}
    _, run_dir = ppo_rlhf.train(small_args(**small, clip_coef=0.05))
    row = {name: float(value) for name, value in rows(run_dir)[0].items()}
    ((_, (sequences, _, mask)),) = calls["generate"]
    texts = [row[-mask.shape[1] :].tolist() for row in sequences]
    lengths = [text.index(EOS) + 1 if EOS in text else len(text) for text in texts]
    assert 0.1 < sum(EOS in text for text in texts) / 256 < 0.9  # some end, some do not
    assert row["charts/ended"] == pytest.approx(sum(EOS in text for text in texts) / 256)
    assert row["charts/response_length"] == pytest.approx(sum(lengths) / 256)
    scores = torch.cat([result for _, result in calls["get_scores"]])
    assert row["charts/reward"] == pytest.approx(scores.mean().item(), rel=1e-5)

    def mean(function):
        return sum(function(*arguments, result).item() for arguments, result in losses) / 8

    losses = calls["clipped_value_loss"]
    assert row["losses/value_loss"] == pytest.approx(mean(lambda *call: call[-1]), rel=1e-5)
    assert row["losses/values"] == pytest.approx(mean(lambda values, *_: values.mean()), rel=1e-5)
    losses = calls["clipped_policy_loss"]
    assert row["losses/policy_loss"] == pytest.approx(mean(lambda *call: call[-1]), rel=1e-5)
    clipfrac = mean(lambda log_ratio, *_: ((log_ratio.exp() - 1).abs() > 0.05).float().mean())
    assert 0.05 < clipfrac < 0.95 and row["losses/clipfrac"] == pytest.approx(clipfrac, rel=1e-4)
    # To second order the KL is half the mean square of the log-ratio.
    second_order = mean(lambda log_ratio, *_: log_ratio.square().mean() / 2)
    assert row["losses/approx_kl"] == pytest.approx(second_order, rel=0.1)
    assert row["losses/old_approx_kl"] == pytest.approx(mean(lambda log_ratio, *_: -log_ratio.mean()), rel=1e-4)
    assert abs(row["losses/old_approx_kl"] / row["losses/approx_kl"] - 1) < 0.5  # two estimates of the same
    # Minus the log-probability of what was sampled estimates the entropy.
    sampled = torch.cat([result[0] for _, result in calls["get_log_probs"][:8:2]])  # the actor's, before the update
    assert row["losses/entropy"] == pytest.approx(-sampled[mask].mean().item(), rel=0.1)


def test_two_estimates_of_the_kl_to_the_reference(learned):
    _, run_dir = learned
    table = [{name: float(value) for name, value in row.items()} for row in rows(run_dir)]
    for row in table[4:]:
        assert row["charts/kl_k3"] > 0 and abs(row["charts/kl_k3"] / row["charts/kl"] - 1) < 0.5


def test_norm_adv(small_args, calls):
    """The advantages of every minibatch have mean 0 and standard deviation 1; without the flag they do not."""
    for norm_adv in (True, False):
        calls["clipped_policy_loss"].clear()
        ppo_rlhf.train(small_args(norm_adv=norm_adv))
        given = [advantages for (_, advantages, _), _ in calls["clipped_policy_loss"]]
        assert len(given) == 16
        moments = torch.stack([torch.stack([x.mean(), x.std() - 1]) for x in given]).abs()
        assert (moments < 1e-4).all() if norm_adv else (moments > 1e-2).any(0).all()


def test_min_response_length(small_args, calls):
    """Shorter answers are scored and logged, and not trained on."""
    one = {"total_episodes": 64, "batch_size": 64, "num_minibatches": 1, "ppo_epochs": 1}
    _, run_dir = ppo_rlhf.train(small_args(**one, min_response_length=5))
    ((_, (_, _, mask)),), (((log_ratio, *_), _),) = calls["generate"], calls["clipped_policy_loss"]
    lengths = mask.sum(-1)  # of each answer
    assert (lengths < 5).any() and (lengths == 5).any() and (lengths > 5).any()
    assert len(log_ratio) == lengths[lengths >= 5].sum()
    assert float(rows(run_dir)[0]["charts/response_length"]) == pytest.approx(lengths.float().mean().item())


def test_iterations_have_noise_of_their_own(small_args, tmp_path, calls):
    """The same actor answers the same prompt otherwise."""
    (tmp_path / "prompt.txt").write_text("the one prompt")
    one_prompt = {"prompts": str(tmp_path / "prompt.txt"), "actor_learning_rate": 1e-30}
    ppo_rlhf.train(small_args(**one_prompt, total_episodes=16, batch_size=8, num_minibatches=1))
    first, second = (sequences for _, (sequences, *_) in calls["generate"])
    assert first.shape != second.shape or not torch.equal(first, second)


def test_frozen_models_in_bfloat16(models):
    """Half the bytes of their matrices, the same numbers under autocast; the layer `score` stays float32."""
    _, *frozen = models
    tokens = torch.randint(4, 20, (8, 6))
    answers = ppo_rlhf.join_answers(tokens[:, :2], torch.ones_like(tokens[:, :2]), tokens[:, 2:], EOS)

    def outputs():
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return ppo_rlhf.get_log_probs(frozen[0], *answers, 1.0)[0], ppo_rlhf.get_scores(frozen[1], *answers)

    before = outputs()
    ppo_rlhf.store_in_bfloat16(*frozen)
    torch.testing.assert_close(outputs(), before, atol=0, rtol=0)
    matrices = [x for model in frozen for name, x in model.named_parameters() if "h." in name and x.ndim == 2]
    assert len(matrices) == 16 and all(x.dtype == torch.bfloat16 for x in matrices)
    assert frozen[1].score.weight.dtype == frozen[0].lm_head.weight.dtype == torch.float32


def test_noise_of_other_architectures(models, tmp_path):
    """Mixtral's routers multiply what they see by random numbers in training."""
    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_local_experts": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.MixtralConfig(**size, **heads, router_jitter_noise=0.5, attention_dropout=0.1)
    save(transformers.MixtralForCausalLM(config), models[0], tmp_path)
    model, _ = ppo_rlhf.load_model(ppo_rlhf.AutoModelForCausalLM, str(tmp_path))
    tokens = torch.randint(64, (2, 5))
    with torch.no_grad():
        torch.testing.assert_close(model.train()(tokens).logits, model.eval()(tokens).logits, atol=0, rtol=0)


def test_run_folder(learned):
    _, run_dir = learned
    assert re.fullmatch(r"builtin__ppo_rlhf__1__[\d.]+", run_dir.name)
    names = {path.name for path in run_dir.iterdir() if "tfevents" not in path.name}
    assert names == {
        "actor",
        "args.json",
        "checkpoint.pt",
        "lock",
        "metrics.csv",
        "ppo_rlhf.py",
        "reward",
        "supervised",
    }
    assert (run_dir / "ppo_rlhf.py").read_text() == (ROOT / "variants" / "ppo_rlhf.py").read_text()
    table, logged = rows(run_dir), scalars(run_dir)
    assert [int(row["global_step"]) for row in table] == [64 * n for n in range(1, 17)]
    assert logged.keys() == {name for name in table[0] if "/" in name}
    for name, points in logged.items():
        assert [value for _, value in points] == pytest.approx([float(row[name]) for row in table], rel=1e-5)
    rates = [float(row["charts/learning_rate"]) for row in table]
    assert rates == pytest.approx([5e-4 * (16 - n) / 16 for n in range(16)])
    frozen = transformers.AutoModelForCausalLM.from_pretrained(run_dir / "supervised")
    assert sum(p.numel() for p in frozen.parameters()) > 1e5


def test_evaluate(learned, main):
    """Twice the same, nothing changes; the likeliest answers are others than the sampled ones."""
    _, run_dir = learned
    files = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    flags = "--evaluate", run_dir, "--eval-episodes=30"
    first = main(ppo_rlhf, *flags)
    assert first.returncode == 0 and first == main(ppo_rlhf, *flags)
    assert len(re.findall(" -> it is ", first.stdout)) >= 6
    reward, kl = re.search(r"30 answers: mean reward (\S+), KL to the reference (\S+)\n", first.stdout).groups()
    last = rows(run_dir)[-1]  # of the trained actor, not of the reference
    assert abs(float(reward) - float(last["charts/reward"])) < 0.1 and 0.5 < float(kl) / float(last["charts/kl"]) < 2
    assert first.stdout != main(ppo_rlhf, *flags, "--eval-deterministic").stdout
    assert files == {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


@pytest.mark.parametrize("builtin", [False, True])
def test_resumed_equals_uninterrupted(small_args, builtin):
    """Weights, optimisers, KL coefficient, random numbers and logs, to the last bit; a row that a kill left after the
    checkpoint goes."""
    changes = {"checkpoint_interval": 2, "kl_target": 0.05, "kl_horizon": 20.0}
    if builtin:
        changes |= {"model": None, "reward_model": None, "prompts": None}
    _, whole = ppo_rlhf.train(small_args(**changes))
    _, half = ppo_rlhf.train(small_args(**changes), stop_signals=[15])
    saved = ppo_rlhf.load_checkpoint(half)
    assert saved["iteration"] == 1 and saved["kl_coef"] != 0.1
    with open(half / "metrics.csv", "a") as file:
        file.write("2,16,0.5,0.1,0.2")
    saved["args"].resume = str(half)
    ppo_rlhf.train(saved["args"])
    assert_same_learner(ppo_rlhf.load_checkpoint(half), ppo_rlhf.load_checkpoint(whole))
    one, two = ([{k: v for k, v in row.items() if "second" not in k} for row in rows(path)] for path in (half, whole))
    assert one == two
    one, two = scalars(half), scalars(whole)
    assert all(one[name] == two[name] for name in two if "second" not in name)


def test_kill_while_writing_a_checkpoint(small_args, capfd):
    """The process dies with half of its second checkpoint written: the first is whole, and the run goes on from it."""
    args = small_args(checkpoint_interval=2)
    original, calls = torch.save, []

    def half(checkpoint, path):
        original(checkpoint, path)
        calls.append(1)
        if len(calls) == 2:
            os.truncate(path, os.path.getsize(path) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    if (child := os.fork()) == 0:
        torch.save = half
        ppo_rlhf.train(args)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    (run_dir,) = (ROOT / args.runs_dir).iterdir()
    saved = ppo_rlhf.load_checkpoint(run_dir)
    assert saved["iteration"] == 2
    saved["args"].resume = str(run_dir)
    ppo_rlhf.train(saved["args"])
    assert [row["iteration"] for row in rows(run_dir)] == ["1", "2", "3", "4"]
    assert ppo_rlhf.load_checkpoint(run_dir)["iteration"] == 4 and (run_dir / "actor").is_dir()


def test_interrupt_saves(small_args, capfd):
    """SIGTERM: the iteration under way is finished and saved."""
    args = small_args(total_episodes=10**5)
    flags = flags_of(**{name: value for name, value in vars(args).items() if value is not None})
    if (child := os.fork()) == 0:
        try:
            sys.argv = ["ppo_rlhf.py", *flags]
            os._exit(ppo_rlhf.main())
        finally:
            os._exit(1)
    runs_dir, end = Path(args.runs_dir), time.monotonic() + 60
    while not any(path.read_text().count("\n") > 1 for path in runs_dir.glob("*/metrics.csv")):
        assert time.monotonic() < end
        time.sleep(0.01)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGTERM
    (run_dir,) = runs_dir.iterdir()
    assert f"--resume {run_dir}" in capfd.readouterr().err
    assert ppo_rlhf.load_checkpoint(run_dir)["iteration"] == len(rows(run_dir)) and not (run_dir / "actor").exists()


def test_two_ranks_train_as_one(small_args, tmp_path):
    """torchrun: other prompts, the same weights to the bit, one run folder."""
    code = f"""
import os, sys, torch
sys.path.insert(0, {str(ROOT / "variants")!r})
import ppo_rlhf
rank, seen = int(os.environ["RANK"]), {{"prompts": [], "scores": [], "models": {{}}, "random": []}}
make_models, generate, get_scores, step = (
    getattr(ppo_rlhf, name) for name in ("make_models", "generate", "get_scores", "apply_gradient"))

def other_models(*arguments):
    result = make_models(*arguments)
    for model in result[1:]:
        for parameter in model.parameters():
            parameter.data += 0.1 * rank  # as if loaded from another file
    return result

def spy_on_generate(actor, tokenizer, prompts):
    seen["prompts"] += prompts
    seen["random"].append(torch.get_rng_state())
    return generate(actor, tokenizer, prompts)

def spy_on_scores(*arguments):
    seen["scores"].append(get_scores(*arguments))
    return seen["scores"][-1]

ppo_rlhf.make_models, ppo_rlhf.generate, ppo_rlhf.get_scores = other_models, spy_on_generate, spy_on_scores
ppo_rlhf.apply_gradient = lambda loss, model, *a: (seen["models"].setdefault(model), step(loss, model, *a))
actor, run_dir = ppo_rlhf.train(ppo_rlhf.parse_args())
models = seen.pop("models")
assert len(models) == 2 and actor in models
seen |= {{"weights": [p.detach() for model in models for p in model.parameters()], "run_dir": str(run_dir)}}
torch.save(seen, {str(tmp_path)!r} + f"/rank-{{rank}}.pt")
"""
    (tmp_path / "two.py").write_text(code)
    flags = flags_of(**{k: v for k, v in vars(small_args(total_episodes=16)).items() if v is not None})
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", tmp_path / "two.py"]
    finished = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=200)
    assert finished.returncode == 0, finished.stderr
    one, other = (torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1))
    run_dir = one["run_dir"]
    assert other["run_dir"] == "None" and len(list((tmp_path / "runs").iterdir())) == 1
    prompts = [x["prompts"] for x in (one, other)]
    shares = [*prompts[0][:4], *prompts[1][:4], *prompts[0][4:], *prompts[1][4:]]  # two iterations of 8
    assert len({tuple(prompt) for prompt in shares[:8]}) == 8  # a pass over all prompts
    assert not torch.equal(one["random"][0], other["random"][0])  # answers to the same prompt would differ
    assert all(torch.equal(*pair) for pair in zip(one["weights"], other["weights"]))
    logged = [float(row["charts/reward"]) for row in rows(tmp_path / "runs" / os.path.basename(run_dir))]
    means = [torch.cat([*one["scores"][i : i + 2], *other["scores"][i : i + 2]]).mean().item() for i in (0, 2)]
    assert logged == pytest.approx(means, rel=1e-5)
    saved = ppo_rlhf.load_checkpoint(run_dir)
    assert torch.equal(saved["actor"]["transformer.wte.weight"], one["weights"][0])


# ------------------------------------------------------------------------------------------------ command line


def test_a_sweep_command_line():
    """As `wandb sweep` builds it."""
    line = "--track=False --kl_coef=0.1 --model=None --kl_target=6 --batch_size=64.0"
    args = ppo_rlhf.parse_args([*line.split(), "--total-episodes", "1e3", "--anneal_lr=false"])
    assert (args.track, args.kl_coef, args.model, args.kl_target) == (False, 0.1, None, 6.0)
    assert (args.batch_size, args.total_episodes, args.anneal_lr) == (64, 1000, False)
    assert ppo_rlhf.parse_args([]) == ppo_rlhf.Args()


@pytest.mark.parametrize("kind", ["Mpt", "Gemma3"])
def test_contexts_with_other_names(models, small_args, kind):
    """MPT's configuration has another name for it; where a model takes images too, it is that of the text part."""
    config = transformers.MptConfig(max_seq_len=6)
    if kind == "Gemma3":
        config = transformers.Gemma3Config(text_config={"max_position_embeddings": 6})
    with pytest.raises(SystemExit, match="exceed the context of 6"):
        ppo_rlhf.load_prompts(small_args(), models[0], SimpleNamespace(config=config))


def test_reward_model_that_pads_with_eos(small_args, capsys):
    """Is named: most often it was trained to be read at the token before."""
    ppo_rlhf.make_models(small_args(), torch.device("cpu"))
    assert "pads with EOS: scores are read at the EOS" in capsys.readouterr().out


@pytest.fixture
def others(folders, tmp_path):
    """What users may give by mistake."""
    words = {word: number for number, word in enumerate(["<eos>", "other", "words"])}
    tokenizer = ppo_rlhf.tokenizers.Tokenizer(ppo_rlhf.tokenizers.models.WordLevel(words, unk_token="<eos>"))
    other = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    _, _, reward_model = ppo_rlhf.make_builtin_models(ppo_rlhf.Args(supervised_steps=1))
    save(reward_model, other, tmp_path / "other")
    texts = {"empty.txt": "how is the soup ?\n\nhow is the cake ?\n", "nothing.txt": "", "long.txt": "soup " * 59}
    texts |= {"chat.jsonl": '{"prompt": [{"role": "user", "content": "soup"}]}\n', "null.jsonl": '{"prompt": null}\n'}
    texts |= {"bad.jsonl": '{"text": "soup"}\n', "blank.jsonl": '{"prompt": "soup\u2028"}\n{"prompt": "  "}\n'}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")  # U+2028 ends no line of a file
    return tmp_path


BAD = {
    "another tokenizer": ({"reward_model": "HERE/other"}, "has another vocabulary than --model"),
    "no reward model": (
        {"reward_model": "FOLDERS/model"},
        "is no trained SequenceClassification: it lacks score.weight",
    ),
    "no such model": ({"model": "FOLDERS/nowhere"}, "cannot load"),
    "empty prompt": ({"prompts": "HERE/empty.txt"}, "empty.txt, line 2: the prompt is empty"),
    "blank prompt": ({"prompts": "HERE/blank.jsonl"}, "blank.jsonl, line 2: the prompt is empty"),
    "no prompts": ({"prompts": "HERE/nothing.txt"}, "nothing.txt has no prompts"),
    "prompt too long": (
        {"prompts": "HERE/long.txt"},
        "line 1: 59 tokens and --response-length exceed the context of 64",
    ),
    "no file": ({"prompts": "HERE/nowhere.txt"}, "cannot read prompts from"),
    "a conversation": ({"prompts": "HERE/chat.jsonl"}, "a prompt is a string, not a conversation"),
    "null": ({"prompts": "HERE/null.jsonl"}, "a prompt is a string, not a conversation"),
    "no prompt in it": ({"prompts": "HERE/bad.jsonl"}, "cannot read prompts from"),
    "models without prompts": ({"prompts": None}, "--model, --reward-model and --prompts"),
    "indivisible": ({"num_minibatches": 3}, "--batch-size 8 must be a multiple of num_minibatches * processes = 3"),
    "nothing to train on": ({"min_response_length": 7}, "--min-response-length 7 is above --response-length 6"),
    "too short": ({"total_episodes": 7}, "--total-episodes 7 is below --batch-size 8"),
    "zero": ({"temperature": 0.0}, "--temperature must be a finite number from 0.0001 to inf, not 0.0"),
    "NaN": ({"kl_coef": "nan"}, "--kl-coef must be a finite number"),
    "negative": ({"kl_coef": -0.1}, "--kl-coef must be a finite number from 0"),
    "not a probability": ({"top_p": 1.5}, "--top-p must be a finite number from 0 to 1, not 1.5"),
    "nothing to resume": ({"resume": "nowhere"}, "nowhere/checkpoint.pt is missing"),
    "nothing to evaluate": ({"evaluate": "nowhere"}, "nowhere/checkpoint.pt"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(small_args, folders, others, case, main):
    changes, message = BAD[case]
    flags = {name: value for name, value in (vars(small_args()) | changes).items() if value is not None}
    flags = [x.replace("HERE", str(others)).replace("FOLDERS", str(folders)) for x in flags_of(**flags)]
    refused = main(ppo_rlhf, *flags)
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1, refused.stderr
    assert refused.stderr.startswith("ppo_rlhf.py: error: ") and message in refused.stderr
    assert not (others / "runs").exists()


def test_reward_that_is_not_finite(small_args, models, tmp_path, capsys):
    """One line, code 2; the last good iteration is saved and logged, and the run goes on from it. This reward model
    fails on long texts; one of the prompts of iteration 3 is long."""
    tokenizer, _, reward_model = models
    broken = copy.deepcopy(reward_model)
    broken.transformer.wpe.weight.data[12:] = 1e38  # its square is infinite
    save(broken, tokenizer, tmp_path / "reward")
    lines = ["how is the soup ?"] * 24  # 5 words, and an answer of 6
    lines[ppo_rlhf.draw_prompts(range(24), 20, 1, seed=1)[0]] += " it is very good" * 3
    (tmp_path / "prompts.txt").write_text("\n".join(lines))
    paths = {"prompts": str(tmp_path / "prompts.txt"), "reward_model": str(tmp_path / "reward")}
    args = small_args(checkpoint_interval=1, **paths)
    with pytest.raises(SystemExit) as exit:
        ppo_rlhf.train(args)
    assert exit.value.code == 2 and "iteration 3: --reward-model gave NaN or infinity" in capsys.readouterr().err
    (run_dir,) = (ROOT / args.runs_dir).iterdir()
    saved = ppo_rlhf.load_checkpoint(run_dir)
    assert saved["iteration"] == 2 and len(rows(run_dir)) == 2
    assert all(x.isfinite().all() for x in saved["actor"].values())
    (tmp_path / "prompts.txt").write_text("how is the soup ?\n" * 24)  # repaired
    saved["args"].resume = str(run_dir)
    ppo_rlhf.train(saved["args"])
    assert len(rows(run_dir)) == 4


DAMAGE = {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:1000]),
    "another program's": lambda path: torch.save({"model": torch.zeros(3)}, path),
    "a pickle that would run code": lambda path: torch.save({"actor": print}, path),
    "of another script": lambda path: torch.save({"agent": {}, "args": {"num_envs": 3}}, path),
}


@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
def test_damaged_checkpoint(small_args, flag, main):
    _, run_dir = ppo_rlhf.train(small_args(total_episodes=8))
    path = run_dir / "checkpoint.pt"
    whole = path.read_bytes()
    for name, damage in DAMAGE.items():
        damage(path)
        refused = main(ppo_rlhf, flag, run_dir)
        assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1, (name, refused.stderr)
        assert "checkpoint.pt" in refused.stderr
        path.write_bytes(whole)
    if flag == "--resume":
        refused = main(ppo_rlhf, flag, run_dir, "--batch-size=4")
        assert refused.returncode == 2 and f"--batch-size 4: {run_dir} began with 8" in refused.stderr


def test_without_transformers(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    spec = importlib.util.spec_from_file_location("alone", ROOT / "variants" / "ppo_rlhf.py")
    with pytest.raises(SystemExit) as exit:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert exit.value.code == 2 and "pip install -r variants/requirements.txt" in capsys.readouterr().err


def test_update_that_is_not_finite(small_args, capsys):
    """A critic with a huge learning rate: its weights are finite after the first step, after the second they are not.
    The checkpoint before is kept."""
    args = small_args(checkpoint_interval=1, num_minibatches=1, ppo_epochs=1, critic_learning_rate=1e36)
    with pytest.raises(SystemExit) as exit:
        ppo_rlhf.train(args)
    assert exit.value.code == 2 and "iteration 2 gave NaN or infinity" in capsys.readouterr().err
    (run_dir,) = (ROOT / args.runs_dir).iterdir()
    checkpoint = ppo_rlhf.load_checkpoint(run_dir)
    assert checkpoint["iteration"] == 1 and all(x.isfinite().all() for x in checkpoint["actor"].values())


def test_tokens_beyond_the_embedding(models, small_args, tmp_path, capsys):
    """A word added to a tokenizer and not to its model: refused in a prompt, harmless as padding."""
    tokenizer, model, reward_model = models
    added = copy.deepcopy(tokenizer)
    added.add_tokens("soufflé")
    (tmp_path / "prompts.txt").write_text("soufflé\n", encoding="utf-8")
    args = small_args(prompts=str(tmp_path / "prompts.txt"))
    with pytest.raises(SystemExit):
        ppo_rlhf.load_prompts(args, added, model, reward_model)
    assert f"line 1: the prompt has token {len(tokenizer)}, a model knows only" in capsys.readouterr().err
    added.add_special_tokens({"pad_token": "[PAD]"})
    for name, each in (("model", model), ("reward", reward_model)):
        save(each, added, tmp_path / name)
    folders = {"model": str(tmp_path / "model"), "reward_model": str(tmp_path / "reward")}
    loaded, actor, _ = ppo_rlhf.make_models(ppo_rlhf.Args(**folders), torch.device("cpu"))
    sequences, *_ = ppo_rlhf.generate(actor, loaded, [[4], [4, 5, 6]])
    assert sequences.max() < model.config.vocab_size


def test_prompts_that_end_the_text(models, small_args, tmp_path, capsys):
    tokenizer, model, reward_model = models
    (tmp_path / "prompts.txt").write_text(f"soup {tokenizer.eos_token}\n")
    ppo_rlhf.load_prompts(small_args(prompts=str(tmp_path / "prompts.txt")), tokenizer, model, reward_model)
    assert "prompts end with EOS" in capsys.readouterr().err
