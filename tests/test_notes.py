"""Every figure of docs/ and docs/notes/ is that of committed results, or of the code. report.py writes docs/results.md.

tests/notes.txt has pieces of the pages. Where a piece has {an expression}, the page has a figure, and the expression
says where it comes from. {*an expression} stands for the rest of a table's row; in it `task` is the head of a column.
The tests evaluate the expressions, and look for figures that no piece covers. `python tests/test_notes.py` writes what
the expressions give into the pages. results/notes.csv has the figures whose rows were not kept, as they were reported.
"""

import csv
import inspect
import json
import math
import re
import statistics
import sys
from functools import cache, partial

import gymnasium as gym
import pytest
import torch
from conftest import ROOT
from scipy.stats import ttest_ind
from test_docs import CLEANRL  # noqa: F401  expressions ask for this

sys.path.insert(0, str(ROOT / "benchmark"))
import report
from stable_baselines3 import PPO

import ppo_continuous
import ppo_discrete  # noqa: F401
from variants import ppo_gpu_sim  # noqa: F401

LOST = 2_000  # a run of Hopper or Walker2d that ends below
LEVEL = 6_000  # between the two levels of HalfCheetah
NOTES = ROOT / "docs" / "notes"
PIECES = ROOT / "tests" / "notes.txt"
FIGURE = r"[-+]?\d[\d,]*(?<!,)(?:\.\d+)?(?:e[-+]?\d+)?"


# ------------------------------------------------------------------------------------- what an expression may call


class Runs(dict):
    """{seed: figure}, of one task and one setting"""

    def __call__(self, *seeds):
        return Runs({seed: self[seed] for seed in seeds})

    def beside(self, other):
        """The part whose seeds are in the other runs too."""
        return Runs({seed: self[seed] for seed in self if seed in other})

    mean = property(lambda self: statistics.fmean(self.values()))
    deviation = property(lambda self: statistics.stdev(self.values()))
    low = property(lambda self: min(self.values()))
    high = property(lambda self: max(self.values()))

    def below(self, bound):
        return Runs({seed: value for seed, value in self.items() if value < bound})

    def reach(self, bound):
        return Runs({seed: value for seed, value in self.items() if value >= bound})


@cache
def table(name):
    with open(report.RESULTS / f"{name}.csv") as file:
        return list(csv.DictReader(file))


@cache
def names(env_id):
    name = re.split("[:/]", env_id)[-1]
    short = name.split("-v")[0].removeprefix("popgym-")
    return name, short, short.removeprefix("Inverted")


def is_task(row, task):
    return task in names(row["env_id"])


def runs(name, task, column="last_100_mean", **where):
    """Of rows of results/NAME.csv. A condition is a text, or a regular expression that begins with ~."""
    found = Runs()
    for row in table(name):
        if is_task(row, task) and all(fits(row[key], wanted) for key, wanted in where.items()):
            again = re.search(r"with seed (\d+)", row.get("what", ""))  # the end of a run, once more
            seed = int(again[1] if again else row["seed"])
            assert seed not in found, f"{name}, {task}, {where}: seed {seed} stands for two rows"
            found[seed] = float(row[column])
    return found


def fits(text, wanted):
    return bool(re.search(wanted[1:], text)) if wanted.startswith("~") else text == wanted


def trial(what, task, setting="~"):
    return runs("tuning_noise", task, what=f"~{what}", setting=setting)


NONE_YET = dict.fromkeys(("target-kl", "log-std-min", "log-std-max"), "None")
D1_FLAGS = {"num-envs": "128", "num-steps": "16", "num-minibatches": "32", "anneal-std": "False"}
D1_FLAGS |= NONE_YET | {"stagger-envs": "False"}


def ablation(task, **changes):
    """Runs with the first defaults, but for these flags."""
    wanted = D1_FLAGS | {name.replace("_", "-"): str(value) for name, value in changes.items()}
    found = Runs()
    for row in table("ablation"):
        if is_task(row, task) and dict(flag[2:].split("=") for flag in row["flags"].split()) == wanted:
            assert int(row["seed"]) not in found
            found[int(row["seed"])] = float(row["last_100_mean"])
    return found


