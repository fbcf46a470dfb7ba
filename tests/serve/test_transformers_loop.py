"""The naive server through its HTTP API: a tiny random llama in the real transformers.

Builds llm-compressor's environment if this machine has none yet.
"""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from tiny import write_llama

from qserve.artifacts import Machine
from qserve.engines import install_engine
from qserve.eval import quality
from qserve.eval.load import Request, Target, run, run_load
from qserve.machine import look
from qserve.recipe import Serving
from qserve.serve.engine import Room, Setting, Subject
from qserve.serve.info import probe
from qserve.serve.kv_cache import read_config
from qserve.serve.server import Server, free_port, running
from qserve.serve.transformers_loop import LoopName, TransformersLoop, open_loop, read_log
from qserve.variants import Bf16

PROMPT = list(b"The quick brown fox")
H100 = Machine(flavour="cuda", cpu="c", cores=8, isa=("avx512f",), memory_bytes=64 * 2**30, gpus=("H100",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("loop") / "model")


def engine(name: LoopName, folder: Path) -> TransformersLoop:
    installed = install_engine(name, Serving(), lambda text: None)
    setting = Setting(Serving(dtype="float32"), read_config(folder), look(), Room(1, 2**33, 2**20), 4)
    return open_loop(name, installed.program, installed.digest, setting)


def served(name: LoopName, folder: Path) -> Iterator[tuple[TransformersLoop, Server]]:
    loop = engine(name, folder)
    launch = loop.launch(Subject("tiny", folder, Bf16()), ("127.0.0.1", free_port("127.0.0.1", 0)))
    with running(launch, folder.parent / f"{name}.log", lambda text: None) as live:
        yield loop, live


@pytest.fixture(scope="module")
def loop(folder: Path) -> Iterator[tuple[TransformersLoop, Server]]:
    yield from served("transformers", folder)


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Iterator[tuple[TransformersLoop, Server]]:
    yield from served("pipeline", folder)


def ask(live: Server, route: str = "completions", **body: object) -> httpx.Response:
    return httpx.post(f"{live.url}/v1/{route}", json={"model": "tiny", "temperature": 0, **body}, timeout=60)


def test_it_says_what_it_serves(loop: tuple[TransformersLoop, Server]) -> None:
    chosen, live = loop
    facts, memory = chosen.facts(live, "log"), chosen.memory(live, 5, 7)
    assert (facts.engine, facts.dtype, facts.quantization) == ("transformers", "float32", None)
    assert facts.version and facts.version.split(".")[0].isdigit()
    assert "torch Linear" in facts.kernels
    assert memory.loaded_bytes and memory.loaded_bytes > 100_000
    assert (memory.kv_capacity_tokens, memory.kv_bytes, memory.peak_bytes) == (None, None, 7)
    info = probe(live.url)
    assert (info.engine, info.version, info.context_tokens) == ("transformers", facts.version, 512)
    assert info.healthy and info.running is None


def test_every_token_is_streamed_and_counted(loop: tuple[TransformersLoop, Server]) -> None:
    _, live = loop
    result = run(run_load(Target(live.url, "tiny", usage_each_chunk=True), [Request(tuple(PROMPT), 5)] * 3, 3))
    assert [r.outcome for r in result.records] == ["ok"] * 3
    assert [(r.prompt_tokens, r.output_tokens) for r in result.records] == [(len(PROMPT), 5)] * 3


def test_greedy_is_the_same_streamed_and_whole(loop: tuple[TransformersLoop, Server]) -> None:
    _, live = loop
    whole = ask(live, prompt=PROMPT, max_tokens=12, ignore_eos=True, skip_special_tokens=False).json()
    lines = ask(live, prompt=PROMPT, max_tokens=12, ignore_eos=True, skip_special_tokens=False, stream=True).text
    events = [json.loads(line[6:]) for line in lines.splitlines() if line.startswith("data: {")]
    assert "".join(e["choices"][0]["text"] for e in events) == whole["choices"][0]["text"]
    assert events[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"] == {"prompt_tokens": len(PROMPT), "completion_tokens": 12, "total_tokens": len(PROMPT) + 12}


@pytest.mark.parametrize("name", ["loop", "pipeline"])
def test_chat(name: str, request: pytest.FixtureRequest) -> None:
    _, live = request.getfixturevalue(name)
    messages = [{"role": "user", "content": "hi"}]
    reply = ask(live, "chat/completions", messages=messages, max_tokens=4, ignore_eos=True).json()
    assert reply["choices"][0]["message"]["role"] == "assistant"
    assert reply["usage"]["completion_tokens"] == 4
    lines = ask(live, "chat/completions", messages=messages, max_tokens=4, ignore_eos=True, stream=True).text
    assert lines.startswith("data: ") and lines.rstrip().endswith("data: [DONE]")


def test_a_pipeline_gives_its_text_at_the_end(pipeline: tuple[TransformersLoop, Server]) -> None:
    _, live = pipeline
    result = run(run_load(Target(live.url, "tiny", usage_each_chunk=True), [Request(tuple(PROMPT), 8)] * 2, 1))
    for record in result.records:
        assert (record.outcome, record.deltas, record.output_tokens) == ("ok", 1, 8)
        assert record.ttft_s and record.e2e_s and record.e2e_s - record.ttft_s < 0.1 * record.e2e_s


def test_prompt_logprobs_are_those_of_the_model(loop: tuple[TransformersLoop, Server]) -> None:
    _, live = loop
    (scored,) = quality.score(live, (tuple(PROMPT),), 320, 60.0)  # the whole vocabulary
    assert scored.logprobs.shape == (len(PROMPT) - 1,)
    for place in scored.top:
        assert len(place) == 320
        assert np.exp(list(place.values())).sum() == pytest.approx(1, abs=1e-4)


def test_echo_gives_the_same_log_probabilities_in_openais_spelling(loop: tuple[TransformersLoop, Server]) -> None:
    """As lm-evaluation-harness asks: a batch of one prompt, one token to generate."""
    _, live = loop
    asked = {"prompt": [PROMPT], "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234}
    found = ask(live, **asked).raise_for_status().json()["choices"][0]["logprobs"]
    (scored,) = quality.score(live, (tuple(PROMPT),), 1, 60.0)
    assert len(found["token_logprobs"]) == len(found["top_logprobs"]) == len(PROMPT) + 1
    assert found["token_logprobs"][0] is None and found["token_logprobs"][-1] is None
    assert found["token_logprobs"][1:-1] == pytest.approx(list(scored.logprobs), abs=1e-5)
    best = [max(place.values()) for place in scored.top]
    assert [max(place.values()) for place in found["top_logprobs"][1:-1]] == pytest.approx(best, abs=1e-5)


def test_one_request_at_a_time_and_a_client_that_leaves_is_not_served(loop: tuple[TransformersLoop, Server]) -> None:
    _, live = loop
    with ThreadPoolExecutor(4) as pool, pytest.raises(httpx.TimeoutException):
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 480, "ignore_eos": True}
        list(pool.map(lambda _: httpx.post(f"{live.url}/v1/completions", json=body, timeout=0.3), range(4)))
    began = time.monotonic()
    assert ask(live, prompt=PROMPT, max_tokens=1).status_code == 200
    assert time.monotonic() - began < 2  # four whole answers take longer
    time.sleep(0.3)
    idle = live.cpu_s()
    time.sleep(0.5)
    assert live.cpu_s() - idle < 0.2, "it still works for clients that left"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": PROMPT, "max_tokens": 1000}, "do not fit into 512"),
        ({"prompt": [9999]}, "outside the vocabulary"),
        ({"prompt": {"a": 1}}, "a text or a list of token ids"),
        ({"prompt": PROMPT, "stop": ["x"]}, "does not know stop"),
        ({"prompt": PROMPT, "model": "other"}, "no model 'other'"),
        ({"prompt": []}, "0 prompt tokens"),
    ],
)
def test_what_it_cannot_do_is_a_sentence(
    loop: tuple[TransformersLoop, Server], body: dict[str, object], says: str
) -> None:
    answer = ask(loop[1], **body)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def test_the_command_on_a_gpu() -> None:
    setting = Setting(Serving(max_model_len=2048), {}, H100, Room(1, 2**33, 2**20), 4)
    loop = open_loop("pipeline", Path("/env/python"), "d", setting)
    launch = loop.launch(Subject("m", Path("/c"), Bf16()), ("::", 9))
    text = " ".join(launch.argv)
    assert "--mode pipeline --checkpoint /c " in text
    assert "--name m --host :: --port 9 --dtype bfloat16 --device cuda" in text
    assert "--context 2048 --threads 8" in text
    assert launch.env["HF_HUB_OFFLINE"] == "1"


def test_a_log_without_its_line_is_not_known() -> None:
    assert read_log("Traceback\n") is None
