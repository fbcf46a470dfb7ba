"""Where every format stands: at which concurrency it would run, whether it qualifies, what it would cost."""

import math

from qserve.artifacts import LoadSummary, Point, Ratio, Report, VariantResult
from qserve.decision import Check, FormatStanding, Interval, Standing
from qserve.eval import checks
from qserve.eval.findings import comparable, verdict
from qserve.eval.gains import ratio_of, speed
from qserve.wishes import Traffic, Wishes


def stand(report: Report, variant: VariantResult, wishes: Wishes) -> FormatStanding:
    """One format against the wishes."""
    fixed = checks.of_format(variant, wishes)
    served = fixed[0].state != "fails"
    at, loaded = _operating(variant, wishes) if served else (None, ())
    point = point_at(variant, at)
    load = point.variant if point and point.variant.valid else None
    rate = speed(load.output_tokens_per_s, load.block_tokens_per_s) if load else None
    requests = load.requests_per_s if load else None
    machines, cautious = _machines(rate, requests, wishes.traffic)
    verdicts = {c: verdict(r) for c, r in sorted(comparable(variant).items())} if served and not report.quick else {}
    return FormatStanding(
        name=variant.name, label=variant.label, standing=_standing((*fixed, *loaded)), concurrency=at,
        checks=(*fixed, *loaded), gain=_gain(report, variant, point, wishes), output_tokens_per_s=rate,
        requests_per_s=requests, cost=cost(rate, wishes.price_per_hour), machines=machines, machines_cautious=cautious,
        faster_at=tuple(c for c, word in verdicts.items() if word == "faster"),
        slower_at=tuple(c for c, word in verdicts.items() if word == "slower"),
        unresolved_at=tuple(c for c, word in verdicts.items() if word == "unresolved"),
    )  # fmt: skip


def point_at(variant: VariantResult, concurrency: int | None) -> Point | None:
    return next((p for p in variant.points if p.concurrency == concurrency), None)


def _operating(variant: VariantResult, wishes: Wishes) -> tuple[int | None, tuple[Check, ...]]:
    """The concurrency to judge at, with the checks there: the asked one; else the largest measured one at which the
    SLO holds, unless a larger one is unknown, which then must be found out first."""
    if asked := wishes.traffic.concurrency:
        return asked, checks.of_load(point_at(variant, asked), asked, wishes)
    found: tuple[Check, ...] = (Check(demand="load", state="unknown", says="no load was measured"),)
    for point in sorted(variant.points, key=lambda p: -p.concurrency):
        found = checks.of_load(point, point.concurrency, wishes)
        if all(check.state != "fails" for check in found):
            return point.concurrency, found
    return None, found


def _standing(found: tuple[Check, ...]) -> Standing:
    states = {check.state for check in found}
    return "excluded" if "fails" in states else "undecided" if "unknown" in states else "qualifies"


def _gain(report: Report, variant: VariantResult, point: Point | None, wishes: Wishes) -> Ratio | None:
    if variant is report.baseline or point is None or not (point.variant.valid and point.baseline.valid):
        return None
    return ratio_of(point, wishes.objective)


# --- money and machines ----------
def cost(rate: Interval | None, price_per_hour: float | None) -> Interval | None:
    """Per million output tokens of a machine that is busy all the time."""
    if rate is None or price_per_hour is None:
        return None
    whole = price_per_hour / 3600 * 1e6
    low, high = (whole / end if end else None for end in (rate.high, rate.low))
    return Interval(value=whole / rate.value, low=low, high=high)


def _machines(rate: Interval | None, requests_per_s: float | None, traffic: Traffic) -> tuple[int | None, int | None]:
    """For the asked rate: by the throughput's value, and by the low end of its interval."""
    asked = traffic.requests_per_s or traffic.output_tokens_per_s
    one = requests_per_s if traffic.requests_per_s else rate.value if rate else None
    if asked is None or one is None or rate is None:
        return None, None
    low = one * rate.low / rate.value if rate.low else None
    return math.ceil(asked / one), math.ceil(asked / low) if low else None


def measured_lengths(report: Report) -> tuple[int | None, int | None]:
    """Prompt and output tokens of every request of the run."""
    bench = report.recipe.get("bench", {})
    return bench.get("prompt_tokens"), bench.get("output_tokens")


def load_at(variant: VariantResult, concurrency: int | None) -> LoadSummary | None:
    point = point_at(variant, concurrency)
    return point.variant if point and point.variant.valid else None
