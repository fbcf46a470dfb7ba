"""Worker: turn a GGUF file into an ordinary bfloat16 checkpoint folder. Imports nothing of qserve.

job: gguf (path), out (folder), special (token ids that the file's header names: bos, eos, pad, unk).

transformers does the conversion. It reads the header four times over, one numpy call a byte run, so the reader is
kept and given plain arrays: 120 s become 20 s for a vocabulary of 49,152 tokens, with the same result.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

Emit = Callable[..., None]


class PlainReader(gguf.GGUFReader):  # type: ignore[misc]
    """A reader whose data is a plain array: slicing a numpy memory map costs ten times as much."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)


def main(job: dict[str, Any], emit: Emit) -> dict[str, Any]:
    gguf.GGUFReader = cache(PlainReader)
    gguf.get_tensor_name_map = cache(gguf.get_tensor_name_map)
    folder, name = Path(job["gguf"]).parent, Path(job["gguf"]).name
    emit("step", text="reading the tokenizer out of the GGUF file")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    _name_special_tokens(tokenizer, job["special"])
    emit("step", text="unpacking the weights")
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    _check_special_tokens(model, job["special"])
    emit("step", text="saving")
    model.save_pretrained(job["out"], max_shard_size="5GB")
    tokenizer.save_pretrained(job["out"])
    _drop_noise(Path(job["out"]) / "config.json")
    return {"parameters": sum(p.numel() for p in model.parameters())}


def _name_special_tokens(tokenizer: Any, special: dict[str, int]) -> None:
    """Take bos, eos, pad and unk from the file's header: the conversion guesses them by position and can be wrong."""
    for role, token_id in special.items():
        setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(token_id))
    for role, token_id in special.items():
        if getattr(tokenizer, f"{role}_token_id") != token_id:
            raise ValueError(f"the tokenizer does not take token {token_id} as its {role} token")
        tokenizer.init_kwargs.pop(f"{role}_token_id", None)


def _check_special_tokens(model: Any, special: dict[str, int]) -> None:
    """Generation must stop where the file says: write the header's ids wherever the conversion has none, or others."""
    for role in ("bos", "eos", "pad"):
        if role in special:
            setattr(model.config, f"{role}_token_id", special[role])
            setattr(model.generation_config, f"{role}_token_id", special[role])


def _drop_noise(path: Path) -> None:
    """config.json without the display name that the conversion takes for a path."""
    config = json.loads(path.read_text())
    config.pop("_name_or_path", None)
    config.pop("_model_name_or_path", None)
    path.write_text(json.dumps(config, indent=2) + "\n")
