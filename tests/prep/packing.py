"""Pack weights by hand, value by value, as the formats are defined: round to nearest, groups along the input."""

import json

import numpy as np
from tiny import Arrays, llama_arrays, llama_config

from qserve.packed_bitsandbytes import LEVELS

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG = llama_config()
TARGETS = tuple(
    name.removesuffix(".weight") for name in llama_arrays(CONFIG) if name.split(".")[-2] in PROJECTIONS
)  # fmt: skip
GROUP = 32
AWQ_PLACES = {0: 0, 2: 1, 4: 2, 6: 3, 1: 4, 3: 5, 5: 6, 7: 7}  # output in a word -> its place, from AutoAWQ's order_map


def floats(values: np.ndarray) -> np.ndarray:
    """bfloat16 as tiny.py stores it -> float32."""
    return (values.astype(np.uint32) << 16).view(np.float32)


def rounded(weight: np.ndarray, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """weight [out, in] -> q [in, out], zero [groups, out], scale [groups, out] (float16)."""
    out, width = weight.shape
    groups = weight.reshape(out, width // GROUP, GROUP)
    low, high = groups.min(axis=2), groups.max(axis=2)
    if symmetric:
        high = np.maximum(abs(low), abs(high))
        low = -high
    scale = ((high - low) / 15).astype(np.float16)
    zero = np.full(scale.shape, 8) if symmetric else np.clip(np.round(-low / scale), 0, 15)
    q = np.clip(np.round(groups / scale[..., None].astype(np.float32)) + zero[..., None], 0, 15)
    return q.reshape(out, width).T.astype(np.int64), zero.T.astype(np.int64), np.ascontiguousarray(scale.T)


def words(values: np.ndarray, axis: int, place: dict[int, int]) -> np.ndarray:
    """[n, m] -> int32 words of eight 4-bit values along `axis`; `place` says where each of the eight stands."""
    along = values if axis == 1 else values.T
    packed = np.zeros((along.shape[0], along.shape[1] // 8), np.uint32)
    for row in range(along.shape[0]):
        for column in range(along.shape[1]):
            packed[row, column // 8] |= int(along[row, column]) << (4 * place[column % 8])
    return np.ascontiguousarray(packed if axis == 1 else packed.T).view(np.int32)


def gptq_parts(weight: np.ndarray) -> dict[str, np.ndarray]:
    plain = {n: n for n in range(8)}
    q, zero, scale = rounded(weight, symmetric=True)
    groups = np.arange(len(q), dtype=np.int32) // GROUP
    return {"qweight": words(q, 0, plain), "qzeros": words(zero - 1, 1, plain), "scales": scale, "g_idx": groups}


def awq_parts(weight: np.ndarray) -> dict[str, np.ndarray]:
    q, zero, scale = rounded(weight, symmetric=False)
    return {"qweight": words(q, 1, AWQ_PLACES), "qzeros": words(zero, 1, AWQ_PLACES), "scales": scale}


def packed_llama(method: str) -> Arrays:
    """The tiny llama with every linear layer packed."""
    out: Arrays = {}
    for name, (dtype, values) in llama_arrays(CONFIG).items():
        if name.removesuffix(".weight") not in TARGETS:
            out[name] = (dtype, values)
            continue
        parts = gptq_parts(floats(values)) if method == "gptq" else awq_parts(floats(values))
        for field, part in parts.items():
            out[f"{name.removesuffix('.weight')}.{field}"] = ("F16" if field == "scales" else "I32", part)
    return out


# --- bitsandbytes ----------
def nf4_parts(weight: np.ndarray, double_quant: bool = False) -> Arrays:
    """Field -> values. Every 64 weights that follow one another are divided by their largest."""
    blocks = weight.reshape(-1, 64)
    absmax = np.abs(blocks).max(axis=1)
    levels = np.array(LEVELS, np.float32)
    index = np.abs((blocks / absmax[:, None]).reshape(-1, 1) - levels).argmin(axis=1)
    packed = np.array([[16 * first + second] for first, second in zip(index[::2], index[1::2], strict=True)], np.uint8)
    state: dict[str, object] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    parts: Arrays = {"weight": ("U8", packed), "weight.quant_map": ("F32", levels)}
    if double_quant:
        offset, steps = absmax.mean(), np.linspace(-1, 1, 256, dtype=np.float32)
        largest = np.array([np.abs(part).max() for part in np.split(absmax - offset, range(256, len(absmax), 256))])
        each = np.repeat(largest, 256)[: len(absmax)]
        nearest = np.abs(((absmax - offset) / each)[:, None] - steps).argmin(axis=1)
        parts["weight.absmax"] = ("U8", nearest.astype(np.uint8))
        parts["weight.nested_absmax"], parts["weight.nested_quant_map"] = ("F32", largest), ("F32", steps)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
    else:
        parts["weight.absmax"] = ("F32", absmax)
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return {**parts, "weight.quant_state.bitsandbytes__nf4": ("U8", text)}


def int8_parts(weight: np.ndarray) -> Arrays:
    largest = np.abs(weight).max(axis=1)
    return {
        "weight": ("I8", np.round(weight / largest[:, None] * 127).astype(np.int8)), "SCB": ("F32", largest),
        "weight_format": ("U8", np.zeros((), np.uint8)),
    }  # fmt: skip


def bitsandbytes_llama(kind: str) -> Arrays:
    """The tiny llama with every linear layer in one of `nf4`, `double`, `int8`."""
    out: Arrays = {}
    for name, (dtype, values) in llama_arrays(CONFIG).items():
        layer = name.removesuffix(".weight")
        if layer not in TARGETS:
            out[name] = (dtype, values)
            continue
        weight = floats(values)
        parts = int8_parts(weight) if kind == "int8" else nf4_parts(weight, kind == "double")
        out |= {f"{layer}.{field}": part for field, part in parts.items()}
    return out
