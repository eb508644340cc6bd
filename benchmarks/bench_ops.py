"""Times of our kernels beside other people's, and beside what the card allows, on one GPU.

    python benchmarks/bench_ops.py                    # everything, ours alone
    python benchmarks/bench_ops.py --peers fla flashqla   # beside Flash Linear Attention (FLA_FLASH_QLA=0) and FlashQLA, a process each
    python benchmarks/bench_ops.py --only forward/long

A parity gate runs first: nothing is timed that does not agree with the float64 reference. Rows go to benchmarks/results/ops-<card>.jsonl,
which is also written out as .csv and as a plot. Times are medians over runs queued back to back on fresh random data larger than the cache.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.notation import Coefficients
from fastweights.ops import ccq_query
from fastweights.ops.dispatch import decay, delta, delta_step_
from fastweights.ops.reference import reference_decay, reference_delta
from fastweights.records import append_rows, provenance, read_rows

RESULTS = Path(__file__).resolve().parent / "results"
COPY, MATMUL = 4.26e12, 7.4e14
"""What an H200 measured: bytes a second of a large copy, bfloat16 FLOP a second of a large product."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One line of the table."""

    name: str
    kind: str
    """forward, forward+backward, step (one token, in a CUDA graph) or first (the first call of forward+backward, empty cache)."""
    shape: tuple[int, int, int, int, int]
    """B, T, H, K, V."""
    read: str = "raw"
    """raw, or ccq: the query contracted by the keys' covariance first."""
    rule: str = "kla"
    """kla; or of the decay family mamba2 (a decay a head, values scaled) or gla (a decay a channel)."""

    def floor(self) -> float:
        """Milliseconds that no version can beat: bytes that must move, or multiplications in chunks of 64, whichever takes longer.

        With CCQ, of its bytes only that q' is written and read, and of its multiplications those of a covariance kept in chunks. The
        decay family does without the delta rule's correction of values, and a decay a channel is as much to read as a key in float32.
        """
        B, T, H, K, V = self.shape
        if self.kind == "step":
            return 1e3 * 2 * 4 * B * H * K * V / COPY
        moved, products = B * T * H * (4 * K + 4 * V), B * T * H * (4 * 64 * (K + V) + 6 * K * V)
        if self.rule != "kla":
            moved, products = moved + B * T * H * 4 * K * (self.rule == "gla"), B * T * H * (2 * 64 * (K + V) + 4 * K * V)
        if self.read == "ccq":
            moved, products = moved + B * T * H * 4 * K, products + B * T * H * (8 * 64 * K + 4 * K * K)
        passes = 1 if self.kind == "forward" else 3
        return 1e3 * max(passes * moved / COPY, passes * products / MATMUL)


WORKS = (
    Work(name="forward", kind="forward", shape=(1, 32768, 16, 128, 128)),
    Work(name="forward/long", kind="forward", shape=(1, 131072, 4, 128, 128)),
    Work(name="forward/paper", kind="forward", shape=(4, 4096, 12, 96, 192)),
    *(Work(name=f"step/{B}", kind="step", shape=(B, 1, 16, 128, 128)) for B in (1, 8, 64, 256)),
    Work(name="training", kind="forward+backward", shape=(8, 8192, 8, 128, 128)),
    Work(name="training/paper", kind="forward+backward", shape=(4, 4096, 12, 96, 192)),
    Work(name="training/one row", kind="forward+backward", shape=(1, 32768, 16, 128, 128)),
    Work(name="training/long", kind="forward+backward", shape=(1, 131072, 4, 128, 128)),
    Work(name="ccq/training", kind="forward+backward", shape=(8, 8192, 8, 128, 128), read="ccq"),
    Work(name="ccq/one row", kind="forward+backward", shape=(1, 32768, 16, 128, 128), read="ccq"),
    Work(name="ccq/long", kind="forward+backward", shape=(1, 131072, 4, 128, 128), read="ccq"),
    *(
        Work(name=f"{rule}/{name}", kind="forward+backward", shape=shape, rule=rule)
        for rule in ("gla", "mamba2")
        for name, shape in (("training", (4, 8192, 8, 128, 128)), ("small", (16, 4096, 6, 64, 64)))
    ),
    Work(name="first", kind="first", shape=(1, 2048, 4, 128, 128)),
)


