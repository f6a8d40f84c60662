"""A transformers model run one decoder layer at a time, from lazily read tensors.

Only one layer's weights are in memory, whatever the depth. The model class, its masks, rotary embeddings and caches are
transformers' own: a dry forward pass with the layers replaced by recorders shows what each layer is called with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from latentfold.convert.errors import InputError
from latentfold.convert.source import TensorHeader


class TensorReader(Protocol):
    """Anything that gives tensors by name, as `source.Checkpoint` does."""

    def tensor(self, name: str) -> Tensor: ...


ATTENTION = "latentfold_sdpa"


@dataclass(frozen=True)
class Heads:
    """What one call of attention works on, rotated and with KV heads repeated to query heads.

    Attributes:
        query, key: (B, H, T, d).  value: (B, H, T, e).
        mask: (B, 1, T, T), True where a query sees a key; None: causal.
        scale: of the scores.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: float


_watched: WeakKeyDictionary[nn.Module, list[Heads]] = WeakKeyDictionary()


@contextmanager
def watched_heads(attention: nn.Module) -> Iterator[list[Heads]]:
    """Collects the heads of every call of an attention module of a `StreamedModel`, for the length of the block."""
    _watched[attention] = []
    try:
        yield _watched[attention]
    finally:
        del _watched[attention]


def _equal_heads_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """transformers' sdpa with values zero-padded to the keys' size.

    torch's fused CPU kernel wants heads of one size; without it MLA's attention is four times slower.
    """
    if module in _watched:
        groups = query.shape[1] // key.shape[1]
        keys, values = (part.repeat_interleave(groups, dim=1) for part in (key, value))
        _watched[module].append(Heads(query, keys, values, attention_mask, kwargs["scaling"]))
    size = value.shape[-1]
    padded = nn.functional.pad(value, (0, query.shape[-1] - size)) if size < query.shape[-1] else value
    output, weights = sdpa_attention_forward(module, query, key, padded, attention_mask, **kwargs)
    return output[..., :size], weights


AttentionInterface.register(ATTENTION, _equal_heads_sdpa)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


class _Recorder(nn.Module):
    """Stands in for a layer: notes the keyword arguments, hands the hidden states on unchanged."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.kwargs: dict[str, Any] = {}
        # models choose a mask by attributes of the layer (attention_type, layer_idx)
        for name, value in vars(layer).items():
            if not name.startswith("_") and isinstance(value, (str, int)):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        self.kwargs = kwargs
        return hidden_states


class StreamedModel:
    """A causal language model whose layers are loaded when needed and dropped afterwards.

    Args:
        checkpoint: where tensors are read from.
        config: the model's transformers config.
        dtype: compute dtype.
        device: compute device.
    """

    def __init__(
        self, checkpoint: TensorReader, config: PretrainedConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.checkpoint, self.config, self.dtype, self.device = checkpoint, config, dtype, device
        with torch.device("meta"):
            self.model: Any = AutoModelForCausalLM.from_config(
                config, attn_implementation=ATTENTION, dtype=dtype
            ).eval()
        if not hasattr(getattr(self.model, "model", None), "rotary_emb"):
            raise InputError(f"model type {config.model_type!r}: expected a decoder with rotary embeddings")
        self.decoder = self.model.model
        self.decoder.rotary_emb = type(self.decoder.rotary_emb)(config=config).to(device)

    @property
    def num_layers(self) -> int:
        return len(self.decoder.layers)

    @property
    def inverse_frequencies(self) -> Tensor:
        """(n,) the model's own inverse frequencies, any scaling included, in float64."""
        return self.decoder.rotary_emb.inv_freq.to("cpu", torch.float64)

    def check_headers(self, headers: Mapping[str, TensorHeader]) -> None:
        """Compare the tensors that will be read with the files' headers, before the first is.

        Raises:
            InputError: one is missing or has another shape.
        """
        tied = {"lm_head.weight"} if self.config.tie_word_embeddings else set()
        for name, meta in self.model.state_dict().items():
            found = list(headers[name].shape) if name in headers else "nothing"
            if name not in tied and found != list(meta.shape):
                raise InputError(
                    f"tensor {name}: expected shape {list(meta.shape)}, as config.json says, found {found}"
                )

    def _load(self, module: nn.Module, prefix: str) -> None:
        state = {
            name: self.checkpoint.tensor(prefix + name).to(self.device, self.dtype) for name in module.state_dict()
        }
        for name, meta in module.state_dict().items():
            if state[name].shape != meta.shape:
                raise InputError(
                    f"tensor {prefix + name}: expected shape {list(meta.shape)}, as config.json says, "
                    f"found {list(state[name].shape)}"
                )
        module.load_state_dict(state, strict=True, assign=True)

    @contextmanager
    def loaded(self, module: nn.Module, prefix: str) -> Iterator[nn.Module]:
        """`module` with its weights, for the length of the block."""
        self._load(module, prefix)
        try:
            yield module
        finally:
            module.to("meta")

    @contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        """Decoder layer `index` with its weights, for the length of the block."""
        with self.loaded(self.decoder.layers[index], f"model.layers.{index}.") as module:
            yield module

    @torch.no_grad()
    def begin(self, tokens: Tensor, cache: Any = None) -> tuple[Tensor, list[dict[str, Any]]]:
        """Embed (B, T) tokens: the first layer's input (B, T, D) and each layer's keyword arguments.

        The arguments depend on B and T only, so those of one batch serve all batches of that shape.
        """
        layers = self.decoder.layers
        recorders = [_Recorder(layer) for layer in layers]
        norm = self.decoder.norm
        self.decoder.layers, self.decoder.norm = nn.ModuleList(recorders), nn.Identity()
        try:
            with self.loaded(self.decoder.embed_tokens, "model.embed_tokens."):
                out = self.decoder(input_ids=tokens.to(self.device), cache=cache, use_cache=cache is not None)
        finally:
            self.decoder.layers, self.decoder.norm = layers, norm
        return out.last_hidden_state, [recorder.kwargs for recorder in recorders]

    @contextmanager
    def head(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """A function from last hidden states (.., D) to logits (.., V), for the length of the block."""
        tied = self.config.tie_word_embeddings
        with (
            self.loaded(self.decoder.norm, "model.norm.") as norm,
            self.loaded(self.model.lm_head, "model.embed_tokens." if tied else "lm_head.") as lm_head,
        ):
            yield lambda hidden: lm_head(norm(hidden))

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """(B, T) tokens to (B, T, V) logits, layer by layer."""
        hidden, kwargs = self.begin(tokens)
        for index in range(self.num_layers):
            with self.layer(index) as layer:
                hidden = layer(hidden, **kwargs[index])
        with self.head() as head:
            return head(hidden)


@torch.no_grad()
def attention_inputs(layer: nn.Module, hidden: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Run one layer: its output, attention's normed input x, and attention's output, all (B, T, D)."""
    seen: list[Tensor] = []

    def note(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen.append(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])
        seen.append(output[0])

    attention: nn.Module = layer.self_attn  # type: ignore[assignment]
    handle = attention.register_forward_hook(note, with_kwargs=True)
    try:
        output = layer(hidden, **kwargs)
    finally:
        handle.remove()
    return output, seen[0], seen[1]
