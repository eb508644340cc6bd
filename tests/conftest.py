"""Shape checks are on in every test, unless FASTWEIGHTS_SHAPE_CHECKS=0: jaxtyping's import hook breaks torch.compile(fullgraph=True)."""

import os

if os.environ.get("FASTWEIGHTS_SHAPE_CHECKS", "1") != "0":
    from jaxtyping import install_import_hook

    install_import_hook("fastweights", "beartype.beartype")

import pytest
import torch


@pytest.fixture(autouse=True)
def one_seed_per_test():
    torch.manual_seed(0)
