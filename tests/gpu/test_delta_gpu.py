"""The ``delta`` kernels compiled: the parity grid in every dtype, every entry of the table, and what only size shows."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from fastweights.notation import Coefficients
from fastweights.ops.delta.chunk import chunk_delta
from fastweights.ops.delta.recurrent import recurrent_delta
from fastweights.ops.reference import reference_delta
from tests.ops.grid import DELTA, Case, Problem, bounds, check, compare, make, run, sample

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from fastweights.ops.delta.chunk_triton import TILES, chunk_delta_triton
    from fastweights.ops.delta.step_triton import delta_step_triton_
else:
    TILES = {}

DTYPES = {"bf16": torch.bfloat16, "tf32": torch.float16, "ieee": torch.float32}
COMPILED = {**DELTA, "dtype": tuple(DTYPES.values())}


def on_card(problem: Problem) -> Problem:
    def move(x):
        return None if x is None else x.cuda()

    names = ("q", "k", "v", "state", "cu_seqlens", "grad_o", "grad_state")
    return replace(problem, coef=Coefficients(*map(move, problem.coef)), **{name: move(getattr(problem, name)) for name in names})


def right(problem: Problem, **options) -> None:
    """As good as plain torch, in units of the type the tensor cores read."""
    check(partial(chunk_delta_triton, **options), reference_delta, problem, precision=problem.q.dtype)


@pytest.mark.parametrize("case", sample(COMPILED, quick=1))
def test_chunk_is_the_reference(case):
    right(on_card(make(case)))


@pytest.mark.parametrize("segment", [0, 128, -128], ids=["whole", "split", "kept"])
@pytest.mark.parametrize("K", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("entry", TILES, ids=str)
def test_every_entry_of_the_table(entry, K, segment):
    _card, how, size = entry
    if size < K:
        pytest.skip("the entry is for smaller K")
    problem = on_card(make(Case(T=300, K=K, V=K, heads=(1, 2), rows="packed", dtype=DTYPES[how], beta="over-relaxed", decay="mixed")))
    right(problem, tiles=TILES[entry]._replace(segment=segment))


@pytest.mark.parametrize("entry", TILES, ids=str)
def test_twenty_runs_are_the_same_bits(entry):
    problem = on_card(make(Case(T=300, K=min(128, entry[2]), V=128, dtype=DTYPES[entry[1]])))
    form = partial(chunk_delta_triton, tiles=TILES[entry])
    first = run(form, problem)
    for _ in range(19):
        again = run(form, problem)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("norm", [0.0, 1e-4, 1.0, 1e3])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_keys_of_any_norm(norm, dtype):
    """KLA's scales 1/√(‖k‖² + ε): the forward is right in every dtype, gradients in bfloat16 and float32."""
    problem = on_card(make(Case(T=130, K=64, V=64, dtype=dtype)))
    k = (torch.nn.functional.normalize(problem.k.float(), dim=-1) * norm).to(dtype)
    inverse = (k.float().square().sum(-1) + 1e-6).rsqrt()
    problem = replace(problem, k=k, coef=problem.coef._replace(key_scale=inverse, value_scale=inverse.clone()))
    if dtype == torch.float16:
        problem = replace(problem, grad_o=None, grad_state=None)
        o, state = chunk_delta_triton(problem.q, k, problem.v, problem.coef, scale=problem.scale, state=problem.state)
        exact = problem.to(torch.float64)
        truth = reference_delta(exact.q, exact.k, exact.v, exact.coef, scale=exact.scale, state=exact.state)
        plain = reference_delta(problem.q, k, problem.v, problem.coef, scale=problem.scale, state=problem.state)
        names = ("o", "final state")
        compare(*(dict(zip(names, pair, strict=True)) for pair in ((o, state), plain, truth)), precision=dtype)
    else:
        right(problem)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_identical_keys_for_long(dtype):
    k = torch.nn.functional.normalize(torch.randn(1, 1, 1, 128, device="cuda"), dim=-1).to(dtype).expand(1, 16_384, 2, 128)
    v = torch.randn(1, 16_384, 2, 128, device="cuda", dtype=dtype)
    coef = Coefficients(beta=torch.full((1, 16_384, 2), 1.9, device="cuda"))
    o, state = chunk_delta_triton(k, k, v, coef)
    exact, last = chunk_delta(k.double(), k.double(), v.double(), Coefficients(coef.beta.double()))
    plain = chunk_delta(k, k, v, coef)
    names = ("o", "final state")
    compare(*(dict(zip(names, pair, strict=True)) for pair in ((o, state), plain, (exact, last))), precision=dtype)


