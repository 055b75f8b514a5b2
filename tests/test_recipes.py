"""recipes/: every diff applies to the scripts as they are, is short, and does what its head says."""

import csv
import importlib.util
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, SCRIPTS, SMALL, scalars

from recipes import with_recipes

spec = importlib.util.spec_from_file_location("refresh", ROOT / "recipes" / "refresh.py")
spec.loader.exec_module(refresh := importlib.util.module_from_spec(spec))
sys.path.insert(0, str(ROOT / "benchmark"))
spec = importlib.util.spec_from_file_location("recipes_study", ROOT / "benchmark" / "studies" / "recipes.py")
spec.loader.exec_module(study := importlib.util.module_from_spec(spec))
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.diff"))
LONG = {"exact_resume", "cpu_ranks"}  # what once stood in the scripts


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_applies_and_is_short(name, tmp_path):
    """By `git apply` and by `patch`; the result is as tidy as the scripts. Its head says what, why, for which script,
    and what it changed."""
    path = ROOT / "recipes" / f"{name}.diff"
    head, diff = re.split(r"(?=^diff --git )", path.read_text(), maxsplit=1, flags=re.M)
    assert head.startswith(f"{name}: ") and 4 <= len(head.strip().splitlines()) <= 12
    for word in ("Why: ", "Script", "Source: ", "Run: ", "Result: "):
        assert re.search(f"^{word}|[.] {word}", head, re.M), word
    changed = [line for line in diff.splitlines() if re.match(r"[+-](?![+-]{2} )", line)]
    assert 0 < len(changed) <= (70 if name in LONG else 60)
    assert max(map(len, head.splitlines())) <= 120
    named = re.search(r"^Scripts?: .*", head, re.M)[0].split("Source: ")[0]
    named = SCRIPTS if "all three" in named else re.findall(r"ppo_\w+", named)
    assert re.findall(r"^diff --git a/(ppo_\w+)\.py ", diff, re.M) == sorted(named)
    for folder, command in (("git", ["git", "apply", path]), ("patch", ["patch", "-p1", "-s", "-i", path])):
        (tmp_path / folder).mkdir()
        for script in [*ROOT.glob("ppo_*.py"), ROOT / "pyproject.toml"]:
            shutil.copy(script, tmp_path / folder)
        subprocess.run(command, cwd=tmp_path / folder, check=True)
    for command in (["check"], ["format", "--check"]):
        subprocess.run(["ruff", *command, "."], cwd=tmp_path / "git", check=True, capture_output=True)


def test_recipes_are_short():
    """Half of them change 30 lines or fewer."""
    rows = [refresh.row(ROOT / "recipes" / f"{name}.diff") for name in RECIPES]
    assert len(rows) >= 16 and np.median([int(row.split("|")[4]) for row in rows]) <= 30


def test_results_of_recipes():
    """A Result line has the figures of results/recipes.csv, as benchmark/studies/recipes.py writes them."""
    rows, measured = study.report.read_csv(ROOT / "benchmark" / "results" / "recipes.csv"), 0
    for name in study.CASES:
        if (text := study.sentence(name, rows)) is not None:
            head = " ".join((ROOT / "recipes" / f"{name}.diff").read_text().split("diff --git")[0].split())
            assert f"Result: {text}" in head, name
            measured += 1
    assert measured >= 8


def test_table_of_recipes():
    """recipes/README.md has a row for every recipe, written by refresh.py from their heads."""
    assert refresh.fill_page() == (ROOT / "recipes" / "README.md").read_text()


def small(module, tmp_path, **changes):
    given = {"env_id": "box/Target-v0", "runs_dir": str(tmp_path / "runs"), "total_timesteps": 640}
    return module.Args(**SMALL | given | changes)


def test_state_dependent_std(tmp_path):
    """log_std follows the state. Outside its bounds it is what they say, and is still told where to go."""
    module = with_recipes(tmp_path, "ppo_continuous", "state_dependent_std")
    agent, _ = module.train(small(module, tmp_path, learning_rate=0.01))
    _, log_std = agent.get_mean_and_log_std(torch.randn(8, 2))
    assert log_std.std(0).min() > 0
    for drift, bound in ((0.2, -0.5), (-2.0, -1.5)):
        agent = module.Agent((3,), -np.ones(3, np.float32), np.ones(3, np.float32), module.Args())
        agent.actor[-1].bias.data[3:] += drift
        obs = torch.randn(8, 3)
        torch.testing.assert_close(agent.get_mean_and_log_std(obs)[1].detach(), torch.full((8, 3), bound))
        agent.get_action_and_value(obs)[2].mean().backward()  # the entropy rises by one with every log_std
        torch.testing.assert_close(agent.actor[-1].bias.grad, torch.tensor([0.0] * 3 + [1.0] * 3))


def test_init_from(tmp_path):
    """A new run begins with the weights and statistics of another, and with an optimizer that has made no step."""
    module = with_recipes(tmp_path, "ppo_continuous", "init_from")
    first, run_dir = module.train(small(module, tmp_path))
    still = {"learning_rate": 0.0, "anneal_lr": False, "norm_obs": False, "norm_reward": False}
    second, new_dir = module.train(small(module, tmp_path, init_from=str(run_dir), total_timesteps=64, **still))
    assert new_dir != run_dir
    for name, tensor in second.state_dict().items():
        if name != "log_std_shift":
            torch.testing.assert_close(tensor, first.state_dict()[name], msg=name)
    state = torch.load(new_dir / "checkpoint.pt")["optimizer"]["state"][0]
    assert state["step"] <= SMALL["num_minibatches"] * SMALL["update_epochs"]


def test_evaluate_while_training(tmp_path):
    """The means are those of the saved agents; best.pt is the best of them; nothing that is learned changes."""
    module = with_recipes(tmp_path, "ppo_continuous", "evaluate_while_training")
    args = small(module, tmp_path, eval_interval=3, eval_episodes=5)
    agent, run_dir = module.train(args)
    rows = list(csv.DictReader((run_dir / "evaluations.csv").open()))
    assert [int(row["global_step"]) for row in rows] == [3 * 64, 6 * 64, 9 * 64, 640]
    means = [float(row["mean_return"]) for row in rows]
    assert [value for _, value in scalars(run_dir)["charts/eval_return"]] == pytest.approx(means, rel=1e-5)
    last = module.evaluate(agent, args.env_id, 5, 10_000 + args.seed).mean()
    assert last == pytest.approx(means[-1], rel=1e-5)
    best = module.evaluate(module.load_agent(run_dir / "best.pt"), args.env_id, 5, 10_000 + args.seed).mean()
    assert best == pytest.approx(max(means), rel=1e-5)
    plain = with_recipes(tmp_path, "ppo_continuous")
    other, _ = plain.train(small(plain, tmp_path))
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, agent.state_dict()[name]), name
