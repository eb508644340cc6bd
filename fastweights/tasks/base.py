"""What every task is: a seeded maker of fresh batches with a score. A task knows no model."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

IGNORE = -100
"""The label where nothing is asked, as in Hugging Face and ``torch.nn.functional.cross_entropy``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Fresh examples, ready for ``model(input_ids=batch.input_ids, labels=batch.labels)`` of a Hugging Face causal language model."""

    input_ids: Tensor
    """``[B, T]``, int64."""
    labels: Tensor
    """``[B, T]``, int64, *not* shifted: ``labels[:, t]`` is what the logits at ``t − 1`` must say, as Hugging Face models shift it. -100
    where nothing is asked.

    A label need not be the token that follows: in MQAR filler follows the query, and the value is only in the label.
    """
    groups: dict[str, Tensor]
    """Strata for the score: name to ``[B, T]``, int64, read where ``labels`` asks."""

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, rows: slice) -> Batch:
        """Some of the rows: ``batch[8:16]``."""
        return self._each(lambda value: value[rows])

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with its tensors on another device."""
        return self._each(lambda value: value.to(device) if isinstance(value, Tensor) else value)

    def _each(self, change: Callable[[Any], Any]) -> Batch:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        groups = {name: change(group) for name, group in fields.pop("groups").items()}
        return dataclasses.replace(self, groups=groups, **{name: change(value) for name, value in fields.items()})


@dataclasses.dataclass(frozen=True)
class Count:
    """Right answers out of questions, with the sums from which the spread between sequences follows. Counts add up."""

    samples: int = 0
    """Sequences with at least one question."""
    asked: int = 0
    """Questions."""
    correct: int = 0
    """Right answers."""
    correct_squared: int = 0
    """Σ over sequences of (right answers)²."""
    correct_asked: int = 0
    """Σ over sequences of right answers × questions."""
    asked_squared: int = 0
    """Σ over sequences of (questions)²."""

    @classmethod
    def of(cls, correct: Tensor, asked: Tensor) -> Count:
        """From right answers and questions per sequence, both ``[B]``."""
        correct, asked = correct.long(), asked.long()
        sums = ((asked > 0).sum(), asked.sum(), correct.sum(), (correct * correct).sum(), (correct * asked).sum(), (asked * asked).sum())
        return cls(*(int(x) for x in sums))

    def __add__(self, other: Count) -> Count:
        return Count(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    @property
    def accuracy(self) -> float:
        """Right answers per question; nan when nothing was asked."""
        return self.correct / self.asked if self.asked else float("nan")


@dataclasses.dataclass(frozen=True)
class Score:
    """A batch's result: the whole, and each stratum. Scores add up, so that batches can stream."""

    total: Count = Count()
    """All questions."""
    groups: dict[str, dict[int, Count]] = dataclasses.field(default_factory=dict)
    """Stratum name to stratum value to its questions."""

    def __add__(self, other: Score) -> Score:
        groups = {name: dict(counts) for name, counts in self.groups.items()}
        for name, counts in other.groups.items():
            mine = groups.setdefault(name, {})
            for value, count in counts.items():
                mine[value] = mine.get(value, Count()) + count
        return Score(self.total + other.total, groups)

    @property
    def accuracy(self) -> float:
        """Right answers per question."""
        return self.total.accuracy


def score_tokens(answers: Tensor, batch: Batch) -> Score:
    """Compare logits ``[B, T, vocabulary]`` or predicted tokens ``[B, T]`` with the labels; what position ``t`` says answers ``labels[:,
    t + 1]``."""
    B, T = batch.labels.shape
    if answers.dim() not in (2, 3) or answers.shape[:2] != (B, T):
        raise ValueError(f"answers are {list(answers.shape)}; logits must be [{B}, {T}, vocabulary], predicted tokens [{B}, {T}]")
    predicted = (answers.argmax(-1) if answers.dim() == 3 else answers)[:, :-1]
    labels = batch.labels[:, 1:].to(predicted.device)
    asked = labels != IGNORE
    right = asked & (predicted == labels)
    groups = {name: _by_value(group[:, 1:].to(predicted.device), asked, right) for name, group in batch.groups.items()}
    return Score(Count.of(right.sum(1), asked.sum(1)), groups)


def _by_value(group: Tensor, asked: Tensor, right: Tensor) -> dict[int, Count]:
    counts = {}
    for value in group[asked].unique().tolist():
        here = group == value
        counts[value] = Count.of((right & here).sum(1), (asked & here).sum(1))
    return counts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """Base of the tasks. Each is a keyword-only frozen dataclass of its parameters; another length is ``dataclasses.replace(task,
    length=…)``."""

    name: ClassVar[str]
    """Its name in `fastweights.tasks.TASKS`."""
    length: int
    """Tokens a sequence, at most."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Token ids are below this."""

    @property
    @abstractmethod
    def chance(self) -> float:
        """Accuracy of the best guess that has not read the sequence."""

    @property
    def ceiling(self) -> float:
        """Accuracy of a reader with perfect memory: 1 unless the task contradicts itself."""
        return 1.0

    @abstractmethod
    def batch(self, size: int, rng: np.random.Generator) -> Batch:
        """``size`` fresh examples from ``rng`` (`fastweights.tasks.generator`); the same seed gives the same data on every platform."""

    def score(self, answers: Any, batch: Batch) -> Score:
        """Score logits ``[B, T, vocabulary]`` or predicted tokens ``[B, T]`` (what position ``t`` says of ``t + 1``) on a batch."""
        return score_tokens(answers, batch)

    def parameters(self) -> dict[str, Any]:
        """The plain fields, for the rows of a result file."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.repr}
        return {name: value for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        parameters = ", ".join(f"{name}={value}" for name, value in self.parameters().items())
        return f"{self.name}({parameters}): chance {100 * self.chance:.3g} %, ceiling {100 * self.ceiling:.2f} %"


def require(ok: bool, message: str) -> None:
    """Raise ``ValueError(message)`` unless ``ok``: the tasks' constructors check their fields with it."""
    if not ok:
        raise ValueError(message)


def finish(tokens: np.ndarray, labels: np.ndarray, **groups: np.ndarray) -> Batch:
    """NumPy int64 arrays ``[B, T]`` to a batch."""
    return Batch(
        input_ids=torch.from_numpy(tokens), labels=torch.from_numpy(labels), groups={k: torch.from_numpy(v) for k, v in groups.items()}
    )


def at_places(shape: tuple[int, int], places: np.ndarray, values: np.ndarray, fill: int) -> np.ndarray:
    """An int64 array of ``fill`` with ``values [B, n]`` put at ``places [B, n]``."""
    out = np.full(shape, fill, dtype=np.int64)
    np.put_along_axis(out, places, values, axis=1)
    return out


_POWERS = 2 ** np.arange(32, dtype=np.int64)


def doubling(distance: np.ndarray) -> np.ndarray:
    """The strata of a distance: the smallest power of two that is not below it."""
    return _POWERS[np.searchsorted(_POWERS, distance)]
