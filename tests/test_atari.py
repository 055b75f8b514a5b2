"""Atari games of ale-py: the protocol of the published tables, the same in ppo_discrete.py and ppo_rnn.py."""

import json

import ale_py
import gymnasium as gym
import numpy as np
import pytest

BOTH = pytest.mark.parametrize("script", ["ppo_discrete", "ppo_rnn"], indirect=True)


@BOTH
def test_settings_of_atari_games(script):
    """An ALE id brings its defaults along, in whatever form it is given; each can be given again; others stay."""
    default = script.Args(**script.ATARI)
    for line in ("--env-id ALE/Pong-v5", "--env_id=ALE/Pong-v5", "--env_id=ale_py:ALE/Pong-v5"):
        args = script.parse_args(line.split())
        assert vars(args) == vars(default) | {"env_id": args.env_id} and args.env_id.endswith("ALE/Pong-v5")
    line = "--clip-coef=0.3 --env_id=ALE/Pong-v5 --clip_reward=False --num-envs 1e1 --seed 3"
    args = script.parse_args(line.split())
    given = {"clip_coef": 0.3, "env_id": "ALE/Pong-v5", "clip_reward": False, "num_envs": 10, "seed": 3}
    assert vars(args) == vars(default) | given
    assert script.parse_args([]) == script.Args()
    resumed = script.Args(env_id="ALE/Pong-v5", clip_coef=0.4)
    assert script.parse_args(["--seed=4"], default=resumed).clip_coef == 0.4


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
        self.steps.append(
            (actions, reward, terminated, truncated, infos.get("final_obs", obs)[truncated & ~terminated])
        )
        return obs, reward, terminated, truncated, infos


class Game(ale_py.AtariEnv):
    """The game of an evaluation, which remembers what it was asked for, and how many lives each step left."""

    def __init__(self, **asked):
        super().__init__(**asked)
        Game.last, self.asked, self.lives = self, asked, []

    def step(self, action):
        result = super().step(action)
        self.lives.append(self.ale.lives())
        return result


for name in ("Breakout", "Seaquest", "Pong"):
    kwargs = gym.spec(f"ALE/{name}-v5").kwargs
    gym.register(f"ALE/My{name}-v5", Game, vector_entry_point=Games, kwargs=kwargs)


@pytest.fixture
def play(script, small_args):
    """play("Pong", {"frameskip": 2}, ...) trains on a few games, and gives the run folder."""

    def play(name, env_kwargs, **changes):
        atari = {"env_id": f"ALE/My{name}-v5", "env_kwargs": json.dumps(env_kwargs), "num_envs": 4, "num_steps": 128}
        changes = {"num_minibatches": 1, "update_epochs": 1} | changes
        return script.train(small_args(**script.ATARI | atari | changes))[1]

    return play


CASES = {"Breakout": (600, 50), "Seaquest": (1000, 60), "Pong": (9999, 140)}  # frames of a game, steps of a rollout


@pytest.mark.parametrize(
    "script, name",
    [("ppo_discrete", "Breakout"), ("ppo_discrete", "Seaquest"), ("ppo_discrete", "Pong")]
    + [("ppo_rnn", "Breakout"), ("ppo_rnn", "Seaquest")],
    indirect=["script"],
)
def test_scores_and_what_the_learner_sees(script, play, watch, rollouts, name):
    """Small pictures of games, which end by themselves or after some frames. Breakout and Seaquest have lives, Pong has
    none and negative rewards.

    The same actions in a second vector of the same games, which knows nothing of lost lives: its own ends and its
    rewards give the rows of episodes.csv, and the starts of episodes that a memory sees. What reaches the advantages:
    the sign of each reward, every lost life as a termination, and the final observations of truncated games only."""
    estimates, (frames, num_steps) = watch(script, "estimate_advantages"), CASES[name]
    limit, size = {"max_num_frames_per_episode": frames}, {"img_height": 36, "img_width": 36}
    run_dir = play(name, limit | size, num_steps=num_steps, total_timesteps=4 * 8 * num_steps)
    games = Games.last
    actions, raw, terminated, truncated, final_obs = zip(*games.steps)
    options = {"repeat_action_probability": 0.0, "reward_clipping": False, "autoreset_mode": "SameStep"}
    again = ale_py.AtariVectorEnv(games.name, 4, **options | limit)
    again.reset(seed=games.seeds)
    expected, over, scores, lengths = [], [], np.zeros(4), np.zeros(4, int)
    for i, action in enumerate(actions):
        _, reward, game_over, cut, _ = again.step(action)
        over.append(game_over | cut)
        scores, lengths = scores + reward, lengths + 1
        for n in np.flatnonzero(over[-1]):
            expected.append(((i + 1) * 4, scores[n], lengths[n]))
            scores[n] = lengths[n] = 0
    lines = [line.split(",") for line in (run_dir / "episodes.csv").read_text().splitlines()[1:]]
    assert [(int(step), float(score), int(length)) for step, score, length, _ in lines] == expected
    assert len(expected) >= 3 and (np.sum(terminated) > 2 * len(expected)) == (name != "Pong")
    some_are_cut = any(0 < sum(cut) < 4 for cut in truncated) and np.sum(truncated) < len(expected)
    assert {"Breakout": some_are_cut, "Seaquest": np.max(raw) > 1, "Pong": np.min(raw) < 0}[name]

    rewards, terminations = (np.concatenate([arguments[k] for arguments, _ in estimates]) for k in (4, 5))
    assert np.array_equal(rewards, np.sign(raw)) and np.array_equal(terminations, terminated)
    assert np.array_equal(np.concatenate([arguments[3] for arguments, _ in rollouts]), np.concatenate(final_obs))
    if script.__name__ == "ppo_rnn":
        assert np.array_equal(np.concatenate([arguments[4][1:] for arguments, _ in rollouts]), over)


