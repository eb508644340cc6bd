"""No kernel touches memory that is not its own, at every kind of call; and the checker finds the faults it is there for."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from fastweights.ops.ccq.forward_triton import Shape, one_shape
from fastweights.ops.ccq.query_triton import ccq_query_triton
from fastweights.ops.ccq.step_triton import ccq_step_triton_
from fastweights.ops.conv.causal_triton import causal_conv_triton
from fastweights.ops.decay.chunk_triton import chunk_decay_triton
from fastweights.ops.decay.segments_triton import Tile
from fastweights.ops.decay.step_triton import decay_step_triton_
from fastweights.ops.delta.chunk_triton import TILES, chunk_delta_triton
from fastweights.ops.delta.step_triton import delta_step_triton_
from fastweights.ops.token.head_dots_triton import head_dots_triton
from fastweights.ops.token.matvec_triton import matvec_triton
from tests.ops import ccq_loop
from tests.ops import test_conv as conv_cases
from tests.ops.grid import Case, bounds, make, run
from tests.ops.memcheck import MemoryFault, watched

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="watches the interpreter; on a card, compute-sanitizer does this")
FULL = pytest.mark.full
LENGTHS = [0, 1, 16, 0, 20, 0]


@triton.jit
def shift_kernel(x, y, n, BARRIER: tl.constexpr, BLOCK: tl.constexpr):
    """y = x, moved on by one place within a block."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n)
    if BARRIER:
        tl.debug_barrier()
    tl.store(y + i + 1, value, mask=i + 1 < n)


@pytest.mark.parametrize(
    "blocks, length, in_place, barrier, told",
    [
        (1, 31, False, False, None),
        (1, 40, False, False, "outside every tensor"),
        (1, 31, True, False, "its other threads may not have read yet"),
        (1, 31, True, True, None),
        (2, 63, True, True, "reads what another program wrote"),
    ],
)
def test_faults_are_found(blocks, length, in_place, barrier, told):
    x = torch.arange(32.0 * blocks)
    y = x if in_place else torch.empty_like(x)

    def call():
        with watched():
            shift_kernel[(blocks,)](x, y, length, BARRIER=barrier, BLOCK=64 if length == 40 else 32)

    if told is None:
        call()
        assert torch.equal(y[1:length], torch.arange(length - 1.0))
    else:
        with pytest.raises(Exception) as raised:
            call()
        assert isinstance(raised.value.__cause__, MemoryFault) and told in str(raised.value.__cause__)


def finite(named) -> None:
    for name, x in named.items():
        assert x.isfinite().all(), f"{name} holds numbers that nobody wrote"


@pytest.mark.parametrize("segment", [0, pytest.param(64, marks=FULL), pytest.param(-64, marks=FULL)])
@pytest.mark.parametrize("rows", ["packed", pytest.param("two", marks=FULL)])
def test_delta(rows, segment):
    x = make(Case(T=100 if segment else 20, K=20, V=24, heads=(1, 2), rows=rows, decay="mixed", scales=("Hv", "Hk", "Hk")))
    tiles = next(iter(TILES.values()))._replace(segment=segment)
    with watched():
        found = run(partial(chunk_delta_triton, tiles=tiles), x)
    finite(found)


@pytest.mark.parametrize("warps", [4, pytest.param(1, marks=FULL)])
@pytest.mark.parametrize("decay", ["mixed", pytest.param("channel mixed", marks=FULL), pytest.param(None, marks=FULL)])
def test_decay(decay, warps):
    x = make(Case(T=18, K=16, V=20, heads=(1, 2), rows="packed", decay=decay, beta=None, scales=("Hv", "Hk", "Hk")))
    with watched():
        found = run(partial(chunk_decay_triton, tile=Tile(16, 16, warps, 1, 32)), x)
    finite(found)


@pytest.mark.full
def test_decay_per_channel():
    """Chunks of mild decays, which are products, and of strong ones, in pieces of 16."""
    x = make(Case(T=85, K=16, V=20, heads=(1, 2), rows="packed", decay="channel", beta=None, scales=("Hv", "Hk", "Hk")))
    x.coef.log_decay[:, 40:60] = -50.0
    with watched():
        found = run(partial(chunk_decay_triton, tile=Tile(32, 16, 4, 1, 64)), x)
    finite(found)


@pytest.mark.parametrize("warps", [pytest.param(4, marks=FULL), 1])
def test_ccq(warps):
    x = ccq_loop.draw(T=sum(LENGTHS), B=1, H=1, K=20, dtype=torch.float32, state=True, rows=6) | {"cu_seqlens": bounds(LENGTHS)}
    with watched():
        found = ccq_loop.differentiate(partial(ccq_query_triton, tiles=one_shape(Shape(16, warps, 1), 32)), x)
    finite(found)


def test_conv():
    x = conv_cases.operands(B=1, T=sum(LENGTHS), rows=6, dtype=torch.float32)
    with watched():
        found = conv_cases.differentiate(lambda x, w, b, s: causal_conv_triton(x, w, bias=b, state=s, cu_seqlens=bounds(LENGTHS)), x)
    finite(found)


def test_what_is_made_of_each_token():
    x, token = torch.randn(1, 5, 7 * 20 + 3)[..., 3:].unflatten(-1, (7, 20)), torch.randn(1, 1, 600)
    weights = torch.randn(5, 600), torch.randn(5, 600)
    with watched():
        found = [head_dots_triton(x, None), head_dots_triton(x, torch.randn(7, 20))]
        found += [
            *matvec_triton(token, *weights, False),
            matvec_triton(token, *weights, True)[0],
            matvec_triton(token, weights[0], None, False)[0],
        ]
    finite(dict(enumerate(found)))


@pytest.mark.parametrize("T, K", [(1, 20), pytest.param(3, 20, marks=FULL), (1, 16)])
def test_steps(T, K):
    x = make(Case(T=T, K=K, V=40, heads=(2, 4), rows="two", decay="mixed"))
    c = ccq_loop.draw(T=T, K=K, dtype=torch.float32, state=True)
    memories, moments = [x.state.clone(), x.state.clone()], type(c["state"])(*(t.clone().contiguous() for t in c["state"]))
    with watched():
        o = delta_step_triton_(x.q, x.k, x.v, x.coef, memories[0])
        p = decay_step_triton_(x.q, x.k, x.v, x.coef._replace(beta=None), memories[1])
        q = ccq_step_triton_(c["q"], c["k"], c["lam"], moments)
    finite({"delta": o, "decay": p, "ccq": q, "S": torch.stack(memories), **moments._asdict()})
