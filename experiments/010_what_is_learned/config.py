"""What the models of experiment 007 have learned: gates, CCQ's strength and what it removes, and where the keys of needles lie."""

from __future__ import annotations

import json
import os
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.recipes.settings import Variant
from fastweights.report.plots import Curve, beside, curves
from fastweights.train.documents import SourceFile, read_documents
from fastweights.train.tokenizer import document_token_id, load_tokenizer

QUESTION = "What do η, the decays and λ learn, layer by layer, and do needle keys avoid the directions that CCQ removes?"
TRAINED = "007_language_25m"
WITH_CCQ = [("gdn+ccq", 0), ("gdn+ccq", 1), ("kla+ccq", 0), ("gla+ccq", 0), ("gdn+ccq-learned", 0), ("kla+ccq-learned", 0)]
MODELS = [*WITH_CCQ, ("gdn", 0), ("kla", 0)]
"""(label, seed) of 007's trainings. The second seed says what is chance, the raw twins what is there without CCQ."""
UNTRAINED = {"gdn-untrained": "gdn", "kla-untrained": "kla"}
"""What is there before anything is learned: models of 007's shape with the weights that seed 0 draws."""
LOOKED_AT = [*MODELS, *((label, 0) for label in UNTRAINED)]
DATA = "FASTWEIGHTS_DATA"
PROMPTS, TOP = 32, 4
LENGTH = 1024
"""Tokens of a prompt."""
LOOKS = {
    "prose": f"--needle s_niah --needle-prompts {PROMPTS} --needle-length {LENGTH} --top {TOP}",
    "code": f"--tokens {2 * LENGTH} --top {TOP}",
}
"""By text: the first prompt is the prose in which gates are looked at."""
ESSAYS, CODE = 200_000, 20_000
"""Characters: of the haystack, and at least of the file of code."""
LANES = 8
"""Most of a look is loading: they share the card."""
QUANTITIES = ("beta", "forgotten", "lambda", "lambda_trace", "removed", "removed_top", "query_top", "residual_share")
ORIGIN = ("command", "commit", "device", "versions", "time")
Row = dict[str, Any]
Layers = list[Row]


def run(lab: Any) -> None:
    folder, here = lab.folder.parent / TRAINED, lab.place("")
    places = {_name(*model): _model(folder, *model) for model in MODELS}
    missing = [name for name, place in places.items() if not place.is_dir()]
    if missing:
        print(f"Not looked at: {', '.join(missing)}. `python experiments/run.py {TRAINED[:3]}` trains them.", flush=True)
    _write_texts(lab.folder)
    models = {name: here.parent / place.relative_to(folder.parent) for name, place in places.items() if name not in missing}
    for label in UNTRAINED:
        models[_name(label, 0)] = here / "untrained" / label
        _write_untrained(label, lab.folder / "untrained" / label)
    looks = []
    for name, model in models.items():
        for text, settings in LOOKS.items():
            if not (lab.folder / f"{name}-{text}" / "results.json").exists():
                looks.append([(f"{name}-{text}", f"inspect {model} {here / text}.txt {settings}")])
    failed = lab.together(looks, LANES)
    if failed:
        raise SystemExit(f"not done: {', '.join(failed)}")


def _write_untrained(label: str, folder: Path) -> None:
    """A model as a training begins, with its tokenizer."""
    if not (folder / "config.json").exists():
        trainings = runpy.run_path(str(Path(__file__).parent.parent / TRAINED / "config.py"))["run"].__globals__
        tokenizer = load_tokenizer(str(Path(os.environ[DATA]) / "tokenizer"))
        special = dict.fromkeys(("bos_token_id", "eos_token_id"), document_token_id(tokenizer))
        mixer = Variant.parse(trainings["MIXERS"][UNTRAINED[label]])
        torch.manual_seed(0)
        model = FastWeightsForCausalLM(FastWeightsConfig(**mixer.config(trainings["SHAPE"], vocab_size=len(tokenizer), **special)))
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)


def _model(folder: Path, label: str, seed: int) -> Path:
    """Where a training of the experiment in this folder leaves its model."""
    return folder / _name(label, seed) / "model"


def _name(label: str, seed: int) -> str:
    return f"{label}-seed{seed}"


