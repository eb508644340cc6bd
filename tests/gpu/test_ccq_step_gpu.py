"""The delta step with CCQ's read compiled: every dtype and shape of program, in a CUDA graph, and the same bits every time."""

from functools import partial

import pytest
import torch

from fastweights.notation import CCQState, Coefficients
from fastweights.ops import ccq_step_, delta_step_
from tests.ops.ccq_step_cases import Step, composition, draw, run
from tests.ops.grid import Case, compare

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from fastweights.ops.delta import ccq_step_triton
    from fastweights.ops.delta.ccq_step_triton import SHAPES, delta_ccq_step_triton_
else:
    SHAPES = {}

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KEYS = ("Hk", "Hk", "Hk")


def right(x: Step, **options) -> None:
    got = run(partial(delta_ccq_step_triton_, **options), x.to("cuda"))
    got = {name: t.cpu() for name, t in got.items()}
    compare(got, composition(x, torch.float32), composition(x, torch.float64), precision=x.problem.q.dtype)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K, V", [(128, 128), (96, 192), (256, 64), (16, 20), (100, 320)])
@pytest.mark.parametrize("T", [1, 4, 20])
def test_it_is_the_composition(T, K, V, dtype, shape):
    right(draw(Case(T=T, K=K, V=V, heads=(2, 4), rows="two", dtype=dtype, decay="mixed", scales=KEYS, layout="strided")), shape=shape)


@pytest.mark.parametrize("scales", [(None, None, None), ("Hv", "Hv", "Hv"), KEYS], ids=str)
@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("forget, decay", [(False, None), (False, "model"), (True, "mixed")])
@pytest.mark.parametrize("unit_keys", [False, True])
def test_every_option(unit_keys, forget, decay, fresh, scales):
    case = Case(T=2, K=64, V=64, rows="two", dtype=torch.bfloat16, decay=decay, scales=scales)
    right(draw(case, unit_keys=unit_keys, forget=forget, fresh=fresh))


@pytest.mark.parametrize("rows", [1, 80])
@pytest.mark.parametrize("K, V", [(128, 128), (96, 192)])
@pytest.mark.parametrize("T", [1, 4])
def test_a_graph_replayed_is_the_two_launches_one_after_the_other(T, K, V, rows):
    x = draw(Case(T=T, K=K, V=V, heads=(4, 8), dtype=torch.float32, scales=KEYS)).to("cuda")
    p = x.problem

    def wide(t):
        return t.expand(rows, *t.shape[1:]).contiguous()

    q, k, v, lam, coef = wide(p.q), wide(p.k), wide(p.v), wide(x.lam), Coefficients(*map(wide, p.coef))
    start = [wide(t) for t in (p.state, *x.moments)]
    static, separate = [t.clone() for t in start], [t.clone() for t in start]

    def step():
        return delta_ccq_step_triton_(q, k, v, coef, lam, static[0], CCQState(*static[1:]), scale=p.scale)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = step()
    for t, begin in zip(static, start, strict=True):
        t.copy_(begin)
    for _ in range(3):
        graph.replay()
        clean = ccq_step_(q, k * coef.key_scale.unsqueeze(-1), lam, CCQState(*separate[1:]), backend="triton")
        expected = delta_step_(clean, k, v, coef, separate[0], scale=p.scale, backend="triton")
        for got, want in zip((o, *static), (expected, *separate), strict=True):
            assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=str)
def test_twenty_runs_are_the_same_bits(shape, T):
    x = draw(Case(T=T, K=128, V=128, heads=(16, 32), rows="two", dtype=torch.bfloat16, scales=KEYS)).to("cuda")
    first = run(delta_ccq_step_triton_, x, shape=shape)
    for _ in range(19):
        again = run(delta_ccq_step_triton_, x, shape=shape)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=str)
def test_every_entry_fits_99_kilobytes(shape):
    cache = ccq_step_triton.step_kernel.device_caches[torch.cuda.current_device()][0]
    cache.clear()
    run(delta_ccq_step_triton_, draw(Case(T=16, K=256, V=256, dtype=torch.bfloat16)).to("cuda"), shape=shape)
    assert max(kernel.metadata.shared for kernel in cache.values()) <= 99 * 1024
