"""Atari games of ale-py: the protocol of the published tables, the same in ppo_discrete.py and ppo_rnn.py."""

import ale_py
import gymnasium as gym
import numpy as np
import pytest
from conftest import SMALL
from torch import nn

BOTH = pytest.mark.parametrize("script", ["ppo_discrete", "ppo_rnn"], indirect=True)


@pytest.fixture
def args(script, tmp_path):
    return lambda **changes: script.Args(**{"runs_dir": str(tmp_path)} | SMALL | changes)


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


class Pixels(nn.Module):
    """A network for tests that need many steps of a game and no skill: some pixels, 512 of them."""

    def __init__(self, shape):
        super().__init__()

    def forward(self, images):
        return images[..., ::7, ::7].flatten(-3)[..., :512] / 255.0


@pytest.fixture
def game(script, args, monkeypatch):
    """Trains on a game with the cheap network; returns all that went into and came out of its vector environment."""
    original_step, original_reset, steps, seeds = ale_py.AtariVectorEnv.step, ale_py.AtariVectorEnv.reset, [], []

    def step(self, actions):
        result = original_step(self, actions)
        steps.append((actions, *result))
        return result

    def reset(self, *, seed=None, options=None):
        seeds.append(seed)
        return original_reset(self, seed=seed, options=options)

    monkeypatch.setattr(ale_py.AtariVectorEnv, "step", step)
    monkeypatch.setattr(ale_py.AtariVectorEnv, "reset", reset)
    monkeypatch.setattr(script, "NatureCNN", Pixels)

    def play(name, **changes):
        atari = script.ATARI | {"env_id": f"ALE/{name}-v5", "num_envs": 4, "num_steps": 50, "update_epochs": 1}
        _, run_dir = script.train(args(**atari | {"num_minibatches": 1, "eval_deterministic": True} | changes))
        return run_dir, steps, seeds[0]

    return play


def episodes_of(run_dir):
    lines = (run_dir / "episodes.csv").read_text().splitlines()[1:]
    return [(int(step), float(score), int(length)) for step, score, length, _ in (line.split(",") for line in lines)]


@pytest.mark.parametrize(
    "script, name",
    [("ppo_discrete", "Breakout"), ("ppo_discrete", "Seaquest"), ("ppo_discrete", "Pong"), ("ppo_rnn", "Breakout")],
    indirect=["script"],
)
def test_scores_are_those_of_whole_games(game, name):
    """The same actions in a second vector of the same games, which knows nothing of lost lives: its own `terminated`
    and its rewards give the same rows. Breakout and Seaquest have lives, Pong has none and negative rewards."""
    run_dir, steps, seeds = game(name, total_timesteps=4 * 1100)
    again = ale_py.AtariVectorEnv(
        {"Breakout": "breakout", "Seaquest": "seaquest", "Pong": "pong"}[name],
        4,
        repeat_action_probability=0.0,
        reward_clipping=False,
        autoreset_mode="SameStep",
    )
    again.reset(seed=seeds)
    expected, scores, lengths = [], np.zeros(4), np.zeros(4, int)
    for i, (actions, *_) in enumerate(list(steps)):
        _, reward, terminated, truncated, _ = again.ale.send(actions, np.ones(4, np.float32)) or again.ale.recv()
        scores, lengths = scores + reward, lengths + 1
        for n in np.flatnonzero(terminated | truncated):
            expected.append(((i + 1) * 4, scores[n], lengths[n]))
            scores[n] = lengths[n] = 0
    assert len(expected) >= 3 and episodes_of(run_dir) == expected
    lives_lost = sum(step[3].sum() for step in steps)
    assert (lives_lost > 2 * len(expected)) == (name != "Pong")


@BOTH
def test_learner_sees_signs_and_lost_lives(script, game, monkeypatch):
    """What reaches the advantages: the sign of each reward, and every lost life as a termination."""
    original, seen = script.compute_gae, []

    def spy(rewards, values, next_values, terminations, *rest):
        seen.append((rewards.clone(), terminations.clone()))
        return original(rewards, values, next_values, terminations, *rest)

    monkeypatch.setattr(script, "compute_gae", spy)
    _, steps, _ = game("Seaquest", total_timesteps=4 * 500)
    rewards = np.concatenate([rewards for rewards, _ in seen])
    raw = np.stack([step[2] for step in steps])
    assert raw.max() > 1 and np.array_equal(rewards, np.sign(raw))
    assert np.array_equal(np.concatenate([ends for _, ends in seen]), np.stack([step[3] for step in steps]))


@BOTH
def test_garbage_final_observations_are_not_read(script, game, monkeypatch):
    """ale-py fills only the rows of infos["final_obs"] whose game was truncated. With games cut after 600 frames,
    which some reach and some do not, and every other row poisoned, the critic gets exactly the truncated ones."""
    make_vec, step, truncated_rows = gym.make_vec, ale_py.AtariVectorEnv.step, []

    def poisoned(self, actions):
        obs, reward, terminated, truncated, infos = step(self, actions)
        if "final_obs" in infos:
            infos["final_obs"] = infos["final_obs"].copy()
            infos["final_obs"][~truncated] = 213
            truncated_rows.extend(infos["final_obs"][truncated])
        return obs, reward, terminated, truncated, infos

    name = "replay_rollout" if script.__name__ == "ppo_rnn" else "estimate_advantages"
    original, seen = getattr(script, name), []

    def spy(agent, obs, last_obs, final_obs, *rest):
        seen.extend(final_obs.numpy())
        return original(agent, obs, last_obs, final_obs, *rest)

    monkeypatch.setattr(ale_py.AtariVectorEnv, "step", poisoned)
    monkeypatch.setattr(gym, "make_vec", lambda *a, **k: make_vec(*a, max_num_frames_per_episode=600, **k))
    monkeypatch.setattr(script, name, spy)
    _, steps, _ = game("Breakout", total_timesteps=4 * 500)
    lost_lives = sum(step[3].sum() for step in steps)
    assert lost_lives > 10 and any(0 < step[4].sum() < 4 for step in steps)
    assert np.array_equal(seen, truncated_rows) and not (np.stack(seen) == 213).all((1, 2, 3)).any()


