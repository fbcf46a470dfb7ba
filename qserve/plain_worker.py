"""For workers: a checkpoint as a plain transformers model, whoever packed it. Loaded by its path; imports nothing of
qserve.

AutoAWQ's and AutoGPTQ's formats are expanded by their definition (packed.py beside this file), so no kernel and no
further package has a hand in it. What compressed-tensors wrote, transformers loads with compressed-tensors; the weights
of a GGUF file it expands itself.
"""

import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

PACKED = runpy.run_path(str(Path(__file__).with_name("packed.py")))


def load(folder: str, dtype: Any, layers: int | None = None) -> Any:
    """The model, ready to be run. `layers`: its first few decoder layers alone."""
    if (Path(folder) / "model.gguf").exists():
        return _load_gguf(folder, dtype)
    config = AutoConfig.from_pretrained(folder)
    if layers is not None:
        text = config.get_text_config()
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
    quantization = getattr(config, "quantization_config", None) or {}
    if quantization.get("quant_method") not in ("awq", "gptq"):
        return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype).eval()
    del config.quantization_config
    tensors = dict(plain_tensors(Path(folder), quantization, layers))
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = kind.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype).eval()
    model.expanded_from = quantization["quant_method"]
    return model


def _load_gguf(folder: str, dtype: Any) -> Any:
    gguf.GGUFReader = cache(gguf.GGUFReader)  # transformers reads the header four times over
    gguf.get_tensor_name_map = cache(gguf.get_tensor_name_map)
    expand = GgufConfig(dequantize=True)
    kind = AutoModelForCausalLM
    return kind.from_pretrained(folder, gguf_file="model.gguf", dtype=dtype, quantization_config=expand).eval()


def plain_tensors(folder: Path, quantization: dict[str, Any], layers: int | None) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of the model as it was before packing; expanded weights in float32."""
    packed: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if layers is not None and _layer(name) >= layers:
                    continue
                module, _, field = name.rpartition(".")
                if field in PACKED["PARTS"]:
                    packed.setdefault(module, {})[field] = file.get_tensor(name).numpy()
                else:
                    yield name, file.get_tensor(name)
    for module, parts in packed.items():
        yield f"{module}.weight", torch.from_numpy(PACKED["dequantize"](parts, quantization)).contiguous()


def _layer(name: str) -> int:
    """The decoder layer that a tensor belongs to; -1 for none."""
    _, found, rest = name.partition(".layers.")
    return int(rest.partition(".")[0]) if found else -1
