"""Look at a written GGUF file before its checkpoint gets its name: is it whole, finite, and of the types asked for?

llama.cpp mixes types: Q4_K_M keeps some tensors in Q6_K, and a matrix whose rows are no multiple of a type's block gets
the next type that fits. Both are told apart here, because the second one changes what is measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qserve.artifacts import Weights
from qserve.errors import UsageError, WorkerError
from qserve.prep.gguf import TENSOR_TYPES, GgufTensor, read_gguf
from qserve.variants import GgufType

# What llama-quantize writes for each type where it fits, and what it takes instead for rows that do not.
# https://github.com/ggml-org/llama.cpp/blob/master/src/llama-quant.cpp, tensor_type_fallback
MIX: dict[GgufType, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "bf16": (("BF16",), ()), "f16": (("F16",), ()), "q8_0": (("Q8_0",), ("F16",)), "q6_k": (("Q6_K",), ("Q8_0", "F16")),
    "q5_k_m": (("Q5_K", "Q6_K"), ("Q5_1", "Q8_0", "F16")), "q4_k_m": (("Q4_K", "Q6_K"), ("Q5_0", "Q8_0", "F16")),
    "q4_0": (("Q4_0", "Q6_K"), ("Q8_0", "F16")),
}  # fmt: skip
WHOLE = ("F32", "F16", "BF16")
# Where the float16 scales stand in a block, in bytes.
SCALES = {"Q4_0": (0,), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
EMBEDDINGS = ("token_embd.weight", "output.weight")
LEAST_SHARE = 0.99  # of the elements of matrices that must be of the types asked for, or of their replacements
COUNT_TOLERANCE = 0.01  # a file may hold a few more values than the source: tables of rotary frequencies


@dataclass(frozen=True)
class GgufFound:
    """`fallback`: the matrices of another type than asked for. `note`: a sentence about them."""

    targets: tuple[str, ...]
    fallback: tuple[str, ...]
    weights: Weights
    note: str | None


def verify_gguf(name: str, path: Path, kind: GgufType, parameters: int) -> GgufFound:
    """Check everything. `parameters`: of the source. Raises WorkerError."""
    try:
        tensors = read_gguf(path).tensors
        _check_count(tensors, parameters)
        matrices = [tensor for tensor in tensors if len(tensor.shape) > 1]
        fallback = _replaced(matrices, kind)
        _check_types(matrices, fallback, kind)
        _check_finite(path, tensors)
    except (_Wrong, UsageError) as problem:
        raise WorkerError(f"{name}: the checkpoint is not right and was not kept: {problem}") from None
    targets = tuple(t.name for t in matrices if t.name not in EMBEDDINGS)
    return GgufFound(targets, tuple(t.name for t in fallback), _weigh(tensors, parameters), _note(fallback, matrices))


class _Wrong(Exception):
    """What is wrong, in a few words."""


def _check_count(tensors: Sequence[GgufTensor], parameters: int) -> None:
    count = sum(tensor.elements for tensor in tensors)
    if abs(count - parameters) > COUNT_TOLERANCE * parameters:
        raise _Wrong(f"it holds {count:,} values, and the source has {parameters:,}")


def _replaced(matrices: Sequence[GgufTensor], kind: GgufType) -> list[GgufTensor]:
    """The matrices whose rows did not fit, so that they have the replacement's type."""
    asked, instead = MIX[kind]
    block = max(size for name, size, _ in TENSOR_TYPES.values() if name in asked)
    return [t for t in matrices if t.kind in instead and t.kind not in asked and t.shape[0] % block]


def _check_types(matrices: Sequence[GgufTensor], fallback: Sequence[GgufTensor], kind: GgufType) -> None:
    asked, _ = MIX[kind]
    known = {tensor.name for tensor in fallback} | {tensor.name for tensor in matrices if tensor.kind in asked}
    share = sum(t.elements for t in matrices if t.name in known) / max(sum(t.elements for t in matrices), 1)
    if share < LEAST_SHARE:
        other = next(tensor for tensor in matrices if tensor.name not in known)
        raise _Wrong(f"{other.name} is {other.kind}, and {kind} was asked for ({1 - share:.0%} is of other types)")


def _check_finite(path: Path, tensors: Sequence[GgufTensor]) -> None:
    """All values of unrounded tensors, all scales of the others."""
    data = np.memmap(path, np.uint8, "r")
    for tensor in tensors:
        raw = data[tensor.start : tensor.start + tensor.size_bytes]
        for values in _values(tensor, raw):
            if not np.isfinite(values).all():
                raise _Wrong(f"{tensor.name} holds NaN or infinity")


def _values(tensor: GgufTensor, raw: np.ndarray) -> list[np.ndarray]:
    match tensor.kind:
        case "F32":
            return [raw.view(np.float32)]
        case "F16":
            return [raw.view(np.float16)]
        case "BF16":  # the upper half of a float32: its exponent says whether it is finite
            return [np.where(raw.view(np.uint16) & 0x7F80 == 0x7F80, np.inf, 0)]
        case kind:
            block_bytes = next((size for name, _, size in TENSOR_TYPES.values() if name == kind), 1)
            blocks = raw.reshape(-1, block_bytes)
            return [np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16) for at in SCALES.get(kind, ())]


def _weigh(tensors: Sequence[GgufTensor], parameters: int) -> Weights:
    total = sum(t.size_bytes for t in tensors)
    embedding = sum(t.size_bytes for t in tensors if t.name in EMBEDDINGS)
    quantized = sum(t.size_bytes for t in tensors if t.kind not in WHOLE and t.name not in EMBEDDINGS)
    return Weights(
        total_bytes=total, quantized_bytes=quantized, embedding_bytes=embedding,
        other_bytes=total - quantized - embedding, parameters=parameters, bits_per_parameter=8 * total / parameters,
    )  # fmt: skip


def _note(fallback: Sequence[GgufTensor], matrices: Sequence[GgufTensor]) -> str | None:
    if not fallback:
        return None
    kinds = " and ".join(sorted({t.kind for t in fallback}))
    widths = ", ".join(str(width) for width in sorted({t.shape[0] for t in fallback}))
    return (
        f"llama.cpp wrote {len(fallback)} of {len(matrices)} matrices as {kinds} instead: their rows, {widths} wide, "
        "do not divide into the type's blocks"
    )
