"""Make a GGUF checkpoint of the baseline: one weight file, and beside it what every checkpoint carries.

From the bfloat16 baseline, also where the source itself is a GGUF file: every variant starts from the same weights.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from qserve.artifacts import MANIFEST_NAME
from qserve.errors import WorkerError
from qserve.llama_cpp import ensure_llama_cpp
from qserve.prep.context import Context
from qserve.prep.gguf_tokenizer import carry_tokenizer, misread_tokenizer
from qserve.prep.headers import INDEX, read_folder
from qserve.prep.verify import parameters
from qserve.prep.verify_gguf import GgufFound, verify_gguf
from qserve.recipe import source_text
from qserve.variants import Gguf

GGUF_NAME = "model.gguf"


@dataclass(frozen=True)
class GgufMade:
    found: GgufFound
    llama_cpp: str  # its build number
    wall_s: float
    peak_memory_bytes: int | None


def make_gguf(
    context: Context, name: str, variant: Gguf, baseline: Path, folder: Path, came_in: Path | None
) -> GgufMade:
    """Fill `folder`. `came_in`: the GGUF file that the model came in, whose tokenizer is then taken.

    Raises:
        WorkerError: the conversion failed, or what it wrote is not right.
    """
    llama_cpp = ensure_llama_cpp(context.machine.flavour, context.say)
    job = {
        "source": str(baseline), "out": str(folder / GGUF_NAME), "type": variant.type.upper(),
        "name": source_text(context.recipe.model).rstrip("/").rsplit("/", 1)[-1], "work": str(folder),
        "converter": str(llama_cpp.converter), "quantize": str(llama_cpp.quantize), "threads": context.threads,
    }  # fmt: skip
    result = context.run(name, "to_gguf_worker.py", job)
    if came_in is not None:
        carry_tokenizer(came_in, folder / GGUF_NAME)
    (folder / GGUF_NAME).chmod(0o644)
    for path in baseline.rglob("*"):
        if path.is_file() and path.suffix != ".safetensors" and path.name not in (INDEX, MANIFEST_NAME):
            target = folder / path.relative_to(baseline)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    if wrong := misread_tokenizer(folder / GGUF_NAME, baseline):
        raise WorkerError(f"{name}: the checkpoint is not right and was not kept: {wrong}")
    found = verify_gguf(name, folder / GGUF_NAME, variant.type, parameters(read_folder(baseline)))
    return GgufMade(found, llama_cpp.version, result["wall_s"], result["peak_memory_bytes"])
