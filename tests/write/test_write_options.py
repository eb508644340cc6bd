"""Every option of every rule does something, every impossible one is refused by name, and every gate stays finite."""

import dataclasses

import pytest
import torch

from fastweights.ops.reference import reference_decay, reference_delta
from fastweights.precision import at_least_float32
from fastweights.write import WRITE_RULES

B, T, D, Hk, Hv, K, V = 2, 6, 16, 2, 4, 8, 4
HALF_AND_FULL = (torch.float16, torch.bfloat16, torch.float32)

# For each option, values that must each change what the rule says of a token.
OTHER_VALUES = {
    "relaxation": (False,),
    "key_norm": ("none", "learned"),
    "sequence_factor": ("1/t", "1/sqrt(t)", "1/log(1+t)"),
    "q_norm": ("none",),
    "single_gate": (True,),
    "eta_max": (1.5, 2.0),
    "eps": (1e-2,),
}
OPTIONS = [(rule, field.name) for rule in WRITE_RULES for field in dataclasses.fields(WRITE_RULES[rule].Options)]


def build(name, **options):
    torch.manual_seed(0)
    return WRITE_RULES[name](hidden_size=D, num_heads=Hk, num_value_heads=Hv, head_k_dim=K, head_v_dim=V, **options)


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x, q, k, v = (torch.randn(B, T, *shape, generator=generator).to(dtype) for shape in ((D,), (Hk, K), (Hk, K), (Hv, V)))
    return x, q, k, v, torch.arange(T).expand(B, T)


def coefficients(rule, x, q, k, v, position):
    return rule(x, k, v, position)._replace(query_scale=rule.query_scale(q))


def recurrence(rule):
    return {"delta": reference_delta, "decay": reference_decay}[rule.family]


@pytest.mark.parametrize("name, option", OPTIONS)
def test_every_option_has_an_effect(name, option):
    x, q, k, v, position = inputs()
    default = build(name)
    if option == "key_norm":  # "learned" starts where "kaczmarz" is

        def perturb(rule):
            if rule.norm_weight is not None:
                torch.nn.init.constant_(rule.norm_weight, -1.0)
            return rule
    else:

        def perturb(rule):
            return rule

    o, _ = recurrence(default)(q, k, v, coefficients(default, x, q, k, v, position))
    for value in OTHER_VALUES[option]:
        other = perturb(build(name, **{option: value}))
        o_other, _ = recurrence(other)(q, k, v, coefficients(other, x, q, k, v, position))
        assert not torch.allclose(o, o_other, rtol=1e-4), f"{option}={value!r}"


REFUSED = [
    ("kla", {"single_gate": True, "relaxation": False}, "single_gate=True .* needs relaxation=True"),
    ("kla", {"eta_max": 1.5, "relaxation": False}, "eta_max=1.5 has no effect with relaxation=False"),
    ("kla", {"eta_max": 2.0, "sequence_factor": "1/log(1+t)"}, "eta_max=2.0 with sequence_factor='1/log"),
    ("kla", {"eta_max": 1.1, "key_norm": "none"}, "eta_max=1.1 needs key_norm='kaczmarz'.* key_norm is 'none'"),
    ("kla", {"eta_max": 1.1, "key_norm": "learned"}, "eta_max=1.1 needs key_norm='kaczmarz'.* key_norm is 'learned'"),
    ("kla", {"eta_max": 2, "single_gate": True}, "eta_max=2.0 with single_gate=True"),
    ("kla", {"key_norm": "l2"}, "key_norm='l2' is not one of 'kaczmarz', 'learned', 'none'"),
    ("kla", {"sequence_factor": "1/t²"}, "sequence_factor='1/t²' is not one of 'none', '1/t'"),
    ("kla", {"q_norm": "softmax"}, "q_norm='softmax' is not one of 'l2', 'none'"),
    ("kla", {"eps": 0.0}, r"eps=0.0 is not a number in \(0"),
    ("kla", {"eps": float("nan")}, "eps=nan is not a number"),
    *[
        (name, {"eta_max": value}, rf"eta_max={value!r} is not a number in \[1.0, 2.0\]")
        for name in ("deltanet", "gated_deltanet", "kla")
        for value in (0.5, 2.5)
    ],
    ("deltanet", {"eps": -1e-6}, "eps=-1e-06 is not a number"),
]


@pytest.mark.parametrize("name, options, message", REFUSED)
def test_impossible_options_are_refused_by_name(name, options, message):
    with pytest.raises(ValueError, match=message):
        build(name, **options)


@pytest.mark.parametrize("name", WRITE_RULES)
def test_an_unknown_option_is_refused_with_those_that_exist(name):
    known = [field.name for field in dataclasses.fields(WRITE_RULES[name].Options)]
    with pytest.raises(ValueError, match=f"write rule '{name}' has no option 'strengh'; it has: {', '.join(known) or 'none'}"):
        build(name, strengh=1)


@pytest.mark.parametrize("name", WRITE_RULES)
def test_rules_are_named_as_they_are_listed(name):
    assert WRITE_RULES[name].name == name


