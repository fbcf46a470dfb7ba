"""HTTP/1.1 for a load client: one exchange at a time on a kept-alive connection, in plain asyncio callbacks.

Bytes are stamped the moment the event loop hands them over, and a listener may send its next request from inside the
callback that ends the last one, so a connection is never idle for a trip through the scheduler.
"""

import asyncio
import errno
import socket
import ssl
import time
from dataclasses import dataclass, field
from typing import Protocol, cast
from urllib.parse import urlsplit

from qserve.errors import UsageError
from qserve.eval.http_response import HttpError, Response

CONNECT_TIMEOUT_S = 10.0


# --- where to connect ----------
@dataclass(frozen=True)
class Address:
    """A server, and the key it wants. The key is kept out of `repr`, so that no message can show it."""

    host: str
    port: int
    authority: str  # as the Host header spells it
    path: str  # in front of /v1; "" for most servers
    tls: ssl.SSLContext | None
    api_key: str | None = field(default=None, repr=False)

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of one request."""
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        head = (
            f"{method} {self.path}{path} HTTP/1.1\r\nHost: {self.authority}\r\n{key}Accept-Encoding: identity\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode("latin-1") + body


def parse_url(url: str, api_key: str | None = None) -> Address:
    """Read `http://host:port`, with or without `/v1` at its end.

    Raises:
        UsageError: no http or https URL, or a key that cannot stand in a header.
    """
    if "@" in url:
        raise UsageError("the URL has a user or a password in it; put the key into the environment instead")
    try:
        parts = urlsplit(url.strip())
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")  # as the look-up of its address does
    except ValueError as error:
        raise UsageError(f"{url!r} is no URL ({error}); write http://HOST:PORT") from error
    if parts.scheme not in ("http", "https") or not host:
        raise UsageError(f"{url!r} is no http or https URL; write http://HOST:PORT")
    key = (api_key or "").strip()
    if not all(33 <= ord(char) <= 126 for char in key):
        raise UsageError("the API key has spaces or characters that no header can carry; set it again")
    return Address(
        host=host,
        port=port or (443 if parts.scheme == "https" else 80),
        authority=parts.netloc,
        path=parts.path.rstrip("/").removesuffix("/v1"),
        tls=ssl.create_default_context() if parts.scheme == "https" else None,
        api_key=key or None,
    )


def reason_of(error: BaseException) -> str:
    """A short reason for a connection that failed, without addresses, so that equal failures count together."""
    if isinstance(error, ConnectionRefusedError) or f"[Errno {errno.ECONNREFUSED}]" in str(error):
        return "connection refused"  # a name with two addresses gives one OSError that quotes both
    match error:
        case ssl.SSLCertVerificationError():
            return f"certificate not accepted: {error.verify_message}"
        case ssl.SSLError():
            return "TLS handshake failed"
        case socket.gaierror():
            return "host not found"
        case TimeoutError():
            return "connect timeout"
        case ConnectionResetError() | BrokenPipeError():
            return "connection reset"
        case OSError() if error.strerror:
            return error.strerror.lower()
        case _:
            return type(error).__name__


# --- one connection ----------
class Listener(Protocol):
    """Who sends on a connection. Times are `time.perf_counter()`."""

    def on_body(self, body: bytes, now_s: float) -> None: ...

    def on_end(self, response: Response, body: bytes, now_s: float, problem: str | None) -> None:
        """The last body bytes, and why the answer is not whole. The next request may be sent from here."""
        ...


class Connection(asyncio.Protocol):
    """A kept-alive connection with at most one request on it."""

    def __init__(self, listener: Listener) -> None:
        self.open = False
        self.sent = 0  # requests
        self._listener = listener
        self._response: Response | None = None  # of the request in flight

    def send(self, request: bytes) -> None:
        self.sent += 1
        self._response = Response()
        self._transport.write(request)

    def drop(self) -> None:
        """Leave, without a call to the listener; a request in flight is abandoned."""
        self._response = None
        self.open = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.open = True

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        response = self._response
        if response is None:
            return self.drop()  # bytes that nobody asked for
        try:
            body = response.feed(data)
        except HttpError as error:
            self.drop()
            return self._listener.on_end(response, b"", now_s, str(error))
        if not response.done:
            return self._listener.on_body(body, now_s) if body else None
        self._response = None
        if not response.keep_alive:
            self.drop()
        return self._listener.on_end(response, body, now_s, None)

    def connection_lost(self, error: Exception | None) -> None:
        now_s, response = time.perf_counter(), self._response
        self.open, self._response = False, None
        if response is not None:
            lost = reason_of(error) if error else "connection closed"
            self._listener.on_end(response, b"", now_s, None if response.closed() else lost)


async def connect(address: Address, listener: Listener) -> Connection:
    """Raises OSError (TimeoutError and ssl.SSLError are ones); `reason_of` words it."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        _, connection = await loop.create_connection(
            lambda: Connection(listener), address.host, address.port, ssl=address.tls
        )
    if not connection.open:
        raise ConnectionResetError
    return connection


class _Collector:
    """Listener for one whole answer."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.ended: asyncio.Future[tuple[int, str | None]] = asyncio.get_running_loop().create_future()

    def on_body(self, body: bytes, now_s: float) -> None:
        self.pieces.append(body)

    def on_end(self, response: Response, body: bytes, now_s: float, problem: str | None) -> None:
        self.pieces.append(body)
        if not self.ended.done():
            self.ended.set_result((response.status, problem))


async def fetch(address: Address, request: bytes, timeout_s: float) -> tuple[int, bytes]:
    """One request on a connection of its own: status and whole body.

    Raises:
        OSError: no connection; `reason_of` words it.
        HttpError: no answer in `timeout_s`, one that is not whole, or no HTTP.
    """
    collector = _Collector()
    connection = await connect(address, collector)
    try:
        connection.send(request)
        async with asyncio.timeout(timeout_s):
            status, problem = await collector.ended
    except TimeoutError as error:
        raise HttpError(f"no answer in {timeout_s:.0f} s") from error
    finally:
        connection.drop()
    if problem:
        raise HttpError(problem)
    return status, b"".join(collector.pieces)
