"""The ``decay`` kernels in Triton's interpreter, at small sizes; tests/gpu runs the grid, and every entry of the table, on a card."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from fastweights.notation import Coefficients
from fastweights.ops.decay import chunk_backward_triton, chunk_forward_triton
from fastweights.ops.decay.chunk_triton import SMALL_TILE, chunk_decay_triton, decay_forward
from fastweights.ops.decay.recurrent import recurrent_decay
from fastweights.ops.decay.segments_triton import Tile, cut_segments, segment_length
from fastweights.ops.decay.step_triton import decay_step_triton_
from fastweights.ops.dispatch import decay, explain
from fastweights.ops.reference import reference_decay
from tests.ops.grid import DECAY, Case, compare, largest_error, make, run, sample

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these kernels compiled")

SPLIT = Tile(16, 16, 1, 1, 32)
"""Segments of two chunks; columns shared among programs where V > 16."""
WHOLE = Tile(16, 128, 1, 1, 64)
SMALL = {
    **DECAY,
    "T": (40, 0, 1, 17),
    "K": (16, 20),
    "V": (16, 20, 40),
    "dtype": (torch.float32, torch.float16),
    "heads": ((1, 1), (1, 3), (2, 2)),
    "decay": tuple(kind for kind in DECAY["decay"] if kind is None or "extreme" not in kind),
}


def check(form, problem):
    """The rule of `compare`, but for log_decay: the kernels take its gradient as a difference of sums, right to the digits of the sums."""
    got, plain, exact = run(form, problem), run(reference_decay, problem), run(reference_decay, problem.to(torch.float64))
    precision = problem.q.dtype  # in which the kernels multiply
    sums = 0.0
    for output, upstream in ((exact["o"], problem.grad_o), (exact["final state"], problem.grad_state)):
        if upstream is not None:
            sums += (output * upstream).abs().sum().item()
    if problem.q.numel() and "grad log_decay" in got:
        error = largest_error(got.pop("grad log_decay"), exact["grad log_decay"])
        allowed = 2 * largest_error(plain.pop("grad log_decay"), exact.pop("grad log_decay"))
        assert error <= allowed + 4 * torch.finfo(precision).eps * sums, f"grad log_decay: error {error:.3g}, sums {sums:.3g}"
    compare(got, plain, exact, precision=precision)


@pytest.mark.parametrize("tile", [SPLIT, WHOLE], ids=["split", "whole"])
@pytest.mark.parametrize("case", sample(SMALL, quick=16))
def test_chunk_is_the_reference(case, tile):
    check(partial(chunk_decay_triton, tile=tile), make(case))


FULL = pytest.mark.full


@pytest.mark.parametrize("decay", ["mixed", pytest.param(None, marks=FULL), pytest.param("channel mixed", marks=FULL)])
def test_gradients_of_all_operands_through_groups_segments_and_documents(decay):
    case = Case(T=50, K=16, V=20, heads=(1, 2), rows="packed", decay=decay, beta=None, scales=("Hv", "Hk", "Hk"))
    check(partial(chunk_decay_triton, tile=SPLIT), make(case))


PRODUCT = ("mild_output_chunk", "mild_query_chunk", "mild_key_value_chunk")
CHANNELS = ("output_chunk", "query_chunk", "key_value_chunk")
"""What the kernels call for a chunk whose decays per channel are mild, and for 16 tokens of any other."""


@pytest.fixture
def calls(monkeypatch):
    """How often each of them is called; the interpreter looks them up by name."""
    counted = dict.fromkeys((*PRODUCT, *CHANNELS), 0)

    def count(module, name):
        kernel = getattr(module, name)

        def counting(*operands):
            counted[name] += 1
            return kernel(*operands)

        monkeypatch.setattr(module, name, counting)

    for name in counted:
        count(chunk_forward_triton if "output" in name else chunk_backward_triton, name)
    return counted


def decays(kind, like, chunk):
    """Log decays per channel, and whether each token's are too strong for a product. ``like`` are mild ones, as in GLA.

    Steep: just above the bound of `is_mild`, evenly or at once. Strong: none, and now and then −50; in channel 3 at every fifth token.
    """
    t = torch.arange(like.shape[1])
    if kind == "steep":
        steep = torch.full_like(like, -15.9 / chunk)
        steep[..., 1::2] = torch.where(t % chunk == chunk // 2, -15.9, 0.0)[None, :, None, None]
        return steep, t < 0
    strong = torch.zeros_like(like).masked_fill(torch.rand(like.shape) < 0.1, -50.0)
    strong[:, t % 5 == 0, :, 3] = -50.0
    is_strong = {"mild": t < 0, "strong": t >= 0, "both": t // chunk % 2 == 1}[kind]
    return torch.where(is_strong[None, :, None, None], strong, like), is_strong


KINDS = ("mild", "steep", "strong")
WAYS = [(chunk, kind, "one", torch.float32) for chunk in (16, 32, 64) for kind in KINDS]
WAYS += [(chunk, "both", "one", torch.float32) for chunk in (16, 64)] + [(32, kind, "packed", torch.float32) for kind in ("both", *KINDS)]
WAYS += [(chunk, kind, "packed", torch.float16) for chunk, kind in ((16, "both"), (32, "steep"), (64, "both"))]


@pytest.mark.parametrize(
    "chunk, kind, rows, dtype", [(32, "both", "one", torch.float32), *(pytest.param(*way, marks=FULL) for way in WAYS)]
)
def test_chunks_of_mild_decays_are_products_and_no_others(chunk, kind, rows, dtype, calls):
    """Three chunks and a piece, or documents of which some are shorter than a chunk, in segments of two."""
    T = 3 * chunk + 5 if rows == "one" else 2 * chunk + 9
    x = make(Case(T=T, K=16, V=20, heads=(1, 2), rows=rows, dtype=dtype, decay="channel", beta=None, scales=("Hv", "Hk", "Hk")))
    log_decay, is_strong = decays(kind, x.coef.log_decay, chunk)
    if dtype == torch.float16 and kind == "steep":
        log_decay = log_decay * 4  # the bound for operands of few digits
    x = replace(x, coef=x.coef._replace(log_decay=log_decay))
    check(partial(chunk_decay_triton, tile=Tile(chunk, 32, 1, 1, 2 * chunk)), x)
    if rows == "one" and dtype == torch.float32:
        starts = range(0, T, chunk)
        products = sum(2 for start in starts if not is_strong[start])  # of two heads
        channels = sum(2 * -(-min(chunk, T - start) // 16) for start in starts if is_strong[start])
        assert calls == {**dict.fromkeys(PRODUCT, products), **dict.fromkeys(CHANNELS, channels)}
    elif kind in ("mild", "steep"):
        assert all(calls[name] for name in PRODUCT) and not any(calls[name] for name in CHANNELS)


@pytest.mark.parametrize("decay", ["extreme", "channel extreme"])
def test_shut_gates(decay):
    """Every true gradient of log decay is below 1e-20 here."""
    x = make(Case(T=40, K=16, V=16, heads=(1, 1), decay=decay, beta=None))
    check(partial(chunk_decay_triton, tile=SPLIT), x)


def test_documents_do_not_touch_each_other():
    x = make(Case(T=60, K=16, V=16, heads=(1, 1), rows="packed", beta=None))
    other = type(x)(**{**vars(x), "k": x.k.clone()})
    end = int(x.cu_seqlens[4])
    other.k[:, 1:end] = 1.0
    before, after = (run(partial(chunk_decay_triton, tile=SPLIT), p) for p in (x, other))
    for name in ("o", "grad q", "grad k", "grad v", "grad log_decay"):
        assert torch.equal(before[name][:, end:], after[name][:, end:]), name
    assert not torch.equal(before["o"][:, :end], after["o"][:, :end])


def test_one_token_of_heads_that_lie_first():
    """Of ``[B, H, 1, K]`` torch calls the transpose dense, whatever the stride of the single token is."""
    q, k, v = (torch.randn(2, 3, 1, 16).transpose(1, 2) for _ in range(3))
    coef = Coefficients(log_decay=-torch.rand(2, 1, 3))
    torch.testing.assert_close(chunk_decay_triton(q, k, v, coef)[0], recurrent_decay(q, k, v, coef)[0])


@pytest.mark.parametrize("lengths", [[0], [5], [0, 0, 3, 16, 17, 0, 40, 0], [64, 1, 0, 32]])
def test_segments_hold_every_token_once(lengths):
    """Every token lies in one segment of its own document, in order, and the first segment of every row is where it is said to be."""
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    cut = cut_segments(1, sum(lengths), 16, bounds)
    held = [(int(row), range(int(start), int(end))) for row, start, end, _ in cut.table[: int(cut.first[-1])]]
    assert [t for _, tokens in held for t in tokens] == list(range(sum(lengths)))
    for row, tokens in held:
        assert bounds[row] <= tokens.start < tokens.stop <= bounds[row + 1] and len(tokens) <= 16
    for row in range(len(lengths)):
        assert [r for r, _ in held[int(cut.first[row]) : int(cut.first[row + 1])]] == [row] * -(-lengths[row] // 16)
    assert all(start >= end for _, start, end, _ in cut.table[int(cut.first[-1]) :].tolist())


def test_segments_fill_the_card_and_no_more():
    tile = Tile(64, 64, 4, 2)
    assert segment_length(131_072, 4, tile) == segment_length(65_536, 8, tile) == 1024  # 512 programs
    assert segment_length(512, 4, tile) == 64
    assert segment_length(1 << 26, 64, tile) == 4096


@pytest.mark.parametrize("tile, decay", [(None, "model"), (None, "channel"), (SMALL_TILE, "model"), (Tile(64, 16, 4, 2), "model")])
@pytest.mark.parametrize("K, V", [(16, 320), (20, 16), (32, 100), (100, 32), (256, 16)])
def test_no_tile_is_narrow_in_bfloat16(K, V, tile, decay, monkeypatch):
    """One swizzle for every tile of a kernel: ptxas 12.8 confuses two at one address (`tile_side`). No kernel runs here."""
    sides = []

    def note(kernel, grid, *operands, **constants):
        if "DOT" in constants:
            sides.append((constants["BK"], constants["BV"]))
            assert constants["BV"] * constants["NB"] >= V and constants["BK"] >= K

    for module in (chunk_forward_triton, chunk_backward_triton):
        monkeypatch.setattr(module, "launch", note)
    x = make(Case(T=70, K=K, V=V, heads=(1, 2), dtype=torch.bfloat16, decay=decay, beta=None))
    run(partial(chunk_decay_triton, tile=tile), x)
    assert len(sides) == 5 and min(map(min, sides)) >= 64, sides


@pytest.mark.full
def test_tiles_at_one_shared_address_are_swizzled_in_one_way():
    """What `tile_side` is for, in the compiler's output for a Hopper card; in a process of its own, where Triton compiles."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    found = subprocess.run(
        [sys.executable, "-m", "tests.ops.compiled", "decay"], check=True, env=environment, capture_output=True, text=True
    )
    kernels = [json.loads(line) for line in found.stdout.splitlines()]
    assert {kernel["kernel"] for kernel in kernels if kernel["swizzles"]} >= {"output_kernel", "query_kernel", "key_value_kernel"}
    assert max(kernel["swizzles"] for kernel in kernels) == 1, kernels


