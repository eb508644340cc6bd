import copy
import re
from html.parser import HTMLParser

import pytest

from fastweights.report import write_report
from fastweights.report.html import Html, escape, table, tag
from fastweights.report.numbers import interval
from fastweights.report.plots import Curve, curves, short_number

VOID = {"meta", "link", "br", "path", "use", "rect", "image"}


class Reader(HTMLParser):
    """Collects text, and fails on tags that do not close in order."""

    def __init__(self, markup):
        super().__init__()
        self.open, self.text, self.tags, self.attributes = [], [], [], []
        self.feed(markup)
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture
def report(results, tmp_path):
    def build(results=results):
        write_report([results], tmp_path / "deep/report.html", title="A <title> & more")
        return tmp_path / "deep/report.html"

    return build


def test_the_page_is_whole_and_asks_the_network_for_nothing(report):
    markup = report().read_text(encoding="utf-8")
    page = Reader(markup)
    assert page.tags.count("svg") == 4 and page.tags.count("table") == 4
    assert "script" not in page.tags and "img" not in page.tags
    for name, value in page.attributes:
        if name in ("src", "href", "xlink:href", "action"):
            assert value.startswith(("#", "data:")), (name, value)
    assert not re.search(r"@import|url\((?!#)", markup)
    assert markup.count("http") == markup.count("http://www.w3.org/")  # names of SVG's vocabulary, which are never fetched


def test_text_is_escaped_everywhere(report, results):
    evil = "<script>alert(1)</script>&\"'"
    results = copy.deepcopy(results)
    for entry in results["summary"]:
        entry["label"] = entry["sample"]["prompt"] = entry["sample"]["text"] = evil
    for row in results["rows"]:
        row["label"] = row["command"] = evil
    results["command"] = results["device"] = results["settings"]["data"][0] = evil
    markup = report(results).read_text(encoding="utf-8")
    assert "<script" not in markup and "script" not in Reader(markup).tags
    assert Reader(markup).text.count(evil) >= 4 * 4


def test_every_number_of_the_summary_is_there(report, results):
    text = " ".join(Reader(report().read_text(encoding="utf-8")).text)
    for entry in results["summary"]:
        assert entry["label"] in text and f"{entry['parameters']:,}" in text
        for point in [entry["validation"], *entry["lengths"]]:
            assert interval(point["bits_per_byte"]) in text
        if entry["validation"]["difference"]:
            assert interval(entry["validation"]["difference"], signed=True) in text
    for fact in ("fastweights demo", "abc1234567", "A processor, 2 threads", "torch 2.13.0", "2030-01-01T00:00:00+00:00", "run3"):
        assert fact in text


def test_the_best_row_is_marked_and_rows_of_earlier_commands_are_told(report, results):
    results = copy.deepcopy(results)
    results["rows"][1]["command"] = "fastweights demo --steps 600"
    markup = report(results).read_text(encoding="utf-8")
    assert re.search(r'<tr class="strong"><th scope="row">kla\+ccq</th>', markup) and markup.count('class="strong"') == 1
    assert "Some rows were made by earlier commands:" in markup and "<pre>fastweights demo --steps 600</pre>" in markup


def test_one_mixer_alone_has_no_differences(report, results):
    results = results | {"summary": results["summary"][:1], "rows": results["rows"][:1]}
    page = Reader(report(results).read_text(encoding="utf-8"))
    assert page.tags.count("svg") == 3


def test_an_unknown_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match="results of kind 'poem' cannot be shown; known: comparison"):
        write_report([{"kind": "poem"}], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_plots_are_the_same_each_time_and_carry_every_line():
    lines = [Curve(f"line {i}", [1, 2, 4], [i, i, i], [i - 1, None, i - 1], [i + 1, None, i + 1]) for i in range(10)]
    first, again = (curves(lines, x_label="x", y_label="y", description="a <b>", log_x=True) for _ in range(2))
    assert first == again and isinstance(first, Html) and 'aria-label="a &lt;b&gt;"' in first
    strokes = re.findall(r'<path d="[^"]*" clip-path="[^"]*" style="fill: none; ([^"]*stroke: #[0-9a-f]{6}[^"]*)"', first)
    assert len({stroke for stroke in strokes if "#e4e8ec" not in stroke}) == 10  # more lines than colours: still told apart


def test_pieces():
    assert tag("p", "a < b", Html("<b>c</b>"), cls="x y") == '<p class="x y">a &lt; b<b>c</b></p>'
    assert escape(3) == "3" and escape(Html("&amp;")) == "&amp;"
    assert "<td>2</td>" in table(["name", "n"], [("a", 2)])
    assert interval({"value": 2.3456, "low": 2.3, "high": 2.4}) == "2.346 ± 0.050"
    assert interval({"value": -0.01, "low": None, "high": None}, signed=True) == "-0.010"
    assert [short_number(float(x)) for x in (0, 8, 256, 1024, 4096, 2**20, 1500, 2_500_000, 3000)] == [
        "0", "8", "256", "1K", "4K", "1M", "1.5k", "2.5M", "3k",
    ]  # fmt: skip
