"""ONE Hugging Face model for every mixer and every hybrid.

``AutoConfig`` and ``AutoModelForCausalLM`` know it once ``fastweights`` is imported, before or after transformers. A saved folder also
loads where nobody has imported it, with ``trust_remote_code=True``: it carries a small file that does.
"""

from typing import TYPE_CHECKING

from fastweights._lazy import lazy_names
from fastweights.models.config import FastWeightsConfig

__all__ = ["FastWeightsCache", "FastWeightsConfig", "FastWeightsForCausalLM", "FastWeightsModel", "parameter_groups"]

# Only the config is imported at once: it is registered while transformers is still loading, where a model could not be defined yet.
if TYPE_CHECKING:
    from fastweights.models.cache import FastWeightsCache
    from fastweights.models.modeling import FastWeightsForCausalLM, FastWeightsModel
    from fastweights.models.parameters import parameter_groups
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "FastWeightsCache": "fastweights.models.cache",
            "FastWeightsForCausalLM": "fastweights.models.modeling",
            "FastWeightsModel": "fastweights.models.modeling",
            "parameter_groups": "fastweights.models.parameters",
        },
    )
