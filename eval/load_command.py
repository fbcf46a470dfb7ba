"""`qserve load URL`: put a load on any OpenAI server and say what it did. Needs no recipe and no checkpoint.

Prompts are token ids drawn anew for each run, so that no prefix cache can have seen them, and answers have a fixed
length. A first request, not counted, finds out which of these wishes the server knows, and warms it up.
"""

import itertools
import json
import os
import secrets
from dataclasses import dataclass, replace

import numpy as np

from qserve.artifacts import Artifact, LoadSummary
from qserve.errors import LoadError, UsageError
from qserve.eval.answer import Answer
from qserve.eval.http_response import HttpError
from qserve.eval.http_stream import Address, fetch, parse_url, reason_of
from qserve.eval.load import run, run_load
from qserve.eval.null_server import null_server
from qserve.eval.records import Request, Target
from qserve.eval.slot import request_bytes
from qserve.eval.summary import summarize
from qserve.limits import DRAWN_TOKENS

ID_RANGE = (100, 10_000)  # past the special tokens, and inside every vocabulary in use
ANSWER_TIMEOUT_S = 600.0
WORDS = ("tree", "blue", "seven", "river", "light", "stone", "paper", "green", "house", "early", "music", "north")


class LoadReport(Artifact):
    """One run of `qserve load`."""

    url: str
    model: str
    seed: int  # of the prompts, drawn from the operating system
    prompt_tokens: int  # asked for, of each request
    output_tokens: int
    token_ids: bool  # False: the server takes text alone, so the prompts' length is only about what was asked for
    chat: bool  # the server has no /v1/completions
    fixed_length: bool  # False: the server does not know `ignore_eos`, so answers end where the model ends them
    loop_lag_s: float  # the most by which the client's event loop came late
    summary: LoadSummary


def load_text(report: LoadReport) -> str:
    """The result in a few lines, for a terminal."""
    done, unknown = report.summary, "unknown"
    failed = ", ".join(f"{count} {reason}" for reason, count in done.failed.items()) or "none"

    def ms(value: float | None) -> str:
        return f"{1000 * value:.1f} ms" if value is not None else unknown

    def number(value: float | None) -> str:
        return f"{value:,.1f}" if value is not None else unknown

    lines = [f"{report.model} at {report.url}"]
    lines.append(f"requests      {done.ok} of {done.attempted} ok; failed: {failed}")
    lines.append(f"concurrency   {number(done.delivered_concurrency)} delivered of {done.concurrency} asked for")
    lines.append(
        f"throughput    {number(done.output_tokens_per_s)} output tokens/s, {number(done.requests_per_s)} requests/s"
    )
    for name, item in (("TTFT", done.ttft_s), ("ITL", done.itl_s), ("end to end", done.e2e_s)):
        lines.append(f"{name:13} p50 {ms(item.p50)}, p95 {ms(item.p95)}, p99 {ms(item.p99)}")
    lines.append(f"client        {number(done.client_cpu)} cores, loop late by at most {ms(report.loop_lag_s)}")
    return "\n".join([*lines, *([f"problem       {done.problem}"] if done.problem else [])])


@dataclass(frozen=True)
class Shape:
    """The requests of a run."""

    count: int
    prompt_tokens: int
    output_tokens: int


def load_command(
    url: str | None,
    concurrency: int,
    requests: int,
    prompt_tokens: int,
    output_tokens: int,
    model: str | None = None,
    api_key_env: str = "OPENAI_API_KEY",
    self_test: bool = False,
) -> LoadReport:
    """Load the server at `url`; with `self_test` the built-in null server, which gives this client's own ceiling.

    Raises:
        UsageError: a URL, model or length that cannot work.
        LoadError: no server there, a key refused, or no OpenAI API.
    """
    if min(concurrency, requests, prompt_tokens, output_tokens) < 1:
        raise UsageError("concurrency, requests, prompt tokens and output tokens are all at least 1")
    if requests < concurrency:
        raise UsageError(
            f"{requests} requests cannot keep {concurrency} in flight; ask for at least {concurrency} requests"
        )
    if requests * prompt_tokens > DRAWN_TOKENS:
        raise UsageError(
            f"{requests:,} requests with prompts of {prompt_tokens:,} tokens are more than the {DRAWN_TOKENS:,} tokens "
            "that this client holds; ask for fewer requests or shorter prompts"
        )
    shape = Shape(requests, prompt_tokens, output_tokens)
    if self_test:
        with null_server() as own_url:
            return run(_load(Target(own_url, ""), concurrency, shape))
    if url is None:
        raise UsageError("give the URL of a server, or --self-test for the built-in null server")
    return run(_load(Target(url, model or "", os.environ.get(api_key_env)), concurrency, shape))


