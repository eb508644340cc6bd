"""The delta step with CCQ's read in one launch, in Triton's interpreter; and what `delta_ccq_step_` does where no kernel can."""

import json
import os
import subprocess
import sys

import pytest
import torch
from allpairspy import AllPairs

pytest.importorskip("triton")

from fastweights.ops import ccq_step_, delta_ccq_step_, delta_step_, explain
from fastweights.ops.delta.ccq_step_triton import SHAPES, Shape, _step, delta_ccq_step_triton_
from tests.ops.ccq_step_cases import composition, draw, run
from tests.ops.grid import Case, compare
from tests.ops.memcheck import watched

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs this kernel compiled")
FULL = pytest.mark.full

FACTORS = {
    "T": (1, 3, 2, 5, 18),
    "K": (16, 20, 96, 192),
    "V": (16, 24, 40),
    "heads": ((1, 1), (1, 2), (2, 2)),
    "dtype": (torch.float32, torch.float16),
    "decay": ("mixed", None),
    "scales": (("Hk", "Hk", "Hk"), (None, None, None), ("Hv", "Hv", "Hv")),
    "forget": (False, True),
    "unit_keys": (False, True),
    "fresh": (False, True),
    "rows": ("one", "two"),
    "layout": ("strided", "contiguous"),
    "shape": (Shape(512, 1), SHAPES[True], SHAPES[False]),
}


def possible(values) -> bool:
    x = dict(zip(FACTORS, values, strict=False))
    grouped = x.get("heads") == (1, 2)
    long = x["T"] == 18 and (x.get("K", 16) > 20 or x.get("rows") == "two" or grouped)
    return not (long or (grouped and x.get("forget")) or (x.get("scales", "  ")[0] == "Hv" and x.get("unit_keys") is False and grouped))


CASES = [dict(zip(FACTORS, values, strict=True)) for values in AllPairs(list(FACTORS.values()), filter_func=possible)]


def quick(x) -> bool:
    return x["T"] * (x["rows"] == "two" or 0.5) * x["heads"][1] <= 3 and x["K"] < 192


@pytest.mark.parametrize(
    "x", [pytest.param(x, id="-".join(map(str, x.values())).replace(" ", ""), marks=[] if quick(x) else FULL) for x in CASES]
)
def test_one_launch_is_the_composition(x):
    options = {name: x[name] for name in ("forget", "unit_keys", "fresh")}
    problem = draw(Case(**{name: value for name, value in x.items() if name not in (*options, "shape")}), **options)
    got = run(delta_ccq_step_triton_, problem, shape=x["shape"])
    compare(got, composition(problem, torch.float32), composition(problem, torch.float64))


SMALL = Case(T=2, K=20, V=24, heads=(1, 2), scales=("Hk", "Hk", "Hk"))


def two_steps(q, k, v, coef, lam, memory, moments, *, forget, unit_keys, scale, **options):
    key = k if unit_keys else k * coef.key_scale.unsqueeze(-1)
    log_decay = coef.log_decay if forget else None
    clean = ccq_step_(q, key, lam, moments, log_decay=log_decay, unit_keys=unit_keys, **options)
    return delta_step_(clean, k, v, coef, memory, scale=scale, **options)


@pytest.mark.parametrize("unit_keys, forget", [(False, False), (True, True)])
def test_states_are_those_of_two_launches(unit_keys, forget):
    x = draw(Case(**{**vars(SMALL), "heads": (1, 1)}), unit_keys=unit_keys, forget=forget)
    one, two = run(delta_ccq_step_triton_, x), run(two_steps, x, backend="triton")
    assert torch.equal(one["memory"], two["memory"]) and torch.equal(one["weight"], two["weight"])
    for name in ("o", "covariance", "mean"):
        torch.testing.assert_close(one[name], two[name], rtol=1e-5, atol=1e-6)
    assert torch.equal(one["covariance"], one["covariance"].mT)


def test_without_a_kernel_it_is_two_steps_to_the_bit():
    x = draw(SMALL)
    one, two = run(delta_ccq_step_, x), run(two_steps, x)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_at_no_strength_it_is_the_raw_read():
    x = draw(Case(**{**vars(SMALL), "dtype": torch.float16}))
    p = x.problem
    o = delta_step_(p.q, p.k, p.v, p.coef, p.state.clone(), scale=p.scale, backend="triton")
    x.lam.zero_()
    assert torch.equal(run(delta_ccq_step_triton_, x)["o"], o)


