"""Operands of the delta step with CCQ's read, and its plain composition, which is the truth in float64: for tests/ops and tests/gpu."""

from dataclasses import dataclass, replace

import torch

from fastweights.notation import CCQState, Coefficients
from fastweights.ops.delta.recurrent import recurrent_delta
from tests.ops.ccq_loop import loop
from tests.ops.grid import Case, Problem, make


@dataclass(frozen=True, kw_only=True)
class Step:
    problem: Problem
    lam: torch.Tensor
    moments: CCQState
    options: dict

    def to(self, device: str) -> "Step":
        def move(x):
            return None if x is None else x.to(device)

        p = self.problem
        p = replace(p, q=move(p.q), k=move(p.k), v=move(p.v), state=move(p.state), coef=Coefficients(*map(move, p.coef)))
        return replace(self, problem=p, lam=move(self.lam), moments=CCQState(*map(move, self.moments)))


def draw(case: Case, *, forget: bool = False, unit_keys: bool = False, fresh: bool = False) -> Step:
    """``fresh``: CCQ has seen no key yet."""
    x = make(case)
    B, T, Hk, K = x.k.shape
    generator = torch.Generator().manual_seed(1)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    root = randn(B, Hk, K, K) * K**-0.5
    moments = CCQState(root @ root.mT, randn(B, Hk, K), torch.rand(B, Hk, generator=generator) * 5 + 1)
    moments = CCQState(*(x * (not fresh) for x in moments))
    lam = torch.rand(B, T, Hk, generator=generator) * 2
    return Step(problem=x, lam=lam, moments=moments, options={"forget": forget, "unit_keys": unit_keys})


def run(form, x: Step, **options) -> dict[str, torch.Tensor]:
    """Output and states after an in-place step, by name; x keeps its own."""
    p, memory, moments = x.problem, x.problem.state.clone(), CCQState(*(m.clone() for m in x.moments))
    o = form(p.q, p.k, p.v, p.coef, x.lam, memory, moments, scale=p.scale, **x.options, **options)
    return {"o": o, "memory": memory, **moments._asdict()}


def composition(x: Step, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The two equations one after the other, all in ``dtype``."""

    def cast(t):
        return None if t is None else t.to(dtype)

    p, coef = x.problem, Coefficients(*map(cast, x.problem.coef))
    q, k, v = cast(p.q), cast(p.k), cast(p.v)
    unit = x.options["unit_keys"]
    key = k if unit or coef.key_scale is None else k * coef.key_scale.unsqueeze(-1)
    log_decay = coef.log_decay if x.options["forget"] else None
    clean, moments = loop(q, key, cast(x.lam), log_decay=log_decay, unit_keys=unit, state=CCQState(*map(cast, x.moments)))
    o, memory = recurrent_delta(clean, k, v, coef, scale=p.scale, state=cast(p.state))
    return {"o": o, "memory": memory, **moments._asdict()}
