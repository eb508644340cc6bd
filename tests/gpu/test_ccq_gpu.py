"""CCQ's kernels compiled: every dtype, every entry of the table, and what only size shows."""

from functools import partial

import pytest
import torch

from fastweights.notation import CCQState
from tests.ops.ccq_loop import cast, draw, loop
from tests.ops.grid import bounds, compare

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from fastweights.ops.ccq.query_triton import SMALL, TILES, ccq_query_triton
    from fastweights.ops.ccq.step_triton import ccq_step_triton_
else:
    TILES, SMALL = {}, None

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LENGTHS = [0, 1, 5, 0, 200, 70, 0]


def run(form, x, seed=1):
    """Outputs and gradients by name, on the card."""
    leaves = {name: t.cuda().detach().requires_grad_() for name, t in x.items() if torch.is_tensor(t) and t.is_floating_point()}
    given = {**leaves}
    if "state" in x:
        states = {f"state {name}": t.cuda().detach().requires_grad_() for name, t in x["state"]._asdict().items()}
        given["state"] = CCQState(*states.values())
        leaves |= states
    if "cu_seqlens" in x:
        given["cu_seqlens"] = x["cu_seqlens"].cuda()
    o, state = form(**given)
    generator = torch.Generator().manual_seed(seed)
    outputs = {"q'": o, **state._asdict()}
    upstream = [torch.randn(out.shape, generator=generator).bfloat16().to(out) for out in outputs.values()]
    flows = [(out, up) for out, up in zip(outputs.values(), upstream, strict=True) if out.requires_grad]
    grads = torch.autograd.grad([f[0] for f in flows], list(leaves.values()), [f[1] for f in flows])
    named = {f"grad {name}": g for name, g in zip(leaves, grads, strict=True)}
    if "state" in x:
        C = named["grad state covariance"]
        named["grad state covariance"] = (C + C.mT) / 2
    return {name: t.detach() for name, t in (outputs | named).items()}


def check(x, **options):
    runs = run(partial(ccq_query_triton, **options), x), run(loop, cast(x, torch.float32)), run(loop, cast(x, torch.float64))
    compare(*runs, precision=x["q"].dtype)


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K", [16, 32, 64, 96, 100, 128])
@pytest.mark.parametrize("T", [1, 2, 15, 17, 63, 64, 65, 200])
def test_it_is_the_loop(T, K, dtype, state):
    check(draw(T=T, K=K, dtype=dtype, state=state))


@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_documents_are_the_loops(dtype, K):
    check(draw(T=276, B=1, K=K, dtype=dtype, state=True, rows=7) | {"cu_seqlens": bounds(LENGTHS)})


@pytest.mark.parametrize("segment", [0, 128])
@pytest.mark.parametrize("entry", [*TILES, "small"], ids=str)
def test_every_entry_of_the_table(entry, segment):
    tiles = SMALL if entry == "small" else TILES[entry]
    bytes_, K = (2, 128) if entry == "small" else entry
    tiles = tiles._replace(segment=segment)
    check(draw(T=300, K=K, dtype=torch.bfloat16 if bytes_ == 2 else torch.float32, state=True), tiles=tiles)


@pytest.mark.parametrize("entry", TILES, ids=str)
def test_twenty_runs_are_the_same_bits(entry):
    x = draw(T=300, K=entry[1], dtype=torch.bfloat16 if entry[0] == 2 else torch.float32)
    first = run(ccq_query_triton, x)
    for _ in range(19):
        again = run(ccq_query_triton, x)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_65536_tokens_stay_positive_and_bounded():
    k = torch.nn.functional.normalize(torch.randn(1, 65_536, 2, 128, device="cuda") + 1, dim=-1).bfloat16()
    q = torch.randn_like(k)
    clean, state = ccq_query_triton(q, k, torch.ones(1, 65_536, 2, device="cuda"))
    spectrum = torch.linalg.eigvalsh(state.covariance.double() / state.weight[..., None, None])
    assert clean.isfinite().all()
    assert spectrum.min() >= -1e-6 and spectrum.sum(-1).max() <= 1.01


@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T, K", [(1, 128), (4, 100), (1, 256)])
def test_step_is_the_loop_in_place(T, K, dtype, forget):
    x = draw(T=T, K=K, dtype=dtype, state=True, forget=forget)
    exact, plain = loop(**cast(x, torch.float64)), loop(**cast(x, torch.float32))
    symmetric = x["state"]._replace(covariance=(x["state"].covariance + x["state"].covariance.mT) / 2)
    state = CCQState(*(t.cuda().contiguous() for t in symmetric))
    log_decay = x["log_decay"].cuda() if forget else None
    clean = ccq_step_triton_(x["q"].cuda(), x["k"].cuda(), x["lam"].cuda(), state, log_decay=log_decay)
    named = [dict(zip(("q'", *CCQState._fields), (q, *s), strict=True)) for q, s in ((clean.cpu(), [t.cpu() for t in state]), plain, exact)]
    compare(*named, precision=dtype)
