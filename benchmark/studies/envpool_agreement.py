"""Question: are EnvPool's MuJoCo tasks those of gymnasium?

    python benchmark/studies/envpool_agreement.py        # writes envpool_agreement.csv, one row per task

Answer (envpool_agreement.csv): the observations of seven of nine tasks agree to 1e-10, and all their episodes
end in the same step. Ant and Humanoid differ by 1e-5 after one step. Contacts make more of that: within ten steps
Ant differs by 2, Humanoid by 3,000. EnvPool 1.2.5 has a MuJoCo of its own.

Both start in the same states and take the same random actions. The state is read from EnvPool's first observation. A
row has the largest difference of an observation at the start, after 1 step and within 10 steps, the largest difference
of a reward within 10 steps, each over all starts; how many episodes ended within 100 steps, and how many of these ended
in different steps.
"""

import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmark/

import gymnasium as gym
import numpy as np
from run_folder import installed_versions, write_rows
from suites import MUJOCO

STARTS, STEPS = 100, 100


def read_state(task, obs, env):
    """The qpos and qvel that gave this first observation. Positions that it does not show are 0."""
    qpos, qvel = env.init_qpos.copy(), env.init_qvel.copy()
    if task.startswith("Reacher"):
        qpos[:2], qpos[2:], qvel[:2], qvel[2:] = np.arctan2(obs[2:4], obs[:2]), obs[4:6], obs[6:8], 0.0
    elif task.startswith("InvertedDouble"):
        qpos[:], qvel[:] = [obs[0], *np.arctan2(obs[1:3], obs[3:5])], obs[5:8]
    else:
        hidden = {"InvertedPendulum": 0, "HalfCheetah": 1, "Hopper": 1, "Walker2d": 1}.get(task.split("-")[0], 2)
        shown = len(qpos) - hidden
        qpos[hidden:], qvel[:] = obs[:shown], obs[shown : shown + len(qvel)]
        qpos[:hidden] = 0.0
    return qpos, qvel


def compare(task):
    import envpool_envs  # here, because it is optional

    pool = envpool_envs.EnvPoolVector(task, STARTS, 10**6)
    first_obs, _ = pool.reset(seed=range(STARTS))
    rng = np.random.default_rng(0)
    low, high = pool.single_action_space.low, pool.single_action_space.high
    actions = rng.uniform(low, high, (STEPS, STARTS, *low.shape))
    steps = []  # of EnvPool: observations, rewards, terminations
    for t in range(STEPS):
        obs, rewards, terminations, _, infos = pool.step(actions[t])
        steps.append((infos.get("final_obs", obs), rewards, terminations))
    env, differences, ended, other_end = gym.make(task).unwrapped, [], 0, 0
    for n in range(STARTS):
        env.reset()  # the solver forgets the episode before
        env.set_state(*read_state(task, first_obs[n], env))
        row = [np.abs(env._get_obs() - first_obs[n]).max(), 0.0, 0.0, 0.0]
        for t in range(STEPS):
            obs, reward, terminated, _, _ = env.step(actions[t, n])
            pool_obs, pool_reward, pool_terminated = (x[n] for x in steps[t])
            if t < 10:
                difference = np.abs(obs - pool_obs).max()
                row[1] = difference if t == 0 else row[1]
                row[2], row[3] = max(row[2], difference), max(row[3], abs(reward - pool_reward))
            if terminated or pool_terminated:
                ended += 1
                other_end += terminated != pool_terminated
                break
        differences.append(row)
    names = "start", "after_1_step", "after_10_steps", "reward_in_10_steps"
    row = {"env_id": task} | {name: f"{x:.1g}" for name, x in zip(names, np.max(differences, axis=0))}
    return row | {"ended": ended, "ended_in_another_step": other_end}


if __name__ == "__main__":
    rows = [compare(f"{name}-v4") for name in MUJOCO.split()]
    packages = installed_versions() + f" envpool {version('envpool')}"
    rows = [row | {"starts": STARTS, "versions": packages} for row in rows]
    write_rows(Path(__file__).with_suffix(".csv"), list(rows[0]), rows)
    for row in rows:
        print(*(f"{name} {value}" for name, value in row.items() if name != "versions"), sep="  ")
