"""Build one checkpoint: the bf16 baseline from its source, or a quantized variant from the baseline.

A checkpoint is filled under a temporary name, verified, given its manifest last, and renamed. Its name ends in a
digest of everything that made it.
"""

import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from qserve import __version__
from qserve.artifacts import MANIFEST_NAME, DataRecord, FileEntry, Manifest
from qserve.llama_cpp import source_digest
from qserve.prep.context import Context
from qserve.prep.data import calibration_record
from qserve.prep.gguf import read_gguf, special_tokens
from qserve.prep.headers import INDEX, read_folder, weight_files
from qserve.prep.preflight import compute_dtype
from qserve.prep.quantize import Task, carry, quantize
from qserve.prep.schemes import ignore_of, scheme_of
from qserve.prep.source import Model, read_config
from qserve.prep.to_gguf import make_gguf
from qserve.prep.verify import parameters, weigh
from qserve.recipe import source_text
from qserve.variants import (
    BASELINE,
    Bf16,
    Gguf,
    QuantizedVariant,
    Variant,
    backend_of,
    samples_of,
    scheme_label,
    settings_of,
)  # fmt: skip
from qserve.workspace import complete_or_absent, digest_of, sha256_file

FORMAT = 1  # of what the workers write: raise it when a change of theirs changes checkpoints


@dataclass(frozen=True)
class Prepared:
    """A finished checkpoint."""

    variant: str
    folder: Path
    manifest: Manifest


@dataclass(frozen=True)
class Made:
    """What a build tells its manifest."""

    targets: tuple[str, ...] = ()
    fallback: tuple[str, ...] = ()
    calibration: DataRecord | None = None
    note: str | None = None
    peak_memory_bytes: int | None = None


# --- names ----------
def baseline_digest(context: Context, model: Model) -> str:
    """Linked weights are the source's own; converted ones depend on the environment that converts."""
    runtime = None if _conversion(model) == "link" else context.digest_of_runtime("llmcompressor")
    return digest_of([FORMAT, model.identity, _conversion(model), runtime])


def variant_digest(context: Context, model: Model, name: str, data: Path) -> str:
    """Changes with the source, the settings that matter, the very calibration ids, and the environment's lock."""
    variant = context.recipe.variants[name]
    if isinstance(variant, Gguf):
        made_by = [context.digest_of_runtime("llmcompressor"), source_digest()]
        made_by += ["tokenizer of the source"] if _came_in(model) else []
        return digest_of([FORMAT, baseline_digest(context, model), variant.model_dump(mode="json"), *made_by])
    record, _ = _calibration(variant, data)
    own = {field: value for field, value in settings_of(variant).items() if field != "samples"}
    settings = [own, ignore_of(variant, model.outline.config)]
    dtype, runtime = compute_dtype(model.outline, context.machine), context.digest_of_runtime(backend_of(variant))
    return digest_of([FORMAT, model.identity, settings, record and record.sha256, dtype, runtime])


def _calibration(variant: QuantizedVariant, data: Path) -> tuple[DataRecord | None, int]:
    if isinstance(variant, Gguf) or not scheme_of(variant).calibrated:
        return None, 0
    return calibration_record(data, samples_of(variant))


# --- baseline ----------
def build_baseline(context: Context, model: Model, digest: str) -> Prepared:
    """The source as an ordinary bfloat16 folder. Raises WorkerError, UsageError."""
    final = context.workspace.checkpoint(BASELINE, digest)
    started = time.monotonic()
    with complete_or_absent(final) as partial:
        made = _fill_baseline(context, model, partial)
        tensors = read_folder(partial)
        weights = weigh(tensors, (), parameters(tensors))
        facts = {"digest": digest, "weights": weights, "wall_s": time.monotonic() - started}
        manifest = _write_manifest(context, model, BASELINE, partial, {**facts, **_facts(Bf16(), made)})
    return Prepared(BASELINE, final, manifest)


def _fill_baseline(context: Context, model: Model, out: Path) -> Made:
    conversion, note = _conversion(model), model.outline.note
    if conversion == "gguf":
        job = {"gguf": str(model.path), "out": str(out), "special": special_tokens(read_gguf(model.path))}
        result = context.run(BASELINE, "gguf_worker.py", job)
        carry(model.carried, model.path.parent, out)
        return Made(note=note, peak_memory_bytes=result["peak_memory_bytes"])
    carry(model.carried, model.path, out)
    if conversion == "link":
        for path in (*weight_files(model.path), *model.path.glob(INDEX)):
            link(path.resolve(), out / path.name)
        shutil.copyfile(model.path / "config.json", out / "config.json")
        return Made(note=note)
    return _cast(context, model, out)


