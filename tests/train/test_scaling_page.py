"""docs/scaling.md says what its script computes, and its arithmetic is that of the parts it is made of."""

import runpy
from pathlib import Path

import pytest
import torch

from fastweights.recipes.train_presets import PRESETS
from fastweights.train.flops import training_flops
from tests.train.two_processes import born_on_meta

DOCS = Path(__file__).parents[2] / "docs"

pytestmark = pytest.mark.full


def test_the_page_holds_the_tables_of_its_script():
    written = runpy.run_path(str(DOCS / "scaling_arithmetic.py"))["written"]
    page = (DOCS / "scaling.md").read_text()
    assert written(page) == page and all(page.count(f"<!-- {name} -->\n| ") == 1 for name in ("cost", "memory", "messages"))


def test_what_it_needs_of_a_small_model():
    """By hand: 16 bytes a parameter; two blocks and one's gradient, embedding and gradient, in 2 bytes; FLOPs as logged in training."""
    page = runpy.run_path(str(DOCS / "scaling_arithmetic.py"))
    model = born_on_meta()
    need = page["needs"](model.config)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    block = sum(size for name, size in sizes.items() if name.startswith("model.layers.0."))
    assert need.parameters == sum(sizes.values()) and need.state == 16 * need.parameters
    assert need.whole == 6 * block + 4 * 64 * 32 and need.flops == training_flops(model, 4096)
    assert need.kept == 2 * need.block and need.recomputed == 2 * 2 * 32 * 4096 + need.block
    saved = []  # of a real pass, on the CPU and in bfloat16: the same bytes
    x = torch.randn(1, 4096, 32, dtype=torch.bfloat16, requires_grad=True)
    layer = born_on_meta().to_empty(device="cpu").to(torch.bfloat16)
    layer.init_weights()
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer.model.layers[0](x)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    assert need.block == sum(size for at, size in storages.items() if at not in weights)


def test_the_commands_name_presets_that_their_cards_can_share():
    page = (DOCS / "scaling.md").read_text()
    for name, accumulation, cards in (("kla+ccq-0.4b", 8, 8), ("kla+ccq-1.3b", 1, 32)):
        assert f"--preset {name} --accumulation {accumulation}" in page
        train = PRESETS[name].run.train
        assert train.batch_tokens % (train.sequence_length * accumulation * cards) == 0
