"""Fixtures of the tests of variants/ppo_rlhf.py: tiny models on disk, small runs, one run that has learned."""

import os

import pytest
import torch
from filelock import FileLock
from rlhf import SMALL, ppo_rlhf, save


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory):
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
def rlhf_args(model_folders, tmp_path):
    """A function that gives Args of a run that takes a second: rlhf_args(gamma=0.9)."""

    def make(**changes):
        names = {"model": "model", "reward_model": "reward", "prompts": "prompts.txt"}
        names = {name: str(model_folders / path) for name, path in names.items()} | {"runs_dir": str(tmp_path / "runs")}
        return ppo_rlhf.Args(**(names | {"actor_learning_rate": 1e-3} | SMALL | changes))

    return make


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The built-in task, for ten seconds: the run folder. One process of pytest-xdist trains, others wait for it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with FileLock(folder / "rlhf.lock"):
        if not (folder / "rlhf").exists():
            settings = {"supervised_steps": 150, "total_episodes": 64 * 16, "batch_size": 64}
            ppo_rlhf.train(ppo_rlhf.Args(**settings, runs_dir=str(folder / "rlhf")))
    (run_dir,) = (folder / "rlhf").iterdir()
    return run_dir


@pytest.fixture
def models(rlhf_args):
    """Tokenizer, language model and reward model of the folders."""
    return ppo_rlhf.make_models(rlhf_args(), torch.device("cpu"))


@pytest.fixture
def calls(watch):
    """{name of a function of the script: its calls from now on, [(arguments, result), ...]}"""
    names = ["make_models", "generate", "get_log_probs", "get_scores", "compute_rewards", "compute_advantages"]
    names += ["clipped_policy_loss", "clipped_value_loss", "apply_gradient"]
    return {name: watch(ppo_rlhf, name) for name in names}
