"""EnvPool's vectors as environments: benchmark/envpool_envs.py. Most tests need EnvPool, which is optional."""

import gymnasium as gym
import numpy as np
import pytest

import ppo_continuous

SAME_STEP = gym.vector.AutoresetMode.SAME_STEP


def make(task, num_envs, **kwargs):
    pytest.importorskip("envpool")
    return gym.make_vec(f"benchmark.envpool_envs:EnvPool/{task}", num_envs, "vector_entry_point", **kwargs)


@pytest.mark.parametrize("seed", [[5, 6, 5, 7], 5])
def test_step_that_ends_an_episode(seed):
    """Rows of `final_obs` are what followed the step; the observation is the first of the next episode. Hopper falls
    within 100 steps. A shortened first episode ends by its time limit. Arrays of earlier steps stay as they were."""
    make("Hopper-v4", 1, autoreset_mode=SAME_STEP).close()  # before a reset
    envs = make("Hopper-v4", 4, autoreset_mode=SAME_STEP, max_episode_steps=50)
    obs, _ = envs.reset(seed=seed)
    assert np.array_equal(obs[0], obs[2]) == (seed != 5) and not np.array_equal(obs[0], obs[1])
    envs.set_attr("_elapsed_steps", [0, 0, 0, 40])
    lengths, ends, all_obs, copies = np.zeros(4, int), [], [obs], [obs.copy()]
    for _ in range(120):
        actions = np.where(np.arange(4)[:, None] < 2, 1.0, 0.0) * np.ones((4, 3))  # two fall, two stand for a while
        obs, _, terminated, truncated, infos = envs.step(actions)
        all_obs.append(obs)
        copies.append(obs.copy())
        lengths += 1
        for n in np.flatnonzero(terminated | truncated):
            final_obs = infos["final_obs"][n]
            assert abs(final_obs - all_obs[-2][n]).max() < 10 and abs(obs[n] - copies[0][n]).max() < 0.02
            assert terminated[n] == (not (final_obs[0] > 0.7 and abs(final_obs[1]) < 0.2))
            ends.append((n, lengths[n], bool(truncated[n])))
            lengths[n] = 0
        others = ~(terminated | truncated)
        assert all(np.array_equal(infos["final_obs"][n], obs[n]) for n in np.flatnonzero(others) if infos)
    assert all(np.array_equal(one, other) for one, other in zip(all_obs, copies))
    assert (3, 10, True) in ends and any(not truncated for *_, truncated in ends)
    assert max(length for _, length, _ in ends) <= 50
    envs.close()


def test_training_repeats_itself_and_can_be_evaluated(tmp_path, main):
    """The same seed gives the same run; --evaluate plays in gymnasium's environment."""
    pytest.importorskip("envpool")
    flags = ["--env-id=benchmark.envpool_envs:EnvPool/InvertedPendulum-v4", "--total-timesteps=8000", "--no-compile"]
    runs = []
    for name in ("one", "two"):
        finished = main(ppo_continuous, *flags, f"--runs-dir={tmp_path / name}")
        assert finished.returncode == 0, finished.stderr
        (run_dir,) = (tmp_path / name).iterdir()
        runs.append([row.rsplit(",", 1)[0] for row in (run_dir / "episodes.csv").read_text().splitlines()])
    assert runs[0] == runs[1] and len(runs[0]) > 200
    finished = main(ppo_continuous, flags[0], f"--evaluate={run_dir}", "--eval-episodes=2")
    assert finished.stdout.startswith("returns:"), finished.stderr
