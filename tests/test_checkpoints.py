"""Checkpoints that are damaged, from elsewhere, or would not be worth keeping."""

import importlib
import os

import pytest
import torch
from conftest import SCRIPTS, SMALL, assert_one_line, probe


class Command:
    """It runs when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path.with_name('it-ran')}",)


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:1000]),
    "flipped": lambda path: path.write_bytes(b"\0" * 64 + path.read_bytes()[64:]),
    "text": lambda path: path.write_text("hello"),
    "another program's": lambda path: torch.save({"model": torch.zeros(3)}, path),
    "a pickle that would run code": lambda path: torch.save(torch.load(path) | {"seconds": Command(path)}, path),
    "not a dictionary": lambda path: torch.save(torch.zeros(3), path),
    "of another agent": lambda path: torch.save(
        torch.load(path) | {"agent": {"critic.0.weight": torch.zeros(3)}}, path
    ),
    "without its optimizer": lambda path: torch.save(
        {key: value for key, value in torch.load(path).items() if key != "optimizer"}, path
    ),
    "of another version": lambda path: torch.save(torch.load(path) | {"args": {"no_such_argument": 1}}, path),
}


def test_damaged_checkpoint(script, run_dir, main):
    """It is refused in one line. Nothing in the folder changes: a command in the checkpoint does not run either."""
    path = run_dir / "checkpoint.pt"
    whole = path.read_bytes()
    for name, damage in DAMAGE.items():
        path.write_bytes(whole)
        damage(path)
        files = {path: path.read_bytes() for path in run_dir.iterdir()}
        for flag in ("--resume", "--evaluate"):
            assert_one_line(main(script, flag, run_dir), "checkpoint.pt is missing, damaged, or")
            assert files == {path: path.read_bytes() for path in run_dir.iterdir()}, name


def test_checkpoint_of_another_script(script, tmp_path, main):
    name = SCRIPTS[SCRIPTS.index(script.__name__) - 1]
    other = importlib.import_module(name)
    _, run_dir = other.train(other.Args(env_id=probe(other), runs_dir=str(tmp_path), **SMALL))
    for flag in ("--resume", "--evaluate"):
        message = "checkpoint.pt is missing, damaged, or from another script or version"
        assert_one_line(main(script, flag, run_dir), message)


def test_weights_that_are_not_finite_are_not_saved(script, small_args, run_dir, capsys):
    """A resumed run that diverges ends in one line, code 2, and leaves the checkpoint as it was."""
    before = (run_dir / "checkpoint.pt").read_bytes()
    more = {"learning_rate": 1e38, "max_grad_norm": 0.0, "total_timesteps": 1024, "checkpoint_interval": 1}
    with pytest.raises(SystemExit) as exit:
        script.train(small_args(resume=str(run_dir), anneal_lr=False, target_kl=None, **more))
    assert exit.value.code == 2 and "gave NaN or infinity; the last checkpoint is kept" in capsys.readouterr().err
    assert (run_dir / "checkpoint.pt").read_bytes() == before
