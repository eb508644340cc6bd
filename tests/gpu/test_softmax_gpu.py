"""Softmax over packed documents on a card: those that go together are what each is by itself, with their gradients."""

import itertools

import pytest
import torch

from fastweights.layers import SoftmaxAttention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LENGTHS = [700, 1, 0, 64, 65, 79, 80, 2049, 512, 511, 640, 3, 3, 1024]


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context")  # autograd's thread, the first time
@pytest.mark.parametrize("window", [None, 100])
def test_packed_documents_are_each_by_itself(window):
    """As training has it: float32 weights, under autocast to bfloat16. Against float64, they err no more than documents one by one do."""
    torch.manual_seed(0)
    layer = SoftmaxAttention(hidden_size=384, num_heads=6, window_size=window).cuda()
    bounds = torch.tensor([0, *itertools.accumulate(LENGTHS)], device="cuda")
    x = torch.randn(1, sum(LENGTHS), 384, device="cuda")
    dy = torch.randn_like(x)

    def run(how, dtype, autocast):
        mine = SoftmaxAttention(hidden_size=384, num_heads=6, window_size=window).to("cuda", dtype)
        mine.load_state_dict(layer.state_dict())
        leaf = x.to(dtype).requires_grad_()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            y = how(mine, leaf)
        return [y, *torch.autograd.grad(y, [leaf, *mine.parameters()], dy.to(y.dtype))]

    def packed(mine, leaf):
        return mine(leaf, cu_seqlens=bounds)[0]

    def apart(mine, leaf):
        return torch.cat([mine(piece)[0] for piece in leaf.split(LENGTHS, dim=1)], dim=1)

    exact, one_by_one, together = run(apart, torch.float64, False), run(apart, torch.float32, True), run(packed, torch.float32, True)
    for right, other, mine in zip(exact, one_by_one, together, strict=True):
        errors = [((got.double() - right).norm() / right.norm()).item() for got in (other, mine)]
        assert errors[1] <= 1.2 * errors[0] < 0.03
