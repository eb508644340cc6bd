"""What can be measured of a saved model: a language task, needles of a length, a length curve, a task of recall it was trained on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from lm_eval.api.task import Task
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastweights.evaluate.accuracy import accuracy
from fastweights.evaluate.harness.model import HarnessModel
from fastweights.evaluate.harness.needles import SAMPLES, Needle, load_needle, splitter
from fastweights.evaluate.harness.scores import run_task
from fastweights.evaluate.harness.tasks import LocalFile, Unavailable, go_offline_if_the_hub_is_out_of_reach, load_task
from fastweights.evaluate.perplexity import score_lengths
from fastweights.recipes.evaluate_settings import EvalSettings
from fastweights.recipes.evaluate_text import tokenise
from fastweights.recipes.task_presets import TASK_PRESETS
from fastweights.train.hub import HUB, HubText

Row = dict[str, Any]
Progress = Callable[[int, int], None]
"""Told (done, in all) of whatever a measurement counts in."""
TAIL = 2048
"""Tokens at the end of each window that a curve scores apart."""


@dataclass(frozen=True)
class Subject:
    """A loaded model."""

    label: str
    """As people are told of it."""
    name: str
    """As it was given: a folder, or a name on the hub."""
    fingerprint: str
    """A hash of its weights and configuration."""
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None

    def need_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise Unavailable(f"{self.name} has no tokenizer; give one by --tokenizer")
        return self.tokenizer

    def for_harness(self, settings: EvalSettings, progress: Progress, *, cut: Literal["left", "middle"]) -> HarnessModel:
        harness = HarnessModel(
            self.model,
            self.need_tokenizer(),
            batch_size=settings.batch_size,
            max_length=settings.max_length,
            begin=settings.document_token,
        )
        harness.cut, harness.on_progress = cut, progress
        return harness


@runtime_checkable  # the shape checker of the tests asks
class Item(Protocol):
    """One thing to measure. Plain data; ``repr`` tells two apart."""

    @property
    def name(self) -> str: ...
    @property
    def group(self) -> str: ...
    def source(self, settings: EvalSettings) -> str:
        """What the data are, for the key of the row: the content of a local file, or a name."""

    def measure(self, subject: Subject, settings: EvalSettings, progress: Progress) -> Row:
        """The measured part of a row. Raises Unavailable where it cannot be measured here."""


@dataclass(frozen=True)
class Language:
    """A task of the harness."""

    name: str
    metrics: tuple[str, ...] = ()
    """Those to show, the main one first; none: the first of the task's own."""
    group: str = "tasks"
    files: tuple[str, ...] = ()
    """Further names of its file in the data folder."""
    note: str = ""
    """What a reader must know of a score on that file."""
    cut: Literal["left", "middle"] = "left"
    local: bool = False
    """Only from a file."""

    def file(self, settings: EvalSettings) -> Path | None:
        return find(settings.data, *self.files, f"{self.name}.jsonl", f"{self.name}.parquet")

    def source(self, settings: EvalSettings) -> str:
        return _hash_of(path) if (path := self.file(settings)) else "hub"

    def measure(self, subject: Subject, settings: EvalSettings, progress: Progress) -> Row:
        path = self.file(settings)
        if path is None and self.local:
            raise Unavailable(f"put {(*self.files, f'{self.name}.jsonl')[0]} into {_folder(settings)}")
        if path is None:
            _ask_hub()
        task = load_task(self.name, file=LocalFile(path) if path else None)
        data = {"file": path.name, "sha256": _hash_of(path)} if path else {"hub": str(task.DATASET_PATH), "name": task.DATASET_NAME}
        return _of_harness(task, subject, settings, progress, cut=self.cut, metrics=self.metrics) | {
            "data": data,
            "note": self.note if path else "",
        }


@dataclass(frozen=True)
class Needles:
    """RULER's single needle, in one variant at one length."""

    needle: Needle
    group: str = "needles"

    @property
    def name(self) -> str:
        return f"{self.needle.task}_{self.needle.length}"

    def source(self, settings: EvalSettings) -> str:
        return _hash_of(path) if self.needle.variant > 1 and (path := find(settings.data, "essays.json", "essays.txt")) else "hub"

    def measure(self, subject: Subject, settings: EvalSettings, progress: Progress) -> Row:
        essays = find(settings.data, "essays.json", "essays.txt")
        if essays is None and self.needle.variant > 1:
            _ask_hub()
        task = load_needle(self.needle, subject.need_tokenizer(), essays=essays, samples=min(settings.limit or SAMPLES, SAMPLES))
        data = {"file": essays.name, "sha256": _hash_of(essays)} if essays and self.needle.variant > 1 else {"hub": "generated"}
        measured = _of_harness(task, subject, settings, progress, metrics=(str(self.needle.length),), cut="left")
        measured |= {"data": data, "splitter": splitter(), **self.needle._asdict()}
        fewest, mean, most = measured["prompt_tokens"]
        short = mean < 0.7 * (self.needle.length - 128)
        return measured | {"note": f"prompts fall short of the length: {mean:,.0f} tokens ({fewest:,} to {most:,})" if short else ""}


