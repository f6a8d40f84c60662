"""What a model is and what converting it would save, from config.json alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from latentfold.convert.shapes import ModelShape

if TYPE_CHECKING:
    from latentfold.convert.families.family import Family

CONTEXTS = (4096, 32768, 131072)
KERNEL_SIZES = ((512, 64), (256, 64))
"""kv_lora_rank + qk_rope_head_dim that fast MLA kernels are built for."""
HEAD_SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1)
"""Shares of a head's size that may be given to rotation where a number of cached values is to be divided."""
TARGET_SHARE = 1 / 3
"""Share of the source's cached values that a proposal aims at: most of what can be kept without training is."""


@dataclass(frozen=True)
class Proposal:
    """Sizes for a conversion.

    Attributes:
        kv_rank, rope_dim: kv_lora_rank and qk_rope_head_dim.
        cached_share: cached values relative to the source's.
        kernels: which engine kernels take these sizes, in the stock class.
    """

    kv_rank: int
    rope_dim: int
    cached_share: float
    kernels: tuple[str, ...]


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


def engine_kernels(kv_rank: int, rope_dim: int) -> tuple[str, ...]:
    """MLA kernels that take a latent and rope part of these sizes (vLLM 0.32's backends; docs/portable.md)."""
    found = []
    total = kv_rank + rope_dim
    if (kv_rank, rope_dim) == (512, 64):
        found += ["CUTLASS MLA", "CPU MLA / AMX"]
    if total in (320, 512, 576):
        found += ["FlashMLA", "FlashAttention MLA", "FlashInfer MLA"]
    return (*found, "Triton MLA")


def propose_sizes(shape: ModelShape) -> Proposal:
    """About a third of the source's cached values, on sizes that fast kernels take where one is near."""
    values = shape.cache_values
    fitting = [
        size for size in KERNEL_SIZES if 0.2 * values <= sum(size) <= 0.4 * values and size[0] <= shape.max_kv_rank
    ]
    if fitting and shape.rotates:
        kv_rank, rope_dim = min(fitting, key=lambda size: abs(sum(size) - TARGET_SHARE * values))
    else:
        rope_dim = usual_rope_dim(shape, TARGET_SHARE * values)
        wanted = TARGET_SHARE * values - rope_dim
        step = 16 if wanted >= 32 else 1
        kv_rank = min(shape.max_kv_rank, max(step * round(wanted / step), rope_dim // 2, 1))
    share = (kv_rank + rope_dim) / values
    return Proposal(kv_rank, rope_dim, share, engine_kernels(kv_rank, rope_dim))


def usual_rope_dim(shape: ModelShape, values: float) -> int:
    """How many of so many cached values rotate: half a head's size (every other frequency), a third of them at most."""
    return max(2, 2 * int(min(shape.head_dim / 4, values / 6))) if shape.rotates else 0


def splits(shape: ModelShape, values: int) -> list[tuple[int, int]]:
    """(kv_rank, rope_dim) that together cache `values`; none where no division makes sense."""
    found = [(values - rope_dim, rope_dim) for rope_dim in _rotated(shape)]
    return [(rank, rope) for rank, rope in found if max(1, rope // 2) <= rank <= shape.max_kv_rank]


def divisible(shape: ModelShape) -> tuple[int, int]:
    """The fewest and the most cached values, below the source's, that `splits` divides."""
    rotated = _rotated(shape)
    return rotated[0] + max(1, rotated[0] // 2), min(shape.cache_values - 1, rotated[-1] + shape.max_kv_rank)


def _rotated(shape: ModelShape) -> list[int]:
    """Sizes of the rotated part to choose from, ascending."""
    if not shape.rotates:
        return [0]
    return sorted({max(2, round(shape.head_dim * share / 2) * 2) for share in HEAD_SHARES})


def inspect_model(name: str, *, revision: str | None = None, token: str | None = None) -> Inspection:
    """Describe a checkpoint from its config.json.

    Args:
        name: folder or Hub id.  revision, token: for the Hub.

    Raises:
        InputError: no usable config.json.
    """
    from latentfold.convert.families import judge
    from latentfold.convert.plan import read_config
    from latentfold.convert.shapes import model_shape
    from latentfold.convert.source import open_checkpoint

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
        not_portable=verdict.not_portable,
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
