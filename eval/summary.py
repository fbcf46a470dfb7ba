"""From raw request records to one LoadSummary. Definitions stand in `LoadSummary`; what cannot be known is None."""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from qserve.artifacts import LoadSummary, Quantiles
from qserve.eval.records import LoadRun, RequestRecord

P95_NEEDS, P99_NEEDS = 20, 100  # values: with fewer, the percentile is one of the extremes by another name
FAILED_LIMIT = 0.05  # share of requests
LENGTH_LIMIT = 0.01  # share of tokens
DELIVERED_LIMIT = 0.9  # share of the concurrency asked for


def quantiles(values_s: Iterable[float]) -> Quantiles:
    """Mean and percentiles (linear between order statistics), as far as the sample carries them."""
    sample = np.fromiter(values_s, dtype=float)
    n = len(sample)
    if n == 0:
        return Quantiles(n=0, mean=None, p50=None, p95=None, p99=None)
    ordered = np.sort(sample)
    p50, p95, p99 = (float(value) for value in np.quantile(sample, (0.5, 0.95, 0.99)))
    return Quantiles(
        n=n,
        mean=float(sample.mean()),
        p50=p50,
        p95=p95 if n >= P95_NEEDS else None,
        p99=p99 if n >= P99_NEEDS else None,
        p50_range=bounds(ordered, 0.5),
        p95_range=bounds(ordered, 0.95) if n >= P95_NEEDS else (None, None),
        p99_range=bounds(ordered, 0.99) if n >= P99_NEEDS else (None, None),
    )


def bounds(ordered: np.ndarray, q: float, miss: float = 0.05) -> tuple[float | None, float | None]:
    """One-sided bounds of the q quantile: each is on the wrong side of it with a chance of at most `miss`.

    The number of values below the true quantile is binomial(n, q), whatever the distribution is.
    """
    n = len(ordered)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])
    k = np.arange(n + 1)
    log_mass = log_factorial[n] - log_factorial[k] - log_factorial[n - k] + k * np.log(q) + (n - k) * np.log1p(-q)
    at_most = np.cumsum(np.exp(log_mass))  # P(at most k values lie below the quantile)
    low = int(np.searchsorted(at_most, miss, side="right"))  # ranks up to this one are above it with less than `miss`
    high = int(np.searchsorted(at_most, 1 - miss)) + 1  # P(at least `high` lie below) <= miss
    return float(ordered[low - 1]) if low >= 1 else None, float(ordered[high - 1]) if high <= n else None


def summarize(runs: Sequence[LoadRun]) -> LoadSummary:
    """Pool blocks of one concurrency: records together, times added up.

    Raises:
        ValueError: no run, or runs of different concurrency.
    """
    (concurrency,) = {run.concurrency for run in runs}
    records = [record for run in runs for record in run.records]
    ok = [record for record in records if record.outcome == "ok"]
    served = [record for record in records if record.outcome in ("ok", "cut")]
    failed = Counter(record.outcome for record in records if record.outcome not in ("ok", "cut"))
    wall_s = sum(run.wall_s for run in runs)
    tokens = sum(token_count(record) for record in served)
    prompts = [record.prompt_tokens for record in served if record.prompt_tokens is not None]
    fatal = fatal_problem(records, concurrency, delivered := delivered_concurrency(runs))
    return LoadSummary(
        concurrency=concurrency,
        delivered_concurrency=delivered,
        attempted=len(records),
        ok=len(ok),
        cut=len(served) - len(ok),
        failed=dict(failed.most_common()),
        wall_s=wall_s,
        prompt_tokens=sum(prompts) if prompts else None,
        output_tokens=tokens,
        counted_by="deltas" if any(record.output_tokens is None and record.deltas for record in served) else "usage",
        output_tokens_per_s=tokens / wall_s if tokens and wall_s else None,
        requests_per_s=len(ok) / wall_s if ok and wall_s else None,
        block_tokens_per_s=tuple(speed for run in runs if (speed := _tokens_per_s(run))),
        ttft_s=quantiles(record.ttft_s for record in served if record.ttft_s is not None),
        itl_s=quantiles(gap for record in served for gap in record.itl_s),
        tpot_s=quantiles(tpot for record in ok if (tpot := tpot_s(record)) is not None),
        e2e_s=quantiles(record.e2e_s for record in ok if record.e2e_s is not None),
        client_cpu=sum(run.client_cpu_s for run in runs) / wall_s if wall_s else None,
        valid=fatal is None,
        problem=fatal or remark(records),
    )


