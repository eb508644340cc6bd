"""A page opened in a real browser, without a window: what it complains of, and whether every plot is drawn."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run", "--enable-logging=stderr")
MEASURE = """<script>
const parts = [...document.querySelectorAll("svg image")].map(part => {  // the page is not loaded before all of these are
  const probe = document.createElement("img");
  probe.src = part.href.baseVal;
  probe.hidden = true;
  document.body.append(probe);
  return [part.closest("svg"), probe];
});
window.addEventListener("load", () => {
  const plots = [...document.querySelectorAll("svg, img:not([hidden])")].map(plot => {
    for (let fold = plot.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
    const { width, height, right } = plot.getBoundingClientRect();
    if (plot.tagName === "IMG") return { width, height, right, drawn: plot.naturalWidth, broken: 0 };
    const boxes = [...plot.querySelectorAll("path, use, rect")].map(part => part.getBBox());
    const widths = parts.filter(([owner]) => owner === plot).map(([, probe]) => probe.naturalWidth);
    const drawn = boxes.filter(box => box.width > 0 || box.height > 0).length + widths.reduce((sum, one) => sum + one, 0);
    return { width, height, right, drawn, broken: widths.filter(one => one === 0).length };
  });
  const told = document.createElement("pre");
  told.id = "measured";
  told.textContent = JSON.stringify({ plots, width: document.documentElement.scrollWidth, window: window.innerWidth });
  document.body.append(told);
});</script>"""


class Opened(NamedTuple):
    complaints: list[str]
    """What the console said."""
    plots: list[dict]
    """Of every svg and img: its size, its right edge, how much is drawn in it, and how many of its images do not decode."""
    width: int
    """Of all content."""
    window: int


def open_page(page: Path, folder: Path) -> Opened:
    """Open a copy that measures itself; skips the test where there is no browser."""
    browser = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    copy = folder / "measured.html"
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", f"{MEASURE}</body>"), encoding="utf-8")
    where = [f"--user-data-dir={folder / 'profile'}", "--window-size=1200,1600", "--dump-dom"]
    done = subprocess.run([browser, *OPTIONS, *where, copy.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    measured = re.search(r'<pre id="measured">(.*?)</pre>', done.stdout, flags=re.S)
    assert measured, "the page did not load"
    return Opened([line for line in done.stderr.splitlines() if ":CONSOLE" in line], **json.loads(html.unescape(measured.group(1))))
