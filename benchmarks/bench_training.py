"""Training speed of whole models on one GPU: ours, and other people's at equal parameters in the same run.

    python benchmarks/bench_training.py                                 # as `fastweights train` does it on a GPU: not compiled
    python benchmarks/bench_training.py --compile --peers llama         # as with --train.compile; peers are compiled whole
    python benchmarks/bench_training.py --models gdn-0.4b --peers fla fla-logits llama --profile
    python benchmarks/bench_training.py --models kla-5m --batch 1 --tokens 64 --steps 2 --device cpu --out rows.jsonl

A step is the Trainer's of one piece: forward and loss in bf16 autocast over float32 weights, backward, clipping, fused AdamW, gradients to
None, and a wait for the device; without the rest of its guard, its schedule and its log. Each reads other random tokens, drawn before: ours
as the Trainer feeds it, one packed row with `cu_seqlens` and a document a window; with --no-pack, and peers, as a batch [B, T]. The loss is
made in pieces where the Trainer would. FLA's is its own: fused with the projection, or as `fla-logits` that which its models have by
default, of whole logits. Each model has a process of its own with empty compile caches; its first step is timed without imports.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import pkgutil
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.recipes.settings import Variant
from fastweights.recipes.train_presets import MISTRAL, preset_run
from fastweights.records import append_rows, provenance

RESULTS = Path(__file__).resolve().parent / "results"
BYTE_VOCABULARY, PIECES = 258, 32_000
WARM_UP, PROFILED, KERNELS = 3, 3, 25
"""Steps after the first that are not timed, steps that are profiled, and lines of a profile."""
Batch = dict[str, Any]
"""A packed row, and the number of its targets as `items`."""
Subject = tuple[nn.Module, Callable[[Batch], Tensor], dict[str, Any]]
"""A model, its mean loss of a batch, and what the row says of both."""


def preset_config(name: str, backend: str = "auto") -> Any:
    """What `fastweights train --preset name` builds, without loading a tokenizer from the hub."""
    from fastweights.models import FastWeightsConfig

    run = preset_run(name)
    variant, vocabulary = Variant.parse(run.mixer), PIECES if run.tokenizer == MISTRAL else BYTE_VOCABULARY
    mixer = variant.mixer(run.model.num_hidden_layers)
    return FastWeightsConfig(mixer=mixer, vocab_size=vocabulary, backend=backend, **vars(run.model), **variant.options)


def ours(name: str, arguments: argparse.Namespace) -> Subject:
    from fastweights import ops
    from fastweights.models import FastWeightsForCausalLM
    from fastweights.train.packed_trainer import WHOLE_LOGITS, input_names

    model = FastWeightsForCausalLM(preset_config(name, arguments.backend))
    whole = arguments.batch * arguments.tokens * model.config.vocab_size <= WHOLE_LOGITS
    names, loss_only = input_names(model), {} if whole else {"logits_to_keep": 1}
    for module in pkgutil.walk_packages(ops.__path__, "fastweights.ops."):
        if arguments.device == "cuda" and module.name.endswith("_triton"):
            importlib.import_module(module.name)  # else the first step would

    def loss(batch: Batch) -> Tensor:
        inputs = {key: batch[key] for key in names} if arguments.pack else _rows(batch, arguments)
        return model(**inputs, num_items_in_batch=batch["items"], **loss_only).loss

    about = {"backend": arguments.backend, "input": "packed row" if arguments.pack else "batch"}
    return model, loss, about | {"loss": "whole logits" if whole else "pieces"}


def fla(name: str, arguments: argparse.Namespace) -> Subject:
    """Flash Linear Attention's Gated DeltaNet in our shape, by its own kernels; on Hopper some are tilelang's, where that is installed."""
    from fla import __version__
    from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

    shape = _shape(name, "num_heads", "conv_size", "norm_eps", "expand_k", "expand_v")
    shape["head_dim"] = round(shape["expand_k"] * shape["hidden_size"] / shape["num_heads"])
    shape["expand_v"] /= shape.pop("expand_k")
    pieces = arguments.child[0] == "fla"
    model = GatedDeltaNetForCausalLM(GatedDeltaNetConfig(**shape, fuse_linear_cross_entropy=pieces, fuse_cross_entropy=not pieces))

    def loss(batch: Batch) -> Tensor:
        return model(**_rows(batch, arguments), num_items_in_batch=batch["items"]).loss

    backend = "triton+tilelang" if importlib.util.find_spec("tilelang") else "triton"
    about = {"backend": backend, "input": "batch", "loss": "its own, in pieces" if pieces else "its own, whole logits"}
    return model, loss, about | {"peer_version": __version__}


def llama(name: str, arguments: argparse.Namespace) -> Subject:
    """transformers' Llama in the shape of our transformer, with our loss in pieces."""
    from transformers.models.llama import modeling_llama

    from fastweights.models.loss import next_token_targets, summed_losses

    shape = _shape(name, "num_attention_heads") | {"max_position_embeddings": arguments.tokens, "attn_implementation": "sdpa"}
    model = modeling_llama.LlamaForCausalLM(modeling_llama.LlamaConfig(**shape))
    # Without a mask SDPA takes its fast causal path. transformers leaves it out too, except that under torch.compile it cannot know.
    modeling_llama.create_causal_mask = lambda *_, **__: None

    def loss(batch: Batch) -> Tensor:
        rows = _rows(batch, arguments)
        hidden = model.model(rows["input_ids"], use_cache=False).last_hidden_state
        return summed_losses(hidden, model.lm_head, next_token_targets(rows["labels"])) / batch["items"]

    return model, loss, {"backend": "sdpa", "input": "batch", "loss": "pieces"}


