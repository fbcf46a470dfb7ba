"""The worker protocol against real worker processes that behave and misbehave."""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from qserve.errors import WorkerError
from qserve.jobs import Job, run_job

BODY = """
import os, signal, subprocess, sys, time
def main(job, emit):
    emit("progress", text="one")
    print("noise on stdout")
    {body}
"""


def job(tmp_path: Path, body: str, silence_s: float = 60) -> Job:
    worker = tmp_path / "some_worker.py"
    worker.write_text(BODY.format(body=body))
    return Job("test job", Path(sys.executable), worker, {"x": 3}, tmp_path / "log.txt", {"QSERVE_X": "7"}, silence_s)


def test_job_in_result_out(tmp_path: Path) -> None:
    events: list[Mapping[str, Any]] = []
    result = run_job(
        job(tmp_path, "time.sleep(1.2); return {'sum': job['x'] + int(os.environ['QSERVE_X'])}"), events.append
    )
    assert result["sum"] == 10
    assert events == [{"event": "progress", "text": "one"}]
    assert result["wall_s"] > 1
    assert result["peak_memory_bytes"] > 2**20
    assert "noise on stdout" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("raise ValueError('width 576\\nmore')", "test job: ValueError: width 576; log: .*log.txt"),
        ("os._exit(3)", "ended with code 3 and no result; log"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed, most likely out of memory; use fewer or shorter"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV; log"),
        ("sys.exit(2)", "SystemExit: 2"),
        ("return {'bad': object()}", "Object of type object is not JSON serializable|no result"),
    ],
)
def test_a_fault_is_one_sentence(tmp_path: Path, body: str, sentence: str) -> None:
    with pytest.raises(WorkerError, match=sentence):
        run_job(job(tmp_path, body))


def test_a_hang_is_ended_with_its_children(tmp_path: Path) -> None:
    body = "p = subprocess.Popen(['sleep', '600']); open(job_file, 'w').write(str(p.pid)); time.sleep(600)"
    body = body.replace("job_file", repr(str(tmp_path / "pid")))
    began = time.monotonic()
    with pytest.raises(WorkerError, match="no sign of life for 2 s"):
        run_job(job(tmp_path, body, silence_s=2))
    assert time.monotonic() - began < 20
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_an_interrupt_leaves_no_worker(tmp_path: Path) -> None:
    pids: list[int] = []

    def interrupt(event: Mapping[str, Any]) -> None:
        pids.extend(p.pid for p in psutil.Process(os.getpid()).children())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(job(tmp_path, "time.sleep(600)"), interrupt)
    assert len(pids) == 1
    assert not psutil.pid_exists(pids[0])
