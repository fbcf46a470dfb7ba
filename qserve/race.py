"""`qserve race`: the same concurrent requests against each engine.

    entries (checked before any work) -> legs, one an engine and pass, saved at once -> race.json, race.html

This is where serve/ and eval/ meet; how a race is run fairly is told in eval/race.py.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from qserve import __version__
from qserve.artifacts import DataParts
from qserve.engines import Installed, engine_for, engine_name, install_engine, open_engine, unservable
from qserve.errors import UsageError
from qserve.eval.load import LabelledRecord, Request, write_requests
from qserve.eval.race import NAIVE, Leg, Race, Starter, standings
from qserve.eval.race_report import write_race
from qserve.eval.throughput import Plan, Prompts
from qserve.machine import available_bytes
from qserve.prep.checkpoint import Prepared
from qserve.race_legs import PASSES, Course, Entry, leg_path, run_pass
from qserve.race_legs import Heat as Heat
from qserve.race_legs import Inputs as Inputs
from qserve.recipe import EngineName, Recipe, spelled
from qserve.serve.engine import Engine, Room, Setting
from qserve.serve.kv_cache import read_config
from qserve.variants import BASELINE, Gguf
from qserve.workspace import digest_of

Say = Callable[[str], None]
OWN_GGUF = "gguf-bf16"


def with_gguf(recipe: Recipe, asked: Sequence[str]) -> Recipe:
    """The recipe, with a GGUF file of the baseline where llama-server is asked for and no variant is one."""
    if "llama-server" not in asked or any(isinstance(v, Gguf) for v in recipe.variants.values()):
        return recipe
    return recipe.model_copy(update={"variants": {**recipe.variants, OWN_GGUF: Gguf(method="gguf", type="bf16")}})


def choose_entries(asked: Sequence[str], recipe: Recipe) -> tuple[tuple[EngineName, str], ...]:
    """(engine, variant) of each `ENGINE` or `ENGINE:VARIANT`. With none asked for: every engine that runs without a GPU
    and can serve a variant of the recipe.

    Raises:
        UsageError: no such engine or variant, or an engine twice with the same variant.
        PreflightError: an engine that cannot serve its variant here.
    """
    every = ("transformers", "pipeline", "llama-server", "vllm")
    texts = asked or [name for name in every if _first_servable(engine_name(name), recipe)]
    chosen = tuple(_entry(text, recipe) for text in texts)
    if twice := next((pair for pair in chosen if chosen.count(pair) > 1), None):
        raise UsageError(f"--engine {':'.join(twice)} is there twice; a race has each engine once with a variant")
    return chosen


def _entry(text: str, recipe: Recipe) -> tuple[EngineName, str]:
    word, _, variant = text.partition(":")
    row, at, engine = word.partition("@")
    if at:
        raise UsageError(f"--engine {text} is a row of a report; a race names the engine first: {engine}:{row}")
    name = engine_name(word)
    chosen = variant or _first_servable(name, recipe) or BASELINE
    engine_for(recipe.variant(chosen), name, recipe)  # raises where it cannot be
    return name, chosen


def _first_servable(name: EngineName, recipe: Recipe) -> str | None:
    """The baseline where the engine reads it, else the first variant that it does."""
    names = (BASELINE, *recipe.variants)
    return next((n for n in names if unservable(name, recipe.variant(n)) is None), None)


def install_entries(
    chosen: Sequence[tuple[EngineName, Prepared]], recipe: Recipe, say: Say
) -> tuple[tuple[Entry, Installed], ...]:
    """Every engine's program. A Python or program that the recipe names is of its own engine alone. The naive loop is
    that of bf16: with another checkpoint it goes by both names, and nothing is held against it."""
    served: dict[EngineName, list[str]] = {}
    for name, prepared in chosen:
        served.setdefault(name, []).append(prepared.variant)
    found = []
    for name, prepared in chosen:
        own = recipe.serving if name == recipe.serving.engine else recipe.serving.model_copy(update={"python": None})
        plain = prepared.variant == BASELINE or (len(served[name]) == 1 and name != NAIVE)
        entry = Entry(name if plain else f"{name}:{prepared.variant}", name, prepared)
        found.append((entry, install_engine(name, own, say, map(recipe.variant, served[name]))))
    return tuple(found)


def run_race(inputs: Inputs) -> Path:
    """Race, write the run folder and return it."""
    with inputs.workspace.only_one("bench"):
        return _run(inputs)


def _run(inputs: Inputs) -> Path:
    started = time.monotonic()
    engines = tuple((entry, _open(inputs, entry, installed)) for entry, installed in inputs.entries)
    course = _course(inputs, _run_folder(inputs, engines))
    for number in range(PASSES):
        run_pass(course, engines, number)
    _write(course, time.monotonic() - started)
    return course.run


def _baseline(inputs: Inputs) -> Prepared:
    """Any checkpoint of ours: all are of one model."""
    if not inputs.entries:
        raise UsageError("a race needs at least one engine of its own; give --engine")
    return inputs.entries[0][0].prepared


def _open(inputs: Inputs, entry: Entry, installed: Installed) -> Engine:
    """The engine with the machine to itself."""
    prepared, serving = entry.prepared, inputs.recipe.serving
    if entry.engine != serving.engine:
        serving = serving.model_copy(update={"extra_args": (), "python": None})
    room = Room(1, available_bytes(), prepared.manifest.weights.total_bytes)
    setting = Setting(serving, read_config(prepared.folder), inputs.machine, room, inputs.heat.concurrency)
    return open_engine(installed, setting)


def _run_folder(inputs: Inputs, engines: Sequence[tuple[Entry, Engine]]) -> Path:
    """The folder of an unfinished race of exactly this, else a new one."""
    what = [[entry.prepared.manifest.digest, engine.identity] for entry, engine in engines]
    urls = [attached.url for attached in inputs.attached]
    digest = digest_of([inputs.recipe.bench.model_dump(mode="json"), what, urls, vars(inputs.heat), __version__])
    for folder in sorted(inputs.workspace.runs.glob(f"*-race-{digest}"), reverse=True):
        if not (folder / "race.json").exists():
            inputs.say(f"going on with the unfinished race {folder.name}")
            return folder
    folder = inputs.workspace.runs / f"{time.strftime('%Y%m%d-%H%M%S')}-race-{digest}"
    folder.mkdir(parents=True)
    return folder


def _course(inputs: Inputs, folder: Path) -> Course:
    heat = inputs.heat
    bench = inputs.recipe.bench.model_copy(update={"block_s": heat.round_limit_s})
    parts = DataParts.read(inputs.data / "parts.json")
    prompts = Prompts(np.load(inputs.data / "load.npy"), parts.bos_token_id)

    def take(count: int, tokens: int) -> tuple[Request, ...]:
        return tuple(Request(ids, tokens) for ids in prompts.take(count, bench.prompt_tokens))

    warm = tuple(take(heat.concurrency, min(4, bench.output_tokens)) for _ in range(PASSES))
    rounds = tuple(take(heat.requests, bench.output_tokens) for _ in range(heat.rounds))
    return Course(inputs, folder, Plan(bench, prompts, float("inf")), warm, rounds)


# --- writing it down ----------
def _served(recipe: Recipe, entry: Entry) -> str:
    """The checkpoint in words, and what vLLM makes of it as it starts."""
    at_start = recipe.serving.quantization if (entry.engine, entry.prepared.variant) == ("vllm", BASELINE) else None
    label = entry.prepared.manifest.label + (f", {at_start} at start-up" if at_start else "")
    return f"{entry.prepared.variant} ({label})"


def _write(course: Course, wall_s: float) -> None:
    inputs, heat = course.inputs, course.inputs.heat
    legs: dict[str, list[Leg]] = {}
    starters = []
    for entry, _ in inputs.entries:
        starters.append(Starter(name=entry.name, served=_served(inputs.recipe, entry)))
        legs[entry.name] = [Leg.read(leg_path(course.run, entry.name, n)) for n in range(PASSES)]
    for index, attached in enumerate(inputs.attached):
        starters.append(Starter(name=attached.url, served=attached.model))
        legs[attached.url] = [Leg.read(leg_path(course.run, f"attached{index}", n)) for n in range(PASSES)]
    manifest = _baseline(inputs).manifest
    race = Race(
        run=course.run.name, created=time.strftime("%FT%TZ", time.gmtime()), qserve_version=__version__,
        recipe_file=spelled(inputs.recipe_file), model=manifest.model, source_note=manifest.source_note,
        machine=inputs.machine, requests=heat.requests, concurrency=heat.concurrency, rounds=heat.rounds,
        prompt_tokens=inputs.recipe.bench.prompt_tokens, output_tokens=inputs.recipe.bench.output_tokens,
        round_limit_s=heat.round_limit_s, racers=standings(starters, legs), wall_s=wall_s,
    )  # fmt: skip
    rows = [
        LabelledRecord(name, "variant", heat.concurrency, n, record)
        for name, own in legs.items()
        for leg in own
        for n, block in leg.rounds().items()
        for record in block.run.records
    ]
    write_requests(course.run / "requests.parquet", rows)
    write_race(race, course.run)
