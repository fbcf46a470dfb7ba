"""Pack weights by hand, value by value, as the two formats are defined: round to nearest, groups along the input."""

import numpy as np
from tiny import Arrays, llama_arrays, llama_config

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
