"""Worker: log-probabilities of windows of token ids under a checkpoint, in plain transformers.

Job: {checkpoint: folder, windows: [[id, ...], ...], threads: n, loader: file that loads a checkpoint as a plain model}.
Result: {float32: [[nats, ...], ...], bfloat16: the same of the first window alone}: it only serves to see what rounding
does, and bfloat16 is slow on many CPUs. Quantized weights are expanded, activations are rounded as the checkpoint says.
"""

import runpy
from typing import Any

import torch


def main(job: dict[str, Any], emit: Any) -> dict[str, Any]:
    torch.set_num_threads(job["threads"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    load = runpy.run_path(job["loader"])["load"]
    result: dict[str, Any] = {}
    every = job["windows"]
    for name, dtype, windows in (("float32", torch.float32, every), ("bfloat16", torch.bfloat16, every[:1])):
        emit("progress", text=f"transformers, {name}")
        model = load(job["checkpoint"], dtype).to(device)
        result[name] = [score(model, window, device) for window in windows]
    return result


def score(model: Any, window: list[int], device: str) -> list[float]:
    """Log-probability of each token after the first, given those before it."""
    ids = torch.tensor([window], device=device)
    with torch.inference_mode():
        logits = model(ids).logits[0, :-1].float()
    return [float(x) for x in logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]]
