"""Text Generation Inference: its container, started with `docker run` and stopped with it.

Written to its documentation (launcher arguments, /info, /health, /metrics), and not run: no machine of this project had
a Docker daemon. The image has to be there: qserve pulls none. The container shares the host's network, so that host and
port are the same inside and outside. Its processes are the daemon's, so their memory and CPU time are not known. Its
completions take text alone and end where the model ends them, so it races with prompts of its own.
"""

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from qserve.artifacts import Machine, Memory, ServerFacts
from qserve.errors import PreflightError
from qserve.serve.engine import Setting, Subject
from qserve.serve.info import probe
from qserve.serve.kv_cache import context_length
from qserve.serve.server import Launch, Server
from qserve.variants import Bitsandbytes, Gguf, Variant

IMAGES: Mapping[str, str] = {
    "cuda": "ghcr.io/huggingface/text-generation-inference:3.3.4",
    "cpu": "ghcr.io/huggingface/text-generation-inference:3.3.4-intel-cpu",
}
COUNTERS = {"running": ("tgi_batch_current_size",), "waiting": ("tgi_queue_size",)}


@dataclass(frozen=True)
class Tgi:
    """The engine. `image` is there; `image_id` is its digest."""

    image: str
    image_id: str
    gpus: int  # 0: none
    context: int
    extra_args: tuple[str, ...]
    start_timeout_s: float

    @property
    def name(self) -> Literal["tgi"]:
        return "tgi"

    @property
    def identity(self) -> str:
        return f"{self.image_id} {self.gpus} {self.context} {self.extra_args}"

    def unservable(self, variant: Variant) -> str | None:
        return unservable(variant)

    def launch(self, subject: Subject, at: tuple[str, int]) -> Launch:
        """The folder is mounted under its model id, since TGI calls a model by its path."""
        host, port = at
        inside = f"/{subject.name}"
        argv = [
            "docker", "run", "--rm", "--name", f"qserve-tgi-{port}", "--network", "host", "--shm-size", "1g",
            "--volume", f"{subject.folder}:{inside}:ro", "--env", "HF_HUB_OFFLINE=1",
        ]  # fmt: skip
        if self.gpus:
            argv += ["--gpus", "all"]
        argv += [
            self.image, "--model-id", inside, "--hostname", host, "--port", str(port),
            "--max-input-tokens", str(self.context - 1), "--max-total-tokens", str(self.context),
        ]  # fmt: skip
        argv += ["--num-shard", str(self.gpus)] if self.gpus else ["--cuda-graphs", "0"]
        return Launch(
            "tgi", (*argv, *self.extra_args), {}, host, port, inside, self.start_timeout_s, counters=COUNTERS,
            contained=True,
        )  # fmt: skip

    def facts(self, server: Server, log_name: str) -> ServerFacts:
        """From /info. It names no kernel, and no quantization."""
        info = probe(server.url)
        return ServerFacts(
            engine="tgi", version=info.version, command=server.launch.argv, env=dict(server.launch.env),
            dtype=info.dtype, quantization=None, kernels=(), startup_s=server.startup_s, log=log_name,
        )  # fmt: skip

    def memory(self, server: Server, disk_bytes: int, peak_bytes: int | None) -> Memory:
        return Memory(
            disk_bytes=disk_bytes, loaded_bytes=None, kv_capacity_tokens=probe(server.url).kv_capacity_tokens,
            kv_bytes=None, peak_bytes=peak_bytes,
        )  # fmt: skip


def unservable(variant: Variant) -> str | None:
    """Why it cannot serve this format; None where it can. It reads compressed-tensors by itself."""
    match variant:
        case Gguf():
            return "tgi serves no GGUF file; use --engine llama-server"
        case Bitsandbytes():
            return "tgi is not set up for bitsandbytes checkpoints; use --engine transformers"
        case _:
            return None


def find_image(asked: str | None, machine: Machine) -> tuple[str, str]:
    """(image, its id): the one asked for, else the one for this machine.

    Raises:
        PreflightError: no docker command, no daemon behind it, or the image is not there; says what to do.
    """
    image = asked or IMAGES[machine.flavour]
    if shutil.which("docker") is None:
        raise PreflightError("tgi runs in a container and there is no docker command here; install Docker, or use vllm")
    if _docker("version", "--format", "{{.Server.Version}}").returncode != 0:
        raise PreflightError(
            "tgi runs in a container and no Docker daemon answers; start it (systemctl start docker), or use vllm"
        )
    found = _docker("image", "inspect", "--format", "{{.Id}}", image)
    if found.returncode != 0:
        raise PreflightError(f"the image {image} is not here; run `docker pull {image}`, or set serving.tgi_image")
    return image, found.stdout.strip()


def _docker(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(("docker", *words), capture_output=True, text=True, check=False)


def open_tgi(image: str, image_id: str, setting: Setting) -> Tgi:
    """The engine with its settings chosen."""
    serving = setting.serving
    gpus = serving.tensor_parallel if setting.machine.flavour == "cuda" else 0
    own = serving.extra_args if serving.engine == "tgi" else ()
    context = context_length(setting.config, serving.max_model_len)
    return Tgi(image, image_id, gpus, context, own, serving.start_timeout_s)
