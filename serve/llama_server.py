"""llama-server, of llama.cpp: settings for a machine, its start command, and what it says was really served.

threads    every physical core computes, for prompts and for tokens
slots      one a request that is to be expected at once; each holds the tokens of one request of full length. They are
           reserved at start, unlike vLLM's blocks, which requests share
KV cache   float16, llama.cpp's default
cache      a slot keeps its last prompt, and prompts that left their slot are kept in memory up to a limit
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx

from qserve.artifacts import Memory, ServerFacts
from qserve.errors import PreflightError
from qserve.machine import core_ids
from qserve.serve.engine import Setting, Subject
from qserve.serve.kv_cache import GIB, context_length, kv_bytes_per_token
from qserve.serve.server import Launch, Server, ask
from qserve.variants import Bitsandbytes, Gguf, Variant

MIB = 2**20
GGUF_NAME = "model.gguf"
SLOT_MULTIPLE = 256  # tokens; llama.cpp rounds up to it
OWN_BYTES = GIB // 2  # compute buffers and the rest of the process
COMMON = ("SSE3", "SSSE3", "AVX", "F16C", "FMA", "BMI2")
COUNTERS = {
    "running": ("llamacpp:requests_processing",), "waiting": ("llamacpp:requests_deferred",),
    "prefix_queries": ("llamacpp:prompt_tokens_total", "llamacpp:prompt_tokens_cached_total"),
    "prefix_hits": ("llamacpp:prompt_tokens_cached_total",),
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Every choice that a start depends on, made."""

    threads: int
    slots: int
    slot_tokens: int
    prompt_cache_mib: int  # of prompts that left their slot; 0: nothing is reused
    gpu_layers: int | None  # None: no GPU
    extra_args: tuple[str, ...]
    start_timeout_s: float


@dataclass(frozen=True)
class LlamaServer:
    """The engine. `digest` tells one build of the program from another."""

    program: Path
    digest: str
    settings: Settings

    @property
    def name(self) -> Literal["llama-server"]:
        return "llama-server"

    @property
    def identity(self) -> str:
        return f"{self.digest} {self.settings}"

    def unservable(self, variant: Variant) -> str | None:
        return unservable(variant)

    def launch(self, subject: Subject, at: tuple[str, int]) -> Launch:
        return launch_llama_server(self.program, subject, self.settings, at)

    def facts(self, server: Server, log_name: str) -> ServerFacts:
        return facts(server, log_name)

    def memory(self, server: Server, disk_bytes: int, peak_bytes: int | None) -> Memory:
        return memory(server.log_text(), self.settings, disk_bytes, peak_bytes)


def unservable(variant: Variant) -> str | None:
    """Why it cannot serve this format; None where it can."""
    match variant:
        case Gguf():
            return None
        case Bitsandbytes():
            return "llama-server serves GGUF files (method: gguf), and bitsandbytes is none; use --engine transformers"
        case _:
            return f"llama-server serves GGUF files (method: gguf), and {variant.method} is none; use --engine vllm"


def open_llama_server(program: Path, digest: str, setting: Setting) -> LlamaServer:
    """The engine with its settings chosen. Raises PreflightError where there is no room for it."""
    return LlamaServer(program, digest, choose_settings(setting))


