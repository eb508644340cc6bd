"""One model of a task comparison, from nothing to its result row. Runs in a process of its own or in the caller's, alone or in turn with
others: its generators pause after every step."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastweights.evaluate.accuracy import measured
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM, parameter_groups
from fastweights.recipes.pool import Report, finish
from fastweights.recipes.settings import Variant
from fastweights.recipes.task_ask import ask, compiled_parts, compilers_remarks_aside, tf32
from fastweights.recipes.task_examples import Asked, shared
from fastweights.recipes.task_presets import TaskSettings
from fastweights.records import provenance
from fastweights.tasks import generator
from fastweights.tasks.base import IGNORE
from fastweights.train.repeated import Repeated

CHECKPOINT_SECONDS = 30.0
"""At least so long between two checkpoints of a run: what a kill may cost."""


class Point(NamedTuple):
    """A window of training."""

    step: int
    loss: float
    """Mean over the window, nats a question."""
    accuracy: float
    """Mean over the tasks of the mixture; of fresh examples, before each step learned from them."""
    seconds: float
    """Of training so far, over all resumptions."""


class Trained(NamedTuple):
    """How a training ended."""

    curve: list[Point]
    reached: bool
    """Every task of the mixture reached ``stop_at``."""
    diverged: bool
    """The loss of the last window is not finite."""


class Window:
    """Losses and right answers of some steps, kept on the device until they are read."""

    def __init__(self, settings: TaskSettings, device: str) -> None:
        self.settings = settings
        self.loss = torch.zeros((), device=device)
        self.answers = torch.zeros(len(settings.train), 2, device=device)
        """Right answers and questions of each task."""

    def clear(self) -> None:
        self.loss.zero_()
        self.answers.zero_()

    def add(self, which: int, loss: Tensor, right: Tensor, asked: Tensor) -> None:
        self.loss += loss
        self.answers[which, 0] += right.sum()
        self.answers[which, 1] += asked.sum()

    def read(self, step: int, steps: int, seconds: float) -> tuple[Point, bool]:
        """The point of the last ``steps`` steps, and whether every task has come up and reached ``stop_at``."""
        share = [right / asked if asked else None for right, asked in self.answers.tolist()]
        known = [value for value in share if value is not None]
        reached = self.settings.stop_at is not None and all(
            value is not None and value >= self.settings.stop_at * task.ceiling
            for value, (task, _) in zip(share, self.settings.train, strict=True)
        )
        return Point(step, self.loss.item() / steps, sum(known) / len(known), round(seconds, 3)), reached


@dataclass(frozen=True, kw_only=True)
class TaskJob:
    """A training and its measurement. Plain data: it travels to another process."""

    preset: str
    """The name of the settings, for the row."""
    settings: TaskSettings
    """What to train on, how, and what to measure."""
    label: str
    """The mixer with its options, as `fastweights.recipes.settings.Variant` reads it."""
    learning_rate: float
    """Peak learning rate."""
    seed: int
    """Of weights and examples."""
    folder: Path
    """Where the checkpoint lies while the run lasts."""
    device: str
    """``cpu`` or ``cuda``."""
    save: bool = False
    """Leave the trained model in `saved`."""
    graphs: bool = False
    """Repeat steps as CUDA graphs."""
    compile: bool = False
    """Through torch.compile."""
    at_once: int = 1
    """How many models share the device: seconds are to be read with that in mind."""
    drawers: int = 0
    """Processes that draw its examples ahead of time; 0: they are drawn here, step by step."""

    @property
    def key(self) -> str:
        """A hash of all that decides the run. The grid around it is no part of that."""
        alone = dataclasses.replace(self.settings, learning_rates=(self.learning_rate,), seeds=(self.seed,))
        return hashlib.sha256(f"{alone!r}|{self.label}".encode()).hexdigest()[:12]

    @property
    def checkpoint(self) -> Path:
        """Where an interrupted training is kept."""
        return self.folder / f"{self.key}.pt"

    @property
    def saved(self) -> Path:
        """Where the trained model is left, for `fastweights eval` and `inspect`."""
        return (
            self.folder
            / "models"
            / f"{re.sub(r'[^A-Za-z0-9_.+=-]', '_', self.label)}-lr{self.learning_rate:.2g}-seed{self.seed}-{self.key}"
        )

    @property
    def name(self) -> str:
        """As people are told of it."""
        return f"{self.label} lr {self.learning_rate:.2g} seed {self.seed}"

    def model(self) -> FastWeightsForCausalLM:
        """A new model with this run's weights, on the CPU. Raises ValueError for a mixer or option that does not exist."""
        config = Variant.parse(self.label).config(self.settings.model, vocab_size=self.settings.vocab_size)
        torch.manual_seed(self.seed)
        return FastWeightsForCausalLM(FastWeightsConfig(**config))

    def run(self, report: Report, should_stop: Callable[[], bool]) -> dict[str, Any] | None:
        """Train (or go on), measure. None if `should_stop` ended it: a later call goes on."""
        return finish(self.work(report, should_stop))

    def work(self, report: Report, should_stop: Callable[[], bool]) -> Generator[None, None, dict[str, Any] | None]:
        """`run`, pausing after every step."""
        settings, model = self.settings, self.model()
        nn.Module.to(model, self.device)
        trained = yield from train_on_task(self, model, report=report, should_stop=should_stop)
        if trained is None:
            return None
        total, done, rows = settings.samples * len(settings.evaluate), 0, []
        for part in measured(model, settings.evaluate, samples=settings.samples):
            if isinstance(part, int):
                done += part
                report("measuring", done, total, "")
                yield
            else:
                rows.append(part)
                if should_stop():
                    return None
        if self.save:
            model.save_pretrained(self.saved)
        self.checkpoint.unlink(missing_ok=True)
        last = trained.curve[-1]
        return {
            "kind": "task",
            "run": self.key,
            "preset": self.preset,
            "label": self.label,
            "learning_rate": self.learning_rate,
            "batch_size": settings.batch_size,
            "train": [{"task": task.name, **task.parameters(), "share": share} for task, share in settings.train],
            "model": {name: getattr(model.config, name) for name in dataclasses.asdict(settings.model)},
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "state_floats": state_floats(model),
            "steps": last.step,
            "seconds": last.seconds,
            "at_once": self.at_once,
            "compiled": self.compile,
            "train_accuracy": last.accuracy,
            "reached": trained.reached,
            "diverged": trained.diverged,
            "training": [list(point) for point in trained.curve],
            "accuracy": rows,
            **provenance(device=self.device, seed=self.seed),
        }


