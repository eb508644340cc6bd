"""The curvature-conditioned query against numpy's covariance, the Hessian it stands for, and its recursion as a loop in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastweights.notation import CCQState
from fastweights.ops.ccq.query import ccq_query, ccq_step_
from tests.ops.ccq_loop import cast, differentiate, draw, loop
from tests.ops.grid import bounds, compare

LENGTHS = [0, 1, 5, 0, 70, 3, 0]


def check(x):
    """As good as the loop in float32; a half-precision operand is rounded there too, once."""
    compare(differentiate(ccq_query, x), differentiate(loop, cast(x, torch.float32)), differentiate(loop, cast(x, torch.float64)))


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("T", [1, 3, 4, 5, 64, 150])
def test_it_is_the_loop(T, dtype, forget, state):
    check(draw(T=T, dtype=dtype, forget=forget, state=state))


@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_the_loop(dtype, forget):
    check(draw(T=70, dtype=dtype, forget=forget, state=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("T", [2, 70])
def test_unit_keys_are_the_loops_and_zero_keys_are_finite(T, dtype):
    x = draw(T=T, dtype=dtype, forget=True, state=True) | {"unit_keys": True, "eps": 1e-2}
    x["k"][:, T // 2] = 0
    check(x)


@pytest.mark.parametrize("T", [2, 70])
def test_scaled_keys_are_the_loops_in_one_pass_and_in_steps(T):
    x = draw(T=T, state=True) | {"key_scale": torch.rand(2, T, 2, dtype=torch.float64) + 0.5}
    check(x)
    o, after = ccq_query(**x)
    state = CCQState(*(t.clone() for t in x["state"]))
    state.covariance.copy_((state.covariance + state.covariance.mT) / 2)
    stepped = [
        ccq_step_(*(x[name][:, t : t + 1] for name in ("q", "k", "lam")), state, key_scale=x["key_scale"][:, t : t + 1]) for t in range(T)
    ]
    torch.testing.assert_close(torch.cat(stepped, 1), o, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(tuple(state), tuple(after), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("T", [3, 90])
def test_masked_tokens_are_not_there(T, forget):
    x = draw(T=T, forget=forget, state=True)
    mask = torch.rand(2, T) < 0.6
    mask[:, : T // 3] = False  # left padding
    mask[0, T // 3 : T // 2 + 1] = True
    check(x | {"mask": mask})
    for row in range(2):
        kept = {name: t[row : row + 1, mask[row]] for name, t in x.items() if name != "state"}
        alone, after = ccq_query(**kept, state=CCQState(*(t[row : row + 1] for t in x["state"])))
        o, state = ccq_query(**x, mask=mask)
        torch.testing.assert_close(o[row : row + 1, mask[row]], alone, rtol=1e-12, atol=1e-12)
        for a, b in zip(after, state, strict=True):
            torch.testing.assert_close(a[0], b[row], rtol=1e-12, atol=1e-12)


def test_nothing_leaks_from_masked_keys():
    x = draw(T=40, dtype=torch.float32, forget=True)
    mask = torch.rand(2, 40) < 0.5
    x["k"][~mask] = float("nan")
    o, state = ccq_query(**x, mask=mask)
    assert o.isfinite().all() and all(t.isfinite().all() for t in state)
    k = x["k"].requires_grad_()
    o, _ = ccq_query(**x, mask=mask)
    (grad,) = torch.autograd.grad(o.square().sum(), k)
    assert (grad[~mask] == 0).all() and grad[mask].isfinite().all() and grad[mask].abs().sum() > 0


def test_all_masked_is_the_identity_on_the_state():
    x = draw(T=20, dtype=torch.float32, forget=True, state=True)
    _, state = ccq_query(**x, mask=torch.zeros(2, 20, dtype=torch.bool))
    C = x["state"].covariance
    for got, want in zip(state, x["state"]._replace(covariance=(C + C.mT) / 2), strict=True):
        assert torch.equal(got, want)


def test_mask_of_ones_changes_nothing():
    x = draw(T=33, dtype=torch.float32, forget=True, state=True)
    o, state = ccq_query(**x)
    o_, state_ = ccq_query(**x, mask=torch.ones(2, 33, dtype=torch.bool))
    assert torch.equal(o, o_) and all(torch.equal(a, b) for a, b in zip(state, state_, strict=True))


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_packed_documents_are_the_documents_apart(dtype, masked, state):
    T = sum(LENGTHS)
    x = draw(T=T, B=1, dtype=dtype, forget=True, state=state, rows=len(LENGTHS)) | {"cu_seqlens": bounds(LENGTHS)}
    check(x | {"mask": torch.rand(1, T) < 0.6} if masked else x)


def test_documents_do_not_touch():
    T, edges = sum(LENGTHS), bounds(LENGTHS)
    x = draw(T=T, B=1, dtype=torch.float32)
    o, state = ccq_query(**x, cu_seqlens=edges)
    k = x["k"].clone()
    k[:, 6:76] *= -2  # the document of 70 tokens
    o_, state_ = ccq_query(**x | {"k": k}, cu_seqlens=edges)
    same = torch.ones(T, dtype=torch.bool)
    same[6:76] = False
    assert torch.equal(o[:, same], o_[:, same]) and not torch.equal(o, o_)
    others = [i for i in range(len(LENGTHS)) if i != 4]
    assert all(torch.equal(a[others], b[others]) for a, b in zip(state, state_, strict=True))


@settings(deadline=None, max_examples=20)
@given(st.lists(st.sampled_from([0, 1, 2, 3, 64, 65]), min_size=1, max_size=5), st.booleans())
def test_any_split_of_a_sequence_gives_the_same(pieces, forget):
    x = draw(T=sum(pieces), forget=forget, state=True)

    def in_pieces(state, **tokens):
        outputs = []
        for parts in zip(*(t.split(pieces, dim=1) for t in tokens.values()), strict=True):
            o, state = ccq_query(**dict(zip(tokens, parts, strict=True)), state=state)
            outputs.append(o)
        return torch.cat(outputs, dim=1), state

    whole = differentiate(ccq_query, x)
    compare(differentiate(in_pieces, x), differentiate(loop, cast(x, torch.float32)), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sigma_is_numpys_covariance_of_the_keys_so_far(dtype):
    x = draw(T=70, B=1, H=1, dtype=dtype)
    x["lam"] = torch.full_like(x["lam"], -1.0)  # q' − q = Σ q
    o, state = ccq_query(**x)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    k, q = x["k"][0, :, 0].double().numpy(), x["q"][0, :, 0].double().numpy()
    for t in range(1, 71):
        covariance = np.cov(k[:t], rowvar=False, bias=True)
        np.testing.assert_allclose((o - x["q"])[0, t - 1, 0].double().numpy(), covariance @ q[t - 1], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose((state.covariance / state.weight[..., None, None])[0, 0].double().numpy(), covariance, atol=tolerance)
    np.testing.assert_allclose(state.mean[0, 0].double().numpy(), k.mean(0), rtol=tolerance)
    assert state.weight.item() == 70


def test_sigma_with_forgetting_is_numpys_weighted_covariance():
    x = draw(T=40, B=1, H=1, forget=True)
    _, state = ccq_query(**x)
    log_decay = x["log_decay"][0, :, 0].numpy()
    weights = np.exp(np.append(np.cumsum(log_decay[::-1])[::-1][1:], 0.0))  # what later gates leave of each key
    k = x["k"][0, :, 0].numpy()
    want = np.cov(k, rowvar=False, aweights=weights, ddof=0)
    np.testing.assert_allclose((state.covariance / state.weight[..., None, None])[0, 0].numpy(), want, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(state.weight.item(), weights.sum(), rtol=1e-12)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own, on the first use of torch.func
def test_sigma_is_the_hessian_of_log_mean_exp_at_zero():
    x = draw(T=30, B=1, H=1)
    k = x["k"][0, :, 0]

    def log_mean_exp(q):
        return torch.logsumexp(k @ q, dim=0) - np.log(len(k))

    hessian = torch.func.hessian(log_mean_exp)(torch.zeros(k.shape[1], dtype=k.dtype))
    _, state = ccq_query(**x)
    torch.testing.assert_close(state.covariance[0, 0] / 30, hessian, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ccq_query(**x)[0][0, -1, 0], x["q"][0, -1, 0] - x["lam"][0, -1, 0] * hessian @ x["q"][0, -1, 0])


def test_chans_formula_merges_two_halves():
    x = draw(T=75)
    parts = [{name: t[:, piece] for name, t in x.items()} for piece in (slice(0, 30), slice(30, 75))]
    (_, whole), (_, a), (_, b) = ccq_query(**x), ccq_query(**parts[0]), ccq_query(**parts[1])
    w = a.weight + b.weight
    delta = b.mean - a.mean
    torch.testing.assert_close(whole.weight, w)
    torch.testing.assert_close(whole.mean, a.mean + delta * (b.weight / w).unsqueeze(-1))
    between = (a.weight * b.weight / w)[..., None, None] * delta.unsqueeze(-1) * delta.unsqueeze(-2)
    torch.testing.assert_close(whole.covariance, a.covariance + b.covariance + between, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("T", [1, 3, 90])
def test_strength_zero_is_the_query_bit_for_bit(T, dtype):
    x = draw(T=T, dtype=dtype, state=True)
    o, _ = ccq_query(**x | {"lam": torch.zeros_like(x["lam"])})
    assert o.dtype == dtype and torch.equal(o, x["q"])


@pytest.mark.parametrize("unit_keys", [False, True])
@pytest.mark.parametrize("pieces", [[300], [1] * 6, [3, 100, 2, 1]])
def test_constant_keys_have_no_spread_at_all(pieces, unit_keys):
    x = draw(T=sum(pieces), dtype=torch.float32)
    x["k"] = x["k"][:, :1].expand_as(x["k"])
    state = None
    for part in zip(*(t.split(pieces, dim=1) for t in x.values()), strict=True):
        part = dict(zip(x, part, strict=True))
        o, state = ccq_query(**part, unit_keys=unit_keys, state=state)
        assert torch.equal(o, part["q"])
        assert (state.covariance == 0).all()


@pytest.mark.parametrize("pieces", [[4096], [64] * 16, [1] * 100 + [900]])
def test_crowded_keys_keep_their_digits(pieces):
    """Spread 1e-4 around 1: raw second moments would have lost everything, as the last lines show."""
    T = sum(pieces)
    x = draw(T=T, B=1, H=1, dtype=torch.float32)
    x["k"] = 1 + 1e-4 * torch.randn(1, T, 1, 6)
    state = None
    for part in zip(*(t.split(pieces, dim=1) for t in x.values()), strict=True):
        _, state = ccq_query(**dict(zip(x, part, strict=True)), state=state)
    k = x["k"][0, :, 0].double()
    exact = torch.cov(k.mT, correction=0)
    sigma = (state.covariance / state.weight[..., None, None])[0, 0].double()
    assert (sigma - exact).abs().max() <= 1e-3 * exact.abs().max()
    k = k.float()
    raw = (k.mT @ k / T - torch.outer(k.mean(0), k.mean(0))).double()
    assert (raw - exact).abs().max() > exact.abs().max()


def test_keys_that_crowd_anew_after_all_is_forgotten():
    """The reference key is far from where keys crowd later."""
    x = draw(T=600, B=1, H=1, dtype=torch.float32)
    x["k"] = 1 + 1e-3 * torch.randn(1, 600, 1, 6)
    x["k"][:, :100] -= 2
    x["log_decay"] = torch.zeros(1, 600, 1)
    x["log_decay"][:, 100] = -100
    _, state = ccq_query(**x)
    exact = torch.cov(x["k"][0, 100:, 0].double().mT, correction=0)
    sigma = (state.covariance / state.weight[..., None, None])[0, 0].double()
    assert (sigma - exact).abs().max() <= 1e-3 * exact.abs().max()


def test_shut_gates_leave_tiny_numbers_right():
    x = draw(T=100, dtype=torch.float32, state=True)
    x["log_decay"] = torch.full_like(x["lam"], -50.0)
    got, exact = differentiate(ccq_query, x), differentiate(loop, cast(x, torch.float64))
    for name in ("covariance", "grad log_decay"):
        assert 0 < exact[name].abs().max() < 1e-17
        assert (got[name] - exact[name]).abs().max() <= 1e-5 * exact[name].abs().max()


def test_65536_tokens_stay_symmetric_positive_and_bounded():
    T, K = 65_536, 16
    x = draw(T=T, B=1, H=1, K=K, dtype=torch.float32, offset=0.5)
    o, state = ccq_query(**x, unit_keys=True)
    sigma = state.covariance[0, 0].double() / T
    assert torch.equal(sigma, sigma.mT)
    values = torch.linalg.eigvalsh(sigma)
    assert values[0] > 0 and values[-1] < 1 and sigma.trace() < 1
    k = x["k"][0, :, 0].double()
    exact = torch.cov((k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()).mT, correction=0)
    assert (sigma - exact).abs().max() <= 1e-5 * exact.abs().max()
    assert (o.norm(dim=-1) <= x["q"].norm(dim=-1) * (1 + 1e-6)).all()  # I − λΣ contracts


def test_keys_on_a_line_have_no_negative_direction():
    T = 5000
    x = draw(T=T, B=1, H=1, K=8, dtype=torch.float32)
    x["k"] = 1 + torch.randn(1, T, 1, 1) * torch.linspace(0.1, 1, 8)
    _, state = ccq_query(**x)
    values = torch.linalg.eigvalsh(state.covariance[0, 0].double())
    assert values[-1] > 0 and values[0] >= -8 * torch.finfo(torch.float32).eps * values[-1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("T", [0, 3])
def test_step_is_the_query_in_place(T, forget, dtype):
    x = draw(T=T, dtype=dtype, forget=forget, state=True)
    state = CCQState(*(t.clone() for t in x["state"]))
    o, after = ccq_query(**x, unit_keys=True)
    o_ = ccq_step_(**x | {"state": state}, unit_keys=True)
    assert o_.dtype == dtype
    torch.testing.assert_close(o_, o)
    for got, want in zip(state, after, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("T", [0, 1, 3, 40])
def test_state_is_fresh_and_operands_are_left_alone(T, packed):
    x = draw(T=T, B=1, dtype=torch.float32, state=True)
    before = [t.clone() for t in (x["q"], x["k"], x["lam"], *x["state"])]
    o, state = ccq_query(**x, cu_seqlens=torch.tensor([0, T]) if packed else None)
    for t in (o, *state):
        t.zero_()
    assert all(torch.equal(a, b) for a, b in zip(before, (x["q"], x["k"], x["lam"], *x["state"]), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 5, 8)}, r"q must be \[B, T, Hk, K\]"),
        ({"k": torch.zeros(2, 5, 3, 8)}, r"k must be \[B, T, Hk, K\] with .*Hk = 2"),
        ({"lam": torch.zeros(2, 5, 4)}, r"lam must be \[B, T, Hk\] = \[2, 5, 2\]"),
        ({"key_scale": torch.zeros(2, 5, 4)}, r"key_scale must be \[B, T, Hk\] = \[2, 5, 2\]"),
        ({"key_scale": torch.zeros(2, 5, 2), "unit_keys": True}, "key_scale and unit_keys=True are both"),
        ({"log_decay": torch.zeros(2, 5, 2, 8)}, r"log_decay must be \[B, T, Hk\]"),
        ({"log_decay": torch.full((2, 5, 2), 0.1)}, "log_decay must be ≤ 0"),
        ({"mask": torch.ones(2, 5)}, "mask must be bool"),
        ({"mask": torch.ones(2, 6, dtype=torch.bool)}, r"mask must be \[B, T\]"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "batch must be 1"),
        ({"state": CCQState(torch.zeros(2, 2, 8, 8), torch.zeros(2, 2, 8), torch.zeros(1, 2))}, r"state.weight must be \[R, Hk\]"),
        ({"state": CCQState(*(torch.zeros(2, 2, *s).half() for s in ((8, 8), (8,), ())))}, "state.covariance must be float32; got float16"),
        ({"backend": "triton"}, "backend='triton' cannot run this"),
        ({"backend": "best"}, "backend must be one of"),
    ],
)
def test_bad_operands_are_named(change, message, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    given = {"q": torch.zeros(2, 5, 2, 8), "k": torch.zeros(2, 5, 2, 8), "lam": torch.zeros(2, 5, 2)} | change
    with pytest.raises(ValueError, match=message):
        ccq_query(**given)


@pytest.mark.parametrize("T", [2, 11])
def test_it_passes_gradcheck(T):
    x = draw(T=T, B=1, H=1, K=3, forget=True, state=True)
    x["log_decay"] -= 0.01  # finite differences may not step above 0
    leaves = [t.requires_grad_() for t in (x["q"], x["k"], x["lam"], x["log_decay"], *x["state"])]

    def form(q, k, lam, log_decay, *state):
        o, after = ccq_query(q, k, lam, log_decay=log_decay, state=CCQState(*state), unit_keys=True, eps=0.1)
        return o, *after

    assert torch.autograd.gradcheck(form, leaves, fast_mode=True)


@pytest.mark.compile
@pytest.mark.parametrize("T", [1, 20])
def test_compiles_without_a_graph_break(T):
    x = draw(T=T, forget=True, state=True)
    got = differentiate(torch.compile(ccq_query, fullgraph=True, backend="aot_eager"), x)
    compare(got, differentiate(loop, cast(x, torch.float32)), differentiate(loop, x))
