"""The ``delta`` family chunk by chunk, with its backward written out. Only the memory passes from chunk to chunk in a loop.

Within a chunk let g = cumsum(log_decay), D_ij = exp(g_i − g_j) for i ≥ j and 0 above, S the memory before the chunk. The error that token i
corrects, e_i = v̂_i − S̃_iᵀk̂_i, sees the writes β_j k̂_j e_jᵀ of the tokens before it, so all errors of a chunk solve one triangular system:

    L = strictly lower part of (K̂K̂ᵀ ∘ D) diag(β)        P = lower part of (Q̂K̂ᵀ ∘ D) diag(β)        w_j = exp(g_C − g_j) β_j
    (I + L) E = V̂ − diag(eᵍ) K̂ S          O = diag(eᵍ) Q̂ S + P E          S ← exp(g_C) S + K̂ᵀ diag(w) E

Every exponent is ≤ 0. β stands on the right, so nothing is divided by it. The inverse of I + L is built in full precision from the inverses
of blocks on its diagonal. The forward keeps it, E, and S before each chunk; everything else the backward makes again. Both walk over spans
of a few chunks, small enough for the processor's cache. The derivation is in docs/chunkwise.md.
"""

# No `from __future__ import annotations` here: a custom op reads its types from them, and the tests' shape checker hides their names.

from collections.abc import Iterator

import torch
from torch import Tensor

from fastweights.notation import Coefficients
from fastweights.ops.heads import per_own_head, per_value_head, working_dtype
from fastweights.ops.segments import Segments, fit

CHUNK = 32
"""C. Of 16, 32, 64 and 128 the fastest here: the work within chunks grows with C, the number of steps shrinks."""
SPAN = 128
"""How many chunks, counted for every head, are worked on at once."""
BLOCK = 16
"""Triangles up to this size are inverted by substitution."""