PEERS = {"fla": ("gdn", fla), "fla-logits": ("gdn", fla), "llama": ("transformer", llama)}
"""Each has the shape of our preset of that mixer and of `--peer-size`."""


def _shape(name: str, *more: str) -> dict[str, Any]:
    like = preset_config(name)
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "tie_word_embeddings")
    return {key: getattr(like, key) for key in (*same, *more)}


def _rows(batch: Batch, arguments: argparse.Namespace) -> Batch:
    return {key: batch[key].view(arguments.batch, arguments.tokens) for key in ("input_ids", "labels")}


def draw(count: int, vocabulary: int, arguments: argparse.Namespace) -> list[Batch]:
    """Random tokens, packed as the Trainer does, each window one document."""
    from fastweights.train.packing import IGNORE, packed_row

    windows = torch.randint(vocabulary, (count, arguments.batch, arguments.tokens)).numpy()
    rows: list[Any] = [packed_row(list(each)) for each in windows]
    return [{key: x.to(arguments.device) for key, x in {**row, "items": (row["labels"] != IGNORE).sum()}.items()} for row in rows]


def profile(run: Callable[[], Any], gpu: bool) -> None:
    """Print the kernels that take longest (without a GPU the operators), with milliseconds and calls in all the steps together."""
    kind, spent = ("CUDA", "self_device_time_total") if gpu else ("CPU", "self_cpu_time_total")
    with torch.profiler.profile(activities=[getattr(torch.profiler.ProfilerActivity, kind)]) as recorded:
        run()
    found = [(getattr(e, spent) / 1e3, e) for e in recorded.key_averages() if e.device_type.name == kind and not e.is_user_annotation]
    print(f"  {PROFILED} steps: {sum(ms for ms, _ in found):.2f} ms in {sum(e.count for _, e in found)} calls of {len(found)} kinds")
    for ms, e in sorted(found, key=lambda pair: -pair[0])[:KERNELS]:
        print(f"  {ms:10.3f} ms {e.count:6} x  {' '.join(e.key.split())[:90]}")


