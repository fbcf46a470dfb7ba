"""A race: the same concurrent requests against each engine, and how much faster each is than the naive loop.

Servers of different engines cannot share a machine fairly, so they run one after another, in two passes of opposite
order (A B C, C B A): a machine that drifts steadily favours none. Each pass starts the server anew and sends its share
of the rounds. Round k has the same prompts for every engine, and no server sees a prompt twice. A ratio is over rounds
with the same prompts: geometric mean, 95 % t interval.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import TypeAdapter

from qserve.artifacts import Artifact, LoadSummary, Machine, Memory, Ratio, ServerFacts
from qserve.eval.compare import ratio
from qserve.eval.summary import summarize
from qserve.eval.throughput import Block, pool
from qserve.values import Frozen

NAIVE = "transformers"  # the engine that the others are held against
BLOCKS = TypeAdapter(dict[int, Block])


class Leg(Artifact):
    """One engine in one pass, saved as soon as it is done. `blocks`: round -> Block, as JSON."""

    facts: ServerFacts | None = None  # None: not a server of ours, or it did not start
    memory: Memory | None = None
    blocks: str = "{}"
    problem: str | None = None

    def rounds(self) -> dict[int, Block]:
        return BLOCKS.validate_json(self.blocks)


class Racer(Frozen):
    """One engine of a race."""

    name: str  # the engine, or the URL of a server that was running already
    served: str  # the checkpoint: its variant and what it is
    status: Literal["measured", "failed"]
    problem: str | None
    version: str | None
    kernels: tuple[str, ...]
    startups_s: tuple[float, ...]  # spawn to ready, one a pass
    memory: Memory | None
    load: LoadSummary | None  # all rounds pooled
    rounds_tokens_per_s: tuple[float | None, ...]
    throughput: Ratio | None  # to the naive loop, by rounds with the same prompts


class Race(Artifact):
    """race.json: one run of `qserve race`. Written last, so its presence means complete."""

    format: Literal[1] = 1
    run: str
    created: str  # ISO 8601, UTC
    qserve_version: str
    recipe_file: str
    model: str
    source_note: str | None
    machine: Machine
    requests: int  # a round
    concurrency: int
    rounds: int
    prompt_tokens: int
    output_tokens: int
    round_limit_s: float  # a round is cut here
    racers: tuple[Racer, ...]
    wall_s: float


class Starter(Frozen):
    """Who raced: a name, and what was served."""

    name: str
    served: str


def standings(starters: Sequence[Starter], legs: Mapping[str, Sequence[Leg]]) -> tuple[Racer, ...]:
    """One Racer a starter, in their order; legs by starter's name."""
    blocks = {name: _blocks(own) for name, own in legs.items()}
    naive = blocks.get(NAIVE, {})
    return tuple(_racer(starter, legs[starter.name], blocks[starter.name], naive) for starter in starters)


def _blocks(legs: Sequence[Leg]) -> dict[int, Block]:
    found = {n: block for leg in legs for n, block in leg.rounds().items()}
    return dict(sorted(found.items()))


def _racer(starter: Starter, legs: Sequence[Leg], own: dict[int, Block], naive: dict[int, Block]) -> Racer:
    facts = [leg.facts for leg in legs if leg.facts]
    problem = next((leg.problem for leg in legs if leg.problem), None)
    load = pool(list(own.values())) if own else None
    speeds = {n: summarize([block.run]).output_tokens_per_s for n, block in own.items()}
    theirs = {n: summarize([block.run]).output_tokens_per_s for n, block in naive.items()}
    to_naive = ratio([(v, theirs.get(n)) for n, v in speeds.items()], higher_is_faster=True)
    valid = load is not None and load.valid and bool(naive) and pool(list(naive.values())).valid
    return Racer(
        name=starter.name, served=starter.served, status="measured" if own and not problem else "failed",
        problem=problem, version=facts[0].version if facts else None, kernels=facts[0].kernels if facts else (),
        startups_s=tuple(f.startup_s for f in facts), memory=_memory(legs), load=load,
        rounds_tokens_per_s=tuple(speeds.values()),
        throughput=to_naive if valid and starter.name != NAIVE else None,
    )  # fmt: skip


def _memory(legs: Sequence[Leg]) -> Memory | None:
    """Of the first pass, with the highest peak of both."""
    known = [leg.memory for leg in legs if leg.memory]
    peaks = [m.peak_bytes for m in known if m.peak_bytes is not None]
    return known[0].model_copy(update={"peak_bytes": max(peaks, default=None)}) if known else None
