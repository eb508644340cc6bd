"""The short depthwise causal convolution in front of q, k and v, with its SiLU, its state, and packed documents.

    y_t = silu(bias + Σ_{w<W} weight_w ∘ x_{t-(W-1)+w})

The last tap sees the token itself. Before its first token a sequence sees its state: the last W − 1 inputs of the piece before it, or
zeros. So each sequence is laid out behind its state, and one convolution without padding runs over all.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.ops import dispatch
from fastweights.ops.checks import DTYPES, check_cu_seqlens, check_dtype, check_same_device, check_shape
from fastweights.ops.heads import working_dtype

PIECE = 2**17
"""On a CPU about this many numbers are worked on at a time."""


def causal_conv(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: bool = True,
) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution of width W along T, and SiLU unless ``activation=False``.

    Args:
        x: ``[B, T, Ch]``; any T.
        weight: ``[Ch, W]``, any W ≥ 1; as `torch.nn.Conv1d` has it, without its middle dimension. bias: ``[Ch]``.
        state: the last W − 1 inputs before x, oldest first ``[R, W − 1, Ch]``; None is zeros. R is B, or the number of documents.
        cu_seqlens: bounds of documents packed into one row ``[documents + 1]``; B must be 1. No tap crosses a document's start.

    Returns:
        y ``[B, T, Ch]`` in x's dtype (computed in float32 at least), and the new state, in x's dtype and fresh. Both are differentiable,
        once, in x, weight, bias and state; the backward keeps its operands and nothing else.

    Raises:
        ValueError: for shapes, dtypes, devices or bounds that do not fit.
    """
    _check(x, weight, bias, state, cu_seqlens)
    past = weight.shape[1] - 1
    kernels = _kernels("causal", x)
    if not isinstance(kernels, str):
        return kernels.causal_conv_triton(x, weight, bias=bias, state=state, cu_seqlens=cu_seqlens, activation=activation)
    if cu_seqlens is None:
        state = x.new_zeros(len(x), past, x.shape[2]) if state is None else state.to(x.dtype)
        laid = torch.cat([state, x], dim=1)
        return _convolve(laid, weight, bias, activation), laid[:, x.shape[1] :].clone(memory_format=torch.contiguous_format)
    layout = _Layout.of(cu_seqlens.to(x.device), x.shape[1], past)
    laid = x.new_zeros(x.shape[1] + layout.before.numel(), x.shape[2])
    laid.index_copy_(0, layout.tokens, x[0])
    if state is not None:
        laid.index_copy_(0, layout.before.flatten(), state.flatten(0, 1).to(x.dtype))
    y = _convolve(laid.unsqueeze(0), weight, bias, activation)
    return y.index_select(1, layout.tokens - past), laid[layout.after]


@torch.no_grad()
def causal_conv_step_(x: Tensor, weight: Tensor, state: Tensor, *, bias: Tensor | None = None, activation: bool = True) -> Tensor:
    """A few tokens of `causal_conv`, for inference: overwrites ``state [B, W − 1, Ch]`` and returns y ``[B, T, Ch]``; no gradients."""
    _check(x, weight, bias, state, None)
    kernels = _kernels("step", x)
    if not isinstance(kernels, str) and state.dtype == x.dtype:
        return kernels.causal_conv_step_triton_(x, weight, state, bias=bias, activation=activation)
    y, new = causal_conv(x, weight, bias=bias, state=state, activation=activation)
    state.copy_(new)
    return y


def _kernels(form: str, x: Tensor) -> ModuleType | str:
    """The module of the kernels for x, or why there is none."""
    return dispatch.twin("conv", form) if x.is_cuda and x.dtype != torch.float64 else "no CUDA tensor"


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, cu_seqlens: Tensor | None) -> None:
    sizes: dict[str, int] = {}
    check_shape("x", x, "B T Ch", sizes)
    check_shape("weight", weight, "Ch W", sizes)
    if sizes["W"] < 1:
        raise ValueError("weight must have at least one tap, W ≥ 1; got W = 0")
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, sizes["B"], sizes["T"])
    if bias is not None:
        check_shape("bias", bias, "Ch", sizes)
    if state is not None:
        sizes |= {"R": sizes["B"] if cu_seqlens is None else len(cu_seqlens) - 1, "W−1": sizes["W"] - 1}
        check_shape("state", state, "R W−1 Ch", sizes)
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias), ("state", state)):
        if tensor is not None:
            check_dtype(name, tensor, DTYPES)
    check_same_device(x=x, weight=weight, bias=bias, state=state)


