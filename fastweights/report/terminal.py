"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from fastweights.report.efficiency import GROWTH_COLUMNS, by_length, growth_lines, size
from fastweights.report.efficiency import number as short
from fastweights.report.evaluation import lines, point_lines
from fastweights.report.microscope import COLUMNS, layer_rows, needle_differences, number, real_length
from fastweights.report.numbers import interval, percent
from fastweights.report.tasks import whole


def comparison_table(results: Mapping[str, Any]) -> Table:
    """The summary of a comparison, a row per mixer; four of usual names fit 80 columns."""
    entries = results["summary"]
    first, last = entries[0]["lengths"][0]["length"], entries[0]["lengths"][-1]["length"]
    table = Table(
        title="Bits per byte on validation text, ± half of the 95 % interval. Lower is better.",
        caption=f"difference: to {entries[0]['label']}, {'seed by seed' if len(entries[0]['seeds']) > 1 else 'document by document'}",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("mixer")
    for column in (f"context {first}", "difference", f"context {last}", "tokens/s"):
        table.add_column(column, justify="right")
    for entry in entries:
        validation = entry["validation"]
        table.add_row(
            entry["label"] if len(results["settings"]["sizes"]) == 1 else f"{entry['label']} {entry['size']}",
            interval(validation["bits_per_byte"]),
            interval(validation["difference"], signed=True) if validation["difference"] else "",
            interval(entry["lengths"][-1]["bits_per_byte"]),
            f"{entry['tokens_per_second']:,.0f}",
        )
    return table


def task_table(results: Mapping[str, Any]) -> Table:
    """The standings of a comparison on a task, a row per mixer."""
    standings = results["standings"]
    spread = "the 95 % interval" if len(standings[0]["seeds"]) == 1 else "the worst and the best seed"
    table = Table(title=f"{results['preset']}: accuracy in %, with {spread}", title_justify="left")
    table.add_column("mixer", no_wrap=True)
    for column in (*(one["evaluation"] for one in whole(standings[0])), "learning rate", "steps"):
        table.add_column(column, justify="right")
    for one in standings:
        table.add_row(one["label"], *map(percent, whole(one)), f"{one['learning_rate']:.2g}", f"{one['steps']:,.0f}")
    return table


def microscope_tables(results: Mapping[str, Any]) -> list[Table]:
    """What was seen: a row a layer; what the read keeps of needle and haystack; the depth map."""
    tables = []
    if results["view"]:
        rows = layer_rows(results)
        short = {"corrected": "β‖k̂‖²", "residual_share": "residual", "decay": "a", "lambda_trace": "λ·tr Σ", "removed": "removed"}
        names = [*(COLUMNS | short).values(), "‖S‖", "rank"]
        mixers = list(dict.fromkeys(layer["mixer"] for layer, _ in rows))
        shown = [i for i in range(len(names)) if any(numbers[i] is not None for _, numbers in rows)]
        whole = _narrow(f"{', '.join(mixers)}: means over heads and tokens")
        whole.add_column("layer", no_wrap=True)
        for i in shown:
            whole.add_column(names[i], justify="right")
        for layer, numbers in rows:
            name = f"{layer['layer']} {layer['mixer']}" if len(mixers) > 1 else str(layer["layer"])
            whole.add_row(name, *(number(numbers[i]) for i in shown))
        tables.append(whole)
        if results["needle"]:
            tables.append(_needle_table(results))
    if results["depth_map"]:
        tables.append(_depth_table(results["depth_map"]))
    return tables


def _narrow(title: str) -> Table:
    """A table whose columns lie close together, and that its title fits."""
    look = dict(title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    return Table(title=title, min_width=len(title) + 2, **look)  # type: ignore[arg-type]


def _needle_table(results: Mapping[str, Any]) -> Table:
    names = {"survives_query": "query kept", "survives_direction": "direction kept", "projection": "on top directions"}
    layers = results["view"]["layers"]
    prompts = layers[0]["needle"].get("prompts", 1)
    table = _narrow(f"Needle keys / haystack keys, means over {f'{prompts} prompts and ' if prompts > 1 else ''}heads")
    shown = [name for name in names if any(name in layer["needle"] for layer in layers)]
    table.add_column("layer")
    for name in shown:
        table.add_column(names[name], justify="right")
    if prompts > 1:
        table.add_column("difference", justify="right")
    for layer, apart in needle_differences(layers):
        cells = []
        for name in shown:
            found = layer["needle"].get(name)
            heads = found and [found[kind][-1] if name == "projection" else found[kind] for kind in ("needle", "haystack")]
            cells.append(" / ".join(f"{sum(h) / len(h):.3f}" for h in heads) if heads else "–")
        table.add_row(f"{layer['layer']} {layer['mixer']}", *cells, *([apart["projection"]] if apart else []))
    return table


def _depth_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _narrow("Needles by length (real length): nats a token of the value, share said")
    lengths = sorted({row["length"] for row in rows})
    cells = {(row["depth"], row["length"]): f"{row['nats_per_token']:.2f} {100 * row['accuracy']:.0f} %" for row in rows}
    table.add_column("depth")
    for length in lengths:
        table.add_column(f"{length:,} ({real_length(rows, length):,.0f})", justify="right")
    for depth in sorted({row["depth"] for row in rows}):
        table.add_row(f"{depth} %", *(cells.get((depth, length), "") for length in lengths))
    return table


def evaluation_table(results: Mapping[str, Any]) -> Table:
    """Every task with its main metric, a column per model."""
    table = Table(title="95 % intervals in brackets", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("task", "metric"):
        table.add_column(column, no_wrap=True)
    for column in (*results["models"], "samples"):
        table.add_column(column, justify="right")
    for line in [*lines(results["rows"], [results]), *point_lines(results["rows"])]:
        table.add_row(line.task, line.metric, *(line.cells.get(model, "–") for model in results["models"]), line.samples)
    return table


def efficiency_tables(results: Mapping[str, Any]) -> list[Table]:
    """Times by length, with the state's size; what the longest costs beside the memory's floor; and how times grow."""
    rows = [row for row in results["rows"] if "failed" not in row]
    prefill = results["what"] == "prefill"
    key = ("label",) if prefill else ("label", "path", "batch")
    title = (
        "Time to the first token (ms) by tokens of the prompt"
        if prefill
        else "Tokens a second in all, by tokens of context; floor: times the memory's"
    )
    tables = []
    if rows:
        columns, lines = by_length(rows, lambda row: short(row["ms"] if prefill else row["tokens_per_second"]), key)
        last = {tuple(str(row[name]) for name in key): row for row in sorted(rows, key=lambda row: row["length"])}
        ends = ("state", "peak memory") if prefill else ("state", "floor")
        speed = _narrow(title)
        for column in ("model", *key[1:]):
            speed.add_column(column, no_wrap=True)
        for column in (*columns, *ends):
            speed.add_column(column, justify="right", no_wrap=True)
        for line in lines:
            row = last[tuple(line[: len(key)])]
            speed.add_row(*line, size(row["state_bytes"]), size(row["peak_bytes"]) if prefill else f"{row['over_floor']:.3g}")
        tables.append(speed)
    if results["growth"]:
        grown = _narrow("Time as a power of the length: " + ("1 is linear" if prefill else "0 is flat"))
        for column in GROWTH_COLUMNS:
            grown.add_column(column, justify="left" if column in ("model", "path") else "right", no_wrap=True)
        for line in growth_lines(results["growth"]):
            grown.add_row(*line)
        tables.append(grown)
    return tables
