"""NaN, infinity and numbers too large for float32, from an environment or from learning: one line, code 2, and the last
checkpoint stays."""

from pathlib import Path

import gymnasium as gym
import numpy as np
import probes
import pytest
from conftest import assert_one_line, flags_of, probe


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


class NanEnd(probes.Chain):
    """The last observation of its third episode, which is truncated, is NaN."""

    def step(self, action):
        obs, *rest = super().step(action)
        self.ends = getattr(self, "ends", 0) + rest[2]
        return obs * np.nan if rest[2] and self.ends == 3 else obs, *rest


class NanLater(probes.Target):
    """Observes NaN after its 300th step, and takes any action, also the one that NaN leads to."""

    def __init__(self, discrete, number=300):
        super().__init__(discrete)
        self.number, self.steps = number, 0

    def step(self, action):
        self.steps += 1
        is_nan = self.steps == self.number
        return self.target * np.nan if is_nan else self.target.copy(), 0.0, not is_nan, False, {}


class Huge(probes.Target):
    """From the 300th step on, its rewards or its observations are this many times as large."""

    def __init__(self, discrete, reward=1.0, obs=1.0):
        super().__init__(discrete)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
        self.reward, self.obs, self.steps = reward, obs, 0

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        return obs.astype(float) * (self.obs if self.steps >= 300 else 1), info

    def step(self, action):
        self.steps += 1
        obs, reward, *rest = super().step(action)
        return obs.astype(float), (reward - 1) * (self.reward if self.steps >= 300 else 1), *rest


probes.register("HugeRewards", Huge, reward=1e19)
probes.register("HugeObs", Huge, obs=1e200)
probes.register("NanLater", NanLater)
probes.register("NanLast", NanLater, number=304)  # the last of 19 rollouts
probes.register("NanFirst", NanReset, number=1)
probes.register("NanReset", NanReset, number=10)
probes.register("NanEnd", NanEnd, lengths=(5,))


SOURCES = {"NanFirst": "observations", "NanReset": "observations", "NanEnd": "weights"}


@pytest.mark.parametrize("name", SOURCES)
def test_no_checkpoint_of_nan(script, small_args, main, name):
    """In the first iteration. The line says where it came from."""
    args = small_args(env_id=probe(script, name), norm_obs=False)
    assert_one_line(
        main(script, *flags_of(**vars(args) | {"hidden_sizes": "[64, 64]"})),
        f"NaN or a number above 1e15 in the {SOURCES[name]}: ",
    )
    assert not list(Path(args.runs_dir).glob("*/checkpoint.pt"))


@pytest.mark.parametrize(
    "name, source, changes",
    [
        ("NanLater", "observations", {}),
        ("NanLast", "weights", {}),
        ("NanReward", "rewards", {}),
        ("Infinity", "rewards", {}),
        ("HugeObs", "observations", {}),
        ("HugeRewards", "rewards", {"norm_reward": False}),
    ],
)
def test_environment_that_returns_nan(script, small_args, name, source, changes):
    """In step 1200 or 1216: the checkpoint before it stays, in a folder that the line names, and it can be resumed."""
    args = small_args(env_id=probe(script, name), total_timesteps=64 * 20, checkpoint_interval=0, **changes)
    with pytest.raises(ValueError, match=f"^NaN or a number above 1e15 in the {source}: ") as error:
        script.train(args)
    (run_dir,) = Path(args.runs_dir).iterdir()
    saved = script.load_checkpoint(run_dir)
    assert str(run_dir) in str(error.value) and saved["global_step"] == 64 * 18
    assert all(tensor.isfinite().all() for tensor in saved["agent"].values())
    script.train(resume=run_dir)
    assert script.load_checkpoint(run_dir)["global_step"] == 64 * 20


def test_weights_that_are_not_finite_are_not_saved(script, run_dir, main):
    """A resumed run that diverges leaves the checkpoint as it was."""
    before = (run_dir / "checkpoint.pt").read_bytes()
    flags = ["--learning-rate=1e38", "--max-grad-norm=0", "--no-anneal-lr", "--total-timesteps=1024"]
    diverged = main(script, "--resume", run_dir, *flags, "--checkpoint-interval=0", "--target-kl=None")
    assert_one_line(diverged, f"NaN or a number above 1e15 in the weights: stopped, not saved in {run_dir}")
    assert (run_dir / "checkpoint.pt").read_bytes() == before
