"""SGLang, on NVIDIA GPUs: its start command, and what it says was really served.

Written to its documentation (server arguments, native API, production metrics) and its source, and not run: no machine
of this project had a GPU for it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qserve.artifacts import Machine, Memory, ServerFacts
from qserve.errors import PreflightError
from qserve.serve.engine import Setting, Subject
from qserve.serve.info import probe
from qserve.serve.kv_cache import context_length, kv_bytes_per_token
from qserve.serve.server import Launch, Server
from qserve.serve.vllm import choose_dtype
from qserve.variants import Bitsandbytes, Gguf, Variant

COUNTERS = {
    "running": ("sglang:num_running_reqs",), "waiting": ("sglang:num_queue_reqs",),
    "prefix_queries": ("sglang:prompt_tokens_total",), "prefix_hits": ("sglang:cached_tokens_total",),
}  # fmt: skip


@dataclass(frozen=True)
class Sglang:
    """The engine. `python` has SGLang in it; `runtime` is the digest of that environment."""

    python: Path
    runtime: str
    dtype: str
    context: int
    memory_share: float | None  # of the GPU, for weights and KV cache; None: SGLang's own choice
    tensor_parallel: int
    data_parallel: int
    prefix_caching: bool
    token_bytes: int | None  # of KV cache, a token
    extra_args: tuple[str, ...]
    start_timeout_s: float

    @property
    def name(self) -> Literal["sglang"]:
        return "sglang"

    @property
    def identity(self) -> str:
        return repr(self)

    def unservable(self, variant: Variant) -> str | None:
        return unservable(variant)

    def launch(self, subject: Subject, at: tuple[str, int]) -> Launch:
        host, port = at
        argv = [
            str(self.python), "-m", "sglang.launch_server", "--model-path", str(subject.folder),
            "--served-model-name", subject.name, "--host", host, "--port", str(port), "--dtype", self.dtype,
            "--context-length", str(self.context), "--tp-size", str(self.tensor_parallel),
            "--dp-size", str(self.data_parallel), "--enable-metrics", "--log-level", "info",
        ]  # fmt: skip
        if self.memory_share is not None:
            argv += ["--mem-fraction-static", str(self.memory_share)]
        if not self.prefix_caching:
            argv.append("--disable-radix-cache")
        env = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        return Launch(
            "sglang", (*argv, *self.extra_args), env, host, port, subject.name, self.start_timeout_s,
            counters=COUNTERS,
        )  # fmt: skip

    def facts(self, server: Server, log_name: str) -> ServerFacts:
        info = probe(server.url)
        return ServerFacts(
            engine="sglang", version=info.version, command=server.launch.argv, env=dict(server.launch.env),
            dtype=info.dtype, quantization=info.quantization, kernels=(), startup_s=server.startup_s, log=log_name,
        )  # fmt: skip

    def memory(self, server: Server, disk_bytes: int, peak_bytes: int | None) -> Memory:
        tokens = probe(server.url).kv_capacity_tokens
        return Memory(
            disk_bytes=disk_bytes, loaded_bytes=None, kv_capacity_tokens=tokens,
            kv_bytes=tokens * self.token_bytes if tokens is not None and self.token_bytes else None,
            peak_bytes=peak_bytes,
        )  # fmt: skip


def unservable(variant: Variant) -> str | None:
    """Why it cannot serve this format; None where it can."""
    match variant:
        case Gguf():
            return "sglang is not set up for GGUF files; use --engine llama-server"
        case Bitsandbytes():
            return "sglang is not set up for bitsandbytes checkpoints; use --engine transformers"
        case _:
            return None


def need_gpu(machine: Machine) -> None:
    """Raises PreflightError on a machine without one."""
    if machine.flavour != "cuda":
        raise PreflightError("sglang needs an NVIDIA GPU, and this machine shows none; use vllm or llama-server here")


def open_sglang(python: Path, runtime: str, setting: Setting) -> Sglang:
    """The engine with its settings chosen. Alone on the machine SGLang fits its own memory share."""
    serving, servers = setting.serving, setting.room.servers
    dtype = choose_dtype(serving, setting.machine)
    return Sglang(
        python, runtime, dtype, context_length(setting.config, serving.max_model_len),
        None if servers == 1 else round(0.85 / servers, 3), serving.tensor_parallel, serving.data_parallel,
        serving.prefix_caching, kv_bytes_per_token(setting.config, dtype),
        serving.extra_args if serving.engine == "sglang" else (), serving.start_timeout_s,
    )  # fmt: skip
