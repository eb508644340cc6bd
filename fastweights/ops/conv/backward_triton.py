"""The convolution's gradients in one walk: x and dy are read once, and what one token owes another stays in registers.

A program walks through a stretch of tokens with a window of the last W − 1 inputs. It makes z and dz of the token it is at, adds dz to the
gradients of weight and bias, and to those of the last W inputs, of which the oldest is then complete. It goes on for W − 1 tokens more,
whose dz its own tokens still need. At a document's first token the window becomes the state, and all inputs before it are complete.
"""

# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"
# Triton adds tuples and does not unpack them, and they grow.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def document_at(t, bounds, rows):
    """The document that token t is in: the last one that begins at or before it."""
    low = t * 0
    high = rows + low
    while high - low > 1:
        middle = (low + high) // 2
        later = tl.load(bounds + middle) > t
        high = tl.where(later, middle, high)
        low = tl.where(later, low, middle)
    return low


@triton.jit
def row_of(base, r, i, count, c, W: tl.constexpr):
    """Row i of document r in a tensor ``[R, W − 1, CH]``, at the channels c below ``count``; zeros where there is no tensor."""
    if base is None:
        return tl.zeros([c.shape[0]], tl.float32)
    else:
        return tl.load(base + (r * (W - 1) + i) * count + c, mask=c < tl.where((i >= 0) & (i < W - 1), count, 0), other=0.0).to(tl.float32)


@triton.jit
def taps_of(weight, bias, c, CH, W: tl.constexpr):
    """The weights of each tap, and the bias, or zeros."""
    taps = ()
    for w in tl.static_range(W):
        taps = taps + (tl.load(weight + c * W + w, mask=c < CH, other=0.0).to(tl.float32),)
    shift = tl.zeros([c.shape[0]], tl.float32)
    if bias is not None:
        shift += tl.load(bias + c, mask=c < CH, other=0.0).to(tl.float32)
    return taps, shift


@triton.jit
def through_silu(dy, seen, taps, shift, W: tl.constexpr, SILU: tl.constexpr):
    """dz, given dy and the W inputs that z sees."""
    dz = dy.to(tl.float32)
    if SILU:
        z = shift
        for w in tl.static_range(W):
            z += taps[w] * seen[w]
        gate = tl.sigmoid(z)
        dz *= gate * (1.0 + z * (1.0 - gate))
    return dz


@triton.jit
def pass_on(owed, taps, dz, W: tl.constexpr):
    """dz added to the gradients of the W inputs that its token sees."""
    total = ()
    for w in tl.static_range(W):
        total = total + (owed[w] + taps[w] * dz,)
    return total


