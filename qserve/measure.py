"""Measure every variant of a run beside bf16. This is where serve/ and eval/ meet; neither knows the other.

    together    bf16 up all the time, each variant in its turn beside it: blocks alternate
    in rounds   where two do not fit: bf16 | variant variant | bf16, each half with the other's prompts

Each variant becomes a Part, saved at once, so that an interrupted run goes on where it stopped. A variant that fails
is a result too: it says why.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from qserve.artifacts import Artifact, DataParts, Machine, Memory, VariantResult
from qserve.engines import Installed
from qserve.errors import QserveError, ServerError
from qserve.eval import fidelity, quality, throughput
from qserve.eval.throughput import Pair, Plan, Prompts
from qserve.prep.checkpoint import Prepared
from qserve.recipe import Bench, Recipe
from qserve.runtimes import Runtime
from qserve.serve import server
from qserve.serve.engine import Engine, Subject
from qserve.tasks import Tasks, score_tasks
from qserve.variants import BASELINE
from qserve.workspace import Workspace

Say = Callable[[str], None]
PAIRS = TypeAdapter(tuple[Pair, ...])


class Part(Artifact):
    """One variant of a run, done: its result and the raw blocks (Pair values as JSON)."""

    result: VariantResult
    pairs: str = "[]"

    def blocks(self) -> tuple[Pair, ...]:
        return PAIRS.validate_json(self.pairs)


@dataclass(frozen=True)
class Inputs:
    """Everything a run needs, gathered and checked before anything starts."""

    recipe: Recipe
    recipe_file: Path
    workspace: Workspace
    prepared: tuple[Prepared, ...]  # baseline first
    data: Path  # data/<digest>/
    machine: Machine
    engines: tuple[Installed, ...]  # the first one serves the baseline
    reference: Runtime
    quick: bool
    say: Say
    options: tuple[str, ...] = ()  # of the command, for whoever runs it again
    tasks: Tasks | None = None


@dataclass(frozen=True)
class Arm:
    """One row of the report: a checkpoint under an engine. `name` is the variant's, and the engine's where another one
    serves the baseline."""

    name: str
    prepared: Prepared
    engine: Engine


@dataclass(frozen=True)
class Context:
    """What the steps of a run share."""

    inputs: Inputs
    run: Path
    arms: tuple["Arm", ...]  # the baseline's first
    windows: tuple[quality.Window, ...]
    parts: DataParts
    prompts: Prompts
    references: Mapping[str, fidelity.Reference]  # by variant
    together: bool  # bf16 and a variant fit side by side

    def plan(self, deadline: float) -> Plan:
        return Plan(self.inputs.recipe.bench, self.prompts, deadline)


def part_path(run: Path, arm: str) -> Path:
    """Where an arm's part lies."""
    return run / f"part-{arm}.json"


def measure(context: Context) -> Iterator[str]:
    """Measure what has no part yet; yields a line as each variant begins."""
    yield from _together(context) if context.together else _rounds(context)


@contextmanager
def _served(context: Context, arm: Arm) -> Iterator[server.Server]:
    """The live server of one arm on a free port. If it dies inside the block, its own log says why."""
    at = ("127.0.0.1", server.free_port("127.0.0.1", 0))
    variant = context.inputs.recipe.variant(arm.prepared.variant)
    launch = arm.engine.launch(Subject(arm.name, arm.prepared.folder, variant), at)
    log = context.run / f"server-{arm.name}.log"
    context.inputs.say(f"{arm.name}: starting {arm.engine.name}")
    with server.running(launch, log, context.inputs.say) as live:
        context.inputs.say(f"{arm.name}: ready after {live.startup_s:.0f} s")
        try:
            yield live
        except QserveError as error:
            if live.alive():
                raise
            raise ServerError(
                f"{arm.engine.name} died while it served: {server.first_error(log)}; log: {log}"
            ) from error


def _together(context: Context) -> Iterator[str]:
    """Both servers up: bf16 all the time, each variant in its turn."""
    baseline, *others = context.arms
    todo = [arm for arm in others if not part_path(context.run, arm.name).exists()]
    if not todo and part_path(context.run, BASELINE).exists():
        return
    with _served(context, baseline) as base:
        base_scored, result = _judge_baseline(context, baseline, base)
        peak = base.memory_bytes() or 0
        for arm in todo:
            yield f"--- {arm.name}: {arm.prepared.manifest.label}"
            part = _unserved(context, arm) or _measure_beside(context, arm, base, base_scored)
            peak = max([peak, *(p.baseline.memory_bytes or 0 for p in part.blocks())])
            part.write(part_path(context.run, arm.name))
        Part(result=_with_peak(result, peak)).write(part_path(context.run, BASELINE))


def _judge_baseline(
    context: Context, baseline: Arm, base: server.Server
) -> tuple[tuple[quality.Scored, ...], VariantResult]:
    """As `_judge`, and saved. Raises ServerError if bf16 itself is not served faithfully: nothing can be held to it."""
    scored, result = _judge(context, baseline, base, None)
    if result.status != "measured":
        raise ServerError(f"bf16 itself is not served faithfully: {result.problem}; log: {base.log}")
    Part(result=result).write(part_path(context.run, BASELINE))
    return scored, result


