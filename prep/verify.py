"""Look at a written checkpoint before it gets its name: is it what was asked for, whole, and finite?

Reads headers, all scales, and the layers that must be untouched. Raises WorkerError with the first thing that is wrong.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from qserve.artifacts import Weights
from qserve.errors import UsageError, WorkerError
from qserve.prep.headers import Tensor, read_bytes, read_folder
from qserve.prep.schemes import Scheme, bytes_per_weight

EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
    "lm_head.weight",
    "embed_out.weight",
)
SIZE_TOLERANCE = 0.05
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Expectation:
    """What the checkpoint must be. `rescaled`: the method may change layers that it does not quantize (AWQ scales
    norms).
    """

    variant: str
    scheme: Scheme
    targets: tuple[str, ...]  # modules that were quantized
    config: Mapping[str, object]  # what config.json must say, but for how it is quantized
    rescaled: bool


def verify(folder: Path, baseline: Path, want: Expectation) -> Weights:
    """Check everything; returns the weight bytes by class. Raises WorkerError."""
    try:
        tensors, source = read_folder(folder), read_folder(baseline)
        check_tied(tensors, want)
        _check_targets(tensors, want)
        check_others(tensors, source, want)
        _check_scales(tensors)
        _check_fp8(tensors)
        _check_size(tensors, source, want)
        check_config(folder, want)
    except (Wrong, UsageError) as problem:
        raise WorkerError(f"{want.variant}: the checkpoint is not right and was not kept: {problem}") from None
    return weigh(tensors, want.targets, parameters(source))


def weigh(tensors: Tensors, targets: Iterable[str], count: int) -> Weights:
    """Bytes of tensor data by class. `count`: parameters of the model before quantization."""
    owners = set(targets)
    quantized = sum(t.size_bytes for name, t in tensors.items() if name.rpartition(".")[0] in owners)
    embedding = sum(t.size_bytes for name, t in tensors.items() if _is_embedding(name, owners))
    total = sum(t.size_bytes for t in tensors.values())
    return Weights(
        total_bytes=total, quantized_bytes=quantized, embedding_bytes=embedding,
        other_bytes=total - quantized - embedding, parameters=count, bits_per_parameter=8 * total / count,
    )  # fmt: skip


def parameters(source: Tensors) -> int:
    return sum(prod(tensor.shape) for tensor in source.values())


class Wrong(Exception):
    """What is wrong, in a few words."""


def _is_embedding(name: str, targets: set[str]) -> bool:
    return name.endswith(EMBEDDINGS) and name.rpartition(".")[0] not in targets


def check_tied(tensors: Tensors, want: Expectation) -> None:
    if want.config.get("tie_word_embeddings") and any(name.endswith("lm_head.weight") for name in tensors):
        raise Wrong("the tied output head is stored a second time")


def _check_targets(tensors: Tensors, want: Expectation) -> None:
    """Every layer that was to be quantized has packed weights and a scale, and nothing else has."""
    for name in want.targets:
        if f"{name}.weight_scale" not in tensors:
            raise Wrong(f"{name} has no scale: it was to be quantized")
        _check_packed(tensors, name, want.scheme)
    if want.scheme.kv_cache:
        _check_kv_scales(tensors, want)
    packed = {name.rpartition(".")[0] for name in tensors if name.endswith(("weight_packed", "weight_scale"))}
    if extra := sorted(packed - set(want.targets)):
        raise Wrong(f"{extra[0]} is quantized and was not to be ({len(extra)} such layers)")


def _check_kv_scales(tensors: Tensors, want: Expectation) -> None:
    """A scale for keys and one for values in every layer of attention."""
    for name in want.targets:
        if name.endswith(".k_proj"):
            module = name.removesuffix(".k_proj")
            for field in ("k_scale", "v_scale"):
                if f"{module}.{field}" not in tensors:
                    raise Wrong(f"{module} has no {field} for the KV cache")


def _check_packed(tensors: Tensors, name: str, scheme: Scheme) -> None:
    if scheme.bits < 8 or scheme.activations is None:
        if f"{name}.weight_packed" not in tensors:
            raise Wrong(f"{name} has no packed weights")
        if not scheme.symmetric and f"{name}.weight_zero_point" not in tensors:
            raise Wrong(f"{name} has no zero points")
        if scheme.weights["strategy"] == "tensor_group" and f"{name}.weight_global_scale" not in tensors:
            raise Wrong(f"{name} has no scale of the whole tensor")
        if scheme.calibrated and scheme.bits < 8 and scheme.activations and f"{name}.input_global_scale" not in tensors:
            raise Wrong(f"{name} has no scale for its activations")
        return
    dtype = "F8_E4M3" if scheme.weights["type"] == "float" else "I8"
    stored = tensors.get(f"{name}.weight")
    if stored is None or stored.dtype != dtype:
        raise Wrong(f"{name} is not stored as {dtype}")
    static = scheme.activations["dynamic"] is False
    if static and f"{name}.input_scale" not in tensors:
        raise Wrong(f"{name} has no scale for its activations")


def check_others(tensors: Tensors, source: Tensors, want: Expectation, own: tuple[str, ...] = ("weight",)) -> None:
    """What was not quantized is there, and the same bytes as in the source. `own`: fields of a quantized layer that are
    the format's own.
    """
    targets = set(want.targets)
    for name, original in source.items():
        module, _, field = name.rpartition(".")
        if module in targets and field in own:
            continue
        stored = tensors.get(name)
        if stored is None:
            if ".experts." in name or (want.config.get("tie_word_embeddings") and name.endswith("lm_head.weight")):
                continue  # experts may be stored one by one; a tied head is the embedding
            raise Wrong(f"{name} is missing")
        if (stored.dtype, stored.shape) != (original.dtype, original.shape):
            raise Wrong(f"{name} is {stored.dtype} {stored.shape}, and {original.dtype} {original.shape} in the source")
        if not want.rescaled and read_bytes(stored) != read_bytes(original):
            raise Wrong(f"{name} was changed, and was not to be")


def _check_scales(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if name.endswith("_scale"):
            values = floats(tensor)
            if not np.isfinite(values).all():
                raise Wrong(f"{name} holds NaN or infinity")
            if not (values > 0).all():
                raise Wrong(f"{name} holds {int((values <= 0).sum())} scales that are zero or negative")


def _check_fp8(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype == "F8_E4M3" and (np.frombuffer(read_bytes(tensor), np.uint8) & 0x7F == 0x7F).any():
            raise Wrong(f"{name} holds NaN")


def floats(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    raw = read_bytes(tensor)
    match tensor.dtype:
        case "BF16":  # the upper half of a float32
            return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        case "F16":
            return np.frombuffer(raw, np.float16).astype(np.float32)
        case "F32":
            return np.frombuffer(raw, np.float32)
        case "F8_E4M3":
            return _fp8(np.frombuffer(raw, np.uint8))
        case "U8":  # a power of two: the exponent of a float32 (E8M0); 255 is NaN
            return (np.frombuffer(raw, np.uint8).astype(np.uint32) << 23).view(np.float32)
        case other:
            raise Wrong(f"a scale is stored as {other}")


def _fp8(values: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """FP8 E4M3 (4 bits of exponent with bias 7, 3 of mantissa) as float32; S.1111.111 is NaN."""
    exponent, mantissa = (values >> 3 & 0xF).astype(np.int32), (values & 7).astype(np.float32)
    size = np.where(exponent > 0, np.ldexp(1 + mantissa / 8, exponent - 7), np.ldexp(mantissa / 8, -6))
    signed = np.where(values & 0x80, -size, size)
    return np.where(values & 0x7F == 0x7F, np.nan, signed).astype(np.float32)


def _check_size(tensors: Tensors, source: Tensors, want: Expectation) -> None:
    """Within a few percent of what the scheme comes to; scales of whole channels are counted exactly."""
    expected = 0.0
    targets = set(want.targets)
    for name, tensor in source.items():
        module, _, field = name.rpartition(".")
        if module in targets and field == "weight":
            expected += prod(tensor.shape) * bytes_per_weight(want.scheme)
            expected += 2 * tensor.shape[0] if want.scheme.group is None else 0
        elif not (want.config.get("tie_word_embeddings") and name.endswith("lm_head.weight")):
            expected += tensor.size_bytes
    total = sum(tensor.size_bytes for tensor in tensors.values())
    if abs(total - expected) > SIZE_TOLERANCE * expected:
        raise Wrong(f"it holds {total} bytes of weights, and {expected:.0f} are expected")


def check_config(folder: Path, want: Expectation, method: str = "compressed-tensors") -> dict[str, object]:
    """It is the source's, and says how it is quantized. Returns its quantization_config."""
    written = json.loads((folder / "config.json").read_bytes())
    quantization = written.pop("quantization_config", None)
    if not isinstance(quantization, dict) or quantization.get("quant_method") != method:
        raise Wrong("config.json does not say how it is quantized")
    if changed := sorted(key for key in {**written, **want.config} if written.get(key) != want.config.get(key)):
        raise Wrong(f"config.json differs from the source's in {', '.join(changed)}")
    return quantization
