"""--track: Weights & Biases, offline."""

from conftest import ONE


@ONE
def test_wandb(script, small_args, run_dir, offline_wandb):
    """--track, offline: the run folder holds a wandb run of its name, also if the folder is resumed by another path. It
    has the metrics and the arguments, complete when train returns: another run may follow in this process."""
    (run_dir / "sub").mkdir()
    resume = {"resume": f"{run_dir}/sub/..", "total_timesteps": 512}
    script.train(small_args(track=True, wandb_project_name="hill", **resume))
    (record,) = (run_dir / "wandb").glob("offline-run-*/run-*.wandb")
    assert record.name == f"run-{run_dir.name}.wandb"
    content = record.read_bytes()
    for key in ("losses/value_loss", "charts/last_100_return", "charts/learning_rate", "global_step", "gamma", "hill"):
        assert key.encode() in content, key
    # Each of the 4 new iterations is there, not only the last one.
    assert content.count(b"losses/value_loss") >= 4
