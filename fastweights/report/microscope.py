"""What a microscope saw: writes, state, reads and needles, models side by side."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastweights.report.html import Html, fields, figure, folded, section, table, tag
from fastweights.report.numbers import interval
from fastweights.report.plots import Curve, Heat, curves, heat_map

Results = Mapping[str, Any]
Layer = Mapping[str, Any]
LINES = 8
"""Layers drawn as lines in one figure, at most; more are thinned out evenly."""
COLUMNS = {
    "key_norm": "‖k‖",
    "beta": "β",
    "corrected": "corrected β‖k̂‖²",
    "residual_share": "residual / value",
    "decay": "decay a",
    "lambda": "λ",
    "lambda_trace": "λ·tr Σ",
    "removed": "removed from q",
}
"""The quantities of the table, in the head of a column."""


def sections(results: Sequence[Results]) -> Sequence[Html]:
    """The parts of a page for all results of kind `microscope`."""
    results = _named(results)
    seen = [one for one in results if one["view"]]
    parts = [_table(seen), _writes(seen), _states(seen), _reads(seen), _needles(seen)] if seen else []
    return [part for part in (*parts, _depths(results), _sources(results)) if part is not None]


def _named(results: Sequence[Results]) -> list[Results]:
    """Each with a ``name``: its mixers, its label, or both label and text, whichever first tells it from the others."""
    names = [(", ".join(dict.fromkeys(one["mixers"])), one["label"], f"{one['label']} on {one['source']}") for one in results]
    columns = list(zip(*names, strict=True))
    chosen = [next((n for n, all_ in zip(own, columns, strict=True) if all_.count(n) == 1), own[-1]) for own in names]
    return [{**one, "name": name} for one, name in zip(results, chosen, strict=True)]


def layer_rows(result: Results) -> list[tuple[Layer, list[float | None]]]:
    """Each layer, and the means of `COLUMNS`, then of ‖S‖_F and effective rank after the last chunk; None where there is none."""
    rows = []
    for layer in result["view"]["layers"]:
        means = [layer["tokens"][name]["mean"] if name in layer["tokens"] else None for name in COLUMNS]
        last = [layer["states"][name][-1] for name in ("frobenius", "effective_rank")]
        rows.append((layer, [*means, *(sum(heads) / len(heads) for heads in last)]))
    return rows


def real_length(rows: Sequence[Mapping[str, Any]], length: int) -> float:
    """Mean tokens of a depth map's prompts of a nominal length: a haystack of long sentences falls short of it."""
    found = [row["prompt_tokens"] for row in rows if row["length"] == length]
    return sum(found) / len(found)


def number(x: float | None) -> str:
    """Three digits; a dash for what is not there."""
    return "–" if x is None else f"{x:.3g}" if 1e-3 <= abs(x) < 1e4 or x == 0 else f"{x:.1e}"


def _table(seen: Sequence[Results]) -> Html:
    rows = []
    for one in seen:
        for layer, numbers in layer_rows(one):
            ranks = layer["states"]["numerical_rank"][-1]
            rows.append((f"{_mixer(one, layer)} {layer['layer']}", *map(number, (*numbers, sum(ranks) / len(ranks)))))
        rows += [(f"{one['name']} {layer}: softmax, no memory", *["–"] * (len(COLUMNS) + 3)) for layer in one["without_memory"]]
    read = "; ".join(dict.fromkeys(f"{one['tokens']:,} tokens of {one['source']}" for one in seen))
    note = (
        f"Means over all heads and recorded tokens of {read}; ‖S‖ and rank after the last one. “Corrected” is the share of the residual"
        " that a write takes away: below 1 it under-corrects, above 1 it overshoots. “Residual / value” is how wrong the memory is just"
        " before the write: 0 knows the value already, 1 is no better than empty. What a rule does not have is a dash."
    )
    meaning = [(name, text) for name, text in seen[0]["meaning"].items()]
    return section(
        "What the memories do",
        table(["layer", *COLUMNS.values(), "‖S‖", "effective rank", "numerical rank"], rows, note=note),
        folded("Every quantity, and what it means", fields(meaning)),
    )


def _mixer(one: Results, layer: Layer) -> str:
    """The model's name, and the layer's mixer where its layers differ."""
    return one["name"] if len(set(one["mixers"])) == 1 else f"{one['name']}: {layer['mixer']}"


