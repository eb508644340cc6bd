"""How tokens are cut into chunks: one layout for a batch ``[B, T]`` and for documents packed into one row.

Every row (or document) is cut into chunks of C tokens; its last chunk is filled up with zeros, which every recurrence reads as "no token":
no decay, nothing written. Chunks lie "time-major": first the first chunk of every document, then every second chunk, and so on, documents
ordered by their number of chunks, longest first. The documents that still have a chunk n are then always the first ones, so a recurrence
over chunks is a loop of as many steps as the longest document has chunks, each step one batched product over the rows still alive:

    S = segments.sort(state)
    for step in segments.steps:                  # step: the slice of chunks of this moment
        alive = S[: step.stop - step.start]
        ... k[step] ...                          # [rows alive, H, C, K]
    state = segments.unsort(S)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

SHORTEST = 16
"""Chunks are not shrunk below this many tokens."""


@dataclass(frozen=True)
class Segments:
    """The cut of one call. Make it with `Segments.of`; it is cheap and is never cached (an index that outlives its call goes stale)."""

    batch: int
    tokens: int
    chunk: int
    """C."""
    rows: int
    """R: rows of state; the batch, or the number of documents."""
    steps: list[slice]
    """For every moment n the slice of chunks that hold it; chunk ``step.start + i`` belongs to sorted row i."""
    place: tuple[Tensor, Tensor] | None
    """Packed documents only: the chunk of every token, and its place in it, both ``[T]``."""
    order: Tensor | None
    """Packed documents only: the document in each sorted row ``[R]``."""

    @staticmethod
    def of(batch: int, tokens: int, cu_seqlens: Tensor | None = None, chunk: int = 64) -> Segments:
        """Cut ``[batch, tokens]``, or the documents that ``cu_seqlens`` bounds, into chunks of at most ``chunk`` tokens.

        Where no document fills half a chunk, the chunk is halved (down to 16 tokens). Documents need their lengths on the host: with
        ``cu_seqlens`` on a CUDA device this waits for the device.
        """
        if cu_seqlens is None or len(cu_seqlens) == 2:
            chunk = fit(chunk, tokens)
            count = -(-tokens // chunk)
            return Segments(batch, tokens, chunk, batch, [slice(n * batch, (n + 1) * batch) for n in range(count)], None, None)
        starts = cu_seqlens[:-1].long()
        lengths = cu_seqlens[1:].long() - starts
        chunk = fit(chunk, int(lengths.max()))
        chunks = (lengths + chunk - 1).div(chunk, rounding_mode="floor")
        order = chunks.argsort(descending=True, stable=True)
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device=order.device)
        ended = torch.bincount(chunks)  # documents of exactly n chunks, n = 0 … N
        alive = len(chunks) - ended.cumsum(0)[:-1]  # documents of more than n chunks, n = 0 … N-1
        bounds = [0, *alive.cumsum(0).tolist()]
        first = torch.tensor(bounds, device=order.device)
        document = torch.repeat_interleave(lengths, output_size=tokens)
        position = torch.arange(tokens, device=order.device) - starts[document]
        n = position.div(chunk, rounding_mode="floor")
        place = (first[n] + rank[document], position - n * chunk)
        steps = [slice(start, end) for start, end in pairwise(bounds)]
        return Segments(batch, tokens, chunk, len(chunks), steps, place, order)

    @property
    def chunks(self) -> int:
        """How many chunks there are in all."""
        return self.steps[-1].stop if self.steps else 0

    def cut(self, x: Tensor, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """``[B, T, H, …] -> [chunks, H, C, …]``, zeros where a chunk has no token; contiguous and fresh, or written into ``out``."""
        if out is None:
            out = x.new_empty((self.chunks, x.shape[2], self.chunk, *x.shape[3:]), dtype=dtype)
        if self.place is not None:
            out.zero_().transpose(1, 2)[self.place] = x[0].to(out.dtype)
            return out
        for tokens, chunks in self._pairs(x, out):
            chunks.copy_(tokens)
        if tail := self.tokens % self.chunk:
            self._batched(out)[:, -1, tail:] = 0
        return out

    def join(self, y: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """``[chunks, H, C, …] -> [B, T, H, …]``: the inverse of `cut`."""
        if self.place is not None:
            return y.transpose(1, 2)[self.place].unsqueeze(0).to(dtype or y.dtype)
        out = y.new_empty((self.batch, self.tokens, y.shape[1], *y.shape[3:]), dtype=dtype)
        for tokens, chunks in self._pairs(out, y):
            tokens.copy_(chunks)
        return out

    def sort(self, state: Tensor) -> Tensor:
        """Rows of state ``[R, …]`` from the caller's order into this layout's; always a copy."""
        return state.clone(memory_format=torch.contiguous_format) if self.order is None else state[self.order]

    def unsort(self, state: Tensor) -> Tensor:
        """The inverse of `sort`; returns its argument where the orders are the same."""
        return state if self.order is None else torch.empty_like(state).index_copy(0, self.order, state)

    def _batched(self, chunks: Tensor) -> Tensor:
        """A view of the chunks of a batch ``[N·B, H, C, …]`` as ``[B, N, C, H, …]``."""
        return chunks.unflatten(0, (len(self.steps), self.batch)).movedim(3, 2).transpose(0, 1)

    def _pairs(self, tokens: Tensor, chunks: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of equal shape that cover ``tokens [B, T, H, …]`` and its chunks: the full chunks, and the last, partly filled one."""
        whole, tail = divmod(self.tokens, self.chunk)
        chunks = self._batched(chunks)
        yield tokens[:, : whole * self.chunk].unflatten(1, (whole, self.chunk)), chunks[:, :whole]
        if tail:
            yield tokens[:, whole * self.chunk :], chunks[:, whole, :tail]


def fit(chunk: int, longest: int) -> int:
    """The chunk size for documents of up to ``longest`` tokens: halved (down to 16) until the longest fills more than half of it."""
    while chunk > SHORTEST and longest <= chunk // 2:
        chunk //= 2
    return chunk
