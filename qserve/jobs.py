"""Run a worker: job JSON in, progress events as JSON lines, result JSON out, log kept.

A worker that fails, is killed or stops making progress becomes one WorkerError with the first real error line and the
path of the log. Leaving `run_job` by any way, Ctrl-C included, leaves no process behind.
"""

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from qserve.errors import WorkerError

FRAME = Path(__file__).with_name("worker.py")
Progress = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Job:
    """One worker run. `silence_s`: how long it may go without an event, log output or CPU time."""

    name: str
    python: Path
    worker: Path
    spec: Mapping[str, Any]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    silence_s: float = 1800


def run_job(job: Job, progress: Progress = lambda event: None) -> dict[str, Any]:
    """Run the worker to its end and return its result, with `peak_memory_bytes` and `wall_s` added.

    Raises:
        WorkerError: it failed, was killed, hung or left no result.
    """
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="qserve-job-") as scratch:
        job_path, result_path = Path(scratch) / "job.json", Path(scratch) / "result.json"
        job_path.write_text(json.dumps(job.spec), encoding="utf-8")
        started = time.monotonic()
        with job.log.open("ab") as log:
            log.write(f"\n=== {time.strftime('%F %T')} {job.name}\n".encode())
            log.flush()
            process = subprocess.Popen(
                [str(job.python), str(FRAME), str(job.worker), str(job_path), str(result_path)],
                stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL,
                env={**os.environ, **job.env}, start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip
            try:
                peak, error = _follow(process, job, progress)
            finally:
                kill_group(process.pid)
                process.wait()
        if process.returncode != 0 or not result_path.exists():
            raise WorkerError(_sentence(job, process.returncode, error))
        result: dict[str, Any] = json.loads(result_path.read_text(encoding="utf-8"))
    return {**result, "peak_memory_bytes": peak, "wall_s": time.monotonic() - started}


def _follow(process: subprocess.Popen[bytes], job: Job, progress: Progress) -> tuple[int | None, str | None]:
    """Read events until the worker ends. Returns (peak resident bytes, message of its error event)."""
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    peak: int | None = None
    error, pending = None, b""
    last_sign, last_seen = time.monotonic(), (-1, -1.0)
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            if selector.select(timeout=0.5):
                chunk = process.stdout.read()
                if chunk == b"":
                    process.wait()
                    return peak, error
                *lines, pending = (pending + (chunk or b"")).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    if event["event"] == "error":
                        error = f"{event['type']}: {event['message']}"
                    else:
                        progress(event)
                last_sign = time.monotonic()
            usage = _usage(process.pid)
            if usage:
                peak = max(peak or 0, usage[0])
            seen = (job.log.stat().st_size, round(usage[1]) if usage else -1.0)
            if seen != last_seen:
                last_sign, last_seen = time.monotonic(), seen
            if time.monotonic() - last_sign > job.silence_s:
                raise WorkerError(f"{job.name}: no sign of life for {job.silence_s:.0f} s, stopped; log: {job.log}")


def die_with_parent() -> None:
    """For a child, before its program starts: Linux ends it if this process is killed without a chance to clean up."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _usage(pid: int) -> tuple[int, float] | None:
    """(resident bytes, CPU seconds) of a process and its children; None once it is gone."""
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
        times = [p.cpu_times() for p in family]
        return sum(p.memory_info().rss for p in family), sum(t.user + t.system for t in times)
    except psutil.Error:
        return None


def _sentence(job: Job, code: int, error: str | None) -> str:
    """What went wrong, in one sentence that says what to do next."""
    if code in (-signal.SIGKILL, 137):
        return (
            f"{job.name}: killed, most likely out of memory; use fewer or shorter calibration samples, "
            f"or free memory; log: {job.log}"
        )
    if code < 0:
        return f"{job.name}: ended by {signal.Signals(-code).name}; log: {job.log}"
    return f"{job.name}: {error or f'ended with code {code} and no result'}; log: {job.log}"


def kill_group(pgid: int, grace_s: float = 5.0) -> bool:
    """End a process group: TERM, wait, KILL, check. Returns True once nobody is left in it."""
    for sig, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pgid, sig)
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            if not group_members(pgid):
                return True
            time.sleep(0.05)
    return not group_members(pgid)


def group_members(pgid: int) -> list[int]:
    """Process ids alive (not zombies) in a process group."""
    alive = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getpgid(process.pid) == pgid and process.info["status"] != psutil.STATUS_ZOMBIE:
                alive.append(process.pid)
    return alive
