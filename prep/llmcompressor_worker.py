"""Worker: quantize one checkpoint with llm-compressor. Imports nothing of qserve; runs in its own environment.

job: source (bf16 folder), out (folder), calibration (JSON file of token-id lists, or None), samples, dtype ("float32"
or "bfloat16", in which calibration computes), threads, method, weights, input_activations and kv_cache (fields of
compressed-tensors' QuantizationArgs, or None), ignore, own_ignore (those that the user wrote), max_fallback; grid for
AWQ; dampening and smooth (strength or None) for GPTQ.

Weights are quantized against scales that are already rounded to bfloat16, because that is how they are stored and
served.
"""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_range
from compressed_tensors.utils import match_named_modules
from compressed_tensors.utils.impl_backend import ImplBackend
from llmcompressor import oneshot
from llmcompressor.core import LifecycleCallbacks
from llmcompressor.modeling.moe.linearize import get_linearized_moes
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.gptq.helpers import column_scale_window
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.observers.base import Observer
from llmcompressor.pipelines.cache import IntermediatesCache
from llmcompressor.pipelines.sequential import pipeline as sequential
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GenerationConfig

Emit = Callable[..., None]
BATCH_TOKENS = 2048


def main(job: dict[str, Any], emit: Emit) -> dict[str, Any]:
    torch.set_num_threads(job["threads"])
    if not torch.accelerator.is_available():
        IntermediatesCache.pin_memory = lambda *_: None  # it asks for an accelerator that is not there
        _quick_columns()
    _round_scales()
    fallback = _collect_fallback()
    _refuse_idle_awq()
    _report_layers(emit)
    emit("step", text="loading the model")
    model = AutoModelForCausalLM.from_pretrained(job["source"], dtype=getattr(torch, job["dtype"]))
    _refuse_broken_weights(model)
    _refuse_idle_patterns(model, job["own_ignore"])
    if torch.accelerator.is_available() and job["calibration"] is None:
        model.to(torch.accelerator.current_accelerator())
    oneshot(model=model, recipe=_modifiers(job), **_calibration(job))
    targets = sorted(name for name, module in model.named_modules() if _is_quantized(module))
    if not targets:
        raise ValueError("no layer matched: the variant would not be quantized at all")
    _refuse_mostly_rounded(fallback, len(targets), job["max_fallback"])
    # transformers joins experts into one tensor a layer, and cannot do that with every quantized format: such a model
    # is tried here, before it is written
    forward = _forward(model) if get_linearized_moes(model) else None
    emit("step", text="saving")
    _store_as_bf16(model)
    model.save_pretrained(job["out"], save_compressed=True, max_shard_size="5GB")
    emit("written")
    del model
    if forward is None:
        emit("step", text="loading the result")
        forward = _forward(_reload(job["out"]))
    return {"targets": targets, "fallback": sorted(set(fallback)), "forward": forward}


def _modifiers(job: dict[str, Any]) -> list[Any]:
    """The recipe, with every scheme spelled out: no preset that a release could change."""
    activations = job["input_activations"]
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**job["weights"]),
        input_activations=QuantizationArgs(**activations) if activations else None,
    )
    common = {"config_groups": {"group_0": scheme}, "ignore": job["ignore"]}
    if job["kv_cache"]:
        common["kv_cache_scheme"] = QuantizationArgs(**job["kv_cache"])
    match job["method"]:
        case "awq":
            return [AWQModifier(n_grid=job["grid"]), QuantizationModifier(**common)]
        case "gptq":
            actorder = job["weights"].get("actorder")
            smooth = [SmoothQuantModifier(smoothing_strength=job["smooth"])] if job["smooth"] else []
            return [*smooth, GPTQModifier(dampening_frac=job["dampening"], actorder=actorder, **common)]
        case "fp8" | "rtn" | "nvfp4" | "mxfp4":
            return [QuantizationModifier(**common)]
        case other:
            raise ValueError(f"unknown method {other!r}")


