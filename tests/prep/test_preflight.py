"""What cannot work is refused in one sentence, from the config alone."""

import re
from pathlib import Path

import pytest
from tiny import llama_config

from qserve.artifacts import Machine
from qserve.errors import PreflightError
from qserve.prep.preflight import check_disk, check_memory, check_variant, compute_dtype, expected_bytes, kernel_notes
from qserve.prep.schemes import ignore_of, matches
from qserve.prep.source import Outline
from qserve.recipe import Recipe
from qserve.variants import Awq, Bitsandbytes, Fp8, Gptq, QuantizedVariant
from qserve.workspace import Workspace

CPU = Machine(flavour="cpu", cpu="test", cores=2, isa=("avx2",), memory_bytes=16 * 2**30)
GPU = CPU.model_copy(update={"flavour": "cuda", "gpus": ("A100",), "gpu_capability": "8.0"})
SMOL = {
    **llama_config(hidden=576, layers=30, inner=1536), "num_attention_heads": 9, "num_key_value_heads": 3,
    "head_dim": 64, "vocab_size": 49152,
}  # fmt: skip
MOE = {**llama_config(), "num_experts": 8, "moe_intermediate_size": 64}


def outline(config: dict[str, object], bf16_bytes: int | None) -> Outline:
    return Outline(config, "folder", Path("/nowhere"), None, bf16_bytes, None)


def test_what_fits_passes() -> None:
    variants: list[QuantizedVariant] = [
        Awq(method="awq", group_size=64), Gptq(method="gptq", group_size=32), Fp8(method="fp8"),
        Gptq(method="gptq", bits=8, activations="int8"),
    ]  # fmt: skip
    for variant in variants:
        check_variant("v", variant, SMOL, CPU)
    check_variant("v", variants[0], {"model_type": "unknown"}, CPU)  # shapes are not known: left to the worker


