"""What a training step asks of a task model: the loss, and which answers are right. Plain, or through torch.compile.

Compiled, a model still goes block by block: its blocks, and those of all models of its kind in a process, share one compilation, for
sequences of any length. The embedding stays plain: the compiler would add up its gradient in the order in which threads come.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from fastweights.generate.passes import compiled
from fastweights.models import FastWeightsForCausalLM
from fastweights.models.modeling import FastWeightsBlock
from fastweights.notation import Hidden
from fastweights.recipes.task_examples import Asked
from fastweights.tasks.base import IGNORE


def _block(block: FastWeightsBlock, x: Hidden) -> Hidden:
    return block(x)[0]


def _answers(
    norm: nn.Module, head: nn.Module, x: Hidden, places: Int[Tensor, " questions"], labels: Int[Tensor, " questions"]
) -> tuple[Float[Tensor, ""], Bool[Tensor, " questions"]]:
    logits = head(norm(x).flatten(0, 1).index_select(0, places.long())).float()
    labels = labels.long()
    return nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE), logits.detach().argmax(-1) == labels


class Parts(NamedTuple):
    """What a model is asked through, after its embedding."""

    block: Callable[[FastWeightsBlock, Tensor], Tensor] = _block
    answers: Callable[[nn.Module, nn.Module, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = _answers


PLAIN = Parts()


@cache
def compiled_parts(kind: Hashable, head: Hashable) -> Parts:
    """Compiled at their first calls: blocks once for all models of one ``kind``, answers once for all whose ``head`` is of one kind."""
    block, answers = compiled(_block), _compiled_answers(head)
    return Parts(
        lambda module, x: block(module, _any_size(x, 1)),
        lambda norm, head, x, places, labels: answers(norm, head, _any_size(x, 1), _any_size(places, 0), _any_size(labels, 0)),
    )


@cache
def _compiled_answers(head: Hashable) -> Callable:
    return compiled(_answers)


def _any_size(x: Tensor, dim: int) -> Tensor:
    """It, for the compiler not to take the size of ``dim`` for a constant, unless something in its way needs that."""
    torch._dynamo.maybe_mark_dynamic(x, dim)
    return x


def ask(model: FastWeightsForCausalLM, batch: Asked, parts: Parts = PLAIN) -> tuple[Tensor, Tensor]:
    """The mean loss over the questions, equal to the model's own ``loss`` on the batch, and which answers are right ``[questions]``.

    Logits are formed at the questions alone: in MQAR that is a sixteenth of the tokens.
    """
    x = model.model.embed_tokens(batch.tokens.long())
    for block in model.model.layers:
        x = parts.block(block, x)
    return parts.answers(model.model.norm, model.lm_head, x, batch.places, batch.labels)


@contextmanager
def tf32(on: bool) -> Iterator[None]:
    """Inside, torch multiplies float32 matrices in TF32 on a GPU, if ``on``. For the whole process, so that a backward pass does too.

    Through torch's older switch, which moves the newer ones (``fp32_precision``) along. Moved alone, those make torch.compile raise.
    """
    if not on:
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def compilers_remarks_aside() -> Iterator[None]:
    """The compiler warns of its own parts, and advises TF32: here the settings say which precision."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", module=r"torch\._(dynamo|functorch|inductor|subclasses)")
        yield
