"""Bits per byte and perplexity by context length, in constant memory.

The same tokens are scored at every context length: stretches of the longest length are taken from documents, each from a single one, and
for a context of L tokens each stretch is cut into windows of L, at the beginning of which the memory is empty. What changes from point
to point is only how much the model could have read before. (Where L does not divide the longest, its windows end where the stretch ends,
and the stretch's first tokens are left out.) A window is fed in chunks through the model's cache, so that a window of a
million tokens needs no more memory than a chunk.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from fastweights.evaluate.statistics import Estimate, Numbers, ratio_estimate

LOGITS = {"cpu": 2**25, "cuda": 2**28}
"""Most logits that exist at a time, by the kind of device: a GPU wants more work in a call."""
FIRST_BUCKET = 16
"""Tokens of the first bucket of the curve over position; from there on two buckets an octave."""


class LengthScore(NamedTuple):
    """All scored tokens at one context length."""

    length: int
    """Tokens of context at most: those of a window."""
    bits_per_byte: Estimate
    """Over all tokens."""
    tail_bits_per_byte: Estimate
    """Over the last `tail` tokens of each window."""
    perplexity: float
    """exp of the mean nats per token."""
    tail_perplexity: float
    """The same over the last `tail` tokens of each window."""
    tokens: int
    documents: int
    per_document: list[tuple[float, float]]
    """(bits, bytes) of each document, in the same order for every model: what a paired comparison needs."""


class PositionScore(NamedTuple):
    """The tokens at places `begin` to `end` of the longest windows."""

    begin: int
    end: int
    bits_per_byte: Estimate


class LengthCurve(NamedTuple):
    lengths: list[LengthScore]
    positions: list[PositionScore]


class Stretch(NamedTuple):
    """Targets `begin + 1` to `begin + longest` of a document."""

    document: int
    begin: int


@torch.inference_mode()
def score_lengths(
    model: PreTrainedModel,
    documents: Sequence[NDArray],
    *,
    lengths: Sequence[int],
    tokens: int,
    bytes_per_token: Numbers | None = None,
    tail: int = 2048,
    chunk: int = 2048,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> LengthCurve:
    """Score any causal language model of transformers at each context length.

    Args:
        documents: token ids of each; those shorter than the longest length and one more are left out.
        lengths: contexts in tokens. Those that divide the longest score all tokens of the stretches.
        tokens: how many tokens to score at each length, at most, drawn by `choose_stretches`.
        bytes_per_token: of each document; None for byte-level tokens.
        tail: tokens at the end of each window that are also scored apart.
        chunk: tokens of a window that are fed at a time.
        on_progress: called with (tokens scored, tokens in all).

    Raises:
        ValueError: impossible lengths, or no document is long enough.
    """
    longest = max(lengths)
    if min(lengths) < 1:
        raise ValueError(f"lengths={list(lengths)}: each must be positive")
    stretches = choose_stretches([len(document) for document in documents], longest, tokens)
    rate = np.ones(len(documents)) if bytes_per_token is None else np.asarray(bytes_per_token, np.float64)
    chosen = sorted({stretch.document for stretch in stretches})
    total, done = sum(longest // length * length for length in lengths) * len(stretches), 0
    scores = []
    for length in lengths:
        sums = _Sums.zeros(len(documents), length)
        windows = [(d, begin + j) for d, begin in stretches for j in range(longest % length, longest, length)]
        for group in _batched(windows, _rows(model, min(length, chunk))):
            ids = torch.stack([torch.from_numpy(documents[d][at : at + length + 1].astype(np.int64)) for d, at in group])
            owners = np.array([d for d, _ in group])
            for begin, nats in stream_nats(model, ids.to(model.device), chunk=chunk):
                sums.add(owners, begin, nats.double().cpu().numpy(), tail)
                done += nats.numel()
                on_progress(done, total)
        scores.append(sums.score(chosen, rate))
        if length == longest:
            positions = sums.positions(rate)
    return LengthCurve(scores, positions)


def choose_stretches(document_lengths: Sequence[int], longest: int, tokens: int) -> list[Stretch]:
    """Stretches of `longest` tokens from anywhere in the documents, each equally likely and none twice, until `tokens` are reached.

    The same stretches every time: the draw has a fixed seed.

    Raises:
        ValueError: no document has `longest + 1` tokens.
    """
    whole = [Stretch(document, begin) for document, n in enumerate(document_lengths) for begin in range(0, n - longest, longest)]
    if not whole:
        most = max(document_lengths, default=0)
        raise ValueError(f"no document has {longest + 1} tokens; the longest of {len(document_lengths)} has {most}")
    order = np.random.default_rng(0).permutation(len(whole))
    return [whole[i] for i in order[: max(1, tokens // longest)]]


def stream_nats(model: PreTrainedModel, ids: Int[Tensor, "R L_plus_one"], *, chunk: int) -> Iterator[tuple[int, Float[Tensor, "R c"]]]:
    """−log p in nats of ids[:, 1:], given all before in the row, as (begin, piece) in pieces of `chunk` tokens."""
    carried: dict = {}
    length = ids.shape[1] - 1
    for begin in range(0, length, chunk):
        end = min(begin + chunk, length)
        output = model(input_ids=ids[:, begin:end], use_cache=length > chunk, **carried)
        name = "cache" if "cache" in output else "past_key_values"  # transformers renamed it
        carried = {name: output[name]} if length > chunk else {}
        logits = output.logits.flatten(0, 1).float()
        yield begin, F.cross_entropy(logits, ids[:, begin + 1 : end + 1].flatten(), reduction="none").view(len(ids), end - begin)


def _rows(model: PreTrainedModel, columns: int) -> int:
    """Windows scored side by side."""
    most = LOGITS.get(model.device.type, LOGITS["cpu"])
    return max(1, min(16384, most // model.config.vocab_size) // columns)


def _batched(items: list, size: int) -> Iterator[list]:
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]


@dataclass
class _Sums:
    """Nats and counts by document: of all tokens, of the tails, and by bucket of position."""

    length: int
    edges: NDArray[np.int64]
    nats: NDArray[np.float64]
    count: NDArray[np.float64]
    tail_nats: NDArray[np.float64]
    tail_count: NDArray[np.float64]

    @classmethod
    def zeros(cls, documents: int, length: int) -> _Sums:
        steps = math.ceil(2 * math.log2(max(1.0, length / FIRST_BUCKET)))
        edges = np.unique([0, *(min(length, round(FIRST_BUCKET * 2 ** (i / 2))) for i in range(steps + 1))])
        by_bucket = np.zeros((2, documents, len(edges) - 1))
        by_document = np.zeros((2, documents))
        return cls(length, edges, *by_bucket, *by_document)

    def add(self, owners: NDArray[np.int64], begin: int, nats: NDArray[np.float64], tail: int) -> None:
        places = np.arange(begin, begin + nats.shape[1])
        buckets = np.searchsorted(self.edges, places, side="right") - 1
        np.add.at(self.nats, (owners[:, None], buckets[None, :]), nats)
        np.add.at(self.count, (owners[:, None], buckets[None, :]), 1.0)
        last = places >= self.length - tail
        np.add.at(self.tail_nats, owners, nats[:, last].sum(1))
        np.add.at(self.tail_count, owners, float(last.sum()))

    def score(self, chosen: Sequence[int], rate: NDArray[np.float64]) -> LengthScore:
        bits, byte = self.nats.sum(1) / math.log(2), self.count.sum(1) * rate
        return LengthScore(
            length=self.length,
            bits_per_byte=ratio_estimate(bits, byte),
            tail_bits_per_byte=ratio_estimate(self.tail_nats / math.log(2), self.tail_count * rate),
            perplexity=math.exp(self.nats.sum() / self.count.sum()),
            tail_perplexity=math.exp(self.tail_nats.sum() / self.tail_count.sum()),
            tokens=int(self.count.sum()),
            documents=len(chosen),
            per_document=[(float(bits[d]), float(byte[d])) for d in chosen],
        )

    def positions(self, rate: NDArray[np.float64]) -> list[PositionScore]:
        bits, byte = self.nats / math.log(2), self.count * rate[:, None]
        return [
            PositionScore(int(begin), int(end), ratio_estimate(bits[:, i], byte[:, i]))
            for i, (begin, end) in enumerate(itertools.pairwise(self.edges))
        ]
