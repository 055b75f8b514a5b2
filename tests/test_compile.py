"""torch.compile: compiled runs equal eager ones, and a number that is changed in the loop counts."""

import importlib

import numpy as np
import pytest
import torch
from conftest import ONE, ROOT, SCRIPTS, SMALL, assert_one_line, flags_of, probe, scalars

OTHER_CHOICES = {"norm_adv": True, "recompute_advantages": True, "clip_vloss": True, "max_grad_norm": 0.1}


@pytest.mark.parametrize(
    "script, flags",
    [
        ("ppo_continuous", {"env_id": "box/Target-v0"}),
        ("ppo_discrete", {"env_id": "masks/Masked-v0", **OTHER_CHOICES}),
        # A memory learns nothing of its own past where an episode has one step, as in the usual probe.
        ("ppo_rnn", {"env_id": "box/Chain-v0", **OTHER_CHOICES}),
        ("ppo_rnn", {"env_id": "masks/Masked-v0", "cell": "gru"}),
    ],
    ids=["continuous", "discrete with masks and other choices", "LSTM with other choices", "GRU with masks"],
    indirect=["script"],
)
def test_compiled_equals_eager(script, small_args, flags):
    """After 24 minibatch updates in 3 iterations the whole learner, its statistics and its optimizer are those of eager
    mode, and they have changed. (The trap: a compiled function that leaves a tensor as it was, without an error.)"""
    learners = {}
    for compile in (False, True):
        agent, run_dir = script.train(small_args(compile=compile, total_timesteps=3 * 64, **flags))
        learners[compile] = agent.state_dict(), script.load_checkpoint(run_dir)["optimizer"], scalars(run_dir)
    eager, compiled = learners[False], learners[True]
    torch.testing.assert_close(compiled[0], eager[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(compiled[1], eager[1], atol=1e-5, rtol=1e-4)
    for key in eager[2].keys() - {"charts/SPS"}:
        theirs, ours = np.array(eager[2][key]), np.array(compiled[2][key])
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=1e-3, err_msg=key)
    # Learning rate 0 leaves what was there at first: all parameters have moved from it.
    before, _ = script.train(small_args(total_timesteps=64, learning_rate=0.0, **flags))
    for name, tensor in before.state_dict().items():
        if not name.startswith(("action_", "obs_rms", "return_rms", "log_std_shift")):
            assert not torch.equal(tensor, compiled[0][name]), f"{name} did not change"
    assert compiled[0]["obs_rms.count"] > 100 and compiled[0]["return_rms.count"] > 100


CHANGES = """
            args.ent_coef, args.clip_coef, args.vf_coef = 0.5 * iteration, 0.1 / iteration, 1.0 / iteration
"""


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_number_changed_in_the_loop_counts(tmp_path, monkeypatch, name):
    """As whoever copies a script schedules a coefficient: compiled and eager runs stay equal, and differ from a run
    without the schedule."""
    text, place = (ROOT / f"{name}.py").read_text(), "            remaining = 1.0 -"
    assert text.count(place) == 1
    path = tmp_path / f"my_{name}.py"
    path.write_text(text.replace(place, CHANGES + place))
    monkeypatch.syspath_prepend(tmp_path)
    script = importlib.import_module(path.stem)

    def weights(script, **changes):
        env_id = probe(script) if script.__name__ in SCRIPTS else probe(importlib.import_module(name))
        args = script.Args(**SMALL | {"env_id": env_id, "runs_dir": str(tmp_path), "total_timesteps": 192} | changes)
        return script.train(args)[0].state_dict()

    eager, compiled = weights(script), weights(script, compile=True)
    torch.testing.assert_close(compiled, eager, atol=1e-5, rtol=1e-4)
    unchanged = weights(importlib.import_module(name), ent_coef=0.5, clip_coef=0.1, vf_coef=1.0)
    assert (eager["actor.0.weight"] - unchanged["actor.0.weight"]).abs().max() > 1e-4


@ONE
def test_no_compiler(script, small_args, main, monkeypatch, tmp_path):
    """As in a small container: refused in one line, before anything is created."""
    monkeypatch.setenv("PATH", str(tmp_path))
    refused = main(script, *flags_of(**vars(small_args(compile=True)) | {"hidden_sizes": "[64, 64]"}))
    assert_one_line(refused, "torch.compile needs a C++ compiler: install g++, or add --no-compile")
    assert not list(tmp_path.iterdir())
    assert main(script, *flags_of(**SMALL, env_id=probe(script), runs_dir=tmp_path)).returncode == 0
