"""The ``delta`` kernels in Triton's interpreter, at small sizes; tests/gpu runs the grid, and every entry of the table, on a card."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

import triton
import triton.language as tl

from fastweights.notation import Coefficients
from fastweights.ops.delta.chunk import chunk_delta
from fastweights.ops.delta.chunk_forward_triton import Tiles, segment_size
from fastweights.ops.delta.chunk_triton import chunk_delta_triton, delta_forward
from fastweights.ops.delta.recurrent import recurrent_delta
from fastweights.ops.delta.step_triton import delta_step_triton_
from fastweights.ops.dispatch import delta, delta_step_, explain
from fastweights.ops.reference import reference_delta
from fastweights.ops.tiles_triton import cut, dithered, unit_lower_inverse
from tests.ops.grid import DELTA, Case, check, compare, make, run, sample

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these kernels compiled")

SHAPES = (Tiles(16, 16, 1, 1, 1, 16, 16, 1, 1), Tiles(32, 32, 1, 1, 1, 64, 16, 1, 1), Tiles(64, 64, 1, 1, 1, 32, 64, 1, 1))
SPLIT = SHAPES[0]._replace(segment=32)
KEPT = SHAPES[0]._replace(segment=-48)
SMALL = {
    **DELTA,
    "T": (65, 0, 1, 17, 100),
    "K": (16, 20, 96),
    "V": (16, 20, 96),
    "dtype": (torch.float32, torch.float16),
    "heads": ((1, 1), (1, 3)),
    "decay": ("model", None, "mixed"),
}


GRID = [pytest.param(*p.values, [*SHAPES, SPLIT, KEPT][i // 9 % 5], id=p.id, marks=p.marks) for i, p in enumerate(sample(SMALL, quick=9))]
"""Each shape of tiles meets other cases of the grid."""


@pytest.mark.parametrize("case, tiles", GRID)
def test_chunk_is_the_reference(case, tiles):
    check(partial(chunk_delta_triton, tiles=tiles), reference_delta, make(case))


@pytest.mark.parametrize("C", [16, 32, 64])
@pytest.mark.parametrize("keys", ["random", "identical"])
def test_inverse_of_a_unit_triangle(C, keys):
    A = (torch.randn(C, C) * 0.3 if keys == "random" else torch.full((C, C), 1.9)).tril(-1)
    X = torch.empty(C, C)
    invert[(1,)](A, X, C)
    exact = torch.linalg.inv(torch.eye(C, dtype=torch.float64) + A)
    bound = exact.abs() @ A.abs().double() @ exact.abs()  # what one rounding of every product may do
    assert (X - exact).abs().max() <= torch.finfo(X.dtype).eps * bound.max()


@triton.jit
def invert(a, x, C: tl.constexpr):
    i = tl.arange(0, C)
    place = i[:, None] * C + i[None, :]
    tl.store(x + place, unit_lower_inverse(tl.load(a + place), C))


@pytest.mark.parametrize("beta", [0.6, 1.3, 1.9])
def test_equal_numbers_do_not_err_alike_in_bfloat16(beta):
    """With equal keys a diagonal of the inverse is one number, and a chunk adds up its roundings: they must not grow with its rows."""
    C = 64
    below = (torch.arange(C)[:, None] - torch.arange(C)).clamp(min=1).double()
    exact = torch.eye(C) - (beta * (1 - beta) ** (below - 1)).float().tril(-1)  # the inverse of 1 + β below the diagonal
    rounded = torch.empty(C, C)
    round_inverse[(1,)](exact, rounded, C)
    assert torch.equal(rounded, rounded.bfloat16().float()) and torch.equal(rounded.diag(), torch.ones(C))
    assert ((rounded - exact).abs() <= torch.finfo(torch.bfloat16).eps * exact.abs()).all()
    for distance in range(1, C):
        unit = torch.exp2(exact.diagonal(-distance).abs().log2().floor() - 7)
        added_up = ((rounded - exact).diagonal(-distance) / unit).cumsum(0)
        assert added_up.abs().max() <= 4  # a unit for each of the Fibonacci numbers that make up a count below 64; to the nearest it is 25
    lost = torch.full((C, C), float("nan"))
    round_inverse[(1,)](lost, rounded, C)
    assert rounded.isnan().all()


@triton.jit
def round_inverse(x, out, C: tl.constexpr):
    i = tl.arange(0, C)
    place = i[:, None] * C + i[None, :]
    tl.store(out + place, dithered(tl.load(x + place), C))


@pytest.mark.parametrize(
    "tiles, precision", [pytest.param(SHAPES[0], None, marks=pytest.mark.full), (SHAPES[2], torch.bfloat16)], ids=["C16", "C64"]
)
def test_identical_keys_at_eta_near_two(tiles, precision):
    """The triangle's worst case: every power of A grows without bound, its inverse does not. Chunks of 64 are for bfloat16 operands."""
    T, H = 96, 4  # several keys, since one alone may fall well for plain torch
    k = torch.randn(1, 1, H, 16).expand(1, T, H, 16)
    x = make(Case(T=T, K=16, V=16, heads=(H, H), decay=None, state=False))
    coef = x.coef._replace(beta=torch.full((1, T, H), 1.9), key_scale=k.norm(dim=-1).reciprocal())
    x = type(x)(**{**vars(x), "k": k, "coef": coef})
    check(partial(chunk_delta_triton, tiles=tiles), chunk_delta, x, precision=precision)


