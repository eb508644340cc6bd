"""The raw read: o_t = S_tᵀ q_t, the query as it is."""

from __future__ import annotations

import dataclasses

from fastweights.read.base import ReadRule


class Raw(ReadRule):
    name = "raw"

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Options:
        pass

    def initial_state(self, rows, device=None, dtype=None) -> None:
        return None

    def forward(self, q, k, coef, *, operands=None, state=None, cu_seqlens=None, backend="auto"):
        if state is not None:
            raise ValueError("the raw read keeps no state, and was given one: it belongs to a layer with another read")
        return q, None

    def step_(self, q, k, coef, state, *, backend="auto"):
        return q
