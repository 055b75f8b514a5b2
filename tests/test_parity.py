"""What the scripts share is the same text in each of them. `python tests/test_parity.py` copies it from the first one
that has it into the others."""

import ast
import itertools
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = "ppo_continuous", "ppo_discrete", "ppo_rnn"
VARIANTS = "variants/ppo_gpu_sim", "variants/ppo_rlhf"  # siblings of ppo_continuous.py
# What is about actions, observations or the command line of one script. All else that has one name has one text.
OWN = {"Args", "Agent", "check_args", "evaluate", "load_checkpoint", "make_envs", "make_evaluation_env", "parse_args"}
OWN |= {"load_agent", "ppo_loss", "train"}
OWN_OF_VARIANTS = {"main", "mlp"}


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


PAIRS = list(itertools.combinations(SCRIPTS, 2))


@pytest.mark.parametrize("one, other", PAIRS)
def test_shared_text(one, other):
    canonical, copy = definitions(ROOT / f"{one}.py"), definitions(ROOT / f"{other}.py")
    shared = canonical.keys() & copy.keys() - OWN
    assert {"compute_gae", "clipped_policy_loss", "clipped_value_loss", "RunningMeanStd", "layer_init"} <= shared
    different = [name for name in shared if canonical[name] != copy[name]]
    assert not different, f"{different} differ: python tests/test_parity.py copies them from {one}.py"


@pytest.mark.parametrize("variant", VARIANTS)
def test_shared_text_of_variants(variant):
    canonical, copy = definitions(ROOT / "ppo_continuous.py"), definitions(ROOT / f"{variant}.py")
    shared = canonical.keys() & copy.keys() - OWN - OWN_OF_VARIANTS
    assert {"fail", "average_over_ranks", "save_checkpoint"} <= shared
    different = [name for name in shared if canonical[name] != copy[name]]
    assert not different, f"{different} differ: python tests/test_parity.py copies them from ppo_continuous.py"


@pytest.mark.parametrize("one, other", PAIRS)
def test_same_order(one, other):
    """So that `diff` shows what differs, and nothing else."""
    canonical, copy = definitions(ROOT / f"{one}.py"), definitions(ROOT / f"{other}.py")
    assert [name for name in canonical if name in copy] == [name for name in copy if name in canonical]


if __name__ == "__main__":
    for one, other in PAIRS + [("ppo_continuous", variant) for variant in VARIANTS]:
        own = OWN | OWN_OF_VARIANTS if other in VARIANTS else OWN
        canonical, path = definitions(ROOT / f"{one}.py"), ROOT / f"{other}.py"
        text = path.read_text()
        for name, source in definitions(path).items():
            if name in canonical and name not in own and source != canonical[name]:
                text = text.replace(source, canonical[name])
                print(f"{other}.py: {name}", file=sys.stderr)
        path.write_text(text)
