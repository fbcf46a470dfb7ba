"""Variants: the closed set of ways to quantize. `variants` of a recipe holds these, and the baseline beside them."""

from typing import Annotated, Any, ClassVar, Literal, assert_never

from pydantic import Field, model_validator

from qserve.values import Frozen

BASELINE = "bf16"
HEAD = ("lm_head",)

# Who quantizes. llm-compressor writes compressed-tensors; the others write formats of their own, which vLLM loads, but
# for bitsandbytes', which is for transformers.
Backend = Literal["llmcompressor", "autoawq", "autogptq", "gptqmodel", "bitsandbytes"]
BACKEND_NAMES: dict[Backend, str] = {
    "llmcompressor": "llm-compressor", "autoawq": "AutoAWQ", "autogptq": "AutoGPTQ", "gptqmodel": "GPTQModel",
    "bitsandbytes": "bitsandbytes",
}  # fmt: skip


class Awq(Frozen):
    """W4A16 by activation-aware scaling (Lin et al., arXiv 2306.00978)."""

    method: Literal["awq"]
    backend: Literal["llmcompressor", "autoawq"] = "llmcompressor"
    bits: Literal[4] = 4
    group_size: int = Field(128, ge=8)
    symmetric: bool = False
    grid: int = Field(20, ge=2)  # steps of the search for the scaling exponent
    ignore: tuple[str, ...] = HEAD
    # fewer samples than the recipe's, for this variant alone
    samples: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _autoawq_is_asymmetric(self) -> "Awq":
        if self.backend == "autoawq" and self.symmetric:
            raise ValueError("backend: autoawq goes with symmetric: false (vLLM reads its format with zero points)")
        _refuse_ignore(self.backend, self.ignore)
        return self


class Gptq(Frozen):
    """W4A16 or W8A8 by second-order rounding (Frantar et al., arXiv 2210.17323)."""

    method: Literal["gptq"]
    backend: Literal["llmcompressor", "autogptq", "gptqmodel"] = "llmcompressor"
    bits: Literal[4, 8] = 4
    # None: 128 for weights alone, one scale a channel with int8 activations
    group_size: int | None = Field(None, ge=8)
    activations: Literal["none", "int8"] = "none"
    act_order: Literal["static", "none"] = "static"
    dampening: float = Field(0.01, gt=0, lt=1)
    max_fallback: float = Field(0.1, ge=0, le=1)  # share of layers that may fall back to round-to-nearest
    # strength of SmoothQuant (Xiao et al., arXiv 2211.10438), which moves outliers from activations into weights
    smooth: float | None = Field(None, gt=0, lt=1)
    ignore: tuple[str, ...] = HEAD
    samples: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _int8_is_per_channel(self) -> "Gptq":
        if self.activations == "int8" and (self.bits != 8 or self.group_size is not None):
            raise ValueError("activations: int8 goes with bits: 8 and no group_size (one scale a channel)")
        if self.activations == "int8" and self.backend != "llmcompressor":
            raise ValueError(f"backend: {self.backend} quantizes weights alone; activations: int8 needs llmcompressor")
        if self.smooth is not None and self.activations == "none":
            raise ValueError("smooth goes with activations: int8 (it makes activations easier to round)")
        _refuse_ignore(self.backend, self.ignore)
        return self


class Fp8(Frozen):
    """FP8 E4M3 weights and activations: one scale a channel and a token (`dynamic`), a calibrated scale a layer for
    activations (`static`), or a scale a block of 128 (`block`, as DeepSeek-V3 has it). `kv_cache`: calibrated scales
    for keys and values too, so that the engine keeps them in FP8.
    """

    method: Literal["fp8"]
    activations: Literal["dynamic", "static", "block"] = "dynamic"
    kv_cache: bool = False
    ignore: tuple[str, ...] = HEAD
    samples: int | None = Field(None, ge=1)


class Rtn(Frozen):
    """Round to nearest: W4A16, W8A16 or W8A8 with no calibration at all. What the others must beat."""

    method: Literal["rtn"]
    bits: Literal[4, 8] = 4
    group_size: int | None = Field(None, ge=8)  # as with gptq
    activations: Literal["none", "int8"] = "none"
    symmetric: bool = True
    ignore: tuple[str, ...] = HEAD

    @model_validator(mode="after")
    def _int8_is_per_channel(self) -> "Rtn":
        if self.activations == "int8" and (self.bits != 8 or self.group_size is not None or not self.symmetric):
            raise ValueError("activations: int8 goes with bits: 8, symmetric, and no group_size (one scale a channel)")
        return self


class Nvfp4(Frozen):
    """FP4 E2M1 in groups of 16 with FP8 scales, as Blackwell GPUs multiply it; `none`: weights alone."""

    method: Literal["nvfp4"]
    activations: Literal["fp4", "none"] = "fp4"
    ignore: tuple[str, ...] = HEAD
    samples: int | None = Field(None, ge=1)


class Mxfp4(Frozen):
    """FP4 E2M1 in groups of 32 with power-of-two scales (OCP microscaling formats v1.0); `none`: weights alone."""

    method: Literal["mxfp4"]
    activations: Literal["fp4", "none"] = "none"
    ignore: tuple[str, ...] = HEAD


