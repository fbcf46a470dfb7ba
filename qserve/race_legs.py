"""The legs of a race: one engine in one pass, its server alone on the machine, saved at once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qserve.artifacts import Machine
from qserve.engines import Installed
from qserve.errors import QserveError, ServerError
from qserve.eval import figures
from qserve.eval.endpoint import Endpoint
from qserve.eval.http_stream import parse_url
from qserve.eval.load import Request, Target, run
from qserve.eval.load_command import as_text, choose_body
from qserve.eval.race import BLOCKS, Leg
from qserve.eval.summary import summarize
from qserve.eval.throughput import Block, Plan
from qserve.prep.checkpoint import Prepared
from qserve.recipe import EngineName, Recipe
from qserve.serve import server
from qserve.serve.attach import Attached
from qserve.serve.engine import Engine, Subject
from qserve.workspace import Workspace

Say = Callable[[str], None]
PASSES = 2


@dataclass(frozen=True)
class Heat:
    """What every engine has to do: `rounds` rounds of `requests` requests, `concurrency` at a time."""

    requests: int
    concurrency: int
    rounds: int
    limit_s: float  # of all rounds of one engine

    @property
    def round_limit_s(self) -> float:
        return self.limit_s / self.rounds


@dataclass(frozen=True)
class Entry:
    """An engine of ours with the checkpoint it serves. `name`: the engine's; with the variant's, where the engine is in
    the race with another one, or would be taken for the naive loop."""

    name: str
    engine: EngineName
    prepared: Prepared


@dataclass(frozen=True)
class Inputs:
    """Everything a race needs, gathered and checked before anything starts."""

    recipe: Recipe
    recipe_file: Path
    workspace: Workspace
    data: Path
    machine: Machine
    entries: tuple[tuple[Entry, Installed], ...]
    attached: tuple[Attached, ...]
    heat: Heat
    say: Say


@dataclass(frozen=True)
class Course:
    """The run folder, and the requests: the same for every engine."""

    inputs: Inputs
    run: Path
    plan: Plan
    warm: tuple[tuple[Request, ...], ...]  # by pass
    rounds: tuple[tuple[Request, ...], ...]


def run_pass(course: Course, engines: Sequence[tuple[Entry, Engine]], number: int) -> None:
    """Each engine once; the second pass in the opposite order."""
    in_order = list(engines) if number % 2 == 0 else list(reversed(engines))
    for entry, engine in in_order:
        if not (path := leg_path(course.run, entry.name, number)).exists():
            course.inputs.say(f"pass {number + 1} of {PASSES}: starting {entry.engine} with {entry.prepared.variant}")
            _leg(course, entry, engine, number).write(path)
    for index, attached in enumerate(course.inputs.attached):
        if not (path := leg_path(course.run, f"attached{index}", number)).exists():
            course.inputs.say(f"pass {number + 1} of {PASSES}: {attached.url}")
            _attached_leg(course, attached, number).write(path)


def leg_path(folder: Path, name: str, number: int) -> Path:
    """Where an engine's leg of a pass lies."""
    return folder / f"leg-{name}-{number + 1}.json"


def _leg(course: Course, entry: Entry, engine: Engine, number: int) -> Leg:
    """One engine in one pass. What fails is a result, too."""
    recipe, prepared = course.inputs.recipe, entry.prepared
    at = ("127.0.0.1", server.free_port("127.0.0.1", 0))
    subject = Subject(prepared.variant, prepared.folder, recipe.variant(prepared.variant))
    log = course.run / f"server-{entry.name}-{number + 1}.log"
    try:
        with server.running(engine.launch(subject, at), log, course.inputs.say) as live:
            facts = engine.facts(live, log.name)
            course.inputs.say(f"{entry.name}: ready after {live.startup_s:.0f} s")
            unlike = Target(live.url, live.model) if entry.engine == "tgi" else None
            blocks = dict(_rounds(course, entry.name, number, _asker(course, live, unlike, number)))
            if not live.alive():
                raise ServerError(f"{entry.engine} died while it served: {server.first_error(log)}; log: {log}")
            peak = max((b.memory_bytes for b in blocks.values() if b.memory_bytes), default=None)
            memory = engine.memory(live, prepared.manifest.weights.total_bytes, peak)
            return Leg(facts=facts, memory=memory, blocks=BLOCKS.dump_json(blocks).decode())
    except QserveError as error:
        course.inputs.say(f"{entry.name}: failed: {error}")
        return Leg(problem=str(error))


Asked = tuple[Sequence[Request], int]


def _rounds(course: Course, name: str, number: int, block: Callable[[Asked], Block]) -> Iterator[tuple[int, Block]]:
    """A short round that counts for nothing, then this pass's share of the rounds."""
    heat = course.inputs.heat
    block((course.warm[number], heat.concurrency))
    for n in range(number, heat.rounds, PASSES):
        done = block((course.rounds[n], heat.concurrency))
        speed = figures.number(summarize([done.run]).output_tokens_per_s)
        course.inputs.say(f"{name}: round {n + 1} of {heat.rounds}: {speed} tok/s")
        yield n, done


def _asker(course: Course, live: Endpoint, unlike: Target | None, number: int) -> Callable[[Asked], Block]:
    """How a server is asked. `unlike`: one that may not know every wish of ours, so it is asked in a spelling that it
    takes: one that takes text alone gets words in place of token ids."""
    if unlike is None:
        return lambda asked: course.plan.block(live, *asked)
    first = replace(course.warm[number][0], max_tokens=2)
    target, probe, _ = run(choose_body(parse_url(unlike.url, unlike.api_key), unlike, first))

    def spelled(request: Request) -> Request:
        return as_text(request, len(request.prompt), probe.chat) if isinstance(probe.prompt, str) else request

    return lambda asked: course.plan.block(live, [spelled(r) for r in asked[0]], asked[1], target)


def _attached_leg(course: Course, attached: Attached, number: int) -> Leg:
    """A server that was running already."""
    try:
        unlike = Target(attached.url, attached.model, attached.api_key, dialect=attached.dialect)
        blocks = dict(_rounds(course, attached.url, number, _asker(course, attached, unlike, number)))
        return Leg(blocks=BLOCKS.dump_json(blocks).decode())
    except QserveError as error:
        course.inputs.say(f"{attached.url}: failed: {error}")
        return Leg(problem=str(error))
