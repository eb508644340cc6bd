"""`fastweights inspect MODEL TEXT`: a saved model's memories under the microscope, and its needles by length and depth."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerBase

from fastweights.evaluate.accuracy import EVALUATION_SEED, interval
from fastweights.evaluate.microscope import STATES, TOKENS, View, inspect_memory, layers_with_memory
from fastweights.evaluate.microscope_summary import digits, summarise_view
from fastweights.evaluate.needle import Needle, NeedleKeys, find_needle, over_prompts
from fastweights.models import FastWeightsForCausalLM
from fastweights.recipes.folder import alone_in
from fastweights.recipes.inspect_settings import S_NIAH, InspectSettings
from fastweights.recipes.saved import load_saved
from fastweights.records import append_rows, provenance, rows_by_run
from fastweights.report import write_report
from fastweights.report.terminal import microscope_tables
from fastweights.tasks import SNIAH, Count, generator
from fastweights.tasks.base import IGNORE
from fastweights.tasks.s_niah import NEEDLE, PROMPT
from fastweights.train.corpus import encoder
from fastweights.train.documents import SourceFile, read_documents
from fastweights.train.tokenizer import document_token_id


class Prompt(NamedTuple):
    """A prompt of the needle task."""

    prompt: list[int]
    answer: list[int]
    needle: Needle
    """Where it is in the prompt with its answer."""


@dataclass(frozen=True)
class Slide:
    """Something to look at, ready: everything that can be wrong with the request has been looked for."""

    model: FastWeightsForCausalLM
    tokenizer: PreTrainedTokenizerBase
    label: str
    settings: InspectSettings
    source: str
    """Where the text comes from, as results say it."""
    text: str
    """Empty without a text."""
    ids: list[int]
    """What the model reads; empty when there is just a depth map to make."""
    needle: Needle | None
    prompts: list[Prompt]
    """Where the needle is the task's; ``ids`` and ``needle`` are those of the first."""
    cells: list[SNIAH]
    """The depth map's tasks, one a length and depth."""
    folder: Path


def prepare(model: str, text: str, settings: InspectSettings) -> Slide:
    """Load the model, read the text, find the needle.

    Raises:
        ValueError, OSError: what cannot be looked at, and why.
    """
    device = settings.device if settings.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda': torch sees no GPU here; device='cpu' works without")
    loaded, tokenizer = load_saved(model, device)
    source, content = read_text(text)
    asks_niah = settings.needle == S_NIAH
    if not content and not asks_niah and not settings.depth_map:
        raise ValueError(f"nothing to read: give a text, a file, --needle {S_NIAH} or --depth-map")
    if settings.needle and not asks_niah and settings.needle not in content:
        raise ValueError(f"the needle {settings.needle!r} does not occur in the text ({source or 'none was given'})")
    ids, needle, prompts = list[int](), None, list[Prompt]()
    if asks_niah:
        task = _niah(tokenizer, content, settings.needle_length, settings.needle_depth)
        task = dataclasses.replace(task, random_start=settings.needle_prompts > 1)
        prompts = list(_prompts(task, settings.needle_prompts, tokenizer))
        ids, needle = prompts[0].prompt + prompts[0].answer, prompts[0].needle
        source = f"{task}" + (f" in {source}" if content else "")
    elif content:
        ids = [document_token_id(tokenizer), *map(int, encoder(tokenizer)([content.encode()])[0])][: settings.tokens]
        if settings.needle:
            needle = _span_in_text(tokenizer, content, settings.needle, len(ids))
    if ids:
        layers_with_memory(loaded, settings.layers or None)
    cells = []
    if settings.depth_map:
        cells = [_niah(tokenizer, content, length, depth) for length in settings.lengths for depth in settings.depths]
    label = Path(model).resolve().parent.name if Path(model).name == "model" else Path(model).name
    folder = settings.out or Path("runs/inspect") / label
    return Slide(loaded, tokenizer, label, settings, source, content, ids, needle, prompts, cells, folder)


def read_text(text: str) -> tuple[str, str]:
    """(its name, the text) of a file, of which the first document counts, or of words given as they are."""
    if not text:
        return "", ""
    path = Path(os.path.expanduser(text))  # which leaves a ~ that is nobody's home
    if os.path.isdir(path):
        raise ValueError(f"{text!r} is a folder; give one file of it")
    if os.path.isfile(path):  # os.path's, for which a name too long for a file is no file
        document = next(read_documents(SourceFile(path, path.name)), None)
        if document is None or not document.text.strip():
            raise ValueError(f"there is no text in {text!r}")
        return document.name, document.text.decode()
    if len(text.split()) < 2:
        raise ValueError(f"no file {text!r} (what has at least two words is taken for the text itself)")
    return "words on the command line", text


def run(slide: Slide, console: Console) -> dict[str, Any]:
    """Look, write the files, print the tables; returns what results.json holds.

    Raises:
        ValueError: another process is at work in the folder, or it holds what is no row.
        KeyboardInterrupt: interrupted; cells of the depth map that are finished are kept, and the same call goes on.
    """
    with alone_in(slide.folder):
        return _run(slide, console)


