"""For workers: a checkpoint as a plain transformers model, whoever packed it. Loaded by its path; imports nothing of
qserve.

AutoAWQ's, AutoGPTQ's and bitsandbytes' formats are expanded by their definition (packed.py and packed_bitsandbytes.py
beside this file), so no kernel and no further package has a hand in it. What compressed-tensors wrote, transformers
loads with compressed-tensors; the weights of a GGUF file it expands itself.
"""

import logging
import runpy
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

PACKED = runpy.run_path(str(Path(__file__).with_name("packed.py")))
BITSANDBYTES = runpy.run_path(str(Path(__file__).with_name("packed_bitsandbytes.py")))


def load_to_serve(folder: str, dtype: Any, device: str) -> Any:
    """As a server that people start with has it: bitsandbytes computes what it wrote; all else is as `load` has it."""
    if (Path(folder) / "model.gguf").exists() or _quantization(AutoConfig.from_pretrained(folder))[0] != "bitsandbytes":
        return load(folder, dtype).to(device)
    logging.getLogger("bitsandbytes.autograd").setLevel(logging.ERROR)  # int8: a line a layer and token
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map={"": device}).eval()
    for module in model.modules():
        if hasattr(module, "compute_dtype"):  # the config names the one it was made with
            module.compute_dtype = dtype
    return model


def load(folder: str, dtype: Any, layers: int | None = None, round_activations: bool = True) -> Any:
    """The model, ready to be run. `layers`: its first few decoder layers alone. `round_activations`: where the format
    says so, else its weights alone are as the checkpoint has them (of those that are expanded here).
    """
    if (Path(folder) / "model.gguf").exists():
        return _load_gguf(folder, dtype)
    config = AutoConfig.from_pretrained(folder)
    if layers is not None:
        text = config.get_text_config()
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
    method, quantization = _quantization(config)
    if method not in ("awq", "gptq", "bitsandbytes"):
        return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype).eval()
    del config.quantization_config
    tensors = dict(plain_tensors(Path(folder), quantization, layers))
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = kind.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype).eval()
    model.expanded_from = method
    if round_activations and quantization.get("load_in_8bit"):
        _round_inputs(model, int8_layers(Path(folder)))
    return model


def _quantization(config: Any) -> tuple[str | None, dict[str, Any]]:
    """(quant_method, all of quantization_config)."""
    found = getattr(config, "quantization_config", None) or {}
    return found.get("quant_method"), found


def _load_gguf(folder: str, dtype: Any) -> Any:
    gguf.GGUFReader = cache(gguf.GGUFReader)  # transformers reads the header four times over
    gguf.get_tensor_name_map = cache(gguf.get_tensor_name_map)
    expand = GgufConfig(dequantize=True)
    kind = AutoModelForCausalLM
    return kind.from_pretrained(folder, gguf_file="model.gguf", dtype=dtype, quantization_config=expand).eval()


def plain_tensors(folder: Path, quantization: dict[str, Any], layers: int | None) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of the model as it was before packing; expanded weights in float32."""
    own = quantization["quant_method"] == "bitsandbytes"
    part = _bitsandbytes_parts(folder) if own else _packed_part
    packed: dict[str, dict[str, Any]] = {}
    for name, tensor in _tensors(folder, layers):
        if found := part(name):
            packed.setdefault(found[0], {})[found[1]] = tensor.numpy()
        else:
            yield name, tensor
    for module, parts in packed.items():
        weight = BITSANDBYTES["dequantize"](parts) if own else PACKED["dequantize"](parts, quantization)
        yield f"{module}.weight", torch.from_numpy(weight).contiguous()


def _tensors(folder: Path, layers: int | None) -> Iterator[tuple[str, Any]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if layers is None or _layer(name) < layers:
                    yield name, file.get_tensor(name)


Part = Callable[[str], tuple[str, str] | None]  # (layer, field) of a packed layer's tensor


def _packed_part(name: str) -> tuple[str, str] | None:
    module, _, field = name.rpartition(".")
    return (module, field) if field in PACKED["PARTS"] else None


def _bitsandbytes_parts(folder: Path) -> Part:
    """A plain layer has a `weight` too: a quantized one is known by its scales."""
    packed = {found[0] for name in _names(folder) if (found := BITSANDBYTES["split"](name)) and found[1] != "weight"}

    def part(name: str) -> tuple[str, str] | None:
        found: tuple[str, str] | None = BITSANDBYTES["split"](name)
        return found if found and found[0] in packed else None

    return part


def int8_layers(folder: Path) -> set[str]:
    """Names of the layers that bitsandbytes holds in 8 bits."""
    return {name.removesuffix(".SCB") for name in _names(folder) if name.endswith(".SCB")}


def _names(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            yield from file.keys()


def _round_inputs(model: Any, names: set[str]) -> None:
    """LLM.int8(): each token to float16, then to 8 bits with a scale of its own, but for the columns of outliers. One
    step up or down moves the next layer's input, so two ways to sum soon round another way: that is no fault.
    """

    def rounded(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0]
        half = x.to(torch.float16).float()
        large = half.abs() >= BITSANDBYTES["OUTLIER"]
        columns = large.flatten(0, -2).any(0)
        scale = 127 / half.masked_fill(large, 0).abs().amax(-1, keepdim=True).clamp(min=1e-10)
        return (torch.where(columns, x, ((half * scale).round() / scale).to(x.dtype)), *args[1:])

    for name, module in model.named_modules():
        if name in names:
            module.register_forward_pre_hook(rounded)


def _layer(name: str) -> int:
    """The decoder layer that a tensor belongs to; -1 for none."""
    _, found, rest = name.partition(".layers.")
    return int(rest.partition(".")[0]) if found else -1
