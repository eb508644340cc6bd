"""`fastweights serve MODEL`: a saved model behind an OpenAI-compatible address. The server is transformers' own, `transformers serve`.

What is here makes it know our model. It finds a model's class by name inside transformers, wants a chat template, which base models have
none of, and decodes greedily, whatever temperature is asked for, unless the model's generation config says otherwise.
"""

from __future__ import annotations

import json
import socket
from typing import Any

import jinja2
import torch
from fastapi import HTTPException
from rich.console import Console

from fastweights.models import FastWeightsForCausalLM
from fastweights.recipes.saved import saved_config
from fastweights.recipes.serve_settings import CHAT_TEMPLATE, ServeSettings
from fastweights.train.tokenizer import load_tokenizer


class ServedModel(FastWeightsForCausalLM):
    """What the server finds under our model's name."""

    @classmethod
    def from_pretrained(cls, *arguments: Any, **keywords: Any) -> ServedModel:
        """It samples, from all tokens, unless a request's temperature is 0, as clients of such servers expect; a folder whose generation
        config says how to decode is obeyed."""
        model = super().from_pretrained(*arguments, **keywords)
        generation = model.generation_config
        if generation.do_sample is None:
            generation.do_sample, generation.top_k = True, 0 if generation.top_k is None else generation.top_k
        return model.eval()

    def generate(self, *arguments: Any, **keywords: Any) -> Any:
        """What cannot be met is the client's error, with its reason, where the server by itself would say just "Internal Server Error"."""
        if keywords["input_ids"].shape[1] == 0:
            raise HTTPException(400, "the prompt is empty")
        try:
            return super().generate(*arguments, **keywords)
        except ValueError as error:
            raise HTTPException(400, str(error)) from error


def prepare(model: str, settings: ServeSettings) -> dict[str, Any]:
    """The arguments for transformers' server. All that can be wrong with the request has been looked for; the model is not yet loaded.

    Raises:
        ValueError, OSError: what cannot be served, and why.
    """
    saved_config(model)
    template = load_tokenizer(model).chat_template
    device = ("cuda" if torch.cuda.is_available() else "cpu") if settings.device == "auto" else settings.device
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda': this machine has none that torch can use; take device='cpu'")
    if settings.chat_template is not None:
        template = settings.chat_template.read_text(encoding="utf-8")
        try:
            jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"{settings.chat_template} is no chat template: {error.message} in line {error.lineno}") from error
        chosen = {"chat_template": template}
    else:
        chosen = {} if template else {"chat_template": CHAT_TEMPLATE}
    _check_free(settings.host, settings.port)
    return {
        "force_model": model,
        "host": settings.host,
        "port": settings.port,
        "device": device,
        "dtype": {"auto": "auto", "fp32": "float32", "bf16": "bfloat16"}[settings.precision],
        "chat_template_kwargs": json.dumps(chosen),
    }


def run(arguments: dict[str, Any], console: Console) -> None:
    """Load the model and answer until interrupted."""
    from transformers.cli.serve import Serve  # imports the web framework
    from transformers.cli.serving import model_manager

    setattr(model_manager.transformers, FastWeightsForCausalLM.__name__, ServedModel)  # where it looks a configuration's architecture up
    address = f"http://{arguments['host']}:{arguments['port']}/v1"
    console.print(f"Serving {arguments['force_model']} on {address}; Ctrl-C ends it.", highlight=False, soft_wrap=True)
    Serve(**arguments)


def _check_free(host: str, port: int) -> None:
    """ValueError unless one can listen there. (The server itself would say so only after it has loaded the model.)"""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: a port just left is free
            probe.bind(address)
    except OSError as error:
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