def chunk_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coef: Coefficients,
    *,
    scale: float = 1.0,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference_delta`: o ``[B, T, Hv, V]`` in v's dtype and S ``[R, Hv, K, V]``; arithmetic in float32, or float64 for float64 inputs.

    One custom op, so torch.compile keeps it whole; it can be differentiated once.
    """
    operands = (q, k, v, *coef, state)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)
    o, final, *_ = _forward(*operands, cu_seqlens, scale, keep)
    return o, final


@torch.library.custom_op("fastweights::chunk_delta", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    query_scale: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o and the final state; for the backward (empty unless ``keep``) the inverses, the errors E, and the memory before each chunk."""
    (B, T, Hv, V), K, real = v.shape, k.shape[3], working_dtype(q)
    segments = Segments.of(B, T, cu_seqlens, CHUNK)
    C = segments.chunk
    inverses, errors, memories = _kept(keep, v, segments.chunks * Hv, C, K)
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    S = v.new_zeros((segments.rows, Hv, K, V), dtype=real) if state is None else segments.sort(state.to(real))
    for span in segments.spans(max(SPAN // Hv, 1)):
        x = _Span(span, q, k, v, beta, log_decay, key_scale, query_scale, scale)
        P, L = x.products(x.decay.mul_(x.beta.unsqueeze(-2))).unbind(1)
        inverse, now = _inverse(L), x.rows_of(S)
        z = x.zeros_and_values(v, value_scale)
        e = z.new_empty(z[:, C:].shape)
        before = memories[x.held] if keep else None
        for step, reader, writer, inverse_, z_, e_, total in x.steps(x.reader(), x.writer(), inverse, z, e, x.total):
            now = now[: len(e_)]
            if before is not None:
                before[step] = now
            z_.baddbmm_(reader, now)  # diag(eᵍ) Q̂ S above V̂ − diag(eᵍ) K̂ S
            torch.bmm(inverse_, z_[:, C:], out=e_)
            now.mul_(total).baddbmm_(writer.mT, e_)
        x.join(torch.baddbmm(z[:, :C], P, e), o)
        if keep:
            inverses[x.held], errors[x.held] = inverse, e
    return o, segments.unsort(S), inverses, errors, memories


@_forward.register_fake
def _(q, k, v, beta, log_decay, key_scale, value_scale, query_scale, state, cu_seqlens, scale, keep):
    (B, T, Hv, V), K = v.shape, k.shape[3]
    rows = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    M: int | torch.SymInt
    C: int | torch.SymInt
    if not keep or cu_seqlens is None:
        C = fit(CHUNK, T)
        M = B * -(-T // C) * Hv
    else:  # the number of chunks depends on the values in cu_seqlens
        context = torch.library.get_ctx()
        M, C = context.new_dynamic_size(), context.new_dynamic_size()
    final = v.new_empty((rows, Hv, K, V), dtype=working_dtype(q))
    return torch.empty_like(v, memory_format=torch.contiguous_format), final, *_kept(keep, v, M, C, K)


def _kept(keep: bool, v: Tensor, M, C, K) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the inverses, the errors and the memories of M chunks; empty unless ``keep``."""
    V, dtype = v.shape[3], working_dtype(v)
    shapes = ((M, C, C), (M, C, V), (M, K, V)) if keep else ((0,), (0,), (0,))
    return v.new_empty(shapes[0], dtype=dtype), v.new_empty(shapes[1], dtype=dtype), v.new_empty(shapes[2], dtype=dtype)


def _save(ctx, inputs, output):
    *operands, ctx.scale, _ = inputs
    kept = output[2:]
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*operands, *kept)


def _differentiate(ctx, do, dfinal, *_):
    *given, cu_seqlens, inverses, errors, memories = ctx.saved_tensors
    grads = _backward(*given[:-1], cu_seqlens, inverses, errors, memories, do, dfinal, ctx.scale)
    return *(None if x is None else grad for x, grad in zip(given, grads, strict=True)), None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op("fastweights::chunk_delta_backward", mutates_args=())
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    query_scale: Tensor | None,
    cu_seqlens: Tensor | None,
    inverses: Tensor,
    errors: Tensor,
    memories: Tensor,
    do: Tensor | None,
    dfinal: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, beta, log_decay, key_scale, value_scale, query_scale and state; empty where there is no such operand."""
    (B, T, Hv, V), K, real = v.shape, k.shape[3], working_dtype(q)
    segments = Segments.of(B, T, cu_seqlens, CHUNK)
    dS = v.new_zeros((segments.rows, Hv, K, V), dtype=real) if dfinal is None else segments.sort(dfinal.to(real))
    per_head = [v.new_empty((B, T, Hv, *size), dtype=real) for size in ((K,), (K,), (V,), (), ())]
    for span in reversed(segments.spans(max(SPAN // Hv, 1))):
        x = _Span(span, q, k, v, beta, log_decay, key_scale, query_scale, scale)
        e = errors[x.held]
        do_ = torch.zeros_like(e) if do is None else x.cut(do)
        grads = _backward_span(x, inverses[x.held], e, memories[x.held], do_, x.rows_of(dS))
        for grad, out in zip(grads, per_head, strict=True):
            x.join(grad, out)
    dq, dk, dv, dbeta, dlog_decay = per_head
    dq, dquery_scale = _unscale(dq.mul_(scale), q, query_scale)
    dk, dkey_scale = _unscale(dk, k, key_scale)
    dv, dvalue_scale = _unscale(dv, v, value_scale)
    dbeta, dlog_decay = (dx.new_empty(0) if x is None else dx.to(x.dtype) for dx, x in ((dbeta, beta), (dlog_decay, log_decay)))
    return dq, dk, dv, dbeta, dlog_decay, dkey_scale, dvalue_scale, dquery_scale, segments.unsort(dS)


@_backward.register_fake
def _(q, k, v, beta, log_decay, key_scale, value_scale, query_scale, cu_seqlens, inverses, errors, memories, do, dfinal, scale):
    (B, _, Hv, V), K = v.shape, k.shape[3]
    rows = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    operands = (q, k, v, beta, log_decay, key_scale, value_scale, query_scale)
    none = errors.new_empty(0)
    grads = (torch.empty_like(none if x is None else x, memory_format=torch.contiguous_format) for x in operands)
    return *grads, errors.new_empty((rows, Hv, K, V))


def _backward_span(x: "_Span", inverse: Tensor, e: Tensor, memories: Tensor, do: Tensor, dS: Tensor) -> tuple[Tensor, ...]:
    """Gradients of q̂ (times scale), k̂, v̂, β and log_decay of a span; takes dS from behind the span to before it, in place."""
    C = x.y.shape[1] // 2
    raw = x.products(x.decay)  # P and L without β
    P = raw[:, 0] * x.beta.unsqueeze(-2)
    dy, dk, dv, dproducts = torch.empty_like(x.y), e.new_empty(x.k.shape), torch.empty_like(e), torch.empty_like(raw)
    dreach, dweight, dtotal = e.new_empty(x.y.shape[:2]), torch.empty_like(x.beta), e.new_empty(len(e))
    small = (x.reach, x.weight, x.total, dreach, dweight, dtotal)
    steps = list(x.steps(x.y, P, inverse, e, memories, do, dy, dk, dv, dproducts.flatten(1, 2), *small))
    for _, y, P_, inverse_, e_, S, do_, dy_, dk_, dv_, dproducts_, reach, weight, total, dreach_, dweight_, dtotal_ in reversed(steps):
        now = dS[: len(y)]
        de = torch.bmm(y[:, C:], now)
        torch.sum(de * e_, -1, out=dweight_)
        de.mul_(weight).baddbmm_(P_.mT, do_)
        torch.bmm(inverse_.mT, de, out=dv_)
        dz = torch.cat([do_, dv_], dim=1)
        torch.bmm(dz, e_.mT, out=dproducts_)
        dz.mul_(reach)
        torch.bmm(dz, S.mT, out=dy_)
        torch.sum(dy_ * y, -1, out=dreach_)
        torch.bmm(e_ * weight, now.mT, out=dk_)
        torch.sum(now * S, (1, 2), out=dtotal_)
        now.mul_(total).baddbmm_(y.mT, dz)

    dproducts[:, 1].neg_().diagonal(dim1=1, dim2=2).zero_()
    pairs = raw.mul_(dproducts).sum(1)  # the gradient of log D, but for β
    dbeta = pairs.sum(-2) + dweight * x.fade
    pairs *= x.beta.unsqueeze(-2)
    dproducts = dproducts.mul_(x.decay.mul_(x.beta.unsqueeze(-2)).unsqueeze(1)).flatten(1, 2)
    dk.baddbmm_(dproducts.mT, x.y)
    dy.baddbmm_(dproducts, x.k)

    # A decay at t acts on every pair i ≥ t > j, on the reads of S at i ≥ t, on the writes to S at j < t, and on S itself. Sums of these
    # terms alone lose nothing; differences of row and column sums would.
    before = torch.ones(C, C, dtype=e.dtype, device=e.device).triu(1)  # [j, t]: j < t
    dlog_decay = (pairs @ before).tril_().sum(-2) + (dweight * x.weight.squeeze(-1)) @ before
    dlog_decay += dreach.unflatten(1, (2, C)).sum(1) @ (1 - before) + (dtotal * x.total.flatten()).unsqueeze(-1)
    return dy[:, :C], dk.add_(dy[:, C:]), dv, dbeta, dlog_decay


class _Span:
    """What forward and backward both need of a span. Chunks and value heads share the first dimension M = chunks · Hv."""

    def __init__(self, span, q, k, v, beta, log_decay, key_scale, query_scale, scale):
        self.span, self.heads, self.real, C = span, v.shape[2], working_dtype(q), span.chunk
        self.held = slice(span.offset * self.heads, (span.offset + span.chunks) * self.heads)
        """Its chunks among all."""
        self.y = self._queries_and_keys(q, k, query_scale, key_scale, scale)
        """q̂ (times scale) above k̂ ``[M, 2C, K]``."""
        self.k = self.y[:, C:]
        a = self.y.new_zeros((len(self.y), C)) if log_decay is None else self.cut(log_decay)
        since = a.unsqueeze(-1).expand(-1, C, C).tril(-1).cumsum_(-2)
        """log D: the decays after j up to i, summed: in a difference of longer sums one decay of −50 would drown the small ones."""
        self.fade = since[:, -1].exp()
        """exp(g_C − g) ``[M, C]``."""
        self.decay = since.exp_().tril_()
        """D ``[M, C, C]``."""
        self.beta = torch.ones_like(a) if beta is None else self.cut(beta)
        self.weight = (self.fade * self.beta).unsqueeze(-1)
        """w ``[M, C, 1]``."""
        reach = a.double().cumsum(-1).exp_().to(a.dtype).unsqueeze(-1)
        self.reach = torch.cat([reach, -reach], dim=1)
        """exp(g) for queries, −exp(g) for keys: what each adds to its line is that times its product with S ``[M, 2C, 1]``."""
        self.total = reach[:, -1:]
        """exp(g_C) ``[M, 1, 1]``."""

    def cut(self, x: Tensor) -> Tensor:
        """``[B, T, heads, …] -> [M, C, …]`` in the working precision; key heads are repeated for their value heads."""
        return per_value_head(self.span.cut(x, self.real), 1, self.heads).flatten(0, 1)

    def join(self, x: Tensor, out: Tensor) -> None:
        """``[M, C, …]`` into its tokens of ``out [B, T, Hv, …]``."""
        self.span.join(x.unflatten(0, (-1, self.heads)), out=out)

    def rows_of(self, S: Tensor) -> Tensor:
        """Its rows of a state ``[R, Hv, K, V]``, a view ``[rows · Hv, K, V]``."""
        return S[self.span.top : self.span.top + self.span.rows].flatten(0, 1)

    def steps(self, *tensors: Tensor) -> Iterator[tuple]:
        """For every step its slice of M, and that part of each of the tensors."""
        steps = [slice(step.start * self.heads, step.stop * self.heads) for step in self.span.steps]
        sizes = [step.stop - step.start for step in steps]
        return zip(steps, *(x.split(sizes) for x in tensors), strict=True)

    def zeros_and_values(self, v: Tensor, value_scale: Tensor | None) -> Tensor:
        """0 above v̂ ``[M, 2C, V]``."""
        z = self.y.new_zeros((self.span.chunks, self.heads, 2 * self.span.chunk, v.shape[3]))
        values = z[:, :, self.span.chunk :]
        self.span.cut(v, out=values)
        if value_scale is not None:
            values *= self.cut(value_scale).view(*values.shape[:3], 1)
        return z.flatten(0, 1)

    def reader(self) -> Tensor:
        """diag(eᵍ) Q̂ above −diag(eᵍ) K̂ ``[M, 2C, K]``."""
        return self.y * self.reach

    def writer(self) -> Tensor:
        """diag(w) K̂ ``[M, C, K]``."""
        return self.k * self.weight

    def products(self, decay: Tensor) -> Tensor:
        """The lower parts of Q̂K̂ᵀ and K̂K̂ᵀ times ``decay [M, C, C]``: ``[M, 2, C, C]``."""
        return torch.bmm(self.y, self.k.mT).unflatten(1, (2, -1)).mul_(decay.unsqueeze(1))

    def _queries_and_keys(self, q, k, query_scale, key_scale, scale):
        (_, _, Hk, K), C = k.shape, self.span.chunk
        y = torch.empty((self.span.chunks, Hk, self.heads // Hk, 2, C, K), dtype=self.real, device=k.device)
        for half, x in enumerate((q, k)):
            self.span.cut(x, out=y[:, :, 0, half])
        y[:, :, 1:] = y[:, :, :1]
        y = y.flatten(0, 2)
        for half, factor in enumerate((query_scale, key_scale)):
            if factor is not None:
                y[:, half].mul_(self.cut(factor).unsqueeze(-1))
        y[:, 0].mul_(scale)
        return y.flatten(1, 2)


def _inverse(L: Tensor) -> Tensor:
    """(I + L)⁻¹ for strictly lower triangular L ``[M, C, C]``, C = 16 · 2ⁿ; what lies on and above L's diagonal is not read.

    [[A, 0], [B, D]]⁻¹ = [[A⁻¹, 0], [−D⁻¹BA⁻¹, D⁻¹]]. Unlike a Neumann series nothing here grows that is not in the inverse: on equal
    keys the powers of L explode, while the inverse stays below β.
    """
    M, C, _ = L.shape
    if C <= BLOCK:
        identity = torch.eye(C, dtype=L.dtype, device=L.device)
        return torch.linalg.solve_triangular(L, identity.expand_as(L), upper=False, unitriangular=True)
    h = C // 2
    halves = _inverse(torch.stack([L[:, :h, :h], L[:, h:, h:]], dim=1).flatten(0, 1)).unflatten(0, (M, 2))
    inverse = torch.zeros_like(L)
    inverse[:, :h, :h], inverse[:, h:, h:] = halves[:, 0], halves[:, 1]
    inverse[:, h:, :h] = torch.bmm(halves[:, 1], torch.bmm(L[:, h:, :h], halves[:, 0])).neg_()
    return inverse


def _unscale(dx: Tensor, x: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """From the gradient of factor·x per value head ``[B, T, Hv, X]`` to those of x and of the factor, in their heads and dtypes."""
    Hv = dx.shape[2]
    if factor is None:
        return per_own_head(dx, x.shape[2]).to(x.dtype), dx.new_empty(0)
    dfactor = torch.linalg.vecdot(dx, per_value_head(x, 2, Hv).to(dx.dtype))
    dx = dx.mul_(per_value_head(factor, 2, Hv).unsqueeze(-1))
    return per_own_head(dx, x.shape[2]).to(x.dtype), per_own_head(dfactor, factor.shape[2]).to(factor.dtype)
