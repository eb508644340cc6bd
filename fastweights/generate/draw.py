"""Sampling on the device, one token a row, every row with its own settings; nothing waits for the host.

A row's randomness is a function of (its seed, how many tokens its request has drawn) and of nothing else: no generator is advanced, so
neighbours in the batch, the row and the time of joining change nothing. The one uniform number a token is looked up in the distribution,
laid out from the likeliest token down: all filters keep a beginning of that order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fastweights.generate.sampling import Sampling


class Dials(NamedTuple):
    """The settings of every row, each ``[R]``, as `Sampling` has them."""

    penalty: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    drawn: Tensor
    """How many tokens the row's request has drawn."""

    @classmethod
    def of(cls, rows: int, device: torch.device) -> Dials:
        neutral = (1.0, 0.0, 0, 1.0, 0.0, 0, 0)
        dtypes = {float: torch.float64, int: torch.int64}
        return cls(*(torch.full((rows,), value, dtype=dtypes[type(value)], device=device) for value in neutral))

    def set(self, row: int, sampling: Sampling, seed: int, drawn: int) -> None:
        values = (sampling.repetition_penalty, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, seed, drawn)
        for dial, value in zip(self, values, strict=True):
            dial[row] = value


def draw(logits: Float[Tensor, "R vocabulary"], seen: Bool[Tensor, "R vocabulary"], dials: Dials) -> Int[Tensor, " R"]:
    """A token for each row. ``seen`` marks the tokens that ``penalty`` is for. A row of NaN gives some token."""
    penalty = dials.penalty.to(logits.dtype).unsqueeze(1)
    logits = logits.where(~seen, torch.where(logits > 0, logits / penalty, logits * penalty))
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    greedy = dials.temperature == 0
    p = (values.double() / dials.temperature.where(~greedy, 1).unsqueeze(1)).softmax(-1)

    top_k = dials.top_k.where(dials.top_k > 0, logits.shape[1]).unsqueeze(1)
    p = p.where(torch.arange(logits.shape[1], device=p.device) < top_k, 0)
    before = p.cumsum(-1) - p
    top_p = (dials.top_p * p.sum(-1)).where(dials.top_p < 1, torch.inf).unsqueeze(1)
    p = p.where((before < top_p) & (p >= dials.min_p.unsqueeze(1) * p[:, :1]), 0)

    cumulated = p.cumsum(-1)
    target = uniform(dials.seed, dials.drawn) * cumulated[:, -1]
    place = (cumulated <= target.unsqueeze(1)).sum(-1)
    last = (p > 0).sum(-1) - 1  # rounding may lead past it
    place = torch.minimum(place, last).clamp(min=0).where(~greedy, 0)
    return order.gather(1, place.unsqueeze(1)).squeeze(1)


def uniform(seed: Int[Tensor, " R"], drawn: Int[Tensor, " R"]) -> Float[Tensor, " R"]:
    """A number in [0, 1) of 53 bits for each (seed, drawn): the finaliser of SplitMix64 (Steele, Lea & Flood 2014), twice.

    The first takes the seed to the start of a stream, so that streams of neighbouring seeds are not shifts of each other.
    """
    return (_mixed(_mixed(seed) + (drawn + 1) * _signed(0x9E3779B97F4A7C15)) >> 11 & 2**53 - 1).double() * 2.0**-53


def _mixed(x: Tensor) -> Tensor:
    """A bijection of 64-bit numbers without visible structure; products wrap, and shifts bring in zeros."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> shift & 2 ** (64 - shift) - 1)) * _signed(factor)
    return x ^ (x >> 31 & 2**33 - 1)


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x
