"""Sequence parallelism is exact: a sequence in four shards, each summarised alone, the summaries composed by a parallel prefix scan, and
every shard run from the state it is owed, gives the layer's outputs and gradients in one pass. docs/scaling.md derives it."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fastweights import ops
from fastweights.layers import FastWeightAttention
from fastweights.notation import CCQState, MemoryState

LENGTHS = (7, 2, 18, 5)
"""Of the shards; the second is shorter than the convolution reaches."""
MIXERS = {
    "decay, a gate a channel": {"mixer": "gla+ccq"},
    "decay, a gate a head": {"mixer": "mamba2+ccq", "ccq_forget": "memory"},
    "delta": {"mixer": "kla+ccq", "sequence_factor": "1/t"},
    "delta, Σ forgets": {"mixer": "gated_deltanet+ccq", "ccq_forget": "memory"},
}


class Summary(NamedTuple):
    """What a shard does to any state that comes in: S -> M S + D, and a covariance to be merged behind the faded one."""

    M: Tensor
    """``[R, Hv, K, K]``: diagonal in the decay family, where it would travel as a vector."""
    D: Tensor
    """``[R, Hv, K, V]``: the state after the shard alone."""
    kept: Tensor
    """α ``[R, Hk]``: what is left of a weight of CCQ over the shard."""
    moments: CCQState


def then(first: Summary, second: Summary) -> Summary:
    """Both shards as one."""
    M, D = second.M @ first.M, second.M @ first.D + second.D
    A, B, alpha = first.moments, second.moments, second.kept
    faded = alpha * A.weight
    w = faded + B.weight
    δ = B.mean - A.mean
    mean = A.mean + (B.weight / w).unsqueeze(-1) * δ
    between = (faded * B.weight / w)[..., None, None] * δ.unsqueeze(-1) * δ.unsqueeze(-2)
    C = alpha[..., None, None] * A.covariance + B.covariance + between
    return Summary(M, D, first.kept * alpha, CCQState(C, mean, w))


def summarise(layer: FastWeightAttention, q: Tensor, k: Tensor, v: Tensor, coef) -> Summary:
    """By the forms that there are: D from no state, M from the identity with nothing to write, Σ's moments from no keys."""
    D = layer.recurrence(q, k, v, coef)[1]
    identity = torch.eye(k.shape[-1], dtype=D.dtype).expand(*D.shape[:2], -1, -1)
    nothing = v.new_zeros(*v.shape[:3], k.shape[-1])
    M = layer.recurrence(q, k, nothing, coef, state=identity)[1]
    lam, key_scale, log_decay = layer.read.operands(q, coef)
    options = {"key_scale": key_scale, "log_decay": log_decay, "unit_keys": layer.read.unit_keys, "eps": layer.read.options.eps}
    moments = ops.ccq_query(q, k, lam, **options)[1]
    kept = torch.ones_like(moments.weight) if log_decay is None else log_decay.sum(1).exp()
    return Summary(M, D, kept, moments)


def prefix_scan(summaries: list[Summary]) -> list[Summary]:
    """All shards up to each one as one, in log₂ rounds in which each shard takes from one other (Hillis and Steele)."""
    distance = 1
    while distance < len(summaries):
        summaries = [then(summaries[i - distance], s) if i >= distance else s for i, s in enumerate(summaries)]
        distance *= 2
    return summaries


def in_shards(layer: FastWeightAttention, x: Tensor) -> tuple[list[Tensor], list[MemoryState]]:
    """Each shard's outputs, and its state at the end."""
    pieces = x.split(LENGTHS, dim=1)
    qkv = layer.qkv_proj(x)  # of a token alone: each shard makes its own, and sends the last W − 1 on
    reach = torch.cat([qkv.new_zeros(x.shape[0], layer.conv.size - 1, qkv.shape[-1]), qkv], dim=1)
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    halos = [reach[:, start : start + layer.conv.size - 1] for start in starts]
    summaries = []
    for piece, mine, halo, start in zip(pieces, qkv.split(LENGTHS, dim=1), halos, starts, strict=True):
        position = (start + torch.arange(piece.shape[1])).expand(piece.shape[0], -1)
        summaries.append(summarise(layer, *layer._by_heads(piece, layer.conv(mine, state=halo)[0], position)))
    before = layer.initial_state(x.shape[0])
    incoming = [before] + [
        MemoryState(memory=s.D, conv=halo, place=torch.full_like(before.place, start), read=s.moments)
        for s, halo, start in zip(prefix_scan(summaries), halos[1:], starts[1:], strict=False)
    ]
    done = [layer(piece, state=state) for piece, state in zip(pieces, incoming, strict=True)]
    return [y for y, _ in done], [state for _, state in done]


@pytest.mark.parametrize("mixer", MIXERS)
def test_shards_composed_are_one_pass(mixer):
    """In float64, to the rounding of as many steps as there are tokens: outputs, the last state and the gradient that crosses shards."""
    layer, x = layer_and_tokens(**MIXERS[mixer])
    y, last = layer(x)
    outputs, states = in_shards(layer, x)

    def same(a: Tensor, b: Tensor) -> None:
        torch.testing.assert_close(a, b, rtol=0, atol=sum(LENGTHS) * torch.finfo(torch.float64).eps * b.abs().max().item())

    same(torch.cat(outputs, dim=1), y)
    assert torch.equal(states[-1].place, last.place)
    for ours, theirs in zip((*states[-1][:2], *states[-1].read), (*last[:2], *last.read), strict=True):
        same(ours, theirs)
    direction = torch.randn_like(y)
    (whole,) = torch.autograd.grad((y * direction).sum(), x)
    (composed,) = torch.autograd.grad((torch.cat(outputs, dim=1) * direction).sum(), x)
    same(composed, whole)


@pytest.mark.parametrize("part", MemoryState._fields)
def test_no_part_of_the_state_can_be_left_out(part):
    """The other test would see it."""
    layer, x = layer_and_tokens(**MIXERS["delta"])
    first, second = x.split([20, 12], dim=1)
    state = layer(first)[1]
    without = state._replace(**{part: getattr(layer.initial_state(2), part)})
    assert (layer(second, state=state)[0] - layer(second, state=without)[0]).abs().max() > 1e-6


def layer_and_tokens(**options) -> tuple[FastWeightAttention, Tensor]:
    layer = FastWeightAttention(hidden_size=24, num_heads=2, head_k_dim=6, head_v_dim=8, **options).double()
    torch.nn.init.normal_(layer.read.lambda_weight)
    return layer, torch.randn(2, sum(LENGTHS), 24, dtype=torch.float64, requires_grad=True)
