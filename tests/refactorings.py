"""Do tests break where behaviour stays as it is? Three refactorings of the reference scripts, all at once, on a copy.

    python tests/refactorings.py        # the whole suite on the copy: about six minutes

Local functions of `train` get other names, `Run.log` and `Run.save` become one method, and `train` is split in two. The
tool prints each test that fails. Tests of the text may fail: recipes are diffs, README quotes the loop, scripts have
ceilings and shared text, phases.py times functions by name. The exit status is 1 if any other test fails.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OF_THE_TEXT = r"test_recipes|test_parity|test_readme_is_short_and_quotes_the_loop|test_phases_are_those_of_the_loop"
NAMES = {r"\bcompute_gradient\b": "gradient_of", r"\bapply_gradient\b": "take_step", r"(?<![.\w])act\(": "choose("}


def between(text, begin, end):
    """The part of the text from `begin` to before `end`, each of which it has once."""
    first, last = (match.start() for mark in (begin, end) for match in re.finditer(re.escape(mark), text))
    return text[first:last]


def refactor(text):
    for name, other in NAMES.items():
        text, count = re.subn(name, other, text)
        assert count > 1, name

    split = between(text, "    # One vector holds all parameters", "    global_step, seconds = restore(")
    results = "flat_parameters, lr, clip_scale, optimizer, adam_step"
    text = text.replace(split, f"    {results} = make_optimizer(agent, args, device)\n")
    part = f"def make_optimizer(agent, args, device):\n{split}    return {results}\n\n\n"
    text = text.replace("def train(args", part + "def train(args")

    save = between(text, "    def save(self, agent, optimizer):", "    def close(self):\n")
    log = between(text, "        run.log(global_step", "        if args.capture_video")
    stopped, condition = re.search(r"(        stopped = .*\n)        if (.*):\n            run\.save", log).groups()
    call = "run.log_and_save(global_step, gather_from_ranks(episodes), scalars, agent, optimizer, to_save)"
    text = text.replace(save, "").replace(log, f"{stopped}        to_save = {condition}\n        {call}\n")
    text = text.replace("self.log = self.save = ", "self.log_and_save = ")
    merged = "def log_and_save(self, global_step, episodes, scalars, agent, optimizer, to_save)"
    text = text.replace("def log(self, global_step, episodes, scalars)", merged)
    body = "".join(f"    {line}\n" for line in save.rstrip().splitlines()[2:])
    end = "        self.global_step = global_step\n\n"
    return text.replace(end, f"{end.rstrip()}\n        if to_save:\n{body}\n")


def main():
    with tempfile.TemporaryDirectory() as folder:
        tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in tracked.splitlines():
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, Path(folder) / name)
        for script in ("ppo_continuous", "ppo_discrete", "ppo_rnn"):
            path = Path(folder) / f"{script}.py"
            path.write_text(refactor(path.read_text()))
        # Git applies recipes, and results name the commit.
        subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
        author = ["-c", "user.name=copy", "-c", "user.email=copy"]
        subprocess.run(["git", *author, "commit", "-q", "--allow-empty", "-m", "copy"], cwd=folder, check=True)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *sys.argv[1:]]
        printed = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", printed, re.M)
    others = [name for name in failed if not re.search(OF_THE_TEXT, name)]
    print(*failed, printed.rstrip().splitlines()[-1], f"{len(others)} of them are not of the text", *others, sep="\n")
    raise SystemExit(bool(others))


if __name__ == "__main__":
    main()
