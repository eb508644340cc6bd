"""`fastweights bench`: that what is timed is what is said, what memory is counted, how rows survive, and what cannot be met."""

import dataclasses
import io
import itertools
import json
import mmap
import re
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
from rich.console import Console

from fastweights import cli
from fastweights.evaluate.statistics import growth
from fastweights.generate.passes import Passes
from fastweights.generate.rows import Rows
from fastweights.recipes import bench as recipe
from fastweights.recipes import bench_cases, bench_memory
from fastweights.recipes.bench import plan_bench, run_bench
from fastweights.recipes.bench_cases import PATHS, Bench, Case, groups
from fastweights.recipes.bench_memory import Peak, bytes_per_step, expected_state_bytes, state_bytes, weight_bytes
from fastweights.recipes.bench_settings import BenchSettings
from fastweights.recipes.report import load_results
from fastweights.records import read_rows
from fastweights.train.tokenizer import byte_tokenizer
from tests.models.tiny import tiny_model

KINDS = {
    "kla+ccq": {"mixer": "kla+ccq"},
    "gla": {"mixer": "gla", "tie_word_embeddings": False},
    "softmax": {"mixer": "softmax"},
    "sliding": {"mixer": "softmax", "window_size": 8},
    "hybrid": {"mixer": ["kla", "softmax"]},
}


def test_growth_is_the_least_squares_line_through_logarithms():
    lengths = [256.0, 512.0, 1024.0, 2048.0, 4096.0]
    exact = growth(lengths, [3e-4 * length**1.5 for length in lengths])
    assert exact.exponent == pytest.approx(1.5) and exact.error == pytest.approx(0, abs=1e-9)
    noisy = np.repeat(lengths, 3), 5.0 * np.random.default_rng(0).lognormal(0, 0.2, 15)
    fit, truth = growth(*noisy), scipy.stats.linregress(*map(np.log, noisy))
    assert (fit.exponent, fit.error) == pytest.approx((truth.slope, truth.stderr))
    assert fit.high - fit.exponent == pytest.approx(truth.stderr * scipy.stats.t.ppf(0.975, 13), rel=1e-2)
    assert growth([1.0, 8.0], [1.0, 4.0]) == (pytest.approx(2 / 3), None, None, None)
    with pytest.raises(ValueError, match="two different places"):
        growth([5.0, 5.0], [1.0, 2.0])


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_the_states_and_the_weights(kind):
    model = tiny_model(**KINDS[kind])
    states = Bench(model, 0, 2, 0).prepare(Case(20, 3, "rows"))
    assert state_bytes(states) == expected_state_bytes(model, 20)
    config = model.config
    keys = 20 if config.window_size is None else 7  # those that a next token may still see
    attention = sum(2 * keys * 32 * 4 + keys * 8 + 8 for mixer in config.mixers if mixer == "softmax")
    memories = state_bytes(states) - attention
    assert bytes_per_step(model, states, 3) == weight_bytes(model) + 3 * (2 * memories + attention)
    assert (memories == 0) == (config.mixer == "softmax")
    everything = sum(p.numel() for p in model.parameters())
    assert weight_bytes(model) == 4 * (everything if config.tie_word_embeddings else everything - config.vocab_size * 32)


def test_the_peak_is_that_inside():
    def resident():
        return int(re.search(r"^VmRSS:\s+(\d+) kB", bench_memory.STATUS.read_text(), flags=re.M)[1]) * 1024

    peak, size = Peak(torch.device("cpu")), 2**27
    with peak.watch():
        before = resident()
        fresh = mmap.mmap(-1, size)  # an allocator might give what it has kept, which is resident already
        for page in range(0, size, mmap.PAGESIZE):
            fresh[page] = 1
        fresh.close()
    during = peak.bytes
    assert 0.9 * size < during - before < 2 * size
    with peak.watch():  # the largest of all
        pass
    assert peak.bytes == during
    later = Peak(torch.device("cpu"))
    with later.watch():  # what was freed before is not counted
        pass
    assert later.bytes < during - size / 2


