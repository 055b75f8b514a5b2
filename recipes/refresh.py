"""Carry the recipes along after a change of the scripts: every diff that no longer applies, or whose lines have moved,
is merged by git's three-way apply and written again.

    python recipes/refresh.py            # all of them
    python recipes/refresh.py gsde       # one
    python recipes/refresh.py --table    # only the table of README.md, from the heads
    python recipes/refresh.py --new NAME # recipes/NAME.diff from what you have changed in the working tree

Commit the change of the script first: the three-way merge needs the old text, which a diff names by its hash.
A conflict is left in the worktree that is named: mend it there, and run --new there.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

RECIPES = Path(__file__).resolve().parent


def git(*arguments, cwd=RECIPES.parent):
    return subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, text=True)


def split(text):
    """The head of plain text, and the diff."""
    start = text.index("diff --git ")
    return text[:start], text[start:]


def changes(folder):
    return git("diff", "HEAD", "--full-index", "--", ":/ppo_*.py", ":/variants/*.py", cwd=folder).stdout


def refresh(path):
    """Apply the diff to a clean worktree, and write what it has changed. -> whether that worked"""
    head, diff = split(path.read_text())
    folder = tempfile.mkdtemp()
    git("worktree", "add", "--detach", folder)
    applied = git("apply", "--3way", str(path), cwd=folder)
    if applied.returncode:
        print(f"{path.name}: conflict, left in {folder}\n{applied.stderr}", file=sys.stderr)
        return False
    git("reset", "--quiet", cwd=folder)  # --3way has put the changes into the index
    fresh, hashes = changes(folder), r"(?m)^index .*"
    if re.sub(hashes, "", fresh) != re.sub(hashes, "", diff):
        path.write_text(head + fresh)
        print(f"{path.name}: written again")
    git("worktree", "remove", "--force", folder)
    return True


def row(path):
    """The line of a recipe in README.md, from its head."""
    head, diff = split(path.read_text())
    idea, rest = head.split("\n\n", 1)
    idea = re.sub(r"^\w+: ", "", " ".join(idea.split())).rstrip(".")
    end = r"(?=[.] Source: |\n[A-Z][a-z]+: |\s*\Z)"
    pairs = re.findall(rf"(?:^|[.] )(Scripts?|Source|Result): (.*?){end}", rest, re.M | re.S)
    fields = {name.rstrip("s"): " ".join(text.split()).rstrip(".") for name, text in pairs}
    lines = len([line for line in diff.splitlines() if re.match(r"[+-](?![+-]{2} )", line)])
    name = f"[{path.stem}]({path.name})"
    return f"| {name} | {idea} | {fields['Script']} | {lines} | {fields['Source']} | {fields['Result']} |"


def fill_page():
    """README.md with today's table."""
    text, mark = (RECIPES / "README.md").read_text(), "<!-- the table: written by refresh.py -->\n"
    lines = ["| recipe | idea | script | changed lines | source | result |", "|---" * 6 + "|"]
    return text.split(mark)[0] + mark + "\n".join([*lines, *map(row, sorted(RECIPES.glob("*.diff")))]) + "\n"


def main():
    if sys.argv[1:2] == ["--new"]:
        path = RECIPES / f"{sys.argv[2]}.diff"
        head = split(path.read_text())[0] if path.exists() else f"{sys.argv[2]}: what it does, why, source, result\n\n"
        if not (diff := changes(Path.cwd())):
            raise SystemExit("no script has changed here: edit one first")
        path.write_text(head + diff)
        return 0
    if sys.argv[1:2] == ["--table"]:
        (RECIPES / "README.md").write_text(fill_page())
        return 0
    paths = [RECIPES / f"{name}.diff" for name in sys.argv[1:]] or sorted(RECIPES.glob("*.diff"))
    done = [refresh(path) for path in paths]
    (RECIPES / "README.md").write_text(fill_page())
    return int(not all(done))


if __name__ == "__main__":
    sys.exit(main())
