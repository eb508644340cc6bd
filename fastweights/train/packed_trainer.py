"""transformers' Trainer on accelerate, fed with packed rows; ours are the batches, the guards and the numbers that are logged."""

from __future__ import annotations

import inspect
import json
import resource
import statistics
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.trainer_callback import PrinterCallback

from fastweights.models import FastWeightsForCausalLM, parameter_groups
from fastweights.models.loss import loss_and_gradients, losses_of_logits
from fastweights.train.carry import CarriedMemory, batches_of, check_carry
from fastweights.train.checkpoints import keep_newest
from fastweights.train.corpus import Corpus
from fastweights.train.flops import peak_flops, training_flops
from fastweights.train.observe import first_window, observe
from fastweights.train.packing import PackedBatches
from fastweights.train.presets import TrainSettings
from fastweights.train.stream import Stream, StreamRows

PLACES = "places-of-rank-{}.json"
CARRIED = "carried-by-rank-{}.pt"
CURVE = ("step", "loss", "grad_norm", "learning_rate", "seconds")
"""What a checkpoint remembers of each point of the curve."""
WHOLE_LOGITS = 2**26
"""Numbers of logits that a micro-batch may hold at a time; above, they are made piece by piece, and again in the backward pass."""
SPIKE_STEPS = 100
"""Steps that a spike is measured by; the first fifth of them are never one."""
Logs = dict[str, Any]
"""Numbers by name."""
Model = Any
"""A `PreTrainedModel`, or a `PeftModel` around one, which is none."""


