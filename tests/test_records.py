"""Rows on disk outlive a kill at any byte."""

import json

import pytest

from fastweights.records import append_rows, commit, provenance, read_rows, rows_by_run

ROWS = [{"run": "a", "text": "ä" * 9}, {"run": "b", "points": [1, 2]}]


def test_a_row_that_was_cut_anywhere_spoils_no_later_one(tmp_path):
    """A kill may leave any part of the last line; the next append and the next read find whole rows."""
    append_rows(tmp_path / "whole.jsonl", ROWS)
    whole = (tmp_path / "whole.jsonl").read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(len(whole) + 1):
        file = tmp_path / f"{cut}.jsonl"
        file.write_bytes(whole[:cut])
        kept = ROWS[: (cut >= first - 1) + (cut >= len(whole) - 1)]
        assert read_rows(file) == kept
        append_rows(file, [{"run": "c"}])
        append_rows(file, [{"run": "d"}])
        assert read_rows(file) == [*kept, {"run": "c"}, {"run": "d"}]
        assert [json.loads(line) for line in file.read_text().splitlines()] == read_rows(file)


@pytest.mark.parametrize("line", [b"garbage", b"[]", b"\xe9", b"\0\0"])
def test_a_line_that_is_no_row_is_named(tmp_path, line):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"run": 1}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl is not JSON lines: line 3: "):
        read_rows(file)
    file.write_bytes(b'{"run": 1}\n' + line)
    assert read_rows(file) == [{"run": 1}]  # as a kill may leave it


def test_no_file_has_no_rows(tmp_path):
    assert read_rows(tmp_path / "none.jsonl") == []
    assert rows_by_run(tmp_path / "none.jsonl") == {}


def test_of_the_rows_of_a_run_the_last_counts_and_a_row_without_one_is_named(tmp_path):
    file = tmp_path / "rows.jsonl"
    append_rows(file, [{"run": "a", "x": 1}, {"run": "b"}, {"run": "a", "x": 2}])
    assert rows_by_run(file) == {"a": {"run": "a", "x": 2}, "b": {"run": "b"}}
    append_rows(file, [{"x": 3}])
    with pytest.raises(ValueError, match=r"rows\.jsonl: row 4 has no 'run', by which finished runs are known"):
        rows_by_run(file)


@pytest.mark.parametrize("program", ["/somewhere/bin/fastweights", "/somewhere/fastweights/__main__.py"])
def test_a_command_is_named_as_it_was_typed(program, monkeypatch):
    """By its script or as `python -m fastweights`, never by a path of this machine."""
    monkeypatch.setattr("sys.argv", [program, "train", "--out", "a b"])
    assert provenance(device="cpu")["command"] == "fastweights train --out 'a b'"


def test_a_copy_of_a_tree_is_told_its_commit(monkeypatch):
    monkeypatch.setenv("FASTWEIGHTS_COMMIT", "0123456789")
    commit.cache_clear()
    assert commit() == "0123456789"
    commit.cache_clear()
