"""Worker: log-probabilities of windows of token ids under a checkpoint, in plain transformers.

Job: {checkpoint: folder, windows: [[id, ...], ...], threads: n}. Result: {float32: [[nats, ...], ...], bfloat16: the
same of the first window alone}: it only serves to see what rounding does, and bfloat16 is slow on many CPUs.
Quantized weights are expanded by compressed-tensors, or out of a GGUF file; activations are rounded as the checkpoint
says.
"""

from functools import cache
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import AutoModelForCausalLM, GgufConfig


def main(job: dict[str, Any], emit: Any) -> dict[str, Any]:
    torch.set_num_threads(job["threads"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result: dict[str, Any] = {}
    every = job["windows"]
    for name, dtype, windows in (("float32", torch.float32, every), ("bfloat16", torch.bfloat16, every[:1])):
        emit("progress", text=f"transformers, {name}")
        model = load(Path(job["checkpoint"]), dtype).to(device).eval()
        result[name] = [score(model, window, device) for window in windows]
    return result


def load(folder: Path, dtype: torch.dtype) -> Any:
    """The checkpoint; the weights of a GGUF file expanded."""
    if not (folder / "model.gguf").exists():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    gguf.GGUFReader = cache(gguf.GGUFReader)  # transformers reads the header four times over
    gguf.get_tensor_name_map = cache(gguf.get_tensor_name_map)
    config = GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=dtype, quantization_config=config)


def score(model: Any, window: list[int], device: str) -> list[float]:
    """Log-probability of each token after the first, given those before it."""
    ids = torch.tensor([window], device=device)
    with torch.inference_mode():
        logits = model(ids).logits[0, :-1].float()
    return [float(x) for x in logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]]
