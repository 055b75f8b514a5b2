"""--track: Weights & Biases, offline."""

import collections
import json
import struct
import time

import gpu_sim
import pytest
import test_atari
from conftest import ONE, SMALL, probe, scalars, start
from wandb.proto import wandb_internal_pb2


def payloads(path):
    """Of W&B's offline file: a header of 7 bytes, then pieces in blocks of 32 KiB, as in the logs of LevelDB. A piece
    has a checksum, a length and a kind: 1 is a whole record, 2, 3 and 4 are the first, a middle and the last part."""
    data, position, record = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = 32_768 - position % 32_768
        if left < 7:  # too short for another piece
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def records(run_dir, run_id=None):
    """The history of the one offline run of a folder, a dict for each row; its settings. The run has the id run_id;
    None: the folder's name."""
    history, settings = [], {}
    for path in sorted((run_dir / "wandb").glob("offline-run-*/*.wandb")):
        assert path.name == f"run-{run_id or run_dir.name}.wandb"
        for payload in payloads(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(payload)
            if record.history.item:
                history.append({x.key or "/".join(x.nested_key): json.loads(x.value_json) for x in record.history.item})
            if record.run.run_id:
                values = {x.key: x.value_json for x in record.run.config.update}
                settings |= {"id": record.run.run_id, "name": record.run.display_name, "project": record.run.project}
                settings |= {"gamma": values.get("gamma", settings.get("gamma"))}
    return history, settings


def wait_for_records(run_dir, count, run_id=None):
    """The same, once the history has `count` rows: on a busy machine W&B writes its file after it has finished."""
    for _ in range(200):
        history, settings = records(run_dir, run_id)
        if len(history) >= count:
            break
        time.sleep(0.1)
    return history, settings


@ONE
def test_wandb(script, small_args, main, offline_wandb):
    """Two runs in one process, the first one resumed: two runs of W&B, which have the names of the folders. Each metric
    is there once for each iteration, with its global_step, and has the value that TensorBoard has."""
    args = {"track": True, "wandb_project_name": "hill", "total_timesteps": 128}
    _, first = script.train(small_args(gamma=0.5, **args))
    _, second = script.train(small_args(seed=2, **args))
    assert main(script, "--resume", f"{first}/../{first.name}", "--total-timesteps=256").returncode == 0
    for run_dir, steps, gamma in ((first, [64, 128, 192, 256], "0.5"), (second, [64, 128], "0.99")):
        history, settings = wait_for_records(run_dir, len(steps))
        names = {"id": run_dir.name, "name": run_dir.name, "project": "hill", "gamma": gamma}
        assert settings == names
        counts = collections.Counter(name for row in history for name in row if not name.startswith("_"))
        logged = scalars(run_dir)
        assert counts == dict.fromkeys([*logged, "global_step"], len(steps))
        assert [row["global_step"] for row in history] == [row["_step"] for row in history] == steps
        for name, points in logged.items():
            assert [row[name] for row in history] == pytest.approx([value for _, value in points], nan_ok=True), name


def test_variants(tmp_path, offline_wandb):
    """They send what TensorBoard has, under the folder's name."""
    _, images = test_atari.train(tmp_path, env_id="images/Last-v0", total_timesteps=128, track=True)
    _, robots = gpu_sim.script.train(gpu_sim.make_args(tmp_path, total_timesteps=320, track=True))
    for run_dir, steps in ((images, [64, 128]), (robots, [160, 320])):
        history, settings = wait_for_records(run_dir, len(steps))
        assert settings["name"] == run_dir.name and [row["global_step"] for row in history] == steps
        for name, points in scalars(run_dir).items():
            found = {row["global_step"]: row[name] for row in history if name in row}
            assert found == pytest.approx(dict(points), nan_ok=True), name


@ONE
def test_a_run_that_is_tracked_later(script, run_dir, main, offline_wandb):
    """It has the folder's name all the same."""
    assert main(script, "--resume", run_dir, "--track", "--total-timesteps=320").returncode == 0
    history, settings = wait_for_records(run_dir, 1)
    assert settings["name"] == run_dir.name and [row["global_step"] for row in history] == [320]


@ONE
def test_a_run_of_a_sweep(script, tmp_path, main, offline_wandb):
    """The sweep chooses the id, by the variables that wandb's agent sets. Resumed without the agent, the run continues
    under the same id."""
    sweep = {"WANDB_SWEEP_ID": "search", "WANDB_RUN_ID": "chosen", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    args = SMALL | {"env_id": probe(script), "total_timesteps": 128, "track": True}
    process = start(script.__name__, tmp_path / "runs", environment=sweep, **args)  # wandb reads them once in a process
    printed, _ = process.communicate()
    assert process.returncode == 0, printed
    [run_dir] = (tmp_path / "runs").iterdir()
    assert main(script, "--resume", run_dir, "--total-timesteps=256").returncode == 0
    history, settings = wait_for_records(run_dir, 4, "chosen")
    assert settings["id"] == "chosen" and settings["name"] == run_dir.name
    assert [row["global_step"] for row in history] == [64, 128, 192, 256]
