"""What would flip the decision: the same rule, applied to other wishes, and an estimate for other lengths.

Nothing is interpolated: other concurrencies are the measured ones, other limits are those at which a measured figure
begins to fail or to hold. Only the lengths are modelled (lengths.py), and the text says so.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from qserve.artifacts import Report, VariantResult
from qserve.decision import Flip, FormatStanding
from qserve.eval import figures
from qserve.eval.checks import WORDS, estimate_of, quantiles_of, range_of
from qserve.eval.lengths import lengths
from qserve.eval.settle import Settled, settle
from qserve.eval.standing import load_at
from qserve.eval.table import concurrencies, everyone
from qserve.eval.tasks import interval
from qserve.variants import BASELINE
from qserve.wishes import Floor, Wishes


@dataclass(frozen=True)
class Ground:
    """What the flips start from."""

    report: Report
    wishes: Wishes
    settled: Settled
    rival: FormatStanding | None  # the runner-up, or bf16

    @property
    def at(self) -> int | None:
        """The concurrency of the answer."""
        return self.settled.lead.concurrency if self.settled.lead else None

    def with_wishes(self, **changes: object) -> Settled:
        return settle(self.report, self.wishes.model_copy(update=changes))


def flips(ground: Ground) -> tuple[Flip, ...]:
    """Everything that is known to change the answer; for concurrency, lengths and price also what does not."""
    if any(not need.names for need in ground.settled.needs):  # the report itself decides nothing, whatever is asked
        return ()
    found = [
        *_concurrency(ground),
        *lengths(ground.report, ground.settled, ground.rival),
        *_price(ground),
        *_floor(ground),
        *_task_floors(ground),
        *_memory(ground),
    ]
    return (*found, *_slo(ground))


def _then(settled: Settled, beside: int | None) -> str:
    """What would follow; with its concurrency where that is another than `beside`."""
    if settled.outcome == "nothing qualifies":
        return "nothing would qualify"
    if settled.choice is None or settled.lead is None:
        return "it would be unresolved"
    at = f" at concurrency {settled.lead.concurrency}" if settled.lead.concurrency != beside else ""
    return f"bf16 would stay{at}" if settled.choice == BASELINE else f"{settled.choice} would be chosen{at}"


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
            yield Flip(by="concurrency", says=f"at concurrency {c} {_then(other, c)}", to=other.choice)
    if same:
        yield Flip(by="concurrency", says=f"at concurrency {figures.listed(same)} the answer would be the same")
    if not others:
        yield Flip(by="concurrency", says="one concurrency was measured, so it is not known what another would change")


# --- price ----------
def _price(ground: Ground) -> Iterator[Flip]:
    """On one machine the price is the same for all; another machine is worth it below a share of this price."""
    lead, rival = ground.settled.lead, ground.rival
    if ground.settled.outcome != "chosen" or lead is None:
        return
    said = "the price of this machine is the same for every format, so it changes no ranking"
    rates = [one.output_tokens_per_s for one in (rival, lead) if one]
    if rival and len(rates) == 2 and rates[0] and rates[1] and rates[0].value < rates[1].value:
        share = figures.share(rates[0].value / rates[1].value)
        said += (
            f"; {rival.name} would be cheaper only on a machine as fast as this one for less than {share} of its price"
        )
    yield Flip(by="price", says=said)


# --- limits ----------
def _floor(ground: Ground) -> Iterator[Flip]:
    floor = ground.wishes.floor
    for name in (n for n in WORDS if getattr(floor, n) is not None):
        other = ground.with_wishes(floor=floor.model_copy(update={name: None}))
        if not _same(other, ground.settled):
            says = f"without the floor on {name} {_then(other, ground.at)}{_figure(ground, other, name)}"
            yield Flip(by="floor", says=says, to=other.choice)
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
    says = f"a floor on {name} {word} {figures.significant(edge)} rules {lead.name} out; then {_then(other, ground.at)}"
    yield Flip(by="floor", says=says, to=other.choice)


def _task_floors(ground: Ground) -> Iterator[Flip]:
    """Each floor on a task: left out, and so high that the lead fails for sure, at the good end of its interval."""
    floor, lead = ground.wishes.floor, ground.settled.lead
    variant = _variant(ground, lead)
    for name in floor.tasks:
        rest = {task: limit for task, limit in floor.tasks.items() if task != name}
        other = ground.with_wishes(floor=floor.model_copy(update={"tasks": rest}))
        if not _same(other, ground.settled):
            yield Flip(by="floor", says=f"without the floor on task {name} {_then(other, ground.at)}", to=other.choice)
        task = variant.quality.tasks.get(name) if variant and variant.quality else None
        within = interval(task) if task else None
        if lead is None or within is None or within[1] >= 1:
            continue
        edge = min(within[1] * 1.000001, 1.0)
        other = ground.with_wishes(floor=floor.model_copy(update={"tasks": {**floor.tasks, name: edge}}))
        ruled = f"a floor on task {name} above {figures.significant(within[1])} rules {lead.name} out"
        yield Flip(by="floor", says=f"{ruled}; then {_then(other, ground.at)}", to=other.choice)


def _memory(ground: Ground) -> Iterator[Flip]:
    if ground.wishes.memory_gb is not None:
        peaks = [v.memory.peak_bytes for v in everyone(ground.report) if v.memory and v.memory.peak_bytes]
        found = _first_other(
            ground, sorted(peak / 1e9 for peak in peaks if peak / 1e9 > ground.wishes.memory_gb), _ceiling
        )
        if found:
            limit, other = found
            says = f"with a memory ceiling of {figures.size(math.ceil(limit * 1e9))} {_then(other, ground.at)}"
            yield Flip(by="memory", says=says, to=other.choice)
    lead = ground.settled.lead
    variant = _variant(ground, lead)
    if lead and variant and variant.memory and (peak := variant.memory.peak_bytes):
        other = ground.with_wishes(memory_gb=peak / 1e9 * (1 - 1e-9))
        says = f"a memory ceiling below {figures.size(peak)} rules {lead.name} out; then {_then(other, ground.at)}"
        yield Flip(by="memory", says=says, to=other.choice)


def _ceiling(wishes: Wishes, limit: float) -> dict[str, object]:
    return {"memory_gb": limit * (1 + 1e-9)}


def _variant(ground: Ground, one: FormatStanding | None) -> VariantResult | None:
    return next((v for v in everyone(ground.report) if one and v.name == one.name), None)


def _first_other(
    ground: Ground, limits: Sequence[float], change: Callable[[Wishes, float], dict[str, object]]
) -> tuple[float, Settled] | None:
    """The first of the looser limits with which something else is chosen."""
    for limit in limits:
        other = ground.with_wishes(**change(ground.wishes, limit))
        if other.outcome == "chosen" and not _same(other, ground.settled):
            return limit, other
    return None


def _slo(ground: Ground) -> Iterator[Flip]:
    """Each limit, loosened to the first measured figure that changes the choice, and so strict that the lead fails."""
    for name in ground.wishes.slo:
        yield from _looser_slo(ground, name)
        yield from _stricter_slo(ground, name)


def _looser_slo(ground: Ground, name: str) -> Iterator[Flip]:
    latency, percentile = name.split("_")
    loads = [p.variant for v in everyone(ground.report) if v.status == "measured" for p in v.points if p.variant.valid]
    highs = [range_of(quantiles_of(load, latency), percentile)[1] for load in loads]
    limits = sorted(high for high in highs if high is not None and high > ground.wishes.slo[name])

    def change(wishes: Wishes, limit: float) -> dict[str, object]:
        return {"slo": {**wishes.slo, name: limit * (1 + 1e-9)}}

    if found := _first_other(ground, limits, change):
        limit, other = found
        says = f"with a limit on {name} of {figures.duration(limit)} {_then(other, ground.at)}"
        yield Flip(by="slo", says=says, to=other.choice)


def _stricter_slo(ground: Ground, name: str) -> Iterator[Flip]:
    lead, (latency, percentile) = ground.settled.lead, name.split("_")
    variant = _variant(ground, lead)
    load = load_at(variant, lead.concurrency) if variant and lead else None
    edge = range_of(quantiles_of(load, latency), percentile)[0] if load else None
    if lead and edge and edge < ground.wishes.slo[name]:
        other = ground.with_wishes(slo={**ground.wishes.slo, name: edge * (1 - 1e-9)})
        ruled = f"a limit on {name} below {figures.duration(edge)} rules {lead.name} out at concurrency {ground.at}"
        yield Flip(by="slo", says=f"{ruled}; then {_then(other, ground.at)}", to=other.choice)
