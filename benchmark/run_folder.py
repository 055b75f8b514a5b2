"""What a run folder holds: arguments, episodes, checkpoint -> a row of figures."""

import ast
import contextlib
import csv
import importlib
import json
import math
import platform
import re
import subprocess
import sys
import threading
import zipfile
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # for tasks of benchmark/, as benchmark.memory_envs:CartPoleNoVel-v1
FIELDS = ["script", "env_id", "exp_name", "seed", "global_step", "last_100_mean", "evaluation"]
FIELDS += ["episodes", "falls", "seconds", "flags", "versions", "commit", "hardware", "curve"]
# Arguments that say where and how a run went, not what it did.
WHERE_AND_HOW = {"script", "version", "env_id", "seed", "exp_name", "runs_dir", "compile"}
WHERE_AND_HOW |= {"checkpoint_interval", "track", "wandb_project_name", "wandb_entity", "capture_video"}
CURVE_POINTS = 25


def read_csv(path):
    if not path.exists():
        return []
    with open(path) as file:
        rows = list(csv.DictReader(file))
    if any(None in row or None in row.values() for row in rows):  # too many cells, or too few
        raise ValueError(f"{path} has rows of different lengths")
    return rows


def write_rows(path, fields, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def path_of(script):
    """The file of a script: a path, or the name of a script of the repository, with or without .py."""
    name = Path(script)
    here = [name] if name.suffix else []  # a bare name always means the repository's script
    for path in (*here, ROOT / name.with_suffix(".py"), ROOT / "variants" / name.with_suffix(".py")):
        if path.is_file():
            return path.resolve()
    raise SystemExit(f"there is no script {script}")


def load_script(script):
    """A script as a module."""
    path = path_of(script)
    for name in (path.stem, str(path)):  # the second one: where another module has the name
        module = sys.modules.get(name)
        if module is None:
            spec = importlib.util.spec_from_file_location(name, path)
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        if module.__file__ == str(path):
            return module


def installed_versions(*packages):
    """Text: the version of Python, and of those of the packages that are installed."""
    found = [f"python {platform.python_version()}"]
    for name in packages or ("torch", "gymnasium", "mujoco", "ale-py"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return " ".join(found)


def machine():
    """What a result depends on besides its arguments."""
    commit = ""
    with contextlib.suppress(FileNotFoundError):  # a machine without git
        git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)
        commit = git(["git", "describe", "--always"]).stdout.strip()
        changed = git(["git", "diff", "--quiet", "HEAD", "--", "*.py"]).returncode  # new rows of results do not count
        if commit and changed:
            commit += "-dirty"
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) if sys.platform == "linux" else None
    hardware = model[1] if model else platform.processor()
    hardware += ", " + torch.backends.cpu.get_cpu_capability()  # AVX2 and AVX512 round differently
    if torch.cuda.is_available():
        hardware += ", " + torch.cuda.get_device_name()
    return {"commit": commit, "versions": installed_versions(), "hardware": hardware}


PARSING = threading.Lock()  # run.py reads run folders in threads, and ast.parse in two threads fails in CPython 3.11


def read_args(run_dir):
    try:
        return json.loads((run_dir / "args.json").read_text())
    except ValueError as error:
        raise ValueError(f"{run_dir}/args.json is damaged: {error}") from None


def load_checkpoint(run_dir):
    path = run_dir / "checkpoint.pt"
    with contextlib.suppress(Exception):  # a damaged file can raise anything
        if zipfile.ZipFile(path).testzip() is None:  # all checksums are right
            return torch.load(path, map_location="cpu", weights_only=True)
    raise ValueError(f"{path} is missing or damaged")


def is_finished(run_dir):
    """Whether --resume has no whole iteration left to train. After a resume with another batch size, global_step need
    not be a whole number of iterations."""
    if not (run_dir / "checkpoint.pt").is_file():
        return False
    args = read_args(run_dir)
    batch_size = args["num_envs"] * args["num_steps"]
    return math.ceil(load_checkpoint(run_dir)["global_step"] / batch_size) >= args["total_timesteps"] // batch_size