@triton.jit
def conv_gradient_kernel(
    x, weight, bias, state, dy, dlast, dx, dweight, dbias, bounds, rows, tokens, T, CH, stride, dy_stride,
    W: tl.constexpr, SILU: tl.constexpr, BC: tl.constexpr, STRETCH: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """dx of STRETCH tokens, and what they add to dweight ``[stretches, CH, W]`` and dbias ``[stretches, CH]``.

    UNROLL tokens are loaded at once, so that their loads do not wait for each other. Tokens are counted from the stretch's first.
    """
    first = tl.program_id(0).to(tl.int64) * STRETCH
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    x += first * stride
    dy += first * dy_stride
    dx += first * CH
    FAR: tl.constexpr = 1 << 30
    stop = tl.minimum(tokens - first, FAR).to(tl.int32)
    r = first // T if bounds is None else document_at(first, bounds, rows)
    begin = tl.maximum((r * T if bounds is None else tl.load(bounds + r)) - first, -FAR).to(tl.int32)
    end = tl.minimum((r * T + T if bounds is None else tl.load(bounds + r + 1)) - first, FAR).to(tl.int32)

    taps, shift = taps_of(weight, bias, c, CH, W)
    sum_b = tl.zeros([BC], tl.float32)
    sums, window, owed = (sum_b,), (), ()
    for i in tl.static_range(W - 1):
        s = i - (W - 1)
        here = tl.load(x + s * stride + c, mask=c < tl.where(s >= begin, CH, 0), other=0.0).to(tl.float32)
        window = window + (here + row_of(state, r, tl.where(s < begin, s - begin + (W - 1), -1), CH, c, W),)
        owed = owed + (sum_b,)
        sums = sums + (sum_b,)

    for n in range(0, STRETCH + W - 1, UNROLL):
        inputs, grads = (), ()
        for u in tl.static_range(UNROLL):
            inside = c < tl.where(n + u < stop, CH, 0)
            inputs = inputs + (tl.load(x + (n + u) * stride + c, mask=inside, other=0.0),)
            grads = grads + (tl.load(dy + (n + u) * dy_stride + c, mask=inside, other=0.0),)
        mine = tl.where(stop * 0 + n < STRETCH, 1.0, 0.0)
        for u in tl.static_range(UNROLL):
            t = stop * 0 + n + u
            if (t == end) & (t < stop):
                for i in tl.static_range(W - 1):
                    s = t - (W - 1) + i
                    complete = c < tl.where((s >= tl.maximum(begin, 0)) & (s < STRETCH), CH, 0)
                    tl.store(dx + s * CH + c, owed[i].to(dx.dtype.element_ty), mask=complete)
                r += 1
                if bounds is not None:
                    while tl.load(bounds + r + 1) <= first + t:  # documents of no tokens
                        r += 1
                begin = t
                end = t + T if bounds is None else tl.minimum(tl.load(bounds + r + 1) - first, FAR).to(tl.int32)
                window, owed = (), ()
                for i in tl.static_range(W - 1):
                    window = window + (row_of(state, r, i, CH, c, W),)
                    owed = owed + (tl.zeros([BC], tl.float32),)
            seen = window + (inputs[u].to(tl.float32),)
            dz = through_silu(grads[u], seen, taps, shift, W, SILU)
            owed = pass_on(owed + (row_of(dlast, r, t - end + (W - 1), tl.where(t < stop, CH, 0), c, W),), taps, dz, W)
            dz *= mine
            sums = pass_on(sums, seen, dz, W)
            sum_b += dz
            s = t - (W - 1)
            complete = c < tl.where((s >= tl.maximum(begin, 0)) & (s < tl.minimum(stop, STRETCH)), CH, 0)
            tl.store(dx + s * CH + c, owed[0].to(dx.dtype.element_ty), mask=complete)
            window, owed = seen[1:], owed[1:]

    part = tl.program_id(0).to(tl.int64) * CH + c
    for w in tl.static_range(W):
        tl.store(dweight + part * W + w, sums[w], mask=c < CH)
    tl.store(dbias + part, sum_b, mask=c < CH)


@triton.jit
def state_gradient_kernel(
    x, weight, bias, state, dy, dlast, dstate, bounds, T, CH, stride, dy_stride, W: tl.constexpr, SILU: tl.constexpr, BC: tl.constexpr
):
    """The gradient of one document's state, from its first W − 1 tokens, and from its new state where it has fewer."""
    r = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    begin = r * T if bounds is None else tl.load(bounds + r)
    end = begin + T if bounds is None else tl.load(bounds + r + 1)
    taps, shift = taps_of(weight, bias, c, CH, W)
    window, owed = (), ()
    for i in tl.static_range(W - 1):
        window = window + (row_of(state, r, i, CH, c, W),)
        owed = owed + (row_of(dlast, r, begin - end + i, CH, c, W),)
    for i in tl.static_range(W - 1):
        t = begin + i
        inside = c < tl.where(t < end, CH, 0)
        seen = window + (tl.load(x + t * stride + c, mask=inside, other=0.0).to(tl.float32),)
        dz = through_silu(tl.load(dy + t * dy_stride + c, mask=inside, other=0.0), seen, taps, shift, W, SILU)
        owed = pass_on(owed + (tl.zeros([BC], tl.float32),), taps, dz, W)
        tl.store(dstate + (r * (W - 1) + i) * CH + c, owed[0].to(dstate.dtype.element_ty), mask=c < CH)
        window, owed = seen[1:], owed[1:]
