"""A server for the length of a `with` block: start, wait until it answers, watch, stop the whole process group.

The state machine is short on purpose:

    spawn (own session, log file) -> starting (log grows or CPU time is spent) -> ready (/health, right model id)
    -> stopping (TERM, wait, KILL, check that nobody is left)

Whatever ends the block, an exception or Ctrl-C included, nothing of the server survives it.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import httpx
import psutil

from qserve.artifacts import Counters, Dialect, Scoring
from qserve.errors import ServerError, UsageError
from qserve.jobs import die_with_parent, group_members, kill_group

Say = Callable[[str], None]
T = TypeVar("T")
LOOK_S = 1.0  # how often a starting server is looked at for signs of life: looking costs CPU time that it needs


@dataclass(frozen=True)
class Launch:
    """How to start one server. `env` is what is added to this process's environment."""

    engine: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    host: str
    port: int
    model: str  # the id that /v1/models must show
    timeout_s: float = 1800  # to become ready
    silence_s: float = 600  # without log output or CPU time, it hangs
    # field of Counters -> what /metrics calls it; of several names the sum
    counters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    scoring: Scoring | None = None
    echoes: bool = False  # /v1/completions knows `echo` with `logprobs`, which is how lm-evaluation-harness scores
    dialect: Dialect = "vllm"
    contained: bool = False  # it runs in a container: its processes are not below the one that is started

    @property
    def url(self) -> str:
        """Where a client on this machine reaches it."""
        anywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
        host = anywhere.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


@dataclass(frozen=True)
class Server:
    """A running, ready server."""

    launch: Launch
    pid: int  # also the process group
    log: Path
    startup_s: float  # spawn to ready

    @property
    def url(self) -> str:
        return self.launch.url

    @property
    def model(self) -> str:
        return self.launch.model

    @property
    def scoring(self) -> Scoring | None:
        return self.launch.scoring

    @property
    def dialect(self) -> Dialect:
        return self.launch.dialect

    def log_text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def alive(self) -> bool:
        return self.pid in group_members(self.pid)

    def cpu_s(self) -> float | None:
        """CPU seconds that the whole process group has used so far; None: it runs in a container."""
        return None if self.launch.contained else _cpu_seconds(self.pid)

    def memory_bytes(self) -> int | None:
        """Device memory of the process group where there is a GPU; else its proportional set size, in which shared
        pages are counted once. None: it runs in a container."""
        if self.launch.contained:
            return None
        if shutil.which("nvidia-smi"):
            return _device_bytes(set(group_members(self.pid)))
        sizes = _each(self.pid, lambda p: int(p.memory_full_info().pss) if sys.platform == "linux" else None)
        return sum(s for s in sizes if s is not None) or None

    def counters(self) -> Counters:
        """What the server counts of its own, in the same words for every engine."""
        found = self.metrics() if self.launch.counters else {}
        known = {ours: [found.get(name) for name in theirs] for ours, theirs in self.launch.counters.items()}
        return Counters(
            **{ours: sum(v for v in values if v is not None) for ours, values in known.items() if None not in values}
        )

    def metrics(self) -> dict[str, float]:
        """The counters and gauges of /metrics, summed over labels; empty if the server has none."""
        try:
            response = ask(f"{self.url}/metrics", timeout_s=30)
        except httpx.HTTPError:
            return {}
        return parse_metrics(response.text) if response.status_code == 200 else {}


def _device_bytes(pids: set[int]) -> int | None:
    """GPU memory in use by these processes, as the driver tells it; None where it does not."""
    query = ("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
    out = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    rows = re.findall(r"^(\d+), (\d+)$", out, re.MULTILINE)
    return sum(int(mib) * 2**20 for pid, mib in rows if int(pid) in pids) or None


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text -> {name: sum over label sets}."""
    totals: dict[str, float] = {}
    for match in re.finditer(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})? ([-+.\deE]+)$", text, re.MULTILINE):
        totals[match[1]] = totals.get(match[1], 0.0) + float(match[2])
    return totals


def free_port(host: str, wanted: int) -> int:
    """A port that can be bound now: the wanted one, or any free one for 0.

    Raises:
        UsageError: it is taken (with the process that holds it, if known), not allowed, or the host is no address here.
    """
    try:
        info = socket.getaddrinfo(host, wanted, type=socket.SOCK_STREAM)[0]
        with socket.socket(info[0], socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(info[4])
            return int(probe.getsockname()[1])
    except PermissionError as error:
        raise UsageError(f"port {wanted} needs root; use --port 8000, or --port 0 for any free one") from error
    except (OSError, UnicodeError) as error:  # the latter: a name that cannot be one of a host
        holder = _holder(wanted)
        if holder or "in use" in str(error):
            who = f" by {holder}" if holder else ""
            raise UsageError(f"port {wanted} is in use{who}; stop it, or use --port 0 for any free port") from error
        raise UsageError(f"cannot listen on {host}:{wanted}: {error}; use --host 127.0.0.1") from error


def _holder(port: int) -> str | None:
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if (
                connection.status == psutil.CONN_LISTEN
                and connection.laddr
                and connection.laddr.port == port
                and connection.pid
            ):
                return f"process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return None


def ask(url: str, timeout_s: float) -> httpx.Response:
    """GET from a server of our own: never through the proxy that is set for the outside."""
    return httpx.get(url, timeout=timeout_s, trust_env=False)


@contextmanager
def running(launch: Launch, log: Path, say: Say) -> Iterator[Server]:
    """Start a server, give it once it is ready, stop it at the end of the block.

    Raises:
        ServerError: it died, hung or came up with another model; with the first real error line and the log's path.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            launch.argv, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env={**os.environ, **launch.env}, start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip
    try:
        _wait_ready(process, launch, log, say)
        yield Server(launch, process.pid, log, time.monotonic() - started)
    finally:
        with _deaf_to_interrupts():
            gone = kill_group(process.pid, grace_s=20)
            process.wait()
        if not gone:
            say(f"warning: processes {group_members(process.pid)} of the stopped server are still there")


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """A second Ctrl-C must not leave half of a process group behind."""
    try:
        old = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread: it gets no SIGINT anyway
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)


