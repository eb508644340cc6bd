import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from rich.console import Console

from fastweights.models import FastWeightsForCausalLM
from fastweights.read import READ_RULES
from fastweights.recipes import job, pool
from fastweights.recipes.compare import TOLERANCE, compare, count_parameters, equal_parameters, plan_comparison
from fastweights.recipes.settings import Variant
from fastweights.records import read_rows
from fastweights.train.presets import SIZES, TrainSettings
from fastweights.train.tokenizer import load_tokenizer
from fastweights.write import WRITE_RULES


@pytest.fixture
def run(small, monkeypatch):
    """Compare in this process; returns (results, what the terminal showed). Plots take time, and one test looks at them."""

    def run(report=False, **changes):
        if not report:
            monkeypatch.setattr("fastweights.recipes.compare.write_report", lambda *args: None)
        console = Console(file=io.StringIO(), width=160)
        return compare(small(**changes), console), console.file.getvalue()

    return run


def numbers(results):
    """All that two runs of the same comparison must agree in."""
    return [{k: row[k] for k in ("label", "seed", "training", "validation", "lengths", "positions", "sample")} for row in results["rows"]]


def test_everything_a_comparison_leaves(run, tmp_path):
    results, shown = run(report=True)
    assert json.loads(json.dumps(results)) == json.loads((tmp_path / "out/results.json").read_text())
    assert [row["label"] for row in results["rows"]] == ["kla", "kla+ccq"] == [entry["label"] for entry in results["summary"]]
    for row in results["rows"]:
        assert {"command", "commit", "device", "versions", "time", "seed"} <= set(row)
        assert row["tokens"] == 6 * 64 and [step for step, _ in row["training"]] == [128, 256, 384]
        assert [point["length"] for point in row["lengths"]] == [16, 32, 64]
        assert {point["tokens"] for point in row["lengths"]} == {128} and row["validation"]["tokens"] <= 256
        assert 0 < row["validation"]["bits_per_byte"]["value"] < 9
        assert row["sample"]["prompt"] == "the" and isinstance(row["sample"]["text"], str)
        assert f"{row['parameters']:,}" in shown
    assert results["summary"][1]["validation"]["difference"] is not None
    assert (tmp_path / "out/report.html").read_text().startswith("<!doctype html>")
    assert "kla+ccq: training" in shown and "kla+ccq: measuring" in shown and "Bits per byte" in shown and "report.html" in shown

    (model_folder,) = (tmp_path / "out/models").glob("kla+ccq*/model")
    model, tokenizer = FastWeightsForCausalLM.from_pretrained(model_folder), load_tokenizer(str(model_folder))
    assert sum(p.numel() for p in model.parameters()) == results["rows"][1]["parameters"]
    ids = tokenizer("the memory", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 13)
    assert not list((tmp_path / "out/models").glob("*/checkpoint-*"))


def test_what_is_finished_is_not_done_again(run, monkeypatch):
    first, _ = run()
    trained = []
    monkeypatch.setattr(job, "run_job", lambda work, *rest: trained.append(work.label) or pytest.fail("trained again"))
    again, shown = run()
    assert numbers(again) == numbers(first) and "2 of 2 runs are finished already" in shown
    monkeypatch.undo()
    calls = _count(monkeypatch, job, "run_job")
    run(mixers=("kla", "kla+ccq", "gated_deltanet"))
    assert [work.label for work, *_ in calls] == ["gated_deltanet"]  # a mixer more is a run more


def test_a_changed_setting_is_another_run_and_restart_is_a_fresh_one(run, small, monkeypatch):
    run()
    calls = _count(monkeypatch, job, "run_job")
    run(train=dataclasses.replace(small().train, learning_rate=1e-3), mixers=("kla",))
    run(seeds=(1,), mixers=("kla",))
    assert len(calls) == 2
    run(mixers=("kla",))
    assert len(calls) == 2
    run(mixers=("kla",), restart=True)
    assert len(calls) == 3
    rows = read_rows(small().out / "results.jsonl")
    assert len(rows) == len({row["run"] for row in rows}) == 4  # kla three ways, and kla+ccq, which the restart left alone


def test_another_way_to_measure_trains_nothing(run, small, monkeypatch):
    run(mixers=("kla",))
    calls = _count(monkeypatch, job, "train")
    results, _ = run(mixers=("kla",), evaluate=dataclasses.replace(small().evaluate, longest=2))
    assert not calls and [point["length"] for point in results["rows"][0]["lengths"]] == [16, 32]


