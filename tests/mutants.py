"""Would a test notice? One-line mistakes in the five scripts, each held against the tests that concern it.

    python tests/mutants.py                  # all of them, one on each core: 10 to 20 minutes
    python tests/mutants.py entropy ppo_rnn  # those whose script, line or tests have one of these words

mutants.txt has the mistakes: the script, the tests that are asked (files, and behind a colon words of their names, as
pytest's -k takes them), what stands in the script, and what stands there instead. Each is made in a copy of the
repository, and a test has to fail there. The tool prints each mistake with the test that failed, and at the end those
that no test has noticed; the exit status is then 1. test_parity.py is never asked: it compares texts, and would notice
a mistake in shared text whatever it does.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MISTAKES = ROOT / "tests" / "mutants.txt"
LONGEST = 600  # seconds that the tests of a mutant may take: a loop that never ends is noticed too


def read_mistakes():
    """[(script, tests, text, what stands there instead)]"""
    pattern = r"^(\S+), tests of (.*)\n- (.*)\n\+ ?(.*)$"
    found = re.findall(pattern, MISTAKES.read_text(), re.M)
    for script, _, text, _ in found:
        if (count := (ROOT / f"{script}.py").read_text().count(text)) != 1:
            raise SystemExit(f"mutants.py: error: {script}.py has {text!r} {count} times, not once")
    return found


def words_of(mutant):
    """What pytest is given: files, and which tests of them."""
    script, tests, *_ = mutant
    files, _, names = tests.partition(": ")
    others = {"ppo_continuous", "ppo_discrete", "ppo_rnn"} - {script}  # tests of the other scripts pass all the same
    chosen = [*(f"not {other}" for other in sorted(others)), *([f"({names})"] if names else [])]
    words = [f"tests/test_{name}.py" for name in files.split()]
    return [*words, "-k", " and ".join(chosen)]


def try_out(mutant):
    """Run the tests in a copy of the repository. Returns the name of the test that failed, or None."""
    script, _, text, replacement = mutant
    with tempfile.TemporaryDirectory() as folder:
        tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in tracked.splitlines():
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, Path(folder) / name)
        path = Path(folder) / f"{script}.py"
        path.write_text(path.read_text().replace(text, replacement))
        command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider", *words_of(mutant)]
        options = {"cwd": folder, "capture_output": True, "text": True, "env": os.environ | {"PYTHONPATH": ""}}
        try:
            done = subprocess.run(command, timeout=LONGEST, **options)
        except subprocess.TimeoutExpired:
            return f"the tests did not end within {LONGEST} s"
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{mutant}: pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-500:]}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    return (failed[1] if failed else "?") if done.returncode else None


def main():
    chosen = [m for m in read_mistakes() if not sys.argv[1:] or any(word in " ".join(m) for word in sys.argv[1:])]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    survivors = []
    with ThreadPoolExecutor(cores) as pool:
        for number, (mutant, killer) in enumerate(zip(chosen, pool.map(try_out, chosen)), 1):
            print(f"[{number}/{len(chosen)}] {mutant[0]}: {mutant[3]!r}: {killer or 'SURVIVED'}", flush=True)
            survivors += [] if killer else [mutant]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants were noticed")
    for script, tests, text, replacement in survivors:
        print(f"survived: {script}.py, {text!r} -> {replacement!r}, by the tests of {tests}")
    raise SystemExit(bool(survivors))


if __name__ == "__main__":
    main()
