"""Managed environments ("runtimes"): each heavy stack in a locked virtual environment of its own, built on first use.

Look, lock, look again, build under a temporary name, check that it works, write the state, rename into place: a runtime
is complete or absent. It lies in <cache>/runtimes/<name>-<digest>, named by a digest of its lock file, so a new lock
makes a new runtime, and the old one is stale.
"""

import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from qserve import llama_cpp
from qserve.built import STATE_NAME, Thing, build_once, read_state
from qserve.errors import RuntimeBuildError, UsageError
from qserve.machine import look
from qserve.packages import fetch_package_file as fetch_package_file
from qserve.rounding import size
from qserve.runtime_spec import (
    ALWAYS,
    FLAVOURS,
    NAMES,
    Flavour,
    RuntimeName,
    Spec,
    Unfit,
    check,
    runtimes_root,
    sglang_spec,
    spec_of,
)
from qserve.uvrun import Build, Say, building, failure, install, run_uv
from qserve.workspace import digest_of


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
    python = Path(os.path.expanduser(python))
    try:
        packages = check(spec, python, write_bytecode=False)
    except Unfit as problem:
        stack = spec.name.partition("-")[0]
        raise UsageError(
            f"{python} cannot be used for {stack}: {problem}; give the python of an environment with {stack} in it "
            "(VENV/bin/python), or leave --python (in a recipe serving.python) out"
        ) from None
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
    current |= {llama_cpp.thing_of(flavour).folder.name for flavour in FLAVOURS} | {sglang_spec().folder.name}
    infos = []
    for path in sorted(runtimes_root().glob(f"*/{STATE_NAME}")):
        folder = path.parent
        state = read_state(folder)
        if state is not None and not folder.name.endswith(".partial"):
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
    """`qserve runtimes list|build|check|remove [NAME]`, for this machine's flavour: lines to print.

    With no name, `build` makes what every recipe needs; what else a recipe names is built on its first use.
    """
    if name is not None and name not in (*NAMES, llama_cpp.NAME):
        raise UsageError(f"no runtime {name!r}; there are {', '.join((*NAMES, llama_cpp.NAME))}")
    flavour, names = look().flavour, [known for known in NAMES if name in (None, known)]
    match action:
        case "list":
            found = [info for info in list_runtimes() if name is None or _is_of(info, name)]
            yield from (_line(info) for info in found)
            if not found:
                yield f"no runtime in {runtimes_root()}; `qserve runtimes build` makes them, and so does the first use"
        case "build":
            for known in names if name else ALWAYS:
                yield _versions(ensure_runtime(known, flavour, say))
            if name == llama_cpp.NAME:
                yield llama_cpp.ensure_llama_cpp(flavour, say).line
        case "check":
            for known in names:
                checked = check_runtime(known, flavour)
                yield f"works: {_versions(checked)}" if checked else f"{spec_of(known, flavour).name}: not built"
            if name in (None, llama_cpp.NAME):
                yield llama_cpp.check_llama_cpp(flavour)
        case "remove":
            doomed = {info.name for info in list_runtimes() if name is None or _is_of(info, name)}
            for label in sorted(doomed):
                yield from (f"removed {_line(info)}" for info in remove_runtime(label))
        case _:
            raise UsageError(f"no action {action!r}: list, build, check or remove")


# --- building ----------
def _complete(spec: Spec) -> Runtime | None:
    """The finished runtime, or None. Reads one small file; a Python that was removed from the system makes it None."""
    python = spec.folder / "bin" / "python"
    state = read_state(spec.folder)
    if state is None or not python.exists():
        return None
    return Runtime(state.name, python, state.digest, state.packages)


def _build(spec: Spec, build: Build) -> Runtime:
    """Build it, complete or absent."""
    thing = Thing(spec.name, spec.digest, spec.folder, spec.need_bytes)
    state = build_once(thing, build, lambda partial: _fill(spec, build, partial))
    return Runtime(state.name, spec.folder / "bin" / "python", state.digest, state.packages)


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
def _is_of(info: RuntimeInfo, name: str) -> bool:
    """`vllm-cpu` is of `vllm`; `lmeval` has no flavour."""
    return info.name == name or info.name.startswith(f"{name}-")


def _user_of(folder: Path) -> int | None:
    """Process id of something that runs from this environment."""
    for process in psutil.process_iter(["cmdline"]):
        if process.info["cmdline"] and process.info["cmdline"][0].startswith(f"{folder}{os.sep}"):
            return int(process.pid)
    return None


def _line(info: RuntimeInfo) -> str:
    return f"{info.name}  {info.digest}  {size(info.size_bytes)}  built {info.built}  {info.status}"


def _versions(runtime: Runtime) -> str:
    return f"{runtime.name} {runtime.digest}: {', '.join(f'{n} {v}' for n, v in runtime.packages.items())}"
