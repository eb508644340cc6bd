"""Training by transformers' Trainer on accelerate: from a model and text to the end, by way of any number of interruptions.

A cached corpus needs no state of its own: a batch is a function of its number (`packing`), and the Trainer's checkpoint holds the step.
What is streamed or mixed is resumed from the places of its readers (`stream`), and memory that is carried over from what the windows left
(`carry`): a checkpoint holds either in a file for each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import TrainerCallback

from fastweights.train.checkpoints import last_checkpoint
from fastweights.train.corpus import Corpus
from fastweights.train.packed_trainer import Logs, Model, PackedTrainer
from fastweights.train.presets import TrainSettings
from fastweights.train.sharded_trainer import ShardedTrainer
from fastweights.train.stream import Stream

OnStep = Callable[[int, Logs], None]


class Training(NamedTuple):
    """What is left of a training besides the model, which is trained in place."""

    finished: bool
    """False if `should_stop` ended it early: the same call goes on from the last checkpoint."""
    history: list[Logs]
    """Every `log_every` steps: step, loss (nats a token), grad_norm, learning_rate, seconds (of training, over all resumptions)."""


def train(
    model: Model,
    text: Corpus | Stream,
    settings: TrainSettings,
    *,
    folder: Path,
    seed: int = 0,
    device: str = "cpu",
    log_to: tuple[str, ...] = (),
    on_step: OnStep | None = None,
    on_log: Callable[[Logs], None] = lambda logs: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Training:
    """Train any causal language model of transformers on packed windows; go on from the last whole checkpoint in `folder` if there is one.

    Args:
        model: trained in place. If its forward takes `cu_seqlens` it is given them; else `position_ids`, from which transformers'
            attention reads the borders of documents.
        device: `cpu` or `cuda`.
        log_to: names of transformers' loggers, such as `tensorboard`.
        on_step: called after each step with (steps done, the last logged values) in place of the Trainer's own progress bar.
        on_log: called every `log_every` steps with all that is logged: what `Training.history` keeps, and tokens, tokens_per_second,
            mfu (where the device's peak is known), memory (most bytes so far, of the device or the process) and what `observe` gives.
        should_stop: asked every `log_every` steps; if true, a checkpoint is saved and training ends.

    Raises:
        ValueError: model, text, settings and the number of ranks do not fit together, or not with the checkpoint.
        FloatingPointError: a loss or gradient is not finite, or a loss is a spike by `settings.spike`; the message names step, batch and
            tensor. Checkpoints stay.
    """
    kind = ShardedTrainer if settings.sharding == "fsdp2" else PackedTrainer
    trainer = kind(model, text, settings, folder=folder, seed=seed, device=device, log_to=log_to, quiet=on_step is not None)
    trainer.add_callback(_Hooks(trainer, on_step, on_log, should_stop))
    if settings.activation_checkpointing:  # the method was renamed in transformers 5.2x
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    use_cache, model.config.use_cache = model.config.use_cache, False
    try:
        checkpoint = last_checkpoint(folder)
        if checkpoint is not None:
            trainer.find_place(Path(checkpoint))
        trainer.train(resume_from_checkpoint=checkpoint)
    finally:
        model.config.use_cache = use_cache
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Training(finished=trainer.state.global_step >= settings.steps, history=history)


class _Hooks(TrainerCallback):
    """What `train` hangs into the Trainer: the clock, the report of progress, and the way to stop."""

    def __init__(
        self, trainer: PackedTrainer, on_step: OnStep | None, on_log: Callable[[Logs], None], should_stop: Callable[[], bool]
    ) -> None:
        self.trainer, self.on_step, self._on_log, self.should_stop = trainer, on_step, on_log, should_stop

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.trainer.start_clock()

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if "loss" in logs:
            self._on_log({name: value for name, value in logs.items() if name != "epoch"} | {"step": state.global_step})

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if self.on_step is not None:
            self.on_step(state.global_step, state.log_history[-1] if state.log_history else {})
        if state.global_step >= args.max_steps:
            control.should_log = True  # so that the curve reaches the end, and a short one has a point
        if state.global_step % args.logging_steps == 0 and self._any_rank_should():  # elsewhere, a point of the curve would miss some steps
            control.should_save = control.should_training_stop = True

    def _any_rank_should(self) -> bool:
        """All ranks stop at one step, whichever heard of it first: a rank that went on alone would wait for the others for ever."""
        here = torch.tensor([float(self.should_stop())], device=self.trainer.args.device)
        return bool(self.trainer.accelerator.reduce(here) > 0)
