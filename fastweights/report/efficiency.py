"""How fast models read and write, what memory they take, and how both grow with the context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastweights.report.html import Html, escape, figure, folded, section, table, tag
from fastweights.report.plots import Curve, curves, short_number
from fastweights.report.rows import sources

Results = Mapping[str, Any]
Row = Mapping[str, Any]
PATHS = {
    "prompt": "the engine, from the request to its first token",
    "rows": "the engine's step alone",
    "engine": "the whole engine, requests and all",
    "generate": "model.generate",
}


def sections(results: Sequence[Results]) -> Sequence[Html]:
    """The parts of a page for all results of kind `efficiency`."""
    parts = []
    for what, show in (("prefill", _prefill), ("decode", _decode)):
        rows = [row for one in results for row in one["rows"] if one["what"] == what]
        growth = [line for one in results for line in one["growth"] if one["what"] == what]
        if done := [row for row in rows if "failed" not in row]:
            parts.append(show(done, growth))
        if failed := [row for row in rows if "failed" in row]:
            told = [(row["label"], f"{row['length']:,}", row["batch"], row["path"], row["failed"]) for row in failed]
            parts.append(section(f"Not measured: {what}", table(["model", "length", "batch", "path", "why"], told)))
    return parts


def headline(row: Row) -> str:
    """A row in a line."""
    place = f"{row['label']}: {short_number(float(row['length']))} tokens"
    if row["what"] == "decode":
        place += f" of context, batch {row['batch']}, {row['path']}"
    if "failed" in row:
        return f"{place}: not measured, {row['failed']}"
    return f"{place}: {number(row['ms'])} ms{' a step' if row['what'] == 'decode' else ''}, {number(row['tokens_per_second'])} tokens/s"


def number(value: float | None) -> str:
    """Three digits, and all of those before the point."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def size(count: int | float | None) -> str:
    """Bytes for people, in powers of 1,000."""
    if count is None:
        return "–"
    unit, scale = next(((unit, scale) for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if count >= scale), ("B", 1.0))
    return f"{count / scale:.3g} {unit}"


