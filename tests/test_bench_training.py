"""benchmarks/bench_training.py on a CPU: the row of a small model, and the lines of a profile."""

import math
import runpy
import sys
from pathlib import Path

import pytest
import torch

from fastweights.records import read_rows

ROOT = Path(__file__).parent.parent
BENCHMARK = str(ROOT / "benchmarks" / "bench_training.py")


@pytest.mark.full
def test_a_row_of_a_small_model(tmp_path, monkeypatch, capsys):
    options = ["--models", "byte", "--batch", "2", "--tokens", "16", "--steps", "2", "--no-compile", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", [BENCHMARK, *options, "--out", str(tmp_path / "rows.jsonl")])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    runpy.run_path(BENCHMARK, run_name="__main__")
    (row,) = read_rows(tmp_path / "rows.jsonl")
    told = {"model": "byte", "implementation": "fastweights", "batch": 2, "tokens": 16, "steps": 2, "compile": False, "seed": 0}
    told |= {"backend": "auto", "input": "packed row", "loss": "whole logits"}
    assert row | told == row and {"command", "commit", "device", "versions", "time"} <= row.keys()
    assert row["parameters"] == pytest.approx(0.95e6, rel=0.01) and row["flops_per_token"] > 6 * 0.9 * row["parameters"]
    assert row["tokens_per_s"] == pytest.approx(2 * 16 / row["step_ms"] * 1e3)
    assert row["step_ms"] > 0 and row["first_step_s"] > 0 and 0.1 < row["peak_gib"] < 10
    assert row["first_loss"] == pytest.approx(math.log(258), rel=0.1) and row["last_loss"] != row["first_loss"]
    assert "error" not in row and "mfu" not in row  # nobody told us a CPU's peak
    assert f"{row['parameters']:,} parameters" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_a_profile_names_what_takes_longest(capsys):
    x = torch.randn(256, 256)
    runpy.run_path(BENCHMARK)["profile"](lambda: [torch.mm(x, x).relu_() for _ in range(3)], gpu=False)
    told = capsys.readouterr().out.splitlines()[1:]
    times = [float(line.split()[0]) for line in told]
    assert times == sorted(times, reverse=True) and len(times) <= 25
    assert any(line.split()[2:] == ["3", "x", "aten::mm"] for line in told)
