"""The read rules: what they take out of a query, what they keep, and what they refuse."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from fastweights.notation import Coefficients
from fastweights.read import READ_RULES
from fastweights.write import WRITE_RULES
from tests.layers.mixers import D, build, close

B, T, H, K, V = 2, 14, 2, 8, 6


def pair(write="kla", *, num_value_heads=H, **options):
    rule = WRITE_RULES[write](hidden_size=D, num_heads=H, num_value_heads=num_value_heads, head_k_dim=K, head_v_dim=V)
    torch.manual_seed(0)
    read = READ_RULES["ccq"](rule, **options)
    with torch.no_grad():
        for parameter in read.parameters():
            parameter += 0.5 * torch.randn_like(parameter)
    return rule.double(), read.double()


def inputs(offset=0.0):
    generator = torch.Generator().manual_seed(1)
    x, q, k, v = (torch.randn(B, T, *shape, generator=generator, dtype=torch.float64) for shape in ((D,), (H, K), (H, K), (H, V)))
    return x, q, k + offset, v


def coefficients(rule, x, q, k, v):
    return rule(x, k, v, torch.arange(T).expand(B, T))._replace(query_scale=rule.query_scale(q))


def literal(read, coef, q, k, strength):
    """q' by numpy.cov over all keys so far, of one row, token and head at a time."""
    result = q.clone()
    for b in range(B):
        for t in range(T):
            for head in range(H):
                keys = k[b, : t + 1, head].numpy()
                covariance = np.cov(keys.T, bias=True) if t else np.zeros((K, K))
                normalised = q[b, t, head] * (1 if coef.query_scale is None else coef.query_scale[b, t, head])
                lam = strength[head] * torch.sigmoid(normalised @ read.lambda_weight[head] + read.lambda_bias[head])
                result[b, t, head] -= lam * torch.from_numpy(covariance) @ q[b, t, head]
    return result


@pytest.mark.parametrize("write", WRITE_RULES)
def test_ccq_is_its_equation_on_the_keys_as_written(write):
    """Unit keys where the rule does not bound its keys, else the keys with their key_scale; λ from the normalised query."""
    rule, read = pair(write)
    x, q, k, v = inputs()
    with torch.no_grad():
        coef = coefficients(rule, x, q, k, v)
        written = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt() if not rule.keys_bounded else k * coef.key_scale.unsqueeze(-1)
        assert read.unit_keys == (not rule.keys_bounded)
        actual, state = read(q, k, coef)
        close(actual, literal(read, coef, q, written, torch.ones(H)), 1e-12)
    assert torch.equal(state.weight, torch.full((B, H), float(T), dtype=torch.float64))


def test_learned_strength_scales_lambda():
    rule, read = pair(strength="learned")
    x, q, k, v = inputs()
    with torch.no_grad():
        coef = coefficients(rule, x, q, k, v)
        written = k * coef.key_scale.unsqueeze(-1)
        close(read(q, k, coef)[0], literal(read, coef, q, written, math.sqrt(K) * read.log_strength.exp()), 1e-12)


@pytest.mark.parametrize("strength, factor", [("paper", 1.0), ("learned", math.sqrt(K))])
def test_lambda_starts_where_it_is_told(strength, factor):
    rule, _ = pair()
    _, q, _, _ = inputs()
    for start in (0.1, 0.9):
        read = READ_RULES["ccq"](rule, strength=strength, lambda_init=start)
        lam = read.strength(q.float(), None)
        assert lam.dtype == torch.float32 and torch.allclose(lam, torch.full((B, T, H), start * factor))


def test_forgetting_with_the_memory_weighs_keys_by_its_decay():
    rule, read = pair("gated_deltanet", forget="memory")
    x, q, k, v = inputs()
    with torch.no_grad():
        coef = coefficients(rule, x, q, k, v)
        actual, state = read(q, k, coef)
        written, total = k * coef.key_scale.unsqueeze(-1), coef.log_decay.cumsum(1)
        lam = read.strength(q, coef.query_scale)
        for t in (0, 1, 5, T - 1):
            weights = (total[:, t : t + 1] - total[:, : t + 1]).exp()
            for b in range(B):
                for head in range(H):
                    keys = written[b, : t + 1, head].T.numpy()
                    covariance = np.cov(keys, bias=True, aweights=weights[b, :, head].numpy()) if t else np.zeros((K, K))
                    expected = q[b, t, head] - lam[b, t, head] * torch.from_numpy(covariance) @ q[b, t, head]
                    close(actual[b, t, head], expected, 1e-12)
        close(state.weight, weights.sum(1), 1e-12)


def test_a_query_without_strength_is_read_raw_bit_for_bit():
    x = torch.randn(2, 20, D)
    for write in WRITE_RULES:
        cleaned, raw = build(f"{write}+ccq"), build(write)
        raw.load_state_dict({name: value for name, value in cleaned.state_dict().items() if not name.startswith("read.")})
        with torch.no_grad():
            different = cleaned(x)[0]
            cleaned.read.lambda_weight.zero_()
            cleaned.read.lambda_bias.fill_(-math.inf)
            assert torch.equal(cleaned(x)[0], raw(x)[0]), write
            assert not torch.allclose(different, raw(x)[0], rtol=1e-3), write


def test_constant_keys_take_nothing_out():
    rule, read = pair()
    x, q, k, v = inputs()
    k = k[:, :1].expand_as(k)
    with torch.no_grad():
        assert torch.equal(read(q, k, coefficients(rule, x, q, k, v))[0], q)


