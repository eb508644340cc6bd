"""What runs, and what dispatch says about it."""

import os
import subprocess
import sys
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from fastweights import ops
from fastweights.notation import Coefficients
from fastweights.ops import dispatch
from fastweights.ops.reference import reference_decay, reference_delta
from tests.ops.grid import Case, check, make, run

FAMILIES = {"delta": (ops.delta, reference_delta, {}), "decay": (ops.decay, reference_decay, {"beta": None})}
BOTH = pytest.mark.parametrize("family", FAMILIES)


def example(family, **factors):
    return make(Case(**{"K": 16, "V": 16, **FAMILIES[family][2], **factors}))


def explain(family, x, **options):
    return ops.explain(family, x.q, x.k, x.v, x.coef, cu_seqlens=x.cu_seqlens, **options)


@BOTH
@pytest.mark.parametrize("backend", ["auto", "reference", "torch"])
@pytest.mark.parametrize("T", [2, 70])
def test_every_backend_is_the_same_op(family, backend, T):
    op, reference, _ = FAMILIES[family]
    x = example(family, T=T, dtype=torch.bfloat16)
    o, state = op(x.q, x.k, x.v, x.coef, scale=x.scale, state=x.state, backend=backend)
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert o.shape == x.v.shape and state.data_ptr() != x.state.data_ptr()
    check(lambda *operands, **options: op(*operands, backend=backend, **options), reference, x)


@BOTH
def test_explain_says_what_and_why(family):
    cpu = "Triton kernels need CUDA tensors (or TRITON_INTERPRET=1 and backend='triton'), and q is on cpu"
    assert explain(family, example(family, T=70)) == f"{family}: chunk form, torch backend: {cpu}"
    assert explain(family, example(family, T=3)).startswith(f"{family}: recurrent form, torch backend: ")
    assert explain(family, example(family, T=3, rows="packed")).startswith(f"{family}: chunk form, torch backend: ")
    assert explain(family, example(family, T=70), backend="torch") == f"{family}: chunk form, torch backend: asked for"
    assert explain(family, example(family, T=70), backend="reference") == f"{family}: reference form, reference backend: asked for"
    with pytest.raises(ValueError, match="k must be"):
        x = example(family)
        ops.explain(family, x.q, x.k[:, :1], x.v, x.coef)


def test_explain_names_the_families():
    with pytest.raises(ValueError, match=r"family must be 'delta' or 'decay' .*, or 'delta_ccq_step_'; got 'kla'"):
        explain("kla", example("delta"))


@BOTH
def test_what_runs_is_what_explain_says(family, monkeypatch):
    ran = []
    for (name, form), call in list(dispatch._FORMS.items()):
        monkeypatch.setitem(
            dispatch._FORMS, (name, form), lambda *a, name=name, form=form, call=call, **o: ran.append((name, form)) or call(*a, **o)
        )
    for factors in ({"T": 2}, {"T": 70}, {"T": 2, "rows": "packed"}):
        for backend in ("auto", "torch", "reference"):
            x = example(family, **factors)
            FAMILIES[family][0](x.q, x.k, x.v, x.coef, cu_seqlens=x.cu_seqlens, backend=backend)
            assert explain(family, x, backend=backend).startswith("{}: {} form".format(*ran.pop()))


