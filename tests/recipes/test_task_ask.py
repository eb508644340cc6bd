"""Compiled training steps of task models: the numbers of plain ones, and one compilation for all models of a kind."""

import dataclasses
import functools
import gc
import warnings

import pytest
import torch
from torch._dynamo.utils import counters

from fastweights.recipes import task_ask
from fastweights.recipes.pool import finish
from fastweights.recipes.task_ask import tf32
from fastweights.recipes.task_compare import plan_jobs
from fastweights.recipes.task_job import TaskJob, train_on_task
from fastweights.recipes.task_presets import TaskSettings
from fastweights.recipes.task_settings import TaskCompareSettings
from fastweights.tasks import MQAR
from fastweights.train.presets import ModelSize

CASES = [(label, "fp32", "aot_eager") for label in ("gla+ccq", "mamba2", "softmax")]
CASES += [("kla", "fp32", "inductor"), ("kla", "bf16", "inductor")]
"""What is compiled, and by what: up to torch's own kernels, which takes a moment, or into kernels of its own, which takes a minute."""
TASKS = tuple(MQAR(length=length, pairs=pairs, vocab_size=32) for length, pairs in ((64, 2), (72, 4), (100, 4), (100, 8)))
SETTINGS = TaskSettings(
    train=tuple((task, 1.0) for task in TASKS),
    evaluate=TASKS[:1],
    model=ModelSize(hidden_size=16, num_hidden_layers=2, num_heads=2, intermediate_size=0),
    learning_rates=(1e-2,),
    seeds=(0,),
    steps=10,
    batch_size=3,
    window=5,
)


@pytest.fixture(autouse=True)
def nothing_compiled_yet():
    counters.clear()
    task_ask.compiled_parts.cache_clear()
    task_ask._compiled_answers.cache_clear()


@pytest.fixture
def trained(tmp_path):
    """Train one model: its parameters in a line, and its windows without the time."""

    def trained(label="kla", seed=0, precision="fp32", compile=False):
        settings = dataclasses.replace(SETTINGS, precision=precision)
        folder = tmp_path / f"{compile}"
        job = TaskJob(
            preset="tiny", settings=settings, label=label, learning_rate=1e-2, seed=seed, folder=folder, device="cpu", compile=compile
        )
        model = job.model()
        curve = finish(train_on_task(job, model)).curve
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), [point[:3] for point in curve]

    return trained


@pytest.mark.compile
def test_a_kind_is_compiled_once_for_all_its_models_lengths_and_questions(trained, monkeypatch):
    """Also when the first of them is gone; and what all kinds share, once for all of them."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    for label, graphs in (("kla", 2), ("softmax", 3)):
        for seed in range(2):
            parameters, curve = trained(label, seed, compile=True)
            assert counters["stats"]["unique_graphs"] == graphs
            gc.collect()
            expected, curve_expected = trained(label, seed)
            torch.testing.assert_close(parameters, expected)
            assert [point[2] for point in curve] == [point[2] for point in curve_expected]
    assert not counters["recompiles"] and not counters["graph_break"]


@pytest.mark.full
@pytest.mark.compile
def test_a_process_compiles_all_mixers_of_a_comparison(trained, monkeypatch):
    """More of them than torch compiles versions of one function; each once."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    labels = ("gated_deltanet", "gated_deltanet+ccq", "kla", "kla+ccq", "deltanet", "deltanet+ccq", "gla", "gla+ccq", "mamba2", "softmax")
    assert len(labels) > torch._dynamo.config.recompile_limit
    for number, label in enumerate(labels):
        trained(label, compile=True)
        assert counters["stats"]["unique_graphs"] == 2 + number
    assert not counters["recompiles"] and not counters["graph_break"]


@pytest.mark.full
@pytest.mark.compile
@pytest.mark.parametrize("label, precision, backend", CASES)
def test_compiled_training_gives_the_numbers_of_plain_training(trained, label, precision, backend, monkeypatch):
    """To rounding: what it is off by from float32 is no more than twice what plain training is off by, and ulps of ten steps."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    compiled, plain, exact = (
        trained(label, precision=p, compile=c)[0] for p, c in ((precision, True), (precision, False), ("fp32", False))
    )
    ulps = 2.0**-23 * exact.norm() * SETTINGS.steps
    assert (compiled - exact).norm() <= 2 * (plain - exact).norm() + 4 * ulps


def test_tf32_is_for_the_step_alone():
    before = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.fp32_precision
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tf32(False):
            assert torch.get_float32_matmul_precision() == before[0]
        with pytest.raises(KeyError), tf32(True):
            assert torch.backends.cuda.matmul.fp32_precision == "tf32" and torch.backends.cuda.matmul.allow_tf32
            raise KeyError
        assert torch.get_float32_matmul_precision() == before[0] and torch.backends.cuda.matmul.fp32_precision != "tf32"


def test_what_is_compiled_and_in_which_precision(tmp_path):
    given = dict(task="mqar", mixers=("kla",), out=tmp_path, device="cpu")
    for compile, expected in (("auto", False), ("on", True), ("off", False)):
        assert [job.compile for job in plan_jobs(TaskCompareSettings(**given, compile=compile))] == [expected]
    with pytest.raises(ValueError, match="precision='tf32' is of a GPU's tensor cores"):
        plan_jobs(TaskCompareSettings(**given, precision="tf32"))
