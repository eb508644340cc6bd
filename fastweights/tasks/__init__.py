"""Tasks that ask a memory for what it has read. Each is a seeded maker of fresh batches with a score; none knows a model. See
docs/tasks.md.

>>> from fastweights.tasks import TASKS, generator
>>> task = TASKS["mqar"](length=64, pairs=4, vocab_size=256)
>>> batch = task.batch(32, generator(0))  # batch.input_ids, batch.labels: a Hugging Face causal model's inputs
"""

from __future__ import annotations

from fastweights.tasks.base import Batch, Count, Score, Task
from fastweights.tasks.draw import generator
from fastweights.tasks.mqar import MQAR, MQARKLA
from fastweights.tasks.palindrome import Palindrome
from fastweights.tasks.s_niah import SNIAH, NeedleBatch
from fastweights.tasks.stack import Stack
from fastweights.tasks.state_tracking import StateTracking

TASKS: dict[str, type[Task]] = {task.name: task for task in (MQAR, MQARKLA, SNIAH, Palindrome, Stack, StateTracking)}

__all__ = [
    "MQAR",
    "MQARKLA",
    "SNIAH",
    "TASKS",
    "Batch",
    "Count",
    "NeedleBatch",
    "Palindrome",
    "Score",
    "Stack",
    "StateTracking",
    "Task",
    "generator",
]
