"""recipes/: every diff applies to the scripts as they are. Most train, resume and load here."""

import dataclasses
import importlib.util
import re
import shutil
import subprocess

import pytest
import torch
from conftest import REAL_ENV, ROOT, SCRIPTS, SMALL, scalars

from recipes import TEN, copy_scripts, with_recipes

spec = importlib.util.spec_from_file_location("refresh", ROOT / "recipes" / "refresh.py")
spec.loader.exec_module(refresh := importlib.util.module_from_spec(spec))
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.diff"))


def scripts_of(name):
    """Those that a recipe changes."""
    text = (ROOT / "recipes" / f"{name}.diff").read_text()
    return re.findall(r"^diff --git a/(?:variants/)?(ppo_\w+)\.py ", text, re.M)


# Other tests train these. Their diffs leave the agent as it is.
TRAINED = "time_limits_as_ends", "evaluate_while_training", "exact_resume", "init_from", "torchrun", "unguarded_update"
PATCHED = [(script, name) for name in RECIPES for script in scripts_of(name)]
PATCHED = [(script, name) for script, name in PATCHED if script in SCRIPTS and name not in TRAINED]  # others: variants
# name: environment and arguments of the ten iterations, if they are not REAL_ENV's
SETTINGS = {
    "squashed_gaussian": ("box/Target-v0", {}),
    "gsde": ("InvertedPendulum-v4", {"sde_sample_freq": 4}),
    "beta_policy": ("box/Target-v0", {}),
    "privileged_critic": ("recipes/TwoViews-v0", {}),
    "image_box": ("recipes/Picture-v0", {"num_steps": 4}),
    "dict_observations_box": ("box/TwoSenses-v0", {"num_steps": 4}),
    "layer_norm": ("InvertedPendulum-v4", {"hidden_sizes": (32, 32)}),
    "symmetry_loss": ("Walker2d-v5", {}),
    "sb3_clip_ranges": ("InvertedPendulum-v4", {"clip_range_vf": 0.2, "anneal_clip": True}),
    "dict_observations": ("discrete/TwoSenses-v0", {"num_steps": 4}),
    "rnd": ("discrete/Target-v0", {}),
    "self_play": ("Counted-v0", {"opponent_interval": 4}),
    "shared_parameters": ("recipes:parallel_env", {"num_envs": 6}),
    "images_with_memory": ("recipes/Flash-v0", {"num_steps": 4}),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_applies(name, tmp_path):
    """By `git apply` and by `patch`; the result is as tidy as the scripts. Its head says for which."""
    path = ROOT / "recipes" / f"{name}.diff"
    head = path.read_text().partition("diff --git ")[0]
    named = re.search(r"^Scripts?: .*", head, re.M)[0].split("Source: ")[0]
    named = SCRIPTS if "all three" in named else re.findall(r"ppo_\w+", named)
    assert scripts_of(name) == sorted(named)
    for folder, command in (("git", ["git", "apply", path]), ("patch", ["patch", "-p1", "-s", "-i", path])):
        copy_scripts(tmp_path / folder)
        shutil.copy(ROOT / "pyproject.toml", tmp_path / folder)
        subprocess.run(command, cwd=tmp_path / folder, check=True)
    for command in (["check"], ["format", "--check"]):
        subprocess.run(["ruff", *command, "."], cwd=tmp_path / "git", check=True, capture_output=True)


def test_table_of_recipes():
    """recipes/README.md has a row for every recipe, written by refresh.py from their heads."""
    assert refresh.fill_page() == (ROOT / "recipes" / "README.md").read_text()


@pytest.mark.parametrize("script, name", PATCHED)
def test_trains_resumes_and_loads(tmp_path, script, name):
    """Ten iterations and two more after a resumption. The ratio of every first minibatch is 1: none is clipped, though
    clipping begins 1e-4 from it. The saved agent acts."""
    module = with_recipes(script, name)
    env_id, changes = SETTINGS.get(name, (REAL_ENV[script], {"clip_vloss": True}))
    args = module.Args(env_id=env_id, runs_dir=str(tmp_path), **(SMALL | changes))
    steps = 10 * args.num_envs * args.num_steps
    first = {"clip_coef": 1e-4, "num_minibatches": 1, "update_epochs": 1, "total_timesteps": steps}
    _, run_dir = module.train(dataclasses.replace(args, **first))
    assert [share for _, share in scalars(run_dir)["losses/clipfrac"]] == [0.0] * 10
    agent, _ = module.train(dataclasses.replace(args, total_timesteps=steps * 12 // 10), resume=run_dir)
    assert scalars(run_dir)["losses/approx_kl"][-1][1] > 0
    loaded = module.load_agent(run_dir)
    for key, value in agent.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[key], value, rtol=0, atol=0)
    assert len(module.evaluate(loaded, module.load_args(run_dir), 1)) == 1


STACKS = [
    ("ppo_discrete", "Counted-v0", ["time_limits_as_ends", "rnd", "self_play"]),
    (
        "ppo_continuous",
        "Wanderer-v0",
        ["time_limits_as_ends", "exact_resume", "evaluate_while_training", "sb3_clip_ranges"],
    ),
]


@pytest.mark.parametrize("script, env_id, recipes", STACKS)
def test_they_stack(script, env_id, recipes, tmp_path):
    """Recipes that change other lines apply one on top of the other, in either order, and train ten iterations."""
    with_recipes(script, *reversed(recipes))
    script = with_recipes(script, *recipes)
    _, run_dir = script.train(script.Args(**TEN, env_id=env_id, runs_dir=str(tmp_path)))
    assert script.load_checkpoint(run_dir)["global_step"] == 640
