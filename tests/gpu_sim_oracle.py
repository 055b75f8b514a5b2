"""Makes gpu_sim_oracle.json, one update each of rsl_rl and of Brax's notebook, by running the real ones:

    pip install rsl-rl-lib==5.5.1
    git clone https://github.com/google/brax && git -C brax checkout 0b96d056328d15ea7ebfd3ce07f42be72ec76e40
    python tests/gpu_sim_oracle.py brax/notebooks/training_torch.ipynb

Random numbers are replaced by torch_envs.wave, permutations by the identity, on both sides."""

import collections
import json
import math
import sys
from pathlib import Path

import torch
from torch_envs import wave

RSL_RL = {"T": 6, "N": 4, "D": 5, "P": 7, "hidden": 16}
BRAX = {"num_unrolls": 2, "L": 3, "N": 4, "D": 5, "hidden": 16}


def lists(state):
    return {name: x.tolist() for name, x in state.items()}


def random_record(T, N, sizes):
    """Observations, rewards, and ends of both kinds, among them at the first and the last step."""
    record = {name: torch.randn(T + 1, N, size) for name, size in sizes.items()}
    record["rewards"] = torch.randn(T, N)
    record["dones"], record["time_outs"] = torch.zeros(2, T, N)
    for t, n, time_out in [(0, 0, 1), (1, 1, 0), (3, 2, 1), (T - 1, 3, 1), (T - 1, 1, 0)]:
        record["dones"][t, n], record["time_outs"][t, n] = 1, time_out
    return record


def rsl_rl():
    from rsl_rl.algorithms import PPO
    from rsl_rl.models import MLPModel
    from rsl_rl.storage import RolloutStorage
    from tensordict import TensorDict

    T, N = RSL_RL["T"], RSL_RL["N"]
    record = random_record(T, N, {"obs": RSL_RL["D"], "critic_obs": RSL_RL["P"]})

    def observe(t):
        return TensorDict({"policy": record["obs"][t], "critic": record["critic_obs"][t]}, batch_size=[N])

    groups, sizes = {"actor": ["policy"], "critic": ["critic"]}, [RSL_RL["hidden"]] * 2
    normal = {"class_name": "rsl_rl.modules.distribution:GaussianDistribution", "init_std": 0.8}
    actor = MLPModel(observe(0), groups, "actor", 2, sizes, "elu", distribution_cfg=normal)
    critic = MLPModel(observe(0), groups, "critic", 1, sizes, "elu")
    storage = RolloutStorage("rl", N, T, observe(0), [2])
    settings = {"num_learning_epochs": 3, "num_mini_batches": 2, "gamma": 0.97, "lam": 0.9, "entropy_coef": 0.01}
    ppo = PPO(actor, critic, storage, max_grad_norm=0.5, learning_rate=5e-3, **settings)
    weights = {"actor": lists(actor.state_dict()), "critic": lists(critic.state_dict())}
    for t in range(T):
        ppo.act(observe(t))
        extras = {"time_outs": record["time_outs"][t]}
        ppo.process_env_step(observe(t + 1), record["rewards"][t], record["dones"][t], extras)
    ppo.compute_returns(observe(T))
    losses = ppo.update()
    after = {"actor": lists(actor.state_dict()), "critic": lists(critic.state_dict())}
    inputs = {"record": lists(record), "weights": weights}
    return inputs | {"after": after, "losses": losses, "learning_rate": ppo.learning_rate}


def brax(notebook):
    cells = ["".join(cell["source"]) for cell in json.loads(Path(notebook).read_text())["cells"]]
    code = next(cell for cell in cells if "class Agent(nn.Module)" in cell)
    names = {"collections": collections, "math": math, "torch": torch, "nn": torch.nn, "F": torch.nn.functional}
    exec("from typing import *\n" + code, names)
    L, U, N, sizes = BRAX["L"], BRAX["num_unrolls"], BRAX["N"], [BRAX["D"], BRAX["hidden"], BRAX["hidden"]]
    agent = names["Agent"](
        sizes + [4], sizes + [1], entropy_cost=1e-2, discounting=0.97, reward_scaling=0.1, device="cpu"
    )
    agent.num_steps, agent.running_variance = torch.tensor(9.0), torch.full((BRAX["D"],), 10.0)  # does not normalise
    weights = {"actor": lists(agent.policy.state_dict()), "critic": lists(agent.value.state_dict())}
    record = random_record(U * L, N, {"obs": BRAX["D"]})
    with torch.no_grad():
        policy = [agent.get_logits_action(obs) for obs in record["obs"][:-1]]

    def unrolls(x, extra=0):  # (T, N, ...) -> (L, U * N, ...)
        return torch.cat([x[u * L : (u + 1) * L + extra] for u in range(U)], dim=1)

    data = {"observation": unrolls(record["obs"], 1), "logits": unrolls(torch.stack([logits for logits, _ in policy]))}
    data["action"] = unrolls(torch.stack([action for _, action in policy]))
    names_here = {"reward": "rewards", "done": "dones", "truncation": "time_outs"}
    data |= {name: unrolls(record[here]) for name, here in names_here.items()}
    optimizer, losses = torch.optim.Adam(agent.parameters(), lr=5e-3), []
    for _ in range(3):
        for part in range(2):
            columns = slice(part * U * N // 2, (part + 1) * U * N // 2)
            loss = agent.loss({name: x[:, columns] for name, x in data.items()})
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    after = {"actor": lists(agent.policy.state_dict()), "critic": lists(agent.value.state_dict())}
    return {"record": lists(record), "weights": weights, "after": after, "losses": losses}


if __name__ == "__main__":
    torch.manual_seed(1)
    torch.normal = lambda mean, std: mean + std * wave(mean)  # with a gradient, unlike the real one: docs/gpu_sim.md
    torch.randperm = lambda n, **_: torch.arange(n)
    result = {"recipe": __doc__, "rsl_rl": rsl_rl(), "brax": brax(sys.argv[1])}
    Path(__file__).with_suffix(".json").write_text(json.dumps(result) + "\n")
