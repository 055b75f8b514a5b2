"""--evaluate and evaluate(): whole episodes, repeatable, and nothing of the agent or of training changes."""

import dataclasses
import json
import random
import shlex

import gymnasium as gym
import numpy as np
import probes
import pytest
import torch
from conftest import ONE, make_agent, probe


def returns_of(finished):
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.splitlines()[-2].removeprefix("returns: ")


def shown(returns):
    return " ".join(f"{episodic_return:.1f}" for episodic_return in returns)


def test_evaluate(script, run_dir, main):
    """From raw observations: the same returns twice, on the command line and from Python, and no statistic moves.
    (test_standalone.py evaluates in a new process.)"""
    agent, args = script.load_agent(run_dir), script.load_args(run_dir)
    before = (run_dir / "checkpoint.pt").read_bytes()
    one, two = (returns_of(main(script, "--evaluate", run_dir, "--eval-episodes=5")) for _ in range(2))
    assert one == two == shown(script.evaluate(agent, args, 5)) and len(one.split()) == 5
    assert (run_dir / "checkpoint.pt").read_bytes() == before
    torch.testing.assert_close(agent.state_dict(), script.load_checkpoint(run_dir)["agent"], atol=0, rtol=0)
    returns = script.evaluate(agent, args, 50)
    args = dataclasses.replace(args, eval_deterministic=False)
    sampled, again = script.evaluate(agent, args, 50), script.evaluate(agent, args, 50)
    assert np.array_equal(sampled, again) and not np.array_equal(sampled, returns)


class Watched(probes.Chain):
    """It counts the frames that it shows on the screen."""

    metadata = {"render_modes": ["human"], "render_fps": 30}  # noqa: RUF012
    shown = 0

    def __init__(self, discrete, render_mode=None):
        super().__init__(discrete)
        self.render_mode = render_mode

    def step(self, action):
        Watched.shown += self.render_mode == "human"
        return super().step(action)


probes.register("Watched", Watched)


@ONE
def test_the_last_line_says_how_to_evaluate(script, small_args, main, capsys):
    """To be pasted as it is printed. With another render mode it shows the episodes on the screen."""
    script.train(small_args(env_id=probe(script, "Watched"), total_timesteps=64))
    words = shlex.split(capsys.readouterr().out.splitlines()[-1].partition("to evaluate: python ")[2])
    assert words[0] == f"{script.__name__}.py"
    assert len(returns_of(main(script, *words[1:])).split()) == 10 and Watched.shown == 0
    returns_of(main(script, *words[1:], '--env-kwargs={"render_mode": "human"}'))
    assert Watched.shown > 0
    Watched.shown = 0


def test_evaluations_are_whole_episodes_of_their_own_seeds(script, small_args):
    """The returns that anybody gets who plays these seeds; what the agent does makes no difference here."""
    args = small_args(env_id=probe(script, "Chain"), seed=3)
    agent, _ = script.train(args)
    env, expected = gym.make(args.env_id), []
    for seed in range(3, 7):
        env.reset(seed=seed)
        rewards, ended = [], False
        while not ended:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            rewards.append(reward)
            ended = terminated or truncated
        expected.append(sum(rewards))
    assert len({*expected}) == 4
    assert script.evaluate(agent, args, 4) == pytest.approx(expected)


@ONE
def test_evaluate_with_other_arguments(script, run_dir, main):
    """Those of the run apply, except those given again. Nothing is trained or written."""

    def evaluate(*flags):
        return returns_of(main(script, "--evaluate", run_dir, "--eval-episodes=20", *flags))

    files = {path: path.read_bytes() for path in run_dir.iterdir()}
    agent, saved = script.load_agent(run_dir), script.load_args(run_dir)

    def expected(**changes):
        return shown(script.evaluate(agent, dataclasses.replace(saved, **changes), 20))

    first = evaluate()
    assert first == expected()
    assert first != evaluate("--seed=9") == expected(seed=9)
    assert first != evaluate("--no-eval-deterministic", "--gamma=0.5") == expected(eval_deterministic=False)
    assert files == {path: path.read_bytes() for path in run_dir.iterdir()}


def test_a_gpu_that_torch_cannot_use(script, run_dir, monkeypatch):
    """Its driver is too old, say. A run on the CPU can be evaluated."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert len(script.evaluate(script.load_agent(run_dir), script.load_args(run_dir), 2)) == 2


class Stay(gym.Env):
    """The reward is 1, and an episode never ends. Draws from every global generator; may raise in some step."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, discrete, fails_at=None):
        self.action_space = probes.two_actions(discrete)
        self.fails_at, self.steps = fails_at, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == self.fails_at:
            raise RuntimeError("the simulator is lost")
        if self.steps < 9:
            random.random(), np.random.random(), torch.rand(1)
        return np.zeros(2, np.float32), 1.0, False, False, {}


probes.register("Stay", Stay)


class Still(torch.nn.Module):
    """Stands in for an agent, and costs nothing: it always does the same."""

    def __init__(self, action):
        super().__init__()
        self.action = action

    def predict(self, *arguments):
        return self.action


def test_an_episode_that_never_ends(script, small_args):
    """Evaluation, and with it a video, ends it after 30,000 steps."""
    args = small_args(env_id=probe(script, "Stay"))
    action = gym.make(args.env_id).action_space.sample()
    agent = Still((action, None) if script.__name__ == "ppo_rnn" else action)
    assert script.evaluate(agent, args, 1).tolist() == [30_000]
    args.env_kwargs = '{"max_episode_steps": 9}'
    assert script.evaluate(agent, args, 1).tolist() == [9]


@pytest.mark.parametrize("fails_at", [None, 5])
def test_evaluation_leaves_the_generators_as_they_were(script, small_args, fails_at):
    """Those of torch, numpy and Python, whatever the environment and the policy draw, also if it raises."""

    def draw():
        return random.random(), np.random.random(), torch.rand(()).item()

    def seed():
        random.seed(7), np.random.seed(7), torch.manual_seed(7)

    limits = json.dumps({"max_episode_steps": 20, "fails_at": fails_at})
    args = small_args(env_id=probe(script, "Stay"), env_kwargs=limits, eval_deterministic=False)
    agent = make_agent(script, obs_size=2, action_size=2)
    seed()
    expected = draw()
    seed()
    if fails_at:
        with pytest.raises(RuntimeError, match="the simulator is lost"):
            script.evaluate(agent, args, 2)
    else:
        assert script.evaluate(agent, args, 2).tolist() == [20, 20]
    assert draw() == expected


def test_a_seed_that_training_takes(script, small_args, main):
    """Evaluation takes it too."""
    _, run_dir = script.train(small_args(seed=10**12, total_timesteps=64))
    assert main(script, "--evaluate", run_dir, "--eval-episodes=2").returncode == 0


def test_predict_refuses_other_shapes(script, run_dir):
    """The subtraction of the mean would broadcast them, and the action would say nothing."""
    agent = script.load_agent(run_dir)
    for shape in ((), (1,), (3,), (2, 1), (4, 3), (0,)):
        with pytest.raises(ValueError, match=r"observations of shape .*, not \(\.\.\., 2\)"):
            agent.predict(np.zeros(shape))
    for shape in ((2,), (4, 2)):
        action = agent.predict(np.zeros(shape))
        action = action[0] if script.__name__ == "ppo_rnn" else action
        assert action.shape == shape
