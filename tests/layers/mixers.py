"""What the tests of layers loop over: every write with every read, small, in a layer whose every part is at work."""

import torch

from fastweights.layers import FastWeightAttention, SoftmaxAttention
from fastweights.read import READ_RULES
from fastweights.write import WRITE_RULES

STATELESS = ("projection",)
"""Reads that see the query alone: one write rule is as good as another for them."""
MIXERS = [
    write if read == "raw" else f"{write}+{read}" for write in WRITE_RULES for read in READ_RULES if read not in STATELESS or write == "kla"
]
D, H, K, V = 16, 2, 8, 6


def build(mixer: str, *, num_value_heads: int = H, **options) -> FastWeightAttention:
    """The same parameters each time, none of them where it starts by convention (zeros, ones): a part without effect would be invisible."""
    torch.manual_seed(0)
    if num_value_heads != H and mixer == "longhorn+ccq":
        options.setdefault("ccq_unit_keys", True)
    layer = FastWeightAttention(
        hidden_size=D, num_heads=H, num_value_heads=num_value_heads, head_k_dim=K, head_v_dim=V, mixer=mixer, **options
    )
    return _perturbed(layer)


def build_softmax(**options) -> SoftmaxAttention:
    torch.manual_seed(0)
    return SoftmaxAttention(hidden_size=D, num_heads=H, **options)


def _perturbed(layer):
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return layer


def tensors_of(state) -> list[torch.Tensor]:
    """Every tensor in a state, however nested."""
    if state is None:
        return []
    return [state] if isinstance(state, torch.Tensor) else [t for part in state for t in tensors_of(part)]


def join(states):
    """The rows of several states as one."""
    first = states[0]
    if first is None:
        return None
    return torch.cat(states) if isinstance(first, torch.Tensor) else type(first)(*(join(parts) for parts in zip(*states, strict=True)))


def close(actual, expected, digits=1e-10):
    assert actual.shape == expected.shape
    scale = expected.abs().max() if expected.numel() else 0
    assert not actual.numel() or (actual - expected).abs().max() <= digits * max(scale, 1)
