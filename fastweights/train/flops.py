"""What a training step costs in arithmetic, and what share of a device's peak that is (model FLOP utilisation, MFU).

Model FLOPs are what the mathematics asks for, whatever an implementation does: activations computed twice do not count twice. A multiply
and an add are two. Per token and forward pass:

    2 · (parameters of all matrix products, the output projection included)
    decay memory   5·K·V a value head:  forget 1, write 2, read 2          delta memory  7·K·V:  and 2 to read what is erased
    CCQ            5·K²  a key head:    scale 1, write 2, product 2        convolution   2·taps a channel
    softmax        4·D · (mean context: half a window of training, or the layer's own window where that is shorter)

and a step of training is three forward passes (PaLM, arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

import torch
from torch import nn

from fastweights.layers import FastWeightAttention, SoftmaxAttention

PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}
"""Dense bf16 FLOP/s by what a CUDA device's name contains, from the makers' data sheets; the first that fits counts."""


def training_flops(model: nn.Module, sequence_length: int) -> float:
    """Model FLOPs a token of a training step. Layers it does not know cost their matrix products."""
    return 3.0 * (2 * _products(model) + sum(_mixing(module, sequence_length) for module in model.modules()))


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Dense FLOP/s of one device in that arithmetic, or None where nobody told us."""
    if device.type != "cuda" or precision != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def _products(model: nn.Module) -> int:
    return sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))


def _mixing(module: nn.Module, sequence_length: int) -> float:
    """Of a mixer, besides its matrix products."""
    if isinstance(module, SoftmaxAttention):
        window = min(sequence_length, module.window_size or sequence_length)
        context = window - window * (window - 1) / (2 * sequence_length)  # the mean of min(t, window) over t = 1 … sequence_length
        return 4 * module.hidden_size * context
    if not isinstance(module, FastWeightAttention):
        return 0.0
    H, K, V = module.num_heads, module.head_k_dim, module.head_v_dim
    memory = (7 if module.write.family == "delta" else 5) * module.num_value_heads * K * V
    covariance = 5 * H * K * K if module.read.name == "ccq" else 0
    return float(memory + covariance + 2 * module.conv.size * (2 * module.key_size + module.value_size))
