"""The Trainer for a model in shards.

accelerate shards a model too, but by one policy for all of a block, not in processes on the CPU, and it finds parameters again by their
addresses, of which a rank has none for a gate that it has no part of (fewer heads than ranks). So the model is in shards before the
Trainer makes an optimizer, and accelerate is given that alone. A checkpoint is torch.distributed.checkpoint's: each rank writes its shards,
and any number of ranks reads them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import checkpoint as sharded_checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from fastweights.models import FastWeightsForCausalLM
from fastweights.train.packed_trainer import PackedTrainer
from fastweights.train.sharding import shard

SHARDS, SCHEDULER = "shards", "scheduler.pt"


class ShardedTrainer(PackedTrainer):
    """A `PackedTrainer` that shares out a model of ours over all ranks. Give it the model whole, each rank the same.

    Raises:
        ValueError: the model is not ours, or there is one rank.
    """

    def __init__(self, model: Any, *args: Any, **options: Any) -> None:
        if not isinstance(model, FastWeightsForCausalLM):
            raise ValueError(f"sharding='fsdp2' is for fastweights models, and this is a {type(model).__name__}; sharding='ddp' takes any")
        super().__init__(model, *args, **options)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """In pieces: a whole model may be more than a device holds."""
        if self.args.world_size == 1:
            raise ValueError("sharding='fsdp2' shares a model out over processes, and there is one; start several by torchrun")
        assert isinstance(model, FastWeightsForCausalLM)
        dtype = torch.bfloat16 if self.settings.precision == "bf16" else torch.float32
        shard(model, init_device_mesh(device.type, (self.args.world_size,)), dtype=dtype)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return model if isinstance(model, _InShards) else _InShards(model)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Nothing: weights are saved with the optimizer."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        sharded_checkpoint.save(self._state(), checkpoint_id=Path(output_dir, SHARDS))
        if self.args.should_save:
            assert self.lr_scheduler is not None
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Nothing: weights are loaded with the optimizer."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        state = self._state()
        sharded_checkpoint.load(state, checkpoint_id=Path(checkpoint, SHARDS))
        model, optimizer = self._parts()
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        assert self.lr_scheduler is not None
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER), weights_only=True))

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(*self._parts())
        return {"model": model, "optimizer": optimizer}

    def _parts(self) -> tuple[nn.Module, Optimizer]:
        assert isinstance(self.model, nn.Module) and self.optimizer is not None
        return self.model, self.optimizer


class _InShards(nn.Module):
    """What keeps accelerate from copying a sharded model to every rank: a model that is wrapped already."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module: Any = module

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.module(*args, **options)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of a piece of a step stay where they are, as with DDP; the last piece's backward pass sums them over the ranks."""
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)
