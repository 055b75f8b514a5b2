"""variants/ppo_rlhf.py: rewards, advantages and losses are those of DeepSpeed-Chat but for short answers."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import TESTS, golden
from rlhf import EOS, ppo_rlhf, rows

pytest_plugins = "rlhf_fixtures"


ORACLE = json.loads((TESTS / "rlhf_oracle.json").read_text())


def test_log_probs_and_entropy():
    inputs, expected = golden("gather_log_probs")
    log_probs, entropy = ppo_rlhf.log_probs_and_entropy(inputs["logits"], inputs["labels"].long())
    torch.testing.assert_close(log_probs, expected["logprobs"], atol=1e-9, rtol=0)
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=inputs["logits"]).entropy())
    with_unused_token = torch.tensor([0.0, 0.0, -torch.inf])
    _, entropy = ppo_rlhf.log_probs_and_entropy(with_unused_token, torch.tensor(1))
    assert entropy.item() == pytest.approx(0.6931472)


def advantages_of(kl, values, scores, mask, gamma=1.0, gae_lambda=0.95):
    rewards = ppo_rlhf.compute_rewards(kl, scores, mask, kl_coef=0.1, clip_reward=5.0)
    return rewards, *ppo_rlhf.compute_advantages(rewards, values, mask, gamma, gae_lambda)


def test_rewards_and_advantages():
    inputs, expected = golden("rlhf_masked_textbook")
    mask = inputs["mask"].bool()
    results = advantages_of(inputs["kl_logratio"], inputs["values"], inputs["score"], mask)
    for result, name in zip(results, ("rewards", "advantages", "returns")):
        torch.testing.assert_close(result, expected[name], atol=1e-9, rtol=0)
    assert results[1][mask].mean().item() == pytest.approx(expected["masked_mean_adv"])


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


SETTINGS = {  # none of them a default
    "gamma": 0.9,
    "gae_lambda": 0.8,
    "clip_coef": 0.3,
    "vf_clip_coef": 0.4,
    "clip_reward": 0.5,
    "kl_coef": 0.6,
    "actor_learning_rate": 2e-3,
    "critic_learning_rate": 3e-3,
    "anneal_lr": True,
}
OFF = {"anneal_lr": False, "vf_clip_coef": None}


@pytest.mark.parametrize("settings", [SETTINGS, SETTINGS | OFF], ids=["on", "off"])
def test_settings_reach_what_they_set(rlhf_args, calls, settings):
    _, run_dir = ppo_rlhf.train(rlhf_args(**settings, num_minibatches=1, ppo_epochs=1))
    for function, *names in (  # what it is given last
        ("compute_rewards", "kl_coef", "clip_reward"),
        ("compute_advantages", "gamma", "gae_lambda"),
        ("clipped_policy_loss", "clip_coef"),
        ("clipped_value_loss", "vf_clip_coef"),
    ):
        given = {arguments[-len(names) :] for arguments, _ in calls[function]}
        assert given == {tuple(settings[name] for name in names)}
    remaining = (1, 0.75, 0.5, 0.25) if settings["anneal_lr"] else (1, 1, 1, 1)
    logged = [float(row["charts/learning_rate"]) for row in rows(run_dir)]
    assert logged == pytest.approx([2e-3 * share for share in remaining])
    checkpoint = ppo_rlhf.load_checkpoint(run_dir)
    last = [checkpoint[name]["param_groups"][0]["lr"] for name in ("actor_optimizer", "critic_optimizer")]
    assert last == pytest.approx([2e-3 * remaining[-1], 3e-3 * remaining[-1]])


def test_gradients_are_clipped_apart(rlhf_args):
    """Each model's has the norm that is allowed; 0: any. After one step Adam's mean is a tenth of the gradient."""
    norms = []
    for bound in (0.0, 1e-3):
        _, run_dir = ppo_rlhf.train(rlhf_args(total_episodes=8, num_minibatches=1, ppo_epochs=1, max_grad_norm=bound))
        for name in ("actor_optimizer", "critic_optimizer"):
            means = [state["exp_avg"] for state in ppo_rlhf.load_checkpoint(run_dir)[name]["state"].values()]
            norms.append(10 * torch.cat([mean.flatten() for mean in means]).norm().item())
    assert min(norms[:2]) > 2e-3 and norms[2:] == pytest.approx([1e-3, 1e-3], rel=1e-3)


def test_ratio_is_one_in_the_first_minibatch(rlhf_args, calls):
    """And the old log-probabilities, values, advantages and returns stay what they are in later epochs."""
    _, run_dir = ppo_rlhf.train(rlhf_args(temperature=0.7, ppo_epochs=3))
    kl = [given[0].sum(-1).mean().item() for given, _ in calls["compute_rewards"]]
    assert [float(row["charts/kl"]) for row in rows(run_dir)] == pytest.approx(kl, abs=1e-6)
    policy, value = ([given for given, _ in calls[f"clipped_{name}_loss"]] for name in ("policy", "value"))
    firsts = set()
    for i, ((_, old_values, mask, *_), (advantages, returns)) in enumerate(calls["compute_advantages"]):
        own = slice(6 * i, 6 * i + 6)  # three epochs of two minibatches
        ratios = [log_ratio.abs().max() for log_ratio, *_ in policy[own]]
        assert ratios[0] < 1e-5 and min(ratios[1:]) > 1e-4
        for losses, column, expected in ((policy, 1, advantages), (value, 1, old_values), (value, 2, returns)):
            parts = [given[column] for given in losses[own]]
            for epoch in zip(parts[::2], parts[1::2]):  # as they came, all of them
                assert torch.equal(torch.cat(epoch).sort().values, expected[mask].sort().values)
        firsts |= {tuple(sorted(given[1].tolist())) for given in policy[own][::2]}
    assert len(firsts) == 4 * 3  # other minibatches in every epoch


def test_norm_adv(rlhf_args, calls):
    """The advantages of every minibatch have mean 0 and standard deviation 1; without the flag they do not."""
    for norm_adv in (True, False):
        calls["clipped_policy_loss"].clear()
        ppo_rlhf.train(rlhf_args(norm_adv=norm_adv, total_episodes=16))
        given = [advantages for (_, advantages, _), _ in calls["clipped_policy_loss"]]
        assert len(given) == 8
        moments = torch.stack([torch.stack([x.mean(), x.std() - 1]) for x in given]).abs()
        assert (moments < 1e-4).all() if norm_adv else (moments > 1e-2).any(0).all()


def learned(run_dir):
    """After one step with Adam, whose mean is then a tenth of the gradient: losses, metrics and gradients."""
    row = {name: float(x) for name, x in rows(run_dir)[0].items() if "second" not in name}
    saved = ppo_rlhf.load_checkpoint(run_dir)
    states = [saved[name]["state"].values() for name in ("actor_optimizer", "critic_optimizer")]
    return row, [10 * state["exp_avg"] for optimizer in states for state in optimizer]


ONE_STEP = {"total_episodes": 8, "num_minibatches": 1, "ppo_epochs": 1, "max_grad_norm": 0.0}


def test_micro_batches_add_up(rlhf_args):
    """The same gradients and metrics as from the whole minibatch, though answers differ in length."""
    settings = ONE_STEP | {"norm_adv": True}
    row, whole = learned(ppo_rlhf.train(rlhf_args(**settings))[1])
    for size in (1, 3):
        other_row, gradients = learned(ppo_rlhf.train(rlhf_args(**settings, micro_batch_size=size))[1])
        torch.testing.assert_close(gradients, whole, atol=1e-6, rtol=1e-5)
        assert other_row == pytest.approx(row, rel=1e-5, abs=1e-6)


def test_padding_changes_no_loss_and_no_gradient(rlhf_args, monkeypatch):
    """One whole iteration, with more padding on the left, on the right and on both sides."""
    original, pad = ppo_rlhf.generate, torch.nn.functional.pad

    def padded(*arguments):
        sequences, attention_mask, mask = original(*arguments)
        both = left, right
        return pad(sequences, both, value=EOS), pad(attention_mask, both), pad(mask, (0, right))

    monkeypatch.setattr(ppo_rlhf, "generate", padded)
    runs = []
    for left, right in ((0, 0), (3, 0), (0, 4), (7, 2)):  # noqa: B007
        runs.append(learned(ppo_rlhf.train(rlhf_args(**ONE_STEP))[1]))
        del runs[-1][0]["charts/ended"]  # it takes padding for an end; `generate` pads only answers that ended
    for row, gradients in runs[1:]:
        torch.testing.assert_close(gradients, runs[0][1], atol=1e-5, rtol=1e-4)
        assert row == pytest.approx(runs[0][0], rel=1e-3, abs=1e-5)
