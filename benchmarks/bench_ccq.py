"""CCQ's read, fused, on a CUDA device: parity first, then medians and the distance to the floor, as rows with their provenance.

    python benchmarks/bench_ccq.py [--output benchmarks/results/ccq-h200.jsonl]

The floor counts each tensor once: the forward reads k and q and writes q', and leaves k − b for the kernels after it; the backward reads
q, k − b and the gradient for dq, the first and last again for N, all three for dk, and writes dq and dk.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from torch.nn import functional as F

from fastweights.ops.ccq.query import ccq_query
from fastweights.records import append_rows, provenance

SHAPES = ((8, 8192, 8, 128), (1, 32_768, 16, 128), (1, 131_072, 4, 128))
COPY = 4.26e12
"""Bytes a second of a device-to-device copy, read and written, on an H200."""
TENSORS = {"forward": 5, "forward+backward": 15}


def median(run, repeats: int = 30) -> float:
    """Milliseconds."""
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[5:])


def parity() -> float:
    """The largest relative error of q' and the gradients in bfloat16, against the plain composition in float64."""
    q, k = (F.normalize(torch.randn(1, 300, 2, 128, device="cuda"), dim=-1).bfloat16() for _ in range(2))
    lam, upstream = torch.rand(1, 300, 2, device="cuda"), torch.randn(1, 300, 2, 128, device="cuda").bfloat16()
    results = []
    for backend, dtype in (("triton", torch.bfloat16), ("torch", torch.float64)):
        leaves = [q.to(dtype), k.to(dtype), lam.to(dtype if dtype == torch.float64 else torch.float32)]
        leaves = [x.detach().requires_grad_() for x in leaves]
        clean, _ = ccq_query(*leaves, backend=backend)
        results.append([clean, *torch.autograd.grad(clean, leaves, upstream.to(dtype))])
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(*results, strict=True))


def measure(shape: tuple[int, int, int, int]) -> list[dict]:
    q, k = (F.normalize(torch.randn(shape, device="cuda"), dim=-1).bfloat16().requires_grad_() for _ in range(2))
    lam = torch.rand(shape[:3], device="cuda", requires_grad=True)
    upstream = torch.randn(shape, device="cuda").bfloat16()

    def forward():
        with torch.no_grad():
            return ccq_query(q, k, lam)

    def both():
        return torch.autograd.grad(ccq_query(q, k, lam)[0], (q, k, lam), upstream)

    both()
    rows = []
    for work, run in (("forward", forward), ("forward+backward", both)):
        floor = TENSORS[work] * q.numel() * 2 / COPY * 1e3
        time = median(run)
        rows.append({"op": "ccq", "work": work, "shape": list(shape), "ms": time, "floor_ms": floor, "of_floor": time / floor})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="benchmarks/results/ccq-h200.jsonl")
    output = parser.parse_args().output
    torch.manual_seed(0)
    error = parity()
    assert error < 0.02, f"parity: relative error {error:.3g}"
    for shape in SHAPES:
        for row in measure(shape):
            print({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}, flush=True)
            append_rows(output, [row | {"parity_error": error} | provenance(seed=0)])


if __name__ == "__main__":
    main()