def test_a_block_of_tokens_is_its_tokens_one_by_one():
    x = draw(Case(**{**vars(SMALL), "T": 3, "heads": (1, 1)}))
    block = run(delta_ccq_step_triton_, x)

    def one_by_one(q, k, v, coef, lam, memory, moments, **options):
        parts = [
            delta_ccq_step_triton_(
                q[:, [t]], k[:, [t]], v[:, [t]], type(coef)(*(c[:, [t]] for c in coef)), lam[:, [t]], memory, moments, **options
            )
            for t in range(q.shape[1])
        ]
        return torch.cat(parts, dim=1)

    single = run(one_by_one, x)
    assert all(torch.equal(block[name], single[name]) for name in block)


@pytest.mark.parametrize("K, T, heads, shape", [(20, 2, (1, 2), Shape(512, 4)), pytest.param(16, 1, (2, 2), SHAPES[False], marks=FULL)])
def test_it_touches_no_memory_that_is_not_its_own(K, T, heads, shape):
    x = draw(Case(T=T, K=K, V=24, heads=heads, rows="two", layout="strided"))
    with watched():
        found = run(delta_ccq_step_triton_, x, shape=shape)
    assert all(t.isfinite().all() for t in found.values())


def test_no_tokens_change_nothing():
    x = draw(Case(T=0, K=16, V=16, heads=(1, 1)))
    after = run(delta_ccq_step_triton_, x)
    assert torch.equal(after["memory"], x.problem.state) and torch.equal(after["mean"], x.moments.mean)


def test_what_it_refuses():
    x = draw(SMALL)
    p, call = x.problem, delta_ccq_step_
    per_value_head = p.coef._replace(key_scale=torch.ones(1, 2, 2))
    with pytest.raises(ValueError, match=r"key_scale \(unless unit_keys\) must be \[B, T, Hk\] = \[1, 2, 1\]; got \[1, 2, 2\]"):
        call(p.q, p.k, p.v, per_value_head, x.lam, p.state, x.moments)
    for backend in ("torch", "triton"):
        with pytest.raises(ValueError, match=r"log_decay must be \[B, T, Hk\]"):
            call(p.q, p.k, p.v, p.coef, x.lam, p.state, x.moments, forget=True, backend=backend)
        with pytest.raises(ValueError, match=r"lam must be \[B, T, Hk\]"):
            call(p.q, p.k, p.v, p.coef, x.lam[:, :1], p.state, x.moments, backend=backend)
    with pytest.raises(ValueError, match="state must be"):
        call(p.q, p.k, p.v, p.coef, x.lam, p.state[:, :1], x.moments, backend="triton")
    with pytest.raises(ValueError, match="dense float32 covariance"):
        moments = x.moments._replace(covariance=torch.ones(1, 1, 40, 20)[:, :, ::2])
        call(p.q, p.k, p.v, p.coef, x.lam, p.state, moments, backend="triton")
    with pytest.raises(ValueError, match="backend of a step must be one of auto, torch, triton; got 'reference'"):
        call(p.q, p.k, p.v, p.coef, x.lam, p.state, x.moments, backend="reference")
    wide = draw(Case(T=1, K=300, V=16, heads=(1, 1)))
    with pytest.raises(ValueError, match="K up to 256, and K is 300"):
        run(call, wide, backend="triton")


def test_explain_says_how_many_launches_and_why():
    p = draw(SMALL).problem
    said = {backend: explain("delta_ccq_step_", p.q, p.k, p.v, p.coef, backend=backend) for backend in ("auto", "torch", "triton")}
    assert said["triton"] == "delta_ccq_step_: one launch, triton backend: asked for"
    assert said["torch"] == "delta_ccq_step_: two steps, ccq_step_ and delta_step_: torch was asked for"
    assert said["auto"].startswith("delta_ccq_step_: two steps, ccq_step_ and delta_step_: Triton kernels need CUDA tensors")


def test_it_declares_what_it_mutates():
    x = draw(SMALL)
    p = x.problem
    arguments = (p.q, p.k, p.v, *p.coef, x.lam, p.state, *x.moments, 0.5, False, False, 1e-6, [512, 1])
    torch.library.opcheck(_step, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.compile
def test_compiles_into_one_graph():
    x = draw(SMALL)
    step = torch.compile(delta_ccq_step_, fullgraph=True, backend="aot_eager")
    eager, graph = run(delta_ccq_step_, x, backend="triton"), run(step, x, backend="triton")
    assert all(torch.equal(eager[name], graph[name]) for name in eager)


@pytest.mark.full
def test_every_shape_compiles_for_a_card_and_fits_99_kilobytes():
    """In a process of its own, where Triton compiles and does not interpret; no card is needed for that."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    found = subprocess.run([sys.executable, "-m", "tests.ops.compiled"], check=True, env=environment, capture_output=True, text=True)
    kernels = [json.loads(line) for line in found.stdout.splitlines()]
    assert len(kernels) == 2 * len(SHAPES)
    assert max(kernel["shared"] for kernel in kernels) <= 99 * 1024, kernels
