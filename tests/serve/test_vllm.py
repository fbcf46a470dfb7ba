"""vLLM's settings, command and log, without starting it: the CUDA flavour is checked here as text."""

from pathlib import Path

import pytest

from qserve.artifacts import Machine
from qserve.errors import PreflightError
from qserve.recipe import Serving
from qserve.serve import vllm
from qserve.serve.engine import Room, Subject
from qserve.serve.kv_cache import kv_bytes_per_token
from qserve.variants import Awq, Bf16, Fp8, Gptq, Mxfp4, Nvfp4, Rtn, Variant

GIB = 2**30
SMOLLM2 = {
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "num_hidden_layers": 30, "hidden_size": 576,
    "max_position_embeddings": 8192,
}  # fmt: skip
ZEN3 = Machine(flavour="cpu", cpu="c", cores=2, isa=("avx2",), memory_bytes=24 * GIB)
ZEN4 = Machine(flavour="cpu", cpu="c", cores=2, isa=("avx2", "avx512f", "avx512_bf16"), memory_bytes=24 * GIB)
H100 = Machine(
    flavour="cuda", cpu="c", cores=8, isa=("avx2", "avx512f"), memory_bytes=64 * GIB, gpus=("H100",),
    gpu_memory_bytes=80 * GIB, gpu_capability="9.0",
)  # fmt: skip
TWO_H100 = H100.model_copy(update={"gpus": ("H100", "H100")})
A100 = H100.model_copy(update={"gpus": ("A100",), "gpu_capability": "8.0"})


def room(servers: int = 1, free: int = 20 * GIB) -> Room:
    return Room(servers, free, 269_000_000)


def test_kv_bytes_per_token() -> None:
    assert kv_bytes_per_token(SMOLLM2, "bfloat16") == 23_040
    assert kv_bytes_per_token(SMOLLM2, "float32") == 46_080
    assert kv_bytes_per_token({"text_config": SMOLLM2}, "bfloat16") == 23_040
    assert kv_bytes_per_token({**SMOLLM2, "kv_lora_rank": 512}, "bfloat16") is None
    assert kv_bytes_per_token({}, "bfloat16") is None


@pytest.mark.parametrize(("machine", "dtype"), [(ZEN3, "float32"), (ZEN4, "bfloat16"), (H100, "bfloat16")])
def test_dtype_follows_the_machine(machine: Machine, dtype: str) -> None:
    assert vllm.choose_settings(Serving(), SMOLLM2, machine, room()).dtype == dtype


def test_two_servers_share_what_one_would_have() -> None:
    one = vllm.choose_settings(Serving(), SMOLLM2, ZEN4, room(1)).kv_cache_bytes
    two = vllm.choose_settings(Serving(), SMOLLM2, ZEN4, room(2)).kv_cache_bytes
    assert one is not None
    assert two is not None
    assert GIB <= two < one <= 0.5 * 20 * GIB
    assert vllm.choose_settings(Serving(), SMOLLM2, H100, room(2)).memory_share == 0.45
    assert vllm.choose_settings(Serving(), SMOLLM2, H100, room(1)).memory_share == 0.9


def test_two_servers_of_the_quickstart_fit_into_ten_gib() -> None:
    """As README.md says."""
    serving = Serving(max_model_len=2048)
    assert vllm.choose_settings(serving, SMOLLM2, ZEN4, room(2, int(10.05 * GIB))).kv_cache_bytes == GIB
    with pytest.raises(PreflightError, match="no room for the KV cache"):
        vllm.choose_settings(serving, SMOLLM2, ZEN4, room(2, int(9.95 * GIB)))


def test_a_length_that_does_not_fit_says_which_does() -> None:
    tall = Serving(max_model_len=100_000, kv_cache_gib=1, dtype="bfloat16")
    with pytest.raises(PreflightError, match=r"needs 2\.15 GiB.*1\.00 GiB is available.*at most 46603"):
        vllm.choose_settings(tall, SMOLLM2, ZEN4, room())


@pytest.mark.parametrize(("servers", "fits"), [(1, 19), (2, 9)])
def test_a_kv_cache_beyond_the_memory_says_what_fits(servers: int, fits: int) -> None:
    """20 GiB free, and 0.25 GiB of weights in each server."""
    most = vllm.choose_settings(Serving(kv_cache_gib=fits), SMOLLM2, ZEN4, room(servers))
    assert most.kv_cache_bytes == fits * GIB
    said = rf"kv_cache_gib is {fits + 1}, and of the memory .*20\.0 GiB\) {fits} fit beside the weights"
    with pytest.raises(PreflightError, match=said):
        vllm.choose_settings(Serving(kv_cache_gib=fits + 1), SMOLLM2, ZEN4, room(servers))
    assert vllm.choose_settings(Serving(kv_cache_gib=100), SMOLLM2, H100, room()).kv_cache_bytes is None