@BOTH
@pytest.mark.parametrize("sticky", [{}, {"repeat_action_probability": 0.25}])
def test_protocol_of_the_games(script, play, sticky):
    """What ale-py is asked for; --env-kwargs reach the games of training and evaluation. Breakout begins with FIRE in
    both: with no-ops only, an evaluation loses a life soon, instead of never."""
    run_dir = play("Breakout", sticky | {"max_num_frames_per_episode": 500}, num_steps=8, total_timesteps=32)
    agent, shapes = script.load_agent(run_dir), []
    agent.predict = lambda obs, *_: shapes.append(obs.shape) or ((0, None) if script.__name__ == "ppo_rnn" else 0)
    script.evaluate(agent, "ALE/MyBreakout-v5", 1, 0)
    assert 90 < len(shapes) <= 125 and set(shapes) == {(4, 84, 84)}
    assert Game.last.lives[0] == 5 and Game.last.lives[-1] < 5
    training, evaluation = Games.last.asked, Game.last.asked
    for asked in (training, evaluation):
        assert asked["repeat_action_probability"] == sticky.get("repeat_action_probability", 0.0)
    assert (training["reward_clipping"], training["episodic_life"], training["life_loss_info"]) == (False, False, True)
    assert evaluation["frameskip"] == 1  # AtariPreprocessing skips


@BOTH
def test_evaluation_sees_what_training_saw(script):
    """gymnasium's preprocessing of one game, frame by frame, against ale-py's of a vector: the same pictures."""
    env = script.make_evaluation_env("ALE/Pong-v5", "{}", False)
    envs = script.make_envs(script.Args(**script.ATARI | {"env_id": "ALE/Pong-v5"}), 1)
    # The no-ops at the start are random: look for a start with the same number of them.
    obs, infos = envs.reset(seed=np.array([1]))
    for seed in (25, *range(1000)):  # 25 is one, with ale-py 0.12
        one, info = env.reset(seed=seed)
        if info["episode_frame_number"] == infos["episode_frame_number"][0]:
            break
    for action in np.random.default_rng(0).integers(6, size=200):
        assert np.array_equal(one, obs[0])
        one, reward, *_ = env.step(action)
        obs, rewards, *_ = envs.step(action[None])
        assert reward == rewards[0]
    envs.close()


@BOTH
def test_ratio_is_one_in_the_first_minibatch(script, play, minibatches):
    """With the Nature CNN, in two iterations of one minibatch and two epochs. A ratio r adds r - 1 - log(r) to the KL,
    which is 0 only for r = 1."""
    play("Breakout", {}, num_envs=2, num_steps=32, update_epochs=2, total_timesteps=2 * 64, learning_rate=1e-3)
    kls = [metrics["approx_kl"].item() for _, (_, metrics) in minibatches]
    assert len(kls) == 4 and max(kls[::2]) < 1e-10 and min(kls[1::2]) > 1e-8


@pytest.mark.parametrize("script", ["ppo_discrete"], indirect=True)
def test_gradient_of_the_nature_cnn(play):
    """Compiled, at Atari's minibatch of 256: the run would end if it were not that of eager mode."""
    play("Breakout", {}, num_envs=2, total_timesteps=256, compile=True)
