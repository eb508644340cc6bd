"""With trust_remote_code=True, transformers loads this folder through this file. Without, `import fastweights` first."""

try:
    from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM, FastWeightsModel
except ModuleNotFoundError as error:
    if error.name != "fastweights":
        raise
    raise ImportError("this model needs the package fastweights: pip install fastweights") from error

__all__ = ["FastWeightsConfig", "FastWeightsForCausalLM", "FastWeightsModel"]