def _unserved(context: Context, arm: Arm) -> Part | None:
    """The part of an arm that is not served: no kernel on this machine, or no reference to hold it against."""
    variant = arm.prepared.variant
    if variant not in context.references:
        error = f"transformers cannot run the checkpoint: {context.run}/reference-{variant}.log says why"
        return Part(result=_failed(context, arm, error))
    reason = arm.engine.unservable(context.inputs.recipe.variant(variant))
    if reason is None:
        return None
    context.inputs.say(f"{arm.name}: not served: {reason}")
    return Part(result=_failed(context, arm, reason).model_copy(update={"status": "not servable"}))


def _measure_beside(context: Context, arm: Arm, base: server.Server, base_scored: tuple[quality.Scored, ...]) -> Part:
    """One variant beside the running bf16. If bf16 is what failed, that is raised."""
    try:
        with _served(context, arm) as live:
            _, result = _judge(context, arm, live, base_scored)
            if result.status != "measured":
                return Part(result=result)
            pairs, halted = _alternate(context, live, base)
            return _part(context, _remark(result, halted), pairs, live.memory_bytes())
    except QserveError as error:
        if not base.alive():
            raise
        return _failed_part(context, arm, error)


def _failed_part(context: Context, arm: Arm, error: QserveError) -> Part:
    context.inputs.say(f"{arm.name}: failed: {error}")
    return Part(result=_failed(context, arm, str(error)))


def _judge(
    context: Context, arm: Arm, live: server.Server, base_scored: tuple[quality.Scored, ...] | None
) -> tuple[tuple[quality.Scored, ...], VariantResult]:
    """What is served, how good it is, and whether it is what the checkpoint says."""
    facts = arm.engine.facts(live, live.log.name)
    if arm.prepared.variant != BASELINE and facts.quantization is None:
        raise ServerError(
            f"{arm.engine.name} serves {arm.name} unquantized: it read no quantization in it; log: {live.log}"
        )
    recipe, manifest = context.inputs.recipe, arm.prepared.manifest
    windows = f"{len(context.windows)} window{'' if len(context.windows) == 1 else 's'}"
    context.inputs.say(f"{arm.name}: scoring {windows} of {recipe.quality.tokens} tokens")
    scored = quality.score(live, context.windows, recipe.quality.top_k, recipe.bench.variant_s / 2)
    gate = fidelity.check(scored, context.references[arm.prepared.variant], context.references[BASELINE])
    data, bos = context.parts.quality, context.parts.bos_token_id
    length = len(scored[0].logprobs) + 1
    text = quality.describe_text(data, length, recipe.quality.top_k, bos)
    problem = None
    if length < recipe.quality.tokens:
        problem = (
            f"too slow to score {recipe.quality.tokens} tokens of a window: the first {length} were, and its "
            "perplexity is of those; ratio, KL and top-1 compare the same tokens of bf16"
        )
    if not gate.faithful:
        problem = fidelity.why_not(gate)
    result = VariantResult(
        name=arm.name, label=manifest.label, status="measured" if gate.faithful else "not faithful",
        problem=problem, **_made(context, arm), server=facts, fidelity=gate,
        memory=arm.engine.memory(live, manifest.weights.total_bytes, live.memory_bytes()),
        quality=quality.compare_quality(scored, base_scored, text),
    )  # fmt: skip
    gap = f"{gate.error:.4f} nats from the checkpoint in transformers (limit {gate.limit:.4f})"
    context.inputs.say(f"{arm.name}: perplexity {gate.served_perplexity:.3f}, {gap}")
    return scored, _with_tasks(context, arm, live, result)


def _with_tasks(context: Context, arm: Arm, live: server.Server, result: VariantResult) -> VariantResult:
    """And its task scores, where there are tasks and it serves what its checkpoint says."""
    tasks = context.inputs.tasks
    if tasks is None or result.quality is None or result.status != "measured":
        return result
    scores = score_tasks(tasks, context.run, arm.name, arm.prepared.folder, live)
    return result.model_copy(update={"quality": result.quality.model_copy(update={"tasks": scores})})


def _made(context: Context, arm: Arm) -> dict[str, object]:
    manifest, reference = arm.prepared.manifest, context.references.get(arm.prepared.variant)
    return {
        "digest": manifest.digest, "bits_per_parameter": manifest.weights.bits_per_parameter, "layers": manifest.layers,
        "layers_fallback": len(manifest.layers_fallback), "prep_s": manifest.wall_s,
        "note": manifest.note, "offline_perplexity": reference.perplexity() if reference else None,
    }  # fmt: skip


def _failed(context: Context, arm: Arm, why: str) -> VariantResult:
    size = arm.prepared.manifest.weights.total_bytes
    unknown = Memory(disk_bytes=size, loaded_bytes=None, kv_capacity_tokens=None, kv_bytes=None, peak_bytes=None)
    return VariantResult(
        name=arm.name, label=arm.prepared.manifest.label, status="failed", problem=why, memory=unknown,
        **_made(context, arm),
    )  # fmt: skip


