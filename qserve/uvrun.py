"""Run uv: with pip's configuration, under a lock, with progress, and with failures in one sentence."""

import fcntl
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uv

from qserve.errors import RuntimeBuildError
from qserve.jobs import kill_group
from qserve.pipconf import UvSettings, uv_settings
from qserve.rounding import size
from qserve.workspace import free_bytes

Say = Callable[[str], None]
SAY_EVERY_S = 5.0
TORCH_CPU_INDEX = "download.pytorch.org"  # where uv's --torch-backend cpu looks

# What the first error line says -> what to do about it. First match counts.
NEXT_STEPS = (
    (r"no space left|disk quota", "free some disk, or put the cache elsewhere with QSERVE_CACHE and UV_CACHE_DIR"),
    (
        r"certificate|UnknownIssuer",
        "name your certificates in SSL_CERT_FILE (or pip's `cert`), or set UV_SYSTEM_CERTS=1",
    ),
    (r"\b40[137]\b|unauthorized|forbidden", "check the credentials of your package index"),
    (
        r"failed to fetch|sending request|dns|connect|timed out|request failed",
        "check the network, or name a reachable index (pip's index-url and find-links are used, UV_DEFAULT_INDEX wins)",
    ),
    (
        r"no version of|not found in the package registry|no solution|no wheels|not found",
        "your package indexes lack it: add one that has it (pip's extra-index-url or find-links, or UV_INDEX)",
    ),
)


@dataclass(frozen=True)
class Build:
    """One thing that is being built with uv. `lock_fd` is the lock that stands while it is."""

    label: str  # "runtime vllm-cpu"
    log: Path
    lock_fd: int
    settings: UvSettings
    say: Say


@contextmanager
def building(label: str, log: Path, say: Say) -> Iterator[Build]:
    """Take the lock beside `log` and hold it. Only one process builds a thing; the others wait, and say so.

    The lock is the kernel's (flock): it goes with the process that holds it, however that ends. uv inherits it, so that
    nobody starts anew beside a uv whose parent was killed.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        opened = log.with_suffix(".lock").open("a")
    except OSError as error:
        raise RuntimeBuildError(
            f"{label} cannot be built in {log.parent} ({error.strerror}); set QSERVE_CACHE to a folder that takes files"
        ) from error
    with opened as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{label}: another process is building it; waiting for it to finish")
            fcntl.flock(lock, fcntl.LOCK_EX)
        settings = uv_settings()
        for notice in settings.notices:
            say(notice)
        yield Build(label, log, lock.fileno(), settings, say)


def need_disk(folder: Path, need_bytes: int, label: str) -> None:
    """Raises RuntimeBuildError if the file system of `folder` has less than `need_bytes` free."""
    free = free_bytes(folder)
    if free < need_bytes:
        raise RuntimeBuildError(
            f"{label} needs about {size(need_bytes)} in {folder} and {size(free)} is free: "
            "free some, or set QSERVE_CACHE to a folder on a larger disk"
        )


def install(build: Build, arguments: Sequence[str]) -> None:
    """`uv pip install ARGUMENTS`, with the user's configuration; once more with PyTorch's own index of CPU builds if
    only that is missing.

    Raises:
        RuntimeBuildError: uv failed; has its first error, the log and a next step.
    """
    command = ["pip", "install", *build.settings.flags, *arguments]
    code, output = run_uv(build, command)
    if code != 0 and lacks_cpu_torch(output):
        build.say(f"{build.label}: no CPU build of torch in your package indexes; asking {TORCH_CPU_INDEX}")
        code, again = run_uv(build, [*command, "--torch-backend", "cpu"])
        if code != 0 and TORCH_CPU_INDEX in again:
            raise RuntimeBuildError(
                f"{build.label}: torch's CPU build is in none of your package indexes, and {TORCH_CPU_INDEX} cannot "
                "be reached: name an index or a folder that has it (pip's extra-index-url or find-links); "
                f"log: {build.log}"
            )
        output = again
    if code != 0:
        raise RuntimeBuildError(failure(build.label, output, build.log))


def lacks_cpu_torch(output: str) -> bool:
    """Whether uv stopped because no index has the `+cpu` build of torch that is asked for."""
    pin = r"(\{[^}\n]*\})?==[\w.]+\+cpu"
    return bool(re.search(rf"no version of torch{pin}|(?<![\w-])torch was not found[^\n]* torch{pin}", output))


def run_uv(build: Build, arguments: Sequence[str]) -> tuple[int, str]:
    """Run uv to its end. Returns (exit code, its output)."""
    return run_logged(build, [uv.find_uv_bin(), *arguments])


def run_logged(build: Build, command: Sequence[str]) -> tuple[int, str]:
    """Run a step to its end. Returns (exit code, its output); the log keeps all. Leaves no process behind."""
    name = Path(command[0]).name
    with build.log.open("a+", encoding="utf-8", errors="replace") as log:
        log.write(f"\n=== {time.strftime('%F %T')} {name} {' '.join(command[1:])}\n")
        log.flush()
        start = log.tell()
        process = subprocess.Popen(
            command, cwd=build.log.parent, env={**os.environ, **build.settings.env},
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, pass_fds=(build.lock_fd,),
        )  # fmt: skip
        try:
            _follow(process, build, start, name)
        finally:
            if process.poll() is None:
                kill_group(process.pid)
                process.wait()
        log.seek(start)
        return process.returncode, log.read()


def _follow(process: subprocess.Popen[bytes], build: Build, start: int, name: str) -> None:
    """Say its newest line every few seconds until it ends."""
    begun = said = time.monotonic()
    while process.poll() is None:
        time.sleep(0.1)
        if time.monotonic() - said >= SAY_EVERY_S:
            said = time.monotonic()
            with build.log.open("rb") as file:
                file.seek(start)
                lines = file.read().decode(errors="replace").split("\n")
            newest = next((line.strip() for line in reversed(lines) if line.strip()), "resolving")
            build.say(f"building {build.label} ({name}): {said - begun:.0f} s, {newest[:90]}")


def failure(label: str, output: str, log: Path) -> str:
    """One sentence about a failed uv run: its first error with its cause, what to do, where the log is."""
    lines = [line.strip(" ×╰─▶├│") for line in output.splitlines()]
    first = next((i for i, line in enumerate(lines) if line.startswith("error")), 0)
    kept = [line.removeprefix("error: ").removeprefix("cause: ") for line in lines[first : first + 6] if line]
    text = "; ".join(kept[:2]) or "uv ended without a word"
    everything = " ".join(kept)
    step = next((step for pattern, step in NEXT_STEPS if re.search(pattern, everything, re.IGNORECASE)), "see the log")
    return f"{label}: uv could not install it: {text[:400].rstrip('.')}; {step}; log: {log}"
