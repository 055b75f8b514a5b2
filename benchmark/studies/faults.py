"""Question: what does a run survive, tried for longer than the tests do?

    python benchmark/studies/faults.py kills --script ppo_continuous     # kill -9, again and again, then to the end
    python benchmark/studies/faults.py flags --script ppo_discrete       # thousands of random command lines
    python benchmark/studies/faults.py memory --script ppo_continuous    # resident memory over three million steps

Answer (results/faults.csv, before the scripts were rebuilt). Each script survives 50 kills. Of 2,100 command lines
1,346 train, 754 are refused and none ends in a traceback. ppo_continuous.py holds 492 MB after a tenth of the steps and
492 MB at the end, ppo_discrete.py 418 and 417.

A try prints its outcome and writes a row to results/faults.csv. It ends with status 1 where something was not as it
should be. The shorter faults are in tests/test_run.py, test_cli.py, test_faults.py and test_ranks.py.
"""

import contextlib
import dataclasses
import inspect
import io
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmark/

import torch
import tyro
from report import RESULTS, ROOT, VERSIONS, last_step, read_csv, write_rows
from run import load_script
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ENV_IDS = {"ppo_continuous": "InvertedPendulum-v4", "ppo_discrete": "CartPole-v1", "ppo_rnn": "CartPole-v1"}
FIELDS = ["fault", "script", "tries", "outcome", "versions"]


def kills(script, folder, tries=50, steps=300_000):
    """kill -9 at random moments of a run, `tries` times; then it shall complete, with every episode up to each of the
    checkpoints that it was resumed from, none twice, and with the scalars of every iteration."""
    program = [sys.executable, str(ROOT / f"{script}.py")]
    flags = ["--env-id", ENV_IDS[script], "--total-timesteps", str(steps), "--no-compile", "--checkpoint-interval", "2"]
    longest_start = 0.0  # seconds from the start of the process to its first checkpoint
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    done, rng, wrong = 0, random.Random(0), []

    def saved():
        """The run folder and the time of its checkpoint; None without one."""
        paths = list((folder / "killed").glob("*/checkpoint.pt"))
        return (paths[0].parent, paths[0].stat().st_mtime_ns) if paths else None

    def finished_episodes(run_dir):
        """The lines of episodes.csv up to the checkpoint."""
        last = torch.load(run_dir / "checkpoint.pt", weights_only=True)["global_step"]
        lines = (run_dir / "episodes.csv").read_text().splitlines()[1:]
        return [line for line in lines if line.count(",") == 3 and int(line.split(",")[0]) <= last]

    episodes = []
    while True:
        before, begun = saved(), time.monotonic()
        if before:
            last_episodes, episodes = episodes, finished_episodes(before[0])
            wrong += ["LOST episodes"] * (episodes[: len(last_episodes)] != last_episodes)
        begin = ["--resume", str(before[0]), *flags] if before else [*flags, "--runs-dir", str(folder / "killed")]
        process = subprocess.Popen(program + begin, **quiet)
        if done < tries:
            # Half of the times wherever it is, at the start too; half of the times some way into the training.
            early = before and rng.random() < 0.5
            while process.poll() is None and not early and saved() == before:
                time.sleep(0.002)
            end = rng.uniform(0, longest_start) if early else rng.uniform(0, 0.7)
            longest_start = longest_start if early else max(longest_start, time.monotonic() - begun)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(end)
            if process.poll() is None:
                process.kill()
                process.wait()
                done += 1
                continue
        errors = process.communicate()[1]
        if process.returncode:
            return done, f"ENDED with {process.returncode}: {errors.strip().splitlines()[-1]}"
        break
    run_dir, _ = saved()
    checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    last_episodes, episodes = episodes, finished_episodes(run_dir)
    wrong += ["LOST episodes"] * (episodes[: len(last_episodes)] != last_episodes)
    batch_size = checkpoint["args"]["num_envs"] * checkpoint["args"]["num_steps"]
    end = steps // batch_size * batch_size
    wrong += [f"ENDED at {checkpoint['global_step']}"] * (checkpoint["global_step"] != end)
    lengths = sum(int(line.split(",")[2]) for line in episodes)
    # No more steps than there were: an episode that is there twice, or was played on, would give more.
    wrong += [f"TOO MANY: episodes of {lengths} steps"] * (lengths > end)
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
    events.Reload()
    logged = [event.step for event in events.Scalars("losses/value_loss")]
    wrong += ["MISSING or repeated scalars"] * (logged != list(range(batch_size, end + 1, batch_size)))
    outcome = f"complete, with {len(episodes)} episodes, none lost and none twice, and all scalars"
    return done, ", ".join(dict.fromkeys(wrong)) or outcome


def random_value(rng, field):
    """A value of a field of Args, most often one that can work."""
    kind = str(field.type)
    if rng.random() < 0.04 and "str" not in kind:
        return rng.choice(["nan", "inf", "-1", "0", "", "None", "1e400", "abc", "True", "0x10", "1e-320"])
    if field.name == "env_id":
        return rng.choice(
            ["CartPole-v1", "Pendulum-v1", "InvertedPendulum-v4", "Taxi-v4", "NoSuch-v0", "FrozenLake-v1"]
        )
    if field.name == "device":
        return rng.choice(["cpu", "auto"])
    if "Literal" in kind:
        return rng.choice(["lstm", "gru", "rnn"])
    if kind == "<class 'bool'>":
        return rng.choice(["True", "False", "true", "false"])
    if field.name in ("num_envs", "num_steps", "num_minibatches", "update_epochs", "hidden_size"):
        return str(rng.choice([1, 2, 3, 4, 8, 16]))
    if kind == "<class 'int'>":
        return str(rng.choice([1, 2, 5, 100]))
    if field.name in ("gamma", "gae_lambda"):
        return str(rng.choice([0, 0.5, 0.99, 1, 1.5]))
    if "float" in kind:
        return str(
            rng.choice([0, 1e-8, 1e-3, 0.2, 1, 30, 1e6, None] if "None" in kind else [0, 1e-8, 1e-3, 0.2, 1, 30])
        )
    return rng.choice(["x", "a b", "ä", "../y"])


