"""torch.compile: compiled runs equal eager ones, and a number that is changed in the loop counts."""

import importlib

import numpy as np
import pytest
import torch
from conftest import ONE, ROOT, SMALL, assert_one_line, flags_of, probe, scalars

from recipes import quick_compile

# Two iterations, whose schedule can be seen. It begins with the run's own coefficients.
FAST = {"total_timesteps": 128, "learning_rate": 1e-3, "ent_coef": 0.5, "clip_coef": 0.1, "vf_coef": 1.0}
OTHER_CHOICES = {"norm_adv": True, "recompute_advantages": True, "clip_vloss": True, "max_grad_norm": 0.1}
SCHEDULE = """
            args.ent_coef, args.clip_coef, args.vf_coef = 0.5 * iteration, 0.1 / iteration, 1.0 / iteration
"""


@pytest.mark.parametrize(
    "name, flags",
    [
        ("ppo_continuous", {"env_id": "box/Target-v0"}),
        ("ppo_discrete", {"env_id": "masks/Masked-v0", **OTHER_CHOICES}),
        # A memory learns nothing of its own past where an episode has one step, as in the usual probe.
        ("ppo_rnn", {"env_id": "box/Chain-v0", **OTHER_CHOICES}),
        ("ppo_rnn", {"env_id": "masks/Masked-v0", "cell": "gru"}),
    ],
    ids=["continuous", "discrete with masks and other choices", "LSTM with other choices", "GRU with masks"],
)
def test_compiled_equals_eager(tmp_path, monkeypatch, name, flags):
    """After two iterations the learner, its statistics, its optimizer and its logs are those of eager mode. In
    ppo_discrete.py a second compiled run has the same bits.

    ppo_continuous.py and the GRU run as copies that schedule coefficients in the loop. Their learners must differ from
    those without the schedule. (The traps: a compiled function that leaves a tensor as it was, and a number that became
    a constant.) The GRU is only traced, without kernels: building them takes long."""
    if "cell" in flags:
        quick_compile(monkeypatch)
    original = script = importlib.import_module(name)
    is_scheduled = name == "ppo_continuous" or "cell" in flags
    if is_scheduled:
        text, place = (ROOT / f"{name}.py").read_text(), "            remaining = 1.0 -"
        assert text.count(place) == 1
        (tmp_path / f"my_{name}.py").write_text(text.replace(place, SCHEDULE + place))
        monkeypatch.syspath_prepend(tmp_path)
        script = importlib.import_module(f"my_{name}")

    def train(script, **changes):
        args = script.Args(**SMALL | {"runs_dir": str(tmp_path)} | FAST | flags | changes)
        agent, run_dir = script.train(args)
        return agent.state_dict(), script.load_checkpoint(run_dir)["optimizer"], scalars(run_dir)

    eager, compiled = train(script), train(script, compile=True)
    torch.testing.assert_close(compiled[:2], eager[:2], atol=1e-5, rtol=1e-4)
    for key in eager[2].keys() - {"charts/SPS"}:
        np.testing.assert_allclose(compiled[2][key], eager[2][key], atol=1e-4, rtol=1e-3, err_msg=key)
    if name == "ppo_discrete":
        torch.testing.assert_close(train(script, compile=True)[:2], compiled[:2], rtol=0, atol=0)
    if is_scheduled:
        constant, *_ = train(original)
        assert (eager[0]["actor.0.weight"] - constant["actor.0.weight"]).abs().max() > 1e-4


@ONE
def test_no_compiler(script, small_args, main, monkeypatch, tmp_path):
    """As in a small container: refused in one line, before anything is created."""
    monkeypatch.setenv("PATH", str(tmp_path))
    refused = main(script, *flags_of(**vars(small_args(compile=True)) | {"hidden_sizes": "[64, 64]"}))
    assert_one_line(refused, "torch.compile needs a C++ compiler: install g++, or add --no-compile")
    assert not list(tmp_path.iterdir())
    assert main(script, *flags_of(**SMALL, env_id=probe(script), runs_dir=tmp_path)).returncode == 0