def _wait_ready(process: subprocess.Popen[bytes], launch: Launch, log: Path, say: Say) -> None:
    started = last_sign = last_said = last_look = time.monotonic()
    last_seen = (-1, -1.0)
    while True:
        if process.poll() is not None:
            raise ServerError(
                f"{launch.engine} ended with code {process.returncode} at start: {first_error(log)}; log: {log}"
            )
        if _healthy(launch):
            return _check_model(launch, log)
        now = time.monotonic()
        if now - last_look > LOOK_S:
            last_look, seen = now, (log.stat().st_size, round(_cpu_seconds(process.pid), 1))
            if seen != last_seen:
                last_sign, last_seen = now, seen
        if now - last_sign > launch.silence_s:
            raise ServerError(
                f"{launch.engine} hangs at start: no log line and no CPU time for {launch.silence_s:.0f} s; log: {log}"
            )
        if now - started > launch.timeout_s:
            raise ServerError(
                f"{launch.engine} was not ready after {launch.timeout_s:.0f} s (serving.start_timeout_s): "
                f"{first_error(log)}; log: {log}"
            )
        if now - last_said > 20:
            last_said = now
            say(f"{launch.engine} is starting, {now - started:.0f} s: {_last_line(log)}")
        time.sleep(0.3)


def _healthy(launch: Launch) -> bool:
    try:
        return ask(f"{launch.url}/health", timeout_s=5).status_code == 200
    except httpx.HTTPError:
        return False


def _check_model(launch: Launch, log: Path) -> None:
    url = f"{launch.url}/v1/models"
    try:
        shown = [row["id"] for row in ask(url, timeout_s=30).json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ServerError(f"{url} does not answer like an OpenAI API ({error}); log: {log}") from error
    if launch.model not in shown:
        raise ServerError(
            f"the server on port {launch.port} serves {', '.join(shown)}, not {launch.model}: something else answers "
            f"there; use --port 0; log: {log}"
        )


_NOISE = re.compile(r"Traceback|Failed core proc|See root cause|^\s*(File|raise|return|self\.|\^)|WARNING|INFO")
_ERROR = re.compile(
    r"(?:\w+\.)*\w*(?:Error|Exception|Exit)\b: .+|\bERROR\b.*|error: .+|Killed|out of memory", re.IGNORECASE
)
_LLAMA_CPP = re.compile(r"[\d.]+ E (?:(?:srv|cmn|slot) +)?(.*)")


def first_error(log: Path) -> str:
    """The first line of a log that names a real error, without its logging prefix."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    bare = [
        re.sub(r"^\(\w[\w-]* pid=\d+\)\s*(?:ERROR [\d-]+ [\d:]+ \[[^]]*\]\s*)?", "", line).strip() for line in lines
    ]
    named = [line for line in bare if re.match(r"(?:\w+\.)*\w*(?:Error|Exception)\b: \S", line)]
    named = named or [
        m[1] for line in bare if (m := re.match(r"[\d.]+ E (?:(?:srv|cmn|slot) +)?(.*)", line))
    ]  # llama.cpp
    loose = [line for line in bare if _ERROR.search(line) and not _NOISE.search(line)]
    if found := (named or loose):
        return found[0][:300]
    return f"its last line was {bare[-1][:200]!r}" if bare else "it wrote nothing"


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
    text = (
        re.sub(r"^\(.*?\)\s*|\b(INFO|WARNING) [\d-]+ [\d:]+ \[[^]]*\]\s*", "", lines[-1]) if lines else "no output yet"
    )
    return text[:90]


def _cpu_seconds(pgid: int) -> float:
    return sum(t.user + t.system for t in _each(pgid, lambda p: p.cpu_times()))


def _each(pgid: int, read: Callable[[psutil.Process], T]) -> list[T]:
    values = []
    for pid in group_members(pgid):
        with contextlib.suppress(psutil.Error):
            values.append(read(psutil.Process(pid)))
    return values
