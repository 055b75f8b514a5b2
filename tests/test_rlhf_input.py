"""variants/ppo_rlhf.py: the command line, and one line for what users may give by mistake."""

import importlib.util
import sys

import pytest
import torch
from conftest import ROOT, flags_of
from rlhf import ppo_rlhf, save, transformers

pytest_plugins = "rlhf_fixtures"


def test_a_sweep_command_line():
    """As `wandb sweep` builds it."""
    line = "--track=False --kl_coef=0.1 --model=None --kl_target=6 --batch_size=64.0"
    args = ppo_rlhf.parse_args([*line.split(), "--total-episodes", "1e3", "--anneal_lr=false"])
    assert (args.track, args.kl_coef, args.model, args.kl_target) == (False, 0.1, None, 6.0)
    assert (args.batch_size, args.total_episodes, args.anneal_lr) == (64, 1000, False)
    assert ppo_rlhf.parse_args([]) == ppo_rlhf.Args()


@pytest.fixture
def others(model_folders, tmp_path):
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
def test_bad_input(rlhf_args, model_folders, others, case, main):
    changes, message = BAD[case]
    flags = {name: value for name, value in (vars(rlhf_args()) | changes).items() if value is not None}
    flags = [x.replace("HERE", str(others)).replace("FOLDERS", str(model_folders)) for x in flags_of(**flags)]
    refused = main(ppo_rlhf, *flags)
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1, refused.stderr
    assert refused.stderr.startswith("ppo_rlhf.py: error: ") and message in refused.stderr
    assert not (others / "runs").exists()


DAMAGE = {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:1000]),
    "another program's": lambda path: torch.save({"model": torch.zeros(3)}, path),
    "a pickle that would run code": lambda path: torch.save({"actor": print}, path),
    "of another script": lambda path: torch.save({"agent": {}, "args": {"num_envs": 3}}, path),
}


def test_damaged_checkpoint(rlhf_args, main):
    _, run_dir = ppo_rlhf.train(rlhf_args(total_episodes=8))
    path = run_dir / "checkpoint.pt"
    whole = path.read_bytes()
    for name, damage in DAMAGE.items():
        damage(path)
        for flag in ("--resume", "--evaluate"):
            refused = main(ppo_rlhf, flag, run_dir)
            assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1, (name, refused.stderr)
            assert "checkpoint.pt" in refused.stderr
        path.write_bytes(whole)
    refused = main(ppo_rlhf, "--resume", run_dir, "--batch-size=4")
    assert refused.returncode == 2 and f"--batch-size 4: {run_dir} began with 8" in refused.stderr


def test_without_transformers(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    spec = importlib.util.spec_from_file_location("alone", ROOT / "variants" / "ppo_rlhf.py")
    with pytest.raises(SystemExit) as exit:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert exit.value.code == 2 and "pip install -r variants/requirements.txt" in capsys.readouterr().err
