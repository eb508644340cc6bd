"""`fastweights compare --task NAME`: mixers trained from scratch on a task, for every learning rate and seed; a table, a report, rows."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.console import Console

from fastweights.recipes.errors import CannotDo
from fastweights.recipes.folder import alone_in
from fastweights.recipes.pool import cores, run_jobs, threads_of
from fastweights.recipes.task_job import TaskJob
from fastweights.recipes.task_settings import TaskCompareSettings
from fastweights.recipes.task_standings import best_rates, standings
from fastweights.records import append_rows, provenance, rows_by_run
from fastweights.report import write_report
from fastweights.report.terminal import task_table

Row = dict[str, Any]


def plan_jobs(settings: TaskCompareSettings) -> list[TaskJob]:
    """The grid: for each mixer every learning rate and seed.

    Raises:
        ValueError: a mixer or option that does not exist, or a device that is not there; before anything runs.
    """
    preset = settings.preset
    jobs = _jobs(settings, {label: preset.learning_rates for label in settings.mixers}, preset.seeds)
    with torch.device("meta"):
        for job in jobs[:: len(preset.learning_rates) * len(preset.seeds)]:
            job.model()  # a mixer that cannot be built fails now, not after the others have been trained
    return jobs


def more_jobs(settings: TaskCompareSettings, grid: Sequence[Row]) -> list[TaskJob]:
    """Each mixer at the best rate of the grid's rows, with the seeds that are kept for that."""
    return _jobs(settings, {label: (rate,) for label, rate in best_rates(grid).items()}, settings.more_seeds)


def _jobs(settings: TaskCompareSettings, rates: Mapping[str, Sequence[float]], seeds: Sequence[int]) -> list[TaskJob]:
    device = settings.device if settings.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda': torch sees no GPU here; device='cpu' works without")
    on_gpu = device == "cuda"
    if settings.preset.precision == "tf32" and not on_gpu:
        raise ValueError(f"precision='tf32' is of a GPU's tensor cores, and device is {device!r}; take fp32 or bf16")
    graphs = on_gpu and settings.graphs
    at_once = settings.at_once or (8 if on_gpu and settings.processes <= 1 else 1)
    return [
        TaskJob(
            preset=settings.task,
            settings=settings.preset,
            label=label,
            learning_rate=rate,
            seed=seed,
            folder=settings.folder,
            device=device,
            save=settings.save_models,
            graphs=graphs,
            compile=graphs if settings.compile == "auto" else settings.compile == "on",
            at_once=at_once,
            drawers=max(1, min(4, (os.cpu_count() or 1) // (4 * max(1, settings.processes)))) if on_gpu else 0,
        )
        for label in settings.mixers
        for rate in rates[label]
        for seed in seeds
    ]


def run_plan(settings: TaskCompareSettings, jobs: Sequence[TaskJob], console: Console) -> dict[str, Any]:
    """Do what is not done yet, then write results.json and report.html, and print the table; returns what results.json holds.

    Raises:
        ValueError: another process is at work in the folder, or it holds what is no row.
        KeyboardInterrupt: interrupted; what is finished is kept, and the same call goes on.
    """
    with alone_in(settings.folder):
        return _run_plan(settings, jobs, console)


def _run_plan(settings: TaskCompareSettings, jobs: Sequence[TaskJob], console: Console) -> dict[str, Any]:
    folder = settings.folder
    ends = None if settings.minutes is None else time.monotonic() + 60 * settings.minutes
    if settings.restart:
        forget(settings, jobs)
    rows = rows_by_run(folder / "results.jsonl")
    for task, _ in jobs[0].settings.train:
        console.print(f"Training on {task}", highlight=False)
    _do(settings, jobs, rows, console, ends)
    if settings.more_seeds and all(job.key in rows for job in jobs):
        jobs = [*jobs, *more_jobs(settings, [rows[job.key] for job in jobs])]
        _do(settings, jobs, rows, console, ends)
    done = [rows[job.key] for job in jobs if job.key in rows]
    if len(done) < len(jobs):
        console.print(f"The time is up: {len(jobs) - len(done)} runs are left. The same command goes on with them.", highlight=False)
    if not done:
        raise CannotDo(f"no run was finished in minutes={settings.minutes:g}; checkpoints are kept")
    results = {"kind": "task comparison", "preset": settings.task, "standings": standings(done), "rows": done}
    results |= provenance(device=jobs[0].device)
    (folder / "results.json").write_text(json.dumps(results, indent=1))
    write_report([results], folder / "report.html")
    console.print(task_table(results))
    console.print(f"Report: {folder / 'report.html'}   Rows and provenance: {folder / 'results.json'}", highlight=False)
    return results


def _do(settings: TaskCompareSettings, jobs: Sequence[TaskJob], rows: dict[str, Row], console: Console, ends: float | None) -> None:
    """Run the jobs without a row, until ``ends`` of the clock; each row goes into the file and into ``rows``."""
    to_do = [job for job in jobs if job.key not in rows]
    console.print(f"{len(jobs)} runs, {len(jobs) - len(to_do)} of them finished already.", highlight=False)
    if not to_do:
        return

    def on_row(row: Row) -> None:
        append_rows(settings.folder / "results.jsonl", [row])
        rows[row["run"]] = row

    on_cpu = to_do[0].device == "cpu"
    processes = settings.processes or (min(len(to_do), cores()) if on_cpu and settings.at_once <= 1 else 1)
    minutes = None if ends is None else (ends - time.monotonic()) / 60
    threads = threads_of(to_do[0].device, processes)
    run_jobs(to_do, processes=processes, threads=threads, console=console, on_row=on_row, at_once=to_do[0].at_once, minutes=minutes)


def forget(settings: TaskCompareSettings, jobs: Sequence[TaskJob]) -> None:
    """Rows and checkpoints of the grid, and of more seeds at whatever rate."""
    jobs = [*jobs, *_jobs(settings, {label: settings.preset.learning_rates for label in settings.mixers}, settings.more_seeds)]
    keys, rows_file = {job.key for job in jobs}, settings.folder / "results.jsonl"
    kept = [row for run, row in rows_by_run(rows_file).items() if run not in keys]
    rows_file.unlink(missing_ok=True)
    append_rows(rows_file, kept)
    for job in jobs:
        job.checkpoint.unlink(missing_ok=True)
