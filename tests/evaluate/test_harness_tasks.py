"""Prompts are the harness's own whatever the rows come from; what is missing is told in a line; metrics have honest intervals."""

import math
import os
import re
from pathlib import Path

import datasets
import jinja2
import lm_eval.tasks
import nltk
import pytest
from huggingface_hub import constants
from lm_eval.tasks._yaml_loader import load_yaml

from fastweights.evaluate.harness import needles, tasks
from fastweights.evaluate.harness.model import HarnessModel
from fastweights.evaluate.harness.needles import Needle, load_needle
from fastweights.evaluate.harness.scores import run_task
from fastweights.evaluate.harness.tasks import LocalFile, Unavailable, load_task
from fastweights.evaluate.statistics import mean_estimate
from fastweights.train.tokenizer import byte_tokenizer
from tests.evaluate.rows import LONGBENCH_ROWS, MADE, kla_ccq, write_jsonl, write_rows

HARNESS = Path(lm_eval.tasks.__file__).parent
YAML = {  # task -> (its file in the harness, our file of rows)
    "lambada_openai": ("lambada/lambada_openai.yaml", "lambada_openai"),
    "wikitext": ("wikitext/wikitext.yaml", "wikitext2"),
    "piqa": ("piqa/piqa.yaml", "piqa"),
    "hellaswag": ("hellaswag/hellaswag.yaml", "hellaswag"),
    "winogrande": ("winogrande/default.yaml", "winogrande"),
    "arc_easy": ("arc/arc_easy.yaml", "arc_easy"),
    "arc_challenge": ("arc/arc_challenge.yaml", "arc_c"),
    "social_iqa": ("siqa/siqa.yaml", "siqa"),
    "openbookqa": ("openbookqa/openbookqa.yaml", "obqa"),
    "boolq": ("super_glue/boolq/default.yaml", "boolq"),
}
SOURCE = {
    "dataset_path",
    "dataset_name",
    "dataset_kwargs",
    "training_split",
    "validation_split",
    "test_split",
    "fewshot_split",
    "metadata",
    "tag",
}
"""What may differ from the harness's own configuration: where the rows come from."""
DATA = os.environ.get("FASTWEIGHTS_DATA")
needs_data = pytest.mark.skipif(DATA is None, reason="FASTWEIGHTS_DATA does not name a folder with the files of docs/evaluation.md")


@pytest.fixture
def offline(monkeypatch):
    """As with HF_HUB_OFFLINE=1 from the start: no test asks the network."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture
def rows(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return write_rows(tmp_path / "rows")


def requests(task):
    task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=0)
    with tasks.quiet():
        task.build_all_requests(limit=None, rank=0, world_size=1)
    return [instance.args for instance in task.instances]


def rendered(config, field, row):
    """A field of the harness's configuration, for a row: its template, its function, or its column."""
    template = config[field]
    if callable(template):
        return template(row)
    return jinja2.Template(template, keep_trailing_newline=True).render(**row) if "{{" in template else row.get(template, template)


@pytest.mark.parametrize("name", YAML)
def test_prompts_are_the_harness_own(name, rows):
    config = load_yaml(HARNESS / YAML[name][0])
    task = load_task(name, file=LocalFile(rows / f"{YAML[name][1]}.jsonl"))
    ours, theirs = task.config.to_dict(), type(task.config)(**config).to_dict()
    differ = {field for field in ours | theirs if str(ours.get(field)) != str(theirs.get(field))}
    assert differ <= SOURCE, f"the local form of {name} changes {differ - SOURCE}"
    docs = MADE[YAML[name][1]]
    if config.get("process_docs"):
        docs = list(config["process_docs"](datasets.Dataset.from_list(docs)))
    expected = []
    for doc in docs:
        if name == "wikitext":
            expected.append((config["doc_to_target"](doc),))
        elif name == "winogrande":
            expected += [(choice, " " + config["doc_to_target"](doc)) for choice in config["doc_to_choice"](doc)]
        elif config["output_type"] == "multiple_choice":
            choices = {"piqa": lambda d: [d["sol1"], d["sol2"]], "boolq": lambda d: ["no", "yes"], "hellaswag": lambda d: d["choices"]}
            choices["social_iqa"] = lambda d: [d["answerA"], d["answerB"], d["answerC"]]
            found = choices.get(name, lambda d: d["choices"]["text"])(doc)
            expected += [(rendered(config, "doc_to_text", doc), f" {choice}") for choice in found]
        else:
            expected.append((rendered(config, "doc_to_text", doc), rendered(config, "doc_to_target", doc)))
    assert requests(task) == expected


