"""Softmax attention against its equation, and through pieces, packs and windows."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastweights.layers import SoftmaxAttention
from fastweights.layers.softmax_documents import MOST, _by_length, layout
from tests.layers.mixers import D, H, build_softmax, close, tensors_of

T, K = 24, D // H
WINDOWS = [None, 1, 5, 100]


def hidden(rows=1, tokens=T, seed=5, dtype=torch.float64):
    return torch.randn(rows, tokens, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def literal(layer, x):
    """One row, one token and one head at a time; rotary positions as multiplication of complex pairs (i, i + K/2) by exp(i·place·θ_i)."""
    q, k, v = (x[0] @ layer.qkv_proj.weight.T).split(D, dim=-1)
    turn = torch.polar(
        torch.ones(len(x[0]), K // 2, dtype=torch.float64),
        torch.outer(torch.arange(len(x[0])).double(), layer.rope_theta ** (-2 * torch.arange(K // 2).double() / K)),
    )

    def rotated(t):
        z = torch.complex(t[:, : K // 2], t[:, K // 2 :]) * turn
        return torch.cat([z.real, z.imag], dim=-1)

    o = torch.zeros(len(x[0]), D, dtype=torch.float64)
    for head in range(H):
        part = slice(head * K, (head + 1) * K)
        q_head, k_head = rotated(q[:, part]), rotated(k[:, part])
        for t in range(len(x[0])):
            first = 0 if layer.window_size is None else max(0, t - layer.window_size + 1)
            weights = torch.softmax(k_head[first : t + 1] @ q_head[t] / K**0.5, dim=0)
            o[t, part] = weights @ v[first : t + 1, part]
    return (o @ layer.out_proj.weight.T).unsqueeze(0)


@pytest.mark.parametrize("window", WINDOWS)
def test_is_its_equation(window):
    layer, x = build_softmax(window_size=window, rope_theta=100.0).double(), hidden()
    close(layer(x)[0], literal(layer, x), 1e-12)


@pytest.mark.parametrize("window", WINDOWS)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(cuts=st.lists(st.integers(0, T), max_size=8))
def test_any_partition_through_the_state_is_one_pass(window, cuts):
    layer, x = build_softmax(window_size=window).double(), hidden(rows=2)
    expected, expected_state = layer(x)
    state, outputs = None, []
    for start, end in itertools.pairwise([0, *sorted(cuts), T]):
        y, state = layer(x[:, start:end], state=state)
        outputs.append(y)
    close(torch.cat(outputs, dim=1), expected)
    for actual, whole in zip(state, expected_state, strict=True):
        close(actual.double(), whole.double())


@pytest.mark.parametrize("window", WINDOWS)
def test_packed_documents_are_the_documents_apart(window):
    """Twice in a row, so that the second pack goes on from rows of unequal length; then a batch goes on from those."""
    layer = build_softmax(window_size=window).double()
    states, apart = None, [None] * 4
    for round_, lengths in enumerate(([5, 0, 1, 9], [3, 2, 0, 1])):
        bounds = torch.tensor([0, *itertools.accumulate(lengths)])
        x = hidden(tokens=sum(lengths), seed=round_).requires_grad_()
        y, states = layer(x, state=states, cu_seqlens=bounds)
        pairs = [layer(piece, state=state) for piece, state in zip(x.split(lengths, dim=1), apart, strict=True)]
        y_apart, apart = torch.cat([y for y, _ in pairs], dim=1), [state for _, state in pairs]
        close(y, y_apart)
        leaves = [x, *layer.parameters()]
        for actual, expected in zip(*(torch.autograd.grad(o.square().sum(), leaves, retain_graph=True) for o in (y, y_apart)), strict=True):
            close(actual, expected)
    assert states.place.tolist() == [8, 2, 1, 10]
    x = hidden(rows=4, tokens=3)
    y, states = layer(x, state=states)
    close(y, torch.cat([layer(x[i : i + 1], state=apart[i])[0] for i in range(4)]))
    assert states.place.tolist() == [11, 5, 4, 13]


@pytest.mark.parametrize("window", [None, 1, 5])
@settings(max_examples=20, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(0, 21), min_size=1, max_size=9))
def test_new_documents_in_groups_are_each_by_itself(window, lengths):
    """Outputs, gradients and what is kept, against the loop that takes over where there is a past."""
    layer, bounds = build_softmax(window_size=window).double(), torch.tensor([0, *itertools.accumulate(lengths)])
    x = hidden(tokens=sum(lengths)).requires_grad_()
    nothing = layer.initial_state(len(lengths), dtype=torch.float64)
    (y, state), (z, state_z) = (layer(x, state=past, cu_seqlens=bounds) for past in (None, nothing))
    close(y, z)
    for mine, other in zip(state, state_z, strict=True):
        close(mine.double(), other.double())
    leaves = [x, *layer.parameters()]
    total, total_z = (o.square().sum() + kept.keys.square().sum() + kept.values.sum() for o, kept in ((y, state), (z, state_z)))
    for mine, other in zip(*(torch.autograd.grad(t, leaves) for t in (total, total_z)), strict=True):
        close(mine, other)


def test_groups_waste_less_than_half():
    lengths = [3, 0, 700, 1, 512, 1023, 4, 2, 7, 0]
    groups, tokens, back = _by_length([0, *itertools.accumulate(lengths)])
    assert sorted(groups) == [(1, 1), (1, 512), (1, 700), (1, 1023), (2, 3), (2, 7)]
    assert torch.equal(tokens[back], torch.arange(sum(lengths)))  # each token stands where it is looked for
    assert len(tokens) == sum(n * longest for n, longest in groups) < 2 * sum(lengths)
    long, *_ = _by_length([0, *itertools.accumulate(range(64, 2048, 7))])
    assert sum(n * longest**2 for n, longest in long) < 1.4 * sum(length**2 for length in range(64, 2048, 7))


def test_so_many_documents_are_not_one_batch():
    groups, tokens, back = _by_length(list(range(70_001)))
    assert groups == [(MOST, 1), (MOST, 1), (70_000 - 2 * MOST, 1)] and torch.equal(tokens[back], torch.arange(70_000))


def test_layers_share_what_the_lengths_say_until_they_change():
    bounds, here = torch.tensor([0, 3, 10]), torch.device("cpu")
    one = layout(bounds, None, here)
    assert layout(bounds, None, here) is one and one.slots == 7
    assert layout(bounds, 4, here).slots == 4 and layout(bounds.clone(), None, here) is not one
    bounds[1] = 5
    assert layout(bounds, None, here).slots == 5


def test_what_was_found_without_gradients_serves_training():
    layer, bounds, x = build_softmax(), torch.tensor([0, 11, T]), hidden(dtype=torch.float32)
    with torch.inference_mode():
        y = layer(x, cu_seqlens=bounds)[0]
        assert torch.equal(layer(x, cu_seqlens=bounds.clone())[0], y)
    z = layer(x.requires_grad_(), cu_seqlens=bounds)[0]
    z.sum().backward()
    assert torch.equal(y, z) and x.grad is not None


def test_changing_one_document_changes_no_bit_of_another():
    layer, bounds = build_softmax(), torch.tensor([0, 11, T])
    x = hidden(dtype=torch.float32)
    other = torch.cat([hidden(tokens=11, seed=9, dtype=torch.float32), x[:, 11:]], dim=1)
    (y, state), (z, state_z) = layer(x, cu_seqlens=bounds), layer(other, cu_seqlens=bounds)
    assert not torch.equal(y[:, :11], z[:, :11]) and torch.equal(y[:, 11:], z[:, 11:])
    assert all(torch.equal(a[1], b[1]) for a, b in zip(state, state_z, strict=True))


def test_a_window_bounds_the_state():
    layer = build_softmax(window_size=5)
    _, state = layer(hidden(dtype=torch.float32))
    assert state.keys.shape[1] == 4 and state.key_place.tolist() == [[20, 21, 22, 23]]
    _, state = layer(hidden(dtype=torch.float32), cu_seqlens=torch.tensor([0, 2, T]))
    assert state.key_place.tolist() == [[-1, -1, 0, 1], [18, 19, 20, 21]]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_no_given_state_is_changed_or_shared(window, tokens):
    layer = build_softmax(window_size=window)
    with torch.no_grad():
        _, state = layer(hidden(rows=2, dtype=torch.float32, tokens=7))
        before = [t.clone() for t in state]
        _, new = layer(hidden(rows=2, dtype=torch.float32, tokens=tokens), state=state)
    for t in new:
        t.zero_()
    assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))


def test_initial_state_is_the_state_of_no_tokens():
    layer, x = build_softmax(), hidden(rows=2, dtype=torch.float32)
    assert torch.equal(layer(x, state=layer.initial_state(2))[0], layer(x)[0])
    for a, b in zip(layer.initial_state(2), layer(x[:, :0])[1], strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "autocast"], ids=str)
def test_half_precision_is_close_forward_and_finite_backward(dtype):
    layer, x = build_softmax(), hidden(rows=2, dtype=torch.float32)
    expected, _ = layer(x)
    if dtype == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, state = layer(x)
            again, _ = layer(x, state=state)
        kind = torch.bfloat16
    else:
        layer, x, kind = layer.to(dtype), x.to(dtype), dtype
        y, state = layer(x)
        again, _ = layer(x, state=state)
    assert y.dtype == again.dtype == kind
    assert (y.float() - expected).norm() <= 16 * torch.finfo(kind).eps * expected.norm()
    again.float().square().sum().backward()
    assert all(torch.isfinite(p.grad).all() and p.grad.abs().max() > 0 for p in layer.parameters())


def test_far_places_stay_right():
    """At place 10⁶ the angle is taken in float32, and distances still decide: shifting all places changes nothing but rounding."""
    layer, x = build_softmax(), hidden(dtype=torch.float32)
    near, _ = layer(x)
    far, state = layer(x, state=layer.initial_state(1)._replace(place=torch.tensor([1_000_000])))
    assert state.place.tolist() == [1_000_000 + T]
    assert (near - far).abs().max() <= 0.1 * near.abs().max()  # float32 resolves an angle of 10⁶ to 0.06


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"num_heads": 3}, "hidden_size=16 is not an even multiple of num_heads=3"),
        ({"num_heads": 16}, "rotary positions need pairs"),
        ({"num_heads": 0}, "num_heads=0"),
        ({"num_heads": 2, "window_size": 0}, "window_size=0 is not positive"),
        ({"num_heads": 2, "rope_theta": 0.0}, "rope_theta=0.0 is not positive"),
    ],
)
def test_impossible_sizes_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SoftmaxAttention(hidden_size=16, **arguments)


def test_operands_are_refused():
    layer, x = build_softmax(), hidden(rows=2, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"x must be \[B, T, D\] with D = 16"):
        layer(x[..., :3])
    with pytest.raises(ValueError, match="the batch must be 1"):
        layer(x, cu_seqlens=torch.tensor([0, T]))
    with pytest.raises(ValueError, match="the state has 3 rows and x has 2 sequences"):
        layer(x, state=layer.initial_state(3))


@pytest.mark.parametrize("options", [{"window_size": 3}, {"rope_theta": 10.0}])
def test_every_argument_acts(options):
    x = hidden(dtype=torch.float32)
    assert not torch.allclose(build_softmax()(x)[0], build_softmax(**options)(x)[0], rtol=1e-3)


def test_meta_then_reset():
    with torch.device("meta"):
        layer = SoftmaxAttention(hidden_size=D, num_heads=H, window_size=5)
    layer = layer.to_empty(device="cpu")
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    y, state = layer(hidden(dtype=torch.float32))
    assert torch.isfinite(y).all() and all(torch.isfinite(t).all() for t in tensors_of(state))
