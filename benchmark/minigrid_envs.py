"""MiniGrid's tasks without the text in their observations: 7 x 7 cells. MiniGrid is optional:

    python -m pip install "minigrid>=3.2,<4"
    python ppo_discrete.py --env-id benchmark.minigrid_envs:Image/MiniGrid-Empty-8x8-v0

Every task of MiniGrid is registered as Image/NAME, where a cell is 3 numbers (object, color, state), and as
OneHot/NAME, where it is 20 zeros and ones.
"""

from functools import partial

import gymnasium as gym

try:
    from minigrid.wrappers import ImgObsWrapper, OneHotPartialObsWrapper  # the import registers MiniGrid's own tasks
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f'{error}: python -m pip install "minigrid>=3.2,<4"') from None


def make_image(env_id, **kwargs):
    return ImgObsWrapper(gym.make(env_id, **kwargs))


def make_one_hot(env_id, **kwargs):
    return ImgObsWrapper(OneHotPartialObsWrapper(gym.make(env_id, **kwargs)))


for env_id in [env_id for env_id in gym.registry if env_id.startswith("MiniGrid-")]:
    # Tasks truncate their episodes themselves, so no time limit is registered.
    gym.register(f"Image/{env_id}", partial(make_image, env_id))
    gym.register(f"OneHot/{env_id}", partial(make_one_hot, env_id))
