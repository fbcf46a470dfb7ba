"""Each way in which a checkpoint can be silently wrong is caught before it gets its name."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny import Arrays, bf16, llama_arrays, llama_config, write_llama, write_safetensors

from qserve.errors import WorkerError
from qserve.prep.headers import read_folder
from qserve.prep.schemes import scheme_of
from qserve.prep.verify import Expectation, floats, verify
from qserve.variants import Fp8, Gptq

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG = llama_config()
TARGETS = tuple(
    name.removesuffix(".weight") for name in llama_arrays(CONFIG) if name.split(".")[-2] in PROJECTIONS
)  # fmt: skip
LAYER = TARGETS[0]
WANT = Expectation("int8", scheme_of(Gptq(method="gptq", bits=8, activations="int8")), TARGETS, CONFIG, False)


def rounded(arrays: Arrays) -> Arrays:
    """Round to nearest with one scale an output channel, by hand."""
    out: Arrays = {}
    for name, (dtype, values) in arrays.items():
        if name.removesuffix(".weight") not in TARGETS:
            out[name] = (dtype, values)
            continue
        floats = (values.astype(np.uint32) << 16).view(np.float32)
        scale = np.abs(floats).max(axis=1, keepdims=True) / 127
        out[name] = ("I8", np.round(floats / scale).astype(np.int8))
        out[name + "_scale"] = ("BF16", bf16(scale))
    return out


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "bf16")


def write(folder: Path, arrays: Arrays, config: dict[str, object] = CONFIG) -> Path:
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", arrays)
    quantization = {"quant_method": "compressed-tensors"}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return folder


def test_a_right_checkpoint_passes_and_is_weighed(tmp_path: Path, baseline: Path) -> None:
    weights = verify(write(tmp_path / "int8", rounded(llama_arrays(CONFIG))), baseline, WANT)
    linear = 2 * (64 * 64 * 2 + 32 * 64 * 2 + 3 * 64 * 128)
    channels = 2 * (64 + 32 + 32 + 64 + 128 + 128 + 64)
    assert weights.quantized_bytes == linear + 2 * channels
    assert weights.embedding_bytes == 2 * 320 * 64
    assert weights.other_bytes == 2 * 64 * 5
    assert weights.parameters == linear + 320 * 64 + 64 * 5
    assert weights.bits_per_parameter == 8 * weights.total_bytes / weights.parameters


def drop_scale(arrays: Arrays) -> None:
    del arrays[f"{LAYER}.weight_scale"]


def zero_scale(arrays: Arrays) -> None:
    arrays[f"{LAYER}.weight_scale"][1][3] = 0


def nan_scale(arrays: Arrays) -> None:
    arrays[f"{LAYER}.weight_scale"][1][3] = 0x7FC0


def leave_unquantized(arrays: Arrays) -> None:
    arrays[f"{LAYER}.weight"] = llama_arrays(CONFIG)[f"{LAYER}.weight"]


def pack_the_ignored(arrays: Arrays) -> None:
    arrays["model.layers.0.mlp.gate.weight_scale"] = ("BF16", bf16(np.ones((4, 1))))


def change_a_norm(arrays: Arrays) -> None:
    arrays["model.norm.weight"] = ("BF16", bf16(np.full(64, 2.0)))


def drop_a_norm(arrays: Arrays) -> None:
    del arrays["model.norm.weight"]


def store_the_head_twice(arrays: Arrays) -> None:
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]


def store_a_copy(arrays: Arrays) -> None:
    arrays["model.embed_tokens_again"] = arrays["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("corrupt", "sentence"),
    [
        (drop_scale, "has no scale"), (zero_scale, "1 scales that are zero"), (nan_scale, "NaN or infinity"),
        (leave_unquantized, "is not stored as I8"), (pack_the_ignored, r"mlp\.gate is quantized and was not to be"),
        (change_a_norm, r"model\.norm\.weight was changed"), (drop_a_norm, r"model\.norm\.weight is missing"),
        (store_the_head_twice, "second time"), (store_a_copy, "are expected"),
    ],
)  # fmt: skip
def test_a_wrong_checkpoint_is_caught(
    tmp_path: Path, baseline: Path, corrupt: Callable[[Arrays], None], sentence: str
) -> None:
    arrays = rounded(llama_arrays(CONFIG))
    corrupt(arrays)
    with pytest.raises(WorkerError, match=f"int8: the checkpoint is not right and was not kept: .*{sentence}"):
        verify(write(tmp_path / "int8", arrays), baseline, WANT)


def test_a_config_that_changed_is_caught(tmp_path: Path, baseline: Path) -> None:
    folder = write(tmp_path / "int8", rounded(llama_arrays(CONFIG)), {**CONFIG, "rms_norm_eps": 1e-6})
    with pytest.raises(WorkerError, match=r"differs from the source's in rms_norm_eps"):
        verify(folder, baseline, WANT)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(WorkerError, match="does not say how it is quantized"):
        verify(folder, baseline, WANT)


@pytest.mark.parametrize(("dtype", "raw", "value"), [
    ("F8_E4M3", 0x38, 1.0), ("F8_E4M3", 0x01, 2.0**-9), ("F8_E4M3", 0x7E, 448.0), ("F8_E4M3", 0xB8, -1.0),
    ("U8", 127, 1.0), ("U8", 126, 0.5), ("U8", 130, 8.0),
])  # fmt: skip
def test_scales_of_eight_bits_are_read(tmp_path: Path, dtype: str, raw: int, value: float) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"x.weight_scale": (dtype, np.array([[raw]], np.uint8))})
    assert floats(read_folder(tmp_path)["x.weight_scale"]).tolist() == [value]


@pytest.mark.parametrize(("dtype", "raw"), [("F8_E4M3", 0x7F), ("F8_E4M3", 0xFF), ("U8", 255)])
def test_a_scale_of_eight_bits_that_is_no_number_is_seen(tmp_path: Path, dtype: str, raw: int) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"x.weight_scale": (dtype, np.array([[raw]], np.uint8))})
    assert not np.isfinite(floats(read_folder(tmp_path)["x.weight_scale"])).any()


def test_a_nan_among_fp8_weights_is_caught(tmp_path: Path, baseline: Path) -> None:
    arrays = rounded(llama_arrays(CONFIG))
    for name in TARGETS:
        arrays[f"{name}.weight"] = ("F8_E4M3", arrays[f"{name}.weight"][1].view(np.uint8) & 0x77)
    want = Expectation("fp8", scheme_of(Fp8(method="fp8")), TARGETS, CONFIG, False)
    verify(write(tmp_path / "fp8", arrays), baseline, want)
    arrays[f"{LAYER}.weight"][1][0, 0] = 0x7F
    with pytest.raises(WorkerError, match=rf"{LAYER}\.weight holds NaN"):
        verify(write(tmp_path / "broken", arrays), baseline, want)
