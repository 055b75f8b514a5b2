"""The benchmark suites: script, task, flags."""

MUJOCO = "HalfCheetah Hopper Walker2d Ant Swimmer Humanoid Reacher InvertedPendulum InvertedDoublePendulum"
MINATAR = "Asterix Breakout Freeway Seaquest SpaceInvaders"
DM_CONTROL = "walker-walk cheetah-run hopper-hop finger-spin cartpole-swingup"
# The paper calls PositionOnly tasks Stateless.
POPGYM = """RepeatPreviousEasy AutoencodeEasy PositionOnlyCartPoleEasy NoisyPositionOnlyPendulumEasy HigherLowerEasy
    CountRecallEasy"""
PENDULUM_NO_VEL = "--num-envs 16 --learning-rate 5e-4 --gamma 0.95 --num-minibatches 8 --update-epochs 10 --ent-coef 0"
PENDULUM_NO_VEL += " --target-kl 0.02"
SWIMMER = "--gamma 0.9999 --gae-lambda 0.98 --num-envs 10 --num-steps 200"
RARE = "--no-norm-adv --ent-coef 0"  # where rewards are rare, normalized advantages are mostly noise
PONG = "--num-minibatches 16 --learning-rate 5e-4 --clip-coef 0.2"
SHORT_ATARI = {"Breakout": 500_000, "Boxing": 500_000, "Freeway": 350_000, "Qbert": 350_000}  # steps
SUITES = {
    "classic": [
        ("ppo_discrete", "CartPole-v1", "--total-timesteps 200000"),
        ("ppo_discrete", "Acrobot-v1", ""),
        ("ppo_discrete", "MountainCar-v0", ""),
        ("ppo_discrete", "Taxi-v4", ""),
        ("ppo_continuous", "Pendulum-v1", "--total-timesteps 300000"),
        ("ppo_continuous", "MountainCarContinuous-v0", "--total-timesteps 300000 --gamma 0.9999"),
    ],
    "mujoco": [("ppo_continuous", f"{name}-v4", "") for name in MUJOCO.split()],
    # Settings of their own, chosen on seeds from 101 up.
    "mujoco-tuned": [
        ("ppo_continuous", "Reacher-v4", "--exp-name tuned --gamma 0.95"),
        ("ppo_continuous", "Swimmer-v4", f"--exp-name tuned {SWIMMER}"),
    ],
    "mujoco-v5": [("ppo_continuous", f"{name}-v5", "") for name in MUJOCO.split()],
    "atari": [("ppo_atari", f"ALE/{name}-v5", "") for name in ("Pong", "Breakout", "BeamRider")],
    # What one CPU core carries in a few hours. Pong has settings that learn from fewer steps.
    "atari-short": [
        ("ppo_atari", "ALE/Pong-v5", f"--total-timesteps 1200000 {PONG}"),
        *(("ppo_atari", f"ALE/{name}-v5", f"--total-timesteps {steps}") for name, steps in SHORT_ATARI.items()),
    ],
    "memory": [
        ("ppo_discrete", "benchmark.memory_envs:CartPoleNoVel-v1", "--total-timesteps 300000"),
        ("ppo_rnn", "benchmark.memory_envs:CartPoleNoVel-v1", "--total-timesteps 300000 --num-steps 256"),
        ("ppo_rnn", "benchmark.memory_envs:PendulumNoVel-v1", f"--total-timesteps 300000 {PENDULUM_NO_VEL}"),
    ],
    "box2d": [
        ("ppo_discrete", "LunarLander-v3", "--total-timesteps 1000000"),
        ("ppo_continuous", "LunarLanderContinuous-v3", "--log-std-init -1.5"),  # noise would hide the landing bonus
        ("ppo_continuous", "BipedalWalker-v3", ""),
        ("ppo_continuous", "BipedalWalkerHardcore-v3", "--total-timesteps 2000000"),
    ],
    "minatar": [
        ("ppo_discrete", f"benchmark.minatar_envs:MinAtar/{name}-v1", "--total-timesteps 5000000")
        for name in MINATAR.split()
    ],
    "minigrid": [
        ("ppo_discrete", "benchmark.minigrid_envs:Image/MiniGrid-Empty-8x8-v0", ""),
        ("ppo_discrete", "benchmark.minigrid_envs:Image/MiniGrid-DoorKey-6x6-v0", ""),
        ("ppo_discrete", "benchmark.minigrid_envs:Image/MiniGrid-FourRooms-v0", "--total-timesteps 1000000"),
        ("ppo_discrete", "benchmark.minigrid_envs:Image/MiniGrid-MultiRoom-N2-S4-v0", ""),
        ("ppo_rnn", "benchmark.minigrid_envs:OneHot/MiniGrid-MemoryS7-v0", "--total-timesteps 1000000"),
        ("ppo_rnn", "benchmark.minigrid_envs:Image/MiniGrid-RedBlueDoors-6x6-v0", f"--total-timesteps 1000000 {RARE}"),
    ],
    # docs/your-environment.md says what dm_control needs, and why the time limit is given.
    "dm_control": [
        ("ppo_continuous", f"shimmy:dm_control/{name}-v0", '--env-kwargs {"max_episode_steps":1000}')
        for name in DM_CONTROL.split()
    ],
    "popgym": [
        ("ppo_rnn", f"popgym:popgym-{name}-v0", "--total-timesteps 1000000 --num-envs 16") for name in POPGYM.split()
    ],
}
# Tasks of these suites again, with the steps of the published figure.
SUITES["long"] = [
    ("ppo_discrete", "Acrobot-v1", "--total-timesteps 1000000"),
    ("ppo_continuous", "BipedalWalker-v3", "--total-timesteps 5000000"),
    ("ppo_discrete", "benchmark.minigrid_envs:Image/MiniGrid-FourRooms-v0", "--total-timesteps 5000000"),
]
BREADTH = ("classic", "box2d", "minigrid", "minatar", "dm_control", "popgym")  # docs/results.md has one table of these
SUITES["breadth"] = [task for name in (*BREADTH, "memory") for task in SUITES[name]]
