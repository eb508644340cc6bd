"""The ``decay`` recurrence by chunks: matrix products inside a chunk, a short loop over chunks for the state. docs/chunkwise.md derives it.

Inside a chunk of C tokens, with a_t the forget gate (one number a head, or one a key channel c), a query sees a key through the gates
between them:

    P_ij = Σ_c q_ic k_jc ∏_{j<t≤i} a_tc   (j ≤ i)
    f_i  = ∏_{t≤i} a_t     what is left, at token i, of the state the chunk began with
    b_j  = ∏_{j<t} a_t     what is left, at the chunk's end, of what token j wrote

    o = P v + (f ∘ q) S,    S ← f_C ∘ S + (b ∘ k)ᵀ v

P is made by halving. The later half of a chunk sees its earlier half through (what is left, at i, of the middle) · (what is left, at the
middle, of j): one matrix product. Then each half does the same within itself, down to single tokens. Every factor is a product of gates,
hence at most 1: no decay overflows, nothing is divided, no digits cancel. And as every pair (i, j) meets at exactly one middle, the
gradient of log a_t is a plain sum over the pairs that straddle t.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.notation import Coefficients
from fastweights.ops.heads import per_own_head, per_value_head, working_dtype
from fastweights.ops.segments import Segments

SPAN = 64
"""On a CPU about this many chunks, counted for every head, are worked on at once, so that they stay in the cache."""


def chunk_decay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coef: Coefficients,
    *,
    scale: float = 1.0,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference_decay`: o ``[B, T, Hv, V]`` in v's dtype and S ``[R, Hv, K, V]``; arithmetic in float32, or float64 for float64 inputs.

    One custom op, so torch.compile keeps it whole; it can be differentiated once. Its backward keeps the operands and nothing else.
    """
    return _forward(q, k, v, coef.log_decay, coef.key_scale, coef.value_scale, coef.query_scale, state, cu_seqlens, scale)


@torch.library.custom_op("fastweights::chunk_decay", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    query_scale: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    segments = Segments.of(v.shape[0], v.shape[1], cu_seqlens)
    S = _first_state(k, v, state, segments)
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    for span in _spans(segments, v):
        x = _Span(span, v)
        q_, k_, v_ = x.cut(q, query_scale).mul_(scale), x.cut(k), x.cut(v, key_scale, value_scale)
        P, f, b, _ = _pairs(q_, k_, x.gates(log_decay))
        S_ = _recur(x.rows(S), _times(k_, b).mT @ v_, f, x.steps)
        x.join(torch.bmm(P, v_).baddbmm_(_times(q_, f), S_), o)
    return o, segments.unsort(S)


@_forward.register_fake
def _(q, k, v, log_decay, key_scale, value_scale, query_scale, state, cu_seqlens, scale):
    rows = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    final = v.new_empty((rows, v.shape[2], k.shape[3], v.shape[3]), dtype=working_dtype(q))
    return torch.empty_like(v, memory_format=torch.contiguous_format), final


def _save(ctx, inputs, output):
    *operands, ctx.scale = inputs
    ctx.save_for_backward(*operands)


def _differentiate(ctx, do, dfinal):
    grads = _backward(*ctx.saved_tensors, do, dfinal, ctx.scale, ctx.needs_input_grad[3])
    return *(grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=False)), None, None


