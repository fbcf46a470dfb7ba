"""`qserve bench`: one run, from checked inputs to a report.

references (transformers, offline) -> every variant beside bf16 (measure.py)
    -> requests.parquet, measurements.json, report.*
"""

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from qserve import __version__
from qserve.artifacts import DataParts, Point, Report
from qserve.engines import open_engine
from qserve.errors import PreflightError, UsageError, WorkerError
from qserve.eval import fidelity, quality, throughput
from qserve.eval.load import LabelledRecord, write_requests
from qserve.eval.report import write_report
from qserve.eval.throughput import Prompts
from qserve.jobs import Job, run_job
from qserve.machine import available_bytes
from qserve.measure import Arm, Context, Inputs, Part, measure, part_path
from qserve.packed import LOADER
from qserve.prep.checkpoint import Prepared
from qserve.recipe import Bench, Recipe, spelled
from qserve.serve.engine import Engine, Room, Setting
from qserve.serve.kv_cache import GIB, read_config
from qserve.variants import BASELINE
from qserve.workspace import digest_of

REFERENCE_WORKER = Path(fidelity.__file__).with_name("reference_worker.py")


def quick_recipe(recipe: Recipe) -> Recipe:
    """A smoke run of the same recipe: every step once, no figure worth keeping."""
    bench = recipe.bench.model_copy(
        update={
            "pairs": 1, "requests_per_slot": 1, "concurrency": recipe.bench.concurrency[:1], "block_s": 10.0,
            "variant_s": 30.0, "output_tokens": min(8, recipe.bench.output_tokens),
        }
    )  # fmt: skip
    few = {"task_items": min(8, recipe.quality.task_items or 8)} if recipe.quality.tasks else {}
    return recipe.model_copy(update={"bench": bench, "quality": recipe.quality.model_copy(update=few)})


def changed_recipe(
    recipe: Recipe,
    bench: Mapping[str, object],
    windows: int | None,
    task_items: int | None = None,
    task_s: int | None = None,
) -> Recipe:
    """The recipe with what was given on the command line instead of its own; None leaves it. More pairs get more time,
    and so do more items.

    Raises:
        UsageError: a value that cannot be.
    """
    changes = {name: value for name, value in bench.items() if value is not None}
    if isinstance(pairs := changes.get("pairs"), int):
        changes["variant_s"] = recipe.bench.variant_s * max(1.0, pairs / recipe.bench.pairs)
    try:
        changed = Bench.model_validate(recipe.bench.model_dump() | changes)
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        raise UsageError(f"bench.{'.'.join(map(str, first['loc']))}: {message}") from error
    own = recipe.quality
    judged: dict[str, object] = {"windows": windows} if windows else {}
    if (task_items or task_s) and not own.tasks:
        raise UsageError(f"--task-{'items' if task_items else 's'}: the recipe names no task; add quality.tasks")
    if task_items:
        more = max(1.0, task_items / (own.task_items or task_items))
        judged |= {"task_items": task_items, "task_s": own.task_s * more}
    if task_s:
        judged["task_s"] = float(task_s)
    return recipe.model_copy(update={"bench": changed, "quality": own.model_copy(update=judged)})


def run_bench(inputs: Inputs) -> Path:
    """Measure, write the run folder and return it."""
    with inputs.workspace.only_one("bench"):
        return _run(inputs)


def _run(inputs: Inputs) -> Path:
    started = time.monotonic()
    context = _prepare_context(inputs)
    for step in measure(context):
        inputs.say(step)
    parts = [Part.read(part_path(context.run, arm.name)) for arm in context.arms]
    report = _assemble(context, parts, time.monotonic() - started)
    write_requests(context.run / "requests.parquet", _rows(parts))
    report.write(context.run / "measurements.json")
    write_report(report, context.run)
    return context.run


def check_recipe(recipe: Recipe, baseline: Path) -> None:
    """Refuse what cannot be measured, before any work. `baseline`: the folder of its checkpoint."""
    if recipe.serving.quantization is not None:
        raise UsageError(
            "serving.quantization would quantize the bf16 baseline itself; leave it out of a bench, make a variant, or "
            "use it with `qserve serve` or `qserve race`"
        )
    check_lengths(recipe, read_config(baseline))


