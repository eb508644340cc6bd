"""`fastweights eval`: what is measured, resumed, missing and shown; the suites from end to end on tiny models and rows of our own."""

import importlib.util
import io
import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import constants
from rich.console import Console

from fastweights import cli
from fastweights.assets import byte_model_path
from fastweights.evaluate.harness.tasks import Unavailable
from fastweights.recipes import evaluate_items
from fastweights.recipes.evaluate import evaluate, group_means, labels, load_subject
from fastweights.recipes.evaluate_items import Curve, Language, find
from fastweights.recipes.evaluate_settings import SUITES, EvalSettings
from fastweights.recipes.evaluate_suites import CCQ_PAPER, LONGBENCH, groups_of, items_of
from fastweights.recipes.evaluate_text import read_texts, tokenise
from fastweights.records import append_rows, read_rows
from fastweights.report import write_report
from fastweights.train.hub import HubText
from fastweights.train.tokenizer import byte_tokenizer
from tests.evaluate.rows import LONGBENCH_ROWS, MADE, SENTENCES, kla_ccq, llama, save, write_jsonl, write_rows


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """As with HF_HUB_OFFLINE=1: no test asks the network."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def data(tmp_path):
    return write_rows(tmp_path / "data")


@pytest.fixture
def measured(tmp_path, data):
    """Measure saved models in this process: (results, what the terminal showed)."""

    def measured(*models, **changes):
        given = dict(data=data, out=tmp_path / "out", device="cpu")
        shown = io.StringIO()
        names = [str(model) for model in models or (save(kla_ccq(), tmp_path / "tiny"),)]
        return evaluate(names, EvalSettings(**given | changes), Console(file=shown, width=160)), shown.getvalue()

    return measured


def test_rows_results_table_and_report(measured, tmp_path):
    results, shown = measured(tasks=("piqa", "arc_challenge"), limit=2)
    rows = read_rows(tmp_path / "out/results.jsonl")
    assert [row["task"] for row in rows] == ["piqa", "arc_challenge"] and not results["missing"]
    piqa, arc = rows
    assert {"command", "commit", "versions", "device", "time", "fingerprint", "parameters", "run", "seconds"} <= set(piqa)
    assert piqa["max_length"] is None and piqa["document_token"] and piqa["few_shot"] == 0 and piqa["samples"] == 2
    assert piqa["data"]["file"] == "piqa.jsonl" and len(piqa["data"]["sha256"]) == 64 and arc["data"]["file"] == "arc_c.jsonl"
    assert [row["scores"][0]["metric"] for row in rows] == ["acc", "acc_norm"]  # what each is reported by
    saved = json.loads((tmp_path / "out/results.json").read_text())
    assert saved["kind"] == "evaluation" and [row["run"] for row in saved["rows"]] == [row["run"] for row in rows]
    page = (tmp_path / "out/report.html").read_text()
    assert "Language tasks" in page and "arc_challenge" in page and piqa["run"] in page and "Only the first 2 rows" in page
    assert "piqa" in shown and "acc_norm (%)" in shown and "[" in shown


def test_what_is_finished_is_not_done_again(measured, monkeypatch, tmp_path):
    first, _ = measured(tasks=("piqa",), limit=2)
    did = []
    run = evaluate_items.run_task
    monkeypatch.setattr(evaluate_items, "run_task", lambda lm, task, **given: did.append(task.task_name) or run(lm, task, **given))
    again, _ = measured(tasks=("piqa", "arc_easy"), limit=2, batch_size=1)  # the batch size is no part of a score
    assert did == ["arc_easy"] and again["rows"][0] == first["rows"][0]
    measured(tasks=("piqa",), limit=2, restart=True)
    measured(tasks=("piqa",), limit=1)
    write_jsonl(tmp_path / "data/piqa.jsonl", MADE["piqa"][:2])  # other rows under the same name
    evaluate_items._hash_of.cache_clear()
    measured(tasks=("piqa",), limit=2)
    measured(save(kla_ccq(seed=1), tmp_path / "other"), tasks=("piqa",), limit=2)
    assert did[1:] == ["piqa"] * 4 and len(read_rows(tmp_path / "out/results.jsonl")) == 6


def test_an_interrupt_keeps_what_is_finished(measured, monkeypatch, tmp_path):
    run = evaluate_items.run_task

    def interrupted(lm, task, **given):
        if task.task_name == "arc_easy":
            raise KeyboardInterrupt
        return run(lm, task, **given)

    monkeypatch.setattr(evaluate_items, "run_task", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measured(tasks=("piqa", "arc_easy"), limit=2)
    assert [row["task"] for row in read_rows(tmp_path / "out/results.jsonl")] == ["piqa"]


def test_models_stand_side_by_side(measured, tmp_path):
    models = [save(kla_ccq(), tmp_path / "kla/model"), save(kla_ccq(mixer="gated_deltanet"), tmp_path / "gdn/model")]
    results, shown = measured(*models, tasks=("boolq",), text=(str(tmp_path / "data/essays.json"),), lengths=(64, 256), tokens=256)
    assert results["models"] == ["kla", "gdn"] and [row["label"] for row in results["rows"]] == ["kla", "kla", "gdn", "gdn"]
    points = results["rows"][1]["points"]
    assert [point["length"] for point in points] == [64, 256] and all(point["tail_perplexity"] > 0 for point in points)
    page = (tmp_path / "out/report.html").read_text()
    assert page.count("<svg") == 1 and "kla, last" in page and "gdn, last" in page
    assert "curve_essays 256" in shown and labels(["a/x", "b/x", "hub/name"]) == ["a/x", "b/x", "name"]


def test_what_is_missing_is_listed_and_the_others_go_on(tmp_path, data, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(kla_ccq(), tmp_path / "tiny")
    (data / "winogrande.jsonl").unlink()
    code = cli.main(
        f"eval tiny --tasks winogrande mqar-kla boolq --suite ccq-paper --data {data} --limit 2 --max-length 300 --device cpu".split()
    )
    told = capsys.readouterr()
    assert code == 2 and "boolq acc" in told.out and (tmp_path / "runs/eval/report.html").exists()
    first, *reasons = told.err[told.err.index("fastweights: ") :].splitlines()
    assert first == "fastweights: 2 of 3 could not be measured:" and len(reasons) == 2
    assert "tiny, winogrande: its data cannot be fetched" in reasons[0] and "winogrande.jsonl in the folder given by --data" in reasons[0]
    assert "tiny, mqar-kla: the task has 8,192 tokens and the model 258" in reasons[1]
    assert "Not measured" in (tmp_path / "runs/eval/report.html").read_text()


def test_a_text_or_a_file_that_is_of_no_use_stops_no_other(measured, data, tmp_path):
    """Empty documents, in a text and alone; rows of another data set, or none, under a task's name."""
    write_jsonl(tmp_path / "empty.jsonl", [{"text": ""}] * 3)
    write_jsonl(tmp_path / "some.jsonl", [{"text": ""}, {"text": "a memory is read " * 9}, {"text": ""}] * 2)
    write_jsonl(data / "arc_c.jsonl", [{"page": "of a book"}])
    (data / "siqa.jsonl").write_text("")
    texts = tuple(str(tmp_path / name) for name in ("empty.jsonl", "some.jsonl"))
    results, _ = measured(tasks=("arc_challenge", "social_iqa", "piqa"), suite="offline", text=texts, lengths=(16, 64), tokens=64, limit=1)
    assert [row["task"] for row in results["rows"]] == ["piqa"]
    told = {entry["task"]: entry["reason"] for entry in results["missing"]}
    assert "arc_c.jsonl does not hold rows of arc_challenge, with the columns that docs/evaluation.md names: " in told["arc_challenge"]
    assert "siqa.jsonl" in told["social_iqa"]
    results, _ = measured(text=texts, lengths=(16, 64), tokens=64)
    (entry,) = results["missing"]
    assert entry["task"] == "curve_empty" and entry["reason"].startswith("there is no text in ")
    assert [row["task"] for row in results["rows"]] == ["curve_some"]
    assert tokenise(texts[1], byte_tokenizer(), longest=200, tokens=200).documents[0].tolist().count(256) == 2  # of what has text


