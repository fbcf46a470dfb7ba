"""`qserve init`: a starting recipe that loads and fits its model. No network."""

import json
import re
import struct
from pathlib import Path

import pytest

from qserve.errors import UsageError
from qserve.prep.init import recipe_text, write_starting_recipe
from qserve.prep.shapes import fitting_group_sizes, linear_shapes
from qserve.prep.source import Outline
from qserve.recipe import HubSource, PackageSource, PathSource, load_recipe
from qserve.variants import Awq, Gptq

LLAMA = {
    "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
}  # fmt: skip


def make_folder(place: Path, **config: object) -> Path:
    folder = place / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**LLAMA, **config}))
    header = json.dumps({"w": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0")
    return folder


def make_gguf(path: Path) -> Path:
    """A whole GGUF with one tensor: eight float32 in a llama of width 896."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    def number(key: str, value: int) -> bytes:
        return text(key) + struct.pack("<II", 4, value)

    pairs = [
        text("general.architecture") + struct.pack("<I", 8) + text("llama"), number("llama.embedding_length", 896),
        number("llama.feed_forward_length", 4864), number("llama.attention.head_count", 14),
        number("llama.attention.head_count_kv", 2), number("llama.context_length", 2048),
    ]  # fmt: skip
    tensor = text("token_embd.weight") + struct.pack("<IQIQ", 1, 8, 0, 0)
    head = struct.pack("<IIQQ", 0x46554747, 3, 1, len(pairs)) + b"".join(pairs) + tensor
    path.write_bytes(head + b"\0" * (-len(head) % 32) + b"\0" * 32)
    return path


def test_a_recipe_for_a_local_folder_loads_and_its_group_size_divides(tmp_path: Path) -> None:
    folder, out = make_folder(tmp_path), tmp_path / "new" / "qserve.yaml"
    assert write_starting_recipe(str(folder), out) == out
    recipe = load_recipe(out)
    assert recipe.model == PathSource(folder)
    assert list(recipe.variants) == ["awq", "gptq", "int8", "fp8"]
    awq, gptq = recipe.variants["awq"], recipe.variants["gptq"]
    assert isinstance(awq, Awq) and awq.group_size == 64 and isinstance(gptq, Gptq) and gptq.group_size == 64
    assert recipe.serving.max_model_len == 8192
    assert "64 divides 576, 1536" in out.read_text()
    assert set(re.findall(r"`?qserve (\w+)", out.read_text())) == {"init", "prep", "bench", "choose"}


def test_a_recipe_for_a_gguf_file_fits_its_header(tmp_path: Path) -> None:
    path, out = make_gguf(tmp_path / "some model.gguf"), tmp_path / "qserve.yaml"
    recipe = load_recipe(write_starting_recipe(str(path), out))
    assert recipe.model == PathSource(path)
    assert isinstance(recipe.variants["awq"], Awq) and recipe.variants["awq"].group_size == 128
    assert recipe.serving.max_model_len == 2048
    assert recipe.bench.prompt_tokens + recipe.bench.output_tokens <= 2048 and recipe.quality.tokens <= 2048


def test_a_hub_model_is_pinned_and_calibrated_on_the_hub(tmp_path: Path) -> None:
    out = tmp_path / "qserve.yaml"
    out.write_text(recipe_text(HubSource("me/model"), Outline(LLAMA, "folder", None, "a" * 40, None, None)))
    recipe = load_recipe(out)
    assert (recipe.model, recipe.revision) == (HubSource("me/model"), "a" * 40)
    data = recipe.calibration
    assert (data.dataset, data.split) == (HubSource("HuggingFaceH4/ultrachat_200k"), "train_sft")
    assert (data.samples, data.tokens) == (256, 512)


def test_a_model_out_of_a_package_needs_no_hub(tmp_path: Path) -> None:
    out, source = tmp_path / "qserve.yaml", PackageSource("some-model", "1.0", "model.gguf")
    out.write_text(recipe_text(source, Outline(LLAMA, "gguf", None, None, None, None)))
    recipe = load_recipe(out)
    assert recipe.model == source and isinstance(recipe.calibration.dataset, PackageSource)


@pytest.mark.parametrize(("config", "variants", "said"), [
    ({"hidden_size": 575, "num_attention_heads": 1}, ["int8", "fp8"], "no usual group size divides all of 575, 1536"),
    ({"hidden_size": None}, ["awq", "gptq", "int8", "fp8"], "this config names no widths"),
    ({"max_position_embeddings": 131072}, ["awq", "gptq", "int8", "fp8"], "max_model_len: 8192   # of the 131072"),
    ({"max_position_embeddings": 64}, ["awq", "gptq", "int8", "fp8"], "max_model_len: 64"),
])  # fmt: skip
def test_odd_models_get_a_recipe_that_loads_and_says_why(
    tmp_path: Path, config: dict[str, object], variants: list[str], said: str
) -> None:
    folder = make_folder(tmp_path, **config)
    out = write_starting_recipe(str(folder), tmp_path / "qserve.yaml")
    assert list(load_recipe(out).variants) == variants
    assert said in out.read_text()


def test_an_existing_recipe_is_never_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "qserve.yaml"
    out.write_text("mine\n")
    with pytest.raises(UsageError, match="is there already"):
        write_starting_recipe(str(make_folder(tmp_path)), out)
    assert out.read_text() == "mine\n"


def test_a_model_that_is_not_there_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "qserve.yaml"
    for wrong in (str(tmp_path / "nothing"), "no model at all", ""):
        with pytest.raises(UsageError):
            write_starting_recipe(wrong, out)
    assert not out.exists()


# --- shapes ----------
def test_shapes_of_a_plain_decoder() -> None:
    assert linear_shapes(LLAMA) == {
        "q_proj": (576, 576), "k_proj": (192, 576), "v_proj": (192, 576), "o_proj": (576, 576),
        "gate_proj": (1536, 576), "up_proj": (1536, 576), "down_proj": (576, 1536),
    }  # fmt: skip


@pytest.mark.parametrize(("config", "kind", "shape", "sizes"), [
    # a head_dim of its own: o_proj reads heads * head_dim, which is not the hidden size
    ({**LLAMA, "head_dim": 80}, "o_proj", (576, 720), (16,)),
    # experts 768 wide; the dense width of 6144 is on no layer
    ({**LLAMA, "hidden_size": 2048, "num_attention_heads": 32, "head_dim": 128, "intermediate_size": 6144,
      "num_experts": 128, "moe_intermediate_size": 768}, "experts.down_proj", (2048, 768), (128, 64, 32, 16)),
    # a shared expert of another width
    ({**LLAMA, "num_experts": 8, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 160},
     "shared_expert.down_proj", (576, 160), (32, 16)),
    # latent attention with a query rank, and a dense first layer
    ({**LLAMA, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
      "v_head_dim": 128, "n_routed_experts": 4, "moe_intermediate_size": 64, "n_shared_experts": 2,
      "first_k_dense_replace": 1}, "q_b_proj", (9 * 192, 1536), (64, 32, 16)),
    ({"text_config": LLAMA, "vision_config": {"hidden_size": 1000}}, "down_proj", (576, 1536), (64, 32, 16)),
])  # fmt: skip
def test_shapes_of_others(config: dict[str, object], kind: str, shape: tuple[int, int], sizes: tuple[int, ...]) -> None:
    assert linear_shapes(config)[kind] == shape
    assert fitting_group_sizes(config) == sizes


def test_unknown_shapes_are_not_guessed() -> None:
    assert linear_shapes({"d_model": 512}) == {} and fitting_group_sizes({"d_model": 512}) == ()
