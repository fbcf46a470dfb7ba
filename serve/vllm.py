"""vLLM: the best safe settings for a machine, its start command, and what its log says was really served.

Settings that were measured against plain defaults are in docs/measurements.md. On a CPU:
    threads      every physical core computes; vLLM's own `auto` keeps one for the API server, half of a 2-core machine
    dtype        float32 where the CPU multiplies no bfloat16 (x86 without AVX-512): there it has a slow kernel only
    int4         with bfloat16 activations, as W4A16 says: with AMX vLLM's own default rounds them to int8 (W4A8), which
                 the gate rightly calls not faithful
    allocator    tcmalloc, preloaded, where the system has it
    OpenMP       Intel's, preloaded, on a CPU with AVX-512, Intel's or AMD's
    KV cache     a share of the free memory, and at least one request of full length
On CUDA vLLM's defaults are good; only the memory share is set, so that two servers fit side by side.
"""

import os
import re
from collections.abc import Mapping
from ctypes.util import find_library
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from qserve.artifacts import Machine, Memory, ServerFacts
from qserve.errors import PreflightError
from qserve.machine import core_ids
from qserve.recipe import Serving, StartQuantization
from qserve.serve.engine import Room, Setting, Subject
from qserve.serve.kv_cache import GIB, context_length, kv_bytes_per_token
from qserve.serve.server import Launch, Server
from qserve.serve.vllm_limits import too_few_gpus, unquantizable
from qserve.serve.vllm_limits import unservable as unservable
from qserve.variants import Bf16, Variant

