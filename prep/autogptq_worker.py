"""Worker: quantize one checkpoint with AutoGPTQ. Imports nothing of qserve; runs in its own environment.

job: source (bf16 folder with a config that transformers 4 reads), out (folder), calibration (JSON file of token-id
lists), samples, dtype (in which calibration computes), threads, bits, group_size, act_order, dampening.

AutoGPTQ asks for CUDA in places that are not its algorithm: they are pointed at the CPU where there is no GPU. It saves
a tied output head a second time, and a bias of zeros for every layer that has none: they are dropped. It does not fall
back: a Hessian that cannot be factored is an error.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from auto_gptq import BaseQuantizeConfig
from auto_gptq.modeling import _base, _utils
from auto_gptq.modeling.auto import GPTQ_CAUSAL_LM_MODEL_MAP
from auto_gptq.quantization import gptq
from transformers import AutoModelForCausalLM

Emit = Callable[..., None]


def main(job: dict[str, Any], emit: Emit) -> dict[str, Any]:
    torch.set_num_threads(job["threads"])
    if not torch.cuda.is_available():
        _base.CUDA_0 = _utils.CUDA_0 = _base.CPU
        torch.cuda.synchronize = lambda *_: None
    emit("step", text="loading the model")
    model = _load(job["source"], getattr(torch, job["dtype"]))
    biased = {name for name, module in model.named_modules() if getattr(module, "bias", None) is not None}
    order = job["act_order"] == "static"
    config = BaseQuantizeConfig(
        bits=job["bits"], group_size=job["group_size"], damp_percent=job["dampening"], sym=True, desc_act=order,
        static_groups=order, model_file_base_name="model",
    )  # fmt: skip
    quantized = GPTQ_CAUSAL_LM_MODEL_MAP[model.config.model_type](model, False, config)
    samples = json.loads(Path(job["calibration"]).read_text())[: job["samples"]]
    _report_layers(model, quantized, emit)
    quantized.quantize([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in samples], batch_size=1)
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "qweight")}
    _refuse_mixed_groups(layers, job["group_size"])
    emit("step", text="saving")
    _store(model, layers, biased)
    config.desc_act = False  # true: the order of the inputs is plain, see above
    quantized.save_quantized(job["out"])
    return {"targets": sorted(layers), "fallback": []}


def _load(source: str, dtype: Any) -> Any:
    """The model; its config must be as it was written: transformers 4 drops what it does not know without a word."""
    model = AutoModelForCausalLM.from_pretrained(source, torch_dtype=dtype, use_cache=False)
    written, loaded = json.loads((Path(source) / "config.json").read_text()), model.config.to_dict()
    free = ("torch_dtype", "transformers_version", "use_cache")
    if wrong := [key for key, value in written.items() if key not in free and loaded.get(key) != value]:
        raise ValueError(f"transformers 4 does not read the model's config rightly: {', '.join(wrong)}")
    return model.eval()


def _report_layers(model: Any, quantized: Any, emit: Emit) -> None:
    """Emit how many of the linear layers are rounded."""
    linear = sum(isinstance(m, torch.nn.Linear) for m in model.get_submodule(quantized.layers_block_name).modules())
    done, original = [0], gptq.GPTQ.fasterquant

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        done[0] += 1
        emit("layer", done=done[0], total=linear)
        return found

    gptq.GPTQ.fasterquant = counted


def _refuse_mixed_groups(layers: dict[str, Any], group_size: int) -> None:
    """Order by activation with groups fixed beforehand leaves every input in its own group; engines rely on it."""
    for name, layer in layers.items():
        if not torch.equal(layer.g_idx.cpu(), torch.arange(len(layer.g_idx), dtype=torch.int32) // group_size):
            raise ValueError(f"the inputs of {name} are not grouped in order")


def _store(model: Any, layers: dict[str, Any], biased: set[str]) -> None:
    """As the format is: scales and biases of packed layers in float16. All else in bfloat16, as it came."""
    for parameter in model.parameters():  # packed weights are buffers
        parameter.data = parameter.data.to(torch.bfloat16)
    for name, layer in layers.items():
        layer.scales = layer.scales.to(torch.float16)
        layer.bias = layer.bias.to(torch.float16) if name in biased else None
    if model.config.tie_word_embeddings:
        model.lm_head = torch.nn.Identity()
