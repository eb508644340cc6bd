"""Kernels of one call are compiled side by side before the first of them runs."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

triton = pytest.importorskip("triton")

from fastweights.ops import launch_triton  # noqa: E402
from fastweights.ops.launch_triton import compiled_together, launch  # noqa: E402


class Recorded:
    """What a kernel is asked."""

    def __init__(self):
        self.asked = []

    def run(self, *operands, grid, warmup, **constants):
        self.asked.append((grid, "compile" if warmup else "run"))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launch_triton, "_may_look_ahead", lambda operands: True)
    return Recorded()


def test_only_the_first_call_of_a_kind_looks_ahead(kernel):
    @compiled_together
    def call(x, scale, sizes):
        launch(kernel, (1,), x)
        launch(kernel, (2,), x, SIZE=sizes[0])
        return "result"

    def asked(*operands):
        kernel.asked.clear()
        assert call(*operands) == "result"
        return [what for _, what in kernel.asked]

    ahead, run = ["compile"] * 2 + ["run"] * 2, ["run"] * 2
    x = torch.zeros(2, 32, 4, 8)
    assert asked(x, 0.5, [16]) == ahead
    assert asked(x + 1, 0.25, [16]) == run, "other numbers"
    assert asked(x[:, :, :, :4], 0.5, [16]) == ahead, "another K"
    assert asked(x.bfloat16(), 0.5, [16]) == ahead, "another dtype"
    assert asked(x[:, :31], 0.5, [16]) == ahead, "a length that no 16 divides is compiled for itself"
    assert asked(None, 0.5, [16]) == ahead and asked(x, 0.5, [32]) == ahead
    assert asked(x, 0.5, [16]) == run


def test_what_follows_is_compiled_too_where_a_gradient_is_wanted(kernel):
    def after(operands, results):
        assert results == "result"
        launch(kernel, (2,), *operands)

    def call(x):
        launch(kernel, (1,), x)
        return "result"

    for wanted, asked in (False, [1, 1]), (True, [1, 2, 1]):
        kernel.asked.clear()
        compiled_together(call, after)(torch.zeros(1, requires_grad=wanted))
        assert [grid for (grid,), _ in kernel.asked] == asked
        assert [what for _, what in kernel.asked] == ["compile"] * (len(asked) - 1) + ["run"]


def test_an_error_leaves_nothing_behind(kernel):
    @compiled_together
    def call(x):
        launch(kernel, (1,), x)
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            call(torch.zeros(1))
    launch(kernel, (1,))
    assert [what for _, what in kernel.asked] == ["compile", "run", "run"]


def test_on_a_cpu_nothing_looks_ahead():
    kernel = Recorded()
    compiled_together(lambda x: launch(kernel, (1,), x))(torch.zeros(1))
    assert kernel.asked == [((1,), "run")]


@pytest.mark.full
def test_the_delta_kernels_are_compiled_before_the_first_runs(tmp_path):
    """For a Hopper card, which need not be there: at a launch nothing is left to compile, forward and backward, split rows or not."""
    script = """
        import torch, triton
        from triton.backends.compiler import GPUTarget
        from triton.runtime import _async_compile, driver
        from triton.runtime.jit import JITFunction
        from fastweights.ops import launch_triton
        from fastweights.ops.delta.chunk_triton import delta_backward, delta_forward, tiles_for

        class Card:
            get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
            get_current_device = staticmethod(lambda: 0)
            get_current_stream = staticmethod(lambda device: 0)

            def launcher_cls(self, src, metadata):
                launchers.append(src.fn.__name__)

        launchers = []
        driver.set_active(Card())
        launch_triton._may_look_ahead = lambda operands: _async_compile.active_mode.get() is None
        run, counts = JITFunction.run, {True: 0, False: 0}

        def only_compile(self, *operands, grid, warmup, **constants):
            known = self.device_caches[0][0]
            before = len(known)
            run(self, *operands, grid=grid, warmup=True, **constants)
            counts[warmup] += 1
            assert warmup or len(known) == before, f"{self.__name__} was compiled at its launch"

        JITFunction.run = only_compile
        for T in (64, 4096):
            q, k, v = (torch.empty(1, T, 1, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
            beta = torch.empty(1, T, 1)
            operands = [q, k, v, beta, beta, None, None, None, None, None, 1.0, list(tiles_for(q, k, v, "small"))]
            o, final, *kept = delta_forward(*operands)
            looked_at, made = counts[True], len(launchers)
            with torch.no_grad():
                delta_backward(*operands, torch.empty_like(o), None, *kept)
            assert counts[True] == looked_at and len(launchers) == made, "the forward has the backward's kernels compiled too"
        assert counts[True] == counts[False] > 10, counts
        assert {"prepare_kernel", "gradient_kernel"} <= set(launchers), launchers
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
