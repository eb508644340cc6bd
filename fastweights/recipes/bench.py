"""`fastweights bench prefill|decode`: how fast models read and write, how much memory they take, and how both grow with the context."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.models.loading import load_whole
from fastweights.recipes.bench_cases import PATHS, Bench, Case, groups, is_out_of_memory
from fastweights.recipes.bench_memory import (
    Peak,
    bytes_per_step,
    expected_state_bytes,
    free_bytes,
    measure_bandwidth,
    needed_bytes,
    state_bytes,
    weight_bytes,
)
from fastweights.recipes.bench_results import joined
from fastweights.recipes.bench_settings import BenchSettings, What
from fastweights.recipes.folder import alone_in
from fastweights.recipes.saved import saved_config
from fastweights.recipes.settings import Variant
from fastweights.recipes.train_presets import PRESETS
from fastweights.records import append_rows, commit, device_name, provenance, rows_by_run, versions
from fastweights.report import write_report
from fastweights.report.efficiency import headline
from fastweights.report.terminal import efficiency_tables
from fastweights.train.flops import peak_flops, training_flops
from fastweights.train.presets import SIZES, ModelSize
from fastweights.train.tokenizer import BYTES

Row = dict[str, Any]
PRESETS_ON_GPU = ("kla-0.4b", "kla+ccq-0.4b", "gdn-0.4b", "transformer-0.4b")
MIXERS_ON_CPU = ("kla", "kla+ccq", "gated_deltanet", "softmax")
"""What is measured when nothing is named."""
BYTE_VOCABULARY, PIECES = 258, 32_000


class Contender(NamedTuple):
    """A model to measure: a saved folder, or a configuration to be filled with random weights."""

    label: str
    config: FastWeightsConfig
    folder: str | None


@dataclass(frozen=True)
class Plan:
    """A benchmark that can be run: everything that can be wrong with the request has been looked for, and every choice is made."""

    what: What
    contenders: list[Contender]
    settings: BenchSettings
    """Without anything left to choose but `chunk`, `bandwidth` and `precision`."""

    @property
    def folder(self) -> Path:
        return self.settings.out / self.what


def plan_bench(what: What, models: Sequence[str], settings: BenchSettings) -> Plan:
    """Find the models, build every configuration, choose what was left open.

    Raises:
        ValueError, OSError: a model, mixer or device that does not exist.
    """
    device = settings.device if settings.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda': torch sees no GPU here; device='cpu' works without")
    gpu = device == "cuda"
    if not models and not settings.mixers:
        models, settings = (PRESETS_ON_GPU, settings) if gpu else ((), dataclasses.replace(settings, mixers=MIXERS_ON_CPU))
    contenders = [_named(model) for model in models]
    vocabulary = BYTE_VOCABULARY if settings.size.endswith("m") and settings.size != "500m" else PIECES
    for mixer in settings.mixers:
        label = f"{mixer} {settings.size}" if models else mixer
        contenders.append(Contender(label, _config(mixer, SIZES[settings.size], vocabulary), None))
    labels = [contender.label for contender in contenders]
    if twice := [label for label in dict.fromkeys(labels) if labels.count(label) > 1]:
        raise ValueError(f"{', '.join(twice)}: given more than once")
    chosen = dataclasses.replace(
        settings,
        device=device,
        lengths=settings.lengths or tuple(2**i for i in (range(12, 21) if gpu else range(8, 13))),
        batches=settings.batches or ((1, 4, 16, 64, 256) if gpu else (1, 4)),
        new_tokens=settings.new_tokens or (256 if gpu else 16),
        seconds=settings.seconds or (120.0 if gpu else 5.0),
        compile=("on" if gpu else "off") if settings.compile == "auto" else settings.compile,
    )
    if chosen.new_tokens < 2:
        raise ValueError(f"new_tokens={chosen.new_tokens}: a rate needs at least two")
    return Plan(what, contenders, chosen)


def _named(model: str) -> Contender:
    if (Path(model) / "config.json").is_file():
        config, path = saved_config(model), Path(model).resolve()
        return Contender(path.parent.name if path.name == "model" else path.name, config, model)
    if model not in PRESETS:
        raise ValueError(f"{model!r} is neither the folder of a saved model (it has no config.json) nor a preset: {', '.join(PRESETS)}")
    run = PRESETS[model].run
    return Contender(model, _config(run.mixer, run.model, BYTE_VOCABULARY if run.tokenizer == BYTES else PIECES), None)


def _config(mixer: str, size: ModelSize, vocabulary: int) -> FastWeightsConfig:
    return FastWeightsConfig(**Variant.parse(mixer).config(size, vocab_size=vocabulary))


def run_bench(plan: Plan, console: Console) -> Row:
    """Measure what is not measured yet, rows as they come; then the tables, results.json and the report. Returns what results.json holds.

    Raises:
        ValueError: another process is at work in the folder, or it holds what is no row.
        KeyboardInterrupt: interrupted; what is finished is kept, and the same call goes on.
    """
    with alone_in(plan.folder):
        return _run_bench(plan, console)


def _run_bench(plan: Plan, console: Console) -> Row:
    settings, rows_file = plan.settings, plan.folder / "results.jsonl"
    earlier = {} if settings.restart else {run: row for run, row in rows_by_run(rows_file).items() if "failed" not in row}
    bandwidth = 1e9 * settings.bandwidth or measure_bandwidth(torch.device(settings.device))
    rows: list[Row] = []
    for contender in plan.contenders:
        cases = groups(
            _full_softmax(contender.config), plan.what, settings.lengths, settings.batches, PATHS if settings.generate else PATHS[:2]
        )
        keys = {case: _key(plan, contender, case) for group in cases for case in group}
        rows += [earlier[key] for key in keys.values() if key in earlier]
        cases = [left for group in cases if (left := [case for case in group if keys[case] not in earlier])]
        if not cases:
            continue
        model = _load(contender, settings)
        bench = Bench(model, settings.chunk, settings.new_tokens, settings.seed, compile=settings.compile == "on")
        for group in cases:
            for case, measured in _measure(bench, group, plan, contender.label, console).items():
                row = _row(plan, contender, bench, case, measured, bandwidth) | {"run": keys[case]}
                append_rows(rows_file, [row])
                rows.append(row)
                console.print(headline(row), highlight=False, markup=False, soft_wrap=True)
            bench.forget()
        del model, bench
    (results,) = joined(rows)
    results |= provenance(device=settings.device, seed=settings.seed)
    (plan.folder / "results.json").write_text(json.dumps(results, indent=1))
    write_report([results], plan.folder / "report.html")
    for table in efficiency_tables(results):
        console.print(table)
    console.print(f"Report: {plan.folder / 'report.html'}   Rows and provenance: {plan.folder / 'results.json'}", highlight=False)
    return results


class Measured:
    """What is known of a case after its runs."""

    def __init__(self, device: torch.device) -> None:
        self.runs: list[dict[str, float]] = []
        self.peak = Peak(device)
        self.state_bytes = 0
        self.step_bytes = 0
        self.failed = ""


def _measure(bench: Bench, group: Sequence[Case], plan: Plan, label: str, console: Console) -> dict[Case, Measured]:
    """Run the group's cases in turns: prepare all, warm up with the shortest, then round after round, there and back."""
    settings = plan.settings
    found = {case: Measured(bench.device) for case in group}

    def attempt(case: Case, step) -> None:
        one = found[case]
        if one.failed:
            return
        try:
            step(case, one)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            one.failed = "out of memory: " + next(iter(str(error).splitlines()), type(error).__name__)
            bench.forget()
            if bench.device.type == "cuda":
                torch.cuda.empty_cache()

    def begin(case: Case, one: Measured) -> None:
        one.failed = _too_large(bench, case)
        if not one.failed:
            states = bench.prepare(case)
            one.state_bytes = state_bytes(states)
            one.step_bytes = bytes_per_step(bench.model, states, case.batch)

    def warm_up(case: Case, one: Measured) -> None:
        bench.prepare(case)
        bench.run(case, Peak(bench.device))

    def time_it(case: Case, one: Measured) -> None:
        bench.prepare(case)
        one.runs.append(bench.run(case, one.peak))

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=28), TextColumn("{task.completed} of at most {task.total} rounds"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"{label}: {plan.what}, batch {group[0].batch}", total=settings.repeats)
        for case in group:
            attempt(case, begin)
        shortest = min((case.length for case in group if not found[case].failed), default=0)
        for case in group:
            if case.length == shortest:
                attempt(case, warm_up)
        start = time.monotonic()
        for number in range(settings.repeats):
            if number and time.monotonic() - start > settings.seconds:
                break
            for case in reversed(group) if number % 2 else group:  # a load that rises meanwhile must not look like growth
                attempt(case, time_it)
            bar.advance(task)
    return found


