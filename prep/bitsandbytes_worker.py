"""Worker: round a model with bitsandbytes as it is loaded. Imports nothing of qserve; runs in its own environment.

job: source (bf16 folder), out (folder), threads, type (nf4 or int8), double_quant; what else it holds is not used.

Nothing is calibrated. On a CPU the weights are packed anew for its kernel when they are first computed with, so they
are written before that.
"""

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GenerationConfig

Emit = Callable[..., None]


def main(job: dict[str, Any], emit: Emit) -> dict[str, Any]:
    torch.set_num_threads(job["threads"])
    logging.getLogger("bitsandbytes.autograd").setLevel(logging.ERROR)  # int8: a line a layer and call
    emit("step", text="loading and rounding")
    model = AutoModelForCausalLM.from_pretrained(
        job["source"], dtype=torch.bfloat16, quantization_config=_config(job["type"], job["double_quant"])
    )
    targets = sorted(name for name, module in model.named_modules() if isinstance(module, Linear4bit | Linear8bitLt))
    if not targets:
        raise ValueError("no layer was found to quantize")
    emit("step", text="saving")
    model.generation_config = GenerationConfig()  # the source's own file is carried over, and need not pass a check
    model.save_pretrained(job["out"], max_shard_size="5GB")
    del model
    emit("step", text="loading the result")
    return {"targets": targets, "fallback": [], "forward": _forward(_reload(job["out"]))}


def _config(kind: str, double_quant: bool) -> Any:
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=6.0)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip


def _reload(folder: str) -> Any:
    """What was written, loaded as a user would. Raises if anything is missing or left over."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    if wrong := {kind: sorted(info[kind])[:3] for kind in kinds if info.get(kind)}:
        raise ValueError(f"the written checkpoint does not load cleanly: {wrong}")
    return model


def _forward(model: Any) -> dict[str, float]:
    """Run it on 16 ids. Raises if what comes out is not finite, or all the same."""
    ids = torch.arange(16).remainder(model.config.get_text_config().vocab_size)[None].to(model.device)
    with torch.inference_mode():
        spread = float(model(input_ids=ids).logits.float().std())
    if not math.isfinite(spread) or spread == 0:
        raise ValueError("the quantized model gives logits that are not finite, or all the same")
    return {"logit_std": spread}
