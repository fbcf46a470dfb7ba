"""What a measurement needs of a server. The stages meet in this shape, not in a class."""

from typing import Protocol


class Endpoint(Protocol):
    """A live OpenAI-compatible server that can also be looked at from outside."""

    @property
    def url(self) -> str: ...

    @property
    def model(self) -> str: ...

    def metrics(self) -> dict[str, float]:
        """Counters and gauges by name; empty where the server has none."""

    def cpu_s(self) -> float:
        """CPU seconds used so far by all of its processes."""

    def memory_bytes(self) -> int | None:
        """Memory that its processes hold now."""
