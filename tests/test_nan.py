"""Environments that return NaN."""

import re
from pathlib import Path

import numpy as np
import probes
import pytest
from conftest import probe


class NanReset(probes.Target):
    """Observes NaN: at its 10th reset, or at its first one."""

    def __init__(self, discrete, number):
        super().__init__(discrete)
        self.number = number

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        self.number -= 1
        return obs * np.nan if self.number == 0 else obs, info

    def step(self, action):  # not the one above, which refuses NaN
        return self.target.copy(), 0.0, True, False, {}


probes.register("NanFirst", NanReset, number=1)
probes.register("NanReset", NanReset, number=10)


@pytest.mark.parametrize(
    "name, where", [("NanFirst", ""), ("NanReset", "NanReset-v0 returned NaN or infinity in step 36")]
)
def test_environment_that_resets_to_nan(script, small_args, name, where, capsys):
    """One line, code 2, no checkpoint."""
    args = small_args(env_id=probe(script, name), norm_obs=False)
    with pytest.raises(SystemExit) as exit:
        script.train(args)
    (error,) = capsys.readouterr().err.splitlines()
    assert exit.value.code == 2 and "NaN or infinity" in error and where in error
    assert not list(Path(args.runs_dir).glob("*/checkpoint.pt"))


@pytest.mark.parametrize("where, interval, kept", [("Obs", 7, 64 * 14), ("Reward", 100, 64)])
def test_environment_that_returns_nan(script, small_args, where, interval, kept, capsys):
    """One line, code 2; the last checkpoint before it stays, and it can be resumed. The first iteration leaves one,
    whatever the interval."""
    args = small_args(env_id=probe(script, f"Nan{where}"), total_timesteps=64 * 40, checkpoint_interval=interval)
    with pytest.raises(SystemExit) as exit:
        script.train(args)
    error = capsys.readouterr().err
    assert exit.value.code == 2 and re.search(r"Nan\S+ returned NaN or infinity in step 1200", error), error
    (run_dir,) = Path(args.runs_dir).iterdir()
    saved = script.load_checkpoint(run_dir)
    assert saved["global_step"] == kept
    assert all(tensor.isfinite().all() for tensor in saved["agent"].state_dict().values())
