"""Question: how much memory and time does one iteration of variants/ppo_rlhf.py take, beside an earlier commit?

    python benchmark/studies/rlhf_iteration.py --before PATH     # another commit, checked out at PATH

Answer (rlhf_iteration.csv, one run each, beside commit 69c1c24): about as much as before. tiny: 8.6 s and 0.95 GB,
before 7.4 s and 0.96 GB. gpt2: 32 s and 6.17 GB, before 36 s and 6.38 GB. With so few tokens weights and Adam fill
the memory, so --micro-batch-size 1 saves 0.06 GB, for 8 s.

A run has one iteration of 128 answers (tiny: the built-in task) or of 2 answers (gpt2: 0.12 billion random weights,
which rlhf_plot.py makes), in float32 on one thread. Seconds are those of the CPU, with the start and what is saved, so
that a busy machine matters little. Memory is the most that the process had. Rows go to rlhf_iteration.csv.
"""

import dataclasses
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmark/
sys.path.insert(0, str(Path(__file__).resolve().parent))

import tyro
from rlhf_plot import make_gpt2
from run_folder import ROOT, installed_versions, machine, write_rows

FIELDS = ["case", "script", "flags", "cpu_seconds", "peak_gb", "versions", "hardware", "commit"]
GPT2 = "--batch-size=2 --num-minibatches=1 --response-length=16"
CASES = {"tiny": "--supervised-steps=20", "gpt2": GPT2}
EXTRA = {"tiny": "--micro-batch-size=16", "gpt2": "--micro-batch-size=1"}


@dataclasses.dataclass
class Args:
    before: Path | None = None  # a checkout of an earlier commit
    cases: tuple[str, ...] = tuple(CASES)


def run(script, flags, batch_size):
    """-> CPU seconds and the largest memory, in GB, of a run of its own"""
    with tempfile.TemporaryDirectory() as runs_dir:
        command = [sys.executable, str(script), *flags, f"--total-episodes={batch_size}"]
        command += [f"--runs-dir={runs_dir}", "--device=cpu"]
        process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"rlhf_iteration.py: error: {' '.join(command)} ended with {status}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20


def main():
    args = tyro.cli(Args, description=__doc__.split("\n")[0])
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for case in args.cases:
            flags, models = CASES[case].split(), []
            if case == "gpt2":
                make_gpt2(folder)
                models = [f"--model={folder}/model", f"--reward-model={folder}/reward"]
                models.append(f"--prompts={folder}/prompts.txt")
            turns = [("before", args.before, [])] if args.before else []
            for name, root, more in [*turns, ("now", ROOT, []), ("now", ROOT, EXTRA[case].split())]:
                script, every = root / "variants" / "ppo_rlhf.py", [*flags, *more]
                seconds, peak = run(script, every + models, 2 if case == "gpt2" else 128)
                row = {"case": case, "script": name, "flags": " ".join(every)}
                rows.append(row | {"cpu_seconds": round(seconds, 1), "peak_gb": round(peak, 2)})
                print(rows[-1], flush=True)
    about = {"versions": installed_versions("torch", "transformers")}
    about |= {name: machine()[name] for name in ("hardware", "commit")}
    write_rows(Path(__file__).with_suffix(".csv"), FIELDS, [row | about for row in rows])


if __name__ == "__main__":
    main()
