"""What a model is and what converting it would save, from config.json alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from latentfold.convert.model.shape import ModelShape
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
        """Plain JSON-able data; windows as a count per size."""
        data = asdict(self)
        data["shape"]["windows"] = {str(window): n for window, n in Counter(self.shape.windows).items()}
        data["shape"]["cache_values"] = self.shape.cache_values
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
        cache_bytes_per_token=shape.num_layers * shape.cache_values * width,
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
    windows = Counter(shape.windows)
    full = windows.pop(None, 0)
    for window, count in windows.items():
        found.append(f"sliding window of {window} tokens on {count} of {count + full} layers")
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
