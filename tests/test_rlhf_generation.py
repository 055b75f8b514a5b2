"""variants/ppo_rlhf.py: prompts, sampling, padding, and the four models."""

import copy
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from rlhf import EOS, ppo_rlhf, rows, save, stop_in_iteration, transformers

pytest_plugins = "rlhf_fixtures"


def test_left_padding_changes_no_answer(models):
    """Prompts of several lengths, together and one by one: the same likeliest answers."""
    tokenizer, model, _ = models
    prompts = [tokenizer(prompt).input_ids for prompt in ppo_rlhf.BUILTIN_PROMPTS[::5]]
    assert len({len(prompt) for prompt in prompts}) > 1
    sequences, _, mask = ppo_rlhf.generate(model, tokenizer, prompts, do_sample=False)
    together = ppo_rlhf.decode(tokenizer, prompts, sequences, mask)
    tokenizer.clean_up_tokenization_spaces = True  # would decode "soup ?" as "soup?"
    assert ppo_rlhf.decode(tokenizer, prompts, sequences, mask) == together
    for prompt, pair in zip(prompts, together):
        sequences, _, mask = ppo_rlhf.generate(model, tokenizer, [prompt], do_sample=False)
        assert ppo_rlhf.decode(tokenizer, [prompt], sequences, mask) == [pair]


def test_log_probs_are_those_of_what_is_sampled_from(rlhf_args):
    """At a temperature, with a cache and left padding: the numbers of transformers' own `generate`."""
    tokenizer, model, _ = ppo_rlhf.make_models(rlhf_args(temperature=0.6), torch.device("cpu"))
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
def test_sampling_flags(rlhf_args, models, flags):
    """Each of them, at its extreme, leaves only the likeliest token."""
    tokenizer, model, _ = models
    prompts = [tokenizer(prompt).input_ids for prompt in ppo_rlhf.BUILTIN_PROMPTS]
    likeliest, *_ = ppo_rlhf.generate(model, tokenizer, prompts, do_sample=False)
    sampled, *_ = ppo_rlhf.generate(model, tokenizer, prompts)
    assert likeliest.shape == sampled.shape and not torch.equal(likeliest, sampled)
    _, model, _ = ppo_rlhf.make_models(rlhf_args(**flags), torch.device("cpu"))
    sampled, *_ = ppo_rlhf.generate(model, tokenizer, prompts)
    assert torch.equal(likeliest, sampled)


def test_every_prompt_in_every_pass():
    """Whatever the size of the batches, and however many ranks share them."""
    prompts = [[n] for n in range(10)]
    whole = ppo_rlhf.draw_prompts(prompts, 0, 40, seed=1)
    for first in (0, 10, 20, 30):
        assert sorted(whole[first : first + 10]) == prompts
    assert whole[:10] != whole[10:20]
    parts = [ppo_rlhf.draw_prompts(prompts, first, 8, seed=1) for first in range(0, 40, 8)]
    assert [prompt for part in parts for prompt in part] == whole != ppo_rlhf.draw_prompts(prompts, 0, 40, seed=2)


def test_iterations_have_noise_of_their_own(rlhf_args, tmp_path, calls):
    """The same actor answers the same prompt otherwise."""
    (tmp_path / "prompt.txt").write_text("the one prompt")
    one_prompt = {"prompts": str(tmp_path / "prompt.txt"), "actor_learning_rate": 1e-30}
    ppo_rlhf.train(rlhf_args(**one_prompt, total_episodes=16, batch_size=8, num_minibatches=1))
    first, second = (sequences for _, (sequences, *_) in calls["generate"])
    assert first.shape != second.shape or not torch.equal(first, second)


def test_four_models(rlhf_args, models, calls):
    """Two frozen ones, which stay as they were to the bit; two trained ones, which start as these, share nothing with
    them or each other, and take their steps in turn. Their Adam is DeepSpeed-Chat's."""
    actor, run_dir = ppo_rlhf.train(rlhf_args(temperature=0.7))
    assert float(rows(run_dir)[0]["charts/kl"]) == 0  # the actor still is the reference
    ((_, (_, *frozen)),) = calls["make_models"]
    for model, fresh in zip(frozen, models[1:]):
        torch.testing.assert_close(model.state_dict(), fresh.state_dict(), atol=0, rtol=0)
        assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
        assert all(module.p == 0 for module in model.modules() if isinstance(module, torch.nn.Dropout))
    trained = [model for (model, *_), _ in calls["apply_gradient"]]
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
    assert matrices and all(x.dtype == torch.bfloat16 for x in matrices)
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


