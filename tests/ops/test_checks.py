"""Every ValueError names what was passed and what is allowed."""

import re
from dataclasses import replace

import pytest
import torch

from fastweights.notation import Coefficients
from fastweights.ops.checks import check_cu_seqlens, check_memory
from tests.ops.grid import Case, bounds, make

B, T, HK, HV, K, V = 2, 10, 2, 4, 16, 32
GOOD = make(Case(T=T, K=K, V=V, heads=(HK, HV), rows="two", scales=("Hk", "Hv", "Hk")))
ONES = torch.ones


def check(problem=GOOD, family="delta", **changed):
    coefficients = {name: changed.pop(name) for name in list(changed) if name in Coefficients._fields}
    validate = changed.pop("validate", False)
    p = replace(problem, **changed)
    coef = p.coef._replace(**coefficients)
    check_memory(family, p.q, p.k, p.v, coef, state=p.state, cu_seqlens=p.cu_seqlens, validate=validate)


def test_good_operands_pass():
    check()
    check(make(Case(rows="packed")))
    check(make(Case(T=0, rows="packed")))
    check(make(Case(decay="channel", beta=None)), family="decay")
    check(key_scale=ONES(B, T, HV), value_scale=ONES(B, T, HK), query_scale=ONES(B, T, HV))
    wide = GOOD.to(torch.float64)
    check(wide)
    check(wide, beta=wide.coef.beta.float())


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"q": ONES(B, T, K)}, "q must be [B, T, Hk, K]; got [2, 10, 16]"),
        ({"k": ONES(B, T, HV, K)}, "k must be [B, T, Hk, K] with B = 2, T = 10, Hk = 2, K = 16; got [2, 10, 4, 16]"),
        ({"v": ONES(B, T + 1, HV, V)}, "v must be [B, T, Hv, V] with B = 2, T = 10; got [2, 11, 4, 32]"),
        ({"v": ONES(B, T, 3, V)}, "value heads must be a multiple of key heads; got Hv = 3 (v) and Hk = 2 (q, k)"),
        ({"q": ONES(B, T, HK, K, dtype=torch.int64)}, "q must be float16 or bfloat16 or float32 or float64; got int64"),
        ({"k": ONES(B, T, HK, K, dtype=torch.bfloat16)}, "k must be float32; got bfloat16"),
        ({"beta": ONES(B, T, HV, dtype=torch.bfloat16)}, "beta must be float32; got bfloat16"),
        ({"beta": ONES(B, T, HK)}, "beta must be [B, T, Hv] = [2, 10, 4]; got [2, 10, 2]"),
        ({"key_scale": ONES(B, T, 1)}, "key_scale must be [B, T, Hk] = [2, 10, 2] or [B, T, Hv] = [2, 10, 4]; got [2, 10, 1]"),
        ({"value_scale": ONES(B, T)}, "value_scale must be [B, T, Hk] = [2, 10, 2] or [B, T, Hv] = [2, 10, 4]; got [2, 10]"),
        ({"query_scale": ONES(T, HK)}, "query_scale must be [B, T, Hk] = [2, 10, 2] or [B, T, Hv] = [2, 10, 4]; got [10, 2]"),
        ({"log_decay": ONES(B, T, HK)}, "log_decay must be [B, T, Hv] = [2, 10, 4]; got [2, 10, 2]"),
        ({"log_decay": -ONES(B, T, HK, K)}, "log_decay must be [B, T, Hv]; got [2, 10, 2, 16] per channel"),
        ({"log_decay": ONES(B, T, HV) / 4}, "log_decay must be ≤ 0 (the log of a forget gate in [0, 1]); its largest value is 0.25"),
        ({"log_decay": -ONES(B, T, HV, dtype=torch.float64)}, "log_decay must be float32; got float64"),
        ({"state": ONES(B, HV, V, K)}, "state must be [R, Hv, K, V] with R = 2, Hv = 4, K = 16, V = 32; got [2, 4, 32, 16]"),
        ({"state": ONES(B, HV, K, V, dtype=torch.bfloat16)}, "state must be float32; got bfloat16"),
        ({"state": ONES(B, HV, K, V, device="meta")}, "all tensors must be on one device; got q on cpu"),
        ({"cu_seqlens": torch.tensor([0, T])}, "the batch must be 1; got B = 2"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_bad_operands_are_named(changed, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check(**changed)


def test_what_only_one_family_takes():
    with pytest.raises(ValueError, match="only the delta family has a beta"):
        check(family="decay")
    with pytest.raises(
        ValueError, match=re.escape("log_decay must be [B, T, Hk, K] with B = 2, T = 10, Hk = 2, K = 16; got [2, 10, 4, 16]")
    ):
        check(family="decay", beta=None, log_decay=-ONES(B, T, HV, K))


@pytest.mark.parametrize(
    "cu_seqlens, message",
    [
        (torch.tensor([[0, 10]]), "cu_seqlens must be [documents + 1] with at least one document; got [1, 2]"),
        (torch.tensor([0]), "cu_seqlens must be [documents + 1] with at least one document; got [1]"),
        (torch.tensor([0.0, 10.0]), "cu_seqlens must be int32 or int64; got float32"),
        (torch.tensor([1, 10]), "cu_seqlens must start at 0; got cu_seqlens[0] = 1"),
        (torch.tensor([0, 9]), "cu_seqlens must end at T = 10; got cu_seqlens[-1] = 9"),
        (torch.tensor([0, 6, 4, 10]), "cu_seqlens must not decrease; got cu_seqlens[1] = 6 > cu_seqlens[2] = 4"),
    ],
)
def test_bad_bounds_are_named(cu_seqlens, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_cu_seqlens(cu_seqlens, 1, 10)


def test_state_rows_are_documents():
    packed = make(Case(rows="packed"))
    with pytest.raises(ValueError, match="with R = 6, Hv = 2"):
        check(packed, state=packed.state[:1])
    check_cu_seqlens(bounds([3, 0, 7]).int(), 1, 10)
