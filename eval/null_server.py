"""A server that answers at once: what a load client can do at most, with nobody to wait for.

    python -m qserve.eval.null_server --port 0 --delay-ms 0

Speaks as much of the OpenAI API as the load client uses: /v1/models, and streamed /v1/completions and
/v1/chat/completions of `max_tokens` one-token events. Says on stdout where it listens.
"""

import argparse
import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import cast

import orjson

from qserve.errors import LoadError

MODEL = "null"
JSON_HEAD = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
MODELS = orjson.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]})


def chunk(event: bytes) -> bytes:
    """One server-sent event as one HTTP chunk."""
    return b"%x\r\ndata: %s\n\n\r\n" % (len(event) + 8, event)


@cache
def token_chunks(chat: bool, tokens: int) -> tuple[bytes, ...]:
    return tuple(token_chunk(chat, last=i == tokens - 1) for i in range(tokens))


@cache
def token_chunk(chat: bool, last: bool) -> bytes:
    delta = {"delta": {"content": " a"}} if chat else {"text": " a"}
    choice = {"index": 0, **delta, "logprobs": None, "finish_reason": "length" if last else None}
    kind = "chat.completion.chunk" if chat else "text_completion"
    return chunk(orjson.dumps({"id": "null-0", "object": kind, "created": 0, "model": MODEL, "choices": [choice]}))


def usage_chunk(prompt_tokens: int, output_tokens: int) -> bytes:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens}
    usage["total_tokens"] = prompt_tokens + output_tokens
    return chunk(orjson.dumps({"id": "null-0", "model": MODEL, "choices": [], "usage": usage}))


@dataclass(frozen=True)
class Pace:
    """Seconds before the first token, and between tokens."""

    first_s: float = 0.0
    next_s: float = 0.0


AT_ONCE = Pace()


class NullProtocol(asyncio.Protocol):
    """One client connection. Requests come one after another, as the load client sends them."""

    def __init__(self, tokens: int, pace: Pace) -> None:
        self.tokens, self.pace = tokens, pace
        self.received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.received += data
        head_end = self.received.find(b"\r\n\r\n") + 4
        if head_end < 4:
            return
        head = bytes(self.received[:head_end])
        _, _, length = head.lower().partition(b"content-length:")
        end = head_end + int(length.split(b"\r\n", 1)[0] or 0)
        if len(self.received) >= end:
            body = bytes(self.received[head_end:end])
            del self.received[:end]
            self.answer(head.split(b" ", 2)[1], body)

    def answer(self, path: bytes, body: bytes) -> None:
        match path:
            case b"/v1/completions" | b"/v1/chat/completions":
                self.stream(path == b"/v1/chat/completions", body)
            case b"/v1/models":
                self.transport.write(JSON_HEAD % (200, b"OK", len(MODELS)) + MODELS)
            case _:
                self.transport.write(JSON_HEAD % (404, b"Not Found", 0))

    def stream(self, chat: bool, body: bytes) -> None:
        job = orjson.loads(body)
        tokens = int(job.get("max_tokens") or self.tokens)
        prompt = job.get("prompt") or job["messages"][0]["content"]
        end = chunk(b"[DONE]") + b"0\r\n\r\n"
        if (job.get("stream_options") or {}).get("include_usage"):
            end = usage_chunk(len(prompt), tokens) + end
        pieces = (*token_chunks(chat, tokens), end)
        if self.pace == AT_ONCE:
            self.transport.write(STREAM_HEAD + b"".join(pieces))
        else:
            pieces = pieces if self.pace.next_s else (b"".join(pieces),)
            self.transport.write(STREAM_HEAD)
            asyncio.get_running_loop().call_later(self.pace.first_s, self.send, iter(pieces))

    def send(self, pieces: Iterator[bytes]) -> None:
        """Write the next piece, and call for the one after it."""
        piece = next(pieces, None)
        if piece is not None and not self.transport.is_closing():
            self.transport.write(piece)
            asyncio.get_running_loop().call_later(self.pace.next_s, self.send, pieces)


async def listen(port: int, tokens: int, pace: Pace) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: NullProtocol(tokens, pace), "127.0.0.1", port, backlog=4096)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


@contextlib.contextmanager
def null_server() -> Iterator[str]:
    """Its URL, with the server in a process of its own for as long as the block lasts."""
    command = [sys.executable, "-m", "qserve.eval.null_server", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            url = process.stdout.readline().strip()
            if not url:
                raise LoadError("the built-in null server did not start; its error is above")
            yield url
        finally:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer whose request has no max_tokens")
    parser.add_argument("--delay-ms", type=float, default=0, help="before the first token")
    parser.add_argument("--token-ms", type=float, default=0, help="between tokens")
    args = parser.parse_args()
    main_task = listen(args.port, args.tokens, Pace(args.delay_ms / 1e3, args.token_ms / 1e3))
    with contextlib.suppress(KeyboardInterrupt):
        try:
            import uvloop
        except ImportError:
            asyncio.run(main_task)
        else:
            uvloop.run(main_task)


if __name__ == "__main__":
    main()
