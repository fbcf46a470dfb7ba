"""Worker: read a checkpoint's quantization_config with the compressed-tensors of the environment that will serve it.

The writer is newer than the reader, so what it writes is parsed by the reader before the checkpoint is kept.
job: quantization_config. Imports nothing of qserve; raises if it is not understood.
"""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from compressed_tensors.quantization import QuantizationConfig

Emit = Callable[..., None]


def main(job: dict[str, Any], emit: Emit) -> dict[str, Any]:
    config = QuantizationConfig.model_validate(job["quantization_config"])
    return {"groups": len(config.config_groups), "compressed-tensors": version("compressed-tensors")}
