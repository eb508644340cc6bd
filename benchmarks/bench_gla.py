"""Tiles of the ``decay`` kernels for a decay per channel, as in GLA, on a CUDA device: errors, then medians, as rows with their provenance.

    python benchmarks/bench_gla.py [--output benchmarks/results/gla-h200.jsonl]

Errors are the largest of each tensor over its largest number, in a segment of 512 tokens, against the float32 torch form. First, in a
process of its own, come chunks of 16 whose scores are all summed channel by channel, the way of strong decays, for comparison.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from fastweights.notation import Coefficients
from fastweights.ops.decay import chunk_backward_triton, chunk_forward_triton
from fastweights.ops.decay.chunk import chunk_decay
from fastweights.ops.decay.chunk_triton import chunk_decay_triton
from fastweights.ops.decay.segments_triton import Tile
from fastweights.records import append_rows, provenance

SMALL = Tile(16, 64, 4, 1)
TILES = (SMALL, Tile(32, 64, 4, 1), Tile(64, 64, 8, 1), Tile(64, 64, 4, 1))
SHAPES = ((16, 4096, 6, 64, 64), (8, 4096, 8, 128, 128))
"""B, T, H, K, V: a layer of 24 M parameters, and one of a larger model."""
CHECKED, REPEATS = 512, 20
NAMES = ("o", "final", "dq", "dk", "dv", "dg")


@triton.jit
def never(logs, PRECISION: tl.constexpr):
    """Takes the place of `is_mild`: no chunk is."""
    return tl.min(tl.sum(logs, 0), 0) > 1.0


def operands(B: int, T: int, H: int, K: int, V: int) -> list[Tensor]:
    """q, k, v in bfloat16, log decays as GLA's gates start, and what flows back into o."""
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(B, T, H, size, device="cuda").bfloat16() for size in (K, K, V, V))
    return [q, k, v, F.logsigmoid(torch.randn(B, T, H, K, device="cuda")) / 16, do]


def results(form: Callable, q: Tensor, k: Tensor, v: Tensor, g: Tensor, do: Tensor) -> list[Tensor]:
    """o, the final state, and the gradients of q, k, v and the log decay."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v, g)]
    o, final = form(*leaves[:3], Coefficients(log_decay=leaves[3]), scale=q.shape[3] ** -0.5)
    return [o.detach(), final.detach(), *torch.autograd.grad([o], leaves, [do.to(o.dtype)])]


def errors(got: list[Tensor], truth: list[Tensor]) -> dict[str, float]:
    found = {}
    for name, x, y in zip(NAMES, got, truth, strict=True):
        found[name] = float(f"{((x.float() - y.float()).abs().max() / y.float().abs().max()).item():.3g}")
    return found


def median(call: Callable[[], object]) -> float:
    """Milliseconds."""
    times = []
    for _ in range(3 + REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return round(statistics.median(times[3:]), 4)


def measure(shape: tuple[int, int, int, int, int], tile: Tile, way: str) -> dict:
    B, _, H, K, V = shape

    def form(*args, segment=0, **named):
        return chunk_decay_triton(*args, tile=tile._replace(segment=segment), **named)

    checked = partial(form, segment=CHECKED)
    small, full = operands(min(B, 2), CHECKED, H, K, V), operands(*shape)
    truth, got, again = results(chunk_decay, *(x.float() for x in small)), results(checked, *small), results(checked, *small)
    with torch.no_grad():
        forward = median(lambda: form(*full[:3], Coefficients(log_decay=full[3]), scale=K**-0.5))
    return {
        "op": "decay per channel",
        "shape": list(shape),
        "way": way,
        "tile": list(tile[:4]),
        "errors": errors(got, truth),
        "same_bits_twice": all(torch.equal(x, y) for x, y in zip(got, again, strict=True)),
        "forward_ms": forward,
        "forward_backward_ms": median(lambda: results(form, *full)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="benchmarks/results/gla-h200.jsonl")
    parser.add_argument("--by-channels", action="store_true", help="only the way of strong decays")
    settings = parser.parse_args()
    if settings.by_channels:
        chunk_forward_triton.is_mild = chunk_backward_triton.is_mild = never
    else:
        subprocess.run([sys.executable, __file__, "--by-channels", "--output", settings.output], check=True)
    way = "by channels" if settings.by_channels else "products"
    for shape in SHAPES:
        for tile in (SMALL,) if settings.by_channels else TILES:
            row = measure(shape, tile, way) | provenance(device="cuda", seed=0)
            print(row["shape"], row["way"], row["tile"], row["forward_ms"], row["forward_backward_ms"], row["errors"], flush=True)
            append_rows(settings.output, [row])


if __name__ == "__main__":
    main()
