"""What each variant asks of llm-compressor, spelled out: no preset that a release could change, one table to read.

The fields are those of compressed-tensors' QuantizationArgs.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import assert_never

from qserve.prep.shapes import linear_shapes
from qserve.recipe import Awq, Fp8, Gptq, LayerVariant, gptq_group_size

Fields = dict[str, object]
INT8_TOKEN: Fields = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
FP8_TOKEN: Fields = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
FP8_TENSOR: Fields = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
# A router decides which experts see a token: quantized, it sends tokens astray (and engines expect it whole).
ROUTERS = ("re:.*\\.gate$", "re:.*\\.router$", "re:.*\\.shared_expert_gate$")
EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # engines run each group as one matrix


@dataclass(frozen=True)
class Scheme:
    """`bits` of a weight; `group` None: one scale an output channel."""

    bits: int
    group: int | None
    symmetric: bool
    calibrated: bool
    weights: Fields
    activations: Fields | None


def scheme_of(variant: LayerVariant) -> Scheme:
    """The numbers behind a variant."""
    match variant:
        case Awq():
            weights = _grouped(4, variant.group_size, variant.symmetric)
            return Scheme(4, variant.group_size, variant.symmetric, True, weights, None)
        case Gptq(activations="int8"):
            # no activation order: engines accept one for grouped scales only
            weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
            return Scheme(8, None, True, True, weights, INT8_TOKEN)
        case Gptq():
            group = gptq_group_size(variant)
            order = "static" if variant.act_order == "static" else None
            weights = {**_grouped(variant.bits, group, True), "actorder": order}
            return Scheme(variant.bits, group, True, True, weights, None)
        case Fp8():
            weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
            static = variant.activations == "static"
            return Scheme(8, None, True, static, weights, FP8_TENSOR if static else FP8_TOKEN)
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
    return (scheme.bits + (16 + zero) / scheme.group) / 8
