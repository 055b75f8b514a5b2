"""What README, docs/ and the scripts say about themselves is so."""

import ast
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import REAL_ENV, ROOT, SCRIPTS, SMALL, flags_of, scalars

import ppo_continuous
import ppo_discrete
import ppo_rnn

README = (ROOT / "README.md").read_text()
DOCS = {path.stem: path.read_text() for path in (ROOT / "docs").glob("*.md")}
PAGES = "\n".join([README, *(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))])  # with notes/


def requirements(path):
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return {line for line in lines if line}


def header(name):
    """The requirements in the PEP 723 header of a script, which are what `uv run` installs."""
    block = re.search(r"^# /// script\n(.*?)^# ///$", (ROOT / f"{name}.py").read_text(), re.M | re.S)[1]
    return set(re.findall(r'"([^"]+)"', block.split("dependencies")[1]))


def test_headers_agree_with_requirements():
    """That of a script is requirements.txt, those of variants are parts of it and of theirs. Every entry has a lower
    and an upper bound."""
    every = requirements(ROOT / "requirements.txt")
    for script in SCRIPTS:
        assert header(script) == every
    for variant in ("ppo_gpu_sim", "ppo_rlhf"):
        assert header(f"variants/{variant}") <= every | requirements(ROOT / "variants" / "requirements.txt")
    for requirement in every | requirements(ROOT / "tests" / "requirements.txt"):
        assert re.fullmatch(r"[\w\[\],-]+>=[\d.]+,<[\d.]+", requirement), requirement


def test_metric_table_lists_what_is_logged(script, small_args):
    _, run_dir = script.train(small_args())
    assert set(re.findall(r"^\| `(\S+)`", DOCS["metrics"], re.M)) == set(scalars(run_dir))


def test_readme_is_short_and_quotes_the_loop():
    """The loop that README shows is that of ppo_continuous.py, line by line."""
    assert len(README.splitlines()) <= 150
    (block,) = re.findall(r"```python\n(.*?)```", README, re.S)
    lines = [line and " " * 8 + line for line in block.splitlines()]
    assert len(lines) > 30 and "\n".join(lines) in (ROOT / "ppo_continuous.py").read_text()


def test_pages_link_to_each_other(tmp_path):
    """mkdocs finds every page, picture and link; no list or table is left as text; README's links lead to files."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert (tmp_path / "results" / "index.html").is_file()
    for page in tmp_path.rglob("*.html"):
        for paragraph in re.findall(r"<p>(.*?)</p>", page.read_text(), re.S):
            assert not re.search(r"^(- |\d+\. |\|)", paragraph, re.M), paragraph
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link


def test_commands_have_the_flags_they_use(script):
    """Every command line of the script in README, in docs/ and in its docstring parses, torchrun's too."""
    starts = r"(?:python|torchrun [^\n`]*?)"
    commands = re.findall(rf"{starts} {script.__name__}\.py((?! FLAGS)[^\n#&`]*)", PAGES + script.__doc__)
    assert len(commands) >= 8
    for command in commands:
        if "--help" not in command:
            script.parse_args(shlex.split(command))


def test_commands_of_the_benchmark_parse():
    """Those of run.py and tune.py in docs/ and their docstrings; what follows `--` is for the script."""
    sys.path.insert(0, str(ROOT / "benchmark"))
    import report
    import run
    import tune
    import tyro

    commands = re.findall(r"python benchmark/report\.py( [^\n#`]*)", PAGES + report.__doc__)
    assert len(commands) >= 8
    for command in commands:
        tyro.cli(report.Args, args=command.split())
    for tool, fewest in ((run, 10), (tune, 4)):
        commands = re.findall(rf"python benchmark/{tool.__name__}\.py( [^\n#`]*)", PAGES + tool.__doc__)
        assert len(commands) >= fewest
        for command in commands:
            words, _, flags = command.partition(" -- ")
            args = tyro.cli(tool.Args, args=words.split())
            if tool is run:
                assert run.make_jobs(args, flags.replace("cuda", "cpu").split())  # refused where there is none
            else:
                assert (ROOT / args.sweep).is_file()


# CleanRL's defaults (commit fe8d8a0) in the names of Args: what its three scripts have in common, and what not.
CLEANRL = {"seed": 1, "anneal_lr": True, "gamma": 0.99, "gae_lambda": 0.95, "norm_adv": True, "clip_vloss": True}
CLEANRL |= {"vf_clip_coef": None, "vf_coef": 0.5, "kl_coef": 0.0, "max_grad_norm": 0.5, "target_kl": None}
CLEANRL |= {"recompute_advantages": False}
CLASSIC = {"env_id": "CartPole-v1", "total_timesteps": 500_000, "num_envs": 4, "num_steps": 128}
CLASSIC |= {"learning_rate": 2.5e-4, "num_minibatches": 4, "update_epochs": 4, "clip_coef": 0.2, "ent_coef": 0.01}
CLASSIC |= {"norm_obs": False, "norm_reward": False, "clip_reward": False}
ATARI = CLASSIC | {"env_id": "ALE/Breakout-v5", "total_timesteps": 10_000_000, "num_envs": 8, "clip_coef": 0.1}
ATARI |= {"norm_obs": True, "clip_reward": True}  # norm_obs leaves images alone
MUJOCO = {"env_id": "HalfCheetah-v4", "total_timesteps": 1_000_000, "num_envs": 1, "num_steps": 2048}
MUJOCO |= {"learning_rate": 3e-4, "num_minibatches": 32, "update_epochs": 10, "clip_coef": 0.2, "ent_coef": 0.0}
MUJOCO |= {"norm_obs": True, "norm_reward": True, "log_std_init": 0.0, "log_std_min": None, "log_std_max": None}
MUJOCO |= {"anneal_std": False}