async def _load(target: Target, concurrency: int, shape: Shape) -> LoadReport:
    address = parse_url(target.url, target.api_key)
    target = replace(target, model=await find_model(address, target, shape))
    seed = secrets.randbits(63)
    probe, *work = fresh_requests(seed, shape)
    target, probe, counted = await choose_body(address, target, probe)
    if isinstance(probe.prompt, str):
        words = max(1, round(shape.prompt_tokens**2 / (counted or shape.prompt_tokens)))
        work = [as_text(request, words, probe.chat) for request in work]
    result = await run_load(target, work, concurrency)
    return LoadReport(
        url=target.url,
        model=target.model,
        seed=seed,
        prompt_tokens=shape.prompt_tokens,
        output_tokens=shape.output_tokens,
        token_ids=not isinstance(probe.prompt, str),
        chat=probe.chat,
        fixed_length=target.fixed_length,
        loop_lag_s=result.loop_lag_s,
        summary=summarize([result]),
    )


# --- prompts ----------
def fresh_requests(seed: int, shape: Shape) -> list[Request]:
    """One request more than the run sends: the first is the probe."""
    rng = np.random.default_rng(seed)
    known = np.arange(ID_RANGE[1]).astype(object)  # one int object an id, however many prompts use it
    draws = (known[rng.integers(*ID_RANGE, shape.prompt_tokens)] for _ in range(shape.count + 1))
    return [Request(tuple(draw.tolist()), shape.output_tokens) for draw in draws]


def as_text(request: Request, words: int, chat: bool) -> Request:
    """The same random choice as `words` English words, instead of token ids."""
    assert not isinstance(request.prompt, str)
    ids = itertools.islice(itertools.cycle(request.prompt), words)
    return replace(request, prompt=" ".join(WORDS[i % len(WORDS)] for i in ids), chat=chat)


# --- the server ----------
async def find_model(address: Address, target: Target, shape: Shape) -> str:
    """The model asked for, else the first one of /v1/models.

    Raises:
        UsageError: the server does not have that model, or its context is too short for these requests.
        LoadError: no OpenAI API there.
    """
    status, body = await ask(address, target, address.request("GET", "/v1/models"))
    try:
        context_of = {str(entry["id"]): entry.get("max_model_len") for entry in json.loads(body)["data"]}
    except (ValueError, KeyError, TypeError, AttributeError):
        context_of = {}
    if status != 200 or not context_of:
        if target.model:
            return target.model  # a server may do without the list
        raise LoadError(
            f"{target.url}: no list of models at /v1/models (HTTP {status}), so it looks like no OpenAI API; "
            "check the URL, or name a model with --model"
        )
    model = target.model or next(iter(context_of))
    if model not in context_of:
        raise UsageError(f"{target.url} has no model {model!r}; it has {', '.join(context_of)}")
    context, wanted = context_of[model], shape.prompt_tokens + shape.output_tokens
    if isinstance(context, int) and wanted > context:
        raise UsageError(
            f"{model} is served with a context of {context} tokens: {shape.prompt_tokens} + {shape.output_tokens} "
            "do not fit; ask for fewer prompt or output tokens"
        )
    return model


async def choose_body(address: Address, target: Target, probe: Request) -> tuple[Target, Request, int | None]:
    """Send one request, not counted, in the first spelling that the server takes: token ids or text, with and without
    the fields that fix the length, completion or chat. Returns target and request in that spelling, and the prompt
    tokens that the server counted.

    Raises:
        LoadError: the server takes none of them, or its answer is no stream of text.
    """
    text, chat = (as_text(probe, len(probe.prompt), chat) for chat in (False, True))
    refusal = ""
    for request, fixed_length in itertools.product((probe, text, chat), (True, False)):
        attempt = replace(target, fixed_length=fixed_length)
        status, body = await ask(address, target, request_bytes(attempt, address, request), ANSWER_TIMEOUT_S)
        if status == 200:
            answer = Answer()
            answer.feed(body, 0.0)
            if wrong := answer.end(0.0):
                raise LoadError(f"{target.url}: the answer to a first request is not usable ({wrong}); see its log")
            return attempt, request, answer.prompt_tokens
        refusal = refusal or f"HTTP {status}: {_message(body, target)}"
        if status not in (400, 404, 405, 422):
            break
    raise LoadError(f"{target.url}: a first request was refused ({refusal}); check the model and the lengths")


async def ask(address: Address, target: Target, request: bytes, timeout_s: float = 30) -> tuple[int, bytes]:
    """Status and body of one answer. Raises LoadError if there is none, or if the server refused the key."""
    try:
        status, body = await fetch(address, request, timeout_s)
    except OSError as error:
        raise LoadError(f"{target.url}: {reason_of(error)}; is the server running, and is the URL right?") from error
    except HttpError as error:
        raise LoadError(f"{target.url}: {error}; is this the URL of an OpenAI API?") from error
    if status in (401, 403):
        what = "refused the API key" if target.api_key else "wants an API key"
        raise LoadError(
            f"{target.url}: the server {what} (HTTP {status}); put the right one into $OPENAI_API_KEY, "
            "or name another variable with --api-key-env"
        )
    return status, body


def _message(body: bytes, target: Target) -> str:
    """The server's own words on one line, short, and without the key."""
    try:
        parsed = json.loads(body)
        error = parsed.get("error") or parsed
        text = str(error.get("message") or error.get("detail") or error)
    except (ValueError, AttributeError):
        text = body.decode("utf-8", "replace")
    text = " ".join(text.split())
    return (text.replace(target.api_key, "***") if target.api_key else text)[:300]
