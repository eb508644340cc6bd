"""The legend of letters, used everywhere in code and docs, and the few types that cross module borders.

========  =======================================================================
B         batch (1 when documents are packed with ``cu_seqlens``)
T         tokens
D         model width (``hidden_size``)
Hk, Hv    key heads; value heads (a multiple of Hk: value head h uses key head h // (Hv // Hk))
K, V      key size and value size of one head
C, N      chunk size and number of chunks
R         rows of state: the batch, or with ``cu_seqlens`` the number of documents
q, k      queries and keys ``[B, T, Hk, K]``
v         values ``[B, T, Hv, V]``
β, η      write strength and Kaczmarz relaxation ``[B, T, Hv]``
log_decay log of the forget gate, ≤ 0 (0 means "forget nothing"), ``[B, T, Hv]`` or per key channel ``[B, T, Hk, K]``
S         the memory ``[R, Hv, K, V]``, float32
μ, C, w   CCQ's running mean ``[R, Hk, K]``, centred second moment ``[R, Hk, K, K]``, and weight ``[R, Hk]``
========  =======================================================================
"""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

Hidden = Float[Tensor, "B T D"]
Query = Float[Tensor, "B T Hk K"]
Key = Float[Tensor, "B T Hk K"]
Value = Float[Tensor, "B T Hv V"]
PerHead = Float[Tensor, "B T H"]
"""A number per token and head: β, η, λ, a scale. H is Hk or Hv, as the docstring says."""
Memory = Float[Tensor, "R Hv K V"]
CuSeqlens = Int[Tensor, "documents_plus_one"]


class Coefficients(NamedTuple):
    """What a write rule tells the recurrence about each token. Every field is optional and float32.

    The kernels know no rule by name; they see ``k̂ = key_scale·k``, ``v̂ = value_scale·v``, ``q̂ = query_scale·q`` and never store them.
    """

    beta: Tensor | None = None
    """Write strength ``[B, T, Hv]``; None means 1. Only the ``delta`` family has one."""
    log_decay: Tensor | None = None
    """Log of the forget gate, ≤ 0: ``[B, T, Hv]``, or ``[B, T, Hk, K]`` per key channel (``decay`` family only). None means 0."""
    key_scale: Tensor | None = None
    """``[B, T, Hk]`` or ``[B, T, Hv]``; None means 1."""
    value_scale: Tensor | None = None
    """``[B, T, Hv]`` or ``[B, T, Hk]``; None means 1."""
    query_scale: Tensor | None = None
    """``[B, T, Hk]``; None means 1. Set by the layer where the query is L2-normalised and the read leaves it alone."""


class CCQState(NamedTuple):
    """The running key covariance Σ = C / w, kept centred. All float32."""

    covariance: Tensor
    """C, the centred second moment times its weight ``[R, Hk, K, K]``."""
    mean: Tensor
    """μ ``[R, Hk, K]``."""
    weight: Tensor
    """w ``[R, Hk]``: the number of keys seen, or their decayed count."""


class MemoryState(NamedTuple):
    """All that one layer carries from one piece of a sequence to the next. Rows are independent: reorder and copy them freely."""

    memory: Tensor
    """S ``[R, Hv, K, V]``, float32."""
    conv: Tensor | None
    """The last ``conv_size − 1`` inputs of the convolution ``[R, conv_size − 1, channels]``; None without a convolution."""
    place: Tensor
    """How many tokens of its document each row has read ``[R]``, int64."""
    read: CCQState | None
    """The read's own memory; None for the raw read."""
