"""`fastweights inspect` from a saved folder to its files."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from fastweights import cli
from fastweights.evaluate.microscope import inspect_memory
from fastweights.recipes import inspect as recipe
from fastweights.recipes.inspect import prepare, read_text, run
from fastweights.recipes.inspect_settings import InspectSettings
from fastweights.records import read_rows
from fastweights.report.microscope import number
from fastweights.tasks.s_niah import NEEDLE
from fastweights.train.tokenizer import byte_tokenizer
from tests.models.tiny import tiny_model

TEXT = "Memory is written by a rule. It is read by a query, né? The last key wins here.\n" * 3


def save(folder, **arguments):
    tiny_model(**{"vocab_size": 258, "num_hidden_layers": 1, "mixer": "kla+ccq"} | arguments).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def saved(tmp_path):
    return save(tmp_path / "kla+ccq-tiny" / "model")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


def test_from_a_text_to_files(saved, text, tmp_path):
    settings = InspectSettings(
        chunk=50, stride=2, needle="read by a query, né?", out=tmp_path / "out", depth_map=True, lengths=(430,), depths=(0, 100), samples=2
    )
    slide = prepare(saved, text, settings)
    assert slide.ids[0] == 256 and slide.tokenizer.decode(slide.ids[1:]) == TEXT and slide.label == "kla+ccq-tiny"
    assert slide.tokenizer.decode(slide.ids[slide.needle.begin : slide.needle.end]) == "read by a query, né?"
    assert slide.needle.question == slide.needle.asked == len(slide.ids) - 1
    console = Console(width=100, record=True)
    results = run(slide, console)
    told = console.export_text()
    assert (
        "kla+ccq: means over heads and tokens" in told
        and "Needle keys / haystack keys" in told
        and "nats a token of the value, share said" in told
    )

    written = json.loads((tmp_path / "out/results.json").read_text())
    assert written == json.loads(json.dumps(results)) and written["kind"] == "microscope" and written["tokens"] == len(slide.ids)
    arrays = np.load(tmp_path / "out/tokens.npz")
    assert arrays["layer0.beta"].shape == (len(range(0, len(slide.ids), 2)), 2) and arrays["ids"][1] == slide.ids[2]
    assert {"command", "commit", "versions"} <= set(json.loads(arrays["provenance"].item()))
    rows = read_rows(tmp_path / "out/rows.jsonl")
    mean = next(row for row in rows if row["quantity"] == "beta" and row["head"] == 1)
    assert (
        mean["mean"] == pytest.approx(arrays["layer0.beta"][:, 1].mean(), rel=1e-5) and mean["command"] and mean["meaning"].startswith("β")
    )
    (layer,) = written["view"]["layers"]
    kept = [row for row in rows if row["quantity"] == "survives_query" and row["of"] == "needle"]
    assert [row["value"] for row in kept] == pytest.approx(layer["needle"]["survives_query"]["needle"], rel=1e-5)
    np.testing.assert_allclose(layer["tokens"]["removed"]["mean"], arrays["layer0.removed"].mean(), rtol=1e-5)
    first = arrays["layer0.removed"][: round(len(arrays["positions"]) / len(written["view"]["begins"])), 0].mean()
    np.testing.assert_allclose(layer["maps"]["removed"][0][0], first, rtol=1e-5)
    assert (tmp_path / "out/report.html").stat().st_size > 50_000


def test_a_prompt_of_the_needle_task_and_its_spans(saved, text):
    for given in ("", text):
        slide = prepare(saved, given, InspectSettings(needle="s_niah", needle_length=600, needle_depth=40))
        ((prompt, answer, needle),) = slide.prompts
        assert needle == slide.needle
        sentence = slide.tokenizer.decode(slide.ids[needle.begin : needle.end])
        value = slide.tokenizer.decode(answer).strip()
        assert sentence.startswith(NEEDLE.split("{")[0]) and sentence.endswith(f"is: {value}.") and value.isdigit()
        assert slide.tokenizer.decode(slide.ids[needle.question :]).startswith("What is the special magic number for")
        assert slide.ids == prompt + answer and slide.ids[0] == 256 and len(slide.ids) <= 601
        assert (needle.asked, needle.asked_end) == (len(prompt) - 1, len(slide.ids) - 1)
        assert 0.2 < needle.begin / needle.question < 0.6


def test_several_prompts_have_other_haystacks_and_an_interval(saved, tmp_path):
    text = tmp_path / "sentences.txt"
    text.write_text(" ".join(f"Sentence {n} tells of {n * n} ships." for n in range(60)))
    settings = InspectSettings(needle="s_niah", needle_length=600, needle_prompts=3, out=tmp_path / "out")
    slide = prepare(saved, str(text), settings)
    read = [slide.tokenizer.decode(prompt) for prompt, _, _ in slide.prompts]
    assert (
        len({words.split("\n")[1][:12] for words in read}) == 3 and len({slide.tokenizer.decode(one.answer) for one in slide.prompts}) == 3
    )
    console = Console(width=120, record=True)
    (layer,) = run(slide, console)["view"]["layers"]
    assert "means over 3 prompts and heads" in console.export_text()
    assert "3 prompts: needle keys less haystack keys" in (tmp_path / "out/report.html").read_text()
    needle, each = layer["needle"], []
    for prompt, answer, place in slide.prompts:
        view = inspect_memory(slide.model, torch.tensor(prompt + answer), needle=place)
        each.append(view.layers[0].needle["projection"])
    apart = [np.mean(one["needle"][-1]) - np.mean(one["haystack"][-1]) for one in each]
    found = needle["difference"]["projection"]["haystack"]["mean"]
    assert needle["prompts"] == 3 and found["value"] == pytest.approx(np.mean(apart)) and found["low"] < found["value"] < found["high"]
    np.testing.assert_allclose(needle["projection"]["needle"], np.mean([one["needle"] for one in each], axis=0))
    with pytest.raises(ValueError, match="needle_prompts=2 makes prompts for needle='s_niah'; needle is 'ships'"):
        InspectSettings(needle="ships", needle_prompts=2)


def test_the_depth_map_goes_on_where_it_stopped(saved, tmp_path, monkeypatch):
    settings = InspectSettings(depth_map=True, lengths=(430, 500), depths=(0, 50), samples=2, out=tmp_path)
    slide, real, calls = prepare(saved, "", settings), recipe.find_needle, []

    def stops(*arguments):
        calls.append(arguments)
        if len(calls) > 5:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(recipe, "find_needle", stops)
    console = Console(width=120, record=True)
    with pytest.raises(KeyboardInterrupt):
        run(slide, console)
    assert "Interrupted with 2 of 4 cells of the depth map done. The same command goes on from here." in console.export_text()
    assert len(read_rows(tmp_path / "depth.jsonl")) == 2  # of 2 samples each; the third row was not whole
    monkeypatch.setattr(recipe, "find_needle", lambda *a: calls.append(a) or real(*a))
    calls.clear()
    rows = run(slide, Console(quiet=True))["depth_map"]
    assert len(calls) == 4 and [(row["length"], row["depth"]) for row in rows] == [(430, 0), (430, 50), (500, 0), (500, 50)]
    assert all(
        row["nats_per_token"] == pytest.approx(row["nats"] / 8) and 0 <= row["low"] <= row["accuracy"] <= row["high"] for row in rows
    )
    calls.clear()
    other = tiny_model(vocab_size=258, num_hidden_layers=1, mixer="kla+ccq", seed=1)
    run(dataclasses.replace(slide, model=other), Console(quiet=True))
    assert len(calls) == 8  # other weights are other rows


def test_the_page_has_the_numbers_of_the_recorded_rows():
    root = Path(__file__).parents[2]
    rows = [row for row in read_rows(root / "benchmarks/results/microscope.jsonl") if row.get("source") == "argparse.py"]
    names = ("key_norm", "corrected", "residual_share", "decay", "lambda", "lambda_trace", "removed", "effective_rank")
    lines = []
    for mixer in ("kla", "kla+ccq"):
        for layer in (0, 1):
            cells = []
            for name in names:
                found = [row for row in rows if (row["mixer"], row["layer"], row["quantity"]) == (mixer, layer, name)]
                values = [row["last" if name == "effective_rank" else "mean"] for row in found]
                cells.append(number(sum(values) / len(values) if values else None))
            lines.append(f"| {mixer} {layer} | {' | '.join(cells)} |")
    assert "\n".join(lines) in (root / "docs/microscope.md").read_text()


def test_what_cannot_be_looked_at_is_one_line(saved, text, tmp_path, capsys):
    softmax = save(tmp_path / "softmax", mixer="softmax")
    llama = tmp_path / "llama"
    LlamaForCausalLM(
        LlamaConfig(vocab_size=258, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, pad_token_id=None)
    ).save_pretrained(llama)
    bare = tmp_path / "bare"
    tiny_model(mixer="kla").save_pretrained(bare)
    capsys.readouterr()
    for arguments, told in (
        ((str(tmp_path), text), "it has no config.json"),
        ((str(llama), text), "holds a model of type 'llama'; this is for models of fastweights"),
        ((softmax, text), "there is no memory to look at: layer 0 is softmax attention"),
        ((str(bare), text), "no tokenizer can be loaded from"),
        ((saved,), "nothing to read: give a text, a file, --needle s_niah or --depth-map"),
        ((saved, "no/such/file.txt"), "no file 'no/such/file.txt'"),
        ((saved, str(tmp_path)), "is a folder; give one file of it"),
        ((saved, text, "--needle", "a needle"), "the needle 'a needle' does not occur in the text (text.txt)"),
        ((saved, text, "--needle", "wins", "--tokens", "20"), "the needle ends at token 75, and 20 are read"),
        ((saved, text, "--layers", "3"), "layer 3 does not exist; the model has layers 0 to 0"),
        ((saved, text, "--chunk", "0"), "chunk=0 is not positive"),
        ((saved, "--needle", "s_niah", "--needle-length", "50"), "length is 50; the question and"),
    ):
        out = ("--out", str(tmp_path / "out"))
        try:
            code = cli.main(("inspect", *arguments, *out))
        except SystemExit as exit:
            code = exit.code
        captured = capsys.readouterr()
        assert code == 2 and told in " ".join((captured.out + captured.err).split()), (arguments, captured)
        assert "Traceback" not in captured.err


def test_words_that_no_file_could_be_named_by():
    for words in ("a few words " * 40, "~nobody and others"):
        assert read_text(words) == ("words on the command line", words)


@pytest.mark.full
def test_words_are_a_text_and_hybrids_tell_of_their_softmax_layers(tmp_path):
    hybrid = save(tmp_path / "hybrid", mixer=["kla", "softmax"], num_hidden_layers=2)
    console = Console(width=100, record=True)
    results = run(prepare(hybrid, "some plain words", InspectSettings(out=tmp_path / "out")), console)
    assert "Layer 1 is softmax attention: there is no memory to look at." in console.export_text()
    assert results["without_memory"] == [1] and results["tokens"] == 17 and results["source"] == "words on the command line"
