"""Worker: how far the first layers of a checkpoint are from another's, beside what rounding to nearest does to them.
Imports nothing of qserve.

job: checkpoint, baseline (folders), layers, ids (one sample of token ids), bits, group_size (None: a scale a row),
symmetric, targets (names of the quantized layers), loader (file that loads a checkpoint as a plain model), threads.
Result: error and rounded, each the median over tokens of |h - h0| / |h0|: of the checkpoint, and of the baseline with
its targets rounded to nearest. The median, because the state of a first token may be huge.
"""

import runpy
from collections.abc import Callable
from typing import Any

import torch

Emit = Callable[..., None]


def main(job: dict[str, Any], emit: Emit) -> dict[str, Any]:
    torch.set_num_threads(job["threads"])
    load = runpy.run_path(job["loader"])["load"]
    ids = torch.tensor([job["ids"]])
    model = load(job["baseline"], torch.float32, job["layers"] + 1)
    plain = _states(model, ids)
    for name in job["targets"]:
        if module := dict(model.named_modules()).get(name):
            module.weight.data = _rounded(module.weight.data, job["bits"], job["group_size"], job["symmetric"])
    rounded = _states(model, ids)
    made = _states(load(job["checkpoint"], torch.float32, job["layers"] + 1, round_activations=False), ids)
    return {"error": _gap(made, plain), "rounded": _gap(rounded, plain)}


def _states(model: Any, ids: Any) -> Any:
    """[tokens, hidden] on the way into the last layer: behind it comes a norm, which would hide a wrong size."""
    with torch.inference_mode():
        return model(ids, output_hidden_states=True).hidden_states[-2][0]


def _gap(states: Any, plain: Any) -> float:
    error = (states - plain).norm(dim=-1) / plain.norm(dim=-1)
    return float(error.median()) if bool(torch.isfinite(error).all()) else float("inf")


def _rounded(weight: Any, bits: int, group_size: int | None, symmetric: bool) -> Any:
    """weight [out, in], each group of inputs rounded between its smallest and its largest value."""
    width = weight.shape[1]
    groups = weight.reshape(weight.shape[0], -1, group_size if group_size and width % group_size == 0 else width)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    step = ((high - low) / (2**bits - 1)).clamp(min=1e-10)
    zero = (-low / step).round()
    q = ((groups / step).round() + zero).clamp(0, 2**bits - 1)
    return ((q - zero) * step).reshape(weight.shape)
