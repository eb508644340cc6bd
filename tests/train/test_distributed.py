"""Training in two processes is training in one: by the Trainer (DDP), and by the command under torchrun."""

import dataclasses
import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import TrainingArguments

from fastweights.cli import main
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.recipes.pool import run_jobs
from fastweights.records import read_rows
from fastweights.train.packed_trainer import PackedTrainer
from fastweights.train.trainer import train
from tests.train.two_processes import SETTINGS, Run, in_processes, train_each

pytestmark = pytest.mark.full


CARRIED = {"carry_memory": True, "accumulation": 2}
SHARDED = {"sharding": "fsdp2", "clip": 0.2}
RUNS = {
    "whole": [Run(Path("whole"))],
    "pieces": [Run(Path("pieces"), changes={"accumulation": 2})],
    "carried": [Run(Path("carried"), stop_at=3, changes=CARRIED), Run(Path("carried"), changes=CARRIED)],
    "sharded": [Run(Path("sharded"), stop_at=3, changes=SHARDED), Run(Path("sharded"), changes=SHARDED)],
    "sharded pieces": [Run(Path("sharded-pieces"), changes=SHARDED | CARRIED)],
    "sharded bf16": [Run(Path("sharded-bf16"), changes=SHARDED | {"precision": "bf16", "activation_checkpointing": True})],
    "in more": [Run(Path("in-more"), stop_at=3, changes=SHARDED)],
}
"""By name, and in parts where one is stopped and goes on."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def two(texts, folder):
    """What the parts of each run gave in each of two processes, ``[part][rank]``."""
    parts = [dataclasses.replace(run, folder=folder / run.folder) for run in itertools.chain(*RUNS.values())]
    given = iter(zip(*in_processes(2, train_each, folder, parts, texts), strict=True))
    return {name: list(itertools.islice(given, len(runs))) for name, runs in RUNS.items()}


@pytest.fixture(scope="module")
def alone(texts, folder):
    """The same in one process, and never stopped."""
    return functools.cache(lambda **changes: Run(folder / f"alone{changes}", changes=changes)(texts))


def fed_by_step(results, pieces=1):
    """The tokens of each step, in the order that one process feeds them: pieces of a step go round the ranks."""
    rows = [row for turn in zip(*(result["fed"] for result in results), strict=True) for row in turn]
    size = pieces * len(results)
    return [list(itertools.chain.from_iterable(rows[at : at + size])) for at in range(0, len(rows), size)]


def assert_same_training(results, straight, steps):
    """To float32's rounding, which the order of sums decides; the losses to the 1e-5 that is asked for."""
    ours, theirs = results[0]["curve"], straight["curve"][:steps]
    assert ours.shape == theirs.shape and (ours[:, 0] - theirs[:, 0]).abs().max() <= 1e-5
    torch.testing.assert_close(ours[:, 1:], theirs[:, 1:], rtol=1e-4, atol=0)
    for name, weight in results[0]["weights"].items():
        assert torch.equal(weight, results[-1]["weights"][name]), name


def test_two_processes_train_as_one(two, alone):
    """The same tokens each step, the same losses: in one piece and in two, at uneven numbers of targets in each."""
    straight = alone()
    assert straight["finished"] and straight["curve"][-1, 0] < straight["curve"][0, 0]
    for name, pieces in (("whole", 1), ("pieces", 2)):
        (results,) = two[name]
        assert fed_by_step(results, pieces) == fed_by_step([straight])
        assert results[0]["fed"] != results[1]["fed"]
        assert_same_training(results, straight, steps=8)


def test_carried_memory_in_two_processes(two, alone, texts, folder):
    """Stopped and resumed. Each process carries what its own lanes have read, so another number of them is refused."""
    straight, (first, last) = alone(**CARRIED), two["carried"]
    assert fed_by_step(first, 2) + fed_by_step(last, 2) == fed_by_step([straight], 2)
    assert_same_training(last, straight, steps=8)
    with pytest.raises(ValueError, match="was written by 2 ranks and there are 1; carried memory is shared out by ranks"):
        Run(folder / "carried", changes=CARRIED)(texts)
    assert (alone()["curve"][:, 0] - straight["curve"][:, 0]).abs().max() > 1e-3


def test_a_model_in_shards_trains_as_the_whole_one(two, alone):
    """Stopped and resumed; in pieces, with memory that is carried over; with gradients that are clipped."""
    straight, (first, last) = alone(clip=0.2), two["sharded"]
    assert (straight["curve"][:, 1] > 0.3).all()
    assert [first[0]["steps"], last[0]["steps"]] == [[1, 2, 3], [4, 5, 6, 7, 8]] and last[0]["finished"]
    assert fed_by_step(first) + fed_by_step(last) == fed_by_step([straight])
    (pieces,) = two["sharded pieces"]
    for results, one in ((last, straight), (pieces, alone(clip=0.2, **CARRIED))):
        assert_same_training(results, one, steps=8)
        for name, weight in one["weights"].items():
            torch.testing.assert_close(results[0]["weights"][name], weight, rtol=1e-3, atol=1e-4)


def test_gates_of_shards_stay_float32_in_bf16(two, alone):
    (results,) = two["sharded bf16"]
    dtypes = results[0]["dtypes"]
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == results[0]["gates"]
    assert {name for name, dtype in dtypes.items() if dtype == torch.bfloat16} == dtypes.keys() - results[0]["gates"] != set()
    assert all(weight.dtype == torch.float32 for weight in results[0]["weights"].values())
    assert (results[0]["curve"][:, 0] - alone(clip=0.2)["curve"][:, 0]).abs().max() < 0.05


