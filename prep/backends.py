"""What the backends beside llm-compressor ask of a model and a machine, checked before any work."""

import platform
import sys
from collections.abc import Mapping
from typing import assert_never

from qserve.artifacts import Machine
from qserve.errors import PreflightError
from qserve.prep.legacy_config import with_older_spellings
from qserve.prep.schemes import EXPERT_FIELDS, NF4_BLOCK, text_config
from qserve.prep.shapes import Shape, linear_shapes
from qserve.variants import BACKEND_NAMES, Backend, Bitsandbytes, Gptq, LayerVariant, backend_of, group_size_of

WORD_VALUES = 32  # their packing wants widths that are multiples of this
NF4_OUT = 32  # block_n of _convert_weight_packed_for_cpu in bitsandbytes 0.50's functional.py
VLLM_GROUPS = (32, 64, 128)  # MARLIN_SUPPORTED_GROUP_SIZES in vllm 0.32's marlin_utils.py, checked on CPUs as well
# Keys of AutoAWQ 0.2.9's AWQ_CAUSAL_LM_MODEL_MAP (awq/models/auto.py) that are text models.
AUTOAWQ_MODELS = (
    "Yi", "aquila", "baichuan", "bloom", "cohere", "deepseek_v2", "deepseek_v3", "exaone", "falcon", "gemma", "gemma2",
    "gpt_bigcode", "gpt_neox", "gptj", "internlm2", "llama", "minicpm", "minicpm3", "mistral", "mixtral", "mpt", "opt",
    "phi3", "qwen", "qwen2", "qwen3", "qwen3_moe", "stablelm", "starcoder2",
)  # fmt: skip
# Those of AutoGPTQ 0.7.1's GPTQ_CAUSAL_LM_MODEL_MAP (auto_gptq/modeling/auto.py) with a class in transformers 4.51.
AUTOGPTQ_MODELS = (
    "bloom", "codegen", "falcon", "gemma", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "llama", "mistral", "mixtral",
    "opt", "qwen2",
)  # fmt: skip


def check_bitsandbytes(name: str, variant: Bitsandbytes, config: Mapping[str, object], machine: Machine) -> None:
    """Raises PreflightError, in one sentence, if it cannot be made of this model, or not be run on this machine."""
    _check_platform(name, "bitsandbytes", "use another method")
    if any(text_config(config).get(field) for field in EXPERT_FIELDS):
        raise PreflightError(
            f"{name}: bitsandbytes rounds no experts in transformers, so most of this model would stay in bfloat16; "
            "use another method"
        )
    packs = machine.flavour == "cpu" and "avx512_bf16" in machine.isa and variant.type == "nf4"
    shapes = linear_shapes(config) if packs else {}
    if wrong := [kind for kind, (out, width) in shapes.items() if out % NF4_OUT or width % NF4_BLOCK]:
        raise PreflightError(
            f"{name}: bitsandbytes' NF4 kernel for this CPU needs input widths that are multiples of {NF4_BLOCK} and "
            f"output widths that are multiples of {NF4_OUT}, and those of {', '.join(wrong)} are not; use type: int8"
        )


def check_backend(name: str, variant: LayerVariant, config: Mapping[str, object], shapes: Mapping[str, Shape]) -> None:
    """Raises PreflightError, in one sentence, if the variant's backend cannot run on this machine or this model."""
    backend = backend_of(variant)
    label = BACKEND_NAMES[backend]
    match backend:
        case "llmcompressor":
            return
        case "autoawq":
            _check_model(name, label, AUTOAWQ_MODELS, config)
        case "autogptq":
            _check_model(name, label, AUTOGPTQ_MODELS, config)
            if sys.version_info[:2] != (3, 11):
                raise PreflightError(
                    f"{name}: {label}'s last release is built for Python up to 3.11, and this is "
                    f"{platform.python_version()}: install qserve under Python 3.11, or use backend: gptqmodel"
                )
        case "gptqmodel" | "bitsandbytes":  # the latter: check_bitsandbytes
            pass
        case _:
            assert_never(backend)
    _check_platform(name, backend, "leave `backend` out")
    _check_reader(name, variant)
    if wrong := [kind for kind, (out, width) in shapes.items() if out % WORD_VALUES or width % WORD_VALUES]:
        raise PreflightError(
            f"{name}: {label} packs widths that are multiples of {WORD_VALUES}, and those of {', '.join(wrong)} are "
            "not; leave `backend` out"
        )


def _check_model(name: str, label: str, known: tuple[str, ...], config: Mapping[str, object]) -> None:
    kind = text_config(config).get("model_type")
    if kind not in known:
        raise PreflightError(f"{name}: {label} does not know {kind} models ({', '.join(known)}); leave `backend` out")
    try:
        with_older_spellings(config)
    except PreflightError as problem:
        raise PreflightError(f"{name}: {label} needs transformers 4, but {problem}; leave `backend` out") from None


def _check_reader(name: str, variant: LayerVariant) -> None:
    match variant:
        case Gptq() if group_size_of(variant) not in VLLM_GROUPS:
            fit = ", ".join(map(str, VLLM_GROUPS))
            raise PreflightError(
                f"{name}: vLLM reads {variant.backend}'s format with a group_size of {fit}, and this is "
                f"{group_size_of(variant)}; choose one of them, or leave `backend` out"
            )


def _check_platform(name: str, backend: Backend, remedy: str) -> None:
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise PreflightError(
            f"{name}: backend {backend} is locked for Linux on x86-64, and this is {sys.platform} on "
            f"{platform.machine()}; {remedy}"
        )