def _maps(seen: Sequence[Results], name: str, label: str, caption: str, centre: float | None = None) -> list[Html]:
    """One heat map a model, all with the same colours."""
    having = [one for one in seen if any(name in layer["maps"] for layer in one["view"]["layers"])]
    every = [x for one in having for layer in one["view"]["layers"] for row in layer["maps"].get(name, ()) for x in row]
    found = []
    for one in having:
        layers = [layer for layer in one["view"]["layers"] if name in layer["maps"]]
        begins = one["view"]["begins"]
        plot = heat_map(
            Heat(
                [row for layer in layers for row in layer["maps"][name]],
                [(f"layer {layer['layer']}", len(layer["maps"][name])) for layer in layers],
                (min(every), max(every)),
                centre,
            ),
            x_label="token",
            value_label=label,
            description=f"{label} of {one['name']} by head and token.",
            extent=(0.0, float(begins[-1] + (begins[-1] - begins[-2] if len(begins) > 1 else 1))),
        )
        found.append(figure(plot, Html(f"{tag('b', one['name'])}: {caption} A line a head, grouped by layer.")))
    return found


def _lines(seen: Sequence[Results], draw: Callable[[Results, Layer], Curve | None], caption: str, **options: Any) -> list[Html]:
    """One figure a model with a line a layer, all with the same y axis."""
    drawn = [[line for layer in one["view"]["layers"] if (line := draw(one, layer)) is not None] for one in seen]
    y_range = _range([line for lines in drawn for line in lines])
    found = []
    for one, lines in zip(seen, drawn, strict=True):
        if not lines:
            continue
        shown = lines if len(lines) <= LINES else [lines[round(i * (len(lines) - 1) / (LINES - 1))] for i in range(LINES)]
        some = "" if len(shown) == len(lines) else f" {LINES} of {len(lines)} layers."
        plot = curves(shown, description=f"{options['y_label']} of {one['name']}, a line a layer.", y_range=y_range, **options)
        found.append(figure(plot, Html(f"{tag('b', one['name'])}: {caption}{some}")))
    return found


def _range(lines: Sequence[Curve]) -> Sequence[float]:
    values = [y for line in lines for part in (line.y, line.low, line.high) for y in part if y is not None]
    return (min(values), max(values)) if values else ()


def _grids(*kinds: Sequence[Html]) -> list[Html]:
    """The figures of each kind side by side; single ones in a row share a grid."""
    alone = itertools.groupby((figures for figures in kinds if figures), key=lambda figures: len(figures) == 1)
    rows = [row for single, run in alone for row in ([list(itertools.chain(*run))] if single else run)]
    return [tag("div", *row, cls="half") for row in rows]


def _over_heads(layer: Layer, x: Sequence[int], heads: Sequence[Sequence[float]]) -> Curve:
    """A line of means over heads; its band is from the least to the greatest."""
    means = [sum(h) / len(h) for h in heads]
    return Curve(f"layer {layer['layer']}", x, means, [min(h) for h in heads], [max(h) for h in heads])


def _writes(seen: Sequence[Results]) -> Html:
    def against(name: str) -> Callable[[Results, Layer], Curve | None]:
        def draw(one: Results, layer: Layer) -> Curve | None:
            curve = layer["by_key_norm"].get(name)
            return curve and Curve(f"layer {layer['layer']}", curve["x"], curve["mean"], curve["low"], curve["high"])

        return draw

    norms = [x for one in seen for layer in one["view"]["layers"] for curve in layer["by_key_norm"].values() for x in curve["x"]]
    options: dict[str, Any] = {"x_label": "‖k‖", "log_x": min(norms) > 0 and max(norms) > 8 * min(norms), "markers": True}
    band = "tokens in groups of equal size by ‖k‖; bands from the 10th to the 90th percentile."
    parts = _grids(
        _maps(seen, "corrected", "share corrected", "the share of the residual that each write takes away.", centre=1.0),
        _lines(seen, against("corrected"), band, y_label="share corrected", **options),
        _maps(seen, "residual_share", "residual / value", "how wrong the memory is just before each write."),
        _lines(seen, against("residual_share"), band, y_label="residual / value", **options),
    )
    return section("Writes", *parts)


