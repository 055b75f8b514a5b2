"""--capture-video."""

import random

import numpy as np
import probes
import torch
from conftest import ONE, SMALL, assert_one_line, assert_same_learner, flags_of, probe


class Drawn(probes.Chain):
    """It can be drawn, as noise. It draws from the global generators too."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012

    def __init__(self, discrete, render_mode=None):
        super().__init__(discrete)
        self.render_mode = render_mode

    def render(self):
        random.random(), np.random.rand(), torch.rand(1)
        return np.random.default_rng(self.state).integers(0, 256, (64, 64, 3), np.uint8)


probes.register("Noise", Drawn)


def test_video(script, small_args, main):
    """In training, where it changes nothing of what is learned, and in evaluation."""
    changes = {"env_id": probe(script, "Noise"), "total_timesteps": 128}
    _, run_dir = script.train(small_args(capture_video=True, **changes))
    videos = run_dir / "videos"
    assert sorted(path.name for path in videos.glob("*.mp4")) == ["step-128-episode-0.mp4", "step-64-episode-0.mp4"]
    _, without = script.train(small_args(**changes))
    assert_same_learner(script.load_checkpoint(run_dir), script.load_checkpoint(without))
    finished = main(script, "--evaluate", run_dir, "--eval-episodes=1", "--capture-video")
    assert finished.returncode == 0, finished.stderr
    assert len(list(videos.glob("*.mp4"))) == 3 and all(path.stat().st_size > 1000 for path in videos.glob("*.mp4"))


@ONE
def test_about_ten_videos_of_a_run(script, small_args):
    """However many iterations it has; the first one is among them."""
    sizes = {"num_envs": 1, "num_steps": 8, "num_minibatches": 1, "total_timesteps": 8 * 48}
    _, run_dir = script.train(small_args(env_id=probe(script, "Noise"), capture_video=True, **sizes))
    names = [path.name for path in run_dir.glob("videos/*.mp4")]
    assert 9 <= len(names) <= 12 and "step-8-episode-0.mp4" in names


@ONE
def test_videos_in_wandb(script, small_args, offline_wandb):
    changes = {"env_id": probe(script, "Noise"), "total_timesteps": 128, "capture_video": True, "track": True}
    _, run_dir = script.train(small_args(**changes))
    uploaded = run_dir.glob("wandb/offline-run-*/files/videos/*.mp4")
    assert {path.name for path in uploaded} == {path.name for path in (run_dir / "videos").glob("*.mp4")} != set()


def test_environment_that_cannot_be_drawn(script, tmp_path, main):
    """Refused in one line, before anything is trained."""
    flags = flags_of(env_id=probe(script), runs_dir=tmp_path, capture_video=True, **SMALL)
    assert_one_line(main(script, *flags), f"{probe(script)} cannot record videos")
    assert not list(tmp_path.iterdir())
