"""What a run leaves: its folder, episodes.csv, TensorBoard."""

import itertools
import json
import re

import numpy as np
import pytest
from conftest import ACTIONS, ONE, ROOT, probe, rows, scalars
from probes import CHAIN_GAMMA, CHAIN_VALUES
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def test_run_folder(script, small_args, run_dir):
    """Everything a run leaves, and what is in it."""
    assert run_dir.name.startswith(f"{probe(script).replace('/', '-')}__{script.__name__}__1__")
    saved = json.loads((run_dir / "args.json").read_text())
    args = vars(small_args(runs_dir=saved["runs_dir"]))
    about = {"script": script.__name__, "version": script.__version__}
    assert saved == about | args | {"hidden_sizes": list(args["hidden_sizes"])}
    assert (run_dir / f"{script.__name__}.py").read_text() == (ROOT / f"{script.__name__}.py").read_text()
    table = rows(run_dir)
    assert table[0] == ["global_step", "episodic_return", "episodic_length", "seconds"]
    assert len(table) == 1 + 256 and {row[2] for row in table[1:]} == {"1"}
    assert not list(run_dir.glob("*.tmp"))
    text = EventAccumulator(str(run_dir)).Reload().Tensors("hyperparameters/text_summary")[0].tensor_proto
    assert f"|env_id|{args['env_id']}|" in text.string_val[0].decode()


def test_one_point_per_metric_and_iteration(script, run_dir):
    """Of episodes it is the mean over those that ended in the iteration; behind it, over the last 100."""
    logged = scalars(run_dir)
    assert all([step for step, _ in points] == [64, 128, 192, 256] for points in logged.values())
    returns = np.array([float(row[1]) for row in rows(run_dir)[1:]])  # of episodes of one step
    means = [value for _, value in logged["charts/episodic_return"]]
    np.testing.assert_allclose(means, returns.reshape(4, 64).mean(1), rtol=1e-4)
    assert {value for _, value in logged["charts/episodic_length"]} == {1}
    last = [value for _, value in logged["charts/last_100_return"]]
    expected = [returns[max(0, end - 100) : end].mean() for end in (64, 128, 192, 256)]
    np.testing.assert_allclose(last, expected, rtol=1e-4)


def test_episodes_span_rollouts(script, small_args, capsys):
    """Chain episodes of 3, 5, 2 and 7 steps in rollouts of 4: whole lengths and raw, undiscounted returns. An iteration
    in which none ends has no point. Without a terminal 20 lines show the progress, and the last return is printed."""
    sizes = {"num_steps": 4, "num_envs": 1, "total_timesteps": 136, "num_minibatches": 1}
    _, run_dir = script.train(small_args(env_id=probe(script, "Chain"), **sizes))
    table = rows(run_dir)[1:]
    lengths = [int(row[2]) for row in table]
    assert sorted(lengths[:4]) == [2, 3, 5, 7] and lengths[:4] * 8 == lengths
    ends = list(itertools.accumulate(lengths))
    assert [int(row[0]) for row in table] == ends
    for row in table:
        length = int(row[2])
        rewards = CHAIN_VALUES[:length] - CHAIN_GAMMA * CHAIN_VALUES[1 : length + 1]
        assert float(row[1]) == pytest.approx(rewards.sum(), rel=1e-5)
    text, mean = capsys.readouterr().out, np.mean([float(row[1]) for row in table])
    assert text.count(" steps/s\n") == 20 and f"mean return of the last 32 episodes: {mean:.1f}\n" in text
    logged = [step for step, _ in scalars(run_dir)["charts/episodic_length"]]
    assert logged == sorted({(end + 3) // 4 * 4 for end in ends}) and len(logged) < 34


@ONE
def test_speed_is_that_of_the_iteration(script, small_args):
    """charts/SPS does not drag the first iteration along, in which functions are compiled; here its first step is slow.
    The rows of an iteration tell when it ended, to a hundredth of a second."""
    steps = {"num_envs": 1, "num_steps": 256, "num_minibatches": 1, "update_epochs": 1, "total_timesteps": 256 * 4}
    _, run_dir = script.train(small_args(env_id=probe(script, "Slow"), **steps))
    first, *speeds = (value for _, value in scalars(run_dir)["charts/SPS"])
    ends = [float(row[3]) for row in rows(run_dir)[256::256]]
    assert first < 256 / 0.5 and len(speeds) == 3
    for speed, (one, two) in zip(speeds, itertools.pairwise(ends)):
        assert two - one - 0.011 < 256 / speed < two - one + 0.011


def test_metric_table_lists_what_is_logged(script, run_dir):
    table = set(re.findall(r"^\| `(\S+)`", (ROOT / "docs" / "metrics.md").read_text(), re.M))
    logged = set(scalars(run_dir))
    assert logged == table - ({"charts/policy_std"} if ACTIONS[script.__name__] == "discrete" else set())
