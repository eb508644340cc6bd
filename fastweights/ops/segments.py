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

Where all chunks at once are too much, `spans` divides the work into pieces of the same kind, each some rows over some moments:

    for span in segments.spans(limit):           # backward in time: reversed(segments.spans(limit))
        k = span.cut(key)                        # only the span's chunks
        rows = S[span.top : span.top + span.rows]
        for step in span.steps: ...
        span.join(o, out=output)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, takewhile

import torch
from torch import Tensor

SHORTEST = 16
"""Chunks are not shrunk below this many tokens."""


@dataclass(frozen=True)
class Segments:
    """The cut of one call, or a span of it. Make it with `Segments.of`; it is cheap and never cached (a stale index would be silent)."""

    batch: int
    tokens: int
    chunk: int
    """C."""
    rows: int
    """How many rows of state it moves; for the whole R: the batch, or the documents."""
    alive: list[int]
    """How many of its rows have a chunk at each of its moments."""
    top: int = 0
    """Its first row of sorted state."""
    first: int = 0
    """Its first moment: which chunk of a row its first step holds."""
    offset: int = 0
    """How many chunks the spans before it hold."""
    documents: tuple[Tensor, Tensor] | None = None
    """Packed documents only: start and length of each, in the sorted order."""
    order: Tensor | None = None
    """Packed documents only: the document in each sorted row ``[R]``."""

    @staticmethod
    def of(batch: int, tokens: int, cu_seqlens: Tensor | None = None, chunk: int = 64) -> Segments:
        """Cut ``[batch, tokens]``, or the documents that ``cu_seqlens`` bounds, into chunks of at most ``chunk`` tokens.

        Where no document fills half a chunk, the chunk is halved (down to 16 tokens). Documents need their lengths on the host: with
        ``cu_seqlens`` on a CUDA device this waits for the device.
        """
        if cu_seqlens is None or len(cu_seqlens) == 2:
            chunk = fit(chunk, tokens)
            return Segments(batch, tokens, chunk, batch, [batch] * -(-tokens // chunk))
        starts = cu_seqlens[:-1].long()
        lengths = cu_seqlens[1:].long() - starts
        chunk = fit(chunk, int(lengths.max()))
        chunks = (lengths + chunk - 1).div(chunk, rounding_mode="floor")
        order = chunks.argsort(descending=True, stable=True)
        ended = torch.bincount(chunks).cumsum(0)  # documents of at most n chunks, n = 0 … N
        alive = (len(chunks) - ended[:-1]).tolist()
        return Segments(batch, tokens, chunk, len(chunks), alive, documents=(starts[order], lengths[order]), order=order)

    @property
    def steps(self) -> list[slice]:
        """For every moment the slice of chunks that hold it; chunk ``step.start + i`` belongs to sorted row ``top + i``."""
        bounds = [0]
        for alive in self.alive:
            bounds.append(bounds[-1] + alive)
        return [slice(start, end) for start, end in pairwise(bounds)]

    @property
    def chunks(self) -> int:
        """How many chunks there are in all."""
        return sum(self.alive)

    def spans(self, limit: int) -> list[Segments]:
        """The same chunks in spans of at most ``limit``, one row's in the order of time."""
        spans: list[Segments] = []
        offset = 0
        for top in range(0, self.rows, limit):
            rows = min(limit, self.rows - top)
            alive = [min(count - top, rows) for count in takewhile(top.__lt__, self.alive)]
            first = 0
            while first < len(alive):
                last, held = first + 1, alive[first]
                while last < len(alive) and held + alive[last] <= limit:
                    held += alive[last]
                    last += 1
                spans.append(replace(self, rows=rows, top=top, alive=alive[first:last], first=first, offset=offset))
                first, offset = last, offset + held
        return spans

    def cut(self, x: Tensor, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """``[B, T, H, …] -> [chunks, H, C, …]``, zeros where a chunk has no token; contiguous and fresh, or written into ``out``."""
        if out is None:
            out = x.new_empty((self.chunks, x.shape[2], self.chunk, *x.shape[3:]), dtype=dtype)
        if self.documents is not None:
            token, chunk, place = self._places
            out.zero_().transpose(1, 2)[chunk, place] = x[0, token].to(out.dtype)
            return out
        for tokens, chunks in self._pairs(x, out):
            chunks.copy_(tokens)
        if tail := self._length % self.chunk:
            self._batched(out)[:, -1, tail:] = 0
        return out

    def join(self, y: Tensor, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        """``[chunks, H, C, …] -> [B, T, H, …]``: the inverse of `cut`; a span writes its own tokens into ``out``."""
        if out is None:
            out = y.new_empty((self.batch, self.tokens, y.shape[1], *y.shape[3:]), dtype=dtype)
        if self.documents is not None:
            token, chunk, place = self._places
            out[0, token] = y.transpose(1, 2)[chunk, place].to(out.dtype)
            return out
        for tokens, chunks in self._pairs(out, y):
            tokens.copy_(chunks)
        return out

    def sort(self, state: Tensor) -> Tensor:
        """Rows of state ``[R, …]`` from the caller's order into this layout's; always a copy."""
        return state.clone(memory_format=torch.contiguous_format) if self.order is None else state[self.order]

    def unsort(self, state: Tensor) -> Tensor:
        """The inverse of `sort`; returns its argument where the orders are the same."""
        return state if self.order is None else torch.empty_like(state).index_copy(0, self.order, state)

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Packed documents only: the tokens held, and for each of them its chunk and its place in that."""
        assert self.documents is not None
        starts, lengths = self.documents
        count = torch.tensor(self.alive, dtype=torch.int64, device=starts.device)
        moment = torch.repeat_interleave(count, output_size=self.chunks)
        row = torch.arange(self.chunks, device=starts.device) - (count.cumsum(0) - count)[moment] + self.top
        before = (moment + self.first) * self.chunk  # tokens of the row before this chunk
        within = torch.arange(self.chunk, device=starts.device)
        chunk, place = (within < (lengths[row] - before).unsqueeze(-1)).nonzero(as_tuple=True)
        return (starts[row] + before)[chunk] + place, chunk, place

    @property
    def _length(self) -> int:
        """A batch only: how many tokens of each row are held."""
        return min(self.tokens - self.first * self.chunk, len(self.alive) * self.chunk)

    def _batched(self, chunks: Tensor) -> Tensor:
        """A view of the chunks of a batch ``[N·rows, H, C, …]`` as ``[rows, N, C, H, …]``."""
        return chunks.unflatten(0, (len(self.alive), -1)).movedim(3, 2).transpose(0, 1)

    def _pairs(self, tokens: Tensor, chunks: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of equal shape that cover the tokens held and their chunks: the full chunks, and the last, partly filled one."""
        if not self.alive:
            return
        start, (whole, tail) = self.first * self.chunk, divmod(self._length, self.chunk)
        tokens, chunks = tokens[self.top : self.top + self.rows, start : start + self._length], self._batched(chunks)
        yield tokens[:, : whole * self.chunk].unflatten(1, (whole, self.chunk)), chunks[:, :whole]
        if tail:
            yield tokens[:, whole * self.chunk :], chunks[:, whole, :tail]


def fit(chunk: int, longest: int) -> int:
    """The chunk size for documents of up to ``longest`` tokens: halved (down to 16) until the longest fills more than half of it."""
    while chunk > SHORTEST and longest <= chunk // 2:
        chunk //= 2
    return chunk
