"""A tiny random llama as a GGUF file, written with the gguf package that llama.cpp brings: a byte-level vocabulary, and
rows of 256 elements, so that the K types fit."""

import sys
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 256, 512, 2, 4, 2
CONFIG: dict[str, object] = {
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HIDDEN // HEADS,
    "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "max_position_embeddings": 512,
}  # fmt: skip


def byte_tokens() -> list[str]:
    """One token a byte, spelled as GPT-2 does: printable characters as themselves, the others from 256 on."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]


def write_tiny_gguf(path: Path, converter: Path) -> int:
    """The file in bfloat16. `converter`: llama.cpp's script, beside its gguf package. Returns the number of values."""
    sys.path.insert(0, str(converter.parent / "gguf-py"))
    try:
        import gguf
    finally:
        sys.path.pop(0)
    writer: Any = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_context_length, 512), (writer.add_embedding_length, HIDDEN), (writer.add_block_count, LAYERS),
        (writer.add_feed_forward_length, INNER), (writer.add_head_count, HEADS), (writer.add_head_count_kv, KV_HEADS),
        (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_rope_dimension_count, HIDDEN // HEADS),
        (writer.add_file_type, gguf.LlamaFileType.MOSTLY_BF16), (writer.add_tokenizer_model, "gpt2"),
        (writer.add_tokenizer_pre, "gpt-2"), (writer.add_token_list, [*byte_tokens(), "<|end|>"]),
        (writer.add_token_types, [gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL]),
        (writer.add_token_merges, ["h e"]), (writer.add_eos_token_id, 256), (writer.add_bos_token_id, 256),
        (writer.add_add_bos_token, False),
    ):  # fmt: skip
        add(value)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd": (257, HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        for name, shape in (
            ("attn_q", (HIDDEN, HIDDEN)), ("attn_k", (kv, HIDDEN)), ("attn_v", (kv, HIDDEN)),
            ("attn_output", (HIDDEN, HIDDEN)), ("ffn_gate", (INNER, HIDDEN)), ("ffn_up", (INNER, HIDDEN)),
            ("ffn_down", (HIDDEN, INNER)), ("attn_norm", (HIDDEN,)), ("ffn_norm", (HIDDEN,)),
        ):  # fmt: skip
            shapes[f"blk.{layer}.{name}"] = shape
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        values = np.ones(shape, np.float32) if len(shape) == 1 else random.normal(0, 0.1, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values)
        else:
            packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sum(int(np.prod(shape)) for shape in shapes.values())
