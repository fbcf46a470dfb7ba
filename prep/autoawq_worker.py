"""Worker: quantize one checkpoint with AutoAWQ. Imports nothing of qserve; runs in its own environment.

job: source (bf16 folder with a config that transformers 4 reads), out (folder), calibration (JSON file of token-id
lists), samples, dtype (in which calibration computes), threads, group_size, grid (steps of the scale search).

Stock AutoAWQ 0.2.9 writes a broken model on a CPU and says nothing: its scale search keeps the weights that it will put
back with `v.cpu()`, a copy on a GPU but the live tensor on a CPU, and multiplies them in place. Here they are copied.
Its search for clipping multiplies every token anew for each choice, as a broadcast sum; here the tokens are summed up
once.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from awq.models.auto import AWQ_CAUSAL_LM_MODEL_MAP
from awq.quantize.quantizer import AwqQuantizer
from transformers import AutoModelForCausalLM

Emit = Callable[..., None]
SHRINK_STEPS, SHRINK_OF = 10, 20  # clip at 20/20, 19/20, ... 11/20 of the largest weight, as AutoAWQ does
CLIP_TOKENS = 512


def main(job: dict[str, Any], emit: Emit) -> dict[str, Any]:
    torch.set_num_threads(job["threads"])
    emit("step", text="loading the model")
    model = _load(job["source"], getattr(torch, job["dtype"]))
    kind = model.config.model_type
    awq = AWQ_CAUSAL_LM_MODEL_MAP[kind](model, kind, False, model.config, None, None)
    samples = json.loads(Path(job["calibration"]).read_text())[: job["samples"]]
    quantizer = type("Quantizer", (CopyingQuantizer,), {"grid": job["grid"], "emit": staticmethod(emit)})
    awq.quantize(
        None, {"zero_point": True, "q_group_size": job["group_size"], "w_bit": 4, "version": "GEMM"},
        calib_data=samples, max_calib_samples=len(samples), max_calib_seq_len=max(map(len, samples)),
        quantizer_cls=quantizer,
    )  # fmt: skip
    emit("step", text="saving")
    for parameter in model.parameters():  # packed weights are buffers
        parameter.data = parameter.data.to(torch.bfloat16)
    awq.save_quantized(job["out"])
    return {"targets": sorted(n for n, m in model.named_modules() if hasattr(m, "qweight")), "fallback": []}


class CopyingQuantizer(AwqQuantizer):  # type: ignore[misc]
    """AutoAWQ's quantizer with the two mends above."""

    grid: int
    emit: Emit

    def _get_input_feat(self, layer: Any, named_linears: Any) -> Any:
        """Called once for each block, in order."""
        self.emit("layer", done=1 + [id(m) for m in self.modules].index(id(layer)), total=len(self.modules))
        return super()._get_input_feat(layer, named_linears)

    def _compute_best_scale(
        self, x: Any, w_mean: Any, x_mean: Any, module2inspect: Any, linears2scale: Any, fp16_output: Any, kwargs: Any
    ) -> Any:
        """The scales s of |Q(W s) (x / s) - W x|^2 that are best of `grid` steps between activations and weights."""
        originals = {name: tensor.clone() for name, tensor in module2inspect.state_dict().items()}
        best, least = None, float("inf")
        for step in range(self.grid):
            ratio = step / self.grid
            scales = (x_mean.view(-1).pow(ratio) / (w_mean.view(-1).pow(1 - ratio) + 1e-4)).clamp(min=1e-4)
            scales = scales / (scales.max() * scales.min()).sqrt()
            scales[~torch.isfinite(scales)] = 1
            for linear in linears2scale:
                linear.weight.data = self.pseudo_quantize_tensor(linear.weight.data * scales)[0] / scales
            loss = self._compute_loss(fp16_output, self._module_forward(x, module2inspect, kwargs), x.device)
            module2inspect.load_state_dict(originals)
            if loss < least:
                best, least = scales.clone(), loss
        if best is None:
            raise ValueError("no scale gives a finite output: the model or the calibration data are not finite")
        return best.cpu()

    def _compute_best_clip(self, w: Any, input_feat: Any, *_: Any, **__: Any) -> Any:
        """The largest value a group may keep, [out, groups, 1]: the one whose output over the tokens is nearest.

        |X (W' - W)|^2 over the tokens X of a group is (W' - W) X^T X (W' - W)^T, so the tokens are summed up once.
        """
        out, groups = w.shape[0], w.shape[1] // self.group_size
        x = input_feat.view(-1, input_feat.shape[-1]).to(w.device)
        x = x[:: max(1, len(x) // CLIP_TOKENS)].reshape(-1, groups, self.group_size).transpose(0, 1).float()
        gram = torch.bmm(x.transpose(1, 2), x)  # [groups, size, size]
        w = w.reshape(out, groups, self.group_size)
        largest = w.abs().amax(dim=-1, keepdim=True)
        best, least = largest.clone(), torch.full_like(largest, float("inf"), dtype=torch.float32)
        for step in range(SHRINK_STEPS):
            limit = largest * (1 - step / SHRINK_OF)
            change = (self.pseudo_quantize_tensor(w.clamp(-limit, limit))[0] - w).float().transpose(0, 1)
            error = (torch.bmm(change, gram) * change).sum(-1).T[..., None]  # [out, groups, 1]
            better = error < least
            least[better], best[better] = error[better], limit[better]
        return best


def _load(source: str, dtype: Any) -> Any:
    """The model; its config must be as it was written: transformers 4 drops what it does not know without a word."""
    model = AutoModelForCausalLM.from_pretrained(source, torch_dtype=dtype, use_cache=False)
    written, loaded = json.loads((Path(source) / "config.json").read_text()), model.config.to_dict()
    free = ("torch_dtype", "transformers_version", "use_cache")
    if wrong := [key for key, value in written.items() if key not in free and loaded.get(key) != value]:
        raise ValueError(f"transformers 4 does not read the model's config rightly: {', '.join(wrong)}")
    return model.eval()
