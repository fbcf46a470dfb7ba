"""A server that was running already: measured like one of ours, but neither started nor stopped.

What only the machine it runs on could tell (CPU time, memory, kernels) is not known.
"""

from dataclasses import dataclass, field

import httpx

from qserve.artifacts import Counters, Dialect, Scoring
from qserve.serve.info import RUNNING, WAITING, Info, first_of, probe
from qserve.serve.server import parse_metrics

COUNTERS = {
    "running": RUNNING, "waiting": WAITING, "prefix_queries": ("vllm:prefix_cache_queries_total",),
    "prefix_hits": ("vllm:prefix_cache_hits_total",),
}  # fmt: skip


@dataclass(frozen=True)
class Attached:
    """A live server at a URL, with what it said of itself when it was attached."""

    info: Info
    model: str
    api_key: str | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return self.info.url

    @property
    def scoring(self) -> Scoring | None:
        """It may be able to score, but whether it does so rightly cannot be held against a checkpoint."""
        return None

    @property
    def dialect(self) -> Dialect:
        return "llama.cpp" if self.info.engine == "llama-server" else "vllm"

    def cpu_s(self) -> None:
        """Not known."""

    def memory_bytes(self) -> None:
        """Not known."""

    def counters(self) -> Counters:
        """From /metrics, where it has one that is read without a key."""
        try:
            response = httpx.get(f"{self.url}/metrics", timeout=30, trust_env=False)
        except httpx.HTTPError:
            return Counters()
        found = parse_metrics(response.text) if response.status_code == 200 else {}
        return Counters(**{ours: first_of(found, theirs) for ours, theirs in COUNTERS.items()})


def attach(url: str, api_key: str | None, key_name: str) -> Attached:
    """Raises UsageError, ServerError: as of `probe`."""
    info = probe(url, api_key, key_name)
    return Attached(info, info.model, api_key)
