"""What README and docs/ say is so: commands, snippets, tables, links."""

import dataclasses
import importlib
import re
import textwrap

import numpy as np
import pytest
import torch
from conftest import ROOT, SCRIPTS

README = (ROOT / "README.md").read_text()
DOCS = {path.stem: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}  # notes/ are not kept up to date
PAGES = "\n".join([README, *DOCS.values()])


def anchors(path):
    """What a link to a heading of a Markdown page may name."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.S), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    """Every relative link of every page, to a file and to a heading."""
    pages = [page for pattern in ("*.md", "docs/**/*.md", "recipes/*.md") for page in ROOT.glob(pattern)]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)\s:]+)\)", page.read_text())]
    assert links
    for page, link in links:
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page}: {link}"
        assert not anchor or anchor in anchors(target), f"{page}: {link}"


def test_commands_of_the_benchmark_parse(tmp_path):
    """Those of its tools in docs/ and their docstrings; what follows `--` is for the script."""
    import report
    import run
    import speed
    import tune
    import tyro

    for tool in (report, speed, run, tune):
        commands = {*re.findall(rf"python benchmark/{tool.__name__}\.py( [^\n#`]*)", PAGES + tool.__doc__)}
        assert commands
        for command in commands:
            words, _, flags = command.replace("my_ppo.py", "ppo_continuous.py").partition(" -- ")
            args = tyro.cli(tool.Args, args=words.split())
            if tool is run:
                args = dataclasses.replace(args, runs_dir=tmp_path, seeds=1)
                assert run.make_jobs(args, flags.replace("cuda", "cpu").split())  # refused where there is none
            if tool is tune:
                assert (ROOT / args.sweep).is_file()


def test_table_of_defaults():
    """That of docs/choices.md. A dash stands for no such flag."""
    rows = re.findall(r"^\| `--([\w-]+)` \| (.*) \|$", DOCS["choices"], re.M)
    assert len(rows) > 15
    columns = [importlib.import_module(name).Args for name in (*SCRIPTS[:2], "ppo_atari", "ppo_rnn")]
    for name, cells in rows:
        for args, cell in zip(columns, cells.split(" | "), strict=True):
            shown = {"on": True, "off": False, "none": None, "64 64": (64, 64), "-": "no such flag"}
            value = getattr(args, name.replace("-", "_"), "no such flag")
            assert value == (shown[cell] if cell in shown else float(cell)), name


@pytest.mark.parametrize("script", ["ppo_continuous", "ppo_discrete"], indirect=True)
def test_snippet_acts(script, run_dir):
    """The Python block of docs/running.md, on a run of the test."""
    block, env_id = re.findall(r"```python\n(.*?)```", DOCS["running"], re.S)[0], script.load_args(run_dir).env_id
    for word, own in (("runs/NAME", run_dir), ("ppo_continuous", script.__name__), ("HalfCheetah-v4", env_id)):
        assert word in block
        block = block.replace(word, str(own))
    namespace = {}
    exec(block, namespace)
    assert isinstance(namespace["reward"], float)


@pytest.mark.parametrize("script", ["ppo_continuous", "ppo_discrete"], indirect=True)
def test_snippet_exports(script, small_args, tmp_path):
    """The exported file gives the actions of the agent, for any number of observations."""
    discrete = script.__name__ == "ppo_discrete"
    agent, run_dir = script.train(small_args(env_id="Acrobot-v1" if discrete else "Hopper-v4"))
    _, block, lines, *_ = re.findall(r"```python\n(.*?)```", DOCS["running"], re.S)
    if discrete:  # the page says which two lines change
        block = block.replace("from ppo_continuous", "from ppo_discrete")
        before, after = block[: block.index("        mean, _ =")], block[block.index("\n\n\nagent = ") :]
        block = before + textwrap.indent(lines.rstrip(), " " * 8) + after
    exec(block.replace("runs/NAME", str(run_dir)).replace("agent.pt2", f"{tmp_path}/agent.pt2"), {})
    policy = torch.export.load(tmp_path / "agent.pt2").module()
    for rows in (1, 5):
        raw_obs = 3 * torch.randn(rows, *agent.obs_rms.mean.shape)
        np.testing.assert_allclose(policy(raw_obs).numpy(), agent.predict(raw_obs.numpy()), atol=1e-6)


def test_snippet_trains(tmp_path):
    """The Python block of docs/your-environment.md that trains, shorter and in another folder."""
    blocks = re.findall(r"```python\n(.*?)```", DOCS["your-environment"], re.S)
    (block,) = (block for block in blocks if "200_000" in block)
    namespace = {}
    exec(block.replace("200_000", f"2000, runs_dir={str(tmp_path)!r}, compile=False"), namespace)
    assert (namespace["run_dir"] / "checkpoint.pt").is_file() and namespace["run_dir"].parent == tmp_path
