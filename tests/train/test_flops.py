import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.train.flops import peak_flops, training_flops

SHAPE = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "intermediate_size": 48}
T = 64


def model(mixer, **options):
    return FastWeightsForCausalLM(FastWeightsConfig(mixer=mixer, **SHAPE, **options))


def test_a_transformer_is_what_torch_counts():
    """Torch counts the products of a forward and backward pass, attention without its causal half."""
    transformer = model("softmax").train()
    ids = torch.zeros(1, T, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        transformer(ids, labels=ids, use_cache=False).loss.backward()
    parameters = sum(p.numel() for p in transformer.parameters() if p.dim() == 2)  # tied: the embedding is the head
    counts = counter.get_flop_counts()["Global"]
    products = sum(flops for op, flops in counts.items() if "mm" in str(op) and "bmm" not in str(op))
    assert products == 3 * 2 * parameters * T
    attention = 2 * 3 * 4 * 32 * (T + 1) / 2  # layers · passes · 4 D · mean context
    assert training_flops(transformer, T) == pytest.approx(products / T + attention)


def test_a_window_shortens_the_context():
    contexts = [min(t, 16) for t in range(1, T + 1)]
    fewer = training_flops(model("softmax"), T) - training_flops(model("softmax", window_size=16), T)
    assert fewer == pytest.approx(2 * 3 * 4 * 32 * ((T + 1) / 2 - sum(contexts) / T))


def test_memories_by_hand():
    """H = 2, K = 12, V = 24: qkv 32·96, gate and out 32·48, decay 32·2, η 32·2 in each layer; 4 taps on 96 channels."""
    shared = 2 * (32 * 96 + 2 * 32 * 48 + 32 * 2 + 3 * 32 * 48) + 100 * 32
    taps = 2 * 2 * 4 * 96
    assert training_flops(model("mamba2"), T) == 3 * (2 * shared + 2 * 5 * 2 * 12 * 24 + taps)
    delta = 3 * (2 * (shared + 2 * 32 * 2) + 2 * 7 * 2 * 12 * 24 + taps)
    assert training_flops(model("kla"), T) == delta
    assert training_flops(model("kla+ccq"), T) == delta + 3 * 2 * 5 * 2 * 12 * 12


def test_the_peak_is_known_or_none(monkeypatch):
    assert peak_flops(torch.device("cpu"), "bf16") is None
    for name, peak in (("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA Titan", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda"), "bf16") == peak
        assert peak_flops(torch.device("cuda"), "fp32") is None
