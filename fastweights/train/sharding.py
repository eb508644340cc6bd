"""A model in shards over the ranks, by PyTorch's own `fully_shard` (FSDP2): matrices computed with in bfloat16, gates in float32.

FSDP2 casts the parameters of a unit to one dtype before each forward pass. A decay of 0.999 would be 1 in bfloat16, so in each block
the parameters that act in float32 (`fastweights.precision`) are a unit of their own. What goes into a module is never cast: activations
have the dtype of the embedding, and a memory that is passed in keeps float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastweights.models import FastWeightsForCausalLM
from fastweights.precision import Float32Module


def shard(model: FastWeightsForCausalLM, mesh: DeviceMesh | None = None, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Shard the parameters of a model in place: two units a block, matrices and gates, and two for the rest.

    Args:
        model: on the meta device, to be filled by `initialize_`, or with its weights, each rank with the same.
        mesh: the ranks; None: all.
        dtype: of the matrices in forward and backward. The shards, which the optimiser sees, stay as they are, and gradients are summed
            over the ranks in float32.
    """
    matrices = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    gates = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for part in (*model.model.layers, model):
        fully_shard(list(_float32_modules(part)), mesh=mesh, mp_policy=gates)
        fully_shard(part, mesh=mesh, mp_policy=matrices)


def unshard(model: FastWeightsForCausalLM) -> FastWeightsForCausalLM | None:
    """The model whole, on the CPU of the first rank; None on the others, which must ask too."""
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() > 0:
        return None
    with torch.device("meta"):
        whole = FastWeightsForCausalLM(model.config)
    whole.load_state_dict(weights, assign=True)
    whole.tie_weights()
    return whole


def initialize_(model: FastWeightsForCausalLM, device: torch.device | str, seed: int = 0) -> None:
    """Give a model that was made on the meta device memory and weights: those of the seed, however it is sharded, bit for bit.

    No rank holds more than its shards and one whole parameter.
    """
    model.to_empty(device=device)
    model.tie_weights()  # `to_empty` has parted them
    torch.manual_seed(seed)
    with _DrawWhole():
        model.init_weights()


def _float32_modules(part: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules with parameters in float32 that no unit has yet: all that is below them is float32 too."""
    for child in part.children():
        if isinstance(child, Float32Module):
            if any(True for _ in child.parameters()):
                yield child
        elif not isinstance(child, nn.ModuleList):
            yield from _float32_modules(child)


class _DrawWhole(TorchDispatchMode):
    """Every rank draws a whole parameter and keeps its shard. Shards that draw for themselves would be others for each number of ranks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Tensor:
        x = args[0] if args else None
        if not isinstance(x, DTensor) or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        whole = func(torch.empty(x.shape, dtype=x.dtype, device=x.device), *args[1:], **(kwargs or {}))
        return x.copy_(distribute_tensor(whole, x.device_mesh, x.placements, src_data_rank=None))
