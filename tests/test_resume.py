"""--resume: the run goes on as if nothing had been, with its arguments or others."""

import dataclasses
import json
import re
import shutil
import signal

import probes
import pytest
import torch
from conftest import ONE, RNN, SCRIPTS, assert_one_line, assert_same_learner, probe, rows, scalars


class SameNumbers(probes.Chain):
    """The same random numbers begin when a run starts, and when it is resumed."""

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            torch.manual_seed(0)
        return super().reset(seed=seed)


probes.register("SameNumbers", SameNumbers, lengths=(8,))


class Stops(list):
    """Stop signals. The same random numbers begin where train reads them, at the end of every iteration."""

    def __iter__(self):
        torch.manual_seed(0)
        return super().__iter__()


@pytest.mark.parametrize("flags", [{}, {"desired_kl": 0.01, "anneal_clip": True, "clip_vloss": True}])
def test_resumed_learner_is_the_uninterrupted_one(script, small_args, flags):
    """Only random numbers and episodes begin anew. Here every rollout is one whole episode, and the same random numbers
    begin behind each iteration: a run that is stopped in each of them is then the whole one to the last bit. Weights,
    optimizer, learning rate, schedules and statistics all have to be there for it, episodes and logs too."""
    flags = {"num_steps": 8, "num_minibatches": 2, "env_id": probe(script, "SameNumbers")} | flags
    _, whole = script.train(small_args(exp_name="whole", **flags), Stops())
    args = small_args(exp_name="half", **flags)
    for step in range(32, 257, 32):
        _, half = script.train(args, Stops([signal.SIGTERM]))
        saved = script.load_checkpoint(half)
        assert saved["global_step"] == step
        args = dataclasses.replace(saved["args"], resume=str(half))
    assert_same_learner(script.load_checkpoint(half), script.load_checkpoint(whole))
    assert len(rows(half)) == 1 + 256 // 8 and [row[:3] for row in rows(half)] == [row[:3] for row in rows(whole)]
    logged = scalars(whole)
    del logged["charts/SPS"]  # runs of one iteration have none
    assert scalars(half) == logged


def test_resume_without_further_steps(script, run_dir, capsys):
    """The learner is that of the checkpoint, to the bit; rows and checkpoint stay as they are; a line says why."""
    saved = script.load_checkpoint(run_dir)
    before = {name: (run_dir / name).read_bytes() for name in ("checkpoint.pt", "episodes.csv")}
    agent, same_dir = script.train(dataclasses.replace(saved["args"], resume=str(run_dir)))
    assert "step 256 of 256, nothing left to do: raise --total-timesteps" in capsys.readouterr().out
    assert same_dir == run_dir and list(run_dir.parent.iterdir()) == [run_dir]
    torch.testing.assert_close(agent.state_dict(), saved["agent"].state_dict(), atol=0, rtol=0)
    assert before == {name: (run_dir / name).read_bytes() for name in before}


LONGER = {"ppo_continuous": "Pendulum-v1", "ppo_discrete": "CartPole-v1", "ppo_rnn": "CartPole-v1"}


@pytest.mark.parametrize(
    "script, async_envs", [*((name, False) for name in SCRIPTS), ("ppo_continuous", True)], indirect=["script"]
)
def test_resumed_twice_is_the_same_run_twice(script, small_args, async_envs):
    """From copies of one folder, cut in the middle of episodes: the same weights, optimizer, rows and logs."""
    half = {"env_id": LONGER[script.__name__], "async_envs": async_envs, "total_timesteps": 4 * 16 * 10}
    _, run_dir = script.train(small_args(**half))
    copy = shutil.copytree(run_dir, run_dir.parent / "copy")
    for folder in (run_dir, copy):
        args = dataclasses.replace(script.load_checkpoint(folder)["args"], resume=str(folder))
        script.train(dataclasses.replace(args, total_timesteps=4 * 16 * 40))
    assert_same_learner(*(script.load_checkpoint(folder) for folder in (run_dir, copy)))
    assert len(rows(run_dir)) > 4 and [row[:3] for row in rows(run_dir)] == [row[:3] for row in rows(copy)]
    one, two = scalars(run_dir), scalars(copy)
    assert one.keys() == two.keys() and all(one[key] == two[key] for key in one.keys() - {"charts/SPS"})


