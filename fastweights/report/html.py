"""Pieces of a page, and the page. Every piece is `Html`; a plain string is text and is escaped wherever it enters one."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


class Html(str):
    """Markup that is safe to place as it is."""


def escape(text: object) -> Html:
    """Text as markup; `Html` passes as it is."""
    return text if isinstance(text, Html) else Html(html.escape(str(text)))


def tag(name: str, *content: object, **attributes: str) -> Html:
    """``<name attributes>content</name>``; `cls` stands for `class`."""
    given = "".join(f' {"class" if key == "cls" else key}="{html.escape(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{given}>{''.join(map(escape, content))}</{name}>")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, note: object = "", strong: int | None = None) -> Html:
    """The first column names the rows, the others hold numbers. `strong` is the row to set off."""
    head = tag("tr", *(tag("th", column, scope="col") for column in columns))
    body = []
    for i, (name, *cells) in enumerate(rows):
        marks = {"cls": "strong"} if i == strong else {}
        body.append(tag("tr", tag("th", name, scope="row"), *(tag("td", cell) for cell in cells), **marks))
    grid = tag("table", tag("thead", head), tag("tbody", *body))
    return tag("figure", tag("div", grid, cls="scroll"), *([tag("figcaption", note)] if note else []))


def figure(svg: Html, caption: object) -> Html:
    return tag("figure", svg, tag("figcaption", caption))


def section(title: str, *content: object) -> Html:
    return tag("section", tag("h2", title), *content)


def fields(pairs: Iterable[tuple[str, object]]) -> Html:
    """Names and values, such as a provenance."""
    return tag("dl", *(Html(tag("dt", name) + tag("dd", value)) for name, value in pairs))


def folded(summary: object, *content: object) -> Html:
    """Content that is opened by a click."""
    return tag("details", tag("summary", summary), *content)


def page(title: str, lead: object, *sections: Html) -> str:
    """A whole page in one file: it asks the network for nothing."""
    head = tag("title", title) + tag("style", Html(STYLE))
    body = tag("header", tag("h1", title), tag("p", lead, cls="lead")) + "".join(sections)
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
    return f'<!doctype html>\n<html lang="en"><head>{meta}{head}</head>\n<body><main>{body}</main></body></html>\n'


STYLE = """
:root { --ink: #1c2128; --soft: #59636e; --line: #d8dee4; --paper: #ffffff; --wash: #f6f8fa; --accent: #0b57a4; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--wash); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 68rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .5rem; letter-spacing: -.01em; }
h2 { font-size: 1.2rem; margin: 0 0 .9rem; }
h3 { font-size: .95rem; margin: 0; }
p { margin: 0 0 .8rem; max-width: 48rem; }
.lead { color: var(--soft); font-size: 1.05rem; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 1.4rem 1.5rem; margin-top: 1.25rem; }
figure { margin: 0 0 1rem; }
figure:last-child { margin-bottom: 0; }
figure svg { display: block; width: 100%; height: auto; }
figcaption { color: var(--soft); font-size: .88rem; margin-top: .5rem; max-width: 52rem; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: 1.5rem; }
.half { display: grid; grid-template-columns: repeat(auto-fill, minmax(24rem, 1fr)); gap: 1.2rem 1.5rem; margin-bottom: 1.2rem; }
.half figure { margin: 0; min-width: 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
thead th { font-size: .82rem; font-weight: 600; color: var(--soft); vertical-align: bottom; white-space: normal; }
th[scope=row], thead th:first-child { text-align: left; font-weight: 600; }
tbody tr:last-child > * { border-bottom: 0; }
tr.strong > * { background: #eef5fc; }
small { color: var(--soft); font-size: .85em; }
pre { max-height: 22rem; overflow-y: auto; }
code, pre, dd { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: .85rem; }
pre { background: var(--wash); border: 1px solid var(--line); border-radius: 8px; padding: .8rem 1rem; margin: .4rem 0 1rem;
      white-space: pre-wrap; overflow-wrap: anywhere; }
pre b { color: var(--accent); font-weight: 600; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.2rem; margin: 0 0 1rem; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
details { border-top: 1px solid var(--line); padding: .6rem 0; }
summary { cursor: pointer; font-weight: 600; }
@media print { body { background: none; } section { break-inside: avoid; } }
"""
