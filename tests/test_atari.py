"""variants/ppo_atari.py: the protocol of Atari games, the Nature CNN, images outside ALE."""

import json
import sys

import ale_py
import gymnasium as gym
import numpy as np
import ppo_atari as script
import probes
import pytest
import torch
from conftest import scalars
from filelock import FileLock

SMALL = {"num_envs": 4, "num_steps": 16, "total_timesteps": 256, "num_minibatches": 2, "update_epochs": 2}
SMALL |= {"compile": False, "device": "cpu"}


def train(runs_dir, **changes):
    """The agent and the run folder of a short run."""
    return script.train(script.Args(**SMALL | {"runs_dir": str(runs_dir)} | changes))


def rows(run_dir):
    """episodes.csv: (step, return, length) of each episode"""
    lines = [line.split(",") for line in (run_dir / "episodes.csv").read_text().splitlines()[1:]]
    return [(int(step), float(episodic_return), int(length)) for step, episodic_return, length, _ in lines]


class Games(ale_py.AtariVectorEnv):
    """A vector of games that remembers what it was asked for, what went in and what came out. ale-py fills only those
    rows of infos["final_obs"] whose game was truncated: here all others are 213."""

    def __init__(self, game, num_envs, **asked):
        super().__init__(game, num_envs, **asked)
        Games.last, self.name, self.asked, self.steps = self, game, asked, []

    def reset(self, *, seed=None, options=None):
        self.seeds = seed
        return super().reset(seed=seed, options=options)

    def step(self, actions):
        obs, reward, terminated, truncated, infos = super().step(actions)
        if "final_obs" in infos:
            infos["final_obs"] = np.where(truncated[:, None, None, None], infos["final_obs"], np.uint8(213))
        final_obs = infos.get("final_obs", obs)[truncated & ~terminated]
        self.steps.append((actions, reward, terminated, truncated, final_obs))
        return obs, reward, terminated, truncated, infos


class Game(ale_py.AtariEnv):
    """The game of an evaluation, which remembers what it was asked for, and how many lives each step left."""

    def __init__(self, img_height=84, img_width=84, **asked):  # sizes are for the vector above
        super().__init__(**asked)
        Game.last, self.asked, self.lives = self, asked, []

    def step(self, action):
        result = super().step(action)
        self.lives.append(self.ale.lives())
        return result


for name in ("Breakout", "Pong"):
    kwargs = gym.spec(f"ALE/{name}-v5").kwargs
    gym.register(f"ALE/My{name}-v5", Game, vector_entry_point=Games, kwargs=kwargs)


def play(runs_dir, name, env_kwargs, **changes):
    changes = {"num_steps": 128, "num_minibatches": 1, "update_epochs": 1} | changes
    return train(runs_dir, env_id=f"ALE/My{name}-v5", env_kwargs=json.dumps(env_kwargs), **changes)[1]


CASES = {"Breakout": (600, 50), "Pong": (9999, 140)}  # frames of a game, steps of a rollout


@pytest.mark.parametrize("name", CASES)
def test_scores_and_what_the_learner_sees(tmp_path, watch, name):
    """Small pictures of games, which end by themselves or after some frames. Breakout has lives, Pong has none and
    negative rewards.

    The same actions in a second vector of the same games, which knows nothing of lost lives: its own ends and its
    rewards give the rows of episodes.csv. What reaches the advantages: the sign of each reward, every lost life as a
    termination, and the final observations of truncated games only."""
    estimates, (frames, num_steps) = watch(script, "estimate_advantages"), CASES[name]
    limit, size = {"max_num_frames_per_episode": frames}, {"img_height": 36, "img_width": 36}
    run_dir = play(tmp_path, name, limit | size, num_steps=num_steps, total_timesteps=4 * 8 * num_steps)
    games = Games.last
    actions, raw, terminated, truncated, final_obs = zip(*games.steps)
    options = {"repeat_action_probability": 0.0, "reward_clipping": False, "autoreset_mode": "SameStep"}
    again = ale_py.AtariVectorEnv(games.name, 4, **options | limit | size)
    again.reset(seed=games.seeds)
    expected, scores, lengths = [], np.zeros(4), np.zeros(4, int)
    for i, action in enumerate(actions):
        _, reward, game_over, cut, _ = again.step(action)
        scores, lengths = scores + reward, lengths + 1
        for n in np.flatnonzero(game_over | cut):
            expected.append(((i + 1) * 4, scores[n], lengths[n]))
            scores[n] = lengths[n] = 0
    assert rows(run_dir) == expected
    assert len(expected) >= 3 and (np.sum(terminated) > 2 * len(expected)) == (name != "Pong")
    some_are_cut = any(0 < sum(cut) < 4 for cut in truncated) and np.sum(truncated) < len(expected)
    assert some_are_cut if name == "Breakout" else np.min(raw) < 0

    rewards, terminations = (np.concatenate([arguments[k] for arguments, _ in estimates]) for k in (4, 5))
    assert np.array_equal(rewards, np.sign(raw)) and np.array_equal(terminations, terminated)
    assert np.array_equal(np.concatenate([arguments[3] for arguments, _ in estimates]), np.concatenate(final_obs))


