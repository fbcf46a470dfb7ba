"""Score text on a server that tells the log-probabilities of its next token alone, as llama-server does.

One position after another, each a request for one token. The server keeps the prefix in its slot, so a request computes
one token. The token that stands there is forced by a bias: what the server reports is of the logits before the sampler
(`post_sampling_probs` false), which a bias does not touch, so its log-probability is exact, however unlikely it is.
A token that is a part of a character is held back by llama-server, with its log-probability: then another token is
forced, and that one is looked up among the top k, or in the whole vocabulary.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import orjson

from qserve.errors import ServerError
from qserve.eval.endpoint import Endpoint
from qserve.eval.scored import Scored, Window

WHOLE_VOCABULARY = 10**7  # more than any has: the server gives what it has
FORCE = 1000.0  # logits


def score(client: httpx.Client, endpoint: Endpoint, windows: Sequence[Window], top_k: int) -> tuple[Scored, ...]:
    """Score the windows, side by side in the server's slots. Raises ServerError."""
    slots = [_Slot(client, endpoint, top_k, number) for number in range(min(_slots(client, endpoint), len(windows)))]
    plain = _plain_token(slots[0], windows[0])
    with ThreadPoolExecutor(len(slots)) as pool:
        shares = [windows[slot.number :: len(slots)] for slot in slots]
        done = list(pool.map(lambda slot, share: [_score_one(slot, w, plain) for w in share], slots, shares))
    return tuple(done[i % len(slots)][i // len(slots)] for i in range(len(windows)))


@dataclass(frozen=True)
class _Slot:
    """One slot of the server, whose cache holds the prefix of the window at work."""

    client: httpx.Client
    endpoint: Endpoint
    top_k: int
    number: int

    def ask(self, prefix: Window, forced: int, top: int) -> tuple[float, dict[int, float]] | None:
        """Log-probabilities after a prefix: of the forced token, and {id: logprob} of the most likely ones. None: the
        server holds this token back."""
        body = {
            "prompt": prefix, "n_predict": 1, "temperature": 0, "logit_bias": [[forced, FORCE]], "n_probs": top,
            "post_sampling_probs": False, "cache_prompt": True, "id_slot": self.number,
        }  # fmt: skip
        found = self._post(body).get("completion_probabilities") or []
        if not found:
            return None
        if found[0]["id"] != forced:
            raise ServerError(f"{self.endpoint.model} cannot score text: it chose another token than the forced one")
        return float(found[0]["logprob"]), {int(t["id"]): float(t["logprob"]) for t in found[0]["top_logprobs"]}

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        """Once more if the server had closed the idle connection."""
        for attempt in (1, 2):
            try:
                response = self.client.post(f"{self.endpoint.url}/completion", content=orjson.dumps(body))
                break
            except httpx.TransportError as error:
                if attempt == 2:
                    name = self.endpoint.model
                    raise ServerError(f"{name} stopped answering while its quality was scored: {error}") from error
        if response.status_code != 200:
            answer = f"(http {response.status_code}): {response.text[:200]}"
            raise ServerError(f"{self.endpoint.model} cannot score text {answer}")
        found: dict[str, Any] = orjson.loads(response.content)
        return found


def _slots(client: httpx.Client, endpoint: Endpoint) -> int:
    try:
        return int(client.get(f"{endpoint.url}/props").json()["total_slots"])
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise ServerError(f"{endpoint.model} does not say how many slots it has: {error!r}") from error


def _plain_token(slot: _Slot, window: Window) -> int:
    """A token of the text that the server does not hold back."""
    for token in window[1:]:
        if slot.ask(window[:1], token, 1) is not None:
            return token
    raise ServerError(f"{slot.endpoint.model} cannot score text: it gives no log-probabilities")


def _score_one(slot: _Slot, window: Window, plain: int) -> Scored:
    each = [_position(slot, window[:n], window[n], plain) for n in range(1, len(window))]
    return Scored(np.array([own for own, _ in each]), tuple(top for _, top in each))


def _position(slot: _Slot, prefix: Window, token: int, plain: int) -> tuple[float, dict[int, float]]:
    """Log-probability of the token that stands there, and {id: logprob} of the top k and itself."""
    if found := slot.ask(prefix, token, slot.top_k):
        own, top = found
    else:
        held = slot.ask(prefix, plain, slot.top_k)
        top = held[1] if held else {}
        if token not in top and (every := slot.ask(prefix, plain, WHOLE_VOCABULARY)):
            top |= {token: every[1][token]}
        own = top[token]
    return own, {**top, token: own}
