"""Every kind of report in a real browser: no complaint, every plot drawn, nothing wider than the page."""

import pytest

from fastweights.report import write_report
from tests.report.browser import open_page

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    "kinds, plots",
    [
        (["results"], 4),
        (["task_results"], 3),
        (["seen"], 26),
        (["evaluated"], 2),
        (["bench"], 1),
        (["results", "task_results", "seen", "evaluated", "bench"], 36),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else "",
)
def test_a_browser_draws_it_without_complaint(request, tmp_path, kinds, plots):
    results = []
    for kind in kinds:
        found = request.getfixturevalue(kind)
        results += found if isinstance(found, list) else [found]
    write_report(results, tmp_path / "report.html")
    opened = open_page(tmp_path / "report.html", tmp_path)
    assert not opened.complaints
    assert len(opened.plots) == plots
    for plot in opened.plots:
        assert plot["width"] > 300 and plot["height"] > 60 and plot["drawn"] >= 10 and plot["broken"] == 0
        assert plot["right"] <= opened.window
    assert opened.width <= opened.window  # wide tables scroll in their own box


def test_the_check_sees_what_is_broken(tmp_path):
    page = tmp_path / "bad.html"
    broken = '<svg width="400" height="90"><image width="9" height="9" xlink:href="data:image/png;base64,AAAA"/></svg>'
    page.write_text(f'<html><body>{broken}<script>console.error("no")</script></body></html>')
    opened = open_page(page, tmp_path)
    assert any('"no"' in line for line in opened.complaints)
    assert opened.plots[0]["drawn"] == 0 and opened.plots[0]["broken"] == 1
