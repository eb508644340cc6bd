"""Compile kernels for a Hopper card on a machine that has none, as they would be launched:  TRITON_INTERPRET=0 python -m tests.ops.compiled

    with compiled_only() as kernels:
        delta_step_triton_(q, k, v, coef, state)   # on CPU tensors; nothing runs

Prints a line of JSON for every kernel of every shape of the delta step with CCQ's read or, with the argument decay, of decay's smallest
tiles in bfloat16: warps, bytes of shared memory, a thread's registers and stack, and in how many ways tiles at one address are swizzled.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64"}
OPTIONS = ("num_warps", "num_stages")


def compile_launch(kernel: JITFunction, arguments: tuple, named: dict) -> dict:
    """Compile what ``kernel[grid](*arguments, **named)`` would run; None, 1 and ``named`` are constants, as in a launch."""
    options = {name: named[name] for name in OPTIONS if name in named}
    given = {**dict(zip(kernel.arg_names, arguments, strict=False)), **{name: x for name, x in named.items() if name not in OPTIONS}}
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        x = given[name]
        if x is None or name in named or (isinstance(x, int) and x == 1):
            signature[name], constants[name] = "constexpr", x
        elif isinstance(x, torch.Tensor):
            signature[name] = "*" + NAMES[x.dtype]
        else:
            signature[name] = "fp32" if isinstance(x, float) else "i32"
        if isinstance(x, torch.Tensor) or (signature[name] == "i32" and x % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(ASTSource(kernel, signature, constants, attributes), target=HOPPER, options=options)
    found = {"shared": compiled.metadata.shared, "swizzles": swizzles(compiled.asm["ptx"]), **resources(compiled.asm["cubin"])}
    return {"kernel": kernel.__name__, **options, **found}


def swizzles(ptx: str) -> int:
    """In how many ways, at most, wgmma's operands at one shared address are swizzled: ptxas 12.8 confuses the second with the first.

    A descriptor is a register, which holds the address, and a constant, whose two highest bits are the swizzle.
    """
    made = {name: (base, int(constant) >> 62 & 3) for name, base, constant in re.findall(r"(%rd\d+), (%rd\d+), (-?\d{18,});", ptx)}
    ways = defaultdict(set)
    for left, right in re.findall(r"wgmma\.mma_async\S+ \{[^}]*\}, (\{[^}]*\}|%rd\d+), (%rd\d+),", ptx):
        for base, way in (made[x] for x in (left, right) if x in made):
            ways[base].add(way)
    return max(map(len, ways.values()), default=0)


def resources(cubin: bytes) -> dict:
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", said).groups()
    return {"registers": int(registers), "stack": int(stack)}


@contextlib.contextmanager
def compiled_only() -> Iterator[list[dict]]:
    """Every launch inside is compiled and not run."""
    kernels, run = [], JITFunction.run

    def compile_instead(self, *arguments, grid, warmup, **named):
        kernels.append(compile_launch(self, arguments, named))

    JITFunction.run = compile_instead
    try:
        yield kernels
    finally:
        JITFunction.run = run


def ccq_steps() -> None:
    from fastweights.ops.delta.ccq_step_triton import SHAPES, delta_ccq_step_triton_
    from tests.ops.ccq_step_cases import draw, run
    from tests.ops.grid import Case

    for shape in SHAPES.values():
        for T, K, heads in ((1, 128, (1, 1)), (16, 256, (1, 2))):
            x = draw(Case(T=T, K=K, V=K, heads=heads, dtype=torch.bfloat16, scales=("Hk", "Hk", "Hk")))
            with compiled_only() as kernels:
                run(delta_ccq_step_triton_, x, shape=shape)
            for kernel in kernels:
                print(json.dumps({"T": T, "K": K, "V": K, "heads": heads, **kernel}), flush=True)


def decay() -> None:
    from fastweights.ops.decay.chunk_triton import chunk_decay_triton
    from tests.ops.grid import Case, make, run

    for K, V, gates in ((16, 64, "model"), (128, 16, "model"), (16, 64, "channel"), (128, 16, "channel")):
        with compiled_only() as kernels:
            run(chunk_decay_triton, make(Case(T=64, K=K, V=V, dtype=torch.bfloat16, decay=gates, beta=None)))
        for kernel in kernels:
            print(json.dumps({"K": K, "V": V, "gates": gates, **kernel}), flush=True)


if __name__ == "__main__":
    decay() if sys.argv[1:] == ["decay"] else ccq_steps()
