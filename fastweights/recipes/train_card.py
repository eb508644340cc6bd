"""The README.md of a trained model's folder: what it is, what it read, how it was made, what it scores."""

from __future__ import annotations

from typing import Any

from fastweights.report.numbers import interval


def model_card(row: dict[str, Any]) -> str:
    """A Hugging Face model card of a result row of `fastweights train`."""
    return "\n".join([_header(row), _use(row), _text(row), _training(row), _results(row), _sample(row), _provenance(row)])


def _header(row: dict[str, Any]) -> str:
    mixer = row["mixer"] if isinstance(row["mixer"], str) else ", ".join(row["mixer"])
    tuned = f", fine-tuned from `{row['settings']['init_from']}`" if row["settings"]["init_from"] else ""
    return (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- fastweights\n- linear-attention\n---\n\n"
        f"# {row['preset']}\n\nA causal language model of {row['parameters']:,} parameters, mixer `{mixer}`, "
        f"trained with `fastweights`{tuned}.\n"
    )


def _use(row: dict[str, Any]) -> str:
    return """## Use

```python
import fastweights  # registers the model; or pass trust_remote_code=True below
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
```
"""


def _text(row: dict[str, Any]) -> str:
    settings, text = row["settings"], row["text"]
    held_out = f"validated on `{' '.join(settings['validation'])}`" if settings["validation"] else "validated on documents held out of it"
    size = ""
    if "train_tokens" in text:
        epochs = row["tokens"] / text["train_tokens"]
        size = f", {epochs:.2g} epochs of the {text['train_tokens']:,} in {text['train_documents']:,} documents to train on"
    return (
        f"## Text\n\n`{' '.join(settings['data'])}`, {held_out}; tokenizer `{settings['init_from'] or settings['tokenizer']}`. "
        f"The model read {row['tokens']:,} tokens{size} (content key `{text['key']}`).\n"
    )


def _training(row: dict[str, Any]) -> str:
    names = ("steps", "batch_tokens", "sequence_length", "learning_rate", "final_learning_rate", "warmup", "weight_decay", "betas", "clip")
    settings = ", ".join(f"{name} {row['settings'][f'train.{name}']}" for name in (*names, "precision"))
    took = "" if row["seconds"] is None else f" {row['seconds'] / 60:.0f} minutes."
    return f"## Training\n\nAdamW, linear warm-up, cosine decay: {settings}; seed {row['seed']}.{took}\n"


def _results(row: dict[str, Any]) -> str:
    lines = [
        "## Results\n\nBits per byte on text that was not trained on, the same tokens at each context length. ± is half of a 95 % interval"
        " over documents.\n",
        "| context in tokens | bits per byte | tokens scored |",
        "|---|---|---|",
    ]
    for point in row["lengths"]:
        lines.append(f"| {point['length']:,} | {interval(point['bits_per_byte'])} | {point['tokens']:,} |")
    whole = row["validation"]
    lines.append(
        f"\nOver {whole['tokens']:,} tokens of {whole['documents']} documents at the training length: {interval(whole['bits_per_byte'])}.\n"
    )
    return "\n".join(lines)


def _sample(row: dict[str, Any]) -> str:
    text = row["sample"]
    return f"## A sample\n\nThe prompt and how the model goes on:\n\n````\n{text['prompt']}{text['text']}\n````\n" if text["text"] else ""


def _provenance(row: dict[str, Any]) -> str:
    lines = ["## Provenance\n"]
    for session in row["sessions"]:
        versions = ", ".join(f"{name} {version}" for name, version in session["versions"].items())
        lines.append(f"- `{session['command']}` at commit {session['commit']}, {session['time']}, {session['device']}; {versions}")
    return "\n".join(lines) + "\n"
