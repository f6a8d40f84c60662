"""KV cache bytes per token: counted from the config, and measured on the cache that transformers fills."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Cache, DynamicCache, PretrainedConfig

from latentfold.convert.families.registry import attention_name
from latentfold.convert.model.heads import ATTENTION
from latentfold.convert.model.shape import ModelShape, first_context
from latentfold.convert.model.streamed import StreamedModel, find_layers
from latentfold.convert.model.walk import Walk
from latentfold.eval.records import CachePoint, CacheSize

MEASURED_TOKENS = 32


@torch.no_grad()
def cache_size(model: StreamedModel, shape: ModelShape, tokens: Tensor) -> CacheSize:
    """Fill a cache layer by layer with (1, T) tokens; `model` computes in the dtype it is stored in."""
    tokens = tokens[:, :MEASURED_TOKENS]
    cache = DynamicCache(config=model.config)
    for visit in Walk(model, tokens, cache=cache):
        visit.advance()
    counted = sum(shape.layer_values) * model.dtype.itemsize
    return CacheSize(counted=float(counted), measured=held_bytes(cache) / tokens.shape[1])


@torch.no_grad()
def cache_by_context(
    original: PretrainedConfig, converted: PretrainedConfig, dtypes: Sequence[torch.dtype], contexts: Sequence[int]
) -> tuple[CachePoint, ...]:
    """What the caches hold after each of `contexts` tokens of one sequence.

    The models run on torch's meta device: transformers' own code fills its own cache, with tensors that have a shape
    and a dtype but no content, so any length of any model takes no time and no memory. What is neither attention nor
    norm is left out: no cache depends on it, and a mixture of experts cannot route what has no content.
    """
    held: list[list[int]] = []
    for config, dtype in zip(map(_at_one_length, (original, converted)), dtypes, strict=True):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION).eval()
        for layer in find_layers(model)[1]:
            for name, _ in list(layer.named_children()):
                if name != attention_name(config) and "norm" not in name and not name.startswith("ln_"):
                    setattr(layer, name, nn.Identity())
        bytes_held = []
        for context in contexts:
            cache = DynamicCache(config=config)
            width = model.get_input_embeddings().embedding_dim
            model.base_model(inputs_embeds=torch.zeros(1, context, width, dtype=dtype, device="meta"), cache=cache)
            bytes_held.append(held_bytes(cache))
        held.append(bytes_held)
    return tuple(CachePoint(*point) for point in zip(contexts, *held, strict=True))


def _at_one_length(config: PretrainedConfig) -> PretrainedConfig:
    """The same model without frequencies that depend on positions, which have no content here (longrope)."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    if first_context(config) is not None:
        kept = {k: v for k, v in text.rope_parameters.items() if k in ("rope_theta", "partial_rotary_factor")}
        text.rope_parameters = {"rope_type": "default", **kept}
    if getattr(config, "first_context", None) is not None:
        config.first_context = config.frequencies_beyond = None
    return config


def held_bytes(cache: Cache) -> int:
    """Bytes of the keys and values, or latents, that a cache holds: all layers, all sequences."""
    return sum(
        part.numel() * part.element_size()
        for layer in cache.layers
        for part in vars(layer).values()
        if isinstance(part, torch.Tensor) and part.dim() == 4
    )
