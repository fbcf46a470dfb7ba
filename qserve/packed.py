"""The two packed 4-bit formats that others write, read by their definition alone: no kernel, numpy only.

Both hold a linear layer as qweight, qzeros (int32 words of 32/bits values) and scales [groups, out], and mean
    weight[out, in] = (q[in, out] - zero[group, out]) * scale[group, out]

GPTQ  qweight [in * bits/32, out]: a word holds consecutive inputs, lowest bits first. qzeros [groups, out * bits/32]:
      consecutive outputs. Version 1 (`checkpoint_format: gptq`, and files that do not say) stores zero - 1, version 2
      (`gptq_v2`) zero itself. g_idx [in]: the group of each input.
      https://github.com/AutoGPTQ/AutoGPTQ, auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py, pack and forward
AWQ   version `gemm`, 4 bits: qweight [in, out/8] and qzeros [groups, out/8] hold eight consecutive outputs a word, in
      the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits up. zero is stored as it is; inputs are grouped in order.
      https://github.com/casper-hansen/AutoAWQ, awq/modules/linear/gemm.py, from_linear

Workers load this file by its path, so it imports nothing of qserve.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
LOADER = Path(__file__).with_name("plain_worker.py")  # what workers load a checkpoint with
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which output stands at each place of a word, lowest bits first
PARTS = ("qweight", "qzeros", "scales", "g_idx")


def dequantize(parts: Mapping[str, Array], config: Mapping[str, Any]) -> Array:
    """One layer as float32 [out, in]. `parts`: its tensors by PARTS; `config`: the checkpoint's quantization_config.

    Raises:
        ValueError: a format that this file does not define.
    """
    method, bits = config.get("quant_method"), config.get("bits")
    if method == "awq" and bits == 4 and str(config.get("version", "gemm")).lower() == "gemm":
        return dequantize_awq(parts["qweight"], parts["qzeros"], parts["scales"])
    if method == "gptq" and bits in (4, 8):
        zero_offset = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
        return dequantize_gptq(parts, int(bits), zero_offset)
    raise ValueError(f"no definition of quant_method {method!r} with {bits} bits here")


def dequantize_gptq(parts: Mapping[str, Array], bits: int, zero_offset: int) -> Array:
    q = unpack(parts["qweight"], bits, axis=0)  # [in, out]
    zeros = (unpack(parts["qzeros"], bits, axis=1) + zero_offset) & (2**bits - 1)  # [groups, out]
    scales = parts["scales"].astype(np.float32)
    groups = parts["g_idx"] if "g_idx" in parts else np.arange(len(q)) // (len(q) // len(scales))
    weights: Array = ((q - zeros[groups]).astype(np.float32) * scales[groups]).T
    return weights


def dequantize_awq(qweight: Array, qzeros: Array, scales: Array) -> Array:
    q, zeros = _in_order(unpack(qweight, 4, axis=1)), _in_order(unpack(qzeros, 4, axis=1))
    groups = np.arange(len(q)) // (len(q) // len(scales))
    weights: Array = ((q - zeros[groups]).astype(np.float32) * scales.astype(np.float32)[groups]).T
    return weights


def unpack(words: Array, bits: int, axis: int) -> Array:
    """int32 words -> their values as int32, 32/bits times as many along `axis`, lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    values = (np.moveaxis(words.view(np.uint32), axis, -1)[..., None] >> shifts) & np.uint32(2**bits - 1)
    return np.moveaxis(values.reshape(*values.shape[:-2], -1), -1, axis).astype(np.int32)


def _in_order(values: Array) -> Array:
    """[n, out] as it is packed by AWQ -> in the order of the outputs."""
    rows, out = values.shape
    ordered = np.empty((rows, out // 8, 8), values.dtype)
    ordered[:, :, list(AWQ_ORDER)] = values.reshape(rows, out // 8, 8)
    return ordered.reshape(rows, out)
