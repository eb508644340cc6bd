"""The cut into chunks: what goes in comes out, in the promised order, for any packing."""

import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastweights.ops.segments import Segments


def bounds(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def expected_chunks(x, lengths, C):
    """The layout by its definition, with Python lists."""
    documents = [d for d in x[0].split(list(lengths))]
    order = sorted(range(len(lengths)), key=lambda d: -math.ceil(lengths[d] / C))
    out = []
    for n in range(max(-(-length // C) for length in lengths)):
        for d in order:
            piece = documents[d][n * C : (n + 1) * C]
            if len(piece):
                out.append(torch.cat([piece, piece.new_zeros(C - len(piece), *piece.shape[1:])]).transpose(0, 1))
    return order, torch.stack(out) if out else x.new_zeros(0, x.shape[2], C, *x.shape[3:])


def assert_spans_are_the_whole(segments, x, limit):
    """Every chunk lies in exactly one span, spans keep to the limit where one moment does, and follow each other in time."""
    whole, joined = segments.cut(x), torch.full_like(x, torch.nan)
    first = {}  # of each row, the next moment
    offset, seen = 0, []
    for span in segments.spans(limit):
        assert span.offset == offset and span.chunks <= limit and 0 < span.rows <= limit
        chunks = span.cut(x)
        for i, step in enumerate(span.steps):
            for row, chunk in enumerate(chunks[step], span.top):
                assert first.get(row, 0) == span.first + i
                first[row] = span.first + i + 1
                moment = segments.steps[span.first + i]
                seen.append(moment.start + row)
                assert row < moment.stop - moment.start
                torch.testing.assert_close(chunk, whole[moment.start + row], rtol=0, atol=0)
        span.join(chunks, out=joined)
        offset += span.chunks
    assert sorted(seen) == list(range(segments.chunks))
    torch.testing.assert_close(joined, x, rtol=0, atol=0)


@given(st.lists(st.integers(0, 70), min_size=2, max_size=12), st.sampled_from([1, 3, 16]), st.data())
@settings(max_examples=60, deadline=None)
def test_packed_layout_is_its_definition(lengths, C, data):
    x = torch.randn(1, sum(lengths), 2, 3)
    segments = Segments.of(1, sum(lengths), bounds(lengths), C)
    assert segments.chunk == C
    order, chunks = expected_chunks(x, lengths, C)
    torch.testing.assert_close(segments.cut(x), chunks, rtol=0, atol=0)
    assert segments.order.tolist() == order
    torch.testing.assert_close(segments.join(chunks), x, rtol=0, atol=0)
    assert_spans_are_the_whole(segments, x, data.draw(st.integers(1, 9)))
    state = torch.randn(len(lengths), 4)
    torch.testing.assert_close(segments.unsort(segments.sort(state)), state, rtol=0, atol=0)
    assert segments.chunks == sum(-(-length // C) for length in lengths)


@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("T", [0, 1, 16, 40, 64])
@pytest.mark.parametrize("C", [1, 16])
def test_batch_is_cut_as_equal_documents(B, T, C):
    x = torch.randn(B, T, 2, 5)
    for y in (x, x[..., 0]):
        dense = Segments.of(B, T, chunk=C)
        chunks = dense.cut(y)
        if T and B > 1:
            packed = Segments.of(1, B * T, bounds([T] * B), C)
            torch.testing.assert_close(chunks, packed.cut(y.reshape(1, B * T, *y.shape[2:])), rtol=0, atol=0)
            assert dense.steps == packed.steps
        assert chunks.shape[:3] == (dense.chunks, 2, C) and dense.rows == B
        torch.testing.assert_close(dense.join(chunks), y, rtol=0, atol=0)
        for limit in (1, 2, 5, 100):
            assert_spans_are_the_whole(dense, y, limit)


def test_one_document_is_the_batch_of_one_and_short_documents_get_short_chunks():
    assert Segments.of(1, 200, torch.tensor([0, 200])) == Segments.of(1, 200)
    assert [Segments.of(1, T).chunk for T in (0, 1, 16, 17, 32, 33, 64, 1000)] == [16, 16, 16, 32, 32, 64, 64, 64]
    assert Segments.of(1, 40, bounds([17, 0, 23])).chunk == 32


def test_cut_and_join_change_dtype_take_strides_and_carry_gradients():
    x = torch.randn(2, 3, 40, 4, dtype=torch.float64).transpose(1, 2)
    segments = Segments.of(2, 40, chunk=16)
    assert segments.cut(x, torch.float32).dtype == torch.float32
    assert segments.join(segments.cut(x), torch.float32).dtype == torch.float32
    torch.testing.assert_close(segments.join(segments.cut(x)), x, rtol=0, atol=0)
    packed = Segments.of(1, 40, bounds([10, 30]), 16)
    for layout, y in ((segments, x), (packed, x[:1])):
        y = y.clone().requires_grad_()
        weight = torch.randn_like(y)
        (layout.join(layout.cut(y)) * weight).sum().backward()
        torch.testing.assert_close(y.grad, weight, rtol=0, atol=0)


def test_sort_never_aliases_the_state():
    state = torch.randn(3, 2)
    assert Segments.of(3, 64).sort(state).data_ptr() != state.data_ptr()
    assert Segments.of(1, 6, bounds([1, 2, 3])).sort(state).data_ptr() != state.data_ptr()


def test_seventy_thousand_documents_are_quick():
    lengths = torch.arange(70_000) % 4
    start = time.perf_counter()
    segments = Segments.of(1, int(lengths.sum()), bounds(lengths.tolist()))
    x = torch.randn(1, segments.tokens, 1, 2)
    torch.testing.assert_close(segments.join(segments.cut(x)), x, rtol=0, atol=0)
    assert segments.rows == 70_000 and segments.chunk == 16 and len(segments.steps) == 1
    assert time.perf_counter() - start < 20
