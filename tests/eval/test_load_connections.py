"""The connections of the load client: kept alive, retried once, without a hidden limit, encrypted."""

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
from fake_openai import Call, serving
from loading import good, load, outcomes

from qserve.eval.load import Request, Target, run, run_load


def test_a_connection_closed_while_idle_is_no_failure() -> None:
    with serving(good, close_after_answer=True) as fake:
        result = load(fake.url, count=12, concurrency=3)
    assert outcomes(result) == {"ok": 12}
    assert len(fake.calls) == 12  # no request was served twice
    assert fake.connections >= 12


def test_a_retry_happens_once_and_a_real_failure_counts() -> None:
    async def script(call: Call) -> None:
        if call.number == 0:
            await call.answer()
        else:
            call.hang_up()  # takes the request, then resets: on the reused connection and on the new one

    with serving(script) as fake:
        result = load(fake.url, count=3)
    assert result.records[0].outcome == "ok"
    assert outcomes(result)["ok"] == 1 and len(result.records) == 3
    assert len(fake.calls) == 4  # one request of three was tried twice: only the first was on a reused connection


def test_connections_are_kept_alive() -> None:
    with serving(good) as fake:
        result = load(fake.url, count=40, concurrency=4)
    assert outcomes(result) == {"ok": 40} and fake.connections == 4


def test_requests_in_flight_have_no_hidden_limit() -> None:
    all_here = asyncio.Event()

    async def script(call: Call) -> None:
        if call.number == 255:
            all_here.set()
        await all_here.wait()  # nobody is answered before 256 are in flight
        await call.answer()

    with serving(script) as fake:
        result = load(fake.url, count=256, concurrency=256, tokens=1, timeout_s=10)
    assert outcomes(result) == {"ok": 256}
    assert fake.peak == 256 and result.delivered_concurrency == 256
    assert result.loop_lag_s >= 0 and result.client_cpu_s > 0


def test_large_prompts() -> None:
    text = "x" * 1_000_000
    with serving(good) as fake:
        requests = [Request(text, 2) for _ in range(6)]
        result = run(run_load(Target(fake.url, "fake"), requests, 3))
    assert outcomes(result) == {"ok": 6}
    assert {len(call.body["prompt"]) for call in fake.calls} == {1_000_000}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_https(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    extra = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command.split() + extra, check=True, capture_output=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(cert, key)
    with serving(good, tls=tls) as fake:
        assert outcomes(load(fake.url, count=1)).popitem()[0].startswith("certificate not accepted")
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        assert outcomes(load(fake.url, count=6, concurrency=2)) == {"ok": 6}
