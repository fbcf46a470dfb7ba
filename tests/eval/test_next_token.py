"""Scoring token by token, against a small server with llama-server's /props and /completion: known probabilities, a
token that it holds back, and idle connections that it closes."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from qserve.errors import ServerError
from qserve.eval.quality import score

VOCABULARY = 50
HELD_BACK = 7  # a part of a character


def logprob(prefix: list[int], token: int) -> float:
    """A distribution that depends on the last token: token t has weight 1 / (1 + distance)."""
    weights = [1 / (1 + abs(t - prefix[-1])) for t in range(VOCABULARY)]
    return math.log(weights[token] / sum(weights))


class Llama(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    lock: ClassVar[Lock] = Lock()
    prefixes: ClassVar[dict[int, list[int]]] = {}
    computed = 0
    answers = 0
    hang_up_every = 0
    status = 200

    def do_GET(self) -> None:
        self.reply({"total_slots": 3})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            Llama.answers += 1
            if self.hang_up_every and self.answers % self.hang_up_every == 0:
                self.close_connection = True
                return
            self.reply(self.complete(body))

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["n_predict"] == 1
        assert body["cache_prompt"] is True
        assert body["post_sampling_probs"] is False
        prefix, kept = body["prompt"], self.prefixes.get(body["id_slot"], [])
        common = next((i for i, (a, b) in enumerate(zip(prefix, kept, strict=False)) if a != b), len(kept))
        Llama.computed += max(len(prefix) - common, 1)
        self.prefixes[body["id_slot"]] = prefix
        ((forced, bias),) = body["logit_bias"]
        assert bias > 100
        if forced == HELD_BACK:
            return {"content": ""}
        ranked = sorted(range(VOCABULARY), key=lambda t: -logprob(prefix, t))[: body["n_probs"]]
        top = [{"id": t, "logprob": logprob(prefix, t)} for t in ranked]
        return {"completion_probabilities": [{"id": forced, "logprob": logprob(prefix, forced), "top_logprobs": top}]}

    def reply(self, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serving(**how: int) -> Iterator[Any]:
    Llama.prefixes, Llama.computed, Llama.answers = {}, 0, 0
    handler = type("Handler", (Llama,), how)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}", model="m", scoring="next_token")
        server.shutdown()


WINDOWS = [(1, 2, 40, HELD_BACK, 6, 49, HELD_BACK), (9, HELD_BACK, 10, 3, 4, 5, 6), (30, 31, 2, 8, 9, 48, 0)] * 2


@pytest.mark.parametrize("hang_up_every", [0, 5])
def test_every_position_has_its_exact_probability(hang_up_every: int) -> None:
    with serving(hang_up_every=hang_up_every) as endpoint:
        found = score(endpoint, WINDOWS, top_k=4, budget_s=60)
    assert len(found) == 6
    for window, one in zip(WINDOWS, found, strict=True):
        assert len(one.logprobs) == 6
        for n, (own, top) in enumerate(zip(one.logprobs, one.top, strict=True), 1):
            prefix = list(window[:n])
            assert own == pytest.approx(logprob(prefix, window[n]))
            assert top == pytest.approx({t: logprob(prefix, t) for t in top})
            assert window[n] in top
            assert len(top) in (4, 5)


def test_a_position_costs_one_token() -> None:
    window = tuple(t % 6 for t in range(1, 40))
    with serving() as endpoint:
        score(endpoint, [window], top_k=4, budget_s=60)
        assert Llama.computed <= Llama.answers + 2


def test_a_server_that_cannot_is_said_to() -> None:
    with serving(status=501) as endpoint, pytest.raises(ServerError, match="m cannot score text"):
        score(endpoint, WINDOWS, top_k=4, budget_s=60)
