"""Engine kernels by the sizes they take."""

from __future__ import annotations

KERNEL_SIZES = ((512, 64), (256, 64))
"""kv_lora_rank + qk_rope_head_dim that fast MLA kernels are built for."""


def engine_kernels(kv_rank: int, rope_dim: int) -> tuple[str, ...]:
    """MLA kernels that take a latent and rope part of these sizes (vLLM 0.32's backends; docs/portable.md)."""
    found = []
    total = kv_rank + rope_dim
    if (kv_rank, rope_dim) == (512, 64):
        found += ["CUTLASS MLA", "CPU MLA / AMX"]
    if total in (320, 512, 576):
        found += ["FlashMLA", "FlashAttention MLA", "FlashInfer MLA"]
    return (*found, "Triton MLA")
