"""The real llama-server and llama-quantize on a tiny model: where llama.cpp is built already, since that takes 14
minutes of CPU time (`qserve runtimes build llama.cpp`)."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from tiny_gguf import CONFIG, write_tiny_gguf

from qserve.artifacts import Machine
from qserve.eval.load import Request, Target, run, run_load
from qserve.eval.quality import score
from qserve.eval.summary import summarize
from qserve.llama_cpp import LlamaCpp, find_llama_cpp, thing_of
from qserve.prep.verify_gguf import verify_gguf
from qserve.recipe import Serving
from qserve.serve.engine import Room, Setting, Subject
from qserve.serve.llama_server import GGUF_NAME, open_llama_server
from qserve.serve.server import Server, free_port, running
from qserve.variants import Gguf, GgufType

CPU = Machine(flavour="cpu", cpu="c", cores=2, isa=(), memory_bytes=2**33)
TYPES: tuple[GgufType, ...] = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0")


@pytest.fixture(scope="module")
def llama_cpp() -> LlamaCpp:
    found = find_llama_cpp(thing_of("cpu"))
    if found is None:
        pytest.skip(
            "llama.cpp is not built in this cache; `qserve runtimes build llama.cpp` takes 14 minutes of CPU time"
        )
    return found


@pytest.fixture(scope="module")
def whole(llama_cpp: LlamaCpp, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    path = tmp_path_factory.mktemp("tiny") / "bf16.gguf"
    return path, write_tiny_gguf(path, llama_cpp.converter)


@pytest.fixture(scope="module")
def live(llama_cpp: LlamaCpp, whole: tuple[Path, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("q4")
    quantize(llama_cpp, whole[0], folder / GGUF_NAME, "q4_k_m")
    setting = Setting(Serving(max_model_len=300), CONFIG, CPU, Room(1, 2**33, 10**6), 3)
    engine = open_llama_server(llama_cpp.server, llama_cpp.digest, setting)
    subject = Subject("tiny", folder, Gguf(method="gguf", type="q4_k_m"))
    with running(engine.launch(subject, ("127.0.0.1", free_port("127.0.0.1", 0))), folder / "log", print) as server:
        yield SimpleNamespace(engine=engine, server=server)


def quantize(llama_cpp: LlamaCpp, source: Path, out: Path, kind: GgufType) -> None:
    subprocess.run([llama_cpp.quantize, source, out, kind.upper(), "1"], check=True, capture_output=True)


@pytest.mark.parametrize("kind", TYPES)
def test_what_llama_quantize_writes_is_what_is_expected(
    llama_cpp: LlamaCpp, whole: tuple[Path, int], tmp_path: Path, kind: GgufType
) -> None:
    quantize(llama_cpp, whole[0], tmp_path / "q.gguf", kind)
    found = verify_gguf(kind, tmp_path / "q.gguf", kind, whole[1])
    assert found.note is None
    assert len(found.targets) == 14
    assert verify_gguf("bf16", whole[0], "bf16", whole[1]).weights.bits_per_parameter == pytest.approx(16, rel=0.02)
    expected = {"q8_0": 8.5, "q6_k": 6.56, "q5_k_m": 5.8, "q4_k_m": 5, "q4_0": 4.6}
    assert found.weights.bits_per_parameter == pytest.approx(expected[kind], rel=0.06)


def test_what_is_served_is_told(live: Any) -> None:
    facts = live.engine.facts(live.server, "log")
    assert facts.version == "b11434"
    assert facts.quantization is not None and facts.quantization.startswith("Q4_K")
    assert any(name.startswith("weights in") for name in facts.kernels)
    assert "OPENMP" in facts.kernels
    memory = live.engine.memory(live.server, 1, None)
    assert memory.kv_capacity_tokens == 3 * 512
    assert memory.kv_bytes == 3 * 512 * 2 * 2 * 2 * 64 * 2  # slots, tokens, K and V, layers, heads, head size, bytes
    assert memory.loaded_bytes is not None and memory.loaded_bytes > 500_000


def test_scores_are_of_the_model_itself(live: Any) -> None:
    """The forced token does not move them; bytes that are no character by themselves are scored as well."""
    random = np.random.default_rng(1)
    windows = [tuple(int(t) for t in random.integers(0, 256, 24)) for _ in range(4)]
    assert sum(token > 127 for window in windows for token in window) > 20
    gaps = []
    for window, one in zip(windows, score(live.server, windows, 8, 600), strict=True):
        assert len(one.logprobs) == 23
        for n in (1, 7, 23):
            plain = everything(live.server, window[:n])
            assert sum(np.exp(list(plain.values()))) == pytest.approx(1, abs=1e-3)
            gaps.append(abs(one.logprobs[n - 1] - plain[window[n]]))
            best = sorted(plain, key=lambda token: -plain[token])[:3]
            assert set(best) <= set(one.top[n - 1])
    assert len(gaps) == 12
    assert np.mean(gaps) < 0.1  # a prompt of several tokens at once rounds otherwise than one of a single token


def everything(server: Server, prefix: tuple[int, ...]) -> dict[int, float]:
    """The whole distribution after a prefix, asked for plainly: greedy, no bias but one that keeps to ASCII."""
    body = {"prompt": prefix, "n_predict": 1, "n_probs": 1000, "temperature": 0, "logit_bias": [[65, 50]]}
    found = httpx.post(f"{server.url}/completion", json=body, timeout=60).json()["completion_probabilities"][0]
    return {token["id"]: token["logprob"] for token in found["top_logprobs"]}


def test_a_load_is_counted_and_of_the_length_asked_for(live: Any) -> None:
    before = live.server.counters()
    random = np.random.default_rng(2)
    requests = [Request(tuple(int(t) for t in random.integers(32, 127, 40)), 120) for _ in range(60)]
    target = Target(live.server.url, "tiny", usage_each_chunk=True, dialect=live.server.dialect)
    summary = summarize([run(run_load(target, requests, 3))])
    assert (summary.ok, summary.failed, summary.counted_by) == (60, {}, "usage")  # kept-alive connections are dropped
    assert (summary.prompt_tokens, summary.output_tokens) == (60 * 40, 60 * 120)
    assert summary.valid, summary.problem
    after = live.server.counters()
    assert after.prefix_queries - before.prefix_queries == 60 * 40
    assert after.prefix_hits - before.prefix_hits < 0.05 * 60 * 40
    assert (after.running, after.waiting) == (0, 0)


def test_a_prompt_that_was_there_is_not_computed_again(live: Any) -> None:
    prompt = list(range(40, 120))
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
    before = live.server.counters()
    for _ in range(2):
        httpx.post(f"{live.server.url}/v1/completions", json=body, timeout=60).raise_for_status()
    after = live.server.counters()
    assert after.prefix_queries - before.prefix_queries == 160
    assert 70 <= after.prefix_hits - before.prefix_hits <= 80