def D1(task):
    return ablation(task) or runs("tuning_noise", task, setting="base")


def D2(task):
    return runs("mujoco-431d2aa", task)


def D3(task):
    return runs("tuning_noise", task, setting="no penalty")


def D4(task):
    return runs("mujoco-49c198e", task)


def avx2(task):
    return runs("mujoco-avx2", task)


def D5(task):
    return runs("mujoco-aca7fe7", task)


def rounding(task):
    return runs("mujoco-rounding", task)


def again(task):
    return runs("mujoco", task, exp_name="again")


BENCHMARKS = (D4, avx2, D5, rounding, again)  # of nearly the same defaults


def between(task):
    """The lowest and the highest mean of these."""
    means = [benchmark(task).mean for benchmark in BENCHMARKS]
    return Runs({"lowest": min(means), "highest": max(means)})


def both(task):
    """D5 and the same again."""
    return Runs(
        {(name, seed): x for name, found in (("D5", D5(task)), ("again", again(task))) for seed, x in found.items()}
    )


def further(task):
    """All runs with a critic that looks further."""
    names = ("critic lambda 1", "critic lambda 0.98", "two horizons")
    return Runs({(name, seed): x for name in names for seed, x in trial("", task, name).items()})


def shown(value):
    """A mean return as the tables have it."""
    return f"{value:.1f}" if abs(value) < 10 else f"{value:,.0f}"


def mean(found):
    return shown(found.mean) if found else ""


def deviation(found):
    return shown(found.deviation) if found else ""


def seeds(found):
    """What stands for the seeds: (3), s3, nothing for seed 1."""
    return f"({len(found)})" if len(found) > 1 else "" if list(found) == [1] else f"s{next(iter(found))}"


def cell(found, beside=None):
    """Mean and seeds; with other runs their mean on the same seeds too."""
    if beside is not None:
        found = found.beside(beside)
    if not found:
        return ""
    text = shown(found.mean) + (f" / {shown(beside(*found).mean)}" if beside is not None else "")
    which = seeds(found)
    return f"{which} {text}" if which.startswith("s") else f"{text} {which}".strip()


def counted(found):
    return f"{found.mean:,.0f} ({len(found)} seeds)"


def up_to(number):
    """The next thousand."""
    return math.ceil(number / 1000) * 1000


def welch(before, after):
    return ttest_ind(list(after.values()), list(before.values()), equal_var=False)


def difference(before, after):
    return welch(before, after).confidence_interval()


def value(name, column, **where):
    """A number of the one row that fits."""
    (row,) = (row for row in table(name) if all(fits(row[key], wanted) for key, wanted in where.items()))
    return float(row[column])


def phase(case, *names, before=False):
    """Microseconds of these phases, of all without names."""
    script = "~before$" if before else "~^ppo_[a-z]+$"
    rows = [row for row in table("phases") if row["case"] == case and fits(row["script"], script)]
    return sum(float(row["microseconds"]) for row in rows if not names or row["phase"] in names)


SPENT = {"all": (), "memory": ("memory, forwards", "memory, backwards")}


def spent(case, name):
    """Microseconds of a phase, in brackets those before the work on speed."""
    names = SPENT.get(name, (name,))
    now, before = (phase(case, *names, before=before) for before in (False, True))
    return (f"{now:,.0f}" + (f" ({before:,.0f})" if before else "")) if now else ""


def before_rebuild():
    """{case: times the steps per second of the script before it was rebuilt}"""
    return {row["case"]: float(row["ratio"]) for row in table("speed-before") if row["contestant"] == "before"}


def pairs(case):
    """The least and the largest of the single ratios to the script before."""
    before, after = (
        [float(x) for x in row["single_runs"].split()] for row in table("speed-before") if row["case"] == case
    )
    ratios = [b / a for a, b in zip(before, after)]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def alone():
    """Percent of the steps per second that the simulators alone make, the least and the largest of the series."""
    shares = [100 * float(x) for x in series("defaults", "simulator", digits=2).split(", ")]
    return min(shares), max(shares)


