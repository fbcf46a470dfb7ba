"""What each variant asks of llm-compressor, spelled out: no preset that a release could change, one table to read.
(Of bitsandbytes' variants only the sizes count.)

The fields are those of compressed-tensors' QuantizationArgs.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import assert_never

from qserve.prep.shapes import linear_shapes
from qserve.variants import Awq, Bitsandbytes, Fp8, Gptq, LayerVariant, Mxfp4, Nvfp4, Rtn, group_size_of

Fields = dict[str, object]
INT8_TOKEN: Fields = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
FP8_TOKEN: Fields = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
FP8_TENSOR: Fields = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
FP8_CHANNEL: Fields = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
INT8_CHANNEL: Fields = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
# DeepSeek-V3's: a scale for each 128 x 128 weights, and for each 128 inputs of a token
FP8_BLOCK: Fields = {
    "num_bits": 8, "type": "float", "strategy": "block", "symmetric": True, "block_structure": [128, 128],
}  # fmt: skip
FP8_GROUP: Fields = {
    "num_bits": 8, "type": "float", "strategy": "group", "symmetric": True, "dynamic": True, "group_size": 128,
}  # fmt: skip
# FP4: the scales of groups are FP8 under one float32 scale a tensor (NVIDIA), or powers of two (OCP)
NVFP4: Fields = {
    "num_bits": 4, "type": "float", "strategy": "tensor_group", "symmetric": True, "group_size": 16,
    "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn",
}  # fmt: skip
MXFP4: Fields = {
    "num_bits": 4, "type": "float", "strategy": "group", "symmetric": True, "group_size": 32,
    "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8",
}  # fmt: skip
NF4: Fields = {"num_bits": 4, "type": "float", "strategy": "flat"}  # bitsandbytes': blocks run on over rows
NF4_BLOCK = 64
BLOCK = 128
FP8 = {"dynamic": (FP8_CHANNEL, FP8_TOKEN), "static": (FP8_CHANNEL, FP8_TENSOR), "block": (FP8_BLOCK, FP8_GROUP)}
# A router decides which experts see a token: quantized, it sends tokens astray (and engines expect it whole).
ROUTERS = ("re:.*\\.gate$", "re:.*\\.router$", "re:.*\\.shared_expert_gate$")
EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # engines run each group as one matrix


@dataclass(frozen=True)
class Scheme:
    """`bits` of a weight; `group` None: one scale an output channel, or a block. `scale_bits`: of one group's scale."""

    bits: int
    group: int | None
    symmetric: bool
    calibrated: bool
    weights: Fields
    activations: Fields | None
    scale_bits: int = 16
    kv_cache: Fields | None = None


def scheme_of(variant: LayerVariant) -> Scheme:
    """The numbers behind a variant."""
    match variant:
        case Awq():
            weights = _grouped(4, variant.group_size, variant.symmetric)
            return Scheme(4, variant.group_size, variant.symmetric, True, weights, None)
        case Gptq(activations="int8"):
            # no activation order: engines accept one for grouped scales only
            return Scheme(8, None, True, True, INT8_CHANNEL, INT8_TOKEN)
        case Gptq():
            group = group_size_of(variant)
            order = "static" if variant.act_order == "static" else None
            weights = {**_grouped(variant.bits, group, True), "actorder": order}
            return Scheme(variant.bits, group, True, True, weights, None)
        case Fp8():
            kv_cache = FP8_TENSOR if variant.kv_cache else None
            calibrated = variant.activations == "static" or variant.kv_cache
            weights, activations = FP8[variant.activations]
            return Scheme(8, None, True, calibrated, weights, activations, kv_cache=kv_cache)
        case Rtn(activations="int8"):
            return Scheme(8, None, True, False, INT8_CHANNEL, INT8_TOKEN)
        case Rtn():
            group = group_size_of(variant)
            weights = _grouped(variant.bits, group, variant.symmetric)
            return Scheme(variant.bits, group, variant.symmetric, False, weights, None)
        case Nvfp4():
            activations = {**NVFP4, "dynamic": "local", "observer": "static_minmax"}
            both = variant.activations == "fp4"
            return Scheme(4, 16, True, both, NVFP4, activations if both else None, scale_bits=8)
        case Mxfp4():
            both = variant.activations == "fp4"
            return Scheme(4, 32, True, False, MXFP4, {**MXFP4, "dynamic": True} if both else None, scale_bits=8)
        case Bitsandbytes(type="int8"):
            return Scheme(8, None, True, False, INT8_CHANNEL, INT8_TOKEN)
        case Bitsandbytes():
            return Scheme(4, NF4_BLOCK, True, False, NF4, None, scale_bits=8 if variant.double_quant else 32)
        case _:
            assert_never(variant)


def _grouped(bits: int, group: int, symmetric: bool) -> Fields:
    return {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group, "symmetric": symmetric}


def ignore_of(variant: LayerVariant, config: Mapping[str, object]) -> tuple[str, ...]:
    """The recipe's list, with the routers of a model of experts added."""
    own = text_config(config)
    experts = any(own.get(field) for field in EXPERT_FIELDS)
    return tuple(dict.fromkeys([*variant.ignore, *(ROUTERS if experts else ())]))


def text_config(config: Mapping[str, object]) -> Mapping[str, object]:
    """The part of a config that describes the language model."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def matches(pattern: str, name: str) -> bool:
    """compressed-tensors' rule: `re:` and a pattern from the start of the name, else the whole name or the class."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return pattern in (name, "Linear")


def layer_names(config: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """(kind, module name) of each linear layer of a decoder, in Llama's spelling. Nothing where shapes are not
    known.
    """
    own = text_config(config)
    layers = own.get("num_hidden_layers")
    for index in range(layers if isinstance(layers, int) else 0):
        for kind in linear_shapes(config):
            block = "mlp" if kind.split(".")[-1] in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            path = kind.replace("experts.", "experts.0.")
            yield kind, f"model.layers.{index}.{block}.{path}"


def bytes_per_weight(scheme: Scheme) -> float:
    """Stored bytes of one quantized weight, scales (bfloat16) and packed zero points included."""
    if scheme.group is None:
        return scheme.bits / 8
    zero = 0 if scheme.symmetric else scheme.bits
    return (scheme.bits + (scheme.scale_bits + zero) / scheme.group) / 8