def _too_large(bench: Bench, case: Case) -> str:
    """Why the case is not even tried; empty where it is."""
    free = free_bytes(bench.device)
    state = expected_state_bytes(bench.model, case.length)
    needed = needed_bytes(bench.model, state, case.length, case.batch, bench.chunk(case.length))
    needed += 16 * case.length * case.batch if case.path == "generate" else 0  # its ids and mask
    if free is None or needed <= free:
        return ""
    return f"needs about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"


def _row(plan: Plan, contender: Contender, bench: Bench, case: Case, measured: Measured, bandwidth: float) -> Row:
    settings, model = plan.settings, bench.model
    row: Row = {
        "kind": "efficiency",
        "what": plan.what,
        "label": contender.label,
        "mixer": ",".join(dict.fromkeys(contender.config.mixers)),
        "weights": "random" if contender.folder is None else "saved",
        "parameters": sum(p.numel() for p in model.parameters()),
        "precision": str(model.dtype).removeprefix("torch."),
        **case._asdict(),
        "chunk": bench.chunk(case.length),
        "compiled": bench.compile and case.path != "generate",
        "new_tokens": settings.new_tokens if plan.what == "decode" else 1,
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        **provenance(device=settings.device, seed=settings.seed),
    }
    if measured.failed or not measured.runs:
        return row | {"failed": measured.failed}
    medians = {name: statistics.median(run[name] for run in measured.runs) for name in measured.runs[0]}
    tokens = case.length if plan.what == "prefill" else case.batch
    row |= (
        medians
        | {f"runs_{name}": [round(run[name], 4) for run in measured.runs] for name in ("ms", "cpu_ms")}
        | {"tokens_per_second": 1e3 * tokens / medians["ms"]}
    )
    row |= {"state_bytes": measured.state_bytes, "weight_bytes": weight_bytes(model)}
    row |= {"peak_bytes": measured.peak.bytes, "peak_kind": measured.peak.kind}
    if plan.what == "prefill":
        rate = training_flops(model, case.length) / 3 * 1e3 * case.length / medians["reading_ms"]
        most = peak_flops(bench.device, "bf16" if model.dtype == torch.bfloat16 else "fp32")
        return row | {"teraflops": rate / 1e12, "share_of_peak": None if most is None else rate / most}
    floor = 1e3 * measured.step_bytes / bandwidth
    source = "given" if settings.bandwidth else "measured by a copy"
    floors = {"step_bytes": measured.step_bytes, "floor_ms": floor, "over_floor": medians["ms"] / floor}
    return row | floors | {"bandwidth_gb_s": bandwidth / 1e9, "bandwidth_source": source}


def _full_softmax(config: FastWeightsConfig) -> bool:
    return "softmax" in config.mixers and config.window_size is None


def _load(contender: Contender, settings: BenchSettings) -> FastWeightsForCausalLM:
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    if contender.folder is not None:
        dtype = dtypes.get(settings.precision, "auto")
        return load_whole(FastWeightsForCausalLM, contender.folder, dtype=dtype, device_map=settings.device)
    torch.manual_seed(settings.seed)
    dtype = dtypes[("bf16" if settings.device == "cuda" else "fp32") if settings.precision == "auto" else settings.precision]
    return FastWeightsForCausalLM(contender.config).to(settings.device, dtype).eval()  # type: ignore[arg-type]


def _key(plan: Plan, contender: Contender, case: Case) -> str:
    """A hash of all that a time depends on, this code included; the values of weights are no part of it."""
    settings = plan.settings
    chosen = [
        settings.precision,
        settings.new_tokens,
        settings.repeats,
        settings.seconds,
        settings.chunk,
        settings.compile,
        settings.bandwidth,
        settings.seed,
    ]
    told = [plan.what, contender.label, contender.config.to_json_string(), case, chosen, commit(), versions(), device_name(settings.device)]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]