def series(case, contestant, column="ratio", digits=1):
    """The figures of the four series of speed.py."""
    found = []
    for rows in (*([row for row in table("speed-series") if row["series"] == i] for i in "123"), table("speed")):
        figures = [row[column] for row in rows if (row["case"], row["contestant"]) == (case, contestant)]
        found.append(f"{float(figures[0]):,.{digits}f}" if figures else "-")
    return ", ".join(found)


def speed(case, contestant, name="speed", column="ratio"):
    return value(name, column, case=case, contestant=contestant)


def ratios(contestant):
    cases = ("continuous-1", "continuous-8", "discrete")
    return [float(row["ratio"]) for row in table("speed") if row["case"] in cases and row["contestant"] == contestant]


def outcome(fault, script, pattern):
    """The number that a pattern finds in results/faults.csv, added up over scripts."""
    rows = [row for row in table("faults") if row["fault"] == fault and fits(row["script"], f"~{script}")]
    return sum(int(re.search(pattern, row["outcome"])[1]) for row in rows)


def least_kills():
    return min(float(row["tries"]) for row in table("faults") if row["fault"] == "kills")


@cache
def original():
    cases = json.loads((ROOT / "tests" / "golden.json").read_text())["cases"]
    return next(case["inputs"] for case in cases if case["id"] == "seed001_results")


@cache
def scores(update, evaluation):
    rows = [row for row in table("google_vs_nvidia_small") if row["update"] == update]
    return [float(row["mean_return"]) for row in rows if row["evaluation"] == str(evaluation)]


@cache
def interval(update, evaluation):
    """Mean and bootstrap interval of a kind of update at the small size."""
    found = report.np.array(scores(update, evaluation))

    def bounds(resamples):  # those of report.bootstrap_interval, all draws at once
        draws = report.np.random.default_rng(0).choice(found, (resamples, len(found))).mean(1)
        return report.np.percentile(draws, [2.5, 97.5])

    assert list(bounds(10)) == list(report.bootstrap_interval([found], report.np.mean, 10))
    low, high = bounds(10_000)
    return f"{found.mean():,.0f} ({low:,.0f} to {high:,.0f})"


def significance(one, other):
    return f"{ttest_ind(one, other, equal_var=False).pvalue:.1g}"


def first_seed(update, *evaluations):
    return " ".join(f"{scores(update, i)[0]:.0f}" for i in evaluations)


def column(update, evaluation):
    """Scores of the original."""
    return [row[evaluation] for row in original()[update]]


def published(update, evaluation):
    found = column(update, evaluation)
    return f"{statistics.fmean(found):,.0f} ± {statistics.stdev(found):,.0f}"


def memory(script, task):
    """The memory suite with the script's defaults, or the flags of the suite for the task."""
    return runs("memory", task, script=script, flags="~^(?!.*num-steps)")


def old_memory(task):
    return runs("memory-49c198e", task)


def tuned(setting):
    """CartPole without velocities with another setting."""
    return runs("tuning_memory", "CartPoleNoVel", setting=setting)


def ending(setting, *chosen):
    found = tuned(setting)(*chosen) if chosen else tuned(setting)
    return f"{len(found.reach(475))} of {len(found)}"


def pendulum(task, gamma=0.9, **changes):
    """Pendulum without velocities: runs with 10 epochs, no bonus and these flags."""
    wanted = {"total_timesteps": "300000", "update_epochs": "10", "ent_coef": "0.0", "gamma": str(gamma)}
    wanted |= {name: str(value) for name, value in changes.items()}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in wanted.items()]
    rows = [row for row in table("ablation") if is_task(row, task) and set(row["flags"].split()) == set(flags)]
    return Runs({int(row["seed"]): float(row["last_100_mean"]) for row in rows})


def tuned_task(task):
    """With settings of its own."""
    return runs("mujoco-tuned", task)


def search(study, number):
    """The figures of a trial of tune.py, by seed."""
    (row,) = (row for row in table(f"tuning_{study}") if row["trial"] == str(number))
    return Runs({int(name.split()[-1]): float(x) for name, x in row.items() if " seed " in name and x})


