"""How memory is read. To add a rule: one file here, one line below, one section in docs/rules.md."""

from fastweights.read.base import ReadRule
from fastweights.read.ccq import CCQ
from fastweights.read.projection import Projection
from fastweights.read.raw import Raw

READ_RULES: dict[str, type[ReadRule]] = {
    "raw": Raw,
    "ccq": CCQ,
    "projection": Projection,
}

__all__ = ["READ_RULES", "ReadRule"]