def _states(seen: Sequence[Results]) -> Html:
    def over_time(name: str) -> Callable[[Results, Layer], Curve]:
        return lambda one, layer: _over_heads(layer, one["view"]["looks"], layer["states"][name])

    band = "mean over heads; bands from the least to the greatest."
    parts = _grids(
        _maps(seen, "decay", "decay a", "the forget gate; 1 forgets nothing."),
        _lines(seen, over_time("effective_rank"), band, x_label="tokens read", y_label="effective rank of S"),
        _lines(seen, over_time("frobenius"), band, x_label="tokens read", y_label="‖S‖"),
    )
    return section("What is kept", *parts)


def _reads(seen: Sequence[Results]) -> Html | None:
    def spectrum(one: Results, layer: Layer) -> Curve | None:
        if "sigma_top" not in layer["states"]:
            return None
        columns = list(zip(*layer["states"]["sigma_top"], strict=True))
        return _over_heads(layer, range(1, len(columns) + 1), columns)

    band = "the largest after the last token. Mean over heads; bands from the least to the greatest."
    options: dict[str, Any] = {"x_label": "rank among the eigenvalues of Σ", "y_label": "eigenvalue", "markers": True, "integers": True}
    parts = _grids(
        _maps(seen, "removed", "removed from q", "the share of the query that CCQ takes away, ‖λΣq‖/‖q‖."),
        _maps(seen, "lambda_trace", "λ·tr Σ", "a bound on λ‖Σ‖; the read contracts up to 2."),
        _lines(seen, spectrum, band, **options),
    )
    return section("Reads", *parts) if parts else None


def _needles(seen: Sequence[Results]) -> Html | None:
    asked = [one for one in seen if one["needle"]]
    if not asked:
        return None
    kinds = (
        ("survives_query", "kept of the query", "how much of the asking query's scores with these keys survives I − λΣ, root mean square."),
        ("survives_direction", "kept of the direction", "1 − λ uᵀΣu over the directions u of these keys."),
        ("projection", "share on top directions", None),
    )
    kept: list[list[Html]] = []
    for name, label, caption in kinds:
        having = [(one, [layer for layer in one["view"]["layers"] if name in layer["needle"]]) for one in asked]
        having = [(one, layers) for one, layers in having if layers]
        y_range = _range([_needle_line(layers, name, kind) for _, layers in having for kind in ("needle", "haystack")])
        figures = []
        for one, layers in having:
            top = len(layers[0]["needle"]["projection"]["needle"])
            lines = [_needle_line(layers, name, kind) for kind in ("needle", "haystack")]
            words = caption or f"the share of a key's squared length along the {top} largest eigenvectors of Σ."
            plot = curves(
                lines,
                x_label="layer",
                y_label=label,
                description=f"{label}, needle against haystack, of {one['name']} by layer.",
                markers=True,
                integers=True,
                y_range=y_range,
            )
            prompts = layers[0]["needle"].get("prompts", 1)
            over = "heads" if prompts == 1 else f"{prompts} prompts and heads"
            told_of = f"{words} Mean over {over}; bands from the least to the greatest head."
            figures.append(figure(plot, Html(f"{tag('b', one['name'])}: {told_of}")))
        kept.append(figures)
    told = []
    for one in asked:
        spans, answer = one["needle"]["spans"], one["needle"]["answer"]
        prompts = one["view"]["layers"][0]["needle"].get("prompts", 1)
        name = f"{one['name']}, first of {prompts} prompts" if prompts > 1 else one["name"]
        text = f"{name}: needle at tokens {spans['begin']:,} to {spans['end'] - 1:,} of {one['tokens']:,}"
        if answer:
            verdict = "said by greedy decoding" if answer["retrieved"] else "not said by greedy decoding"
            text += f"; its value is {verdict}, −log p {answer['nats']:.2f} nats for {answer['tokens']} tokens"
        told.append(tag("p", f"{text}."))
    return section("Needle and haystack", *told, *_grids(*kept), *_over_prompts(asked))


def needle_differences(layers: Sequence[Layer]) -> list[tuple[Layer, dict[str, str]]]:
    """Each layer, and by quantity how far needle keys are from haystack keys in the mean over heads, with the interval over prompts; empty
    where there is one prompt."""
    found = []
    for layer in layers:
        apart = layer["needle"].get("difference", {}) if layer["needle"].get("prompts", 1) > 1 else {}
        found.append((layer, {name: interval(one["haystack"]["mean"], signed=True) for name, one in apart.items()}))
    return found


