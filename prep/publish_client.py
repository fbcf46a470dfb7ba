"""The Hub client's HTTP client with every wait bounded: by itself it waits for ever, or as long as a server asks."""

import os
from typing import Any

from huggingface_hub.utils._http import default_client_factory

from qserve.errors import PublishError, UsageError
from qserve.prep.publish_errors import AGAIN
from qserve.uvrun import Say

LONGEST_WAIT_S = 310  # the Hub counts requests in windows of 300 s
TIMEOUT_S = 120.0  # for one answer: a commit of many files takes the Hub a while


def patient_client(say: Say) -> Any:
    """A client that gives up on silence after $QSERVE_HUB_TIMEOUT_S [120], and on a server that asks for a wait that is
    longer than its own windows."""

    def heed(response: Any) -> None:
        wait_s = _asked_wait_s(response)
        if wait_s is not None and wait_s > LONGEST_WAIT_S:
            raise PublishError(f"the Hub asks to wait {wait_s:,} s before the next request; wait, then {AGAIN}")
        if wait_s:
            say(f"the Hub answered {response.status_code} and asks to wait {wait_s} s")

    client = default_client_factory()
    client.timeout = _timeout_s()
    client.event_hooks = {**client.event_hooks, "response": [*client.event_hooks.get("response", ()), heed]}
    return client


def _timeout_s() -> float:
    text = os.environ.get("QSERVE_HUB_TIMEOUT_S", str(TIMEOUT_S))
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"QSERVE_HUB_TIMEOUT_S is {text!r}; give a number of seconds") from None


def _asked_wait_s(response: Any) -> int | None:
    """Retry-After of a refusal in seconds, or the time to the end of the window of requests; None if it names none."""
    if response.status_code not in (429, 503):
        return None
    window = response.headers.get("ratelimit", "").replace(" ", "").partition(";r=0;t=")[2]
    named = window or response.headers.get("retry-after", "")
    return int(named) if named.isdigit() else None
