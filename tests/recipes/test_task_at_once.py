"""Several models trained in turn by one process: each to the numbers that it has alone; examples drawn ahead; steps as graphs."""

import contextlib
import dataclasses
import io
import os
import subprocess
import sys
import time
import weakref
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fastweights.recipes import task_examples, task_job
from fastweights.recipes.errors import CannotDo
from fastweights.recipes.pool import finish, run_jobs
from fastweights.recipes.task_compare import forget, more_jobs, plan_jobs
from fastweights.recipes.task_examples import Asked, Examples, examples, shared, words_of
from fastweights.recipes.task_job import TaskJob, ask, train_on_task
from fastweights.recipes.task_presets import TASK_PRESETS, TaskSettings
from fastweights.recipes.task_settings import TaskCompareSettings
from fastweights.records import read_rows
from fastweights.tasks import MQAR, Stack, generator
from fastweights.tasks.base import IGNORE
from fastweights.train import repeated
from fastweights.train.presets import ModelSize
from fastweights.train.repeated import Repeated

EASY, HARDER = MQAR(length=16, pairs=2, vocab_size=16), MQAR(length=24, pairs=4, vocab_size=16)
SMALL = TaskSettings(
    train=((EASY, 3.0), (HARDER, 1.0)),
    evaluate=(EASY,),
    model=ModelSize(hidden_size=16, num_hidden_layers=1, num_heads=2, intermediate_size=0),
    learning_rates=(1e-3, 1e-2),
    seeds=(0,),
    steps=6,
    batch_size=4,
    window=2,
    samples=8,
)
COMPARED = dict(mixers=("kla", "gla"), at_once=3)


def run(jobs, at_once):
    rows = []
    run_jobs(jobs, processes=1, threads=1, console=Console(file=io.StringIO()), on_row=rows.append, at_once=at_once)
    return {(row["label"], row["learning_rate"], row["seed"]): row for row in rows}


def numbers(row):
    return row["steps"], [point[:3] for point in row["training"]], row["accuracy"], row["diverged"], row["reached"]


def test_in_turn_each_model_becomes_what_it_becomes_alone(job, monkeypatch):
    jobs = [job(label=label, learning_rate=rate, seed=seed, at_once=3) for label, rate, seed in
            [("kla", 1e-2, 0), ("kla", 1e-3, 0), ("gla+ccq", 1e-2, 1), ("softmax", 1e-2, 2)]]  # fmt: skip
    alone = run(jobs, 1)
    order = []
    monkeypatch.setattr(task_job, "ask", lambda model, batch: order.append(model.config.mixers[0]) or ask(model, batch))
    together = run(jobs, 3)
    assert order[:6] == ["kla", "kla", "gla+ccq"] * 2  # step by step
    assert order[18:] == ["softmax"] * 6  # it comes when a place is free
    assert {key: numbers(row) for key, row in together.items()} == {key: numbers(row) for key, row in alone.items()}
    assert all(row["at_once"] == 3 for row in together.values())


def test_one_that_diverges_ends_alone(job, monkeypatch):
    monkeypatch.setattr(task_job, "ask", lambda model, batch: (lambda loss, right: (loss * model.factor, right))(*ask(model, batch)))
    made = TaskJob.model

    def model(self):
        model = made(self)
        model.factor = float("nan") if self.seed else 1.0
        return model

    monkeypatch.setattr(TaskJob, "model", model)
    rows = run([job(seed=1), job()], 2)
    assert [(row["seed"], row["diverged"], row["steps"]) for row in rows.values()] == [(1, True, 2), (0, False, 6)]


def test_a_failure_lets_the_others_save(job):
    fine, broken = job(), job(label="nothing")
    with pytest.raises(ValueError, match="nothing"):
        run([fine, broken], 2)
    assert fine.checkpoint.exists()
    told = []
    finish(train_on_task(fine, fine.model(), report=lambda phase, done, *rest: told.append(done)))
    assert told == [3, 4, 5, 6]