@pytest.mark.parametrize("name", WRITE_RULES)
def test_facts_the_read_relies_on_are_true(name):
    rule = build(name)
    x, q, k, v, position = inputs()
    coef = coefficients(rule, x, q, 30 * k, v, position)
    written = (
        k * 30
        if coef.key_scale is None
        else 30 * k.repeat_interleave(Hv // Hk, 2) * coef.key_scale.repeat_interleave(Hv // coef.key_scale.shape[2], 2).unsqueeze(-1)
    )
    assert rule.keys_bounded == bool((written.norm(dim=-1) <= 1 + 1e-6).all())
    assert rule.head_decay == (coef.log_decay is not None and coef.log_decay.dim() == 3)
    assert rule.key_scale_per_value_head == (coef.key_scale is not None and coef.key_scale.shape[2] != Hk)
    assert (rule.q_norm == "l2") == (coef.query_scale is not None)


@pytest.mark.parametrize("dtype", HALF_AND_FULL, ids=str)
@pytest.mark.parametrize("name", WRITE_RULES)
def test_coefficients_are_float32_and_right_for_keys_of_any_length(name, dtype):
    """‖k‖ and ‖q‖ in {0, 1e-4, 1, 1e3}, hidden states up to 100: finite, and as the float64 rule has them on the same inputs."""
    rule = build(name)
    x, q, k, v, position = inputs(dtype)
    lengths = torch.tensor([0, 1e-4, 1, 1e3, 0, 1])[:, None, None]
    x = (x * torch.tensor([1, 100, 0, 1, 30, 1])[:, None]).to(dtype)
    q, k = ((lengths * t.float() / t.float().norm(dim=-1, keepdim=True)).to(dtype) for t in (q, k))
    coef = coefficients(rule, x, q, k, v, position)
    exact = coefficients(build(name).double(), x.double(), q.double(), k.double(), v.double(), position)
    for field, value, truth in zip(coef._fields, coef, exact, strict=True):
        assert (value is None) == (truth is None)
        if value is not None:
            assert value.dtype == torch.float32 and torch.isfinite(value).all(), field
            # exp and softplus of logits up to a few hundred: their rounding is relative to the logit
            assert torch.allclose(value.double(), truth, rtol=1e-4, atol=1e-30), field
            assert field != "log_decay" or (value <= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [0, 1e-4, 1, 1e3])
@pytest.mark.parametrize("name", WRITE_RULES)
def test_gradients_are_right_for_keys_of_any_length(name, length, dtype):
    """KLA's gradient at ‖k‖ → 0 is of order η/ε, and it must be that, not inf or 0."""
    x, q, k, v, position = inputs(dtype)
    k = (length * k.float() / k.float().norm(dim=-1, keepdim=True)).to(dtype)
    gradients = []
    for rule, convert in ((build(name), lambda t: t), (build(name).double(), torch.Tensor.double)):
        leaves = [convert(t).detach().requires_grad_() for t in (x, q, k, v)]
        o, S = recurrence(rule)(*leaves[1:], coefficients(rule, *leaves, position))
        weight_o, weight_S = (torch.randn(t.shape, generator=torch.Generator().manual_seed(3)).to(t.dtype) for t in (o, S))
        gradients.append(torch.autograd.grad((o * weight_o).sum() + (S * weight_S).sum(), [*leaves, *rule.parameters()], allow_unused=True))
    ulp = torch.finfo(dtype).eps
    for actual, exact in zip(*gradients, strict=True):
        assert (actual is None) == (exact is None)
        if actual is not None:
            assert torch.isfinite(actual).all()
            assert (actual.double() - exact).norm() <= 8 * ulp * exact.norm()


@pytest.mark.parametrize("name", WRITE_RULES)
def test_autocast_does_not_touch_the_gates(name):
    rule = build(name)
    arguments = inputs()
    plain = coefficients(rule, *arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = coefficients(rule, *arguments)
    for a, b in zip(plain, cast, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_a_longhorn_gate_that_underflows_keeps_finite_gradients():
    rule = build("longhorn")
    x, _, k, v, position = inputs()
    torch.nn.init.constant_(rule.beta_proj.bias, -200.0)  # σ(−200) is 0 in float32
    k.requires_grad_()
    coef = rule(x, k, v, position)
    (at_least_float32(coef.key_scale).sum() + coef.value_scale.sum()).backward()
    assert torch.isfinite(k.grad).all() and all(torch.isfinite(p.grad).all() for p in rule.beta_proj.parameters())


@pytest.mark.parametrize("name", WRITE_RULES)
def test_no_tokens(name):
    rule = build(name)
    x, q, k, v, position = (t[:, :0] for t in inputs())
    coef = coefficients(rule, x, q, k, v, position)
    o, S = recurrence(rule)(q, k, v, coef)
    assert o.shape == (B, 0, Hv, V) and S.abs().max() == 0


@pytest.mark.parametrize("eps", [1e-6, 1e-3])
def test_what_epsilon_costs_at_a_zero_key(eps):
    """docs/rules.md: the write's gradient in k at k = 0 is (η/ε) v, and Gated DeltaNet's (β/√ε) v; exactly so in float32."""
    x, q, _, v, position = inputs()
    x, q, v, position = x[:, :1], q[:, :1], v[:, :1], position[:, :1]
    for name, step in (("kla", 1 / eps), ("gated_deltanet", eps**-0.5)):
        rule = build(name, eps=eps)
        k = torch.zeros(B, 1, Hk, K, requires_grad=True)
        coef = coefficients(rule, x, q, k, v, position)
        _, S = reference_delta(q, k, v, coef)
        (gradient,) = torch.autograd.grad(S[:, 0, 0, 0].sum(), k)
        expected = step * coef.beta[:, 0, 0] * v[:, 0, 0, 0]
        assert torch.allclose(gradient[:, 0, 0, 0], expected, rtol=1e-5)