def test_a_row_without_a_run_is_named(measured, tmp_path):
    append_rows(tmp_path / "out/results.jsonl", [{"task": "piqa"}])
    with pytest.raises(ValueError, match=r"results\.jsonl: row 1 has no 'run'"):
        measured(tasks=("piqa",), limit=1)


@pytest.mark.parametrize(
    "arguments, told",
    [
        (("tiny",), "nothing to measure: give tasks, a text, or a suite (ccq-paper, kla-paper, offline)"),
        (("--tasks", "piqa"), "models []: give at least one, and none twice"),
        (("nowhere", "--tasks", "piqa"), "no folder 'nowhere' with a saved model"),
        ((str(byte_model_path()), "damaged", "--tasks", "piqa"), "'damaged' cannot be used: hidden_size='wide' is not a whole number"),
        ((str(byte_model_path()), "nowhere", "--tasks", "piqa"), "no folder 'nowhere' with a saved model"),
        ((str(byte_model_path()), "--tasks", "piqa", "--data", "data/piqa.jsonl"), "data='data/piqa.jsonl' is no folder"),
        (("data", "--tasks", "piqa"), "data holds no config.json"),
        (("tiny", "--tasks", "piqa", "--batch-size", "0"), "batch_size=0 is not positive"),
        (("tiny", "--text", "x", "--lengths", "8", "8"), "all must be positive, and none may stand twice"),
        (("tiny", "--suite", "mine"), "mine"),
    ],
)
def test_a_request_that_cannot_be_met(tmp_path, data, capsys, monkeypatch, arguments, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/config.json").write_text('{"model_type": "fastweights", "hidden_size": "wide"}')
    try:
        code = cli.main(("eval", *arguments))
    except SystemExit as exit:
        code = exit.code
    captured = capsys.readouterr()
    assert code == 2 and told in " ".join((captured.out + captured.err).replace("│", " ").split())
    assert not (tmp_path / "runs").exists()


def test_without_the_harness_it_says_what_to_install(capsys, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "lm_eval" else find_spec(name, *rest))
    assert cli.main(("eval", "tiny", "--tasks", "piqa")) == 2
    assert capsys.readouterr().err == "fastweights: this needs the extra 'eval': pip install 'fastweights[eval]'\n"


def test_a_checkpoint_without_a_tokenizer(tmp_path, data, measured):
    kla_ccq().save_pretrained(tmp_path / "bare")
    results, _ = measured(tmp_path / "bare", tasks=("piqa",), limit=1)
    assert results["missing"] == [{"model": "bare", "task": "piqa", "reason": f"{tmp_path}/bare has no tokenizer; give one by --tokenizer"}]
    results, _ = measured(tmp_path / "bare", tasks=("piqa",), limit=1, tokenizer="bytes")
    assert not results["missing"]


def test_any_text_is_a_source(tmp_path, monkeypatch):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two"]}), tmp_path / "t.parquet")
    write_jsonl(tmp_path / "t.jsonl", [{"text": "three"}])
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a.txt").write_text("four")
    for name, expected in (("t.parquet", [b"one", b"two"]), ("t.jsonl", [b"three"]), ("folder", [b"four"]), ("folder/a.txt", [b"four"])):
        assert [document.text for document in read_texts(str(tmp_path / name))] == expected
    asked = []

    class Rows(dict):
        column_names = property(lambda self: list(self))

    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **given: asked.append((args, given)) or Rows(content=["five", None]))
    assert [document.text for document in read_texts("hub:owner/set::train:content")] == [b"five", b""]
    assert asked == [(("owner/set", None), {"split": "train"})]
    with pytest.raises(Unavailable, match="has no column 'text'; it has content"):
        list(read_texts("hub:owner/set"))
    with pytest.raises(Unavailable, match="no file or folder 'nothing'"):
        list(read_texts("nothing"))
    assert str(HubText.parse("hub:a/b:config", split="test")) == "hub:a/b:config:test:text" == str(HubText.parse("hub:a/b:config:test"))
    with pytest.raises(ValueError, match="is not of the form hub:NAME"):
        HubText.parse("hub:a:b:c:d:e")