@pytest.mark.parametrize("flag, rest", [("--num-envs=2", 8), ("--num-steps=32", 2), ("--update-epochs=1", 4)])
def test_resume_with_other_sizes(script, run_dir, flag, rest):
    """What is given again applies from the checkpoint on: steps and iterations go on from there to the same end."""
    flags = [flag, "--num-minibatches=2", "--total-timesteps=512"]
    args = script.parse_args(flags, default=script.load_checkpoint(run_dir)["args"])
    script.train(dataclasses.replace(args, resume=str(run_dir)))
    steps = [step for step, _ in scalars(run_dir)["losses/value_loss"]]
    assert steps == [64, 128, 192, 256] + [256 + 256 // rest * (i + 1) for i in range(rest)]
    assert script.load_checkpoint(run_dir)["global_step"] == 512
    assert sum(int(row[2]) for row in rows(run_dir)[1:]) == 512  # episodes of one step


def test_resume_with_a_larger_batch_stays_within_the_total(script, small_args):
    _, run_dir = script.train(small_args(total_timesteps=192))
    args = script.load_checkpoint(run_dir)["args"]
    script.train(dataclasses.replace(args, resume=str(run_dir), num_envs=8, total_timesteps=512))
    assert script.load_checkpoint(run_dir)["global_step"] == 192 + 2 * 128


def test_resume_with_another_learning_rate(script, run_dir):
    """What is given again with --resume counts, also where nothing anneals it."""
    flags = ["--learning-rate=1e-5", "--no-anneal-lr"]
    args = script.parse_args(flags, default=script.load_checkpoint(run_dir)["args"])
    args.resume, args.total_timesteps = str(run_dir), 512
    script.train(args)
    rates = [value for _, value in scalars(run_dir)["charts/learning_rate"]]
    first = script.Args().learning_rate
    assert rates == pytest.approx([first, 0.75 * first, 0.5 * first, 0.25 * first] + [1e-5] * 4)


def test_longer_total_stretches_the_schedules(script, small_args):
    """As README says: after --resume the learning rate is where a run of the new length would have it."""
    args = small_args(anneal_lr=True, desired_kl=None, learning_rate=1e-3)
    _, run_dir = script.train(args)
    iterations = args.total_timesteps // (args.num_envs * args.num_steps)
    script.train(dataclasses.replace(args, resume=str(run_dir), total_timesteps=2 * args.total_timesteps))
    rates = [rate for _, rate in scalars(run_dir)["charts/learning_rate"]]
    fractions = [1 - i / iterations for i in range(iterations)]
    fractions += [1 - i / (2 * iterations) for i in range(iterations, 2 * iterations)]
    assert rates == pytest.approx([1e-3 * fraction for fraction in fractions], rel=1e-5)


def test_resume_with_other_arguments(script, run_dir, main):
    """What is given again applies, everything else stays as it was."""
    before = script.load_checkpoint(run_dir)["args"]
    main(script, "--resume", run_dir, "--total-timesteps=512", "--gamma=0.5", "--num_envs=8", "--no-norm-obs")
    saved = script.load_checkpoint(run_dir)
    changes = {"resume": str(run_dir), "total_timesteps": 512, "gamma": 0.5, "num_envs": 8, "norm_obs": False}
    assert saved["args"] == dataclasses.replace(before, **changes) and saved["global_step"] == 512
    assert json.loads((run_dir / "args.json").read_text()) == json.loads(json.dumps(vars(saved["args"])))


@RNN
def test_resume_with_another_memory(script, small_args, run_dir):
    """The weights do not fit: an error, no silent new start."""
    for changes in ({"cell": "gru"}, {"hidden_size": 9}, {"separate_critic_rnn": True}):
        with pytest.raises(RuntimeError, match="loading state_dict"):
            script.train(small_args(resume=str(run_dir), **changes))


def test_resume_of_a_cuda_checkpoint_on_cpu(script, run_dir):
    """The optimizer's settings that belong to a device do not travel with the checkpoint."""
    checkpoint = torch.load(run_dir / "checkpoint.pt")
    checkpoint["optimizer"]["param_groups"][0]["capturable"] = True
    torch.save(checkpoint, run_dir / "checkpoint.pt")
    args = script.load_checkpoint(run_dir)["args"]
    args.resume, args.total_timesteps = str(run_dir), 512
    script.train(args)
    assert script.load_checkpoint(run_dir)["global_step"] == 512


def test_latest(script, small_args, run_dir, main):
    """--resume latest and --evaluate latest mean the newest checkpoint in --runs-dir; a file in the folder will do."""
    args = small_args(seed=2)
    folders = [run_dir, script.train(args)[1]]
    for flags in (["--evaluate=latest", "--eval-episodes=1"], ["--resume", "latest", "--total-timesteps=512"]):
        assert main(script, *flags, f"--runs-dir={args.runs_dir}").returncode == 0
    steps = [script.load_checkpoint(folder)["global_step"] for folder in folders]
    assert steps == [256, 512]
    printed = main(script, f"--evaluate={folders[0]}/checkpoint.pt", "--eval-episodes=3").stdout
    assert len(re.findall(r"returns: .*", printed)[-1].split()) == 4
    assert_one_line(main(script, "--resume=latest", "--runs-dir=nowhere"), "latest/checkpoint.pt is missing")


@ONE
def test_latest_of_a_copied_run(script, small_args, run_dir, main, monkeypatch, tmp_path):
    """It is that of --runs-dir, here ./runs, not of the folder that the run was made in."""
    copy = shutil.copytree(run_dir, tmp_path / "elsewhere" / "runs" / run_dir.name)
    script.train(small_args(seed=2))
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(script, "--resume=latest", "--total-timesteps=512").returncode == 0
    assert [script.load_checkpoint(folder)["global_step"] for folder in (copy, run_dir)] == [512, 256]