@pytest.mark.parametrize("sticky", [{}, {"repeat_action_probability": 0.25}])
def test_protocol_of_the_games(tmp_path, sticky):
    """What ale-py is asked for; --env-kwargs reach the games of training and evaluation. Breakout begins with FIRE in
    both: with no-ops only, an evaluation loses a life soon, instead of never."""
    kwargs = sticky | {"max_num_frames_per_episode": 500}
    run_dir = play(tmp_path, "Breakout", kwargs, num_steps=8, total_timesteps=32)
    agent, args, shapes = script.load_agent(run_dir), script.load_args(run_dir), []
    agent.predict = lambda obs, *_: shapes.append(obs.shape) or 0
    script.evaluate(agent, args, 1)
    assert 90 < len(shapes) <= 125 and set(shapes) == {(4, 84, 84)}
    assert Game.last.lives[0] == 5 and Game.last.lives[-1] < 5
    training, evaluation = Games.last.asked, Game.last.asked
    for asked in (training, evaluation):
        assert asked["repeat_action_probability"] == sticky.get("repeat_action_probability", 0.0)
    assert (training["reward_clipping"], training["life_loss_info"]) == (False, True)
    assert not training.get("episodic_life")  # a lost life does not reset the game
    assert evaluation["frameskip"] == 1  # AtariPreprocessing skips


@pytest.mark.parametrize(("kwargs", "frames"), [({}, 4), ({"frameskip": 2}, 2), ({"frameskip": 1}, 1)])
def test_frames_of_a_step(kwargs, frames):
    """The same in training and in evaluation."""
    args = script.Args(env_id="ALE/Pong-v5", env_kwargs=json.dumps(kwargs))
    with script.make_env(args) as env:
        env.reset(seed=1)
        before = env.unwrapped.ale.getEpisodeFrameNumber()
        env.step(0)
        assert env.unwrapped.ale.getEpisodeFrameNumber() - before == frames
    envs = script.make_envs(args, 1)
    _, infos = envs.reset(seed=1)
    before = infos["episode_frame_number"].item()
    assert envs.step(np.zeros(1, int))[4]["episode_frame_number"].item() - before == frames
    envs.close()


def test_evaluation_sees_what_training_saw():
    """gymnasium's preprocessing of one game, frame by frame, against ale-py's of a vector: the same pictures."""
    args = script.Args(env_id="ALE/Pong-v5")
    env, envs = script.make_env(args), script.make_envs(args, 1)
    # The no-ops at the start are random: look for a start with the same number of them.
    obs, infos = envs.reset(seed=1)
    for seed in range(1000):
        one, _ = env.reset(seed=seed)
        if env.unwrapped.ale.getEpisodeFrameNumber() == infos["episode_frame_number"][0]:
            break
    for action in np.random.default_rng(0).integers(6, size=200):
        assert np.array_equal(one, obs[0])
        one, reward, *_ = env.step(action)
        obs, rewards, *_ = envs.step(action[None])
        assert reward == rewards[0]
    envs.close()


