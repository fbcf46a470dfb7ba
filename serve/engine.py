"""What an engine is: one way to turn a Checkpoint into a Server, its settings already chosen for model and machine.

One file of serve/ an engine. Each has a frozen class that fits `Engine`; qserve/engines.py lists them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from qserve.artifacts import Machine, Memory, ServerFacts
from qserve.recipe import EngineName, Serving
from qserve.serve.server import Launch, Server
from qserve.variants import Variant


@dataclass(frozen=True)
class Room:
    """What may be used: how many servers stand side by side, and the memory that is free now."""

    servers: int
    free_bytes: int
    weight_bytes: int  # of the largest checkpoint, on disk


@dataclass(frozen=True)
class Setting:
    """What an engine chooses its settings from. `config`: the config.json of the baseline. `concurrency`: the most
    requests at once that are to be expected."""

    serving: Serving
    config: Mapping[str, object]
    machine: Machine
    room: Room
    concurrency: int


@dataclass(frozen=True)
class Subject:
    """What is served: the folder of a finished checkpoint, under the model id `name`."""

    name: str
    folder: Path
    variant: Variant


class Engine(Protocol):
    """A frozen value: program and settings are chosen, the same for every checkpoint that it serves."""

    @property
    def name(self) -> EngineName: ...

    @property
    def identity(self) -> str:
        """Everything in it that decides figures: not the size of the KV cache, which follows the memory free now."""

    def unservable(self, variant: Variant) -> str | None:
        """Why it cannot serve this format on this machine; None where it can."""

    def launch(self, subject: Subject, at: tuple[str, int]) -> Launch:
        """The start command. `at`: host and port."""

    def facts(self, server: Server, log_name: str) -> ServerFacts:
        """What is really served, read out of the live server and its log."""

    def memory(self, server: Server, disk_bytes: int, peak_bytes: int | None) -> Memory:
        """Weights, KV cache and peak in separate columns; unknown is None."""
