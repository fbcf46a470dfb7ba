"""Does one format hold what is demanded? A demand holds, fails, or is unknown: not measured, or too close to its limit
for the noise. Unknown is never taken for a yes."""

import math
from collections.abc import Iterator

from qserve.artifacts import Estimate, LoadSummary, Point, Quality, Quantiles, VariantResult
from qserve.decision import Check, State
from qserve.eval import figures
from qserve.eval.compare import t_95
from qserve.eval.student import samples_needed
from qserve.eval.tasks import interval, needed
from qserve.variants import BASELINE
from qserve.wishes import Floor, Wishes

MISSING_LIMIT = 0.01  # share of requests without the latency in question, up to which they are passed over
BOUND_NEEDS = {"p50": 5, "p95": 59, "p99": 299}  # values that a one-sided 95 % bound above the percentile needs
WINDOWS_FIRST = 4  # asked for where the noise is not known at all
ITEMS_FIRST = 50  # the same of a task


def of_format(variant: VariantResult, wishes: Wishes) -> tuple[Check, ...]:
    """The demands that do not depend on the load; only the first where it is not served as its checkpoint says."""
    served = _served(variant)
    if served.state == "fails":
        return (served,)
    tasks = (task_check(name, variant.quality, limit) for name, limit in wishes.floor.tasks.items())
    return served, *_floor(variant, wishes.floor), *tasks, *_memory(variant, wishes.memory_gb)


def _served(variant: VariantResult) -> Check:
    problem = f": {variant.problem}" if variant.problem else ""
    if variant.status != "measured":
        return Check(demand="served faithfully", state="fails", says=f"it is {variant.status}{problem}")
    if variant.fidelity is None:
        return Check(demand="served faithfully", state="unknown", says="its fidelity was not checked")
    if not variant.fidelity.faithful:
        return Check(demand="served faithfully", state="fails", says=f"it is not served faithfully{problem}")
    return Check(demand="served faithfully", state="holds", says="what is served is what the checkpoint says")


# --- quality ----------
def _floor(variant: VariantResult, floor: Floor) -> Iterator[Check]:
    limits = (("kl", floor.kl, True), ("top1", floor.top1, False), ("perplexity_ratio", floor.perplexity_ratio, True))
    for name, limit, at_most in limits:
        if limit is None:
            continue
        if variant.name == BASELINE:
            yield Check(demand=name, state="holds", says=f"{WORDS[name]} is its own")
        else:
            yield quality_check(name, variant.quality, limit, at_most)


WORDS = {"kl": "the KL to bf16", "top1": "the share of tokens ranked first as by bf16",
         "perplexity_ratio": "the perplexity over bf16's"}  # fmt: skip


def estimate_of(quality: Quality | None, name: str) -> Estimate | None:
    if quality is None:
        return None
    return {"kl": quality.kl, "top1": quality.top1, "perplexity_ratio": quality.perplexity_ratio}[name]


def quality_check(name: str, quality: Quality | None, limit: float, at_most: bool) -> Check:
    """The 95 % interval of the estimate against the limit: all of it on the good side, or all on the bad one."""
    item = estimate_of(quality, name)
    if quality is None or item is None:
        return Check(demand=name, state="unknown", says=f"{WORDS[name]} was not measured")
    word = "at most" if at_most else "at least"
    said = f"{WORDS[name]} is {figures.estimate(item)}, {word} {figures.number(limit)} is asked for"
    half = figures.margin(item.se, quality.windows)
    if half is None:
        return Check(demand=name, state="unknown", says=f"{said}; its noise is not known", more_windows=WINDOWS_FIRST)
    room = (limit - item.value) * (1 if at_most else -1)
    if room >= half or (half == 0 and room == 0):
        return Check(demand=name, state="holds", says=said)
    if room < -half:
        return Check(demand=name, state="fails", says=said)
    assert item.se is not None
    deviation = item.se * math.sqrt(quality.windows)
    needed = max(samples_needed(deviation, abs(room), 0.95), quality.windows + 1)
    return Check(demand=name, state="unknown", says=f"{said}: within noise", more_windows=needed)


def task_check(name: str, quality: Quality | None, limit: float) -> Check:
    """The 95 % interval of the score against the limit; bf16's as well, since the floor is one on the score itself."""
    demand = f"task:{name}"
    task = quality.tasks.get(name) if quality else None
    within = interval(task) if task else None
    if task is None or task.score is None:
        why = f": {task.note}" if task and task.note else ""
        said = f"its score on {name} was not measured{why}"
        return Check(demand=demand, state="unknown", says=said, final=task is not None)  # asked, and in vain
    asked = f"at least {figures.number(limit)} is asked for"
    if within is None:
        says = f"its {name} is {figures.estimate(task.score)}, {asked}; its noise is not known"
        return Check(demand=demand, state="unknown", says=says, more_items=min(ITEMS_FIRST, task.of_items))
    low, high = within
    said = (
        f"its {name} is {figures.share_range(task.score.value, within)} of {figures.count(task.items, 'item')}, {asked}"
    )
    if low >= limit or high < limit:
        return Check(demand=demand, state="holds" if low >= limit else "fails", says=said)
    more = needed(task, limit)
    if task.items + task.too_long >= task.of_items:  # every item there is
        return Check(demand=demand, state="unknown", says=f"{said}: within noise, and it has no more items", final=True)
    items = min(max(more or task.of_items, task.items + 1), task.of_items)
    return Check(demand=demand, state="unknown", says=f"{said}: within noise", more_items=items)


