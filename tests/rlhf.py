"""What the tests of variants/ppo_rlhf.py share: the script, its logs, what makes a run small."""

import csv

import pytest

transformers = pytest.importorskip(
    "transformers", reason="variants/ppo_rlhf.py is not tested: pip install -r variants/requirements.txt"
)
import ppo_rlhf  # noqa: E402

EOS = 0  # of the built-in tokenizer, which pads with it too
SMALL = {"supervised_steps": 2, "total_episodes": 32, "batch_size": 8, "num_minibatches": 2, "response_length": 6}


def save(model, tokenizer, folder):
    """As users have it, for --model or --reward-model."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def rows(run_dir):
    with open(run_dir / "metrics.csv") as file:
        return list(csv.DictReader(file))


def stop_in_iteration(number, patch, module=ppo_rlhf):
    """Ctrl-C in the rollout of that iteration of a run that has not begun yet; patch: pytest's monkeypatch."""
    original, calls = module.generate, []

    def generate(*arguments):
        calls.append(1)
        if len(calls) == number:
            raise KeyboardInterrupt
        return original(*arguments)

    patch.setattr(module, "generate", generate)