class Bitsandbytes(Frozen):
    """Weights rounded as they are loaded, without data, for transformers.

    nf4: 4 bits, a scale for each 64 weights (QLoRA; Dettmers et al., arXiv 2305.14314). `double_quant`: those scales
    are stored in 8 bits.
    int8: a scale an output channel, activations rounded a token, all but outliers (LLM.int8(); Dettmers et al.,
    arXiv 2208.07339).
    """

    method: Literal["bitsandbytes"]
    type: Literal["nf4", "int8"] = "nf4"
    double_quant: bool = False
    ignore: ClassVar[tuple[str, ...]] = HEAD  # always, and nothing else

    @model_validator(mode="after")
    def _int8_has_one_scale(self) -> "Bitsandbytes":
        if self.type == "int8" and self.double_quant:
            raise ValueError("double_quant goes with type: nf4 (int8 has one scale a channel)")
        return self


GgufType = Literal["bf16", "f16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0"]


class Gguf(Frozen):
    """A GGUF file of llama.cpp, rounded without calibration; embeddings are quantized as well."""

    method: Literal["gguf"]
    type: GgufType


class Bf16(Frozen):
    """The baseline. Always there, always first; a recipe does not list it."""

    method: Literal["bf16"] = "bf16"


LayerVariant = Awq | Gptq | Fp8 | Rtn | Nvfp4 | Mxfp4 | Bitsandbytes  # linear layers are quantized, in safetensors
QuantizedVariant = Annotated[LayerVariant | Gguf, Field(discriminator="method")]
Variant = Bf16 | LayerVariant | Gguf
METHODS: dict[str, type[Frozen]] = {
    "awq": Awq, "gptq": Gptq, "fp8": Fp8, "rtn": Rtn, "nvfp4": Nvfp4, "mxfp4": Mxfp4, "gguf": Gguf,
    "bitsandbytes": Bitsandbytes,
}  # fmt: skip

# Fields that came later, with the value that says what was done before: left out, so that checkpoints keep their names.
LATER: dict[str, object] = {"backend": "llmcompressor", "smooth": None, "kv_cache": False}


def settings_of(variant: Variant) -> dict[str, Any]:
    """The variant as JSON: what a manifest keeps, and part of what names a checkpoint."""
    dumped = variant.model_dump(mode="json")
    return {field: value for field, value in dumped.items() if field not in LATER or value != LATER[field]}


def backend_of(variant: Variant) -> Backend:
    """Who makes it: llama.cpp's files too begin in llm-compressor's environment."""
    match variant:
        case Awq() | Gptq():
            return variant.backend
        case Bitsandbytes():
            return "bitsandbytes"
        case Bf16() | Fp8() | Rtn() | Nvfp4() | Mxfp4() | Gguf():
            return "llmcompressor"
        case _:
            assert_never(variant)


def samples_of(variant: Variant) -> int | None:
    """How many calibration samples it wants instead of the recipe's number; None for all of them."""
    match variant:
        case Awq() | Gptq() | Fp8() | Nvfp4():
            return variant.samples
        case Bf16() | Rtn() | Mxfp4() | Bitsandbytes() | Gguf():
            return None
        case _:
            assert_never(variant)


def scheme_label(variant: Variant) -> str:
    """The short name people use: `AWQ W4A16 g64`, `GPTQ W8A8 int8`, `FP8 dynamic`; with the backend, if it is another
    than llm-compressor.
    """
    backend = backend_of(variant)
    named = backend == "llmcompressor" or isinstance(variant, Bitsandbytes)
    return _scheme(variant) + ("" if named else f" ({BACKEND_NAMES[backend]})")


def _scheme(variant: Variant) -> str:
    match variant:
        case Bf16():
            return "bfloat16"
        case Awq():
            return f"AWQ W4A16 g{variant.group_size}"
        case Gptq(activations="int8"):
            return "GPTQ W8A8 int8" + ("" if variant.smooth is None else f" smooth {variant.smooth:g}")
        case Gptq():
            return f"GPTQ W{variant.bits}A16 g{group_size_of(variant)}"
        case Fp8():
            return f"FP8 {variant.activations}" + (" with FP8 KV cache" if variant.kv_cache else "")
        case Rtn(activations="int8"):
            return "RTN W8A8 int8"
        case Rtn():
            return f"RTN W{variant.bits}A16 g{group_size_of(variant)}"
        case Nvfp4() | Mxfp4():
            name = "NVFP4" if isinstance(variant, Nvfp4) else "MXFP4"
            return f"{name} W4A{4 if variant.activations == 'fp4' else 16}"
        case Bitsandbytes(type="int8"):
            return "bitsandbytes int8"
        case Bitsandbytes():
            return "bitsandbytes NF4" + (" (double quantization)" if variant.double_quant else "")
        case Gguf():
            return f"GGUF {variant.type.upper()}"
        case _:
            assert_never(variant)


def group_size_of(variant: Gptq | Rtn) -> int:
    """Group size of a weight-only variant; 128 where the recipe is silent."""
    return variant.group_size or 128


def _refuse_ignore(backend: Backend, ignore: tuple[str, ...]) -> None:
    if backend != "llmcompressor" and ignore != HEAD:
        raise ValueError(f"backend: {backend} takes no `ignore`: it quantizes every linear layer but lm_head")
