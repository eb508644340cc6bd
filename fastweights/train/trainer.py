"""Training through transformers' Trainer on accelerate; ours are the packed batches, the guards and the report of progress.

The data need no state of their own: a batch is a function of its number (`packing`), and the Trainer's checkpoint holds the step.
"""

from __future__ import annotations

import inspect
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from fastweights.models import parameter_groups
from fastweights.train.corpus import Corpus
from fastweights.train.packing import PackedBatches
from fastweights.train.presets import TrainSettings

CHECKPOINT = "checkpoint-"
OnStep = Callable[[int, dict[str, float]], None]


class Training(NamedTuple):
    """What is left of a training besides the model, which is trained in place."""

    finished: bool
    """False if `should_stop` ended it early: the same call goes on from the last checkpoint."""
    history: list[dict[str, float]]
    """Every `log_every` steps: step, loss (nats a token), grad_norm, learning_rate, seconds (of training, over all resumptions)."""


def train(
    model: PreTrainedModel,
    corpus: Corpus,
    settings: TrainSettings,
    *,
    folder: Path,
    seed: int = 0,
    device: str = "cpu",
    log_to: tuple[str, ...] = (),
    on_step: OnStep | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Training:
    """Train any causal language model of transformers on packed windows; go on from the last whole checkpoint in `folder` if there is one.

    Args:
        model: trained in place. If its forward takes `cu_seqlens` it is given them; else `position_ids`, from which transformers'
            attention reads the borders of documents.
        device: `cpu` or `cuda`.
        log_to: names of transformers' loggers, such as `tensorboard`.
        on_step: called after each step with (steps done, the last logged values) in place of the Trainer's own progress bar.
        should_stop: asked every `log_every` steps; if true, a checkpoint is saved and training ends.

    Raises:
        FloatingPointError: a loss or gradient is not finite; the message names step, batch and tensor. Checkpoints stay.
    """
    trainer = PackedTrainer(model, corpus, settings, folder=folder, seed=seed, device=device, log_to=log_to, quiet=on_step is not None)
    trainer.add_callback(_Hooks(trainer, on_step, should_stop))
    use_cache, model.config.use_cache = model.config.use_cache, False
    try:
        trainer.train(resume_from_checkpoint=last_checkpoint(folder))
    finally:
        model.config.use_cache = use_cache
    history = [{k: v for k, v in entry.items() if k != "epoch"} for entry in trainer.state.log_history if "loss" in entry]
    return Training(finished=trainer.state.global_step >= settings.steps, history=history)


def last_checkpoint(folder: Path) -> str | None:
    """The newest whole checkpoint of a run; what a kill left half-written is removed."""
    whole: dict[int, Path] = {}
    for path in folder.glob(f"{CHECKPOINT}*"):
        try:
            whole[int(json.loads((path / "trainer_state.json").read_text())["global_step"])] = path  # the Trainer writes this file last
        except (OSError, ValueError, KeyError):
            shutil.rmtree(path, ignore_errors=True)
    return str(whole[max(whole)]) if whole else None


class PackedTrainer(transformers.Trainer):
    """transformers' Trainer fed with `PackedBatches`, which stops at the first number that is not finite."""

    def __init__(
        self,
        model: PreTrainedModel,
        corpus: Corpus,
        settings: TrainSettings,
        *,
        folder: Path,
        seed: int,
        device: str,
        log_to: tuple[str, ...],
        quiet: bool,
    ) -> None:
        arguments = TrainingArguments(
            output_dir=str(folder),
            max_steps=settings.steps,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=settings.accumulation,
            learning_rate=settings.learning_rate,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": settings.final_learning_rate},
            warmup_steps=round(settings.warmup * settings.steps),
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            max_grad_norm=settings.clip,
            bf16=settings.precision == "bf16",
            seed=seed,
            use_cpu=device == "cpu",
            save_steps=settings.save_every,
            save_total_limit=2,
            logging_steps=settings.log_every,
            logging_nan_inf_filter=False,
            disable_tqdm=quiet,
            report_to=list(log_to),
            remove_unused_columns=False,
            dataloader_pin_memory=device != "cpu",
        )
        windows = settings.batch_tokens // (settings.sequence_length * settings.accumulation * arguments.world_size)
        self.batches = PackedBatches(
            corpus,
            sequence_length=settings.sequence_length,
            windows=windows,
            count=settings.steps * settings.accumulation,
            seed=seed,
            rank=arguments.process_index,
            ranks=arguments.world_size,
        )
        self.inputs = input_names(model)
        self._began = 0.0
        super().__init__(model=model, args=arguments, train_dataset=self.batches)
        if quiet:
            self.remove_callback(PrinterCallback)

    def get_train_dataloader(self) -> DataLoader:
        """One packed row a micro-batch. Not handed to accelerate: the batches know their rank."""
        names = self.inputs
        return DataLoader(self.batches, batch_size=1, collate_fn=lambda rows: {name: rows[0][name] for name in names})

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Weight decay is for matrices: never for gates, norms and biases."""
        return parameter_groups(model)[0]["param_names"]

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Forward and backward of a micro-batch; what is not finite stops here, before clipping spreads it and a weight takes it."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        if not torch.isfinite(loss + norm):
            raise FloatingPointError(self._not_finite(model, loss))
        return loss

    def _not_finite(self, model: nn.Module, loss: Tensor) -> str:
        step, pieces = self.state.global_step, self.args.gradient_accumulation_steps
        broken = []
        for name, parameter in model.named_parameters():
            for what, tensor in ((f"weight {name}", parameter), (f"gradient of {name}", parameter.grad)):
                if tensor is not None and not torch.isfinite(tensor).all():
                    broken.append(what)
        text = "\n".join(self.batches.describe(batch) for batch in range(step * pieces, (step + 1) * pieces))
        return (
            f"step {step + 1}: the loss is {loss.item():g}; not finite: {', '.join(broken) or 'the loss alone'}."
            f" Checkpoints in {self.args.output_dir} stay. The text of the step:\n{text}"
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs["seconds"] = round(time.perf_counter() - self._began, 3)
        super().log(logs, start_time)

    def start_clock(self) -> None:
        """Count seconds on from what the log of an earlier part says."""
        before = [entry["seconds"] for entry in self.state.log_history if "seconds" in entry]
        self._began = time.perf_counter() - (before[-1] if before else 0.0)


def input_names(model: PreTrainedModel) -> list[str]:
    """Which parts of a `PackedRow` a model is given: borders as `cu_seqlens` where its forward names them, else as `position_ids`."""
    borders = "cu_seqlens" if "cu_seqlens" in inspect.signature(model.forward).parameters else "position_ids"
    return ["input_ids", "labels", borders]


class _Hooks(TrainerCallback):
    """What `train` hangs into the Trainer: the clock, the report of progress, and the way to stop."""

    def __init__(self, trainer: PackedTrainer, on_step: OnStep | None, should_stop: Callable[[], bool]) -> None:
        self.trainer, self.on_step, self.should_stop = trainer, on_step, should_stop

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.trainer.start_clock()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if self.on_step is not None:
            self.on_step(state.global_step, state.log_history[-1] if state.log_history else {})
        if state.global_step % args.logging_steps == 0 and self.should_stop():  # elsewhere, a point of the curve would miss some steps
            control.should_save = control.should_training_stop = True
