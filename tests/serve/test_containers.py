"""tgi and sglang as text: no machine of ours could run them. Docker's answers come from a stand-in on PATH."""

import os
from pathlib import Path

import pytest

from qserve.artifacts import Machine
from qserve.errors import PreflightError
from qserve.recipe import Serving
from qserve.serve.engine import Room, Setting, Subject
from qserve.serve.server import Server
from qserve.serve.sglang import need_gpu, open_sglang
from qserve.serve.tgi import find_image, open_tgi
from qserve.variants import Bf16, Gptq

GIB = 2**30
CPU = Machine(flavour="cpu", cpu="c", cores=2, isa=("avx512f",), memory_bytes=24 * GIB)
H100 = Machine(
    flavour="cuda", cpu="c", cores=8, isa=(), memory_bytes=64 * GIB, gpus=("H100", "H100"), gpu_memory_bytes=80 * GIB,
)  # fmt: skip
CONFIG = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
SUBJECT = Subject("gptq", Path("/ws/gptq-1"), Gptq(method="gptq"))


def setting(machine: Machine, servers: int = 1, **serving: object) -> Setting:
    parsed = Serving.model_validate({"max_model_len": 2048, **serving})
    return Setting(parsed, CONFIG, machine, Room(servers, 20 * GIB, GIB), 8)


def docker(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`docker` on PATH is this shell script."""
    program = folder / "docker"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/bin{os.pathsep}/usr/bin")


def test_tgi_on_gpus() -> None:
    engine = open_tgi(
        "img:1", "sha256:1", setting(H100, engine="tgi", tensor_parallel=2, extra_args=["--quantize", "x"])
    )
    launch = engine.launch(SUBJECT, ("127.0.0.1", 8000))
    text = " ".join(launch.argv)
    assert text.startswith("docker run --rm --name qserve-tgi-8000 --network host --shm-size 1g ")
    assert "--volume /ws/gptq-1:/gptq:ro --env HF_HUB_OFFLINE=1 --gpus all img:1 --model-id /gptq" in text
    assert "--hostname 127.0.0.1 --port 8000 --max-input-tokens 2047 --max-total-tokens 2048 --num-shard 2" in text
    assert text.endswith("--quantize x")
    assert launch.model == "/gptq"  # as TGI calls it
    assert launch.contained
    live = Server(launch, os.getpid(), Path("log"), 1.0)
    assert (live.cpu_s(), live.memory_bytes()) == (None, None)  # those of the docker command are not the server's


def test_tgi_without_a_gpu() -> None:
    text = " ".join(open_tgi("img", "i", setting(CPU)).launch(SUBJECT, ("127.0.0.1", 1)).argv)
    assert "--gpus" not in text and "--num-shard" not in text
    assert text.endswith("--cuda-graphs 0")


def test_what_tgi_needs_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PreflightError, match="no docker command here"):
        find_image(None, CPU)
    docker(tmp_path, "echo 'Cannot connect to the Docker daemon' >&2; exit 1", monkeypatch)
    with pytest.raises(PreflightError, match="no Docker daemon answers"):
        find_image(None, CPU)
    docker(tmp_path, '[ "$1" = version ] && echo 28 && exit 0\necho "No such image" >&2; exit 1', monkeypatch)
    with pytest.raises(PreflightError, match=r"image my/tgi:1 is not here; run `docker pull my/tgi:1`"):
        find_image("my/tgi:1", CPU)
    docker(tmp_path, '[ "$1" = version ] && echo 28 && exit 0\necho "sha256:abc"', monkeypatch)
    assert find_image("my/tgi:1", CPU) == ("my/tgi:1", "sha256:abc")
    assert find_image(None, CPU)[0].endswith("-intel-cpu")


def test_sglang() -> None:
    alone = open_sglang(Path("/env/python"), "d", setting(H100, tensor_parallel=2, data_parallel=2))
    launch = alone.launch(SUBJECT, ("127.0.0.1", 8000))
    text = " ".join(launch.argv)
    assert text.startswith("/env/python -m sglang.launch_server --model-path /ws/gptq-1 --served-model-name gptq")
    assert "--dtype bfloat16 --context-length 2048 --tp-size 2 --dp-size 2 --enable-metrics" in text
    assert "--mem-fraction-static" not in text and "--disable-radix-cache" not in text
    beside = open_sglang(Path("python"), "d", setting(H100, servers=2, prefix_caching=False))
    text = " ".join(beside.launch(SUBJECT, ("127.0.0.1", 1)).argv)
    assert "--mem-fraction-static 0.425" in text and "--disable-radix-cache" in text
    assert alone.identity != beside.identity


def test_sglang_needs_a_gpu() -> None:
    need_gpu(H100)
    with pytest.raises(PreflightError, match="needs an NVIDIA GPU"):
        need_gpu(CPU)


def test_formats() -> None:
    for engine in (open_tgi("i", "i", setting(H100)), open_sglang(Path("p"), "d", setting(H100))):
        assert engine.unservable(Bf16()) is None
        assert engine.unservable(Gptq(method="gptq")) is None
