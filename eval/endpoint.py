"""What a measurement needs of a server. The stages meet in this shape, not in a class."""

from typing import Protocol

from qserve.artifacts import Counters, Dialect, Scoring


class Endpoint(Protocol):
    """A live OpenAI-compatible server that can also be looked at from outside."""

    @property
    def url(self) -> str: ...

    @property
    def model(self) -> str: ...

    @property
    def scoring(self) -> Scoring | None:
        """How it scores a text; None: it cannot."""

    @property
    def dialect(self) -> Dialect:
        """Which wishes beyond OpenAI's API it understands."""

    def counters(self) -> Counters:
        """What it counts of its own, now."""

    def cpu_s(self) -> float | None:
        """CPU seconds used so far by all of its processes; None: not known."""

    def memory_bytes(self) -> int | None:
        """Memory that its processes hold now; None: not known."""
