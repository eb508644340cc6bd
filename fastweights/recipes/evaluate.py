"""`fastweights eval MODEL …`: measure saved models; rows as they come, a table, results.json and a report."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

import fastweights  # noqa: F401  registers our models with transformers
from fastweights.evaluate.harness.tasks import Unavailable
from fastweights.models.loading import load_config, load_whole
from fastweights.recipes.evaluate_items import Item, Row, Subject
from fastweights.recipes.evaluate_settings import EvalSettings
from fastweights.recipes.evaluate_suites import groups_of, items_of
from fastweights.recipes.folder import alone_in
from fastweights.records import append_rows, provenance, rows_by_run
from fastweights.report import write_report
from fastweights.report.evaluation import headline
from fastweights.report.terminal import evaluation_table
from fastweights.train.tokenizer import load_tokenizer

WEIGHTS = ("*.safetensors", "*.bin", "config.json", "tokenizer*.json")
"""Files of a saved folder that its results depend on."""


def load_subject(name: str, label: str, settings: EvalSettings) -> Subject:
    """A saved folder, or a name on the hub, on the device and in evaluation mode.

    Raises:
        ValueError, OSError: there is no such model, or no such device.
    """
    device = settings.device if settings.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda': torch sees no GPU here; device='cpu' works without")
    folder = _check_name(name)
    model = load_whole(AutoModelForCausalLM, name, dtype=settings.dtype, device_map=device)
    return Subject(label, name, _fingerprint(folder, model), model, _tokenizer(name, settings))


def evaluate(names: Sequence[str], settings: EvalSettings, console: Console | None = None) -> dict[str, Any]:
    """Measure every model on every item that is not measured yet; returns what results.json holds.

    What cannot be measured here is listed under ``missing``, with the reason, and does not stop the others.

    Raises:
        ValueError, OSError: a model that cannot be loaded, another process at work in the folder, or what is no row in it.
        KeyboardInterrupt: interrupted; what is finished is kept, and the same call goes on.
    """
    if not names or len(set(names)) < len(names):
        raise ValueError(f"models {list(names)}: give at least one, and none twice")
    if settings.data is not None and not settings.data.is_dir():
        raise ValueError(f"data={str(settings.data)!r} is no folder")
    for name in names:
        _check_name(name)
    with alone_in(settings.out):
        return _evaluate(names, settings, console or Console())


def _evaluate(names: Sequence[str], settings: EvalSettings, console: Console) -> dict[str, Any]:
    items, rows_file = items_of(settings), settings.out / "results.jsonl"
    earlier = {} if settings.restart else rows_by_run(rows_file)
    rows: list[Row] = []
    missing: list[dict[str, str]] = []
    device = None
    try:
        for name, label in zip(names, labels(names), strict=True):
            subject = load_subject(name, label, settings)
            device = subject.model.device.type
            for item in items:
                try:
                    key = row_key(item, subject, settings)
                    if key not in earlier:
                        earlier[key] = {"run": key} | _measure(item, subject, settings, console)
                        append_rows(rows_file, [earlier[key]])
                except (Unavailable, ValueError, OSError) as error:  # this item's text or files; the others go on
                    missing.append({"model": label, "task": item.name, "reason": str(error)})
                    console.print(f"{label}: {item.name} cannot be measured: {error}", highlight=False, markup=False)
                    continue
                rows.append(earlier[key] | {"label": label})
                console.print(f"{label}: {item.name} {headline(rows[-1])}", highlight=False, markup=False)
    except KeyboardInterrupt:
        done, total = len(rows), len(items) * len(names)
        console.print(f"Interrupted with {done} of {total} measured. The same command goes on from here.", highlight=False)
        raise
    results = {"kind": "evaluation", "suite": settings.suite, "models": labels(names), "rows": rows, "missing": missing}
    results |= {"groups": group_means(rows, groups_of(items))} | provenance(device=device)
    (settings.out / "results.json").write_text(json.dumps(results, indent=1))
    write_report([results], settings.out / "report.html")
    console.print(evaluation_table(results))
    console.print(f"Report: {settings.out / 'report.html'}   Rows and provenance: {settings.out / 'results.json'}", highlight=False)
    return results


def _measure(item: Item, subject: Subject, settings: EvalSettings, console: Console) -> Row:
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=28), TextColumn("{task.completed:,} of {task.total:,}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"{subject.label}: {item.name}", total=1)
        began = time.perf_counter()
        measured = item.measure(subject, settings, lambda done, total: bar.update(task, completed=done, total=total))
        seconds = time.perf_counter() - began
    return {
        "kind": "evaluation",
        "label": subject.label,
        "model": subject.name,
        "fingerprint": subject.fingerprint,
        "parameters": subject.model.num_parameters(),
        "dtype": str(subject.model.dtype).removeprefix("torch."),
        "task": item.name,
        "group": item.group,
        "limit": settings.limit,
        "batch_size": settings.batch_size,
        "lm_eval": lm_eval.__version__,
        "seconds": round(seconds, 2),
        **measured,
        **provenance(device=subject.model.device.type),
    }


def row_key(item: Item, subject: Subject, settings: EvalSettings) -> str:
    """A hash of all that a score depends on; the batch size and the device are no part of that."""
    chosen = [settings.limit, settings.few_shot, settings.max_length, settings.document_token, settings.tokenizer, settings.dtype]
    told = [repr(item), item.source(settings), subject.fingerprint, lm_eval.__version__, *chosen]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]


def group_means(rows: Sequence[Row], groups: dict[str, list[str]]) -> list[Row]:
    """The mean over the first metrics of each group's tasks, for every model that has them all."""
    by_model: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_model.setdefault(row["label"], {})[row["task"]] = row
    return [
        {
            "label": label,
            "group": group,
            "tasks": tasks,
            "value": sum(measured[task]["scores"][0]["value"] for task in tasks) / len(tasks),
        }
        for label, measured in by_model.items()
        for group, tasks in groups.items()
        if set(tasks) <= set(measured)
    ]


def labels(names: Sequence[str]) -> list[str]:
    """The last part of each path that says something; whole paths where two would be the same."""
    short = [Path(name).parent.name if Path(name).name == "model" else Path(name).name for name in names]
    return [label if label and short.count(label) == 1 else name for label, name in zip(short, names, strict=True)]


def _check_name(name: str) -> Path:
    """ValueError or OSError for what is neither the folder of a saved model nor may be a name on the hub."""
    folder = Path(name)
    if not folder.exists() and (name.count("/") != 1 or name.startswith((".", "/", "~"))):
        raise ValueError(f"no folder {name!r} with a saved model")
    if folder.exists() and not (folder / "config.json").exists():
        raise ValueError(f"{name} holds no config.json: give the folder that save_pretrained wrote")
    if folder.exists():
        load_config(name)  # raises for one that cannot be used
    return folder


def _tokenizer(name: str, settings: EvalSettings) -> PreTrainedTokenizerBase | None:
    if settings.tokenizer is not None:
        return load_tokenizer(settings.tokenizer)
    if Path(name).exists() and not any(Path(name).glob("tokenizer*")):
        return None
    return load_tokenizer(name)


def _fingerprint(folder: Path, model: PreTrainedModel) -> str:
    if not folder.exists():
        return str(getattr(model.config, "_commit_hash", None) or model.name_or_path)
    digest = hashlib.sha256()
    for file in sorted({path for pattern in WEIGHTS for path in folder.glob(pattern)}):
        with file.open("rb") as content:
            digest.update(f"{file.name} {hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()[:16]
