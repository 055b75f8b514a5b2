"""Which GPU a process uses. The calls are recorded: no GPU is needed."""

import pytest
import torch


@pytest.mark.parametrize("environment, device", [({}, "cuda:1"), ({"LOCAL_RANK": "3"}, "cuda:3")])
@pytest.mark.parametrize("name", ["ppo_atari", "ppo_gpu_sim", "ppo_rlhf"])
def test_gpu_of_a_process(monkeypatch, name, environment, device):
    """That of --device cuda:1, or of the process of torchrun, is the current device: graphs would else be recorded on
    the first GPU."""
    script = pytest.importorskip(name)
    calls, precisions = [], []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precisions.append)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert script.start_device(script.Args(device="cuda:1")) == (torch.device(device), 0, 1)
    assert calls == [torch.device(device)]
    script.start_device(script.Args(device="cpu"))
    assert len(calls) == 1 and precisions == ([] if name == "ppo_rlhf" else ["high"])  # TF32 on CUDA, not on a CPU