@pytest.mark.parametrize("kind", ["kla+ccq", "softmax"])
def test_every_path_decodes_after_the_context_and_reads_none_of_it_again(kind, monkeypatch):
    model = tiny_model(**KINDS[kind])
    bench, read = Bench(model, 0, 4, 0), []
    for case in groups(bench.full_softmax, "decode", [20], [3], PATHS)[0]:
        bench.prepare(case)
        seen, step = [], model.step_

        def count(ids, states, step=step, seen=seen):
            seen.append((tuple(ids.shape), {int(place) for place in states[0].place}))
            return step(ids, states)

        monkeypatch.setattr(model, "step_", count)
        hook = model.model.register_forward_pre_hook(lambda _, given: read.append(tuple(given[0].shape)))
        assert bench.run(case, Peak(torch.device("cpu")))["ms"] > 0
        hook.remove()
        monkeypatch.undo()
        if case.path == "rows":
            assert seen == [((3, 1), {20 + i}) for i in range(4)]
        elif case.path == "engine":  # the snapshot's last token is read when a request joins
            assert seen == [((3, 1), {21 + i}) for i in range(4)]
    assert read == [(3, 1)] * 4  # generate's


def test_the_engine_is_compiled_where_it_is_asked_for():
    for compile, chosen in (("auto", "off"), ("on", "on"), ("off", "off")):
        assert plan_bench("decode", [], BenchSettings(device="cpu", mixers=("kla",), compile=compile)).settings.compile == chosen
    for compile in (False, True):
        assert Bench(tiny_model(), 8, 3, 0, compile=compile).engine(Case(16, 1, "rows")).passes.compiled is compile


def test_a_time_is_that_of_one_step_or_one_prompt(monkeypatch):
    """By a clock that a step and a piece of a prompt move on."""
    clock = [0.0]

    def takes(seconds, f):
        def call(*arguments, **keywords):
            clock[0] += seconds
            return f(*arguments, **keywords)

        return call

    model = tiny_model()
    bench, peak = Bench(model, 8, 3, 0), Peak(torch.device("cpu"))
    every = [Case(16, 2, "rows"), Case(16, 2, "engine"), Case(16, 2, "generate"), Case(17, 1, "prompt")]
    monkeypatch.setattr(bench_cases, "time", SimpleNamespace(perf_counter=lambda: clock[0], process_time=lambda: clock[0] / 2))
    monkeypatch.setattr(Rows, "launch", takes(0.2, Rows.launch))
    monkeypatch.setattr(Passes, "read", takes(0.05, Passes.read))
    monkeypatch.setattr(model, "generate", takes(0.3, model.generate))
    found = []
    for case in every:
        bench.prepare(case)
        found.append(bench.run(case, peak))
    wanted = [{"ms": pytest.approx(ms), "cpu_ms": pytest.approx(ms / 2)} for ms in (200, 200, 100, 300)]
    assert found[:3] == wanted[:3]
    assert found[3] == wanted[3] | {"reading_ms": pytest.approx(100)}  # two pieces of 8, and the first token is a step


@pytest.mark.parametrize(
    "arguments, told",
    [
        (("decode", "{tmp}/none"), "is neither the folder of a saved model"),
        (("decode", "{tmp}/llama"), "holds a model of type 'llama'"),
        (("prefill", "--mixers", "kla+cqc"), "cqc"),
        (("prefill", "--mixers", "kla", "--size", "9b"), "size '9b' is not one of"),
        (("prefill", "kla-5m", "kla-5m"), "kla-5m: given more than once"),
        (("prefill", "--lengths", "1"), "lengths=[1]"),
        (("decode", "--batches", "0"), "batches=[0]"),
        (("decode", "--new-tokens", "1"), "new_tokens=1: a rate needs at least two"),
        (("decode", "--repeats", "0"), "repeats=0 is not positive"),
        (("write",), "write"),
    ],
)
def test_a_request_that_cannot_be_met_is_told_before_anything_runs(capsys, tmp_path, monkeypatch, arguments, told):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recipe, "run_bench", lambda *_: pytest.fail("ran"))
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    try:
        code = cli.main(["bench", *(argument.format(tmp=tmp_path) for argument in arguments)])
    except SystemExit as exit:
        code = exit.code
    captured = capsys.readouterr()
    assert code == 2 and told in captured.out + captured.err and "Traceback" not in captured.err