def test_the_time_is_up(compared, tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])

    def ask_slowly(model, batch):
        clock[0] += 6.0  # a window of two models takes 24 seconds
        return ask(model, batch)

    monkeypatch.setattr(task_job, "ask", ask_slowly)
    with pytest.raises(CannotDo, match=r"minutes=0\.3"):
        compared(minutes=0.3, at_once=2)
    assert len(list((tmp_path / "out").glob("*.pt"))) == 2
    results, shown = compared(minutes=1.0, at_once=2)
    assert "2 runs are left" in shown and {row["label"] for row in results["rows"]} == {"kla"}
    results, shown = compared(at_once=2)
    assert "left" not in shown and len(results["rows"]) == 4
    assert {row["steps"] for row in results["rows"]} == {6}


def test_more_seeds_at_the_best_rate(compared, tmp_path):
    grid, _ = compared(mixers=("kla",))
    (best,) = grid["standings"]
    results, shown = compared(mixers=("kla",), more_seeds=(3, 4))
    assert "2 runs, 2 of them finished already" in shown and "4 runs, 2 of them finished already" in shown
    (standing,) = results["standings"]
    assert (standing["learning_rate"], standing["seeds"]) == (best["learning_rate"], [0, 3, 4])
    rows = read_rows(tmp_path / "out/results.jsonl")
    settings = TaskCompareSettings(task="small", mixers=("kla",), out=tmp_path / "out", device="cpu", more_seeds=(3, 4), restart=True)
    jobs = plan_jobs(settings)
    assert {job.key for job in [*jobs, *more_jobs(settings, rows[:2])]} == {row["run"] for row in rows}
    forget(settings, jobs)
    assert read_rows(tmp_path / "out/results.jsonl") == []


def test_impossible_settings_are_refused():
    for changes, message in [
        (dict(at_once=-1), "at_once=-1 is negative"),
        (dict(at_once=2, processes=2), "not both"),
        (dict(minutes=0.0), "not positive"),
        (dict(more_seeds=(0,)), "are in the grid already"),
        (dict(more_seeds=(7, 7)), "more_seeds=.7, 7.: give none twice"),
        (dict(more_seeds=(-1,)), "none that is negative"),
        (dict(seeds=(1, 1)), "seeds=.1, 1.: give none twice"),
        (dict(learning_rates=(1e-3, 1e-3)), "learning_rates=.*: give none twice"),
    ]:
        with pytest.raises(ValueError, match=message):
            TaskCompareSettings(task="mqar", **changes)


@pytest.mark.parametrize("name", sorted(TASK_PRESETS))
def test_what_a_task_draws_does_not_decide_how_much_it_draws(name):
    for task, _ in TASK_PRESETS[name].train:
        for seed in range(3):
            drawn, skipped = generator(seed), generator(seed)
            task.batch(3, drawn)
            skipped.bit_generator.advance(words_of(task, 3))
            assert drawn.bit_generator.state == skipped.bit_generator.state


def same(batches, others):
    return all(a.kind == b.kind and (a.numbers == b.numbers).all() and a.state == b.state for a, b in zip(batches, others, strict=True))


def test_processes_take_turns_at_the_same_examples(monkeypatch):
    start = generator(5).bit_generator.state
    batches = list(examples(SMALL, start, 1))
    assert same(batches[3:], list(examples(SMALL, batches[2].state, 4)))  # from any step on
    shares = []
    for worker in range(3):
        info = type("Worker", (), {"id": worker, "num_workers": 3})
        monkeypatch.setattr(task_examples, "get_worker_info", lambda info=info: info)
        shares.append(list(Examples(SMALL, start, 1)))
    assert [len(share) for share in shares] == [2, 2, 2]
    assert same(batches, [share[turn] for turn in range(2) for share in shares])


