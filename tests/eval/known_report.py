"""Reports with a known truth: simulated blocks whose speeds have a stated ratio and noise, through the same pairs,
points and ratios as a real run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from sample_report import HELD_OUT

from qserve.artifacts import Estimate, Fidelity, Machine, Memory, Point, Quality, Report, VariantResult
from qserve.eval import throughput
from qserve.eval.records import LoadRun, RequestRecord
from qserve.eval.throughput import Block, Pair

BF16_TOKENS_PER_S = {1: 30.0, 8: 150.0, 16: 200.0}
PROMPT, OUTPUT = 128, 16


@dataclass(frozen=True)
class Truth:
    """What is true of a variant. `speed`: times bf16's tokens/s. `noise`: log standard deviation of a block's speed
    that the other block of the pair does not share."""

    name: str
    speed: float | Mapping[int, float] = 1.0
    noise: float = 0.02
    kl: tuple[float, float] | None = (0.02, 0.001)  # value, standard error
    disk_mb: float = 160
    ttft: float = 1.0  # times what its speed would give
    faithful: bool | None = True
    status: str = "measured"
    cut: float = 0.0  # share of requests

    def at(self, concurrency: int) -> float:
        return self.speed if isinstance(self.speed, float | int) else self.speed[concurrency]


BF16 = Truth("bf16", noise=0.0, kl=None, disk_mb=270)


def block(truth: Truth, concurrency: int, requests: int, luck: float) -> Block:
    """One block whose speed is the truth's times exp(luck). Latencies scatter a little, for their percentiles."""
    tokens_per_s = BF16_TOKENS_PER_S[concurrency] * truth.at(concurrency) * float(np.exp(luck))
    itl_s = concurrency / tokens_per_s
    cut = round(requests * truth.cut)
    records = tuple(
        RequestRecord(
            index=i, sent_s=0.0, ttft_s=itl_s * 4 * truth.ttft * (1 + i / requests / 10), e2e_s=itl_s * (OUTPUT + 3),
            itl_s=(itl_s,) * (OUTPUT - 1), deltas=OUTPUT, prompt_tokens=PROMPT, output_tokens=OUTPUT,
            outcome="cut" if i < cut else "ok", asked_prompt_tokens=PROMPT, asked_output_tokens=OUTPUT,
        )
        for i in range(requests)
    )  # fmt: skip
    run = LoadRun(concurrency, records, requests * OUTPUT / tokens_per_s, float(concurrency), 0.01, 0.0)
    return Block(run, server_cpu=0.9, gpu=None, prefix_queries=1.0, prefix_hits=0.0, memory_bytes=None)


def pairs(truth: Truth, concurrency: int, count: int, rng: np.random.Generator, requests: int) -> list[Pair]:
    """Drift of the machine (10 %) is shared by both blocks of a pair; the noise is not."""
    made = []
    for _ in range(count):
        drift, own = rng.normal(0, 0.1), rng.normal(0, truth.noise)
        blocks = block(truth, concurrency, requests, drift + own), block(BF16, concurrency, requests, drift)
        made.append(Pair(concurrency, *blocks))
    return made


def known(
    truths: Sequence[Truth], loads: Sequence[int] = (8,), count: int = 4, seed: int = 0, requests: int = 20,
    **changes: object,
) -> Report:  # fmt: skip
    """A report of what a run with `count` pairs would have seen."""
    rng = np.random.default_rng(seed)
    blocks = {t.name: [p for c in loads for p in pairs(t, c, count, rng, requests)] for t in truths}
    base = [p for found in blocks.values() for p in found] or pairs(BF16, loads[0], count, rng, requests)
    points = []
    for c in loads:
        pooled = throughput.pool([p.baseline for p in base if p.concurrency == c])
        points.append(Point(concurrency=c, variant=pooled, baseline=pooled, throughput=None, ttft=None, itl=None))
    report = Report(
        run="20261130-121500-0123456789ab", created="2026-11-30T12:15:00Z", qserve_version="0.1.0",
        recipe_file="known.yaml", model="owner/name", source_note=None, quick=False, wall_s=100.0, data=(HELD_OUT,),
        recipe={"model": "owner/name", "bench": {"prompt_tokens": PROMPT, "output_tokens": OUTPUT, "pairs": count,
                                                 "concurrency": list(loads), "requests_per_slot": 2}},
        machine=Machine(flavour="cpu", cpu="a CPU", cores=2, isa=("avx2",), memory_bytes=24 * 2**30),
        baseline=result(BF16, tuple(points)),
        variants=tuple(result(t, measured(t, blocks[t.name], loads, count)) for t in truths),
    )  # fmt: skip
    return report.model_copy(update=changes)


def measured(truth: Truth, found: Sequence[Pair], loads: Sequence[int], count: int) -> tuple[Point, ...]:
    if truth.status != "measured":
        return ()
    return tuple(throughput.point([p for p in found if p.concurrency == c], count) for c in loads)


def result(truth: Truth, points: tuple[Point, ...]) -> VariantResult:
    gate = Fidelity(faithful=bool(truth.faithful), error=0.02, floor=0.02, limit=0.06, tokens=400,
                    reference_perplexity=6.3, served_perplexity=6.3)  # fmt: skip
    disk = int(truth.disk_mb * 1e6)
    made = VariantResult(
        name=truth.name, label=f"{truth.name} label", status="measured", points=points,
        memory=Memory(disk_bytes=disk, loaded_bytes=disk, kv_capacity_tokens=None, kv_bytes=None,
                      peak_bytes=disk + 1_000_000_000),
        fidelity=gate if truth.faithful is not None else None, quality=quality(truth.kl),
    )  # fmt: skip
    problem = None if truth.status == "measured" else "no kernel for it here"
    return made.model_copy(update={"status": truth.status, "problem": problem})


def quality(kl: tuple[float, float] | None) -> Quality:
    def beside(scale: float, offset: float) -> Estimate | None:
        return Estimate(value=offset + scale * kl[0], se=abs(scale) * kl[1]) if kl else None

    return Quality(
        perplexity=Estimate(value=6.3, se=0.3), perplexity_ratio=beside(0.6, 1), kl=beside(1, 0), top1=beside(-2, 1),
        windows=16, tokens=8000, context_tokens=512, top_k=64, bos="none", data=HELD_OUT,
    )  # fmt: skip


def without_bounds(report: Report) -> Report:
    """As an older qserve wrote it: no bounds of percentiles, no speeds of blocks."""
    text = report.model_dump()
    for v in (text["baseline"], *text["variants"]):
        for side in (s for p in v["points"] for s in (p["variant"], p["baseline"])):
            side.pop("block_tokens_per_s")
            for latency in ("ttft_s", "itl_s", "tpot_s", "e2e_s"):
                side[latency] = {k: value for k, value in side[latency].items() if not k.endswith("_range")}
    return Report.model_validate(text)


def with_variant(report: Report, name: str, **changes: object) -> Report:
    """One variant changed by hand."""
    return report.model_copy(
        update={"variants": tuple(v.model_copy(update=changes) if v.name == name else v for v in report.variants)}
    )


__all__ = ["BF16", "Truth", "block", "known", "pairs", "replace", "with_variant", "without_bounds"]