def settings(folder, **changes):
    few = {"mixers": ("kla", "softmax"), "size": "0.3m", "lengths": (16, 32, 64), "batches": (1, 2), "new_tokens": 2, "repeats": 2}
    return BenchSettings(**few | {"out": folder, "device": "cpu", "bandwidth": 10.0} | changes)


def run(what, wanted, models=()):
    out = io.StringIO()
    return run_bench(plan_bench(what, models, wanted), Console(file=out, width=120)), out.getvalue()


def cases(rows):
    return sorted((row["label"], row["length"], row["batch"], row["path"]) for row in rows)


@pytest.fixture(autouse=True)
def one_commit(monkeypatch):
    """Rows belong to a commit, and others may commit while tests run."""
    monkeypatch.setattr(recipe, "commit", lambda: "abc")


def test_rows_come_one_a_case_with_all_that_is_asked_of_them(tmp_path):
    results, text = run("decode", settings(tmp_path, lengths=(16, 32), batches=(1,)))
    every = itertools.product(("kla", "softmax"), (16, 32), (1,), PATHS)
    assert cases(results["rows"]) == sorted(every) == cases(read_rows(tmp_path / "decode/results.jsonl"))
    for row in results["rows"]:
        assert len(row["runs_cpu_ms"]) == 2 and row["cpu_ms"] == pytest.approx(sum(row["runs_cpu_ms"]) / 2, rel=1e-3)
        assert len(row["runs_ms"]) == 2 and row["ms"] == pytest.approx(sum(row["runs_ms"]) / 2, rel=1e-3)
        assert row["tokens_per_second"] == pytest.approx(1e3 * row["batch"] / row["ms"])
        assert row["floor_ms"] == pytest.approx(1e3 * row["step_bytes"] / 10e9) and row["over_floor"] == pytest.approx(
            row["ms"] / row["floor_ms"]
        )
        assert row["weights"] == "random" and row["bandwidth_source"] == "given" and row["peak_bytes"] > 2**27
        assert {"command", "commit", "versions", "seed", "device"} <= row.keys()
    assert {(line["label"], line["path"]) for line in results["growth"]} == set(itertools.product(("kla", "softmax"), PATHS))
    assert "0 is flat" in text and "times the memory's" in text
    page = (tmp_path / "decode/report.html").read_text()
    assert page.count("<svg") == 1 and "softmax" in page and "10.0 GB/s, given" in page


def test_what_is_done_is_kept_and_what_is_not_is_done_by_the_same_command(tmp_path, monkeypatch):
    measure, runs = Bench.run, itertools.count()

    def until(stop):
        def run_case(self, case, peak):
            if next(runs) == stop:
                raise KeyboardInterrupt
            return measure(self, case, peak)

        return run_case

    wanted = settings(tmp_path, mixers=("kla", "gla"))
    monkeypatch.setattr(Bench, "run", until(10))  # each of the two has a warm-up and 2 × 3 runs
    with pytest.raises(KeyboardInterrupt):
        run("prefill", wanted)
    kept = read_rows(tmp_path / "prefill/results.jsonl")
    assert cases(kept) == [("kla", length, 1, "prompt") for length in (16, 32, 64)]
    monkeypatch.setattr(Bench, "run", until(-1))
    results, _ = run("prefill", wanted)
    assert results["rows"][:3] == kept and len(results["rows"]) == 6
    monkeypatch.setattr(Bench, "run", until(next(runs) + 1))  # nothing more to run
    assert run("prefill", wanted)[0]["rows"] == results["rows"]
    with pytest.raises(KeyboardInterrupt):
        run("prefill", dataclasses.replace(wanted, restart=True))
    (joined,) = load_results(tmp_path / "prefill/results.jsonl")
    assert joined["rows"] == results["rows"] and joined["growth"] == results["growth"]


