"""The depthwise causal convolution with its SiLU on the GPU: no copy of the input is laid out, documents and state are read where they lie.

    z_t = bias + Σ_{w<W} weight_w ∘ x_{t-(W-1)+w},   y = silu(z)

A tap that falls before its document's first token reads the state. The backward (`backward_triton`) makes z again from x, so nothing but
operands is kept.
"""

# No `from __future__ import annotations` here: a custom op reads its types from them, and the tests' shape checker hides their names.

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.ops.conv.backward_triton import conv_gradient_kernel, state_gradient_kernel, taps_of
from fastweights.ops.tiles_triton import laid_out

CHANNELS, WARPS = 128, 4
"""Channels of one program of the backward, and of a document's edges; warps of the forward."""
TALL, WIDE, STEPS, FULL = 16, 256, 8, 1024
"""Tokens and channels of the forward's tile; how many tiles a program does at most, and how many programs are enough."""
STRETCH, UNROLL = 128, 8
"""Tokens of one program of the backward, and how many of them it loads at once. It has one warp: there is nothing to share."""


@triton.jit
def document_of(t, owner, bounds, T):
    """Document of each token, and its first and past its last token."""
    if bounds is None:
        r = t // T
        return r, r * T, r * T + T
    else:
        r = tl.load(owner + t)
        return r, tl.load(bounds + r), tl.load(bounds + r + 1)


@triton.jit
def tap(x, state, s, r, begin, inside, c, channels, stride, CH, W: tl.constexpr):
    """Inputs at tokens s of documents r that begin at ``begin``: from x, or from the state where s < begin (zeros without one)."""
    now = inside & (s >= begin)
    value = tl.load(x + s[:, None] * stride + c[None, :], mask=now[:, None] & channels[None, :], other=0.0).to(tl.float32)
    if state is not None:
        before = (r * (W - 1) + (W - 1) + s - begin)[:, None] * CH + c[None, :]
        past = inside & (s < begin)
        value += tl.load(state + before, mask=past[:, None] & channels[None, :], other=0.0).to(tl.float32)
    return value


@triton.jit
def preactivation(x, weight, bias, state, t, r, begin, inside, c, channels, stride, CH, W: tl.constexpr):
    """z at tokens t."""
    z = tl.zeros([t.shape[0], c.shape[0]], tl.float32)
    if bias is not None:
        z += tl.load(bias + c, mask=channels, other=0.0).to(tl.float32)[None, :]
    for w in tl.static_range(W):
        taps = tl.load(weight + c * W + w, mask=channels, other=0.0).to(tl.float32)
        z += taps[None, :] * tap(x, state, t - (W - 1) + w, r, begin, inside, c, channels, stride, CH, W)
    return z