def _run(slide: Slide, console: Console) -> dict[str, Any]:
    settings, origin = slide.settings, provenance(device=str(slide.model.device))
    results: dict[str, Any] = {
        "kind": "microscope",
        "label": slide.label,
        "mixers": list(slide.model.config.mixers),
        "source": slide.source,
        "tokens": len(slide.ids),
        "settings": dataclasses.asdict(settings) | {"out": str(slide.folder)},
        "view": None,
        "without_memory": [],
        "needle": None,
        "depth_map": None,
        "meaning": TOKENS | STATES,
        **origin,
    }
    columns = (
        TextColumn("{task.description:<14}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        if slide.ids:
            view = _view(slide, progress)
            results |= {"view": summarise_view(view), "without_memory": view.without_memory}
            _write_arrays(slide, view, origin)
        if slide.needle is not None:
            results["needle"] = {"spans": slide.needle._asdict(), "text": settings.needle, "answer": None}
        if slide.prompts:
            prompt, answer, _ = slide.prompts[0]
            found = find_needle(slide.model, prompt, answer)
            results["needle"]["answer"] = {"nats": found.nats, "tokens": len(answer), "retrieved": found.retrieved}
        if slide.cells:
            bar, cells = progress.add_task("depth map", total=len(slide.cells)), list[dict[str, Any]]()
            results["depth_map"] = cells
            try:
                for row in _depth_rows(slide, origin):
                    cells.append(row)
                    progress.update(bar, completed=len(cells))
            except KeyboardInterrupt:
                console.print(
                    f"Interrupted with {len(cells)} of {len(slide.cells)} cells of the depth map done. The same command goes on from here.",
                    highlight=False,
                )
                raise
    (slide.folder / "results.json").write_text(json.dumps(results))
    write_report([results], slide.folder / "report.html", title=f"Memory of {slide.label}")
    for layer in results["without_memory"]:
        console.print(f"Layer {layer} is softmax attention: there is no memory to look at.", highlight=False)
    for table in microscope_tables(results):
        console.print(table)
    console.print(f"Report: {slide.folder / 'report.html'}   Numbers and provenance: {slide.folder / 'results.json'}", highlight=False)
    return results


def _view(slide: Slide, progress: Progress) -> View:
    """What the microscope sees of the text, and in each layer the needle over all prompts."""
    settings = slide.settings
    common: dict[str, Any] = {"layers": settings.layers or None, "chunk": settings.chunk, "top": settings.top}
    bar = progress.add_task("reading", total=len(slide.ids))
    view = inspect_memory(
        slide.model,
        torch.tensor(slide.ids),
        **common,
        stride=settings.stride,
        rank_tolerance=settings.rank_tolerance,
        needle=slide.needle,
        on_progress=lambda done, total: progress.update(bar, completed=done),
    )
    if slide.needle is None:
        return view
    needles = [[layer.needle for layer in view.layers]]
    bar = progress.add_task("prompts", total=len(slide.prompts), completed=1, visible=len(slide.prompts) > 1)
    for prompt, answer, needle in slide.prompts[1:]:
        again = inspect_memory(slide.model, torch.tensor(prompt + answer), **common, needle=needle, needle_only=True)
        needles.append([layer.needle for layer in again.layers])
        progress.update(bar, advance=1)
    for layer, of_prompts in zip(view.layers, zip(*needles, strict=True), strict=True):
        layer.needle = over_prompts([found for found in of_prompts if found is not None])
    return view


def _niah(tokenizer: PreTrainedTokenizerBase, haystack: str, length: int, depth: int) -> SNIAH:
    """The needle task with the room for its answer that seven digits take."""
    room = len(tokenizer(" 1234567", add_special_tokens=False).input_ids) + 1
    return SNIAH(variant=2 if haystack else 1, length=length, depth=depth, new_tokens=room, haystack=haystack or None, tokenizer=tokenizer)


def _samples(task: SNIAH, count: int, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, str, list[int], list[int]]]:
    """(prompt, value, prompt tokens, answer tokens) of fresh needles, behind the token that documents begin with."""
    batch, begin = task.batch(count, generator(EVALUATION_SEED)), document_token_id(tokenizer)
    for row, labels, prompt, value in zip(batch.input_ids, batch.labels, batch.prompts, batch.values, strict=True):
        asked = (labels != IGNORE).nonzero().flatten().tolist()
        before, answer = row[: asked[0]].tolist(), row[asked].tolist()
        yield prompt, value, before if before[0] == begin else [begin, *before], answer


def _prompts(task: SNIAH, count: int, tokenizer: PreTrainedTokenizerBase) -> Iterator[Prompt]:
    for prompt, value, ids, answer in _samples(task, count, tokenizer):
        at = prompt.index(f"is: {value}.")
        begin = prompt.rindex(NEEDLE.split("{")[0], 0, at)
        question = prompt.rindex(PROMPT.split("{context}")[1].split("{")[0].strip())
        first, end, asking = _tokens_at(tokenizer, prompt, (begin, at + len(f"is: {value}."), question), special=True)
        yield Prompt(ids, answer, Needle(first, end, asking, len(ids) - 1, len(ids) + len(answer) - 1))


def _span_in_text(tokenizer: PreTrainedTokenizerBase, text: str, needle: str, T: int) -> Needle:
    at = text.index(needle)
    begin, end = _tokens_at(tokenizer, text, (at, at + len(needle)), special=False)
    if end > T - 1:
        raise ValueError(f"the needle ends at token {end}, and {T} are read: give more --tokens, or text behind it to ask with")
    return Needle(begin, end, T - 1, T - 1, T)


def _tokens_at(tokenizer: PreTrainedTokenizerBase, text: str, places: tuple[int, ...], *, special: bool) -> list[int]:
    """For each place in the text (a character) the first token that reaches beyond it, in what the model reads: behind a document token."""
    if not tokenizer.is_fast:
        raise ValueError("this tokenizer does not say which characters its tokens stand for; a needle needs a fast tokenizer")
    encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
    ends = np.maximum.accumulate([end for _, end in encoded.offset_mapping])
    shift = 0 if special and encoded.input_ids[0] == document_token_id(tokenizer) else 1
    return [shift + int(np.searchsorted(ends, place, side="right")) for place in places]


def _depth_rows(slide: Slide, origin: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row a length and depth, each appended to depth.jsonl; those that an earlier call finished are taken from there."""
    path, samples = slide.folder / "depth.jsonl", slide.settings.samples
    weights = hashlib.sha256((slide.label + json.dumps(slide.model.config.to_dict(), sort_keys=True, default=str)).encode())
    for parameter in slide.model.parameters():
        weights.update(parameter.detach().float().cpu().numpy().tobytes())
    done = rows_by_run(path)
    for task in slide.cells:
        content = f"{task}|{samples}|{hashlib.sha256(slide.text.encode()).hexdigest()}|{weights.hexdigest()}"
        key = hashlib.sha256(content.encode()).hexdigest()[:12]
        if key not in done:
            drawn = list(_samples(task, samples, slide.tokenizer))
            found = [find_needle(slide.model, ids, answer) for _, _, ids, answer in drawn]
            right = torch.tensor([one.retrieved for one in found])
            low, high = interval(Count.of(right, torch.ones(samples)))
            done[key] = {
                "kind": "needle",
                "run": key,
                "label": slide.label,
                **task.parameters(),
                "samples": samples,
                "prompt_tokens": float(np.mean([len(ids) for _, _, ids, _ in drawn])),
                "nats": float(np.mean([one.nats for one in found])),
                "nats_per_token": float(np.mean([one.nats / len(answer) for one, (*_, answer) in zip(found, drawn, strict=True)])),
                "accuracy": right.double().mean().item(),
                "low": low,
                "high": high,
                **origin,
            }
            append_rows(path, [done[key]])
        yield done[key]


def _write_arrays(slide: Slide, view: View, origin: dict[str, Any]) -> None:
    """tokens.npz: every recorded row; rows.jsonl: a row a layer, quantity and head."""
    arrays: dict[str, Any] = {"positions": view.positions, "ids": np.array(slide.ids)[view.positions], "looks": view.looks}
    rows: list[dict[str, Any]] = []
    for layer in view.layers:
        fixed = {"kind": "memory", "label": slide.label, "source": slide.source, "layer": layer.layer, "mixer": layer.mixer}
        for name, x in (layer.tokens | layer.states).items():
            arrays[f"layer{layer.layer}.{name}"] = x.astype(np.float32)
            for head, values in enumerate(x.T if x.ndim == 2 else x[..., 0].T):
                rows.append(fixed | {"head": head, "quantity": name, "meaning": (TOKENS | STATES)[name]} | _spread(values) | origin)
        needle = layer.needle or {}
        for name in needle.get("difference", ()):
            for kind in NeedleKeys.KINDS:
                for head, value in enumerate(needle[name][kind][-1] if name == "projection" else needle[name][kind]):
                    of = {"head": head, "quantity": name, "of": kind, "value": digits(value), "prompts": needle["prompts"]}
                    rows.append(fixed | of | origin)
    np.savez_compressed(slide.folder / "tokens.npz", provenance=np.array(json.dumps(origin)), **arrays)
    path = slide.folder / "rows.jsonl"
    path.unlink(missing_ok=True)
    append_rows(path, rows)


def _spread(values: np.ndarray) -> dict[str, float]:
    low, middle, high = np.percentile(values, [10, 50, 90])
    numbers = {"mean": values.mean(), "p10": low, "p50": middle, "p90": high, "last": values[-1]}
    return {name: digits(number) for name, number in numbers.items()}