def check_lengths(recipe: Recipe, config: Mapping[str, object]) -> None:
    """Refuse lengths that cannot be served, before anything starts."""
    context = config.get("max_position_embeddings")
    limit = recipe.serving.max_model_len or (context if isinstance(context, int) else None)
    asked = {
        "bench.prompt_tokens + output_tokens": recipe.bench.prompt_tokens + recipe.bench.output_tokens,
        "quality.tokens + 1": recipe.quality.tokens + 1,
    }
    for name, tokens in asked.items():
        if limit is not None and tokens > limit:
            raise UsageError(f"{name} is {tokens}, but a request may have {limit} tokens; raise serving.max_model_len")


# --- getting ready ----------
def _prepare_context(inputs: Inputs) -> Context:
    parts = DataParts.read(inputs.data / "parts.json")
    count = 1 if inputs.quick else inputs.recipe.quality.windows
    windows = tuple(tuple(w) for w in json.loads((inputs.data / "quality.json").read_text())[:count])
    engines, together = _engines(inputs, read_config(inputs.prepared[0].folder))
    stream = np.load(inputs.data / "load.npy")
    if len(stream) < 4 * inputs.recipe.bench.prompt_tokens:
        raise UsageError(
            f"the load text has {len(stream):,} tokens, too few for prompts of {inputs.recipe.bench.prompt_tokens}; "
            "give bench a larger dataset, or more rows"
        )
    prompts = Prompts(stream, parts.bos_token_id)
    run = _run_folder(inputs, engines)
    references = dict(_references(inputs, windows, run))
    return Context(inputs, run, _arms(inputs, engines), windows, parts, prompts, references, together)


def _engines(inputs: Inputs, config: Mapping[str, object]) -> tuple[tuple[Engine, ...], bool]:
    """The engines with settings for two servers side by side where they fit, else for one; and whether they do.

    Raises:
        PreflightError: not even one has room for a request of full length.
    """
    free, weights = available_bytes(), max(p.manifest.weights.total_bytes for p in inputs.prepared)
    serving = inputs.recipe.serving
    gpu = (inputs.machine.gpu_memory_bytes or 0) * serving.tensor_parallel * serving.pipeline_parallel

    def opened(servers: int) -> tuple[Engine, ...]:
        room, most = Room(servers, free, weights), max(inputs.recipe.bench.concurrency)
        setting = Setting(inputs.recipe.serving, config, inputs.machine, room, most)
        return tuple(open_engine(installed, setting) for installed in inputs.engines)

    if inputs.machine.flavour == "cpu" or 2 * (1.2 * weights + 3 * GIB) <= 0.9 * gpu:
        try:
            return opened(2), True
        except PreflightError:
            inputs.say("bf16 and a variant do not fit side by side: they are measured in rounds")
    return opened(1), False


def _arms(inputs: Inputs, engines: tuple[Engine, ...]) -> tuple[Arm, ...]:
    """The baseline under the first engine; every other checkpoint under each engine that can serve it, and under the
    first where none can, to say why."""

    def able(p: Prepared) -> list[Engine]:
        return [engine for engine in engines if engine.unservable(inputs.recipe.variant(p.variant)) is None]

    first = engines[0]
    baseline, *others = inputs.prepared
    pairs = [(baseline, first)]
    pairs += [(p, first) for p in others if first in able(p) or not able(p)]
    pairs += [(p, engine) for engine in engines[1:] for p in others if engine in able(p)]
    return tuple(Arm(p.variant if e is first else f"{p.variant}@{e.name}", p, e) for p, e in pairs)