def _write_texts(folder: Path) -> None:
    """The essays in which RULER hides needles, and a file of Python that no model was trained on."""
    if DATA not in os.environ:
        raise SystemExit(f"{DATA} does not name the folder of the texts that docs/evaluation.md lists")
    data = Path(os.environ[DATA])
    code = data / "corpus" / "python" / "test.parquet"
    texts = {
        "prose": json.loads((data / "eval" / "essays.json").read_text(encoding="utf-8"))["text"][:ESSAYS],
        "code": next(one.text.decode() for one in read_documents(SourceFile(code, code.name)) if len(one.text) > CODE),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")


def rows(folder: Path) -> list[Row]:
    """A row a model, text and layer of what the gates do, numbers a head; and a row a model and layer of its needles."""
    kept = []
    for label, seed in LOOKED_AT:
        for text in LOOKS:
            look = folder / f"{_name(label, seed)}-{text}"
            if (look / "results.json").exists():
                results = json.loads((look / "results.json").read_text(encoding="utf-8"))
                origin = {"label": label, "seed": seed, "text": text} | {name: results[name] for name in ORIGIN}
                kept += [_gates(layer, results) | origin for layer in results["view"]["layers"]]
                kept += [_needle(layer) | origin for layer in results["view"]["layers"] if layer["needle"]]
    return kept


def _gates(layer: Row, results: Row) -> Row:
    """Of a layer: by quantity, means over tokens, a number a head."""
    heads = {name: _short(layer["tokens"][name]["heads"]) for name in QUANTITIES if name in layer["tokens"]}
    return {"kind": "gates", "layer": layer["layer"], "n": results["tokens"], "heads": heads}


def _needle(layer: Row) -> Row:
    """Of a layer: by quantity, means over prompts, a number a head, and how sure differences are."""
    needle = layer["needle"]
    found = {name: _short(needle[name]) for name in needle if name not in ("prompts", "tokens")}
    return {"kind": "needle", "layer": layer["layer"], "n": needle["prompts"], "tokens": needle["tokens"], **found}


def _short(x: Any) -> Any:
    """Four digits are enough."""
    if isinstance(x, dict):
        return {name: _short(part) for name, part in x.items()}
    return [_short(part) for part in x] if isinstance(x, list) else x if x is None else float(f"{x:.4g}")


def _models(rows: list[Row], kind: str, text: str) -> Iterator[tuple[str, Layers]]:
    """Name and layers of each model that has rows of a kind; the seed is named where it is not 0."""
    for label, seed in LOOKED_AT:
        found = [row for row in rows if (row["kind"], row["text"], row["label"], row["seed"]) == (kind, text, label, seed)]
        if found:
            yield label if seed == 0 else f"{label}, seed {seed}", sorted(found, key=lambda row: row["layer"])


def answer(rows: list[Row]) -> str:
    layers = [row for row in rows if row["kind"] == "needle" and row["label"] not in UNTRAINED]
    control = [row["difference"]["projection"] for row in rows if row["kind"] == "needle" and row["label"] in UNTRAINED]
    removed = [_mean(row["heads"]["removed"]) for row in rows if row["kind"] == "gates" and "removed" in row["heads"]]
    apart = [row["difference"]["projection"] for row in layers]
    less = sum(_below(one["haystack"]["mean"]) for one in apart)
    more = sum(one["haystack"]["mean"]["low"] > 0 for one in apart)
    passage = sum(_below(one["passage"]["mean"]) for one in apart)
    words = (
        f"needle keys lie less on the {TOP} largest key directions than the keys around them in {less} of {len(layers)} layers of trained "
        f"models, more in {more}, less than an ordinary passage in {passage} (95 % intervals over {PROMPTS} prompts that leave out 0)"
    )
    if control:
        words += f"; in {sum(_below(one['haystack']['mean']) for one in control)} of {len(control)} layers of untrained ones"
    return words + (f"; CCQ takes {100 * min(removed):.1f} to {100 * max(removed):.1f} % of the query" if removed else "")


def _below(estimate: Row) -> bool:
    return estimate["high"] < 0


def _mean(heads: list[float]) -> float:
    return sum(heads) / len(heads)


def table(rows: list[Row]) -> str:
    count = 1 + max(row["layer"] for row in rows)
    lines = [f"| | model | {' | '.join(f'layer {n}' for n in range(count))} |", "|---" * (count + 2) + "|"]
    cells: list[tuple[str, str, str, Callable[[Row], str]]] = [
        ("needle − haystack, ‰", "needle", "prose", _apart),
        ("query kept, needle − haystack, ‰", "needle", "prose", _kept),
        ("memory lasts, tokens", "gates", "prose", _lasts),
        ("memory lasts, code", "gates", "code", _lasts),
        ("β or η", "gates", "prose", _beta),
        ("λ, λ·tr Σ", "gates", "prose", _lambda),
        ("removed, %", "gates", "prose", _removed),
        ("removed, code", "gates", "code", _removed),
    ]
    for name, kind, text, cell in cells:
        for model, layers in _models(rows, kind, text):
            found = [cell(row) for row in layers]
            lines += [f"| {name} | {model} | {' | '.join(found)} |"] if any(found) else []
    note = (
        f"Prose and needles: essays, {LENGTH:,} tokens; code: {2 * LENGTH:,}. First, the share of a key's squared length on the {TOP} "
        "largest directions of Σ, needle keys less haystack keys, in thousandths, mean over heads, ± half of the 95 % interval over "
        "prompts; in brackets, in how many prompts the needle has less than an ordinary passage as long. Then how much more of the "
        "asking query's scores with needle keys than with haystack keys the read keeps. How long a memory lasts is 1 over the mean of "
        "−log a: the median head of the shorter-lived half of the heads / of the longer-lived; β of the same halves, means. λ and λ·tr Σ, "
        "means. Removed: ‖λΣq‖/‖q‖; in brackets which percent of the squared length of that, and of the query, lies on those "
        f"{TOP} directions."
    )
    return "\n".join([*lines, "", note, ""])


def _apart(row: Row) -> str:
    found = row["difference"]["projection"]
    return f"{_thousandths(found['haystack']['mean'])} ({100 * found['passage']['below']:.0f} %)"


def _kept(row: Row) -> str:
    found = row["difference"].get("survives_query")
    return _thousandths(found["haystack"]["mean"]) if found else ""


def _thousandths(estimate: Row) -> str:
    return f"{1000 * estimate['value']:+.0f} ± {500 * (estimate['high'] - estimate['low']):.0f}"


def _halves(row: Row, name: str) -> list[list[float]]:
    """Means over tokens of a quantity, of the shorter-lived half of the heads and of the longer-lived."""
    order = sorted(range(len(row["heads"]["forgotten"])), key=lambda head: -row["heads"]["forgotten"][head])
    values = [row["heads"][name][head] for head in order]
    return [values[: len(values) // 2], values[len(values) // 2 :]]


def _lasts(row: Row) -> str:
    return " / ".join(f"{1 / half[len(half) // 2]:,.3g}" for half in _halves(row, "forgotten"))


def _beta(row: Row) -> str:
    return " / ".join(f"{_mean(half):.2f}" for half in _halves(row, "beta")) if "beta" in row["heads"] else ""


def _lambda(row: Row) -> str:
    return ", ".join(f"{_mean(row['heads'][name]):.2f}" for name in ("lambda", "lambda_trace")) if "lambda" in row["heads"] else ""


def _removed(row: Row) -> str:
    if "removed" not in row["heads"]:
        return ""
    share, of_removed, of_query = (100 * _mean(row["heads"][name]) for name in ("removed", "removed_top", "query_top"))
    return f"{share:.1f} ({of_removed:.0f}, {of_query:.0f})"


def figure(rows: list[Row]) -> str:
    apart, removed = [], []
    for name, layers in _models(rows, "needle", "prose"):
        found = [row["difference"]["projection"]["haystack"]["mean"] for row in layers]
        x = [row["layer"] for row in layers]
        apart.append(Curve(name, x, *([one[end] for one in found] for end in ("value", "low", "high"))))
    for name, layers in _models(rows, "gates", "prose"):
        if "removed" in layers[0]["heads"]:
            shares = [100 * _mean(row["heads"]["removed"]) for row in layers]
            removed.append(Curve(name, [row["layer"] for row in layers], shares))
    names: dict[str, Any] = {"x_label": "layer", "markers": True, "integers": True}
    figures = []
    if apart:
        needle = f"needle − haystack on {TOP} key directions"
        figures.append(curves(apart, **names, y_label=needle, zero=True, description="Where needle keys lie, by layer, a line a model."))
    if removed:
        taken = "removed from the query, %"
        figures.append(curves(removed, **names, y_label=taken, description="What CCQ removes, by layer, a line a model."))
    return str(
        beside(figures, description="Needle keys against haystack keys, and what CCQ removes of the query, by layer, a line a model.")
    )