def _cast(context: Context, model: Model, out: Path) -> Made:
    files = weight_files(model.path)
    job = {"files": [[str(path.resolve()), str(out / path.name)] for path in files]}
    result = context.run(BASELINE, "cast_worker.py", job)
    for path in model.path.glob(INDEX):
        shutil.copyfile(path, out / path.name)
    config = read_config(model.path)
    config.update({key: "bfloat16" for key in ("torch_dtype", "dtype") if key in config})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    kinds = ", ".join(sorted(_float_kinds(model)))
    return Made(note=f"weights were cast from {kinds} to bfloat16", peak_memory_bytes=result["peak_memory_bytes"])


def _conversion(model: Model) -> str:
    """gguf, link or cast: how the source becomes a bfloat16 folder. A few float32 tensors beside bfloat16 ones stay."""
    if model.outline.kind == "gguf":
        return "gguf"
    sizes = _float_kinds(model)
    return "link" if sizes.get("BF16", 0) > sum(sizes.values()) / 2 and "F16" not in sizes else "cast"


def _float_kinds(model: Model) -> dict[str, int]:
    """dtype -> bytes of floating-point weights."""
    sizes: dict[str, int] = {}
    for tensor in read_folder(model.path).values():
        if tensor.dtype in ("F16", "BF16", "F32", "F64"):
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.size_bytes
    return sizes


# --- variants ----------
def build_variant(context: Context, model: Model, baseline: Prepared, name: str, data: Path) -> Prepared:
    """Quantize, verify, keep. Raises WorkerError; then nothing is left of it."""
    variant = context.recipe.variants[name]
    if isinstance(variant, Gguf):
        return _build_gguf(context, model, baseline, name, data)
    digest = variant_digest(context, model, name, data)
    final = context.workspace.checkpoint(name, digest)
    record, samples = _calibration(variant, data)
    with complete_or_absent(final) as partial:
        sample = data / "calibration.json"
        task = Task(name, variant, baseline.folder, partial, sample if record else None, samples, sample)
        done = quantize(context, model, task)
        made = Made(done.targets, done.fallback, record, baseline.manifest.source_note, done.peak_memory_bytes)
        facts = {"digest": digest, "weights": done.weights, "wall_s": done.wall_s, **_facts(variant, made)}
        manifest = _write_manifest(context, model, name, partial, facts)
    return Prepared(name, final, manifest)


def _came_in(model: Model) -> Path | None:
    """The GGUF file that the model came in, if it did."""
    return model.path if model.outline.kind == "gguf" else None


def _build_gguf(context: Context, model: Model, baseline: Prepared, name: str, data: Path) -> Prepared:
    variant = context.recipe.variants[name]
    assert isinstance(variant, Gguf)
    digest = variant_digest(context, model, name, data)
    final = context.workspace.checkpoint(name, digest)
    with complete_or_absent(final) as partial:
        made = make_gguf(context, name, variant, baseline.folder, partial, _came_in(model))
        found, source_note = made.found, baseline.manifest.source_note
        settings = Made(found.targets, (), None, source_note, made.peak_memory_bytes)
        facts = {"digest": digest, "weights": found.weights, "wall_s": made.wall_s, "note": found.note}
        packages = {"llama.cpp": made.llama_cpp}
        manifest = _write_manifest(context, model, name, partial, {**facts, **_facts(variant, settings)}, packages)
    return Prepared(name, final, manifest)


# --- files ----------
def link(source: Path, target: Path) -> None:
    """A hard link costs no disk; across file systems, a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


# --- manifest ----------
def _facts(variant: Variant, made: Made) -> dict[str, Any]:
    return {
        "settings": settings_of(variant), "label": scheme_label(variant), "calibration": made.calibration,
        "layers": len(made.targets), "layers_fallback": made.fallback, "source_note": made.note,
        "peak_memory_bytes": made.peak_memory_bytes,
    }  # fmt: skip


def _write_manifest(
    context: Context, model: Model, name: str, folder: Path, facts: dict[str, Any],
    packages: Mapping[str, str] = MappingProxyType({}),
) -> Manifest:  # fmt: skip
    """`packages`: what made it beside the runtime."""
    _readable(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = tuple(
        FileEntry(name=str(p.relative_to(folder)), size_bytes=p.stat().st_size, sha256=sha256_file(p)) for p in files
    )
    linked = name == BASELINE and _conversion(model) == "link"
    runtime = None if linked else context.runtime_of(backend_of(context.recipe.variant(name)))
    manifest = Manifest(
        variant=name, model=source_text(context.recipe.model), revision=model.outline.revision,
        source_sha256=model.sha256, runtime=runtime.name if runtime else "none",
        packages={**runtime.packages, **packages} if runtime else {},
        qserve_version=__version__, threads=context.threads if runtime else None, files=entries,
        created=time.strftime("%FT%TZ", time.gmtime()), licence=model.outline.licence,
        base_model=model.outline.base_model, **facts,
    )  # fmt: skip
    manifest.write(folder / MANIFEST_NAME)
    return manifest


def _readable(folder: Path) -> None:
    """Weights are written for their owner alone; a checkpoint is for whoever serves it."""
    for path in folder.glob("*.safetensors"):
        if path.stat().st_nlink == 1:  # not the source's own file
            path.chmod(0o644)
