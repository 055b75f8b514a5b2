"""variants/ppo_rlhf.py: learning, logs, run folders, resuming, ranks."""

import copy
import json
import math
import os
import re
import signal

import pytest
import torch
from conftest import ROOT, scalars
from forks import exit_status, fork, two_ranks
from rlhf import EOS, ppo_rlhf, rows, save, stop_in_iteration, transformers
from test_wandb import wait_for_records

pytest_plugins = "rlhf_fixtures"


def test_learns_the_builtin_task(trained):
    """Rewards, and what they stand for, go up; the KL to the reference stays small."""
    table = [{name: float(value) for name, value in row.items()} for row in rows(trained)]
    for name, gain in (("charts/reward", 0.25), ("charts/task_score", 0.1)):
        begin, end = table[0][name], sum(row[name] for row in table[-4:]) / 4
        assert end > begin + gain, (name, begin, end)
    assert 0.2 < table[-1]["charts/kl"] < 2
    assert table[-1]["losses/explained_variance"] > 0.2


def test_two_estimates_of_the_kl_to_the_reference(trained):
    table = [{name: float(value) for name, value in row.items()} for row in rows(trained)]
    for row in table[4:]:
        assert row["charts/kl_k3"] > 0 and abs(row["charts/kl_k3"] / row["charts/kl"] - 1) < 0.5


def test_run_folder(trained):
    assert re.fullmatch(r"builtin__ppo_rlhf__1__[\d.]+", trained.name)
    names = {path.name for path in trained.iterdir() if "tfevents" not in path.name}
    assert names == {
        "actor",
        "args.json",
        "checkpoint.pt",
        "lock",
        "metrics.csv",
        "ppo_rlhf.py",
        "reward",
        "supervised",
    }
    assert (trained / "ppo_rlhf.py").read_text() == (ROOT / "variants" / "ppo_rlhf.py").read_text()
    table, logged = rows(trained), scalars(trained)
    assert [int(row["global_step"]) for row in table] == [64 * n for n in range(1, 17)]
    assert logged.keys() == {name for name in table[0] if "/" in name}
    for name, points in logged.items():
        assert [value for _, value in points] == pytest.approx([float(row[name]) for row in table], rel=1e-5)
    rates = [float(row["charts/learning_rate"]) for row in table]
    assert rates == pytest.approx([5e-4 * (16 - n) / 16 for n in range(16)])
    frozen = transformers.AutoModelForCausalLM.from_pretrained(trained / "supervised")
    assert sum(p.numel() for p in frozen.parameters()) > 1e5


