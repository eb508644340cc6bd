import re
from xml.etree import ElementTree

import numpy as np
import pytest

from fastweights.report import write_report
from fastweights.report.microscope import COLUMNS, _named, layer_rows, number
from fastweights.report.plots import Curve, Heat, bars, beside, curves, exporting, heat_map
from fastweights.report.terminal import microscope_tables
from tests.report.conftest import look
from tests.report.test_report import Reader


def page_of(results, tmp_path):
    write_report(results, tmp_path / "report.html")
    return (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.full
def test_models_stand_side_by_side_and_the_page_is_whole(seen, tmp_path):
    markup = page_of(seen, tmp_path)
    page, text = Reader(markup), " ".join(Reader(markup).text)
    assert page.tags.count("h2") == len(re.findall("<h2>", markup)) == 8 - 1
    for name in ("kla+ccq", "gla+ccq"):
        assert f"<b>{name}</b>" in markup
    for one in seen:
        for _, numbers in layer_rows(one):
            assert all(number(x) in text for x in numbers)
    assert "a <text>" in text and "<text>" not in markup.replace("&lt;text&gt;", "")
    for name, value in page.attributes:
        if name in ("src", "href", "xlink:href"):
            assert value.startswith(("#", "data:"))
    assert "25 %" in text or 'aria-label="Needles of kla+ccq' in markup
    assert "needle at tokens 20 to 29 of 120; its value is not said by greedy decoding, −log p 12.50 nats for 8 tokens." in text


def test_what_a_rule_does_not_have_is_a_dash_and_has_no_plot(tmp_path):
    raw = look("raw", mixer="linear", num_hidden_layers=1)
    (_, numbers), *_ = layer_rows(raw)
    absent = {name for name, x in zip(COLUMNS, numbers, strict=False) if x is None}
    assert absent == {"beta", "corrected", "decay", "lambda", "lambda_trace", "removed"}
    markup = page_of([raw], tmp_path)
    assert "–" in Reader(markup).text and "<h2>Reads</h2>" not in markup and "forget gate" not in markup.split("<h2>Writes")[1]
    (table, needle, depth) = microscope_tables(raw)
    assert [str(c.header) for c in table.columns] == ["layer", "‖k‖", "residual", "‖S‖", "rank"]
    assert [str(c.header) for c in needle.columns] == ["layer", "on top directions"] and len(depth.columns) == 4


@pytest.mark.full
def test_two_models_of_one_mixer_go_by_their_labels_and_softmax_layers_are_told(tmp_path):
    twins = [look("one", mixer=["kla", "softmax"]), look("two", mixer=["kla", "softmax"], seed=1)]
    text = " ".join(Reader(page_of(twins, tmp_path)).text)
    assert "one: kla 0" in text and "two: kla 0" in text and "one 1: softmax, no memory" in text


def test_what_stands_side_by_side_can_be_told_apart():
    def named(*results):
        return [one["name"] for one in _named([{"mixers": m, "label": label, "source": source} for m, label, source in results])]

    assert named((["kla", "kla"], "a", "x"), (["gla"], "a", "x")) == ["kla", "gla"]
    assert named((["kla"], "a", "x"), (["kla"], "b", "x"), (["gla"], "c", "x")) == ["a", "b", "gla"]
    assert named((["kla"], "a", "x"), (["kla"], "a", "y")) == ["a on x", "a on y"]


def test_a_depth_map_alone_is_a_page(tmp_path):
    alone = look("x", mixer="kla", num_hidden_layers=1) | {"view": None, "needle": None}
    markup = page_of([alone], tmp_path)
    assert markup.count("<svg") == 1 and "What the memories do" not in markup


def test_figures_are_written_as_files(tmp_path):
    alone = look("x", mixer="kla", num_hidden_layers=1) | {"view": None, "needle": None}
    with exporting(tmp_path / "figures", ("svg", "png")) as written:
        page_of([alone], tmp_path)
        bars(["a"], [1.0], x_label="ms", description="Two: (bars)")
    names = ["01-needles-of-kla-by-length-and-depth.svg", "01-needles-of-kla-by-length-and-depth.png", "02-two-bars.svg", "02-two-bars.png"]
    assert [path.name for path in written] == names
    assert all(path.stat().st_size > 1500 for path in written)
    bars(["a"], [1.0], x_label="ms", description="outside, nothing is written")
    assert len(list((tmp_path / "figures").iterdir())) == 4
    with pytest.raises(ValueError, match="svg or png, not 'jpg'"), exporting(tmp_path, ("jpg",)):
        pass


def test_figures_side_by_side_are_one():
    words = {"x_label": "x", "y_label": "y"}
    low, high = (curves([Curve("a", [0, 1], [1.0, 2.0])], **words, description=size, size=(4.0, float(size))) for size in ("2", "3"))
    both = beside([low, high], description="a < b")
    outer, *inner = ElementTree.fromstring(both).iter("{http://www.w3.org/2000/svg}svg")
    assert (outer.get("width"), outer.get("height"), outer.get("viewBox")) == ("576pt", "216pt", "0 0 576 216")
    assert [(svg.get("x"), svg.get("width"), svg.get("height")) for svg in inner] == [("0", "288", "144"), ("288", "288", "216")]
    assert outer.get("aria-label") == "a < b" and [svg.get("aria-label") for svg in inner] == ["2", "3"]


def test_heat_maps_are_drawn_as_given():
    values = [[0.0, 1.0, None], [2.0, 1.0, 0.5]]
    heat = Heat(values, [("a", 1), ("b", 1)], (0.0, 2.0), centre=1.0)
    words = {"x_label": "x", "value_label": "v", "description": "d"}
    plots = {
        heat_map(heat, columns=["p", "q", "r"], texts=[["1", "2", ""], ["3", "4", "5"]], **words),
        heat_map(heat, columns=["p", "q", "r"], **words),
        heat_map(heat._replace(centre=None), columns=["p", "q", "r"], **words),
        heat_map(heat._replace(limits=(1.0, 1.0)), extent=(0.0, 30.0), **words),  # all the same: still a plot
    }
    assert len(plots) == 4 and all(plot.count("<image") == 2 for plot in plots)  # the map and its scale


def test_whole_numbers_get_whole_ticks_and_figures_can_share_an_axis():
    words = {"x_label": "x", "y_label": "y", "description": "d"}
    one = Curve("a", [0], [1.0])
    assert len({curves([one], **words), curves([one], integers=True, **words), curves([one], y_range=(0, 9), **words)}) == 3


def test_rows_of_a_benchmark(bench, tmp_path):
    markup = page_of([bench], tmp_path)
    page, text = Reader(markup), " ".join(Reader(markup).text)
    assert page.tags.count("svg") == 1 and page.tags.count("table") == 2
    assert "4 rows of forward. The same in all: kind forward, backend triton, floor_ms 0.12." in text
    assert "1 × 8,192 × 16 × 128 × 128" in text and "The mark is the floor of the same row." in text
    assert "4 rows" in text and "fastweights demo" in text and text.count("abc1234567") == 1  # one origin, said once
    assert bars(["a", "b"], [1.0, 2.0], x_label="ms", description="d", marks=[0.5, None]) != bars(
        ["a", "b"], [1.0, 2.0], x_label="ms", description="d"
    )


def test_numbers_are_short():
    assert [number(x) for x in (None, 0.0, 0.12345, 12.345, 1e-5, 123456.0)] == ["–", "0", "0.123", "12.3", "1.0e-05", "1.2e+05"]
    assert np.isfinite(float(number(3.0)))
