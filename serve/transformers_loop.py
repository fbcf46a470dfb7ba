"""transformers and pipeline: the naive servers that people start with, to measure the others against.

One request at a time, no batching, no paged cache: serve/transformers_worker.py is the server. dtype and cores are
vLLM's, so that what differs is the way of serving.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qserve.artifacts import Memory, ServerFacts
from qserve.packed import LOADER
from qserve.serve.engine import Setting, Subject
from qserve.serve.kv_cache import context_length
from qserve.serve.server import Launch, Server
from qserve.serve.vllm import choose_dtype
from qserve.values import Frozen
from qserve.variants import Gguf, Variant

WORKER = Path(__file__).with_name("transformers_worker.py")
LoopName = Literal["transformers", "pipeline"]


class Serving(Frozen):
    """The line of the log in which the worker says what it serves."""

    version: str
    torch: str
    dtype: str
    quantization: str | None
    kernels: tuple[str, ...]
    loaded_bytes: int
    threads: int


@dataclass(frozen=True)
class TransformersLoop:
    """The engine. `python` has transformers in it, and bitsandbytes where it serves that; `runtime` is the digest of
    that environment."""

    name: LoopName
    python: Path
    runtime: str
    device: Literal["cpu", "cuda"]
    dtype: str
    context: int
    threads: int
    start_timeout_s: float

    @property
    def identity(self) -> str:
        return f"{self.runtime} {self.name} {self.device} {self.dtype} {self.context} {self.threads}"

    def unservable(self, variant: Variant) -> str | None:
        return unservable(variant)

    def launch(self, subject: Subject, at: tuple[str, int]) -> Launch:
        host, port = at
        argv = (
            str(self.python), str(WORKER), "--mode", self.name, "--checkpoint", str(subject.folder),
            "--loader", str(LOADER),
            "--name", subject.name, "--host", host, "--port", str(port), "--dtype", self.dtype,
            "--device", self.device, "--context", str(self.context), "--threads", str(self.threads),
        )  # fmt: skip
        # safe path: libraries that look for a `vllm` must not find serve/vllm.py beside the worker
        env = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
        env["OMP_NUM_THREADS"] = str(self.threads)
        return Launch(
            self.name, argv, env, host, port, subject.name, self.start_timeout_s, scoring="prompt_logprobs",
            echoes=self.name == "transformers",
        )  # fmt: skip

    def facts(self, server: Server, log_name: str) -> ServerFacts:
        said = read_log(server.log_text())
        return ServerFacts(
            engine=self.name, version=said and said.version, command=server.launch.argv, env=dict(server.launch.env),
            dtype=said and said.dtype, quantization=said and said.quantization, kernels=said.kernels if said else (),
            startup_s=server.startup_s, log=log_name,
        )  # fmt: skip

    def memory(self, server: Server, disk_bytes: int, peak_bytes: int | None) -> Memory:
        """There is no pool: keys and values grow with the one request that runs."""
        said = read_log(server.log_text())
        return Memory(
            disk_bytes=disk_bytes, loaded_bytes=said and said.loaded_bytes, kv_capacity_tokens=None, kv_bytes=None,
            peak_bytes=peak_bytes,
        )  # fmt: skip


def unservable(variant: Variant) -> str | None:
    """transformers computes every safetensors format that qserve writes: by bitsandbytes what that wrote, else if need
    be by expanding it."""
    if isinstance(variant, Gguf):
        return "transformers would serve the expanded weights of a GGUF file, not the file; use --engine llama-server"
    return None


def open_loop(name: LoopName, python: Path, runtime: str, setting: Setting) -> TransformersLoop:
    """The engine with its settings chosen: the machine's cores and the dtype that vLLM would take."""
    serving, machine = setting.serving, setting.machine
    return TransformersLoop(
        name, python, runtime, machine.flavour, choose_dtype(serving, machine),
        context_length(setting.config, serving.max_model_len), machine.cores, serving.start_timeout_s,
    )  # fmt: skip


def read_log(text: str) -> Serving | None:
    """What the worker said of itself; None if it has not yet."""
    line = re.search(r"^serving (\{.*\})$", text, re.MULTILINE)
    return Serving.model_validate(json.loads(line[1])) if line else None
