"""What would flip the decision: the same rule, applied to other wishes, and an estimate for other lengths.

Nothing is interpolated: other concurrencies are the measured ones, other limits are those at which a measured figure
begins to fail or to hold. Only the lengths are modelled, and the text says so.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from qserve.artifacts import Point, Report
from qserve.decision import Flip, FormatStanding
from qserve.eval import figures
from qserve.eval.checks import WORDS, estimate_of, quantiles_of, range_of
from qserve.eval.settle import Settled, settle
from qserve.eval.standing import load_at, measured_lengths, point_at
from qserve.eval.table import concurrencies, everyone
from qserve.recipe import BASELINE
from qserve.wishes import Floor, Wishes


@dataclass(frozen=True)
class Ground:
    """What the flips start from."""

    report: Report
    wishes: Wishes
    settled: Settled
    rival: FormatStanding | None  # the runner-up, or bf16

    def with_wishes(self, **changes: object) -> Settled:
        return settle(self.report, self.wishes.model_copy(update=changes))


def flips(ground: Ground) -> tuple[Flip, ...]:
    """Everything that is known to change the answer; for concurrency, lengths and price also what does not."""
    if ground.report.quick:
        return ()
    found = [*_concurrency(ground), *_lengths(ground), *_price(ground), *_floor(ground), *_memory(ground)]
    return (*found, *_slo(ground))


def _then(settled: Settled) -> str:
    if settled.outcome == "chosen":
        return f"{settled.choice} would be chosen" if settled.choice != BASELINE else "bf16 would stay"
    return "nothing would qualify" if settled.outcome == "nothing qualifies" else "it would be unresolved"


def _same(a: Settled, b: Settled) -> bool:
    return (a.outcome, a.choice) == (b.outcome, b.choice)


def _concurrency(ground: Ground) -> Iterator[Flip]:
    """The same question at every other measured concurrency."""
    lead = ground.settled.lead
    at = ground.wishes.traffic.concurrency or (lead.concurrency if lead else None)
    others = [c for c in concurrencies(ground.report) if c != at]
    same = []
    for c in others:
        traffic = ground.wishes.traffic.model_copy(update={"concurrency": c})
        other = ground.with_wishes(traffic=traffic)
        if _same(other, ground.settled):
            same.append(str(c))
        else:
            yield Flip(by="concurrency", says=f"at concurrency {c} {_then(other)}", to=other.choice)
    if same:
        yield Flip(by="concurrency", says=f"at concurrency {figures.listed(same)} the answer would be the same")
    if not others:
        yield Flip(by="concurrency", says="one concurrency was measured, so it is not known what another would change")


# --- lengths ----------
def _lengths(ground: Ground) -> Iterator[Flip]:
    """An estimate: e2e = TTFT x prompt / measured prompt + ITL x (output - 1); of the lead and bf16, or of bf16 and its
    rival, since only those have pairs."""
    lead = ground.settled.lead
    rival = ground.rival if lead and lead.name == BASELINE else ground.settled.standings[0]
    prompt, output = measured_lengths(ground.report)
    if lead is None or rival is None or not prompt or not output:
        return
    measured = f"only {prompt} tokens in and {output} out were measured"
    shares = _first_and_next(ground, lead, rival)
    if shares is None:
        yield Flip(by="lengths", says=f"{measured}, and neither the time to first token nor the one between tokens "
                   f"differs between {lead.name} and {rival.name} beyond noise")  # fmt: skip
        return
    first, following = shares
    if first <= 0 and following <= 0:
        yield Flip(by="lengths", says=f"{measured}; {lead.name} is not slower than {rival.name} to the first token nor "
                   "between tokens, so other lengths are not expected to change the answer (an estimate)")  # fmt: skip
        return
    if first >= 0 and following >= 0:
        yield Flip(by="lengths", says=f"{measured}; {rival.name} is ahead both to the first token and between tokens")
        return
    tokens = 1 + abs(first / following)
    word = "shorter" if first > 0 else "longer"
    says = (
        f"{measured}; for prompts of {prompt} tokens, {rival.name} is expected to answer sooner where outputs are "
        f"{word} than about {figures.significant(tokens, 2)} tokens, and in proportion for other prompts (an estimate)"
    )
    yield Flip(by="lengths", says=says, to=rival.name)


def _first_and_next(ground: Ground, lead: FormatStanding, rival: FormatStanding) -> tuple[float, float] | None:
    """Seconds by which the lead is slower (above 0) to the first token and between tokens; 0 within noise. None where
    both are within noise, or not known."""
    one, sign = (rival, -1.0) if lead.name == BASELINE else (lead, 1.0)
    variant = next(v for v in everyone(ground.report) if v.name == one.name)
    point = point_at(variant, one.concurrency)
    if point is None:
        return None
    first, following = (sign * gap for gap in _gaps_s(point))
    return (first, following) if first or following else None


def _gaps_s(point: Point) -> tuple[float, float]:
    pairs = ((point.ttft, point.variant.ttft_s.mean, point.baseline.ttft_s.mean),
             (point.itl, point.variant.itl_s.mean, point.baseline.itl_s.mean))  # fmt: skip
    first, following = (
        own - base if ratio and ratio.verdict != "unresolved" and own is not None and base is not None else 0.0
        for ratio, own, base in pairs
    )
    return first, following


def _price(ground: Ground) -> Iterator[Flip]:
    """On one machine the price is the same for all; another machine is worth it below a share of this price."""
    lead, rival = ground.settled.lead, ground.rival
    if lead is None or rival is None or not (lead.output_tokens_per_s and rival.output_tokens_per_s):
        return
    share = rival.output_tokens_per_s.value / lead.output_tokens_per_s.value
    yield Flip(by="price", says=f"the price of this machine changes no ranking on it; {rival.name} would cost less a "
               f"token only on a machine that is as fast for {figures.share(share)} of the price or less")  # fmt: skip


# --- limits ----------
def _floor(ground: Ground) -> Iterator[Flip]:
    floor = ground.wishes.floor
    for name in (n for n in WORDS if getattr(floor, n) is not None):
        other = ground.with_wishes(floor=floor.model_copy(update={name: None}))
        if not _same(other, ground.settled):
            yield Flip(by="floor", says=f"without the floor on {name} {_then(other)}{_figure(ground, other, name)}",
                       to=other.choice)  # fmt: skip
    lead = ground.settled.lead
    if lead and lead.name != BASELINE:
        for name in ("kl", *(n for n in WORDS if n != "kl" and getattr(floor, n) is not None)):
            yield from _stricter_floor(ground, lead, name)


def _figure(ground: Ground, other: Settled, name: str) -> str:
    variant = next((v for v in ground.report.variants if v.name == other.choice), None)
    item = estimate_of(variant.quality, name) if variant else None
    return f" ({WORDS[name]} is {figures.estimate(item)})" if item else ""


def _stricter_floor(ground: Ground, lead: FormatStanding, name: str) -> Iterator[Flip]:
    """Where the lead would fail for sure: at the good end of its interval."""
    quality = next(v.quality for v in ground.report.variants if v.name == lead.name)
    item = estimate_of(quality, name)
    half = figures.margin(item.se, quality.windows) if item and quality else None
    if item is None or half is None:
        return
    edge = item.value + half if name == "top1" else item.value - half
    limit = min(edge * 1.000001, 1.0) if name == "top1" else edge * 0.999999
    floor = Floor.model_copy(ground.wishes.floor, update={name: limit})
    if limit <= 0 or (name == "top1" and edge >= 1):
        return
    other = ground.with_wishes(floor=floor)
    word = "above" if name == "top1" else "below"
    says = f"a floor on {name} {word} {figures.significant(edge)} rules {lead.name} out; then {_then(other)}"
    yield Flip(by="floor", says=says, to=other.choice)


def _memory(ground: Ground) -> Iterator[Flip]:
    if ground.wishes.memory_gb is not None:
        other = ground.with_wishes(memory_gb=None)
        if not _same(other, ground.settled):
            yield Flip(by="memory", says=f"without the memory ceiling {_then(other)}", to=other.choice)
    lead = ground.settled.lead
    variant = next((v for v in everyone(ground.report) if lead and v.name == lead.name), None)
    if lead and variant and variant.memory and (peak := variant.memory.peak_bytes):
        other = ground.with_wishes(memory_gb=math.nextafter(peak / 1e9, 0) * (1 - 1e-9))
        says = f"a memory ceiling below {figures.size(peak)} rules {lead.name} out; then {_then(other)}"
        yield Flip(by="memory", says=says, to=other.choice)


def _slo(ground: Ground) -> Iterator[Flip]:
    """Each limit left out, and each made so strict that the lead fails."""
    slo, lead = ground.wishes.slo, ground.settled.lead
    variant = next((v for v in everyone(ground.report) if lead and v.name == lead.name), None)
    load = load_at(variant, lead.concurrency) if variant and lead else None
    for name in slo:
        other = ground.with_wishes(slo={n: s for n, s in slo.items() if n != name})
        if not _same(other, ground.settled):
            yield Flip(by="slo", says=f"without the limit on {name} {_then(other)}", to=other.choice)
        if load is None or lead is None:
            continue
        latency, percentile = name.split("_")
        item = quantiles_of(load, latency)
        edge = range_of(item, percentile)[0] or getattr(item, percentile)
        if edge:
            other = ground.with_wishes(slo={**slo, name: edge * 0.999999})
            at = f"at concurrency {lead.concurrency}"
            says = f"a limit on {name} below {figures.duration(edge)} rules {lead.name} out {at}; then {_then(other)}"
            yield Flip(by="slo", says=says, to=other.choice)
