"""README is true: its example runs, its links exist, its commands are the Makefile's, and its table is the recorded rows'."""

import json
import re
import runpy
from pathlib import Path

import pytest

from fastweights.records import read_rows

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    lines = [line for line in example.splitlines() if line and not line.startswith("#")]
    assert len(lines) <= 15
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["o"].shape == (1, 128, 4, 32)
    assert "tensor" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


def test_make_has_the_commands():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    assert set(re.findall(r"^make ([a-z-]+)", README, flags=re.M)) <= targets


def test_the_table_is_the_recorded_rows():
    page = runpy.run_path(str(ROOT / "benchmarks" / "readme_table.py"))
    assert page["MARKED"].findall(README) == [page["table"](json.loads(page["RESULTS"].read_text()))]


def test_the_tables_of_speed_are_the_recorded_rows():
    page = runpy.run_path(str(ROOT / "benchmarks" / "efficiency_table.py"))
    assert page["MARKED"].findall(page["PAGE"].read_text()) == [page["tables"](read_rows(page["ROWS"]))]
