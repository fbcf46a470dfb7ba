"""Broken weight files and GGUF headers: named in milliseconds."""

import json
import struct
from pathlib import Path

import pytest
from tiny import llama_arrays, llama_config, write_llama, write_safetensors

from qserve.errors import UsageError
from qserve.prep.gguf import config_of, read_gguf, special_tokens
from qserve.prep.headers import INDEX, read_bytes, read_folder, read_header


def test_a_header_is_read_as_written(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "m")
    tensors = read_folder(folder)
    arrays = llama_arrays(llama_config())
    assert len(tensors) == len(arrays) == 20
    for name, (dtype, values) in arrays.items():
        assert (tensors[name].dtype, tensors[name].shape) == (dtype, values.shape)
        assert read_bytes(tensors[name]) == values.tobytes()


@pytest.mark.parametrize(
    ("keep", "sentence"),
    [(-1000, "holds .* bytes where its header says"), (100, "cut off in its header"), (0, "cut off in its header")],
)
def test_a_file_that_is_cut_off_is_named(tmp_path: Path, keep: int, sentence: str) -> None:
    path = write_llama(tmp_path / "m") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UsageError, match=rf"model\.safetensors .*{sentence}"):
        read_folder(path.parent)


def shard(folder: Path) -> None:
    """Split the weights over two files with an index."""
    arrays = llama_arrays(llama_config())
    names = list(arrays)
    halves = {"a.safetensors": names[:10], "b.safetensors": names[10:]}
    for file, part in halves.items():
        write_safetensors(folder / file, {name: arrays[name] for name in part})
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (folder / INDEX).write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


def test_a_missing_shard_and_a_missing_tensor_are_named(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "m")
    shard(folder)
    assert len(read_folder(folder)) == 20
    arrays = llama_arrays(llama_config())
    name, *others = list(arrays)[10:]
    write_safetensors(folder / "b.safetensors", {other: arrays[other] for other in others})
    with pytest.raises(UsageError, match=rf"b\.safetensors lacks {name}"):
        read_folder(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(UsageError, match=r"b\.safetensors is missing"):
        read_folder(folder)


def test_a_header_that_lies_about_sizes(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m") / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"shape": [320, 64]', b'"shape": [321, 64]', 1))
    with pytest.raises(UsageError, match="broken safetensors header"):
        read_header(path)


@pytest.mark.parametrize("index", [[], {}, {"weight_map": ["a"]}, {"weight_map": {"a": 1}}, {"weight_map": {"a": []}}])
def test_an_index_that_is_none(tmp_path: Path, index: object) -> None:
    folder = write_llama(tmp_path / "m")
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(UsageError, match=r"index\.json is not a weight index; download or make it again"):
        read_folder(folder)


@pytest.mark.parametrize("offsets", [[], [0], [0, 2, 4], ["0", "2"], [0.0, 2.0], [None, 2], [2, 0], [-2, 0], {}, 2])
def test_offsets_that_are_none(tmp_path: Path, offsets: object) -> None:
    header = json.dumps({"w": {"dtype": "BF16", "shape": [1], "data_offsets": offsets}}).encode()
    path = tmp_path / "w.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0")
    with pytest.raises(UsageError, match=r"w\.safetensors has a broken safetensors header"):
        read_header(path)


def gguf_text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def gguf_bytes() -> bytes:
    """A header of five fields and one Q4_1 tensor of 64 elements (2 blocks of 20 bytes)."""
    fields = [
        gguf_text("general.architecture") + struct.pack("<I", 8) + gguf_text("llama"),
        gguf_text("llama.embedding_length") + struct.pack("<II", 4, 64),
        gguf_text("llama.attention.head_count") + struct.pack("<II", 4, 2),
        gguf_text("tokenizer.ggml.eos_token_id") + struct.pack("<II", 4, 2),
        gguf_text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 100) + b"".join(map(gguf_text, ["x"] * 100)),
    ]
    tensor = gguf_text("token_embd.weight") + struct.pack("<IQIQ", 1, 64, 3, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(fields)) + b"".join(fields) + tensor
    return head + bytes(-len(head) % 32) + bytes(40)


def test_a_gguf_header_says_what_the_model_is(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes())
    header = read_gguf(path)
    assert (header.weight_type, header.elements) == ("Q4_1", 64)
    assert config_of(header) == {
        "model_type": "llama", "tie_word_embeddings": True, "hidden_size": 64, "num_attention_heads": 2,
        "vocab_size": 100,
    }  # fmt: skip
    assert special_tokens(header) == {"eos": 2}


@pytest.mark.parametrize("keep", [0, 3, 20, 90, 300])
def test_a_gguf_file_that_is_cut_off(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes()[:keep])
    with pytest.raises(UsageError, match=r"m\.gguf is cut off or no GGUF file"):
        read_gguf(path)
    path.write_bytes(b"PK" + gguf_bytes()[2:])
    with pytest.raises(UsageError, match="is no GGUF file"):
        read_gguf(path)


@pytest.mark.parametrize("lost", [1, 16, 39])
def test_a_gguf_file_whose_last_weights_are_cut(tmp_path: Path, lost: int) -> None:
    path, whole = tmp_path / "m.gguf", gguf_bytes()
    path.write_bytes(whole[:-lost])
    sentence = f"its weights end at byte {len(whole):,}, and it has {len(whole) - lost:,}"
    with pytest.raises(UsageError, match=rf"m\.gguf is cut off .*{sentence}.*; download it again"):
        read_gguf(path)
