"""The prep stage: a recipe's variants become checkpoints. What is there already is left alone.

prepare        make what is missing: baseline, data, variants
ensure_data    the token ids of calibration, quality and load
find_prepared  the checkpoints of a recipe, for a stage that uses them
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qserve.artifacts import MANIFEST_NAME, Manifest
from qserve.errors import DamagedFile, QserveError, UsageError, WorkerError
from qserve.llama_cpp import check_llama_cpp_can_be_built
from qserve.machine import look as look_at_machine
from qserve.prep.checkpoint import Prepared, baseline_digest, build_baseline, build_variant, variant_digest
from qserve.prep.context import Context
from qserve.prep.data import build_data, calibration_record, data_folder, read_parts
from qserve.prep.preflight import check_disk, check_memory, check_variant, kernel_notes
from qserve.prep.schemes import scheme_of
from qserve.prep.source import Model, Outline, look, open_model
from qserve.recipe import PathSource, Recipe
from qserve.uvrun import Say
from qserve.variants import BASELINE, Bf16, Gguf, samples_of, settings_of
from qserve.workspace import Workspace


def prepare(
    recipe: Recipe, workspace: Workspace, only: tuple[str, ...], say: Say, python: Path | None = None
) -> tuple[Prepared, ...]:
    """Make the checkpoints that are missing. Returns the baseline, then the variants named in `only`, in that order.

    `python`: an environment of the user's own with llm-compressor in it.

    Raises:
        UsageError, PreflightError: before any long work.
        WorkerError: variants failed; the others are finished and kept.
    """
    context = Context(recipe, workspace, look_at_machine(), python, say)
    names = tuple(name for name in only if name != BASELINE)
    _refuse_source_as_workspace(recipe, workspace)
    outline = look(recipe, say)
    for name in names:
        check_variant(name, recipe.variants[name], outline.config, context.machine)
    if any(isinstance(recipe.variants[name], Gguf) for name in names):
        check_llama_cpp_can_be_built(context.machine.flavour)
    context.digest_of_runtime("llmcompressor")  # a Python of the user's that does not fit is refused here
    with workspace.only_one("prep"):
        model = open_model(recipe, outline, workspace)
        data = data_folder(recipe, model, workspace)
        baseline = _complete(context, BASELINE, baseline_digest(context, model))
        finished = _finished(context, model, names, data)
        if baseline and len(finished) == len(names):
            return (baseline, *(finished[name] for name in names))
        _sweep(workspace)
        _check_room(context, outline, tuple(name for name in names if name not in finished))
        parts = None if _has_data(data) else read_parts(context)
        baseline = baseline or build_baseline(context, model, baseline_digest(context, model))
        if parts is not None:
            build_data(context, parts, baseline.folder, data)
        return (baseline, *_build_all(context, model, baseline, names, data))


def ensure_data(recipe: Recipe, workspace: Workspace, say: Say, python: Path | None = None) -> Path:
    """The data folder of the recipe, made if it is missing.

    Raises:
        UsageError: there is no baseline yet whose tokenizer could be used, or the data cannot be.
    """
    context = Context(recipe, workspace, look_at_machine(), python, say)
    _refuse_source_as_workspace(recipe, workspace)
    model = open_model(recipe, look(recipe, say), workspace)
    final = data_folder(recipe, model, workspace)
    if not _has_data(final):
        baseline = find_prepared(recipe, workspace, ())[0]
        with workspace.only_one("prep"):
            build_data(context, read_parts(context), baseline.folder, final)
    return final


def find_prepared(recipe: Recipe, workspace: Workspace, only: tuple[str, ...]) -> tuple[Prepared, ...]:
    """The finished checkpoints, baseline first, then those named in `only`.

    A checkpoint that the current environment would make is preferred; else the newest of the same source, settings and
    calibration ids, whatever environment made it (`prep --python`, or an older lock).

    Raises:
        UsageError: some are missing; names them. Or one is damaged: a file is not there, or not of its size.
    """
    context = Context(recipe, workspace, look_at_machine(), None, lambda text: None)
    _refuse_source_as_workspace(recipe, workspace)
    names = (BASELINE, *(name for name in only if name != BASELINE))
    _refuse_missing(workspace, [name for name in names if not any(_manifests(workspace, name))])
    model = open_model(recipe, look(recipe, context.say), workspace)
    data = data_folder(recipe, model, workspace)
    found = {name: _find(context, model, name, data) for name in names}
    _refuse_missing(workspace, [name for name, prepared in found.items() if prepared is None])
    whole = tuple(prepared for prepared in found.values() if prepared is not None)
    for prepared in whole:
        _check_files(prepared)
    return whole


def _refuse_missing(workspace: Workspace, names: list[str]) -> None:
    if names:
        raise UsageError(f"no checkpoint of {', '.join(names)} in {workspace.root}; run `qserve prep` first")


# --- looking ----------
def _complete(context: Context, name: str, digest: str) -> Prepared | None:
    folder = context.workspace.checkpoint(name, digest)
    with _naming(folder):
        manifest = context.workspace.complete(name, digest)
    return Prepared(name, folder, manifest) if manifest else None


def _finished(context: Context, model: Model, names: tuple[str, ...], data: Path) -> dict[str, Prepared]:
    """Variants that are there. Without data, whose ids are in their names, there are none."""
    if not _has_data(data):
        return {}
    found = {name: _complete(context, name, variant_digest(context, model, name, data)) for name in names}
    return {name: prepared for name, prepared in found.items() if prepared is not None}


def _find(context: Context, model: Model, name: str, data: Path) -> Prepared | None:
    if name == BASELINE:
        exact = _complete(context, name, baseline_digest(context, model))
    elif _has_data(data):
        exact = _complete(context, name, variant_digest(context, model, name, data))
    else:
        exact = None
    return exact or next((p for p in _newest_first(context.workspace, name) if _fits(context, model, p, data)), None)


def _manifests(workspace: Workspace, name: str) -> list[Path]:
    """Of checkpoints with that name, whatever they were made of."""
    return [p for p in workspace.checkpoints.glob(f"{name}-*/{MANIFEST_NAME}") if p.parent.suffix != ".partial"]


def _newest_first(workspace: Workspace, name: str) -> Iterator[Prepared]:
    for path in sorted(_manifests(workspace, name), key=lambda p: p.stat().st_mtime, reverse=True):
        with _naming(path.parent):
            manifest = Manifest.read(path)
        yield Prepared(name, path.parent, manifest)


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """A manifest that cannot be read is a damaged checkpoint."""
    try:
        yield
    except DamagedFile as error:
        raise UsageError(_damaged(folder, folder / MANIFEST_NAME, "cannot be read")) from error


def _check_files(prepared: Prepared) -> None:
    """Presence and size of every file of the manifest. Hashing them would read all the weights again."""
    for entry in prepared.manifest.files:
        path = prepared.folder / entry.name
        if not path.is_file():
            raise UsageError(_damaged(prepared.folder, path, "is missing"))
        if (size := path.stat().st_size) != entry.size_bytes:
            what = f"has {size:,} bytes where {entry.size_bytes:,} were written"
            raise UsageError(_damaged(prepared.folder, path, what))


def _damaged(folder: Path, path: Path, what: str) -> str:
    return f"{path} {what}; remove the folder {folder} and run `qserve prep` again"


def _fits(context: Context, model: Model, found: Prepared, data: Path) -> bool:
    """Whether a checkpoint was made of the same source, settings and calibration ids."""
    manifest = found.manifest
    variant = context.recipe.variant(found.variant)
    if (manifest.variant, manifest.source_sha256) != (found.variant, model.sha256):
        return False
    if manifest.settings != settings_of(variant):
        return False
    if isinstance(variant, Bf16 | Gguf) or not scheme_of(variant).calibrated:
        return True
    if not _has_data(data) or manifest.calibration is None:
        return False
    return manifest.calibration.sha256 == calibration_record(data, samples_of(variant))[0].sha256


def _has_data(folder: Path) -> bool:
    return (folder / "parts.json").is_file()


# --- making ----------
def _sweep(workspace: Workspace) -> None:
    """Remove what a killed prep left half done. The lock is held, so nobody is at work on it."""
    for folder in (workspace.checkpoints, workspace.data):
        for path in folder.glob("*.partial"):
            shutil.rmtree(path)


def _check_room(context: Context, outline: Outline, names: tuple[str, ...]) -> None:
    missing = {name: context.recipe.variants[name] for name in names}
    check_disk(outline, missing, context.workspace)
    check_memory(context.recipe, outline, missing, context.machine)
    for name, variant in missing.items():
        for note in kernel_notes(name, variant, outline.config, context.machine):
            context.say(note)


def _build_all(
    context: Context, model: Model, baseline: Prepared, names: tuple[str, ...], data: Path
) -> tuple[Prepared, ...]:
    """Every variant, one after the other. One that fails does not keep the others from being made."""
    done, failed = [], []
    for name in names:
        there = _complete(context, name, variant_digest(context, model, name, data))
        try:
            done.append(there or build_variant(context, model, baseline, name, data))
        except QserveError as error:
            context.say(f"{name}: failed")
            failed.append(str(error))
    if failed:
        raise WorkerError("\n".join(failed) + f"\n{len(done)} of {len(names)} variants are finished and kept")
    return tuple(done)


def _refuse_source_as_workspace(recipe: Recipe, workspace: Workspace) -> None:
    match recipe.model:
        case PathSource(path) if workspace.root.resolve().is_relative_to(path.expanduser().resolve()):
            raise UsageError(
                f"the workspace {workspace.root} is inside the source model; choose another with --workspace"
            )
