"""--evaluate and evaluate(): whole episodes, repeatable, and nothing of the agent changes."""

import gymnasium as gym
import numpy as np
import probes
import pytest
import torch
from conftest import probe


def test_evaluate(script, run_dir, main, watch):
    """From raw observations: the same returns twice, and no statistic moves. Not even the random numbers of a GPU are
    touched for an agent on the CPU: it may be somebody else's. (test_standalone.py evaluates in a new process.)"""
    agent, args = script.load_agent(run_dir), script.load_checkpoint(run_dir)["args"]
    before = (run_dir / "checkpoint.pt").read_bytes()
    outputs = [main(script, "--evaluate", run_dir, "--eval-episodes=5") for _ in range(2)]
    assert outputs[0].returncode == 0, outputs[0].stderr
    assert outputs[0].stdout == outputs[1].stdout and len(outputs[0].stdout.splitlines()[0].split()) == 6
    assert (run_dir / "checkpoint.pt").read_bytes() == before
    state = {name: tensor.clone() for name, tensor in agent.state_dict().items()}
    asked_for_gpus = watch(torch.cuda, "device_count")
    returns = script.evaluate(agent, args.env_id, 5, args.seed)
    assert outputs[0].stdout.splitlines()[0].split()[1:] == [f"{value:.1f}" for value in returns]
    torch.testing.assert_close(agent.state_dict(), state, atol=0, rtol=0)
    torch.manual_seed(0)
    returns, sampled, again = (
        script.evaluate(agent, args.env_id, 50, args.seed, deterministic=deterministic)
        for deterministic in (True, False, False)
    )
    assert not asked_for_gpus
    assert np.array_equal(sampled, again) and not np.array_equal(sampled, returns)
    # Evaluation in between changes nothing of what training draws.
    assert torch.equal(torch.randn(3), torch.randn(3, generator=torch.Generator().manual_seed(0)))


def test_evaluations_are_whole_episodes_of_their_own_seeds(script, small_args):
    """The returns that anybody gets who plays these seeds; what the agent does makes no difference here."""
    agent, _ = script.train(small_args(env_id=probe(script, "Chain")))
    env, expected = gym.make(probe(script, "Chain")), []
    for seed in range(3, 7):
        env.reset(seed=seed)
        rewards, ended = [], False
        while not ended:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            rewards.append(reward)
            ended = terminated or truncated
        expected.append(sum(rewards))
    assert len({*expected}) == 4
    assert script.evaluate(agent, probe(script, "Chain"), 4, 3) == pytest.approx(expected)


class Shifted(probes.Target):
    """Rewards of 1 more."""

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, reward + 1, *rest


probes.register("Shifted", Shifted)


def test_evaluate_with_other_arguments(script, run_dir, main):
    """Those of the run apply, except those given again. Nothing is trained or written."""

    def evaluate(*flags):
        finished = main(script, "--evaluate", run_dir, "--eval-episodes=20", *flags)
        return finished.stdout.splitlines()[-2].removeprefix("returns: ")

    files = {path: path.read_bytes() for path in run_dir.iterdir()}
    agent, saved = script.load_agent(run_dir), script.load_checkpoint(run_dir)["args"]

    def expected(env_id, seed, deterministic):
        return " ".join(f"{x:.1f}" for x in script.evaluate(agent, env_id, 20, seed, deterministic))

    first = evaluate()
    assert first == expected(saved.env_id, saved.seed, saved.eval_deterministic)
    assert first != evaluate("--seed=9") == expected(saved.env_id, 9, saved.eval_deterministic)
    assert first != evaluate("--no-eval-deterministic") == expected(saved.env_id, saved.seed, False)
    assert first != evaluate(f"--env-id={probe(script, 'Shifted')}", "--gamma=0.5", "--num-envs=1")
    assert files == {path: path.read_bytes() for path in run_dir.iterdir()}
