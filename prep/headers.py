"""Safetensors headers: what a checkpoint folder holds, checked in milliseconds without reading a weight.

Format: https://github.com/huggingface/safetensors (8 bytes of header length, JSON, data).
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from qserve.errors import UsageError

INDEX = "model.safetensors.index.json"
ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2, "I8": 1,
    "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
AGAIN = "download or make it again"


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies. `start`: byte in its file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint. Raises UsageError if there are none, or one that the index names is not
    there.
    """
    index = folder / INDEX
    if not index.exists():
        found = tuple(sorted(folder.glob("*.safetensors")))
        if not found:
            raise UsageError(f"{folder} has no safetensors weights; give a folder with config.json and *.safetensors")
        return found
    names = sorted(set(_weight_map(index).values()))
    for name in names:
        if not (folder / name).is_file():
            raise UsageError(f"{folder / name} is missing, and {INDEX} names it; {AGAIN}")
    return tuple(folder / name for name in names)


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor -> file, as the index says."""
    try:
        found = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{index} is not a weight index; {AGAIN}") from error
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise UsageError(f"{index} is not a weight index; {AGAIN}")
    return found


def read_folder(folder: Path) -> dict[str, Tensor]:
    """Name -> tensor of every weight in the folder. Raises UsageError: a broken, missing or incomplete file, by
    name.
    """
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder):
        for name, tensor in read_header(path).items():
            if name in tensors:
                raise UsageError(f"{path} and {tensors[name].file} both hold {name}; {AGAIN}")
            tensors[name] = tensor
    index = folder / INDEX
    if index.exists():
        for name, file in _weight_map(index).items():
            if name not in tensors or tensors[name].file.name != file:
                raise UsageError(f"{folder / file} lacks {name}, which {INDEX} says is in it; {AGAIN}")
    return tensors


def read_header(path: Path) -> dict[str, Tensor]:
    """Name -> tensor of one file. Raises UsageError if its header is cut off or does not fit the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise UsageError(f"{path} is cut off in its header ({size} bytes); {AGAIN}")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            tensors = {name: _tensor(path, 8 + length, item) for name, item in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} has a broken safetensors header ({error}); {AGAIN}") from error
    end = max((t.start + t.size_bytes for t in tensors.values()), default=8 + length)
    if end != size:
        raise UsageError(f"{path} holds {size} bytes where its header says {end}; {AGAIN}")
    return tensors


def _tensor(path: Path, base: int, item: dict[str, object]) -> Tensor:
    dtype, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    if not (isinstance(dtype, str) and _are_counts(shape) and _are_counts(offsets) and len(offsets) == 2):
        raise ValueError("wrong field types")
    size = offsets[1] - offsets[0]
    if size < 0:
        raise ValueError("a tensor that ends before it starts")
    if dtype in ITEM_BYTES and math.prod(shape) * ITEM_BYTES[dtype] != size:
        raise ValueError(f"a {dtype} tensor of shape {shape} in {size} bytes")
    return Tensor(path, dtype, tuple(shape), base + offsets[0], size)


def _are_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def read_bytes(tensor: Tensor) -> bytes:
    with tensor.file.open("rb") as file:
        file.seek(tensor.start)
        return file.read(tensor.size_bytes)
