"""The parity grid of the recurrences as data, inputs drawn as a model draws them, and the one rule of tolerance.

    @pytest.mark.parametrize("case", sample(DELTA))
    def test_chunk_delta(case):
        check(chunk_delta, reference_delta, make(case))

`sample` covers every pair of factor values (the full product has millions of cases); a fixed part of it is quick, the rest is marked
``full``. `check` runs both, forward and backward, and compares outputs and all gradients. `compare` holds the rule: no absolute tolerance,
but the error that plain torch makes in the same dtype.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from allpairspy import AllPairs
from torch import Tensor

from fastweights.notation import Coefficients

Form = Callable[..., tuple[Tensor, Tensor]]

LARGEST = 14_000_000
"""Bound on T·rows·Hv·K·V of one case: the reference keeps that many floats, several times over, for its backward."""

FEW = 16
"""A chunkwise form passes twice through sums of C = 64 rounded products, each worth about √64 units in the last place."""

DELTA: dict[str, Sequence[Any]] = {
    "T": (65, 0, 1, 2, 15, 16, 17, 63, 64, 100, 127, 200),
    "K": (64, 16, 32, 96, 100, 128, 192, 256),
    "V": (64, 16, 32, 96, 100, 128, 192, 256, 320),
    "dtype": (torch.float32, torch.float64, torch.bfloat16, torch.float16),
    "heads": ((2, 2), (1, 1), (1, 3), (2, 4)),  # Hk, Hv
    "rows": ("one", "two", "packed"),
    "decay": ("model", None, "zero", "extreme", "mixed"),
    "beta": ("model", None, "over-relaxed"),
    "scales": (("Hk", "Hk", None), (None, None, None), ("Hv", "Hv", "Hv"), ("Hk", None, "Hk"), (None, "Hk", "Hk")),  # key, value, query
    "state": (True, False),
    "layout": ("contiguous", "strided"),
    "upstream": ("dense", "stride 0", "o only", "state only"),
}
DECAY: dict[str, Sequence[Any]] = {
    **DELTA,
    "decay": ("model", None, "zero", "extreme", "mixed", "channel", "channel zero", "channel extreme", "channel mixed"),
    "beta": (None,),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point of the grid; the field names are the factors."""

    T: int = 65
    K: int = 64
    V: int = 64
    dtype: torch.dtype = torch.float32
    heads: tuple[int, int] = (2, 2)
    rows: str = "one"
    decay: str | None = "model"
    beta: str | None = "model"
    scales: tuple[str | None, str | None, str | None] = ("Hk", "Hk", None)
    state: bool = True
    layout: str = "contiguous"
    upstream: str = "dense"

    def __str__(self) -> str:
        words = {
            **dataclasses.asdict(self),
            "dtype": str(self.dtype).removeprefix("torch."),
            "heads": f"heads{self.heads[0]}/{self.heads[1]}",
            "decay": f"decay {self.decay}",
            "beta": f"beta {self.beta}",
            "scales": "scales " + "/".join(str(s) for s in self.scales),
            "state": "state" if self.state else "no state",
        }
        return "-".join(f"{name}{value}" if name in "TKV" else str(value) for name, value in words.items()).replace(" ", "_")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The operands of one call, and what flows back into its two outputs (None where nothing does)."""

    q: Tensor
    k: Tensor
    v: Tensor
    coef: Coefficients
    scale: float
    state: Tensor | None
    cu_seqlens: Tensor | None
    grad_o: Tensor | None
    grad_state: Tensor | None

    def to(self, dtype: torch.dtype) -> Problem:
        """The same numbers in float64, or rounded to float32."""

        def cast(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(dtype)

        names = ("q", "k", "v", "state", "grad_o", "grad_state")
        changed: dict[str, Any] = {name: cast(getattr(self, name)) for name in names}
        return dataclasses.replace(self, coef=Coefficients(*map(cast, self.coef)), **changed)


def sample(factors: dict[str, Sequence[Any]], quick: int = 3, keep: Callable[[Case], bool] = lambda case: True) -> list[Any]:
    """Parameters for pytest that hold every pair of factor values; every ``quick``-th case runs in `make test`, the others are ``full``."""

    def fits(values: Sequence[Any]) -> bool:
        point = dict(zip(factors, values, strict=False))
        if len(point) < len(factors):
            point = {name: point.get(name, choices[0]) for name, choices in factors.items()} | {"heads": point.get("heads", (1, 1))}
        case = Case(**point)
        return size(case) <= LARGEST and keep(case)

    cases = [Case(**dict(zip(factors, values, strict=True))) for values in AllPairs(list(factors.values()), filter_func=fits)]
    return [pytest.param(case, id=str(case), marks=[pytest.mark.full] if i % quick else []) for i, case in enumerate(cases)]


def size(case: Case) -> int:
    return case.T * (2 if case.rows == "two" else 1) * case.heads[1] * case.K * case.V


def lengths(T: int) -> list[int]:
    """Documents that pack T tokens: empty ones at both ends and between, one of a single token, two longer ones of unequal length."""
    one = min(T, 1)
    long = (T - one) * 2 // 3
    return [0, one, 0, long, T - one - long, 0]


def bounds(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def make(case: Case, seed: int = 0) -> Problem:
    """Keys, queries and values as a model draws them (after a SiLU), gates as layers are initialised, in the dtype of the case."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    B, T = (2 if case.rows == "two" else 1), case.T
    Hk, Hv = case.heads
    heads = {"Hk": Hk, "Hv": Hv}
    exact = torch.float64 if case.dtype == torch.float64 else torch.float32
    q, k, v = F.silu(randn(B, T, Hk, case.K)), F.silu(randn(B, T, Hk, case.K)), F.silu(randn(B, T, Hv, case.V))

    def inverse_norm(x: Tensor, kind: str | None) -> Tensor | None:
        """1/‖x‖ for each of the kind's heads, a little smaller from head to head of a group, so that mixing up heads is seen."""
        if kind is None:
            return None
        group = heads[kind] // Hk
        return (x.norm(dim=-1) + 1e-3).reciprocal().repeat_interleave(group, dim=2) * torch.linspace(1, 0.9, heads[kind], dtype=x.dtype)

    key_scale, query_scale = inverse_norm(k, case.scales[0]), inverse_norm(q, case.scales[2])
    if key_scale is None:
        k = F.normalize(k, dim=-1)
    if query_scale is None:
        q = F.normalize(q, dim=-1)
    value_scale = None if case.scales[1] is None else F.softplus(randn(B, T, heads[case.scales[1]]))
    beta = None if case.beta is None else torch.sigmoid(randn(B, T, Hv)) * (1.9 if case.beta == "over-relaxed" else 1.0)
    rows = len(lengths(T)) if case.rows == "packed" else B
    strided = case.layout == "strided"

    def narrow(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        x = x.to(exact)
        return x.transpose(1, 2).contiguous().transpose(1, 2) if strided else x

    def slice_of_projection(x: Tensor) -> Tensor:
        x = x.to(case.dtype)
        if not strided:
            return x
        wide = x.new_zeros(*x.shape[:2], x.shape[2] * x.shape[3] + 5)
        view = wide[..., 3:-2].unflatten(-1, x.shape[2:])
        view.copy_(x)
        return view

    return Problem(
        q=slice_of_projection(q),
        k=slice_of_projection(k),
        v=slice_of_projection(v),
        coef=Coefficients(*map(narrow, (beta, _log_decay(case, B, Hk, Hv, randn, generator), key_scale, value_scale, query_scale))),
        scale=case.K**-0.5,
        state=randn(rows, Hv, case.K, case.V).to(exact) if case.state else None,
        cu_seqlens=bounds(lengths(T)) if case.rows == "packed" else None,
        grad_o=_upstream(case, "o only", randn(B, T, Hv, case.V).to(case.dtype)),
        grad_state=_upstream(case, "state only", randn(rows, Hv, case.K, case.V).to(exact)),
    )


def _log_decay(case: Case, B: int, Hk: int, Hv: int, randn: Callable[..., Tensor], generator: torch.Generator) -> Tensor | None:
    if case.decay is None:
        return None
    channel, kind = case.decay.startswith("channel"), case.decay.removeprefix("channel").strip()
    shape = (B, case.T, Hk, case.K) if channel else (B, case.T, Hv)
    if kind == "zero":
        return torch.zeros(shape, dtype=torch.float64)
    if kind == "extreme":
        return torch.full(shape, -50.0, dtype=torch.float64)
    if channel:
        log_decay = F.logsigmoid(randn(*shape)) / 16  # as in GLA
    else:  # as in Mamba-2: A uniform in (0, 16), dt log-uniform in [1e-3, 1e-1]
        A = torch.rand(Hv, generator=generator, dtype=torch.float64) * 16
        dt = torch.exp(torch.rand(Hv, generator=generator, dtype=torch.float64) * math.log(100) + math.log(1e-3))
        log_decay = -A * F.softplus(randn(*shape) + dt.expm1().log())
    if kind == "mixed":  # a model's decays, with tokens that forget nothing and tokens that forget all
        draw = torch.rand(shape, generator=generator)
        log_decay = log_decay.masked_fill(draw < 0.3, 0.0).masked_fill(draw > 0.9, -50.0)
    return log_decay


def _upstream(case: Case, only: str, grad: Tensor) -> Tensor | None:
    if case.upstream == "stride 0":
        return grad.new_full((), 0.5).expand(grad.shape)
    return grad if case.upstream in ("dense", only) else None


def run(form: Form, problem: Problem) -> dict[str, Tensor]:
    """Outputs and all gradients of one call, by name; a gradient that does not exist (nothing flows back) is zeros."""
    leaves: dict[str, Tensor] = {
        name: x.detach().requires_grad_()
        for name, x in {"q": problem.q, "k": problem.k, "v": problem.v, **problem.coef._asdict(), "state": problem.state}.items()
        if x is not None
    }
    coef = Coefficients(*(leaves.get(name) for name in Coefficients._fields))
    o, state = form(
        leaves["q"], leaves["k"], leaves["v"], coef, scale=problem.scale, state=leaves.get("state"), cu_seqlens=problem.cu_seqlens
    )
    pairs = [(o, problem.grad_o), (state, problem.grad_state)]
    flows = [(out, grad.to(out.dtype)) for out, grad in pairs if grad is not None and out.requires_grad]
    torch.autograd.backward([out for out, _ in flows], [grad for _, grad in flows])
    grads = {f"grad {name}": torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}
    return {"o": o.detach(), "final state": state.detach(), **grads}


def check(form: Form, baseline: Form, problem: Problem, *, few: float = FEW, precision: torch.dtype | None = None) -> None:
    """``form`` is as good as ``baseline``, plain torch run in the problem's dtype; the truth is the baseline in float64.

    A form tested in float64 has no finer truth: it may err as the baseline does in float32, shrunk by the ratio of their precisions.
    """
    same = problem.to(torch.float32) if problem.q.dtype == torch.float64 else problem
    compare(run(form, problem), run(baseline, same), run(baseline, problem.to(torch.float64)), few=few, precision=precision)


def compare(
    got: dict[str, Tensor],
    baseline: dict[str, Tensor],
    truth: dict[str, Tensor],
    *,
    few: float = FEW,
    precision: torch.dtype | None = None,
) -> None:
    """The rule: the largest error of a tensor is at most twice the baseline's plus ``few`` units in the last place of its largest number.

    The units are those of ``precision``, in which the form multiplies: float32 unless said otherwise (float64 for float64), also where the
    result is rounded to a half. Infinity is right where the truth overflows the dtype.
    """
    assert got.keys() == baseline.keys() == truth.keys()
    for name, x in got.items():
        exact, plain = truth[name], baseline[name]
        assert x.shape == exact.shape, f"{name}: shape {tuple(x.shape)}, not {tuple(exact.shape)}"
        if not x.numel():
            continue
        double = x.dtype == torch.float64
        eps = torch.finfo(precision or (x.dtype if double else torch.float32)).eps
        allowed = 2 * largest_error(plain if double else plain.to(x.dtype), exact)
        if double:
            allowed *= eps / torch.finfo(plain.dtype).eps
        error, allowed = largest_error(x, exact), allowed + few * eps * exact.abs().max().item()
        assert error <= allowed, f"{name}: error {error:.3g} > {allowed:.3g} allowed (largest value {exact.abs().max().item():.3g})"


def largest_error(x: Tensor, truth: Tensor) -> float:
    """Infinity for a NaN; an infinity is no error where the truth overflows x's dtype."""
    error = (x.double() - truth).abs().masked_fill(x.isinf() & (x == truth.to(x.dtype)), 0.0)
    return error.nan_to_num(nan=math.inf, posinf=math.inf).max().item()
