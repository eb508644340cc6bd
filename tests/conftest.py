"""Without a GPU, Triton's kernels run in its interpreter; that has to be said before Triton is imported.

Shape checks are on in every test, unless FASTWEIGHTS_SHAPE_CHECKS=0: jaxtyping's import hook breaks torch.compile(fullgraph=True).
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one test process per core: threads that wait for each other would only be in the way

if os.environ.get("FASTWEIGHTS_SHAPE_CHECKS", "1") != "0":
    from jaxtyping import install_import_hook

    hook = install_import_hook("fastweights", "beartype.beartype").hook
    checked = hook.should_instrument
    hook.should_instrument = lambda module: checked(module) and not module.endswith("_triton")  # Triton reads a kernel's own source

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def one_seed_per_test():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def fresh_compiler(request):
    """The compiler counts recompilations of one function over the whole process: one test's shapes are not the next one's."""
    if request.node.get_closest_marker("compile"):
        torch._dynamo.reset()
