"""Incremental reader of one HTTP/1.1 response (RFC 9112): a body that is chunked, has a length, or ends with the
connection, whatever the split of bytes."""

LINE_LIMIT_BYTES = 65536  # a head or a chunk-size line longer than this is no HTTP


class HttpError(Exception):
    """The peer broke the protocol. `str(error)` is the reason, as it stands in a record."""


class Response:
    """Incremental reader of one response. `feed` takes bytes in any split and gives back the body bytes in them."""

    __slots__ = ("_left", "_mode", "_rest", "done", "headers", "keep_alive", "started", "status")

    def __init__(self) -> None:
        self.status = 0  # 0 until the head is complete
        self.headers: dict[str, str] = {}  # names in lower case
        self.started = self.done = False
        self.keep_alive = True
        self._mode = "head"  # then one of: chunked, trailer, length, close
        self._left = 0  # bytes to come: of the body, or of the chunk with the CRLF behind it
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Raises HttpError where the bytes are no HTTP/1.1 response."""
        self.started = True
        if self._rest:
            data, self._rest = self._rest + data, b""
        if self._mode == "head":
            data = self._read_head(data)
        match self._mode:
            case "chunked" | "trailer":
                return self._read_chunks(data)
            case "length":
                return self._read_length(data)
            case _:
                return data

    def closed(self) -> bool:
        """The connection ended here. Returns whether the response is whole."""
        self.done = self.done or self._mode == "close"
        return self.done

    def _read_head(self, data: bytes) -> bytes:
        """Returns what stands behind the head; keeps an unfinished head for the next call."""
        if not data.startswith(b"HTTP/1."[: len(data)]):
            raise HttpError("not an HTTP/1.1 answer")
        head, found, behind = data.partition(b"\r\n\r\n")
        if not found:
            self._keep(data)
            return b""
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not rest[:3].isdigit():
            raise HttpError("not an HTTP/1.1 answer")
        if rest[0] == "1":  # 1xx: the answer itself is still to come
            return self._read_head(behind) if behind else b""
        self.status = int(rest[:3])
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._choose_mode(version)
        return behind

    def _choose_mode(self, version: str) -> None:
        """How the body ends, RFC 9112 section 6.3."""
        connection = self.headers.get("connection", "").lower()
        self.keep_alive = "close" not in connection and (version != "HTTP/1.0" or "keep-alive" in connection)
        length = self.headers.get("content-length", "")
        if self.status in (204, 304):
            self._mode = "length"
        elif "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._mode = "chunked"
        elif length.isdigit():
            self._mode, self._left = "length", int(length)
        else:
            self._mode, self.keep_alive = "close", False
        self.done = self._mode == "length" and self._left == 0

    def _read_length(self, data: bytes) -> bytes:
        body = data[: self._left]
        self._left -= len(body)
        self._finish(self._left == 0, spare=len(data) > len(body))
        return body

    def _read_chunks(self, data: bytes) -> bytes:
        pieces = []
        at, end, left = 0, len(data), self._left  # left: of a chunk, with the CRLF behind it
        while at < end and not self.done:
            if not left:
                stop = data.find(b"\r\n", at)
                if stop < 0:
                    self._keep(data[at:])
                    break
                left = self._read_line(data[at:stop])
                at = stop + 2
            elif left <= end - at:  # all of a chunk
                at += left
                pieces.append(data[at - left : at - 2])
                if data[at - 2 : at] != b"\r\n":
                    raise HttpError("broken chunk")
                left = 0
            else:  # a part: pass on its payload, keep a lone CR
                payload_end = min(end, at + left - 2)
                pieces.append(data[at:payload_end])
                left -= payload_end - at
                self._rest = data[payload_end:]
                break
        self._left = left
        self._finish(self.done, spare=self.done and at < end)
        return b"".join(pieces)

    def _read_line(self, line: bytes) -> int:
        """A chunk's size line, or a line of the trailer, which an empty line ends. Returns the bytes that follow."""
        if self._mode == "trailer":
            self.done = not line
            return 0
        try:
            size = int(line, 16)
        except ValueError:
            size = _size_with_extension(line)
        if size < 0:
            raise HttpError("broken chunk")
        if size == 0:
            self._mode = "trailer"
            return 0
        return size + 2

    def _keep(self, data: bytes) -> None:
        if len(data) > LINE_LIMIT_BYTES:
            raise HttpError("not an HTTP/1.1 answer")
        self._rest = data

    def _finish(self, done: bool, spare: bool) -> None:
        self.done = done
        if spare:  # bytes behind the end: nobody can say whose they are
            self.keep_alive = False


def _size_with_extension(line: bytes) -> int:
    """`1a;name=value`; -1 if it is no size at all."""
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError:
        return -1
