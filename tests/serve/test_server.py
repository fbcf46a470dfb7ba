"""Start, watch, stop: against real processes that misbehave in the ways that servers do."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from qserve.errors import ServerError, UsageError
from qserve.jobs import group_members
from qserve.serve.server import Launch, Server, first_error, free_port, parse_metrics, running

FAKE = Path(__file__).with_name("fake_vllm.py")


def launch(mode: str, timeout_s: float = 30, silence_s: float = 30) -> Launch:
    port = free_port("127.0.0.1", 0)
    argv = (sys.executable, str(FAKE), mode, str(port))
    return Launch("vllm", argv, {}, "127.0.0.1", port, "m", timeout_s, silence_s)


def start(mode: str, tmp_path: Path, then: Callable[[Server], object] = lambda s: s.url, **limits: float) -> object:
    with running(launch(mode, **limits), tmp_path / "log.txt", lambda text: None) as server:
        return then(server)


def test_a_silent_exit_says_so(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"ended with code 1 at start: it wrote nothing; log: .*log\.txt"):
        start("silent-exit", tmp_path)


def test_the_first_real_error_is_lifted_from_far_up(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="ended with code 1 at start: ValueError: the real reason; log"):
        start("deep-error", tmp_path)


def test_a_hang_is_ended(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ServerError, match="hangs at start"):
        start("hang", tmp_path, silence_s=2)
    assert 2 <= time.monotonic() - began < 15


def test_slow_progress_is_no_hang(tmp_path: Path) -> None:
    assert str(start("slow", tmp_path, silence_s=2.5)).startswith("http://127.0.0.1:")


def test_a_deadline_holds_although_there_is_progress(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"not ready after 1 s \(serving.start_timeout_s\)"):
        start("slow", tmp_path, timeout_s=1)


def test_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="serves other, not m"):
        start("wrong-model", tmp_path)


def test_stop_leaves_nobody_even_if_they_ignore_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import qserve.serve.server as module

    kill = module.kill_group
    monkeypatch.setattr(module, "kill_group", lambda pgid, grace_s: kill(pgid, 1.0))  # not 20 s of patience
    pids: list[int] = []

    def look(server: Server) -> None:
        child = re.search(r"child (\d+)", server.log_text())
        assert child
        pids.extend([server.pid, int(child[1])])
        assert set(group_members(server.pid)) == set(pids)
        assert server.alive()
        assert server.memory_bytes()

    start("stubborn-child", tmp_path, look)
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)


def test_death_while_serving_is_seen(tmp_path: Path) -> None:
    def wait(server: Server) -> bool:
        deadline = time.monotonic() + 10
        while server.alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        return server.alive()

    assert start("dies-later", tmp_path, wait) is False


def test_killed_parent_takes_the_server_with_it(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom qserve.serve.server import *\n"
        f"port = free_port('127.0.0.1', 0)\nargv = (sys.executable, {str(FAKE)!r}, 'slow', str(port))\n"
        f"with running(Launch('v', argv, {{}}, '127.0.0.1', port, 'm'), Path({str(tmp_path / 'log')!r}), print) as s:\n"
        "    print(s.pid, flush=True)\n    time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while group_members(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert group_members(pid) == []


def test_a_taken_port_names_its_holder() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(UsageError, match=rf"port {port} is in use by process {os.getpid()} .*--port 0"):
            free_port("127.0.0.1", port)


def test_a_bad_host_is_a_sentence() -> None:
    with pytest.raises(UsageError, match=r"cannot listen on 203\.0\.113\.9:8000"):
        free_port("203.0.113.9", 8000)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("INFO ok\nDEBUG fine\n", "its last line was 'DEBUG fine'"),
        ("x\nfoo.bar.OutOfMemoryError: no\nValueError: later\n", "foo.bar.OutOfMemoryError: no"),
        ("error: unrecognized arguments: --x\n", "error: unrecognized arguments: --x"),
        (
            "0.00.08 I srv  load_model: loading\n0.00.09 E gguf_init_from_file: failed to open GGUF file 'm'\n"
            "0.00.09 E cmn  common_init_: failed to load model 'm.gguf'",
            "gguf_init_from_file: failed to open GGUF file 'm'",
        ),
    ],
)
def test_first_error(tmp_path: Path, text: str, error: str) -> None:
    log = tmp_path / "log"
    log.write_text(text)
    assert first_error(log) == error


def test_metrics_are_summed_over_labels() -> None:
    text = '# HELP a b\nvllm:hits_total{engine="0"} 3.0\nvllm:hits_total{engine="1"} 4.5\nplain 1e3\n'
    assert parse_metrics(text) == {"vllm:hits_total": 7.5, "plain": 1000.0}


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:9"), ("0.0.0.0", "http://127.0.0.1:9"), ("::", "http://[::1]:9")],
)
def test_the_url_a_client_can_use(host: str, url: str) -> None:
    assert Launch("v", (), {}, host, 9, "m").url == url


def test_a_proxy_for_the_outside_is_not_used_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert str(start("slow", tmp_path, silence_s=10)).startswith("http://127.0.0.1:")
