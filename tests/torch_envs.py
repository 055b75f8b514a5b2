"""Simulators in torch, for variants/ppo_gpu_sim.py: thousands of tasks side by side as one tensor."""

import gymnasium as gym
import torch


class Drift:
    """A point on a line that a steady wind moves. Each step rewards being close to 0. The actor sees the position and
    its last action; the critic sees the wind too, which is privileged.

    An episode ends with termination where |position| > 2, with truncation after 50 steps."""

    def __init__(self, num_envs, device, seed, privileged=True, final_obs=True):
        self.num_envs, self.device, self.privileged, self.gives_final_obs = num_envs, device, privileged, final_obs
        self.single_action_space = gym.spaces.Box(-1.0, 1.0, (1, 1))  # of any shape; what comes is flat

    def reset(self, seed=None):
        self.random = torch.Generator(self.device).manual_seed(seed)
        self.position, self.wind, self.last_action, self.steps = torch.zeros(4, self.num_envs, device=self.device)
        self.start(torch.ones_like(self.position, dtype=torch.bool))
        return self.observe(), {}

    def start(self, where):
        new = torch.rand(2, self.num_envs, generator=self.random, device=self.device) * 2 - 1
        self.position = torch.where(where, new[0], self.position)
        self.wind = torch.where(where, new[1] * 0.3, self.wind)
        self.last_action = self.last_action.masked_fill(where, 0.0)
        self.steps = self.steps.masked_fill(where, 0.0)

    def observe(self):
        obs = torch.stack([self.position, self.last_action], dim=-1)
        return {"policy": obs, "critic": torch.cat([obs, self.wind.unsqueeze(-1)], dim=-1)} if self.privileged else obs

    def step(self, actions):
        assert actions.shape == (self.num_envs, 1)
        self.last_action = actions[:, 0].clone()
        self.position = self.position + 0.5 * self.last_action + self.wind
        self.steps = self.steps + 1
        rewards = 1.0 - self.position.abs()
        terminations, truncations = self.position.abs() > 2, self.steps >= 50
        infos = {"final_obs": self.observe()} if self.gives_final_obs else {}
        self.start(terminations | truncations)
        return self.observe(), rewards, terminations, truncations, infos


class Replay:
    """Gives back what was once observed, whatever is done. obs (T + 1, N, D), with or without critic_obs (T + 1, N, P),
    rewards, dones and time_outs (T, N)."""

    def __init__(self, record):
        self.record = {name: torch.tensor(x) for name, x in record.items()}
        self.num_envs, self.step_number = self.record["obs"].shape[1], 0
        self.single_action_space = gym.spaces.Box(-1.0, 1.0, (2,))
        if "critic_obs" in record:  # rsl_rl leaves bounds to the environment
            self.single_action_space = gym.spaces.Box(-float("inf"), float("inf"), (2,))

    def observe(self):
        obs = self.record["obs"][self.step_number]
        return (
            {"policy": obs, "critic": self.record["critic_obs"][self.step_number]}
            if "critic_obs" in self.record
            else obs
        )

    def reset(self, seed=None):
        self.step_number = 0
        return self.observe(), {}

    def step(self, actions):
        rewards, done, time_out = (self.record[name][self.step_number] for name in ("rewards", "dones", "time_outs"))
        self.step_number += 1
        return self.observe(), rewards, done.bool() & ~time_out.bool(), time_out.bool(), {}


def wave(like, *_, **__):
    """In place of random normal numbers: ones that only depend on the shape."""
    return torch.cos(1.0 + 2.7 * torch.arange(like.numel(), dtype=torch.float32)).view(like.shape)


def drift(num_envs, device, seed):
    return Drift(num_envs, device, seed)


def unbounded(num_envs, device, seed):
    return Replay({"obs": [[[0.0]] * num_envs], "critic_obs": [[[0.0]] * num_envs]})


def one(num_envs, device, seed):
    """A mistake: not as many as asked for."""
    return Drift(1, device, seed)
