"""Worker: copy safetensors files with their floating-point tensors cast to bfloat16. Imports nothing of qserve.

job: files (list of [from, to]). Tensor by tensor names stay as they are; integer tensors are copied.
"""

from collections.abc import Callable
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

Emit = Callable[..., None]


def main(job: dict[str, Any], emit: Emit) -> dict[str, Any]:
    cast = 0
    for done, (source, out) in enumerate(job["files"]):
        with safe_open(source, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and tensor.dtype != torch.bfloat16:
                tensors[name] = tensor.to(torch.bfloat16)
                cast += 1
        save_file(tensors, out, metadata={"format": "pt"})
        emit("layer", done=done + 1, total=len(job["files"]))
    return {"cast": cast}
