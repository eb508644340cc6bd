"""Experiments: what the pages say is what the rows say, and each row says where it comes from."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from fastweights.records import read_rows

ROOT = Path(__file__).parent.parent
RUN = runpy.run_path(str(ROOT / "experiments" / "run.py"))
FOLDERS = RUN["folders"]()
RECORDED = RUN["recorded"]()
SECTIONS = ("Question", "Prediction", "Setting", "Result", "What it means")
ids = {"ids": lambda folder: folder.name}


@pytest.mark.parametrize("folder", FOLDERS, **ids)
def test_a_page_has_its_parts(folder):
    page = (folder / "README.md").read_text()
    assert re.findall(r"^\*\*([\w ]+)[.*]", page, flags=re.M) == list(SECTIONS)
    assert folder.name in (ROOT / "experiments" / "LOG.md").read_text()
    assert ("Not run yet." in page) == (folder not in RECORDED)


@pytest.mark.parametrize("folder", RECORDED, **ids)
def test_a_row_says_where_it_comes_from(folder):
    for row in read_rows(folder / "results.jsonl"):
        assert {"command", "commit", "device", "versions", "seed", "n"} <= row.keys()
        assert re.fullmatch(r"[0-9a-f]{10}", row["commit"]), "of files that are committed"
        assert not re.search(r"/(work|tmp|root|home)/", json.dumps(row)), "a path of one machine"


@pytest.mark.parametrize("folder", RECORDED, **ids)
def test_the_page_says_what_the_rows_say(folder):
    experiment, rows = RUN["config"](folder), read_rows(folder / "results.jsonl")
    assert RUN["MARKED"].findall((folder / "README.md").read_text()) == [experiment["table"](rows)]
    assert (folder / "figure.svg").read_text().startswith("<svg") and experiment["figure"](rows).startswith("<svg")


def test_the_projects_page_has_every_answer():
    assert RUN["MARKED"].findall((ROOT / "README.md").read_text()) == [RUN["answers"]()]


def test_every_claim_has_a_verdict():
    rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", (ROOT / "docs" / "claims.md").read_text(), flags=re.M)
    claims = [row for row in rows if row[0] not in ("claim", "---")]
    assert len(claims) >= 15
    for claim, verdict, known in claims:
        assert verdict in ("holds", "does not hold", "open"), claim
        if verdict != "open":
            assert "](" in known or "`tests/" in known, f"{claim}: a verdict without its evidence"


def test_commands_go_on_and_paths_go_by_a_name(tmp_path, monkeypatch):
    """The laboratory around the command line: variables, the folder, an exit that is passed on."""
    lab = RUN["Lab"]("a_test")
    monkeypatch.setattr(lab, "folder", tmp_path / "runs")
    monkeypatch.setitem(RUN["Lab"].start.__globals__, "ROOT", tmp_path)
    monkeypatch.delenv("FASTWEIGHTS_DATA", raising=False)
    with pytest.raises(SystemExit, match="FASTWEIGHTS_DATA does not name"):
        lab.start("a", "train --data $FASTWEIGHTS_DATA/x")
    with pytest.raises(SystemExit, match="2"):
        lab.fastweights("a", "report nothing.jsonl")
    monkeypatch.setenv("FASTWEIGHTS_DATA", "/somewhere/texts/")
    row = {"command": "fastweights train --data /somewhere/texts/a.parquet", "sessions": [{"command": "/somewhere/texts"}]}
    named = RUN["_named_by_variable"](row)
    assert named == {"command": "fastweights train --data $FASTWEIGHTS_DATA/a.parquet", "sessions": [{"command": "$FASTWEIGHTS_DATA"}]}
    with pytest.raises(SystemExit, match="004_none: experiments are 001_"):
        RUN["main"](["004_none"])


def test_chains_share_the_lanes_and_one_that_fails_ends_alone(tmp_path, monkeypatch):
    lab, began = RUN["Lab"]("a_test"), []

    def start(name, arguments):
        began.append(name)
        return subprocess.Popen([sys.executable, "-S", "-c", arguments])

    monkeypatch.setattr(lab, "start", start)
    first = f"import pathlib, time; time.sleep(0.2); pathlib.Path({str(tmp_path / 'there')!r}).touch()"
    after = f"import pathlib; assert pathlib.Path({str(tmp_path / 'there')!r}).exists()"
    chains = [[("a", first), ("a, measured", after)], [("b", "raise SystemExit(1)"), ("b, measured", "")], [("c", "")]]
    assert lab.together(chains, 2) == ["b"]
    assert began[:2] == ["a", "b"] and sorted(began) == ["a", "a, measured", "b", "c"]
    assert lab.place("a") == Path("runs/experiments/a_test/a")