def read_record(run_dir, global_step):
    """What run.py has recorded about the agent of this step: evaluation, commit, hardware; {} if nothing."""
    path = run_dir / "benchmark.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    return record if record.get("global_step") == global_step else {}  # else it has learned since


def defaults_of(path):
    """The defaults of the class Args of a script, as args.json has them. No code in the script runs."""
    with PARSING:
        tree = ast.parse(path.read_text())
    (fields,) = (node.body for node in tree.body if getattr(node, "name", "") == "Args")
    defaults = {}
    for field in fields:
        with contextlib.suppress(ValueError, AttributeError):  # a docstring, or a default that is computed
            defaults[field.target.id] = ast.literal_eval(field.value)
    return json.loads(json.dumps(defaults))  # tuples as lists


def flags_of(args, path):
    """Text: the arguments that differ from the defaults of a script."""
    defaults = defaults_of(path)
    changed = [name for name in args if name not in WHERE_AND_HOW and args[name] != defaults.get(name)]
    return " ".join(f"--{name.replace('_', '-')}={args[name]}" for name in changed)


def rolling_mean(returns):
    """Mean of the last 100 numbers up to each one, of fewer at the beginning."""
    sums = np.cumsum(returns)
    sums[100:] = sums[100:] - sums[:-100]
    return sums / np.minimum(np.arange(len(sums)) + 1, 100)


def curve(episodes, global_step, points=CURVE_POINTS):
    """Rows of episodes.csv -> [(step, mean return of the last 100 episodes)] at even steps of a run. It begins with the
    first step that has an episode behind it, and is linear between the ends of episodes."""
    steps = np.array([int(row["global_step"]) for row in episodes])
    last = np.flatnonzero(np.diff(steps, append=np.inf))  # where environments end in the same step, the last of them
    means = rolling_mean([float(row["episodic_return"]) for row in episodes])
    grid = np.linspace(0, global_step, points + 1)[1:]
    grid = grid[grid >= steps[0]]
    return [(round(at), np.interp(at, steps[last], means[last])) for at in grid]


def falls(env_id, env_kwargs, episodes, global_step):
    """Episodes that ended before the environment's time limit, per 1,000 steps of the last fifth of a run. "" where no
    limit is known. Only the limits of imported modules are known."""
    spec = gym.registry.get(env_id.rpartition(":")[2])
    limit = json.loads(env_kwargs).get("max_episode_steps", spec and spec.max_episode_steps)
    if not limit or limit < 0:  # -1: none
        return ""
    last = [row for row in episodes if int(row["global_step"]) > 0.8 * global_step]
    return f"{sum(int(row['episodic_length']) < limit for row in last) / (0.2 * global_step / 1000):.4g}"


def summarise(run_dir):
    """The CSV row of a run folder, or None where the run has not finished or no episode has. `flags` are the arguments
    that differ from the script's defaults, `curve` the returns at the last of CURVE_POINTS even steps."""
    if not is_finished(run_dir):  # its last row may be half written
        return None
    episodes = read_csv(run_dir / "episodes.csv")
    if not episodes:
        return None
    args = read_args(run_dir)
    checkpoint = load_checkpoint(run_dir)
    last_100 = [float(row["episodic_return"]) for row in episodes[-100:]]
    record = read_record(run_dir, checkpoint["global_step"])
    return {
        "script": args["script"],
        "env_id": args["env_id"],
        "exp_name": args["exp_name"],
        "seed": args["seed"],
        "global_step": checkpoint["global_step"],
        "last_100_mean": f"{np.mean(last_100):.6g}",
        "evaluation": f"{record['evaluation']:.6g}" if "evaluation" in record else "",
        "episodes": len(episodes),
        "falls": falls(args["env_id"], args["env_kwargs"], episodes, checkpoint["global_step"]),
        "seconds": f"{checkpoint['seconds']:.0f}",
        "flags": flags_of(args, run_dir / f"{args['script']}.py"),
        "versions": record.get("versions", ""),
        "commit": record.get("commit", ""),
        "hardware": record.get("hardware", ""),
        "curve": " ".join(f"{mean:.4g}" for _, mean in curve(episodes, checkpoint["global_step"])),
    }