def test_documents_that_are_too_short_are_joined_and_it_is_said(tmp_path):
    path = tmp_path / "t.jsonl"
    write_jsonl(path, [{"text": "a" * 50}, {"text": "b" * 10}, {"text": "c" * 30}, {"text": "d" * 30}])
    alone = tokenise(str(path), byte_tokenizer(), longest=40, tokens=40)
    assert [len(ids) for ids in alone.documents] == [51] and not alone.joined and alone.documents[0][0] == 256
    joined = tokenise(str(path), byte_tokenizer(), longest=40, tokens=100)
    assert joined.joined and [len(ids) for ids in joined.documents] == [51, 42]  # b and c in one; d alone is not enough
    assert joined.documents[1].tolist() == [256, *b"b" * 10, 256, *b"c" * 30]
    assert joined.bytes_per_token.tolist() == [1.0, 40 / 41]
    with pytest.raises(Unavailable, match="has 124 tokens in all; a context of 200 needs one more"):
        tokenise(str(path), byte_tokenizer(), longest=200, tokens=1)


def test_a_curve_reads_the_same_stretches_at_every_length(tmp_path):
    (tmp_path / "t.txt").write_text(" ".join(SENTENCES * 4))
    subject = load_subject(str(save(kla_ccq(), tmp_path / "tiny")), "tiny", EvalSettings(text=("t",), device="cpu"))
    told: list = []
    settings = EvalSettings(text=("t",), tokens=240)
    row = Curve("c", (40, 60, 100), given=str(tmp_path / "t.txt")).measure(subject, settings, lambda *progress: told.append(progress))
    assert [(point["length"], point["tokens"]) for point in row["points"]] == [(40, 160), (60, 120), (100, 200)]  # two stretches of 100
    assert told[-1] == (480, 480)
    with pytest.raises(Unavailable, match="a context of 100 tokens is more than max_length=64"):
        Curve("c", (100,), given="x").measure(subject, EvalSettings(text=("t",), max_length=64), lambda *progress: None)
    with pytest.raises(Unavailable, match="there is no text: give one by --text"):
        Curve("c", (100,)).measure(subject, settings, lambda *progress: None)


