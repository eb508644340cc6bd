"""What a model is made of: the one fast-weight layer, softmax attention as its baseline, norms and the feed-forward half."""

from fastweights.layers.attention import FastWeightAttention, mixer_options, parse_mixer
from fastweights.layers.mlp import SwiGLU
from fastweights.layers.norm import RMSNorm
from fastweights.layers.softmax import SoftmaxAttention, SoftmaxState

__all__ = ["FastWeightAttention", "RMSNorm", "SoftmaxAttention", "SoftmaxState", "SwiGLU", "mixer_options", "parse_mixer"]
