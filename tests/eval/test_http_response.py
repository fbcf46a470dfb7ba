"""Bytes of an HTTP answer, however they are split."""

import itertools
import random

import pytest

from qserve.eval.answer import Answer
from qserve.eval.http_response import HttpError, Response

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