# what its counters are called in /metrics
COUNTERS = {
    "running": ("vllm:num_requests_running",), "waiting": ("vllm:num_requests_waiting",),
    "prefix_queries": ("vllm:prefix_cache_queries_total",), "prefix_hits": ("vllm:prefix_cache_hits_total",),
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Every choice that a start of vLLM depends on, made. The same for all variants of a recipe."""

    dtype: str
    max_model_len: int
    kv_cache_bytes: int | None  # CPU: reserved at start
    memory_share: float | None  # CUDA: --gpu-memory-utilization
    compile: bool
    prefix_caching: bool
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    executor: Literal["auto", "mp", "ray"]
    quantization: StartQuantization | None  # at start-up, of unquantized checkpoints
    threads: tuple[int, ...]  # CPU ids that compute, empty on CUDA
    allocator: str | None  # CPU: tcmalloc, preloaded
    intel_openmp: bool  # CPU: preloaded, where the environment brings it along
    max_logprobs: int
    extra_args: tuple[str, ...]
    start_timeout_s: float


@dataclass(frozen=True)
class Vllm:
    """The engine. `python` has vLLM in it; `runtime` is the digest of that environment."""

    python: Path
    runtime: str
    machine: Machine
    settings: Settings
    token_bytes: int | None  # of KV cache, a token

    @property
    def name(self) -> Literal["vllm"]:
        return "vllm"

    @property
    def identity(self) -> str:
        return f"{self.runtime} {replace(self.settings, kv_cache_bytes=None)}"

    def unservable(self, variant: Variant) -> str | None:
        return unservable(variant, self.machine)

    def launch(self, subject: Subject, at: tuple[str, int]) -> Launch:
        launch = launch_vllm(self.python, subject.folder, subject.name, self.settings, at)
        if self.settings.quantization is None or not isinstance(subject.variant, Bf16):
            return launch
        return replace(launch, argv=(*launch.argv, "--quantization", self.settings.quantization))

    def facts(self, server: Server, log_name: str) -> ServerFacts:
        return facts(server, log_name)

    def memory(self, server: Server, disk_bytes: int, peak_bytes: int | None) -> Memory:
        return memory(server, disk_bytes, peak_bytes, self.token_bytes)


def open_vllm(python: Path, runtime: str, setting: Setting) -> Vllm:
    """The engine with its settings chosen. Raises PreflightError where there is no room for it."""
    settings = choose_settings(setting.serving, setting.config, setting.machine, setting.room)
    return Vllm(python, runtime, setting.machine, settings, kv_bytes_per_token(setting.config, settings.dtype))


def choose_settings(serving: Serving, config: Mapping[str, object], machine: Machine, room: Room) -> Settings:
    """The settings for this model on this machine; `config` is the checkpoint's config.json.

    Raises:
        PreflightError: the KV cache has no room for one request of `max_model_len` tokens, there are too few GPUs, or
            it cannot quantize as it is asked to at start-up.
    """
    if reason := too_few_gpus(serving, machine) or unquantizable(serving.quantization, machine):
        raise PreflightError(reason)
    dtype = choose_dtype(serving, machine)
    length = context_length(config, serving.max_model_len)
    cuda = machine.flavour == "cuda"
    one_request = (kv_bytes_per_token(config, dtype) or 0) * length
    return Settings(
        dtype=dtype,
        max_model_len=length,
        kv_cache_bytes=None if cuda else _kv_cache_bytes(serving, one_request, room),
        memory_share=round(0.9 / room.servers, 3) if cuda else None,
        compile=serving.compile != "off",
        prefix_caching=serving.prefix_caching,
        tensor_parallel=serving.tensor_parallel,
        pipeline_parallel=serving.pipeline_parallel,
        data_parallel=serving.data_parallel,
        executor=serving.executor,
        quantization=serving.quantization,
        threads=() if cuda else core_ids(),
        allocator=None if cuda else tcmalloc(),
        intel_openmp=not cuda and "avx512f" in machine.isa,
        max_logprobs=1024,
        extra_args=serving.extra_args if serving.engine == "vllm" else (),
        start_timeout_s=serving.start_timeout_s,
    )


def choose_dtype(serving: Serving, machine: Machine) -> str:
    """What the recipe asks for, else what this machine multiplies fastest."""
    if serving.dtype != "auto":
        return serving.dtype
    multiplies_bf16 = {"avx512f", "amx_tile", "bf16", "asimd"} & set(machine.isa)
    return "bfloat16" if machine.flavour == "cuda" or multiplies_bf16 else "float32"


def _kv_cache_bytes(serving: Serving, one_request: int, room: Room) -> int:
    """Whole GiB, which is what vLLM's CPU backend takes."""
    if serving.kv_cache_gib is not None:
        chosen = serving.kv_cache_gib * GIB
        if (fits := int((room.free_bytes / room.servers - room.weight_bytes) // GIB)) < serving.kv_cache_gib:
            raise PreflightError(
                f"serving.kv_cache_gib is {serving.kv_cache_gib}, and of the memory that is free now "
                f"({room.free_bytes / GIB:.1f} GiB) {max(fits, 0)} fit beside the weights; set less, or free memory"
            )
    else:
        # a server needs its weights about twice while it loads (packed and not), and 2 GiB for itself
        spare = room.free_bytes / room.servers - 2 * room.weight_bytes - 2 * GIB
        chosen = int(min(max(0.4 * spare, 0) // GIB, 64)) * GIB
    if chosen < max(one_request, GIB):
        fits = int(chosen / one_request * (serving.max_model_len or 0)) if one_request else 0
        remedy = f"set serving.max_model_len to at most {fits}, or free memory" if fits else "free memory"
        raise PreflightError(
            f"no room for the KV cache: a request of full length needs {one_request / GIB:.2f} GiB, at least 1 GiB is "
            f"reserved, and {chosen / GIB:.2f} GiB is available; {remedy}"
        )
    return chosen


def launch_vllm(python: Path, checkpoint: Path, name: str, settings: Settings, at: tuple[str, int]) -> Launch:
    """The command that serves `checkpoint` under the model id `name`. `at` is (host, port)."""
    host, port = at
    argv = [
        str(python), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(checkpoint), "--served-model-name", name,
        "--host", host, "--port", str(port),
        "--dtype", settings.dtype,
        "--max-model-len", str(settings.max_model_len),
        "--tensor-parallel-size", str(settings.tensor_parallel),
        "--max-logprobs", str(settings.max_logprobs),
        "--enable-prefix-caching" if settings.prefix_caching else "--no-enable-prefix-caching",
        "--uvicorn-log-level", "warning",
    ]  # fmt: skip
    if settings.pipeline_parallel > 1:
        argv += ["--pipeline-parallel-size", str(settings.pipeline_parallel)]
    if settings.data_parallel > 1:
        argv += ["--data-parallel-size", str(settings.data_parallel)]
    if settings.executor != "auto":
        argv += ["--distributed-executor-backend", settings.executor]
    if not settings.compile:
        argv.append("--enforce-eager")
    if settings.memory_share is not None:
        argv += ["--gpu-memory-utilization", str(settings.memory_share)]
    return Launch(
        "vllm", (*argv, *settings.extra_args), _env(settings, python), host, port, name, settings.start_timeout_s,
        counters=COUNTERS, scoring="prompt_logprobs", echoes=True,
    )  # fmt: skip


def _env(settings: Settings, python: Path) -> dict[str, str]:
    """Local files only, no usage reports; on a CPU the cores, the KV cache and the OpenMP library."""
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
    if settings.threads:
        env["VLLM_CPU_INT4_W4A8"] = "0"  # with AMX it would round the activations of a W4A16 checkpoint to int8
        env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in settings.threads)
    if settings.kv_cache_bytes is not None:
        env["VLLM_CPU_KVCACHE_SPACE"] = str(settings.kv_cache_bytes // GIB)
    if preloaded := _preloaded(settings, python):
        env["LD_PRELOAD"] = ":".join(preloaded)
    return env


def _preloaded(settings: Settings, python: Path) -> list[str]:
    """Libraries to load first, the user's own before them; none where there is nothing of ours to add."""
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    ours = [settings.allocator] if settings.allocator else []
    ours += [str(openmp)] if settings.intel_openmp and openmp.is_file() else []
    return [text for text in (os.environ.get("LD_PRELOAD"), *ours) if text] if ours else []


def tcmalloc() -> str | None:
    """The allocator's library, if the system has it (Debian: libtcmalloc-minimal4); vLLM's CPU wheel lacks it."""
    return find_library("tcmalloc_minimal") or find_library("tcmalloc")


# --- what the log says ----------
def facts(server: Server, log_name: str) -> ServerFacts:
    """What is really served, from the server's own log."""
    text = server.log_text()
    return ServerFacts(
        engine="vllm",
        version=_find(r"V1 LLM engine \(v([^)]+)\)", text),
        command=server.launch.argv,
        env=dict(server.launch.env),
        dtype=_find(r"dtype=torch\.(\w+)", text),
        quantization=_find(r"[ ,]quantization=([\w-]+)", text),
        kernels=kernels(text),
        startup_s=server.startup_s,
        log=log_name,
    )


def kernels(text: str) -> tuple[str, ...]:
    """Kernels that the log names, each once, in order; what a kernel or a dense layer falls back to is said as well."""
    named = re.findall(r"(?:Selected|Using) (\w+Kernel) (?:for|to)\b", text)
    named += [f"{name} (fall-back)" for name in re.findall(r"falling back to (\w+Kernel)\b", text)]
    named += re.findall(r"CPU unquantized GEMM dispatch: using ([\w. -]+)", text)
    if "Failed to create oneDNN linear" in text:
        named.append("torch linear (oneDNN refused)")
    return tuple(dict.fromkeys(name.strip() for name in named))


def memory(server: Server, disk_bytes: int, peak_bytes: int | None, kv_token_bytes: int | None) -> Memory:
    """Weights, KV cache and peak in separate columns. `kv_token_bytes` as of `kv_bytes_per_token`."""
    text = server.log_text()
    loaded = re.search(r"Model loading took ([\d.]+) GiB", text)
    tokens = re.search(r"KV cache size: ([\d,]+) tokens", text)
    capacity = int(tokens[1].replace(",", "")) if tokens else None
    return Memory(
        disk_bytes=disk_bytes,
        loaded_bytes=int(float(loaded[1]) * GIB) if loaded else None,
        kv_capacity_tokens=capacity,
        kv_bytes=capacity * kv_token_bytes if capacity is not None and kv_token_bytes else None,
        peak_bytes=peak_bytes,
    )


def _find(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return None if match is None or match[1] == "None" else match[1]
