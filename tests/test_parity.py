"""What the scripts share is the same text in each of them. `python tests/test_parity.py` copies it from the first one
that has it into the others."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ATARI, SIM, RLHF = "variants/ppo_atari", "variants/ppo_gpu_sim", "variants/ppo_rlhf"
# These are about actions, observations or memory. All else that has one name has one text.
OWN = {"Args", "Agent", "make_envs", "load_agent", "evaluate", "train"}
OWN_OF = {  # What else differs between two scripts. A name that does not differ fails the test.
    ("ppo_continuous", "ppo_discrete"): {"VectorMember", "ppo_loss", "main"},
    ("ppo_continuous", "ppo_rnn"): {"VectorMember", "ppo_loss", "main", "check", "estimate_advantages"},
    ("ppo_discrete", "ppo_rnn"): {"ppo_loss", "check", "estimate_advantages"},
    ("ppo_discrete", ATARI): {"Run", "main", "compiled", "make_env"},
    ("ppo_continuous", SIM): {"Run", "main", "compiled", "ppo_loss", "check", "RunningMeanStd", "mlp"},
    (ATARI, SIM): {"Run", "main", "ppo_loss", "check", "start_device", "average_over_ranks"},
    ("ppo_continuous", RLHF): {"Run", "main", "check", "parse_args", "load_checkpoint"},
}


def definitions(path):
    """{name: source} of the functions and classes at the top level, with decorators."""
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "".join(lines[first - 1 : node.end_lineno])
    return found


def shared(one, other):
    """Names that both have, whose text is to be the same."""
    names = definitions(ROOT / f"{one}.py").keys() & definitions(ROOT / f"{other}.py").keys()
    return names - OWN - OWN_OF[one, other]


@pytest.mark.parametrize("one, other", OWN_OF)
def test_shared_text(one, other):
    canonical, copy = definitions(ROOT / f"{one}.py"), definitions(ROOT / f"{other}.py")
    names = shared(one, other)
    assert "explained_variance" in names and (other == RLHF or {"compute_gae", "parse_args"} <= names)
    different = {name for name in canonical.keys() & copy.keys() if canonical[name] != copy[name]}
    changed, same = different & names, OWN_OF[one, other] - different
    assert not changed, f"{changed} differ: python tests/test_parity.py copies them from {one}.py"
    assert not same, f"{same} are the same: take them out of OWN_OF"


@pytest.mark.parametrize("one, other", OWN_OF)
def test_same_order(one, other):
    """So that `diff` shows what differs, and nothing else."""
    canonical, copy = definitions(ROOT / f"{one}.py"), definitions(ROOT / f"{other}.py")
    assert [name for name in canonical if name in copy] == [name for name in copy if name in canonical]


if __name__ == "__main__":
    for one, other in OWN_OF:
        canonical, path = definitions(ROOT / f"{one}.py"), ROOT / f"{other}.py"
        text = path.read_text()
        for name in shared(one, other):
            if (source := definitions(path)[name]) != canonical[name]:
                text = text.replace(source, canonical[name])
                print(f"{other}.py: {name}", file=sys.stderr)
        path.write_text(text)
