"""Finished checkpoints are looked at before they are used. The baseline of a bfloat16 folder needs no worker."""

import json
from pathlib import Path

import pytest
from tiny import write_corpus, write_llama

from qserve.artifacts import MANIFEST_NAME
from qserve.errors import UsageError
from qserve.machine import look as look_at_machine
from qserve.prep.checkpoint import Prepared, baseline_digest, build_baseline
from qserve.prep.context import Context
from qserve.prep.source import look, open_model, sha256_cached
from qserve.prep.stage import ensure_data, find_prepared, prepare
from qserve.recipe import Recipe
from qserve.workspace import Workspace

AGAIN = "remove the folder .*/bf16-[0-9a-f]{12} and run `qserve prep` again"


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    model, corpus = write_llama(tmp_path / "model"), write_corpus(tmp_path / "corpus.jsonl")
    fields = {"model": str(model), "calibration": {"dataset": str(corpus)}, "variants": {"fp8": {"method": "fp8"}}}
    return Recipe.model_validate(fields)


@pytest.fixture
def space(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "ws")


@pytest.fixture
def baseline(recipe: Recipe, space: Workspace) -> Prepared:
    context = Context(recipe, space, look_at_machine(), None, print)
    model = open_model(recipe, look(recipe, print), space)
    return build_baseline(context, model, baseline_digest(context, model))


def test_a_whole_checkpoint_is_found(recipe: Recipe, space: Workspace, baseline: Prepared) -> None:
    assert find_prepared(recipe, space, ()) == (baseline,)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "LICENSE"])
def test_a_file_that_is_missing_or_cut_is_named(
    recipe: Recipe, space: Workspace, baseline: Prepared, name: str
) -> None:
    path = baseline.folder / name
    whole = path.read_bytes()
    path.unlink()  # weights are the source's own file by a hard link: never written into
    with pytest.raises(UsageError, match=f"/{name} is missing; {AGAIN}"):
        find_prepared(recipe, space, ())
    path.write_bytes(whole[:-1])
    with pytest.raises(
        UsageError, match=f"/{name} has {len(whole) - 1:,} bytes where {len(whole):,} were written; {AGAIN}"
    ):
        find_prepared(recipe, space, ())
    path.write_bytes(whole)
    assert find_prepared(recipe, space, ()) == (baseline,)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}'])
def test_a_manifest_that_cannot_be_read_is_named(
    recipe: Recipe, space: Workspace, baseline: Prepared, text: str
) -> None:
    (baseline.folder / MANIFEST_NAME).write_text(text)
    sentence = rf"/qserve\.json cannot be read; {AGAIN}"
    with pytest.raises(UsageError, match=sentence):
        find_prepared(recipe, space, ())
    with pytest.raises(UsageError, match=sentence):
        prepare(recipe, space, ("fp8",), print)
    other = baseline.folder.rename(space.checkpoint("bf16", "0" * 12))  # as another environment would have named it
    with pytest.raises(UsageError, match=sentence):
        find_prepared(recipe, space, ())
    assert other.is_dir()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"KEY": null}', '{"KEY": [1]}', "\udcff"])
def test_remembered_hashes_that_cannot_be_read_are_made_again(tmp_path: Path, space: Workspace, text: str) -> None:
    path = tmp_path / "abc"
    path.write_text("abc")
    space.root.mkdir()
    store = space.root / "hashes.json"
    store.write_text(text.replace("KEY", str(path)), errors="surrogateescape")
    sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert sha256_cached(path, space) == sha256
    stat = path.stat()
    assert json.loads(store.read_bytes()) == {str(path): [stat.st_size, stat.st_mtime_ns, sha256]}


def test_nothing_is_written_into_the_source(tmp_path: Path, recipe: Recipe) -> None:
    model = tmp_path / "model"
    before = sorted(model.rglob("*"))
    for inside in (Workspace(model), Workspace(model / "ws")):
        with pytest.raises(UsageError, match="is inside the source model; choose another with --workspace"):
            find_prepared(recipe, inside, ())
        with pytest.raises(UsageError, match="is inside the source model; choose another with --workspace"):
            ensure_data(recipe, inside, print)
    assert sorted(model.rglob("*")) == before
