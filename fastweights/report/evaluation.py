"""What saved models can do: tasks, needles and length curves, models side by side, and where every number came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fastweights.report.html import Html, fields, figure, folded, section, table, tag
from fastweights.report.numbers import percent
from fastweights.report.plots import Curve, curves, short_number

Results = Mapping[str, Any]
Row = Mapping[str, Any]


class Shown(NamedTuple):
    """One line of a table: a task and a metric, and what each model has."""

    task: str
    metric: str
    cells: dict[str, str]
    """Label of a model -> its number."""
    samples: str


def sections(results: Sequence[Results]) -> Sequence[Html]:
    """The parts of a page for all results of kind `evaluation`."""
    rows = list({(row["task"], row["label"]): row for one in results for row in one["rows"]}.values())  # of two runs of one, the later
    models = list(dict.fromkeys(label for one in results for label in one["models"]))
    parts = [_tasks(results, rows, models), _needles(rows, models), _curves(rows, models), _recall(rows, models)]
    return [part for part in (*parts, _missing(results), _sources(results, rows)) if part is not None]


def headline(row: Row) -> str:
    """A row in a few words."""
    if "points" in row:
        return "perplexity " + ", ".join(f"{point['perplexity']:.4g} at {short_number(float(point['length']))}" for point in row["points"])
    if "accuracy" in row:
        return ", ".join(f"{percent(one)} at length {one['length']:,}" for one in row["accuracy"] if one["stratum"] is None)
    told = ", ".join(f"{_metric(score)} {number(score)}" for score in row["scores"][: row["shown"]])
    return f"{told} ({row['samples']:,} {'row' if row['samples'] == 1 else 'rows'})" + (f"; {row['note']}" if row["note"] else "")


def number(score: Mapping[str, Any]) -> str:
    """Shares in percent, everything else with four digits; the 95 % interval in brackets."""
    share = score["higher_is_better"] and 0 <= score["value"] <= 1
    parts = [score["value"], score["low"], score["high"]]
    value, low, high = ("" if part is None else f"{100 * part:.1f}" if share else f"{part:.4g}" for part in parts)
    return f"{value} [{low}, {high}]" if low and high else value


def lines(rows: Sequence[Row], results: Sequence[Results], *, every_metric: bool = False) -> list[Shown]:
    """The lines of all tasks that have scores, with the means over groups; needles are lines like others."""
    found: dict[tuple[str, str], Shown] = {}
    for row in rows:
        for score in row.get("scores", ())[: None if every_metric else row.get("shown")]:
            key = row["task"], score["metric"]
            line = found.setdefault(key, Shown(row["task"], _metric(score), {}, f"{row['samples']:,}"))
            line.cells[row["label"]] = number(score)
    for one in results:
        for mean in one["groups"]:
            line = found.setdefault((mean["group"], "mean"), Shown(f"{mean['group']} ({len(mean['tasks'])})", "mean", {}, ""))
            line.cells[mean["label"]] = f"{100 * mean['value']:.1f}"
    return list(found.values())


def point_lines(rows: Sequence[Row]) -> list[Shown]:
    """The lines of the length curves and of the tasks of recall."""
    found: dict[tuple[str, str], Shown] = {}
    for row in rows:
        for point in row.get("points", ()):
            name = f"{row['task']} {short_number(float(point['length']))}"
            for metric, value in (("perplexity", "perplexity"), (f"perplexity, last {row['tail']:,}", "tail_perplexity")):
                line = found.setdefault((name, metric), Shown(name, metric, {}, f"{point['tokens']:,} tokens"))
                line.cells[row["label"]] = f"{point[value]:.4g}"
        for one in row.get("accuracy", ()):
            if one["stratum"] is None:
                name = f"{row['task']} {one['length']:,}"
                found.setdefault((name, "acc"), Shown(name, "accuracy (%)", {}, f"{one['samples']:,}")).cells[row["label"]] = percent(one)
    return list(found.values())


def _metric(score: Mapping[str, Any]) -> str:
    return "found (%)" if score["metric"].isdigit() else f"{score['metric']}{' (%)' if score['higher_is_better'] else ''}"


def _grid(shown: Iterable[Shown], models: Sequence[str], note: object = "") -> Html:
    rows = [(line.task, line.metric, *(line.cells.get(model, "–") for model in models), line.samples) for line in shown]
    return table(["task", "metric", *models, "samples"], rows, note=note)


def _tasks(results: Sequence[Results], rows: Sequence[Row], models: Sequence[str]) -> Html | None:
    plain = [row for row in rows if "scores" in row and row["group"] != "needles"]
    if not plain:
        return None
    few = sorted({row["few_shot"] for row in plain})
    limits = sorted({str(row["limit"]) for row in plain if row["limit"]})
    note = f"Prompts and metrics of lm-evaluation-harness {plain[0]['lm_eval']}; examples before each question: {', '.join(map(str, few))}."
    note += f" Only the first {', '.join(limits)} rows of each task: a first look." if limits else ""
    notes = {f"{row['task']}: {row['note']}" for row in plain if row["note"]}
    cut = {f"{row['task']}: {row['truncated']:,} texts were cut to max_length {row['max_length']:,}" for row in plain if row["truncated"]}
    remarks = [tag("p", remark) for remark in sorted(notes | cut)]
    every = folded("Every metric", _grid(lines(plain, (), every_metric=True), models))
    lead = tag("p", "In brackets 95 % intervals over the rows of a task. Shares are in percent; perplexities are better when lower.")
    return section("Language tasks", lead, _grid(lines(plain, results), models, note), *remarks, every, _facts(plain))


def _facts(rows: Sequence[Row]) -> Html:
    columns = ["task", "model", "data", "prompt tokens", "most", "max_length", "document token", "time"]
    body = []
    for row in rows:
        limit = "none" if row["max_length"] is None else f"{row['max_length']:,}"
        _, mean, most = row["prompt_tokens"]
        data = " ".join(str(part)[:16] for part in row["data"].values() if part)
        begun = "before each text" if row["document_token"] else "as the tokenizer does"
        body.append((row["task"], row["label"], data, f"{mean:,.0f}", f"{most:,}", limit, begun, f"{row['seconds']:.0f} s"))
    return folded("Data and lengths", table(columns, body))


def _needles(rows: Sequence[Row], models: Sequence[str]) -> Html | None:
    rows = [row for row in rows if row["group"] == "needles"]
    if not rows:
        return None
    plots = []
    for variant in sorted({row["variant"] for row in rows}):
        found = []
        for model in models:
            mine = sorted((r for r in rows if (r["variant"], r["label"]) == (variant, model)), key=lambda row: row["length"])
            if mine:
                parts = [[100 * row["scores"][0][part] for row in mine] for part in ("value", "low", "high")]
                found.append(Curve(model, [row["length"] for row in mine], *parts))
        plot = curves(
            found,
            x_label="length (tokens)",
            y_label="found (%)",
            description=f"Needles found by length, variant {variant}, one line per model.",
            log_x=True,
            markers=True,
        )
        plots.append(figure(plot, f"S-NIAH-{variant}: {MEANING[variant]}."))
    notes = [tag("p", remark) for remark in sorted({f"{row['task']}: {row['note']}" for row in rows if row["note"]})]
    splitters = " and ".join(sorted({row["splitter"] for row in rows}))
    note = f"The value occurs in the greedy continuation. Essays were split into sentences by {splitters}; real lengths are below."
    grid = _grid(lines(rows, ()), models, note)
    return section("Needles", tag("div", *plots, cls="pair"), grid, *notes, _facts(rows))


MEANING = {1: "a number in one repeated line", 2: "a number in essays", 3: "a UUID in essays"}


def _curves(rows: Sequence[Row], models: Sequence[str]) -> Html | None:
    rows = [row for row in rows if "points" in row]
    if not rows:
        return None
    plots, notes = [], []
    for task in dict.fromkeys(row["task"] for row in rows):
        mine = [row for row in rows if row["task"] == task]
        plot = curves(
            [_line(row, row["label"] + end, name) for row in mine for name, end in (("", ""), ("tail_", ", last"))],
            x_label="context length (tokens)",
            y_label="bits per byte",
            description=f"Bits per byte by context length on {task}, two lines per model.",
            log_x=True,
            markers=True,
        )
        last = mine[0]["points"][-1]
        few = min(point["tokens"] for point in mine[0]["points"])
        counted = f"{few:,} to {last['tokens']:,}" if few < last["tokens"] else f"the same {few:,}"
        told = f"{task}: {counted} tokens of {last['documents']} documents at every length. “last”: the last {mine[0]['tail']:,} tokens"
        plots.append(figure(plot, f"{told} of each window."))
        notes += [tag("p", f"{task}: {mine[0]['note']}")] if mine[0]["note"] else []
    numbers = folded("The numbers", _grid(point_lines(rows), models, "Perplexity per token."))
    return section("By context length", tag("div", *plots, cls="pair"), *notes, numbers)


def _line(row: Row, label: str, prefix: str) -> Curve:
    estimates = [point[f"{prefix}bits_per_byte"] for point in row["points"]]
    return Curve(label, [point["length"] for point in row["points"]], *([e[part] for e in estimates] for part in ("value", "low", "high")))


def _recall(rows: Sequence[Row], models: Sequence[str]) -> Html | None:
    rows = [row for row in rows if "accuracy" in row]
    if not rows:
        return None
    limits = {
        f"{row['task']}: chance {100 * one['chance']:.3g} %, ceiling {100 * one['ceiling']:.2f} %"
        for row in rows
        for one in row["accuracy"][:1]
    }
    return section("Recall", _grid(point_lines(rows), models, f"In brackets 95 % intervals. {'; '.join(sorted(limits))}."))


def _missing(results: Sequence[Results]) -> Html | None:
    missing = [entry for one in results for entry in one["missing"]]
    if not missing:
        return None
    return section("Not measured", table(["task", "model", "why"], [(m["task"], m["model"], m["reason"]) for m in missing]))


def _sources(results: Sequence[Results], rows: Sequence[Row]) -> Html:
    parts: list[Html] = []
    for one in results:
        versions = ", ".join(f"{name} {version}" for name, version in one["versions"].items())
        facts = [(name, one[name]) for name in ("command", "commit", "device")] + [("versions", versions), ("time", one["time"])]
        parts.append(fields(facts))
    models = {
        row["label"]: (row["label"], row["model"], f"{row['parameters']:,}", row["dtype"], tag("code", row["fingerprint"])) for row in rows
    }
    parts.append(table(["model", "saved as", "parameters", "type", "fingerprint"], models.values()))
    runs = [(row["task"], row["label"], tag("code", row["run"]), row["command"], row["commit"], row["time"]) for row in rows]
    return section(
        "Where it comes from", *parts, folded("Every row", table(["task", "model", "run", "command", "commit", "measured"], runs))
    )