@dataclass(frozen=True)
class Curve:
    """Perplexity and bits per byte by context length, over all tokens and the last `TAIL`."""

    name: str
    lengths: tuple[int, ...]
    files: tuple[str, ...] = ()
    """Names in the data folder."""
    given: str | HubText | None = None
    """Where else the text is: a source of `read_texts`."""
    group: str = "curves"

    def text(self, settings: EvalSettings) -> str | HubText | None:
        path = find(settings.data, *self.files)
        return str(path) if path else self.given

    def source(self, settings: EvalSettings) -> str:
        path = find(settings.data, *self.files)
        if path is None and isinstance(self.given, str) and Path(self.given).is_file():
            path = Path(self.given)
        return f"{_hash_of(path) if path and path.is_file() else self.text(settings)}, {settings.tokens} tokens"

    def measure(self, subject: Subject, settings: EvalSettings, progress: Progress) -> Row:
        text = self.text(settings)
        if text is None:
            where = f"put {self.files[0]} into {_folder(settings)}" if self.files else "give one by --text"
            raise Unavailable(f"there is no text: {where}")
        if isinstance(text, HubText) or text.startswith(HUB):
            _ask_hub()
        longest = max(self.lengths)
        if settings.max_length is not None and longest > settings.max_length:
            raise Unavailable(f"a context of {longest:,} tokens is more than max_length={settings.max_length:,}")
        found = tokenise(text, subject.need_tokenizer(), longest=longest, tokens=settings.tokens)
        curve = score_lengths(
            subject.model,
            found.documents,
            lengths=self.lengths,
            tokens=settings.tokens,
            bytes_per_token=found.bytes_per_token,
            tail=TAIL,
            on_progress=progress,
        )
        estimates = ("bits_per_byte", "tail_bits_per_byte")
        points = [score._asdict() | {name: getattr(score, name)._asdict() for name in estimates} for score in curve.lengths]
        data = {"text": Path(text).name if isinstance(text, str) and not text.startswith(HUB) else str(text), "sha256": found.sha256}
        note = "documents shorter than the longest context are joined, in the order of the text" if found.joined else ""
        return {"points": points, "tail": TAIL, "data": data, "note": note}


@dataclass(frozen=True)
class Trained:
    """A task of ours, on a checkpoint that was trained on it: what its preset measures."""

    preset: str
    group: str = "recall"

    @property
    def name(self) -> str:
        return self.preset

    def source(self, settings: EvalSettings) -> str:
        return repr(TASK_PRESETS[self.preset].evaluate)

    def measure(self, subject: Subject, settings: EvalSettings, progress: Progress) -> Row:
        preset = TASK_PRESETS[self.preset]
        have, need = subject.model.config.get_text_config().vocab_size, max(task.vocab_size for task in preset.evaluate)
        if have < need:
            raise Unavailable(f"the task has {need:,} tokens and the model {have:,}: it wants a checkpoint that was trained on the task")
        samples, done = settings.limit or preset.samples, 0

        def did(count: int) -> None:
            nonlocal done
            done += count
            progress(done, samples * len(preset.evaluate))

        rows = list(accuracy(subject.model, preset.evaluate, samples=samples, on_samples=did))
        return {"accuracy": rows, "samples": samples, "data": {"generated": self.preset}, "note": ""}


def find(folder: Path | None, *names: str) -> Path | None:
    """The first of the names that is in the folder, or in its folder eval."""
    if folder is None:
        return None
    places = [place / name for name in names for place in (folder, folder / "eval")]
    return next((path for path in places if path.exists()), None)


def _of_harness(
    task: Task,
    subject: Subject,
    settings: EvalSettings,
    progress: Progress,
    *,
    metrics: tuple[str, ...],
    cut: Literal["left", "middle"],
) -> Row:
    harness = subject.for_harness(settings, progress, cut=cut)
    measured = run_task(harness, task, limit=settings.limit, few_shot=settings.few_shot)
    order = {metric: place for place, metric in enumerate(metrics)}
    return {
        "scores": sorted(measured.scores, key=lambda score: order.get(score["metric"], len(order))),
        "shown": max(1, len(order)),
        "samples": measured.samples,
        "prompt_tokens": list(measured.prompt_tokens),
        "truncated": measured.truncated,
        "max_length": harness.limit,
        "document_token": harness.begin,
        "few_shot": task.get_config("num_fewshot"),
        "task_version": str(task.VERSION),
    }


def _folder(settings: EvalSettings) -> str:
    return str(settings.data) if settings.data else "a folder, and give it by --data"


@cache
def _ask_hub() -> bool:
    return go_offline_if_the_hub_is_out_of_reach()


@cache
def _hash_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
