"""Tiny models made by hand: a random llama with a byte-level tokenizer, no torch needed."""

import json
from pathlib import Path

import numpy as np

TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
DTYPES = {
    "I32": np.int32,
    "I8": np.int8,
    "U8": np.uint8,
    "BF16": np.uint16,
    "F8_E4M3": np.uint8,
    "F32": np.float32,
    "F16": np.float16,
}
Arrays = dict[str, tuple[str, np.ndarray]]  # name -> (safetensors dtype, values)


def bf16(values: np.ndarray) -> np.ndarray:
    """The upper half of each float32, which is bfloat16 (rounded towards zero)."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def write_safetensors(path: Path, arrays: Arrays) -> None:
    header, at = {}, 0
    for name, (dtype, values) in arrays.items():
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(np.ascontiguousarray(values, DTYPES[dtype]).tobytes() for dtype, values in arrays.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def llama_config(hidden: int = 64, layers: int = 2, inner: int = 128, tied: bool = True) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": hidden // 2,
        "vocab_size": 320, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": tied,
        "hidden_act": "silu", "bos_token_id": 256, "eos_token_id": 257, "dtype": "bfloat16", "attention_bias": False,
        "mlp_bias": False, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    }  # fmt: skip


def llama_arrays(config: dict[str, object], seed: int = 0) -> Arrays:
    random = np.random.default_rng(seed)
    hidden, inner, kv = int(str(config["hidden_size"])), int(str(config["intermediate_size"])), 0
    kv = hidden // 2
    shapes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    weights = {"model.embed_tokens.weight": random.normal(0, 0.5, (320, hidden)), "model.norm.weight": np.ones(hidden)}
    for layer in range(int(str(config["num_hidden_layers"]))):
        for kind, shape in shapes.items():
            weights[f"model.layers.{layer}.{kind}.weight"] = random.normal(0, 0.2, shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = np.ones(hidden)
    return {name: ("BF16", bf16(values)) for name, values in weights.items()}


def write_llama(folder: Path, **options: int) -> Path:
    """A whole checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = llama_config(**options)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_safetensors(folder / "model.safetensors", llama_arrays(config))
    write_tokenizer(folder)
    # values that transformers refuses to save again: they must be carried over all the same
    generation = {"eos_token_id": [257, 258], "do_sample": False, "temperature": 0.6}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "LICENSE").write_text("Do as you like.\n")
    return folder


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """One token a byte, then <s>, </s>, <pad>."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in letters]
    letters.update({byte: chr(256 + index) for index, byte in enumerate(others)})
    special = ["<s>", "</s>", "<pad>"]
    vocab = {letters[byte]: byte for byte in range(256)} | {token: 256 + i for i, token in enumerate(special)}
    added = [
        {
            "id": 256 + i, "content": token, "special": True, "normalized": False,
            "single_word": False, "lstrip": False, "rstrip": False,
        }
        for i, token in enumerate(special)
    ]  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": [],
    }  # fmt: skip
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": level, "post_processor": level, "decoder": level, "model": model,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>",
        "model_max_length": 512,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)


def write_corpus(path: Path, rows: int = 120) -> Path:
    """JSONL of distinct texts, about 450 bytes each."""
    random = np.random.default_rng(1)
    words = ["river", "stone", "quick", "lantern", "orbit", "seven", "quiet", "market", "copper", "window", "salt"]
    lines = [json.dumps({"text": f"{i}: " + " ".join(random.choice(words, 70))}) for i in range(rows)]
    path.write_text("\n".join(lines) + "\n")
    return path
