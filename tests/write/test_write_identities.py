"""Each rule is what its equation says: its coefficients in the reference recurrence, against the equation written out, in float64."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from torch.nn import functional as F

from fastweights.notation import Coefficients
from fastweights.ops.reference import reference_decay, reference_delta
from fastweights.write import WRITE_RULES, kaczmarz

B, T, D, Hk, Hv, K, V = 2, 12, 10, 2, 4, 6, 5
EPS = 1e-6


def close(actual, expected, digits=1e-12):
    assert torch.isfinite(actual).all()
    assert (actual - expected).abs().max() <= digits * expected.abs().max()


def rule_and_inputs(name, *, heads=(Hk, Hv), **options):
    rule = WRITE_RULES[name](hidden_size=D, num_heads=heads[0], num_value_heads=heads[1], head_k_dim=K, head_v_dim=V, **options).double()
    generator = torch.Generator().manual_seed(1)
    x, q, k, v = (
        torch.randn(B, T, *shape, generator=generator, dtype=torch.float64) for shape in ((D,), (heads[0], K), (heads[0], K), (heads[1], V))
    )
    return rule, x, q, k, v


def run(rule, x, q, k, v):
    position = torch.arange(T).expand(B, T)
    coef = rule(x, k, v, position)._replace(query_scale=rule.query_scale(q))
    return {"decay": reference_decay, "delta": reference_delta}[rule.family](q, k, v, coef)


def per_value_head(x):
    return x.repeat_interleave(Hv // Hk, dim=2)


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + EPS).sqrt()


def mamba_gate(decay, x):
    dt = F.softplus(x @ decay.proj.weight.T + decay.dt_bias)
    return torch.exp(-torch.exp(decay.A_log) * dt), dt


def loop(step, q):
    """o_t = S_tᵀq_t with S_t = step(t, S_{t-1}), one [B, Hv, K, V] matrix a step."""
    S, outputs = torch.zeros(B, Hv, K, V, dtype=torch.float64), []
    for t in range(T):
        S = step(t, S)
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, per_value_head(q)[:, t]))
    return torch.stack(outputs, dim=1), S


def outer(k, v):
    return k.unsqueeze(-1) * v.unsqueeze(-2)


def test_linear_is_masked_attention_without_softmax():
    rule, x, q, k, v = rule_and_inputs("linear")
    o, _ = run(rule, x, q, k, v)
    scores = torch.einsum("bthk,bshk->bhts", per_value_head(q), per_value_head(k)).tril()
    close(o, torch.einsum("bhts,bshv->bthv", scores, v))


def test_retention_weighs_the_past_by_fixed_powers():
    rule, x, q, k, v = rule_and_inputs("retention")
    o, _ = run(rule, x, q, k, v)
    gamma = torch.tensor([31 / 32, 63 / 64, 127 / 128, 255 / 256], dtype=torch.float64)
    age = torch.arange(T)[:, None] - torch.arange(T)
    weights = (gamma[:, None, None] ** age.clamp(min=0)).tril()
    scores = weights * torch.einsum("bthk,bshk->bhts", per_value_head(q), per_value_head(k))
    close(o, torch.einsum("bhts,bshv->bthv", scores, v))


def test_mamba2_is_the_discretised_state_space_model():
    """h_t = exp(−AΔ_t) h_{t-1} + Δ_t B_t x_t and y_t = C_tᵀ h_t for every channel of every head, with A and Δ from the parameters."""
    rule, x, q, k, v = rule_and_inputs("mamba2")
    o, _ = run(rule, x, q, k, v)
    A = rule.decay.A_log.exp()
    dt = torch.log1p(torch.exp(torch.einsum("btd,hd->bth", x, rule.decay.proj.weight) + rule.decay.dt_bias))
    for b in range(B):
        for head in range(Hv):
            for channel in range(V):
                h = torch.zeros(K, dtype=torch.float64)
                for t in range(T):
                    h = torch.exp(-A[head] * dt[b, t, head]) * h + dt[b, t, head] * k[b, t, head // 2] * v[b, t, head, channel]
                    close(o[b, t, head, channel], q[b, t, head // 2] @ h, 1e-11)


def test_gla_is_its_equation():
    rule, x, q, k, v = rule_and_inputs("gla")
    o, S = run(rule, x, q, k, v)
    gate = x @ rule.decay_down.weight.T @ rule.decay_up.weight.T + rule.decay_up.bias
    a = per_value_head(torch.sigmoid(gate).pow(1 / 16).unflatten(-1, (Hk, K)))
    expected, S_expected = loop(lambda t, S: a[:, t].unsqueeze(-1) * S + outer(per_value_head(k)[:, t], v[:, t]), q)
    close(o, expected)
    close(S, S_expected)


def test_gla_with_equal_channels_is_scalar_decay():
    rule, x, q, k, v = rule_and_inputs("gla", heads=(2, 2))
    with torch.no_grad():
        for parameter in (rule.decay_up.weight, rule.decay_up.bias):
            heads = parameter.unflatten(0, (2, K))
            heads.copy_(heads[:, :1].expand_as(heads).clone())
    per_channel = rule(x, k, v, torch.zeros(B, T, dtype=torch.int64))
    scalar = per_channel._replace(log_decay=per_channel.log_decay[..., 0])
    for actual, expected in zip(reference_decay(q, k, v, per_channel), reference_decay(q, k, v, scalar), strict=True):
        close(actual, expected)


def test_deltanet_is_its_equation():
    rule, x, q, k, v = rule_and_inputs("deltanet", eta_max=1.5)
    o, S = run(rule, x, q, k, v)
    beta = 1.5 * torch.sigmoid(x @ rule.beta_proj.weight.T)
    k_hat = per_value_head(unit(k))
    eye = torch.eye(K, dtype=torch.float64)

    def step(t, S):
        b = beta[:, t, :, None, None]
        return (eye - b * outer(k_hat[:, t], k_hat[:, t])) @ S + b * outer(k_hat[:, t], v[:, t])

    expected, S_expected = loop(step, unit(q))
    close(o, expected)
    close(S, S_expected)


def test_gated_deltanet_is_its_equation():
    rule, x, q, k, v = rule_and_inputs("gated_deltanet")
    o, S = run(rule, x, q, k, v)
    beta = torch.sigmoid(x @ rule.beta_proj.weight.T)
    a, _ = mamba_gate(rule.decay, x)
    k_hat = per_value_head(unit(k))
    eye = torch.eye(K, dtype=torch.float64)

    def step(t, S):
        b = beta[:, t, :, None, None]
        return a[:, t, :, None, None] * (eye - b * outer(k_hat[:, t], k_hat[:, t])) @ S + b * outer(k_hat[:, t], v[:, t])

    expected, S_expected = loop(step, unit(q))
    close(o, expected)
    close(S, S_expected)


def test_longhorn_solves_its_implicit_step():
    """S_t = argmin ‖S − S̃‖² + β‖v − Sᵀk‖² satisfies (I + β k kᵀ) S_t = S̃ + β k vᵀ: solved as a linear system at every token."""
    rule, x, q, k, v = rule_and_inputs("longhorn")
    o, S = run(rule, x, q, k, v)
    beta = torch.sigmoid(x @ rule.beta_proj.weight.T + rule.beta_proj.bias)
    a, _ = mamba_gate(rule.decay, x)
    keys = per_value_head(k)
    eye = torch.eye(K, dtype=torch.float64)

    def step(t, S):
        b = beta[:, t, :, None, None]
        return torch.linalg.solve(eye + b * outer(keys[:, t], keys[:, t]), a[:, t, :, None, None] * S + b * outer(keys[:, t], v[:, t]))

    expected, S_expected = loop(step, q)
    close(o, expected)
    close(S, S_expected)


def literal_kla(rule, x, q, k, v):
    """β = η/(‖k‖²+ε), keys and values as they come."""
    eta = torch.sigmoid(x @ rule.eta_proj.weight.T + rule.eta_proj.bias)
    beta = eta / (per_value_head(k).square().sum(-1) + EPS)
    a, _ = mamba_gate(rule.decay, x)
    keys = per_value_head(k)

    def step(t, S):
        S = a[:, t, :, None, None] * S
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", S, keys[:, t])
        return S + beta[:, t, :, None, None] * outer(keys[:, t], error)

    return loop(step, unit(q))


def test_kla_is_the_literal_formula_with_all_its_gradients():
    rule, *inputs = rule_and_inputs("kla")
    inputs = [t.requires_grad_() for t in inputs]
    leaves = [*inputs, *rule.parameters()]
    weight_o, weight_S = torch.randn(B, T, Hv, V, dtype=torch.float64), torch.randn(B, Hv, K, V, dtype=torch.float64)
    results = []
    for form in (run, literal_kla):
        o, S = form(rule, *inputs)
        results.append([o, S, *torch.autograd.grad((o * weight_o).sum() + (S * weight_S).sum(), leaves)])
    for actual, expected in zip(*results, strict=True):
        close(actual, expected, 1e-11)


@pytest.mark.parametrize(
    "factor, f", [("1/t", lambda t: 1 / t), ("1/sqrt(t)", lambda t: t**-0.5), ("1/log(1+t)", lambda t: 1 / math.log(1 + t))]
)
def test_kla_sequence_factors_count_from_one(factor, f):
    rule, x, _, k, v = rule_and_inputs("kla", sequence_factor=factor)
    position = torch.tensor([[*range(7), *range(5)], [*range(100, 112)]])
    beta = rule(x, k, v, position).beta
    expected = torch.tensor([[f(p + 1) for p in row] for row in position.tolist()], dtype=torch.float64)
    close(beta, torch.sigmoid(rule.eta_proj(x)) * expected.unsqueeze(-1))


def test_kla_variants_are_their_formulas():
    rule, x, q, k, v = rule_and_inputs("kla", relaxation=False)
    assert torch.equal(rule(x, k, v, None).beta, torch.ones(B, T, Hv, dtype=torch.float64))
    rule, x, q, k, v = rule_and_inputs("kla", key_norm="none", q_norm="none")
    coef = rule(x, k, v, None)
    assert coef.key_scale is None and coef.value_scale is None and rule.query_scale(q) is None
    rule, x, q, k, v = rule_and_inputs("kla", key_norm="learned")
    close(rule(x, k, v, None).key_scale, (k.square().sum(-1) + EPS).rsqrt(), 1e-7)  # softplus(c) = 1 at first, c in float32
    torch.nn.init.constant_(rule.norm_weight, 0.7)
    close(rule(x, k, v, None).key_scale, (math.log1p(math.exp(0.7)) * k.square().sum(-1) + EPS).rsqrt())
    rule, x, q, k, v = rule_and_inputs("kla", single_gate=True)
    coef = rule(x, k, v, None)
    close(coef.log_decay.exp(), 1 - coef.beta)
    rule, x, q, k, v = rule_and_inputs("kla", eta_max=2.0)
    close(rule(x, k, v, None).beta, 2 * torch.sigmoid(rule.eta_proj(x)))


def test_kaczmarz_is_the_canonical_form_of_the_literal_step():
    _, _, q, k, v = rule_and_inputs("kla")
    eta = torch.rand(B, T, Hv, dtype=torch.float64)
    beta = eta / (per_value_head(k).square().sum(-1) + EPS)
    k_hat, v_hat, strength = kaczmarz(k, v, eta)
    literal = reference_delta(q, k, v, Coefficients(beta=beta))
    for actual, expected in zip(reference_delta(q, k_hat, v_hat, Coefficients(beta=strength)), literal, strict=True):
        close(actual, expected)
    with pytest.raises(ValueError, match="v has 4 heads and k has 3"):
        kaczmarz(torch.zeros(1, 1, 3, K), torch.zeros(1, 1, 4, V), torch.zeros(1, 1, 4))


class TestKaczmarzTheorems:
    """At η = 1, ε = 0 the write is the minimum-norm change that stores (k, v), the exact line search, and the normalised-gradient step."""

    @pytest.fixture
    def problem(self):
        generator = torch.Generator().manual_seed(2)
        S, k, v = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((K, V), (K,), (V,)))
        return S, k, v

    def write(self, S, k, v, eps=0.0):
        k_hat, v_hat, eta = kaczmarz(k[None, None, None], v[None, None, None], torch.ones(1, 1, 1, dtype=torch.float64), eps)
        _, S = reference_delta(k_hat, k_hat, v_hat, Coefficients(beta=eta), state=S[None, None])
        return S[0, 0]

    def test_stores_the_pair_with_the_smallest_change(self, problem):
        S, k, v = problem
        change = self.write(S, k, v) - S
        smallest, *_ = scipy.linalg.lstsq(k[None].numpy(), (v - k @ S)[None].numpy())  # lstsq of an underdetermined system: least norm
        assert np.abs(change.numpy() - smallest).max() <= 1e-13
        close(k @ self.write(S, k, v), v)

    def test_is_the_exact_line_search(self, problem):
        S, k, v = problem
        S.requires_grad_()
        loss = 0.5 * (v - k @ S).square().sum()
        (gradient,) = torch.autograd.grad(loss, S)

        def along(alpha):
            return 0.5 * (v - k @ (S - alpha * gradient)).square().sum()

        # The loss along the gradient is a parabola; its minimum, from three of its points.
        below, here, above = along(-1.0), along(0.0), along(1.0)
        best = (below - above) / (2 * (below - 2 * here + above))
        close(self.write(S, k, v), S - best * gradient)

    def test_is_the_normalised_gradient_step(self, problem):
        S, k, v = problem
        S.requires_grad_()
        loss = 0.5 * (v - k @ S).square().sum()
        (gradient,) = torch.autograd.grad(loss, S)
        close(self.write(S, k, v), S - 2 * loss / gradient.square().sum() * gradient)

    @pytest.mark.parametrize("eps", [1e-6, 1e-2, 1.0])
    def test_recall_is_exact_up_to_epsilon(self, problem, eps):
        """What is left of the error is ε/(‖k‖²+ε) of it."""
        S, k, v = problem
        left = v - k @ self.write(S, k, v, eps)
        assert (left - eps / (k @ k + eps) * (v - k @ S)).abs().max() <= 1e-13


@pytest.mark.parametrize("length", [1e-4, 1e-2, 1.0, 1e3])
def test_a_write_of_kla_leaves_a_share_of_its_residual_however_long_the_key(length):
    """v̂ − S'ᵀk̂ = (1 − η‖k̂‖²)(v̂ − S̃ᵀk̂) with 0 ≤ 1 − η‖k̂‖² ≤ 1: it never over-corrects."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(B, 1, Hk, size, generator=generator, dtype=torch.float64) for size in (K, V))
    eta = torch.rand(B, 1, Hk, generator=generator, dtype=torch.float64)
    k, v, beta = kaczmarz(k * length, v, eta, eps=EPS)
    state = torch.randn(B, Hk, K, V, generator=generator, dtype=torch.float64)
    _, after = reference_delta(k, k, v, Coefficients(beta=beta), state=state)
    before, left = (v[:, 0] - torch.einsum("bhkv,bhk->bhv", memory, k[:, 0]) for memory in (state, after))
    share = 1 - beta[:, 0] * k[:, 0].square().sum(-1)
    assert (share >= 0).all() and (share <= 1).all()
    close(left, share.unsqueeze(-1) * before)