def _run_folder(inputs: Inputs, engines: tuple[Engine, ...]) -> Path:
    """The folder of an unfinished run of exactly this, else a new one. What is to be chosen plays no part in it."""
    digest = digest_of(
        [inputs.recipe.measured(), [p.manifest.digest for p in inputs.prepared],
         [engine.identity for engine in engines], inputs.quick, __version__,
         *(inputs.tasks.identity if inputs.tasks else [])]
    )  # fmt: skip
    for folder in sorted(inputs.workspace.runs.glob(f"*-{digest}"), reverse=True):
        if not (folder / "measurements.json").exists():
            inputs.say(f"going on with the unfinished run {folder.name}")
            return folder
    folder = inputs.workspace.runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{digest}"
    folder.mkdir(parents=True)
    return folder


def _references(
    inputs: Inputs, windows: tuple[quality.Window, ...], run: Path
) -> Iterator[tuple[str, fidelity.Reference]]:
    """(variant, reference). A variant whose reference fails is left out; without bf16's there is no run."""
    for prepared in inputs.prepared:
        try:
            yield prepared.variant, _reference(inputs, prepared, windows, run)
        except WorkerError as error:
            if prepared.variant == BASELINE:
                raise
            inputs.say(f"{prepared.variant}: {error}")


def _reference(
    inputs: Inputs, prepared: Prepared, windows: tuple[quality.Window, ...], run: Path
) -> fidelity.Reference:
    """Log-probabilities of the checkpoint in transformers; kept, since they are of the files alone."""
    digest = digest_of([prepared.manifest.digest, windows, inputs.reference.digest])
    path = inputs.workspace.references / f"{prepared.variant}-{digest}.json"
    if not path.exists():
        inputs.say(f"{prepared.variant}: log-probabilities in transformers, to hold the server against")
        threads = inputs.recipe.threads or inputs.machine.cores
        job = Job(
            name=f"reference {prepared.variant}", python=inputs.reference.python, worker=REFERENCE_WORKER,
            spec={"checkpoint": str(prepared.folder), "windows": windows, "threads": threads, "loader": str(LOADER)},
            log=run / f"reference-{prepared.variant}.log",
            env={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip
        result = run_job(job)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"float32": result["float32"], "bfloat16": result["bfloat16"]}))
        partial.replace(path)
    return fidelity.Reference.read(path)


# --- writing it down ----------
def _assemble(context: Context, parts: list[Part], wall_s: float) -> Report:
    inputs = context.inputs
    baseline = parts[0].result.model_copy(update={"points": _baseline_points(inputs.recipe.bench, parts)})
    return Report(
        run=context.run.name, created=time.strftime("%FT%TZ", time.gmtime()), qserve_version=__version__,
        recipe_file=spelled(inputs.recipe_file), options=inputs.options, recipe=inputs.recipe.model_dump(mode="json"),
        model=inputs.prepared[0].manifest.model, source_note=inputs.prepared[0].manifest.source_note,
        quick=inputs.quick, machine=inputs.machine, baseline=baseline,
        data=(context.parts.calibration, context.parts.quality, context.parts.load),
        variants=tuple(p.result for p in parts[1:]), wall_s=wall_s,
    )  # fmt: skip


def _baseline_points(bench: Bench, parts: list[Part]) -> tuple[Point, ...]:
    """bf16 alone: its blocks beside every variant, pooled."""
    points = []
    for concurrency in bench.concurrency:
        blocks = [p.baseline for part in parts for p in part.blocks() if p.concurrency == concurrency]
        if blocks:
            pooled = throughput.pool(blocks)
            points.append(
                Point(concurrency=concurrency, variant=pooled, baseline=pooled, throughput=None, ttft=None, itl=None)
            )
    return tuple(points)


def _rows(parts: list[Part]) -> Iterator[LabelledRecord]:
    """Every request that was sent in a counted block."""
    for part in parts:
        begun: Counter[int] = Counter()  # pairs so far at each concurrency
        for pair in part.blocks():
            n = begun[pair.concurrency]
            begun[pair.concurrency] += 1
            for arm, block in (("variant", pair.variant), ("baseline", pair.baseline)):
                for record in block.run.records:
                    yield LabelledRecord(part.result.name, arm, pair.concurrency, n, record)
