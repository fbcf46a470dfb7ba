"""`qserve choose`: a run's report and the wishes in, a decision out.

Wishes come from the `choose:` section of the recipe that was run (or of --recipe), and options override them.
"""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qserve.app import WorkspaceOption, app, say
from qserve.errors import NOTHING_QUALIFIES, UNRESOLVED, PreflightError, UsageError

if TYPE_CHECKING:
    from qserve.artifacts import Report
    from qserve.wishes import Wishes


class DecisionFormat(StrEnum):
    text = "text"
    md = "md"
    json = "json"


class ObjectiveChoice(StrEnum):
    throughput = "throughput"
    ttft = "ttft"
    itl = "itl"


@app.command()
def choose(
    run: Annotated[Path | None, typer.Argument(help="A run folder; default: the newest.")] = None,
    slo: Annotated[list[str] | None, typer.Option(help="NAME=SECONDS, as ttft_p95=0.5; may be given again.")] = None,
    floor: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE of kl, top1, perplexity_ratio or task:NAME.")
    ] = None,
    concurrency: Annotated[int | None, typer.Option(help="Requests in flight on one machine.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second, of all machines.")] = None,
    tokens_rate: Annotated[float | None, typer.Option(help="Output tokens per second, of all machines.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(help="Of your traffic; default: as measured.")] = None,
    output_tokens: Annotated[int | None, typer.Option(help="Of your traffic; default: as measured.")] = None,
    memory_gb: Annotated[float | None, typer.Option(help="Most peak memory of a server, in 10^9 bytes.")] = None,
    price: Annotated[float | None, typer.Option(help="Of one machine an hour.")] = None,
    objective: Annotated[ObjectiveChoice | None, typer.Option(help="What is to be best; default throughput.")] = None,
    recipe: Annotated[str | None, typer.Option("--recipe", help="Take the choose: section of this recipe.")] = None,
    format: Annotated[DecisionFormat, typer.Option(help="How to print it.")] = DecisionFormat.text,
    workspace: WorkspaceOption = None,
) -> None:
    """Choose what to deploy.

    One format with the reasons and what would flip it, or how much more to measure. Exit codes: 0 chosen, 9 unresolved,
    10 nothing qualifies.
    """
    from qserve.eval.decide import decide
    from qserve.eval.decision_text import to_json, to_markdown, to_text
    from qserve.eval.report import read_report
    from qserve.workspace import open_workspace

    report = read_report(run or open_workspace(workspace).latest_run())
    given: dict[str, Any] = {
        "slo": named_numbers("--slo", slo), "floor": _floor(named_numbers("--floor", floor)), "memory_gb": memory_gb,
        "price_per_hour": price, "objective": objective.value if objective else None,
        "traffic": {"concurrency": concurrency, "requests_per_s": rate, "output_tokens_per_s": tokens_rate,
                    "prompt_tokens": prompt_tokens, "output_tokens": output_tokens},
    }  # fmt: skip
    decision = decide(report, merge(section(report, recipe), given))
    write = {DecisionFormat.text: to_text, DecisionFormat.md: to_markdown, DecisionFormat.json: to_json}[format]
    typer.echo(write(decision).rstrip("\n"))
    code = {"chosen": 0, "unresolved": UNRESOLVED, "nothing qualifies": NOTHING_QUALIFIES}[decision.outcome]
    if code:
        raise typer.Exit(code)


def chosen(report: "Report", wishes: "Wishes", what_for: str) -> str:
    """The row that `qserve choose` chooses of this run and these wishes, for a command that was given no name.

    Raises:
        PreflightError: it chooses none.
    """
    from qserve.eval.decide import decide

    decision = decide(report, wishes)
    if decision.choice is None:
        raise PreflightError(f"{decision.sentence} Name the variant to {what_for}; `qserve choose` says more")
    say(decision.sentence)
    return decision.choice


def section(report: "Report", recipe: str | None) -> "Wishes":
    """The `choose:` section of the recipe that was run, or of another one."""
    from pydantic import ValidationError

    from qserve.recipe import find_recipe, load_recipe
    from qserve.wishes import Wishes

    if recipe is not None:
        return load_recipe(find_recipe(recipe)).choose
    try:
        return Wishes.model_validate(report.recipe.get("choose", {}))
    except ValidationError as error:
        raise UsageError(
            f"the recipe in {report.run}: choose: {_first(error)}; give --recipe with a sound one"
        ) from error


def merge(base: "Wishes", given: Mapping[str, Any]) -> "Wishes":
    """`base` with what was given: None and empty leave it as it is, and mappings are merged by name.

    Raises:
        UsageError: a name or value that cannot be.
    """
    from pydantic import ValidationError

    from qserve.wishes import Wishes

    merged = base.model_dump()
    for key, value in given.items():
        if isinstance(value, Mapping):
            kept = {name: item for name, item in value.items() if item is not None}
            if key == "traffic" and {"requests_per_s", "output_tokens_per_s"} & set(kept):
                merged[key] |= {"requests_per_s": None, "output_tokens_per_s": None}
            if key == "floor" and isinstance(tasks := kept.get("tasks"), Mapping):
                kept["tasks"] = {**merged[key]["tasks"], **tasks}
            merged[key] = {**merged[key], **kept}
        elif value is not None:
            merged[key] = value
    try:
        return Wishes.model_validate(merged)
    except ValidationError as error:
        raise UsageError(_first(error)) from error


def _first(error: Any) -> str:
    """`slo.ttft_p95: Input should be greater than 0`."""
    item = error.errors()[0]
    where = ".".join(str(part) for part in item["loc"])
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        message = "there is no such wish"
    return f"{where}: {message}" if where else message


def named_numbers(option: str, words: list[str] | None) -> dict[str, float]:
    """`ttft_p95=0.5` as a mapping."""
    found: dict[str, float] = {}
    for word in words or []:
        name, sign, value = word.partition("=")
        if name.strip() in found:
            raise UsageError(f"{option} {name.strip()} is given twice; give it once")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            sign = ""
        if not sign:
            raise UsageError(f"{option} {word}: write NAME=NUMBER, as in --slo ttft_p95=0.5 or --floor kl=0.05")
    return found


def _floor(found: Mapping[str, float]) -> dict[str, Any]:
    """kl, top1 and perplexity_ratio are fields; any other name is a task."""
    from qserve.wishes import Floor

    fields = set(Floor.model_fields) - {"tasks"}
    if unknown := [name for name in found if name not in fields and not name.startswith("task:")]:
        raise UsageError(f"--floor {unknown[0]}: did you mean one of {', '.join(sorted(fields))}, or task:NAME?")
    return floor_of(found)


def floor_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """`task:NAME` as the recipe has it: one of the floor's `tasks`."""
    tasks = {name.removeprefix("task:"): value for name, value in found.items() if name.startswith("task:")}
    fields = {name: value for name, value in found.items() if not name.startswith("task:")}
    return {**fields, **({"tasks": tasks} if tasks else {})}