@BOTH
def test_triton_that_cannot_run_says_why(family, monkeypatch):
    op = FAMILIES[family][0]
    x = example(family)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"backend='triton' cannot run this: Triton kernels need CUDA tensors .* and q is on cpu"):
        op(x.q, x.k, x.v, x.coef, backend="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    wide = x.to(torch.float64)
    with pytest.raises(ValueError, match="take float16, bfloat16 and float32, and q is float64"):
        op(wide.q, wide.k, wide.v, wide.coef, backend="triton")
    find = dispatch.importlib.util.find_spec
    for missing, reason in (("triton", "triton is not installed"), ("chunk_triton", "has no Triton twin yet")):
        with monkeypatch.context() as patch:
            patch.setattr(
                dispatch.importlib.util, "find_spec", lambda name, missing=missing: None if name.endswith(missing) else find(name)
            )
            with pytest.raises(ValueError, match=f"backend='triton' cannot run this: .*{reason}"):
                op(x.q, x.k, x.v, x.coef, backend="triton")
    monkeypatch.setattr(dispatch, "twin", lambda *names: SimpleNamespace(why_not=lambda q, k, v, coef: f"K = {q.shape[-1]} is odd"))
    with pytest.raises(ValueError, match="backend='triton' cannot run this: K = 16 is odd"):
        op(x.q, x.k, x.v, x.coef, backend="triton")


@BOTH
@pytest.mark.parametrize("form", ["chunk", "step"])
def test_a_twin_that_can_run_is_called(family, form, monkeypatch):
    """As on a GPU: the twin says yes, and its function gets the operands as they are."""
    x = example(family)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    plain = dispatch._FORMS[family, form]
    name = f"{family}_step_triton_" if form == "step" else f"chunk_{family}_triton"
    monkeypatch.setattr(dispatch, "twin", lambda *names: SimpleNamespace(why_not=lambda *operands: None, **{name: plain}))
    monkeypatch.setitem(dispatch._FORMS, (family, form), None)
    if form == "step":
        step = ops.delta_step_ if family == "delta" else ops.decay_step_
        step(x.q, x.k, x.v, x.coef, x.state, backend="triton")
    else:
        assert explain(family, x, backend="triton") == f"{family}: chunk form, triton backend: asked for"
        FAMILIES[family][0](x.q, x.k, x.v, x.coef, backend="triton")


@BOTH
def test_auto_takes_kernels_that_can(family, monkeypatch):
    q = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    monkeypatch.setattr(dispatch, "twin", lambda *names: SimpleNamespace(why_not=lambda *operands: None))
    for backend in ("auto", "triton"):
        assert dispatch.why_not_triton(family, "chunk", backend, q) is None


@BOTH
def test_unknown_backends_are_named(family):
    x = example(family)
    with pytest.raises(ValueError, match="backend must be one of auto, reference, torch, triton; got 'cuda'"):
        FAMILIES[family][0](x.q, x.k, x.v, x.coef, backend="cuda")
    step = ops.delta_step_ if family == "delta" else ops.decay_step_
    with pytest.raises(ValueError, match="backend of a step must be one of auto, torch, triton; got 'reference'"):
        step(x.q, x.k, x.v, x.coef, x.state, backend="reference")


@BOTH
def test_step_is_the_op_in_place(family):
    op, step = (ops.delta, ops.delta_step_) if family == "delta" else (ops.decay, ops.decay_step_)
    x = example(family, T=3, heads=(2, 4), dtype=torch.bfloat16)
    o, final = op(x.q, x.k, x.v, x.coef, scale=x.scale, state=x.state)
    for backend in ("auto", "torch"):
        state = x.state.clone()
        assert torch.equal(step(x.q, x.k, x.v, x.coef, state, scale=x.scale, backend=backend), o)
        torch.testing.assert_close(state, final)
    with pytest.raises(ValueError, match="state must be"):
        step(x.q, x.k, x.v, x.coef, x.state[:, :1])


def test_functional_faces():
    x = make(Case(T=70, heads=(2, 4), rows="two", scales=("Hk", "Hv", None)))
    beta, log_decay, key_scale, value_scale, _ = x.coef
    scales = {"key_scale": key_scale, "value_scale": value_scale, "state": x.state}
    expected = reference_delta(x.q, x.k, x.v, x.coef, state=x.state)  # scale is 1 unless given
    for got, want in zip(ops.delta_memory(x.q, x.k, x.v, beta, log_decay, **scales), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert all(map(torch.equal, ops.delta_memory(x.q, x.k, x.v, beta), ops.delta(x.q, x.k, x.v, Coefficients(beta=beta))))
    coef = x.coef._replace(beta=None)
    got, want = ops.decay_memory(x.q, x.k, x.v, log_decay, **scales, scale=0.5), ops.decay(x.q, x.k, x.v, coef, scale=0.5, state=x.state)
    assert all(map(torch.equal, got, want))
    with pytest.raises(ValueError, match="log_decay must be"):
        ops.delta_memory(x.q, x.k, x.v, beta, log_decay[..., :1])
    with pytest.raises(ValueError, match="the batch must be 1; got B = 2"):
        ops.decay_memory(x.q, x.k, x.v, cu_seqlens=torch.tensor([0, 70]))


def test_importing_ops_loads_neither_triton_nor_transformers():
    code = "import sys, fastweights.ops; assert not {'triton', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "TRITON_INTERPRET": "0"})


@BOTH
@pytest.mark.parametrize("form", ["chunk", "step"])
def test_every_twin_says_what_it_cannot_take(family, form):
    pytest.importorskip("triton")
    module = import_module(f"fastweights.ops.{family}.{form}_triton")
    x = example(family)
    assert module.why_not(x.q, x.k, x.v, x.coef) is None
    assert callable(getattr(module, f"{family}_step_triton_" if form == "step" else f"chunk_{family}_triton"))


COMPILE_WARNS = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch, to itself


@COMPILE_WARNS
@pytest.mark.compile
@pytest.mark.parametrize("rows, T", [("two", 70), ("packed", 70), ("packed", 3), pytest.param("two", 3, marks=pytest.mark.full)])
def test_delta_compiles_into_one_graph(rows, T):
    """Forward and backward, through the checks and dispatch; other lengths too."""
    compiled = torch.compile(ops.delta, fullgraph=True)
    for length in (T, T + 30) if T > dispatch.FEW else (T,):
        x = make(Case(T=length, K=16, V=16, rows=rows))
        got, expected = run(compiled, x), run(ops.delta, x)
        for name in expected:
            torch.testing.assert_close(got[name], expected[name], rtol=1e-5, atol=1e-5 if T <= dispatch.FEW else 0)


@COMPILE_WARNS
@pytest.mark.compile
def test_step_compiles_and_writes_into_its_state():
    x = make(Case(T=1, K=16, V=16))
    state, expected = x.state.clone(), x.state.clone()
    step = torch.compile(lambda state: ops.delta_step_(x.q, x.k, x.v, x.coef, state), fullgraph=True)
    assert torch.equal(step(state), ops.delta_step_(x.q, x.k, x.v, x.coef, expected))
    assert torch.equal(state, expected)
