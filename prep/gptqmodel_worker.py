"""Worker: quantize one checkpoint with GPTQModel. Imports nothing of qserve; runs in its own environment.

job: source (bf16 folder), out (folder), calibration (JSON file of token-id lists), samples, dtype (in which calibration
computes), threads, bits, group_size, act_order, dampening, max_fallback.

Its packing has a C++ extension that would be compiled here; its own Python path packs the same words, and is used. It
writes a log of its own into the current folder, so it works in a temporary one; the paths above are absolute.
"""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["GPTQMODEL_DISABLE_PACK_EXT"] = "1"

import torch
from gptqmodel import GPTQModel
from gptqmodel.quantization.config import GPTQConfig

Emit = Callable[..., None]


def main(job: dict[str, Any], emit: Emit) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        return quantize(job, emit)


def quantize(job: dict[str, Any], emit: Emit) -> dict[str, Any]:
    torch.set_num_threads(job["threads"])
    order = job["act_order"] == "static"
    config = GPTQConfig(
        bits=job["bits"], group_size=job["group_size"], sym=True, damp_percent=job["dampening"],
        desc_act=order, static_groups=order, act_group_aware=False, offload_to_disk=False,
    )  # fmt: skip
    emit("step", text="loading the model")
    model = GPTQModel.load(job["source"], config, dtype=getattr(torch, job["dtype"]))
    samples = json.loads(Path(job["calibration"]).read_text())[: job["samples"]]
    emit("step", text="calibrating and rounding")
    model.quantize([{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in samples], batch_size=1)
    layers = {name: module for name, module in model.model.named_modules() if hasattr(module, "qweight")}
    fallback = _fallback(model.quant_log, list(layers))
    share = len(fallback) / len(layers)
    if share > job["max_fallback"]:
        raise ValueError(
            f"GPTQ rounded {len(fallback)} of {len(layers)} layers to nearest (limit {job['max_fallback']:.0%}); use "
            "more and more varied calibration samples, or a larger dampening"
        )
    _refuse_mixed_groups(layers, job["group_size"])
    emit("step", text="saving")
    for parameter in model.model.parameters():  # packed weights are buffers
        parameter.data = parameter.data.to(torch.bfloat16)
    model.quantize_config.desc_act = False  # true: the order of the inputs is plain, see above
    model.save(job["out"])
    return {"targets": sorted(layers), "fallback": fallback}


def _fallback(log: list[dict[str, Any]], names: list[str]) -> list[str]:
    """Layers that it rounded to nearest: their log says so in the place of a loss."""
    rounded = {f".{row['layer']}.{row['module']}" for row in log if "fallback" in str(row.get("loss"))}
    return sorted(name for name in names if name.endswith(tuple(rounded)))


def _refuse_mixed_groups(layers: dict[str, Any], group_size: int) -> None:
    """Order by activation with groups fixed beforehand leaves every input in its own group; engines rely on it."""
    for name, layer in layers.items():
        if not torch.equal(layer.g_idx.cpu(), torch.arange(len(layer.g_idx), dtype=torch.int32) // group_size):
            raise ValueError(f"the inputs of {name} are not grouped in order")