def choose_settings(setting: Setting) -> Settings:
    """The settings for this model on this machine.

    Raises:
        PreflightError: the slots do not fit into the memory that is free; says what would.
    """
    serving, room = setting.serving, setting.room
    length = context_length(setting.config, serving.max_model_len)
    slot_tokens = -(-(length + 1) // SLOT_MULTIPLE) * SLOT_MULTIPLE
    token_bytes = kv_bytes_per_token(setting.config, "float16") or 0
    cuda = setting.machine.flavour == "cuda"
    free = (setting.machine.gpu_memory_bytes or room.free_bytes) if cuda else room.free_bytes
    spare = int(free / room.servers) - room.weight_bytes - OWN_BYTES
    kv_bytes = setting.concurrency * slot_tokens * token_bytes
    if kv_bytes > spare:
        fits = max(spare, 0) // (setting.concurrency * token_bytes) // SLOT_MULTIPLE * SLOT_MULTIPLE - 1
        remedy = f"set serving.max_model_len to at most {fits}" if fits > 0 else "free memory"
        raise PreflightError(
            f"llama-server reserves {setting.concurrency} slots of {length} tokens, {kv_bytes / GIB:.2f} GiB of KV "
            f"cache, and {max(spare, 0) / GIB:.2f} GiB is available; {remedy}, or ask for less concurrency"
        )
    return Settings(
        threads=len(core_ids()),
        slots=setting.concurrency,
        slot_tokens=slot_tokens,
        prompt_cache_mib=min(512, max(spare - kv_bytes, 0) // 4 // MIB) if serving.prefix_caching else 0,
        gpu_layers=999 if cuda else None,
        extra_args=serving.extra_args if serving.engine == "llama-server" else (),
        start_timeout_s=serving.start_timeout_s,
    )


def launch_llama_server(program: Path, subject: Subject, settings: Settings, at: tuple[str, int]) -> Launch:
    """The command that serves the GGUF file of a checkpoint. `at` is (host, port)."""
    host, port = at
    argv = [
        str(program), "--model", str(subject.folder / GGUF_NAME), "--alias", subject.name,
        "--host", host, "--port", str(port), "--offline",
        "--threads", str(settings.threads), "--threads-batch", str(settings.threads),
        "--parallel", str(settings.slots), "--ctx-size", str(settings.slots * settings.slot_tokens),
        "--cont-batching", "--no-kv-unified", "--no-context-shift", "--jinja", "--metrics", "--slots",
        "--cache-prompt" if settings.prompt_cache_mib else "--no-cache-prompt",
        "--cache-ram", str(settings.prompt_cache_mib), "--verbosity", "4",
    ]  # fmt: skip
    template = subject.folder / "chat_template.jinja"
    if template.exists():
        argv += ["--chat-template-file", str(template)]
    if settings.gpu_layers is not None:
        argv += ["--gpu-layers", str(settings.gpu_layers)]
    return Launch(
        "llama-server", (*argv, *settings.extra_args), {}, host, port, subject.name, settings.start_timeout_s,
        counters=COUNTERS, scoring="next_token", dialect="llama.cpp",
    )  # fmt: skip


# --- what it says ----------
def facts(server: Server, log_name: str) -> ServerFacts:
    """What is really served, from the server's own properties and its log."""
    text = server.log_text()
    try:
        props = ask(f"{server.url}/props", timeout_s=30).json()
    except (httpx.HTTPError, ValueError):
        props = {}
    return ServerFacts(
        engine="llama-server",
        version=str(props["build_info"]).removesuffix("-unknown") if "build_info" in props else None,
        command=server.launch.argv,
        env=dict(server.launch.env),
        dtype=None,
        quantization=props.get("model_ftype"),
        kernels=kernels(text),
        startup_s=server.startup_s,
        log=log_name,
    )


def kernels(text: str) -> tuple[str, ...]:
    """Where the weights lie (a kernel's own layout is named so), and what the build computes with: its system_info,
    without what every x86 CPU of ten years has."""
    line = re.search(r"system_info: .*", text)
    used = [name for name in re.findall(r"(\w+) = 1\b", line[0]) if name not in COMMON] if line else []
    buffers = re.findall(r"load_tensors: +(\w+) model buffer size", text)
    return tuple(dict.fromkeys([*(f"weights in {name}" for name in buffers), *used]))


def memory(text: str, settings: Settings, disk_bytes: int, peak_bytes: int | None) -> Memory:
    """Weights and KV cache as the log tells them."""
    loaded = re.findall(r"model buffer size = +([\d.]+) MiB", text)
    kv = re.findall(r"KV buffer size = +([\d.]+) MiB", text)
    return Memory(
        disk_bytes=disk_bytes,
        loaded_bytes=int(sum(map(float, loaded)) * MIB) if loaded else None,
        kv_capacity_tokens=settings.slots * settings.slot_tokens if kv else None,
        kv_bytes=int(sum(map(float, kv)) * MIB) if kv else None,
        peak_bytes=peak_bytes,
    )
