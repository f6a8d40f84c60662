"""What a model is and what converting it would save, from config.json alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from latentfold.convert.model.shape import LayerKind, ModelShape
from latentfold.convert.plan.sizes import Proposal, propose_sizes

if TYPE_CHECKING:
    from latentfold.convert.families.family import Family


CONTEXTS = (4096, 32768, 131072)


@dataclass(frozen=True)
class Inspection:
    """The result of `inspect_model`; bytes are of one sequence, in the config's dtype."""

    name: str
    revision: str | None
    model_type: str
    attention: str
    shape: ModelShape
    rope: dict[str, Any]
    dtype: str
    unusual: tuple[str, ...]
    cache_bytes_per_token: int
    cache_bytes: dict[int, int]
    convertible: bool
    reasons: tuple[str, ...]
    not_portable: tuple[str, ...]
    proposal: Proposal | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able data; layers that are alike are counted."""
        data = asdict(self)
        shape = self.shape
        data["shape"] |= {
            "num_layers": shape.num_layers,
            "layers": [asdict(layer) | {"count": n} for layer, n in Counter(shape.layers).items()],
            "windows": {str(window): n for window, n in Counter(shape.windows).items()},
            "cache_values": shape.cache_values,
        }
        return data


def inspect_model(name: str, *, revision: str | None = None, token: str | None = None) -> Inspection:
    """Describe a checkpoint from its config.json.

    Args:
        name: folder or Hub id.  revision, token: for the Hub.

    Raises:
        InputError: no usable config.json.
    """
    from latentfold.convert.model.shape import model_shape
    from latentfold.convert.plan.support import judge
    from latentfold.convert.source.config import read_config
    from latentfold.convert.source.opening import open_checkpoint

    checkpoint = open_checkpoint(name, revision=revision, token=token)
    config = read_config(checkpoint)
    shape = model_shape(config)
    verdict = judge(config, shape)
    text = config.get_text_config()
    dtype = text.dtype or config.dtype
    width = dtype.itemsize if dtype is not None else 2
    rope = getattr(text, "rope_parameters", None) or {}
    return Inspection(
        name=checkpoint.name,
        revision=checkpoint.revision,
        model_type=config.model_type,
        attention=_attention_kind(shape),
        shape=shape,
        rope=dict(rope),
        dtype=str(dtype).removeprefix("torch.") if dtype is not None else "bfloat16",
        unusual=tuple(_unusual(text, shape, verdict.family)),
        cache_bytes_per_token=sum(shape.layer_values) * width,
        cache_bytes={tokens: shape.cache_bytes(tokens, width) for tokens in CONTEXTS},
        convertible=verdict.family is not None,
        reasons=verdict.reasons,
        not_portable=verdict.refusals.get("deepseek", ()),
        proposal=propose_sizes(shape) if verdict.family is not None else None,
    )


def _attention_kind(shape: ModelShape) -> str:
    if shape.is_mla:
        return "MLA"
    if shape.num_kv_heads == shape.num_heads:
        return "MHA"
    return "MQA" if shape.num_kv_heads == 1 else "GQA"


def _unusual(config: Any, shape: ModelShape, family: Family | None) -> list[str]:
    found: list[str] = []
    for (kind, window), count in Counter((layer.kind, layer.window) for layer in shape.layers).items():
        if kind is not LayerKind.FULL:
            tokens = f" of {window} tokens" if window is not None else ""
            found.append(f"{kind.value}{tokens} on {count} of {shape.num_layers} layers")
    if not shape.is_mla and shape.num_heads * shape.head_dim != shape.hidden_size:
        found.append(f"heads x head_dim = {shape.num_heads * shape.head_dim}, hidden size {shape.hidden_size}")
    if family.biased(config) if family else getattr(config, "attention_bias", False):
        found.append("attention bias")
    if family and family.q_norm:
        found.append("q/k-norm")
    if getattr(config, "mlp_bias", False):
        found.append("MLP bias")
    if getattr(config, "attn_logit_softcapping", None):
        found.append(f"attention soft-cap {config.attn_logit_softcapping}")
    if getattr(config, "quantization_config", None):
        found.append("quantized weights")
    if getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        found.append("mixture of experts")
    if getattr(config, "tie_word_embeddings", False):
        found.append("tied embeddings")
    return found
