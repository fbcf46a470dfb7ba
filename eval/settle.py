"""The rule of the decision, as a pure function: which format, or what is still to be measured.

1. A format qualifies only where every demand holds; a demand that is unknown leaves it undecided.
2. bf16 stays unless a format that qualifies is better beyond noise. With more than two such formats each is held to a
   stricter interval (Bonferroni), so that the chance of naming any false winner stays at 5 % in all; it is never laxer
   than the 95 % interval of the report.
3. Among several winners the best must be ahead of each other one beyond noise. Else it is a tie, which a better KL
   beyond noise breaks, then fewer bytes; or none needs to break it, since no worthwhile difference is left.
4. Whatever could still hide a worthwhile gain (an interval too wide, a format undecided) makes it unresolved.
"""

import math
from dataclasses import dataclass
from functools import reduce

from qserve.artifacts import Report, VariantResult
from qserve.decision import FormatStanding, Outcome
from qserve.eval import figures, gains
from qserve.eval.checks import kl_gap
from qserve.eval.findings import valid
from qserve.eval.gains import Gain
from qserve.eval.standing import load_at, measured_lengths, point_at, stand
from qserve.eval.student import samples_needed
from qserve.eval.table import everyone
from qserve.variants import BASELINE
from qserve.wishes import Wishes

WORTHWHILE = math.log(1.05)  # a gain of less than 5 % is not worth another run
FALSE_WINNER = 0.05  # chance of naming one where there is none
PAIRS_FIRST = 4  # asked for where the noise is not known at all
LOST = ("not faithful", "not servable")  # another run of the same would find the same
SAME_BYTES = 0.99  # files that differ by less than 1 % break no tie


@dataclass(frozen=True)
class Need:
    """What one open question takes."""

    why: str
    names: tuple[str, ...] = ()  # formats to measure again; none: all of them
    pairs: int | None = None
    windows: int | None = None
    items: int | None = None  # of each task
    final: bool = False  # no longer run answers it
    requests: int | None = None  # at the concurrency in question
    concurrency: int | None = None  # one that was not measured
    lengths: tuple[int | None, int | None] | None = None  # prompt and output tokens that were not measured


@dataclass(frozen=True)
class Settled:
    outcome: Outcome
    standings: tuple[FormatStanding, ...]
    lead: FormatStanding | None = None  # the choice; where unresolved, what is safe until then
    because: str = ""
    needs: tuple[Need, ...] = ()

    @property
    def choice(self) -> str | None:
        return self.lead.name if self.lead and self.outcome == "chosen" else None


@dataclass(frozen=True)
class Race:
    """The formats that may be compared, and how."""

    report: Report
    wishes: Wishes
    fit: tuple[FormatStanding, ...]

    def ahead(self, a: FormatStanding, b: FormatStanding) -> Gain | None:
        """How much better a is than b; None where nothing says it."""
        if a.concurrency is not None and a.concurrency == b.concurrency:
            own, other = self.beside_bf16(a), self.beside_bf16(b)
            return gains.difference(own, other) if own and other else None
        loads = [load_at(self.variant(s), s.concurrency) for s in (a, b)]
        speeds = [gains.of_blocks(load.block_tokens_per_s) if load else None for load in loads]
        return gains.difference(speeds[0], speeds[1]) if speeds[0] and speeds[1] else None

    def beside_bf16(self, one: FormatStanding) -> Gain | None:
        if one.name == BASELINE:
            return gains.NO_GAIN
        point = point_at(self.variant(one), one.concurrency)
        ratio = gains.ratio_of(point, self.wishes.objective) if point and valid(point) else None
        return gains.from_ratio(ratio, self.wishes.objective) if ratio else None

    def variant(self, one: FormatStanding) -> VariantResult:
        return next(v for v in everyone(self.report) if v.name == one.name)

    def confidence(self) -> float:
        """Two-sided level of a comparison with bf16. A false winner is an error on one side of one of them."""
        tested = sum(s.name != BASELINE for s in self.fit)
        return 1 - 2 * min(0.025, FALSE_WINNER / max(tested, 1))

    def best(self, some: tuple[FormatStanding, ...]) -> FormatStanding:
        """The best by its value alone."""

        def better(a: FormatStanding, b: FormatStanding) -> FormatStanding:
            gain = self.ahead(b, a)
            return b if gain is not None and gain.log > 0 else a

        return reduce(better, some)


def settle(report: Report, wishes: Wishes) -> Settled:
    """Apply the rule."""
    standings = tuple(stand(report, variant, wishes) for variant in everyone(report))
    if blocked := _blocked(report, wishes):
        return Settled("unresolved", standings, needs=(blocked,))
    fit = tuple(s for s in standings if s.standing == "qualifies")
    undecided = tuple(s for s in standings if s.standing == "undecided")
    if not fit:
        needs = tuple(need for s in undecided for need in _needs_of(s, wishes))
        return Settled("unresolved" if undecided else "nothing qualifies", standings, needs=needs)
    race = Race(report, wishes, fit)
    base = next((s for s in fit if s.name == BASELINE), None)
    settled = _against_bf16(race, base, standings) if base else _among(race, fit, standings)
    open_ = tuple(s for s in undecided if _could_win(race, s, settled.lead))
    needs = (*settled.needs, *(need for s in open_ for need in _needs_of(s, wishes)))
    return Settled("unresolved" if needs else "chosen", standings, settled.lead, settled.because, needs)


