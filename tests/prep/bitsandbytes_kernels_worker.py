"""Run in bitsandbytes' environment: every quantized layer by its kernel and by the definition, on the same input.
Imports nothing of qserve.

job: checkpoints (folders), source (of both), loader (file that loads one), ids. Result: found, one a checkpoint: gap
(largest over layers of |kernel - definition| / |kernel|), apart (smallest of |kernel - source| / |kernel|: what the gap
is to be small beside), layers (how many), kinds (class names of the linear layers that the server computes with).

A layer at a time: where activations are rounded, a whole model makes large differences out of the smallest.
"""

import runpy
from typing import Any

import torch


def main(job: dict[str, Any], emit: Any) -> dict[str, Any]:
    file, ids = runpy.run_path(job["loader"]), torch.tensor([job["ids"]])
    source = file["load"](job["source"], torch.float32)
    with torch.inference_mode():
        return {"found": [compare(file, folder, source, ids) for folder in job["checkpoints"]]}


def compare(file: dict[str, Any], folder: str, source: Any, ids: Any) -> dict[str, Any]:
    served, defined = file["load_to_serve"](folder, torch.float32, "cpu"), file["load"](folder, torch.float32)
    seen: dict[str, Any] = {}
    linear = {name: module for name, module in served.named_modules() if isinstance(module, torch.nn.Linear)}
    for name, module in linear.items():
        if type(module) is not torch.nn.Linear:
            module.register_forward_hook(lambda _, args, out, name=name: seen.update({name: (args[0], out)}))
    served(ids)
    gaps = [_gap(defined, name, *call) for name, call in seen.items()]
    aparts = [_gap(source, name, *call) for name, call in seen.items()]
    kinds = sorted({type(module).__name__ for module in linear.values()})
    return {"gap": max(gaps), "apart": min(aparts), "layers": len(seen), "kinds": kinds}


def _gap(model: Any, name: str, x: Any, out: Any) -> float:
    return float((model.get_submodule(name)(x) - out).norm() / out.norm())
