"""Compare mixers: the same text in the same order, equal parameters, one row per trained model, one report."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fastweights.evaluate.perplexity import choose_stretches
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.recipes.folder import alone_in
from fastweights.recipes.job import Job, Text
from fastweights.recipes.pool import cores, run_jobs, threads_of
from fastweights.recipes.settings import CompareSettings, Variant
from fastweights.recipes.summary import summarise
from fastweights.records import append_rows, provenance, rows_by_run
from fastweights.report import write_report
from fastweights.report.terminal import comparison_table
from fastweights.train.carry import batches_of, check_carry
from fastweights.train.corpus import Corpus, load_corpus
from fastweights.train.presets import SIZES, ModelSize
from fastweights.train.tokenizer import document_token_id, load_tokenizer

TOLERANCE = 0.005
"""How far parameter counts may lie apart, relative to the largest."""
ALIGNED, WORTH = 8, 1e-3
"""Widths of MLPs are multiples of so many, which tensor cores need for rows of 16 bytes, where parameters then lie no further apart."""


@dataclass(frozen=True)
class Plan:
    """A comparison that can be run: everything that can be wrong with the settings has been looked for."""

    settings: CompareSettings
    jobs: list[Job]
    train_tokens: int
    validation_tokens: int
    validation_documents: int


def compare(settings: CompareSettings, console: Console | None = None) -> dict[str, Any]:
    """Plan, run and report; returns what results.json holds.

    Raises:
        ValueError, FileNotFoundError: settings that cannot be met, before any work.
        KeyboardInterrupt: interrupted; what is finished is kept, and the same call goes on.
    """
    console = console or Console()
    return run_plan(plan_comparison(settings), console)


def plan_comparison(settings: CompareSettings) -> Plan:
    """Load the text, match the parameters, name the runs.

    Raises:
        ValueError, FileNotFoundError: settings that cannot be met.
    """
    tokenizer = load_tokenizer(settings.tokenizer)
    variants = [Variant.parse(label) for label in settings.mixers]
    sizes = {name: settings.change.apply(SIZES[name]) for name in settings.sizes}
    special = dict.fromkeys(("bos_token_id", "eos_token_id"), document_token_id(tokenizer))
    configs = {name: equal_parameters(variants, size, len(tokenizer), special) for name, size in sizes.items()}

    device = settings.device if settings.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda': torch sees no GPU here; device='cpu' works without")
    corpus = load_corpus(settings.data, tokenizer)
    if settings.validation:
        held_out = load_corpus(settings.validation, tokenizer)
        texts = (Text(corpus.folder, None), Text(held_out.folder, None))
    else:
        texts = (Text(corpus.folder, "train"), Text(corpus.folder, "validation"))
    training, validation = (text.open() for text in texts)
    _check_enough_text(settings, training, validation)
    if settings.train.carry_memory:
        for config, _ in (made for by_label in configs.values() for made in by_label.values()):
            check_carry(FastWeightsConfig(**config), by_number=True)

    jobs = []
    for size, by_label in configs.items():
        for seed in settings.seeds:
            for label, (config, parameters) in by_label.items():
                trained = [config, dataclasses.asdict(settings.train), training.key, seed]
                measured = [*trained, dataclasses.asdict(settings.evaluate), validation.key]
                name = f"{_file_name(label)}-{size}-seed{seed}-{_hash(trained)}"
                jobs.append(
                    Job(label, size, seed, config, parameters, settings.out / "models" / name, _hash(measured), *texts, settings, device)
                )
    return Plan(settings, jobs, training.total, validation.total, len(validation))


def equal_parameters(
    variants: Sequence[Variant], size: ModelSize, vocab_size: int, special: dict[str, int]
) -> dict[str, tuple[dict[str, Any], int]]:
    """(arguments of `FastWeightsConfig`, parameters) by label: MLPs are widened until all have as many parameters as the largest.

    Raises:
        ValueError: a mixer or option that does not exist, or counts that cannot be made equal to within `TOLERANCE`.
    """

    def config(variant: Variant, width: int) -> dict[str, Any]:
        return variant.config(dataclasses.replace(size, intermediate_size=width), vocab_size=vocab_size, **special)

    width = size.intermediate_size
    counts = {variant.label: count_parameters(config(variant, width)) for variant in variants}
    most = max(counts.values())
    unit = 3 * size.hidden_size * size.num_hidden_layers  # parameters of one more unit in every MLP
    matched = {}
    for variant in variants:
        exact = width + (most - counts[variant.label]) / unit
        aligned = ALIGNED * round(exact / ALIGNED)
        fits = exact > width and aligned >= max(1, width) and abs(aligned - exact) * unit <= WORTH * most
        wider = config(variant, aligned if fits else round(exact))
        parameters = count_parameters(wider)
        if abs(parameters - most) > TOLERANCE * most:
            raise ValueError(f"{variant.label} cannot have {most:,} parameters, only {parameters:,}: take a larger size")
        matched[variant.label] = wider, parameters
    return matched


def count_parameters(config: dict[str, Any]) -> int:
    """Of a model that is never made."""
    with torch.device("meta"):
        return sum(p.numel() for p in FastWeightsForCausalLM(FastWeightsConfig(**config)).parameters())


def run_plan(plan: Plan, console: Console) -> dict[str, Any]:
    """Do what is not done yet, then write results.json and report.html, and print the table.

    Raises:
        ValueError: another process is at work in the folder, or it holds what is no row.
    """
    with alone_in(plan.settings.out):
        return _run_plan(plan, console)


def _run_plan(plan: Plan, console: Console) -> dict[str, Any]:
    settings, jobs = plan.settings, plan.jobs
    rows_file = settings.out / "results.jsonl"
    if settings.restart:
        _forget(jobs, rows_file)
    finished = rows_by_run(rows_file)
    to_do = [job for job in jobs if job.key not in finished]
    processes = settings.processes or (1 if jobs[0].device == "cuda" else min(len(to_do), cores()))
    threads = threads_of(jobs[0].device, processes)
    _print_plan(plan, len(jobs) - len(to_do), console)

    try:
        if to_do:
            run_jobs(to_do, processes=processes, threads=threads, console=console, on_row=lambda row: append_rows(rows_file, [row]))
    except KeyboardInterrupt:
        finished = rows_by_run(rows_file)
        done = sum(job.key in finished for job in jobs)
        console.print(f"Interrupted with {done} of {len(jobs)} runs finished. The same command goes on from here.", highlight=False)
        raise
    rows = rows_by_run(rows_file)
    results = {
        "kind": "comparison",
        "settings": _jsonable(dataclasses.asdict(settings)),
        "text": {
            "train_tokens": plan.train_tokens,
            "validation_tokens": plan.validation_tokens,
            "validation_documents": plan.validation_documents,
        },
        "summary": summarise([rows[job.key] for job in jobs]),
        "rows": [rows[job.key] for job in jobs],
        **provenance(device=jobs[0].device),
    }
    (settings.out / "results.json").write_text(json.dumps(results, indent=1))
    write_report([results], settings.out / "report.html")
    console.print(comparison_table(results))
    console.print(f"Report: {settings.out / 'report.html'}   Rows and provenance: {settings.out / 'results.json'}", highlight=False)
    return results


def _check_enough_text(settings: CompareSettings, training: Corpus, validation: Corpus) -> None:
    batches_of(training, settings.train)
    longest = settings.lengths[-1]
    try:
        choose_stretches(validation.lengths.tolist(), longest, longest)
    except ValueError as error:
        raise ValueError(
            f"the validation text is too short for contexts of longest={settings.evaluate.longest} times"
            f" sequence_length={settings.train.sequence_length}: {error}"
        ) from None


def _print_plan(plan: Plan, finished: int, console: Console) -> None:
    settings, train = plan.settings, plan.settings.train
    tokens = train.steps * train.batch_tokens
    console.print(
        f"{plan.train_tokens:,} tokens of text to train on, {plan.validation_tokens:,} in {plan.validation_documents} documents to validate"
        f" on. Each model reads {tokens:,} tokens ({tokens / plan.train_tokens:.2g} epochs) in {train.steps} steps.",
        highlight=False,
    )
    for job in plan.jobs:
        if job.seed == settings.seeds[0]:
            width = job.config["intermediate_size"]
            console.print(f"  {job.label:<24}{job.size:>6}  {job.parameters:>12,} parameters, MLP width {width}", highlight=False)
    if finished:
        console.print(f"{finished} of {len(plan.jobs)} runs are finished already (restart does them again).", highlight=False)


def _forget(jobs: Sequence[Job], rows_file: Path) -> None:
    for job in jobs:
        shutil.rmtree(job.folder, ignore_errors=True)
    keys = {job.key for job in jobs}
    kept = [row for run, row in rows_by_run(rows_file).items() if run not in keys]
    rows_file.unlink(missing_ok=True)
    append_rows(rows_file, kept)


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]


def _file_name(label: str) -> str:
    return re.sub(r"[^\w.+=-]", "_", label)


def _jsonable(settings: dict[str, Any]) -> dict[str, Any]:
    return settings | {"out": str(settings["out"])}
