"""The examples of one training, a batch a step: drawn here, or by processes that run ahead where a device is faster than the drawing."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from copy import copy
from itertools import tee
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fastweights.recipes.task_presets import TaskSettings
from fastweights.tasks import Batch, Task, generator
from fastweights.tasks.base import IGNORE
from fastweights.tasks.draw import words

AHEAD = 8
"""Batches that each process draws before they are asked for."""
TOGETHER = 64
"""Batches of a stream after which no other training joins it."""
_begun: dict[str, tuple[object, Iterator[Drawn | Exception]]] = {}
"""The streams that may be joined: which one it is, and the stream at its first batch."""


class Asked(NamedTuple):
    """A batch as a training step takes it, in integers of any size."""

    tokens: Tensor
    """``[B, T]``."""
    places: Tensor
    """Where something is asked ``[questions]``, among the B · T tokens."""
    labels: Tensor
    """What is to be said there ``[questions]``. Behind them come questions that ask nothing (place 0, label -100), so that batches with
    about as many questions have the same shape."""

    @staticmethod
    def of(batch: Batch) -> Asked:
        """The questions of a task's batch: what is to be said after ``[b, t]`` is the label at ``[b, t + 1]``."""
        row, place = (batch.labels[:, 1:] != IGNORE).nonzero(as_tuple=True)
        labels = batch.labels[row, place + 1]
        spare = _room(len(labels)) - len(labels)
        return Asked(batch.input_ids, F.pad(row * batch.labels.shape[1] + place, (0, spare)), F.pad(labels, (0, spare), value=IGNORE))

    @staticmethod
    def unpacked(numbers: Tensor, rows: int, length: int) -> Asked:
        """From `Drawn.numbers`, as views."""
        places, labels = numbers[rows * length :].view(2, -1)
        return Asked(numbers[: rows * length].view(rows, length), places, labels)


class Drawn(NamedTuple):
    """The batch of one step on its way to the device."""

    kind: tuple[int, int, int, int]
    """Which task of the mixture; B, T and the number of questions. Steps of one kind do the same to other numbers."""
    numbers: np.ndarray
    """Tokens, places and labels in one line, int32: one copy to the device."""
    state: Mapping[str, Any]
    """Of the random generator, after it."""


class Examples(IterableDataset):
    """The batches of a training from ``state`` of its generator and step ``start`` on, one `Drawn` a step.

    Each of n processes draws every nth, and skips the words that the others take: together they give the same batches as one.
    """

    def __init__(self, settings: TaskSettings, state: Mapping[str, Any], start: int) -> None:
        self.settings, self.state, self.start = settings, state, start

    def __iter__(self) -> Iterator[Drawn]:
        settings, worker = self.settings, get_worker_info()
        mine, of = (0, 1) if worker is None else (worker.id, worker.num_workers)
        taken = [words_of(task, settings.batch_size) for task, _ in settings.train] if of > 1 else []
        rng = generator(0)
        rng.bit_generator.state = self.state
        for step in range(self.start, settings.steps + 1):
            which = _pick(settings, rng)
            if (step - self.start) % of != mine:
                rng.bit_generator.advance(taken[which])  # type: ignore[attr-defined]  # PCG64 has it
                continue
            asked = Asked.of(settings.train[which][0].batch(settings.batch_size, rng))
            numbers = torch.cat([part.flatten().int() for part in asked]).numpy()
            yield Drawn((which, *asked.tokens.shape, len(asked.labels)), numbers, rng.bit_generator.state)  # type: ignore[arg-type]


def examples(settings: TaskSettings, state: Mapping[str, Any], start: int, processes: int = 0) -> Iterator[Drawn]:
    """`Examples`, drawn by so many processes ahead of time; with 0 here, when they are asked for."""
    ahead: dict[str, Any] = {}
    if processes:
        # Not forked from this process, whose threads and device a fork would copy in an unknown state, but from one that has neither.
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        context = multiprocessing.get_context(method)
        context.set_forkserver_preload([__name__])
        ahead = {"multiprocessing_context": context, "prefetch_factor": AHEAD, "worker_init_fn": _begin_worker}
    yield from DataLoader(Examples(settings, state, start), batch_size=None, num_workers=processes, collate_fn=_as_it_is, **ahead)


def shared(settings: TaskSettings, state: Mapping[str, Any], start: int, processes: int = 0) -> Iterator[Drawn]:
    """`examples`, drawn once for all trainings of this process that begin at the same place together and go on in turn: models that
    differ in mixer or learning rate see the same batches. Kept are those between the slowest reader and the fastest."""
    key, begun = repr((settings.train, settings.batch_size, settings.steps, dict(state), start, processes)), _begun
    if key not in begun:
        begun[key] = object(), tee(_or_why_not(examples(settings, state, start, processes)), 1)[0]
    which, mine = begun[key][0], copy(begun[key][1])  # to hold the first batch is to hold all that come after it

    def close() -> None:
        if key in begun and begun[key][0] is which:  # not by the module's name, which is gone where the interpreter ends meanwhile
            del begun[key]

    try:
        for read, drawn in enumerate(mine):
            if read == TOGETHER:
                close()
            if isinstance(drawn, Exception):
                raise drawn
            yield drawn
    finally:
        close()


def _or_why_not(stream: Iterator[Drawn]) -> Iterator[Drawn | Exception]:
    """What ends a stream early reaches every reader, not the first alone."""
    try:
        yield from stream
    except Exception as failure:
        yield failure


class _Counting(np.random.PCG64):
    """Counts the words it gives."""

    count = 0

    def random_raw(self, size: Any = None, output: bool = True) -> Any:
        self.count += 1 if size is None else int(np.prod(size))
        return super().random_raw(size, output)  # type: ignore[call-overload]


def words_of(task: Task, size: int) -> int:
    """How many words of its generator a batch of a task takes: no task of a mixture lets that depend on what is drawn."""
    counting = _Counting(0)
    task.batch(size, np.random.Generator(counting))
    return counting.count


def _as_it_is(drawn: Any) -> Any:
    return drawn


def _begin_worker(worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches every process, and the training still ends its window
    threading.Thread(target=_end_with_the_training, daemon=True).start()


def _end_with_the_training() -> None:
    """Also if that is killed: torch's workers look only whether the process that forked them is there, and that waits for them."""
    training = multiprocessing.parent_process()
    assert training is not None
    training.join()
    os._exit(1)


def _pick(settings: TaskSettings, rng: np.random.Generator) -> int:
    """The task of a step, by its share."""
    shares = np.cumsum([share for _, share in settings.train])
    uniform = int(words(rng, 1)[0] >> np.uint64(11)) * 2.0**-53
    return int(np.searchsorted(shares, uniform * shares[-1], side="right"))


def _room(questions: int) -> int:
    """At least so many, to four binary digits: up to an eighth more."""
    step = 1 << max(0, questions.bit_length() - 4)
    return -(-questions // step) * step
