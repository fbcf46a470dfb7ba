"""`qserve load` against a scripted server: which requests it sends, and what it says of servers that it cannot use."""

import asyncio

import pytest
from fake_openai import Call, serving

from qserve.errors import LoadError, UsageError
from qserve.eval.http_stream import parse_url
from qserve.eval.load import Request, Target, run, run_load
from qserve.eval.load_command import load_command
from qserve.eval.null_server import null_server


async def good(call: Call) -> None:
    await asyncio.sleep(0.02)  # so that the client's own share of the time is small
    await call.answer()


def test_the_command_finds_the_model_and_asks_for_exact_lengths() -> None:
    with serving(good) as fake:
        report = load_command(fake.url + "/v1/", 2, 8, 16, 4)
        again = load_command(fake.url, 1, 1, 16, 4)
    assert report.model == "fake" and report.token_ids and report.fixed_length
    assert report.summary.ok == 8 and report.summary.valid, report.summary.problem
    bodies = [call.body for call in fake.calls]
    assert len(bodies) == 9 + 2  # a first request each, not counted
    assert all(body["ignore_eos"] and body["min_tokens"] == body["max_tokens"] == 4 for body in bodies)
    assert all(body["temperature"] == 0 and body["stream"] and len(body["prompt"]) == 16 for body in bodies)
    assert len({tuple(body["prompt"]) for body in bodies}) == 11  # never the same prompt, in this run or the next
    assert all(100 <= i < 10_000 for body in bodies for i in body["prompt"])
    assert report.seed != again.seed
    assert type(report).model_validate_json(report.model_dump_json()) == report


def test_a_server_that_refuses_unknown_fields() -> None:
    async def script(call: Call) -> None:
        if "ignore_eos" in call.body:
            await call.json(422, {"detail": "extra field ignore_eos"})
        else:
            await call.answer()

    with serving(script) as fake:
        report = load_command(fake.url, 2, 4, 16, 4)
    assert report.token_ids and not report.fixed_length and report.summary.ok == 4
    assert len(fake.calls) == 2 + 4


def test_a_server_that_takes_text_alone() -> None:
    async def script(call: Call) -> None:
        if not isinstance(call.body["prompt"], str):
            await call.json(400, {"error": {"message": "prompt must be a string"}})
        else:
            await call.begin()
            for _ in range(4):
                await call.text(" a")
            await call.usage(4, prompt_tokens=2 * len(call.body["prompt"].split()))
            await call.end()

    with serving(script) as fake:
        report = load_command(fake.url, 1, 3, 16, 4)
    assert not report.token_ids and not report.chat and report.fixed_length
    assert report.summary.ok == 3 and report.summary.prompt_tokens == 3 * 16  # corrected by the server's own count


def test_a_server_that_chats_only() -> None:
    async def script(call: Call) -> None:
        if call.path != "/v1/chat/completions":
            await call.json(404, {"detail": "Not Found"})
        else:
            await call.answer()

    with serving(script) as fake:
        report = load_command(fake.url, 1, 3, 16, 4)
    assert report.chat and report.summary.ok == 3


def test_a_refused_key_is_one_sentence_without_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(call: Call) -> None:
        await call.json(401, {"error": {"message": f"bad key {call.headers['authorization']}"}})

    monkeypatch.setenv("MY_KEY", "sk-secret-123")
    with serving(script) as fake, pytest.raises(LoadError) as caught:
        load_command(fake.url, 1, 1, 16, 4, api_key_env="MY_KEY")
    assert fake.calls[0].headers["authorization"] == "Bearer sk-secret-123"
    assert "refused the API key" in str(caught.value) and "secret" not in str(caught.value)
    assert "secret" not in repr(Target("http://h", "m", "sk-secret-123")) + repr(parse_url("http://h", "sk-secret-123"))


def test_the_servers_own_words_do_not_leak_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(call: Call) -> None:
        await call.json(500, {"error": {"message": f"header was {call.headers['authorization']}"}})

    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-123")
    with serving(script) as fake, pytest.raises(LoadError, match=r"HTTP 500: header was Bearer \*\*\*"):
        load_command(fake.url, 1, 1, 16, 4)


BAD_URLS = [
    "localhost:8000",
    "ftp://localhost",
    "http://",
    "",
    "http://h:99999",
    "http://u:pw@h",
    "http://u:pw@h:99999",
]


@pytest.mark.parametrize("url", [*BAD_URLS, "http://[::1", "http://a..b"])
def test_urls_that_cannot_work(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_command(url, 1, 1, 16, 4)
    assert "pw" not in str(caught.value)


def test_what_is_not_there_is_said() -> None:
    with serving(good, models={"hello": "world"}) as fake, pytest.raises(LoadError, match="no list of models"):
        load_command(fake.url, 1, 1, 16, 4)
    with serving(good) as fake:
        with pytest.raises(UsageError, match="has no model 'other'; it has fake"):
            load_command(fake.url, 1, 1, 16, 4, model="other")
        with pytest.raises(UsageError, match="context of 4096"):
            load_command(fake.url, 1, 1, 4000, 400)
    with pytest.raises(LoadError, match="connection refused"):
        load_command(fake.url, 1, 1, 16, 4)


def test_the_self_test_gives_the_clients_ceiling() -> None:
    report = load_command(None, 16, 400, 128, 32, self_test=True)
    assert report.model == "null" and report.summary.ok == 400
    assert report.summary.output_tokens == 400 * 32 and report.summary.prompt_tokens == 400 * 128
    assert report.summary.requests_per_s is not None and report.summary.requests_per_s > 100  # thousands when idle


def test_the_null_server_chats_too() -> None:
    with null_server() as url:
        requests = [Request("hello", tokens, chat=True) for tokens in (1, 2, 33)]
        result = run(run_load(Target(url, "null"), requests, 1))
    assert [r.outcome for r in result.records] == ["ok"] * 3
    assert [r.output_tokens for r in result.records] == [1, 2, 33]


def test_more_prompts_than_the_client_holds_are_refused() -> None:
    with pytest.raises(
        UsageError, match=r"100,000 requests with prompts of 100,000 tokens are more than the 200,000,000"
    ):
        load_command("http://127.0.0.1:9", 8, 100_000, 100_000, 64)


def test_fewer_requests_than_slots_are_refused() -> None:
    with pytest.raises(UsageError, match="4 requests cannot keep 8 in flight; ask for at least 8"):
        load_command("http://127.0.0.1:9", 8, 4, 16, 4)
