"""What README and the scripts say about themselves is so."""

import ast
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, SCRIPTS, SMALL, flags_of, scalars

README = (ROOT / "README.md").read_text()


def requirements(path):
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return {line for line in lines if line}


def test_script_header_agrees_with_requirements(script):
    """PEP 723: what `uv run` installs is what requirements.txt says, every entry with a lower and an upper bound."""
    block = re.search(r"^# /// script\n(.*?)^# ///$", (ROOT / f"{script.__name__}.py").read_text(), re.M | re.S)[1]
    header = set(re.findall(r'"(.+)",', block.split("dependencies")[1]))
    assert header == requirements(ROOT / "requirements.txt")
    for requirement in header | requirements(ROOT / "tests" / "requirements.txt"):
        assert re.fullmatch(r"[\w\[\]-]+>=[\d.]+,<[\d.]+", requirement), requirement


def test_metric_table_lists_what_is_logged(script, small_args):
    _, run_dir = script.train(small_args())
    table = README.split("## Metrics")[1].split("## ")[0]
    assert set(re.findall(r"^\| `(\S+)`", table, re.M)) == set(scalars(run_dir))


def test_readme_commands_have_the_flags_they_use(script):
    """Every command line of the script in README and in its docstring parses."""
    commands = re.findall(rf"python {script.__name__}\.py([^\n#&`]*)", README + script.__doc__)
    assert len(commands) >= 8
    for command in commands:
        if "--help" not in command:
            script.parse_args(command.split())


def test_readme_gives_cleanrl_settings(script):
    """The flags in README leave CleanRL's ppo_continuous_action.py defaults (commit fe8d8a0)."""
    if script.__name__ != "ppo_continuous":
        pytest.skip("of ppo_continuous.py")
    (command,) = re.findall(r"ppo_continuous\.py (--num-envs 1 .*)", README)
    args = script.parse_args(command.split())
    cleanrl = {"learning_rate": 3e-4, "num_envs": 1, "num_steps": 2048, "anneal_lr": True, "gamma": 0.99}
    cleanrl |= {"gae_lambda": 0.95, "num_minibatches": 32, "update_epochs": 10, "norm_adv": True, "clip_coef": 0.2}
    cleanrl |= {"clip_vloss": True, "vf_clip_coef": None, "ent_coef": 0.0, "vf_coef": 0.5, "max_grad_norm": 0.5}
    cleanrl |= {
        "target_kl": None,
        "log_std_init": 0.0,
        "total_timesteps": 1_000_000,
        "seed": 1,
        "env_id": "HalfCheetah-v4",
    }
    cleanrl |= {"norm_obs": True, "norm_reward": True, "recompute_advantages": False, "state_dependent_std": False}
    assert {name: getattr(args, name) for name in cleanrl} == cleanrl


def test_readme_snippet_acts(script, small_args, monkeypatch):
    """The Python block of README, on a run of the test."""
    import gymnasium as gym

    args = small_args()
    _, run_dir = script.train(args)
    (block,) = re.findall(r"```python\n(.*?)```", README, re.S)
    namespace = {"env": gym.make(args.env_id)}
    exec(block.replace("runs/NAME", str(run_dir)), namespace)
    assert isinstance(namespace["reward"], float)


def test_alone_in_an_empty_folder(script, tmp_path):
    """The script needs no other file and leaves nothing but its run folder. In training as in evaluation stderr has
    nothing but gymnasium's note that v4 is out of date, two lines."""
    shutil.copy(ROOT / f"{script.__name__}.py", tmp_path)

    def run_alone(*flags):
        command = [sys.executable, "-P", f"{script.__name__}.py", *map(str, flags)]
        finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert finished.returncode == 0, finished.stderr
        assert {path.name for path in tmp_path.iterdir()} == {f"{script.__name__}.py", "runs"}
        assert len(finished.stderr.strip().splitlines()) <= 2, finished.stderr

    run_alone(*flags_of(env_id="HalfCheetah-v4", **SMALL))
    (run_dir,) = (tmp_path / "runs").iterdir()
    run_alone("--evaluate", run_dir, "--eval-episodes=1")


def test_importing_does_nothing(script, tmp_path):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {script.__name__}; assert 'wandb' not in sys.modules"
    finished = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


def test_same_phases_in_the_same_order(script):
    text = (ROOT / f"{script.__name__}.py").read_text()
    phases = ["setup", "storage", "rollout", "advantages", "update", "log", "checkpoint"]
    assert re.findall(r"# -{20,} (.+)", text) == phases


def test_every_flag_is_explained(script):
    """tyro takes the comment behind a field as its help; a field without one shows none."""
    tree = ast.parse((ROOT / f"{script.__name__}.py").read_text())
    lines = (ROOT / f"{script.__name__}.py").read_text().splitlines()
    (args,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"]
    for field in args.body:
        assert "  # " in lines[field.lineno - 1], lines[field.lineno - 1]
    shown = subprocess.run(
        [sys.executable, str(ROOT / f"{script.__name__}.py"), "--help"], capture_output=True, text=True
    )
    assert shown.returncode == 0 and "discount factor" in shown.stdout


def test_top_level_holds_scripts_only():
    assert {path.stem for path in ROOT.glob("*.py")} == set(SCRIPTS)
