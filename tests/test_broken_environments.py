"""Environments that raise: the message says what it was, and the last checkpoint is whole."""

import pytest
from conftest import ONE, flags_of, probe, rows

FAULTY = {"total_timesteps": 9600, "num_envs": 2, "num_steps": 16, "num_minibatches": 2, "update_epochs": 1, "seed": 5}
FAULTY |= {"compile": False, "checkpoint_interval": 0}
LAST = 88 // 32 * 32  # the last checkpoint: these environments break in step 88


@pytest.mark.usefixtures("two_threads")
def test_environment_that_breaks(script, tmp_path, main):
    """The environment's own error reaches the user, with its traceback; threads are what they were. The checkpoint is
    whole: it trains on where the environment works."""
    flags = flags_of(env_id=f"probes:{probe(script, 'Raise')}", runs_dir=tmp_path, **FAULTY)
    with pytest.raises(RuntimeError, match="the simulator is lost") as raised:
        main(script, *flags)
    assert raised.traceback[-1].path.name == "probes.py"
    (run_dir,) = tmp_path.iterdir()
    assert script.load_checkpoint(run_dir)["global_step"] == LAST
    assert int(rows(run_dir)[-1][0]) == LAST
    flags = [f"--env-id=probes:{probe(script)}", f"--total-timesteps={LAST + 96}"]
    finished = main(script, "--resume", run_dir, *flags)
    assert finished.returncode == 0, finished.stderr
    assert script.load_checkpoint(run_dir)["global_step"] == LAST + 96


@ONE
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    "flags, error", [({"env_kwargs": "{"}, "Expecting"), ({"env_kwargs": '{"no": 1}'}, "argument 'no'")]
)
def test_environment_that_cannot_be_made(script, tmp_path, main, flags, error):
    """The threads are what they were, and no run folder is made."""
    with pytest.raises(Exception, match=error):
        main(script, *flags_of(env_id=probe(script), runs_dir=tmp_path, **FAULTY | flags))
    assert not list(tmp_path.iterdir())
