"""A_log, dt_bias, gates and norms: born float32, kept float32, never rounded."""

import copy

import pytest
import torch
from torch import nn

from fastweights.precision import Float32Linear, Float32Module, at_least_float32, digits, float32_parameters


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(3, 3, bias=False)
        self.gate = Float32Linear(3, 2)
        self.inner = Inner()


class Inner(Float32Module):
    def __init__(self):
        super().__init__()
        self.A_log = nn.Parameter(torch.rand(4, dtype=torch.float32))
        self.register_buffer("steps", torch.arange(3))
        self.gate = Float32Linear(2, 2, bias=False)


FLOAT32 = ["gate.weight", "gate.bias", "inner.A_log", "inner.gate.weight"]


@pytest.mark.parametrize(
    "cast", [lambda m: m.to(torch.bfloat16), lambda m: m.bfloat16(), lambda m: m.half(), lambda m: m.to("cpu", torch.float16)]
)
def test_half_casts_leave_float32_parameters_bit_equal(cast):
    block = Block()
    before = copy.deepcopy(dict(block.named_parameters()))
    identity = block.inner.A_log
    cast(block)
    assert block.proj.weight.dtype.itemsize == 2
    for name in FLOAT32:
        after = block.get_parameter(name)
        assert after.dtype == torch.float32 and after.requires_grad and torch.equal(after, before[name])
    assert block.inner.A_log is identity and block.inner.steps.dtype == torch.int64


def test_float64_is_followed_both_ways():
    block = Block().double()
    assert {p.dtype for p in block.parameters()} == {torch.float64}
    with torch.no_grad():
        block.inner.A_log.fill_(1 / 3)
    block.bfloat16()
    assert block.proj.weight.dtype == torch.bfloat16
    assert torch.equal(block.inner.A_log, torch.full((4,), 1 / 3, dtype=torch.float32))


def test_gradients_are_kept_too():
    block = Block()
    block.gate(torch.randn(5, 3)).sum().backward()
    before = block.gate.weight.grad.clone()
    block.bfloat16()
    assert block.gate.weight.grad.dtype == torch.float32 and torch.equal(block.gate.weight.grad, before)


def test_born_float32_under_any_default_dtype_and_on_meta():
    torch.set_default_dtype(torch.bfloat16)
    try:
        block = Block()
    finally:
        torch.set_default_dtype(torch.float32)
    assert block.proj.weight.dtype == torch.bfloat16
    assert {block.get_parameter(name).dtype for name in FLOAT32} == {torch.float32}
    with torch.device("meta"):
        block = Block()
    block = block.bfloat16()
    assert {p.device.type for p in block.parameters()} == {"meta"}
    block = block.to_empty(device="cpu")
    assert block.inner.A_log.device.type == "cpu" and block.inner.A_log.dtype == torch.float32


def test_gate_projections_leave_autocast_and_half_inputs():
    gate = Float32Linear(64, 8)
    x = torch.randn(5, 64)
    exact = gate(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(gate(x), exact)
    assert gate(x.bfloat16()).dtype == torch.float32
    assert torch.equal(gate(x.bfloat16()), gate(x.bfloat16().float()))
    assert gate(x.double()).dtype == torch.float64
    assert gate.to("meta")(x.to("meta")).shape == (5, 8)


def test_float32_parameters_are_listed_by_name():
    block = Block()
    assert dict(float32_parameters(block)) == {name: block.get_parameter(name) for name in FLOAT32}


def test_at_least_float32():
    for dtype, expected in ((torch.float16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)):
        assert at_least_float32(torch.ones(2, dtype=dtype)).dtype == expected


def test_three_numbers_of_bfloat16_are_a_float32():
    """To the last digit, so that products of bfloat16 operands with them have lost nothing before they are added up."""
    x = torch.cat([torch.randn(500) * 10.0 ** torch.randint(-20, 20, (500,)), torch.tensor([0.0, -0.0, 1.0, 1 / 3, -(2.0**-100)])])
    parts = digits(x)
    assert parts.dtype == torch.bfloat16 and parts.shape == (3, len(x))
    assert torch.equal(parts.double().sum(0), x.double())
    assert (parts[0].abs() >= parts[1].abs()).all() and (parts[1].abs() >= parts[2].abs()).all()
    assert torch.equal(torch.compile(digits, backend="aot_eager")(x), parts)
