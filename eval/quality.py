"""Quality of what is served: perplexity, KL divergence and top-1 agreement on held-out windows.

The live server is teacher-forced: each window of token ids is sent as a prompt with `prompt_logprobs`, or token by
token (next_token.py), so what is judged is the kernel and the checkpoint together. Windows are the unit of all standard
errors: the tokens of one window are not independent of each other.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, assert_never

import httpx
import numpy as np
import orjson

from qserve.artifacts import DataRecord, Estimate, Quality
from qserve.errors import ServerError
from qserve.eval import next_token
from qserve.eval.endpoint import Endpoint
from qserve.eval.scored import Scored as Scored
from qserve.eval.scored import Window as Window

PROBE_TOKENS = 16
Scorer = Callable[[Sequence[Window], int], tuple[Scored, ...]]  # windows and top k


def score(endpoint: Endpoint, windows: Sequence[Window], top_k: int, budget_s: float) -> tuple[Scored, ...]:
    """Score each window on the live server; of a server that is too slow for that, the beginnings of the windows alone.

    A token's probability depends on what stands before it and on nothing else, so a beginning scores as it does in the
    whole window. 16 tokens at least are scored of each.

    Raises:
        ServerError: the server cannot score text, or answers with something else.
    """
    with httpx.Client(timeout=1800, trust_env=False) as client:  # our own server: never through a proxy
        scorer = _scorer(client, endpoint)
        length = _affordable(scorer, windows, budget_s)
        return scorer([window[:length] for window in windows], top_k)


def _scorer(client: httpx.Client, endpoint: Endpoint) -> Scorer:
    """How this server scores."""
    match endpoint.scoring:
        case "prompt_logprobs":
            return lambda windows, top_k: tuple(_score_one(client, endpoint, window, top_k) for window in windows)
        case "next_token":
            return lambda windows, top_k: next_token.score(client, endpoint, windows, top_k)
        case None:
            raise ServerError(f"{endpoint.model}: this engine gives no log-probabilities, so its quality is unknown")
    assert_never(endpoint.scoring)


def _affordable(scorer: Scorer, windows: Sequence[Window], budget_s: float) -> int:
    """Tokens of each window that can be scored in the budget, judged by a short prompt (the second: shapes are compiled
    and buffers touched by the first). Overhead counts as if it grew with length, so what this allows fits easily."""
    for _ in range(2):
        started = time.monotonic()
        scorer([windows[0][:PROBE_TOKENS]], 1)
    token_s = (time.monotonic() - started) / PROBE_TOKENS
    return max(int(budget_s / token_s / len(windows)), PROBE_TOKENS)


def _score_one(client: httpx.Client, endpoint: Endpoint, window: Window, top_k: int) -> Scored:
    body = {
        "model": endpoint.model, "prompt": list(window), "max_tokens": 1, "temperature": 0, "prompt_logprobs": top_k,
    }  # fmt: skip
    try:
        response = client.post(f"{endpoint.url}/v1/completions", json=body)
    except httpx.HTTPError as error:
        raise ServerError(f"{endpoint.model} stopped answering while its quality was scored: {error}") from error
    if response.status_code != 200:
        raise ServerError(f"{endpoint.model} cannot score prompts (http {response.status_code}): {response.text[:200]}")
    positions = orjson.loads(response.content)["choices"][0]["prompt_logprobs"][1:]
    if len(positions) != len(window) - 1:
        raise ServerError(f"{endpoint.model} scored {len(positions)} of {len(window) - 1} tokens of a window")
    top = tuple({int(token): float(entry["logprob"]) for token, entry in p.items()} for p in positions)
    own = np.array([at[token] for at, token in zip(top, window[1:], strict=True)])
    return Scored(own, top)


def kl_divergence(p: dict[int, float], q: dict[int, float]) -> float:
    """KL(p || q) in nats over the tokens that both list and one bucket for the rest: a lower bound of the full one.

    Merging outcomes never raises a divergence (data-processing inequality), so the bound is safe.
    """
    common = sorted(p.keys() & q.keys())
    lp, lq = np.array([p[t] for t in common]), np.array([q[t] for t in common])
    inside = float(np.sum(np.exp(lp) * (lp - lq)))
    rest_p, rest_q = (max(1.0 - float(np.exp(x).sum()), 1e-9) for x in (lp, lq))
    return max(inside + rest_p * float(np.log(rest_p / rest_q)), 0.0)


def mean_of_windows(values: Sequence[float]) -> Estimate:
    """Mean and its standard error between windows."""
    se = float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None
    return Estimate(value=float(np.mean(values)), se=se)


def perplexity(windows: Sequence[Sequence[float] | np.ndarray]) -> Estimate:
    """exp of the mean negative log-likelihood of windows of log-probabilities; standard error by the delta method."""
    nll = mean_of_windows([-float(np.mean(window)) for window in windows])
    value = float(np.exp(nll.value))
    return Estimate(value=value, se=None if nll.se is None else value * nll.se)


def compare_quality(variant: Sequence[Scored], baseline: Sequence[Scored] | None, made_of: dict[str, Any]) -> Quality:
    """Quality of a variant, paired window by window with bf16's; without a baseline only the perplexity is known. Of a
    window that one of the two scored in part, that part is paired.

    `made_of`: the fields of Quality that describe the text (context_tokens, top_k, bos, data).
    """
    ratio = kl = top1 = None
    if baseline is not None:
        pairs = [_common(v, b) for v, b in zip(variant, baseline, strict=True)]
        log_ratio = mean_of_windows([float(b.logprobs.mean() - v.logprobs.mean()) for v, b in pairs])
        value = float(np.exp(log_ratio.value))
        ratio = Estimate(value=value, se=None if log_ratio.se is None else value * log_ratio.se)
        kl = mean_of_windows([_window_mean(kl_divergence, b, v) for v, b in pairs])
        top1 = mean_of_windows([_window_mean(_same_top, b, v) for v, b in pairs])
    return Quality(
        perplexity=perplexity([s.logprobs for s in variant]), perplexity_ratio=ratio, kl=kl, top1=top1,
        windows=len(variant), tokens=sum(len(s.logprobs) for s in variant), **made_of,
    )  # fmt: skip


def _common(a: Scored, b: Scored) -> tuple[Scored, Scored]:
    length = min(len(a.logprobs), len(b.logprobs))
    return Scored(a.logprobs[:length], a.top[:length]), Scored(b.logprobs[:length], b.top[:length])


def _window_mean(measure: Any, p: Scored, q: Scored) -> float:
    return float(np.mean([measure(a, b) for a, b in zip(p.top, q.top, strict=True)]))


def _same_top(p: dict[int, float], q: dict[int, float]) -> float:
    return float(max(p, key=p.__getitem__) == max(q, key=q.__getitem__))


def describe_text(data: DataRecord, tokens: int, top_k: int, bos: int | None) -> dict[str, Any]:
    """The part of Quality that says what was read."""
    first = f"token {bos} stands first" if bos is not None else "none: this tokenizer adds none"
    return {"context_tokens": tokens, "top_k": top_k, "bos": first, "data": data}
