"""Run in AutoAWQ's environment: its own searches beside the mended ones, on one layer. Imports nothing of qserve.

job: worker (file of the mended quantizer). Result: clip_differs (share of groups for which the two clip differently),
weights_left (whether each scale search leaves the layer's weights as it found them: stock, mended).
"""

import copy
import runpy
from typing import Any

import torch
from awq.quantize.quantizer import AwqQuantizer


def main(job: dict[str, Any], emit: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    mended = object.__new__(runpy.run_path(job["worker"])["CopyingQuantizer"])
    mended.group_size, mended.zero_point, mended.w_bit, mended.grid = 64, True, 4, 20
    mended.n_parallel_calib_samples, mended.max_chunk_memory = None, 2**30
    mended.duo_scaling = True
    layer = torch.nn.Linear(256, 128, bias=False)
    layer.weight.data *= torch.exp(torch.randn(256))
    x = torch.randn(4, 64, 256) * torch.exp(torch.randn(256))
    stock = AwqQuantizer._compute_best_clip(mended, layer.weight.data, x)
    quick = mended._compute_best_clip(layer.weight.data, x)
    left = []
    for search in (AwqQuantizer._compute_best_scale, type(mended)._compute_best_scale):
        own = copy.deepcopy(layer)
        with torch.no_grad():
            mean = x.abs().view(-1, 256).mean(0)
            search(mended, x, own.weight.abs().mean(0), mean, own, [own], own(x), {})
        left.append(torch.equal(own.weight, layer.weight))
    return {"clip_differs": float((stock != quick).float().mean()), "weights_left": left}