def test_trained_actor_loads_with_transformers(trained):
    """With its tokenizer, from the run folder, and says the same."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(trained / "actor")
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained / "actor")
    batch = tokenizer(["how is the soup ?", "tell us about the cake please ."], return_tensors="pt", padding=True)
    assert batch.attention_mask[0].tolist() == [0, 0, 1, 1, 1, 1, 1]  # shorter prompts are padded on the left
    saved = ppo_rlhf.load_checkpoint(trained)["actor"]
    torch.testing.assert_close(loaded.state_dict(), saved, atol=0, rtol=0)
    answers = tokenizer.batch_decode(loaded.generate(**batch, do_sample=False), skip_special_tokens=True)
    assert answers[0].startswith("how is the soup ? it is ")


def test_evaluate(trained, main, tmp_path):
    """Twice the same, nothing changes; the likeliest answers are others than sampled ones; prompts of another file."""
    files = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    flags = "--evaluate", "latest", "--runs-dir", trained.parent, "--eval-episodes=30"
    first = main(ppo_rlhf, *flags)
    assert first.returncode == 0 and first == main(ppo_rlhf, *flags)
    assert len(re.findall(" -> it is ", first.stdout)) >= 6
    reward, kl = re.search(r"30 answers: mean reward (\S+), KL to the reference (\S+)\n", first.stdout).groups()
    last = rows(trained)[-1]  # of the trained actor, not of the reference
    assert abs(float(reward) - float(last["charts/reward"])) < 0.1 and 0.5 < float(kl) / float(last["charts/kl"]) < 2
    assert first.stdout != main(ppo_rlhf, *flags, "--eval-deterministic").stdout
    (tmp_path / "one.txt").write_text("how is the soup ?\n")
    other = main(ppo_rlhf, *flags, f"--prompts={tmp_path / 'one.txt'}").stdout
    assert other.count(" -> ") == other.count("how is the soup ? -> ") == 8
    assert files == {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}


def test_metrics(rlhf_args, calls):
    """What is logged of one iteration, from what its functions saw."""
    small = {"total_episodes": 256, "batch_size": 256, "num_minibatches": 4, "actor_learning_rate": 3e-3}
    _, run_dir = ppo_rlhf.train(rlhf_args(**small, clip_coef=0.05, clip_reward=0.4))
    row = {name: float(value) for name, value in rows(run_dir)[0].items()}
    ((_, (sequences, _, mask)),) = calls["generate"]
    texts = [row[-mask.shape[1] :].tolist() for row in sequences]
    lengths = [text.index(EOS) + 1 if EOS in text else len(text) for text in texts]
    assert 0.1 < sum(EOS in text for text in texts) / 256 < 0.9  # some end, some do not
    assert row["charts/ended"] == pytest.approx(sum(EOS in text for text in texts) / 256)
    assert row["charts/response_length"] == pytest.approx(sum(lengths) / 256)
    scores = torch.cat([result for _, result in calls["get_scores"]])
    assert row["charts/reward"] == pytest.approx(scores.mean().item(), rel=1e-5)
    share = (scores.abs() > 0.4).float().mean().item()
    assert 0 < share < 1 and row["charts/clipped_scores"] == pytest.approx(share)

    def mean(function):
        return sum(function(*arguments, result).item() for arguments, result in losses) / 8

    losses = calls["clipped_value_loss"]
    assert row["losses/value_loss"] == pytest.approx(mean(lambda *call: call[-1]), rel=1e-5)
    assert row["losses/values"] == pytest.approx(mean(lambda values, *_: values.mean()), rel=1e-5)
    losses = calls["clipped_policy_loss"]
    assert row["losses/policy_loss"] == pytest.approx(mean(lambda *call: call[-1]), rel=1e-5)
    clipfrac = mean(lambda log_ratio, *_: ((log_ratio < math.log(0.95)) | (log_ratio > math.log(1.05))).float().mean())
    assert 0.05 < clipfrac < 0.95 and row["losses/clipfrac"] == pytest.approx(clipfrac, rel=1e-4)
    # To second order the KL is half the mean square of the log-ratio.
    second_order = mean(lambda log_ratio, *_: log_ratio.square().mean() / 2)
    assert row["losses/approx_kl"] == pytest.approx(second_order, rel=0.1)
    assert row["losses/old_approx_kl"] == pytest.approx(mean(lambda log_ratio, *_: -log_ratio.mean()), rel=1e-4)
    assert abs(row["losses/old_approx_kl"] / row["losses/approx_kl"] - 1) < 0.5  # two estimates of the same
    # Minus the log-probability of what was sampled estimates the entropy.
    sampled = torch.cat([result[0] for _, result in calls["get_log_probs"][:8:2]])  # the actor's, before the update
    assert row["losses/entropy"] == pytest.approx(-sampled[mask].mean().item(), rel=0.1)


def assert_same_learner(one, two):
    for name in ("actor", "critic", "actor_optimizer", "critic_optimizer", "iteration"):
        torch.testing.assert_close(one[name], two[name], atol=0, rtol=0)


@pytest.mark.parametrize("builtin", [False, True])
def test_resumed_equals_uninterrupted(rlhf_args, builtin, monkeypatch, capsys):
    """Weights, optimisers, random numbers and logs, to the last bit; a row after the checkpoint goes."""
    changes = {"checkpoint_interval": 2}
    if builtin:
        changes |= {"model": None, "reward_model": None, "prompts": None}
    _, whole = ppo_rlhf.train(rlhf_args(**changes))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_in_iteration(4, patch)
        ppo_rlhf.train(rlhf_args(**changes))
    (half,) = {*whole.parent.iterdir()} - {whole}
    script = os.path.relpath(ppo_rlhf.__file__)
    assert f"to resume: python {script} --resume {half}\n" in capsys.readouterr().out
    assert ppo_rlhf.load_checkpoint(half)["iteration"] == 2 and len(rows(half)) == 3
    ppo_rlhf.train(rlhf_args(**changes), resume="latest")
    assert_same_learner(ppo_rlhf.load_checkpoint(half), ppo_rlhf.load_checkpoint(whole))
    one, two = ([{k: v for k, v in row.items() if "second" not in k} for row in rows(path)] for path in (half, whole))
    assert one == two
    one, two = scalars(half), scalars(whole)
    assert all(one[name] == two[name] for name in two if "second" not in name)


@pytest.mark.parametrize("place", ["checkpoint", "actor"])
def test_kill_while_saving(rlhf_args, monkeypatch, place):
    """The process dies with half of its second checkpoint written, or before the second actor replaces the first. The
    first checkpoint is whole, transformers loads the actor, and the run goes on. At its end the actor is the
    checkpoint's."""
    args = rlhf_args(checkpoint_interval=2)
    save, replace, calls = torch.save, os.replace, []

    def half(checkpoint, path):
        save(checkpoint, path)
        calls.append("checkpoint")
        if place == "checkpoint" and calls.count("checkpoint") == 2:
            os.truncate(path, os.path.getsize(path) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    def no_second_actor(source, target):
        calls.append(target.name)
        if place == "actor" and calls.count("actor") == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", half)
        patch.setattr(ppo_rlhf.os, "replace", no_second_actor)
        process = fork(ppo_rlhf.train, args)
    assert exit_status(process) == -signal.SIGKILL
    (run_dir,) = (ROOT / args.runs_dir).iterdir()
    assert ppo_rlhf.load_checkpoint(run_dir)["iteration"] == 1
    if place == "checkpoint":
        transformers.AutoModelForCausalLM.from_pretrained(run_dir / "actor")
    ppo_rlhf.train(resume=run_dir)
    assert [row["iteration"] for row in rows(run_dir)] == ["1", "2", "3", "4"]
    saved = ppo_rlhf.load_checkpoint(run_dir)
    assert saved["iteration"] == 4
    actor = transformers.AutoModelForCausalLM.from_pretrained(run_dir / "actor")
    torch.testing.assert_close(actor.state_dict(), saved["actor"], atol=0, rtol=0)


def test_wandb_gets_every_value_once_and_sample_answers(rlhf_args, offline_wandb):
    """As a table of scores, prompts and answers, ten times in a run."""
    _, run_dir = ppo_rlhf.train(rlhf_args(track=True, total_episodes=16))
    history, settings = wait_for_records(run_dir, 2)
    assert settings["name"] == run_dir.name and [row["global_step"] for row in history] == [8, 16]
    logged = scalars(run_dir)
    for name, points in logged.items():
        assert [row[name] for row in history] == pytest.approx([value for _, value in points], nan_ok=True), name
    tables = sorted((run_dir / "wandb").glob("offline-run-*/files/media/table/samples_*.table.json"))
    for path, row in zip(tables, rows(run_dir), strict=True):
        table = json.loads(path.read_text())
        assert table["columns"] == ["score", "prompt", "answer"] and len(table["data"]) == 8
        assert {prompt for _, prompt, _ in table["data"]} <= {*ppo_rlhf.BUILTIN_PROMPTS}
        mean = sum(score for score, *_ in table["data"]) / 8
        assert mean == pytest.approx(float(row["charts/reward"]), rel=1e-5)


def test_reward_that_is_not_finite(rlhf_args, models, tmp_path):
    """One line; the last good iteration is saved and logged, and the run goes on from it. This reward model
    fails on long texts; one of the prompts of iteration 3 is long."""
    tokenizer, _, reward_model = models
    broken = copy.deepcopy(reward_model)
    broken.transformer.wpe.weight.data[12:] = 1e38  # its square is infinite
    save(broken, tokenizer, tmp_path / "reward")
    lines = ["how is the soup ?"] * 24  # 5 words, and an answer of 6
    lines[ppo_rlhf.draw_prompts(range(24), 20, 1, seed=1)[0]] += " it is very good" * 3
    (tmp_path / "prompts.txt").write_text("\n".join(lines))
    paths = {"prompts": str(tmp_path / "prompts.txt"), "reward_model": str(tmp_path / "reward")}
    args = rlhf_args(checkpoint_interval=1, **paths)
    with pytest.raises(ppo_rlhf.UsageError, match="iteration 3: a score is NaN or infinite"):
        ppo_rlhf.train(args)
    (run_dir,) = (ROOT / args.runs_dir).iterdir()
    saved = ppo_rlhf.load_checkpoint(run_dir)
    assert saved["iteration"] == 2 and len(rows(run_dir)) == 2
    assert all(x.isfinite().all() for x in saved["actor"].values())
    (tmp_path / "prompts.txt").write_text("how is the soup ?\n" * 24)  # repaired
    ppo_rlhf.train(resume=run_dir)
    assert len(rows(run_dir)) == 4


def test_update_that_is_not_finite(rlhf_args):
    """A critic with a huge learning rate: its weights are finite after the first step, after the second they are not.
    The checkpoint before, that of the first iteration, is kept."""
    args = rlhf_args(num_minibatches=1, ppo_epochs=1, critic_learning_rate=1e36)
    with pytest.raises(ppo_rlhf.UsageError, match="iteration 2 gave NaN or infinity"):
        ppo_rlhf.train(args)
    (run_dir,) = (ROOT / args.runs_dir).iterdir()
    checkpoint = ppo_rlhf.load_checkpoint(run_dir)
    assert checkpoint["iteration"] == 1 and all(x.isfinite().all() for x in checkpoint["actor"].values())


def test_two_ranks_train_as_one(rlhf_args, tmp_path, monkeypatch):
    """torchrun: other prompts, the same weights to the bit, one run folder."""
    seen = {"prompts": [], "scores": [], "random": []}
    make_models, generate, get_scores = ppo_rlhf.make_models, ppo_rlhf.generate, ppo_rlhf.get_scores
    trained, apply_gradient = [], ppo_rlhf.apply_gradient

    def make_other_models(*given):
        tokenizer, *models = make_models(*given)
        for model in models:
            for parameter in model.parameters():
                parameter.data += 0.1 * int(os.environ["RANK"])  # as if loaded from another file
        return tokenizer, *models

    def spy_on_generate(actor, tokenizer, prompts):
        seen["prompts"] += prompts
        seen["random"].append(torch.get_rng_state())
        return generate(actor, tokenizer, prompts)

    def spy_on_scores(*given):
        seen["scores"].append(get_scores(*given))
        return seen["scores"][-1]

    def spy_on_gradients(model, *given):
        if all(model is not other for other in trained):
            trained.append(model)
        return apply_gradient(model, *given)

    def train(rank):
        actor, run_dir = ppo_rlhf.train(rlhf_args(total_episodes=16))
        assert len(trained) == 2 and trained[0] is actor
        weights = [parameter.detach() for model in trained for parameter in model.parameters()]
        torch.save(seen | {"weights": weights, "run_dir": str(run_dir)}, tmp_path / f"rank-{rank}.pt")

    monkeypatch.setattr(ppo_rlhf, "make_models", make_other_models)
    monkeypatch.setattr(ppo_rlhf, "generate", spy_on_generate)
    monkeypatch.setattr(ppo_rlhf, "get_scores", spy_on_scores)
    monkeypatch.setattr(ppo_rlhf, "apply_gradient", spy_on_gradients)
    two_ranks(train)
    one, other = (torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1))
    run_dir = one["run_dir"]
    assert other["run_dir"] == "None" and len(list((tmp_path / "runs").iterdir())) == 1
    prompts = [x["prompts"] for x in (one, other)]
    shares = [*prompts[0][:4], *prompts[1][:4], *prompts[0][4:], *prompts[1][4:]]  # two iterations of 8
    assert len({tuple(prompt) for prompt in shares[:8]}) == 8  # a pass over all prompts
    assert not torch.equal(one["random"][0], other["random"][0])  # answers to the same prompt would differ
    assert all(torch.equal(*pair) for pair in zip(one["weights"], other["weights"]))
    logged = [float(row["charts/reward"]) for row in rows(tmp_path / "runs" / os.path.basename(run_dir))]
    means = [torch.cat([*one["scores"][i : i + 2], *other["scores"][i : i + 2]]).mean().item() for i in (0, 2)]
    assert logged == pytest.approx(means, rel=1e-5)
    saved = ppo_rlhf.load_checkpoint(run_dir)
    assert torch.equal(saved["actor"]["transformer.wte.weight"], one["weights"][0])
