"""The recurrences as pure functions of tensors: no nn.Module, no rule by name. What is public is here; `dispatch` picks what runs."""

from fastweights.ops.ccq.query import ccq_query, ccq_step_
from fastweights.ops.conv.causal import causal_conv, causal_conv_step_
from fastweights.ops.delta.ccq_step import delta_ccq_step_
from fastweights.ops.dispatch import decay, decay_step_, delta, delta_step_, explain
from fastweights.ops.functional import decay_memory, delta_memory
from fastweights.ops.token.columns import split_columns
from fastweights.ops.token.head_dots import head_dots
from fastweights.ops.token.linear import gated_linears, linears

__all__ = [
    "causal_conv",
    "causal_conv_step_",
    "ccq_query",
    "ccq_step_",
    "decay",
    "decay_memory",
    "decay_step_",
    "delta",
    "delta_ccq_step_",
    "delta_memory",
    "delta_step_",
    "explain",
    "gated_linears",
    "head_dots",
    "linears",
    "split_columns",
]
