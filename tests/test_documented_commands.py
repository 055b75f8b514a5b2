"""Commands of the scripts, of git and of a few tools in README.md, CONTRIBUTING.md, docs/, recipes/ and the docstrings
run with a small budget, or have the flags that they use. Tools of the benchmark have separate tests."""

import ast
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SCRIPTS, SMALL, flags_of

PAGES = ["README.md", "CONTRIBUTING.md", "docs/*.md", "recipes/README.md", "ppo_*.py", "variants/*.py"]
PAGES = [path for pattern in [*PAGES, "benchmark/*.py", "recipes/*.py"] for path in sorted(ROOT.glob(pattern))]
PROGRAM = r"(?:python|torchrun|git|cp|diff|patch)"
# What needs an account, minutes or a package, and what the tests of each script do: test_wandb.py, test_video.py,
# test_suites.py, test_resume.py, test_evaluate.py and others test these.
ELSEWHERE = r"--track|--capture-video|LunarLander|(minigrid|minatar|envpool|process)_envs|popgym|shimmy|brax/"
ELSEWHERE += r"|--preset cleanrl$|(?<!rlhf\.py) --resume|--evaluate|--export|--help"

# Flags of a small run. They come before the words of the command, whose own numbers count.
BUDGETS = dict.fromkeys(SCRIPTS, flags_of(**SMALL | {"num_steps": 4, "update_epochs": 1}))
BUDGETS["ppo_atari"] = flags_of(num_envs=1, num_steps=4, num_minibatches=2, update_epochs=1, compile=False)
BUDGETS["ppo_gpu_sim"] = flags_of(env_id="my_robot:make_envs", num_envs=16, num_steps=10, compile=False, device="cpu")
BUDGETS["ppo_rlhf"] = flags_of(supervised_steps=2, batch_size=8, response_length=6, device="cpu")
# What comes after the words.
LENGTHS = dict.fromkeys(BUDGETS, "--total-timesteps=320")
LENGTHS |= {"ppo_atari": "--total-timesteps=16", "ppo_rlhf": "--total-episodes=32"}

# These run in a copy of the repository, one after the other.
FOR_A_COPY = r"git|cp|diff|patch|python (recipes/refresh|tests/test_parity)\.py|python benchmark/compare\.py before"
# What stands for the reader's own words. layer_norm is a recipe that has a head, without which refresh.py fails.
OWN_WORDS = {"COMMIT": "HEAD", "NAME": "layer_norm"}


def commands_of(path):
    """The lines and the inline code that begin with a program, without comments. `a && b` is two commands."""
    text = path.read_text()
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    text = re.sub(r"^```(python|diff)\n.*?^```", "", text, flags=re.M | re.S)
    lines = [re.sub(r"\s+#.*", "", line) for line in re.findall(rf"^(?:    )?({PROGRAM} .+)", text, re.M)]
    inline = [code for code in re.findall(rf"`({PROGRAM}\s[^`]+)`", text) if "." in code or len(code.split()) > 2]
    return [" ".join(command.split()) for line in [*lines, *inline] for command in line.split(" && ")]


def script_of(command):
    found = re.match(rf"(?:python|torchrun .*?) (?:variants/)?({'|'.join(BUDGETS)})\.py\b", command)
    return found and found[1]


