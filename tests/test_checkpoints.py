"""Checkpoints that are damaged, or come from elsewhere: they run no code, and nothing in the folder changes."""

import os
import pickle
import sys

import numpy as np
import pytest
import torch
from conftest import ONE, SMALL, assert_one_line, flags_of, probe


class Command:
    """It runs when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path.with_name('it-ran')}",)


def changed(path, **entries):
    torch.save(torch.load(path) | entries, path)


DAMAGE = {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:1000]),
    "missing": lambda path: path.unlink(),
    "a pickle that would run code": lambda path: changed(path, seconds=Command(path)),
    "of another version": lambda path: changed(path, args={"no_such_argument": 1}),
}


@ONE
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoint(script, run_dir, main, damage):
    """An error, and nothing in the folder changes: a command in the checkpoint does not run either."""
    DAMAGE[damage](run_dir / "checkpoint.pt")
    files = {path: path.read_bytes() for path in run_dir.iterdir()}
    for flag in ("--resume", "--evaluate"):
        with pytest.raises((KeyError, TypeError, EOFError, OSError, RuntimeError, pickle.UnpicklingError)):
            main(script, flag, run_dir)
        assert files == {path: path.read_bytes() for path in run_dir.iterdir()}


def test_numbers_of_numpy_are_saved_as_numbers(script, small_args):
    """As from np.logspace in a notebook: the checkpoint can be loaded, and args.json be written."""
    numbers = {"learning_rate": np.float64(1e-3), "gamma": np.float32(0.5), "seed": np.int64(3), "norm_adv": np.True_}
    _, run_dir = script.train(small_args(total_timesteps=64, **numbers))
    args = script.load_args(run_dir)
    assert (args.learning_rate, args.gamma, args.seed, args.norm_adv) == (1e-3, 0.5, 3, True)
    assert script.train(resume=run_dir)[1] == run_dir


@ONE
def test_missing_folder(script, tmp_path, main):
    """The error names the file, and no folder is made."""
    for flag in ("--resume", "--evaluate"):
        with pytest.raises(FileNotFoundError, match=r"nowhere/checkpoint\.pt"):
            main(script, flag, tmp_path / "nowhere")
    assert not list(tmp_path.iterdir())


@ONE
def test_checkpoint_that_names_a_module(script, run_dir, main):
    """A stranger does not choose which module of this machine is imported. Who asks for it on the command line may have
    it. `this` stands for such a module: no test needs it."""
    path = run_dir / "checkpoint.pt"
    args = torch.load(path)["args"]
    env_id = f"this:{args['env_id']}"
    changed(path, args=args | {"env_id": env_id, "eval_episodes": 1, "total_timesteps": 320})
    for flag in ("--resume", "--evaluate"):
        sys.modules.pop("this", None)
        refused = main(script, flag, run_dir)
        assert_one_line(refused, f"the checkpoint names a module: if you trust it, add --env-id {env_id}")
        assert "this" not in sys.modules
        assert main(script, flag, run_dir, f"--env-id={env_id}").returncode == 0
        assert "this" in sys.modules


@ONE
def test_full_disk(script, tmp_path, main, monkeypatch):
    """An error ends the run, and the checkpoint before is whole."""
    saved = []

    def save(checkpoint, path):
        saved.append(path)
        if len(saved) == 3:
            path.write_bytes(b"half")
            raise OSError("No space left on device")
        torch_save(checkpoint, path)

    torch_save = torch.save
    monkeypatch.setattr("torch.save", save)
    with pytest.raises(OSError, match="No space left"):
        main(script, *flags_of(env_id=probe(script), runs_dir=tmp_path, checkpoint_interval=0, **SMALL))
    (run_dir,) = tmp_path.iterdir()
    assert script.load_checkpoint(run_dir)["global_step"] == 128
    monkeypatch.undo()
    assert script.train(resume=run_dir)[1] == run_dir and script.load_checkpoint(run_dir)["global_step"] == 256