@pytest.mark.parametrize(
    ("variant", "config", "words"),
    [
        (Gptq(method="gptq"), SMOL, ["group_size 128", "q_proj (576 in", "down_proj (1536 in", "fit: 64, 32, 16"]),
        (Awq(method="awq", group_size=64, ignore=("lm_head", "re:.*q_proj")), SMOL, ["q_proj", "one matrix"]),
        (Awq(method="awq", group_size=64, ignore=("lm_head", "re:.*3.mlp.up_proj")), SMOL, ["gate_proj", "one matrix"]),
        (Fp8(method="fp8", ignore=("lm_head", "re:.*")), SMOL, ["nothing would be quantized"]),
        (Fp8(method="fp8", ignore=("Linear",)), SMOL, ["nothing would be quantized"]),
        (Fp8(method="fp8", ignore=()), SMOL, ["add lm_head"]),
        (Gptq(method="gptq", bits=8, group_size=64), SMOL, ["no CPU kernel for 8-bit", "activations: int8"]),
        (Gptq(method="gptq", group_size=16), llama_config(hidden=48), ["multiples of 32", "q_proj (48 in"]),
        (Awq(method="awq", group_size=128, backend="autoawq"), SMOL, ["group_size 128", "fit: 64, 32, 16"]),
        (Awq(method="awq", group_size=64, backend="autoawq"), {**SMOL, "model_type": "olmo3"}, ["AutoAWQ", "olmo3"]),
        (
            Gptq(method="gptq", group_size=64, backend="autogptq"),
            {**SMOL, "model_type": "qwen3"},
            ["does not know qwen3"],
        ),
        (Gptq(method="gptq", group_size=16, backend="gptqmodel"), SMOL, ["group_size of 32, 64, 128", "this is 16"]),
        (
            Gptq(method="gptq", group_size=32, backend="gptqmodel"),
            llama_config(hidden=96),
            ["k_proj"],
        ),
        (Gptq(method="gptq", bits=8, group_size=64, backend="gptqmodel"), SMOL, ["no CPU kernel for 8-bit"]),
        (
            Awq(method="awq", group_size=64, backend="autoawq"),
            {**SMOL, "rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            ["AutoAWQ needs transformers 4", "by kind of layer"],
        ),
    ],
)
def test_what_cannot_work_is_refused(variant: QuantizedVariant, config: dict[str, object], words: list[str]) -> None:
    with pytest.raises(PreflightError) as error:
        check_variant("name", variant, config, CPU)
    for word in ["name: ", *words]:
        assert word in str(error.value)


def test_a_layer_that_does_not_fit_may_be_ignored() -> None:
    narrow = ("lm_head", *(f"re:.*{kind}_proj" for kind in ("q", "k", "v", "o", "gate", "up")))
    check_variant("v", Gptq(method="gptq", group_size=128, ignore=narrow), SMOL, CPU)


def test_bitsandbytes_takes_widths_that_its_kernel_here_takes_and_no_experts() -> None:
    nf4, int8 = Bitsandbytes(method="bitsandbytes"), Bitsandbytes(method="bitsandbytes", type="int8")
    zen4 = CPU.model_copy(update={"isa": ("avx2", "avx512f", "avx512_bf16")})
    check_variant("v", nf4, SMOL, zen4)
    narrow = llama_config(hidden=96)
    with pytest.raises(PreflightError, match=r"v: .* multiples of 64 .* q_proj, k_proj.*use type: int8"):
        check_variant("v", nf4, narrow, zen4)
    check_variant("v", int8, narrow, zen4)
    check_variant("v", nf4, narrow, CPU)
    with pytest.raises(PreflightError, match="v: bitsandbytes rounds no experts"):
        check_variant("v", int8, MOE, GPU)
    assert ["--engine transformers" in note for note in kernel_notes("v", nf4, SMOL, GPU)] == [True]
    source = outline(SMOL, 269_030_016)
    double = Bitsandbytes(method="bitsandbytes", double_quant=True)
    assert expected_bytes(source, double) < expected_bytes(source, nf4) < expected_bytes(source, int8) < 269_030_016


def test_eight_bit_weights_alone_are_for_gpus() -> None:
    check_variant("v", Gptq(method="gptq", bits=8, group_size=64), SMOL, GPU)


def test_routers_are_never_quantized() -> None:
    patterns = ignore_of(Fp8(method="fp8"), MOE)
    assert ignore_of(Fp8(method="fp8"), SMOL) == ("lm_head",)
    routers = ("model.layers.0.mlp.gate", "model.layers.1.block.router", "model.layers.0.mlp.shared_expert_gate")
    experts = ("model.layers.0.mlp.experts.3.gate_proj", "model.layers.0.mlp.shared_expert.gate_proj")
    assert [any(matches(p, name) for p in patterns) for name in routers] == [True] * 3
    assert [any(matches(p, name) for p in patterns) for name in experts] == [False] * 2


def test_kernels_that_are_slow_are_named() -> None:
    assert "emulates" in next(kernel_notes("fp8", Fp8(method="fp8"), SMOL, CPU))
    assert "16-bit activations" in next(kernel_notes("fp8", Fp8(method="fp8"), SMOL, GPU))
    assert "Marlin" in next(kernel_notes("w4", Gptq(method="gptq", group_size=64), SMOL, GPU))
    assert list(kernel_notes("int8", Gptq(method="gptq", bits=8, activations="int8"), SMOL, CPU)) == []


def test_sizes_are_foreseen_within_a_few_percent() -> None:
    source = outline(SMOL, 269_030_016)
    measured = {113_600_000: Gptq(method="gptq", group_size=64), 163_172_736: Fp8(method="fp8")}
    for size, variant in measured.items():
        assert expected_bytes(source, variant) == pytest.approx(size, rel=0.02)


def test_too_little_disk_and_memory(tmp_path: Path) -> None:
    variants: dict[str, QuantizedVariant] = {"awq": Awq(method="awq", group_size=64)}
    with pytest.raises(PreflightError, match=r"GB free and the checkpoints take about [0-9]+"):
        check_disk(outline(SMOL, 10**16), variants, Workspace(tmp_path))
    calibration = {"dataset": "a/b", "samples": 100_000, "tokens": 2048}
    recipe = Recipe.model_validate({"model": "a/b", "calibration": calibration, "variants": variants})
    with pytest.raises(PreflightError) as error:
        check_memory(recipe, outline(SMOL, 269_030_016), variants, CPU)
    fit = int(re.findall(r"at most (\d+) such samples fit", str(error.value))[0])
    assert 100 < fit < 1000
    fewer = recipe.model_copy(update={"calibration": recipe.calibration.model_copy(update={"samples": fit})})
    check_memory(fewer, outline(SMOL, 269_030_016), variants, CPU)


def test_calibration_computes_in_what_is_fast_and_fits() -> None:
    assert compute_dtype(outline(SMOL, 269_030_016), CPU) == "float32"
    assert compute_dtype(outline(SMOL, 14 * 10**9), CPU) == "bfloat16"
    assert compute_dtype(outline(SMOL, 269_030_016), GPU) == "bfloat16"
