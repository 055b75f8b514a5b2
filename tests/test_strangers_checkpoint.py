"""A stranger's checkpoint runs no code: it does not choose which module of this machine is imported."""

import sys

import torch
from conftest import SMALL, probe


def test_checkpoint_that_names_a_module(script, tmp_path, main):
    """Who asks for that module may have it. `this` stands for one: no test needs it."""
    args = script.Args(env_id=probe(script), runs_dir=str(tmp_path), **SMALL | {"total_timesteps": 64})
    _, run_dir = script.train(args)
    checkpoint = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    checkpoint["args"] |= {"env_id": f"this:{args.env_id}", "eval_episodes": 1}
    torch.save(checkpoint, run_dir / "checkpoint.pt")
    for flag in ("--resume", "--evaluate"):
        sys.modules.pop("this", None)
        refused = main(script, flag, run_dir)
        assert refused.returncode == 2 and f"if you trust it, add --env-id this:{args.env_id}" in refused.stderr
        assert "this" not in sys.modules
        assert main(script, flag, run_dir, f"--env-id=this:{args.env_id}").returncode == 0
        assert "this" in sys.modules
