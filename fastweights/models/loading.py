"""Loading a saved model to measure it or to decode with it: whole, or not at all. What is wrong with its files is told in a line."""

from __future__ import annotations

from typing import Any

from safetensors import SafetensorError
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.utils import logging


def load_config(name: str) -> PreTrainedConfig:
    """Of a saved folder, or of a model on the hub.

    Raises:
        ValueError: it is damaged, or holds what cannot be.
        OSError: as transformers raises it, for a file that is not there or is no JSON.
    """
    try:
        return AutoConfig.from_pretrained(name)
    except OSError:
        raise
    except Exception as error:  # transformers looks at nothing before it uses it
        raise ValueError(f"the configuration in {name!r} cannot be used: {first_line(error)}") from error


def load_whole(model_class: Any, folder: str, **arguments: Any) -> Any:
    """``model_class.from_pretrained(folder, **arguments)`` in evaluation mode. ``device_map="meta"`` only looks whether it could be loaded.

    Raises:
        ValueError: a file is damaged, or weights are missing or of another shape, which transformers would draw at random.
        OSError: as transformers raises it, for files that are not there.
    """
    config, verbosity, bars = load_config(folder), logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # what transformers would report at length is raised here
    logging.disable_progress_bar()
    try:
        model, told = model_class.from_pretrained(
            folder, config=config, output_loading_info=True, ignore_mismatched_sizes=True, **arguments
        )
    except (SafetensorError, RuntimeError, TypeError) as error:
        raise ValueError(f"the weights in {folder!r} are damaged or do not fit its configuration: {first_line(error)}") from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
    for what, found in (("lack", told["missing_keys"]), ("have in another shape", [name for name, *_ in told["mismatched_keys"]])):
        if names := sorted(found):
            more = f" and {len(names) - 1} more" if names[1:] else ""
            raise ValueError(f"the weights in {folder!r} {what} what its configuration asks for: {names[0]}{more}")
    return model.eval()


def first_line(error: Exception) -> str:
    """What an exception of another library says, as far as a line goes; behind its name where it was not written for people."""
    line = next(iter(str(error).splitlines()), "").strip(" :")
    return (
        line
        if line and isinstance(error, (ValueError, OSError, RuntimeError, SafetensorError))
        else f"{type(error).__name__} {line}".strip()
    )
