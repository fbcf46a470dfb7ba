"""The prep stage through its front door: a tiny random llama, the real llm-compressor, every method.

Builds the managed environment if this machine has none yet.
"""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from tiny import write_corpus, write_llama

from qserve.artifacts import DataParts
from qserve.errors import PreflightError, UsageError, WorkerError
from qserve.prep.headers import read_folder
from qserve.prep.stage import Prepared, ensure_data, find_prepared, prepare
from qserve.recipe import Recipe
from qserve.workspace import Workspace

VARIANTS = {
    "awq": {"method": "awq", "group_size": 32, "grid": 3, "samples": 4},
    "gptq": {"method": "gptq", "group_size": 32},
    "int8": {"method": "gptq", "bits": 8, "activations": "int8", "ignore": ["lm_head", "re:.*layers\\.1\\.mlp.*"]},
    "fp8": {"method": "fp8", "activations": "static"},
}


def recipe_of(model: Path, corpus: Path, variants: dict[str, dict[str, object]], **calibration: object) -> Recipe:
    cut = {"dataset": str(corpus), "samples": 12, "tokens": 128, "min_tokens": 8, **calibration}
    quality = {"windows": 3, "tokens": 64}
    return Recipe.model_validate({"model": str(model), "calibration": cut, "variants": variants, "quality": quality})


class World:
    """One source, one corpus, one workspace."""

    def __init__(self, root: Path) -> None:
        self.model = write_llama(root / "model")
        self.corpus = write_corpus(root / "corpus.jsonl")
        self.space = Workspace(root / "ws")
        self.said: list[str] = []

    def recipe(self, **variants: dict[str, object]) -> Recipe:
        return recipe_of(self.model, self.corpus, variants)

    def prepare(self, recipe: Recipe) -> dict[str, Prepared]:
        done = prepare(recipe, self.space, tuple(recipe.variants), self.said.append)
        return {prepared.variant: prepared for prepared in done}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("prep"))


@pytest.fixture(scope="module")
def prepared(world: World) -> dict[str, Prepared]:
    before = {path: path.read_bytes() for path in world.model.iterdir()}
    done = world.prepare(world.recipe(**VARIANTS))
    assert {path: path.read_bytes() for path in world.model.iterdir()} == before
    return done


def test_every_method_makes_a_checkpoint(prepared: dict[str, Prepared]) -> None:
    assert list(prepared) == ["bf16", *VARIANTS]
    layers = {name: one.manifest.layers for name, one in prepared.items()}
    assert layers == {"bf16": 0, "awq": 14, "gptq": 14, "int8": 11, "fp8": 14}
    bits = {name: one.manifest.weights.bits_per_parameter for name, one in prepared.items()}
    assert bits["bf16"] == 16
    assert all(4 < bits[name] < 10 for name in ("awq", "gptq", "fp8"))
    assert bits["fp8"] < bits["int8"] < 16
    assert {name: one.manifest.label for name, one in prepared.items()} == {
        "bf16": "bfloat16", "awq": "AWQ W4A16 g32", "gptq": "GPTQ W4A16 g32", "int8": "GPTQ W8A8 int8",
        "fp8": "FP8 static",
    }  # fmt: skip
    samples = {name: one.manifest.calibration and one.manifest.calibration.records for name, one in prepared.items()}
    assert samples == {"bf16": None, "awq": 4, "gptq": 12, "int8": 12, "fp8": 12}


def test_everything_but_weights_and_quantization_is_the_sources(world: World, prepared: dict[str, Prepared]) -> None:
    others = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "LICENSE")
    config = json.loads((world.model / "config.json").read_text())
    for one in prepared.values():
        for name in others:
            assert (one.folder / name).read_bytes() == (world.model / name).read_bytes(), (one.variant, name)
        written = json.loads((one.folder / "config.json").read_text())
        quantization = written.pop("quantization_config", None)
        assert written == config
        assert (quantization is None) == (one.variant == "bf16")
        assert {p.name for p in one.folder.iterdir()} == {*others, "config.json", "model.safetensors", "qserve.json"}
        assert {entry.name for entry in one.manifest.files} == {p.name for p in one.folder.iterdir()} - {"qserve.json"}


def test_activation_order_is_written_for_groups_only(prepared: dict[str, Prepared]) -> None:
    orders = {}
    for name in VARIANTS:
        config = json.loads((prepared[name].folder / "config.json").read_text())
        (group,) = config["quantization_config"]["config_groups"].values()
        orders[name] = group["weights"]["actorder"]
    assert orders == {"awq": None, "gptq": "static", "int8": None, "fp8": None}


def test_ignored_layers_are_left_as_they_were(world: World, prepared: dict[str, Prepared]) -> None:
    tensors = read_folder(prepared["int8"].folder)
    kinds = {name: tensor.dtype for name, tensor in tensors.items() if ".mlp." in name and name.endswith(".weight")}
    assert {dtype for name, dtype in kinds.items() if "layers.0" in name} == {"I8"}
    assert {dtype for name, dtype in kinds.items() if "layers.1" in name} == {"BF16"}
    assert len(kinds) == 6


