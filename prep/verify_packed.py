"""Look at a checkpoint in AutoAWQ's or AutoGPTQ's format before it gets its name (the formats: qserve/packed.py).

Everything is checked that engines rely on without looking: vLLM ignores the zero points and g_idx of a GPTQ checkpoint.
Raises WorkerError with the first thing that is wrong.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qserve.artifacts import Weights
from qserve.errors import UsageError, WorkerError
from qserve.packed import Array, unpack
from qserve.prep.headers import Tensor, read_bytes, read_folder
from qserve.prep.schemes import layer_names
from qserve.prep.verify import (
    Expectation,
    Tensors,
    Wrong,
    check_config,
    check_others,
    check_tied,
    floats,
    parameters,
    weigh,
)


@dataclass(frozen=True)
class Format:
    """One of the two, with the numbers of this checkpoint."""

    method: str  # awq, gptq
    bits: int
    group: int

    def shapes(self, out: int, width: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Field -> (dtype, shape) of a layer with `width` inputs."""
        word, groups = 32 // self.bits, width // self.group
        both = {"qzeros": ("I32", (groups, out // word)), "scales": ("F16", (groups, out))}
        if self.method == "awq":
            return {"qweight": ("I32", (width, out // word)), **both}
        return {"qweight": ("I32", (width // word, out)), **both, "g_idx": ("I32", (width,))}


def verify_packed(folder: Path, baseline: Path, want: Expectation) -> Weights:
    """Check everything; returns the weight bytes by class. Raises WorkerError."""
    assert want.scheme.group is not None
    form = Format("gptq" if want.scheme.symmetric else "awq", want.scheme.bits, want.scheme.group)
    try:
        tensors, source = read_folder(folder), read_folder(baseline)
        check_tied(tensors, want)
        check_targets(source, want)
        for name in want.targets:
            _check_layer(tensors, name, source[f"{name}.weight"], form)
        _check_nothing_else(tensors, source, want, form)
        check_others(tensors, source, want, own=("weight", "bias"))
        _check_says(check_config(folder, want, form.method), form)
    except (Wrong, UsageError) as problem:
        raise WorkerError(f"{want.variant}: the checkpoint is not right and was not kept: {problem}") from None
    return weigh(tensors, want.targets, parameters(source))


def check_targets(source: Tensors, want: Expectation) -> None:
    """They are layers of the source, and all of those whose names are known from the config."""
    if lost := [name for name in want.targets if f"{name}.weight" not in source]:
        raise Wrong(f"{lost[0]} is quantized, and the source has no such layer")
    known = {layer for _, layer in layer_names(want.config) if f"{layer}.weight" in source}
    if missed := sorted(known - set(want.targets)):
        raise Wrong(f"{missed[0]} was to be quantized and is not ({len(missed)} such layers)")


def _check_layer(tensors: Tensors, name: str, weight: Tensor, form: Format) -> None:
    for field, (dtype, shape) in form.shapes(*weight.shape).items():
        stored = tensors.get(f"{name}.{field}")
        if stored is None or (stored.dtype, stored.shape) != (dtype, shape):
            found = f"{stored.dtype} {stored.shape}" if stored else "missing"
            raise Wrong(f"{name}.{field} is {found}, and {dtype} {shape} is expected")
    scales = floats(tensors[f"{name}.scales"])
    if not np.isfinite(scales).all():
        raise Wrong(f"{name}.scales holds NaN or infinity")
    if not (scales > 0).all():
        raise Wrong(f"{name}.scales holds {int((scales <= 0).sum())} scales that are zero or negative")
    if form.method == "gptq":
        _check_gptq(tensors, name, form)
    bias = tensors.get(f"{name}.bias")
    if bias is not None and not np.isfinite(floats(bias)).all():
        raise Wrong(f"{name}.bias holds NaN or infinity")


def _check_gptq(tensors: Tensors, name: str, form: Format) -> None:
    zeros = unpack(_words(tensors[f"{name}.qzeros"]), form.bits, axis=1) + 1  # version 1 stores zero - 1
    if (zeros != 2 ** (form.bits - 1)).any():
        raise Wrong(f"{name} is not symmetric: its zero points are not all {2 ** (form.bits - 1)}")
    groups = _words(tensors[f"{name}.g_idx"])
    if (groups != np.arange(len(groups)) // form.group).any():
        raise Wrong(f"the inputs of {name} are not grouped in order")


def _check_nothing_else(tensors: Tensors, source: Tensors, want: Expectation, form: Format) -> None:
    own = {f"{name}.{field}" for name in want.targets for field in form.shapes(form.group, form.group)}
    plain = set(source) - {f"{name}.weight" for name in want.targets}
    if extra := sorted(set(tensors) - own - plain):
        raise Wrong(f"{extra[0]} is there and was not to be ({len(extra)} such tensors)")
    biases = {name for name in plain if name.endswith(".bias")}
    if lost := sorted(biases - set(tensors)):
        raise Wrong(f"{lost[0]} is missing")


def _check_says(quantization: Mapping[str, object], form: Format) -> None:
    """What its quantization_config must say for an engine to read it rightly."""
    says: dict[str, object] = {"bits": form.bits, "group_size": form.group}
    if form.method == "awq":
        says |= {"zero_point": True, "version": "gemm"}
    else:
        says |= {"sym": True, "desc_act": False}
    if wrong := sorted(key for key, value in says.items() if quantization.get(key) != value):
        raise Wrong(f"its quantization_config says {wrong[0]}: {quantization.get(wrong[0])}, not {says[wrong[0]]}")
    if quantization.get("checkpoint_format", "gptq") != "gptq":
        raise Wrong(f"it is in format {quantization['checkpoint_format']}, which engines do not read")


def _words(tensor: Tensor) -> Array:
    return np.frombuffer(read_bytes(tensor), np.int32).reshape(tensor.shape)
