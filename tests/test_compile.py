"""torch.compile: compiled runs equal eager ones."""

import numpy as np
import pytest
import torch
from conftest import scalars

import ppo_continuous

OTHER_CHOICES = {
    "norm_adv": True,
    "recompute_advantages": True,
    "clip_vloss": True,
    "max_grad_norm": 0.1,
    "kl_coef": 0.1,
}
OTHER_CHOICES |= {"vf_clip_coef": 0.1, "anneal_clip": True, "desired_kl": 0.01}


@pytest.mark.parametrize(
    "script, flags",
    [
        ("ppo_continuous", {"env_id": "box/Target-v0"}),
        ("ppo_discrete", {"env_id": "masks/Masked-v0", **OTHER_CHOICES}),
        # A memory learns nothing of its own past where an episode has one step, as in the usual probe.
        ("ppo_rnn", {"env_id": "box/Chain-v0", **OTHER_CHOICES}),
        ("ppo_rnn", {"env_id": "masks/Masked-v0", "cell": "gru", "separate_critic_rnn": True}),
    ],
    ids=["continuous", "discrete with masks and other choices", "LSTM with other choices", "two GRUs with masks"],
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


def test_compiled_functions_refuse_other_shapes_and_types():
    """They are called without torch's guards: what they were not compiled for has to be an error, no wrong number."""
    weight, x = torch.randn(4, 3), torch.randn(8, 4)
    function = ppo_continuous.compiled(lambda x: (x @ weight).tanh(), ppo_continuous.Args(), x.device)
    torch.testing.assert_close(function(x), (x @ weight).tanh())
    torch.testing.assert_close(function(2 * x), (2 * x @ weight).tanh())
    for other in (x[:5], torch.randn(9, 4), x.double(), torch.randn(4, 8).T):
        with pytest.raises(RuntimeError):
            function(other)


def test_compiled_gradient_that_is_wrong():
    """A function that gives another result when it is compiled: torch.compile has done that to a gradient."""

    def gradient(x, factor):
        return x * (factor if torch.compiler.is_compiling() else 1.0), {}

    x, device = torch.randn(8), torch.device("cpu")
    for factor in (1.001, 0.9):
        function = ppo_continuous.compiled(lambda x: gradient(x, factor), ppo_continuous.Args(), device, check=True)  # noqa: B023
        if factor > 1:
            torch.testing.assert_close(function(x)[0], 1.001 * x)
        else:
            with pytest.raises(ValueError, match=r"gives a wrong gradient for these sizes: use --no-compile"):
                function(x)
