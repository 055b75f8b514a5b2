"""LeanRL's PPO for Breakout, with the games of ale-py in place of EnvPool's: the same games as `ppo_atari.py` plays.

    python -m pip install "tensordict>=0.10,<1"
    python benchmark/leanrl_atari.py CHECKOUT --compile --cudagraphs --total-timesteps 163840

CHECKOUT is LeanRL at commit 760837e. Its script imports envpool, gym and wandb. The few calls that it makes of them are
below, so that none of them has to be installed.
"""

import re
import sys
import types
from pathlib import Path

import ale_py
import gymnasium
import numpy as np
import torch

CHECKOUT = Path(sys.argv[1])
SCRIPT = CHECKOUT / "leanrl" / "ppo_atari_envpool_torchcompile.py"


class Games:
    """EnvPool's vector of games: a lost life ends an episode, and rewards are -1, 0 or 1. info has the raw reward, and
    whether the whole game is over."""

    def __init__(self, env_id, num_envs, seed):
        lives = {"life_loss_info": True, "reward_clipping": False, "repeat_action_probability": 0.0}
        mode = gymnasium.vector.AutoresetMode.SAME_STEP
        self.envs = gymnasium.make_vec(f"ALE/{env_id}", num_envs, "vector_entry_point", autoreset_mode=mode, **lives)
        self.action_space, self.observation_space = self.envs.single_action_space, self.envs.single_observation_space
        self.seed, self.frame_numbers = seed, np.zeros(num_envs, dtype=int)

    def reset(self):
        return self.envs.reset(seed=self.seed)[0]

    def step(self, action):
        obs, reward, terminated, truncated, infos = self.envs.step(action)
        over = infos["episode_frame_number"] < self.frame_numbers  # a new game restarts the count
        self.frame_numbers = infos["episode_frame_number"]
        info = {"reward": reward, "terminated": over.astype(np.int32), "lives": np.where(over, 0, 1)}
        return obs, np.sign(reward).astype(np.float32), terminated | truncated, info

    def close(self):
        self.envs.close()


class Wrapper:
    """gym.Wrapper of old gym, which returns four things from `step`."""

    def __init__(self, env):
        self.env = env

    def __getattr__(self, name):
        return getattr(self.env, name)

    def reset(self, **options):
        return self.env.reset(**options)

    def step(self, action):
        return self.env.step(action)


def module(name, **content):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(content)


module("envpool", make=lambda env_id, num_envs, seed, **options: Games(env_id, num_envs, seed))
module("gym", Wrapper=Wrapper, spaces=gymnasium.spaces)
module("wandb", init=lambda **options: None, log=lambda *values, **options: None)
ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner
sys.argv = [str(SCRIPT), *sys.argv[2:]]
__file__ = str(SCRIPT)
text = SCRIPT.read_text()
if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):  # two lines that fail there: properties of Categorical
    text = re.sub(r"(?m)^Categorical\..*", "", text)
exec(compile(text, SCRIPT, "exec"))
