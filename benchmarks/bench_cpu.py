"""The chunkwise delta memory on the CPU against the torch fallback that transformers ships for Gated DeltaNet (Qwen3-Next).

    python benchmarks/bench_cpu.py [--rounds 15] [--output benchmarks/results/cpu.jsonl]

Both run in one process on the same inputs, turn by turn, so that a busy machine slows both; medians and their ratio are reported, with the
machine's load beside them in the rows. OMP_NUM_THREADS sets the number of threads. Before a shape is timed its results must pass: against
our own form in float64 (which the tests hold to the reference loop) every output and gradient errs at most twice as much as the peer's.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads would measure the other load of a busy machine

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from fastweights import records
from fastweights.notation import Coefficients
from fastweights.ops import delta

NAMES = ("q", "k", "v", "log_decay", "beta")
ULPS = 16
"""What a chunk's two sums of 64 rounded products may cost beyond that, in units in the last place of the largest number."""


class Shape(NamedTuple):
    B: int
    T: int
    H: int
    K: int
    V: int


BARS = {
    Shape(1, 2048, 4, 64, 64): {"forward": (1.3, 2.0), "forward+backward": (1.6, 3.0)},
    Shape(1, 4096, 8, 128, 128): {"forward": (1.3, 2.0), "forward+backward": (2.5, 3.0)},
}
"""For each shape how many times faster than the peer we must be, and aim to be."""


def ours(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    return delta(q, k, v, Coefficients(beta=beta, log_decay=log_decay), scale=q.shape[-1] ** -0.5, backend="torch")[0]


def peer(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    return torch_chunk_gated_delta_rule(q, k, v, log_decay, beta, output_final_state=True)[0]


def draw(shape: Shape, seed: int) -> tuple[list[Tensor], Tensor]:
    """Inputs as a model draws them (keys of unit length after a SiLU, decays as Mamba-2 initialises them), and an upstream gradient."""
    torch.manual_seed(seed)
    B, T, H, K, V = shape
    q, k = (F.normalize(F.silu(torch.randn(B, T, H, K)), dim=-1) for _ in range(2))
    v = F.silu(torch.randn(B, T, H, V))
    A, dt = 16 * torch.rand(H), torch.exp(torch.rand(H) * math.log(100) + math.log(1e-3))
    log_decay = -A * F.softplus(torch.randn(B, T, H) + dt.expm1().log())
    beta = torch.randn(B, T, H).sigmoid()
    return [x.requires_grad_() for x in (q, k, v, log_decay, beta)], torch.randn(B, T, H, V)


def results(form: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> dict[str, Tensor]:
    o = form(*inputs)
    return {"o": o.detach(), **dict(zip(NAMES, torch.autograd.grad(o, inputs, grad), strict=True))}


def parity(inputs: list[Tensor], grad: Tensor) -> None:
    """Stop unless our results are as good as the peer's."""
    exact = results(ours, [x.detach().double().requires_grad_() for x in inputs], grad.double())
    mine, theirs = results(ours, inputs, grad), results(peer, inputs, grad)
    for name, truth in exact.items():
        error, allowed = ((x[name] - truth).abs().max().item() for x in (mine, theirs))
        allowed = 2 * allowed + ULPS * torch.finfo(torch.float32).eps * truth.abs().max().item()
        if not error <= allowed:
            raise SystemExit(f"parity gate: {name} errs by {error:.3g}, allowed {allowed:.3g}; nothing was timed")


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(inputs: list[Tensor], grad: Tensor, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Times by pass and contestant, one of each every round."""
    times: dict[str, dict[str, list[float]]] = {p: {"ours": [], "peer": []} for p in ("forward", "forward+backward")}
    for _ in range(rounds):
        for name, form in (("ours", ours), ("peer", peer)):
            with torch.no_grad():
                times["forward"][name].append(seconds(lambda form=form: form(*inputs)))
            times["forward+backward"][name].append(seconds(lambda form=form: results(form, inputs, grad)))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="timings per pass and contestant, after the parity gate has warmed both up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="benchmarks/results/cpu.jsonl", help="rows are appended here")
    arguments = parser.parse_args()
    print(f"{'B, T, H, K, V':<24}{'pass':<18}{'ours ms':>9}{'peer ms':>9}{'ratio':>7}{'bar':>6}{'aim':>6}")
    for shape, bars in BARS.items():
        inputs, grad = draw(shape, arguments.seed)
        parity(inputs, grad)
        for name, times in measure(inputs, grad, arguments.rounds).items():
            mine, theirs = (1e3 * statistics.median(times[contestant]) for contestant in ("ours", "peer"))
            bar, aim = bars[name]
            print(f"{', '.join(map(str, shape)):<24}{name:<18}{mine:>9.1f}{theirs:>9.1f}{theirs / mine:>7.2f}{bar:>6}{aim:>6}", flush=True)
            row = {
                "benchmark": "chunk_delta",
                "peer": "transformers torch_chunk_gated_delta_rule",
                "shape": shape._asdict(),
                "dtype": "float32",
                "pass": name,
                "ours_ms": round(mine, 2),
                "peer_ms": round(theirs, 2),
                "ratio": round(theirs / mine, 3),
                "bar": bar,
                "aim": aim,
                "rounds": arguments.rounds,
                "load": round(os.getloadavg()[0], 1),
            }
            records.append_rows(arguments.output, [row | records.provenance(device="cpu", seed=arguments.seed)])


if __name__ == "__main__":
    main()
