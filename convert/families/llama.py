"""Llama 1/2/3.x and everything stored as Llama: SmolLM2, Yi, TinyLlama, DeepSeek LLM, ..."""

from latentfold.convert.families.family import Family, PortableLayout, TensorRole

INPUT_NORM = TensorRole("input_layernorm.weight", "D")

FAMILY = Family(
    model_type="llama",
    portable=PortableLayout(
        embedding=TensorRole("model.embed_tokens.weight", "VD", to_residual=True),
        norm=TensorRole("model.norm.weight", "D"),
        head=TensorRole("lm_head.weight", "VD"),
        layer_prefix="model.layers.{layer}.",
        q=TensorRole("self_attn.q_proj.weight", "QD"),
        k=TensorRole("self_attn.k_proj.weight", "KD"),
        v=TensorRole("self_attn.v_proj.weight", "KD"),
        o=TensorRole("self_attn.o_proj.weight", "DQ", to_residual=True),
        input_norm=INPUT_NORM,
        copied={
            "input_layernorm.weight": INPUT_NORM,
            "post_attention_layernorm.weight": TensorRole("post_attention_layernorm.weight", "D"),
            "mlp.gate_proj.weight": TensorRole("mlp.gate_proj.weight", "FD"),
            "mlp.up_proj.weight": TensorRole("mlp.up_proj.weight", "FD"),
            "mlp.down_proj.weight": TensorRole("mlp.down_proj.weight", "DF", to_residual=True),
        },
    ),
)