def test_a_game_of_the_command_line(tmp_path, monkeypatch, capsys):
    """Trained, continued and evaluated as a user does it; a game's old name gets one line."""

    def main(*flags):
        words = ["ppo_atari.py", *flags, "--no-compile", "--device", "cpu", "--runs-dir", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", words)
        script.main()
        return capsys.readouterr().out

    game = ["--env-id", "ALE/Breakout-v5", "--num-envs", "2", "--num-steps", "8"]
    main(*game, "--preset", "cleanrl", "--total-timesteps", "16")
    (run_dir,) = tmp_path.iterdir()
    with FileLock(run_dir / "lock"), pytest.raises(script.UsageError, match="another process is training"):
        main("--resume", "latest", "--total-timesteps", "32")
    main("--resume", "latest", "--total-timesteps", "32")
    saved = script.load_checkpoint(run_dir)
    assert saved["global_step"] == 32 and saved["args"]["clip_vloss"] and not saved["args"]["eval_deterministic"]
    printed = main("--evaluate", str(run_dir), "--eval-episodes", "1", "--capture-video")
    assert printed.startswith("returns: ") and "\nmean " in printed
    assert main("--evaluate", str(run_dir), "--eval-episodes", "1", "--no-capture-video") == printed  # seeds the noise
    assert [path.name for path in (run_dir / "videos").glob("*.mp4")] == ["evaluation-episode-0.mp4"]
    for name in ("BreakoutNoFrameskip-v4", "Breakout-v4"):
        with pytest.raises(script.UsageError, match="ALE/NAME-v5"):
            main("--env-id", name)
    with pytest.raises(script.UsageError, match="unexpected keyword argument 'difficulty'"):
        main(*game, "--env-kwargs", '{"difficulty": 0}')  # which ale-py's vector of games does not take
    with pytest.raises(TypeError, match="unexpected keyword argument 'noop_max'"):
        main(*game, "--env-kwargs", '{"noop_max": 0}')  # which evaluation does not take
    with pytest.raises(gym.error.NameNotFound):
        main("--env-id", "ALE/Brakeout-v5")


def test_ratio_is_one_in_the_first_minibatch(tmp_path, watch):
    """In two iterations of one minibatch and two epochs. A ratio r adds r - 1 - log(r) to the KL, which is 0 only for
    r = 1."""
    minibatches = watch(script, "ppo_loss")
    play(tmp_path, "Breakout", {}, num_envs=2, num_steps=32, update_epochs=2, total_timesteps=128, learning_rate=1e-3)
    kls = [metrics["approx_kl"].item() for _, (_, metrics) in minibatches]
    assert len(kls) == 4 and max(kls[::2]) < 1e-10 and min(kls[1::2]) > 1e-8


def test_compiled_equals_eager(tmp_path, watch):
    """The gradients of two iterations, at Atari's minibatch of 256."""
    sizes = {"num_envs": 2, "num_steps": 128, "num_minibatches": 1, "update_epochs": 1, "total_timesteps": 512}
    sizes |= {"env_id": "ALE/MyBreakout-v5", "runs_dir": str(tmp_path), "clip_vloss": True, "ent_coef": 0.5}

    def gradients(compile):
        calls = watch(script, "average_over_ranks")
        script.train(script.Args(**SMALL | sizes | {"compile": compile}))
        return [gradient for _, (gradient, _) in calls]

    for eager, compiled in zip(gradients(compile=False), gradients(compile=True), strict=True):
        assert (compiled - eager).norm() < 1e-5 * eager.norm() and eager.norm() > 1e-2


def test_network_is_that_of_sb3():
    """Both have Mnih et al.'s layers (2015): the same weights give the same features."""
    from stable_baselines3.common.torch_layers import NatureCNN

    ours, theirs = script.NatureCNN((4, 84, 84)), NatureCNN(gym.spaces.Box(0, 255, (4, 84, 84), np.uint8))
    theirs.load_state_dict(dict(zip(theirs.state_dict(), ours.state_dict().values(), strict=True)))
    images = torch.randint(0, 256, (2, 4, 84, 84), dtype=torch.uint8)
    torch.testing.assert_close(ours(images), theirs(images / 255), rtol=1e-4, atol=1e-5)


def test_channel_order_does_not_matter():
    """The same weights on the same picture, its channels first or last."""
    first, last = script.NatureCNN((3, 40, 48)), script.NatureCNN((40, 48, 3))
    last.load_state_dict(first.state_dict())
    image = torch.randint(0, 256, (2, 5, 3, 40, 48), dtype=torch.uint8)
    features = first(image)
    assert features.shape == (2, 5, 512)
    torch.testing.assert_close(features, last(image.movedim(-3, -1)))
    torch.testing.assert_close(features[0, 0], first(image[0, 0]), atol=1e-5, rtol=1e-4)


class Sides(gym.Env):
    """A picture that is bright on the side that has to be chosen, in an array that is used again for the next one."""

    def __init__(self, shape=(40, 48, 3), prize=3.0):
        self.prize = prize
        self.observation_space = gym.spaces.Box(0, 255, shape, np.uint8)
        self.action_space = gym.spaces.Discrete(2, start=5)
        self.image = np.zeros(shape, np.uint8)[::-1]  # as MuJoCo renders: torch.from_numpy refuses such a view

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.side = int(self.np_random.integers(2))
        bright = slice(24 * self.side, 24 * self.side + 24)
        self.image[:] = 0
        self.image[(..., bright) if self.image.shape[0] == 3 else (slice(None), bright)] = 255
        return self.image, {}

    def step(self, action):
        self.image[:] = 7
        return self.image, self.prize * (action - 5 == self.side), False, True, {}


gym.register("images/Last-v0", Sides, disable_env_checker=True)
gym.register("images/First-v0", Sides, kwargs={"shape": (3, 40, 48)}, disable_env_checker=True)


def test_nan(tmp_path):
    with pytest.raises(script.UsageError, match="NaN or infinity in the rewards"):
        train(tmp_path, env_id="images/Last-v0", env_kwargs='{"prize": NaN}')
    assert not list(tmp_path.glob("*/checkpoint.pt"))


def test_images(tmp_path, watch):
    """Stored as bytes, learned, saved, loaded, evaluated. The critic sees the final observations that the environment
    ended in. Rewards are raw in what is reported."""
    estimates, changes = watch(script, "estimate_advantages"), {"total_timesteps": 1024, "update_epochs": 4}
    agent, run_dir = train(tmp_path, env_id="images/Last-v0", learning_rate=1e-3, **changes)
    (_, obs, _, final_obs, rewards, *_), _ = estimates[0]
    assert obs.dtype == final_obs.dtype == torch.uint8 and (final_obs == 7).all() and len(final_obs) == 64
    assert set(rewards.flatten().tolist()) == {0.0, 1.0} and {row[1:] for row in rows(run_dir)} == {(0.0, 1), (3.0, 1)}
    loaded, args = script.load_agent(run_dir), script.load_args(run_dir)
    args.eval_deterministic = True
    assert script.evaluate(loaded, args, 20).mean() == 3
    image = np.full(agent.obs_shape.tolist(), 255, np.uint8)
    assert agent.predict(image) in (5, 6) and agent.predict(image[None]).shape == (1,)
    with pytest.raises(ValueError, match="of shape"):
        agent.predict(image[:, :20])
    train(tmp_path, env_id="images/Last-v0", total_timesteps=64, clip_reward=False)
    assert set(estimates[-1][0][4].flatten().tolist()) == {0.0, 3.0}


def test_settings_of_the_update(tmp_path, watch):
    """gamma and lambda reach the advantages, which the second epoch computes again. The rate falls. The gradient is
    clipped: Adam's first step keeps a tenth of it."""
    estimates, settings = watch(script, "estimate_advantages"), {"gamma": 0.9, "gae_lambda": 0.8, "num_minibatches": 1}
    settings |= {"env_id": "images/Last-v0", "learning_rate": 1e-3, "max_grad_norm": 1e-3, "recompute_advantages": True}
    _, run_dir = train(tmp_path, total_timesteps=128, **settings)
    assert [arguments[-2:] for arguments, _ in estimates] == [(0.9, 0.8)] * 4  # two iterations
    assert [rate for _, rate in scalars(run_dir)["charts/learning_rate"]] == pytest.approx([1e-3, 5e-4])
    _, run_dir = train(tmp_path, total_timesteps=64, update_epochs=1, **settings)
    moment = script.load_checkpoint(run_dir)["optimizer"]["state"][0]["exp_avg"]
    assert 10 * moment.norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_resume_with_images_of_another_shape(tmp_path):
    """The weights would fit, but the saved agent would refuse the new images."""
    _, run_dir = train(tmp_path, env_id="images/Last-v0", total_timesteps=64)
    args = script.load_args(run_dir)
    args.env_kwargs, args.total_timesteps = '{"shape": [41, 49, 3]}', 128
    with pytest.raises(script.UsageError, match="has another obs_shape"):
        script.train(args, run_dir)


@pytest.mark.parametrize("shape", [(7, 48, 3), (40, 3, 48), (48, 48)])
def test_what_is_no_image_is_refused(tmp_path, shape):
    """Too few pixels for the network, channels in the middle, or none: one line says what is needed."""
    with pytest.raises(script.UsageError, match="36 x 36"):
        train(tmp_path, env_id="images/Last-v0", env_kwargs=json.dumps({"shape": shape}))
    assert not list(tmp_path.iterdir())


class Floats(gym.vector.VectorEnv):
    """A vector that an environment brings along, whose images are numbers between 0 and 1."""

    def __init__(self, num_envs, autoreset_mode):
        self.num_envs, self.single_action_space = num_envs, gym.spaces.Discrete(2)
        self.single_observation_space = gym.spaces.Box(0.0, 1.0, (40, 48, 3))
        self.metadata = {"autoreset_mode": autoreset_mode}


gym.register("images/Floats-v0", Sides, vector_entry_point=Floats, disable_env_checker=True)


def test_a_vector_without_bytes_is_refused(tmp_path):
    """Its images would be cut to 0 and 1."""
    with pytest.raises(script.UsageError, match="no uint8 images"):
        train(tmp_path, env_id="images/Floats-v0")


class Masked(probes.Masked):
    """The choices that are allowed are bright columns of a picture."""

    def __init__(self):
        super().__init__()
        self.observation_space = gym.spaces.Box(0, 255, (40, 48, 3), np.uint8)

    def observe(self):
        allowed, infos = super().observe()
        image = np.zeros((40, 48, 3), np.uint8)
        image[:, :5] = 255 * allowed[:, None]
        return image, infos


gym.register("images/Masked-v0", Masked)


def test_masks(tmp_path, watch):
    """The environment refuses what it forbids, in training and in evaluation. The update has the masks that the
    pictures show. predict takes one or many, with an array for each dimension too."""
    minibatches = watch(script, "ppo_loss")
    agent, run_dir = train(tmp_path, env_id="images/Masked-v0")
    for (_, _, mb_obs, _, mb_masks, *_), _ in minibatches:
        assert torch.equal(mb_masks, mb_obs[:, 0, :5, 0].bool()) and not mb_masks.all()
    args = script.load_args(run_dir)
    for args.eval_deterministic in (True, False):
        script.evaluate(agent, args, 5)
        image, masks = np.zeros((40, 48, 3), np.uint8), [([0, 0, 1], [1, 0]), ([1, 0, 0], [0, 1])]
        assert agent.predict(image, args.eval_deterministic, masks[0]).tolist() == [2, 0]
        assert agent.predict(np.stack([image] * 2), args.eval_deterministic, masks).tolist() == [[2, 0], [0, 1]]


def test_images_through_the_wrappers_of_gymnasium(tmp_path):
    """An environment registered with wrappers: grey, 84 x 84, the last four frames."""
    wrappers = (
        gym.wrappers.GrayscaleObservation.wrapper_spec(),
        gym.wrappers.ResizeObservation.wrapper_spec(shape=(84, 84)),
        gym.wrappers.FrameStackObservation.wrapper_spec(stack_size=4),
    )
    gym.register("images/Wrapped-v0", Sides, kwargs={"shape": (120, 100, 3)}, additional_wrappers=wrappers)
    agent, run_dir = train(tmp_path, env_id="images/Wrapped-v0", total_timesteps=64)
    assert agent.obs_shape.tolist() == [4, 84, 84]
    assert script.evaluate(agent, script.load_args(run_dir), 2).shape == (2,)


def test_same_seed_same_run(tmp_path):
    """Equal to the bit, after a resumption too. Another seed gives another run."""
    runs = []
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        _, run_dir = train(tmp_path / folder, env_id="images/First-v0", seed=seed, total_timesteps=128)
        args = script.Args(**vars(script.load_args(run_dir)) | {"total_timesteps": 256})
        torch.seed()  # nothing may depend on what ran before
        agent, _ = script.train(args, resume=run_dir)
        runs.append((torch.cat([x.flatten() for x in agent.parameters()]), rows(run_dir)))
    assert torch.equal(runs[0][0], runs[1][0]) and runs[0][1] == runs[1][1] and len(runs[0][1]) == 256
    assert not torch.equal(runs[0][0], runs[2][0]) and runs[0][1] != runs[2][1]