_forward.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op("fastweights::chunk_decay_backward", mutates_args=())
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    query_scale: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    do: Tensor,
    dfinal: Tensor,
    scale: float,
    gates_learn: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log_decay, key_scale, value_scale, query_scale and state; empty where there is nothing to differentiate."""
    segments = Segments.of(v.shape[0], v.shape[1], cu_seqlens)
    spans = [_Span(span, v) for span in _spans(segments, v)]

    # First forwards again, for the state before each chunk,
    S = _first_state(k, v, state, segments)
    before = S.new_empty(segments.chunks * v.shape[2], *S.shape[2:])
    for x in spans:
        f, b = _left(x.gates(log_decay))
        _recur(x.rows(S), _times(x.cut(k), b).mT @ x.cut(v, key_scale, value_scale), f, x.steps, out=before[x.held])

    # then backwards, carrying the gradient of the state after each chunk to that of the state before it
    dS = segments.sort(dfinal.to(S.dtype))
    grads = dq, dk, dv, dlog, dkey_scale, dvalue_scale, dquery_scale = [
        v.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (q, k, v, log_decay if gates_learn else None, key_scale, value_scale, query_scale)
    ]
    for x in reversed(spans):
        q_, k_, v_, a_ = x.cut(q, query_scale).mul_(scale), x.cut(k), x.cut(v, key_scale, value_scale), x.gates(log_decay)
        do_, S_ = x.cut(do), before[x.held]
        P, f, b, grad = _pairs(q_, k_, a_, do_ @ v_.mT)
        fq, bk = _times(q_, f), _times(k_, b)
        dS_ = _recur(x.rows(dS), fq.mT @ do_, f, x.steps[::-1])
        dfq, dbk = do_ @ S_.mT, v_ @ dS_.mT
        dq_, dk_, dv_ = _add_times(grad.q, dfq, f), _add_times(grad.k, dbk, b), torch.bmm(P.mT, do_).baddbmm_(bk, dS_)
        if gates_learn:
            df, db = _per_gate(fq.mul_(dfq), a_), _per_gate(bk.mul_(dbk), a_)  # the gradients of log f and log b
            df[:, -1] += f[:, -1] * _per_gate(S_.mul_(dS_).sum(-1), a_)
            da_ = _log_gates(df, db, grad.straddling)
            x.join(da_ if dlog.dim() == 4 else da_.squeeze(-1), dlog)
        x.join_gradients(dq_.mul_(scale), q, dq, (query_scale, dquery_scale))
        x.join(dk_, dk)
        x.join_gradients(dv_, v, dv, (key_scale, dkey_scale), (value_scale, dvalue_scale))
    return *grads, segments.unsort(dS)  # type: ignore[return-value]


@_backward.register_fake
def _(q, k, v, log_decay, key_scale, value_scale, query_scale, state, cu_seqlens, do, dfinal, scale, gates_learn):
    operands = (q, k, v, log_decay if gates_learn else None, key_scale, value_scale, query_scale)
    grads = (v.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in operands)
    return *grads, torch.empty_like(dfinal, memory_format=torch.contiguous_format)


def _first_state(k: Tensor, v: Tensor, state: Tensor | None, segments: Segments) -> Tensor:
    """A fresh copy, or zeros, ``[R, Hv, K, V]`` in the order of the steps."""
    real = working_dtype(k)
    if state is not None:
        return segments.sort(state.to(real))
    return v.new_zeros((segments.rows, v.shape[2], k.shape[3], v.shape[3]), dtype=real)


def _spans(segments: Segments, v: Tensor) -> list[Segments]:
    return segments.spans(max(1, SPAN // v.shape[2]) if v.device.type == "cpu" else max(1, segments.chunks))


class _Span:
    """A few chunks of the operands, as ``[M, C, …]`` in the working precision: chunks and value heads share M = chunks · Hv.

    Both scales of a write act on its value, so that k stays as it came: k̂ v̂ᵀ = k (key_scale · value_scale · v)ᵀ.
    """

    def __init__(self, span: Segments, v: Tensor) -> None:
        self.span, self.heads, self.real = span, v.shape[2], working_dtype(v)
        self.steps = [slice(step.start * self.heads, step.stop * self.heads) for step in span.steps]
        self.held = slice(span.offset * self.heads, (span.offset + span.chunks) * self.heads)
        """Where the span's chunks lie among all chunks."""

    def rows(self, S: Tensor) -> Tensor:
        """Its rows of a state ``[R, Hv, K, V]`` as a view ``[rows · Hv, K, V]``."""
        return S[self.span.top : self.span.top + self.span.rows].flatten(0, 1)

    def cut(self, x: Tensor, *factors: Tensor | None) -> Tensor:
        """``[B, T, heads, …] -> [M, C, …]`` times factors ``[B, T, heads]``; a key head is repeated for each of its value heads."""
        y = per_value_head(self.span.cut(x, self.real), 1, self.heads).flatten(0, 1)
        for factor in factors:
            if factor is not None:
                y *= self.cut(factor).unsqueeze(-1)
        return y

    def gates(self, log_decay: Tensor | None) -> Any:
        """a ``[M, C, K]`` or ``[M, C, 1]``, or None."""
        return None if log_decay is None else self.cut(log_decay if log_decay.dim() == 4 else log_decay.unsqueeze(-1)).exp_()

    def join(self, y: Tensor, out: Tensor) -> None:
        """``[M, C, …]`` into its place in ``[B, T, heads, …]``, summed over the value heads that share a head there."""
        self.span.join(per_own_head(y.unflatten(0, (-1, self.heads)), out.shape[2], 1), out=out)

    def join_gradients(self, dy: Tensor, x: Tensor, dx: Tensor, *factors: tuple[Tensor | None, Tensor]) -> None:
        """From the gradient of ``cut(x, *factors)`` to that of x and, where there is one, of each factor."""
        given = [(self.cut(factor), out) for factor, out in factors if factor is not None]
        for factor, out in given:
            along = torch.linalg.vecdot(dy, self.cut(x))
            for other, _ in given:
                if other is not factor:
                    along *= other
            self.join(along, out)
        for factor, _ in given:
            dy *= factor.unsqueeze(-1)
        self.join(dy, dx)


