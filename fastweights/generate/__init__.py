"""The decoding engine: prompts are read in chunks of constant memory, rows of fixed-size state are decoded side by side.

`Engine` is the face. `Sampling` says how tokens are chosen, `Completion` is an answer, `Snapshot` a memory to keep, save and go on from.
docs/generation.md tells the whole.
"""

from typing import TYPE_CHECKING

from fastweights._lazy import lazy_names

__all__ = ["Completion", "Engine", "QueueFull", "Request", "Sampling", "Snapshot"]

if TYPE_CHECKING:
    from fastweights.generate.engine import Engine, QueueFull
    from fastweights.generate.request import Completion, Request
    from fastweights.generate.sampling import Sampling
    from fastweights.generate.snapshot import Snapshot
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Completion": "fastweights.generate.request",
            "Engine": "fastweights.generate.engine",
            "QueueFull": "fastweights.generate.engine",
            "Request": "fastweights.generate.request",
            "Sampling": "fastweights.generate.sampling",
            "Snapshot": "fastweights.generate.snapshot",
        },
    )
