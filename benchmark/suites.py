"""The suites that run.py trains and report.py tells apart: script, task, flags of every run."""

from pathlib import Path

import yaml

MUJOCO = "HalfCheetah Hopper Walker2d Ant Swimmer Humanoid Reacher InvertedPendulum InvertedDoublePendulum"
ATARI = """Alien Amidar Assault Asterix Asteroids Atlantis BankHeist BattleZone BeamRider Berzerk Bowling Boxing
    Breakout Centipede ChopperCommand CrazyClimber Defender DemonAttack DoubleDunk Enduro FishingDerby Freeway Frostbite
    Gopher Gravitar Hero IceHockey Jamesbond Kangaroo Krull KungFuMaster MontezumaRevenge MsPacman NameThisGame Phoenix
    Pitfall Pong PrivateEye Qbert Riverraid RoadRunner Robotank Seaquest Skiing Solaris SpaceInvaders StarGunner
    Surround Tennis TimePilot Tutankham UpNDown Venture VideoPinball WizardOfWor YarsRevenge Zaxxon"""
PENDULUM = "--gamma 0.95 --learning-rate 1e-3 --num-envs 10 --num-steps 50 --num-minibatches 10"
PENDULUM_NO_VEL = "--num-envs 16 --learning-rate 5e-4 --gamma 0.95 --num-minibatches 8 --update-epochs 10 --ent-coef 0"
PENDULUM_NO_VEL += " --target-kl 0.02"
SUITES = {  # script, task, flags
    "classic": [
        ("ppo_discrete", "CartPole-v1", "--total-timesteps 200000"),
        ("ppo_discrete", "Acrobot-v1", ""),
        ("ppo_discrete", "MountainCar-v0", ""),
        ("ppo_discrete", "Taxi-v4", ""),
        ("ppo_continuous", "Pendulum-v1", f"--total-timesteps 300000 {PENDULUM}"),
        ("ppo_continuous", "MountainCarContinuous-v0", "--total-timesteps 300000 --log-std-init 1 --log-std-max 1"),
    ],
    "mujoco": [("ppo_continuous", f"{name}-v4", "") for name in MUJOCO.split()],
    "mujoco-envpool": [
        ("ppo_continuous", f"benchmark.envpool_envs:EnvPool/{name}-v4", '--env-kwargs={"num_threads":1}')
        for name in ("HalfCheetah", "Hopper", "Walker2d")
    ],
    "mujoco-v5": [("ppo_continuous", f"{name}-v5", "") for name in MUJOCO.split()],
    "atari": [("ppo_atari", f"ALE/{name}-v5", "") for name in ("Pong", "Breakout", "BeamRider")],
    "atari57": [("ppo_atari", f"ALE/{name}-v5", "") for name in ATARI.split()],
    "memory": [
        ("ppo_discrete", "benchmark.memory_envs:CartPoleNoVel-v1", "--total-timesteps 300000"),
        ("ppo_rnn", "benchmark.memory_envs:CartPoleNoVel-v1", "--total-timesteps 300000 --num-steps 256"),
        ("ppo_rnn", "benchmark.memory_envs:PendulumNoVel-v1", f"--total-timesteps 300000 {PENDULUM_NO_VEL}"),
        ("ppo_rnn", "popgym:popgym-RepeatPreviousEasy-v0", "--total-timesteps 1000000 --num-envs 16"),
    ],
}
TUNED = yaml.safe_load((Path(__file__).parent / "tuned.yaml").read_text())  # task -> flags
