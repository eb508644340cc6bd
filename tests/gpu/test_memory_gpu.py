"""One odd shape of every kernel, small enough for compute-sanitizer, under which a launch takes seconds: `make test-gpu-memcheck`."""

from functools import partial

import pytest
import torch

from tests.gpu import test_ccq_gpu as ccq
from tests.gpu import test_ccq_step_gpu as ccq_step
from tests.gpu import test_conv_gpu as conv
from tests.gpu import test_decay_gpu as decay
from tests.gpu import test_delta_gpu as delta
from tests.gpu import test_token_gpu as token
from tests.ops.ccq_step_cases import draw
from tests.ops.grid import Case, bounds, make

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from fastweights.ops.delta.chunk_triton import tiles_for

ODD = {"T": 139, "K": 100, "V": 72, "heads": (1, 2), "rows": "packed"}
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


@DTYPES
@pytest.mark.parametrize("segment", [0, 128, -128], ids=["whole", "split", "kept"])
def test_delta(segment, dtype):
    problem = delta.on_card(make(Case(**ODD, dtype=dtype, beta="over-relaxed", decay="mixed")))
    tiles = tiles_for(problem.q, problem.k, problem.v)._replace(segment=segment)
    delta.right(problem, tiles=tiles)


@DTYPES
@pytest.mark.parametrize("gates, segment", [("mixed", 0), ("mixed", 128), ("channel mixed", 0)])
def test_decay(gates, segment, dtype):
    tile = (decay.CHANNEL_TILES if gates.startswith("channel") else decay.TILES)[dtype.itemsize, 128]
    problem = delta.on_card(make(Case(**ODD, dtype=dtype, decay=gates, beta=None)))
    decay.check(partial(decay.chunk_decay_triton, tile=tile._replace(segment=segment)), problem)


@DTYPES
@pytest.mark.parametrize("segment", [0, 128])
def test_ccq(segment, dtype):
    lengths = [0, 1, 5, 0, 64, 69, 0]
    x = ccq.draw(T=sum(lengths), B=1, K=100, dtype=dtype, state=True, rows=len(lengths)) | {"cu_seqlens": bounds(lengths)}
    ccq.check(x, tiles=ccq.TILES[dtype.itemsize, 128]._replace(segment=segment))


@DTYPES
@pytest.mark.parametrize("T", [1, 5])
def test_steps(T, dtype):
    delta.test_step_in_a_graph(rows=3, K=100, V=72, T=T)
    decay.test_step_is_the_recurrence(dtype, T, "channel")
    ccq.test_step_is_the_loop_in_place(T, 100, dtype, True)
    ccq_step.right(draw(Case(T=T, K=100, V=72, heads=(2, 4), rows="two", dtype=dtype, decay="mixed", scales=ccq_step.KEYS)))


@DTYPES
def test_conv(dtype):
    conv.test_it_is_torchs_convolution(65, 7, True, True, dtype)
    conv.test_packed_documents_are_the_documents_apart(dtype)
    conv.test_steps_in_place_are_torchs_convolution(2, 7, 3, True, dtype)


def test_token():
    token.test_head_dots(3, 65, 1, 20, True, torch.bfloat16)
    token.test_the_gradient_of_squares(torch.bfloat16)
    token.test_gates_of_bfloat16_have_the_digits_of_float32(True)
    token.test_projections_of_one_token(100, 7, 3, torch.bfloat16)
    token.test_both_halves_of_a_gated_projection(100, 7, torch.bfloat16)
