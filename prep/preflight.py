"""Refuse in seconds what would fail after an hour: shapes, fused layers, kernels, disk, memory.

Everything here is worked out from config.json (or a GGUF header) and the machine. No weights, no data, no runtime.
"""

from collections.abc import Iterator, Mapping
from typing import assert_never

import psutil

from qserve.artifacts import Machine
from qserve.errors import PreflightError
from qserve.prep.backends import check_backend, check_bitsandbytes
from qserve.prep.schemes import (
    BLOCK,
    FUSED,
    Scheme,
    bytes_per_weight,
    ignore_of,
    layer_names,
    matches,
    scheme_of,
    text_config,
)
from qserve.prep.shapes import fitting_group_sizes, linear_shapes
from qserve.prep.source import Config, Outline
from qserve.recipe import Recipe
from qserve.rounding import size
from qserve.variants import (
    Awq,
    Bitsandbytes,
    Fp8,
    Gguf,
    GgufType,
    Gptq,
    LayerVariant,
    Mxfp4,
    Nvfp4,
    QuantizedVariant,
    Rtn,
    samples_of,
)  # fmt: skip
from qserve.workspace import Workspace, free_bytes

CPU_KERNEL_MULTIPLE = 32  # vLLM's W4A16 kernel for CPUs: input and output widths
K_BLOCK = 256  # elements of a block of GGUF's K types
# Bits a weight of each GGUF type, in a model whose rows fit: https://github.com/ggml-org/llama.cpp/tree/master/tools/quantize
GGUF_BITS: dict[GgufType, float] = {
    "bf16": 16, "f16": 16, "q8_0": 8.5, "q6_k": 6.6, "q5_k_m": 5.7, "q4_k_m": 4.9, "q4_0": 4.6,
}  # fmt: skip
SPARE_BYTES = 256 * 2**20
# Copies of the hidden states that calibration holds at once: cached inputs, their successors, and for AWQ the
# arguments and two outputs of the block that is being scaled.
ACTIVATION_COPIES = {"awq": 6, "gptq": 3, "fp8": 2, "nvfp4": 2}


def check_variant(name: str, variant: QuantizedVariant, config: Config, machine: Machine) -> None:
    """Shapes, kernels and fused layers of one variant. Raises PreflightError. Unknown shapes pass: the worker finds
    out.
    """
    if isinstance(variant, Gguf):
        return  # llama.cpp takes another type for rows that do not fit
    if isinstance(variant, Bitsandbytes):
        check_bitsandbytes(name, variant, config, machine)
        return
    scheme = scheme_of(variant)
    ignore = ignore_of(variant, config)
    names = list(layer_names(config))
    targeted = {kind for kind, layer in names if not any(matches(pattern, layer) for pattern in ignore)}
    if names and not targeted:
        raise PreflightError(f"{name}: `ignore` covers every layer, so nothing would be quantized; make it narrower")
    shapes = {kind: shape for kind, shape in linear_shapes(config).items() if kind in targeted}
    _check_head(name, variant, config)
    _check_groups(name, scheme, shapes, config)
    _check_blocks(name, scheme, shapes)
    check_backend(name, variant, config, shapes)
    _check_fused(name, names, ignore)
    if machine.flavour == "cpu":
        _check_cpu_kernel(name, scheme, shapes)


