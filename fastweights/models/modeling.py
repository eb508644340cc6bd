"""The model: embedding, blocks of mixer and SwiGLU, norm, output projection. Every mixer and every hybrid is this one class.

    x += Mixer(RMSNorm(x));   x += SwiGLU(RMSNorm(x));   logits = W_out RMSNorm(x)

Source of the block: KLA's public code (arXiv 2605.08587), which is Llama's without biases.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModel, AutoModelForCausalLM
from transformers.utils import can_return_tuple

from fastweights.layers import FastWeightAttention, RMSNorm, SoftmaxAttention, SwiGLU
from fastweights.models.cache import FastWeightsCache, LayerState
from fastweights.models.config import FastWeightsConfig
from fastweights.models.loss import IGNORE, loss_and_gradients, losses_of_logits, next_token_targets, summed_losses, token_losses
from fastweights.models.padding import Packing, real_tokens
from fastweights.notation import CuSeqlens, Hidden

CACHE = "cache" if "cache" in {field.name for field in dataclasses.fields(CausalLMOutputWithPast)} else "past_key_values"
"""What the installed transformers calls the cache in outputs and in ``generate``; it was renamed between 5.17 and 5.24."""

GENERATION_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)


class FastWeightsBlock(GradientCheckpointingLayer):
    """One mixer and one SwiGLU (unless ``intermediate_size`` is 0), each behind a norm and added to its input."""

    def __init__(self, config: FastWeightsConfig, layer: int) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer: Any = config.build_mixer(layer)  # one layer or the other, with one face
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps) if config.intermediate_size else None
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size) if config.intermediate_size else None

    def forward(self, x: Hidden, *, state: LayerState | None = None, cu_seqlens: CuSeqlens | None = None) -> tuple[Hidden, LayerState]:
        y, state = self.mixer(self.mixer_norm(x), state=state, cu_seqlens=cu_seqlens)
        return self._feed_forward(x + y), state

    def step_(self, x: Hidden, state: LayerState) -> Hidden:
        """One token, for inference: overwrites the tensors of ``state``; no gradients."""
        return self._feed_forward(x + self.mixer.step_(self.mixer_norm(x), state))

    def _feed_forward(self, x: Hidden) -> Hidden:
        return x if self.mlp is None or self.mlp_norm is None else x + self.mlp(self.mlp_norm(x))


class FastWeightsPreTrainedModel(PreTrainedModel):
    config: FastWeightsConfig
    config_class = FastWeightsConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # the Trainer passes num_items_in_batch
    _no_split_modules = ["FastWeightsBlock"]  # noqa: RUF012, as transformers declares it
    _supports_sdpa = True
    _is_stateful = True

    def _init_weights(self, module: nn.Module) -> None:
        """Called for every module, children first. What a checkpoint has filled stays: transformers guards `torch.nn.init` to that end."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, SwiGLU):
            nn.init.normal_(module.down_proj.weight, std=self.config.initializer_range / math.sqrt(2 * self.config.num_hidden_layers))
        elif isinstance(module, (FastWeightAttention, SoftmaxAttention)):
            if self.config.out_proj_init != 1:  # to draw them again as they are would give every later module other weights
                nn.init.normal_(module.out_proj.weight, std=self.config.initializer_range * self.config.out_proj_init)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            loaded = [(p, p.detach().clone()) for p in module.parameters() if getattr(p, "_is_hf_initialized", False)]
            reset()  # may write without `torch.nn.init`
            for parameter, value in loaded:
                parameter.copy_(value)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # For code outside transformers it would skip modules without parameters of their own, and such modules set their children's here.
        super()._initialize_weights(module, is_custom_code=False)

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoModel") -> None:
        """Nothing: transformers would copy our source files into saved folders, where the shim is enough."""