@BOTH
def test_evaluation_launches_the_ball(script, monkeypatch):
    """Breakout begins with FIRE, as in training: with no-ops only a life is lost soon, instead of never."""
    lives, make = [], script.make_evaluation_env
    monkeypatch.setattr(script, "make_evaluation_env", lambda *a, **k: lives.append(make(*a, **k)) or lives[0])

    class NoOps:
        args, obs_rms = script.Args(**script.ATARI), script.RunningMeanStd(())

        def predict(self, *arguments):
            lives.append(lives[0].unwrapped.ale.lives())
            if len(lives) > 120:
                raise TimeoutError
            return (0, None) if script.__name__ == "ppo_rnn" else 0

    with pytest.raises(TimeoutError):
        script.evaluate(NoOps(), "ALE/Breakout-v5", 1, 0)
    assert lives[1] == 5 and lives[-1] < 5


@BOTH
@pytest.mark.parametrize("sticky", [False, True])
def test_protocol_of_the_games(script, game, sticky, monkeypatch):
    """What ale-py is asked for, and that --env-kwargs reach the games of training and evaluation."""
    make_vec, make, asked = gym.make_vec, gym.make, []
    kwargs = {"env_kwargs": '{"repeat_action_probability": 0.25}'} if sticky else {}
    short = {"max_num_frames_per_episode": 200}  # an evaluation of 50 steps
    monkeypatch.setattr(gym, "make_vec", lambda *a, **k: (asked.append(k), make_vec(*a, **k))[1])
    monkeypatch.setattr(gym, "make", lambda *a, **k: (asked.append(k), make(*a, **k, **short))[1])
    run_dir, _, _ = game("Freeway", total_timesteps=400, **kwargs)
    agent, shapes = script.load_agent(run_dir), []
    predict = agent.predict
    agent.predict = lambda obs, *rest: (shapes.append(obs.shape), predict(obs, *rest))[1]
    script.evaluate(agent, "ALE/Freeway-v5", 1, 0)
    assert 40 < len(shapes) <= 50 and set(shapes) == {(4, 84, 84)}
    training, evaluation = asked
    assert training["repeat_action_probability"] == evaluation["repeat_action_probability"] == 0.25 * sticky
    assert (training["reward_clipping"], training["episodic_life"], training["life_loss_info"]) == (False, False, True)
    assert evaluation["frameskip"] == 1  # AtariPreprocessing skips


@BOTH
def test_evaluation_sees_what_training_saw(script):
    """gymnasium's preprocessing of one game, frame by frame, against ale-py's of a vector: the same pictures."""
    env = script.make_evaluation_env("ALE/Pong-v5", "{}", False)
    envs = script.make_envs(script.Args(**script.ATARI | {"env_id": "ALE/Pong-v5"}), 1)
    # The no-ops at the start are random: look for a start with the same number of them.
    obs, infos = envs.reset(seed=np.array([1]))
    for seed in range(1000):
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
def test_ratio_is_one_in_the_first_minibatch(script, args, monkeypatch):
    """With the Nature CNN, in two iterations of one minibatch and two epochs. A ratio r adds r - 1 - log(r) to the KL,
    which is 0 only for r = 1."""
    original, kls = script.ppo_loss, []

    def spy(*arguments):
        loss, metrics = original(*arguments)
        kls.append(metrics["approx_kl"].item())
        return loss, metrics

    monkeypatch.setattr(script, "ppo_loss", spy)
    game = {"env_id": "ALE/Breakout-v5", "num_envs": 2, "num_steps": 32, "num_minibatches": 1, "update_epochs": 2}
    script.train(args(**script.ATARI | game | {"total_timesteps": 2 * 64, "learning_rate": 1e-3}))
    assert len(kls) == 4 and max(kls[::2]) < 1e-10 and min(kls[1::2]) > 1e-8


@pytest.mark.parametrize("script", ["ppo_rnn"], indirect=True)
def test_memory_outlasts_a_lost_life(script, game, monkeypatch):
    """An episode of the memory is a game: it starts where episodes.csv has the end of another one."""
    original, starts = script.replay_rollout, []

    def spy(agent, obs, last_obs, final_obs, episode_starts, *rest):
        starts.append(episode_starts.sum().item() - episode_starts[0].sum().item())
        return original(agent, obs, last_obs, final_obs, episode_starts, *rest)

    monkeypatch.setattr(script, "replay_rollout", spy)
    run_dir, steps, _ = game("Breakout", total_timesteps=4 * 500)
    assert sum(starts) == len(episodes_of(run_dir)) > 1 and sum(step[3].sum() for step in steps) > 4 * sum(starts)


@pytest.mark.parametrize("script", ["ppo_discrete"], indirect=True)
def test_gradient_of_the_nature_cnn(script, args):
    """Compiled, at Atari's minibatch of 256: the run would end if it were not that of eager mode."""
    flags = {"env_id": "ALE/Breakout-v5", "num_envs": 2, "num_minibatches": 1, "update_epochs": 1, "compile": True}
    script.train(args(**script.ATARI | flags | {"total_timesteps": 256}))
