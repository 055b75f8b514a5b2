"""The search of a benchmark/sweeps/*.yaml without wandb: Optuna, one file, any number of workers.

    python benchmark/tune.py benchmark/sweeps/ppo_continuous.yaml --study hopper --env-id Hopper-v4 --trials 30
    python benchmark/tune.py benchmark/sweeps/ppo_continuous.yaml --study hopper --trials 0     # what has been found

A trial trains the task with every seed. A run's score is the mean raw return of its last 100 training episodes, a
trial's score the median over seeds. After two seeds or more, a trial ends if it is behind the best one by a signed-rank
test (p < 0.3). Seeds begin at 101: results are reported on other ones. The first trial has the script's
defaults, except those outside the sweep's values and ranges. With --no-defaults it has none.

The same command again, at the same time or later, works on the same study, RUNS_DIR/STUDY.db, until that has so many
trials. A trial whose worker was killed is tried again when a worker starts alone, and its runs go on from their
checkpoints. What has been found, bad and failed trials too, is written to RUNS_DIR/STUDY.csv. To go on with a study on
another machine, copy STUDY.db.
"""

import dataclasses
import fcntl
import hashlib
import json
import shlex
import signal
import statistics
import threading
import warnings
from pathlib import Path

import tyro
import yaml
from run import Job, Stopped, run_job
from run_folder import load_script, path_of, write_rows

try:
    import optuna
    from optuna.storages import RDBStorage
    from optuna.study import MaxTrialsCallback
    from optuna.trial import TrialState
except ModuleNotFoundError as error:
    raise SystemExit(f"tune.py: error: {error}: python -m pip install -r benchmark/requirements.txt") from None


@dataclasses.dataclass
class Args:  # the comments are what --help prints
    sweep: tyro.conf.Positional[Path]  # a file of benchmark/sweeps/
    study: str  # name of the search, of its file and of its table
    env_id: str | None = None  # the task; None: that of the sweep
    seeds: int = 1  # how many seeds
    first_seed: int = 101  # the first of them
    trials: int = 20  # number of finished trials in the study, pruned ones included
    defaults: bool = True  # begin with the script's default settings
    jobs: int = 1  # trials at once in this process
    total_timesteps: int | None = None  # environment steps of a run; None: what the sweep says
    runs_dir: Path = Path("runs")  # where the study and the run folders are


def distribution_of(spec):
    """wandb's rule: min and max alone mean int_uniform for whole numbers, otherwise uniform."""
    whole = all(isinstance(spec.get(end), int) for end in ("min", "max"))
    return spec.get("distribution", "int_uniform" if whole else "uniform")


def check(space, defaults, sweep):
    """Refuse what cannot be searched, before a study is made."""
    for name, spec in space.items():
        if name in ("seed", "runs_dir"):
            raise SystemExit(f"{sweep}: remove {name}: tune.py has --first-seed, --seeds and --runs-dir")
        if name not in defaults:
            raise SystemExit(f"{sweep}: the script has no parameter {name}")
        if not spec.keys() & {"value", "values"} and not {"min", "max"} <= spec.keys():
            raise SystemExit(f"{sweep}: {name} needs value, values, or min and max")
        if "min" in spec and distribution_of(spec) not in ("int_uniform", "uniform", "log_uniform_values"):
            raise SystemExit(f"{sweep}: {name}: the distribution {distribution_of(spec)} is not known here")


def retry_killed_trials(study, lock):
    """Try the trials of killed workers again: all that are running, if no worker lives. All workers share the lock."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # another worker lives; a later start finds them
    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
        study.enqueue_trial(trial.system_attrs.get("fixed_params", {}) | trial.params)


def includes(spec, value):
    """Whether the values or the range of a parameter include a value."""
    if "values" in spec:
        return value in spec["values"]
    return value is not None and float(spec["min"]) <= value <= float(spec["max"])


def suggest(trial, name, spec):
    """The value of a parameter: wandb's description of it, asked of Optuna."""
    if "value" in spec:
        return spec["value"]
    if "values" in spec:
        return trial.suggest_categorical(name, spec["values"])
    distribution, low, high = distribution_of(spec), spec["min"], spec["max"]
    if distribution == "int_uniform":
        return trial.suggest_int(name, low, high)
    # float: YAML reads 1e-5, without a decimal point, as text.
    return trial.suggest_float(name, float(low), float(high), log=distribution == "log_uniform_values")


def write_table(study, path):
    rows = []
    for trial in study.trials:
        if trial.state == TrialState.WAITING:
            continue
        row = {
            "trial": trial.number,
            "state": trial.state.name,
            "score": f"{trial.value:.4g}" if trial.state == TrialState.COMPLETE else "",
        }
        rows.append(row | trial.user_attrs | trial.params)
    if rows:
        write_rows(path, list(dict.fromkeys(name for row in rows for name in row)), rows)