def observed(env_id):
    """How many numbers an observation has."""
    return gym.spec(env_id).make().observation_space.shape[0]


def whole(found):
    return ", ".join(f"{x:,.0f}" for x in found.values())


def single(found):
    return ", ".join(shown(x) for x in found.values())


def answers(kl_coef, column):
    return Runs({row["seed"]: float(row[column]) for row in table("rlhf") if row["kl_coef"] == kl_coef})


def language_model(kl_coef, column, digits):
    rows = [row for row in table("rlhf") if row["kl_coef"] == kl_coef]
    return ", ".join(f"{float(row[column]):,.{digits}f}" if row[column] else "never" for row in rows)


def taxi(name):
    """With its masks."""
    return runs(name, "Taxi", flags="")


def steps_to(variant):
    """Steps until Taxi's mean return is 6.5, of the seeds that get there."""
    rows = [row for row in table("taxi_statistics") if fits(row["variant"], f"~{variant}")]
    found = {int(row["seed"]): row["mean_of_6.5_at_step"] for row in rows}
    return Runs({seed: float(steps) for seed, steps in found.items() if steps})


def published_elsewhere(task, column):
    with open(ROOT / "benchmark" / "published.csv") as file:
        (row,) = (row for row in csv.DictReader(file) if is_task(row, task) and row["column"] == column)
    return float(row["mean_return"])


def kept(page, measure, setting="", task=""):
    """As it was reported: a figure whose rows were not kept."""
    wanted = {"note": page, "measure": measure, "setting": setting, "task": task}
    rows = [row for row in table("notes") if all(row[key] == text for key, text in wanted.items())]
    assert len(rows) <= 1, f"{wanted} stands in {len(rows)} rows"
    return rows[0]["value"] if rows else ""


def words_of(setting, pattern):
    """What a pattern finds in the words of a trial's setting, always the same."""
    (found,) = {re.search(pattern, row["what"])[1] for row in table("tuning_noise") if row["setting"] == setting}
    return found


def sb3_default(name):
    return inspect.signature(PPO).parameters[name].default


def in_source(script, pattern):
    """A number that stands in the text of a script."""
    (found,) = set(re.findall(pattern, (ROOT / f"{script}.py").read_text()))
    return float(found)


def weight_of_squared_error():
    one, zero = torch.ones(1), torch.zeros(1)
    return ppo_continuous.clipped_value_loss(one, zero, zero).item()


CALLS = dict(globals())


# ---------------------------------------------------------------------------------------------- pieces and figures


@cache
def pieces():
    """[(page, title of a section, piece)]"""
    page = section = None
    found = []
    for line in PIECES.read_text().splitlines():
        if line.startswith("# "):
            page, section = line[2:], None
        elif line.startswith("## "):
            section = line[3:]
        elif line:
            found.append((page, section, line))
    return found


def title_of(head):
    """A heading without its dates and its verdict."""
    title = re.sub(r"^#+ (?:\d[^:]*: )?", "", head)
    return title.rpartition(": ")[0] or title if head.startswith("###") else title


def section_of(text, title):
    """(begin, end) of the section with this title"""
    heads = [(match.start(), match[0]) for match in re.finditer(r"^#+ .*$", text, re.M)]
    ((number, begin),) = ((i, at) for i, (at, head) in enumerate(heads) if title_of(head) == title)
    return begin, heads[number + 1][0] if number + 1 < len(heads) else len(text)


def pattern_of(words):
    return r"\s+".join(re.escape(word) for word in re.split(r"\s+", words))


def same(printed, found):
    """Whether a printed figure is this number, or this text."""
    if isinstance(found, str):
        return " ".join(printed.split()) == found
    if "e" in printed:
        return float(printed) == float(f"{found:.0e}")
    digits = len(printed.partition(".")[2])
    number = float(printed.replace(",", ""))
    signed = "+" if printed.startswith("+") else ""
    return printed == f"{number:{signed},.{digits}f}" and abs(number - found) <= 0.5 * 10**-digits + 1e-6