def by_length(rows: Sequence[Row], cell: Callable[[Row], str], key: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """A table with a column a length: its lengths as text, and its lines, which begin with what `key` names."""
    lengths = sorted({row["length"] for row in rows})
    lines: dict[tuple, dict[int, str]] = {}
    for row in rows:
        lines.setdefault(tuple(str(row[name]) for name in key), {})[row["length"]] = cell(row)
    columns = [short_number(float(length)) for length in lengths]
    return columns, [[*names, *(cells.get(length, "–") for length in lengths)] for names, cells in lines.items()]


def growth_lines(growth: Sequence[Row]) -> list[list[str]]:
    """The cells of `GROWTH_COLUMNS`."""
    found = []
    for line in growth:
        exponent, between = f"{line['exponent']:.3f}", "–"
        if line["error"] is not None:
            exponent, between = f"{exponent} ± {line['error']:.3f}", f"[{line['low']:.3f}, {line['high']:.3f}]"
        span = f"{100 * line['change']:+.1f} %" if line["change"] < 1 else f"×{1 + line['change']:.3g}"
        found.append([line["label"], line["path"], str(line["batch"]), exponent, between, span])
    return found


GROWTH_COLUMNS = ("model", "path", "batch", "exponent ± s.e.", "95 % interval", "change")
"""The change is that of the median time, from the shortest to the longest length."""


def _prefill(rows: Sequence[Row], growth: Sequence[Row]) -> Html:
    models = list(dict.fromkeys(row["label"] for row in rows))
    speed = _lines(rows, models, "length", lambda row: row["tokens_per_second"], spread=True)
    memory = _lines([row for row in rows if row["peak_bytes"]], models, "length", lambda row: row["peak_bytes"] / 1e6)
    plots = [
        figure(
            curves(
                speed,
                x_label="prompt (tokens)",
                y_label="tokens/s",
                description="Reading speed by length.",
                log_x=True,
                markers=True,
                y_range=(0,),
            ),
            "Tokens of the prompt over the time from the request to the first token. A level line is time that grows as the length.",
        )
    ]
    if memory:
        kinds = " and ".join(sorted({row["peak_kind"] for row in rows}))
        peak = curves(
            memory,
            x_label="prompt (tokens)",
            y_label="peak memory (MB)",
            description="Peak memory by length.",
            log_x=True,
            markers=True,
            y_range=(0,),
        )
        plots.append(figure(peak, f"Largest memory in use while the prompt is read: {kinds}, weights included."))
    key = ("label",)
    grids = [
        ("Time to the first token (ms)", lambda row: number(row["ms"])),
        ("Tokens of the prompt a second", lambda row: number(row["tokens_per_second"])),
        ("Time of reading alone (ms), without request, checks and the first step", lambda row: number(row["reading_ms"])),
        ("TFLOP/s of the model's arithmetic while reading", lambda row: number(row["teraflops"])),
        ("Peak memory", lambda row: size(row["peak_bytes"])),
        ("State of one sequence after the prompt", lambda row: size(row["state_bytes"])),
    ]
    first, *others = [_grid(rows, cell, key, title) for title, cell in grids]
    return section(
        "Reading a prompt",
        tag("p", _conditions(rows)),
        tag("div", *plots, cls="pair"),
        first,
        _growth(growth, "1 is time that grows as the length, 2 as its square."),
        folded("More numbers", *others),
        sources(rows),
    )


def _decode(rows: Sequence[Row], growth: Sequence[Row]) -> Html:
    models = list(dict.fromkeys(row["label"] for row in rows))
    least, paths = min(row["batch"] for row in rows), [path for path in PATHS if any(row["path"] == path for row in rows)]
    shown = [row for row in rows if row["path"] == paths[0]]
    single = [row for row in shown if row["batch"] == least]
    shortest = min(row["length"] for row in shown)
    of_batch = [row for row in shown if row["length"] == shortest]
    plots = [
        figure(
            curves(
                _lines(single, models, "length", lambda row: row["tokens_per_second"], spread=True),
                x_label="context (tokens)",
                y_label="tokens/s",
                description="Decoding speed by length of the context.",
                log_x=True,
                markers=True,
                y_range=(0,),
            ),
            f"Batch {least}, {PATHS[paths[0]]}. A level line is a step that does not depend on what was read before.",
        )
    ]
    if len({row["batch"] for row in of_batch}) > 1:
        plot = curves(
            _lines(of_batch, models, "batch", lambda row: row["tokens_per_second"], spread=True),
            x_label="batch (sequences)",
            y_label="tokens/s in all",
            description="Decoding speed by batch.",
            log_x=True,
            markers=True,
            y_range=(0,),
        )
        plots.append(figure(plot, f"After {shortest:,} tokens of context, all sequences together, {PATHS[paths[0]]}."))
    key = ("label", "path", "batch")
    measured = sorted({f"{row['bandwidth_gb_s']:,.1f} GB/s, {row['bandwidth_source']}" for row in rows})
    floor_note = f"Times the time in which the memory can move the weights and the states once ({'; '.join(measured)})."
    meaning = "; ".join(f"{path}: {PATHS[path]}" for path in paths)
    return section(
        "Decoding",
        tag("p", _conditions(rows)),
        tag("div", *plots, cls="pair"),
        _grid(rows, lambda row: number(row["tokens_per_second"]), key, f"Tokens a second, all sequences together. {meaning}."),
        _growth(growth, "0 is a step that takes the same time after any context."),
        folded(
            "More numbers",
            _grid(rows, lambda row: number(row["ms"]), key, "Milliseconds of one step."),
            _grid(rows, lambda row: f"{number(row['over_floor'])} ×", key, floor_note),
            _grid(rows, lambda row: size(row["peak_bytes"]), key, f"Peak memory: {', '.join(sorted({row['peak_kind'] for row in rows}))}."),
            _grid(shown, lambda row: size(row["state_bytes"]), ("label",), "State of one sequence."),
        ),
        sources(rows),
    )


def _lines(rows: Sequence[Row], models: Sequence[str], x: str, y: Callable[[Row], float], spread: bool = False) -> list[Curve]:
    """A curve a model; with ``spread`` a band from the slowest run to the quickest."""
    found = []
    for model in models:
        line = sorted((row for row in rows if row["label"] == model), key=lambda row: row[x])
        if not line:
            continue
        values = [y(row) for row in line]
        band = []
        if spread:
            band = [[value * row["ms"] / f(row["runs_ms"]) for row, value in zip(line, values, strict=True)] for f in (max, min)]
        found.append(Curve(model, [row[x] for row in line], values, *band))
    return found


def _grid(rows: Sequence[Row], cell: Callable[[Row], str], key: Sequence[str], note: str) -> Html:
    columns, lines = by_length(rows, cell, key)
    return table([*("model" if name == "label" else name for name in key), *columns], lines, note=f"{note} By length.")


def _growth(growth: Sequence[Row], meaning: str) -> Html:
    if not growth:
        return escape("")
    note = f"Time as a power of the length: a straight line through the logarithms of all runs. {meaning} The change is that of the median"
    note += " from the shortest to the longest length."
    return table(GROWTH_COLUMNS, growth_lines(growth), note=note)


def _conditions(rows: Sequence[Row]) -> str:
    """What the numbers hold for, in a sentence or two."""
    weights = " and ".join(sorted({row["weights"] for row in rows}))
    precision, devices = " and ".join(sorted({row["precision"] for row in rows})), " and ".join(sorted({row["device"] for row in rows}))
    repeats = sorted({len(row["runs_ms"]) for row in rows})
    often = f"{repeats[0]} to {repeats[-1]}" if len(repeats) > 1 else str(repeats[0])
    loads = [row["load"] for row in rows if row["load"] is not None]
    load = f" Load of the machine: {min(loads):g} to {max(loads):g}." if loads else ""
    models = dict.fromkeys(f"{row['label']} {row['parameters'] / 1e6:,.1f} M" for row in rows)
    told = (
        f"{devices}; {precision}; {weights} weights, random tokens; medians of {often} runs after a warm-up, bands from the slowest to the"
    )
    return f"{told} quickest. Parameters: {', '.join(models)}.{load}"
