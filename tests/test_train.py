import ppo_continuous as ppo


def test_trains(tmp_path):
    args = ppo.Args(
        env_id="Pendulum-v1", total_timesteps=256, num_envs=4, num_minibatches=4, compile=False, runs_dir=str(tmp_path)
    )
    _, run_dir = ppo.train(args)
    assert (run_dir / "checkpoint.pt").is_file()
