"""`fastweights compare --task NAME`: mixers trained from scratch on a task, for every learning rate and seed; a table, a report, rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from fastweights.recipes.folder import alone_in
from fastweights.recipes.pool import cores, run_jobs
from fastweights.recipes.task_job import TaskJob
from fastweights.recipes.task_settings import TaskCompareSettings
from fastweights.records import append_rows, provenance, rows_by_run
from fastweights.report import write_report
from fastweights.report.terminal import task_table

Row = dict[str, Any]


def plan_jobs(settings: TaskCompareSettings) -> list[TaskJob]:
    """The grid: for each learning rate and seed every mixer.

    Raises:
        ValueError: a mixer or option that does not exist, or a device that is not there; before anything runs.
    """
    preset = settings.preset
    device = settings.device if settings.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda': torch sees no GPU here; device='cpu' works without")
    jobs = [
        TaskJob(
            preset=settings.task,
            settings=preset,
            label=label,
            learning_rate=rate,
            seed=seed,
            folder=settings.folder,
            device=device,
            save=settings.save_models,
        )
        for rate in preset.learning_rates
        for seed in preset.seeds
        for label in settings.mixers
    ]
    with torch.device("meta"):
        for job in jobs[: len(settings.mixers)]:
            job.model()  # a mixer that cannot be built fails now, not after the others have been trained
    return jobs


def run_plan(settings: TaskCompareSettings, jobs: Sequence[TaskJob], console: Console) -> dict[str, Any]:
    """Do what is not done yet, then write results.json and report.html, and print the table; returns what results.json holds.

    Raises:
        ValueError: another process is at work in the folder, or it holds what is no row.
        KeyboardInterrupt: interrupted; what is finished is kept, and the same call goes on.
    """
    with alone_in(settings.folder):
        return _run_plan(settings, jobs, console)


def _run_plan(settings: TaskCompareSettings, jobs: Sequence[TaskJob], console: Console) -> dict[str, Any]:
    folder, rows_file = settings.folder, settings.folder / "results.jsonl"
    if settings.restart:
        _forget(jobs, rows_file)
    rows = rows_by_run(rows_file)
    to_do = [job for job in jobs if job.key not in rows]
    processes = settings.processes or (1 if jobs[0].device == "cuda" else min(len(to_do), cores()))
    for task, _ in jobs[0].settings.train:
        console.print(f"Training on {task}", highlight=False)
    console.print(f"{len(jobs)} runs, {len(jobs) - len(to_do)} of them finished already.", highlight=False)

    def on_row(row: Row) -> None:
        append_rows(rows_file, [row])
        rows[row["run"]] = row

    if to_do:
        run_jobs(to_do, processes=processes, threads=max(1, cores() // max(1, processes)), console=console, on_row=on_row)
    done = [rows[job.key] for job in jobs]
    results = {"kind": "task comparison", "preset": settings.task, "standings": standings(done), "rows": done}
    results |= provenance(device=jobs[0].device)
    (folder / "results.json").write_text(json.dumps(results, indent=1))
    write_report([results], folder / "report.html")
    console.print(task_table(results))
    console.print(f"Report: {folder / 'report.html'}   Rows and provenance: {folder / 'results.json'}", highlight=False)
    return results


def best_rates(rows: Sequence[Row]) -> dict[str, float]:
    """For each mixer the learning rate with the best mean accuracy in training over its seeds; what is measured in the end has no say."""
    found: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        found.setdefault(row["label"], {}).setdefault(row["learning_rate"], []).append(row["train_accuracy"])
    return {label: max(rates, key=lambda rate: float(np.mean(rates[rate]))) for label, rates in found.items()}


def standings(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry a mixer, of its best learning rate: its mean over the seeds on everything measured.

    ``low`` and ``high`` of a measurement are the worst and the best seed; with a single one, the ends of its confidence interval.
    """
    rates = best_rates(rows)
    return [_standing([row for row in rows if row["label"] == label and row["learning_rate"] == rate]) for label, rate in rates.items()]


def _standing(runs: Sequence[Row]) -> dict[str, Any]:
    first = runs[0]
    measured: dict[tuple[Any, ...], list[Row]] = {}
    for run in runs:
        for row in run["accuracy"]:
            measured.setdefault((evaluation_name(row), row["stratum"], row["value"]), []).append(row)
    return {
        "label": first["label"],
        "learning_rate": first["learning_rate"],
        "seeds": [run["seed"] for run in runs],
        "parameters": first["parameters"],
        "state_floats": first["state_floats"],
        "train_accuracy": float(np.mean([run["train_accuracy"] for run in runs])),
        "steps": float(np.mean([run["steps"] for run in runs])),
        "training": first["training"],
        "accuracy": [_joined(found) for found in measured.values()],
    }


def _joined(found: Sequence[Row]) -> dict[str, Any]:
    one, values = found[0], [row["accuracy"] for row in found]
    low, high = (one["low"], one["high"]) if len(found) == 1 else (min(values), max(values))
    kept = {name: one[name] for name in ("task", "length", "chance", "ceiling", "stratum", "value")}
    pairs = {"pairs": one["pairs"]} if "pairs" in one else {}
    return {"evaluation": evaluation_name(one), **kept, **pairs, "accuracy": float(np.mean(values)), "low": low, "high": high}


def evaluation_name(row: Row) -> str:
    """``length 64, pairs 4``: what tells one measured task of a preset from the others."""
    return ", ".join(f"{name} {row[name]}" for name in ("length", "pairs") if name in row)


def _forget(jobs: Sequence[TaskJob], rows_file: Path) -> None:
    keys = {job.key for job in jobs}
    kept = [row for run, row in rows_by_run(rows_file).items() if run not in keys]
    rows_file.unlink(missing_ok=True)
    append_rows(rows_file, kept)
    for job in jobs:
        job.checkpoint.unlink(missing_ok=True)