@pytest.mark.full
def test_fake_shapes_are_the_real_ones():
    x = make(Case(T=40, K=20, V=24, heads=(1, 2), rows="packed", dtype=torch.float16, beta=None))
    args = (x.q, x.k, x.v, x.coef.log_decay, None, x.coef.key_scale, x.coef.value_scale, x.state, x.cu_seqlens, 0.5, list(SPLIT))
    leaves = [a.clone().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    torch.library.opcheck(decay_forward, leaves, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))


@pytest.mark.compile
def test_compiles_into_one_graph():
    x = make(Case(T=20, K=16, V=16, heads=(1, 2), scales=("Hk", "Hk", "Hk"), beta=None))
    form = partial(chunk_decay_triton, tile=SPLIT)
    eager, graph = run(form, x), run(torch.compile(form, fullgraph=True, backend="aot_eager"), x)
    assert all(torch.equal(eager[name], graph[name]) for name in eager)
    step = torch.compile(decay_step_triton_, fullgraph=True, backend="aot_eager")
    state, same = x.state.clone(), x.state.clone()
    assert torch.equal(step(x.q, x.k, x.v, x.coef, state), decay_step_triton_(x.q, x.k, x.v, x.coef, same))
    assert torch.equal(state, same) and not torch.equal(state, x.state)


