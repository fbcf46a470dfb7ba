"""Look at a checkpoint of bitsandbytes before it gets its name (the formats: qserve/packed_bitsandbytes.py).

Every layer that was to be quantized is there in its format, whole and finite; all else is the source's, byte for byte.
Raises WorkerError with the first thing that is wrong.
"""

from collections.abc import Mapping
from math import ceil, prod
from pathlib import Path

import numpy as np

from qserve.artifacts import Weights
from qserve.errors import UsageError, WorkerError
from qserve.packed_bitsandbytes import INT8, LEVELS, NESTED, NF4, OUTLIER, STATE, Array, block_scales, read_state
from qserve.prep.headers import Tensor, read_bytes, read_folder
from qserve.prep.schemes import NF4_BLOCK
from qserve.prep.verify import (
    Expectation,
    Tensors,
    Wrong,
    check_config,
    check_others,
    check_tied,
    parameters,
    weigh,
)
from qserve.prep.verify_packed import check_targets
from qserve.variants import Bitsandbytes

NESTED_BLOCK = 256
DTYPES = {"U8": np.uint8, "I8": np.int8, "F32": np.float32}
Expected = dict[str, tuple[str, tuple[int, ...]]]  # field -> dtype and shape


def verify_bitsandbytes(folder: Path, baseline: Path, want: Expectation, variant: Bitsandbytes) -> Weights:
    """Check everything; returns the weight bytes by class. Raises WorkerError."""
    try:
        tensors, source = read_folder(folder), read_folder(baseline)
        check_tied(tensors, want)
        check_targets(source, want)
        for name in want.targets:
            _check_layer(tensors, name, source[f"{name}.weight"].shape, variant)
        _check_nothing_else(tensors, source, want, variant)
        check_others(tensors, source, want)
        _check_says(check_config(folder, want, "bitsandbytes"), variant)
    except (Wrong, UsageError) as problem:
        raise WorkerError(f"{want.variant}: the checkpoint is not right and was not kept: {problem}") from None
    owners = [name + inner for name in want.targets for inner in ("", ".weight", ".weight.quant_state")]
    return weigh(tensors, owners, parameters(source))


def _fields(variant: Bitsandbytes) -> tuple[str, ...]:
    if variant.type == "int8":
        return INT8
    return (*NF4, *NESTED) if variant.double_quant else NF4


def _expected(shape: tuple[int, ...], variant: Bitsandbytes) -> Expected:
    """All but the state, whose length varies."""
    count = prod(shape)
    if variant.type == "int8":
        return {"weight": ("I8", shape), "SCB": ("F32", (shape[0],)), "weight_format": ("U8", ())}
    blocks = ceil(count / NF4_BLOCK)
    packed: Expected = {"weight": ("U8", (ceil(count / 2), 1)), "weight.quant_map": ("F32", (16,))}
    if not variant.double_quant:
        return {**packed, "weight.absmax": ("F32", (blocks,))}
    return {
        **packed, "weight.absmax": ("U8", (blocks,)), "weight.nested_quant_map": ("F32", (256,)),
        "weight.nested_absmax": ("F32", (ceil(blocks / NESTED_BLOCK),)),
    }  # fmt: skip


def _check_layer(tensors: Tensors, name: str, shape: tuple[int, ...], variant: Bitsandbytes) -> None:
    for field, (dtype, expected) in _expected(shape, variant).items():
        stored = tensors.get(f"{name}.{field}")
        if stored is None or (stored.dtype, stored.shape) != (dtype, expected):
            found = f"{stored.dtype} {stored.shape}" if stored else "missing"
            raise Wrong(f"{name}.{field} is {found}, and {dtype} {expected} is expected")
    scales = _values(tensors[f"{name}.SCB"]) if variant.type == "int8" else _nf4_scales(tensors, name, shape, variant)
    if not np.isfinite(scales).all():
        raise Wrong(f"the scales of {name} hold NaN or infinity")
    if (scales < 0).any():
        raise Wrong(f"{name} has {int((scales < 0).sum())} negative scales")
    if not scales.any():
        raise Wrong(f"the scales of {name} are all zero")


def _nf4_scales(tensors: Tensors, name: str, shape: tuple[int, ...], variant: Bitsandbytes) -> Array:
    parts = {field: _values(tensors[f"{name}.{field}"]) for field in _fields(variant) if f"{name}.{field}" in tensors}
    if STATE not in parts:
        raise Wrong(f"{name}.{STATE} is missing")
    try:
        state = read_state(parts[STATE])
    except ValueError as error:
        raise Wrong(f"{name}.{STATE} is no JSON") from error
    says: dict[str, object] = {"quant_type": "nf4", "blocksize": NF4_BLOCK, "shape": list(shape)}
    if variant.double_quant:
        says["nested_blocksize"] = NESTED_BLOCK
    if wrong := sorted(key for key, value in says.items() if state.get(key) != value):
        raise Wrong(f"{name} says {wrong[0]}: {state.get(wrong[0])}, not {says[wrong[0]]}")
    if not np.array_equal(parts["weight.quant_map"], np.array(LEVELS, np.float32)):
        raise Wrong(f"{name}.weight.quant_map is not that of NF4")
    # the smallest of scales that are quantized themselves may come out a little below zero
    scales = block_scales(parts, state)
    return np.maximum(scales, 0) if variant.double_quant else scales


def _check_nothing_else(tensors: Tensors, source: Tensors, want: Expectation, variant: Bitsandbytes) -> None:
    own = {f"{name}.{field}" for name in want.targets for field in _fields(variant)}
    if extra := sorted(set(tensors) - own - set(source)):
        raise Wrong(f"{extra[0]} is there and was not to be ({len(extra)} such tensors)")


def _check_says(quantization: Mapping[str, object], variant: Bitsandbytes) -> None:
    """What its quantization_config must say for transformers to read it rightly."""
    if variant.type == "int8":
        says: dict[str, object] = {"load_in_8bit": True, "load_in_4bit": False, "llm_int8_threshold": OUTLIER}
    else:
        says = {
            "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": variant.double_quant, "bnb_4bit_quant_storage": "uint8",
        }  # fmt: skip
    if wrong := sorted(key for key, value in says.items() if quantization.get(key) != value):
        raise Wrong(f"its quantization_config says {wrong[0]}: {quantization.get(wrong[0])}, not {says[wrong[0]]}")


def _values(tensor: Tensor) -> Array:
    return np.frombuffer(read_bytes(tensor), DTYPES[tensor.dtype]).reshape(tensor.shape)
