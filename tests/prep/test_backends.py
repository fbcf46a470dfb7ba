"""The backends beside llm-compressor, through the front door: a tiny random llama, the real libraries.

Builds their managed environments if this machine has none yet.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from tiny import write_corpus, write_llama

from qserve.errors import WorkerError
from qserve.packed import PARTS, dequantize
from qserve.prep.headers import Tensor, read_bytes, read_folder
from qserve.prep.quantize import LOCAL_FIELDS
from qserve.prep.stage import Prepared, prepare
from qserve.recipe import Recipe
from qserve.workspace import Workspace

VARIANTS: dict[str, dict[str, object]] = {
    "autoawq": {"method": "awq", "backend": "autoawq", "group_size": 32, "grid": 3, "samples": 4},
    "autogptq": {"method": "gptq", "backend": "autogptq", "group_size": 32},
    "gptqmodel": {"method": "gptq", "backend": "gptqmodel", "group_size": 32},
    "plain-order": {"method": "gptq", "backend": "gptqmodel", "group_size": 32, "act_order": "none"},
}
LABELS = {
    "autoawq": "AWQ W4A16 g32 (AutoAWQ)", "autogptq": "GPTQ W4A16 g32 (AutoGPTQ)",
    "gptqmodel": "GPTQ W4A16 g32 (GPTQModel)", "plain-order": "GPTQ W4A16 g32 (GPTQModel)",
}  # fmt: skip
DTYPES = {"I32": np.int32, "F16": np.float16}


def recipe_of(root: Path, variants: dict[str, dict[str, object]]) -> Recipe:
    cut = {"dataset": str(root / "corpus.jsonl"), "samples": 8, "tokens": 64, "min_tokens": 8}
    spec = {"model": str(root / "model"), "calibration": cut, "variants": variants}
    return Recipe.model_validate({**spec, "quality": {"windows": 2, "tokens": 32}})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("backends")
    write_llama(root / "model")
    write_corpus(root / "corpus.jsonl", rows=80)
    return root


@pytest.fixture(scope="module")
def prepared(root: Path) -> dict[str, Prepared]:
    done = prepare(recipe_of(root, VARIANTS), Workspace(root / "ws"), tuple(VARIANTS), print)
    return {one.variant: one for one in done}


def array(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == "BF16":
        return (
            (np.frombuffer(read_bytes(tensor), np.uint16).astype(np.uint32) << 16)
            .view(np.float32)
            .reshape(tensor.shape)
        )
    return np.frombuffer(read_bytes(tensor), DTYPES[tensor.dtype]).reshape(tensor.shape)


def test_every_backend_makes_a_checkpoint_of_its_own_format(prepared: dict[str, Prepared]) -> None:
    assert list(prepared) == ["bf16", *VARIANTS]
    for name, label in LABELS.items():
        manifest = prepared[name].manifest
        assert (manifest.label, manifest.layers, manifest.layers_fallback) == (label, 14, ())
        assert manifest.runtime.startswith("gptqmodel-" if name == "plain-order" else f"{name}-")
        assert 4 < manifest.weights.bits_per_parameter < 10
        written = json.loads((prepared[name].folder / "config.json").read_text())["quantization_config"]
        assert written["quant_method"] == ("awq" if name == "autoawq" else "gptq")
        assert not any(field in json.dumps(written) for field in LOCAL_FIELDS)


def test_the_rest_is_the_sources(root: Path, prepared: dict[str, Prepared]) -> None:
    others = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "LICENSE")
    config = json.loads((root / "model" / "config.json").read_text())
    for one in prepared.values():
        for name in others:
            assert (one.folder / name).read_bytes() == (root / "model" / name).read_bytes(), (one.variant, name)
        written = json.loads((one.folder / "config.json").read_text())
        assert {key: written[key] for key in config} == config
        assert (written.get("rope_theta"), written.get("torch_dtype")) == (
            (10000.0, "bfloat16") if one.variant in ("autoawq", "autogptq") else (None, None)
        )
        assert {p.name for p in one.folder.iterdir()} == {*others, "config.json", "model.safetensors", "qserve.json"}


def test_packed_weights_mean_the_sources(prepared: dict[str, Prepared]) -> None:
    """By the written definition of the format, and not by a kernel. (AWQ moves scales between layers.)"""
    source = read_folder(prepared["bf16"].folder)
    for name in ("autogptq", "gptqmodel", "plain-order"):
        tensors = read_folder(prepared[name].folder)
        config = json.loads((prepared[name].folder / "config.json").read_text())["quantization_config"]
        seen = 0
        for layer in [key.removesuffix(".qweight") for key in tensors if key.endswith(".qweight")]:
            parts = {field: array(tensors[f"{layer}.{field}"]) for field in PARTS}
            original = array(source[f"{layer}.weight"])
            gap = np.linalg.norm(dequantize(parts, config) - original) / np.linalg.norm(original)
            assert 0.02 < gap < 0.25, (name, layer, gap)
            seen += 1
        assert seen == 14


def test_a_dead_calibration_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """One letter over and over: no Hessian can be factored with hardly any damping."""
    write_llama(tmp_path / "model")
    (tmp_path / "corpus.jsonl").write_text("\n".join(json.dumps({"text": "a" * (200 + n)}) for n in range(80)))
    stuck = {"method": "gptq", "backend": "autogptq", "group_size": 32, "dampening": 1e-12}
    with pytest.raises(WorkerError, match=r"stuck: .*(Cholesky|cholesky|positive)"):
        prepare(recipe_of(tmp_path, {"stuck": stuck}), Workspace(tmp_path / "ws"), ("stuck",), print)