class TestWatching:
    """The largest λ·tr Σ, only when asked for."""

    @pytest.mark.parametrize("write, options", [("kla", {}), ("gla", {}), ("kla", {"forget": "memory", "strength": "learned"})])
    @pytest.mark.parametrize("offset", [0.0, 300.0])
    def test_is_the_largest_of_lambda_times_trace(self, write, options, offset):
        rule, read = pair(write, **options)
        x, q, k, v = inputs(offset)
        with torch.no_grad():
            coef = coefficients(rule, x, q, k, v)
            read(q, k, coef)
            assert read.lambda_times_trace is None
            read.watched = True
            # One token at a time, the state after it has Σ_t.
            largest, state, lam = 0.0, None, read.strength(q, coef.query_scale)
            for t in range(T):
                step = Coefficients(*(None if c is None else c[:, t : t + 1] for c in coef))
                _, state = read(q[:, t : t + 1], k[:, t : t + 1], step, state=state)
                trace = state.covariance.diagonal(dim1=-2, dim2=-1).sum(-1) / state.weight
                expected = (lam[:, t] * trace).amax().item()
                assert read.lambda_times_trace.item() == pytest.approx(expected, rel=1e-6, abs=1e-12)
                largest = max(largest, expected)
            read(q, k, coef)
            assert read.lambda_times_trace.item() == pytest.approx(largest, rel=1e-6)
            bounds = torch.tensor([0, 5, 5, T])
            read(q[:1], k[:1], Coefficients(*(None if c is None else c[:1] for c in coef)), cu_seqlens=bounds)
            assert 0 < read.lambda_times_trace.item() < math.inf

    def test_costs_nothing_when_nobody_asks(self, monkeypatch):
        rule, read = pair()
        x, q, k, v = inputs()
        monkeypatch.setattr(type(read), "trace", lambda *a: pytest.fail("computed unasked"))
        read(q, k, coefficients(rule, x, q, k, v))

    def test_no_tokens_leave_it_as_it_was(self):
        _, read = pair()
        read.watched = True
        _, q, k, _ = (t[:, :0] for t in inputs())
        read(q, k, Coefficients(key_scale=torch.ones(B, 0, H, dtype=torch.float64)))
        assert read.lambda_times_trace is None


# For each option: a mixer, options it stands among, and values that must each change what the layer says.
OTHER_VALUES = {
    "forget": ("kla+ccq", {}, ("memory",)),
    "lambda_init": ("kla+ccq", {}, (0.1, 0.9)),
    "strength": ("kla+ccq", {}, ("learned",)),
    "unit_keys": ("longhorn+ccq", {}, (True,)),  # where keys are written at length √(‖k‖²/(‖k‖²+ε)) already, it changes nothing
    "eps": ("kla+ccq", {"ccq_unit_keys": True}, (0.1,)),
}


@pytest.mark.parametrize("option", [field.name for field in dataclasses.fields(READ_RULES["ccq"].Options)])
def test_every_option_has_an_effect(option):
    mixer, options, values = OTHER_VALUES[option]
    x = torch.randn(2, 20, D)
    y, _ = build(mixer, **options)(x)
    for value in values:
        z, _ = build(mixer, **options, **{f"ccq_{option}": value})(x)
        assert not torch.allclose(y, z, rtol=1e-3), f"{option}={value!r}"


def test_unit_keys_may_be_switched_off_where_keys_are_not_bounded():
    x = torch.randn(2, 20, D)
    assert not torch.allclose(build("gla+ccq")(x)[0], build("gla+ccq", ccq_unit_keys=False)(x)[0], rtol=1e-3)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"forget": "keys"}, "ccq_forget='keys' is not one of 'none', 'memory'"),
        ({"lambda_init": 0.0}, r"ccq_lambda_init=0.0 is not a number in \(0.0, 1.0\)"),
        ({"lambda_init": 1}, r"ccq_lambda_init=1.0 is not a number in \(0.0, 1.0\)"),
        ({"strength": "strong"}, "ccq_strength='strong' is not one of 'paper', 'learned'"),
        ({"eps": 0.0}, "ccq_eps=0.0 is not a number"),
        ({"lambda": 1.0}, "read rule 'ccq' has no option 'lambda'; it has: forget, lambda_init, strength, unit_keys, eps"),
    ],
)
def test_impossible_options_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        pair(**options)


def test_the_raw_read_has_no_options_and_no_parameters():
    rule, _ = pair()
    assert not list(READ_RULES["raw"](rule).parameters())
    with pytest.raises(ValueError, match="read rule 'raw' has no option 'eps'; it has: none"):
        READ_RULES["raw"](rule, eps=1.0)


@pytest.mark.parametrize("name", READ_RULES)
def test_rules_are_named_as_they_are_listed(name):
    assert READ_RULES[name].name == name


def test_the_projection_is_its_equation_and_takes_as_many_parameters_as_ccq():
    rule, read = pair()
    projection = READ_RULES["projection"](rule)
    assert sum(p.numel() for p in projection.parameters()) == sum(p.numel() for p in READ_RULES["ccq"](rule).parameters())
    torch.nn.init.normal_(projection.bias)
    q = torch.randn(2, 5, *projection.weight.shape, dtype=torch.float64)
    coef = Coefficients(query_scale=torch.rand(q.shape[:-1], dtype=torch.float64))
    w, b = projection.weight.double(), projection.bias.double()
    u = w / (w.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    lam = torch.sigmoid(torch.einsum("bthk,hk->bth", q * coef.query_scale.unsqueeze(-1), w) + b)
    expected = q - lam.unsqueeze(-1) * torch.einsum("hk,hl,bthl->bthk", u, u, q)
    found, state = projection(q, q, coef)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert state is None and torch.equal(projection.step_(q, q, coef, None), found)
    with pytest.raises(ValueError, match="keeps no state"):
        projection(q, q, coef, state=read.initial_state(2))