def test_trainings_that_begin_together_read_one_stream(monkeypatch):
    settings, start = dataclasses.replace(SMALL, steps=200), generator(5).bit_generator.state
    expected = list(examples(settings, start, 1))
    drawn, alive = [], set()

    def counted(*given):
        stream = len(drawn)
        drawn.append(0)
        alive.add(stream)
        try:
            for batch in examples(*given):
                drawn[stream] += 1
                yield batch
        finally:
            alive.remove(stream)

    monkeypatch.setattr(task_examples, "examples", counted)
    monkeypatch.setattr(task_examples, "TOGETHER", 2)
    one, other, elsewhere = shared(settings, start, 1), shared(settings, start, 1), shared(settings, expected[0].state, 2)
    read = [next(stream) for _ in range(2) for stream in (one, other, elsewhere)]
    assert drawn == [2, 2] and same(read[0::3], expected[:2]) and same(read[1::3], expected[:2]) and same(read[2::3], expected[1:3])
    first = weakref.ref(read[0].numbers)
    del read
    assert first() is not None  # another may come yet
    assert same([next(stream) for _ in range(100) for stream in (one, other)][1::2], expected[2:102])
    assert first() is None
    late = shared(settings, start, 1)
    assert same([next(late)], expected[:1]) and drawn == [102, 2, 1]
    one.close()
    assert alive == {0, 1, 2} and same(list(other), expected[102:])
    for stream in (other, elsewhere, late):
        stream.close()
    assert not alive and not task_examples._begun
    last, begun = shared(settings, start, 1), task_examples._begun
    next(last)
    monkeypatch.setattr(task_examples, "_begun", None)  # as where the interpreter ends
    last.close()
    assert not alive and not begun


def test_a_stream_that_breaks_off_says_why_to_every_reader(monkeypatch):
    def broken(*given):
        yield from list(examples(*given))[:2]
        raise RuntimeError("the process that drew is gone")

    monkeypatch.setattr(task_examples, "examples", broken)
    readers = [shared(SMALL, generator(5).bit_generator.state, 1) for _ in range(2)]
    assert [len([next(reader) for reader in readers]) for _ in range(2)] == [2, 2]
    for reader in readers:
        with pytest.raises(RuntimeError, match="drew is gone"):
            next(reader)


@pytest.mark.full
def test_examples_are_drawn_ahead_by_other_processes(job):
    alone, ahead = job(), job(drawers=2, label="kla")
    model, other = alone.model(), ahead.model()
    curve = finish(train_on_task(alone, model)).curve
    alone.checkpoint.unlink()
    assert [point[:3] for point in finish(train_on_task(ahead, other)).curve] == [point[:3] for point in curve]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


