"""What a model's config says about its KV cache."""

import json
from collections.abc import Mapping
from pathlib import Path

GIB = 2**30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def read_config(folder: Path) -> dict[str, object]:
    """The checkpoint's config.json."""
    config: dict[str, object] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


def kv_bytes_per_token(config: Mapping[str, object], dtype: str) -> int | None:
    """Bytes of keys and values that one token takes: 2 x layers x KV heads x head size x element size.

    None for a config that does not say (sparse or latent attention, an unknown shape).
    """
    own = config.get("text_config")
    config = own if isinstance(own, Mapping) else config
    if config.get("kv_lora_rank") or not (whole(config, "num_hidden_layers") and whole(config, "num_attention_heads")):
        return None
    heads = whole(config, "num_attention_heads") or 1
    kv_heads = whole(config, "num_key_value_heads") or heads
    head = whole(config, "head_dim") or (whole(config, "hidden_size") or 0) // heads
    return 2 * (whole(config, "num_hidden_layers") or 0) * kv_heads * head * DTYPE_BYTES[dtype]


def context_length(config: Mapping[str, object], asked: int | None) -> int:
    """Tokens that a request may have: what the recipe asks for, else the model's own context."""
    return asked or whole(config, "max_position_embeddings") or 4096


def whole(config: Mapping[str, object], key: str) -> int | None:
    """A whole number of the config; None if it is not there."""
    value = config.get(key)
    return value if isinstance(value, int) else None
