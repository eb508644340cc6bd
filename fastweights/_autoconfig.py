"""Makes ``AutoModelForCausalLM`` know our models after a mere ``import fastweights``, which does not import transformers.

If transformers' auto classes are loaded already, we register at once. If not, a finder waits for the one module that holds them, lets it
load as ever, registers, and is gone. The registration itself is in `fastweights.models.config`.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

AUTO_CLASSES = "transformers.models.auto.configuration_auto"


class _RegisterOnce(MetaPathFinder):
    def find_spec(self, name: str, path=None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != AUTO_CLASSES:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_register(module: ModuleType) -> None:
            load(module)
            importlib.import_module("fastweights.models.config")

        spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


def register_with_transformers() -> None:
    """Register now if transformers' auto classes are loaded, else when they are."""
    if AUTO_CLASSES in sys.modules:
        importlib.import_module("fastweights.models.config")
    elif not any(isinstance(finder, _RegisterOnce) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegisterOnce())