class PackedTrainer(transformers.Trainer):
    """transformers' Trainer fed with packed rows, which stops at the first number that is not finite.

    Raises:
        ValueError: a step cannot be shared out by whole windows over the ranks.
    """

    def __init__(
        self,
        model: Model,
        text: Corpus | Stream,
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
            logging_steps=settings.log_every,
            logging_nan_inf_filter=False,
            disable_tqdm=quiet,
            report_to=list(log_to),
            remove_unused_columns=False,
            ignore_data_skip=isinstance(text, Stream),
            dataloader_pin_memory=device != "cpu",
            ddp_find_unused_parameters=False,  # there are none, and looking for them takes time at every step
        )
        # Where it sees several GPUs and no torchrun, the Trainer would deal one packed row out over all of them, its borders too.
        arguments._n_gpu = min(arguments.n_gpu, 1)
        self.settings = settings
        ranks = arguments.world_size
        windows, rest = divmod(settings.batch_tokens, settings.sequence_length * settings.accumulation * ranks)
        if rest:
            raise ValueError(
                f"batch_tokens={settings.batch_tokens} is not a whole number of windows of sequence_length={settings.sequence_length} in "
                f"each of accumulation={settings.accumulation} pieces on each of {ranks} ranks"
            )
        self.place_of = {"rank": arguments.process_index, "ranks": ranks}
        self.batches: PackedBatches | StreamRows
        if isinstance(text, Corpus):
            self.batches = batches_of(text, settings, seed=seed, **self.place_of)
        else:
            cut = {"sequence_length": settings.sequence_length, "windows": windows, "workers": settings.workers}
            self.batches = StreamRows(text, seed=seed, **cut, **self.place_of)
        self.carried: CarriedMemory | None = None
        if settings.carry_memory:
            check_carry(model.config, by_number=isinstance(text, Corpus))
            self.carried = CarriedMemory(model.config, sequence_length=settings.sequence_length, pieces=settings.accumulation)
        self._used: deque[str] = deque(maxlen=settings.accumulation)
        self.inputs = input_names(model)
        self.flops_per_token = training_flops(model, settings.sequence_length)
        whole = windows * settings.sequence_length * model.config.vocab_size <= WHOLE_LOGITS
        self.loss_only = {} if whole or not _loses_without_logits(model) else {"logits_to_keep": 1}
        self._began = self._logged_at = 0.0
        self._logged_step = 0
        self._window: dict[str, Any] = {}
        self._step_loss, self._recent = 0.0, deque[float](maxlen=SPIKE_STEPS)
        if settings.compile:
            compile_layers(model)
        super().__init__(model=model, args=arguments, train_dataset=self.batches)
        if quiet:
            self.remove_callback(PrinterCallback)

    def get_train_dataloader(self) -> DataLoader:
        """One packed row a micro-batch. Not handed to accelerate: the batches know their rank."""
        streamed = isinstance(self.batches, StreamRows)
        names = [*self.inputs, *(["reader", "place"] if streamed else ["continued"] if self.carried else [])]
        return DataLoader(
            self.batches, batch_size=1, collate_fn=partial(_only_row, names), num_workers=self.settings.workers if streamed else 0
        )

    def find_place(self, checkpoint: Path) -> None:
        """Let streamed text, or carried memory, go on from where a checkpoint left it.

        Raises:
            ValueError: the checkpoint is of another number of ranks.
        """
        here, before, what = self.place_of["rank"], None, "streamed text"
        if isinstance(self.batches, StreamRows):
            file = checkpoint / PLACES.format(here)
            place = json.loads(file.read_text()) if file.exists() else {"ranks": None, "fed": 0, "places": {}}
            before, self.batches.fed, self.batches.places = place["ranks"], place["fed"], place["places"]
        elif self.carried:
            file, what = checkpoint / CARRIED.format(here), "carried memory"
            before = self.carried.load(file, self.args.device) if file.exists() else None
        else:
            return
        if before != self.place_of["ranks"]:
            raise ValueError(
                f"{checkpoint} was written by {before or 'fewer'} ranks and there are {self.place_of['ranks']}; {what} is shared out by "
                "ranks, so it goes on with as many"
            )

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:  # not the Trainer's own removal, which takes whatever is named checkpoint- for one
            assert self.args.output_dir is not None
            keep_newest(Path(self.args.output_dir), self.settings.keep_checkpoints)

    def _save_rng_state(self, output_dir: str) -> None:
        """What the Trainer saves on every rank, before the file that makes a checkpoint whole."""
        super()._save_rng_state(output_dir)
        if isinstance(self.batches, StreamRows):
            place = {"ranks": self.place_of["ranks"], "fed": self.batches.fed, "places": self.batches.places}
            Path(output_dir, PLACES.format(self.place_of["rank"])).write_text(json.dumps(place))
        if self.carried:
            self.carried.save(Path(output_dir, CARRIED.format(self.place_of["rank"])), self.place_of["ranks"])
        self.accelerator.wait_for_everyone()  # else the first rank could call whole what another is still writing

    def _take_place(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Note what is used, and leave the tensors."""
        if isinstance(self.batches, StreamRows):
            reader, place = inputs.pop("reader"), inputs.pop("place")
            self._used.append(f"reader {reader}, after {self.batches.places.get(reader, 'the beginning')}")
            self.batches.fed += 1
            self.batches.places[reader] = place
        return inputs

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        inputs = super()._prepare_inputs(inputs)
        if self.settings.compile and "cu_seqlens" in inputs:  # each row has another number of documents: compile once for any
            torch._dynamo.maybe_mark_dynamic(inputs["cu_seqlens"], 0)
        return inputs

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Weight decay is for matrices: never for gates, norms and biases."""
        return parameter_groups(model)[0]["param_names"]

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Forward and backward of a micro-batch; what is not finite stops here, before clipping spreads it and a weight takes it."""
        inputs = self._take_place(inputs)
        if self.carried:
            inputs = self.carried.begin(inputs)
        if "cu_seqlens" in inputs and (self.state.global_step + 1) % self.settings.log_every == 0:
            self._window = first_window(inputs, self.settings.sequence_length)
        loss = super().training_step(model, inputs | self.loss_only, num_items_in_batch)
        norm = _whole(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
        if not torch.isfinite(loss + norm):
            raise FloatingPointError(self._stopped_at(f"the loss is {loss.item():g}; not finite: {_not_finite(model) or 'the loss alone'}"))
        if self.carried:
            self.carried.end(inputs["cache"])
        if self.settings.spike:
            self._look_for_spike(loss.item())
        return loss

    def _look_for_spike(self, loss: float) -> None:
        """`loss` is a micro-batch's share of its step's."""
        self._step_loss += loss
        if not self.accelerator.sync_gradients:
            return
        usual = statistics.median(self._recent) if len(self._recent) >= SPIKE_STEPS // 5 else float("inf")
        if self._step_loss > self.settings.spike * usual:
            text = f"the loss is {self._step_loss:g}, more than spike={self.settings.spike:g} times {usual:g}, the median of the"
            raise FloatingPointError(self._stopped_at(f"{text} {len(self._recent)} steps before"))
        self._recent.append(self._step_loss)
        self._step_loss = 0.0

    def _stopped_at(self, why: str) -> str:
        step, pieces = self.state.global_step, self.args.gradient_accumulation_steps
        if isinstance(self.batches, StreamRows):
            text = "\n".join(self._used)
        else:
            text = "\n".join(self.batches.describe(batch) for batch in range(step * pieces, (step + 1) * pieces))
        return f"step {step + 1}: {why}.\nCheckpoints in {self.args.output_dir} stay. The text of the step:\n{text}"

    def log(self, logs: Logs, start_time: float | None = None) -> None:
        if "loss" in logs:
            logs.update(self._speed(), **self._observed())
        super().log(logs, start_time)
        if "loss" in logs:  # the state is written into every checkpoint, so it keeps the curve alone
            self.state.log_history[-1] = {name: self.state.log_history[-1][name] for name in CURVE}

    def _speed(self) -> Logs:
        now = time.perf_counter() - self._began
        step, batch_tokens = self.state.global_step, self.settings.batch_tokens
        rate = (step - self._logged_step) * batch_tokens / (now - self._logged_at)
        self._logged_step, self._logged_at = step, now
        logs = {"seconds": round(now, 3), "tokens": step * batch_tokens, "tokens_per_second": rate}
        peak = peak_flops(self.args.device, self.settings.precision)
        if peak is not None:
            logs["mfu"] = rate * self.flops_per_token / (peak * self.args.world_size)
        return logs | {"memory": _most_memory(self.args.device)}

    def _observed(self) -> Logs:
        if not self._window:
            return {}
        assert isinstance(self.model, nn.Module)
        with self.compute_loss_context_manager():
            return observe(self.model, self._prepare_inputs(self._window))

    def start_clock(self) -> None:
        """Count seconds on from what the log of an earlier part says."""
        before = [entry["seconds"] for entry in self.state.log_history if "seconds" in entry]
        self._logged_step, self._logged_at = self.state.global_step, before[-1] if before else 0.0
        self._began = time.perf_counter() - self._logged_at


def compile_layers(model: nn.Module) -> None:
    """torch.compile each of its layers, and the loss. Layers share one piece of code, so that it is compiled once, where a whole model is
    unrolled."""
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.compile()
        if isinstance(module, FastWeightsForCausalLM):
            module.losses_of_logits = torch.compile(losses_of_logits)
            module.loss_and_gradients = torch.compile(loss_and_gradients)


def input_names(model: Model) -> list[str]:
    """Which parts of a `PackedRow` a model is given: borders as `cu_seqlens` where its forward names them, else as `position_ids`."""
    borders = "cu_seqlens" if "cu_seqlens" in inspect.signature(_inside(model).forward).parameters else "position_ids"
    return ["input_ids", "labels", borders]


def _only_row(names: list[str], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The batch of one row that there is; a function of the module, so that it travels to a worker."""
    return {name: rows[0][name] for name in names}


def _inside(model: Model) -> PreTrainedModel:
    """The model that adapters were put into."""
    return model if isinstance(model, PreTrainedModel) else model.get_base_model()


def _loses_without_logits(model: Model) -> bool:
    """Can the model's forward give a loss without all logits? Ours can; others would cut the loss to the logits that are kept."""
    return isinstance(_inside(model), FastWeightsForCausalLM)


def _not_finite(model: nn.Module) -> str:
    """Names of the weights and gradients that are not."""
    broken = []
    for name, parameter in model.named_parameters():
        for what, tensor in ((f"weight {name}", parameter), (f"gradient of {name}", parameter.grad)):
            if tensor is not None and not _whole(torch.isfinite(tensor).all()):
                broken.append(what)
    return ", ".join(broken)


def _whole(x: Tensor) -> Tensor:
    """Of a tensor that is shared out over the ranks, all of it; they must all ask."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def _most_memory(device: torch.device) -> int:
    """Bytes: on a GPU the most that tensors have held, else the most that the process has."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