def train_on_task(
    job: TaskJob,
    model: FastWeightsForCausalLM,
    *,
    report: Report = lambda *told: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Generator[None, None, Trained | None]:
    """Train ``model`` in place on fresh examples, going on from the job's checkpoint if it exists. Pauses after every step.

    Ends at the last step; at a window in which every task reaches ``stop_at``; or at one whose loss is not finite. Returns None if
    `should_stop`, asked after every window, ended it. Either way the checkpoint then holds all of it.
    """
    settings, window = job.settings, Window(job.settings, job.device)
    optimizer = optimizer_for(job, model)
    state, trained = generator(job.seed).bit_generator.state, Trained([], reached=False, diverged=False)
    began = saved = time.perf_counter()
    if job.checkpoint.exists():
        state, trained = _load(job.checkpoint, model, optimizer, job.device)
        began -= trained.curve[-1].seconds
    curve = trained.curve
    drawn = shared(settings, state, curve[-1].step + 1 if curve else 1, job.drawers)
    model.train()
    repeated = Repeated(training_step(job, model, optimizer, window), job.device, graphs=job.graphs)
    while not (trained.reached or trained.diverged) and (start := curve[-1].step + 1 if curve else 1) <= settings.steps:
        with repeated.on():
            window.clear()
        last = min(start + settings.window - 1, settings.steps)
        for now in range(start, last + 1):
            batch = next(drawn)
            with repeated.on():
                _set_rate(optimizer, job.learning_rate * learning_rate_factor(settings, now))
            repeated(batch.kind, torch.from_numpy(batch.numbers))
            report("training", now, settings.steps, f"{curve[-1].accuracy:.1%}" if curve else "")
            yield
        with repeated.on():
            point, reached = window.read(last, last - start + 1, time.perf_counter() - began)
            curve.append(point)
            trained = Trained(curve, reached, diverged=not math.isfinite(point.loss))
            stop = should_stop()
            if stop or time.perf_counter() - saved > CHECKPOINT_SECONDS:
                _save(job.checkpoint, model, optimizer, batch.state, trained)
                saved = time.perf_counter()
        state = batch.state
        if stop:
            return None
    optimizer.zero_grad()  # gradients lie in the graphs' memory, which nothing else can use
    _save(job.checkpoint, model, optimizer, state, trained)  # an interrupted measurement does not train again
    return trained


def training_step(
    job: TaskJob, model: FastWeightsForCausalLM, optimizer: torch.optim.Optimizer, window: Window
) -> Callable[[tuple[int, int, int, int], Tensor], None]:
    """What a step does to the model, given `Drawn.kind` and `Drawn.numbers` on the model's device; for `Repeated`."""

    settings, asks = job.settings, ask
    if job.compile:
        head = (settings.model.hidden_size, settings.vocab_size, settings.precision)
        asks = partial(ask, parts=compiled_parts((job.label, settings.model, settings.precision), head))

    def step(kind: tuple[int, int, int, int], numbers: Tensor) -> None:
        which, rows, length, _ = kind
        asked = Asked.unpacked(numbers, rows, length)
        with tf32(settings.precision == "tf32"), compilers_remarks_aside() if job.compile else nullcontext():
            with torch.autocast(job.device, dtype=torch.bfloat16, enabled=settings.precision == "bf16"):
                loss, right = asks(model, asked)
            optimizer.zero_grad()
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        window.add(which, loss.detach(), right, asked.labels != IGNORE)

    return step


def optimizer_for(job: TaskJob, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW; for graphs with its rate and the number of its steps on the device."""
    groups, settings = parameter_groups(model, job.settings.weight_decay), job.settings
    if job.graphs:
        rate = torch.zeros((), device=job.device)
        return torch.optim.AdamW(groups, lr=rate, betas=settings.betas, fused=True, capturable=True)
    return torch.optim.AdamW(groups, lr=job.learning_rate, betas=settings.betas)


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def learning_rate_factor(settings: TaskSettings, step: int) -> float:
    """What the peak learning rate is multiplied with at a step, counted from 1."""
    warm = settings.warmup * settings.steps
    if step < warm:
        return step / warm
    if settings.schedule == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1.0, settings.steps - warm)))


def state_floats(model: FastWeightsForCausalLM) -> int | None:
    """Floats of memory that a sequence carries through all layers, without the convolutions' few inputs; None if a layer's grow with it."""
    if "softmax" in model.config.mixers:
        return None
    states = [block.mixer.initial_state(1, device="meta") for block in model.model.layers]
    return sum(state.memory.numel() + sum(part.numel() for part in state.read or ()) for state in states)


def _save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], trained: Trained) -> None:
    """``state`` is that of the examples' generator."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"], "rng": json.dumps(state)}
    ending = {"reached": trained.reached, "diverged": trained.diverged}
    torch.save(kept | ending | {"curve": [tuple(point) for point in trained.curve]}, part)
    os.replace(part, path)


def _load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> tuple[Mapping[str, Any], Trained]:
    kept = torch.load(path, weights_only=True, map_location=device)
    model.load_state_dict(kept["model"])
    moments = kept["optimizer"].get("state", kept["optimizer"])  # older checkpoints have the optimizer's options beside them
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})  # its own options
    return json.loads(kept["rng"]), Trained([Point(*point) for point in kept["curve"]], kept["reached"], kept["diverged"])