def main():
    args = tyro.cli(Args, description=__doc__.split("\n")[0])
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)  # of the pruner below
    sweep = yaml.safe_load(args.sweep.read_text())
    beside = args.sweep.parent / sweep["program"]
    script, space = path_of(beside if beside.is_file() else sweep["program"]), dict(sweep["parameters"])
    tasks = space.pop("env_id", {"value": load_script(script).Args().env_id})
    if not args.env_id and "value" not in tasks:
        raise SystemExit(f"{args.sweep}: env_id has several values: name one with --env-id")
    env_id = args.env_id or tasks["value"]
    if args.total_timesteps is not None:
        space["total_timesteps"] = {"value": args.total_timesteps}
    defaults = vars(load_script(script).parse_args(["--env-id", env_id]))
    check(space, defaults, args.sweep)
    runs_dir = args.runs_dir.absolute()
    if args.trials == 0 and not (runs_dir / f"{args.study}.db").exists():
        raise SystemExit(f"--trials 0: there is no {runs_dir}/{args.study}.db")
    runs_dir.mkdir(parents=True, exist_ok=True)

    engine = {"connect_args": {"timeout": 60}}  # seconds to wait for another worker that is writing
    sampler = optuna.samplers.TPESampler(multivariate=True, constant_liar=True)
    # Seeds are instances: a trial ends when a signed-rank test of two seeds or more speaks against it.
    pruner = optuna.pruners.WilcoxonPruner(p_threshold=0.3, n_startup_steps=2)
    names = {"study_name": args.study, "direction": "maximize", "load_if_exists": True, "pruner": pruner}
    workers = open(runs_dir / f"{args.study}.workers", "w")  # noqa: SIM115  open, and locked, as long as this process
    with open(runs_dir / f"{args.study}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # only one worker makes the file and asks for the defaults
        storage = RDBStorage(f"sqlite:///{runs_dir}/{args.study}.db", engine)
        study = optuna.create_study(storage=storage, sampler=sampler, **names)
        # Its scores are to be compared with each other: what they are about stays as it began.
        seeds = range(args.first_seed, args.first_seed + args.seeds)
        about = {"env_id": env_id, "seeds": list(seeds), "parameters": space, "program": script.read_text()}
        about = json.loads(json.dumps(about))
        if args.trials and study.user_attrs.setdefault("about", about) != about:
            raise SystemExit(
                f"--study {args.study} began with another script, task, seeds, steps or parameters: use a new one"
            )
        if args.trials:
            study.set_user_attr("about", about)
            defaults = {name: defaults[name] for name, spec in space.items() if "value" not in spec}
            if "hidden_sizes" in defaults:
                defaults["hidden_sizes"] = str(list(defaults["hidden_sizes"]))  # as the files have it
            defaults = {name: value for name, value in defaults.items() if includes(space[name], value)}
            if args.defaults:
                study.enqueue_trial(defaults, skip_if_exists=True)
            retry_killed_trials(study, workers)
        fcntl.flock(workers, fcntl.LOCK_SH)

    stop, children = threading.Event(), set()

    def request_stop(number, frame):
        stop.set()
        for child in list(children):
            child.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, request_stop)

    def objective(trial):
        words = [f"--{name.replace('_', '-')}={suggest(trial, name, spec)}" for name, spec in space.items()]
        settings = hashlib.sha1(" ".join([*words, about["program"]]).encode()).hexdigest()
        words += ["--exp-name", f"tune-{settings[:8]}"]  # the same when it is tried again, another for another script
        scores = []  # of each seed
        try:
            for seed in seeds:
                if script.read_text() != about["program"]:
                    raise RuntimeError(f"{script} has changed since this search began")
                row = run_job(Job(script, env_id, seed, tuple(words), runs_dir, evaluate=False), None, children, stop)
                if row is None:
                    raise RuntimeError(f"{env_id}: no episode has ended")
                trial.set_user_attr(f"{env_id} seed {seed}", row["last_100_mean"])
                scores.append(float(row["last_100_mean"]))
                trial.report(scores[-1], seed)
                if len(scores) < len(seeds) and trial.should_prune():
                    raise optuna.TrialPruned
        except Stopped:
            study.enqueue_trial(trial.params)  # a later worker begins with it
            study.stop()
            raise
        return statistics.median(scores)

    def give_up(study, trial):
        last = [each.state for each in study.trials if each.state.is_finished()][-5:]
        if len(last) == 5 and all(state == TrialState.FAIL for state in last):
            study.stop()  # the fault is not in the settings; the log says which

    ended = (TrialState.COMPLETE, TrialState.PRUNED)
    enough = MaxTrialsCallback(args.trials, states=ended)
    if args.trials > len(study.get_trials(states=ended)):
        study.optimize(objective, n_jobs=args.jobs, callbacks=[enough, give_up], catch=(RuntimeError, Stopped))
    path = runs_dir / f"{args.study}.csv"
    write_table(study, path)
    if stop.is_set():
        raise SystemExit("stopped; the same command goes on")
    if not study.get_trials(states=(TrialState.COMPLETE,)):
        raise SystemExit(f"no trial has finished; the last lines of {runs_dir}/logs say why")
    best = study.best_trial
    about = study.user_attrs["about"]
    fixed = {name: spec.get("value") for name, spec in about["parameters"].items()}
    found = {"env_id": about["env_id"]} | fixed | best.params
    flags = shlex.join(f"--{name.replace('_', '-')}={value}" for name, value in found.items())
    print(f"{path}: {len(study.trials)} trials; the best is {best.number}, {best.value:.4g}: {flags}")
    if (finished := len(study.get_trials(states=ended))) < args.trials:
        raise SystemExit(f"only {finished} of {args.trials} trials have finished; {runs_dir}/logs say why")


if __name__ == "__main__":
    main()
