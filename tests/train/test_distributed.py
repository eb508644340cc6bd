"""Training in two processes is training in one: by the Trainer (DDP), and by the command under torchrun."""

import functools
import itertools
import os
import signal
import subprocess
import sys

import pytest
import torch
from rich.console import Console
from transformers import TrainingArguments

from fastweights.cli import main
from fastweights.recipes.pool import run_jobs
from fastweights.records import read_rows
from fastweights.train.trainer import PackedTrainer, train
from tests.train.two_processes import SETTINGS, Run, in_two_processes, train_each

pytestmark = pytest.mark.full


@pytest.fixture
def texts(corpus, tmp_path):
    return tmp_path / "texts"


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


def test_two_processes_train_as_one(texts, tmp_path):
    """The same tokens each step, the same losses: in one piece and in two, at uneven numbers of targets in each."""
    straight = Run(tmp_path / "one")(texts)
    runs = [Run(tmp_path / "two"), Run(tmp_path / "pieces", changes={"accumulation": 2})]
    ranks = in_two_processes(train_each, tmp_path, runs, texts)
    assert straight["finished"] and straight["curve"][-1, 0] < straight["curve"][0, 0]
    for number, pieces in enumerate((1, 2)):
        results = [rank[number] for rank in ranks]
        assert fed_by_step(results, pieces) == fed_by_step([straight])
        assert results[0]["fed"] != results[1]["fed"]
        assert_same_training(results, straight, steps=8)


def test_carried_memory_in_two_processes(texts, tmp_path):
    """Each process carries what its own lanes have read, so another number of them is refused."""
    carried = {"carry_memory": True, "accumulation": 2}
    straight = Run(tmp_path / "one", changes=carried)(texts)
    parts = [Run(tmp_path / "two", stop_at=3, changes=carried), Run(tmp_path / "two", changes=carried)]
    first, last = zip(*in_two_processes(train_each, tmp_path, parts, texts), strict=True)
    assert fed_by_step(first, 2) + fed_by_step(last, 2) == fed_by_step([straight], 2)
    assert_same_training(last, straight, steps=8)
    with pytest.raises(ValueError, match="was written by 2 ranks and there are 1; carried memory is shared out by ranks"):
        Run(tmp_path / "two", changes=carried)(texts)
    anew = Run(tmp_path / "anew")(texts)
    assert (anew["curve"][:, 0] - straight["curve"][:, 0]).abs().max() > 1e-3


def test_a_run_goes_on_in_another_number_of_processes(texts, tmp_path):
    """One process, then two of which one is told to stop, then one: the tokens and losses of the straight run."""
    straight = Run(tmp_path / "straight")(texts)
    first = Run(tmp_path / "run", stop_at=2)(texts)
    second = [rank[0] for rank in in_two_processes(train_each, tmp_path, [Run(tmp_path / "run", stop_at=5, stopped_by=1)], texts)]
    last = Run(tmp_path / "run")(texts)
    assert [second[0]["steps"], second[1]["steps"]] == [[3, 4, 5]] * 2 and not second[0]["finished"] and last["finished"]
    assert fed_by_step([first]) + fed_by_step(second) + fed_by_step([last]) == fed_by_step([straight])
    assert_same_training([last], straight, steps=8)


def test_a_step_that_cannot_be_shared_out(corpus, llama, tmp_path, monkeypatch):
    """Three ranks would quietly leave out two of eight windows."""
    monkeypatch.setattr(TrainingArguments, "world_size", 3)
    with pytest.raises(ValueError, match=r"batch_tokens=128 is not a whole number of windows of sequence_length=16 .* on each of 3 ranks"):
        train(llama(), corpus, SETTINGS, folder=tmp_path)


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


def test_the_command_under_torchrun(texts, tmp_path, monkeypatch):
    """One process tells and writes, and what it writes is what the command writes alone."""
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
    done = subprocess.run([*launch, *options.split(), tmp_path / "two"], capture_output=True, text=True, env=os.environ, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("kla+ccq-5m: training\n") == done.stdout.count(" bits per byte on text that was not trained on.") == 1
    kept = {path.name for path in (tmp_path / "two").iterdir()}
    assert kept == {path.name for path in (tmp_path / "one").iterdir()} == {".lock", "metrics.jsonl", "model", "result.json", "run.json"}
    one, two = (torch.tensor([row["loss"] for row in read_rows(tmp_path / f"{name}/metrics.jsonl")]) for name in ("one", "two"))
    assert len(one) == 6 and (one - two).abs().max() <= 1e-5
