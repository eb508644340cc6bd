"""The processes of the distributed tests: started here, joined by gloo, as torchrun would start them. One core is enough."""

import dataclasses
import os
import socket
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from fastweights.models import FastWeightsCache, FastWeightsConfig, FastWeightsForCausalLM, parameter_groups
from fastweights.notation import MemoryState
from fastweights.precision import float32_parameters
from fastweights.train.corpus import load_corpus
from fastweights.train.presets import TrainSettings
from fastweights.train.sharding import initialize_, shard
from fastweights.train.tokenizer import byte_tokenizer
from fastweights.train.trainer import train

SETTINGS = TrainSettings(steps=8, batch_tokens=128, sequence_length=16, save_every=100, log_every=1, learning_rate=1e-2, warmup=0.2)


def in_processes(count, function, folder, *arguments) -> list:
    """What `function(*arguments)`, a function of a module, gives in each of `count` processes that torch.distributed has joined."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_one, (count, port, folder, function, arguments), nprocs=count)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(count)]


def _one(rank, count, port, folder, function, arguments) -> None:
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{count}", "LOCAL_WORLD_SIZE": f"{count}"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": f"{port}"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.save(function(*arguments), folder / f"rank{rank}.pt")
    dist.barrier()  # a process that ends early takes its connections along
    dist.destroy_process_group()


@dataclasses.dataclass
class Run:
    """A training, or a part of one."""

    folder: Path
    stop_at: int | None = None
    """The step at which to stop; None: go to the end."""
    stopped_by: int | None = None
    """The rank that is told to stop; None: all are."""
    changes: dict = dataclasses.field(default_factory=dict)
    """To `SETTINGS`."""

    def __call__(self, texts: Path) -> dict:
        """What this process saw: the rows of tokens it was fed, the training curve, the weights, which of them are gates, what dtypes they
        have inside of forward, and whether training is over."""
        corpus = load_corpus([str(texts)], byte_tokenizer(), cache=texts.parent / "cache")
        torch.manual_seed(0)
        shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 2, "intermediate_size": 48}
        model = FastWeightsForCausalLM(FastWeightsConfig(vocab_size=258, mixer="kla+ccq", initializer_range=0.1, **shape))
        fed, done, dtypes = [], [], {}
        for name, module in model.named_modules():
            module.register_forward_pre_hook(
                lambda module, arguments, name=name: dtypes.update((f"{name}.{own}", p.dtype) for own, p in own_parameters(module))
            )
        model.register_forward_pre_hook(
            lambda module, arguments, named: fed.append(named["input_ids"][0].tolist()) if module.training else None, with_kwargs=True
        )
        training = train(
            model,
            corpus,
            dataclasses.replace(SETTINGS, **self.changes),
            folder=self.folder,
            on_step=lambda step, logs: done.append(step),
            should_stop=lambda: done[-1] == self.stop_at and self.stopped_by in (None, int(os.environ.get("RANK", "0"))),
        )
        curve = torch.tensor([[entry[name] for name in ("loss", "grad_norm", "learning_rate")] for entry in training.history])
        seen = {"fed": fed, "curve": curve, "finished": training.finished, "steps": done, "dtypes": dtypes}
        return seen | {"weights": whole(model.named_parameters()), "gates": {name for name, _ in float32_parameters(model)}}


def own_parameters(module: torch.nn.Module):
    return module.named_parameters(recurse=False)


def train_each(runs: list[Run], texts: Path) -> list[dict]:
    """One after the other in the same processes: starting them takes the longest."""
    return [run(texts) for run in runs]


ROWS = (
    {"tokens": torch.arange(24) * 7 % 64, "cu_seqlens": [0, 7, 24]},
    {"tokens": torch.arange(24) * 11 % 64, "cu_seqlens": [0, 15, 24]},
)
"""The row of each rank: packed, with as many targets, so that the mean over the ranks is the mean over the tokens."""


def born_on_meta() -> FastWeightsForCausalLM:
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "intermediate_size": 48}
    with torch.device("meta"):
        return FastWeightsForCausalLM(FastWeightsConfig(vocab_size=64, mixer="kla+ccq", initializer_range=0.1, **shape))


def loss_of(model, rank: int) -> torch.Tensor:
    ids = ROWS[rank]["tokens"][None]
    return model(ids, labels=ids, cu_seqlens=torch.tensor(ROWS[rank]["cu_seqlens"]), use_cache=False).loss


def sharded_step(dtype: torch.dtype, recompute: bool, saved: Path | None) -> dict:
    """A step of SGD at rate 1 of a sharded model: its weights before and after, what its modules saw, the gradients, whole on each rank."""
    model = born_on_meta()
    shard(model, dtype=dtype)
    initialize_(model, "cpu", seed=3)
    weights = whole(model.named_parameters())
    shares = {name: p.to_local().numel() / p.numel() for name, p in model.named_parameters()}
    decays = parameter_groups(model)[0]["param_names"]
    if recompute:
        model.gradient_checkpointing_enable()
    seen = {}

    def see(name: str, module: torch.nn.Module, state) -> None:
        seen.update((f"{name}.{own}", p.detach().clone()) for own, p in module.named_parameters(recurse=False))
        if isinstance(state, MemoryState):  # the layer's, not the convolution's
            seen[f"{name}.state"] = state.memory

    for name, module in model.named_modules():
        module.register_forward_pre_hook(
            lambda module, arguments, named, name=name: see(name, module, named.get("state")), with_kwargs=True
        )
    loss = loss_of(model.train(), dist.get_rank())
    loss.backward()
    gradients = whole((name, p.grad) for name, p in model.named_parameters())
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    after = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))  # whole on rank 0
    if saved is not None and dist.get_rank() == 0:
        model.save_pretrained(saved, state_dict=dict(after))  # which it empties
    with torch.no_grad():
        cache = FastWeightsCache(model.config)
        for piece in ROWS[0]["tokens"][None].split(12, dim=1):
            model.eval()(piece, cache=cache)
    return {
        "weights": weights,
        "shares": shares,
        "seen": seen,
        "gradients": gradients,
        "after": after,
        "loss": loss.item(),
        "decays": decays,
    }


def whole(parameters) -> dict[str, torch.Tensor]:
    """By name, put together where they are in shards."""
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in parameters}


def sharded_steps(cases: list[tuple]) -> list[dict]:
    return [sharded_step(*case) for case in cases]