def kernel_notes(name: str, variant: QuantizedVariant, config: Config, machine: Machine) -> Iterator[str]:
    """What works here but not well: said before the work, no error."""
    match variant:
        case Fp8() if machine.flavour == "cpu" and "amx_tile" not in machine.isa:
            yield f"{name}: this CPU has no FP8 kernel, so vLLM emulates it: the checkpoint is right, but slow here"
        case Fp8() if machine.gpu_capability is not None and float(machine.gpu_capability) < 8.9:
            yield f"{name}: this GPU has no FP8 arithmetic: vLLM uses the FP8 weights and 16-bit activations"
        case Nvfp4() | Mxfp4() if machine.flavour == "cpu":
            yield f"{name}: vLLM has no CPU kernel for FP4: the checkpoint is made, and is for GPUs that have FP4"
        case Nvfp4() | Mxfp4() if machine.gpu_capability is not None and float(machine.gpu_capability) < 10:
            yield f"{name}: this GPU has no FP4 arithmetic: vLLM uses the FP4 weights and 16-bit activations"
        case Awq() | Gptq(activations="none") | Rtn(activations="none") if machine.flavour == "cuda":
            wide = {kind: shape for kind, shape in linear_shapes(config).items() if shape[1] % 128 or shape[0] % 64}
            if wide:
                yield f"{name}: {_listed(wide)} do not fit vLLM's Marlin kernel (128 in, 64 out): a slower one is used"
        case Bitsandbytes():
            yield f"{name}: bitsandbytes checkpoints are for transformers: measure with `bench --engine transformers`"
        case Gguf(type="q8_0" | "bf16" | "f16" | "q4_0"):
            return
        case Gguf():
            wide = {kind: shape for kind, shape in linear_shapes(config).items() if shape[1] % K_BLOCK}
            if wide:
                yield f"{name}: {_listed(wide)} are no multiple of {K_BLOCK} wide: llama.cpp takes larger types there"
        case Awq() | Gptq() | Fp8() | Rtn() | Nvfp4() | Mxfp4():
            return
        case _:
            assert_never(variant)


def check_disk(outline: Outline, variants: Mapping[str, QuantizedVariant], workspace: Workspace) -> None:
    """`variants`: those that are still to be made. Raises PreflightError."""
    if outline.bf16_bytes is None:
        return
    need = sum(expected_bytes(outline, variant) for variant in variants.values()) + outline.bf16_bytes + SPARE_BYTES
    free = free_bytes(workspace.root)
    if need > free:
        raise PreflightError(
            f"{workspace.root} has {size(free)} free and the checkpoints take about {size(need)}; "
            "free some, or put the workspace elsewhere with --workspace"
        )


def check_memory(recipe: Recipe, outline: Outline, variants: Mapping[str, QuantizedVariant], machine: Machine) -> None:
    """Weights and calibration activations against the machine's memory. Raises PreflightError with what would fit."""
    hidden = text_config(outline.config).get("hidden_size")
    if outline.bf16_bytes is None or not isinstance(hidden, int):
        return
    width = 2 if compute_dtype(outline, machine) == "bfloat16" else 4
    for name, variant in variants.items():
        if isinstance(variant, Gguf):
            continue  # converted and rounded tensor by tensor
        weights = outline.bf16_bytes * width // 2
        samples = samples_of(variant) or recipe.calibration.samples
        each = recipe.calibration.tokens * hidden * width * ACTIVATION_COPIES.get(variant.method, 0)
        need = weights + (samples * each if scheme_of(variant).calibrated else 0) + SPARE_BYTES
        if need > machine.memory_bytes:
            fit = (machine.memory_bytes - weights - SPARE_BYTES) // each if each else 0
            remedy = f"at most {fit} such samples fit" if fit > 0 else "its weights alone do not fit"
            raise PreflightError(
                f"{name}: needs about {size(need)} of memory ({size(weights)} weights, "
                f"{samples} samples of {recipe.calibration.tokens} tokens), and this machine has "
                f"{size(machine.memory_bytes)}; {remedy}"
            )


def compute_dtype(outline: Outline, machine: Machine) -> str:
    """In what calibration computes. CPUs are several times faster, and more exact, in float32; where that does not
    fit, and on GPUs, bfloat16.
    """
    if machine.flavour == "cuda" or outline.bf16_bytes is None:
        return "bfloat16"
    room = min(machine.memory_bytes, psutil.virtual_memory().total)
    return "float32" if 2 * outline.bf16_bytes < 0.6 * room else "bfloat16"