def operands(shape: tuple[int, ...], rule: str = "kla", grad: bool = False) -> tuple[Tensor, Tensor, Tensor, Coefficients]:
    """KLA's own: keys as they come with their norms as scales, unit queries, gates as a model draws them; bfloat16. Others' decays."""
    B, T, H, K, V = shape
    q = F.normalize(torch.randn(B, T, H, K, device="cuda"), dim=-1).bfloat16()
    k, v = F.silu(torch.randn(B, T, H, K, device="cuda")).bfloat16(), F.silu(torch.randn(B, T, H, V, device="cuda")).bfloat16()
    inverse_norm = (k.float().square().sum(-1) + 1e-6).rsqrt()
    beta, log_decay = torch.sigmoid(torch.randn(B, T, H, device="cuda")), -F.softplus(torch.randn(B, T, H, device="cuda") - 3)
    coef = Coefficients(beta=beta, log_decay=log_decay, key_scale=inverse_norm, value_scale=inverse_norm.clone())
    if rule == "mamba2":
        coef = Coefficients(log_decay=log_decay, value_scale=F.softplus(torch.randn(B, T, H, device="cuda") - 4))
    elif rule == "gla":
        coef = Coefficients(log_decay=F.logsigmoid(torch.randn(B, T, H, K, device="cuda")) / 16)
    if grad:
        for x in (q, k, v, *coef):
            if x is not None:
                x.requires_grad_()
    return q, k, v, coef


def parity(work: Work) -> float:
    """The largest relative error of a short version of the work, outputs and gradients, against the reference in float64."""
    B, _, H, K, V = work.shape
    q, k, v, coef = operands((min(B, 2), 1 if work.kind == "step" else 200, min(H, 2), K, V), work.rule, grad=work.kind != "step")
    remember, reference = (delta, reference_delta) if work.rule == "kla" else (decay, reference_decay)
    state = torch.randn(q.shape[0], q.shape[2], K, V, device="cuda")
    lam = torch.rand(q.shape[:3], device="cuda")
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    true_coef = Coefficients(*(x if x is None else x.detach().double() for x in coef))
    clean = ccq_query(*exact[:2], lam.double(), key_scale=true_coef.key_scale, backend="torch")[0] if work.read == "ccq" else exact[0]
    o, final = reference(clean, *exact[1:], true_coef, state=state.double())
    if work.kind == "step":
        pairs = [(delta_step_(q, k, v, coef, state, backend="triton"), o), (state, final)]
    else:
        clean = ccq_query(q, k, lam, key_scale=coef.key_scale, backend="triton")[0] if work.read == "ccq" else q
        found, last = remember(clean, k, v, coef, state=state, backend="triton")
        upstream = torch.randn_like(found)
        got = torch.autograd.grad(found, (q, k, v), upstream)
        pairs = [(found, o), (last, final), *zip(got, torch.autograd.grad(o, exact, upstream.double()), strict=True)]
    return max(((x.double() - y).norm() / y.norm()).item() for x, y in pairs)


