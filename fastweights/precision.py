"""Parameters that must act in float32 whatever the model's dtype is: decays, gates, norms.

bfloat16 has 8 bits of mantissa: a decay of 0.999 rounds to 1, and a step of the optimiser on A_log is lost. So these parameters are
*born* float32 under any default dtype, *stay* float32 under ``.to(torch.bfloat16)``, and their arithmetic leaves autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def at_least_float32(x: Tensor) -> Tensor:
    """``x`` in float32, or as it is when it is float64."""
    return x if x.dtype == torch.float64 else x.float()


def outside_autocast(x: Tensor) -> AbstractContextManager[None]:
    """A context in which autocast leaves operations on x's device alone."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):  # there is none for the meta device, and no other that tensors of ours are on
        return torch.autocast(kind, enabled=False)
    return nullcontext()


MANY = 64
"""Tokens a row from which on a float32 product is worth three of bfloat16 on a GPU: there it has no tensor cores, and takes 35 µs where
reading its operand takes 6 (8,192 tokens of 1,536 channels on an H200)."""


def for_gates(x: Tensor) -> Tensor:
    """x as a `Float32Linear` works with it, for several of them: float32 or float64, or bfloat16 where that multiplies it in digits."""
    digit_by_digit = x.is_cuda and x.dtype == torch.bfloat16 and x.dim() == 3 and x.shape[1] >= MANY and not torch.is_grad_enabled()
    return x if digit_by_digit else at_least_float32(x)


def digits(x: Tensor) -> Tensor:
    """float32 x as three numbers of bfloat16 that add up to it, exactly above 1e-33, the largest first ``[3, *x.shape]``."""
    parts = []
    for _ in range(3):
        # Eight digits, cut off by their bits: of a cast there and back torch's compiler makes nothing.
        high = (x.view(torch.int32) & -65536).view(torch.float32)
        parts.append(high.bfloat16())
        x = x - high
    return torch.stack(parts)


class Float32Module(nn.Module):
    """A module whose own parameters keep float32 when the model is cast to a half precision; float64 is followed."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Float32Module:
        def keep(x: Tensor) -> Tensor:
            if x.is_floating_point() and fn(x.new_empty(0)).dtype.itemsize < 4:
                # A cast leaves integers alone, so the bits travel as integers: moved to the new device, never rounded.
                return fn(x.float().view(torch.int32)).view(torch.float32)
            return fn(x)

        return super()._apply(keep, recurse)


class Float32Linear(Float32Module, nn.Linear):
    """A projection to gates, ``[..., in] -> [..., out]`` in float32 (float64 for float64 input), outside autocast. Biases start at 0."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias, dtype=torch.float32)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = for_gates(x)
        if x.dtype == torch.bfloat16:
            return self._in_digits(x)
        weight, bias = self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)
        if torch.compiler.is_compiling() and x.dim() == 3 and x.shape[1] == 1:
            # A token a row: the compiler joins a sum with all gates around it, while a matmul of a dozen columns is a launch of its own.
            y = (x.unsqueeze(-2) * weight).sum(-1)
            return y if bias is None else y + bias
        with outside_autocast(x):
            return F.linear(x, weight, bias)

    def _in_digits(self, x: Tensor) -> Tensor:
        """`forward` of bfloat16 as it is: three products of bfloat16 on the tensor cores, added up in float32."""
        weight = F.pad(self.weight, (0, 0, 0, -len(self.weight) % 8))  # cuBLAS has no fast kernel for other numbers of columns
        with outside_autocast(x):
            y = torch.mm(x.flatten(0, -2), digits(weight).flatten(0, 1).t(), out_dtype=torch.float32)
        high, middle, low = y.unflatten(-1, (3, -1))[..., : len(self.weight)].unbind(-2)
        y = (low + middle + high).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias


def float32_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters that act in float32 and take no weight decay: all that a `Float32Module` inside ``module`` owns."""
    for prefix, child in module.named_modules():
        if isinstance(child, Float32Module):
            yield from child.named_parameters(prefix, recurse=False)