READY = """
from fastweights.recipes.task_examples import examples
from fastweights.recipes.task_presets import TASK_PRESETS
from fastweights.tasks import generator

if __name__ == "__main__":
    drawn = examples(TASK_PRESETS["mqar"], generator(0).bit_generator.state, 1, 2)
    print(next(drawn).kind, flush=True)
    input()
"""


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes as Linux shows them")
def test_a_training_that_is_killed_leaves_no_process_behind(tmp_path):
    (tmp_path / "training.py").write_text(READY)
    mark = f"FASTWEIGHTS_TEST={tmp_path}"

    def alive():
        found = []
        for environment in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it may end meanwhile
                if mark.encode() in environment.read_bytes():
                    found.append(environment)
        return len(found)

    with subprocess.Popen(
        [sys.executable, tmp_path / "training.py"],
        env=os.environ | dict([mark.split("=", 1)]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as training:
        assert training.stdout.readline() and alive() >= 3
        training.kill()
    patience = time.monotonic() + 20
    while alive() and time.monotonic() < patience:
        time.sleep(0.1)
    assert alive() == 0


def test_questions_that_ask_nothing_change_nothing(job):
    batch = Stack(length=200, stacks=2, values=3).batch(5, generator(0))
    asked = Asked.of(batch)
    questions = int((batch.labels[:, 1:] != IGNORE).sum())
    assert questions < len(asked.labels) <= questions * 9 / 8 + 1 and int((asked.labels != IGNORE).sum()) == questions
    model = job(settings=dict(train=((Stack(length=200, stacks=2, values=3), 1.0),))).model().train()
    whole, right = ask(model, asked)
    some, _ = ask(model, Asked(asked.tokens, asked.places[:questions], asked.labels[:questions]))
    torch.testing.assert_close(whole, some)
    assert not right[questions:].any()
    for task, _ in TASK_PRESETS["mqar-zoology-64"].train:
        assert len(Asked.of(task.batch(2, generator(0))).labels) == 2 * task.pairs


class FakeGraph:
    """Keeps the calls of a recording, and does them when it is replayed."""

    recording = None

    def __init__(self):
        self.calls = []

    def replay(self):
        for call in self.calls:
            call()


@pytest.fixture
def fake_graphs(monkeypatch):
    @contextmanager
    def graph(graph, pool, stream):
        FakeGraph.recording = graph
        try:
            yield
        finally:
            FakeGraph.recording = None

    monkeypatch.setattr(repeated.torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(repeated.torch.cuda, "graph", graph)
    monkeypatch.setattr(repeated.torch.cuda, "graph_pool_handle", lambda: None)


def test_a_kind_runs_once_is_recorded_and_then_replayed(fake_graphs):
    seen, launched = [], []

    def step(kind, numbers):
        launched.append(kind)
        call = lambda: seen.append((kind, numbers.tolist()))  # noqa: E731
        FakeGraph.recording.calls.append(call) if FakeGraph.recording else call()

    steps = Repeated(step, "cpu", graphs=True)
    given = [("a", [1]), ("b", [2, 3]), ("a", [4]), ("a", [5]), ("b", [6, 7]), ("a", [8]), ("b", [9, 10])]
    for kind, numbers in given:
        steps(kind, torch.tensor(numbers))
    assert seen == given and launched == ["a", "b", "a", "b"]


def test_what_cannot_be_recorded_goes_on_without(fake_graphs):
    seen = []

    def step(kind, numbers):
        if FakeGraph.recording:
            raise RuntimeError("operation not permitted when stream is capturing")
        seen.append(numbers.item())

    steps = Repeated(step, "cpu", graphs=True)
    steps("a", torch.tensor(1))
    with pytest.warns(RuntimeWarning, match="without CUDA graphs.*not permitted"):
        steps("a", torch.tensor(2))
    steps("a", torch.tensor(3))
    assert seen == [1, 2, 3]


def test_the_optimizer_of_graphs_steps_like_the_other_and_reads_its_checkpoints(job):
    """Its rate is a tensor, and its steps are counted on the device; fused arithmetic may round differently, by ulps of each step."""
    plain, recorded = job(), job(graphs=True)
    models = {one: one.model() for one in (plain, recorded)}
    optimizers = {one: task_job.optimizer_for(one, model) for one, model in models.items()}

    def steps(one, numbers):
        for step in numbers:
            torch.manual_seed(step)
            task_job._set_rate(optimizers[one], 1e-2 / step)
            for parameter in models[one].parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizers[one].step()

    def close(a, b):
        for x, y in zip(models[a].parameters(), models[b].parameters(), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=4e-2 * 2.0**-22)  # 4 steps of up to 1e-2, each to 4 ulps

    for one in (plain, recorded):
        steps(one, [1, 2])
    close(plain, recorded)
    assert isinstance(optimizers[recorded].param_groups[0]["lr"], torch.Tensor)
    state, ended = generator(0).bit_generator.state, task_job.Trained([], reached=False, diverged=False)
    for one, other in ((plain, recorded), (recorded, plain)):  # either goes on from the other's checkpoint
        task_job._save(one.checkpoint, models[one], optimizers[one], state, ended)
        kinds = [type(group["lr"]) for group in optimizers[other].param_groups]
        task_job._load(one.checkpoint, models[other], optimizers[other], "cpu")
        assert [type(group["lr"]) for group in optimizers[other].param_groups] == kinds
        for each in (one, other):
            steps(each, [3, 4])
        close(one, other)