def test_suites_have_what_the_papers_have():
    names = {item.name for item in CCQ_PAPER}
    assert len(names) == len(CCQ_PAPER) == 2 + 7 + 12 + 14 + 6
    assert {f"niah_single_{variant}_{1024 * n}" for variant in (1, 2, 3) for n in (1, 2, 4, 8)} <= names
    by_name = {item.name: item for item in CCQ_PAPER}
    assert [name for name, item in by_name.items() if getattr(item, "metrics", ()) == ("acc_norm",)] == ["hellaswag", "arc_challenge"]
    assert all(item.cut == "middle" for item in CCQ_PAPER if item.group in LONGBENCH)
    assert {item.lengths for item in CCQ_PAPER if isinstance(item, Curve)} == {(4096, 8192, 12288, 16384, 20480)}
    kla = items_of(EvalSettings(suite="kla-paper", text=("a.txt",)))
    assert [item.name for item in kla] == ["mqar-kla", "one-pair-kla", "palindrome-kla", "stack-kla", "curve_a"]
    assert kla[-1].lengths == (1024, 2048, 4096, 8192, 16384, 32768, 65536)
    assert [item.name for item in items_of(EvalSettings(suite="kla-paper"))][-1] == "curve_text"
    assert items_of(EvalSettings(tasks=("gsm8k", "piqa")))[0] == Language("gsm8k")
    assert set(SUITES) == {"ccq-paper", "kla-paper", "offline"}


