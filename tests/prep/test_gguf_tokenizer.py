"""The tokenizer of a GGUF file that the model came in goes into the files that are made of it."""

import json
import struct
from pathlib import Path

import pytest

from qserve.prep.gguf import read_gguf
from qserve.prep.gguf_tokenizer import carry_tokenizer, misread_tokenizer

TEXT = 8
BYTE_LEVEL = {"model": {"type": "BPE", "byte_fallback": True}, "decoder": {"type": "ByteLevel"}}
SENTENCEPIECE = {"model": {"type": "BPE", "byte_fallback": True}, "decoder": {"type": "ByteFallback"}}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def write_gguf(path: Path, fields: dict[str, str | int], values: tuple[float, ...]) -> bytes:
    """A GGUF file with these fields and one tensor of float32; returns its data."""
    alignment = fields.get("general.alignment", 32)
    assert isinstance(alignment, int)
    pairs = b"".join(
        text(key) + (struct.pack("<I", TEXT) + text(value) if isinstance(value, str) else struct.pack("<II", 4, value))
        for key, value in fields.items()
    )
    row = text("token_embd.weight") + struct.pack("<IQIQ", 1, len(values), 0, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(fields)) + pairs + row
    data = struct.pack(f"<{len(values)}f", *values)
    path.write_bytes(head + bytes(-len(head) % alignment) + data)
    return data


@pytest.mark.parametrize("alignment", [32, 64])
def test_the_tokenizer_is_the_sources_and_all_else_stays(tmp_path: Path, alignment: int) -> None:
    made = {"general.architecture": "llama", "general.alignment": alignment, "tokenizer.ggml.model": "llama"}
    data = write_gguf(
        tmp_path / "made.gguf", {**made, "tokenizer.ggml.pre": "default", "llama.block_count": 7}, (1, 2, 3)
    )
    given = {"general.name": "another", "tokenizer.ggml.model": "gpt2", "tokenizer.chat_template": "{{ 'é' }}" * 20}
    write_gguf(tmp_path / "source.gguf", given, (4, 5, 6))
    carry_tokenizer(tmp_path / "source.gguf", tmp_path / "made.gguf")
    found = read_gguf(tmp_path / "made.gguf")
    assert found.fields == {
        "general.architecture": "llama", "general.alignment": alignment, "llama.block_count": 7,
        "tokenizer.ggml.model": "gpt2", "tokenizer.chat_template": "{{ 'é' }}" * 20,
    }  # fmt: skip
    (tensor,) = found.tensors
    assert tensor.start % alignment == 0
    assert (tmp_path / "made.gguf").read_bytes()[tensor.start :] == data
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["made.gguf", "source.gguf"]


@pytest.mark.parametrize(
    ("told", "kind", "wrong"),
    [
        (BYTE_LEVEL, "llama", True), (BYTE_LEVEL, "gpt2", False), (SENTENCEPIECE, "llama", False),
        ({"model": {"type": "Unigram"}, "decoder": None}, "t5", False), (None, "llama", False),
    ],
)  # fmt: skip
def test_a_tokenizer_taken_for_another_kind_is_found(
    tmp_path: Path, told: dict[str, object] | None, kind: str, wrong: bool
) -> None:
    write_gguf(tmp_path / "m.gguf", {"tokenizer.ggml.model": kind}, (1,))
    if told is not None:
        (tmp_path / "tokenizer.json").write_text(json.dumps(told))
    said = misread_tokenizer(tmp_path / "m.gguf", tmp_path)
    assert said == (
        "its tokenizer is byte-level BPE, and the file calls it 'llama': llama-server could not read text"
        if wrong
        else None
    )
