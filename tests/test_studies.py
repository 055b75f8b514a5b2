"""benchmark/studies/ can be run from anywhere. What a study measures is tested where it is used."""

import subprocess
import sys

from conftest import ROOT

STUDIES = sorted((ROOT / "benchmark" / "studies").glob("*.py"))


def test_studies_start_anywhere(tmp_path):
    """Their imports need no current folder."""
    code = "import runpy, sys; before = sys.path[:]\n"
    code += "for path in sys.argv[1:]:\n"
    code += "    sys.path[:] = before\n"
    code += "    for name in ('report', 'run', 'run_folder', 'speed', 'suites'): sys.modules.pop(name, None)\n"
    code += "    runpy.run_path(path)"
    assert STUDIES
    subprocess.run([sys.executable, "-c", code, *map(str, STUDIES)], cwd=tmp_path, check=True)
