"""recipes/ of variants/ppo_rlhf.py."""

import pytest
import torch
from conftest import golden
from rlhf import rows, stop_in_iteration

from recipes import with_recipes

pytest_plugins = "rlhf_fixtures"


def with_recipe(name, rlhf_args):
    """The script with a recipe, and a function that gives it Args of a small run."""
    module = with_recipes("ppo_rlhf", name)
    return module, lambda **changes: module.Args(**vars(rlhf_args()) | changes)


def test_lm_human_preferences_numbers():
    """Rewards, advantages, returns and the new kl_coef are those of lm-human-preference-details."""
    inputs, expected = golden("rlhf_lm_human_preferences")
    module = with_recipes("ppo_rlhf", "lm_human_preferences")
    kl, mask = inputs["logprobs"] - inputs["ref_logprobs"], torch.ones(2, 5, dtype=torch.bool)
    rewards = module.compute_rewards(kl, inputs["scores"], mask, inputs["kl_coef"], 1e9)
    whitened = module.whiten(rewards, mask, shift_mean=False)
    advantages, returns = module.compute_advantages(whitened, inputs["values"], mask, 1.0, 0.95)
    results = {"rewards": rewards, "whitened_rewards": whitened, "advantages_raw": advantages, "returns": returns}
    for name, result in (results | {"advantages": module.whiten(advantages, mask)}).items():
        torch.testing.assert_close(result, expected[name], atol=1e-9, rtol=0)
    controller = inputs["kl_target"], inputs["kl_horizon"], inputs["batch_size_for_kl"]
    kl_coef = module.adapt_kl_coef(inputs["kl_coef"], expected["mean_kl"], *controller)
    assert kl_coef == pytest.approx(expected["kl_coef_after_update"], abs=1e-12)
    assert module.adapt_kl_coef(0.1, 9.0, 6.0, 100, 50) == pytest.approx(0.11)  # an error of 50% counts as 20%
    assert module.adapt_kl_coef(0.1, 6.6, 6.0, 100, 50) == pytest.approx(0.105)
    assert module.adapt_kl_coef(0.1, 0.0, 6.0, 20, 128) == pytest.approx(0.08)  # never below 0, which rewards KL


def test_lm_human_preferences_trains(rlhf_args, watch, monkeypatch):
    """With whitened numbers, short answers included. A resumed run goes on with the kl_coef it had."""
    module, args = with_recipe("lm_human_preferences", rlhf_args)
    estimated, losses = watch(module, "compute_advantages"), watch(module, "clipped_policy_loss")
    settings = {"num_minibatches": 1, "ppo_epochs": 1, "kl_horizon": 8.0, "kl_target": 0.01, "checkpoint_interval": 1}
    _, whole = module.train(args(**settings))
    for ((rewards, _, mask, *_), _), ((_, advantages, _), _) in zip(estimated, losses, strict=True):
        assert len(advantages) == mask.sum()
        assert rewards[mask].std(correction=0).item() == pytest.approx(1, abs=1e-4) and (rewards[~mask] == 0).all()
        assert abs(advantages.mean()) < 1e-5 and advantages.std(correction=0).item() == pytest.approx(1, abs=1e-4)
    assert any(not mask.all() for (_, _, mask, *_), _ in estimated)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_in_iteration(3, patch, module)
        module.train(args(**settings))
    (half,) = {*whole.parent.iterdir()} - {whole}
    module.train(resume=half)
    one, two = ([row["charts/kl_coef"] for row in rows(path)] for path in (half, whole))
    assert one == two and one[0] == "0.1" and len({*one}) > 2


def test_lora(rlhf_args, models, watch, monkeypatch, main):
    """Frozen weights stay as they were, to the bit; the reference is the actor without its adapter. The adapter alone
    is saved; peft loads it. A resumed run equals an uncut one."""
    peft = pytest.importorskip("peft")
    module, args = with_recipe("lora", rlhf_args)
    scored, made = watch(module, "get_scores"), watch(module, "make_models")
    settings = {"actor_learning_rate": 1e-2, "checkpoint_interval": 2, "lora_rank": 2}
    actor, whole = module.train(args(**settings))
    table = [{name: float(value) for name, value in row.items()} for row in rows(whole)]
    assert table[0]["charts/kl"] == 0 and table[-1]["charts/kl_k3"] > 1e-4
    ((_, (_, *frozen)),) = made
    for model, fresh in zip(frozen, models[1:]):
        now = {name.replace("base_layer.", ""): x for name, x in model.state_dict().items()}
        assert all(torch.equal(x, now[name]) for name, x in fresh.state_dict().items())
    for (_, *answers), scores in (scored[0], scored[-1]):  # by the reward model, though the critic has learned
        expected = module.get_scores(models[2], *answers)
        torch.testing.assert_close(scores, expected, atol=1e-6, rtol=1e-5)
    weights = sum(x.numel() for x in models[1].parameters())
    saved = module.load_checkpoint(whole)
    assert sum(x.numel() for x in saved["actor"].values()) < weights / 5
    loaded = peft.PeftModel.from_pretrained(models[1], whole / "actor")
    tokens = torch.randint(4, 20, (2, 7))
    torch.testing.assert_close(loaded(tokens).logits, actor(tokens).logits, atol=1e-5, rtol=1e-5)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_in_iteration(4, patch, module)
        module.train(args(**settings))
    (half,) = {*whole.parent.iterdir()} - {whole}
    module.train(resume=half)
    for name in ("actor", "critic", "actor_optimizer", "critic_optimizer"):
        torch.testing.assert_close(module.load_checkpoint(half)[name], saved[name], atol=0, rtol=0)
    evaluated = main(module, "--evaluate", whole, "--eval-episodes=8")
    assert evaluated.returncode == 0 and "KL to the reference 0.000" not in evaluated.stdout

    # The built-in models have just been trained: nothing of that may move them.
    builtin = {"model": None, "reward_model": None, "prompts": None, "supervised_steps": 2, "total_episodes": 8}
    _, run_dir = module.train(args(**settings | builtin))
    _, (_, reference, _) = made[-1]
    now = {name.replace("base_layer.", ""): x for name, x in reference.state_dict().items()}
    saved = module.AutoModelForCausalLM.from_pretrained(run_dir / "supervised").state_dict()
    assert all(torch.equal(x, now[name]) for name, x in saved.items())
