"""The backends beside llm-compressor, through the front door: a tiny random llama, the real libraries.

Builds their managed environments if this machine has none yet.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from packing import CONFIG, GROUP, TARGETS, packed_llama
from tiny import write_corpus, write_llama, write_safetensors

from qserve.errors import WorkerError
from qserve.jobs import Job, run_job
from qserve.machine import look
from qserve.packed import LOADER, PARTS, dequantize
from qserve.prep import quantize
from qserve.prep.headers import Tensor, read_bytes, read_folder
from qserve.prep.stage import Prepared, prepare
from qserve.recipe import Recipe
from qserve.runtimes import ensure_runtime
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
COMPARE = Path(quantize.__file__).with_name("compare_worker.py")
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
    before = set(Path.cwd().iterdir())
    done = prepare(recipe_of(root, VARIANTS), Workspace(root / "ws"), tuple(VARIANTS), print)
    assert set(Path.cwd().iterdir()) == before
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
        assert not any(field in json.dumps(written) for field in quantize.LOCAL_FIELDS)


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


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_packed_checkpoint_is_as_near_as_rounding_and_a_broken_one_is_not(tmp_path: Path, method: str) -> None:
    """Weights that were rounded by hand, loaded by the definition; then one layer packed in the wrong order."""
    says = {"quant_method": method, "bits": 4, "group_size": GROUP, "version": "gemm"}
    right, broken = packed_llama(method), packed_llama(method)
    qweight = broken["model.layers.0.mlp.up_proj.qweight"][1]
    qweight[...] = qweight[:, ::-1]
    gaps = []
    for name, arrays in (("right", right), ("broken", broken)):
        write_safetensors(write_llama(tmp_path / name) / "model.safetensors", arrays)
        (tmp_path / name / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": says}))
        job = {
            "checkpoint": str(tmp_path / name), "baseline": str(write_llama(tmp_path / "bf16")), "layers": 2,
            "ids": list(range(48)), "bits": 4, "group_size": GROUP, "symmetric": method == "gptq",
            "targets": list(TARGETS), "loader": str(LOADER), "threads": 1,
        }  # fmt: skip
        python = ensure_runtime("llmcompressor", look().flavour, print).python
        gaps.append(run_job(Job(name, python, COMPARE, job, tmp_path / "log")))
    assert gaps[0]["error"] == pytest.approx(gaps[0]["rounded"], rel=0.02)
    assert gaps[1]["error"] > 1.3 * gaps[1]["rounded"] == 1.3 * gaps[0]["rounded"]


def test_autoawqs_searches_are_mended_and_choose_as_they_did(tmp_path: Path) -> None:
    """Stock, its scale search leaves a layer changed on a CPU, which is how it writes a broken model."""
    look_at = Path(__file__).with_name("autoawq_mends_worker.py")
    job = {"worker": str(Path(quantize.__file__).with_name("autoawq_worker.py"))}
    python = ensure_runtime("autoawq", look().flavour, print).python
    found = run_job(Job("mends", python, look_at, job, tmp_path / "log"))
    assert found["clip_differs"] == 0
    assert found["weights_left"] == [look().flavour == "cuda", True]


def test_a_dead_calibration_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """One letter over and over: no Hessian can be factored with hardly any damping."""
    write_llama(tmp_path / "model")
    (tmp_path / "corpus.jsonl").write_text("\n".join(json.dumps({"text": "a" * (200 + n)}) for n in range(80)))
    stuck = {"method": "gptq", "backend": "autogptq", "group_size": 32, "dampening": 1e-12}
    with pytest.raises(WorkerError, match=r"stuck: .*(Cholesky|cholesky|positive)"):
        prepare(recipe_of(tmp_path, {"stuck": stuck}), Workspace(tmp_path / "ws"), ("stuck",), print)
