"""The two formats of bitsandbytes, read by their definition alone: no kernel, numpy only.

NF4   `weight` [out * in / 2, 1] holds two indices a byte, the first in its upper half; the weights of a layer follow
      one another row by row. Each index names one of the 16 values of quant_map, and 64 weights have one scale:
          weight[i] = quant_map[index[i]] * scale[i // blocksize]
      (kernels do not read quant_map: they have LEVELS built in.)
      `absmax` holds the scales as float32. Quantized twice it is uint8, and
          scale[j] = nested_quant_map[absmax[j]] * nested_absmax[j // nested_blocksize] + nested_offset
      `quant_state.bitsandbytes__nf4` is JSON as bytes: shape, blocksize and those last two numbers.
      https://github.com/bitsandbytes-foundation/bitsandbytes, bitsandbytes/functional.py, QuantState; arXiv 2305.14314
int8  weight[o, i] * SCB[o] / 127. The layer computes with activations rounded to 8 bits, a scale a token; a column in
      which any token reaches OUTLIER is left out of that, and kept as it is. arXiv 2208.07339, section 3

Workers load this file by its path, so it imports nothing of qserve.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
OUTLIER = 6.0  # llm_int8_threshold
# Sixteen quantiles of a normal distribution, zero among them, scaled to -1..1: arXiv 2305.14314, appendix E
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
STATE = "weight.quant_state.bitsandbytes__nf4"
NF4 = ("weight", "weight.absmax", "weight.quant_map", STATE)
NESTED = ("weight.nested_absmax", "weight.nested_quant_map")  # beside those, where the scales are quantized too
INT8 = ("weight", "SCB", "weight_format")
OWN = re.compile(r"(.+)\.(" + "|".join(map(re.escape, dict.fromkeys((*NF4, *NESTED, *INT8)))) + ")")


def split(name: str) -> tuple[str, str] | None:
    """(layer, field) of a tensor that may belong to a quantized layer; None of any other."""
    found = OWN.fullmatch(name)
    return (found[1], found[2]) if found else None


def dequantize(parts: Mapping[str, Array]) -> Array:
    """One layer as float32 [out, in]. `parts`: its tensors by field.

    Raises:
        ValueError: they are neither format.
    """
    if "SCB" in parts:
        scales: Array = parts["SCB"].astype(np.float32)[:, None]
        return parts["weight"].astype(np.float32) * scales / np.float32(127)
    if STATE in parts:
        state = read_state(parts[STATE])
        packed = parts["weight"].reshape(-1).view(np.uint8)
        index = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)[: int(np.prod(state["shape"]))]
        scales = np.repeat(block_scales(parts, state), state["blocksize"])[: len(index)]
        weights: Array = (parts["weight.quant_map"].astype(np.float32)[index] * scales).reshape(state["shape"])
        return weights
    raise ValueError(f"neither NF4 nor int8 of bitsandbytes: it has {', '.join(sorted(parts))}")


def block_scales(parts: Mapping[str, Array], state: Mapping[str, Any]) -> Array:
    """float32, one a block."""
    absmax = parts["weight.absmax"].reshape(-1)
    if absmax.dtype != np.uint8:
        return absmax.astype(np.float32)
    each = np.repeat(parts["weight.nested_absmax"].reshape(-1), state["nested_blocksize"])[: len(absmax)]
    scales: Array = parts["weight.nested_quant_map"][absmax] * each + np.float32(state["nested_offset"])
    return scales


def read_state(raw: Array) -> dict[str, Any]:
    """The numbers of a layer: shape, blocksize, quant_type, dtype; nested_blocksize and nested_offset."""
    state: dict[str, Any] = json.loads(raw.astype(np.uint8).tobytes())
    return state