@pytest.mark.parametrize("kind", ["Mpt", "Gemma3"])
def test_contexts_with_other_names(models, rlhf_args, kind):
    """MPT's configuration has another name for it; where a model takes images too, it is that of the text part."""
    config = transformers.MptConfig(max_seq_len=6)
    if kind == "Gemma3":
        config = transformers.Gemma3Config(text_config={"max_position_embeddings": 6})
    with pytest.raises(ppo_rlhf.UsageError, match="exceed the context of 6"):
        ppo_rlhf.load_prompts(rlhf_args(), *models[:2], SimpleNamespace(config=config))


def test_tokens_beyond_the_embedding(models, rlhf_args, tmp_path):
    """A word added to a tokenizer and not to its model: refused in a prompt, harmless as padding."""
    tokenizer, model, reward_model = models
    added = copy.deepcopy(tokenizer)
    added.add_tokens("soufflé")
    (tmp_path / "prompts.txt").write_text("soufflé\n", encoding="utf-8")
    args = rlhf_args(prompts=str(tmp_path / "prompts.txt"))
    message = f"line 1: the prompt has token {len(tokenizer)}, but a model has only"
    with pytest.raises(ppo_rlhf.UsageError, match=message):
        ppo_rlhf.load_prompts(args, added, model, reward_model)
    added.add_special_tokens({"pad_token": "[PAD]"})
    for name, each in (("model", model), ("reward", reward_model)):
        save(each, added, tmp_path / name)
    folders = {"model": str(tmp_path / "model"), "reward_model": str(tmp_path / "reward")}
    loaded, actor, _ = ppo_rlhf.make_models(ppo_rlhf.Args(**folders), torch.device("cpu"))
    sequences, *_ = ppo_rlhf.generate(actor, loaded, [[4], [4, 5, 6]])
    assert sequences.max() < model.config.vocab_size


def test_every_end_token_ends_an_answer(models, model_folders, rlhf_args, tmp_path):
    """Those that generation_config.json names, as a number or a list, and the tokenizer's. The log counts them all."""
    tokenizer, *_ = models
    second = tokenizer.convert_tokens_to_ids("is")
    for named, ends in ((second, {EOS, second}), ([second], {EOS, second}), (None, {EOS})):
        shutil.copytree(model_folders / "model", tmp_path / "model", dirs_exist_ok=True)
        (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
        args = rlhf_args(model=str(tmp_path / "model"), total_episodes=8)
        loaded, model, _ = ppo_rlhf.make_models(args, torch.device("cpu"))
        torch.manual_seed(0)
        sequences, _, mask = ppo_rlhf.generate(model, loaded, [[4, 5]] * 100)
        for answer, length in zip(sequences[:, 2:].tolist(), mask.sum(-1).tolist()):
            assert not ends.intersection(answer[: length - 1]) and (length == 6 or answer[length - 1] in ends)
        assert (sequences[:, 2:] == second).any()
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [*range(20)]}))
    _, run_dir = ppo_rlhf.train(args)
    assert float(rows(run_dir)[0]["charts/ended"]) > 0.9


def test_actor_is_saved_as_the_model_came(models, model_folders, rlhf_args, tmp_path):
    """In its dtype, with its own settings of sampling, which the run does not use; at every checkpoint."""
    shutil.copytree(model_folders / "model", tmp_path / "model")
    own = {"eos_token_id": [0, 4], "temperature": 0.3, "top_k": 7, "repetition_penalty": 5.0, "do_sample": True}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").to(torch.bfloat16)
    model.generation_config = transformers.GenerationConfig(**own)
    model.save_pretrained(tmp_path / "model")
    args = rlhf_args(model=str(tmp_path / "model"), checkpoint_interval=2, total_episodes=24)
    _, reference, _ = ppo_rlhf.make_models(args, torch.device("cpu"))
    assert reference.dtype == torch.float32 and reference.generation_config.repetition_penalty != 5.0
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        stop_in_iteration(3, patch)
        ppo_rlhf.train(args)
    (run_dir,) = (tmp_path / "runs").iterdir()
    saved = transformers.AutoModelForCausalLM.from_pretrained(run_dir / "actor")
    assert saved.dtype == torch.bfloat16
    assert {name: getattr(saved.generation_config, name) for name in own} == own
    learned = ppo_rlhf.load_checkpoint(run_dir)
    assert learned["iteration"] == 2
    for name, tensor in saved.state_dict().items():
        assert torch.equal(tensor, learned["actor"][name].bfloat16())


def test_prompts_that_end_the_text(models, rlhf_args, tmp_path, capsys):
    tokenizer, model, reward_model = models
    (tmp_path / "prompts.txt").write_text(f"soup {tokenizer.eos_token}\n")
    ppo_rlhf.load_prompts(rlhf_args(prompts=str(tmp_path / "prompts.txt")), tokenizer, model, reward_model)
    assert "prompts end with EOS" in capsys.readouterr().err
