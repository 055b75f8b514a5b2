"""A two-player game whose second player is given from outside, for recipes/self_play.diff.

python ppo_discrete.py --env-id benchmark.self_play_envs:TicTacToe-v0 --total-timesteps 100000
"""

import gymnasium as gym
import numpy as np

LINES = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]]


class TicTacToe(gym.Env):
    """Three in a row wins. The reward is 1, 0 or -1 at the end of the game; by lot one of the players begins.
    `opponent` moves as soon as the agent has moved; None is one that takes any free cell. Both see their own stones as
    1 and the other's as -1, and infos["action_mask"] has the free cells."""

    opponent = None

    def __init__(self):
        self.observation_space = gym.spaces.Box(-1, 1, (9,), np.float32)
        self.action_space = gym.spaces.Discrete(9)

    def move(self, cell, stone):
        """Whether the game is over, and the reward of whoever has moved."""
        assert self.board[cell] == 0, f"cell {cell} is taken"
        self.board[cell] = stone
        won = any(all(self.board[i] == stone for i in line) for line in LINES)
        return won or 0 not in self.board, float(won)

    def move_of_opponent(self):
        free = self.board == 0
        if self.opponent is None:
            cell = self.np_random.choice(np.flatnonzero(free))
        else:
            cell = self.opponent.predict(-self.board, deterministic=False, action_mask=free)
        return self.move(cell, -1.0)

    def observe(self):
        return self.board.copy(), {"action_mask": self.board == 0}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.board = np.zeros(9, np.float32)
        if self.np_random.random() < 0.5:
            self.move_of_opponent()
        return self.observe()

    def step(self, action):
        over, reward = self.move(action, 1.0)
        if not over:
            over, loss = self.move_of_opponent()
            reward = -loss
        obs, infos = self.observe()
        return obs, reward, over, False, infos


gym.register("TicTacToe-v0", TicTacToe)
