"""What the tests of the load client share: a load on a scripted server, and what became of its requests."""

from collections import Counter

from fake_openai import Call

from qserve.eval.load import LoadRun, Request, Target, run, run_load

PROMPT = tuple(range(100, 116))


def load(url: str, count: int = 1, concurrency: int = 1, tokens: int = 4, **options: float) -> LoadRun:
    requests = [Request(PROMPT, tokens) for _ in range(count)]
    return run(run_load(Target(url, "fake"), requests, concurrency, **options))


def outcomes(result: LoadRun) -> dict[str, int]:
    return dict(Counter(record.outcome for record in result.records))


async def good(call: Call) -> None:
    await call.answer()
