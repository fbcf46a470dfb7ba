"""The header of a GGUF file: what the model is, read in milliseconds without its weights.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (version 2 and 3, little-endian).
"""

import math
import mmap
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from qserve.errors import UsageError

KEPT_ITEMS = 64  # longer arrays (vocabularies) are kept as their length only
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAGIC, VERSIONS = 0x46554747, (2, 3)
Read = TypeVar("Read")
# type -> (name, elements of a block, bytes of a block)
TENSOR_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip
ALIGNMENT_BYTES = 32  # where the weights begin, if the header does not say
# config.json field -> GGUF field under the architecture's name
FIELDS = {
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length", "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length", "max_position_embeddings": "context_length", "vocab_size": "vocab_size",
    "num_experts": "expert_count", "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}  # fmt: skip


@dataclass(frozen=True)
class GgufTensor:
    """`shape`: as GGUF has it, the row width first. `start`: byte in the file. `kind`: "Q4_K"."""

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class GgufHeader:
    """`fields`: key -> number, text, short list, or the length of a long list. `elements`: of all tensors."""

    fields: Mapping[str, object]
    weight_type: str  # of most weights: "Q4_1"
    elements: int
    tied: bool  # no output head of its own
    tensors: tuple[GgufTensor, ...]


@dataclass
class _Cursor:
    data: mmap.mmap
    at: int = 0

    def take(self, form: str) -> int | float | bool:
        value: int | float | bool = struct.unpack_from("<" + form, self.data, self.at)[0]
        self.at += struct.calcsize("<" + form)
        return value

    def count(self) -> int:
        return int(self.take("Q"))

    def text(self) -> str:
        size = self.count()
        self.at += size
        if self.at > len(self.data):
            raise struct.error("text runs over the end")
        return self.data[self.at - size : self.at].decode("utf-8", "replace")


@dataclass(frozen=True)
class GgufPairs:
    """The header as it stands in the file: each field's bytes (key, type and value), and the table of tensors."""

    pairs: Mapping[str, bytes]
    tensors: int
    table: bytes
    data_start: int
    alignment: int

    def head(self, pairs: Mapping[str, bytes]) -> bytes:
        """A header of the same tensors with other fields, up to where the weights begin."""
        start = struct.pack("<IIQQ", MAGIC, VERSIONS[-1], self.tensors, len(pairs))
        made = start + b"".join(pairs.values()) + self.table
        return made + bytes(-len(made) % self.alignment)


def read_gguf(path: Path) -> GgufHeader:
    """Read the header. Raises UsageError if the file is no GGUF, is cut off, or is another version."""
    return _read(path, _header)


def read_pairs(path: Path) -> GgufPairs:
    """Read the header without a look into it. Raises UsageError as `read_gguf` does."""
    return _read(path, _pairs)


def _read(path: Path, read: Callable[[Path, _Cursor], Read]) -> Read:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return read(path, _Cursor(data))
    except (struct.error, ValueError, OverflowError) as error:
        raise UsageError(f"{path} is cut off or no GGUF file ({error}); download it again") from error


def _counts(path: Path, cursor: _Cursor) -> tuple[int, int]:
    """How many tensors and fields follow."""
    magic, version = cursor.take("I"), cursor.take("I")
    if magic != MAGIC or version not in VERSIONS:
        raise UsageError(f"{path} is no GGUF file of version 2 or 3; give a .gguf file of a current llama.cpp")
    return cursor.count(), cursor.count()


def _pairs(path: Path, cursor: _Cursor) -> GgufPairs:
    tensors, pairs = _counts(path, cursor)
    raw: dict[str, bytes] = {}
    alignment: object = ALIGNMENT_BYTES
    for _ in range(pairs):
        start = cursor.at
        key = cursor.text()
        value = _value(cursor, int(cursor.take("I")))
        raw[key] = cursor.data[start : cursor.at]
        alignment = value if key == "general.alignment" else alignment
    start = cursor.at
    rows = [_row(cursor) for _ in range(tensors)]
    table = cursor.data[start : cursor.at]
    data_start = _check_whole(cursor, alignment, rows)
    assert isinstance(alignment, int)
    return GgufPairs(raw, tensors, table, data_start, alignment)


def _header(path: Path, cursor: _Cursor) -> GgufHeader:
    tensors, pairs = _counts(path, cursor)
    fields = {}
    for _ in range(pairs):
        key = cursor.text()
        fields[key] = _value(cursor, int(cursor.take("I")))
    rows = [_row(cursor) for _ in range(tensors)]
    start = _check_whole(cursor, fields.get("general.alignment", ALIGNMENT_BYTES), rows)
    sizes = Counter[str]()
    for tensor in rows:
        sizes[tensor.kind] += tensor.elements
    main = sizes.most_common(1)[0][0] if sizes else "no type"
    placed = tuple(replace(tensor, start=start + tensor.start) for tensor in rows)
    tied = "output.weight" not in {tensor.name for tensor in rows}
    return GgufHeader(fields, main, sizes.total(), tied, placed)


def _row(cursor: _Cursor) -> GgufTensor:
    """One line of the table of tensors, its start still counted from the first weight."""
    name = cursor.text()
    shape = tuple(cursor.count() for _ in range(int(cursor.take("I"))))
    kind, offset = int(cursor.take("I")), cursor.count()
    known = TENSOR_TYPES[kind][0] if kind in TENSOR_TYPES else f"type {kind}"
    return GgufTensor(name, known, shape, offset, _size_bytes(kind, math.prod(shape)))


def _size_bytes(kind: int, elements: int) -> int:
    """Of a tensor; 0 for a type that this table does not know."""
    _, block, block_bytes = TENSOR_TYPES.get(kind, ("", 1, 0))
    return elements // block * block_bytes


def _check_whole(cursor: _Cursor, alignment: object, tensors: Sequence[GgufTensor]) -> int:
    """Whether the file reaches to the end of its last weight. Returns where the weights begin: at a multiple of the
    alignment.
    """
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"general.alignment is {alignment}")
    start = -(-cursor.at // alignment) * alignment
    end = start + max((tensor.start + tensor.size_bytes for tensor in tensors), default=0)
    if end > max(start, len(cursor.data)):
        raise ValueError(f"its weights end at byte {end:,}, and it has {len(cursor.data):,}")
    return start


def _value(cursor: _Cursor, kind: int) -> object:
    if kind == STRING:
        return cursor.text()
    if kind != ARRAY:
        return cursor.take(SCALARS[kind]) if kind in SCALARS else _unknown(kind)
    item, length = int(cursor.take("I")), cursor.count()
    read: Callable[[], object] = cursor.text if item == STRING else lambda: _value(cursor, item)
    if length <= KEPT_ITEMS:
        return [read() for _ in range(length)]
    for _ in range(length):
        read()
    return length


def _unknown(kind: int) -> object:
    raise ValueError(f"unknown field type {kind}")


def config_of(header: GgufHeader) -> dict[str, object]:
    """The fields of config.json that say how large the layers are."""
    architecture = str(header.fields.get("general.architecture", ""))
    found = {name: header.fields.get(f"{architecture}.{key}") for name, key in FIELDS.items()}
    config = {name: max(value) if isinstance(value, list) else value for name, value in found.items()}
    tokens = header.fields.get("tokenizer.ggml.tokens")
    config["vocab_size"] = config["vocab_size"] or (len(tokens) if isinstance(tokens, list) else tokens)
    known = {name: value for name, value in config.items() if value}
    return {"model_type": architecture, "tie_word_embeddings": header.tied, **known}


def special_tokens(header: GgufHeader) -> dict[str, int]:
    """Role (bos, eos, pad, unk) -> token id, for those that the header names."""
    keys = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    found = {role: header.fields.get(f"tokenizer.ggml.{key}_token_id") for role, key in keys.items()}
    return {role: value for role, value in found.items() if isinstance(value, int)}