def test_no_memory_no_server() -> None:
    with pytest.raises(PreflightError, match=r"0\.00 GiB is available"):
        vllm.choose_settings(Serving(), SMOLLM2, ZEN4, room(free=3 * GIB))


def test_the_cpu_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "core_ids", lambda: (0, 1))
    serving = Serving(max_model_len=2048, compile="off", prefix_caching=False, kv_cache_gib=2, start_timeout_s=77)
    settings = vllm.choose_settings(serving, SMOLLM2, ZEN3, room())
    launch = vllm.launch_vllm(Path("/env/bin/python"), Path("/ck pt/awq"), "awq", settings, ("127.0.0.1", 8000))
    text = " ".join(launch.argv)
    assert text.startswith("/env/bin/python -m vllm.entrypoints.openai.api_server --model /ck pt/awq ")
    assert "--served-model-name awq --host 127.0.0.1 --port 8000 --dtype float32 --max-model-len 2048" in text
    assert "--no-enable-prefix-caching" in text
    assert "--enforce-eager" in text
    assert "--gpu-memory-utilization" not in text
    assert launch.env["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert launch.env["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert launch.env["VLLM_CPU_INT4_W4A8"] == "0"
    assert launch.env["HF_HUB_OFFLINE"] == "1"
    assert launch.timeout_s == 77


@pytest.mark.parametrize("allocator", ["libtcmalloc_minimal.so.4", None])
@pytest.mark.parametrize(("isa", "intel"), [(("avx2", "avx512f"), True), (("avx2",), False)])
def test_what_is_preloaded(
    isa: tuple[str, ...], intel: bool, allocator: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/mine.so")
    monkeypatch.setattr(vllm, "tcmalloc", lambda: allocator)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    settings = vllm.choose_settings(Serving(), SMOLLM2, ZEN4.model_copy(update={"isa": isa}), room())
    launch = vllm.launch_vllm(tmp_path / "bin/python", Path("/c"), "int8", settings, ("127.0.0.1", 1))
    ours = [*([allocator] if allocator else []), *([f"{tmp_path}/lib/libiomp5.so"] if intel else [])]
    assert launch.env.get("LD_PRELOAD") == (":".join(["/usr/lib/mine.so", *ours]) if ours else None)


def test_the_cuda_command() -> None:
    settings = vllm.choose_settings(Serving(tensor_parallel=2), SMOLLM2, TWO_H100, room(2))
    launch = vllm.launch_vllm(Path("python"), Path("/c"), "fp8", settings, ("0.0.0.0", 9))
    text = " ".join(launch.argv)
    assert "--dtype bfloat16 --max-model-len 8192 --tensor-parallel-size 2" in text
    assert "--gpu-memory-utilization 0.45" in text
    assert "--enforce-eager" not in text
    assert "--enable-prefix-caching" in text
    assert not {"VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE", "LD_PRELOAD"} & set(launch.env)


def test_several_gpus() -> None:
    eight = H100.model_copy(update={"gpus": ("H100",) * 8})
    serving = Serving(tensor_parallel=2, pipeline_parallel=2, data_parallel=2)
    settings = vllm.choose_settings(serving, SMOLLM2, eight, room())
    text = " ".join(vllm.launch_vllm(Path("p"), Path("/c"), "m", settings, ("::", 9)).argv)
    assert "--tensor-parallel-size 2" in text
    assert "--pipeline-parallel-size 2 --data-parallel-size 2" in text
    assert "--distributed-executor-backend" not in text
    with pytest.raises(PreflightError, match=r"asks for 8 GPUs, and this machine shows 1; .*executor: ray"):
        vllm.choose_settings(serving, SMOLLM2, H100, room())
    on_ray = serving.model_copy(update={"executor": "ray"})
    settings = vllm.choose_settings(on_ray, SMOLLM2, H100, room())
    text = " ".join(vllm.launch_vllm(Path("p"), Path("/c"), "m", settings, ("::", 9)).argv)
    assert "--distributed-executor-backend ray" in text


def test_quantized_at_start_up() -> None:
    settings = vllm.choose_settings(Serving(quantization="fp8_per_channel"), SMOLLM2, ZEN4, room())
    engine = vllm.Vllm(Path("p"), "r", ZEN4, settings, None)
    plain, int8 = Bf16(), Gptq(method="gptq", bits=8, activations="int8")
    argv = [engine.launch(Subject("m", Path("/c"), variant), ("::", 9)).argv for variant in (plain, int8)]
    assert argv[0][-2:] == ("--quantization", "fp8_per_channel")
    assert "--quantization" not in argv[1]  # it is quantized already


@pytest.mark.parametrize(
    ("asked", "machine", "says"),
    [
        ("fp8", ZEN4, "use serving.quantization: fp8_per_channel"), ("fp8_per_block", ZEN4, "needs AMX"),
        ("int8", H100, "only the experts"), ("bitsandbytes", H100, "no bitsandbytes"),
    ],
)  # fmt: skip
def test_start_quantization_that_the_platform_lacks(asked: str, machine: Machine, says: str) -> None:
    with pytest.raises(PreflightError, match=says):
        vllm.choose_settings(Serving.model_validate({"quantization": asked}), SMOLLM2, machine, room())
    assert vllm.unquantizable("fp8", H100) is None


def test_what_this_machine_has_no_kernel_for() -> None:
    four_bits = (Awq(method="awq"), Gptq(method="gptq"))
    served = (Bf16(), Fp8(method="fp8"), Gptq(method="gptq", bits=8, activations="int8"))
    assert all("no kernel for 4-bit weights" in (vllm.unservable(v, ZEN3) or "") for v in four_bits)
    assert [vllm.unservable(v, ZEN3) for v in served] == [None, None, None]
    assert [vllm.unservable(v, m) for v in (*four_bits, *served) for m in (ZEN4, H100)] == [None] * 10
    assert "4-bit weights only" in (vllm.unservable(Gptq(method="gptq", bits=8), ZEN4) or "")


@pytest.mark.parametrize(("variant", "machine", "words"), [
    (Nvfp4(method="nvfp4"), ZEN4, "no CPU kernel for FP4"), (Mxfp4(method="mxfp4"), ZEN4, "no CPU kernel for FP4"),
    (Nvfp4(method="nvfp4"), H100, None), (Rtn(method="rtn"), ZEN3, "no kernel for 4-bit"),
    (Rtn(method="rtn"), ZEN4, None),
    (Rtn(method="rtn", bits=8), ZEN4, "4-bit weights only"),
    (Rtn(method="rtn", bits=8, activations="int8"), ZEN3, None),
    (Fp8(method="fp8", kv_cache=True), ZEN3, "needs AVX-512"), (Fp8(method="fp8", kv_cache=True), ZEN4, None),
    (Fp8(method="fp8", kv_cache=True), A100, "needs a GPU with FP8"), (Fp8(method="fp8", kv_cache=True), H100, None),
    (Fp8(method="fp8", activations="block"), ZEN4, "needs AMX"),
    (Fp8(method="fp8", activations="block"), ZEN4.model_copy(update={"isa": ("avx512f", "amx_tile")}), None),
    (Gptq(method="gptq", backend="gptqmodel"), ZEN3, "no kernel for 4-bit"),
])  # fmt: skip
def test_what_vllm_has_no_kernel_for(variant: Variant, machine: Machine, words: str | None) -> None:
    reason = vllm.unservable(variant, machine)
    assert reason is None if words is None else words in (reason or "")


LOG = """
(EngineCore pid=1) INFO [core.py:1] Initializing a V1 LLM engine (v0.32.0) with config: model='m', dtype=torch.float32, x, quantization=compressed-tensors, y
(Worker pid=2) INFO Selected CPUInt8ScaledMMLinearKernel for CompressedTensorsW8A8Int8
(Worker pid=2) INFO Selected CPUInt8ScaledMMLinearKernel for CompressedTensorsW8A8Int8
(Worker pid=2) WARNING [utils.py:597] Failed to create oneDNN linear, fallback to torch linear. Exception: no
(EngineCore pid=1) INFO CPU KV cache size: 93,184 tokens, Maximum concurrency for 2,048 tokens per request: 45.50x
"""  # noqa: E501


def test_kernels_are_read_from_the_log() -> None:
    assert vllm.kernels(LOG) == ("CPUInt8ScaledMMLinearKernel", "torch linear (oneDNN refused)")
    assert vllm.kernels("nothing") == ()


def test_a_kernel_that_refuses_a_layout_is_named_with_what_computes_instead() -> None:
    text = (
        "Using ZentorchWNA16LinearKernel for mixed-precision linear\n"
        "[zen_cpu] ZentorchWNA16 fast path not eligible for this layer (AWQ pack layout or non-int32 storage); falling "
        "back to CPUWNA16LinearKernel (cpu_gemm_wna16).\n"
    )
    assert vllm.kernels(text) == ("ZentorchWNA16LinearKernel", "CPUWNA16LinearKernel (fall-back)")
