"""Parts of a projection, and how their gradients are joined."""

import pytest
import torch

from fastweights.ops.token.columns import join_columns, split_columns

SIZES = (3, 5, 2)


def loss(x):
    a, b, c = split_columns(x, SIZES)
    return (a.sin().sum() + (b * b).sum()) + 0 * c.sum()


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's compiler, of a part of torch
def test_compiled_and_plain_have_the_same_gradient():
    x = torch.randn(2, 7, sum(SIZES), requires_grad=True)
    (plain,) = torch.autograd.grad(loss(x), x)
    (compiled,) = torch.autograd.grad(torch.compile(loss, fullgraph=True)(x), x)
    expected = torch.cat([x[..., :3].cos(), 2 * x[..., 3:8], torch.zeros(2, 7, 2)], dim=-1)
    for got in (plain, compiled):
        torch.testing.assert_close(got, expected.detach())


def test_parts_are_views():
    x = torch.randn(2, 7, sum(SIZES))
    for part, whole in zip(split_columns(x, SIZES), x.split(SIZES, dim=-1), strict=True):
        assert part.data_ptr() == whole.data_ptr() and torch.equal(part, whole)


def test_fake_shapes_are_the_real_ones():
    torch.library.opcheck(join_columns, ([torch.randn(2, 3), torch.randn(2, 5)],), test_utils=("test_schema", "test_faketensor"))