def _over_prompts(asked: Sequence[Results]) -> list[Html]:
    """A table a model that was given several prompts."""
    names = {"survives_query": "kept of the query", "survives_direction": "kept of the direction", "projection": "share on top directions"}
    found = []
    for one in asked:
        rows = needle_differences(one["view"]["layers"])
        shown = [name for name in names if any(name in cells for _, cells in rows)]
        if not shown:
            continue
        lines = []
        for layer, cells in rows:
            below = layer["needle"]["difference"]["projection"]["passage"]["below"]
            lines.append((str(layer["layer"]), *(cells.get(name, "–") for name in shown), f"{100 * below:.0f} %"))
        note = (
            f"{one['name']}, {rows[0][0]['needle']['prompts']} prompts: needle keys less haystack keys, means over heads, ± half of the"
            " 95 % interval over prompts; and in how many prompts the needle has less of its length on the top directions than an ordinary"
            " passage as long as it."
        )
        found.append(table(["layer", *(names[name] for name in shown), "below a passage"], lines, note=note))
    return found


def _needle_line(layers: Sequence[Layer], name: str, kind: str) -> Curve:
    found = [layer["needle"][name][kind] for layer in layers]
    heads = [one[-1] for one in found] if name == "projection" else found
    means = [sum(h) / len(h) for h in heads]
    return Curve(f"{kind} keys", [layer["layer"] for layer in layers], means, [min(h) for h in heads], [max(h) for h in heads])


def _depths(results: Sequence[Results]) -> Html | None:
    mapped = [one for one in results if one["depth_map"]]
    if not mapped:
        return None
    every = [row["nats_per_token"] for one in mapped for row in one["depth_map"]]
    figures, rows = [], []
    for one in mapped:
        cells = {(row["depth"], row["length"]): row for row in one["depth_map"]}
        depths, lengths = sorted({d for d, _ in cells}), sorted({length for _, length in cells})
        grid = [[cells.get((d, length)) for length in lengths] for d in depths]
        plot = heat_map(
            Heat([[cell and cell["nats_per_token"] for cell in line] for line in grid], [(f"{d} %", 1) for d in depths], _ends(every)),
            x_label="length of the prompt, and its real mean (tokens)",
            y_label="depth of the needle",
            value_label="nats a token of the value",
            description=f"Needles of {one['name']} by length and depth.",
            columns=[f"{length:,}\n({real_length(one['depth_map'], length):,.0f})" for length in lengths],
            texts=[[f"{100 * cell['accuracy']:.0f} %" if cell else "" for cell in line] for line in grid],
            size=(5.4, 1.4 + 0.38 * len(depths)),
        )
        words = "in each cell the share of values that greedy decoding says; the colour is −log p of a token of the value, lower is better."
        figures.append(figure(plot, Html(f"{tag('b', one['name'])}: {words}")))
        rows += [
            (
                one["name"],
                f"{row['length']:,}",
                f"{row['prompt_tokens']:,.0f}",
                f"{row['depth']} %",
                row["samples"],
                f"{100 * row['accuracy']:.1f} [{100 * row['low']:.1f}, {100 * row['high']:.1f}]",
                f"{row['nats']:.2f}",
                f"{row['nats_per_token']:.3f}",
            )
            for row in one["depth_map"]
        ]
    columns = ["model", "length", "real prompt", "depth", "samples", "accuracy (%)", "nats", "nats a token"]
    numbers = folded("The numbers", table(columns, rows, note="In brackets a 95 % interval over samples."))
    return section("Needle by length and depth", *_grids(figures), numbers)


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _sources(results: Sequence[Results]) -> Html:
    parts = []
    for one in results:
        versions = ", ".join(f"{name} {version}" for name, version in one["versions"].items())
        facts = [("model", one["label"]), ("mixers", ", ".join(dict.fromkeys(one["mixers"])))]
        facts += [("text", f"{one['tokens']:,} tokens of {one['source']}")] if one["view"] else []
        facts += [(name, one[name]) for name in ("command", "commit", "device")] + [("versions", versions), ("time", one["time"])]
        settings = [(name, str(value)) for name, value in one["settings"].items()]
        parts += [fields(facts), folded("Every setting", fields(settings))]
    return section("Where it comes from", *parts)
