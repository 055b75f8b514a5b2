"""What a run leaves: its folder, episodes.csv, TensorBoard."""

import itertools
import json
import re

import numpy as np
import pytest
from conftest import ROOT, probe, rows, scalars
from probes import CHAIN_GAMMA, CHAIN_VALUES
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def test_run_folder(script, small_args, run_dir):
    """Everything a run leaves, and what is in it."""
    assert run_dir.name.startswith(f"{probe(script).replace('/', '-')}__{script.__name__}__1__")
    saved = json.loads((run_dir / "args.json").read_text())
    args = vars(small_args(runs_dir=saved["runs_dir"]))
    assert saved == args | {"hidden_sizes": list(args["hidden_sizes"])}
    assert (run_dir / f"{script.__name__}.py").read_text() == (ROOT / f"{script.__name__}.py").read_text()
    table = rows(run_dir)
    assert table[0] == ["global_step", "episodic_return", "episodic_length", "seconds"]
    assert len(table) == 1 + 256 and {row[2] for row in table[1:]} == {"1"}
    logged = scalars(run_dir)
    returns = [value for _, value in logged["charts/episodic_return"]]
    np.testing.assert_allclose(returns, [float(row[1]) for row in table[1:]], rtol=1e-4)
    assert logged["charts/last_100_return"][-1][1] == pytest.approx(np.mean(returns[-100:]), rel=1e-5)
    assert not list(run_dir.glob("*.tmp"))


def test_episodes_span_rollouts(script, small_args):
    """Chain episodes of 3, 5, 2 and 7 steps in rollouts of 4: whole lengths and raw, undiscounted returns."""
    _, run_dir = script.train(
        small_args(env_id=probe(script, "Chain"), num_steps=4, num_envs=1, total_timesteps=136, num_minibatches=1)
    )
    table = rows(run_dir)[1:]
    lengths = [int(row[2]) for row in table]
    assert sorted(lengths[:4]) == [2, 3, 5, 7] and lengths[:4] * 8 == lengths
    assert [int(row[0]) for row in table] == list(itertools.accumulate(lengths))

    for row in table:
        length = int(row[2])
        rewards = CHAIN_VALUES[:length] - CHAIN_GAMMA * CHAIN_VALUES[1 : length + 1]
        assert float(row[1]) == pytest.approx(rewards.sum(), rel=1e-5)


def test_speed_leaves_out_the_first_iteration(script, small_args):
    """charts/SPS counts from the end of the first iteration, in which functions are compiled."""
    steps = {"num_envs": 1, "num_steps": 256, "num_minibatches": 1, "update_epochs": 1, "total_timesteps": 256 * 6}
    _, run_dir = script.train(small_args(env_id=probe(script, "Slow"), **steps))
    *_, speed = EventAccumulator(str(run_dir)).Reload().Scalars("charts/SPS")
    first, *_, last = [float(row[-1]) for row in rows(run_dir)[1:]]  # of the first iteration, of the last one
    assert speed.value == pytest.approx(256 * 5 / (last - first), rel=0.1)


def test_metric_table_lists_what_is_logged(script, run_dir):
    assert set(re.findall(r"^\| `(\S+)`", (ROOT / "docs" / "metrics.md").read_text(), re.M)) == set(scalars(run_dir))