class FastWeightsModel(FastWeightsPreTrainedModel):
    """The model without its output projection."""

    def __init__(self, config: FastWeightsConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(FastWeightsBlock(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Float[Tensor, "B T D"] | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: CuSeqlens | None = None,
        past_key_values: Cache | None = None,
    ) -> BaseModelOutputWithPast:
        """Arguments as in `FastWeightsForCausalLM.forward`; returns ``last_hidden_state [B, T, D]`` and the cache."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._choose_cache(cache, past_key_values, use_cache)
        packing = self._packing(x, attention_mask, cu_seqlens, 0 if cache is None else cache.seen_tokens)
        if packing is not None:
            x = packing.pack(x)
        bounds = cu_seqlens if packing is None else packing.cu_seqlens
        rows = x.shape[0] if bounds is None else len(bounds) - 1
        if cache is not None and cache.batch_size not in (-1, rows):
            raise ValueError(f"the cache holds {cache.batch_size} rows and the input {rows}; repeat or select the cache's rows first")

        states: list[LayerState | None] = [None] * len(self.layers) if cache is None else list(cache.states)
        keep = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        hidden_states = []
        for i, block in enumerate(self.layers):
            if keep:
                hidden_states.append(x)
            x, state = block(x, state=states[i], cu_seqlens=bounds)
            if cache is not None:  # without, each is given up before the next comes: softmax's are as large as its keys
                states[i] = state
        hidden_states.append(self.norm(x))
        if cache is not None:
            cache.states = states
            cache.seen_tokens += _columns(x, cu_seqlens) if packing is None else packing.last.shape[1]
        if packing is not None:
            hidden_states = [packing.unpack(h) for h in hidden_states]
        named_cache: dict[str, Any] = {CACHE: cache}
        every = tuple(hidden_states) if keep else None
        return BaseModelOutputWithPast(last_hidden_state=hidden_states[-1], hidden_states=every, **named_cache)

    def _choose_cache(self, cache: Cache | None, past_key_values: Cache | None, use_cache: bool | None) -> FastWeightsCache | None:
        if cache is not None and past_key_values is not None:
            raise ValueError("cache and past_key_values are two names of one argument; give one")
        cache = past_key_values if cache is None else cache
        if cache is not None and not isinstance(cache, FastWeightsCache):
            raise ValueError(f"cache is a {type(cache).__name__}; this model needs a FastWeightsCache(config)")
        if cache is not None and len(cache) != len(self.layers):
            raise ValueError(f"the cache holds {len(cache)} layers and the model has {len(self.layers)}; make it of the model's config")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        return FastWeightsCache(self.config) if cache is None and use_cache else cache

    def _packing(self, x: Hidden, attention_mask: Tensor | None, cu_seqlens: CuSeqlens | None, seen: int) -> Packing | None:
        """None where there is no padding: a mask of ones changes nothing, not even the path."""
        if attention_mask is None:
            return None
        real = real_tokens(attention_mask, x.shape[0], x.shape[1], seen)
        if real.all():
            return None
        if cu_seqlens is not None:
            raise ValueError("attention_mask marks padding, and packed documents (cu_seqlens) have none; leave the padding out")
        return Packing.of(real)


class FastWeightsForCausalLM(FastWeightsPreTrainedModel, GenerationMixin):
    """The language model. ``generate`` decodes greedily, by sampling and with beams; methods that take tokens back are refused."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012, as transformers declares it

    losses_of_logits: Any = staticmethod(losses_of_logits)
    loss_and_gradients: Any = staticmethod(loss_and_gradients)
    """Compiled ones may take their places."""

    def __init__(self, config: FastWeightsConfig) -> None:
        super().__init__(config)
        self.model = FastWeightsModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Float[Tensor, "B T D"] | None = None,
        labels: Int[Tensor, "B T"] | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seqlens: CuSeqlens | None = None,
        num_items_in_batch: int | Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits ``[B, T, vocabulary]`` and, with ``labels``, the loss.

        input_ids, inputs_embeds: tokens ``[B, T]`` or their embeddings ``[B, T, D]``.
        attention_mask: ``[B, T]``, 0 for padding, which is left out: on either side, at any batch size. With a cache it may also cover the
            earlier tokens. Positions of padding repeat the outputs of the last real token of their row.
        cache: a `FastWeightsCache` to go on from and to update; ``past_key_values`` is the same argument by its older name.
        labels: ``[B, T]``, usually input_ids; the shift is made here. −100, padding and the first token of a document are not predicted.
        logits_to_keep: form only the last n logits (0: all), or those at these positions. If given, a loss too never holds all logits.
        cu_seqlens: ``[documents + 1]``, bounds of documents packed in one row (B = 1), which do not see each other. A cache then has one
            row a document.
        num_items_in_batch: what to divide the summed loss by, as the Trainer passes it for all micro-batches of a step; None: the targets
            at hand. The Trainer counts labels: give the first token of each document the label −100, and both counts agree.
        """
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            cu_seqlens=cu_seqlens,
            past_key_values=past_key_values,
            return_dict=True,
        )
        hidden = outputs.last_hidden_state
        logits = self.lm_head(_kept(hidden, logits_to_keep))
        loss = None
        if labels is not None:
            targets = next_token_targets(labels, attention_mask, cu_seqlens)
            have_all = isinstance(logits_to_keep, int) and logits_to_keep == 0
            losses = self.losses_of_logits
            if have_all:
                total = losses(logits, targets).sum()
            else:
                total = summed_losses(hidden, self.lm_head, targets, losses, self.loss_and_gradients)
            items = (targets != IGNORE).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
            loss = total / (items.to(total.device) if isinstance(items, Tensor) else items)
        return CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=outputs.hidden_states, **{CACHE: outputs.get(CACHE)})

    @torch.no_grad()
    def step_(self, input_ids: Int[Tensor, "B 1"], states: Sequence[LayerState]) -> Float[Tensor, "B vocabulary"]:
        """The logits after one token more in each row, for inference: overwrites the tensors of ``states``, one a layer; no gradients.

        Nothing in it waits for a device, and all shapes are fixed, so that a CUDA graph may hold it.
        """
        x = self.model.embed_tokens(input_ids)
        for block, state in zip(self.model.layers, states, strict=True):
            x = block.step_(x, state)
        return self.lm_head(self.model.norm(x)).squeeze(1)

    def token_losses(
        self,
        input_ids: Int[Tensor, "B T"],
        labels: Int[Tensor, "B T"] | None = None,
        *,
        attention_mask: Tensor | None = None,
        cache: FastWeightsCache | None = None,
        cu_seqlens: CuSeqlens | None = None,
    ) -> Float[Tensor, "B T"]:
        """−log p of the token after each one, in nats; 0 where none is to be predicted. For evaluation: all logits never exist at once.

        ``labels`` defaults to ``input_ids``; the other arguments are those of `forward`.
        """
        outputs = self.model(
            input_ids, attention_mask=attention_mask, cache=cache, use_cache=cache is not None, cu_seqlens=cu_seqlens, return_dict=True
        )
        targets = next_token_targets(input_ids if labels is None else labels, attention_mask, cu_seqlens)
        return token_losses(outputs.last_hidden_state, self.lm_head, targets)

    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs) -> None:
        if generation_mode not in GENERATION_MODES:
            raise ValueError(
                f"generate() by {generation_mode} is not supported: it takes tokens back, and a fast-weight memory does not keep what it "
                f"overwrote. Supported: {', '.join(mode.value for mode in GENERATION_MODES)}"
            )
        super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)  # type: ignore[misc]

    def prepare_inputs_for_generation(self, *args, inputs_embeds=None, tokenizer=None, **kwargs):  # 5.17 wants to see inputs_embeds here
        """Without the tokenizer that ``generate`` is given for stop strings: transformers passes it on to the model too."""
        return super().prepare_inputs_for_generation(*args, inputs_embeds=inputs_embeds, **kwargs)

    def init_continuous_batching(self, *args, **kwargs):
        raise ValueError(
            "continuous batching shares out pages of keys and values, and a fast-weight memory has none; generate() takes a padded batch"
        )

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs) -> None:  # type: ignore[override]
        """Our cache, whatever transformers would make of the configuration."""
        if generation_config.is_assistant:
            raise ValueError("a fast-weight model cannot draft for assisted generation: it cannot take back the drafts that are rejected")
        if generation_config.cache_implementation not in (None, "dynamic"):
            kind = generation_config.cache_implementation
            raise ValueError(f"cache_implementation={kind!r} is not supported: the state has one form of its own; leave the argument out")
        mask = model_kwargs.get("attention_mask")
        if generation_config.prefill_chunk_size is not None and mask is not None and not mask[:, -1].all():
            raise ValueError(
                "prefill_chunk_size needs prompts padded on the left: a last chunk of padding alone has no output to go on from"
            )
        if model_kwargs.get(CACHE) is not None:
            model_kwargs[CACHE]._is_user_defined = True  # transformers asks before it drops the cache
        elif generation_config.use_cache is not False:
            model_kwargs[CACHE] = FastWeightsCache(self.config)


def _columns(x: Hidden, cu_seqlens: CuSeqlens | None) -> int:
    """By how many tokens a row has grown: T, or the longest document's."""
    return x.shape[1] if cu_seqlens is None else int(cu_seqlens.diff().max())


def _kept(hidden: Hidden, logits_to_keep: int | Tensor) -> Float[Tensor, "B kept D"]:
    if isinstance(logits_to_keep, Tensor):
        return hidden[:, logits_to_keep]
    return hidden[:, max(0, hidden.shape[1] - logits_to_keep) :] if logits_to_keep else hidden


AutoModel.register(FastWeightsConfig, FastWeightsModel, exist_ok=True)
AutoModelForCausalLM.register(FastWeightsConfig, FastWeightsForCausalLM, exist_ok=True)
