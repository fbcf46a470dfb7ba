"""bitsandbytes through the front door: a tiny random llama, the real library.

Builds its managed environment if this machine has none yet.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from packing import TARGETS
from tiny import write_corpus, write_llama

from qserve.engines import engine_for, install_engine, unservable
from qserve.errors import PreflightError
from qserve.jobs import Job, run_job
from qserve.machine import look
from qserve.packed import LOADER
from qserve.packed_bitsandbytes import OWN, dequantize
from qserve.prep.headers import read_bytes, read_folder
from qserve.prep.stage import Prepared, prepare
from qserve.race import install_entries
from qserve.recipe import EngineName, Recipe
from qserve.runtimes import ensure_runtime
from qserve.variants import Bf16
from qserve.workspace import Workspace

VARIANTS: dict[str, dict[str, object]] = {
    "nf4": {"method": "bitsandbytes", "double_quant": True}, "int8": {"method": "bitsandbytes", "type": "int8"},
}  # fmt: skip
DTYPES = {"U8": np.uint8, "I8": np.int8, "F32": np.float32}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bitsandbytes")
    write_llama(root / "model")
    write_corpus(root / "corpus.jsonl", rows=80)
    return root


@pytest.fixture(scope="module")
def recipe(root: Path) -> Recipe:
    cut = {"dataset": str(root / "corpus.jsonl"), "samples": 8, "tokens": 64, "min_tokens": 8}
    spec = {"model": str(root / "model"), "calibration": cut, "variants": VARIANTS}
    return Recipe.model_validate({**spec, "quality": {"windows": 2, "tokens": 32}})


@pytest.fixture(scope="module")
def prepared(root: Path, recipe: Recipe) -> dict[str, Prepared]:
    done = prepare(recipe, Workspace(root / "ws"), tuple(VARIANTS), print)
    return {one.variant: one for one in done}


def test_it_makes_checkpoints_of_its_own_format(root: Path, prepared: dict[str, Prepared]) -> None:
    assert list(prepared) == ["bf16", *VARIANTS]
    labels = {name: prepared[name].manifest.label for name in VARIANTS}
    assert labels == {"nf4": "bitsandbytes NF4 (double quantization)", "int8": "bitsandbytes int8"}
    others = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "LICENSE")
    for name in VARIANTS:
        manifest, folder = prepared[name].manifest, prepared[name].folder
        assert (manifest.layers, manifest.layers_fallback, manifest.calibration) == (14, (), None)
        assert manifest.runtime.startswith("bitsandbytes-") and manifest.packages["bitsandbytes"]
        assert json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"] == "bitsandbytes"
        assert all((folder / other).read_bytes() == (root / "model" / other).read_bytes() for other in others)


def test_packed_weights_mean_the_sources(prepared: dict[str, Prepared]) -> None:
    """By the written definition of the format, and not by a kernel."""
    source, seen = read_folder(prepared["bf16"].folder), 0
    for name, most in (("nf4", 0.12), ("int8", 0.012)):
        tensors = read_folder(prepared[name].folder)
        for layer in TARGETS:
            own = {key: tensor for key, tensor in tensors.items() if (m := OWN.fullmatch(key)) and m[1] == layer}
            parts = {
                key.removeprefix(f"{layer}."): np.frombuffer(read_bytes(t), DTYPES[t.dtype]).reshape(t.shape)
                for key, t in own.items()
            }
            raw = np.frombuffer(read_bytes(source[f"{layer}.weight"]), np.uint16)
            original = (raw.astype(np.uint32) << 16).view(np.float32).reshape(source[f"{layer}.weight"].shape)
            gap = np.linalg.norm(dequantize(parts) - original) / np.linalg.norm(original)
            assert most / 4 < gap < most, (name, layer, gap)
            seen += 1
    assert seen == 28


def test_its_kernels_compute_what_the_definition_says(tmp_path: Path, prepared: dict[str, Prepared]) -> None:
    """This is what the gate of a bench relies on: the reference is the definition, the server is bitsandbytes. (Its
    NF4 kernel for a CPU with AVX512-BF16 computes in bfloat16 whatever it is given.)
    """
    job = {
        "checkpoints": [str(prepared[name].folder) for name in VARIANTS], "source": str(prepared["bf16"].folder),
        "loader": str(LOADER), "ids": list(b"The quick brown fox jumps over the lazy dog"),
    }  # fmt: skip
    python = ensure_runtime("bitsandbytes", look().flavour, print).python
    worker = Path(__file__).with_name("bitsandbytes_kernels_worker.py")
    four, eight = run_job(Job("kernels", python, worker, job, tmp_path / "log"))["found"]
    assert (four["kinds"], eight["kinds"]) == (["Linear", "Linear4bit"], ["Linear", "Linear8bitLt"])
    assert (four["layers"], eight["layers"]) == (14, 14)
    assert four["gap"] < 0.01 and four["apart"] > 0.05
    assert eight["gap"] < 0.001 and eight["apart"] > 0.005


def test_one_environment_serves_a_race_of_it_and_bf16(recipe: Recipe, prepared: dict[str, Prepared]) -> None:
    chosen: list[tuple[EngineName, Prepared]] = [("transformers", prepared["bf16"]), ("transformers", prepared["nf4"])]
    (first, one), (second, other) = install_entries(chosen, recipe, print)
    assert (first.name, second.name) == ("transformers", "transformers:nf4")
    ((alone, _),) = install_entries(chosen[1:], recipe, print)
    assert alone.name == "transformers:nf4"  # not the naive loop, which is bf16's
    assert one == other and f"bitsandbytes-{look().flavour}-" in str(one.program)
    plain = install_engine("transformers", recipe.serving, print, [Bf16()])
    assert f"llmcompressor-{look().flavour}-" in str(plain.program)


def test_which_engine_serves_it(recipe: Recipe) -> None:
    variant = recipe.variant("nf4")
    assert recipe.serving.engine == "vllm"
    assert engine_for(variant, None, recipe) == "transformers"
    assert engine_for(variant, "pipeline", recipe) == "pipeline"
    others: tuple[EngineName, ...] = ("vllm", "llama-server", "tgi", "sglang")
    for name in others:
        assert "--engine transformers" in (unservable(name, variant) or ""), name
        with pytest.raises(PreflightError, match="bitsandbytes"):
            engine_for(variant, name, recipe)
