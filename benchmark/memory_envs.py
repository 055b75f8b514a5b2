"""Classic control whose velocities read 0, so that a policy needs a memory (the names are RL Baselines3 Zoo's).

python ppo_rnn.py --env-id benchmark.memory_envs:CartPoleNoVel-v1 --total-timesteps 300000
python benchmark/run.py --suite memory    # both tasks, with their flags
"""

import gymnasium as gym
import numpy as np

VELOCITIES = {"CartPole-v1": [1, 3], "Pendulum-v1": [2]}


class MaskVelocity(gym.ObservationWrapper):
    """Observations in which the numbers at `indices` are 0."""

    def __init__(self, env, indices):
        super().__init__(env)
        self.mask = np.ones(env.observation_space.shape, env.observation_space.dtype)
        self.mask[indices] = 0

    def observation(self, observation):
        return observation * self.mask


def make(name, indices, **kwargs):
    return MaskVelocity(gym.make(name, **kwargs), indices)


for name, indices in VELOCITIES.items():
    # gym.make(name) brings its time limit with it.
    gym.register(name.replace("-", "NoVel-"), make, kwargs={"name": name, "indices": indices})
