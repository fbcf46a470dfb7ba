"""Throughput and latency of a variant beside bf16: alternating blocks, fresh prompts, bounded time.

One level of concurrency:
    warm up both          one short block each, not counted
    pair 1                bf16, variant
    pair 2                variant, bf16      (the order alternates, so that drift does not favour one)
    ...                   until the recipe's pairs are done or the time is spent; two pairs at least, or there is no
                          interval
A block is `concurrency x requests_per_slot` requests in a closed loop, cut after `block_s`. No prompt is ever sent to a
server twice, so the prefix cache cannot help; the server's own hit counters are shown to prove it.
"""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from qserve.artifacts import Counters, LoadSummary, Point
from qserve.eval.compare import ratio
from qserve.eval.endpoint import Endpoint
from qserve.eval.load import LoadRun, Request, Target, run, run_load
from qserve.eval.summary import summarize
from qserve.eval.utilisation import gpu_utilisation
from qserve.recipe import Bench

LEAST_PAIRS = 2
REST_CORES = 0.4  # an idle vLLM takes 0.14 of a core
REST_LOOK_S, REST_PATIENCE_S = 0.25, 5.0


@dataclass(frozen=True)
class Block:
    """One block on one server, with what the server itself counted meanwhile."""

    run: LoadRun
    server_cpu: float | None  # share of the machine's cores, 0..1
    gpu: float | None  # mean utilisation, 0..1
    prefix_queries: float | None  # tokens looked up in the prefix cache
    prefix_hits: float | None  # tokens found there
    memory_bytes: int | None


@dataclass(frozen=True)
class Pair:
    """The same prompts on both servers."""

    concurrency: int
    variant: Block
    baseline: Block


class Prompts:
    """An endless supply of prompts that were never sent before: slices of one long stream of token ids.

    A second round through the stream starts at another offset, so that no two prompts share their first cache block.
    """

    def __init__(self, stream: np.ndarray, bos: int | None) -> None:
        self._stream, self._first = stream, () if bos is None else (bos,)
        self._at = self._round = 0

    def take(self, count: int, tokens: int) -> tuple[tuple[int, ...], ...]:
        """`count` prompts of exactly `tokens` ids each."""
        return tuple(self._next(tokens) for _ in range(count))

    def _next(self, tokens: int) -> tuple[int, ...]:
        size = tokens - len(self._first)
        if self._at + size > len(self._stream):
            self._round += 1
            self._at = 7 * self._round  # a prime step: earlier starts are not met again
        ids = self._stream[self._at : self._at + size]
        self._at += size
        return (*self._first, *(int(i) for i in ids))


def measure_level(concurrency: int, arms: tuple[Endpoint, Endpoint], plan: "Plan") -> Iterator[Pair]:
    """Pairs at one concurrency, each given as soon as it is done. `arms`: (variant, bf16), both up.

    None at all where one of them is too slow to give a first token in the time of a block.
    """
    variant, baseline = arms
    for arm in arms:
        if not plan.warm_up(arm, concurrency):
            return
    for i in range(plan.bench.pairs):
        started = time.monotonic()
        requests = plan.requests(concurrency)
        order = (baseline, variant) if i % 2 == 0 else (variant, baseline)
        blocks = {id(arm): plan.block(arm, requests, concurrency) for arm in order}
        yield Pair(concurrency, blocks[id(variant)], blocks[id(baseline)])
        now = time.monotonic()
        if i + 1 >= LEAST_PAIRS and now + (now - started) > plan.deadline:
            return


