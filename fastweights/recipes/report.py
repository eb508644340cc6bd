"""`fastweights report FILE…`: one page of any set of result files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastweights.recipes.bench_results import joined
from fastweights.recipes.summary import summarise
from fastweights.recipes.task_standings import standings
from fastweights.records import provenance, read_rows
from fastweights.report import SECTIONS, TOGETHER, write_report
from fastweights.report.plots import exporting


def report(files: Sequence[Path], out: Path, *, title: str = "fastweights report", export: Sequence[str] = ()) -> list[Path]:
    """Write ``out`` and, with ``export`` (``svg``, ``png``), every figure into the folder ``<out without .html>_figures``.

    Returns the paths written.

    Raises:
        ValueError, FileNotFoundError: a file that is not there or holds no results.
    """
    if not files:
        raise ValueError("no result files were given: results.json or .jsonl files, or folders that hold them")
    try:
        results = [result for file in files for result in load_results(file)]
        if not export:
            write_report(results, out, title=title)
            return [out]
        with exporting(out.with_name(f"{out.stem}_figures"), tuple(dict.fromkeys(export))) as written:
            write_report(results, out, title=title)
        return [out, *written]
    except (KeyError, TypeError, IndexError, AttributeError) as error:  # files may hold anything
        what = f"lacks {error}" if isinstance(error, KeyError) else f"cannot be shown ({error})"
        raise ValueError(f"a result in {', '.join(map(str, files))} {what}: it is damaged, or of another version") from error


def load_results(file: Path) -> list[dict[str, Any]]:
    """What a file holds: a ``results.json`` as it is; JSON lines as rows, those of a comparison joined as its results.json would be; a
    folder stands for the results.json or results.jsonl in it.

    Raises:
        ValueError, FileNotFoundError: no such file, or no results in it.
    """
    if file.is_dir():
        inside = next((file / name for name in ("results.json", "results.jsonl") if (file / name).is_file()), None)
        if inside is None:
            raise FileNotFoundError(f"{file} holds neither results.json nor results.jsonl")
        file = inside
    if not file.is_file():
        raise FileNotFoundError(f"no file {str(file)!r}")
    try:
        if file.suffix == ".jsonl":
            return _of_rows(file, read_rows(file))
        result = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    known = [*SECTIONS, *TOGETHER]
    if not isinstance(result, dict) or result.get("kind") not in known:
        kind = result.get("kind") if isinstance(result, dict) else type(result).__name__
        raise ValueError(f"{file} holds results of kind {kind!r}, which nothing shows; known: {', '.join(known)}, and rows in .jsonl files")
    return [result]


def _of_rows(file: Path, rows: list[Any]) -> list[dict[str, Any]]:
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{file} holds no rows")
    kinds = {"language model": _comparison, "task": _task_comparison}
    found = []
    for kind, join in kinds.items():
        alike: dict[str, dict[str, Any]] = {}
        for row in rows:
            if row.get("kind") == kind:
                alike.setdefault(json.dumps(_alike(row), sort_keys=True), {})[row["run"]] = row
        found += [join(list(group.values())) for group in alike.values()]
    found += [one | provenance() for one in joined(row for row in rows if row.get("kind") == "efficiency")]
    others = [row for row in rows if row.get("kind") not in (*kinds, "efficiency")]
    return found + ([{"kind": "rows", "name": file.name, "rows": others}] if others else [])


def _alike(row: dict[str, Any]) -> list[Any]:
    """What rows must share to be compared: how they were trained, and what was measured."""
    if row["kind"] == "task":
        return [row["preset"], row["train"], row["model"]]
    return [row["train"], row["text"], [point["length"] for point in row["lengths"]], row["validation"]["tokens"]]


def _comparison(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What `compare` would have written, of the rows that are there."""
    text = rows[0]["text"]
    settings = {
        "mixers": list(dict.fromkeys(row["label"] for row in rows)),
        "sizes": list(dict.fromkeys(row["size"] for row in rows)),
        "seeds": sorted({row["seed"] for row in rows}),
        "data": text["data"],
        "validation": text["validation"],
        "tokenizer": text["tokenizer"],
        "train": rows[0]["train"],
    }
    return {"kind": "comparison", "settings": settings, "text": text, "summary": summarise(rows), "rows": rows, **provenance()}


def _task_comparison(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"kind": "task comparison", "preset": rows[0]["preset"], "standings": standings(rows), "rows": rows, **provenance()}
