"""`fastweights compare --task NAME`: mixers trained from scratch on a task, for every learning rate and seed; a table, a report, rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fastweights.recipes.folder import alone_in
from fastweights.recipes.pool import cores, run_jobs
from fastweights.recipes.task_job import TaskJob
from fastweights.recipes.task_settings import TaskCompareSettings
from fastweights.recipes.task_standings import standings
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


def _forget(jobs: Sequence[TaskJob], rows_file: Path) -> None:
    keys = {job.key for job in jobs}
    kept = [row for run, row in rows_by_run(rows_file).items() if run not in keys]
    rows_file.unlink(missing_ok=True)
    append_rows(rows_file, kept)
    for job in jobs:
        job.checkpoint.unlink(missing_ok=True)
