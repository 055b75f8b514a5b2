"""NaN and infinity, from an environment or from learning: one line, code 2, and the last checkpoint stays."""

from pathlib import Path

import numpy as np
import probes
import pytest
from conftest import SCRIPTS, assert_one_line, probe


class NanLater(probes.Target):
    """Observes NaN after its 44th step, and takes any action, also the one that NaN leads to."""

    def __init__(self, discrete, number=44):
        super().__init__(discrete)
        self.number, self.steps = number, 0

    def step(self, action):
        self.steps += 1
        is_nan = self.steps == self.number
        return self.target * np.nan if is_nan else self.target.copy(), 0.0, not is_nan, False, {}


probes.register("NanLater", NanLater)
probes.register("NanLast", NanLater, number=48)  # the last of three rollouts


CASES = [(script, *case) for script in SCRIPTS for case in (("NanLater", "observations"), ("NanReward", "rewards"))]
CASES += [(SCRIPTS[0], "NanLast", "weights")]  # test_weights_that_are_not_finite_are_not_saved has all


@pytest.mark.parametrize("script, name, source", CASES, indirect=["script"])
def test_environment_that_returns_nan(script, small_args, name, source):
    """In the third iteration: the checkpoint before it stays, and it can be resumed."""
    args = small_args(env_id=probe(script, name), total_timesteps=64 * 4, checkpoint_interval=0)
    with pytest.raises(ValueError, match=f"^NaN or infinity in the {source}: ") as error:
        script.train(args)
    (run_dir,) = Path(args.runs_dir).iterdir()
    saved = script.load_checkpoint(run_dir)
    assert "this iteration was not saved" in str(error.value) and saved["global_step"] == 64 * 2
    assert all(tensor.isfinite().all() for tensor in saved["agent"].values())
    script.train(resume=run_dir)
    assert script.load_checkpoint(run_dir)["global_step"] == 64 * 4


def test_weights_that_are_not_finite_are_not_saved(script, run_dir, main):
    """A resumed run that diverges leaves the checkpoint as it was."""
    before = (run_dir / "checkpoint.pt").read_bytes()
    flags = ["--learning-rate=1e38", "--max-grad-norm=0", "--no-anneal-lr", "--total-timesteps=1024"]
    diverged = main(script, "--resume", run_dir, *flags, "--checkpoint-interval=0", "--target-kl=None")
    assert_one_line(diverged, "NaN or infinity in the weights: training stopped; this iteration was not saved")
    assert (run_dir / "checkpoint.pt").read_bytes() == before