def test_two_prompts_to_the_letter(rows):
    piqa = load_task("piqa", file=LocalFile(rows / "piqa.jsonl"))
    assert requests(piqa)[:2] == [
        ("Question: How do you keep bread fresh?\nAnswer:", " Wrap it in a cloth."),
        ("Question: How do you keep bread fresh?\nAnswer:", " Leave it in the rain for a night."),
    ]
    lambada = load_task("lambada_openai", file=LocalFile(rows / "lambada_openai.jsonl"))
    context, last = requests(lambada)[0]
    assert context.endswith("before the sun was") and last == " up."


@pytest.mark.full
def test_the_fourteen_of_longbench_take_local_rows(tmp_path, rows):
    from fastweights.recipes.evaluate_suites import LONGBENCH

    write_jsonl(tmp_path / "rows/long.jsonl", LONGBENCH_ROWS)
    for name in (f"longbench_{task}" for group in LONGBENCH.values() for task in group):
        task = load_task(name, file=LocalFile(tmp_path / "rows/long.jsonl"))
        prompt, how = requests(task)[0]
        assert LONGBENCH_ROWS[0]["context"] in prompt
        assert how["do_sample"] is False and 32 <= how["max_gen_toks"] <= 512
    assert sum(map(len, LONGBENCH.values())) == 14


def test_what_cannot_be_had_is_told_in_a_line(offline, rows, monkeypatch):
    with pytest.raises(
        Unavailable, match=r"data cannot be fetched: .*allenai/winogrande.*; put the rows into winogrande.jsonl in the folder"
    ):
        load_task("winogrande")
    (rows / "broken.jsonl").write_text("no json")
    with pytest.raises(Unavailable, match=r"broken\.jsonl cannot be read"):
        load_task("piqa", file=LocalFile(rows / "broken.jsonl"))

    def without(*args, **given):
        raise ModuleNotFoundError("No module named 'rouge'", name="rouge")

    monkeypatch.setattr(tasks, "_manager", lambda name: type("", (), {"all_subtasks": [name], "load": without})())
    with pytest.raises(Unavailable, match=r"the package 'rouge' is missing: pip install 'fastweights\[eval\]'"):
        load_task("longbench_qmsum")


@pytest.mark.full  # to read all of the harness's task files takes it ten seconds
def test_a_task_that_does_not_exist():
    with pytest.raises(Unavailable, match="no task 'riddles'"):
        load_task("riddles")


