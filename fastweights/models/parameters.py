"""Which parameters decay, and which act in float32."""

from __future__ import annotations

from typing import Any

from torch import nn

from fastweights.precision import float32_parameters


def parameter_groups(model: nn.Module, weight_decay: float = 0.1) -> list[dict[str, Any]]:
    """Two groups for an optimiser: matrices with ``weight_decay``; gates, norms, biases, A_log and dt_bias without.

    Every trainable parameter is in exactly one. Gates are all that the write and read rules own: they set time scales, which a pull to zero
    would shift. The embedding decays, as it is also the output matrix.
    """
    gates = {id(parameter) for _, parameter in float32_parameters(model)}
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    decays = {name: parameter.dim() >= 2 and id(parameter) not in gates for name, parameter in trainable}
    return [
        {
            "params": [parameter for name, parameter in trainable if decays[name] is decay],
            "param_names": [name for name, _ in trainable if decays[name] is decay],
            "weight_decay": weight_decay if decay else 0.0,
        }
        for decay in (True, False)
    ]