def median(run: Callable[[], Any], repeats: int = 30) -> float:
    """Milliseconds on the device, from events around runs that are queued without waiting for each other."""
    for _ in range(3):
        run()
    flush = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")  # more than the cache holds
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in events:
        flush.zero_()
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in events)[repeats // 2]


def in_graph(step: Callable[[Tensor], Any], shape: tuple[int, ...]) -> float:
    """Milliseconds of one step, from a CUDA graph of many that take turns on more memories than the cache holds."""
    B, _, H, K, V = shape
    states = [torch.randn(B, H, K, V, device="cuda") for _ in range(max(8, min(100, 4000 // B)))]
    rounds = max(1, 200 // len(states)) if B < 64 else 1  # a graph's own start, some microseconds, is then lost among its steps

    def run() -> None:
        for _ in range(rounds):
            for state in states:
                step(state)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return median(graph.replay, 9) / (rounds * len(states))


def measure(work: Work, leaves: list[Tensor], chunk: Callable[[], Tensor], step: Callable[[Tensor], Any]) -> dict[str, float]:
    """``chunk()`` runs one forward, whose gradients are taken for ``leaves``; ``step(state)`` decodes one token."""
    if work.kind == "step":
        with torch.no_grad():
            return {"ms": in_graph(step, work.shape)}
    if work.kind == "forward":
        with torch.no_grad():
            return {"ms": median(chunk)}
    upstream = torch.randn(*work.shape[:3], work.shape[4], device="cuda").bfloat16()
    torch.cuda.synchronize()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    torch.cuda.reset_peak_memory_stats()
    train = lambda: torch.autograd.grad(chunk(), leaves, upstream)  # noqa: E731 - backward() would add up gradients as well
    train()
    torch.cuda.synchronize()
    if work.kind == "first":
        return {"ms": 1e3 * (time.perf_counter() - start)}
    return {"ms": median(train, 15), "peak_mib": (torch.cuda.max_memory_allocated() - before) / 2**20}


def ours(work: Work) -> dict[str, Any]:
    q, k, v, coef = operands(work.shape, work.rule, grad=work.kind in ("forward+backward", "first"))
    remember = delta if work.rule == "kla" else decay
    scale, lam = work.shape[3] ** -0.5, torch.rand(work.shape[:3], device="cuda", requires_grad=True)

    def chunk() -> Tensor:
        clean = ccq_query(q, k, lam, key_scale=coef.key_scale, backend="triton")[0] if work.read == "ccq" else q
        return remember(clean, k, v, coef, scale=scale, backend="triton")[0]

    step = lambda state: delta_step_(q, k, v, coef, state, scale=scale, backend="triton")  # noqa: E731
    if work.kind == "first":
        importlib.import_module("fastweights.ops.delta.chunk_triton")
    leaves = [x for x in (q, k, v, *coef) if x is not None] + [lam] * (work.read == "ccq")
    return {"implementation": "fastweights", "backend": "triton", **measure(work, leaves, chunk, step)}


def gated_deltanet(work: Work) -> tuple[list[Tensor], dict[str, Tensor]]:
    """q, k, v and gates of Gated DeltaNet as both peers take them: keys that are already unit, so that they need not normalise them."""
    q, k, v, coef = operands(work.shape)
    k = F.normalize(k.float(), dim=-1).bfloat16()
    assert coef.beta is not None and coef.log_decay is not None
    gates = {"g": coef.log_decay, "beta": coef.beta.bfloat16()}
    if work.kind in ("forward+backward", "first"):
        for x in (q, k, v, *gates.values()):
            x.requires_grad_()
    return [q, k, v], gates


def fla_decay(work: Work) -> dict[str, Any]:
    """Its kernels of the decay family, on values that are scaled already."""
    from fla.ops.gla import chunk_gla
    from fla.ops.simple_gla import chunk_simple_gla

    q, k, v, coef = operands(work.shape, work.rule)
    assert coef.log_decay is not None
    leaves = [x.requires_grad_() for x in (q, k, v, coef.log_decay)]
    kernel = chunk_gla if work.rule == "gla" else chunk_simple_gla
    return {"implementation": "fla", "backend": "triton", **measure(work, leaves, lambda: kernel(*leaves)[0], lambda _: None)}


def fla(work: Work) -> dict[str, Any]:
    """Flash Linear Attention's own kernels; its backward takes tilelang on Hopper with this Triton, where that is installed."""
    if work.rule != "kla":
        return fla_decay(work)
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    tensors, gates = gated_deltanet(work)
    chunk = lambda: chunk_gated_delta_rule(*tensors, **gates)[0]  # noqa: E731
    step = lambda state: fused_recurrent_gated_delta_rule(*tensors, **gates, initial_state=state, output_final_state=True)  # noqa: E731
    backend = "triton" + ("+tilelang" if importlib.util.find_spec("tilelang") else "")
    return {"implementation": "fla", "backend": backend, **measure(work, [*tensors, *gates.values()], chunk, step)}


def flashqla(work: Work) -> dict[str, Any]:
    """FlashQLA: K = V = 128 only, and no decode step."""
    from flash_qla import chunk_gated_delta_rule

    if work.kind == "step" or work.shape[3:] != (128, 128) or work.rule != "kla":
        raise ValueError("FlashQLA has chunks of the delta rule at K = V = 128 alone")
    tensors, gates = gated_deltanet(work)
    chunk = lambda: chunk_gated_delta_rule(*tensors, **gates)[0]  # noqa: E731
    return {"implementation": "flashqla", "backend": "tilelang", **measure(work, [*tensors, *gates.values()], chunk, lambda _: None)}


IMPLEMENTATIONS = {"fastweights": ours, "fla": fla, "flashqla": flashqla}
ENVIRONMENT = {"fastweights": {}, "fla": {"FLA_FLASH_QLA": "0"}, "flashqla": {}}


def apart(implementation: str, works: list[Work], limit: float) -> Iterator[dict[str, Any]]:
    """Run works in a process of their own with an empty compile cache; each result as it comes, none after ``limit`` seconds."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, "--child", implementation, *(w.name for w in works)]
        environment = {**os.environ, **ENVIRONMENT[implementation], "TRITON_CACHE_DIR": cache}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            timer = threading.Timer(limit, process.kill)
            timer.start()
            assert process.stdout is not None
            yield from (json.loads(line) for line in process.stdout if line.startswith("{"))
            timer.cancel()


def child(implementation: str, names: list[str]) -> None:
    for work in (w for w in WORKS if w.name in names and (w.read == "raw" or implementation == "fastweights")):
        try:
            print(json.dumps({"work": work.name, **IMPLEMENTATIONS[implementation](work)}), flush=True)
        except Exception as error:  # a peer that cannot run a shape is a result too
            print(
                json.dumps({"work": work.name, "implementation": implementation, "error": f"{type(error).__name__}: {error}"[:200]}),
                flush=True,
            )
        torch.cuda.empty_cache()


def write_csv(path: Path) -> None:
    rows = [{**row, "versions": json.dumps(row["versions"])} for row in read_rows(path)]
    columns = sorted({name for row in rows for name in row})
    with path.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def plot(path: Path) -> None:
    """Each work's latest times over its floor, PNG and SVG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    latest = {(row["work"], row["implementation"]): row for row in read_rows(path) if "floor_ms" in row and "ms" in row}
    works, makers = (list(dict.fromkeys(key[i] for key in latest)) for i in (0, 1))
    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    for i, maker in enumerate(makers):
        at = [(x, latest[work, maker]) for x, work in enumerate(works) if (work, maker) in latest]
        axes.bar([x + 0.8 * i / len(makers) for x, _ in at], [row["ms"] / row["floor_ms"] for _, row in at], 0.8 / len(makers), label=maker)
    axes.set_xticks(range(len(works)), works, rotation=30, ha="right")
    axes.set_ylabel("time / hardware floor")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.legend()
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", nargs="*", default=[], choices=[name for name in IMPLEMENTATIONS if name != "fastweights"])
    parser.add_argument("--only", nargs="*", help="names of works")
    parser.add_argument("--limit", type=float, default=240, help="seconds each implementation may take")
    parser.add_argument("--out", type=Path, default=RESULTS / "ops-h200.jsonl")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child[0], arguments.child[1:])
        return
    works = {w.name: w for w in WORKS if arguments.only is None or w.name in arguments.only}
    for name, work in works.items():
        error = parity(work)
        if not error < 2e-2:
            raise SystemExit(f"{name}: error {error:.3g} against the float64 reference; nothing was timed")
        print(f"parity {name}: {error:.1e}", flush=True)
    torch.cuda.empty_cache()
    first = [works[name] for name in ("first",) if name in works]
    for implementation in ("fastweights", *arguments.peers):
        for batch in (first, [w for w in works.values() if w.kind != "first"]):
            for row in apart(implementation, batch, arguments.limit) if batch else ():
                work = works[row["work"]]
                row |= {"kind": work.kind, "shape": list(work.shape)} | ({} if work.kind == "first" else {"floor_ms": work.floor()})
                append_rows(arguments.out, [row | provenance(device="cuda")])
                times = row.get("error") or f"{row['ms']:.4f} ms" + (
                    f", {row['ms'] / row['floor_ms']:.2f} x floor" if "floor_ms" in row else ""
                )
                print(f"{row['work']:16} {row['implementation']:12} {times}", flush=True)
    write_csv(arguments.out)
    plot(arguments.out)


if __name__ == "__main__":
    main()
