"""The ``decay`` kernels compiled: the parity grid in every dtype, every entry of the table, and what only size shows."""

from functools import partial

import pytest
import torch

from fastweights.notation import Coefficients
from fastweights.ops.reference import reference_decay
from tests.gpu.test_delta_gpu import on_card
from tests.ops.grid import DECAY, Case, bounds, compare, make, run, sample
from tests.ops.test_decay_triton import check

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from fastweights.ops.decay.chunk_triton import CHANNEL_TILES, SMALL_TILE, TILES, chunk_decay_triton
    from fastweights.ops.decay.step_triton import decay_step_triton_
else:
    TILES, CHANNEL_TILES, SMALL_TILE = {}, {}, None

DTYPES = {2: torch.bfloat16, 4: torch.float32}
GATES = tuple(kind for kind in DECAY["decay"] if kind is None or "extreme" not in kind)
"""Shut gates have their own test (tests/ops/test_decay_triton.py says why)."""


@pytest.mark.parametrize(
    "case", sample({**DECAY, "decay": GATES, "dtype": (torch.bfloat16, torch.float16, torch.float32)}, quick=1)
)  # fmt: skip
def test_chunk_is_the_reference(case):
    check(chunk_decay_triton, on_card(make(case)))


@pytest.mark.parametrize("segment", [0, 128])
@pytest.mark.parametrize("entry", [*TILES, "small"], ids=str)
def test_every_entry_of_the_table(entry, segment):
    tile = {**TILES, "small": SMALL_TILE}[entry]
    bytes_, K = (2, 128) if entry == "small" else entry
    problem = on_card(make(Case(T=300, K=K, V=192, heads=(1, 2), rows="packed", dtype=DTYPES[bytes_], decay="mixed", beta=None)))
    check(partial(chunk_decay_triton, tile=tile._replace(segment=segment)), problem)


@pytest.mark.parametrize("gates", ["channel", "channel mixed"])
@pytest.mark.parametrize("segment", [0, 128])
@pytest.mark.parametrize("chunk", [16, 32])
@pytest.mark.parametrize("entry", TILES, ids=str)
def test_decays_per_channel(entry, chunk, segment, gates):
    """Mild ones, which go through products of whole chunks, and such of which some chunks go channel by channel."""
    bytes_, K = entry
    problem = on_card(make(Case(T=300, K=K, V=192, heads=(1, 2), rows="packed", dtype=DTYPES[bytes_], decay=gates, beta=None)))
    form = partial(chunk_decay_triton, tile=CHANNEL_TILES[entry]._replace(chunk=chunk, segment=segment))
    if (entry, chunk) == ((4, 256), 32):  # the gradient of v was wrong there
        with pytest.raises(ValueError, match="take chunks of 16"):
            form(problem.q, problem.k, problem.v, problem.coef)
    else:
        check(form, problem)


@pytest.mark.parametrize("gates", ["model", "channel"])
@pytest.mark.parametrize("entry", TILES, ids=str)
def test_twenty_runs_are_the_same_bits(entry, gates):
    problem = on_card(make(Case(T=300, K=entry[1], V=128, dtype=DTYPES[entry[0]], decay=gates, beta=None)))
    first = run(chunk_decay_triton, problem)
    for _ in range(19):
        again = run(chunk_decay_triton, problem)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_seventy_thousand_documents():
    lengths = torch.randint(0, 3, (70_000,)).tolist()
    cu_seqlens, T = bounds(lengths).cuda(), sum(lengths)
    q, k, v = (torch.randn(1, T, 1, 16, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    o, state = chunk_decay_triton(q, k, v, Coefficients(), cu_seqlens=cu_seqlens)
    last = cu_seqlens[69_000].item()
    tail, tail_state = chunk_decay_triton(
        *(x[:, last:] for x in (q, k, v)), Coefficients(), cu_seqlens=cu_seqlens[69_000:] - last
    )  # fmt: skip
    assert torch.equal(o[:, last:], tail) and torch.equal(state[69_000:], tail_state)


def test_offsets_past_two_to_the_31():
    T = 2**31 // (16 * 128) + 1000
    q, k, v = (torch.randn(1, T, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    cu_seqlens = torch.tensor([0, T - 500, T], device="cuda")
    o, state = chunk_decay_triton(q, k, v, Coefficients(), cu_seqlens=cu_seqlens)
    tail = [x[:, -500:].clone() for x in (q, k, v)]
    alone, alone_state = reference_decay(*(x.float() for x in tail), Coefficients())
    scale = alone.abs().max()
    assert (o[:, -500:].float() - alone).abs().max() <= 0.02 * scale
    assert (state[1:] - alone_state).abs().max() <= 0.02 * alone_state.abs().max()


@pytest.mark.parametrize("kind", [None, "model", "channel"])
@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_step_is_the_recurrence(dtype, T, kind):
    x = on_card(make(Case(T=T, K=128, V=100, heads=(2, 4), rows="two", dtype=dtype, decay=kind, beta=None)))
    exact, plain = (reference_decay(y.q, y.k, y.v, y.coef, scale=y.scale, state=y.state) for y in (x.to(torch.float64), x))
    state = x.state.clone()
    o = decay_step_triton_(x.q, x.k, x.v, x.coef, state, scale=x.scale)
    compare(*(dict(zip(("o", "final state"), pair, strict=True)) for pair in ((o, state), plain, exact)), precision=dtype)
