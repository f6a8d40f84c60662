"""The portable target: a dense `DeepseekV3ForCausalLM`, which stock engines load as MLA without remote code.

Shape legend
    D  hidden size    H  query heads    d  head size = qk_nope_head_dim = v_head_dim
    r  kv_lora_rank   S  rope slots, 2S = qk_rope_head_dim

Its conditions, each of which some engine breaks on in silence: no biases, interleaved rope, an explicit lm_head, all
layers dense, rope parameters in the old and the new spelling, rms_norm_eps equal to the 1e-6 that transformers and MLX
hard-code for the latent norm, yarn only with mscale == mscale_all_dim.

Biases are possible where transformers alone has to load it. Its class puts `attention_bias` on q_a_proj,
kv_a_proj_with_mqa and o_proj: what rotates gets its bias from the second, the values' is a constant output, and for the
queries q_a_proj is the identity with a constant beside it (q_lora_rank = D + 1), from which q_b_proj reads their bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import DeepseekV3Config

from latentfold.convert.attention.latent import LatentAttention
from latentfold.convert.attention.sizes import LayerSize, uniform
from latentfold.convert.calibrate.statistics import RopeStatistics
from latentfold.convert.model.shape import longest_context, norm_eps
from latentfold.convert.model.streamed import StreamedModel
from latentfold.convert.source.checkpoint import Checkpoint
from latentfold.convert.targets.deepseek.config import MODEL_TYPE, target_config
from latentfold.convert.targets.deepseek.ladders import Ladder, ladders
from latentfold.convert.targets.deepseek.layout import attention_tensors
from latentfold.convert.targets.deepseek.norm import residual_scale
from latentfold.convert.targets.target import Conversion, Copied, Unwritten
from latentfold.convert.text.windows import DEFAULT_WINDOW

KIND = "all"
"""The class has one ladder: its layers are all of a kind."""


@dataclass(frozen=True)
class PortableTarget(Conversion):
    """Models that outside attention are what Llama is."""

    name: ClassVar[str] = "deepseek"
    model_type: ClassVar[str] = MODEL_TYPE

    @property
    def size(self) -> LayerSize:
        """The one size of all layers."""
        found = uniform(self.wanted)
        assert found is not None
        return found

    @property
    def _biased(self) -> bool:
        return self.family.biased(self.source)

    @property
    def _tied(self) -> bool:
        """Whether the output head is the embedding: other engines do not tie this class, and a scale would show."""
        return self._biased and self.residual == 1.0 and bool(self.source.tie_word_embeddings)

    @property
    def engine(self) -> str:
        return "transformers" if self._biased else "any"

    @cached_property
    def residual(self) -> float:
        eps = norm_eps(self.source)
        assert eps is not None  # Llama's classes all have one
        return residual_scale(eps, self.dtype)

    def kind(self, layer: int) -> str:
        return KIND

    @cached_property
    def ladders(self) -> list[Ladder]:
        """All that `candidates` ever gives."""
        source, rope_dim = self.source, self.size.rope_dim
        longest = longest_context(source) or DEFAULT_WINDOW
        return ladders(source.rope_parameters, self.shape.head_dim, rope_dim, longest)

    def candidates(self, layer: int, stats: RopeStatistics, pairs: Tensor) -> list[Ladder]:
        return self.ladders

    def ladder(self, kind: str, data: dict[str, Any]) -> Ladder:
        return Ladder(data, self.size.rope_dim)

    @cached_property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        config = DeepseekV3Config(**self.config({KIND: self.ladders[0]}))
        return StreamedModel(Unwritten(), config, torch.float32, torch.device("cpu")).shapes

    def outer(self) -> dict[str, Copied]:
        embedding = "model.embed_tokens.weight"
        names = (embedding, "model.norm.weight", *(() if self._tied else ("lm_head.weight",)))
        return {name: self._own(name, to_residual=name == embedding) for name in names}

    def _own(self, name: str, **how: Any) -> Copied:
        """A tensor of the source, whatever its files call it."""
        return Copied(self.model.stored[self.model.tied.get(name, name)][0], **how)

    def copied(self, layer: int) -> dict[str, Copied]:
        prefix = f"model.layers.{layer}."
        gate_up = self.family.gate_up
        return {
            prefix + "input_layernorm.weight": self._own(prefix + "input_layernorm.weight"),
            prefix + "post_attention_layernorm.weight": self._own(prefix + "post_attention_layernorm.weight"),
            prefix + "mlp.down_proj.weight": self._own(prefix + "mlp.down_proj.weight", to_residual=True),
        } | {
            f"{prefix}mlp.{name}.weight": self._own(f"{prefix}{gate_up}.weight", part=(k, 2))
            if gate_up
            else self._own(f"{prefix}mlp.{name}.weight")
            for k, name in enumerate(("gate_proj", "up_proj"))
        }

    def attention(
        self, layer: int, converted: LatentAttention, ladder: Ladder, checkpoint: Checkpoint
    ) -> dict[str, Tensor]:
        gain = checkpoint.tensor(self._own(f"model.layers.{layer}.input_layernorm.weight").source).to(converted.latent)
        tensors = attention_tensors(converted, ladder, gain, self.residual, self.dtype)
        return {f"model.layers.{layer}.self_attn.{name}": tensor for name, tensor in tensors.items()}

    def config(self, chosen: Mapping[str, Ladder]) -> dict[str, Any]:
        plain = target_config(self.source, chosen[KIND], self.shape.head_dim, self.size.kv_rank, self.dtype)
        biased = {"attention_bias": True, "q_lora_rank": self.shape.hidden_size + 1} if self._biased else {}
        return plain | biased | {"tie_word_embeddings": self._tied}

    def rope_parameters(self, chosen: Mapping[str, Ladder]) -> dict[str, Any]:
        return chosen[KIND].parameters
