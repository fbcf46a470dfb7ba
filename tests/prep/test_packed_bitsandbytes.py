"""bitsandbytes' formats: read by their definition, and each silent fault caught before it gets a name."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from packing import CONFIG, TARGETS, bitsandbytes_llama, floats
from tiny import Arrays, llama_arrays, write_llama, write_safetensors

from qserve.artifacts import Weights
from qserve.errors import WorkerError
from qserve.packed_bitsandbytes import STATE, dequantize, split
from qserve.prep.schemes import scheme_of
from qserve.prep.verify import Expectation
from qserve.prep.verify_bitsandbytes import verify_bitsandbytes
from qserve.variants import Bitsandbytes

LAYER = TARGETS[0]
VARIANTS = {
    "nf4": Bitsandbytes(method="bitsandbytes"), "double": Bitsandbytes(method="bitsandbytes", double_quant=True),
    "int8": Bitsandbytes(method="bitsandbytes", type="int8"),
}  # fmt: skip
FOUR = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": False, "bnb_4bit_quant_storage": "uint8",
}  # fmt: skip
EIGHT = {
    "quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True, "llm_int8_threshold": 6.0,
}  # fmt: skip
SAYS: dict[str, dict[str, object]] = {
    "nf4": {**FOUR}, "double": {**FOUR, "bnb_4bit_use_double_quant": True}, "int8": {**EIGHT},
}  # fmt: skip


def test_the_first_of_two_weights_is_in_the_upper_half_of_its_byte() -> None:
    state = np.frombuffer(json.dumps({"shape": [2, 64], "blocksize": 64}).encode(), np.uint8)
    weight = np.zeros((64, 1), np.uint8)
    weight[0], weight[32] = 0x1F, 0x2E
    levels = np.arange(16, dtype=np.float32)
    parts = {"weight": weight, "weight.absmax": np.array([1, 10], np.float32), "weight.quant_map": levels, STATE: state}
    found = dequantize(parts)
    assert found.shape == (2, 64)
    assert (found[0, :3].tolist(), found[1, :3].tolist()) == ([1, 15, 0], [20, 140, 0])


def test_eight_bits_are_127ths_of_the_largest_weight_of_a_row() -> None:
    parts = {"weight": np.array([[127, -127], [0, 1]], np.int8), "SCB": np.array([2.0, 12.7], np.float32)}
    assert np.allclose(dequantize(parts), [[2, -2], [0, 0.1]])
    with pytest.raises(ValueError, match="neither NF4 nor int8"):
        dequantize({"weight": np.zeros((2, 2), np.float32)})


def test_names_of_layers_and_fields() -> None:
    assert split("a.q_proj.weight") == ("a.q_proj", "weight")
    assert split("a.q_proj.weight.nested_absmax") == ("a.q_proj", "weight.nested_absmax")
    assert split(f"a.q_proj.{STATE}") == ("a.q_proj", STATE)
    assert split("a.q_proj.weight_format") == ("a.q_proj", "weight_format")
    assert split("a.q_proj.bias") is None


@pytest.mark.parametrize(("kind", "most"), [("nf4", 0.12), ("double", 0.12), ("int8", 0.012)])
def test_packed_by_hand_it_means_the_source(kind: str, most: float) -> None:
    arrays, seen = bitsandbytes_llama(kind), 0
    for layer in TARGETS:
        parts = {name.removeprefix(f"{layer}."): v for name, (_, v) in arrays.items() if name.startswith(f"{layer}.")}
        original = floats(llama_arrays(CONFIG)[f"{layer}.weight"][1])
        gap = np.linalg.norm(dequantize(parts) - original) / np.linalg.norm(original)
        assert most / 4 < gap < most, (layer, gap)
        seen += 1
    assert seen == 14


def check(root: Path, kind: str, arrays: Arrays, says: dict[str, object]) -> Weights:
    folder = root / "v"
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", arrays)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": says}))
    want = Expectation("v", scheme_of(VARIANTS[kind]), TARGETS, CONFIG, False)
    return verify_bitsandbytes(folder, write_llama(root / "bf16"), want, VARIANTS[kind])


@pytest.mark.parametrize("kind", list(VARIANTS))
def test_a_right_checkpoint_passes_and_is_weighed(tmp_path: Path, kind: str) -> None:
    weights = check(tmp_path, kind, bitsandbytes_llama(kind), SAYS[kind])
    linear = 2 * (64 * 64 * 2 + 32 * 64 * 2 + 3 * 64 * 128)
    rows = 2 * (64 + 32 + 32 + 64 + 128 + 128 + 64)
    arrays = bitsandbytes_llama(kind)
    states = sum(v.nbytes for name, (_, v) in arrays.items() if name.endswith("nf4"))
    bytes_ = {
        "nf4": linear // 2 + linear // 64 * 4 + 14 * 16 * 4 + states, "int8": linear + rows * 4 + 14,
        "double": linear // 2 + linear // 64 + 14 * (4 + 256 * 4 + 16 * 4) + states,
    }  # fmt: skip
    assert weights.quantized_bytes == bytes_[kind]
    assert weights.embedding_bytes == 2 * 320 * 64


def drop_scales(arrays: Arrays) -> None:
    del arrays[f"{LAYER}.weight.absmax"]


def infinite_scale(arrays: Arrays) -> None:
    arrays[f"{LAYER}.weight.absmax"][1][3] = np.inf


def no_number(arrays: Arrays) -> None:
    arrays[f"{LAYER}.SCB"][1][3] = np.nan


def negative_scale(arrays: Arrays) -> None:
    arrays[f"{LAYER}.SCB"][1][3] *= -1


def other_levels(arrays: Arrays) -> None:
    arrays[f"{LAYER}.weight.quant_map"] = ("F32", np.linspace(-1, 1, 16, dtype=np.float32))


def say_another_shape(arrays: Arrays) -> None:
    state = {"quant_type": "nf4", "blocksize": 64, "shape": [32, 128]}
    arrays[f"{LAYER}.{STATE}"] = ("U8", np.frombuffer(json.dumps(state).encode(), np.uint8))


def break_the_state(arrays: Arrays) -> None:
    arrays[f"{LAYER}.{STATE}"] = ("U8", np.frombuffer(b"{", np.uint8))


def leave_one_out(arrays: Arrays) -> None:
    for name in [name for name in arrays if name.startswith(f"{LAYER}.")]:
        del arrays[name]
    arrays[f"{LAYER}.weight"] = llama_arrays(CONFIG)[f"{LAYER}.weight"]


def add_a_scale(arrays: Arrays) -> None:
    arrays["model.norm.SCB"] = ("F32", np.ones(64, np.float32))


def store_the_head_twice(arrays: Arrays) -> None:
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]


def change_a_norm(arrays: Arrays) -> None:
    arrays["model.norm.weight"][1][0] ^= 0x10


@pytest.mark.parametrize(
    ("kind", "corrupt", "sentence"),
    [
        ("nf4", drop_scales, "weight.absmax is missing"), ("nf4", infinite_scale, "NaN or infinity"),
        ("int8", no_number, "NaN or infinity"), ("int8", negative_scale, "1 negative scales"),
        ("nf4", other_levels, "quant_map is not that of NF4"), ("nf4", say_another_shape, r"says shape: \[32, 128\]"),
        ("double", break_the_state, "is no JSON"), ("nf4", leave_one_out, r"BF16 \(64, 64\), and U8 .* is expected"),
        ("int8", leave_one_out, "BF16"), ("nf4", add_a_scale, r"norm\.SCB is there and was not to be"),
        ("nf4", store_the_head_twice, "second time"), ("int8", change_a_norm, "was changed"),
    ],
)  # fmt: skip
def test_a_wrong_checkpoint_is_caught(
    tmp_path: Path, kind: str, corrupt: Callable[[Arrays], None], sentence: str
) -> None:
    arrays = bitsandbytes_llama(kind)
    corrupt(arrays)
    with pytest.raises(WorkerError, match=f"v: the checkpoint is not right and was not kept: .*{sentence}"):
        check(tmp_path, kind, arrays, SAYS[kind])


@pytest.mark.parametrize(("kind", "field", "value"), [
    ("nf4", "bnb_4bit_quant_type", "fp4"), ("nf4", "bnb_4bit_use_double_quant", True), ("nf4", "load_in_4bit", False),
    ("int8", "llm_int8_threshold", 0.0), ("int8", "load_in_8bit", False), ("int8", "quant_method", "awq"),
])  # fmt: skip
def test_a_config_that_would_be_read_wrongly_is_caught(tmp_path: Path, kind: str, field: str, value: object) -> None:
    with pytest.raises(WorkerError, match="is not right and was not kept"):
        check(tmp_path, kind, bitsandbytes_llama(kind), {**SAYS[kind], field: value})
