"""Where a model comes from: a Hub repository, a local folder, a .gguf file, or a file inside a PyPI package.

`look` reads what the model is (config.json or a GGUF header) before any weight is fetched; `open_model` gives the
files. The source is only ever read.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qserve.artifacts import Licence
from qserve.errors import UsageError
from qserve.prep.gguf import GgufHeader, config_of, read_gguf
from qserve.prep.headers import read_folder, weight_files
from qserve.prep.licence import hub_id_of_gguf, licence_of_folder, licence_of_gguf
from qserve.recipe import HubSource, PackageSource, PathSource, Recipe, source_text
from qserve.runtimes import fetch_package_file
from qserve.uvrun import Say
from qserve.workspace import Workspace, sha256_file

CARRIED = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")
LICENCES = ("LICENSE", "LICENCE", "NOTICE", "COPYING", "USE_POLICY")
NOT_CARRIED = ("config.json", "model.safetensors.index.json", "qserve.json", "pytorch_model.bin.index.json")
Config = Mapping[str, object]


@dataclass(frozen=True)
class Outline:
    """What is known before weights are fetched. `bf16_bytes`: the size of its weights in bfloat16, if it can be
    told.
    """

    config: Config
    kind: Literal["folder", "gguf"]
    path: Path | None  # None: on the Hub, not fetched yet
    revision: str | None
    bf16_bytes: int | None
    note: str | None  # "weights came through GGUF Q4_1"
    licence: Licence | None = None  # as the source itself names it
    base_model: str | None = None  # Hub id of the source, where that is known


@dataclass(frozen=True)
class Model:
    """A source whose files are on this disk and whole. `carried`: what every checkpoint of it takes over unchanged."""

    outline: Outline
    path: Path  # folder or .gguf file
    sha256: str  # of the weight files
    identity: str  # of weights, config, tokenizer and all else that is carried
    carried: tuple[Path, ...]


def look(recipe: Recipe, say: Say) -> Outline:
    """Read the model's config. Raises UsageError: no such model, no access, offline, not a model."""
    match recipe.model:
        case HubSource(repo):
            return _look_on_hub(repo, recipe.revision)
        case PathSource(path):
            return _look_at(path.expanduser().absolute())
        case PackageSource():
            return _look_at(fetch_package_file(recipe.model, say))


def open_model(recipe: Recipe, outline: Outline, workspace: Workspace) -> Model:
    """Fetch what is not here yet, check that it is whole (headers only), and name it by its digests."""
    if outline.kind == "gguf":
        assert outline.path is not None
        weights, carried = (outline.path,), _licences_of(recipe, outline.path)
        return _named(outline, outline.path, weights, carried, workspace)
    folder = outline.path or _fetch(recipe, outline)
    read_folder(folder)
    carried = tuple(path for path in sorted(folder.iterdir()) if _is_carried(path))
    return _named(
        outline,
        folder,
        weight_files(folder),
        (*carried, *sorted(folder.glob("additional_chat_templates/*"))),
        workspace,
    )


def read_config(folder: Path) -> dict[str, object]:
    """config.json. Raises UsageError if it is not there or not an object."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UsageError(f"{folder} has no config.json; give a model folder, a .gguf file or a Hub id") from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path} is no JSON object; download it again")
    return config


def sha256_cached(path: Path, workspace: Workspace) -> str:
    """sha256 of a file, remembered in the workspace by path, size and time of change."""
    store = workspace.root / "hashes.json"
    known = _remembered(store)
    stat = path.resolve().stat()
    key, stamp = str(path.resolve()), [stat.st_size, stat.st_mtime_ns]
    if key in known and known[key][:2] == stamp:
        return str(known[key][2])
    known[key] = [*stamp, sha256_file(path)]
    workspace.root.mkdir(parents=True, exist_ok=True)
    partial = store.with_suffix(".partial")
    partial.write_text(json.dumps(known, indent=1), encoding="utf-8")
    partial.replace(store)
    return str(known[key][2])


def _remembered(store: Path) -> dict[str, list[object]]:
    """Path -> [size, time of change, sha256]. What cannot be read is forgotten: it only costs another reading."""
    try:
        found = json.loads(store.read_bytes())
    except (OSError, ValueError):
        return {}
    entries = found.items() if isinstance(found, dict) else ()
    return {key: entry for key, entry in entries if isinstance(entry, list) and len(entry) == 3}


def _look_at(path: Path) -> Outline:
    if path.is_file() and path.suffix == ".gguf":
        header = read_gguf(path)
        terms, repo = licence_of_gguf(header), hub_id_of_gguf(header)
        return Outline(config_of(header), "gguf", path, None, 2 * header.elements, _note(header), terms, repo)
    if path.is_file():
        raise UsageError(f"{path} is no .gguf file; give a model folder, a .gguf file or a Hub id")
    if not path.is_dir():
        raise UsageError(f"{path} does not exist; give a model folder, a .gguf file or a Hub id")
    config = read_config(path)
    refuse_quantized(config, str(path))
    return Outline(config, "folder", path, None, _bf16_bytes(path), None, licence_of_folder(path))


def _look_on_hub(repo: str, revision: str | None) -> Outline:
    from qserve.prep import hub  # the Hub client takes 0.3 s to import

    commit = hub.find_commit(repo, revision)
    config = read_config(commit.config.parent)
    refuse_quantized(config, repo)
    return Outline(config, "folder", None, commit.revision, commit.weight_bytes, None, commit.licence, repo)


def _fetch(recipe: Recipe, outline: Outline) -> Path:
    from qserve.prep import hub

    assert outline.revision is not None
    return hub.fetch_files(source_text(recipe.model), outline.revision)


def refuse_quantized(config: Config, name: str) -> None:
    found = config.get("quantization_config")
    if isinstance(found, Mapping):
        raise UsageError(
            f"{name} is already quantized ({found.get('quant_method', 'by an unnamed method')}); "
            "give the model it was made from"
        )


def _bf16_bytes(folder: Path) -> int:
    floats = {"F32": 2, "F64": 4}  # bytes there for one byte in bfloat16
    return sum(tensor.size_bytes // floats.get(tensor.dtype, 1) for tensor in read_folder(folder).values())


def _note(header: GgufHeader) -> str | None:
    whole = ("BF16", "F16", "F32")
    return None if header.weight_type in whole else f"weights came through GGUF {header.weight_type}"


def _is_carried(path: Path) -> bool:
    if not path.is_file() or path.name in NOT_CARRIED or path.name.startswith("."):
        return False
    return path.suffix in CARRIED or path.name.upper().startswith(LICENCES)


def _licences_of(recipe: Recipe, path: Path) -> tuple[Path, ...]:
    """Licence files beside a .gguf file, or of the package that it came in."""
    if isinstance(recipe.model, PackageSource):
        from qserve.packages import license_files

        return license_files(recipe.model, lambda text: None)
    return tuple(sorted(p for p in path.parent.iterdir() if p.is_file() and p.name.upper().startswith(LICENCES)))


def _named(
    outline: Outline, path: Path, weights: tuple[Path, ...], carried: tuple[Path, ...], workspace: Workspace
) -> Model:
    shas = {file.name: sha256_cached(file, workspace) for file in weights}
    others = {file.name: sha256_cached(file, workspace) for file in carried}
    whole = json.dumps([shas, others, dict(outline.config)], sort_keys=True, default=str)
    one = (
        next(iter(shas.values()))
        if len(shas) == 1
        else hashlib.sha256(json.dumps(shas, sort_keys=True).encode()).hexdigest()
    )
    return Model(outline, path, one, hashlib.sha256(whole.encode()).hexdigest(), carried)
