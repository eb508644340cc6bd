"""`fastweights report` of files that commands and benchmarks wrote."""

import json
from pathlib import Path

import pytest

from fastweights import cli
from fastweights.recipes.report import load_results, report

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_rows_of_a_comparison_are_joined_as_its_results_are(tmp_path):
    whole = json.loads((RESULTS / "demo.json").read_text())
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [whole["rows"][0], *whole["rows"]]))  # one twice
    (joined,) = load_results(tmp_path)
    assert joined["kind"] == "comparison" and joined["summary"] == whole["summary"] and len(joined["rows"]) == len(whole["rows"])
    other = whole["rows"][0] | {"train": whole["rows"][0]["train"] | {"steps": 7}, "run": "other"}
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*whole["rows"][:2], other, {"kind": "odd"}]))
    first, second, rest = load_results(tmp_path)
    assert [len(one["rows"]) for one in (first, second, rest)] == [2, 1, 1]  # trained otherwise: not the same table
    assert rest == {"kind": "rows", "name": "results.jsonl", "rows": [{"kind": "odd"}]}


@pytest.mark.full
def test_the_recorded_files_make_one_page(tmp_path, capsys):
    files = [str(RESULTS / name) for name in ("demo.json", "cpu.jsonl", "ops-h200.jsonl")]
    assert cli.main(("report", *files, "--out", str(tmp_path / "all.html"), "--export", "svg", "png", "--title", "All")) == 0
    markup, figures = (tmp_path / "all.html").read_text(), list((tmp_path / "all_figures").iterdir())
    assert f"{len(figures)} figures: {tmp_path / 'all_figures'}" in " ".join(capsys.readouterr().out.split())
    assert markup.count("<svg") * 2 == len(figures) == 2 * (4 + 1 + 4)
    assert "<h1>All</h1>" in markup and "bench_cpu.py --rounds" in markup and "NVIDIA H200" in markup and "gated_deltanet+ccq" in markup


def test_what_cannot_be_shown_is_said(tmp_path, capsys):
    for name, content in (
        ("a.json", "{"),
        ("b.json", '{"kind": "poem"}'),
        ("c.json", "[1]"),
        ("d.jsonl", ""),
        ("e.json", '{"kind": "comparison"}'),
    ):
        (tmp_path / name).write_text(content)
    for name, told in (
        ("a.json", "a.json is not JSON"),
        ("b.json", "holds results of kind 'poem', which nothing shows; known: comparison"),
        ("c.json", "holds results of kind 'list'"),
        ("d.jsonl", "holds no rows"),
        ("e.json", "it is damaged, or of another version"),
        ("none.json", "no file"),
        ("", "holds neither results.json nor results.jsonl"),
    ):
        code = cli.main(("report", str(tmp_path / name), "--out", str(tmp_path / "page.html")))
        assert code == 2 and told in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()
    assert cli.main(("report",)) == 2 and "no result files were given" in capsys.readouterr().err


def test_a_page_and_no_figures_unless_asked(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"kind": "odd", "x": 1}\n{"kind": "odd", "x": 2}\n')
    assert report([tmp_path / "rows.jsonl"], tmp_path / "page.html") == [tmp_path / "page.html"]
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "page.html"}


@pytest.mark.parametrize(
    "change", [{"summary": 3}, {"rows": [1, 2]}, {"summary": []}, {"settings": "x"}, {"kind": "efficiency", "rows": 3}]
)
def test_a_result_that_holds_something_else_is_told(tmp_path, change):
    (tmp_path / "results.json").write_text(json.dumps(json.loads((RESULTS / "demo.json").read_text()) | change))
    with pytest.raises(ValueError, match=r"a result in .*results\.json (cannot be shown|lacks) .*: it is damaged, or of another version"):
        report([tmp_path / "results.json"], tmp_path / "page.html")