# --- memory ----------
def _memory(variant: VariantResult, ceiling_gb: float | None) -> Iterator[Check]:
    if ceiling_gb is None:
        return
    peak = variant.memory.peak_bytes if variant.memory else None
    if peak is None:
        yield Check(demand="memory", state="unknown", says="its peak memory was not measured")
        return
    kv = variant.memory.kv_bytes if variant.memory else None
    inside = f" ({figures.size(kv)} of it set aside for the KV cache)" if kv else ""
    state: State = "holds" if peak <= ceiling_gb * 1e9 else "fails"
    said = f"its peak memory is {figures.size(peak)}{inside}, at most {figures.size(int(ceiling_gb * 1e9))} may be used"
    yield Check(demand="memory", state=state, says=said)


# --- latency ----------
def of_load(point: Point | None, concurrency: int, wishes: Wishes) -> tuple[Check, ...]:
    """The demands on one measured load: that it counts, and every latency of the SLO."""
    if point is None:
        return (Check(demand="load", state="unknown", says=f"it was not measured at concurrency {concurrency}"),)
    for load in (point.variant, point.baseline):
        if not load.valid:
            says = f"its load at concurrency {concurrency} is not valid: {load.problem or 'no reason was recorded'}"
            return (Check(demand="load", state="unknown", says=says, more_requests=load.attempted),)
    return tuple(slo_check(point.variant, name, limit_s) for name, limit_s in wishes.slo.items())


def slo_check(load: LoadSummary, name: str, limit_s: float) -> Check:
    """A percentile against its limit, by its one-sided bounds."""
    latency, percentile = name.split("_")
    item = quantiles_of(load, latency)
    value: float | None = getattr(item, percentile)
    low, high = range_of(item, percentile)
    where = f"at concurrency {load.concurrency}"
    needed = BOUND_NEEDS[percentile]
    if value is None:
        says = f"{name} {where} is unknown: {item.n} values are too few"
        return Check(demand=name, state="unknown", says=says, more_requests=needed)
    said = f"{name} {where} is {figures.duration(value)}, at most {figures.duration(limit_s)} is asked for"
    if low is None and high is None and item.n >= needed:
        says = f"{said}; this report is from a qserve that kept no bounds of it"
        return Check(demand=name, state="unknown", says=says, more_requests=needed)
    if low is not None and low > limit_s:
        return Check(demand=name, state="fails", says=said)
    if lost := missing(load, latency):
        share = figures.share(lost / load.attempted)
        return Check(demand=name, state="unknown", says=f"{said}, but {share} of the requests did not get that far")
    if high is not None and high <= limit_s:
        return Check(demand=name, state="holds", says=said)
    why = f"within noise of {item.n} values" if high is not None else f"{item.n} values cannot bound it"
    more = needed if high is None else 4 * load.attempted  # four times as many halve the noise
    return Check(demand=name, state="unknown", says=f"{said}: {why}", more_requests=more)


def quantiles_of(load: LoadSummary, latency: str) -> Quantiles:
    return {"ttft": load.ttft_s, "itl": load.itl_s, "tpot": load.tpot_s, "e2e": load.e2e_s}[latency]


def range_of(item: Quantiles, percentile: str) -> tuple[float | None, float | None]:
    return {"p50": item.p50_range, "p95": item.p95_range, "p99": item.p99_range}[percentile]


def missing(load: LoadSummary, latency: str) -> int:
    """Requests that failed, or were cut before they had this latency: theirs would have been the long ones."""
    cut = {"ttft": load.ok + load.cut - load.ttft_s.n, "itl": 0, "tpot": load.cut, "e2e": load.cut}[latency]
    lost = max(cut, 0) + sum(load.failed.values())
    return lost if lost > MISSING_LIMIT * load.attempted else 0


def kl_gap(a: VariantResult, b: VariantResult) -> bool:
    """Whether a is closer to bf16 than b beyond noise."""
    kls = [estimate_of(v.quality, "kl") for v in (a, b)]
    if not (kls[0] and kls[1] and a.quality and b.quality) or kls[0].se is None or kls[1].se is None:
        return False
    df = min(a.quality.windows, b.quality.windows) - 1
    return df >= 1 and kls[1].value - kls[0].value > t_95(df) * math.hypot(kls[0].se, kls[1].se)
