"""Run in bitsandbytes' environment: each checkpoint by its kernels and by the definition. Imports nothing of qserve.

job: checkpoints (folders), source (of both), loader (file that loads one), ids. Result: found, one a checkpoint: gap
(mean absolute difference of log-probabilities, nats), apart (the same between the definition and the source: what the
gap is to be small beside), layers (class names of the linear layers that the server computes with).
"""

import runpy
from typing import Any

import torch


def main(job: dict[str, Any], emit: Any) -> dict[str, Any]:
    file = runpy.run_path(job["loader"])
    ids = torch.tensor([job["ids"]])
    plain = _logprobs(file["load"](job["source"], torch.float32), ids)
    found = []
    for folder in job["checkpoints"]:
        served, defined = file["load_to_serve"](folder, torch.float32, "cpu"), file["load"](folder, torch.float32)
        layers = {type(module).__name__ for module in served.modules() if isinstance(module, torch.nn.Linear)}
        expanded = _logprobs(defined, ids)
        gap = (_logprobs(served, ids) - expanded).abs().mean()
        apart = (plain - expanded).abs().mean()
        found.append({"gap": float(gap), "apart": float(apart), "layers": sorted(layers)})
    return {"found": found}


def _logprobs(model: Any, ids: Any) -> Any:
    with torch.inference_mode():
        return model(ids).logits.float().log_softmax(-1)