def test_the_hub_is_asked_once_and_not_for_half_a_minute(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert not tasks.go_offline_if_the_hub_is_out_of_reach(seconds=1.0)
    assert constants.HF_HUB_OFFLINE and datasets.config.HF_HUB_OFFLINE and os.environ["HF_HUB_OFFLINE"] == "1"
    with pytest.raises(Unavailable, match="cannot be fetched"):
        load_task("winogrande")


def test_metrics_and_their_intervals(rows):
    lm = HarnessModel(kla_ccq(), byte_tokenizer())
    measured = run_task(lm, load_task("piqa", file=LocalFile(rows / "piqa.jsonl")), limit=4)
    acc, norm = measured.scores
    assert (acc["metric"], norm["metric"], measured.samples) == ("acc", "acc_norm", 4) and acc["higher_is_better"]
    right, z2 = round(4 * acc["value"]), 1.959964**2  # Wilson's interval by hand
    p, n = right / 4, 4
    middle, half = (p + z2 / (2 * n)) / (1 + z2 / n), math.sqrt(z2 * (p * (1 - p) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    assert (acc["low"], acc["high"]) == pytest.approx((max(0, middle - half), min(1, middle + half)), abs=1e-6)
    assert measured.prompt_tokens[0] == 1 + len("Question: How do you keep bread dry?\nAnswer:")

    task = load_task("lambada_openai", file=LocalFile(rows / "lambada_openai.jsonl"))
    scores = {score["metric"]: score for score in run_task(lm, task).scores}
    nats = [-value for ((value, _),) in (instance.resps for instance in task.instances)]
    expected = [math.exp(part) for part in mean_estimate(nats)]
    assert [scores["perplexity"][part] for part in ("value", "low", "high")] == pytest.approx(expected, rel=1e-6)
    assert not scores["perplexity"]["higher_is_better"]

    task = load_task("wikitext", file=LocalFile(rows / "wikitext2.jsonl"))
    scores = {score["metric"]: score for score in run_task(lm, task).scores}
    pages = [row["page"] for row in MADE["wikitext2"]]
    total = -sum(instance.resps[0] for instance in task.instances)
    assert scores["bits_per_byte"]["value"] == pytest.approx(total / math.log(2) / sum(len(page.encode()) for page in pages))
    assert scores["word_perplexity"]["value"] == pytest.approx(math.exp(total / sum(len(re.split(r"\s+", page)) for page in pages)))
    for score in scores.values():
        assert score["low"] < score["value"] < score["high"]


@pytest.mark.full
def test_needles_are_the_generators_own_with_our_splitter_and_no_download(rows, monkeypatch):
    monkeypatch.setattr(nltk, "download", lambda *args: pytest.fail("a download was begun"))
    tokenizer, length = byte_tokenizer(), 4096
    # The shape checker of the tests draws from the generator's random numbers when a text is first split; afterwards it is remembered.
    load_needle(Needle(2, length), tokenizer, essays=rows / "essays.json", samples=1)
    for variant, value in ((1, r"\d{7}"), (2, r"\d{7}"), (3, r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")):
        task = load_needle(Needle(variant, length), tokenizer, essays=rows / "essays.json", samples=5)
        again = load_needle(Needle(variant, length), tokenizer, essays=rows / "essays.json", samples=5)
        assert list(task.eval_docs) == list(again.eval_docs) and len(task.eval_docs) == 5
        for doc in task.eval_docs:
            (hidden,) = doc["outputs"]
            assert re.fullmatch(value, hidden) and hidden in doc["input"] and doc["length"] <= length
            assert len(tokenizer(doc["input"]).input_ids) > length / 2
        prompt, how = requests(task)[0]
        assert prompt.endswith("mentioned in the provided text is") and how["max_gen_toks"] == 128
        assert prompt.startswith("A special magic ") and "Make sure to memorize it. I will quiz you about the " in prompt
    assert needles.splitter() == "fastweights"
    assert list(task.aggregation()) == [str(length)]
    found = run_task(HarnessModel(kla_ccq(), tokenizer), task, limit=2)
    assert [score["metric"] for score in found.scores] == ["4096"] and found.scores[0]["value"] == 0.0
    with pytest.raises(Unavailable, match=r"nothing\.json is not a haystack"):
        load_needle(Needle(2, length), tokenizer, essays=rows / "nothing.json")
    with pytest.raises(Unavailable, match="Could not generate any sample"):
        load_needle(Needle(1, 150), tokenizer, essays=None, samples=1)


@pytest.mark.full
@needs_data
def test_real_rows_score_the_same_at_batch_sizes_1_and_8():
    folder = Path(DATA) / "eval"
    for name, file, count in (
        ("lambada_openai", "lambada_openai", 5153),
        ("piqa", "piqa", 1838),
        ("social_iqa", "siqa", 1954),
        ("arc_challenge", "arc_c", 1172),
        ("openbookqa", "obqa", 500),
    ):
        found = []
        for batch_size in (1, 8):
            task = load_task(name, file=LocalFile(folder / f"{file}.jsonl"))
            assert len(task.eval_docs) == count
            found.append(run_task(HarnessModel(kla_ccq(), byte_tokenizer(), batch_size=batch_size), task, limit=6))
        one, eight = ({score["metric"]: score["value"] for score in measured.scores} for measured in found)
        assert one == pytest.approx(eight, rel=1e-4) and one["acc"] == eight["acc"]


@needs_data
def test_the_lambada_file_is_the_harness_own():
    from fastweights.recipes.evaluate_items import _hash_of

    path = Path(DATA) / "eval/lambada_openai.jsonl"
    assert _hash_of(path) == "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226"
