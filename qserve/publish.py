"""`qserve publish`: a measured variant becomes a repository on the Hub. Here prep/ (upload) and eval/ (card) meet.

checkpoint + report -> objections -> access -> hashes -> card -> upload -> looked at once more
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qserve import limits
from qserve.app import WorkspaceOption, app, say
from qserve.errors import PreflightError, UsageError
from qserve.publish_request import Wishes, check_folder, check_ids, model_name, names, repo_of, run_folder

if TYPE_CHECKING:
    from qserve.artifacts import Licence
    from qserve.eval.publishable import Measured, Objection
    from qserve.prep.checkpoint import Prepared
    from qserve.prep.publish import Target
    from qserve.prep.publish_plan import Upload
    from qserve.recipe import Recipe
    from qserve.workspace import Workspace


class PurposeName(StrEnum):
    speed = "speed"
    memory = "memory"


@dataclass(frozen=True)
class Candidate:
    """One variant with all that is known of it, and where it is to go."""

    repo: str
    prepared: "Prepared"
    measured: "Measured | None"
    licence: "Licence | None"
    base_model: str | None
    objections: "tuple[Objection, ...]"


@app.command()
def publish(
    variant: Annotated[str | None, typer.Argument(help="A variant of the recipe; default: the chosen one.")] = None,
    to: Annotated[str, typer.Option("--to", help="OWNER/NAME on the Hub; with --all OWNER.")] = "",
    all_: Annotated[bool, typer.Option("--all", help="Every variant of the recipe, and a collection of them.")] = False,
    recipe: Annotated[str | None, typer.Option("--recipe", help="Recipe file or name.")] = None,
    run: Annotated[
        Path | None, typer.Option("--run", help="Run folder with the figures [default: the newest].")
    ] = None,
    purpose: Annotated[PurposeName, typer.Option("--for", help="What it is published for.")] = PurposeName.speed,
    concurrency: Annotated[
        int | None, typer.Option(min=1, max=limits.CONCURRENCY, help="The load that it is published for.")
    ] = None,
    licence: Annotated[str | None, typer.Option(help="Licence id, where the source names none.")] = None,
    base_model: Annotated[str | None, typer.Option(help="Hub id of the source, where it names none.")] = None,
    public: Annotated[bool, typer.Option("--public", help="For everybody to see; else it is private.")] = False,
    force: Annotated[bool, typer.Option("--force", help="In spite of objections; the card names them.")] = False,
    dry_run: Annotated[Path | None, typer.Option("--dry-run", help="Write what would be sent to this folder.")] = None,
    workspace: WorkspaceOption = None,
) -> None:
    """Publish a measured variant on the Hub.

    With a model card of its figures; private, unless --public is given.
    """
    from qserve.eval.publishable import Regime
    from qserve.recipe import find_recipe, load_recipe
    from qserve.workspace import open_workspace

    parsed, space = load_recipe(find_recipe(recipe)), open_workspace(workspace)
    wishes = Wishes(public, force, licence, base_model, Regime(purpose.value, concurrency), run, dry_run)
    wanted = names(parsed, variant, all_, space, run)
    repos = {name: repo_of(parsed, to, name, all_, bool(dry_run)) for name in wanted}
    check_ids(wishes, repos)
    if wishes.dry_run:
        check_folder(space, wishes.dry_run)
    else:
        _check_access(tuple(repos.values()), public)
    found = tuple(_candidates(parsed, space, wishes, repos))
    for name, address in _publish_all(parsed, found, wishes) if all_ else _publish_one(found[0], wishes):
        typer.echo(f"{name}\t{address}")


def _check_access(repos: tuple[str, ...], public: bool) -> None:
    """Before any work, and before anything is asked of the Hub."""
    from qserve.prep import publish as hub

    hub.open_hub(say)
    hub.check_access(tuple(hub.Target(repo, public, say) for repo in repos))


# --- what is known ----------
def _candidates(recipe: "Recipe", space: "Workspace", wishes: Wishes, repos: dict[str, str]) -> Iterator[Candidate]:
    from qserve.eval.publishable import Objection, objections
    from qserve.prep.publish_plan import strangers
    from qserve.prep.stage import find_prepared

    for prepared in find_prepared(recipe, space, tuple(repos))[1:]:
        repo = repos[prepared.variant]
        measured = _measured(space, prepared, wishes.run)
        licence, base_model, gated = _terms(recipe, prepared, wishes)
        said = list(objections(measured, wishes.regime))
        if licence is None:
            said.append(Objection("has no known licence terms: the source names none", "--licence ID names them"))
        if gated and wishes.public:
            said.append(Objection(f"comes from {base_model}, which is gated: a public copy goes past that gate"))
        if others := strangers(prepared):
            said.append(
                Objection(f"has files in its folder that are not its own: {', '.join(others)}; they are not sent")
            )
        yield Candidate(repo, prepared, measured, licence, base_model, tuple(said))


def _measured(space: "Workspace", prepared: "Prepared", run: Path | None) -> "Measured | None":
    """From the run that was named, else from the newest one that measured this very checkpoint."""
    from qserve.eval.publishable import find_measured
    from qserve.eval.report import read_report

    if run is not None:
        return find_measured(read_report(run_folder(space, run)), prepared.manifest)
    paths = sorted(space.runs.glob("*/measurements.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in paths:
        try:
            found = find_measured(read_report(path.parent), prepared.manifest)
        except UsageError as error:
            say(f"left out: {error}")
            continue
        if found:
            return found
    return None


def _terms(recipe: "Recipe", prepared: "Prepared", wishes: Wishes) -> "tuple[Licence | None, str | None, bool]":
    """Licence, Hub id of the source, and whether it is gated: from the user, the manifest, the source, the Hub."""
    from qserve.artifacts import Licence
    from qserve.prep.source import look
    from qserve.recipe import HubSource

    source, manifest = look(recipe, say), prepared.manifest
    hub_id = recipe.model.repo if isinstance(recipe.model, HubSource) else source.base_model
    base_model = wishes.base_model or manifest.base_model or hub_id
    licence = Licence(id=wishes.licence) if wishes.licence else manifest.licence or source.licence
    if base_model is None:
        say(f"{prepared.variant}: the source names no repository on the Hub, so the card links none (--base-model)")
    if base_model is None or wishes.dry_run:
        return licence, base_model, False
    from qserve.prep.publish import ask_terms

    terms = ask_terms(base_model, say)
    return licence or terms.licence, base_model, terms.gated


# --- doing it ----------
def _publish_one(candidate: Candidate, wishes: Wishes) -> Iterator[tuple[str, str]]:
    if candidate.objections and not wishes.force:
        raise PreflightError(_refusal(candidate))
    _check_place(candidate, wishes, wishes.dry_run)
    yield candidate.prepared.variant, _deliver(candidate, wishes, wishes.dry_run)


def _publish_all(recipe: "Recipe", found: tuple[Candidate, ...], wishes: Wishes) -> Iterator[tuple[str, str]]:
    """Those that nothing speaks against, and their collection. Raises PreflightError for the others, at the end."""
    fit = [one for one in found if wishes.force or not one.objections]
    places = [(one, wishes.dry_run / one.prepared.variant if wishes.dry_run else None) for one in fit]
    for one, folder in places:
        _check_place(one, wishes, folder)
    for one, folder in places:
        yield one.prepared.variant, _deliver(one, wishes, folder)
    if fit and not wishes.dry_run:
        from qserve.prep.publish import collect

        title = f"{model_name(recipe)}, quantized"
        yield "collection", collect(tuple(_target(one, wishes) for one in fit), title[:60])
    if refused := [one for one in found if one not in fit]:
        done = f"{len(fit)} of {len(found)} variants are published"
        raise PreflightError("\n".join([*map(_refusal, refused), done]))


def _refusal(candidate: Candidate) -> str:
    name, found = candidate.prepared.variant, candidate.objections
    reasons = "; it ".join(one.says + (f" ({one.remedy})" if one.remedy else "") for one in found)
    return f"{name} is not published: {name} {reasons}; --force publishes it all the same"


def _check_place(candidate: Candidate, wishes: Wishes, folder: Path | None) -> None:
    """Whether nothing else is there, before the weights are read."""
    from qserve.prep import publish_plan

    if folder is not None:
        publish_plan.check_folder(folder, candidate.prepared.manifest)
        return
    from qserve.prep import publish as hub

    hub.look_at_repo(_target(candidate, wishes), candidate.prepared.manifest)


def _deliver(candidate: Candidate, wishes: Wishes, folder: Path | None) -> str:
    """Write the folder of a dry run, or upload; returns where it is now."""
    from qserve.prep import publish_plan

    manifest = candidate.prepared.manifest
    if folder is not None:
        publish_plan.write_folder(_files(candidate, wishes), folder)
        return str(folder)
    from qserve.prep import publish as hub

    return hub.upload(_target(candidate, wishes), manifest, _files(candidate, wishes))


def _target(candidate: Candidate, wishes: Wishes) -> "Target":
    from qserve.prep.publish import Target

    return Target(candidate.repo, wishes.public, say)


def _files(candidate: Candidate, wishes: Wishes) -> "tuple[Upload, ...]":
    """The checkpoint's files, hashed, and the card."""
    from qserve.eval.card import model_card
    from qserve.eval.card_metadata import Subject
    from qserve.prep.publish_plan import card_file, hashed_files

    prepared = candidate.prepared
    say(f"{prepared.variant}: hashing {len(prepared.manifest.files)} files")
    files = hashed_files(prepared)
    subject = Subject(
        candidate.repo, prepared.manifest, candidate.measured, wishes.regime, candidate.licence, candidate.base_model,
        _quant_method(prepared), _has_template(prepared.folder), tuple(one.says for one in candidate.objections),
    )  # fmt: skip
    return (*files, card_file(model_card(subject)))


def _quant_method(prepared: "Prepared") -> str:
    from qserve.prep.source import read_config

    if any(file.name.endswith(".gguf") for file in prepared.manifest.files):
        return "gguf"
    quantization = read_config(prepared.folder).get("quantization_config")
    return str(quantization.get("quant_method", "unknown")) if isinstance(quantization, dict) else "unknown"


def _has_template(folder: Path) -> bool:
    config = folder / "tokenizer_config.json"
    return (folder / "chat_template.jinja").is_file() or (
        config.is_file() and '"chat_template"' in config.read_text("utf-8")
    )