def test_a_run_goes_on_in_another_number_of_processes(two, alone, texts, folder):
    """One process, then four of which one is told to stop, then one: the tokens and losses of the straight run. And shards of two, in four,
    of which two have no part of what is a number a head."""
    straight = alone()
    first = Run(folder / "run", stop_at=2)(texts)
    parts = [Run(folder / "run", stop_at=5, stopped_by=1), Run(folder / "in-more", changes=SHARDED)]
    second, sharded = zip(*in_processes(4, train_each, folder, parts, texts), strict=True)
    last = Run(folder / "run")(texts)
    assert [result["steps"] for result in second] == [[3, 4, 5]] * 4 and not second[0]["finished"] and last["finished"]
    assert fed_by_step([first]) + fed_by_step(second) + fed_by_step([last]) == fed_by_step([straight])
    assert_same_training([last], straight, steps=8)
    assert fed_by_step(two["in more"][0]) + fed_by_step(sharded) == fed_by_step([straight])
    assert_same_training(sharded, alone(clip=0.2), steps=8)


def test_a_step_that_cannot_be_shared_out(corpus, llama, tmp_path, monkeypatch):
    """Three ranks would quietly leave out two of eight windows."""
    monkeypatch.setattr(TrainingArguments, "world_size", 3)
    with pytest.raises(ValueError, match=r"batch_tokens=128 is not a whole number of windows of sequence_length=16 .* on each of 3 ranks"):
        train(llama(), corpus, SETTINGS, folder=tmp_path)


def test_what_cannot_be_sharded_is_refused(corpus, llama, tmp_path, capsys):
    sharded = dataclasses.replace(SETTINGS, sharding="fsdp2")
    with pytest.raises(ValueError, match="is for fastweights models, and this is a LlamaForCausalLM; sharding='ddp' takes any"):
        train(llama(), corpus, sharded, folder=tmp_path)
    model = FastWeightsForCausalLM(FastWeightsConfig(vocab_size=258, hidden_size=32, num_hidden_layers=1, num_heads=2))
    with pytest.raises(ValueError, match="shares a model out over processes, and there is one"):
        train(model, corpus, sharded, folder=tmp_path)
    assert main(["train", "--sharding", "fsdp2", "--out", str(tmp_path)]) == 2
    assert "start them by torchrun" in " ".join(capsys.readouterr().err.split())


def test_several_processes_do_not_restart(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "--restart", "--out", str(tmp_path)]) == 2
    assert f"remove {tmp_path} first" in " ".join(capsys.readouterr().err.split())


class SignalledTwice:
    name = "signalled twice"
    survived = False

    def run(self, report, should_stop):
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
            assert should_stop()
        self.survived = True


@pytest.mark.parametrize("torchrun", [True, False])
def test_under_torchrun_a_signal_may_come_twice(torchrun, monkeypatch):
    """From the cluster and from torchrun; it is torchrun that stops waiting. Elsewhere a second signal means at once."""
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    job = SignalledTwice()
    with pytest.raises(KeyboardInterrupt):
        run_jobs([job], processes=1, threads=1, console=Console(quiet=True), on_row=lambda row: None)
    assert job.survived == torchrun


def test_one_process_uses_one_of_several_gpus(corpus, llama, tmp_path, monkeypatch):
    """transformers would wrap the model in DataParallel, which splits every tensor of a batch, cu_seqlens among them."""
    set_up = TrainingArguments._setup_devices.func

    def see_four(arguments):
        device = set_up(arguments)
        arguments._n_gpu = 4
        return device

    seen = functools.cached_property(see_four)
    seen.__set_name__(TrainingArguments, "_setup_devices")
    monkeypatch.setattr(TrainingArguments, "_setup_devices", seen)
    assert TrainingArguments(output_dir=str(tmp_path), use_cpu=True).n_gpu == 4
    trainer = PackedTrainer(llama(), corpus, SETTINGS, folder=tmp_path, seed=0, device="cpu", log_to=(), quiet=True)
    assert trainer.args.n_gpu == 1 and trainer.args.train_batch_size == 1


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_the_command_under_torchrun(sharding, texts, tmp_path, monkeypatch):
    """One process tells and writes, and what it writes is what the command writes alone."""
    texts = shutil.copytree(texts, tmp_path / "texts")
    (texts / "long.txt").write_text("Another page of a book. " * 40)
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path / "cache"))
    size = "--hidden-size 32 --num-hidden-layers 1 --num-heads 2 --intermediate-size 48"
    length = "--steps 6 --batch-tokens 128 --sequence-length 16 --save-every 2 --log-every 1"
    measured = "--validation-tokens 64 --longest 1 --length-tokens 64 --sample-tokens 4"
    options = (
        f"train --preset kla+ccq-5m {size} {length} {measured} --no-tensorboard --device cpu --data {texts} --validation {texts} --out "
    )
    assert main([*options.split(), str(tmp_path / "one")]) == 0
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fastweights"]
    done = subprocess.run(
        [*launch, *options.split(), tmp_path / "two", "--sharding", sharding], capture_output=True, text=True, env=os.environ, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("kla+ccq-5m: training\n") == done.stdout.count(" bits per byte on text that was not trained on.") == 1
    kept = {path.name for path in (tmp_path / "two").iterdir()}
    assert kept == {path.name for path in (tmp_path / "one").iterdir()} == {".lock", "metrics.jsonl", "model", "result.json", "run.json"}
    one, two = (torch.tensor([row["loss"] for row in read_rows(tmp_path / f"{name}/metrics.jsonl")]) for name in ("one", "two"))
    assert len(one) == 6 and (one - two).abs().max() <= 1e-5
    one, two = (load_file(tmp_path / f"{name}/model/model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys() and all((one[name] - two[name]).abs().max() <= 1e-4 for name in one)
