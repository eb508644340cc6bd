"""Task models on a card: steps as CUDA graphs, and several models side by side on streams of their own."""

import dataclasses
import io
import os
import warnings

import pytest
import torch
from rich.console import Console
from torch._dynamo.utils import counters

from fastweights.recipes.pool import finish, run_jobs
from fastweights.recipes.task_job import TaskJob, train_on_task
from fastweights.recipes.task_presets import TaskSettings
from fastweights.tasks import MQAR, Stack
from fastweights.train.presets import ModelSize

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

needs_no_shape_checks = pytest.mark.skipif(
    os.environ.get("FASTWEIGHTS_SHAPE_CHECKS", "1") != "0", reason="the shape checker breaks torch.compile: FASTWEIGHTS_SHAPE_CHECKS=0"
)
MIXERS = ("gated_deltanet", "kla", "kla+ccq", "gla", "gla+ccq", "mamba2", "softmax")
SMALL = TaskSettings(
    train=((MQAR(length=64, pairs=4, vocab_size=256), 1.0), (Stack(length=100, stacks=4, values=20), 1.0)),
    evaluate=(MQAR(length=64, pairs=4, vocab_size=256),),
    model=ModelSize(hidden_size=64, num_hidden_layers=2, num_heads=2, intermediate_size=64),
    learning_rates=(1e-3,),
    seeds=(0,),
    steps=12,
    batch_size=32,
    window=4,
    samples=64,
)


@pytest.fixture
def job(tmp_path):
    def job(device="cuda", **changes):
        settings = dataclasses.replace(SMALL, **changes.pop("settings", {}))
        folder = tmp_path / f"{device}-{changes.get('graphs', False)}-{changes.get('compile', False)}"
        given = dict(preset="small", settings=settings, label="kla", learning_rate=1e-3, seed=0, folder=folder, device=device)
        return TaskJob(**given | changes)

    return job


def trained(job):
    """The model's parameters, and the losses of the windows."""
    model = job.model().to(job.device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a step that cannot be recorded is a warning
        curve = finish(train_on_task(job, model)).curve
    return torch.cat([parameter.detach().flatten().cpu().double() for parameter in model.parameters()]), [point.loss for point in curve]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("label", MIXERS)
def test_replayed_steps_do_what_launched_steps_do(job, label, precision):
    """As far from the launched ones as those are from the CPU's, at most: the sums of a gradient may be in another order."""
    here, launched, replayed = (
        trained(job(label=label, settings=dict(precision=precision), **how)) for how in (dict(device="cpu"), {}, dict(graphs=True))
    )
    assert (replayed[0] - launched[0]).abs().max() <= (launched[0] - here[0]).abs().max()
    assert replayed[1] == pytest.approx(launched[1], rel=1e-4 if precision == "fp32" else 1e-2)


@needs_no_shape_checks
@pytest.mark.parametrize(
    "label, precision", [("kla", "fp32"), ("kla", "tf32"), ("kla", "bf16"), ("gla+ccq", "fp32"), ("gla+ccq", "tf32"), ("softmax", "tf32")]
)
def test_compiled_steps_do_what_plain_ones_do_and_can_be_recorded(job, label, precision):
    """Replayed, they are what they are launched; and as near to plain ones as precision goes. Another model compiles nothing."""
    given = dict(label=label, settings=dict(precision=precision))
    plain = trained(job(**given))
    launched, replayed = (trained(job(**given, compile=True, graphs=graphs)) for graphs in (False, True))
    compiled = counters["stats"]["unique_graphs"]
    trained(job(**given, compile=True, graphs=True, seed=1))
    assert counters["stats"]["unique_graphs"] == compiled
    rel = 1e-4 if precision == "fp32" else 1e-2
    assert replayed[1] == pytest.approx(launched[1], rel=1e-4 if precision == "fp32" else 1e-3)
    assert launched[1] == pytest.approx(plain[1], rel=rel)
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("drawers", [0, 2])
def test_side_by_side_each_model_becomes_what_it_becomes_alone(job, drawers):
    """And a checkpoint of launched steps is gone on from by replayed ones."""
    jobs = [job(learning_rate=rate, seed=seed, graphs=True, drawers=drawers) for seed in (0, 1) for rate in (1e-3, 1e-2)]
    alone = [trained(one) for one in jobs]
    rows = []
    for one in jobs:
        one.checkpoint.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_jobs(jobs, processes=1, threads=1, console=Console(file=io.StringIO()), on_row=rows.append, at_once=3)
    losses = {(row["seed"], row["learning_rate"]): [point[1] for point in row["training"]] for row in rows}
    for one, (_, expected) in zip(jobs, alone, strict=True):
        assert losses[one.seed, one.learning_rate] == pytest.approx(expected, rel=1e-4)


def test_either_goes_on_from_the_others_checkpoint(job):
    straight = trained(job())[1]
    for first, then in ((False, True), (True, False)):
        began = job(graphs=first)
        began.checkpoint.unlink(missing_ok=True)
        assert finish(train_on_task(began, began.model().to("cuda"), should_stop=lambda: True)) is None
        goes_on = job(graphs=then)
        goes_on.checkpoint.parent.mkdir(exist_ok=True)
        began.checkpoint.replace(goes_on.checkpoint)
        assert trained(goes_on)[1] == pytest.approx(straight, rel=1e-4)