@pytest.mark.parametrize("tiles", [SHAPES[0], SPLIT, KEPT], ids=["whole", "split", "kept"])
def test_documents_do_not_touch_each_other(tiles):
    x = make(Case(T=70, K=16, V=16, heads=(1, 1), rows="packed"))
    other = type(x)(**{**vars(x), "k": x.k.clone()})
    other.k[:, 1:20] = 1.0  # inside the first document of more than one token
    before, after = (run(partial(chunk_delta_triton, tiles=tiles), p) for p in (x, other))
    end = int(x.cu_seqlens[4])
    for name in ("o", "grad q", "grad k", "grad v", "grad beta", "grad log_decay"):
        assert torch.equal(before[name][:, end:], after[name][:, end:]), name
    assert not torch.equal(before["o"][:, :end], after["o"][:, :end])
    assert torch.equal(before["final state"][4:], after["final state"][4:])


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.sampled_from([1, 3, 16]))
@settings(deadline=None, max_examples=60)
def test_pieces_number_every_token_once(lengths, size):
    """What `locate` reads in a kernel, said in Python: no two pieces share a token, none is missing, and the count was known beforehand."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    count, _, owner = cut(1, sum(lengths), size, cu_seqlens)
    assert len(owner) == count
    seen = []
    for piece, document in enumerate(owner.tolist()):
        begin, stop = cu_seqlens[document].item(), cu_seqlens[document + 1].item()
        first = begin + (piece - begin // size - document) * size
        assert first >= begin
        seen += range(first, min(first + size, stop))
    assert seen == list(range(sum(lengths)))


def test_long_rows_of_few_heads_are_split():
    tiles = Tiles(64, 64, 4, 2, 3, 128, 64, 8, 3)
    assert segment_size(1, 131_072, 4, 128, tiles) == (4096, True)  # 32 segments × 4 heads × 2 tiles
    assert segment_size(8, 8192, 8, 128, tiles) == (4096, False)  # the backward's repeat alone
    assert segment_size(64, 8192, 8, 128, tiles) == (8256, False)
    assert segment_size(1, 512, 4, 128, tiles) == (576, False)


@pytest.mark.full
def test_fake_shapes_are_the_real_ones():
    x = make(Case(T=50, K=16, V=16, heads=(1, 2), rows="packed", dtype=torch.float16))
    for tiles in (SHAPES[0], SPLIT, KEPT):
        args = (x.q, x.k, x.v, *x.coef, x.state, x.cu_seqlens, 0.5, list(tiles))
        leaves = [a.clone().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
        torch.library.opcheck(delta_forward, leaves, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))


@pytest.mark.compile
def test_compiles_into_one_graph():
    x = make(Case(T=40, K=16, V=16, heads=(1, 2), scales=("Hk", "Hk", "Hk")))
    form = partial(chunk_delta_triton, tiles=SHAPES[0])
    compiled = torch.compile(form, fullgraph=True, backend="aot_eager")
    eager, graph = run(form, x), run(compiled, x)
    assert all(torch.equal(eager[name], graph[name]) for name in eager)
    step = torch.compile(delta_step_triton_, fullgraph=True, backend="aot_eager")
    state, same = x.state.clone(), x.state.clone()
    assert torch.equal(step(x.q, x.k, x.v, x.coef, state), delta_step_triton_(x.q, x.k, x.v, x.coef, same))
    assert torch.equal(state, same) and not torch.equal(state, x.state)


@pytest.mark.compile
@pytest.mark.parametrize("op, T", [(delta, 20), (delta_step_, 1)])
def test_compiles_through_dispatch(op, T):
    """A twin that dispatch imports while the compiler traces is in the graph, whether or not it was imported before."""
    x = make(Case(T=T, K=16, V=16, heads=(1, 2)))

    def call(state):
        return op(x.q, x.k, x.v, x.coef, state=state, backend="triton")

    eager, graph = call(x.state.clone()), torch.compile(call, fullgraph=True, backend="aot_eager")(x.state.clone())
    assert torch.equal(torch.cat([*map(torch.flatten, eager)]), torch.cat([*map(torch.flatten, graph)]))


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("heads, query", [((1, 1), "Hk"), ((1, 2), "Hk"), ((1, 2), "Hv")])
@pytest.mark.parametrize("K, V", [(16, 16), (20, 24)])
def test_step_is_the_recurrence(T, heads, query, K, V):
    x = make(Case(T=T, K=K, V=V, heads=heads, rows="two", scales=("Hv", "Hk", query), layout="strided", dtype=torch.float16))
    exact = reference_delta(*(y.double() for y in (x.q, x.k, x.v)), Coefficients(*x.coef), scale=x.scale, state=x.state.double())
    plain = recurrent_delta(x.q, x.k, x.v, x.coef, scale=x.scale, state=x.state)
    state = x.state.clone()
    o = delta_step_triton_(x.q, x.k, x.v, x.coef, state, scale=x.scale)
    names = ("o", "final state")
    compare(dict(zip(names, (o, state), strict=True)), dict(zip(names, plain, strict=True)), dict(zip(names, exact, strict=True)))


def test_step_refuses_a_state_it_cannot_write():
    x = make(Case(T=1, K=16, V=16))
    with pytest.raises(ValueError, match="dense float32 state"):
        delta_step_triton_(x.q, x.k, x.v, x.coef, x.state.mT)


def test_dispatch_reaches_the_kernels(monkeypatch):
    x = make(Case(T=20, K=16, V=16))
    assert explain("delta", x.q, x.k, x.v, x.coef, backend="triton") == "delta: chunk form, triton backend: asked for"
    o, _ = delta(x.q, x.k, x.v, x.coef, backend="triton")
    assert torch.equal(o, chunk_delta_triton(x.q, x.k, x.v, x.coef)[0])
    assert "torch backend" in explain("delta", x.q, x.k, x.v, x.coef)  # on a CPU the interpreter is for tests
    wide = make(Case(T=1, K=300, V=16, heads=(1, 1)))
    with pytest.raises(ValueError, match="K up to 256, and K is 300"):
        delta(wide.q, wide.k, wide.v, wide.coef, backend="triton")
