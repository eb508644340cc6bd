"""`fastweights train`: from settings to a folder with a trained, measured model, by way of any number of interruptions."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from fastweights.evaluate.perplexity import choose_stretches
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.models.loading import load_config, load_whole
from fastweights.recipes.folder import alone_in
from fastweights.recipes.job import Text, measure, sample
from fastweights.recipes.pool import Report, run_jobs, threads_of
from fastweights.recipes.settings import Variant
from fastweights.recipes.train_card import model_card
from fastweights.recipes.train_settings import TrainingRun, determining, flat
from fastweights.recipes.train_text import Mixture, Share, Validation, find_text
from fastweights.records import append_rows, provenance, read_rows
from fastweights.report.numbers import interval
from fastweights.train.carry import batches_of, check_carry
from fastweights.train.checkpoints import checkpoints, keep_newest, last_checkpoint
from fastweights.train.corpus import Corpus
from fastweights.train.documents import STDLIB
from fastweights.train.sharding import unshard
from fastweights.train.tokenizer import BYTES, document_token_id, load_tokenizer
from fastweights.train.trainer import train

SETTINGS, METRICS, RESULT, MODEL, ADAPTER = "run.json", "metrics.jsonl", "result.json", "model", "adapter"
ADAPTED = ["qkv_proj", "gate_proj", "out_proj", "up_proj", "down_proj"]
"""The projections that LoRA adapts; gates, convolutions and norms stay as they are."""


@dataclass(frozen=True)
class TrainingJob:
    """A run that can be done: everything that can be wrong with the settings has been looked for."""

    settings: TrainingRun
    config: FastWeightsConfig
    tokenizer: str
    parameters: int
    training: Text | Mixture
    validation: Validation
    device: str

    @property
    def name(self) -> str:
        return self.settings.preset

    @property
    def folder(self) -> Path:
        return self.settings.out

    def run(self, report: Report, should_stop: Callable[[], bool]) -> dict[str, Any] | None:
        """Train or go on, save the model, measure it. None if `should_stop` ended it: a later call goes on."""
        if not (self.folder / MODEL).exists() and not _train(self, report, should_stop):
            return None
        if not _is_main():
            return {}
        text = json.dumps(_result(self, report), indent=1)
        row = json.loads(text)
        _write_whole(self.folder / RESULT, text)
        (self.folder / MODEL / "README.md").write_text(model_card(row))
        report("done", 1, 1, f"{row['validation']['bits_per_byte']['value']:.3f} bits")
        return row


def plan_training(settings: TrainingRun) -> TrainingJob:
    """Load the text, build the configuration, count the parameters.

    Raises:
        ValueError, FileNotFoundError: settings that cannot be met, or a folder that holds a run of other settings.
    """
    for package in (*settings.loggers, *(["peft"] if settings.lora_rank else [])):
        if importlib.util.find_spec(package) is None:
            off = f", or --no-{package}" if package == "tensorboard" else ""
            raise ValueError(f"{package} is not installed: pip install {package}{off}")
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1 and settings.train.sharding == "fsdp2":
        raise ValueError(
            "sharding='fsdp2' shares a model out over processes, and there is one: start them by torchrun, or leave sharding out"
        )
    if settings.restart and processes > 1:
        raise ValueError(f"restart=True: of several processes one would remove what another has opened; remove {settings.out} first")
    device = settings.device if settings.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda': torch sees no GPU here; device='cpu' works without")
    name = settings.init_from or settings.tokenizer
    tokenizer = load_tokenizer(name)
    config = _config(settings, tokenizer)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in FastWeightsForCausalLM(config).parameters())
    training, validation = find_text(settings.data, settings.validation, tokenizer, name=name, seed=settings.seed)
    if settings.train.carry_memory:
        check_carry(config, by_number=isinstance(training, Text))
    if isinstance(training, Text):
        batches_of(training.open(), settings.train)  # raises for too little text
    _check_validation(settings, validation.open())
    job = TrainingJob(settings, config, name, parameters, training, validation, device)
    if not settings.restart:
        _refuse_other_settings(job)
    return job


def run_training(job: TrainingJob, console: Console) -> dict[str, Any]:
    """Do what is not done yet; returns what result.json holds.

    Raises:
        ValueError: another process is at work in the folder.
        KeyboardInterrupt: interrupted; a checkpoint is saved, and the same call goes on.
        FloatingPointError: a number was not finite, or the loss had a spike; checkpoints stay.
    """
    with alone_in(job.folder) if _is_main() else contextlib.nullcontext():
        return _run_training(job, console)


def _run_training(job: TrainingJob, console: Console) -> dict[str, Any]:
    settings, folder = job.settings, job.folder
    if settings.restart and _is_main():
        _forget(folder)
    finished = _finished(job)
    if finished is not None:
        console.print(f"Finished already: {folder / MODEL} (--restart does it again).", highlight=False)
        return finished
    if _is_main():
        _describe(job, console)
        _write_settings(job)
    rows: list[dict[str, Any]] = []
    try:
        run_jobs([job], processes=1, threads=threads_of(job.device, 1), console=console, on_row=rows.append)
    except KeyboardInterrupt:
        console.print(f"Interrupted; {folder} holds a checkpoint. The same command goes on from there.", highlight=False)
        raise
    except FloatingPointError as error:
        if _is_main():
            _note_in_session(folder, stopped=str(error).partition("\n")[0])
        raise
    (row,) = rows
    if row:
        console.print(f"{interval(row['validation']['bits_per_byte'])} bits per byte on text that was not trained on.", highlight=False)
        console.print(f"Model: {folder / MODEL}   Curve: {folder / METRICS}   Result and provenance: {folder / RESULT}", highlight=False)
    return row


def _check_validation(settings: TrainingRun, corpus: Corpus) -> None:
    longest = settings.evaluate.lengths(settings.train.sequence_length)[-1]
    try:
        choose_stretches(corpus.lengths.tolist(), longest, longest)
    except ValueError as error:
        raise ValueError(f"the validation text is too short for longest={settings.evaluate.longest} windows: {error}") from None


def _config(settings: TrainingRun, tokenizer: PreTrainedTokenizerBase) -> FastWeightsConfig:
    if settings.init_from:
        config = load_config(settings.init_from)
        if not isinstance(config, FastWeightsConfig):
            raise ValueError(
                f"init_from={settings.init_from!r} is a {config.model_type}; what can be fine-tuned here is a fastweights model"
            )
        return config
    special = dict.fromkeys(("bos_token_id", "eos_token_id"), document_token_id(tokenizer))
    return FastWeightsConfig(**Variant.parse(settings.mixer).config(settings.model, vocab_size=len(tokenizer), **special))


def _identity(job: TrainingJob) -> dict[str, Any]:
    """What must be the same for a run to go on: the settings, and the text behind their names."""
    return _by_place(determining(flat(job.settings))) | {"text": _text(job)["key"]}


def _by_place(settings: dict[str, Any]) -> dict[str, Any]:
    """With local files and folders by their whole paths: they are the same from wherever they are named. Other names stay."""

    def place(text: str) -> str:
        name = Share.parse(text).name
        path = Path(name).expanduser()
        return f"{path.resolve()}{text[len(name) :]}" if name not in ("", STDLIB, BYTES) and path.exists() else text

    named = {name: [place(text) for text in settings[name]] for name in ("data", "validation")}
    return settings | named | {name: place(settings[name]) for name in ("tokenizer", "init_from")}


def _text(job: TrainingJob) -> dict[str, Any]:
    """What is trained on; its size only where it is known."""
    if isinstance(job.training, Mixture):
        return {"key": job.training.key}
    corpus = job.training.open()
    return {"key": corpus.key, "train_tokens": corpus.total, "train_documents": len(corpus)}


def _refuse_other_settings(job: TrainingJob) -> None:
    file = job.folder / SETTINGS
    if not file.exists():
        return
    try:
        written, now = json.loads(file.read_text())["identity"], _identity(job)
        before = _by_place(determining(flat(TrainingRun())) | dict(written))  # a setting that is younger than the run had its default
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged, so the run in it cannot go on: {error!r}. Give another --out, or --restart") from None
    other = [f"{name} was {before.get(name)!r}, is {now.get(name)!r}" for name in now | before if before.get(name) != now.get(name)]
    if other:
        raise ValueError(
            f"{job.folder} holds a run of other settings: {'; '.join(other)}. Give another --out, or --restart to remove that run"
        )


def _write_settings(job: TrainingJob) -> None:
    """run.json: the settings with everything resolved, and one entry a session, so that a resumed run says by what code it went on."""
    file = job.folder / SETTINGS
    sessions = json.loads(file.read_text())["sessions"] if file.exists() else []
    content = {
        "settings": flat(job.settings),
        "identity": _identity(job),
        "config": job.config.to_dict(),
        "parameters": job.parameters,
        "sessions": [*sessions, provenance(device=job.device, seed=job.settings.seed)],
    }
    job.folder.mkdir(parents=True, exist_ok=True)
    _write_whole(file, json.dumps(content, indent=1))


def _note_in_session(folder: Path, **notes: str) -> None:
    """In run.json, of the session that is going on."""
    content = json.loads((folder / SETTINGS).read_text())
    content["sessions"][-1] |= notes
    _write_whole(folder / SETTINGS, json.dumps(content, indent=1))


def _train(job: TrainingJob, report: Report, should_stop: Callable[[], bool]) -> bool:
    settings, folder = job.settings, job.folder
    torch.manual_seed(settings.seed)
    model = _model(job)
    checkpoint = last_checkpoint(folder)
    if _is_main():
        _drop_rows_after(folder / METRICS, int(checkpoint.rpartition("-")[2]) if checkpoint else 0)

    def on_step(step: int, logs: dict[str, Any]) -> None:
        report("training", step, settings.train.steps, f"loss {logs['loss']:.3f}" if "loss" in logs else "")

    def on_log(logs: dict[str, Any]) -> None:
        if _is_main():
            append_rows(folder / METRICS, [logs])

    report("training", 0, settings.train.steps, "")
    training = train(
        model,
        job.training.open(),
        settings.train,
        folder=folder,
        seed=settings.seed,
        device=job.device,
        log_to=settings.loggers,
        on_step=on_step,
        on_log=on_log,
        should_stop=should_stop,
    )
    if not training.finished:
        return False
    if settings.train.sharding == "fsdp2":
        model = unshard(model)  # in which every process takes part
    if _is_main():
        _export(job, model)
    return True


def _model(job: TrainingJob) -> Any:
    """Fresh, or the one to start from; with adapters, a `PeftModel`. Weights are float32: bf16 is for the products."""
    settings = job.settings
    if not settings.init_from:
        return FastWeightsForCausalLM(job.config)
    model = load_whole(FastWeightsForCausalLM, settings.init_from, dtype=torch.float32)
    if not settings.lora_rank:
        return model
    import peft

    adapters = peft.LoraConfig(r=settings.lora_rank, lora_alpha=2 * settings.lora_rank, target_modules=ADAPTED)
    return peft.get_peft_model(model, adapters)


def _export(job: TrainingJob, model: Any) -> None:
    """The plain Hugging Face folder, whole or not at all; then the checkpoints have done their work."""
    part = job.folder / f"{MODEL}.part"
    shutil.rmtree(part, ignore_errors=True)  # what a kill left
    if job.settings.lora_rank:
        model.save_pretrained(job.folder / ADAPTER)
        model = model.merge_and_unload()
    if job.settings.export_dtype == "bf16":
        model.bfloat16()  # gates and norms stay float32
    model.save_pretrained(part)
    load_tokenizer(job.tokenizer).save_pretrained(part)
    config = json.loads((part / "config.json").read_text())
    _write_whole(part / "config.json", json.dumps(config | {"dtype": "float32"}, indent=2))  # stored small, loaded in float32
    part.rename(job.folder / MODEL)
    keep_newest(job.folder, 0)


def _result(job: TrainingJob, report: Report) -> dict[str, Any]:
    """Of the model as it was saved: what a user will load."""
    settings = job.settings
    tokenizer = load_tokenizer(str(job.folder / MODEL))
    model = FastWeightsForCausalLM.from_pretrained(job.folder / MODEL, device_map=job.device).eval()
    measured = measure(model, job.validation.open(), settings.evaluate, settings.train.sequence_length, report)
    report("sampling", 0, 1, "")
    curve = read_rows(job.folder / METRICS)
    return {
        "kind": "training",
        "preset": settings.preset,
        "settings": flat(settings),
        "mixer": job.config.mixer,
        "parameters": job.parameters,
        "text": _text(job),
        "tokens": settings.train.steps * settings.train.batch_tokens,
        "seconds": curve[-1]["seconds"] if curve else None,
        "training": [[row["tokens"], row["loss"] / math.log(2)] for row in curve],
        **measured,
        "sample": sample(model, tokenizer, settings.evaluate, settings.seed),
        "sessions": json.loads((job.folder / SETTINGS).read_text())["sessions"],
        **provenance(device=job.device, seed=settings.seed),
    }


def _finished(job: TrainingJob) -> dict[str, Any] | None:
    """The result of an earlier call, if it measured what is asked for now."""
    file = job.folder / RESULT
    if not ((job.folder / MODEL).exists() and file.exists()):
        return None
    wanted = flat(job.settings)
    asked = [name for name in wanted if name.startswith("evaluate.")]
    try:
        row = json.loads(file.read_text())
        return row if all(row["settings"].get(name) == wanted[name] for name in asked) else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # damaged: the model is measured again


def _describe(job: TrainingJob, console: Console) -> None:
    settings, text = job.settings.train, _text(job)
    tokens = settings.steps * settings.batch_tokens
    epochs = f" ({tokens / text['train_tokens']:.2g} epochs of {text['train_tokens']:,} tokens)" if "train_tokens" in text else ""
    console.print(
        f"{job.settings.preset}: {job.parameters:,} parameters, {tokens:,} tokens in {settings.steps:,} steps{epochs}, in {job.folder}.",
        highlight=False,
    )
    checkpoint = last_checkpoint(job.folder)
    if checkpoint:
        console.print(f"Going on from {checkpoint}.", highlight=False)


def _drop_rows_after(file: Path, step: int) -> None:
    """Rows of steps that are done again: a kill came between them and the next checkpoint."""
    rows = read_rows(file)
    if rows:
        _write_whole(file, "".join(json.dumps(row, sort_keys=True) + "\n" for row in rows if row["step"] <= step))


def _write_whole(file: Path, text: str) -> None:
    part = file.with_name(file.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


def _forget(folder: Path) -> None:
    """What `fastweights train` wrote, and nothing else that may lie there."""
    for file in (SETTINGS, METRICS, RESULT):
        (folder / file).unlink(missing_ok=True)
    for path in (folder / MODEL, folder / f"{MODEL}.part", folder / ADAPTER, folder / "runs", *checkpoints(folder)):
        shutil.rmtree(path, ignore_errors=True)


def _is_main() -> bool:
    """Of the processes that torchrun started, the one that writes."""
    return int(os.environ.get("RANK", "0")) == 0
