"""A scripted OpenAI server on loopback, in a thread with an event loop of its own. A script decides each answer."""

import asyncio
import contextlib
import json
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

MODELS = {"object": "list", "data": [{"id": "fake", "object": "model", "max_model_len": 4096}]}


@dataclass
class Call:
    """One request as the server saw it, and the way to answer it."""

    number: int  # of all requests for a completion
    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    body_bytes: int
    writer: asyncio.StreamWriter

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def json(self, status: int, value: object, **headers: str) -> None:
        data = json.dumps(value).encode()
        extra = "".join(f"{name}: {text}\r\n" for name, text in headers.items())
        await self.raw(f"HTTP/1.1 {status} X\r\n{extra}Content-Length: {len(data)}\r\n\r\n".encode() + data)

    async def begin(self, **headers: str) -> None:
        extra = "".join(f"{name}: {text}\r\n" for name, text in headers.items())
        head = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{extra}Transfer-Encoding: chunked\r\n\r\n"
        await self.raw(head.encode())

    async def event(self, value: object) -> None:
        await self.line("data: " + (value if isinstance(value, str) else json.dumps(value)))

    async def line(self, text: str) -> None:
        data = f"{text}\n\n".encode()
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    async def text(self, text: str, finish: str | None = None) -> None:
        await self.event({"choices": [{"index": 0, "text": text, "finish_reason": finish}], "usage": None})

    async def delta(self, finish: str | None = None, **delta: object) -> None:
        await self.event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    async def usage(self, output_tokens: int, prompt_tokens: int | None = None) -> None:
        if prompt_tokens is None:
            prompt_tokens = len(self.body.get("prompt", ""))
        await self.event({"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens}})

    async def end(self) -> None:
        await self.event("[DONE]")
        await self.raw(b"0\r\n\r\n")

    async def answer(self, text: str = " a") -> None:
        """A whole good answer of `max_tokens` tokens."""
        tokens = self.body["max_tokens"]
        await self.begin()
        for i in range(tokens):
            await self.text(text, "length" if i == tokens - 1 else None)
        await self.usage(tokens)
        await self.end()

    def hang_up(self) -> None:
        self.writer.transport.abort()


Script = Callable[[Call], Awaitable[None]]


@dataclass
class FakeOpenAI:
    """What a test may look at."""

    script: Script
    models: object = field(default_factory=lambda: MODELS)
    close_after_answer: bool = False  # without a word about it in the head
    url: str = ""
    calls: list[Call] = field(default_factory=list)
    in_flight: int = 0
    peak: int = 0
    connections: int = 0

    async def client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while not writer.is_closing():
                await self.one(reader, writer)
                if self.close_after_answer:
                    break
        writer.close()

    async def one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.lower(): text.strip() for name, _, text in (line.partition(":") for line in lines)}
        data = await reader.readexactly(int(headers.get("content-length", 0)))
        body = json.loads(data) if data else {}
        call = Call(len(self.calls), method, path, headers, body, len(data), writer)
        if path == "/v1/models":
            return await call.json(200, self.models)
        self.calls.append(call)
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            await self.script(call)
        finally:
            self.in_flight -= 1


@contextlib.contextmanager
def serving(script: Script, tls: ssl.SSLContext | None = None, **settings: Any) -> Iterator[FakeOpenAI]:
    """The server, for as long as the block lasts."""
    fake, loop = FakeOpenAI(script, **settings), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> asyncio.Server:
        return await asyncio.start_server(fake.client, "127.0.0.1", 0, limit=2**24, backlog=1024, ssl=tls)

    async def stop() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    fake.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(server.close)
        asyncio.run_coroutine_threadsafe(stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
