"""The load client against a scripted server: what a first token is, what it counts, and what was delivered."""

import asyncio

import pytest
from fake_openai import Call, serving
from loading import PROMPT, load, outcomes

from qserve.eval.load import Request, Target, mean_in_flight, run, run_load
from qserve.eval.summary import summarize


def test_ttft_is_the_first_text_not_the_role_chunk() -> None:
    async def script(call: Call) -> None:
        await call.begin()
        await asyncio.sleep(0.005)
        await call.delta(role="assistant", content="")
        await call.line(": ping")
        await call.delta(content="")
        await asyncio.sleep(0.295)
        await call.delta(content="Hello")
        await asyncio.sleep(0.05)
        await call.delta(content=" there", finish="stop")
        await call.usage(2, prompt_tokens=9)
        await call.end()

    with serving(script) as fake:
        request = Request("Say hello", 2, chat=True)
        (record,) = run(run_load(Target(fake.url, "fake"), [request], 1)).records
    assert fake.calls[0].path == "/v1/chat/completions"
    assert fake.calls[0].body["messages"] == [{"role": "user", "content": "Say hello"}]
    assert record.outcome == "ok"
    assert record.ttft_s == pytest.approx(0.3, abs=0.1) and record.ttft_s >= 0.29
    assert len(record.itl_s) == 1 and 0.04 < record.itl_s[0] < 0.2
    assert (record.deltas, record.prompt_tokens, record.output_tokens) == (2, 9, 2)
    assert record.answer_s is None


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_a_token_and_the_answer_comes_later(name: str) -> None:
    async def script(call: Call) -> None:
        await call.begin()
        await call.delta(role="assistant", content=None)
        await asyncio.sleep(0.05)
        for _ in range(20):
            await call.delta(**{name: "hm", "content": None})
        await asyncio.sleep(0.2)
        await call.delta(content="42", finish="stop")
        await call.usage(21)
        await call.end()

    with serving(script) as fake:
        (record,) = load(fake.url).records
    assert record.outcome == "ok" and record.deltas == 21 and record.output_tokens == 21
    assert record.ttft_s is not None and 0.045 < record.ttft_s < 0.2
    assert record.answer_s is not None and record.answer_s >= 0.245


def test_a_tool_call_is_an_answer() -> None:
    async def script(call: Call) -> None:
        await call.begin()
        await call.delta(role="assistant")
        await call.delta(tool_calls=[{"index": 0, "function": {"name": "f", "arguments": ""}}])
        await call.delta(finish="tool_calls")
        await call.end()

    with serving(script) as fake:
        (record,) = load(fake.url).records
    assert (record.outcome, record.deltas) == ("ok", 1)
    assert record.output_tokens is None  # the server sent no usage: not known, not 0


def test_tokens_are_the_servers_count() -> None:
    async def script(call: Call) -> None:
        await call.begin()
        await asyncio.sleep(0.02)  # so that the client's own share of the time is small
        for text in ("a", "", "\N{SNOWMAN} b c"):  # no text for half a character, then several tokens in one chunk
            await call.text(text)
        await call.text("", "length")
        await call.usage(5)
        await call.end()

    with serving(script) as fake:
        result = load(fake.url, count=3, tokens=5)
    assert [record.output_tokens for record in result.records] == [5, 5, 5]
    assert [record.deltas for record in result.records] == [2, 2, 2]
    summary = summarize([result])
    assert (summary.output_tokens, summary.prompt_tokens, summary.counted_by) == (15, 48, "usage")
    assert summary.valid, summary.problem


def test_the_cut_keeps_tokens_and_first_tokens_but_no_end() -> None:
    async def script(call: Call) -> None:
        await call.begin()
        for i in range(1000):
            await call.event({
                "choices": [{"index": 0, "text": " a", "finish_reason": None}],
                "usage": {"prompt_tokens": 16, "completion_tokens": 2 * (i + 1)},
            })  # fmt: skip
            await asyncio.sleep(0.02)

    with serving(script) as fake:
        target = Target(fake.url, "fake", usage_each_chunk=True)
        result = run(run_load(target, [Request(PROMPT, 2000)] * 10, 4, cut_after_s=0.3))
        assert fake.calls[0].body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert outcomes(result) == {"cut": 4}  # the other six were never sent, so they are not attempts
    assert all(r.output_tokens == 2 * r.deltas > 4 for r in result.records)
    assert result.wall_s == pytest.approx(0.3, abs=0.15)
    assert result.delivered_concurrency == pytest.approx(4, abs=0.2)
    summary = summarize([result])
    assert (summary.attempted, summary.ok, summary.cut) == (4, 0, 4)
    assert summary.output_tokens_per_s == pytest.approx(summary.output_tokens / result.wall_s)
    assert summary.requests_per_s is None and summary.e2e_s.n == 0
    assert summary.ttft_s.n == 4 and summary.itl_s.p50 == pytest.approx(0.02, abs=0.01)
    assert summary.valid and summary.problem is not None and "no request was complete" in summary.problem


def test_llama_cpp_counts_in_its_own_words() -> None:
    async def script(call: Call) -> None:
        await call.begin()
        for i in range(1000):
            await call.event({
                "choices": [{"index": 0, "text": " a", "finish_reason": None}],
                "timings": {"cache_n": 3, "prompt_n": 13, "predicted_n": 2 * (i + 1)},
            })  # fmt: skip
            await asyncio.sleep(0.02)

    with serving(script) as fake:
        target = Target(fake.url, "fake", usage_each_chunk=True, dialect="llama.cpp")
        result = run(run_load(target, [Request(PROMPT, 2000)], 1, cut_after_s=0.3))
        body = fake.calls[0].body
    assert (body["timings_per_token"], body["ignore_eos"], body["stream_options"]) == (
        True, True, {"include_usage": True},
    )  # fmt: skip
    assert not {"min_tokens", "skip_special_tokens"} & set(body)
    (record,) = result.records
    assert (record.outcome, record.prompt_tokens, record.output_tokens) == ("cut", 16, 2 * record.deltas)


def test_mean_in_flight_is_until_the_last_send() -> None:
    spans = [(0.0, 2.0), (0.0, 1.0), (1.5, 4.0), (2.0, 9.0)]  # two slots; one was idle from 1.0 to 1.5
    assert mean_in_flight(spans, 2, None) == pytest.approx((2.0 + 1.0 + 0.5) / 2.0)
    assert mean_in_flight(spans, 2, 4.0) == pytest.approx((2.0 + 1.0 + 2.5 + 2.0) / 4.0)
    assert mean_in_flight(spans[:2], 2, None) == 2.0  # each slot sent once
    assert mean_in_flight([], 2, None) is None
