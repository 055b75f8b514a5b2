"""Recipes about runs: exact_resume, init_from, evaluate_while_training, unguarded_update, keep_checkpoints,
bfloat16. (test_recipes_torchrun.py has torchrun.)"""

from pathlib import Path

import gymnasium as gym
import pytest
import torch
from conftest import SMALL, scalars

from recipes import episodes, small, with_recipes


class Killed(Exception):
    pass


@pytest.mark.parametrize(
    "recipes, env_id",
    [
        (["exact_resume"], "InvertedPendulum-v4"),
        (["exact_resume"], "Wanderer-v0"),
        (["exact_resume"], "box/Chain-v0"),
        ([], "Wanderer-v0"),
    ],
)
def test_exact_resume(recipes, env_id, tmp_path, capsys, monkeypatch):
    """A run that was killed in its eighth iteration, and went on from the checkpoint of the sixth, ends with the same
    agent and the same episodes as one that was not. Without the recipe it does not. The chain counts its episodes, and
    does not repeat itself: the run goes on with new ones."""
    script = with_recipes("ppo_continuous", *recipes)
    changes = {"env_id": env_id, "total_timesteps": 640, "stagger_envs": True, "recompute_advantages": False}
    args = small(script, tmp_path, **changes, exp_name="whole")
    whole, run_dir = script.train(args)
    original, iterations = script.explained_variance, []

    def killed_in_the_eighth(values, returns):
        iterations.append(len(iterations) + 1)
        args.checkpoint_interval = 0.0 if len(iterations) == 6 else 1e9  # the sixth saves
        if len(iterations) == 8:
            raise Killed
        return original(values, returns)

    args.exp_name = "killed"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(script, "explained_variance", killed_in_the_eighth)
        script.train(args)
    (other_dir,) = Path(args.runs_dir).glob("*killed*")
    assert script.load_checkpoint(other_dir)["global_step"] == 6 * 64
    resumed, _ = script.train(resume=other_dir)
    states = [agent.state_dict() for agent in (whole, resumed)]
    equal = all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    exact = recipes != [] and env_id != "box/Chain-v0"
    assert equal == exact and (episodes(run_dir) == episodes(other_dir)) == exact
    assert ("new episodes" in capsys.readouterr().out) == (env_id == "box/Chain-v0")


def test_exact_resume_with_other_environments(tmp_path, capsys, monkeypatch):
    """A run that is resumed with another number of environments goes on with new episodes. So does one with a native
    vector."""
    script = with_recipes("ppo_continuous", "exact_resume")
    _, run_dir = script.train(small(script, tmp_path, env_id="Wanderer-v0"))
    args = small(script, tmp_path, env_id="Wanderer-v0", num_envs=8, total_timesteps=1280)
    script.train(args, resume=run_dir)
    assert "new episodes" in capsys.readouterr().out
    assert script.load_checkpoint(run_dir)["global_step"] == 1280
    monkeypatch.delattr(gym.vector.SyncVectorEnv, "call")  # native vectors have none
    _, run_dir = script.train(small(script, tmp_path, env_id="Wanderer-v0"))
    script.train(small(script, tmp_path, env_id="Wanderer-v0", total_timesteps=1280), resume=run_dir)
    assert "new episodes" in capsys.readouterr().out


def test_init_from(tmp_path):
    """A new run begins with the weights and observation statistics of another, and with an optimizer that has made no
    step. Statistics of returns begin anew: the reward may be another one."""
    module = with_recipes("ppo_continuous", "init_from")
    first, run_dir = module.train(small(module, tmp_path))
    still = {"learning_rate": 0.0, "anneal_lr": False, "norm_reward": False}
    second, new_dir = module.train(small(module, tmp_path, init_from=str(run_dir), total_timesteps=64, **still))
    assert new_dir != run_dir
    assert second.return_rms.count == 0 < first.return_rms.count
    assert second.obs_rms.count == first.obs_rms.count + 64
    for name, tensor in second.state_dict().items():
        if name not in ("log_std_shift", "return_rms.count") and "obs_rms" not in name:
            torch.testing.assert_close(tensor, first.state_dict()[name], msg=name)
    state = torch.load(new_dir / "checkpoint.pt")["optimizer"]["state"][0]
    assert state["step"] <= SMALL["num_minibatches"] * SMALL["update_epochs"]
    with pytest.raises(module.UsageError, match="has norm_obs True: add --norm-obs"):
        module.train(small(module, tmp_path, init_from=str(run_dir), norm_obs=False))


