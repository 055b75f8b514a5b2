"""A script with recipes applied to it, as a module."""

import importlib.util
import shutil
import subprocess
import sys

from conftest import ROOT


def with_recipes(folder, script, *names):
    """What `git apply recipes/NAME.diff` makes of a script, in a folder of its own, imported."""
    for path in ROOT.glob("ppo_*.py"):
        shutil.copy(path, folder)
    for name in names:
        subprocess.run(["git", "apply", str(ROOT / "recipes" / f"{name}.diff")], cwd=folder, check=True)
    spec = importlib.util.spec_from_file_location("_".join([script, *names]), folder / f"{script}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
