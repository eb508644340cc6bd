"""Documents packed into one row are the documents apart: in outputs, states and gradients, for both families."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastweights.notation import Coefficients
from fastweights.ops.dispatch import decay, delta
from fastweights.ops.reference import reference_decay, reference_delta
from tests.ops.grid import Case, Problem, bounds, check, make, run

FAMILIES = {"delta": (delta, reference_delta, {}), "decay": (decay, reference_decay, {"beta": None})}
BOTH = pytest.mark.parametrize("family", FAMILIES)


def problem(family: str, lengths: list[int], **factors) -> Problem:
    """Documents of these lengths in one row, each with its own state to start from."""
    x = make(Case(T=sum(lengths), **{"K": 16, "V": 16, "heads": (1, 2), "decay": "mixed", **FAMILIES[family][2], **factors}))
    states = torch.randn(2, len(lengths), *x.state.shape[1:], dtype=x.state.dtype)
    return replace(x, cu_seqlens=bounds(lengths), state=states[0], grad_state=states[1])


def apart(form):
    """The form run on every document by itself."""

    def run_apart(q, k, v, coef, *, scale, state, cu_seqlens):
        outputs, states = [], []
        for row, (a, b) in enumerate(pairwise(cu_seqlens.tolist())):
            own = Coefficients(*(None if c is None else c[:, a:b] for c in coef))
            o, final = form(q[:, a:b], k[:, a:b], v[:, a:b], own, scale=scale, state=state[row : row + 1])
            outputs.append(o)
            states.append(final)
        return torch.cat(outputs, dim=1), torch.cat(states)

    return run_apart


@BOTH
@given(lengths=st.lists(st.integers(0, 90), min_size=1, max_size=6))
@settings(max_examples=10, deadline=None)
def test_packed_is_apart(family, lengths):
    form, reference, _ = FAMILIES[family]
    check(form, apart(reference), problem(family, lengths))


@pytest.mark.parametrize("family, decays", [("delta", "mixed"), ("decay", "mixed"), ("decay", "channel mixed")])
def test_a_document_is_blind_to_the_others(family, decays):
    """Other numbers, or no numbers at all, in documents 0 and 2 change not one bit of document 1: not in its gradients either."""
    form = FAMILIES[family][0]
    lengths = [70, 100, 0, 33]
    x = problem(family, lengths, decay=decays)
    before = run(form, x)
    own = slice(70, 170)
    for rubbish in (0.0, torch.nan, 1e30):

        def spoil(t, rubbish=rubbish):
            if t is None:
                return None
            spoiled = torch.full_like(t, rubbish)
            spoiled[:, own] = t[:, own]
            return spoiled

        state = torch.full_like(x.state, rubbish)
        state[1] = x.state[1]
        coef = Coefficients(*map(spoil, x.coef))
        coef = coef._replace(log_decay=coef.log_decay.clamp(max=0))
        spoiled = replace(x, q=spoil(x.q), k=spoil(x.k), v=spoil(x.v), coef=coef, state=state, grad_o=spoil(x.grad_o))
        after = run(form, spoiled)
        for name in before:
            part = (slice(1, 2),) if "state" in name else (slice(None), own)
            assert torch.equal(before[name][part], after[name][part]), name


@BOTH
@pytest.mark.parametrize("lengths", [[0, 0, 5, 0], [0], [0, 0], [1, 1, 1, 1], [64, 64], [65, 0, 63]], ids=str)
def test_empty_and_short_documents(family, lengths):
    form, reference, _ = FAMILIES[family]
    x = problem(family, lengths)
    check(form, apart(reference), x)
    check(form, apart(reference), replace(x, cu_seqlens=x.cu_seqlens.int()))


@BOTH
def test_order_of_documents_does_not_matter(family):
    form = FAMILIES[family][0]
    lengths, order = [40, 3, 70, 0, 33], [2, 4, 0, 3, 1]
    x = problem(family, lengths)

    def reorder(t):
        return None if t is None else torch.cat([t.split(lengths, dim=1)[d] for d in order], dim=1)

    moved = replace(
        x,
        **{name: reorder(getattr(x, name)) for name in ("q", "k", "v", "grad_o")},
        coef=Coefficients(*map(reorder, x.coef)),
        state=x.state[order],
        grad_state=x.grad_state[order],
        cu_seqlens=bounds([lengths[d] for d in order]),
    )
    once, again = run(form, x), run(form, moved)
    for name, value in once.items():
        assert torch.equal(value[order] if "state" in name else reorder(value), again[name]), name


@BOTH
def test_seventy_thousand_documents(family):
    """One token each for most, two for some: against the closed form of a first and a second write."""
    form = FAMILIES[family][0]
    n = 70_000
    lengths = torch.ones(n, dtype=torch.int64)
    lengths[::7] = 2
    cu_seqlens = bounds(lengths.tolist())
    T = int(cu_seqlens[-1])
    q, k, v = (torch.randn(1, T, 1, 4) for _ in range(3))
    o, state = form(q, k, v, Coefficients(), cu_seqlens=cu_seqlens)
    first = cu_seqlens[:-1]
    q, k, v, o = (t[0, :, 0] for t in (q, k, v, o))
    write = k[first].unsqueeze(-1) * v[first].unsqueeze(-2)
    torch.testing.assert_close(o[first], torch.einsum("nkv,nk->nv", write, q[first]))
    second = first[::7] + 1
    error = v[second] - (torch.einsum("nkv,nk->nv", write[::7], k[second]) if family == "delta" else 0)
    write[::7] += k[second].unsqueeze(-1) * error.unsqueeze(-2)
    torch.testing.assert_close(state[:, 0], write)


@BOTH
def test_a_document_of_65537_tokens_among_short_ones(family):
    """More than 65,535 tokens, chunks of every step count; the long document alone, in two pieces, is the check."""
    form = FAMILIES[family][0]
    lengths = [1, 65_537, 0, 2]
    T = sum(lengths)
    q, k, v = (torch.nn.functional.normalize(torch.randn(1, T, 1, 16), dim=-1) for _ in range(3))
    coef = Coefficients(log_decay=-torch.rand(1, T, 1) / 8)
    o, state = form(q, k, v, coef, cu_seqlens=bounds(lengths))
    S = None
    for a, b in ((1, 30_001), (30_001, 65_538)):
        expected, S = form(q[:, a:b], k[:, a:b], v[:, a:b], Coefficients(log_decay=coef.log_decay[:, a:b]), state=S)
        torch.testing.assert_close(o[:, a:b], expected)
    torch.testing.assert_close(state[1:2], S)
    assert not state[2].any()
