"""One model of a comparison, from nothing to its result row. Runs in a process of its own or in the caller's."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fastweights.evaluate.perplexity import LengthCurve, LengthScore, score_lengths
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.recipes.pool import Report
from fastweights.recipes.settings import CompareSettings, EvaluateSettings
from fastweights.records import provenance
from fastweights.train.checkpoints import keep_newest
from fastweights.train.corpus import Corpus, open_corpus
from fastweights.train.tokenizer import document_token_id, load_tokenizer
from fastweights.train.trainer import train


@dataclass(frozen=True)
class Text:
    """A part of a cached corpus, by reference."""

    folder: Path
    split: str | None

    def open(self) -> Corpus:
        corpus = open_corpus(self.folder)
        return corpus if self.split is None else corpus.split(self.split)


@dataclass(frozen=True)
class Job:
    """A model to train and measure. Plain data: it travels to another process."""

    label: str
    size: str
    seed: int
    config: dict[str, Any]
    """Arguments of `FastWeightsConfig`."""
    parameters: int
    folder: Path
    """Where the model and its checkpoints live; its name ends in a hash of all that training depends on."""
    key: str
    """A hash of all that the row depends on."""
    training: Text
    validation: Text
    settings: CompareSettings
    device: str

    @property
    def name(self) -> str:
        """As people are told of it: the mixer, and what else tells it from the others."""
        parts = [self.label]
        if len(self.settings.sizes) > 1:
            parts.append(self.size)
        if len(self.settings.seeds) > 1:
            parts.append(f"seed {self.seed}")
        return " ".join(parts)

    def run(self, report: Report, should_stop: Callable[[], bool]) -> dict[str, Any] | None:
        """Train, measure, sample: `run_job`."""
        return run_job(self, report, should_stop)


def run_job(job: Job, report: Report, should_stop: Callable[[], bool]) -> dict[str, Any] | None:
    """Train (or go on, or load what is finished), measure, sample. None if `should_stop` ended it: a later call goes on."""
    tokenizer = load_tokenizer(job.settings.tokenizer)
    if not (job.folder / "model").exists() and not _train(job, tokenizer, report, should_stop):
        return None
    model = FastWeightsForCausalLM.from_pretrained(job.folder / "model", device_map=job.device).eval()
    history = json.loads((job.folder / "training.json").read_text())

    def report_or_stop(*progress) -> None:
        report(*progress)
        if should_stop():
            raise _Stopped

    try:
        measured = measure(model, job.validation.open(), job.settings.evaluate, job.settings.train.sequence_length, report_or_stop)
        report_or_stop("sampling", 0, 1, "")
    except _Stopped:
        return None
    text = sample(model, tokenizer, job.settings.evaluate, job.seed)
    report("done", 1, 1, f"{measured['validation']['bits_per_byte']['value']:.3f} bits")
    settings = job.settings
    tokens, seconds = settings.train.steps * settings.train.batch_tokens, history[-1]["seconds"]
    return {
        "kind": "language model",
        "run": job.key,
        "label": job.label,
        "size": job.size,
        "parameters": job.parameters,
        "config": job.config,
        "train": dataclasses.asdict(settings.train),
        "text": {"data": list(settings.data), "validation": list(settings.validation), "tokenizer": settings.tokenizer}
        | {"key": job.training.open().key},
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "training": [[entry["step"] * settings.train.batch_tokens, entry["loss"] / math.log(2)] for entry in history],
        **measured,
        "sample": text,
        **provenance(device=job.device, seed=job.seed),
    }


class _Stopped(Exception):
    """A measurement was left; it is begun anew, as it takes little time."""


def _train(job: Job, tokenizer: PreTrainedTokenizerBase, report: Report, should_stop: Callable[[], bool]) -> bool:
    torch.manual_seed(job.seed)
    model = FastWeightsForCausalLM(FastWeightsConfig(**job.config))
    settings = job.settings.train

    def on_step(step: int, logs: dict[str, Any]) -> None:
        report("training", step, settings.steps, f"{logs['loss'] / math.log(2):.2f} bits" if "loss" in logs else "")

    report("training", 0, settings.steps, "")
    training = train(
        model,
        job.training.open(),
        settings,
        folder=job.folder,
        seed=job.seed,
        device=job.device,
        on_step=on_step,
        should_stop=should_stop,
    )
    if not training.finished:
        return False
    (job.folder / "training.json").write_text(json.dumps(training.history))
    part = job.folder / "model.part"
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    part.rename(job.folder / "model")  # whole or not at all
    keep_newest(job.folder, 0)
    return True


def measure(model: PreTrainedModel, corpus: Corpus, wanted: EvaluateSettings, sequence_length: int, report: Report) -> dict[str, Any]:
    """Bits per byte at the training length, by context length and by position, as parts of a result row."""
    documents = [corpus[i] for i in range(len(corpus))]
    rate = corpus.bytes / (corpus.lengths - 1).clip(min=1)  # the document token stands for no byte, and is never scored
    contexts = wanted.lengths(sequence_length)

    def score(lengths: list[int], tokens: int, done: int) -> LengthCurve:
        return score_lengths(
            model,
            documents,
            lengths=lengths,
            tokens=tokens,
            bytes_per_token=rate,
            tail=sequence_length,
            on_progress=lambda scored, _: report("measuring", done + scored, total, ""),
        )

    total = wanted.validation_tokens + len(contexts) * wanted.length_tokens
    validation = score(contexts[:1], wanted.validation_tokens, 0).lengths[0]
    curve = score(contexts, wanted.length_tokens, wanted.validation_tokens)
    return {
        "validation": _plain(validation),
        "lengths": [_plain(point) for point in curve.lengths],
        "positions": [{"begin": p.begin, "end": p.end, "bits_per_byte": p.bits_per_byte._asdict()} for p in curve.positions],
    }


def _plain(score: LengthScore) -> dict[str, Any]:
    return score._asdict() | {name: getattr(score, name)._asdict() for name in ("bits_per_byte", "tail_bits_per_byte")}


def sample(model: FastWeightsForCausalLM, tokenizer: PreTrainedTokenizerBase, wanted: EvaluateSettings, seed: int) -> dict[str, str]:
    """A text that goes on from `wanted.prompt`: the prompt and what the model adds."""
    ids = tokenizer(wanted.prompt, add_special_tokens=False, return_tensors="pt").input_ids.long()
    ids = torch.cat([torch.tensor([[document_token_id(tokenizer)]]), ids], dim=1).to(model.device)
    if wanted.sample_tokens == 0:
        return {"prompt": wanted.prompt, "text": ""}
    torch.manual_seed(seed)
    generated = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=wanted.temperature,
        top_k=0,
        max_new_tokens=wanted.sample_tokens,
        pad_token_id=document_token_id(tokenizer),
        eos_token_id=document_token_id(tokenizer),
    )
    return {"prompt": wanted.prompt, "text": str(tokenizer.decode(generated[0, ids.shape[1] :], skip_special_tokens=True))}
