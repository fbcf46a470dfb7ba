"""The load client against a scripted server: what it counts, what it times, and what it refuses to call a success."""

import asyncio
import itertools
import random
import shutil
import socket
import ssl
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
from fake_openai import Call, serving

from qserve.eval.answer import Answer
from qserve.eval.http_response import HttpError, Response
from qserve.eval.load import LoadRun, Request, Target, mean_in_flight, run, run_load
from qserve.eval.summary import summarize

PROMPT = tuple(range(100, 116))


def load(url: str, count: int = 1, concurrency: int = 1, tokens: int = 4, **options: float) -> LoadRun:
    requests = [Request(PROMPT, tokens) for _ in range(count)]
    return run(run_load(Target(url, "fake"), requests, concurrency, **options))


def outcomes(result: LoadRun) -> dict[str, int]:
    return dict(Counter(record.outcome for record in result.records))


async def good(call: Call) -> None:
    await call.answer()


# --- what a first token is ----------
def test_ttft_is_the_first_text_not_the_role_chunk() -> None:
    async def script(call: Call) -> None:
        await call.begin()
        await asyncio.sleep(0.005)
        await call.delta(role="assistant", content="")
        await call.line(": ping")
        await call.delta(content="")
        await asyncio.sleep(0.295)
        await call.delta(content="Hello")
        await asyncio.sleep(0.05)
        await call.delta(content=" there", finish="stop")
        await call.usage(2, prompt_tokens=9)
        await call.end()

    with serving(script) as fake:
        request = Request("Say hello", 2, chat=True)
        (record,) = run(run_load(Target(fake.url, "fake"), [request], 1)).records
    assert fake.calls[0].path == "/v1/chat/completions"
    assert fake.calls[0].body["messages"] == [{"role": "user", "content": "Say hello"}]
    assert record.outcome == "ok"
    assert record.ttft_s == pytest.approx(0.3, abs=0.1) and record.ttft_s >= 0.29
    assert len(record.itl_s) == 1 and 0.04 < record.itl_s[0] < 0.2
    assert (record.deltas, record.prompt_tokens, record.output_tokens) == (2, 9, 2)
    assert record.answer_s is None


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_a_token_and_the_answer_comes_later(name: str) -> None:
    async def script(call: Call) -> None:
        await call.begin()
        await call.delta(role="assistant", content=None)
        await asyncio.sleep(0.05)
        for _ in range(20):
            await call.delta(**{name: "hm", "content": None})
        await asyncio.sleep(0.2)
        await call.delta(content="42", finish="stop")
        await call.usage(21)
        await call.end()

    with serving(script) as fake:
        (record,) = load(fake.url).records
    assert record.outcome == "ok" and record.deltas == 21 and record.output_tokens == 21
    assert record.ttft_s is not None and 0.045 < record.ttft_s < 0.2
    assert record.answer_s is not None and record.answer_s >= 0.245


def test_a_tool_call_is_an_answer() -> None:
    async def script(call: Call) -> None:
        await call.begin()
        await call.delta(role="assistant")
        await call.delta(tool_calls=[{"index": 0, "function": {"name": "f", "arguments": ""}}])
        await call.delta(finish="tool_calls")
        await call.end()

    with serving(script) as fake:
        (record,) = load(fake.url).records
    assert (record.outcome, record.deltas) == ("ok", 1)
    assert record.output_tokens is None  # the server sent no usage: not known, not 0


def test_tokens_are_the_servers_count() -> None:
    async def script(call: Call) -> None:
        await call.begin()
        await asyncio.sleep(0.02)  # so that the client's own share of the time is small
        for text in ("a", "", "\N{SNOWMAN} b c"):  # no text for half a character, then several tokens in one chunk
            await call.text(text)
        await call.text("", "length")
        await call.usage(5)
        await call.end()

    with serving(script) as fake:
        result = load(fake.url, count=3, tokens=5)
    assert [record.output_tokens for record in result.records] == [5, 5, 5]
    assert [record.deltas for record in result.records] == [2, 2, 2]
    summary = summarize([result])
    assert (summary.output_tokens, summary.prompt_tokens, summary.counted_by) == (15, 48, "usage")
    assert summary.valid, summary.problem


# --- failures ----------
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


# --- connections ----------
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