SHOWN = {path.relative_to(ROOT).as_posix(): commands_of(path) for path in PAGES}
COMMANDS = dict.fromkeys(command for commands in SHOWN.values() for command in commands)
WITH_SCRIPT = [command for command in COMMANDS if script_of(command)]
OF_SCRIPTS = [x for x in WITH_SCRIPT if x.startswith("python") and not re.search(ELSEWHERE, x)]
NOT_RUN = [command for command in WITH_SCRIPT if command not in OF_SCRIPTS]
OF_A_COPY = [command for command in COMMANDS if re.match(rf"({FOR_A_COPY})\b", command)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's folder, with what the commands need that is not in the repository."""
    page = (ROOT / "docs" / "your-environment.md").read_text()
    (tmp_path / "my_module.py").write_text(re.findall(r"```python\n(.*?)```", page, re.S)[0])
    (tmp_path / "my_robot.py").write_text("from torch_envs import drift as make_envs\n")
    (tmp_path / "my_rewards.py").write_text("def score(prompts, answers):\n    return [len(x) for x in answers]\n")
    (tmp_path / "prompts.txt").write_text("how is the soup ?\ntell us about the cake please .\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [x for x in sys.path if x])  # the scripts add the current folder themselves
    yield tmp_path
    for name in ("my_module", "my_robot", "my_rewards"):
        sys.modules.pop(name, None)  # the next test has a file of its own under this name


@pytest.mark.parametrize("command", OF_SCRIPTS)
def test_command_of_a_script(command, folder, main):
    """It ends without an error. Where it needs a finished run, there is one."""
    pages = ", ".join(page for page, commands in SHOWN.items() if command in commands)
    name = script_of(command)
    if name == "ppo_rlhf":
        pytest.importorskip("transformers", reason="transformers is not installed")
    script = importlib.import_module(name)
    if re.search("runs/NAME|--model", command):  # only of ppo_rlhf.py
        finished = main(script, *BUDGETS[name], "--total-episodes=16")
        assert finished.returncode == 0, finished.stderr
        (run_dir,) = folder.glob("runs/*")
        command = command.replace("runs/NAME", str(run_dir))
        command = command.replace("--model A", f"--model {run_dir}/supervised")
        command = command.replace("--reward-model B", f"--reward-model {run_dir}/reward")
    words = shlex.split(command.partition(".py")[2].replace(" FLAGS", ""))
    length = "--total-timesteps=2048" if "--num-steps 2048" in command else LENGTHS[name]
    finished = main(script, *BUDGETS[name], *words, length)
    assert finished.returncode == 0, f"{pages}: {command}: {finished.stderr}"


@pytest.mark.parametrize("command", NOT_RUN)
def test_flags_of_a_command_that_is_not_run(command, folder):
    script = pytest.importorskip(script_of(command))
    run = r"--(?:resume|evaluate|export) (\S+)"
    assert {*re.findall(run, command)} <= {"latest", "runs/NAME"}
    assert "--export" not in command or script.__name__ == "ppo_gpu_sim"
    words = re.sub(rf"{run}|--help| FLAGS", "", command.partition(".py")[2])
    settings = {**getattr(script, "PRESETS", {}), **getattr(script, "UPDATES", {})}
    for name in re.findall(r"--(?:preset|update) (\S+)", words):
        assert name in settings
    script.parse_args(shlex.split(re.sub(r"--(preset|update) \S+", "", words)))


@pytest.mark.parametrize("page", [page for page in SHOWN if {*SHOWN[page]} & {*OF_A_COPY}])
def test_commands_of_a_page_in_a_copy(page, tmp_path):
    """Each ends without an error, in the order of the page. A script has changed since the last commit of the copy."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "wandb", "site", "__pycache__"))
    author = "-c user.name=name -c user.email=name@example.org"
    save = f"git init --quiet && git add --all && git {author} commit --quiet --message copy"
    subprocess.run(save, shell=True, cwd=copy, check=True)
    with open(copy / "ppo_continuous.py", "a") as file:
        file.write("# changed\n")
    for name in ("my_ppo.py", "original.py"):
        shutil.copy(copy / "ppo_continuous.py", copy / name)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for command in SHOWN[page]:
        again = page.startswith("recipes") and command == "python recipes/refresh.py"  # slow; CONTRIBUTING.md has it
        if command in OF_A_COPY and not again:
            for word, own in OWN_WORDS.items():
                command = command.replace(word, own)
            finished = subprocess.run(
                command, shell=True, cwd=copy, env=os.environ | {"PATH": path}, capture_output=True, text=True
            )
            files_differ = command.startswith("diff ") and finished.returncode == 1
            assert finished.returncode == 0 or files_differ, f"{page}: {command}: {finished.stderr}"
