"""How memory is written. To add a rule: one file here, one line below, one section in docs/rules.md."""

from fastweights.write.base import WriteRule
from fastweights.write.deltanet import DeltaNet
from fastweights.write.gated_deltanet import GatedDeltaNet
from fastweights.write.gla import GLA
from fastweights.write.kla import KLA, kaczmarz
from fastweights.write.linear import Linear
from fastweights.write.longhorn import Longhorn
from fastweights.write.mamba2 import Mamba2
from fastweights.write.retention import Retention

WRITE_RULES: dict[str, type[WriteRule]] = {
    "linear": Linear,
    "retention": Retention,
    "mamba2": Mamba2,
    "gla": GLA,
    "deltanet": DeltaNet,
    "gated_deltanet": GatedDeltaNet,
    "longhorn": Longhorn,
    "kla": KLA,
}

__all__ = ["WRITE_RULES", "WriteRule", "kaczmarz"]
