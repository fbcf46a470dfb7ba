"""What the words of `qserve publish` ask for: which variants, where to, on whose terms. Checked before any work."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qserve.errors import PreflightError, UsageError

if TYPE_CHECKING:
    from qserve.eval.publishable import Regime
    from qserve.recipe import Recipe
    from qserve.workspace import Workspace

NAME = r"(?!\S*(?:--|\.\.))[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?(?<!\.git)"  # as the Hub takes it


@dataclass(frozen=True)
class Wishes:
    """What the user asked for."""

    public: bool
    force: bool
    licence: str | None
    base_model: str | None
    regime: "Regime"
    run: Path | None
    dry_run: Path | None


def names(recipe: "Recipe", variant: str | None, all_: bool, space: "Workspace", run: Path | None) -> tuple[str, ...]:
    """The variants that are to be published: all, the one that was named, or the one that the run's figures choose."""
    from qserve.variants import BASELINE

    if variant is not None and all_:
        raise UsageError("name one variant, or give --all for every variant of the recipe")
    if all_:
        return tuple(recipe.variants)
    name = variant or _chosen(space, run)
    if name == BASELINE:
        raise (UsageError if variant else PreflightError)("bf16 is the source itself; name a quantized variant")
    recipe.variant(name)
    return (name,)


def _chosen(space: "Workspace", run: Path | None) -> str:
    from qserve.choose import chosen, section
    from qserve.eval.report import read_report

    report = read_report(run_folder(space, run) if run else space.latest_run())
    return chosen(report, section(report, None), "publish").partition("@")[0]


def run_folder(space: "Workspace", run: Path) -> Path:
    """A path, or the name of a run of the workspace."""
    return run if os.path.isdir(run) else space.runs / run


def repo_of(recipe: "Recipe", to: str, name: str, all_: bool, dry_run: bool) -> str:
    """owner/name; with --all, and where a dry run names no place, the name is the model's and the variant's."""
    own_name = f"{model_name(recipe)}-{name}"
    if all_:
        if not re.fullmatch(NAME, to):
            raise UsageError("with --all give the owner alone: --to OWNER")
        return f"{to}/{own_name}"
    if not to and dry_run:
        return f"OWNER/{own_name}"
    if not re.fullmatch(f"{NAME}/{NAME}", to):
        raise UsageError(f"--to is {to!r}; give OWNER/NAME, in letters, digits and single '-', '_' or '.' between them")
    return to


def model_name(recipe: "Recipe") -> str:
    """`SmolLM2-135M-Instruct` of `.../SmolLM2-135M-Instruct.Q4_1.gguf` and of `HuggingFaceTB/SmolLM2-135M-Instruct`."""
    from qserve.recipe import source_text

    last = source_text(recipe.model).rstrip("/").rpartition("/")[2]
    stem = re.sub(r"[.-](B?F16|F32|I?Q\d\w*)$", "", last.removesuffix(".gguf"), flags=re.IGNORECASE)
    return re.sub(r"[^A-Za-z0-9_.]+|\.{2,}", "-", stem).strip("-.") or "model"


def check_folder(space: "Workspace", dry_run: Path) -> None:
    """A dry run replaces its folder: it may be no checkpoint, not even this variant's own."""
    if dry_run.resolve().is_relative_to(space.checkpoints.resolve()):
        raise UsageError(f"--dry-run {dry_run} is among the checkpoints themselves; give a new folder elsewhere")


def check_ids(wishes: Wishes, repos: dict[str, str]) -> None:
    if wishes.licence and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", wishes.licence):
        raise UsageError(f"--licence is {wishes.licence!r}; give an id such as apache-2.0, mit or llama3.1")
    if wishes.base_model and not re.fullmatch(f"{NAME}/{NAME}", wishes.base_model):
        raise UsageError(f"--base-model is {wishes.base_model!r}; give the Hub id of the source, OWNER/NAME")
    if wishes.base_model in repos.values():
        raise UsageError("--base-model and --to are the same; the source is never overwritten")