def measure(implementation: str, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    from transformers.utils import enable_tf32

    from fastweights.models import FastWeightsForCausalLM, parameter_groups
    from fastweights.train.flops import peak_flops, training_flops
    from fastweights.train.packed_trainer import compile_layers

    settings, device, gpu = preset_run(name).train, torch.device(arguments.device), arguments.device == "cuda"
    with torch.device("meta"):
        twin = FastWeightsForCausalLM(preset_config(name))
    torch.manual_seed(arguments.seed)
    batches = draw(1 + WARM_UP + arguments.steps + PROFILED, twin.config.vocab_size, arguments)
    with device:
        model, loss, row = ours(name, arguments) if implementation == "fastweights" else PEERS[implementation][1](name, arguments)
    row["parameters"], goal = (sum(p.numel() for p in m.parameters()) for m in (model, twin))
    if abs(row["parameters"] - goal) > 0.02 * goal:
        raise ValueError(f"it has {row['parameters']:,} parameters, and our {name} {goal:,}")
    model.config.use_cache = False  # type: ignore[union-attr]
    groups = parameter_groups(model.train(), settings.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=True)
    importlib.import_module("torch._dynamo")  # else the first step would: the optimizer and checkpoints ask for it
    if arguments.compile:
        importlib.import_module("torch._inductor.compile_fx")
        if implementation == "fastweights":  # as our Trainer does
            compile_layers(model)
            for batch in batches:
                torch._dynamo.maybe_mark_dynamic(batch["cu_seqlens"], 0)
        else:  # as transformers' Trainer does, which also turns what is multiplied in float32 into TF32
            loss = torch.compile(loss)
            if gpu:
                enable_tf32(True)
        row["compiled"] = "layers" if implementation == "fastweights" else "whole"
    losses: list[Tensor] = []
    wait = torch.cuda.synchronize if gpu else lambda: None

    def milliseconds(batch: Batch) -> float:
        """Of a step, until the device has done it."""
        began = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            value = loss(batch)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        model.zero_grad()
        losses.append(value.detach())
        wait()
        return 1e3 * (time.perf_counter() - began)

    wait()
    row["first_step_s"], *_ = [milliseconds(batch) / 1e3 for batch in batches[: 1 + WARM_UP]]
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    row["step_ms"] = statistics.median(milliseconds(batch) for batch in batches[1 + WARM_UP : -PROFILED])
    peak = torch.cuda.max_memory_allocated() if gpu else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    row |= {"peak_gib": peak / 2**30, "first_loss": losses[0].item(), "last_loss": losses[-1].item()}
    if not torch.stack(losses).isfinite().all():
        raise FloatingPointError(f"losses {[value.item() for value in losses]}")
    if arguments.profile:
        print(f"{name} {implementation}")
        profile(lambda: [milliseconds(batch) for batch in batches[-PROFILED:]], gpu)
    row["tokens_per_s"] = 1e3 * arguments.batch * arguments.tokens / row["step_ms"]
    row["flops_per_token"], most = training_flops(twin, arguments.tokens), peak_flops(device, "bf16")  # a peer has the twin's shape
    return row | ({"mfu": row["tokens_per_s"] * row["flops_per_token"] / most} if most else {})


def child(arguments: argparse.Namespace) -> None:
    try:
        row = measure(*arguments.child, arguments)
    except Exception as error:  # a peer that does not run is a result too
        traceback.print_exc()
        row = {"error": f"{type(error).__name__}: {error}"[:300]}
    print(json.dumps(row), flush=True)


def apart(implementation: str, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """`measure` in a process of its own, with empty compile caches and at most `limit` seconds; what else it prints is passed on."""
    command = [sys.executable, __file__, *sys.argv[1:], "--child", implementation, name]
    with nullcontext(arguments.caches) if arguments.caches else tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        caches = {f"{kind}_CACHE_DIR": f"{cache}/{kind}" for kind in ("TRITON", "TORCHINDUCTOR", "TILELANG")}
        environment = {**os.environ, "FLA_FLASH_QLA": "0", **caches}
        try:
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=arguments.limit)
        except subprocess.TimeoutExpired:
            return {"error": f"not done in {arguments.limit:g} s"}
    *told, row = done.stdout.splitlines() or [""]
    print("".join(f"{line}\n" for line in told), end="", flush=True)
    return json.loads(row) if row.startswith("{") else {"error": f"its process ended with {done.returncode}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["kla-0.4b", "gdn-0.4b", "kla+ccq-0.4b"], help="presets of ours")
    parser.add_argument("--peers", nargs="*", default=[], choices=list(PEERS))
    parser.add_argument("--peer-size", default="0.4b", help="of our presets that peers are equal to")
    parser.add_argument("--batch", type=int, default=8, help="windows a step")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens a window")
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False, help="torch.compile each model")
    parser.add_argument("--pack", action=argparse.BooleanOptionalAction, default=True, help="feed ours packed rows, as the Trainer does")
    parser.add_argument("--backend", default="auto", help="of our kernels: auto as in training, triton, torch")
    parser.add_argument("--profile", action="store_true", help=f"print the {KERNELS} largest kernels of {PROFILED} more steps")
    parser.add_argument("--caches", type=Path, help="folder of compile caches to use and to leave; else each model begins with empty ones")
    parser.add_argument("--limit", type=float, default=300, help="seconds each model may take")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seed", type=int, default=0, help="of weights and tokens")
    parser.add_argument("--out", type=Path, default=RESULTS / "training-h200.jsonl")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
        return
    works = [("fastweights", name) for name in arguments.models]
    works += [(peer, f"{PEERS[peer][0]}-{arguments.peer_size}") for peer in arguments.peers]
    for _, name in works:
        preset_run(name)  # raises for a name that is none
    for implementation, name in works:
        row = {"model": name, "implementation": implementation, "compile": arguments.compile}
        row |= {"batch": arguments.batch, "tokens": arguments.tokens, "steps": arguments.steps}
        row |= {"caches": "kept" if arguments.caches else "empty", **apart(implementation, name, arguments)}
        append_rows(arguments.out, [row | provenance(device=arguments.device, seed=arguments.seed)])
        if "error" not in row:
            told = f"{row['parameters']:,} parameters, first step {row['first_step_s']:.1f} s, then {row['step_ms']:.1f} ms,"
            told += f" {row['tokens_per_s']:,.0f} tokens/s, {row['peak_gib']:.1f} GiB" + (f", mfu {row['mfu']:.1%}" if "mfu" in row else "")
        print(f"{name:14} {implementation:12} {row.get('error') or told}", flush=True)


if __name__ == "__main__":
    main()
