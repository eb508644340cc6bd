"""Write on with a saved model, in the terminal: one answer, a file remembered and saved, or a conversation."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedTokenizerBase

from fastweights.generate import Completion, Engine, Sampling, Snapshot
from fastweights.generate.prompts import check_text
from fastweights.models import FastWeightsForCausalLM
from fastweights.recipes.generate_settings import GenerateSettings
from fastweights.recipes.saved import load_saved
from fastweights.train.tokenizer import document_token_id

SOFTMAX_CONTEXT = 16_384


@dataclass(eq=False)
class Writer:
    """An engine and what it has read so far."""

    engine: Engine
    sampling: Sampling
    settings: GenerateSettings
    prompt: str | None
    to_remember: str | None
    memory: Snapshot | None


def prepare(model: str, settings: GenerateSettings) -> Writer:
    """Load and check everything, before anything is read or written.

    Raises:
        ValueError, OSError: a folder, file, snapshot or setting that cannot be used; the message says why in a line.
    """
    if settings.prompt is not None and settings.prompt_file is not None:
        raise ValueError("prompt and prompt_file are two ways to give the prompt; give one")
    names = {field.name for field in dataclasses.fields(Sampling)}
    sampling = Sampling(**{name: value for name, value in vars(settings).items() if name in names})
    prompt = settings.prompt if settings.prompt_file is None else _text(settings.prompt_file)
    to_remember = None if settings.remember is None else _text(settings.remember)
    if settings.save is not None and not settings.save.absolute().parent.is_dir():
        raise ValueError(f"there is no folder {str(settings.save.absolute().parent)!r} to save {settings.save.name!r} in")
    if settings.save is not None and settings.save.is_dir():
        raise ValueError(f"save={str(settings.save)!r} is a folder; give the file to write")
    memory = None if settings.load is None else Snapshot.load(settings.load)
    loaded, tokenizer = load(model, settings)
    config = loaded.config
    full = "softmax" in config.mixers and config.window_size is None
    engine = Engine(
        loaded,
        tokenizer,
        rows=1,
        prefill_chunk=settings.prefill_chunk,
        compile=settings.compile,
        max_context=SOFTMAX_CONTEXT if full and settings.max_context is None else settings.max_context,
    )
    if memory is not None:
        memory.check_model(engine.model, engine.fingerprint)
    return Writer(engine, sampling, settings, prompt, to_remember, memory)


def load(folder: str, settings: GenerateSettings) -> tuple[FastWeightsForCausalLM, PreTrainedTokenizerBase]:
    """A saved model and its tokenizer, ready to decode."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if settings.device == "auto" else settings.device
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda': this machine has none that torch can use; take device='cpu'")
    return load_saved(folder, device, {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16}[settings.precision])


def run(writer: Writer, console: Console) -> None:
    """Texts go to the standard output; everything else goes through ``console``, which should be the standard error."""
    settings = writer.settings
    if writer.to_remember is not None:
        _remember(writer, writer.to_remember, console)
    if writer.prompt is not None:
        answer = _answer(writer, writer.prompt, console)
        _tell(answer, console)
    elif settings.interactive:
        _converse(writer, console)
    if settings.save is not None and writer.memory is not None:
        writer.memory.save(settings.save)
        told = f"{len(writer.memory):,} tokens remembered in {settings.save.stat().st_size:,} bytes: {settings.save}"
        console.print(told, style="dim", highlight=False, soft_wrap=True)


def _converse(writer: Writer, console: Console) -> None:
    console.print(
        "Write a line; what was said before is remembered. Ctrl-C ends an answer, Ctrl-D the conversation.", style="dim", soft_wrap=True
    )
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            console.print()
            continue
        except UnicodeDecodeError as error:
            console.print(f"The conversation ends: this line is not text in UTF-8: {error.reason}.", style="red", highlight=False)
            return
        try:
            _tell(_answer(writer, line + "\n", console), console)
        except ValueError as error:  # a line too many for max_context ends nothing
            console.print(str(error), style="red", highlight=False)


def _answer(writer: Writer, prompt: str, console: Console) -> tuple[Completion, float]:
    """Read the prompt, write the answer as it comes, and remember both."""
    begin = time.perf_counter()
    request = writer.engine.submit(_tokens(writer, prompt), writer.sampling, after=writer.memory, keep=True)
    with _interrupts_cancel(request):
        try:
            for piece in request:
                sys.stdout.write(piece)
                sys.stdout.flush()
        except RuntimeError as error:
            raise ValueError(str(error)) from error
    sys.stdout.write("\n")
    sys.stdout.flush()
    completion = request.result()
    if completion.snapshot is not None:  # else it was interrupted while the prompt was read, and the memory is what it was
        writer.memory = completion.snapshot
    return completion, time.perf_counter() - begin


def _tell(answer: tuple[Completion, float], console: Console) -> None:
    completion, seconds = answer
    read = completion.prompt_tokens - completion.reused_tokens
    told = f"{len(completion.tokens)} tokens after {completion.prompt_tokens:,} (of which {read:,} were read now) in {seconds:.1f} s"
    told += f", ended by {completion.finish_reason}"
    if completion.drafted:
        told += f"; {completion.accepted} of {completion.drafted} guessed tokens were right"
    console.print(told, style="dim", highlight=False, soft_wrap=True)


def _remember(writer: Writer, text: str, console: Console) -> None:
    begin = time.perf_counter()
    tokens = _tokens(writer, text)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("Reading", total=len(tokens))
        writer.memory = writer.engine.remember(
            tokens, after=writer.memory, on_progress=lambda done, total: progress.update(task, completed=done, total=total)
        )
    seconds = time.perf_counter() - begin
    console.print(f"{len(tokens):,} tokens read in {seconds:.1f} s, {len(tokens) / seconds:,.0f} a second", style="dim", highlight=False)


def _tokens(writer: Writer, text: str) -> list[int]:
    """As documents are laid out in training: the document token, then the text as it is; a special token's name in it is just text."""
    assert writer.engine.tokenizer is not None
    check_text(text)
    tokens = writer.engine.tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    return tokens if writer.memory is not None else [document_token_id(writer.engine.tokenizer), *tokens]


@contextlib.contextmanager
def _interrupts_cancel(request) -> Iterator[None]:
    """Ctrl-C ends the answer between two steps, so that the memory after it is whole."""
    before = signal.signal(signal.SIGINT, lambda *_: request.cancel())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error.reason} at byte {error.start}") from error
