"""Each script alone: in an empty folder, under another name, and imported."""

import ast
import re
import shutil
import subprocess
import sys

from conftest import REAL_ENV, ROOT, SCRIPTS, SMALL, flags_of


def requirements(path):
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return {line for line in lines if line}


def header(name):
    """The requirements in the PEP 723 header of a script, which are what `uv run` installs."""
    block = re.search(r"^# /// script\n(.*?)^# ///$", (ROOT / f"{name}.py").read_text(), re.M | re.S)[1]
    return set(re.findall(r'"([^"]+)"', block.split("dependencies")[1]))


def imported(name):
    """The packages that a script cannot be imported without."""
    modules = set()
    for node in ast.parse((ROOT / f"{name}.py").read_text()).body:
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            modules.add(node.module)
    return {module.split(".")[0] for module in modules} - sys.stdlib_module_names


def test_headers_agree_with_requirements():
    """They ask for the versions of the requirements, and for all that the script imports. Every entry has a lower and
    an upper bound."""
    every = requirements(ROOT / "requirements.txt")
    without_extras = {re.sub(r"\[.*\]", "", line) for line in every}
    for script in SCRIPTS:
        lines = {re.sub(r"\[.*\]", "", line) for line in header(script)}
        assert lines <= without_extras and imported(script) <= {line.split(">")[0] for line in lines}, script
    every |= requirements(ROOT / "variants" / "requirements.txt")
    for variant in ("ppo_atari", "ppo_gpu_sim", "ppo_rlhf"):
        assert header(f"variants/{variant}") <= every | without_extras, variant
    for requirement in every | requirements(ROOT / "tests" / "requirements.txt"):
        assert re.fullmatch(r"[\w\[\],-]+>=[\d.]+,<[\d.]+", requirement), requirement


def test_alone_in_an_empty_folder(script, tmp_path):
    """As a user starts it, under another name: the script needs no other file, leaves nothing but its run folder, and
    stderr is empty, though v4 of an environment is out of date."""
    shutil.copy(ROOT / f"{script.__name__}.py", tmp_path / "mine.py")

    def run_alone(*flags):
        command = [sys.executable, "-P", "mine.py", *map(str, flags)]
        finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert (finished.returncode, finished.stderr) == (0, "")
        assert {path.name for path in tmp_path.iterdir()} == {"mine.py", "runs"}
        return finished.stdout

    env_id = "HalfCheetah-v4" if script.__name__ == "ppo_continuous" else REAL_ENV[script.__name__]
    run_alone(*flags_of(env_id=env_id, **SMALL))
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert (run_dir / "mine.py").read_text() == (tmp_path / "mine.py").read_text()
    if script.__name__ == "ppo_continuous":
        printed = run_alone("--evaluate", "latest", "--eval-episodes=1")
        (episodic_return,) = script.evaluate(script.load_agent(run_dir), script.load_args(run_dir), 1)
        assert printed.splitlines()[0] == f"returns: {episodic_return:.1f}"


def test_importing_does_nothing(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {', '.join(SCRIPTS)}"
    code += "; assert 'wandb' not in sys.modules"
    finished = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())
