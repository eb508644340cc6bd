"""Linear attention as a fast-weight memory: the write and the read as two free choices."""

from typing import TYPE_CHECKING

from fastweights._autoconfig import register_with_transformers
from fastweights._lazy import lazy_names

__version__ = "0.1.0"

__all__ = [
    "READ_RULES",
    "WRITE_RULES",
    "FastWeightAttention",
    "FastWeightsConfig",
    "FastWeightsForCausalLM",
    "ccq_query",
    "decay_memory",
    "delta_memory",
    "kaczmarz",
]

if TYPE_CHECKING:
    from fastweights.layers import FastWeightAttention
    from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
    from fastweights.ops import ccq_query, decay_memory, delta_memory
    from fastweights.read import READ_RULES
    from fastweights.write import WRITE_RULES, kaczmarz
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "READ_RULES": "fastweights.read",
            "WRITE_RULES": "fastweights.write",
            "FastWeightAttention": "fastweights.layers",
            "FastWeightsConfig": "fastweights.models",
            "FastWeightsForCausalLM": "fastweights.models",
            "ccq_query": "fastweights.ops",
            "decay_memory": "fastweights.ops",
            "delta_memory": "fastweights.ops",
            "kaczmarz": "fastweights.write",
        },
    )

register_with_transformers()