def _alternate(context: Context, live: server.Server, base: server.Server) -> tuple[tuple[Pair, ...], str | None]:
    """All levels of concurrency, each with its share of the time that is left; and why it stopped before the last."""
    bench = context.inputs.recipe.bench
    end = time.monotonic() + bench.variant_s
    pairs: list[Pair] = []
    for i, concurrency in enumerate(bench.concurrency):
        share = (end - time.monotonic()) / (len(bench.concurrency) - i)
        plan = context.plan(time.monotonic() + share)
        for n, pair in enumerate(throughput.measure_level(concurrency, (live, base), plan), 1):
            pairs.append(pair)
            context.inputs.say(_line(live.model, pair, n, bench))
        if not pairs or pairs[-1].concurrency != concurrency:
            return tuple(pairs), _too_slow(concurrency, bench)
    return tuple(pairs), None


def _too_slow(concurrency: int, bench: Bench) -> str:
    return (
        f"too slow to be loaded: at concurrency {concurrency} no first token came within {bench.block_s:g} s (block_s)"
    )


def _remark(result: VariantResult, text: str | None) -> VariantResult:
    """The result with something to know beside it."""
    said = "; ".join(part for part in (result.problem, text) if part)
    return result.model_copy(update={"problem": said or None})


def _line(name: str, pair: Pair, n: int, bench: Bench) -> str:
    """Live progress: one pair in a line."""
    both = throughput.point([pair], 1)
    speeds = [s.output_tokens_per_s for s in (both.variant, both.baseline)]
    shown = [f"{s:.1f}" if s is not None else "no" for s in speeds]
    return f"{name}: concurrency {pair.concurrency}, pair {n}/{bench.pairs}: {shown[0]} tok/s, bf16 {shown[1]} tok/s"


def _part(context: Context, result: VariantResult, pairs: tuple[Pair, ...], memory_now: int | None) -> Part:
    bench = context.inputs.recipe.bench
    levels = [[p for p in pairs if p.concurrency == c] for c in bench.concurrency]
    points = tuple(throughput.point(level, bench.pairs) for level in levels if level)
    peak = max([memory_now or 0, *(p.variant.memory_bytes or 0 for p in pairs)])
    full = _with_peak(result, peak).model_copy(update={"points": points})
    return Part(result=full, pairs=PAIRS.dump_json(pairs).decode())


def _with_peak(result: VariantResult, peak: int) -> VariantResult:
    memory = result.memory and result.memory.model_copy(update={"peak_bytes": peak or result.memory.peak_bytes})
    return result.model_copy(update={"memory": memory})


def _rounds(context: Context) -> Iterator[str]:
    """Too big to stand side by side: bf16 | variant variant | bf16, each half with the other's prompts.

    The time is bounded by pairs x block_s a level, for each of the two.
    """
    baseline, *others = context.arms
    for arm in (arm for arm in others if not part_path(context.run, arm.name).exists()):
        yield f"--- {arm.name}: {arm.prepared.manifest.label} (in rounds: both do not fit at once)"
        part = _unserved(context, arm) or _one_after_the_other(context, arm, baseline)
        part.write(part_path(context.run, arm.name))
    if not part_path(context.run, BASELINE).exists():
        with _served(context, baseline) as base:
            _judge_baseline(context, baseline, base)


def _one_after_the_other(context: Context, arm: Arm, baseline: Arm) -> Part:
    plan = context.plan(float("inf"))
    levels = [(c, i) for c in plan.bench.concurrency for i in range(plan.bench.pairs)]
    halves = [[(c, plan.requests(c)) for c, i in levels if i % 2 == half] for half in (0, 1)]

    def blocks(live: server.Server, half: int) -> list[throughput.Block]:
        for concurrency in plan.bench.concurrency:
            plan.warm_up(live, concurrency)
        return [plan.block(live, requests, concurrency) for concurrency, requests in halves[half]]

    with _served(context, baseline) as base:
        base_scored, _ = _judge_baseline(context, baseline, base)
        first = blocks(base, 0)
    try:
        with _served(context, arm) as live:
            _, result = _judge(context, arm, live, base_scored)
            if result.status != "measured":
                return Part(result=result)
            if not plan.warm_up(live, plan.bench.concurrency[0]):
                return Part(result=_remark(result, _too_slow(plan.bench.concurrency[0], plan.bench)))
            own = blocks(live, 0) + blocks(live, 1)
            memory_now = live.memory_bytes()
    except QserveError as error:
        return _failed_part(context, arm, error)
    with _served(context, baseline) as base:
        theirs = first + blocks(base, 1)
    order = [c for c, _ in halves[0] + halves[1]]
    pairs = tuple(Pair(c, v, b) for c, v, b in zip(order, own, theirs, strict=True))
    return _part(context, result, pairs, memory_now)
