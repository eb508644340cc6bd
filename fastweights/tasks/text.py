"""Plain-text helpers of the needle task: a byte tokenizer, what "any tokenizer" means, and a sentence splitter that needs no downloaded
model."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import Any


class ByteTokenizer:
    """UTF-8 bytes as tokens, for models trained without a tokenizer. Stateless; two are equal."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        """Text to bytes."""
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        """Bytes to text; broken sequences become replacement characters."""
        return bytes(ids).decode("utf-8", errors="replace")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByteTokenizer)

    def __hash__(self) -> int:
        return hash(ByteTokenizer)

    def __repr__(self) -> str:
        return "bytes"


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of ``text`` from a Hugging Face tokenizer, anything with ``encode``, or a callable ``str -> sequence of int``, special
    tokens included as it adds them. Raises ValueError for a tokenizer that gives no tokens: lengths could not be measured."""
    ids = tokenizer.encode(text) if hasattr(tokenizer, "encode") else tokenizer(text)
    ids = list(getattr(ids, "ids", ids))  # the tokenizers package returns an Encoding
    if text and not ids:
        raise ValueError(f"the tokenizer {tokenizer!r} gives no tokens for {text[:40]!r}; lengths cannot be measured with it")
    return ids


_ABBREVIATIONS = frozenset(
    """
    mr mrs ms dr prof sr jr st gen col capt lt sgt rev hon gov sen rep pres mt vol fig vs etc inc ltd co corp dept est approx
    e.g i.e cf al jan feb mar apr jun jul aug sep sept oct nov dec
    """.split()  # noqa: SIM905
)
_BOUNDARY = re.compile(r"""([.!?]+["'”’)\]]*)\s+(?=["'“‘(\[]*[A-Z0-9])""")
LONGEST_SENTENCE = 600
"""Characters. What runs on beyond them without an end, as source code does, is cut between words."""
_LAST_WORD = re.compile(r"([\w.]+)$")


def split_sentences(text: str) -> list[str]:
    """Sentences of English prose, in order, with whitespace collapsed: ``" ".join`` of them gives the text back so collapsed.

    A boundary is ``.``, ``!`` or ``?`` (and closing quotes) before a capital or a digit, but not after a common abbreviation or a single
    initial; what has none for `LONGEST_SENTENCE` characters is cut there. It stands where RULER and lm-evaluation-harness use NLTK's Punkt
    model, which has to be downloaded; some boundaries differ.
    """
    text = " ".join(text.split())
    sentences, start = [], 0
    for match in _BOUNDARY.finditer(text):
        before = _LAST_WORD.search(text, start, match.start()) if match.group(1) == "." else None
        word = before.group(1) if before else ""
        if word.lower() in _ABBREVIATIONS or (len(word) == 1 and word.isupper() and word != "I"):
            continue
        sentences.append(text[start : match.end(1)])
        start = match.end()
    if start < len(text):
        sentences.append(text[start:])
    return [
        piece
        for sentence in sentences
        for piece in textwrap.wrap(sentence, LONGEST_SENTENCE, break_long_words=False, break_on_hyphens=False)
    ]


# The magic words are "adjective-noun". RULER takes them from the wonderwords package; any plain words do.
ADJECTIVES = """
    able ancient bitter blue brave brief bright broad calm careful cheerful clean clever cold common cool crisp curious dark dear
    deep distant dry eager early easy empty fair faint famous fancy fast fierce fine firm flat fresh gentle giant glad golden
    grand green grey happy hard heavy hollow honest humble icy idle jolly keen kind large late lazy light little lively lonely
    long loud lucky mellow mild modern narrow neat noble odd old open pale patient plain polite proud pure quick quiet rapid rare
    red rich ripe rough round royal rusty sharp short shy silent silver simple sleepy slow small smooth soft solid sour steady
    stiff strange strong sunny sweet swift tall tame tender thick thin tidy tiny vast warm weak wet white wide wild wise young
""".split()  # noqa: SIM905
NOUNS = """
    acorn anchor apple arrow badge basket beach beacon bell bench bird blanket boat bottle branch bread bridge brook broom bucket
    butter button cabin camel candle canyon carpet castle cat chair cherry cliff clock cloud coat coin copper corner cottage
    crane crown cup curtain desert desk door dove dragon drum eagle engine falcon feather fence fern field flag flame flute
    forest fountain fox garden gate glove goose grape guitar hammer harbor hat hawk hill horse island jacket jar kettle key kite
    ladder lake lamp lantern leaf lemon letter lion map maple market meadow mirror moon mountain needle nest ocean olive orchard
    otter owl paddle palace paper parrot pebble pencil piano pillow pine pocket pond rabbit rain river road robin rocket roof
    rope rose sail salmon saddle shell ship shoe spoon spring star stone storm street sugar swan table teapot temple thread tiger
    tower train tree tulip turtle valley violin wagon wall water whale wheel window winter wolf
""".split()  # noqa: SIM905