def test_means_are_over_whole_groups_alone():
    groups = groups_of(CCQ_PAPER)
    assert [len(groups[name]) for name in ("zero-shot", *LONGBENCH, "LongBench")] == [7, 3, 3, 3, 3, 2, 14]
    rows = [{"label": "a", "task": task, "scores": [{"value": value}]} for task, value in (("x", 0.5), ("y", 0.25))]
    rows += [{"label": "b", "task": "x", "scores": [{"value": 1.0}]}]
    assert group_means(rows, {"two": ["x", "y"]}) == [{"label": "a", "group": "two", "tasks": ["x", "y"], "value": 0.375}]


def test_files_are_found_in_the_folder_and_in_its_eval(tmp_path, data):
    (tmp_path / "outer").mkdir()
    data.rename(tmp_path / "outer/eval")
    assert find(tmp_path / "outer", "no.jsonl", "piqa.jsonl") == tmp_path / "outer/eval/piqa.jsonl"
    assert find(None, "piqa.jsonl") is None and find(tmp_path, "piqa.jsonl") is None


def long_texts(folder):
    for name in ("qmsum_meetings", "corpus/english/test", "corpus/python/test", "govreport", "narrativeqa", "qasper", "codeparrot", "pg19"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table({"text": [" ".join(SENTENCES * 12)]}), folder / f"{name}.parquet")
    for group in LONGBENCH.values():
        for task in group:
            write_jsonl(folder / f"longbench_{task}.jsonl", LONGBENCH_ROWS)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("suite, count", [("offline", 18), ("ccq-paper", 41)])
def test_language_suites_from_end_to_end(measured, data, tmp_path, suite, count):
    long_texts(data)
    results, shown = measured(suite=suite, limit=1, tokens=1, lengths=(256, 512, 768))
    assert not results["missing"] and len(results["rows"]) == count == len(read_rows(tmp_path / "out/results.jsonl"))
    page = (tmp_path / "out/report.html").read_text()
    for part in ("Language tasks", "Needles", "By context length", "Where it comes from"):
        assert part in page
    assert page.count("<svg") == 3 + (3 if suite == "offline" else 6)
    if suite == "ccq-paper":
        assert [mean["group"] for mean in results["groups"]] == ["zero-shot", *LONGBENCH, "LongBench"]
        assert "LongBench (14)" in shown and {row["max_length"] for row in results["rows"] if "scores" in row} == {None}


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_kla_suite_from_end_to_end(measured, data, tmp_path, monkeypatch):
    text = tmp_path / "long.txt"
    text.write_text(" ".join(SENTENCES * 12))
    model = save(kla_ccq(vocab_size=8192, intermediate_size=0), tmp_path / "recall")
    results, shown = measured(model, suite="kla-paper", limit=1, text=(str(text),), lengths=(256, 512), tokens=512)
    assert not results["missing"]
    assert [row["task"] for row in results["rows"]] == ["mqar-kla", "one-pair-kla", "palindrome-kla", "stack-kla", "curve_long"]
    whole = [one["length"] for one in results["rows"][0]["accuracy"] if one["stratum"] is None]
    assert whole == [256, 512, 1024, 2048] and "mqar-kla 2,048" in shown
    page = (tmp_path / "out/report.html").read_text()
    assert "Recall" in page and "ceiling 99.62 %" in page


@pytest.mark.full
def test_the_report_joins_result_files(measured, tmp_path):
    first, _ = measured(tasks=("boolq",), limit=1)
    second, _ = measured(save(llama(), tmp_path / "llama"), tasks=("boolq",), limit=1)
    write_report([first, second], tmp_path / "both.html")
    page = (tmp_path / "both.html").read_text()
    assert page.count("<h2>Language tasks</h2>") == 1
    assert '<th scope="col">tiny</th><th scope="col">llama</th>' in page
    assert second["rows"][0]["max_length"] == 512 and not second["rows"][0]["document_token"]
