"""What a read rule is: from a token's query and the keys so far, the query that reads the memory."""

from __future__ import annotations

from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from fastweights import ops
from fastweights.notation import CCQState, Coefficients, CuSeqlens, Key, Memory, Query, Value
from fastweights.options import build_options
from fastweights.precision import Float32Module


@runtime_checkable  # the shape checker of the tests asks
class Write(Protocol):
    """What a read needs to know of the write rule it is paired with."""

    name: ClassVar[str]
    num_heads: int
    num_value_heads: int
    head_k_dim: int
    keys_bounded: bool
    head_decay: bool
    key_scale_per_value_head: bool


class ReadRule(Float32Module):
    """A read rule. Its parameters are gates, so all of them act in float32. Options by name; the flat names are ``<rule>_<option>``."""

    name: ClassVar[str]
    Options: ClassVar[type]

    def __init__(self, write: Write, **options) -> None:
        super().__init__()
        self.options = build_options(f"read rule {self.name!r}", self.Options, options)

    def initial_state(self, rows: int, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32) -> CCQState | None:
        """The state before the first token; None for a rule that keeps none."""
        raise NotImplementedError

    def operands(self, q: Query, coef: Coefficients) -> tuple[Tensor | None, ...]:
        """What `forward` first makes of each token by itself, for whoever wants that done apart: the engine compiles it."""
        return ()

    def forward(
        self,
        q: Query,
        k: Key,
        coef: Coefficients,
        *,
        operands: tuple[Tensor | None, ...] | None = None,
        state: CCQState | None = None,
        cu_seqlens: CuSeqlens | None = None,
        backend: str = "auto",
    ) -> tuple[Query, CCQState | None]:
        """The query to read with, in q's dtype and still without ``coef.query_scale``; and the new state, never aliasing ``state``.

        ``k`` is the key before ``coef.key_scale``. ``operands`` are those of `operands`, if they are at hand.
        ``state`` and ``cu_seqlens`` are as in `fastweights.ops`.
        """
        raise NotImplementedError

    def step_(self, q: Query, k: Key, coef: Coefficients, state: CCQState | None, *, backend: str = "auto") -> Query:
        """`forward` for a few tokens, for inference: overwrites the tensors of ``state``; no gradients."""
        raise NotImplementedError

    def write_and_read_(
        self,
        q: Query,
        k: Key,
        v: Value,
        coef: Coefficients,
        memory: Memory,
        state: CCQState | None,
        *,
        family: str,
        scale: float,
        backend: str = "auto",
    ) -> Value:
        """A few tokens of the write rule's ``family`` read with `step_`, for inference: overwrites ``memory`` and ``state``; returns o."""
        q = self.step_(q, k, coef, state, backend=backend)
        return {"delta": ops.delta_step_, "decay": ops.decay_step_}[family](q, k, v, coef, memory, scale=scale, backend=backend)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in vars(self.options).items())
