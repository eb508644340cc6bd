"""The engine's two passes over a model: a token more in every row, and many tokens of one text. Plain, or compiled into few kernels.

Compiled, a pass still goes block by block: blocks of one kind share one compilation, so that it takes as long for forty layers as for one.
Of a block that reads a text only what lies around the memories is compiled, for any number of tokens at once: how the memories' kernels cut
a text depends on its length, which the compiler need not know. Between blocks the residual stream is a pair (x, y) that stands for x + y,
so that this addition and the next block's norm are one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fastweights.generate.captured import CapturedPiece
from fastweights.generate.prompts import Tokens
from fastweights.layers import SoftmaxState
from fastweights.layers.attention import Operands
from fastweights.models import FastWeightsForCausalLM
from fastweights.models.cache import LayerState
from fastweights.models.modeling import FastWeightsBlock
from fastweights.notation import Hidden, MemoryState, Value

SHORT = 64
"""Pieces of fewer tokens are read without the compiler: what takes time there is the host, either way."""


class Passes:
    """``compile``: by torch.compile, each part at its first call. ValueError for a model whose backend has no in-place step."""

    def __init__(self, model: FastWeightsForCausalLM, compile: bool = False) -> None:
        if model.config.backend == "reference":
            raise ValueError("backend='reference' has no in-place step; decode with backend 'auto', 'torch' or 'triton'")
        self.model, self.compiled = model, compile
        self._piece: CapturedPiece | None = None
        if compile:
            self._last = compiled(_last, dynamic=False)
            kinds = {
                mixer: (compiled(_block_step, dynamic=False), compiled(_before), compiled(_after)) for mixer in set(model.config.mixers)
            }
            self._parts = [kinds[mixer] for mixer in model.config.mixers]
            """Of each layer: its step, and what lies before and after its memories when it reads."""

    def warm_up(self, tokens: int) -> None:
        """Compile what reads a text now, for pieces of any length; kernels are chosen with so many tokens in mind, and a piece of just so
        many is captured on a GPU."""
        if not self.compiled:
            return
        self.read([0] * tokens, self.initial_states())
        if self.model.device.type == "cuda" and tokens >= SHORT and "softmax" not in self.model.config.mixers:
            with torch.inference_mode():
                self._piece = CapturedPiece(self._read, tokens, self.initial_states())

    @torch.inference_mode()  # to the compiler a tensor made outside is another kind of tensor
    def initial_states(self) -> list[LayerState]:
        """Those of one text before its first token."""
        return [block.mixer.initial_state(1) for block in self.model.model.layers]

    @torch.inference_mode()
    def read(self, tokens: Sequence[int] | Tokens, states: Sequence[LayerState]) -> tuple[Float[Tensor, "1 T D"], list[LayerState]]:
        """What the last layer makes of ``tokens``, before the last norm, and the states after them. ``states`` stay as they are."""
        ids, device = torch.from_numpy(np.asarray(tokens, np.int64)).unsqueeze(0), self.model.device
        if device.type == "cuda":  # out of pinned memory, so that the host need not wait for the piece before
            ids = ids.pin_memory()
        if self._piece is not None and self._piece.tokens == len(tokens):
            return self._piece(ids, states)
        return self._read(ids.to(device, non_blocking=True), states)

    def _read(self, ids: Int[Tensor, "1 T"], states: Sequence[LayerState]) -> tuple[Hidden, list[LayerState]]:
        x = self.model.model.embed_tokens(ids)
        if self.compiled and ids.shape[1] >= SHORT:
            return self._read_compiled(x, states)
        after = []
        for block, state in zip(self.model.model.layers, states, strict=True):
            x, state = block(x, state=state)
            after.append(state)
        return x, after

    @torch.inference_mode()
    def step_(self, token: Int[Tensor, "R 1"], states: Sequence[LayerState]) -> Float[Tensor, "R vocabulary"]:
        """`FastWeightsForCausalLM.step_`: overwrites ``states``."""
        if not self.compiled:
            return self.model.step_(token, states)
        x = self.model.model.embed_tokens(token)
        y = torch.zeros_like(x)
        for block, (step, _, _), state in zip(self.model.model.layers, self._parts, states, strict=True):
            x, y = step(block, x, y, state)
        if places := [state.place for state in states if isinstance(state, MemoryState)]:
            torch._foreach_add_(places, 1)  # in one launch
        return self._last(self.model, x, y)

    def _read_compiled(self, x: Hidden, states: Sequence[LayerState]) -> tuple[Hidden, list[LayerState]]:
        y, after = torch.zeros_like(x), []
        for block, (_, before, behind), state in zip(self.model.model.layers, self._parts, states, strict=True):
            if isinstance(state, SoftmaxState):  # its keys and values grow with every piece
                x, state = block(x + y, state=state)
                y = torch.zeros_like(x)
            else:
                x, h, operands = before(block, *_any_length(x, y), state)
                o, state = block.mixer.remember(operands, state)
                x, y = behind(block, *_any_length(x, h, o))
            after.append(state)
        return x + y, after


def compiled(function: Callable, dynamic: bool | None = None) -> Callable:
    """``function`` compiled as one graph, apart from other copies: torch counts what it compiles of a function in all the process, and
    stops at eight. So each kind of block of each engine has its own."""
    assert isinstance(function, FunctionType)
    copy = FunctionType(function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    return torch.compile(copy, fullgraph=True, dynamic=dynamic)


def _any_length(*tensors: Tensor) -> tuple[Tensor, ...]:
    """They, for the compiler not to take their number of tokens for a constant."""
    for x in tensors:
        torch._dynamo.mark_dynamic(x, 1)
    return tensors


def _before(block: FastWeightsBlock, x: Hidden, y: Hidden, state: LayerState) -> tuple[Hidden, Hidden, Operands]:
    x = x + y
    h = block.mixer_norm(x)
    return x, h, block.mixer.operands(h, state)


def _after(block: FastWeightsBlock, x: Hidden, h: Hidden, o: Value) -> tuple[Hidden, Hidden]:
    return _fed(block, x, block.mixer.output(h, o))


def _block_step(block: FastWeightsBlock, x: Hidden, y: Hidden, state: LayerState) -> tuple[Hidden, Hidden]:
    x = x + y
    later = {} if isinstance(state, SoftmaxState) else {"move_on": False}
    return _fed(block, x, block.mixer.step_(block.mixer_norm(x), state, **later))


def _fed(block: FastWeightsBlock, x: Hidden, y: Hidden) -> tuple[Hidden, Hidden]:
    if block.mlp is None or block.mlp_norm is None:
        return x, y
    x = x + y
    return x, block.mlp(block.mlp_norm(x))


def _last(model: FastWeightsForCausalLM, x: Hidden, y: Hidden) -> Tensor:
    return model.lm_head(model.model.norm(x + y)).squeeze(1)
