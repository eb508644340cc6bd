"""The suites: which tasks, at which lengths, by which metric, and under which names their local files are looked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fastweights.evaluate.harness.needles import Needle
from fastweights.recipes.evaluate_items import Curve, Item, Language, Needles, Trained
from fastweights.recipes.evaluate_settings import EvalSettings
from fastweights.train.hub import HUB, HubText

TEXTS = (
    Language(
        "wikitext",
        ("word_perplexity", "bits_per_byte"),
        "language",
        ("wikitext2.jsonl",),
        note="a local file; with <unk> in it, not the raw text",
    ),
    Language("lambada_openai", ("acc", "perplexity"), "language"),
)
ZERO_SHOT = (
    Language("piqa", ("acc",), "zero-shot"),
    Language("hellaswag", ("acc_norm",), "zero-shot"),
    Language("winogrande", ("acc",), "zero-shot"),
    Language("arc_easy", ("acc",), "zero-shot", ("arc_e.jsonl",)),
    Language("arc_challenge", ("acc_norm",), "zero-shot", ("arc_c.jsonl",)),
    Language("social_iqa", ("acc",), "zero-shot", ("siqa.jsonl",)),
    Language("boolq", ("acc",), "zero-shot"),
)
"""The seven of the CCQ paper's average."""
LONGBENCH = {
    "single-document QA": ("narrativeqa", "qasper", "multifieldqa_en"),
    "multi-document QA": ("hotpotqa", "2wikimqa", "musique"),
    "summaries": ("gov_report", "qmsum", "multi_news"),
    "few-shot": ("trec", "triviaqa", "samsum"),
    "code": ("lcc", "repobench-p"),
}
"""The usual fourteen."""
LONGBENCH_DATA = "Xnhyacinth/LongBench"
"""Where the harness has them from."""
CCQ_LENGTHS = tuple(1024 * n for n in (4, 8, 12, 16, 20))
KLA_LENGTHS = tuple(1024 * 2**n for n in range(7))


def _files(name: str) -> tuple[str, ...]:
    return (*(f"{name}.{kind}" for kind in ("parquet", "jsonl", "txt")), name)


def _ccq_curves() -> list[Curve]:
    long = [("govreport", "gov_report"), ("qmsum", "qmsum"), ("narrativeqa", "narrativeqa"), ("qasper", "qasper")]
    hub = [(name, HubText(repository=LONGBENCH_DATA, config=config, split="test", column="context")) for name, config in long]
    hub.append(("codeparrot", HubText(repository="codeparrot/codeparrot-clean-valid", column="content")))
    hub.append(("pg19", HubText(repository="emozilla/pg19", split="test")))
    also = {"qmsum": ("qmsum_meetings.parquet",)}
    return [Curve(f"curve_{name}", CCQ_LENGTHS, also.get(name, ()) + _files(name), given) for name, given in hub]


def _needles(*lengths: int) -> list[Needles]:
    return [Needles(Needle(variant, length)) for variant in (1, 2, 3) for length in lengths]


CCQ_PAPER: tuple[Item, ...] = (
    *TEXTS,
    *ZERO_SHOT,
    *_needles(1024, 2048, 4096, 8192),
    *(Language(f"longbench_{task}", ("score",), group, cut="middle") for group, tasks in LONGBENCH.items() for task in tasks),
    *_ccq_curves(),
)
KLA_PAPER: tuple[Item, ...] = tuple(Trained(preset) for preset in ("mqar-kla", "one-pair-kla", "palindrome-kla", "stack-kla"))
OFFLINE: tuple[Item, ...] = (
    Language("lambada_openai", ("acc", "perplexity"), "language", local=True),
    Language(
        "wikitext",
        ("word_perplexity", "bits_per_byte"),
        "language",
        ("wikitext2.jsonl",),
        note="a form with <unk>, not the raw text",
        local=True,
    ),
    Language("piqa", ("acc",), "zero-shot", local=True),
    Language("social_iqa", ("acc",), "zero-shot", ("siqa.jsonl",), local=True),
    Language("openbookqa", ("acc",), "zero-shot", ("obqa.jsonl",), local=True),
    Language("arc_challenge", ("acc_norm",), "zero-shot", ("arc_c.jsonl",), local=True),
    *_needles(1024, 2048, 4096),
    Curve("curve_qmsum", CCQ_LENGTHS, ("qmsum_meetings.parquet",)),
    Curve("curve_english", CCQ_LENGTHS, ("corpus/english/test.parquet",)),
    Curve("curve_python", CCQ_LENGTHS, ("corpus/python/test.parquet",)),
)


def items_of(settings: EvalSettings) -> list[Item]:
    """What the settings ask for: the suite, or of it only the named parts; then other tasks by name; then curves on given text."""
    suite = {"ccq-paper": CCQ_PAPER, "kla-paper": KLA_PAPER, "offline": OFFLINE, None: ()}[settings.suite]
    curves: list[Item] = [Curve(f"curve_{_name_of(text)}", KLA_LENGTHS, given=text) for text in settings.text]
    if settings.suite == "kla-paper" and not curves:
        curves = [Curve("curve_text", KLA_LENGTHS)]  # which says that it wants a text
    items = [*suite, *curves]
    if settings.tasks:
        known = {item.name: item for item in (*CCQ_PAPER, *KLA_PAPER, *items)}  # the suite's own stand last, and win
        items = [known.get(name, Language(name)) for name in settings.tasks]
        items += [] if settings.suite else [curve for curve in curves if curve not in items]
    return [replace(item, lengths=settings.lengths) if settings.lengths and isinstance(item, Curve) else item for item in items]


def groups_of(items: Sequence[Item]) -> dict[str, list[str]]:
    """Group -> its tasks, where a mean over the group is usual."""
    averaged = ("zero-shot", *LONGBENCH)
    groups: dict[str, list[str]] = {}
    for item in items:
        if item.group in averaged:
            groups.setdefault(item.group, []).append(item.name)
    if set(LONGBENCH) <= set(groups):
        groups["LongBench"] = [name for group in LONGBENCH for name in groups[group]]
    return groups


def _name_of(text: str) -> str:
    return HubText.parse(text).repository.rpartition("/")[2] if text.startswith(HUB) else Path(text).stem or text