def test_seventy_thousand_documents():
    lengths = torch.randint(0, 3, (70_000,)).tolist()
    cu_seqlens, T = bounds(lengths).cuda(), sum(lengths)
    q, k, v = (torch.randn(1, T, 1, 16, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    coef = Coefficients(beta=torch.rand(1, T, 1, device="cuda"), key_scale=k.float().norm(dim=-1).reciprocal())
    o, state = chunk_delta_triton(q, k, v, coef, cu_seqlens=cu_seqlens)
    last = cu_seqlens[69_000].item()
    tail, tail_state = chunk_delta_triton(
        *(x[:, last:] for x in (q, k, v)),
        Coefficients(*(x if x is None else x[:, last:] for x in coef)),
        cu_seqlens=cu_seqlens[69_000:] - last,
    )
    assert torch.equal(o[:, last:], tail) and torch.equal(state[69_000:], tail_state)


def test_offsets_past_two_to_the_31():
    T = 2**31 // (16 * 128) + 1000
    q, k, v = (torch.randn(1, T, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    coef = Coefficients(beta=torch.rand(1, T, 16, device="cuda"), key_scale=k.float().norm(dim=-1).reciprocal())
    cu_seqlens = torch.tensor([0, T - 500, T], device="cuda")
    o, state = chunk_delta_triton(q, k, v, coef, cu_seqlens=cu_seqlens)
    tail = [x[:, -500:].clone() for x in (q, k, v)]
    alone, alone_state = chunk_delta_triton(*tail, Coefficients(*(x if x is None else x[:, -500:].clone() for x in coef)))
    scale = alone.float().abs().max()
    assert (o[:, -500:].float() - alone.float()).abs().max() <= 2**-7 * scale
    assert torch.allclose(state[1:], alone_state, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("K, V", [(128, 128), (96, 192), (256, 64)])
@pytest.mark.parametrize("T", [1, 4])
def test_step_in_a_graph(rows, K, V, T):
    q, k = (torch.randn(rows, T, 4, K, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(rows, T, 8, V, device="cuda", dtype=torch.bfloat16)
    coef = Coefficients(
        beta=torch.rand(rows, T, 8, device="cuda"),
        log_decay=-torch.rand(rows, T, 8, device="cuda"),
        key_scale=k.float().norm(dim=-1).reciprocal(),
    )
    state = torch.randn(rows, 8, K, V, device="cuda")
    start, static = state.clone(), state.clone()
    delta_step_triton_(q, k, v, coef, static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = delta_step_triton_(q, k, v, coef, static)
    static.copy_(start)
    for _ in range(2):  # two replays are two blocks of tokens
        graph.replay()
    exact = (x.double() for x in (q, k, v))
    q2, k2, v2 = (torch.cat([x, x], 1) for x in exact)
    twice = Coefficients(*(x if x is None else torch.cat([x, x], 1).double() for x in coef))
    truth, last = reference_delta(q2, k2, v2, twice, state=start.double())
    plain, plain_last = recurrent_delta(
        q2.bfloat16(), k2.bfloat16(), v2.bfloat16(), Coefficients(*(x if x is None else x.float() for x in twice)), state=start
    )
    names = ("o", "final state")
    compare(
        dict(zip(names, (o, static), strict=True)),
        dict(zip(names, (plain[:, T:], plain_last), strict=True)),
        dict(zip(names, (truth[:, T:], last), strict=True)),
    )


def test_compiles_into_one_graph():
    problem = on_card(make(Case(T=200, K=64, V=64, heads=(1, 2), dtype=torch.bfloat16, scales=("Hk", "Hk", "Hk"))))
    eager = run(chunk_delta_triton, problem)
    graph = run(torch.compile(chunk_delta_triton, fullgraph=True), problem)
    assert all(torch.equal(eager[name], graph[name]) for name in eager)


@pytest.mark.parametrize("entry", [e for e in TILES if e[0] == "small"], ids=str)
def test_small_entries_fit_99_kilobytes(entry):
    from fastweights.ops.delta import chunk_backward_triton, chunk_forward_triton

    modules, device = (chunk_forward_triton, chunk_backward_triton), torch.cuda.current_device()
    kernels = {name: getattr(module, name) for module in modules for name in dir(module) if name.endswith("_kernel")}
    for kernel in kernels.values():
        kernel.device_caches[device][0].clear()
    run(
        partial(chunk_delta_triton, tiles=TILES[entry]._replace(segment=64)),
        on_card(make(Case(T=200, K=256, V=256, dtype=DTYPES[entry[1]]))),
    )
    used = {
        name: max(compiled.metadata.shared for compiled in kernel.device_caches[device][0].values()) for name, kernel in kernels.items()
    }
    assert max(used.values()) <= 99 * 1024, used
