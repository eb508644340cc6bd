"""Rows of any JSON-lines file: tables of what differs, a figure where something was timed, and what they share at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastweights.report.html import Html, fields, figure, folded, section, table
from fastweights.report.plots import bars

Row = Mapping[str, Any]
ORIGIN = ("command", "commit", "device", "versions", "time", "seed", "run")
"""What says where a row comes from."""
TIMES = ("ms", "ours_ms")
"""Milliseconds of ours, by the names that benchmarks use."""
BARS = 32
"""Bars of a figure, at most."""


def sections(results: Sequence[Mapping[str, Any]]) -> Sequence[Html]:
    """A part for each file: results of kind `rows` have a ``name`` and ``rows``."""
    return [_file(one["name"], one["rows"]) for one in results]


def _file(name: str, rows: Sequence[Row]) -> Html:
    parts: list[Html] = []
    for title, group in _groups(rows).items():
        parts += _group(title, group)
    return section(name, *parts, sources(rows))


def _groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of one sort: the same kind or benchmark, and the same fields."""
    found: dict[tuple[str, tuple[str, ...]], list[Row]] = {}
    for row in rows:
        found.setdefault((str(row.get("kind", row.get("benchmark", "rows"))), tuple(sorted(row))), []).append(row)
    kinds = [kind for kind, _ in found]
    return {kind if kinds.count(kind) == 1 else f"{kind}, {', '.join(names)}": group for (kind, names), group in found.items()}


def _group(title: str, rows: Sequence[Row]) -> list[Html]:
    names = [name for name in rows[0] if name not in ORIGIN and _is_short(rows, name)]
    differ = [name for name in names if len({_key(row[name]) for row in rows}) > 1]
    same = ", ".join(f"{name} {_text(rows[0][name])}" for name in names if name not in differ)
    left_out = [name for name in rows[0] if name not in ORIGIN and name not in names]
    note = f"{len(rows)} {'row' if len(rows) == 1 else 'rows'} of {title}. " + (
        f"The same in all: {same}. " if same and len(rows) > 1 else ""
    )
    note += f"Too long to show: {', '.join(left_out)}." if left_out else ""
    shown = differ or names
    words = sorted((name for name in shown if not _is_number(rows, name)), key=shown.index)
    columns = [*words, *(name for name in shown if name not in words)]
    parts = []
    timed = next((name for name in TIMES if name in names), None)
    if timed and len(rows) > 1:
        parts.append(_timed(title, timed, words, rows))
    return [*parts, table(columns, [[_text(row[name]) for name in columns] for row in rows], note=note)]


def _timed(title: str, timed: str, words: Sequence[str], rows: Sequence[Row]) -> Html:
    shown = rows[-BARS:]
    short = [" ".join(_text(row[name]) for name in words if name != "shape") for row in shown]
    labels = short if len(set(short)) == len(short) else [" ".join(_text(row[name]) for name in words) for row in shown]
    mark, meaning = next(((n, m) for n, m in (("floor_ms", "the floor"), ("peer_ms", "the peer")) if n in shown[0]), (None, ""))
    marks = [row[mark] for row in shown] if mark else []
    plot = bars(labels, [row[timed] for row in shown], x_label="milliseconds", description=f"Milliseconds of {title}.", marks=marks)
    some = "" if len(shown) == len(rows) else f" The last {BARS} rows."
    return figure(plot, f"Lower is better.{f' The mark is {meaning} of the same row.' if mark else ''}{some}")


def _is_short(rows: Sequence[Row], name: str) -> bool:
    return all(len(_text(row[name])) <= 60 for row in rows)


def _is_number(rows: Sequence[Row], name: str) -> bool:
    return all(isinstance(row[name], (int, float)) and not isinstance(row[name], bool) for row in rows)


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return " ".join(f"{name}={_text(part)}" for name, part in value.items())
    if isinstance(value, list):
        return " × ".join(map(_text, value)) if all(isinstance(part, int) for part in value) else _key(value)
    return "–" if value is None else f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def sources(rows: Sequence[Row]) -> Html:
    """Each origin once, with how many rows it made."""
    counts: dict[str, int] = {}
    for row in rows:
        versions = ", ".join(f"{name} {version}" for name, version in row.get("versions", {}).items())
        facts = [(name, str(row[name])) for name in ("command", "commit", "device", "seed") if name in row] + [("versions", versions)]
        origin = fields([(name, value) for name, value in facts if value])
        counts[origin] = counts.get(origin, 0) + 1
    parts = [part for origin, count in counts.items() for part in (Html(f"<p>{count} {'row' if count == 1 else 'rows'}</p>"), Html(origin))]
    return folded("Where it comes from", *parts)
