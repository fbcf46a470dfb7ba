"""Managed environments ("runtimes"): each heavy stack in a locked virtual environment of its own, built on first use.

Look, lock, look again, build under a temporary name, check that it works, write the state, rename into place: a runtime
is complete or absent. It lies in <cache>/runtimes/<name>-<digest>, named by a digest of its lock file, so a new lock
makes a new runtime, and the old one is stale.
"""

import json
import os
import platform
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

from qserve.errors import RuntimeBuildError, UsageError
from qserve.machine import look
from qserve.packages import fetch_package_file as fetch_package_file
from qserve.runtime_spec import FLAVOURS, NAMES, Flavour, RuntimeName, Spec, Unfit, check, runtimes_root, spec_of
from qserve.uvrun import Build, Say, building, failure, install, need_disk, run_uv
from qserve.workspace import digest_of

STATE_NAME = "runtime.json"


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
class State:
    """runtime.json: written last, so its presence means complete."""

    name: str
    digest: str
    packages: dict[str, str]
    size_bytes: int
    built: str
    build_s: float


def ensure_runtime(name: RuntimeName, flavour: Flavour, say: Say, own_python: Path | None = None) -> Runtime:
    """A runtime that works: the one that is there, else built now; or the user's own environment, checked.

    Raises:
        RuntimeBuildError: it cannot be built, or does not work; says why and what to do.
        UsageError: `own_python` is not fit.
    """
    spec = spec_of(name, flavour)
    if own_python is not None:
        return adopt(spec, own_python)
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
    with building(f"runtime {spec.name}", runtimes_root() / f"{spec.folder.name}.log", say) as build:
        return _complete(spec) or _build(spec, build)


def adopt(spec: Spec, python: Path) -> Runtime:
    """The user's own environment, checked and left as it is. Its digest covers the versions: an upgrade is a new one.

    Raises:
        UsageError: it does not work.
    """
    try:
        packages = check(spec, python, write_bytecode=False)
    except Unfit as problem:
        raise UsageError(f"{python} is not fit as {spec.name}: {problem}; mend it, or leave --python out") from None
    return Runtime(spec.name, python.absolute(), digest_of(packages), packages)


def check_runtime(name: RuntimeName, flavour: Flavour) -> Runtime | None:
    """Import its packages once more; None if it is not built. Raises RuntimeBuildError if it no longer works."""
    spec = spec_of(name, flavour)
    found = _complete(spec)
    if found is None:
        return None
    try:
        check(spec, found.python, write_bytecode=False)
    except Unfit as problem:
        raise RuntimeBuildError(f"runtime {spec.name} no longer works: {problem}; remove it and build anew") from None
    return found


def list_runtimes() -> tuple[RuntimeInfo, ...]:
    """Every finished runtime in the cache, by name."""
    current = {spec_of(name, flavour).folder.name for name in NAMES for flavour in FLAVOURS}
    infos = []
    for path in sorted(runtimes_root().glob(f"*/{STATE_NAME}")):
        folder = path.parent
        if not folder.name.endswith(".partial"):
            state = _read_state(path)
            status: Literal["current", "stale"] = "current" if folder.name in current else "stale"
            infos.append(RuntimeInfo(state.name, state.digest, folder, state.size_bytes, state.built, status))
    return tuple(infos)


def remove_runtime(name: str, digest: str | None = None) -> tuple[RuntimeInfo, ...]:
    """Remove the runtimes of that name (`vllm-cpu`), or the one with that digest. Returns what was removed.

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


def runtimes_command(action: str, name: str | None, say: Say) -> Iterator[str]:
    """`qserve runtimes list|build|check|remove [llmcompressor|vllm]`, for this machine's flavour: lines to print."""
    if name is not None and name not in NAMES:
        raise UsageError(f"no runtime {name!r}; there are {', '.join(NAMES)}")
    flavour, names = look().flavour, [known for known in NAMES if name in (None, known)]
    match action:
        case "list":
            found = [info for info in list_runtimes() if name is None or info.name.startswith(f"{name}-")]
            yield from (_line(info) for info in found)
            if not found:
                yield f"no runtime in {runtimes_root()}; `qserve runtimes build` makes them, and so does the first use"
        case "build":
            for known in names:
                yield _versions(ensure_runtime(known, flavour, say))
        case "check":
            for known in names:
                checked = check_runtime(known, flavour)
                yield f"works: {_versions(checked)}" if checked else f"{known}-{flavour}: not built"
        case "remove":
            doomed = {info.name for info in list_runtimes() if name is None or info.name.startswith(f"{name}-")}
            for label in sorted(doomed):
                yield from (f"removed {_line(info)}" for info in remove_runtime(label))
        case _:
            raise UsageError(f"no action {action!r}: list, build, check or remove")


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
    build.say(f"building {build.label} (uv): {len(spec.pins)} packages, once")
    # Relocatable: its scripts find their Python beside them, so the rename at the end breaks nothing.
    code, output = run_uv(build, ["venv", "--relocatable", "--python", sys.executable, str(partial)])
    if code != 0:
        raise RuntimeBuildError(failure(build.label, output, build.log))
    python = partial / "bin" / "python"
    install(build, install_arguments(spec, python))
    build.say(f"building {build.label}: first import, to see that it works")
    try:
        return check(spec, python, write_bytecode=True)
    except Unfit as problem:
        raise RuntimeBuildError(
            f"{build.label}: installed, but it does not work: {problem}; "
            f"is another torch or Python in the way (find-links, PYTHONPATH)? log: {build.log}"
        ) from None


def install_arguments(spec: Spec, python: Path) -> list[str]:
    """For `uv pip install`. The lock is the whole closure, so nothing is resolved again."""
    return ["--python", str(python), "--no-deps", "--requirements", str(spec.lock)]


# --- small things ----------
def _read_state(path: Path) -> State:
    return State(**json.loads(path.read_text(encoding="utf-8")))


def _size(folder: Path) -> int:
    """Bytes of the files under `folder`. Hard links to uv's cache count: they are the runtime's as much."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def _user_of(folder: Path) -> int | None:
    """Process id of something that runs from this environment."""
    for process in psutil.process_iter(["cmdline"]):
        if process.info["cmdline"] and process.info["cmdline"][0].startswith(f"{folder}{os.sep}"):
            return int(process.pid)
    return None


def _line(info: RuntimeInfo) -> str:
    return f"{info.name}  {info.digest}  {info.size_bytes / 1e9:.1f} GB  built {info.built}  {info.status}"


def _versions(runtime: Runtime) -> str:
    return f"{runtime.name} {runtime.digest}: {', '.join(f'{n} {v}' for n, v in runtime.packages.items())}"
