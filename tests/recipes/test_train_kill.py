"""kill -9 at the worst moments of saving: the same command goes on, and nothing of it is in the curve or the weights."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from fastweights.records import read_rows
from fastweights.train.checkpoints import last_checkpoint

SETTINGS = "--steps 8 --batch-tokens 64 --sequence-length 16 --save-every 2 --log-every 1 --longest 4 --validation-tokens 256"
SHAPE = "--hidden-size 32 --num-hidden-layers 1 --num-heads 2 --intermediate-size 48 --length-tokens 128 --sample-tokens 8 --no-tensorboard"

RUN = """
import os, signal, sys
from pathlib import Path
from fastweights.cli import main

where, arguments = sys.argv[1], sys.argv[2:]

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

if where:
    from fastweights.models import FastWeightsForCausalLM
    from fastweights.train.packed_trainer import PackedTrainer

    save_model, save_optimizer = FastWeightsForCausalLM.save_pretrained, PackedTrainer._save_optimizer_and_scheduler

    def save_pretrained(self, folder, *rest, **options):
        save_model(self, folder, *rest, **options)
        if Path(folder).name == where:
            cut(Path(folder, "model.safetensors"))
            kill()

    def save_optimizer_and_scheduler(self, folder):
        save_optimizer(self, folder)
        if where == "optimizer" and self.state.global_step == 4:
            cut(Path(folder, "optimizer.pt"))
            kill()

    FastWeightsForCausalLM.save_pretrained = save_pretrained
    PackedTrainer._save_optimizer_and_scheduler = save_optimizer_and_scheduler
sys.exit(main(["train", *arguments]))
"""


@pytest.fixture
def command(tmp_path, text):
    def command(where, folder):
        arguments = ["--preset", "kla+ccq-5m", *SETTINGS.split(), *SHAPE.split(), "--data", str(text), "--out", str(tmp_path / folder)]
        environment = os.environ | {"FASTWEIGHTS_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, "-c", RUN, where, *arguments], capture_output=True, text=True, env=environment)
        assert done.returncode == (-signal.SIGKILL if where else 0), done.stdout + done.stderr
        return tmp_path / folder

    return command


@pytest.mark.full
@pytest.mark.timeout(900)
def test_killed_while_saving_three_times(command):
    straight = command("", "straight")
    killed = command("checkpoint-2", "killed")  # the first weights half written
    assert last_checkpoint(killed) is None and len(read_rows(killed / "metrics.jsonl")) == 2
    command("optimizer", "killed")  # the second checkpoint without its optimizer
    assert last_checkpoint(killed) == str(killed / "checkpoint-2")
    command("model.part", "killed")  # the finished model half written
    assert not (killed / "model").exists() and last_checkpoint(killed) == str(killed / "checkpoint-8")
    command("", "killed")
    assert not (killed / "model.part").exists()
    curves = [[(row["step"], row["loss"], row["grad_norm"]) for row in read_rows(run / "metrics.jsonl")] for run in (straight, killed)]
    assert curves[0] == curves[1] and len(curves[0]) == 8
    weights = [load_file(run / "model/model.safetensors") for run in (straight, killed)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