@pytest.mark.parametrize("kind", [None, "mixed", "channel mixed"])
@pytest.mark.parametrize("T, heads, K, V", [(1, (1, 1), 16, 16), (3, (2, 4), 20, 40)])
def test_step_is_the_recurrence(T, heads, K, V, kind):
    x = make(Case(T=T, K=K, V=V, heads=heads, rows="two", scales=("Hv", "Hk", "Hk"), layout="strided", decay=kind, beta=None))
    exact = reference_decay(*(y.double() for y in (x.q, x.k, x.v)), Coefficients(*x.coef), scale=x.scale, state=x.state.double())
    plain = recurrent_decay(x.q, x.k, x.v, x.coef, scale=x.scale, state=x.state)
    state = x.state.clone()
    o = decay_step_triton_(x.q, x.k, x.v, x.coef, state, scale=x.scale)
    compare(*(dict(zip(("o", "final state"), pair, strict=True)) for pair in ((o, state), plain, exact)))


def test_step_refuses_a_state_it_cannot_write():
    x = make(Case(T=1, K=16, V=16, beta=None))
    with pytest.raises(ValueError, match="dense float32 state"):
        decay_step_triton_(x.q, x.k, x.v, x.coef, x.state.mT)


def test_a_tile_that_is_compiled_wrongly_is_refused():
    x = make(Case(T=20, K=256, V=16, heads=(1, 1), decay="channel", beta=None))
    with pytest.raises(ValueError, match="at K=256 in float32 with a decay per channel"):
        chunk_decay_triton(x.q, x.k, x.v, x.coef, tile=Tile(32, 64, 4, 1))


def test_dispatch_reaches_the_kernels():
    x = make(Case(T=20, K=16, V=16, heads=(1, 1), beta=None))
    assert explain("decay", x.q, x.k, x.v, x.coef, backend="triton") == "decay: chunk form, triton backend: asked for"
    o, _ = decay(x.q, x.k, x.v, x.coef, backend="triton")
    assert torch.equal(o, chunk_decay_triton(x.q, x.k, x.v, x.coef)[0])
    wide = make(Case(T=1, K=300, V=16, heads=(1, 1), beta=None))
    with pytest.raises(ValueError, match="K up to 256, and K is 300"):
        decay(wide.q, wide.k, wide.v, wide.coef, backend="triton")