def test_evaluate_while_training(tmp_path):
    """The means are those of the agents at that time; the folder `best` has the best of them, also after a resumption;
    nothing that is learned changes."""
    module = with_recipes("ppo_continuous", "evaluate_while_training")
    args = small(module, tmp_path, eval_interval=3, eval_episodes=5)
    agent, run_dir = module.train(args)
    logged = scalars(run_dir)["charts/eval_return"]
    assert [step for step, _ in logged] == [3 * 64, 6 * 64, 9 * 64, 640]
    means = [value for _, value in logged]
    for (step, _), mean in zip(logged, means):
        kept = module.load_agent(run_dir / f"step-{step}")
        assert module.evaluate(kept, args, 5).mean() == pytest.approx(mean, rel=1e-5)

    def best():
        return module.evaluate(module.load_agent(run_dir / "best"), module.load_args(run_dir / "best"), 5).mean()

    assert best() == pytest.approx(max(means), rel=1e-5)
    plain = with_recipes("ppo_continuous")
    other, _ = plain.train(small(plain, tmp_path))
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, agent.state_dict()[name]), name
    still = {"learning_rate": 0.0, "total_timesteps": 832, "norm_obs": False}  # a worse agent does not replace it
    module.train(small(module, tmp_path, eval_interval=1, eval_episodes=5, **still), resume=run_dir)
    means = [value for _, value in scalars(run_dir)["charts/eval_return"]]
    assert len(means) == 7 and best() == pytest.approx(max(means), rel=1e-5)


def test_unguarded_update_equals_the_plain_one(tmp_path):
    """Compiled, over an iteration, a resumption and one more: no state of Adam and no learning rate is lost."""
    vectors = []
    for recipes, changes in ([], {"compile": False}), (["unguarded_update"], {"compile": True}):
        module = with_recipes("ppo_continuous", *recipes)
        changes |= {"exp_name": f"run{len(recipes)}", "env_id": "InvertedPendulum-v4", "learning_rate": 1e-2}
        _, run_dir = module.train(small(module, tmp_path, **changes, total_timesteps=64))
        agent, _ = module.train(small(module, tmp_path, **changes, total_timesteps=128), resume=run_dir)
        vectors.append(torch.nn.utils.parameters_to_vector(agent.parameters()))
    torch.testing.assert_close(*vectors, rtol=1e-4, atol=1e-5)


def test_keep_checkpoints(tmp_path):
    """The last three of five iterations: each acts as it did then, and the newest is the run's."""
    script = with_recipes("ppo_gpu_sim", "keep_checkpoints")
    small = {"num_envs": 16, "num_steps": 10, "total_timesteps": 800, "hidden_sizes": (16,), "compile": False}
    small |= {"env_id": "torch_envs:drift", "device": "cpu", "runs_dir": str(tmp_path), "checkpoint_interval": 0}
    agent, run_dir = script.train(script.Args(**small, keep_checkpoints=3))
    assert {path.name for path in run_dir.glob("step-*")} == {"step-480", "step-640", "step-800"}
    kept = [script.load_agent(run_dir / name) for name in ("step-480", "step-800")]
    assert torch.equal(kept[1].actor[0].weight, agent.actor[0].weight)
    assert [kept[0].obs_rms.count, kept[1].obs_rms.count] == [480, 800]


def test_bfloat16(tmp_path):
    """The first minibatch has ratio 1. The gradient is close to that of float32: bfloat16 has 8 bits, and the
    terms of 64 steps nearly cancel."""
    small = {"num_envs": 2, "num_steps": 32, "total_timesteps": 64, "num_minibatches": 1, "update_epochs": 1}
    small |= {"compile": False, "device": "cpu", "runs_dir": str(tmp_path)}
    gradients = []
    for recipes in (["bfloat16"], []):
        script = with_recipes("ppo_atari", *recipes)
        agent, run_dir = script.train(script.Args(**small))
        assert scalars(run_dir)["losses/approx_kl"] == [(64, pytest.approx(0, abs=1e-6))]
        assert all(parameter.dtype == torch.float32 for parameter in agent.parameters())
        gradients.append(script.load_checkpoint(run_dir)["optimizer"]["state"][0]["exp_avg"])
    bfloat16, float32 = gradients
    assert 1e-4 < (bfloat16 - float32).norm() / float32.norm() < 0.2
