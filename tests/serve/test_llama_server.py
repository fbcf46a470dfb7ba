"""llama-server's settings, command and log, without starting it; and which engine serves what."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from qserve import engines
from qserve.artifacts import Machine
from qserve.errors import PreflightError, UsageError
from qserve.recipe import EngineName, Recipe, Serving
from qserve.serve import llama_server
from qserve.serve.engine import Room, Setting, Subject
from qserve.variants import Bf16, Fp8, Gguf

GIB = 2**30
SMOLLM2: dict[str, object] = {
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "num_hidden_layers": 30, "hidden_size": 576,
    "max_position_embeddings": 8192,
}  # fmt: skip
CPU = Machine(flavour="cpu", cpu="c", cores=2, isa=("avx2", "avx512f"), memory_bytes=24 * GIB)
H100 = CPU.model_copy(update={"flavour": "cuda", "gpu_memory_bytes": 80 * GIB})
Q4 = Gguf(method="gguf", type="q4_k_m")


def setting(serving: Serving | None = None, machine: Machine = CPU, free: int = 8 * GIB) -> Setting:
    return Setting(serving or Serving(max_model_len=2048), SMOLLM2, machine, Room(2, free, 100_000_000), 8)


def test_a_slot_a_request_with_room_for_a_full_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_server, "core_ids", lambda: (0, 2))
    settings = llama_server.choose_settings(setting())
    assert (settings.slots, settings.slot_tokens, settings.threads) == (8, 2304, 2)
    launch = llama_server.launch_llama_server(Path("/x/llama-server"), Subject("q4", tmp_path, Q4), settings, ("h", 9))
    text = " ".join(launch.argv)
    assert text.startswith(f"/x/llama-server --model {tmp_path}/model.gguf --alias q4 --host h --port 9 --offline")
    assert "--threads 2 --threads-batch 2 --parallel 8 --ctx-size 18432 --cont-batching" in text
    assert "--cache-prompt --cache-ram 512" in text
    assert "--gpu-layers" not in text
    assert "--chat-template-file" not in text
    assert (launch.scoring, launch.dialect, launch.model) == ("next_token", "llama.cpp", "q4")
    (tmp_path / "chat_template.jinja").write_text("x")
    again = llama_server.launch_llama_server(Path("/x/llama-server"), Subject("q4", tmp_path, Q4), settings, ("h", 9))
    assert again.argv[-2:] == ("--chat-template-file", f"{tmp_path}/chat_template.jinja")


def test_prefix_caching_can_be_off() -> None:
    settings = llama_server.choose_settings(setting(Serving(max_model_len=2048, prefix_caching=False)))
    launch = llama_server.launch_llama_server(Path("s"), Subject("q4", Path("c"), Q4), settings, ("h", 9))
    assert "--no-cache-prompt --cache-ram 0" in " ".join(launch.argv)


def test_on_a_gpu_every_layer_is_there() -> None:
    settings = llama_server.choose_settings(setting(machine=H100, free=GIB))
    launch = llama_server.launch_llama_server(Path("s"), Subject("q4", Path("c"), Q4), settings, ("h", 9))
    assert launch.argv[-2:] == ("--gpu-layers", "999")


def test_slots_that_do_not_fit_say_what_would() -> None:
    with pytest.raises(PreflightError, match=r"8 slots of 8192 tokens, 1\.45 GiB .* 0\.41 GiB is av.* at most 2303"):
        llama_server.choose_settings(setting(Serving(), free=2 * GIB))
    llama_server.choose_settings(setting(Serving(max_model_len=2303), free=2 * GIB))
    with pytest.raises(PreflightError, match="free memory"):
        llama_server.choose_settings(setting(free=GIB))


def test_extra_arguments_go_to_the_engine_of_the_recipe_alone() -> None:
    own = Serving(engine="llama-server", max_model_len=2048, extra_args=("--mlock",))
    assert llama_server.choose_settings(setting(own)).extra_args == ("--mlock",)
    assert llama_server.choose_settings(setting(own.model_copy(update={"engine": "vllm"}))).extra_args == ()


def test_a_build_and_its_settings_are_in_the_identity() -> None:
    settings = llama_server.choose_settings(setting())
    one = llama_server.LlamaServer(Path("s"), "d", settings)
    assert one.identity == replace(one, program=Path("elsewhere")).identity
    assert one.identity != replace(one, digest="e").identity
    assert one.identity != replace(one, settings=replace(settings, threads=9)).identity


LOG = """
0.00.012.345 I system_info: n_threads = 2 (n_threads_batch = 2) / 2 | CPU : SSE3 = 1 | AVX512_BF16 = 1 | AMX_INT8 = 0 | REPACK = 1 |
0.00.100.000 I load_tensors:   CPU_Mapped model buffer size =    98.50 MiB
0.00.100.001 I load_tensors:          AMX model buffer size =    40.25 MiB
0.00.200.000 I llama_kv_cache:        CPU KV buffer size =   405.00 MiB
"""  # noqa: E501


def test_what_the_log_says() -> None:
    used = llama_server.kernels(LOG)
    assert used == ("weights in CPU_Mapped", "weights in AMX", "AVX512_BF16", "REPACK")
    found = llama_server.memory(LOG, llama_server.choose_settings(setting()), 7, 9)
    assert (found.loaded_bytes, found.kv_bytes) == (int(138.75 * 2**20), 405 * 2**20)
    assert (found.kv_capacity_tokens, found.disk_bytes, found.peak_bytes) == (18432, 7, 9)
    empty = llama_server.memory("", llama_server.choose_settings(setting()), 7, None)
    assert (empty.loaded_bytes, empty.kv_bytes, empty.kv_capacity_tokens) == (None, None, None)
    assert llama_server.kernels("") == ()


# --- which engine serves what ----------
RECIPE = Recipe.model_validate(
    {
        "model": "a/b", "calibration": {"dataset": "c/d"},
        "variants": {"fp8": {"method": "fp8"}, "q4": {"method": "gguf", "type": "q4_k_m"},
                     "nf4": {"method": "bitsandbytes"}},
    }
)  # fmt: skip


def test_a_gguf_variant_is_served_by_llama_server_and_nothing_else_is() -> None:
    assert engines.engine_for(Q4, None, RECIPE) == "llama-server"
    assert engines.engine_for(Fp8(method="fp8"), None, RECIPE) == "vllm"
    for name in set(get_args(EngineName)) - {"llama-server"}:
        with pytest.raises(PreflightError, match="use --engine llama-server"):
            engines.engine_for(Q4, name, RECIPE)
    for variant in (Bf16(), Fp8(method="fp8")):
        with pytest.raises(PreflightError, match=r"llama-server serves GGUF files .* use --engine vllm"):
            engines.engine_for(variant, "llama-server", RECIPE)


def test_a_run_adds_llama_server_where_there_are_gguf_variants() -> None:
    assert engines.choose_engines((), RECIPE, ("fp8",)) == ("vllm",)
    assert engines.choose_engines((), RECIPE, ("fp8", "q4")) == ("vllm", "llama-server")
    assert engines.choose_engines(("vllm", "vllm"), RECIPE, ("fp8", "q4")) == ("vllm",)


def test_a_run_of_formats_that_its_engines_do_not_read_is_refused() -> None:
    with pytest.raises(PreflightError, match=r"nothing could be compared with bf16: .*use --engine llama-server"):
        engines.choose_engines(("vllm",), RECIPE, ("q4",))
    with pytest.raises(PreflightError, match=r"nothing could be compared with bf16: .*--engine transformers"):
        engines.choose_engines((), RECIPE, ("nf4",))
    assert engines.choose_engines((), RECIPE, ("nf4", "fp8")) == ("vllm",)
    assert engines.choose_engines(("transformers",), RECIPE, ("nf4",)) == ("transformers",)
    assert engines.choose_engines((), RECIPE, ()) == ("vllm",)


def test_the_first_engine_must_serve_the_baseline() -> None:
    with pytest.raises(UsageError, match="bf16 is none; use --engine vllm: name it first"):
        engines.choose_engines(("llama-server", "vllm"), RECIPE, ("q4",))
    with pytest.raises(UsageError, match="no engine 'ollama'; there are vllm, llama-server"):
        engines.choose_engines(("ollama",), RECIPE, ())
