"""The small parts: norm, feed-forward, short convolution."""

import pytest
import torch
from torch.nn import functional as F

from fastweights.layers import RMSNorm, SwiGLU
from fastweights.layers.conv import ShortConv
from fastweights.layers.linear import plain


def test_norm_is_its_equation_with_and_without_a_gate():
    norm = RMSNorm(6, eps=0.1).double()
    torch.nn.init.uniform_(norm.weight)
    x, gate = torch.randn(2, 3, 4, 6, dtype=torch.float64), torch.randn(2, 3, 4, 6, dtype=torch.float64)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 0.1).sqrt() * norm.weight
    assert torch.allclose(norm(x), expected, rtol=1e-14)
    assert torch.allclose(norm(x, gate), expected * gate * torch.sigmoid(gate), rtol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_norm_is_float32_inside_and_the_input_dtype_outside(dtype):
    norm = RMSNorm(64).to(dtype)
    x = (100 * torch.randn(3, 64)).to(dtype)  # float16 squares of 300 overflow
    y = norm(x)
    assert norm.weight.dtype == torch.float32 and y.dtype == dtype
    assert torch.equal(y, norm(x.float()).to(dtype))
    assert torch.equal(norm(torch.zeros(2, 64, dtype=dtype)), torch.zeros(2, 64, dtype=dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(norm(x.float()), norm(x.float()))


def test_swiglu_is_its_equation():
    mlp = SwiGLU(6, 10).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    gate, up, down = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
    z = x @ gate.T
    assert torch.allclose(mlp(x), (z * torch.sigmoid(z) * (x @ up.T)) @ down.T, rtol=1e-12)


def test_whoever_hooks_into_a_projection_or_takes_its_place_is_asked():
    mlp, x = SwiGLU(6, 10), torch.randn(2, 3, 6)
    expected, down, called = mlp(x), mlp.down_proj, []
    for register in (down.register_forward_hook, down.register_forward_pre_hook, down.register_full_backward_hook):
        hook = register(lambda *_, name=register.__name__: called.append(name))
        mlp(x).sum().backward()
        hook.remove()
    down.forward = lambda x: called.append("forward") or F.linear(x, down.weight)
    mlp(x)
    del down.forward

    class Adapter(torch.nn.Linear):
        def forward(self, x):
            called.append("adapter")
            return F.linear(x, down.weight)

    class Quantised(torch.Tensor):
        pass

    mlp.down_proj = Adapter(10, 6, bias=False)
    assert torch.equal(mlp(x), expected)
    assert called == ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook", "forward", "adapter"]
    assert plain(down)
    down.weight = torch.nn.Parameter(down.weight.detach().as_subclass(Quantised))
    assert not plain(down)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_short_convolution_is_torch_conv1d(size):
    conv, x = ShortConv(5, size).double(), torch.randn(2, 9, 5, dtype=torch.float64)
    expected = F.silu(F.conv1d(F.pad(x.mT, (size - 1, 0)), conv.weight.unsqueeze(1), groups=5)).mT
    y, state = conv(x)
    assert torch.allclose(y, expected, rtol=1e-12)
    assert state.shape == (2, size - 1, 5) and torch.equal(state, x[:, 9 - (size - 1) :])


def test_no_convolution_is_only_the_activation():
    conv, x = ShortConv(5, 0), torch.randn(2, 9, 5)
    y, state = conv(x)
    assert torch.equal(y, F.silu(x)) and state is None and conv.initial_state(2, None, None) is None and not list(conv.parameters())
