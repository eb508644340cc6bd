"""Loading a saved model to measure it or to decode with it: whole, or not at all."""

from __future__ import annotations

from typing import Any

from safetensors import SafetensorError
from transformers.utils import logging


def load_whole(model_class: Any, folder: str, **arguments: Any) -> Any:
    """``model_class.from_pretrained(folder, **arguments)`` in evaluation mode.

    Raises:
        ValueError: a file is damaged, or weights are missing or of another shape, which transformers would draw at random.
        OSError: as transformers raises it, for files that are not there.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what transformers would report at length is raised here
    try:
        model, told = model_class.from_pretrained(folder, output_loading_info=True, ignore_mismatched_sizes=True, **arguments)
    except (SafetensorError, RuntimeError, TypeError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"the weights in {folder!r} are damaged or do not fit its configuration: {first}") from error
    finally:
        logging.set_verbosity(verbosity)
    for what, found in (("lack", told["missing_keys"]), ("have in another shape", [name for name, *_ in told["mismatched_keys"]])):
        if names := sorted(found):
            more = f" and {len(names) - 1} more" if names[1:] else ""
            raise ValueError(f"the weights in {folder!r} {what} what its configuration asks for: {names[0]}{more}")
    return model.eval()
