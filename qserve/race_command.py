"""`qserve race`: its words, and what is checked before any work."""

import math
import os
from enum import StrEnum
from typing import Annotated

import typer

from qserve import limits
from qserve.app import RecipeArgument, WorkspaceOption, app, say

ENGINES = "transformers, pipeline, llama-server, vllm, tgi, sglang"


class RaceFormat(StrEnum):
    text = "text"
    json = "json"


@app.command()
def race(
    recipe: RecipeArgument = None,
    engine: Annotated[
        list[str] | None,
        typer.Option("--engine", help=f"ENGINE or ENGINE:VARIANT; may be given again. There are {ENGINES}."),
    ] = None,
    attach: Annotated[
        list[str] | None, typer.Option("--attach", help="URL of a server that is running already; may be given again.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, max=limits.REQUESTS, help="Requests of a round.")] = 20,
    concurrency: Annotated[int, typer.Option(min=1, max=limits.CONCURRENCY, help="Requests in flight.")] = 20,
    rounds: Annotated[
        int, typer.Option(min=2, max=limits.ROUNDS, help="Rounds for each engine; intervals are over rounds.")
    ] = 4,
    limit_s: Annotated[
        float, typer.Option(min=1, max=limits.SECONDS, help="Seconds an engine may take for its rounds.")
    ] = 240,
    api_key_env: Annotated[
        str, typer.Option(help="Environment variable with the key for --attach.")
    ] = "OPENAI_API_KEY",
    format: Annotated[RaceFormat, typer.Option(help="How to print the result.")] = RaceFormat.text,
    workspace: WorkspaceOption = None,
) -> None:
    """Race engines: the same requests against each.

    Throughput, TTFT, start-up and memory of each one alone on the machine, and its ratio to the naive loop.

    With no --engine: transformers, pipeline and vllm, and llama-server where the recipe has a GGUF variant.
    """
    from qserve.bench import check_lengths
    from qserve.engines import refuse
    from qserve.errors import UsageError
    from qserve.eval.race import Race
    from qserve.eval.race_report import race_text
    from qserve.machine import look
    from qserve.prep.stage import ensure_data, find_prepared, prepare
    from qserve.race import OWN_GGUF, Heat, Inputs, choose_entries, install_entries, run_race, with_gguf
    from qserve.recipe import find_recipe, load_recipe
    from qserve.serve.attach import attach as attach_to
    from qserve.serve.kv_cache import read_config
    from qserve.workspace import open_workspace

    if math.isnan(limit_s):  # which is neither below nor above a bound
        raise UsageError("--limit-s is nan; give seconds")
    if requests < concurrency:
        raise UsageError(f"{requests} requests cannot keep {concurrency} in flight; ask for at least {concurrency}")
    path, space, machine = find_recipe(recipe), open_workspace(workspace), look()
    parsed = with_gguf(load_recipe(path), engine or ())
    chosen = choose_entries(engine or (), parsed)
    if twice := next((url for url in attach or () if (attach or ()).count(url) > 1), None):
        raise UsageError(f"--attach {twice} is there twice; a race has each server once")
    for name, _ in chosen:
        refuse(name, parsed.serving, machine)
    key = os.environ.get(api_key_env)
    attached = tuple(attach_to(url, key, api_key_env) for url in attach or ())
    there = find_prepared(parsed, space, tuple(variant for _, variant in chosen if variant != OWN_GGUF))
    if OWN_GGUF in (variant for _, variant in chosen):
        there += prepare(parsed, space, (OWN_GGUF,), say)
    of = {checkpoint.variant: checkpoint for checkpoint in there}
    prepared = [(name, of[variant]) for name, variant in chosen]
    check_lengths(parsed, read_config(there[0].folder))
    inputs = Inputs(
        recipe=parsed, recipe_file=path, workspace=space, data=ensure_data(parsed, space, say), machine=machine,
        entries=install_entries(prepared, parsed, say), attached=attached,
        heat=Heat(requests, concurrency, rounds, limit_s), say=say,
    )  # fmt: skip
    run = run_race(inputs)
    done = Race.read(run / "race.json")
    typer.echo(done.model_dump_json(indent=2) if format is RaceFormat.json else race_text(done))
    say(f"{run / 'race.html'}")
