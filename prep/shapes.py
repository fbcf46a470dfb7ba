"""The shapes of a model's linear layers, worked out from its config.json alone: no weights are read.

Group quantization cuts every input row into groups, so a group size works only if it divides the input width of every
layer it is used on. SmolLM2-135M has a width of 576 = 9 * 64: 64 divides it and 128 does not.
"""

from collections.abc import Mapping

GROUP_SIZES = (128, 64, 32, 16)
Shape = tuple[int, int]  # (out features, in features), as torch stores a weight


def linear_shapes(config: Mapping[str, object]) -> dict[str, Shape]:
    """Layer kind (`q_proj`, `experts.down_proj`, ...) -> (out, in).

    Kinds carry Llama's names; a model that fuses them (qkv_proj, gate_up_proj) has the same input widths. The output
    head is left out: recipes do not quantize it. A config that is no decoder with the usual fields gives {}: not known.
    """
    text = config.get("text_config")
    own = text if isinstance(text, Mapping) else config
    hidden = _int(own, "hidden_size")
    if not hidden or not _int(own, "num_attention_heads"):
        return {}
    attention = _latent_attention(own, hidden) if _int(own, "kv_lora_rank") else _attention(own, hidden)
    return {**attention, **_feed_forward(own, hidden)}


def fitting_group_sizes(config: Mapping[str, object]) -> tuple[int, ...]:
    """Those of 128, 64, 32, 16 that divide every layer's input width; () where the shapes are not known."""
    widths = {width for _, width in linear_shapes(config).values()}
    return tuple(size for size in GROUP_SIZES if widths and all(width % size == 0 for width in widths))


def _attention(config: Mapping[str, object], hidden: int) -> dict[str, Shape]:
    heads = _int(config, "num_attention_heads")
    head_dim = _int(config, "head_dim") or hidden // heads
    kv_width = (_int(config, "num_key_value_heads") or heads) * head_dim
    return {
        "q_proj": (heads * head_dim, hidden),
        "k_proj": (kv_width, hidden),
        "v_proj": (kv_width, hidden),
        "o_proj": (hidden, heads * head_dim),
    }


def _latent_attention(config: Mapping[str, object], hidden: int) -> dict[str, Shape]:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): queries and keys pass through a narrow rank."""
    heads, kv_rank, q_rank = (_int(config, key) for key in ("num_attention_heads", "kv_lora_rank", "q_lora_rank"))
    rope, nope, value = (_int(config, key) for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    q_out = heads * (rope + nope)
    queries = {"q_a_proj": (q_rank, hidden), "q_b_proj": (q_out, q_rank)} if q_rank else {"q_proj": (q_out, hidden)}
    return {
        **queries,
        "kv_a_proj_with_mqa": (kv_rank + rope, hidden),
        "kv_b_proj": (heads * (nope + value), kv_rank),
        "o_proj": (hidden, heads * value),
    }


def _feed_forward(config: Mapping[str, object], hidden: int) -> dict[str, Shape]:
    dense = _int(config, "intermediate_size") or 4 * hidden
    if not any(_int(config, key) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        return _gated("", dense, hidden)
    expert = _int(config, "moe_intermediate_size") or dense
    shared = _int(config, "shared_expert_intermediate_size") or _int(config, "n_shared_experts") * expert
    layers = _gated("experts.", expert, hidden)
    if shared:
        layers |= _gated("shared_expert.", shared, hidden)
    if _some_layers_are_dense(config):
        layers |= _gated("", _int(config, "intermediate_size_mlp") or dense, hidden)
    return layers


def _some_layers_are_dense(config: Mapping[str, object]) -> bool:
    """Whether a model of experts has plain layers too (DeepSeek, Qwen and Llama 4 each say it their own way)."""
    every = max(_int(config, "decoder_sparse_step"), _int(config, "interleave_moe_layer_step"))
    return bool(every > 1 or _int(config, "first_k_dense_replace") or config.get("mlp_only_layers"))


def _gated(prefix: str, inner: int, hidden: int) -> dict[str, Shape]:
    return {
        f"{prefix}gate_proj": (inner, hidden),
        f"{prefix}up_proj": (inner, hidden),
        f"{prefix}down_proj": (hidden, inner),
    }


def _int(config: Mapping[str, object], key: str) -> int:
    """The field, or 0 where it is absent, null or no number: absent and zero mean the same in these fields."""
    value = config.get(key)
    return value if isinstance(value, int) else 0
