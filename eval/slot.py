"""One slot of a load: a connection with one request on it, and the next request the moment that one is answered."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import assert_never

import orjson

from qserve.eval.answer import Answer
from qserve.eval.http_response import Response
from qserve.eval.http_stream import Address, Connection, connect, parse_url, reason_of
from qserve.eval.records import Request, RequestRecord, Target

Job = tuple[int, Request]  # its index and itself
OnDone = Callable[[RequestRecord], None]


def request_bytes(target: Target, address: Address, request: Request) -> bytes:
    """The bytes that ask for one streamed answer."""
    body: dict[str, object] = {
        "model": target.model, "max_tokens": request.max_tokens, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    body |= _wishes(target, request)
    if not request.chat:
        body["prompt"] = request.prompt
        return address.request("POST", "/v1/completions", orjson.dumps(body))
    body["messages"] = [{"role": "user", "content": request.prompt}]
    return address.request("POST", "/v1/chat/completions", orjson.dumps(body))


def _wishes(target: Target, request: Request) -> dict[str, object]:
    """Running token counts and a fixed length, as the server spells them.

    Special tokens are shown, so that an answer of nothing else is not taken for an empty one (llama.cpp has no such
    field for one request).
    """
    counts: dict[str, object]
    length: dict[str, object]
    match target.dialect:
        case "vllm":
            counts = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
            length = {"ignore_eos": True, "min_tokens": request.max_tokens, "skip_special_tokens": False}
        case "llama.cpp":
            counts, length = {"timings_per_token": True}, {"ignore_eos": True}
        case _:
            assert_never(target.dialect)
    return (counts if target.usage_each_chunk else {}) | (length if target.fixed_length else {})


class Load:
    """What the slots share: the work that is left, and what was seen."""

    def __init__(self, target: Target, requests: Sequence[Request], timeout_s: float, on_done: OnDone | None) -> None:
        self.target, self.timeout_s, self.on_done = target, timeout_s, on_done
        self.address = parse_url(target.url, target.api_key)
        self.start_s = time.perf_counter()
        self.cut_at_s: float | None = None
        self.unsent = len(requests)
        self.spans: list[tuple[float, float]] = []  # (send, end) of each request
        self.records: list[RequestRecord] = []
        self.lag_s = 0.0
        self._todo = enumerate(requests)

    def take(self) -> Job | None:
        """The next request; None if there is none left or the time is over."""
        job = next(self._todo, None) if self.cut_at_s is None else None
        self.unsent -= job is not None
        return job

    def refuse_all(self, reason: str) -> None:
        """No slot could connect: every request has failed, and there is no sense in knocking once for each."""
        self.start_s = now_s = time.perf_counter()
        while job := self.take():
            self.add(job, Answer(), (now_s, now_s), reason)

    def add(self, job: Job, answer: Answer, span: tuple[float, float], outcome: str) -> None:
        """Write down one request. `span`: its send and its end."""
        index, request = job
        sent_s, end_s = span
        record = RequestRecord(
            index=index,
            sent_s=sent_s - self.start_s,
            ttft_s=None if answer.first_at_s is None else answer.first_at_s - sent_s,
            e2e_s=end_s - sent_s,
            itl_s=tuple(answer.gaps_s),
            deltas=answer.deltas,
            prompt_tokens=answer.prompt_tokens,
            output_tokens=answer.output_tokens,
            outcome=outcome,
            answer_s=None if answer.answer_at_s is None else answer.answer_at_s - sent_s,
            asked_prompt_tokens=None if isinstance(request.prompt, str) else len(request.prompt),
            asked_output_tokens=request.max_tokens,
        )
        self.spans.append(span)
        self.records.append(record)
        if self.on_done:
            self.on_done(record)


class Slot:
    """One of N: it keeps a connection, and one request on it."""

    def __init__(self, load: Load) -> None:
        self.connection: Connection | None = None
        self.refusal = ""  # why the last attempt to connect failed
        self.sent_s = 0.0
        self._load = load
        self._job: Job | None = None  # in flight
        self._answer = Answer()
        self._retried = False
        self._wake = asyncio.Event()  # `run` is needed: for a new connection, or to end

    async def connect(self) -> None:
        self.connection = None
        try:
            self.connection = await connect(self._load.address, self)
        except OSError as error:
            self.refusal = reason_of(error)

    async def run(self) -> None:
        """Until nothing is left to send. Each turn of the loop is a connection; the first one is there already."""
        self._job = self._load.take()
        while self._job:
            if self.connection is None or not self.connection.open:
                self.sent_s, self._answer = time.perf_counter(), Answer()  # until it is really sent
                await self.connect()
            self._wake.clear()
            if self.connection is None:
                self.stop(self.refusal, time.perf_counter())
            elif self._job:
                self._send(self.connection)
                await self._wake.wait()

    def stop(self, outcome: str, now_s: float) -> None:
        """Give up the request in flight, and its connection; take the next one."""
        self.close()
        if self._job:
            self._load.add(self._job, self._answer, (self.sent_s, now_s), outcome)
            self._job, self._retried = self._load.take(), False
        self._wake.set()

    def overdue(self, now_s: float) -> bool:
        return self._job is not None and now_s - self.sent_s > self._load.timeout_s

    def close(self) -> None:
        if self.connection and self.connection.open:
            self.connection.drop()

    def _send(self, connection: Connection) -> None:
        assert self._job
        request = request_bytes(self._load.target, self._load.address, self._job[1])
        self._answer = Answer()
        self.sent_s = time.perf_counter()
        connection.send(request)

    def on_body(self, body: bytes, now_s: float) -> None:
        self._answer.feed(body, now_s)

    def on_end(self, response: Response, body: bytes, now_s: float, problem: str | None) -> None:
        """Send the next request first, then read the rest of the last answer and write it down."""
        connection, job, answer, sent_s = self.connection, self._job, self._answer, self.sent_s
        assert connection and job
        if problem and not response.started and connection.sent > 1 and not self._retried:
            self._retried = True  # the server had closed the idle connection: it never saw this request
            self._wake.set()
            return
        self._job, self._retried = self._load.take(), False
        if self._job and connection.open:
            self._send(connection)
        else:
            self._wake.set()
        answer.feed(body, now_s)
        self._load.add(job, answer, (sent_s, now_s), _outcome(response, answer, now_s, problem))


def _outcome(response: Response, answer: Answer, now_s: float, problem: str | None) -> str:
    """One word for how a request ended. `problem`: why the HTTP exchange is not whole."""
    if response.status != 200:
        return f"http {response.status}" if response.status else str(problem)
    if "text/event-stream" not in response.headers.get("content-type", "text/event-stream"):
        return "not an event stream"
    if problem and not answer.done and not answer.problem:  # a half event at the end is no event
        return "stream ended early" if problem == "connection closed" else problem
    return answer.end(now_s) or "ok"