def read_piece(page, section, piece, text):
    """[(begin, end, printed, what the expression gives)], places in the text of the page"""
    calls = CALLS | {"kept": partial(kept, page)}
    begin, end = section_of(text, section)
    words, *rest = re.split(r"\{\*([^{}]+)\}", piece)
    if rest:  # a row of a table
        rows = list(re.finditer(rf"^{re.escape(words.rstrip())}(.*)\|$", text[begin:end], re.M))
        assert len(rows) == 1, f"{page}, {section}: {len(rows)} rows begin with {words!r}"
        head = text[begin : begin + rows[0].start()].splitlines()
        head = next(head[i - 1] for i in range(len(head) - 1, 0, -1) if head[i].startswith("|---"))
        tasks = [task.strip() for task in head.split("|")[1:-1]][words.count("|") - 1 :]
        at, found = begin + rows[0].start(1), []
        for task, text_of_cell in zip(tasks, rows[0][1].split("|"), strict=True):
            printed = text_of_cell.strip().strip("*")
            start = at + (text_of_cell.index(printed) if printed else 1)
            found.append((start, start + len(printed), printed, eval(rest[0], calls | {"task": task})))
            at += len(text_of_cell) + 1
        return found
    parts = re.split(r"\{([^{}]+)\}", piece)
    values = [eval(expression, calls) for expression in parts[1::2]]
    assert all(re.search(r"\d", str(x)) for x in values), (page, section, piece, values)
    groups = [r"(?:\*\*)?(" + (FIGURE if not isinstance(x, str) else r"[^|]+?") + r")(?:\*\*)?" for x in values]
    pattern = "".join(pattern_of(word) + group for word, group in zip(parts[::2], [*groups, ""]))
    matches = list(re.finditer(pattern + r"(?![\d.]\d|\d)", text[begin:end]))
    assert len(matches) == 1, f"{page}, {section}: {len(matches)} places for {piece!r}, whose values are {values}"
    return [(begin + matches[0].start(i), begin + matches[0].end(i), matches[0][i], x) for i, x in enumerate(values, 1)]


# Numbers that need no piece, a regular expression for each kind. Whole numbers below 100 need none either.
SETTINGS = "gamma|lambda|log_std|beta|eps|rates?|bonus|clip|KL limit|correlated by|layers|exp"
NO_RESULTS = {
    "code": r"`[^`]*`|^    .*$",
    "links": r"\]\([^)]*\)",
    "dates": r"\d{4}-\d\d-\d\d",
    "what a row of a table is named": r"^\|[^|]*\|",
    "defaults, which test_docs.py looks at": r"^\| `--[\w-]+` \|.*$",
    "the head of a table": r"^\|.*\|(?=\n\|---)",
    "sizes": r"\d[\d,]*(?: x \d[\d,]*)+",
    "versions": r"(?:torch|torch\.compile|gymnasium|rsl_rl|envpool|PPO)\s\(?\d+(?:\.\d+)+",
    "settings": rf"\b(?:{SETTINGS})(?: of)?[ (]-?\d[\d.,]*(?:e-\d+)?(?:(?:,| and| to) \d[\d.]*(?:e-\d+)?)*",
    "amounts": r"\d[\d,]*\s+(?:environments|minibatches|epochs|units)",
    "lengths": r"(?:after|of|over|every|each|first|last)\s+\d[\d,]*\s+(?:\w+(?:ed|ing) )?(?:steps|episodes)",
}


def figures_left(text, covered):
    """[figures of a page that no piece covers and no rule excuses]"""
    spans = covered + [m.span() for rule in NO_RESULTS.values() for m in re.finditer(rule, text, re.M)]
    left = []
    for match in re.finditer(rf"(?<![\w.,#/])(?<!\w-){FIGURE}(?!\w)(?!-v\d)", text):
        number = match[0]
        large = not number.strip("+-").isdigit() or abs(int(number)) >= 100
        if large and not any(begin <= match.start() and match.end() <= end for begin, end in spans):
            left.append(f"line {text[: match.start()].count(chr(10)) + 1}: {number}")
    return left


PAGES = sorted(path.name for path in NOTES.glob("*.md"))
# metrics.md has a test of its own, below.
DOCS = sorted(f"../{path.name}" for path in NOTES.parent.glob("*.md") if path.name not in ("metrics.md", "results.md"))