def token_count(record: RequestRecord) -> int:
    """Output tokens by the server's usage count; text deltas where it sent none."""
    return record.deltas if record.output_tokens is None else record.output_tokens


def _tokens_per_s(run: LoadRun) -> float | None:
    tokens = sum(token_count(record) for record in run.records if record.outcome in ("ok", "cut"))
    return tokens / run.wall_s if run.wall_s else None


def tpot_s(record: RequestRecord) -> float | None:
    """Mean time of a token after the first one."""
    tokens = token_count(record)
    if record.ttft_s is None or record.e2e_s is None or tokens < 2:
        return None
    return (record.e2e_s - record.ttft_s) / (tokens - 1)


def delivered_concurrency(runs: Sequence[LoadRun]) -> float | None:
    """Mean over the blocks, weighted by their time."""
    known = [(run.delivered_concurrency, run.wall_s) for run in runs if run.delivered_concurrency is not None]
    weight_s = sum(wall_s for _, wall_s in known)
    return sum(value * wall_s for value, wall_s in known) / weight_s if weight_s else None


def fatal_problem(records: Sequence[RequestRecord], concurrency: int, delivered: float | None) -> str | None:
    """Why the figures of this load must not be used, or None."""
    failed = Counter(record.outcome for record in records if record.outcome not in ("ok", "cut"))
    if not any(record.outcome == "ok" or (record.outcome == "cut" and token_count(record)) for record in records):
        return f"not one of {len(records)} requests was answered ({_counts(failed) or 'all were cut'})"
    if failed.total() > FAILED_LIMIT * len(records):
        return f"{failed.total()} of {len(records)} requests failed ({_counts(failed)})"
    if wrong := wrong_length(records):
        return wrong
    if delivered is not None and delivered < DELIVERED_LIMIT * concurrency:
        return f"only {delivered:.1f} of {concurrency} requests were in flight on average: the load was not delivered"
    return None


def wrong_length(records: Sequence[RequestRecord]) -> str | None:
    """Whether the server's counts are the ones that were asked for, over completed requests."""
    ok = [record for record in records if record.outcome == "ok"]
    prompt = [(r.prompt_tokens, r.asked_prompt_tokens) for r in ok]
    output = [(r.output_tokens, r.asked_output_tokens) for r in ok]
    for name, pairs in (("output", output), ("prompt", prompt)):
        known = [(got, asked) for got, asked in pairs if got is not None and asked is not None]
        off, asked_sum = sum(abs(got - asked) for got, asked in known), sum(asked for _, asked in known)
        if off > LENGTH_LIMIT * asked_sum:
            mean_got, mean_asked = (sum(column) / len(known) for column in zip(*known, strict=True))
            return f"the server counted {mean_got:.1f} {name} tokens a request where {mean_asked:.1f} were asked for"
    return None


def remark(records: Sequence[RequestRecord]) -> str | None:
    """What a reader of valid figures should know."""
    waiting = sum(record.outcome == "cut" and record.ttft_s is None for record in records)
    if waiting:
        return f"{waiting} cut requests had no first token yet: time to first token is of the others, and too low"
    if not any(record.outcome == "ok" for record in records):
        return "no request was complete when the time ended: throughput counts parts of answers"
    return None


def _counts(failed: Counter[str]) -> str:
    return ", ".join(f"{count} x {reason}" for reason, count in failed.most_common())
