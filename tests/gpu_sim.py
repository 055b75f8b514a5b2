"""What the tests of variants/ppo_gpu_sim.py share: the script, small runs, agents, simulators."""

import gymnasium as gym
import numpy as np
import ppo_gpu_sim as script
import torch
import torch_envs
from torch.nn.utils import parameters_to_vector

# What makes a run small enough for a test, for every update.
SMALL = {"env_id": "torch_envs:drift", "num_envs": 16, "num_steps": 10, "num_minibatches": 4, "update_epochs": 2}
SMALL |= {"total_timesteps": 800, "hidden_sizes": (16, 16, 16), "compile": False, "device": "cpu"}
UPDATES = list(script.UPDATES)


def make_args(tmp_path, update="rsl_rl", **changes):
    given = script.UPDATES[update] | SMALL | {"runs_dir": str(tmp_path / "runs")} | changes
    return script.Args(**given)


def env_id_of(make):
    """The --env-id of simulators that make(num_envs, device, seed) makes."""
    torch_envs.of_this_test = make
    return "torch_envs:of_this_test"


def agent_for(envs, args):
    sizes = [x.shape[1] for x in script.split_obs(envs.reset(seed=1)[0])]
    space = envs.single_action_space
    return script.Agent(*sizes, space.low.flatten(), space.high.flatten(), args)


def make_agent(obs_size=3, critic_obs_size=3, action_size=2, **changes):
    high = np.ones(action_size, np.float32)
    return script.Agent(obs_size, critic_obs_size, -high, high, script.Args(**{"hidden_sizes": (8, 8, 8)} | changes))


def train_from(agent, args, run_dir):
    """Train this agent: the run goes on from a checkpoint of step 0."""
    flat = parameters_to_vector(agent.parameters()).detach()
    optimizer = torch.optim.Adam([flat], torch.tensor(args.learning_rate), fused=True)
    checkpoint = {"agent": agent.state_dict(), "optimizer": optimizer.state_dict(), "args": vars(args)}
    run_dir.mkdir()
    (run_dir / "episodes.csv").touch()
    torch.save(checkpoint | {"global_step": 0, "seconds": 0.0, "episodes_size": 0}, run_dir / "checkpoint.pt")
    return script.train(args, run_dir)


class Narrow(gym.Env):
    """Bounds of 64-bit numbers that 32 bits cannot hold: the nearest ones are outside."""

    observation_space = gym.spaces.Box(-9, 9, (1,), np.float32)
    action_space = gym.spaces.Box(np.array([0.1, -0.7]), np.array([0.3, 0.7]), dtype=np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action):
        assert action.dtype == np.float64 and self.action_space.contains(action), action
        return np.ones(1, np.float32), 1.0, True, False, {}


gym.register("box/Narrow-v0", Narrow)
