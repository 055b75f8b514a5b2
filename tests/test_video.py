"""--capture-video."""

import json

import numpy as np
import probes


class Drawn(probes.Chain):
    """It can be drawn, as noise."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012

    def __init__(self, discrete, render_mode=None):
        super().__init__(discrete)
        self.render_mode = render_mode

    def render(self):
        return np.random.default_rng(self.state).integers(0, 256, (64, 64, 3), np.uint8)


probes.register("Noise", Drawn)
# What draws without a display; an ALE game has an evaluation of its own.
DRAWN = {"ppo_continuous": "box/Noise-v0", "ppo_discrete": "ALE/Breakout-v5", "ppo_rnn": "CartPole-v1"}


def test_video(script, small_args, main):
    """--capture-video in training and in evaluation, on a simulator that can draw."""
    # Sampled actions: the likeliest ones of a new agent may never start a game of Breakout.
    changes = {"capture_video": True, "eval_deterministic": False, "total_timesteps": 128}
    if script.__name__ == "ppo_discrete":
        changes["env_kwargs"] = json.dumps({"max_num_frames_per_episode": 200})
    _, run_dir = script.train(small_args(env_id=DRAWN[script.__name__], **changes))
    assert len(list((run_dir / "videos").glob("*.mp4"))) == 2
    finished = main(script, "--evaluate", run_dir, "--eval-episodes=1", "--capture-video")
    assert finished.returncode == 0, finished.stderr
    videos = list((run_dir / "videos").glob("*.mp4"))
    assert len(videos) == 3 and all(path.stat().st_size > 1000 for path in videos)