@dataclass(frozen=True)
class Plan:
    """What all blocks of a level share. `deadline`: on the monotonic clock; no third pair would pass it."""

    bench: Bench
    prompts: Prompts
    deadline: float

    def requests(self, concurrency: int) -> tuple[Request, ...]:
        """Fresh requests for one block."""
        count = concurrency * self.bench.requests_per_slot
        slices = self.prompts.take(count, self.bench.prompt_tokens)
        return tuple(Request(prompt=ids, max_tokens=self.bench.output_tokens) for ids in slices)

    def warm_up(self, arm: Endpoint, concurrency: int) -> bool:
        """A short block that counts for nothing: shapes are compiled, buffers are touched. Whether any token came."""
        short = [replace(r, max_tokens=min(8, r.max_tokens)) for r in self.requests(concurrency)[:concurrency]]
        done = self.block(arm, short, concurrency).run.records
        return any(r.deltas or r.outcome not in ("ok", "cut") for r in done)  # what fails is measured, and counted

    def block(
        self, arm: Endpoint, requests: Sequence[Request], concurrency: int, target: Target | None = None
    ) -> Block:
        """Run one block, then wait until the server is idle again (cut requests are aborted there) and at rest, so that
        it takes no time from the next block, which is the other server's. `target`: how to ask a server that is not one
        of ours."""
        before, cpu = arm.counters(), arm.cpu_s()
        target = target or Target(url=arm.url, model=arm.model, usage_each_chunk=True, dialect=arm.dialect)
        with gpu_utilisation() as gpu:
            done = run(run_load(target, requests, concurrency, cut_after_s=self.bench.block_s))
        spent = _grown(cpu, arm.cpu_s())
        after = _when_idle(arm)
        _until_at_rest(arm)
        return Block(
            run=done,
            server_cpu=spent / done.wall_s / (os.cpu_count() or 1) if spent is not None and done.wall_s else None,
            gpu=gpu.mean(),
            prefix_queries=_grown(before.prefix_queries, after.prefix_queries),
            prefix_hits=_grown(before.prefix_hits, after.prefix_hits),
            memory_bytes=arm.memory_bytes(),
        )


def _when_idle(arm: Endpoint, patience_s: float = 60) -> Counters:
    """Counters of the server once nothing runs or waits there."""
    deadline = time.monotonic() + patience_s
    while True:
        now = arm.counters()
        if not (now.running or now.waiting) or time.monotonic() > deadline:
            return now
        time.sleep(0.2)


def _until_at_rest(arm: Endpoint) -> None:
    """vLLM's worker looks for work in a tight loop for a second after its last request (busy_loop_s in vLLM's
    shm_broadcast.py): on two cores, llama-server took 1.07 s instead of 0.10 s for a prompt that came in that second.
    """
    deadline = time.monotonic() + REST_PATIENCE_S
    while time.monotonic() < deadline:
        before = arm.cpu_s()
        time.sleep(REST_LOOK_S)
        spent = _grown(before, arm.cpu_s())
        if spent is None or spent < REST_CORES * REST_LOOK_S:
            return


def _grown(before: float | None, after: float | None) -> float | None:
    return None if after is None else after - (before or 0.0)


# --- from pairs to points ----------
def point(pairs: Sequence[Pair], planned: int) -> Point:
    """Pool the pairs of one concurrency and compare them, pair by pair."""
    note = None
    if len(pairs) < planned:
        note = f"{len(pairs)} of {planned} pairs: the variant's time was spent"
    each = [(summarize([p.variant.run]), summarize([p.baseline.run])) for p in pairs]
    return Point(
        concurrency=pairs[0].concurrency,
        variant=pool([p.variant for p in pairs]),
        baseline=pool([p.baseline for p in pairs]),
        throughput=ratio([(v.output_tokens_per_s, b.output_tokens_per_s) for v, b in each], higher_is_faster=True),
        ttft=ratio([(v.ttft_s.mean, b.ttft_s.mean) for v, b in each], higher_is_faster=False),
        itl=ratio([(v.itl_s.mean, b.itl_s.mean) for v, b in each], higher_is_faster=False),
        note=note,
    )


def pool(blocks: Sequence[Block]) -> LoadSummary:
    """One summary of several blocks, with the server's own counts."""
    queries = [b.prefix_queries for b in blocks if b.prefix_queries is not None]
    hits = [b.prefix_hits for b in blocks if b.prefix_hits is not None]
    hit_rate = sum(hits) / sum(queries) if queries and sum(queries) else None
    summary = summarize([b.run for b in blocks])
    update: dict[str, object] = {
        "server_cpu": _mean([b.server_cpu for b in blocks]),
        "gpu": _mean([b.gpu for b in blocks]),
        "prefix_cache_hit_rate": hit_rate,
    }
    if hit_rate is not None and hit_rate > 0.05 and summary.valid:
        update |= {"valid": False, "problem": f"{hit_rate:.0%} of the prompt tokens came from the prefix cache"}
    return summary.model_copy(update=update)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None