@pytest.mark.parametrize(
    "script, original, settings",
    [
        ("ppo_continuous", "ppo_continuous_action.py", MUJOCO),
        ("ppo_discrete", "ppo.py", CLASSIC),
        ("ppo_discrete", "ppo_atari.py", ATARI),
    ],
    indirect=["script"],
)
def test_flags_that_give_cleanrl_settings(script, original, settings):
    """The flags in docs/choices.md leave the defaults of CleanRL's script."""
    (command,) = re.findall(rf"{script.__name__}\.py(.*)  # {original}", DOCS["choices"])
    args = vars(script.parse_args(command.split()))
    assert {name: args[name] for name in CLEANRL | settings} == CLEANRL | settings


def test_table_of_defaults():
    """That of docs/choices.md, for the three scripts and for ALE games."""
    rows = re.findall(r"^\| `--([\w-]+)` \| (.*) \|$", DOCS["choices"], re.M)
    assert len(rows) == 20
    columns = ppo_continuous.Args, ppo_discrete.Args, ppo_discrete.Args(**ppo_discrete.ATARI), ppo_rnn.Args
    for name, cells in rows:
        for args, cell in zip(columns, cells.split(" | "), strict=True):
            shown = {"on": True, "off": False, "none": None, "64 64": (64, 64)}
            assert getattr(args, name.replace("-", "_")) == (shown[cell] if cell in shown else float(cell)), name
    memory = ppo_rnn.Args
    assert (memory.cell, memory.hidden_size, memory.separate_critic_rnn) == ("lstm", 128, False)


@pytest.mark.parametrize("script", ["ppo_continuous", "ppo_discrete"], indirect=True)
def test_snippet_acts(script, small_args):
    """The Python block of docs/running.md, on a run of the test."""
    args = small_args()
    _, run_dir = script.train(args)
    block = re.findall(r"```python\n(.*?)```", DOCS["running"], re.S)[0]
    for word, own in (("runs/NAME", run_dir), ("ppo_continuous", script.__name__), ("HalfCheetah-v4", args.env_id)):
        assert word in block
        block = block.replace(word, str(own))
    namespace = {}
    exec(block, namespace)
    assert isinstance(namespace["reward"], float)


@pytest.mark.parametrize("script", ["ppo_continuous"], indirect=True)
def test_snippet_exports(script, small_args, tmp_path):
    """The exported file gives the actions of the agent, for any number of observations."""
    agent, run_dir = script.train(small_args(env_id="Hopper-v4"))
    block = re.findall(r"```python\n(.*?)```", DOCS["running"], re.S)[1]
    exec(block.replace("runs/NAME", str(run_dir)).replace("agent.pt2", f"{tmp_path}/agent.pt2"), {})
    policy = torch.export.load(tmp_path / "agent.pt2").module()
    for rows in (1, 5):
        raw_obs = 3 * torch.randn(rows, 11)
        np.testing.assert_allclose(policy(raw_obs).numpy(), agent.predict(raw_obs.numpy()), atol=1e-6)


def test_snippet_trains(tmp_path):
    """The Python block of docs/your-environment.md, shorter and in another folder."""
    (block,) = re.findall(r"```python\n(.*?)```", DOCS["your-environment"], re.S)
    assert block.count("200_000") == 1
    namespace = {}
    exec(block.replace("200_000", f"2000, runs_dir={str(tmp_path)!r}, compile=False"), namespace)
    assert (namespace["run_dir"] / "checkpoint.pt").is_file() and namespace["run_dir"].parent == tmp_path


def test_alone_in_an_empty_folder(script, tmp_path):
    """The script needs no other file and leaves nothing but its run folder. In training as in evaluation stderr has
    nothing but gymnasium's note that an environment is out of date, two lines."""
    shutil.copy(ROOT / f"{script.__name__}.py", tmp_path)

    def run_alone(*flags):
        command = [sys.executable, "-P", f"{script.__name__}.py", *map(str, flags)]
        finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert finished.returncode == 0, finished.stderr
        assert {path.name for path in tmp_path.iterdir()} == {f"{script.__name__}.py", "runs"}
        assert len(finished.stderr.strip().splitlines()) <= 2, finished.stderr

    env_id = "HalfCheetah-v4" if script.__name__ == "ppo_continuous" else REAL_ENV[script.__name__]
    run_alone(*flags_of(env_id=env_id, **SMALL))
    (run_dir,) = (tmp_path / "runs").iterdir()
    run_alone("--evaluate", run_dir, "--eval-episodes=1")


def test_importing_does_nothing(script, tmp_path):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {script.__name__}; assert 'wandb' not in sys.modules"
    finished = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


def test_same_phases_in_the_same_order(script):
    text = (ROOT / f"{script.__name__}.py").read_text()
    parts = ["agent", "advantages and losses", "train", "services: no PPO from here to the end"]
    phases = ["set-up", "storage", "rollout", "advantages", "update", "log and save"]
    assert re.findall(r"# ={20,} (.+)", text) == parts
    assert re.findall(r"# -{20,} (.+)", text) == phases
    assert all(f"*{phase}*" in DOCS["your-environment"].replace("\n", " ") for phase in phases)


def test_every_flag_is_explained(script, main):
    """tyro takes the comment behind a field as its help; a field without one shows none."""
    text = (ROOT / f"{script.__name__}.py").read_text()
    lines = text.splitlines()
    (args,) = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == "Args"]
    for field in args.body:
        assert "  # " in lines[field.lineno - 1], lines[field.lineno - 1]
    shown = main(script, "--help")
    assert shown.returncode == 0 and "discount factor" in shown.stdout


def test_top_level_holds_scripts_only():
    assert {path.stem for path in ROOT.glob("*.py")} == set(SCRIPTS)