@triton.jit
def forward_kernel(
    x, weight, bias, y, owner, bounds, T, CH, stride, parts, STEPS,
    W: tl.constexpr, SILU: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """STEPS tiles of BT tokens of one row of x; all but the first W − 1 tokens of a document, so that no tap is asked where it lies."""
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    channels = c < CH
    i = tl.arange(0, BT)
    taps, shift = taps_of(weight, bias, c, CH, W)
    x += (tl.program_id(0) // parts).to(tl.int64) * T * stride
    y += (tl.program_id(0) // parts).to(tl.int64) * T * CH
    for step in range(STEPS):
        first = (tl.program_id(0) % parts * STEPS + step) * BT
        t = first + i
        inside = t < T
        place = t if bounds is None else t - tl.load(bounds + tl.load(owner + t, mask=inside, other=0))
        z = tl.zeros([BT, BC], tl.float32) + shift[None, :]
        for w in tl.static_range(W):
            s = tl.minimum(tl.maximum(i + (w - (W - 1)), -first), T - 1 - first)
            value = tl.load(x + first.to(tl.int64) * stride + ((s * stride)[:, None] + c[None, :]), mask=channels[None, :], other=0.0)
            z += taps[w][None, :] * value.to(tl.float32)
        if SILU:
            z = z / (1.0 + tl.exp(-z))
        there = y + first.to(tl.int64) * CH + ((i * CH)[:, None] + c[None, :])
        tl.store(there, z.to(y.dtype.element_ty), mask=(inside & (place >= W - 1))[:, None] & channels[None, :])


@triton.jit
def edge_kernel(
    x, weight, bias, state, y, last, bounds, T, CH, stride, W: tl.constexpr, SILU: tl.constexpr, BC: tl.constexpr, BW: tl.constexpr
):  # fmt: skip
    """Of one document: the first W − 1 tokens, whose taps reach into its state, and its last W − 1 inputs, which are the next one."""
    r = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    i = tl.arange(0, BW)
    channels, inside = c < CH, i < W - 1
    begin = r * T if bounds is None else tl.load(bounds + r)
    end = begin + T if bounds is None else tl.load(bounds + r + 1)
    value = tap(x, state, end - (W - 1) + i, r, begin, inside, c, channels, stride, CH, W)
    there = last + (r * (W - 1) + i)[:, None] * CH + c[None, :]
    tl.store(there, value.to(last.dtype.element_ty), mask=inside[:, None] & channels[None, :])
    t = begin + i
    inside = inside & (t < end)
    z = preactivation(x, weight, bias, state, t, r, begin, inside, c, channels, stride, CH, W)
    if SILU:
        z = z / (1.0 + tl.exp(-z))
    tl.store(y + t[:, None] * CH + c[None, :], z.to(y.dtype.element_ty), mask=inside[:, None] & channels[None, :])


def _owner(cu_seqlens: Tensor | None, tokens: int) -> tuple[Tensor | None, Tensor | None]:
    """The document of every token, and the bounds, int64."""
    if cu_seqlens is None:
        return None, None
    bounds = cu_seqlens.long()
    token = torch.arange(tokens, device=bounds.device)
    return torch.searchsorted(bounds[1:], token, right=True), bounds


def _rows(x: Tensor) -> Tensor:
    """x ``[B, T, Ch]`` with token (b, t) at ``(b·T + t)·x.stride(1)``; copied only if it does not lie so."""
    B, T, CH = x.shape
    lies = (x.stride(2) == 1 or CH == 1) and (B == 1 or x.stride(0) == T * x.stride(1)) and x.stride(1) > 0
    return x if lies else laid_out(x)


@torch.library.custom_op("fastweights::causal_conv_forward", mutates_args=())
def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: bool,
) -> tuple[Tensor, Tensor]:
    (B, T, CH), W = x.shape, weight.shape[1]
    x = _rows(x)
    y, last = _shapes(x, weight, bias, state, cu_seqlens, activation)
    blocks = triton.cdiv(CH, CHANNELS)
    if y.numel():
        owner, bounds = _owner(cu_seqlens, T)
        BC = min(WIDE, triton.next_power_of_2(CH))
        tiles, across = triton.cdiv(T, TALL), triton.cdiv(CH, BC)
        steps = max(1, min(STEPS, B * tiles * across // FULL))
        parts = triton.cdiv(tiles, steps)
        forward_kernel[(B * parts, across)](
            x, weight, bias, y, owner, bounds, T, CH, x.stride(1), parts, steps,
            W=W, SILU=activation, BT=TALL, BC=BC, num_warps=WARPS,
        )  # fmt: skip
    if last.numel():
        bounds = None if cu_seqlens is None else cu_seqlens.long()
        edge_kernel[(len(last), blocks)](
            x, weight, bias, state, y, last, bounds, T, CH, x.stride(1),
            W=W, SILU=activation, BC=CHANNELS, BW=triton.next_power_of_2(W), num_warps=WARPS,
        )  # fmt: skip
    return y, last


@_forward.register_fake
def _shapes(x, weight, bias, state, cu_seqlens, activation):
    B, T, CH = x.shape
    rows = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_empty(B, T, CH), x.new_empty(rows, weight.shape[1] - 1, CH)


@torch.library.custom_op("fastweights::causal_conv_gradients", mutates_args=())
def _backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    dy: Tensor,
    dlast: Tensor | None,
    activation: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (B, T, CH), W = x.shape, weight.shape[1]
    x, dy = _rows(x), _rows(dy)
    dlast = None if dlast is None or W == 1 else dlast.contiguous()
    dx = torch.empty(B, T, CH, dtype=x.dtype, device=x.device)
    dstate = torch.empty_like(x.new_empty(0) if state is None else state)
    bounds = None if cu_seqlens is None else cu_seqlens.long()
    stretch = min(STRETCH, UNROLL * triton.next_power_of_2(max(1, triton.cdiv(B * T, UNROLL))))
    blocks, parts = triton.cdiv(CH, CHANNELS), triton.cdiv(B * T, stretch)
    dweight, dbias = weight.new_empty(parts, CH, W, dtype=torch.float32), weight.new_empty(parts, CH, dtype=torch.float32)
    if dx.numel():
        conv_gradient_kernel[(parts, blocks)](
            x, weight, bias, state, dy, dlast, dx, dweight, dbias, bounds, B if bounds is None else len(bounds) - 1, B * T, T, CH,
            x.stride(1), dy.stride(1), W=W, SILU=activation, BC=CHANNELS, STRETCH=stretch, UNROLL=UNROLL, num_warps=1,
        )  # fmt: skip
    if dstate.numel():
        state_gradient_kernel[(len(dstate), blocks)](
            x, weight, bias, state, dy, dlast, dstate, bounds, T, CH, x.stride(1), dy.stride(1),
            W=W, SILU=activation, BC=CHANNELS, num_warps=1,
        )  # fmt: skip
    return dx, dweight.sum(0).to(weight.dtype), dbias.sum(0).to(weight.dtype if bias is None else bias.dtype), dstate


@_backward.register_fake
def _gradient_shapes(x, weight, bias, state, cu_seqlens, dy, dlast, activation):
    dbias = weight.new_empty(weight.shape[0], dtype=weight.dtype if bias is None else bias.dtype)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dbias, x.new_empty(0) if state is None else state.new_empty(state.shape)


def _setup(ctx, inputs, output):
    *operands, ctx.activation = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*operands)


def _differentiate(ctx, dy, dlast):
    x, weight, bias, state, cu_seqlens = ctx.saved_tensors
    dy = torch.zeros_like(x) if dy is None else dy
    dx, dweight, dbias, dstate = _backward(x, weight, bias, state, cu_seqlens, dy, dlast, ctx.activation)
    return dx, dweight, None if bias is None else dbias, None if state is None else dstate, None, None


_forward.register_autograd(_differentiate, setup_context=_setup)


def causal_conv_triton(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: bool = True,
) -> tuple[Tensor, Tensor]:
    """As `causal_conv`, with kernels: y ``[B, T, Ch]`` and the new state ``[R, W − 1, Ch]``, both in x's dtype; float32 inside."""
    state = None if state is None else state.to(x.dtype).contiguous()
    bias = None if bias is None else bias.contiguous()
    return _forward(x, weight.contiguous(), bias, state, cu_seqlens, activation)