def test_pieces_are_of_pages():
    assert set(PAGES) <= {page for page, *_ in pieces()} <= set(PAGES + DOCS)


@pytest.mark.parametrize("page", PAGES + DOCS)
def test_figures_of_the_notes(page):
    """Each is what its expression gives, and none is without one."""
    text, covered, wrong = (NOTES / page).read_text(), [], []
    for of, section, piece in pieces():
        if of == page:
            for begin, end, printed, found in read_piece(page, section, piece, text):
                covered.append((begin, end))
                if not same(printed, found):
                    wrong.append(f"{section}: {printed!r} should be {found!r} ({piece})")
    assert not wrong, "\n".join(wrong)
    assert not (left := figures_left(text, covered)), f"{page}: nothing says where these come from: {left}"


def extents(key, words):
    """(least, greatest) of a metric in the parts of the runs that a range is for: 5% and 95% quantiles."""
    rows = {(row["script"], row["part"], row["key"]): row for row in table("metrics")}
    lows, highs = [], []
    for (script, part, name), row in rows.items():
        returns = rows.get((script, part, "charts/last_100_return"))  # none before the first episode ends
        rises = not returns or float(returns["median"]) < 0.99 * float(returns["q95"])
        if name == key and (rises or "rises" not in words) and ("after" not in words or part != "first tenth"):
            lows.append(float(row["q05"]))
            highs.append(float(row["q95"]))
    return min(lows), max(highs)


def end_beside_start(key):
    """How much of a metric is left in the last tenth of a run, of the run where least is."""
    rows = {(row["script"], row["part"]): float(row["median"]) for row in table("metrics") if row["key"] == key}
    return min(rows[script, "last tenth"] / rows[script, "first tenth"] for script, _ in rows)


def test_healthy_ranges_are_those_of_runs_that_learn():
    """A range of docs/metrics.md contains that of results/metrics.csv, and ends within three times of it. What the page
    warns of is outside."""
    lines = re.findall(r"^\| `(\S+)` \|[^|]*\|([^|]*)\|([^|]*)\|$", (ROOT / "docs" / "metrics.md").read_text(), re.M)
    ranges = 0
    for key, healthy, otherwise in lines:
        if "falls to 0" in healthy:
            assert end_beside_start(key) < 0.1, key
        healthy = healthy.replace("falls to 0", "").partition(";")[0]
        figures = [float(x.replace(",", "")) for x in re.findall(FIGURE, healthy)]
        if figures:
            least, greatest = extents(key, healthy)
            if "within" in healthy:
                size, zero = figures
                assert zero == 0
                figures, least, greatest = [size], 0, max(-least, greatest)
            *low, high = figures
            assert greatest <= high <= 3 * greatest, (key, greatest)
            assert not low or low[0] <= least <= 3 * low[0], (key, least)
            ranges += 1
        for bound in re.findall(rf"above ({FIGURE})", otherwise):
            assert float(bound) > extents(key, healthy)[1], key
        for bound in re.findall(rf"stuck at ({FIGURE})", otherwise):
            assert f"clamp(min={bound})" in (ROOT / "ppo_continuous.py").read_text()
    assert ranges == 5
    answer = " ".join((ROOT / "benchmark" / "studies" / "metrics.py").read_text().split())
    for key, digits in (("approx_kl", 3), ("clipfrac", 2)):
        least, greatest = extents(f"losses/{key}", "while the return rises")
        assert f"{key} is {least:.{digits}f} to {greatest:.{digits}f}" in answer


def write_figures():
    """Puts what the expressions give into the pages."""
    for page in PAGES + DOCS:
        text = (NOTES / page).read_text()
        places = [place for of, *piece in pieces() if of == page for place in read_piece(page, *piece, text)]
        for begin, end, printed, found in sorted(places, reverse=True):
            if not same(printed, found):
                digits = len(printed.partition(".")[2])
                text = text[:begin] + (found if isinstance(found, str) else f"{found:,.{digits}f}") + text[end:]
        (NOTES / page).write_text(text)


if __name__ == "__main__":
    write_figures()