@pytest.mark.full
def test_what_does_not_fit_is_a_row_with_the_reason_and_the_others_go_on(tmp_path, monkeypatch):
    measure = Bench.run

    def run_case(self, case, peak):
        if case.length == 32 and case.path == "engine":
            raise torch.OutOfMemoryError("no room\nfor this")
        return measure(self, case, peak)

    monkeypatch.setattr(Bench, "run", run_case)
    monkeypatch.setattr(recipe, "free_bytes", lambda _: 600_000)  # the weights are there; 64 tokens of softmax keys for two are too many
    wanted = settings(tmp_path, lengths=(16, 32, 64), batches=(2,), generate=False)
    results, text = run("decode", wanted)
    failed = {(row["label"], row["length"], row["path"]): row["failed"] for row in results["rows"] if "failed" in row}
    assert {case[:2] for case in failed if case[2] == "rows"} == {("softmax", 64)}
    assert failed["kla", 32, "engine"] == failed["softmax", 32, "engine"] == "out of memory: no room"
    assert "GB are free" in failed["softmax", 64, "rows"] and len(results["rows"]) == 12 and "not measured" in text
    assert "Not measured: decode" in (tmp_path / "decode/report.html").read_text()
    monkeypatch.setattr(Bench, "run", measure)
    monkeypatch.setattr(recipe, "free_bytes", bench_memory.free_bytes)
    assert not any("failed" in row for row in run("decode", wanted)[0]["rows"])  # tried again, and now it fits


def test_other_errors_are_not_taken_for_want_of_memory(tmp_path, monkeypatch):
    def broken(self, case, peak):
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(Bench, "run", broken)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        run("prefill", settings(tmp_path))


@pytest.mark.full
@pytest.mark.parametrize("what", ["prefill", "decode"])
def test_a_saved_folder_from_the_command_line_to_the_page(tmp_path, monkeypatch, capsys, what):
    monkeypatch.chdir(tmp_path)
    model = tiny_model(mixer="kla+ccq", vocab_size=258)
    model.save_pretrained("models/mine/model")
    byte_tokenizer().save_pretrained("models/mine/model")
    small = "--mixers gated_deltanet kla,softmax --size 0.3m --lengths 64 128 256 --new-tokens 4 --batches 1 3 --repeats 2 --device cpu"
    assert cli.main(["bench", what, "models/mine/model", *small.split(), "--precision", "bf16"]) == 0
    assert "mine" in capsys.readouterr().out
    results = json.loads((tmp_path / f"runs/bench/{what}/results.json").read_text())
    labels = {row["label"]: row for row in results["rows"]}
    assert list(labels) == ["mine", "gated_deltanet 0.3m", "kla,softmax 0.3m"] and labels["mine"]["weights"] == "saved"
    assert all(row["precision"] == "bfloat16" and row["runs_ms"] for row in results["rows"])
    assert labels["mine"]["parameters"] == sum(p.numel() for p in model.parameters())
    assert cli.main(["report", f"runs/bench/{what}", "--out", "page.html", "--export", "png"]) == 0
    assert len(list((tmp_path / "page_figures").iterdir())) == 2


@pytest.mark.full
def test_decoding_after_a_context_is_the_decoding_of_its_text():
    """The state that rows are given is that of the tokens, not of something as long."""
    model = tiny_model(mixer="kla+ccq")
    bench, case = Bench(model, 7, 5, 3), Case(20, 1, "rows")
    bench.prepare(case)
    bench.run(case, Peak(torch.device("cpu")))
    text = torch.tensor([[*bench.tokens(20), *bench.tokens(1)]])
    greedy = model.generate(text, attention_mask=torch.ones_like(text), max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert bench.engine(case).rows.output.tolist() == greedy[0, -1:].tolist()
