"""KV cache bytes per token: counted from the config, and measured on the cache that transformers fills."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from latentfold.convert.layers import StreamedModel
from latentfold.convert.shapes import ModelShape
from latentfold.eval.records import CacheSize

MEASURED_TOKENS = 32


@torch.no_grad()
def cache_size(model: StreamedModel, shape: ModelShape, tokens: Tensor) -> CacheSize:
    """Fill a cache layer by layer with (1, T) tokens; `model` computes in the dtype it is stored in."""
    tokens = tokens[:, :MEASURED_TOKENS]
    cache = DynamicCache(config=model.config)
    hidden, kwargs = model.begin(tokens, cache)
    for index in range(model.num_layers):
        with model.layer(index) as layer:
            hidden = layer(hidden, **kwargs[index])
    counted = shape.num_layers * shape.cache_values * model.dtype.itemsize
    return CacheSize(counted=float(counted), measured=held_bytes(cache) / tokens.shape[1])


def held_bytes(cache: Cache) -> int:
    """Bytes of the keys and values, or latents, that a cache holds: all layers, all sequences."""
    return sum(
        part.numel() * part.element_size()
        for layer in cache.layers
        for part in vars(layer).values()
        if isinstance(part, torch.Tensor) and part.dim() == 4
    )
