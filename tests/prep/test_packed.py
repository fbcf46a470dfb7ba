"""AutoAWQ's and AutoGPTQ's formats: read by their definition, and each silent fault caught before it gets a name."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from packing import CONFIG, GROUP, TARGETS, awq_parts, gptq_parts, packed_llama, rounded
from tiny import Arrays, write_llama, write_safetensors

from qserve.errors import WorkerError
from qserve.packed import dequantize, unpack
from qserve.prep.legacy_config import with_older_spellings
from qserve.prep.schemes import scheme_of
from qserve.prep.verify import Expectation
from qserve.prep.verify_packed import verify_packed
from qserve.variants import Awq, Gptq

LAYER = TARGETS[0]
SAYS = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}
WANT = {
    "gptq": Expectation("v", scheme_of(Gptq(method="gptq", group_size=GROUP)), TARGETS, CONFIG, False),
    "awq": Expectation("v", scheme_of(Awq(method="awq", group_size=GROUP)), TARGETS, CONFIG, True),
}


def test_the_order_of_values_in_a_word() -> None:
    counted = np.array([[0x76543210]], np.int32)
    assert unpack(counted, 4, axis=1).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert unpack(counted, 4, axis=0).tolist() == [[0], [1], [2], [3], [4], [5], [6], [7]]
    assert unpack(np.array([[-1]], np.int32), 8, axis=1).tolist() == [[255] * 4]
    awq = np.array([[0x75316420]], np.int32)  # places from the lowest bits: outputs 0, 2, 4, 6, 1, 3, 5, 7
    parts = {"qweight": awq, "qzeros": np.zeros((1, 1), np.int32), "scales": np.ones((1, 8), np.float16)}
    assert dequantize(parts, SAYS["awq"]).ravel().tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_what_was_packed_by_hand_is_read_exactly() -> None:
    weight = np.random.default_rng(0).normal(0, 0.2, (64, 96)).astype(np.float32)
    for method, parts in (("gptq", gptq_parts(weight)), ("awq", awq_parts(weight))):
        q, zero, scale = rounded(weight, symmetric=method == "gptq")
        group = np.arange(96) // GROUP
        expected = ((q - zero[group]) * scale.astype(np.float32)[group]).T
        found = dequantize(parts, SAYS[method])
        assert found.dtype == np.float32 and np.array_equal(found, expected), method
        assert 0.03 < np.linalg.norm(found - weight) / np.linalg.norm(weight) < 0.12, method


def test_version_2_stores_the_zero_point_itself() -> None:
    parts = gptq_parts(np.random.default_rng(0).normal(0, 0.2, (64, 64)).astype(np.float32))
    second = {**parts, "qzeros": (parts["qzeros"].view(np.uint32) + np.uint32(0x11111111)).view(np.int32)}
    version_2 = {**SAYS["gptq"], "checkpoint_format": "gptq_v2"}
    assert np.array_equal(dequantize(second, version_2), dequantize(parts, SAYS["gptq"]))
    assert not np.array_equal(dequantize(second, SAYS["gptq"]), dequantize(parts, SAYS["gptq"]))


def test_a_group_index_is_followed_and_an_unknown_format_refused() -> None:
    parts = gptq_parts(np.random.default_rng(0).normal(0, 0.2, (64, 64)).astype(np.float32))
    turned = {**parts, "g_idx": parts["g_idx"][::-1]}
    q, zero, scale = unpack(parts["qweight"], 4, axis=0), 8, parts["scales"].astype(np.float32)
    assert np.array_equal(dequantize(turned, SAYS["gptq"]), ((q - zero) * scale[turned["g_idx"]]).T)
    with pytest.raises(ValueError, match="no definition of quant_method 'awq' with 8 bits"):
        dequantize(parts, {**SAYS["awq"], "bits": 8})


# --- verify ----------
def write(folder: Path, arrays: Arrays, says: dict[str, object]) -> Path:
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", arrays)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": says}))
    return folder


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_right_checkpoint_passes_and_is_weighed(tmp_path: Path, method: str) -> None:
    folder = write(tmp_path / "v", packed_llama(method), SAYS[method])
    weights = verify_packed(folder, write_llama(tmp_path / "bf16"), WANT[method])
    linear = 2 * (64 * 64 * 2 + 32 * 64 * 2 + 3 * 64 * 128)
    inputs = 2 * (6 * 64 + 128)  # g_idx
    packed = linear // 2 + linear // GROUP * 2 + linear // GROUP // 2
    assert weights.quantized_bytes == packed + (4 * inputs if method == "gptq" else 0)
    assert weights.embedding_bytes == 2 * 320 * 64
    assert 4 < weights.bits_per_parameter < 10


def drop_scales(arrays: Arrays) -> None:
    del arrays[f"{LAYER}.scales"]


def zero_scale(arrays: Arrays) -> None:
    arrays[f"{LAYER}.scales"][1][0, 3] = 0


def infinite_scale(arrays: Arrays) -> None:
    arrays[f"{LAYER}.scales"][1][0, 3] = np.inf


def wide_scales(arrays: Arrays) -> None:
    arrays[f"{LAYER}.scales"] = ("F32", arrays[f"{LAYER}.scales"][1].astype(np.float32))


def leave_one_out(arrays: Arrays) -> None:
    for field in ("qweight", "qzeros", "scales", "g_idx"):
        arrays.pop(f"{LAYER}.{field}", None)


def keep_the_weight(arrays: Arrays) -> None:
    arrays[f"{LAYER}.weight"] = ("F16", np.zeros((64, 64), np.float16))


def store_the_head_twice(arrays: Arrays) -> None:
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]


def shift_the_zero_points(arrays: Arrays) -> None:
    arrays[f"{LAYER}.qzeros"][1][0, 0] ^= 1


def mix_the_groups(arrays: Arrays) -> None:
    arrays[f"{LAYER}.g_idx"][1][:2] = [1, 0]


def change_an_embedding(arrays: Arrays) -> None:
    arrays["model.embed_tokens.weight"][1][0, 0] ^= 0x10


@pytest.mark.parametrize(
    ("method", "corrupt", "sentence"),
    [
        ("gptq", drop_scales, r"scales is missing"), ("awq", zero_scale, "1 scales that are zero"),
        ("gptq", infinite_scale, "NaN or infinity"), ("awq", wide_scales, r"F32 .*F16 .* is expected"),
        ("awq", leave_one_out, "qweight is missing"), ("gptq", keep_the_weight, "was not to be"),
        ("gptq", store_the_head_twice, "second time"), ("gptq", shift_the_zero_points, "not symmetric"),
        ("gptq", mix_the_groups, "not grouped in order"), ("gptq", change_an_embedding, "was changed"),
    ],
)  # fmt: skip
def test_a_wrong_checkpoint_is_caught(
    tmp_path: Path, method: str, corrupt: Callable[[Arrays], None], sentence: str
) -> None:
    arrays = packed_llama(method)
    corrupt(arrays)
    folder = write(tmp_path / "v", arrays, SAYS[method])
    with pytest.raises(WorkerError, match=f"v: the checkpoint is not right and was not kept: .*{sentence}"):
        verify_packed(folder, write_llama(tmp_path / "bf16"), WANT[method])


@pytest.mark.parametrize(("method", "field", "value"), [
    ("gptq", "desc_act", True), ("gptq", "sym", False), ("gptq", "group_size", 64), ("awq", "zero_point", False),
    ("awq", "bits", 8), ("gptq", "quant_method", "awq"), ("gptq", "checkpoint_format", "gptq_v2"),
])  # fmt: skip
def test_a_config_that_would_be_read_wrongly_is_caught(tmp_path: Path, method: str, field: str, value: object) -> None:
    folder = write(tmp_path / "v", packed_llama(method), {**SAYS[method], field: value})
    with pytest.raises(WorkerError, match="is not right and was not kept"):
        verify_packed(folder, write_llama(tmp_path / "bf16"), WANT[method])


# --- the older spellings ----------
def test_a_config_of_transformers_5_is_spelled_for_transformers_4_too() -> None:
    plain = with_older_spellings({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "dtype": "bfloat16"})
    assert plain["rope_theta"] == 1e6 and plain["torch_dtype"] == "bfloat16" and "rope_scaling" not in plain
    scaled = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0}
    llama = with_older_spellings({"rope_parameters": scaled})
    assert llama["rope_scaling"] == {"rope_type": "llama3", "factor": 8.0} and llama["rope_theta"] == 5e5
    older = {"rope_theta": 1e4, "rope_scaling": None, "torch_dtype": "bfloat16"}
    assert with_older_spellings(older) == older
