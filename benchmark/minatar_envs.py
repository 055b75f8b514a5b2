"""MinAtar's five games, 10 x 10 cells with 4 to 10 channels. MinAtar is optional:

    python -m pip install "minatar>=1.0.15,<2"
    python ppo_discrete.py --env-id benchmark.minatar_envs:MinAtar/Breakout-v1

-v1 has the actions that a game uses, -v0 all six. One action in ten repeats the one before it (sticky actions).
"""

try:
    import minatar.gym
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f'{error}: python -m pip install "minatar>=1.0.15,<2"') from None

minatar.gym.register_envs()  # gymnasium no longer looks for packages that offer environments
