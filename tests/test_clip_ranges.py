"""--anneal-clip and --vf-clip-coef."""

import pytest
import torch
from conftest import golden, loss_and_metrics


def test_clip_ranges(script):
    """--vf-clip-coef is a range of its own, and --anneal-clip scales both."""
    inputs, _ = golden("value_loss")
    inputs["old_logprob"] = torch.zeros_like(inputs["returns"])
    value_loss = lambda *a, **args: loss_and_metrics(script, inputs, *a, clip_vloss=True, **args)[1]["value_loss"]  # noqa: E731
    wide, narrow = value_loss(clip_coef=0.2), value_loss(clip_coef=0.1)
    assert wide != narrow
    assert value_loss(clip_coef=0.1, vf_clip_coef=0.2) == wide
    assert value_loss(0.5, clip_coef=0.2) == narrow
    assert value_loss(0.5, clip_coef=0.1, vf_clip_coef=0.4) == wide
    inputs, expected = golden("policy_loss")
    clipfrac = lambda *a, **args: loss_and_metrics(script, inputs, *a, **args)[1]["clipfrac"].item()  # noqa: E731
    assert clipfrac(0.5, clip_coef=2 * inputs["clip_coef"]) == pytest.approx(expected["clipfrac_ratio"])
