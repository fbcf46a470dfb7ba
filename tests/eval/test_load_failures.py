"""The load client against a server that fails: what it refuses to call a success."""

import asyncio
import socket
import time

import pytest
from fake_openai import Call, serving
from loading import PROMPT, load, outcomes

from qserve.eval.load import LoadRun, Request, Target, run, run_load
from qserve.eval.summary import summarize


def test_fast_503s_do_not_look_fast() -> None:
    async def script(call: Call) -> None:
        if call.number % 2:
            await call.json(503, {"error": {"message": "busy"}})
        else:
            await asyncio.sleep(0.05)
            await call.answer()

    with serving(script) as fake:
        result = load(fake.url, count=20, concurrency=2)
    assert outcomes(result) == {"ok": 10, "http 503": 10}
    summary = summarize([result])
    assert (summary.attempted, summary.ok, summary.failed) == (20, 10, {"http 503": 10})
    assert not summary.valid and summary.problem == "10 of 20 requests failed (10 x http 503)"
    assert summary.ttft_s.n == 10 and summary.ttft_s.p50 is not None and summary.ttft_s.p50 >= 0.05
    assert summary.output_tokens == 40


def test_a_stream_that_breaks_off_is_no_success() -> None:
    async def script(call: Call) -> None:
        await call.begin()
        for _ in range(3):
            await call.text(" a")
        if call.number == 1:  # politely
            await call.raw(b"0\r\n\r\n")
        elif call.number == 2:  # in the middle of an event
            await call.raw(b'ff\r\ndata: {"choi')
            call.writer.close()
        else:
            call.writer.close()

    with serving(script) as fake:
        result = load(fake.url, count=3, tokens=64)
    assert outcomes(result) == {"stream ended early": 3}
    assert [record.deltas for record in result.records] == [3, 3, 3]
    summary = summarize([result])
    assert not summary.valid and summary.ok == 0
    assert summary.output_tokens_per_s is summary.requests_per_s is summary.ttft_s.mean is summary.e2e_s.p50 is None


@pytest.mark.parametrize("event", [{"error": {"message": "out of memory"}}, {"object": "error", "message": "no"}])
def test_an_error_event_behind_http_200(event: object) -> None:
    async def script(call: Call) -> None:
        await call.begin()
        await call.text(" a")
        await call.event(event)
        await call.end()

    with serving(script) as fake:
        assert outcomes(load(fake.url)) == {"error event": 1}


def test_a_server_that_hangs_times_out_and_the_rest_goes_on() -> None:
    async def script(call: Call) -> None:
        if call.number == 0:
            await asyncio.sleep(60)
        await call.answer()

    with serving(script) as fake:
        result = load(fake.url, count=3, timeout_s=0.2)
    assert outcomes(result) == {"timeout": 1, "ok": 2}
    assert result.records[0].e2e_s == pytest.approx(0.2, abs=0.15)


@pytest.mark.parametrize("kind", ["only done", "no events", "no body", "html", "garbage", "not http", "nothing"])
def test_answers_without_a_token(kind: str) -> None:
    async def script(call: Call) -> None:
        match kind:
            case "only done":
                await call.begin()
                await call.delta(role="assistant", content="")
                await call.delta(finish="stop")
                await call.end()
            case "no events":
                await call.begin()
                await call.raw(b"0\r\n\r\n")
            case "no body":
                await call.json(204, "")
            case "html":
                await call.raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 4\r\n\r\n<p>x")
            case "garbage":
                await call.begin()
                await call.event("{not json")
                await call.end()
            case "not http":
                await call.raw(b"SSH-2.0-OpenSSH_9.6\r\n")
            case "nothing":
                call.writer.close()

    with serving(script) as fake:
        (record,) = load(fake.url).records
    expected = {
        "only done": "empty", "no events": "empty", "no body": "http 204", "html": "not an event stream",
        "garbage": "unreadable event", "not http": "not an HTTP/1.1 answer", "nothing": "connection closed",
    }  # fmt: skip
    assert record.outcome == expected[kind]
    assert record.ttft_s is None and record.itl_s == ()


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        started = time.monotonic()
        result = load(url, count=500, concurrency=8)
    assert outcomes(result) == {"connection refused": 500}
    assert time.monotonic() - started < 2
    summary = summarize([result])
    assert not summary.valid and summary.problem is not None and "connection refused" in summary.problem
    assert summary.output_tokens_per_s is None and summary.ttft_s.p50 is None


def test_a_port_that_hangs_up_at_once_does_not_hang_the_client() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async def main() -> LoadRun:
        async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            return await run_load(Target(url, "fake"), [Request(PROMPT, 4)] * 9, 3, timeout_s=5)

    result = run(main())
    assert set(outcomes(result)) <= {"connection reset", "connection closed"} and len(result.records) == 9
    assert result.wall_s < 2
