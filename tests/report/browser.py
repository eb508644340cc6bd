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
MEASURE = """<script>window.addEventListener("load", async () => {
  const plots = [];
  for (const plot of document.querySelectorAll("svg, img")) {
    for (let fold = plot.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
    const size = plot.getBoundingClientRect();
    const found = { width: size.width, height: size.height, right: size.right, drawn: 0, broken: 0 };
    if (plot.tagName === "IMG") found.drawn = plot.naturalWidth;
    else {
      for (const part of plot.querySelectorAll("path, use, rect")) {
        const box = part.getBBox();
        if (box.width > 0 || box.height > 0) found.drawn += 1;
      }
      for (const part of plot.querySelectorAll("image")) {
        const image = new Image();
        image.src = part.href.baseVal;
        try { await image.decode(); found.drawn += image.naturalWidth; } catch { found.broken += 1; }
      }
    }
    plots.push(found);
  }
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
    where = [f"--user-data-dir={folder / 'profile'}", "--window-size=1200,1600", "--virtual-time-budget=20000", "--dump-dom"]
    done = subprocess.run([browser, *OPTIONS, *where, copy.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    measured = re.search(r'<pre id="measured">(.*?)</pre>', done.stdout, flags=re.S)
    assert measured, done.stderr
    return Opened([line for line in done.stderr.splitlines() if ":CONSOLE" in line], **json.loads(html.unescape(measured.group(1))))