def _calibration(job: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `oneshot` that hand it the samples. Samples of one length share a batch, so nothing is padded."""
    if job["calibration"] is None:
        return {}
    samples = json.loads(Path(job["calibration"]).read_text())[: job["samples"]]
    batches = list(_batches(samples))
    loader: Any = DataLoader(
        batches,
        batch_size=None,
        collate_fn=lambda ids: {"input_ids": torch.tensor(ids), "attention_mask": torch.ones_like(torch.tensor(ids))},
    )
    return {"dataset": loader, "num_calibration_samples": len(batches)}


def _batches(samples: list[list[int]]) -> Iterator[list[list[int]]]:
    """Samples of equal length together, up to BATCH_TOKENS: a batch each costs a thread wake-up for every operation."""
    by_length: dict[int, list[list[int]]] = {}
    for ids in samples:
        by_length.setdefault(len(ids), []).append(ids)
    for length, group in by_length.items():
        size = max(1, BATCH_TOKENS // length)
        yield from (group[start : start + size] for start in range(0, len(group), size))


def _round_scales() -> None:
    """Round every scale to bfloat16 when it is computed, so that rounding of weights sees the scale that is stored."""
    original = Observer.get_qparams

    def rounded(self: Any) -> Any:
        found = original(self)
        return {**found, "scale": found["scale"].to(torch.bfloat16).to(found["scale"].dtype)}

    Observer.get_qparams = rounded


def _quick_columns() -> None:
    """GPTQ's inner loop for a CPU, registered as llm-compressor provides for: the same operations in the same order, so
    the same bits, on columns that lie together in memory. It takes integers; floats go the library's own way.
    """

    def on_cpu(W1: torch.Tensor, *_: Any, quant_args: QuantizationArgs, **__: Any) -> bool:
        return bool(W1.device.type == "cpu" and quant_args.type == "int")

    @ImplBackend.register("gptq_block_update", on_cpu, 0)  # type: ignore[untyped-decorator]
    def qserve_gptq_columns(
        W1: torch.Tensor, Hinv1: torch.Tensor, Q1: torch.Tensor, Err1: torch.Tensor, losses1: torch.Tensor,
        *, scale: Any, zero_point: Any, global_scale: Any, g_idx: Any, quant_args: QuantizationArgs, i1: int,
    ) -> None:  # fmt: skip
        rows, width = W1.shape[1:]  # W1: (layers of one shape, output channels, columns of this block)
        window = {"num_rows": rows, "i1": i1, "i2": i1 + width}
        steps, zeros = column_scale_window(scale, zero_point, global_scale, g_idx, quant_args, **window)
        low, high = (float(bound) for bound in calculate_range(quant_args, W1.device))

        def columns(values: torch.Tensor) -> torch.Tensor:
            return values.expand_as(W1).transpose(1, 2).contiguous()

        work, steps = columns(W1), columns(steps)
        zeros = None if zeros is None else columns(zeros).to(steps.dtype)
        rounded, errors = torch.empty_like(work), torch.empty_like(work)
        for i in range(width):
            column = rounded[:, i]
            torch.div(work[:, i], steps[:, i], out=column)
            if zeros is not None:
                column += zeros[:, i]
            column.clamp_(low, high).round_()
            if zeros is not None:
                column -= zeros[:, i]
            column *= steps[:, i]
            torch.sub(work[:, i], column, out=errors[:, i])
            errors[:, i] /= Hinv1[:, i, i, None]
            if i + 1 < width:
                work[:, i + 1 :] -= errors[:, i, None] * Hinv1[:, i, i + 1 :, None]
        Q1.copy_(rounded.transpose(1, 2))
        Err1.copy_(errors.transpose(1, 2))
        losses1.copy_(Err1.square())


def _collect_fallback() -> list[str]:
    """Names of the modules that GPTQ rounds to nearest because their Hessian cannot be factored; it fills as it runs.

    llm-compressor only logs a summary, then clears its list.
    """
    names: list[str] = []
    original = GPTQModifier._log_rtn_fallback_summary

    def summary(self: Any) -> None:
        names.extend(self._rtn_fallback_module_names)
        original(self)

    GPTQModifier._log_rtn_fallback_summary = summary
    return names


def _refuse_mostly_rounded(fallback: list[str], layers: int, limit: float) -> None:
    share = len(set(fallback)) / layers
    if share > limit:
        raise ValueError(
            f"GPTQ rounded {len(set(fallback))} of {layers} layers to nearest, because their Hessian could not be "
            f"factored (limit {limit:.0%}); use more and more varied calibration samples, or a larger dampening"
        )


def _report_layers(emit: Emit) -> None:
    """Emit `layer` events: how many of the model's sequential parts are done."""
    total, done = [0], [0]
    trace, end = sequential.trace_subgraphs, LifecycleCallbacks.sequential_epoch_end

    def traced(*args: Any, **kwargs: Any) -> Any:
        parts = trace(*args, **kwargs)
        total[0], done[0] = len(parts), 0
        return parts

    def ended(*args: Any, **kwargs: Any) -> Any:
        out = end(*args, **kwargs)
        done[0] += 1
        if total[0]:
            emit("layer", done=done[0], total=total[0])
        return out

    sequential.trace_subgraphs = traced
    LifecycleCallbacks.sequential_epoch_end = ended


def _refuse_broken_weights(model: Any) -> None:
    for name, tensor in model.named_parameters():
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"the source weight {name} holds NaN or infinity")


def _refuse_idle_patterns(model: Any, patterns: list[str]) -> None:
    """A pattern that matches nothing is a typo, and the layer that was meant would be quantized."""
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    for pattern in patterns:
        if next(match_named_modules(model, [pattern]), None) is None:
            raise ValueError(f"ignore: {pattern!r} matches no layer; layers are called {', '.join(linear[:2])}, ...")


def _refuse_idle_awq() -> None:
    """Where no smoothing was found for an architecture, AWQ would be plain rounding under another name."""
    original = AWQModifier._set_resolved_mappings

    def resolved(self: Any, model: Any) -> None:
        original(self, model)
        if not self._resolved_mappings:
            raise ValueError("AWQ knows no scaling for this architecture, so it would only round; use gptq")

    AWQModifier._set_resolved_mappings = resolved


def _is_quantized(module: Any) -> bool:
    scheme = getattr(module, "quantization_scheme", None)
    return isinstance(module, torch.nn.Linear) and scheme is not None and scheme.weights is not None


def _store_as_bf16(model: Any) -> None:
    """Cast everything but the weights that are still to be packed, and say so in the config."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name.endswith("global_scale"):  # NVFP4: float32, and rounding would move a whole tensor
                continue
            if parameter.dtype == torch.float32 and not (name == "weight" and _is_quantized(module)):
                parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.generation_config = GenerationConfig()  # the source's own file is carried over, and need not pass a check


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
    with torch.no_grad():
        logits = model(input_ids=ids).logits.float()
    spread = float(logits.std())
    if not math.isfinite(spread) or spread == 0:
        raise ValueError("the quantized model gives logits that are not finite, or all the same")
    return {"logit_std": spread}