# --- the cut ----------
def test_the_cut_keeps_tokens_and_first_tokens_but_no_end() -> None:
    async def script(call: Call) -> None:
        await call.begin()
        for i in range(1000):
            await call.event({
                "choices": [{"index": 0, "text": " a", "finish_reason": None}],
                "usage": {"prompt_tokens": 16, "completion_tokens": 2 * (i + 1)},
            })  # fmt: skip
            await asyncio.sleep(0.02)

    with serving(script) as fake:
        target = Target(fake.url, "fake", usage_each_chunk=True)
        result = run(run_load(target, [Request(PROMPT, 2000)] * 10, 4, cut_after_s=0.3))
        assert fake.calls[0].body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert outcomes(result) == {"cut": 4}  # the other six were never sent, so they are not attempts
    assert all(r.output_tokens == 2 * r.deltas > 4 for r in result.records)
    assert result.wall_s == pytest.approx(0.3, abs=0.15)
    assert result.delivered_concurrency == pytest.approx(4, abs=0.2)
    summary = summarize([result])
    assert (summary.attempted, summary.ok, summary.cut) == (4, 0, 4)
    assert summary.output_tokens_per_s == pytest.approx(summary.output_tokens / result.wall_s)
    assert summary.requests_per_s is None and summary.e2e_s.n == 0
    assert summary.ttft_s.n == 4 and summary.itl_s.p50 == pytest.approx(0.02, abs=0.01)
    assert summary.valid and summary.problem is not None and "no request was complete" in summary.problem


def test_llama_cpp_counts_in_its_own_words() -> None:
    async def script(call: Call) -> None:
        await call.begin()
        for i in range(1000):
            await call.event({
                "choices": [{"index": 0, "text": " a", "finish_reason": None}],
                "timings": {"cache_n": 3, "prompt_n": 13, "predicted_n": 2 * (i + 1)},
            })  # fmt: skip
            await asyncio.sleep(0.02)

    with serving(script) as fake:
        target = Target(fake.url, "fake", usage_each_chunk=True, dialect="llama.cpp")
        result = run(run_load(target, [Request(PROMPT, 2000)], 1, cut_after_s=0.3))
        body = fake.calls[0].body
    assert (body["timings_per_token"], body["ignore_eos"], body["stream_options"]) == (
        True, True, {"include_usage": True},
    )  # fmt: skip
    assert not {"min_tokens", "skip_special_tokens"} & set(body)
    (record,) = result.records
    assert (record.outcome, record.prompt_tokens, record.output_tokens) == ("cut", 16, 2 * record.deltas)


# --- bytes ----------
CHUNKED = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX: y\r\n\r\n"
    b'6\r\ndata: \r\n1A;name=value\r\n{"choices":[{"text":"a"}]}\r\n2\r\n\n\n\r\nF\r\n: ping\r\n\r\ndata:\r\n7\r\n'
    b" [DONE]\r\n002\r\n\n\n\r\n0\r\nTrailer: 1\r\n\r\n"
)
LENGTH = b'HTTP/1.1 200 OK\r\nContent-Length: 49\r\n\r\ndata: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n\n'
CLOSED = b'HTTP/1.0 200 OK\r\n\r\ndata: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n'


def read(pieces: list[bytes]) -> tuple[bytes, bool, bool, int]:
    """Body, whether it is whole, whether the connection can be used again, text deltas in it."""
    response, answer, body = Response(), Answer(), b""
    for piece in pieces:
        part = response.feed(piece)
        answer.feed(part, 1.0)
        body += part
    whole = response.closed()
    assert answer.end(1.0) is None
    return body, whole, response.keep_alive, answer.deltas


@pytest.mark.parametrize("data", [CHUNKED, LENGTH, CLOSED])
def test_any_split_of_the_bytes_reads_the_same(data: bytes) -> None:
    whole = read([data])
    assert whole[1:] == (True, data is not CLOSED, 1)
    assert b"data: [DONE]\n\n" in whole[0] and b'{"choices":[{"text":"a"}]}' in whole[0]
    splits = [(cut,) for cut in range(1, len(data))]
    rng = random.Random(0)
    splits += [tuple(sorted(rng.sample(range(1, len(data)), rng.randint(2, 9)))) for _ in range(1000)]
    splits.append(tuple(range(1, len(data))))  # byte by byte
    seen = 0
    for cuts in splits:
        edges = (0, *cuts, len(data))
        assert read([data[a:b] for a, b in itertools.pairwise(edges)]) == whole, cuts
        seen += 1
    assert seen == len(data) + 1000


@pytest.mark.parametrize("bad", [b"5\r\nabcdeXX", b"-1\r\n", b"zz\r\n", b"\r\n"])
def test_broken_chunks_are_errors(bad: bytes) -> None:
    response = Response()
    response.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    with pytest.raises(HttpError):
        response.feed(bad)


def test_bytes_behind_the_end_forbid_reuse() -> None:
    response = Response()
    assert response.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\n") == b"ok"
    assert response.done and not response.keep_alive


# --- what was delivered ----------
def test_mean_in_flight_is_until_the_last_send() -> None:
    spans = [(0.0, 2.0), (0.0, 1.0), (1.5, 4.0), (2.0, 9.0)]  # two slots; one was idle from 1.0 to 1.5
    assert mean_in_flight(spans, 2, None) == pytest.approx((2.0 + 1.0 + 0.5) / 2.0)
    assert mean_in_flight(spans, 2, 4.0) == pytest.approx((2.0 + 1.0 + 2.5 + 2.0) / 4.0)
    assert mean_in_flight(spans[:2], 2, None) == 2.0  # each slot sent once
    assert mean_in_flight([], 2, None) is None