def test_an_interrupted_comparison_goes_on_as_if_nothing_had_been(run, tmp_path, monkeypatch):
    straight, _ = run(out=tmp_path / "straight")
    stops = iter([False, False, True])  # before the run begins, then after each of its pieces
    monkeypatch.setattr(pool, "_interrupts", lambda console: _always(lambda: next(stops, True)))
    with pytest.raises(KeyboardInterrupt):
        run()
    assert list((tmp_path / "out/models").glob("*/checkpoint-4")) and not (tmp_path / "out/results.json").exists()
    monkeypatch.undo()
    monkeypatch.setenv("FASTWEIGHTS_CACHE", str(tmp_path / "cache"))
    resumed, _ = run()
    assert numbers(resumed) == numbers(straight)


@pytest.fixture
def hears_ctrl_c():
    """As a program at a terminal does; one that a shell began in the background is deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_first_ctrl_c_is_a_question_and_the_second_an_end(hears_ctrl_c):
    console = Console(file=io.StringIO())
    before = signal.getsignal(signal.SIGINT)
    with pool._interrupts(console) as interrupted:
        assert not interrupted()
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted() and "saves a checkpoint" in console.file.getvalue()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    assert signal.getsignal(signal.SIGINT) is before
    answers = []
    thread = threading.Thread(target=lambda: answers.append(pool._interrupts(console).__enter__()()))  # no signals there, and no failure
    thread.start()
    thread.join()
    assert answers == [False]


def test_a_run_that_fails_loses_nothing_of_the_others(run, small, monkeypatch):
    real = job.run_job

    def fails(work, *rest):
        if work.label == "kla+ccq":
            raise FloatingPointError("step 3: the loss is nan")
        return real(work, *rest)

    monkeypatch.setattr(job, "run_job", fails)
    with pytest.raises(FloatingPointError, match="step 3"):
        run()
    assert [row["label"] for row in read_rows(small().out / "results.jsonl")] == ["kla"]


def test_the_same_batches_for_every_mixer(run, monkeypatch):
    from fastweights.train import trainer

    fed = {}

    class Recording(trainer.PackedTrainer):
        def training_step(self, model, inputs, *rest):
            fed.setdefault(model.config.mixer, []).append(inputs["input_ids"].tolist())
            return super().training_step(model, inputs, *rest)

    monkeypatch.setattr(trainer, "PackedTrainer", Recording)
    run()
    assert fed["kla"] == fed["kla+ccq"] and len(fed["kla"]) == 6


def test_parameters_are_equal_for_every_mixer_there_is():
    labels = [w if r == "raw" else f"{w}+{r}" for w in WRITE_RULES for r in READ_RULES] + ["softmax", "kla+ccq,softmax"]
    size = SIZES["0.3m"]
    matched = equal_parameters([Variant.parse(label) for label in labels], size, 258, {})
    counts = [parameters for _, parameters in matched.values()]
    assert max(counts) - min(counts) <= TOLERANCE * max(counts)
    assert counts == [count_parameters(config) for config, _ in matched.values()]
    assert min(config["intermediate_size"] for config, _ in matched.values()) == size.intermediate_size


def test_widths_are_aligned_where_it_costs_little():
    """MLPs of 25 M parameters in multiples of 8, to 0.1 %; of 0.3 M, where 8 more would be too many, by single units."""
    labels = [Variant.parse(label) for label in ("kla", "gla", "softmax", "mamba2")]
    widths, apart = {}, {}
    for name in ("25m", "0.3m"):
        matched = equal_parameters(labels, SIZES[name], 32_000 if name == "25m" else 258, {}).values()
        widths[name] = [config["intermediate_size"] for config, _ in matched]
        apart[name] = max(count for _, count in matched) / min(count for _, count in matched) - 1
    assert all(width % 8 == 0 for width in widths["25m"]) and len(set(widths["25m"])) > 2
    assert any(width % 8 for width in widths["0.3m"])
    for given in (0, 1, 4, 1700):  # never narrower than was asked for, and the largest is as it was asked for
        size = dataclasses.replace(SIZES["25m"], intermediate_size=given)
        found = [config["intermediate_size"] for config, _ in equal_parameters(labels, size, 32_000, {}).values()]
        assert min(found) == given and sum(width == given for width in found) == 1, found
    assert apart["25m"] < 2e-3 and apart["0.3m"] < 2e-3


def test_sizes_are_what_their_names_say():
    for name in ("0.3m", "1m", "5m", "25m", "60m", "125m"):  # test_train_presets has those of the papers
        (_, parameters), *_ = equal_parameters([Variant.parse("kla+ccq")], SIZES[name], 258, {}).values()
        assert parameters / 1e6 == pytest.approx(float(name.removesuffix("m")), rel=0.12)


def test_settings_that_cannot_be_met_are_refused_before_any_work(small, tmp_path):
    for changes, message in [
        (dict(mixers=("kla+cqc",)), "cqc"),
        (dict(mixers=("kla:eta_maxx=2",)), "eta_maxx"),
        (dict(data=("nowhere",)), "no file or folder 'nowhere'"),
        (dict(train=TrainSettings(steps=1, batch_tokens=2**20, sequence_length=2**20)), "do not fill one window"),
        (dict(evaluate=dataclasses.replace(small().evaluate, longest=1024)), "too short for contexts of longest=1024 times"),
        (dict(mixers=("kla", "softmax"), train=dataclasses.replace(small().train, carry_memory=True)), "softmax layers"),
        (dict(device="cuda"), "torch sees no GPU"),
    ]:
        if "cuda" in changes.values() and torch.cuda.is_available():
            continue
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            plan_comparison(small(**changes))
    assert not (tmp_path / "out").exists()
    fixed = [Variant.parse("kla:intermediate_size=64"), Variant.parse("kla")]
    with pytest.raises(ValueError, match=r"kla:intermediate_size=64 cannot have .* parameters, only .*: take a larger size"):
        equal_parameters(fixed, SIZES["0.3m"], 258, {})


def test_text_to_validate_on_may_be_given(run, tmp_path):
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("a text that is long enough for a window of 64 tokens and one more, which is all it takes. " * 2)
    results, _ = run(mixers=("kla",), validation=(str(held_out),))
    assert results["text"]["validation_documents"] == 1
    assert results["rows"][0]["validation"]["bits_per_byte"]["low"] is None  # one document says nothing about the spread


def _count(monkeypatch, module, name):
    real, calls = getattr(module, name), []
    monkeypatch.setattr(module, name, lambda *args, **kwargs: calls.append(args) or real(*args, **kwargs))
    return calls


class _always:
    def __init__(self, answer):
        self.answer = answer

    def __enter__(self):
        return self.answer

    def __exit__(self, *_):
        pass


@pytest.mark.full
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_processes_survive_an_interrupt_and_a_kill(small, tmp_path, how):
    """Two processes, the parent interrupted or killed in the middle; nobody is left, and the same command ends like the straight run."""
    settings = small(train=dataclasses.replace(small().train, steps=60), processes=2)
    straight = compare(dataclasses.replace(settings, out=tmp_path / "straight"), Console(file=io.StringIO()))
    arguments = ["compare", "--mixers", *settings.mixers, "--data", *settings.data, "--out", str(settings.out), "--processes", "2"]
    for part in (settings.change, settings.train, settings.evaluate):
        for name, value in dataclasses.asdict(part).items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                arguments.append(f"--{flag}" if value else f"--no-{flag}")
            elif value is not None:
                arguments += [f"--{flag}", *map(str, value if isinstance(value, tuple) else [value])]
    command = [sys.executable, "-c", "import sys; from fastweights.cli import main; sys.exit(main())", *arguments, "--device", "cpu"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    deadline = time.monotonic() + 120
    while not list(settings.out.glob("models/*/checkpoint-*/trainer_state.json")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.05)
    workers = _children(process.pid)
    process.send_signal(how)
    output = process.communicate(timeout=60)[0]
    if how is signal.SIGINT:
        assert process.returncode == 130 and "The same command goes on from here" in output and "Traceback" not in output
    deadline = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{worker}") for worker in workers):
        assert time.monotonic() < deadline, "a worker outlives its parent"
        time.sleep(0.1)
    assert not (settings.out / "results.json").exists()
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert numbers(json.loads((settings.out / "results.json").read_text())) == json.loads(json.dumps(numbers(straight)))


def _children(pid):
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return [int(child) for child in listed.split()]
