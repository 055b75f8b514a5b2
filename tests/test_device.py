"""Which GPU a process uses. The calls are recorded: no GPU is needed."""

import sys

import pytest
import torch
from conftest import ROOT

sys.path.append(str(ROOT / "variants"))
import ppo_atari as script


@pytest.mark.parametrize("environment, device", [({}, "cuda:1"), ({"LOCAL_RANK": "3"}, "cuda:3")])
def test_gpu_of_a_process(monkeypatch, environment, device):
    """That of --device cuda:1, or of the process of torchrun, is the current device: graphs would else be recorded on
    the first GPU. One CPU thread is enough beside it."""
    calls, threads = [], []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert script.start_device(script.Args(device="cuda:1")) == (torch.device(device), 0, 1)
    assert calls == [torch.device(device)] and threads == [1]
    script.start_device(script.Args(device="cpu"))
    assert len(calls) == len(threads) == 1