def _blocked(report: Report, wishes: Wishes) -> Need | None:
    """Why nothing may be decided from this report, whatever its figures."""
    if report.quick:
        return Need("this was a smoke run (--quick), whose figures rank nothing")
    if report.baseline.status != "measured":
        return Need(f"bf16 itself is {report.baseline.status}, so there is nothing to compare with")
    if not report.baseline.points and report.variants and all(v.status in LOST for v in report.variants):
        lost = ", ".join(f"{v.name} is {v.status}" for v in report.variants)
        return Need(f"no load was measured, since no variant could be compared with bf16 ({lost})", final=True)
    asked = (wishes.traffic.prompt_tokens, wishes.traffic.output_tokens)
    if any(want is not None and want != had for want, had in zip(asked, measured_lengths(report), strict=True)):
        had = " and ".join("unknown" if n is None else str(n) for n in measured_lengths(report))
        return Need(f"prompts and outputs of {had} tokens were measured, and others are asked for", lengths=asked)
    return None


def _could_win(race: Race, one: FormatStanding, lead: FormatStanding | None) -> bool:
    gain = race.ahead(one, lead) if lead else None
    return gain is None or gain.may_exceed(WORTHWHILE)


def _needs_of(one: FormatStanding, wishes: Wishes) -> list[Need]:
    """One need for each demand that is unknown."""
    found = []
    for check in one.checks:
        if check.state == "unknown":
            unmeasured = check.demand == "load" and check.more_requests is None
            found.append(
                Need(f"{one.name}: {check.says}", (one.name,), windows=check.more_windows, items=check.more_items,
                     final=check.final, requests=check.more_requests,
                     concurrency=wishes.traffic.concurrency if unmeasured else None)
            )  # fmt: skip
    return found


# --- bf16 qualifies: it stays unless it is beaten ----------
def _against_bf16(race: Race, base: FormatStanding, standings: tuple[FormatStanding, ...]) -> Settled:
    others = tuple(s for s in race.fit if s is not base)
    level = race.confidence()
    won = tuple(s for s in others if (g := race.ahead(s, base)) and g.beyond_noise(level))
    if won:
        return _among(race, won, standings)
    hidden = [s for s in others if (g := race.ahead(s, base)) is None or g.may_exceed(WORTHWHILE, level)]
    if hidden:
        needs = tuple(_need_beside(race, s, base, level) for s in hidden)
        return Settled("unresolved", standings, base, needs=needs)
    because = (
        f"of the formats that qualify ({', '.join(s.name for s in others)}) none is better than bf16 beyond noise, and "
        "none can be by 5 % or more"
        if others
        else "no quantized format qualifies"
    )  # fmt: skip
    return Settled("chosen", standings, base, because)


def _need_beside(race: Race, one: FormatStanding, base: FormatStanding, level: float) -> Need:
    gain = race.ahead(one, base)
    pairs = pairs_needed(gain, level)
    said = f" ({figures.interval(one.gain)} at concurrency {one.concurrency})" if one.gain else ""
    return Need(f"whether {one.name} is better than bf16 is within noise{said}", (one.name,), pairs=pairs)


def pairs_needed(gain: Gain | None, confidence: float = 0.95) -> int:
    """Pairs that would tell a gain like this one from none, or from a worthwhile one, whichever is the easier; by the
    spread that was seen."""
    if gain is None or gain.se is None:
        return PAIRS_FIRST
    precision = max(gain.log, WORTHWHILE - gain.log)
    return max(samples_needed(gain.se * math.sqrt(gain.n), precision, confidence), gain.n + 1)


# --- among those that may be chosen ----------
def _among(race: Race, some: tuple[FormatStanding, ...], standings: tuple[FormatStanding, ...]) -> Settled:
    top = race.best(some)
    ties = tuple(s for s in some if s is not top and not _clear(race.ahead(top, s)))
    if not ties:
        beaten = [s.name for s in some if s is not top]
        because = (
            f"it is ahead of {' and '.join(beaten)} beyond noise"
            if beaten
            else ("it alone qualifies" if len(race.fit) == 1 else "")
        )
        return Settled("chosen", standings, top, because)
    for lead, because in (_closest(race, (top, *ties)), _smallest(race, (top, *ties)), _no_matter(race, top, ties)):
        if lead:
            rest = " and ".join(s.name for s in (top, *ties) if s is not lead)
            return Settled("chosen", standings, lead, f"it and {rest} cannot be told apart by speed; {because}")
    needs = tuple(_need_between(race, top, s) for s in ties)
    return Settled("unresolved", standings, top, needs=needs)


def _need_between(race: Race, top: FormatStanding, other: FormatStanding) -> Need:
    why = f"which of {top.name} and {other.name} is better is within noise"
    return Need(why, (top.name, other.name), pairs=pairs_needed(race.ahead(top, other)))


def _clear(gain: Gain | None) -> bool:
    return gain is not None and gain.beyond_noise()


def _closest(race: Race, tied: tuple[FormatStanding, ...]) -> tuple[FormatStanding | None, str]:
    for one in tied:
        if all(kl_gap(race.variant(one), race.variant(s)) for s in tied if s is not one):
            return one, "it is the closest to bf16 in KL, beyond noise"
    return None, ""


def _smallest(race: Race, tied: tuple[FormatStanding, ...]) -> tuple[FormatStanding | None, str]:
    sizes = [(m.disk_bytes, i) for i, s in enumerate(tied) if (m := race.variant(s).memory)]
    if len(sizes) < len(tied):
        return None, ""
    (least, i), (second, _) = sorted(sizes)[:2]
    return (tied[i], "it has the fewest bytes of weights") if least < SAME_BYTES * second else (None, "")


def _no_matter(race: Race, top: FormatStanding, ties: tuple[FormatStanding, ...]) -> tuple[FormatStanding | None, str]:
    ranges = [g.interval() for s in ties if (g := race.ahead(top, s))]
    small = [r for r in ranges if r and r[0] > -WORTHWHILE and r[1] < WORTHWHILE]
    return (top, "they differ by less than 5 %") if len(small) == len(ties) else (None, "")
