"""The Curvature-Conditioned Query: take out of the query the directions in which keys crowd.

    Σ_t = Cov_{j≤t}[k_j],   λ_t = σ(w_λ·q_t + b_λ) a key head,   q'_t = q_t − λ_t Σ_t q_t

Σ is the covariance of keys as written, the Hessian of log Σ_j exp(k_jᵀq) at q = 0. With ‖k‖ ≤ 1, 0 ≼ Σ ≼ I: I − λΣ contracts for λ ≤ 1.

Source: Le et al., Don't Read Everything: A Curvature-Conditioned Query for Linear Attention (arXiv 2606.01294). Ours: Σ is kept centred, so
that no digits are lost when keys crowd; ``forget="memory"`` (Σ forgets as S does; the paper's keeps every key); ``strength="learned"``
(λ may pass 1); unit keys for the rules whose written keys are not bounded.

λ sees q after its norm. q' is linear in q, so the norm itself (``coef.query_scale``) stays where the raw read has it, fused in the kernel:
at λ = 0 the layer is then bit for bit the raw one.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor, nn

from fastweights import ops
from fastweights.notation import CCQState, Coefficients, CuSeqlens, Key, PerHead, Query
from fastweights.ops.heads import as_written
from fastweights.options import check_between, check_choice
from fastweights.read.base import ReadRule, Write


class CCQ(ReadRule):
    name = "ccq"

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Options:
        forget: str = "none"
        """``none``: every key of the document counts alike (the paper). ``memory``: Σ forgets with the memory's decay, one a head."""
        lambda_init: float = 0.5
        """σ(b_λ) at the start, when w_λ = 0; strictly between 0 and 1."""
        strength: str = "paper"
        """``paper``: λ = σ(…) < 1. ``learned``: λ = √K·exp(s)·σ(…), one s a key head, 0 at first; may leave the contraction."""
        unit_keys: bool | None = None
        """Σ of k/√(‖k‖²+ε) instead of the key as written. None: only where the write rule does not bound its keys. Where the rule writes
        k/√(‖k‖²+ε) already, it is the same."""
        eps: float = 1e-6
        """ε of unit keys, added to the sum of squares."""

        def __post_init__(self) -> None:
            check_choice("ccq_forget", self.forget, ("none", "memory"))
            check_between("ccq_lambda_init", self.lambda_init, 0.0, 1.0, open_ends=True)
            check_choice("ccq_strength", self.strength, ("paper", "learned"))
            check_choice("ccq_unit_keys", self.unit_keys, (True, False, None))
            check_between("ccq_eps", self.eps, 0.0, float("inf"), open_ends=True)

    watched: bool = False
    """Set it, and every forward leaves the largest λ·tr Σ over its tokens and heads in `lambda_times_trace`. Costs nothing while False."""
    lambda_times_trace: Tensor | None = None
    """A bound on λ‖Σ‖: I − λΣ contracts while it is ≤ 2. With ``strength="learned"`` λ may grow past that."""

    def __init__(self, write: Write, **options) -> None:
        super().__init__(write, **options)
        self.num_heads, self.head_k_dim = write.num_heads, write.head_k_dim
        self.unit_keys = not write.keys_bounded if self.options.unit_keys is None else self.options.unit_keys
        if self.options.forget == "memory" and not write.head_decay:
            raise ValueError(f"ccq_forget='memory' needs a decay per head, and write rule {write.name!r} has none; use ccq_forget='none'")
        if self.options.forget == "memory" and write.num_value_heads != write.num_heads:
            raise ValueError(
                f"ccq_forget='memory' needs one decay a key head, and there are {write.num_value_heads} value heads on {write.num_heads} "
                "key heads; use as many, or ccq_forget='none'"
            )
        if write.key_scale_per_value_head and not self.unit_keys:
            raise ValueError(
                f"write rule {write.name!r} with {write.num_value_heads} value heads on {write.num_heads} key heads writes a key at "
                "several lengths, so Σ of keys as written is not defined; use ccq_unit_keys=True"
            )
        self.lambda_weight = nn.Parameter(torch.empty(self.num_heads, self.head_k_dim, dtype=torch.float32))
        self.lambda_bias = nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32))
        learned = self.options.strength == "learned"
        self.log_strength = nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32)) if learned else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.lambda_weight)
        nn.init.constant_(self.lambda_bias, math.log(self.options.lambda_init / (1 - self.options.lambda_init)))
        if self.log_strength is not None:
            nn.init.zeros_(self.log_strength)

    def initial_state(self, rows, device=None, dtype=torch.float32) -> CCQState:
        H, K = self.num_heads, self.head_k_dim
        return CCQState(*(torch.zeros(rows, H, *shape, device=device, dtype=dtype) for shape in ((K, K), (K,), ())))

    def strength(self, q: Query, query_scale: PerHead | None) -> PerHead:
        """λ ``[B, T, Hk]``, float32."""
        logit = ops.head_dots(q, self.lambda_weight)
        if query_scale is not None:
            logit = logit * query_scale
        lam = (logit + self.lambda_bias.to(logit.dtype)).sigmoid()
        return lam if self.log_strength is None else math.sqrt(self.head_k_dim) * self.log_strength.to(logit.dtype).exp() * lam

    def operands(self, q: Query, coef: Coefficients) -> tuple[PerHead, PerHead | None, PerHead | None]:
        """λ, the scale of the keys that Σ is of (before ``unit_keys``), and by what log_decay Σ forgets (None: not at all)."""
        key_scale = None if self.unit_keys else coef.key_scale  # a unit key has no length, so key_scale would drop out
        return self.strength(q, coef.query_scale), key_scale, coef.log_decay if self.options.forget == "memory" else None

    def forward(self, q, k, coef: Coefficients, *, operands=None, state=None, cu_seqlens=None, backend="auto") -> tuple[Tensor, CCQState]:
        lam, key_scale, log_decay = self.operands(q, coef) if operands is None else operands
        if self.watched and lam.numel():
            with torch.no_grad():
                self.lambda_times_trace = (lam * self.trace(k, coef, state, cu_seqlens)).amax()
        return ops.ccq_query(
            q,
            k,
            lam,
            key_scale=key_scale,
            log_decay=log_decay,
            unit_keys=self.unit_keys,
            eps=self.options.eps,
            state=state,
            cu_seqlens=cu_seqlens,
            backend=backend,
        )

    def step_(self, q, k, coef: Coefficients, state, *, backend="auto") -> Tensor:
        lam, key_scale, log_decay = self.operands(q, coef)
        return ops.ccq_step_(
            q, k, lam, state, key_scale=key_scale, log_decay=log_decay, unit_keys=self.unit_keys, eps=self.options.eps, backend=backend
        )

    def write_and_read_(self, q, k, v, coef: Coefficients, memory, state, *, family, scale, backend="auto") -> Tensor:
        if family != "delta":
            return super().write_and_read_(q, k, v, coef, memory, state, family=family, scale=scale, backend=backend)
        return ops.delta_ccq_step_(
            q,
            k,
            v,
            coef,
            self.strength(q, coef.query_scale),
            memory,
            state,
            forget=self.options.forget == "memory",
            unit_keys=self.unit_keys,
            eps=self.options.eps,
            scale=scale,
            backend=backend,
        )

    def trace(self, k: Key, coef: Coefficients, state: CCQState | None = None, cu_seqlens: CuSeqlens | None = None) -> PerHead:
        """tr Σ_t = mean of ‖k‖² − ‖mean of k‖² of the keys that Σ is of, ``[B, T, Hk]``, after ``state``.

        The sums are one more decay memory, with a single key channel that is always 1; in float64, where the difference keeps its digits.
        """
        log_decay = coef.log_decay if self.options.forget == "memory" else None
        k = k.double()
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + self.options.eps) if self.unit_keys else as_written(k, coef)
        one = torch.ones_like(k[..., :1])
        sums = torch.cat([one, k, k.square().sum(-1, keepdim=True)], dim=-1)
        if state is not None:
            C, mean, w = (part.double() for part in state)
            w = w.unsqueeze(-1)
            second = C.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True) + w * mean.square().sum(-1, keepdim=True)
            memory = torch.cat([w, w * mean, second], dim=-1).unsqueeze(-2)
        coef = Coefficients(log_decay=None if log_decay is None else log_decay.double())
        sums, _ = ops.decay(one, one, sums, coef, state=None if state is None else memory, cu_seqlens=cu_seqlens)
        w, mean, second = sums[..., 0], sums[..., 1:-1] / sums[..., :1], sums[..., -1]
        return second / w - mean.square().sum(-1)