def test_again_does_nothing(world: World, prepared: dict[str, Prepared]) -> None:
    files = [path for one in prepared.values() for path in one.folder.iterdir()]
    before = [path.stat().st_mtime_ns for path in files]
    began = time.perf_counter()
    again = world.prepare(world.recipe(**VARIANTS))
    assert time.perf_counter() - began < 2
    assert [path.stat().st_mtime_ns for path in files] == before
    assert again == prepared


def test_the_data_are_disjoint_and_as_long_as_asked(world: World, prepared: dict[str, Prepared]) -> None:
    assert prepared
    folder = ensure_data(world.recipe(**VARIANTS), world.space, print)
    parts = DataParts.read(folder / "parts.json")
    samples, windows = (json.loads((folder / f"{name}.json").read_text()) for name in ("calibration", "quality"))
    load = np.load(folder / "load.npy")
    assert [len(ids) for ids in samples] == [128] * 12
    assert [len(ids) for ids in windows] == [64] * 3
    assert (load.dtype, len(load)) == (np.int32, parts.load.tokens)
    assert (parts.calibration.tokens, parts.quality.tokens) == (12 * 128, 3 * 64)
    assert parts.bos_token_id is None
    whole = bytes(load.astype(np.uint8))  # a token is a byte
    for ids in (*samples, *windows):
        assert bytes(ids)[:60] not in whole


def test_find_prepared_names_what_is_missing(world: World, prepared: dict[str, Prepared]) -> None:
    recipe = world.recipe(**VARIANTS, late={"method": "fp8"})
    found = find_prepared(recipe, world.space, ("fp8",))
    assert found == (prepared["bf16"], prepared["fp8"])
    assert find_prepared(recipe, world.space, ()) == (prepared["bf16"],)
    with pytest.raises(UsageError, match=r"no checkpoint of late in .*; run `qserve prep` first"):
        find_prepared(recipe, world.space, ("fp8", "late"))


def test_a_variant_that_fails_does_not_lose_the_others(tmp_path: Path) -> None:
    """One letter over and over tells GPTQ nothing: hardly any damping, and no Hessian can be factored."""
    world = World(tmp_path)
    lines = [json.dumps({"text": "a" * (200 + length)}) for length in range(100)]
    world.corpus.write_text("\n".join(lines))
    recipe = world.recipe(
        wrong={"method": "fp8", "ignore": ["lm_head", "q_proj"]},  # a name where a pattern is needed
        stuck={"method": "gptq", "group_size": 32, "dampening": 1e-12},
        right={"method": "fp8"},
    )
    with pytest.raises(WorkerError) as error:
        world.prepare(recipe)
    sentences = str(error.value)
    assert "wrong: ValueError: ignore: 'q_proj' matches no layer" in sentences
    assert "stuck: ValueError: GPTQ rounded 14 of 14 layers to nearest" in sentences
    assert "1 of 3 variants are finished and kept" in sentences
    assert find_prepared(recipe, world.space, ("right",))[1].manifest.layers == 14
    kept = {path.name.split("-")[0] for path in world.space.checkpoints.iterdir()}
    assert kept == {"bf16", "right"}


def test_an_interrupt_leaves_no_half_checkpoint(world: World, prepared: dict[str, Prepared]) -> None:
    def interrupt(text: str) -> None:
        if text.startswith("stopped: part 1 of"):
            raise KeyboardInterrupt

    left = world.space.checkpoints / "awq-0123456789ab.partial"  # by a prep that was killed outright
    left.mkdir()
    recipe = world.recipe(stopped={"method": "gptq", "group_size": 16})
    with pytest.raises(KeyboardInterrupt):
        prepare(recipe, world.space, ("stopped",), interrupt)
    assert not list(world.space.checkpoints.glob("stopped*"))
    assert not list(world.space.root.rglob("*.partial"))
    assert find_prepared(recipe, world.space, ()) == (prepared["bf16"],)


def test_nothing_is_built_before_the_refusal(tmp_path: Path) -> None:
    world = World(tmp_path)
    with pytest.raises(PreflightError, match="group_size 48 does not divide"):
        world.prepare(world.recipe(w4={"method": "gptq", "group_size": 48}))
    scarce = recipe_of(world.model, write_corpus(tmp_path / "few.jsonl", rows=6), {"fp8": {"method": "fp8"}})
    with pytest.raises(UsageError, match="calibration samples where 12 are asked for; 6 rows read"):
        world.prepare(scarce)
    inside = Workspace(world.model / "ws")
    with pytest.raises(UsageError, match="is inside the source model"):
        prepare(scarce, inside, ("fp8",), print)
    assert not world.space.checkpoints.exists()
