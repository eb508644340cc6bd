"""A few tokens of the causal convolution in one launch, in place on a static state: the decode step.

Each program owns CHANNELS channels of one row: it reads their last W − 1 inputs and the tokens, writes y, and then the new last inputs
over the old ones. Nothing waits for the host and nothing is allocated but ``y``, so a CUDA graph may hold it.
"""

# No `from __future__ import annotations` here: a custom op reads its types from them, and the tests' shape checker hides their names.

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweights.ops.tiles_triton import rows_side_by_side

CHANNELS, WARPS = 256, 2


@triton.jit
def input_at(x, state, s, c, inside, stride, CH, W: tl.constexpr):
    """The inputs at token s of the row, which is in its state where s < 0."""
    if s < 0:
        value = tl.load(state + (s + W - 1) * CH + c, mask=inside, other=0.0).to(tl.float32)
    else:
        value = tl.load(x + s * stride + c, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def step_kernel(
    x, weight, bias, state, y, T, CH, row_stride, token_stride, W: tl.constexpr, SILU: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = c < CH
    x += row * row_stride
    state += row * (W - 1) * CH
    for t in range(T):
        z = tl.zeros([BC], tl.float32)
        if bias is not None:
            z += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
        for w in tl.static_range(W):
            taps = tl.load(weight + c * W + w, mask=inside, other=0.0).to(tl.float32)
            z += taps * input_at(x, state, t - (W - 1) + w, c, inside, token_stride, CH, W)
        if SILU:
            z *= tl.sigmoid(z)
        tl.store(y + (row * T + t) * CH + c, z.to(y.dtype.element_ty), mask=inside)
    for i in tl.static_range(W - 1):  # upwards: place i takes what stands T places further on, which is still the old input
        value = input_at(x, state, T - (W - 1) + i, c, inside, token_stride, CH, W)
        tl.debug_barrier()  # other threads of this program may still read place i
        tl.store(state + i * CH + c, value.to(state.dtype.element_ty), mask=inside)


@torch.library.custom_op("fastweights::causal_conv_step_", mutates_args=("state",))
def _step(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, activation: bool) -> Tensor:
    (B, T, CH), W = x.shape, weight.shape[1]
    y = torch.empty(B, T, CH, dtype=x.dtype, device=x.device)
    if y.numel():
        step_kernel[(B, triton.cdiv(CH, CHANNELS))](
            x, weight, bias, state, y, T, CH, x.stride(0), x.stride(1), W=W, SILU=activation, BC=CHANNELS, num_warps=WARPS
        )
    return y


@_step.register_fake
def _shapes(x, weight, bias, state, activation):
    return x.new_empty(x.shape)


def causal_conv_step_triton_(x: Tensor, weight: Tensor, state: Tensor, *, bias: Tensor | None = None, activation: bool = True) -> Tensor:
    """As `causal_conv` over the few tokens given, overwriting ``state [B, W − 1, Ch]`` (dense, in x's dtype); returns y ``[B, T, Ch]``.

    Raises:
        ValueError: if the state is not dense or not of x's dtype, since a copy of it could not be updated in place.
    """
    if state.dtype != x.dtype or not state.is_contiguous():
        raise ValueError(f"an in-place step needs a dense state in {x.dtype}; got {state.dtype} with strides {tuple(state.stride())}")
    bias = None if bias is None else bias.contiguous()
    return _step(rows_side_by_side(x), weight.contiguous(), bias, state, activation)
