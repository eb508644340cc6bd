"""Rows of our own in the columns of the data sets that the harness names, and tiny models to ask."""

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.train.tokenizer import byte_tokenizer

SENTENCES = [
    "The miller carried the sacks to the river before the sun was up.",
    "A lamp stood in the window of the harbour office all night.",
    "Nobody on the ferry had brought a coat against the wind.",
    "The clock on the town hall had stopped at a quarter to four.",
    "She wrote the number of the house on the back of a ticket.",
    "In spring the orchard is white and loud with bees.",
    "The baker sold the last of the rye bread to a stranger.",
    "Two boys fished from the bridge and caught nothing at all.",
]
CHOICES = {"label": ["A", "B", "C"], "text": ["a stone", "warm bread", "the cold river"]}
MADE = {
    "lambada_openai": [{"text": f"{sentence} {sentence}"} for sentence in SENTENCES[:5]],
    "wikitext2": [
        {"page": " \n = A Mill = \n \n " + " ".join(SENTENCES[:3]) + ' It was called " the long @-@ wheeled one " . \n'},
        {"page": " \n = A Harbour = \n \n " + " ".join(SENTENCES[3:]) + " \n"},
    ],
    "piqa": [
        {
            "goal": f"How do you keep bread {how}?",
            "sol1": "Wrap it in a cloth.",
            "sol2": "Leave it in the rain for a night.",
            "label": n % 2,
        }
        for n, how in enumerate(("fresh", "soft", "dry", "warm", "whole"))
    ],
    "hellaswag": [
        {
            "activity_label": "Baking bread",
            "ctx_a": "A man kneads dough on a table.",
            "ctx_b": f"he {does}",
            "endings": ["puts it [title] in the oven.", "swims away.", "throws the table out.", "sings to it."],
            "label": str(n),
        }
        for n, does in enumerate(("then", "slowly", "at last"))
    ],
    "winogrande": [
        {"sentence": f"The sack did not fit the cart because the _ was too {size}.", "option1": "sack", "option2": "cart", "answer": answer}
        for size, answer in (("large", "1"), ("small", "2"), ("wide", "1"))
    ],
    "arc_easy": [{"question": f"What does a {who} eat?", "choices": CHOICES, "answerKey": "B"} for who in ("child", "dog", "miller")],
    "arc_c": [
        {"question": f"Which of these is {what}?", "choices": CHOICES, "answerKey": key} for what, key in (("hard", "A"), ("wet", "C"))
    ],
    "siqa": [
        {
            "context": "Ada lent Ben her coat.",
            "question": f"How did {who} feel?",
            "answerA": "warm",
            "answerB": "cold",
            "answerC": "like a stone",
            "label": label,
        }
        for who, label in (("Ben", "1"), ("Ada", "2"))
    ],
    "obqa": [{"question_stem": "The miller grinds", "choices": CHOICES, "answerKey": "A"}] * 2,
    "boolq": [
        {"passage": SENTENCES[0], "question": "was it dark", "label": 1},
        {"passage": SENTENCES[6], "question": "is it wet", "label": 0},
    ],
}
LONGBENCH_ROWS = [
    {
        "context": " ".join(SENTENCES * 2),
        "input": "Who sold the bread?",
        "question": "Who sold the bread?",
        "answers": ["the baker"],
        "all_classes": ["person", "place"],
        "length": 100,
    },
    {"context": "x = 1\ny = x", "input": "", "question": "y?", "answers": ["person"], "all_classes": ["person", "place"], "length": 6},
]


def write_rows(folder: Path, *names: str) -> Path:
    """The rows of some (all) tasks as jsonl in a folder, with essays for the needles."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or MADE:
        write_jsonl(folder / f"{name}.jsonl", MADE[name])
    (folder / "essays.json").write_text(json.dumps({"text": " ".join(SENTENCES * 250)}))
    return folder


def write_jsonl(path: Path, rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def kla_ccq(seed=0, **changes) -> FastWeightsForCausalLM:
    """Random, with weights as large as a trained model's; byte tokens."""
    torch.manual_seed(seed)
    shape = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_heads=2, vocab_size=258, initializer_range=0.3)
    given = dict(mixer="kla+ccq", bos_token_id=256, eos_token_id=256)
    return FastWeightsForCausalLM(FastWeightsConfig(**shape | given | changes)).eval()


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, initializer_range=0.3)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=258, bos_token_id=256, eos_token_id=256, pad_token_id=257, max_position_embeddings=512, **shape)
    ).eval()


def save(model, folder: Path) -> Path:
    """A model with its tokenizer, as a user has them."""
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
