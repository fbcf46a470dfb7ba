"""Whether what was measured of a checkpoint speaks for publishing it, and for which load."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from qserve.artifacts import Manifest, Report, VariantResult
from qserve.eval import figures
from qserve.eval.figures import listed
from qserve.eval.findings import comparable, verdict

Purpose = Literal["speed", "memory"]


@dataclass(frozen=True)
class Measured:
    """The row of a report that is of one checkpoint."""

    report: Report
    result: VariantResult


@dataclass(frozen=True)
class Regime:
    """What a variant is published for: to be faster than bf16 at `concurrency` (None: at any that was measured), or to
    need less memory."""

    purpose: Purpose = "speed"
    concurrency: int | None = None


@dataclass(frozen=True)
class Objection:
    """What speaks against publishing a variant."""

    says: str  # words that follow its name; the card tells them too
    remedy: str = ""  # for whoever publishes it, and nobody else


def find_measured(report: Report, manifest: Manifest) -> Measured | None:
    """The first row of this very checkpoint, one that was served if there is one. A smoke run measures nothing."""
    found = [] if report.quick else [result for result in report.variants if _is_of(result, manifest)]
    found.sort(key=lambda result: result.status != "measured")
    return Measured(report, found[0]) if found else None


def _is_of(result: VariantResult, manifest: Manifest) -> bool:
    """By digest; older reports hold none: there the build's time to its last digit, and the weights' size."""
    if result.digest is not None:
        return result.digest == manifest.digest
    disk_bytes = result.memory.disk_bytes if result.memory else None
    made = (manifest.variant, manifest.wall_s, manifest.weights.total_bytes)
    return (result.name, result.prep_s, disk_bytes) == made


def objections(measured: Measured | None, regime: Regime) -> tuple[Objection, ...]:
    """What speaks against publishing; () if nothing does."""
    if measured is None:
        words = "was not measured: no run holds this very checkpoint"
        return (Objection(words, "`qserve bench` makes one, not with --quick"),)
    result = measured.result
    if result.status != "measured":
        said = {"not faithful": "is not faithful", "not servable": "could not be served", "failed": "failed"}
        why = result.problem or "no reason was recorded"
        return (Objection(f"{said[result.status]} in run {measured.report.run}: {why}"),)
    found = _slow(measured, regime) if regime.purpose == "speed" else _big(measured)
    return (found,) if found else ()


def _slow(measured: Measured, regime: Regime) -> Objection | None:
    ratios = comparable(measured.result)
    if not ratios:
        return Objection("has no valid comparison of speed with bf16")
    if regime.concurrency is not None and regime.concurrency not in ratios:
        return Objection(f"was not compared with bf16 at concurrency {regime.concurrency}, only at {_numbers(ratios)}")
    wanted = {c: r for c, r in ratios.items() if regime.concurrency in (None, c)}
    if not all(verdict(item) == "slower" for item in wanted.values()):
        return None
    where = listed([f"{c} ({figures.interval(r)} times its tokens)" for c, r in sorted(wanted.items())])
    others = "" if regime.concurrency or len(wanted) == 1 else ", which is all that was measured"
    return Objection(f"is slower than bf16 at concurrency {where}{others}", "--for memory publishes it for its size")


def _big(measured: Measured) -> Objection | None:
    own, base = measured.result.memory, measured.report.baseline.memory
    if own is None or base is None:
        return Objection("has no known size beside bf16's")
    if own.disk_bytes < base.disk_bytes:
        return None
    return Objection(f"is not smaller than bf16: {figures.size(own.disk_bytes)} and {figures.size(base.disk_bytes)}")


def _numbers(ratios: Iterable[int]) -> str:
    return listed([str(c) for c in sorted(ratios)])