def expected_bytes(outline: Outline, variant: QuantizedVariant) -> int:
    """About how large the variant's weights will be: embeddings stay in bfloat16, all else is packed."""
    assert outline.bf16_bytes is not None
    if isinstance(variant, Gguf):  # and the unrounded file that it is made from
        return int(outline.bf16_bytes * (1 + GGUF_BITS[variant.type] / 16))
    own = text_config(outline.config)
    vocab, hidden = own.get("vocab_size"), own.get("hidden_size")
    tables = 1 if outline.config.get("tie_word_embeddings") else 2
    embedding = 2 * tables * vocab * hidden if isinstance(vocab, int) and isinstance(hidden, int) else 0
    linear = max(outline.bf16_bytes - embedding, 0) / 2  # weights
    return int(embedding + linear * bytes_per_weight(scheme_of(variant)))


def _check_head(name: str, variant: LayerVariant, config: Config) -> None:
    if config.get("tie_word_embeddings") and not any(matches(pattern, "lm_head") for pattern in variant.ignore):
        raise PreflightError(f"{name}: the output head shares its weights with the embedding; add lm_head to `ignore`")


def _check_groups(name: str, scheme: Scheme, shapes: Mapping[str, tuple[int, int]], config: Config) -> None:
    if scheme.group is None:
        return
    if wrong := {kind: shape for kind, shape in shapes.items() if shape[1] % scheme.group}:
        fit = ", ".join(map(str, fitting_group_sizes(config))) or "none of the usual ones"
        raise PreflightError(
            f"{name}: group_size {scheme.group} does not divide the input width of {_listed(wrong)} "
            f"(all layers: {_listed(shapes)}); group sizes that fit: {fit}"
        )


def _check_blocks(name: str, scheme: Scheme, shapes: Mapping[str, tuple[int, int]]) -> None:
    if scheme.weights["strategy"] != "block":
        return
    if wrong := {kind: shape for kind, shape in shapes.items() if shape[0] % BLOCK or shape[1] % BLOCK}:
        raise PreflightError(
            f"{name}: blocks of {BLOCK} do not fit {_listed(wrong)}; use activations: dynamic (a scale a channel)"
        )


def _check_fused(name: str, names: list[tuple[str, str]], ignore: tuple[str, ...]) -> None:
    """Engines run q, k, v (and gate, up) as one matrix, so all or none of them must be quantized, in every layer."""
    ignored = {layer for _, layer in names if any(matches(pattern, layer) for pattern in ignore)}
    present = {layer for _, layer in names}
    for layer in sorted(present):
        for group in FUSED:
            stem, _, kind = layer.rpartition(".")
            members = {f"{stem}.{other}" for other in group} & present
            if kind in group and members & ignored and members - ignored:
                raise PreflightError(
                    f"{name}: `ignore` covers {', '.join(sorted(members & ignored))} but not "
                    f"{', '.join(sorted(members - ignored))}, and engines run them as one matrix; cover all or none"
                )


def _check_cpu_kernel(name: str, scheme: Scheme, shapes: Mapping[str, tuple[int, int]]) -> None:
    if scheme.activations is not None or scheme.weights["type"] == "float":
        return
    if scheme.bits == 8:
        raise PreflightError(
            f"{name}: vLLM has no CPU kernel for 8-bit weights with 16-bit activations; "
            "use activations: int8, or bits: 4"
        )
    if wrong := {k: s for k, s in shapes.items() if s[0] % CPU_KERNEL_MULTIPLE or s[1] % CPU_KERNEL_MULTIPLE}:
        raise PreflightError(
            f"{name}: vLLM's 4-bit CPU kernel needs input and output widths that are multiples of "
            f"{CPU_KERNEL_MULTIPLE}, and {_listed(wrong)} are not; use method fp8, "
            "or gptq with bits: 8 and activations: int8"
        )


def _listed(shapes: Mapping[str, tuple[int, int]]) -> str:
    return ", ".join(f"{kind} ({wide} in, {out} out)" for kind, (out, wide) in shapes.items())
