"""What the scripts share is the same text in each of them. `python tests/test_parity.py` copies it from the first one
that has it into the others."""

import ast
import itertools
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = "ppo_continuous", "ppo_discrete", "ppo_rnn"
# What is about actions, observations or memory. All else that has one name has one text.
OWN = {"Args", "Agent", "VectorMember", "make_envs", "check", "load_agent", "evaluate", "ppo_loss", "train"}


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


ATARI = "variants/ppo_atari"
SIM = "variants/ppo_gpu_sim"
RLHF = "variants/ppo_rlhf"
PAIRS = [*itertools.combinations(SCRIPTS, 2), ("ppo_discrete", ATARI), ("ppo_continuous", SIM), (ATARI, SIM)]
PAIRS += [("ppo_continuous", RLHF)]
# What is about images, simulators of tensors and several processes.
OWN_OF = {("ppo_discrete", ATARI): OWN | {"compiled", "make_env", "Run", "main"}}
# ppo_continuous.py silences what its MuJoCo tasks print.
OWN_OF |= {("ppo_continuous", other): OWN | {"main"} for other in SCRIPTS[1:]}
for one in SCRIPTS[:2]:  # ppo_rnn.py replays its memory
    OWN_OF[one, "ppo_rnn"] = OWN_OF.get((one, "ppo_rnn"), OWN) | {"estimate_advantages"}
OWN_OF["ppo_continuous", SIM] = OWN_OF["ppo_discrete", ATARI] | {"RunningMeanStd", "mlp"}
OWN_OF[ATARI, SIM] = OWN | {"Run", "main", "start_device", "average_over_ranks"}
OWN_OF["ppo_continuous", RLHF] = OWN | {"Run", "main", "parse_args", "load_checkpoint"}


def shared(one, other):
    """Names that both have, whose text is to be the same."""
    names = definitions(ROOT / f"{one}.py").keys() & definitions(ROOT / f"{other}.py").keys()
    return names - OWN_OF.get((one, other), OWN)


@pytest.mark.parametrize("one, other", PAIRS)
def test_shared_text(one, other):
    canonical, copy = definitions(ROOT / f"{one}.py"), definitions(ROOT / f"{other}.py")
    names = shared(one, other)
    assert "explained_variance" in names and (other == RLHF or {"compute_gae", "parse_args"} <= names)
    different = [name for name in names if canonical[name] != copy[name]]
    assert not different, f"{different} differ: python tests/test_parity.py copies them from {one}.py"


@pytest.mark.parametrize("one, other", PAIRS)
def test_same_order(one, other):
    """So that `diff` shows what differs, and nothing else."""
    canonical, copy = definitions(ROOT / f"{one}.py"), definitions(ROOT / f"{other}.py")
    assert [name for name in canonical if name in copy] == [name for name in copy if name in canonical]


if __name__ == "__main__":
    for one, other in PAIRS:
        canonical, path = definitions(ROOT / f"{one}.py"), ROOT / f"{other}.py"
        text = path.read_text()
        for name in shared(one, other):
            if (source := definitions(path)[name]) != canonical[name]:
                text = text.replace(source, canonical[name])
                print(f"{other}.py: {name}", file=sys.stderr)
        path.write_text(text)
