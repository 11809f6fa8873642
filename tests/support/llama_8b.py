"""The shapes of the 291 parameters of Llama-3-8B (configs/llama-3-8b.yaml)."""

_WIDTH, _KEYS, _INNER, _VOCABULARY, _LAYERS = 4096, 1024, 14336, 128256, 32
_LAYER = {
    "input_layernorm": (_WIDTH,),
    "self_attn.q_proj": (_WIDTH, _WIDTH),
    "self_attn.k_proj": (_KEYS, _WIDTH),
    "self_attn.v_proj": (_KEYS, _WIDTH),
    "self_attn.o_proj": (_WIDTH, _WIDTH),
    "post_attention_layernorm": (_WIDTH,),
    "mlp.gate_proj": (_INNER, _WIDTH),
    "mlp.up_proj": (_INNER, _WIDTH),
    "mlp.down_proj": (_WIDTH, _INNER),
}
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (_VOCABULARY, _WIDTH),
    **{f"model.layers.{n}.{name}.weight": shape for n in range(_LAYERS) for name, shape in _LAYER.items()},
    "model.norm.weight": (_WIDTH,),
    "lm_head.weight": (_VOCABULARY, _WIDTH),
}
