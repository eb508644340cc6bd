"""A comparison of mixers: the table, the curves, the samples, and where every number came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastweights.report.html import Html, escape, fields, figure, folded, section, table, tag
from fastweights.report.numbers import interval
from fastweights.report.plots import Curve, curves

Entry = Mapping[str, Any]
WIDE = (11.2, 3.6)
"""Inches of a figure over the whole width; the default is half of it, so that text has one size."""


def sections(results: Mapping[str, Any]) -> Sequence[Html]:
    """The parts of a page for results of kind `comparison`."""
    entries = results["summary"]
    names = [_name(entry, results) for entry in entries]
    return [
        _verdict(results, entries, names),
        _by_context(results, entries, names),
        _over_training(results, entries, names),
        _samples(entries, names),
        _sources(results),
    ]


def _name(entry: Entry, results: Mapping[str, Any]) -> str:
    return entry["label"] if len(results["settings"]["sizes"]) == 1 else f"{entry['label']} ({entry['size']})"


def _spread(entries: Sequence[Entry]) -> str:
    if len(entries[0]["seeds"]) > 1:
        return f"Intervals are 95 %, over {len(entries[0]['seeds'])} seeds."
    return (
        "Intervals are 95 %, over documents; a difference is taken document by document, which is why it is surer than the numbers it is"
        " the difference of. They say what other text would change, not what another seed would: train more seeds for that."
    )


def _verdict(results: Mapping[str, Any], entries: Sequence[Entry], names: Sequence[str]) -> Html:
    settings, text = results["settings"], results["text"]
    first, last = entries[0]["lengths"][0]["length"], entries[0]["lengths"][-1]["length"]
    values = [entry["validation"]["bits_per_byte"]["value"] for entry in entries]
    rows = [
        (
            name,
            f"{entry['parameters']:,}",
            interval(entry["validation"]["bits_per_byte"]),
            interval(entry["validation"]["difference"], signed=True) if entry["validation"]["difference"] else "–",
            f"{entry['validation']['perplexity']:.3f}",
            interval(entry["lengths"][-1]["bits_per_byte"]),
            f"{entry['tokens_per_second']:,.0f}",
        )
        for name, entry in zip(names, entries, strict=True)
    ]
    known = f" ({text['train_tokens']:,} tokens)" if "train_tokens" in text else ""
    columns = ["mixer", "parameters", f"bits per byte, context {first}", f"difference to {names[0]}", "perplexity per token"]
    columns += [f"bits per byte, context {last} *", "tokens/s in training"]
    seen = entries[0]["validation"]
    return section(
        "Result",
        tag(
            "p",
            f"Each model read {entries[0]['tokens']:,} tokens of {', '.join(settings['data'])}{known}, the same"
            f" in the same order, in windows of {settings['train']['sequence_length']} tokens. Lower is better.",
        ),
        table(
            columns,
            rows,
            strong=values.index(min(values)),
            note=f"Context {first}: {seen['tokens']:,} tokens of {seen['documents']} validation documents."
            f" * on the longer documents of the figure below. {_spread(entries)}",
        ),
    )


def _by_context(results: Mapping[str, Any], entries: Sequence[Entry], names: Sequence[str]) -> Html:
    points = entries[0]["lengths"]
    lengths = [point["length"] for point in points]
    trained = [(float(results["settings"]["train"]["sequence_length"]), "training length")]

    def lines(pick, of: Sequence[Entry], labels: Sequence[str]) -> list[Curve]:
        found = []
        for label, entry in zip(labels, of, strict=True):
            scores = [pick(point) for point in entry["lengths"]]
            values, low, high = ([score[part] for score in scores] for part in ("value", "low", "high"))
            found.append(Curve(label, lengths, values, low, high))
        return found

    absolute = curves(
        lines(lambda point: point["bits_per_byte"], entries, names),
        x_label="context length (tokens)",
        y_label="bits per byte",
        description="Bits per byte by context length, one line per mixer.",
        log_x=True,
        markers=True,
        marks=trained,
    )
    content = [
        figure(
            absolute,
            f"The same {points[0]['tokens']:,} tokens of {points[0]['documents']} documents at every length, cut into windows of that"
            " length at whose beginning the memory is empty: what changes is only how much could be read before.",
        )
    ]
    others = [(entry, name) for entry, name in zip(entries, names, strict=True) if entry["lengths"][0]["difference"]]
    if others:
        relative = curves(
            [Curve(names[0], lengths, [0.0] * len(lengths)), *lines(lambda p: p["difference"], *zip(*others, strict=True))],
            x_label="context length (tokens)",
            y_label="difference (bits per byte)",
            description=f"Difference in bits per byte to {names[0]} by context length.",
            log_x=True,
            markers=True,
            marks=trained,
        )
        seeds = len(entries[0]["seeds"])
        sure = f"of the mixers, over {seeds} seeds" if seeds > 1 else "between these very models; another seed may move it"
        content.append(figure(relative, f"Below zero is better than {names[0]}. A band that does not touch zero is a difference {sure}."))
    position = curves(
        [
            Curve(name, *zip(*((_middle(p), p["value"], p["low"], p["high"]) for p in entry["positions"]), strict=True))
            for name, entry in zip(names, entries, strict=True)
        ],
        x_label="place in the document (tokens)",
        y_label="bits per byte",
        description="Bits per byte by place in the window, one line per mixer.",
        log_x=True,
        marks=trained,
        size=WIDE,
    )
    content.append(figure(position, f"The windows of {lengths[-1]} tokens again, by place: the first tokens have little to go on."))
    grid = tag("div", *content[:2], cls="pair") if others else content[0]
    return section("By context length", grid, content[-1], _length_table(entries, names, lengths))


def _length_table(entries: Sequence[Entry], names: Sequence[str], lengths: Sequence[int]) -> Html:
    rows = [(name, *(interval(point["bits_per_byte"]) for point in entry["lengths"])) for name, entry in zip(names, entries, strict=True)]
    tails = [(name, *(interval(p["tail_bits_per_byte"]) for p in entry["lengths"])) for name, entry in zip(names, entries, strict=True)]
    columns = ["mixer", *(f"{length:,}" for length in lengths)]
    return folded(
        "The numbers",
        table(columns, rows, note="Bits per byte over all tokens, by context length."),
        table(columns, tails, note=f"Bits per byte over the last {lengths[0]:,} tokens of each window."),
    )


def _middle(position: Mapping[str, Any]) -> float:
    return (position["begin"] * position["end"]) ** 0.5 if position["begin"] else position["end"] / 2


def _over_training(results: Mapping[str, Any], entries: Sequence[Entry], names: Sequence[str]) -> Html:
    plot = curves(
        [Curve(name, *zip(*entry["training"], strict=True)) for name, entry in zip(names, entries, strict=True)],
        x_label="tokens read",
        y_label="bits per token",
        description="Training loss by tokens read, one line per mixer.",
        size=WIDE,
    )
    return section("Training", figure(plot, "Loss on the text being read, averaged between points."))


def _samples(entries: Sequence[Entry], names: Sequence[str]) -> Html:
    content = []
    for name, entry in zip(names, entries, strict=True):
        text = tag("pre", tag("b", entry["sample"]["prompt"]), entry["sample"]["text"])
        content.append(tag("div", tag("h3", name), text))
    lead = tag("p", "What each model writes after the prompt (in colour), sampled with the same seed.")
    return section("Samples", lead, tag("div", *content, cls="pair"))


def _sources(results: Mapping[str, Any]) -> Html:
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    facts = [("command", results["command"]), ("commit", results["commit"]), ("device", results["device"]), ("versions", versions)]
    facts += [("time", results["time"]), ("seeds", ", ".join(map(str, results["settings"]["seeds"])))]
    rows = [
        (
            row["label"],
            row["size"],
            row["seed"],
            tag("code", row["run"]),
            f"{row['seconds']:.0f} s",
            row["commit"],
            row["time"],
        )
        for row in results["rows"]
    ]
    runs = table(["mixer", "size", "seed", "run", "training", "commit", "finished"], rows)
    commands = {row["command"] for row in results["rows"]} - {results["command"]}
    earlier = [tag("p", "Some rows were made by earlier commands:"), *(tag("pre", c) for c in sorted(commands))] if commands else []
    settings = [(f"{group}.{name}" if group else name, _setting(value)) for group, name, value in _flat(results["settings"])]
    return section("Where it comes from", fields(facts), *earlier, folded("Every run", runs), folded("Every setting", fields(settings)))


def _flat(settings: Mapping[str, Any], group: str = ""):
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, name)
        else:
            yield group, name, value


def _setting(value: Any) -> Html:
    if isinstance(value, (list, tuple)):
        return escape(" ".join(map(str, value)) or "–")
    return escape("–" if value is None else repr(value) if value == "" else value)
