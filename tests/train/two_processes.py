"""The other processes of the distributed tests: started here, joined by gloo, as torchrun would start them. One core is enough."""

import dataclasses
import os
import socket
from pathlib import Path

import torch
from torch import distributed as dist

from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.train.corpus import load_corpus
from fastweights.train.presets import TrainSettings
from fastweights.train.tokenizer import byte_tokenizer
from fastweights.train.trainer import train

SETTINGS = TrainSettings(steps=8, batch_tokens=128, sequence_length=16, save_every=100, log_every=1, learning_rate=1e-2, warmup=0.2)


def in_two_processes(function, folder, *arguments) -> list:
    """What `function(*arguments)`, a function of a module, gives in each of two processes that torch.distributed has joined."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_one, (port, folder, function, arguments), nprocs=2)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def _one(rank, port, folder, function, arguments) -> None:
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
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
        """What this process saw: the rows of tokens it was fed, the training curve, the weights, and whether training is over."""
        corpus = load_corpus([str(texts)], byte_tokenizer(), cache=texts.parent / "cache")
        torch.manual_seed(0)
        shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 2, "intermediate_size": 48}
        model = FastWeightsForCausalLM(FastWeightsConfig(vocab_size=258, mixer="kla+ccq", initializer_range=0.1, **shape))
        fed, done = [], []
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
        return {"fed": fed, "curve": curve, "finished": training.finished, "steps": done, "weights": model.state_dict()}


def train_each(runs: list[Run], texts: Path) -> list[dict]:
    """One after the other in the same processes: starting them takes the longest."""
    return [run(texts) for run in runs]
