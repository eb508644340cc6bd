"""The depthwise causal convolution with its SiLU on the GPU: no copy of the input is laid out, documents and state are read where they lie.

    z_t = bias + Σ_{w<W} weight_w ∘ x_{t-(W-1)+w},   y = silu(z)

A tap that falls before its document's first token reads the state. The backward makes z again from x, so nothing but operands is kept; it
writes dz in float32 and reads it W times from the cache, since to make it anew for each tap costs W² loads a number.
State rows are tokens −(W−1) … −1 of their document, and get their gradient as tokens do.
"""

# No `from __future__ import annotations` here: a custom op reads its types from them, and the tests' shape checker hides their names.

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS, CHANNELS, WARPS = 32, 128, 4
"""The tile of one program of the backward, and of a document's edges."""
TALL, WIDE, STEPS, FULL = 16, 256, 8, 1024
"""Tokens and channels of the forward's tile; how many tiles a program does at most, and how many programs are enough."""
ROWS, STRETCH = 8, 256
"""Tokens at a time in the programs that add up the gradients of weight and bias, and all of one program. These have one warp, so that a sum
over tokens is a few additions and no barrier."""


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
    taps = ()
    for w in tl.static_range(W):
        taps = taps + (tl.load(weight + c * W + w, mask=channels, other=0.0).to(tl.float32),)  # noqa: RUF005 - Triton's Python
    x += (tl.program_id(0) // parts).to(tl.int64) * T * stride
    y += (tl.program_id(0) // parts).to(tl.int64) * T * CH
    for step in range(STEPS):
        first = (tl.program_id(0) % parts * STEPS + step) * BT
        t = first + i
        inside = t < T
        place = t if bounds is None else t - tl.load(bounds + tl.load(owner + t, mask=inside, other=0))
        z = tl.zeros([BT, BC], tl.float32)
        if bias is not None:
            z += tl.load(bias + c, mask=channels, other=0.0).to(tl.float32)[None, :]
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


@triton.jit
def pulled(weight, dz, dlast, t, r, begin, end, inside, c, channels, CH, W: tl.constexpr):
    """The gradient of the inputs at tokens t, of which those before ``begin`` are state."""
    total = tl.zeros([t.shape[0], c.shape[0]], tl.float32)
    for w in tl.static_range(W):
        s = t + (W - 1 - w)
        there = inside & (s >= begin) & (s < end)
        grad = tl.load(dz + s[:, None] * CH + c[None, :], mask=there[:, None] & channels[None, :], other=0.0)
        total += tl.load(weight + c * W + w, mask=channels, other=0.0).to(tl.float32)[None, :] * grad
    if dlast is not None:
        place = t - end + (W - 1)
        last = (inside & (place >= 0))[:, None] & channels[None, :]
        total += tl.load(dlast + (r * (W - 1) + place)[:, None] * CH + c[None, :], mask=last, other=0.0).to(tl.float32)
    return total


@triton.jit
def preactivation_gradient_kernel(
    x, weight, bias, state, dy, dz, dweight, dbias, owner, bounds, tokens, T, CH, stride, dy_stride,
    W: tl.constexpr, SILU: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, STEPS: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """dz of STEPS·BT tokens, and what they add to dweight ``[stretches, CH, W]`` and dbias ``[stretches, CH]``."""
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    channels = c < CH
    taps = tl.arange(0, BW)
    sum_w = tl.zeros([BW, BC], tl.float32)
    sum_b = tl.zeros([BC], tl.float32)
    for step in range(STEPS):
        t = (tl.program_id(0).to(tl.int64) * STEPS + step) * BT + tl.arange(0, BT)
        inside = t < tokens
        t = tl.where(inside, t, 0)
        r, begin, _ = document_of(t, owner, bounds, T)
        mask = inside[:, None] & channels[None, :]
        grad = tl.load(dy + t[:, None] * dy_stride + c[None, :], mask=mask, other=0.0).to(tl.float32)
        if SILU:
            z = preactivation(x, weight, bias, state, t, r, begin, inside, c, channels, stride, CH, W)
            s = tl.sigmoid(z)
            grad *= s * (1.0 + z * (1.0 - s))
        tl.store(dz + t[:, None] * CH + c[None, :], grad, mask=mask)
        sum_b += tl.sum(grad, 0)
        for w in tl.static_range(W):
            share = tl.sum(grad * tap(x, state, t - (W - 1) + w, r, begin, inside, c, channels, stride, CH, W), 0)
            sum_w += tl.where(taps[:, None] == w, share[None, :], 0.0)
    place = tl.program_id(0).to(tl.int64) * CH + c
    tl.store(dweight + place[None, :] * W + taps[:, None], sum_w, mask=(taps < W)[:, None] & channels[None, :])
    tl.store(dbias + place, sum_b, mask=channels)


@triton.jit
def input_gradient_kernel(
    weight, dz, dlast, dx, owner, bounds, tokens, T, CH, W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside, channels = t < tokens, c < CH
    t = tl.where(inside, t, 0)
    r, begin, end = document_of(t, owner, bounds, T)
    grad = pulled(weight, dz, dlast, t, r, begin, end, inside, c, channels, CH, W)
    tl.store(dx + t[:, None] * CH + c[None, :], grad.to(dx.dtype.element_ty), mask=inside[:, None] & channels[None, :])


@triton.jit
def state_kernel(weight, dz, dlast, dstate, bounds, T, CH, W: tl.constexpr, BC: tl.constexpr, BW: tl.constexpr):
    """The gradient of one document's state."""
    r = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    i = tl.arange(0, BW)
    channels, inside = c < CH, i < W - 1
    begin = r * T if bounds is None else tl.load(bounds + r)
    end = begin + T if bounds is None else tl.load(bounds + r + 1)
    grad = pulled(weight, dz, dlast, begin - (W - 1) + i, r, begin, end, inside, c, channels, CH, W)
    there = dstate + (r * (W - 1) + i)[:, None] * CH + c[None, :]
    tl.store(there, grad.to(dstate.dtype.element_ty), mask=inside[:, None] & channels[None, :])


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
    return x if (x.stride(2) == 1 or CH == 1) and (B == 1 or x.stride(0) == T * x.stride(1)) and x.stride(1) > 0 else x.contiguous()


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
    steps = min(STRETCH // ROWS, triton.next_power_of_2(max(1, triton.cdiv(B * T, ROWS))))
    blocks, parts = triton.cdiv(CH, CHANNELS), triton.cdiv(B * T, steps * ROWS)
    dweight, dbias = weight.new_empty(parts, CH, W, dtype=torch.float32), weight.new_empty(parts, CH, dtype=torch.float32)
    owner, bounds = _owner(cu_seqlens, B * T)
    width = triton.next_power_of_2(W)
    dz = x.new_empty(B, T, CH, dtype=torch.float32)
    if dx.numel():
        preactivation_gradient_kernel[(parts, blocks)](
            x, weight, bias, state, dy, dz, dweight, dbias, owner, bounds, B * T, T, CH, x.stride(1), dy.stride(1),
            W=W, SILU=activation, BT=ROWS, BC=CHANNELS, STEPS=steps, BW=width, num_warps=1,
        )  # fmt: skip
        input_gradient_kernel[(triton.cdiv(B * T, TOKENS), blocks)](
            weight, dz, dlast, dx, owner, bounds, B * T, T, CH, W=W, BT=TOKENS, BC=CHANNELS, num_warps=WARPS
        )
    if dstate.numel():
        state_kernel[(len(dstate), blocks)](weight, dz, dlast, dstate, bounds, T, CH, W=W, BC=CHANNELS, BW=width, num_warps=WARPS)
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
    return _forward(x, weight.contiguous(), bias, state, cu_seqlens, activation)