def _recur(S: Tensor, writes: Tensor, f: Tensor | None, steps: list[slice], out: Tensor | None = None) -> Tensor:
    """S ← f_C ∘ S + writes, step by step and in place; returns S as every chunk found it ``[…, K, V]``."""
    found = torch.empty_like(writes) if out is None else out
    for step in steps:
        alive = S[: step.stop - step.start]
        found[step] = alive
        if f is None:
            alive += writes[step]
        else:
            torch.addcmul(writes[step], alive, f[step, -1].unsqueeze(-1), out=alive)
    return found


class _PairGradients(NamedTuple):
    q: Tensor
    k: Tensor
    straddling: list[tuple[Tensor, Tensor]]
    """What each halving, from single tokens up, adds to the gradient of log f in the later halves, and of log b in the earlier ones."""


def _pairs(q: Tensor, k: Tensor, a: Tensor | None, dP: Tensor | None = None) -> tuple[Tensor, Any, Any, Any]:
    """P, f, b of the module's docstring, for gates a ``[…, C, K]``, ``[…, C, 1]`` or None; and with dP the gradients through P."""
    if a is None:
        P = (q @ k.mT).tril_()
        return P, None, None, None if dP is None else _PairGradients(dP.tril_() @ k, dP.mT @ q, [])
    if a.shape[-1] > 1:
        return _halve(q, k, a, dP)
    products, ones = q @ k.mT, torch.ones_like(a)  # one gate for all channels: it masks the plain products
    mask, f, b, grad = _halve(ones, ones, a, None if dP is None else dP * products)
    if dP is not None:
        dP *= mask
        grad = _PairGradients(dP @ k, dP.mT @ q, grad.straddling)
    return products.mul_(mask), f, b, grad


def _halve(q: Tensor, k: Tensor, a: Tensor, dP: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Any]:
    C = q.shape[-2]
    P = q.new_zeros(*q.shape[:-1], C)
    P.diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
    f, b = a.clone(), torch.ones_like(a)
    grad: Any = None
    if dP is not None:
        d = dP.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        grad = _PairGradients(d * k, d * q, [])
    for s, f_late, b_early in _grow(f, b):
        late, early = _halves(q, s)[1] * f_late, _halves(k, s)[0] * b_early
        _corner(P, s).copy_(_outer(late, early))
        if dP is not None:
            d = _corner(dP, s)
            dlate, dearly = d @ early, d.mT @ late
            _halves(grad.q, s)[1].addcmul_(dlate, f_late)
            _halves(grad.k, s)[0].addcmul_(dearly, b_early)
            grad.straddling.append((late.mul_(dlate), early.mul_(dearly)))
    return P, f, b, grad


def _left(a: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """f and b alone."""
    if a is None:
        return None, None
    f, b = a.clone(), torch.ones_like(a)
    for _ in _grow(f, b):
        pass
    return f, b


def _grow(f: Tensor, b: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Grow f and b, in place, from blocks of one token to blocks of C. Yields, for s = 1, 2, 4 …, s itself, f of the later s tokens of each
    block of 2s, and b of its earlier s tokens.
    """
    s = 1
    while s < f.shape[-2]:
        (f_early, f_late), b_early = _halves(f, s), _halves(b, s)[0]
        yield s, f_late, b_early
        b_early *= f_late[..., -1:, :]
        f_late *= f_early[..., -1:, :]
        s *= 2


def _log_gates(df: Tensor, db: Tensor, straddling: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The gradient of log a from those of log f and log b: `_grow` backwards. Overwrites df and db."""
    for late, early in reversed(straddling):
        s = late.shape[-2]
        (df_early, df_late), db_early = _halves(df, s), _halves(db, s)[0]
        df_early[..., -1, :] += df_late.sum(-2)
        df_late[..., -1, :] += db_early.sum(-2)
        df_late += late
        db_early += early
    return df


def _halves(x: Tensor, s: int) -> tuple[Tensor, Tensor]:
    """The earlier and the later s tokens of every block of 2s: ``[…, C, K] -> 2 × […, C / 2s, s, K]``, views."""
    early, late = x.unflatten(-2, (-1, 2, s)).unbind(-3)
    return early, late


def _corner(P: Tensor, s: int) -> Tensor:
    """Where the later half of every block of 2s meets the earlier: ``[…, C, C] -> […, C / 2s, s, s]``, a view."""
    blocks = P.unflatten(-1, (-1, 2, s))[..., 0, :].unflatten(-3, (-1, 2, s))[..., 1, :, :, :]  # […, n, s, n, s]
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _outer(x: Tensor, y: Tensor) -> Tensor:
    return x * y.mT if x.shape[-1] == 1 else x @ y.mT


def _add_times(x: Tensor, y: Tensor, factor: Tensor | None) -> Tensor:
    return x.add_(y) if factor is None else x.addcmul_(y, factor)


def _times(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor


def _per_gate(x: Tensor, a: Tensor) -> Tensor:
    """Summed over channels where one gate serves them all."""
    return x.sum(-1, keepdim=True) if a.shape[-1] == 1 else x
