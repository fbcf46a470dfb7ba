"""From records to a summary: exact figures on known data, and what makes a load invalid."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from qserve.eval.records import LabelledRecord, LoadRun, RequestRecord, write_requests
from qserve.eval.summary import quantiles, summarize


def record(index: int = 0, **changes: object) -> RequestRecord:
    base = RequestRecord(
        index=index, sent_s=0.0, ttft_s=0.1, e2e_s=0.4, itl_s=(0.1, 0.1, 0.1), deltas=4, prompt_tokens=16,
        output_tokens=4, outcome="ok", asked_prompt_tokens=16, asked_output_tokens=4,
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def made(records: list[RequestRecord], wall_s: float = 2.0, delivered: float | None = 4.0) -> LoadRun:
    return LoadRun(4, tuple(records), wall_s, delivered, client_cpu_s=0.5, loop_lag_s=0.0)


def test_quantiles_are_exact() -> None:
    known = quantiles(float(i) for i in range(1, 102))
    assert (known.n, known.mean, known.p50, known.p95, known.p99) == (101, 51.0, 51.0, 96.0, 100.0)
    sample = np.random.default_rng(0).exponential(size=500)
    assert quantiles(sample).p95 == float(np.quantile(sample, 0.95))


@pytest.mark.parametrize(("n", "known"), [(0, ""), (1, "p50"), (19, "p50"), (20, "p50 p95"), (100, "p50 p95 p99")])
def test_percentiles_only_where_the_sample_carries_them(n: int, known: str) -> None:
    found = quantiles([1.0] * n)
    assert [name for name in ("p50", "p95", "p99") if getattr(found, name) is not None] == known.split()


def test_blocks_are_pooled() -> None:
    first = made([record(i, ttft_s=0.1) for i in range(10)], wall_s=1.0, delivered=4.0)
    second = made([record(i, ttft_s=0.3, outcome="ok" if i else "cut") for i in range(10)], wall_s=3.0, delivered=3.8)
    summary = summarize([first, second])
    assert (summary.attempted, summary.ok, summary.cut, summary.failed) == (20, 19, 1, {})
    assert summary.output_tokens == 80 and summary.output_tokens_per_s == 80 / 4
    assert summary.requests_per_s == 19 / 4 and summary.client_cpu == 1.0 / 4
    assert summary.delivered_concurrency == pytest.approx((4.0 * 1 + 3.8 * 3) / 4)
    assert summary.ttft_s.mean == pytest.approx((10 * 0.1 + 10 * 0.3) / 20)  # a cut request had its first token, too
    assert summary.tpot_s.n == summary.e2e_s.n == 19 and summary.itl_s.n == 60
    assert summary.valid and summary.problem is None
    with pytest.raises(ValueError):
        summarize([first, replace(second, concurrency=8)])


def test_tpot_is_by_tokens_not_by_deltas() -> None:
    summary = summarize([made([record(ttft_s=0.1, e2e_s=1.0, output_tokens=10, asked_output_tokens=10, deltas=3)])])
    assert summary.tpot_s.mean == pytest.approx(0.1)


def test_without_usage_the_deltas_count() -> None:
    summary = summarize([made([record(output_tokens=None, prompt_tokens=None)])])
    assert (summary.output_tokens, summary.counted_by, summary.prompt_tokens) == (4, "deltas", None)


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (made([record(i, outcome="timeout" if i < 6 else "ok") for i in range(100)]), "6 of 100 requests failed"),
        (made([record(output_tokens=3)]), "counted 3.0 output tokens a request where 4.0"),
        (made([record(prompt_tokens=17)]), "counted 17.0 prompt tokens a request where 16.0"),
        (made([record()], delivered=3.5), "only 3.5 of 4"),
        (made([]), "not one of 0"),
    ],
)
def test_a_load_that_cannot_be_trusted_is_invalid(run: LoadRun, problem: str) -> None:
    summary = summarize([run])
    assert not summary.valid and summary.problem is not None and problem in summary.problem


def test_a_few_failures_are_counted_and_tolerated() -> None:
    summary = summarize([made([record(i, outcome="http 500" if i < 5 else "ok") for i in range(100)])])
    assert summary.valid and summary.failed == {"http 500": 5} and summary.ok == 95


def test_raw_records_survive_parquet(tmp_path: Path) -> None:
    records = [record(0), record(1, ttft_s=None, e2e_s=None, itl_s=(), output_tokens=None, outcome="timeout")]
    path = tmp_path / "requests.parquet"
    write_requests(path, [LabelledRecord("awq", "baseline", 4, 2, r) for r in records])
    table = pq.read_table(path)
    rows = table.to_pylist()
    assert [RequestRecord(**{k: tuple(v) if k == "itl_s" else v for k, v in row.items() if k in vars(records[0])})
            for row in rows] == records  # fmt: skip
    assert {(r["variant"], r["arm"], r["concurrency"], r["block"]) for r in rows} == {("awq", "baseline", 4, 2)}
    assert all(field.metadata[b"definition"] for field in table.schema)


def test_a_request_cut_before_its_first_token_is_told() -> None:
    summary = summarize([made([record(), record(1, outcome="cut", ttft_s=None)])])
    assert summary.valid
    assert summary.problem == "1 cut requests had no first token yet: time to first token is of the others, and too low"
