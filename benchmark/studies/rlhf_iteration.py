"""Question: how much memory and time does one iteration of variants/ppo_rlhf.py take, beside an earlier commit?

    python benchmark/studies/rlhf_iteration.py --before PATH     # another commit, checked out at PATH

ANSWER

Tiny is the built-in task with its defaults. gpt2 has 0.12 billion random weights (rlhf_plot.py makes them), 4 answers
of 16 tokens and 1 epoch. Seconds are those of one CPU thread, so that a busy machine does not matter much: a run of
three iterations minus a run of one, halved. Memory is the most that the longer run had. Rows go to rlhf_iteration.csv.
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
GPT2 = "--batch-size=4 --num-minibatches=1 --ppo-epochs=1 --response-length=16"
CASES = {"tiny": "--supervised-steps=20", "gpt2": GPT2}
EXTRA = {"tiny": "--micro-batch-size=16", "gpt2": "--micro-batch-size=1"}


@dataclasses.dataclass
class Args:
    before: Path | None = None  # a checkout of an earlier commit
    cases: tuple[str, ...] = tuple(CASES)


def run(script, flags, batch_size, iterations):
    """-> CPU seconds and the largest memory, in GB, of a run of its own"""
    with tempfile.TemporaryDirectory() as runs_dir:
        command = [sys.executable, str(script), *flags, f"--total-episodes={batch_size * iterations}"]
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
                batch_size = 4 if case == "gpt2" else 128
                (start, _), (whole, peak) = (run(script, every + models, batch_size, n) for n in (1, 3))
                row = {"case": case, "script": name, "flags": " ".join(every), "peak_gb": round(peak, 2)}
                rows.append(row | {"cpu_seconds": round((whole - start) / 2, 2)})
                print(rows[-1], flush=True)
    about = {"versions": installed_versions("torch", "transformers")} | {
        name: machine()[name] for name in ("hardware", "commit")
    }
    write_rows(Path(__file__).with_suffix(".csv"), FIELDS, [row | about for row in rows])


if __name__ == "__main__":
    main()
