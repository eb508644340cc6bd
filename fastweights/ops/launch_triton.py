"""How kernels are launched, and how the several kernels of one call are compiled side by side instead of one after the other."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime import _async_compile, driver

_only_compile: ContextVar[bool] = ContextVar("only_compile", default=False)


def launch(kernel: Any, grid: tuple[int, ...], *operands: Any, **constants: Any) -> None:
    """``kernel[grid](*operands, **constants)``; compiled and not run while `compiled_together` looks ahead."""
    kernel.run(*operands, grid=grid, warmup=_only_compile.get(), **constants)


def compiled_together(call: Callable, then: Callable[[tuple[Any, ...], Any], Any] | None = None) -> Callable:
    """Decorate a function that launches kernels and reads none of their results: before its first call with operands of a kind it is gone
    through once without running anything, and what is not compiled yet is compiled by as many threads as there are cores.

    Triton compiles at the first launch, so the kernels of a call would wait for each other. Its compiler leaves the interpreter lock alone
    for nearly all of its time. ``then(operands, results)`` is a call that will follow where an operand wants a gradient: its kernels are
    compiled in the same go.
    """
    known: set[Hashable] = set()

    def ahead(operands: tuple[Any, ...], options: dict[str, Any]) -> None:
        results = call(*operands, **options)
        if then is not None and any(isinstance(x, Tensor) and x.requires_grad for x in operands):
            then(operands, results)

    @functools.wraps(call)
    def wrapped(*operands: Any, **options: Any) -> Any:
        kind = (_kind(operands), *options.items())
        if kind not in known:
            known.add(kind)
            if _may_look_ahead(operands):
                _compile_together(lambda: ahead(operands, options))
        return call(*operands, **options)

    return wrapped


def _kind(x: Any) -> Any:
    """What decides which kernels are compiled, a little too finely: a kind too many costs one more look at what is compiled already."""
    if isinstance(x, Tensor):
        return x.device, x.dtype, x.shape[2:], tuple((size.bit_length(), size % 16 == 0) for size in x.shape[:2])
    if isinstance(x, (list, tuple)):
        return tuple(map(_kind, x))
    return type(x) if isinstance(x, float) else x


def _may_look_ahead(operands: tuple[Any, ...]) -> bool:
    """Not in the interpreter, which compiles nothing; not while a graph is captured; not inside somebody else's looking ahead."""
    on_gpu = any(isinstance(x, Tensor) and x.is_cuda for x in operands)
    return on_gpu and not torch.cuda.is_current_stream_capturing() and _async_compile.active_mode.get() is None


class _Compilers(ThreadPoolExecutor):
    def submit(self, compile_kernel: Callable[[], Any], /) -> Any:  # type: ignore[override]  # all that AsyncCompileMode asks for
        return super().submit(_with_launcher, compile_kernel)


def _with_launcher(compile_kernel: Callable[[], Any]) -> Any:
    """Triton 3.6 has a C compiler make every kernel's launcher, half a second each, at the first launch unless it lies in the cache."""
    kernel = compile_kernel()
    driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


def _compile_together(call: Callable[[], Any]) -> None:
    token = _only_compile.set(True)
    try:  # an error of the compiler comes again at the launch, where it belongs
        with _Compilers(os.cpu_count()) as threads, triton.AsyncCompileMode(threads, ignore_errors=True):
            call()
    finally:
        _only_compile.reset(token)
