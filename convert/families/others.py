"""Families that differ from Llama in a line or two of their attention."""

from latentfold.convert.families.family import Family, by_head, stacked

FAMILIES = (
    Family("granite", scale=lambda config, shape: config.attention_multiplier, why_not_portable="multipliers"),
    Family(
        "smollm3",
        rotates=lambda config, layer: bool(config.no_rope_layers[layer]),
        why_not_portable="layers without RoPE",
    ),
    Family("olmo", unsupported=("clip_qkv",), why_not_portable="non-parametric LayerNorm"),
    Family(
        "olmo2",
        q_norm="q_norm",
        k_norm="k_norm",
        output_norm="post_attention_layernorm",
        why_not_portable="q/k-norm and post norms",
    ),
    Family(
        "olmo3",
        q_norm="q_norm",
        k_norm="k_norm",
        output_norm="post_attention_layernorm",
        why_not_portable="q/k-norm, post norms and sliding windows",
    ),
    Family("mixtral", why_not_portable="mixture of experts with softmax routing"),
    Family("qwen2_moe", why_not_portable="q/k/v bias and mixture of experts"),
    Family("qwen3_moe", q_norm="q_norm", k_norm="k_norm", why_not_portable="q/k-norm and mixture of experts"),
    Family("olmoe", q_norm="q_norm", k_norm="k_norm", unsupported=("clip_qkv",), why_not_portable="q/k-norm"),
    Family("phi3", split=stacked("qkv_proj"), portable=True, gate_up="mlp.gate_up_proj"),
    Family(
        "phi",
        output="dense",
        unsupported=("qk_layernorm",),
        why_not_portable="biases, partial rotary embedding and a parallel residual",
    ),
    Family("stablelm", unsupported=("qk_layernorm",), why_not_portable="partial rotary embedding and LayerNorm"),
    Family("starcoder2", why_not_portable="biases and LayerNorm"),
    Family("glm", interleaved=True, why_not_portable="partial rotary embedding and biases"),
    Family(
        "glm4",
        interleaved=True,
        output_norm="post_self_attn_layernorm",
        why_not_portable="partial rotary embedding and post norms",
    ),
    Family(
        "cohere",
        interleaved=True,
        unsupported=("use_qk_norm",),
        why_not_portable="LayerNorm and a parallel residual",
    ),
    Family(
        "gpt_neox",
        attention="attention",
        split=by_head("query_key_value"),
        output="dense",
        why_not_portable="parallel residual, partial rotary embedding and biases",
        ignored=("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias"),
    ),
    Family(
        "gpt2",
        attention="attn",
        split=stacked("c_attn"),
        output="c_proj",
        transposed=True,
        scale=lambda config, shape: shape.head_dim**-0.5 if config.scale_attn_weights else 1.0,
        unsupported=("scale_attn_by_inverse_layer_idx", "add_cross_attention"),
        why_not_portable="learned positions, biases and LayerNorm",
        ignored=("attn.bias", "attn.masked_bias"),
    ),
    Family("opt", output="out_proj", why_not_portable="learned positions, biases and LayerNorm"),
)
