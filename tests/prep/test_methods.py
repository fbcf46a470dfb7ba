"""Methods beside AWQ and GPTQ, through the front door: round to nearest, SmoothQuant, FP8 in blocks, for the KV cache,
FP4. A tiny random llama of widths that blocks of 128 fit, the real llm-compressor.
"""

import json
from pathlib import Path

import pytest
from tiny import write_corpus, write_llama

from qserve.errors import PreflightError
from qserve.prep.headers import read_folder
from qserve.prep.stage import Prepared, prepare
from qserve.recipe import Recipe
from qserve.workspace import Workspace

VARIANTS: dict[str, dict[str, object]] = {
    "rtn": {"method": "rtn", "group_size": 32},
    "rtn-zero": {"method": "rtn", "group_size": 32, "symmetric": False},
    "rtn8": {"method": "rtn", "bits": 8, "activations": "int8"},
    "smooth": {"method": "gptq", "bits": 8, "activations": "int8", "smooth": 0.5},
    "block": {"method": "fp8", "activations": "block"},
    "kv": {"method": "fp8", "kv_cache": True},
    "nvfp4": {"method": "nvfp4"},
    "nvfp4-weights": {"method": "nvfp4", "activations": "none"},
    "mxfp4": {"method": "mxfp4"},
    "mxfp4-both": {"method": "mxfp4", "activations": "fp4"},
}
LABELS = {
    "rtn": "RTN W4A16 g32", "rtn-zero": "RTN W4A16 g32", "rtn8": "RTN W8A8 int8", "smooth": "GPTQ W8A8 int8 smooth 0.5",
    "block": "FP8 block", "kv": "FP8 dynamic with FP8 KV cache", "nvfp4": "NVFP4 W4A4", "nvfp4-weights": "NVFP4 W4A16",
    "mxfp4": "MXFP4 W4A16", "mxfp4-both": "MXFP4 W4A4",
}  # fmt: skip
CALIBRATED = {"smooth", "kv", "nvfp4"}
# What stands beside the weights of a layer: the format that engines expect
FIELDS = {
    "rtn": {"weight_packed", "weight_scale", "weight_shape"},
    "rtn-zero": {"weight_packed", "weight_scale", "weight_shape", "weight_zero_point"},
    "rtn8": {"weight", "weight_scale"}, "smooth": {"weight", "weight_scale"}, "block": {"weight", "weight_scale"},
    "kv": {"weight", "weight_scale"},
    "nvfp4": {"weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"},
    "nvfp4-weights": {"weight_packed", "weight_scale", "weight_global_scale"},
    "mxfp4": {"weight_packed", "weight_scale"}, "mxfp4-both": {"weight_packed", "weight_scale"},
}  # fmt: skip


def recipe_of(root: Path, variants: dict[str, dict[str, object]]) -> Recipe:
    cut = {"dataset": str(root / "corpus.jsonl"), "samples": 8, "tokens": 64, "min_tokens": 8}
    spec = {"model": str(root / "model"), "calibration": cut, "variants": variants}
    return Recipe.model_validate({**spec, "quality": {"windows": 2, "tokens": 32}})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("methods")
    write_llama(root / "model", hidden=256, inner=256)
    write_corpus(root / "corpus.jsonl", rows=80)
    return root


@pytest.fixture(scope="module")
def prepared(root: Path) -> dict[str, Prepared]:
    done = prepare(recipe_of(root, VARIANTS), Workspace(root / "ws"), tuple(VARIANTS), print)
    return {one.variant: one for one in done}


def test_every_method_makes_a_checkpoint(prepared: dict[str, Prepared]) -> None:
    assert list(prepared) == ["bf16", *VARIANTS]
    assert {name: prepared[name].manifest.label for name in VARIANTS} == LABELS
    assert {name: prepared[name].manifest.layers for name in VARIANTS} == dict.fromkeys(VARIANTS, 14)
    assert {name for name in VARIANTS if prepared[name].manifest.calibration is not None} == CALIBRATED


def test_each_is_stored_in_the_fields_of_its_format(prepared: dict[str, Prepared]) -> None:
    for name, fields in FIELDS.items():
        tensors = read_folder(prepared[name].folder)
        layer = "model.layers.1.mlp.down_proj."
        assert {key.removeprefix(layer) for key in tensors if key.startswith(layer)} == fields, name
        scales = {"model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale"}
        assert (scales <= set(tensors)) is (name == "kv")
    shapes = {name: read_folder(prepared[name].folder)["model.layers.1.mlp.down_proj.weight_scale"] for name in FIELDS}
    assert {name: (shapes[name].dtype, shapes[name].shape) for name in ("block", "nvfp4", "mxfp4", "rtn8")} == {
        "block": ("BF16", (2, 2)), "nvfp4": ("F8_E4M3", (256, 16)), "mxfp4": ("U8", (256, 8)),
        "rtn8": ("BF16", (256, 1)),
    }  # fmt: skip
    whole = read_folder(prepared["nvfp4"].folder)
    for field in ("weight_global_scale", "input_global_scale"):
        assert whole[f"model.layers.1.mlp.down_proj.{field}"].dtype == "F32"


def test_smoothing_changes_norms_and_rounding_does_not(prepared: dict[str, Prepared]) -> None:
    norm = "model.layers.1.input_layernorm.weight"
    stored = {}
    for name in ("bf16", "rtn8", "smooth"):
        tensor = read_folder(prepared[name].folder)[norm]
        stored[name] = tensor.file.read_bytes()[tensor.start : tensor.start + tensor.size_bytes]
    assert stored["rtn8"] == stored["bf16"] != stored["smooth"]


def test_the_kv_cache_is_named_in_the_config(prepared: dict[str, Prepared]) -> None:
    schemes = {}
    for name in ("kv", "block"):
        config = json.loads((prepared[name].folder / "config.json").read_text())
        schemes[name] = config["quantization_config"].get("kv_cache_scheme")
    assert schemes["block"] is None and (schemes["kv"]["num_bits"], schemes["kv"]["type"]) == (8, "float")


def test_blocks_that_do_not_fit_are_refused_before_any_work(tmp_path: Path) -> None:
    write_llama(tmp_path / "model", hidden=64, inner=128)
    write_corpus(tmp_path / "corpus.jsonl", rows=8)
    block = {"method": "fp8", "activations": "block"}
    with pytest.raises(PreflightError, match=r"block: blocks of 128 do not fit q_proj \(64 in, 64 out\)"):
        prepare(recipe_of(tmp_path, {"block": block}), Workspace(tmp_path / "ws"), ("block",), print)
    assert not (tmp_path / "ws").exists()