def flags(script, folder, tries=2000):
    """Command lines at random: each trains two iterations, is refused with status 2, or ends so because the update
    gave infinity. All else is a fault of the script."""
    module, rng, outcomes, faults = load_script(script), random.Random(0), {}, []
    skipped = {"runs_dir", "resume", "evaluate", "track", "wandb_project_name", "wandb_entity", "capture_video"}
    fields = [field for field in dataclasses.fields(module.Args) if field.name not in skipped]
    for _ in range(tries):
        chosen = rng.sample(fields, rng.randint(1, 8))
        words = []
        for field in chosen:
            name = field.name if rng.random() < 0.3 else field.name.replace("_", "-")
            value = random_value(rng, field)
            words += [f"--{name}={value}"] if rng.random() < 0.7 else [f"--{name}", value]
        given = {field.name for field in chosen}
        small = {"env_id": ENV_IDS[script], "num_envs": 4, "num_steps": 8, "num_minibatches": 2, "update_epochs": 2}
        words += [f"--{name.replace('_', '-')}={value}" for name, value in small.items() if name not in given]
        errors = io.StringIO()
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
                args = module.parse_args([*words, "--runs-dir", str(folder)])
                args.compile, args.async_envs = False, False
                args.total_timesteps = 2 * args.num_envs * args.num_steps
                agent, _ = module.train(args)
            finite = all(bool(torch.isfinite(p).all()) for p in agent.parameters())
            outcome = "trained" if finite else "NOT FINITE"
        except SystemExit as end:
            lines = errors.getvalue().strip().splitlines()
            outcome = "refused" if end.code == 2 and lines else f"STATUS {end.code}"
            if outcome == "refused" and "NaN or infinity" in lines[-1]:
                outcome = "ended because a number was not finite"
        except Exception:
            outcome = "TRACEBACK"
            faults.append((words, traceback.format_exc().strip().splitlines()[-1]))
        if outcome.isupper():
            faults.append((words, outcome))
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    for words, text in faults[:10]:
        print(text, "<-", " ".join(words))
    return tries, ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))


def memory(script, folder, steps=3_000_000):
    """Resident memory of a run, a tenth of the way through and at the end."""
    command = [sys.executable, str(ROOT / f"{script}.py"), "--env-id", ENV_IDS[script], "--runs-dir", str(folder)]
    command += ["--total-timesteps", str(steps)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    samples = []
    while process.poll() is None:
        with contextlib.suppress(FileNotFoundError, StopIteration, ProcessLookupError, IndexError, ValueError):
            text = Path(f"/proc/{process.pid}/status").read_text()
            kilobytes = int(next(line for line in text.splitlines() if line.startswith("VmRSS")).split()[1])
            (run_dir,) = folder.iterdir()
            samples.append((last_step(run_dir), kilobytes / 1024))
        time.sleep(2)
    if process.returncode:
        raise SystemExit(f"{script}.py ended with status {process.returncode}")
    early = [size for step, size in samples if 0.1 * steps <= step < 0.2 * steps]
    late = [size for step, size in samples if step > 0.9 * steps]
    grown = max(late) - max(early)
    text = f"{max(early):.0f} MB after a tenth of {steps:,} steps, {max(late):.0f} MB at the end"
    return 1, text + (f": GROWN by {grown:.0f} MB" if grown > 10 else "")


@dataclasses.dataclass
class Args:
    fault: tyro.conf.Positional[Literal["kills", "flags", "memory"]]  # what is tried
    script: Literal[tuple(ENV_IDS)] = "ppo_continuous"  # on which script
    tries: int | None = None  # kills or command lines; fewer than the default are not kept
    steps: int | None = None  # of the run whose memory is watched


def main():
    args = tyro.cli(Args, description=__doc__.split("\n")[0])
    os.environ["OMP_NUM_THREADS"] = "1"
    sizes = {name: getattr(args, name) for name in ("tries", "steps") if getattr(args, name) is not None}
    takes = inspect.signature(globals()[args.fault]).parameters
    if unknown := [name for name, size in sizes.items() if name not in takes or size < 1]:
        print(f"{args.fault} takes no --{unknown[0]} {sizes[unknown[0]]}", file=sys.stderr)
        raise SystemExit(2)
    with tempfile.TemporaryDirectory() as folder:
        tries, outcome = globals()[args.fault](args.script, Path(folder), **sizes)
    print(f"{args.fault}, {args.script}, {tries} tries: {outcome}")
    failed = any(word.isupper() and len(word) > 2 for word in outcome.split())
    if not failed and any(size < takes[name].default for name, size in sizes.items()):
        return  # a shorter try is not kept
    row = {"fault": args.fault, "script": args.script, "tries": tries, "outcome": outcome, "versions": VERSIONS}
    rows = [
        old for old in read_csv(RESULTS / "faults.csv") if (old["fault"], old["script"]) != (args.fault, args.script)
    ]
    write_rows(RESULTS / "faults.csv", FIELDS, sorted(rows + [row], key=lambda row: (row["fault"], row["script"])))
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
