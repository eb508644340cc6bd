"""CCQ's read on a CUDA device, fused, and decode steps of delta with it in one launch and in two: parity first, then medians and the
distance to the floor, as rows with their provenance.

    python benchmarks/bench_ccq.py [--output benchmarks/results/ccq-h200.jsonl]

The floor counts each tensor once: the forward reads k and q and writes q', and leaves k − b for the kernels after it; the backward reads
q, k − b and the gradient for dq, the first and last again for N, all three for dk, and writes dq and dk. A step reads and writes C and S.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from torch.nn import functional as F

from fastweights.notation import CCQState, Coefficients
from fastweights.ops import ccq_query, ccq_step_, delta_ccq_step_, delta_step_
from fastweights.records import append_rows, provenance

SHAPES = ((8, 8192, 8, 128), (1, 32_768, 16, 128), (1, 131_072, 4, 128))
ROWS, STEP = (1, 8, 64, 256), (16, 128)
"""Rows of a step; its heads, and K = V."""
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
            return ccq_query(q, k, lam, backend="triton")

    def both():
        return torch.autograd.grad(ccq_query(q, k, lam, backend="triton")[0], (q, k, lam), upstream)

    both()
    rows = []
    for work, run in (("forward", forward), ("forward+backward", both)):
        floor = TENSORS[work] * q.numel() * 2 / COPY * 1e3
        time = median(run)
        rows.append({"op": "ccq", "work": work, "shape": list(shape), "ms": time, "floor_ms": floor, "of_floor": time / floor})
    return rows


def two_steps_(q, k, v, coef, lam, memory, moments, *, backend):
    clean = ccq_step_(q, k, lam, moments, key_scale=coef.key_scale, backend=backend)
    return delta_step_(clean, k, v, coef, memory, backend=backend)


LAUNCHES = {"step, one launch": delta_ccq_step_, "step, two launches": two_steps_}


def step_operands(rows: int, heads: int, K: int) -> tuple:
    """One token a row as KLA makes it, bfloat16: q, k, v, coefficients, λ."""
    q = F.normalize(torch.randn(rows, 1, heads, K, device="cuda"), dim=-1).bfloat16()
    k, v = (F.silu(torch.randn(rows, 1, heads, K, device="cuda")).bfloat16() for _ in range(2))
    inverse_norm = (k.float().square().sum(-1) + 1e-6).rsqrt()
    beta, log_decay = torch.rand(rows, 1, heads, device="cuda"), -torch.rand(rows, 1, heads, device="cuda")
    return q, k, v, Coefficients(beta, log_decay, inverse_norm, inverse_norm.clone()), torch.rand(rows, 1, heads, device="cuda")


def step_states(rows: int, heads: int, K: int) -> tuple[torch.Tensor, CCQState]:
    root = torch.randn(rows, heads, K, K, device="cuda") * K**-0.5
    w = torch.full((rows, heads), 100.0, device="cuda")
    return torch.randn_like(root), CCQState(root @ root.mT, torch.randn(rows, heads, K, device="cuda") * 0.1, w)


def step_parity(step) -> float:
    """The largest relative error of o and the states after a step, against two plain steps in float64."""
    operands, (memory, moments) = step_operands(2, 4, 128), step_states(2, 4, 128)
    exact = [
        x.double() if torch.is_tensor(x) else type(x)(*(y if y is None else y.double() for y in x)) for x in (*operands, memory, moments)
    ]
    found = [step(*operands, memory, moments, backend="triton"), memory, *moments]
    truth = [two_steps_(*exact, backend="torch"), exact[-2], *exact[-1]]
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, truth, strict=True))


def measure_step(rows: int, step) -> dict:
    """From a CUDA graph of many steps, which take turns on more states than the cache holds."""
    heads, K = STEP
    operands = step_operands(rows, heads, K)
    states = [step_states(rows, heads, K) for _ in range(max(2, 256 // rows))]

    def run():
        for memory, moments in states:
            step(*operands, memory, moments, backend="triton")

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    floor = 2 * 2 * 4 * rows * heads * K * K / COPY * 1e3
    time = median(graph.replay) / len(states)
    return {"shape": [rows, 1, heads, K], "ms": time, "floor_ms": floor, "of_floor": time / floor}


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
    for work, step in LAUNCHES.items():
        error = step_parity(step)
        assert error < 0.02, f"parity of {work}: relative error {error:.3g}"
        for count in ROWS:
            row = {"op": "delta+ccq", "work": work, **measure_step(count, step)}
            print({name: round(value, 5) if isinstance(value, float) else value for name, value in row.items()}, flush=True)
            append_rows(output, [row | {"parity_error": error} | provenance(seed=0)])


if __name__ == "__main__":
    main()