class _Layout(NamedTuple):
    """Where things lie when every document stands behind its W − 1 rows of state."""

    tokens: Tensor
    """The row of every token ``[T]``."""
    before: Tensor
    """The rows of every document's state ``[R, W − 1]``."""
    after: Tensor
    """The last W − 1 rows of every document: its next state ``[R, W − 1]``."""

    @staticmethod
    def of(cu_seqlens: Tensor, tokens: int, past: int) -> "_Layout":
        bounds = cu_seqlens.long()
        rows = len(bounds) - 1
        device = bounds.device
        document = torch.arange(rows, device=device)
        of_token = torch.repeat_interleave(document, bounds.diff(), output_size=tokens)
        taps = torch.arange(past, device=device)
        return _Layout(
            tokens=torch.arange(tokens, device=device) + (of_token + 1) * past,
            before=(bounds[:-1] + document * past).unsqueeze(-1) + taps,
            after=(bounds[1:] + document * past).unsqueeze(-1) + taps,
        )


@torch.library.custom_op("fastweights::causal_conv", mutates_args=())
def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, activation: bool) -> Tensor:
    """``[B, W − 1 + T, Ch] -> [B, T, Ch]``."""
    y = x.new_empty(x.shape[0], x.shape[1] - weight.shape[1] + 1, x.shape[2])
    for piece in _pieces(y):
        z = _taps(x, weight, bias, piece)
        y[:, piece] = F.silu(z, inplace=True) if activation else z
    return y


@_convolve.register_fake
def _(x, weight, bias, activation):
    return x.new_empty(x.shape[0], x.shape[1] - weight.shape[1] + 1, x.shape[2])


@torch.library.custom_op("fastweights::causal_conv_backward", mutates_args=())
def _convolve_backward(x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor, activation: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias (there is one even where bias is None)."""
    real = working_dtype(x)
    dx = torch.zeros_like(x, dtype=real, memory_format=torch.contiguous_format)
    dbias, *dtaps = x.new_zeros((weight.shape[1] + 1, weight.shape[0]), dtype=real)
    for piece in _pieces(dy):
        dz = dy[:, piece].to(real)
        if activation:
            z = _taps(x, weight, bias, piece)
            s = z.sigmoid()
            dz = dz * s.addcmul_(z.mul_(1 - s), s)  # silu' = s + z s (1 − s)
        dbias += dz.sum((0, 1))
        for w, (tap, dtap) in enumerate(zip(weight.t().to(real).contiguous(), dtaps, strict=True)):
            seen = slice(piece.start + w, piece.stop + w)
            dx[:, seen].addcmul_(dz, tap)
            dtap += (dz * x[:, seen]).sum((0, 1))
    return dx.to(x.dtype), torch.stack(dtaps, dim=1).to(weight.dtype), dbias.to(weight.dtype if bias is None else bias.dtype)


@_convolve_backward.register_fake
def _(x, weight, bias, dy, activation):
    dx, dweight = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, weight))
    return dx, dweight, (weight if bias is None else bias).new_empty(len(weight))


def _save(ctx, inputs, output):
    *operands, ctx.activation = inputs
    ctx.save_for_backward(*operands)


def _differentiate(ctx, dy):
    x, weight, bias = ctx.saved_tensors
    dx, dweight, dbias = _convolve_backward(x, weight, bias, dy, ctx.activation)
    return dx, dweight, None if bias is None else dbias, None


_convolve.register_autograd(_differentiate, setup_context=_save)


def _taps(x: Tensor, weight: Tensor, bias: Tensor | None, piece: slice) -> Tensor:
    """y of the tokens in ``piece`` before the activation, in float32 at least."""
    real = working_dtype(x)
    first, *others = weight.t().to(real).contiguous()
    z = x[:, piece] * first
    if bias is not None:
        z += bias
    for w, tap in enumerate(others, start=1):
        z.addcmul_(x[:, piece.start + w : piece.stop + w].to(real), tap)
    return z


def _pieces(y: Tensor) -> Iterator[slice]:
    """The tokens of y ``[B, T, Ch]`` in pieces that a CPU's cache holds; on another device in one."""
    T = y.shape[1]
    size = max(1, PIECE // max(1, y.shape[0] * y.shape[2])) if y.device.type == "cpu" else max(1, T)
    return (slice(start, min(start + size, T)) for start in range(0, T, size))
