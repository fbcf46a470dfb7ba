"""What a run found, in sentences. The first says it all; the others say what it leaves out.

Everything is read off the report. A variant is called faster or slower only where its interval says so; a variant that
failed, or that does not serve what was quantized, is named and not ranked; a smoke run ranks nothing.
"""

import re
from collections.abc import Sequence

from qserve.artifacts import Machine, Point, Ratio, Report, VariantResult
from qserve.eval import figures
from qserve.eval.figures import listed
from qserve.eval.tasks import against_bf16

FAR_SLOWER = 0.5  # a variant that is surely below half the speed is worth a word in the headline


def findings(report: Report) -> tuple[str, ...]:
    """The headline, then what was not resolved, where speed was lost, quality, and bytes."""
    if report.quick or not candidates(report):
        return (headline(report),)
    rest = (*_speeds(report), _quality(report), _tasks(report), _bytes(report))
    return (headline(report), *(sentence for sentence in rest if sentence))


def headline(report: Report) -> str:
    """One sentence: what was found, at which concurrency, on which machine."""
    if not report.variants:
        return _alone(report)
    if report.quick:
        return _smoke(report)
    if report.baseline.status != "measured":
        return f"Nothing can be compared, because bf16 itself {_state(report.baseline)}."
    if not candidates(report):
        return f"No variant could be compared with bf16: {listed(_excluded(report))}."
    lead = _lead(report)
    body = _winner(report, *lead) if lead else _none_faster(report)
    left_out = _excluded(report)
    ending = f"; left out: {listed(left_out)}" if left_out else ""
    return f"On {machine_words(report.machine)}, {body}{ending}."


# --- what counts ----------
def comparable(variant: VariantResult) -> dict[int, Ratio]:
    """Concurrency -> throughput against bf16, where both sides of the comparison are valid."""
    if variant.status != "measured":
        return {}
    return {p.concurrency: p.throughput for p in variant.points if valid(p) and p.throughput is not None}


def valid(point: Point) -> bool:
    return point.variant.valid and point.baseline.valid


def candidates(report: Report) -> tuple[VariantResult, ...]:
    """The variants with at least one valid comparison of speed."""
    if report.baseline.status != "measured":
        return ()
    return tuple(v for v in report.variants if comparable(v))


def tried(report: Report) -> list[int]:
    """The concurrencies at which any variant has a valid comparison, ascending."""
    return sorted({c for v in candidates(report) for c in comparable(v)})


def faster(item: Ratio) -> bool:
    return item.verdict == "faster" and item.low is not None and item.low > 1


def slower(item: Ratio) -> bool:
    return item.verdict == "slower" and item.high is not None and item.high < 1


def machine_words(machine: Machine) -> str:
    """`AMD EPYC 7763 (2 cores, no AVX-512)`, `2 x NVIDIA H200`."""
    if machine.flavour == "cuda" and machine.gpus:
        same = len(set(machine.gpus)) == 1
        return f"{len(machine.gpus)} × {machine.gpus[0]}" if same and len(machine.gpus) > 1 else listed(machine.gpus)
    name = re.sub(r"\((R|TM)\)|\s+\d+-Core Processor|\s+CPU|\s+Processor|\s*@.*", "", machine.cpu).strip()
    lacks = ", no AVX-512" if "avx2" in machine.isa and "avx512f" not in machine.isa else ""
    return f"{name or 'this machine'} ({figures.count(machine.cores, 'core')}{lacks})"


# --- the headline's parts ----------
def _alone(report: Report) -> str:
    """Speed is measured in pairs, so without a variant there is none."""
    base = report.baseline
    if base.status != "measured":
        return f"No variant was asked for, and bf16 itself {_state(base)}."
    known = f" (perplexity {figures.estimate(base.quality.perplexity)})" if base.quality else ""
    return (
        f"bf16 alone was served and scored{known}; with no variant beside it there is no speed to tell and nothing to "
        "choose from."
    )


def _smoke(report: Report) -> str:
    served = [v.name for v in report.variants if v.status == "measured"]
    lost = [f"{v.name} {_state(v)}" for v in (report.baseline, *report.variants) if v.status != "measured"]
    which = f"{listed(served)} ran from start to end" if served else "no variant ran from start to end"
    return f"A smoke run, whose figures rank nothing: {listed([which, *lost])}."


def _state(variant: VariantResult) -> str:
    match variant.status:
        case "not servable":
            return "cannot be served here"
        case "not faithful":
            return "does not serve what its checkpoint says"
        case _:
            return "failed"


def _excluded(report: Report) -> list[str]:
    why = {"measured": "no valid comparison of speed", "not servable": "not servable here"}
    return [f"{v.name} ({why.get(v.status, v.status)})" for v in report.variants if not comparable(v)]


def _lead(report: Report) -> tuple[VariantResult, int] | None:
    """The variant and concurrency whose gain is largest at the cautious end of its interval."""
    wins = [(r.low or 0, v, c) for v in candidates(report) for c, r in comparable(v).items() if faster(r)]
    if not wins:
        return None
    _, variant, concurrency = max(wins, key=lambda win: win[0])
    return variant, concurrency


def _winner(report: Report, lead: VariantResult, at: int) -> str:
    best = comparable(lead)[at]
    low, high = figures.ratio(best.low or 0), figures.ratio(best.high or 0)
    gain = f"{lead.name} serves {figures.ratio(best.value)} times ({low} to {high}) the tokens of bf16"
    others = [v for v in candidates(report) if v is not lead]
    parts = [
        f"{gain} at concurrency {at}{_elsewhere(report, lead, at)} {_cost(lead)}",
        _also_faster(others),
        _far_slower(others, at),
    ]
    return "; ".join(part for part in parts if part)


def _elsewhere(report: Report, lead: VariantResult, at: int) -> str:
    """What the lead does at the other concurrencies, in brackets."""
    loads = sorted({p.concurrency for v in report.variants for p in v.points} - {at})
    groups = _by_verdict(lead, loads)
    words = {
        "faster": "also faster at",
        "slower": "slower at",
        "unresolved": "unresolved at",
        "missing": "no valid comparison at",
    }
    said = [f"{words[key]} {listed([str(c) for c in cs])}" for key, cs in groups.items()]
    return f" ({', '.join(said)})" if said else ""


def _by_verdict(variant: VariantResult, concurrencies: Sequence[int]) -> dict[str, list[int]]:
    """Verdict, or `missing` -> concurrencies; only what occurs, the gains first."""
    ratios = comparable(variant)
    groups: dict[str, list[int]] = {"faster": [], "slower": [], "unresolved": [], "missing": []}
    for c in concurrencies:
        item = ratios.get(c)
        groups["missing" if item is None else verdict(item)].append(c)
    return {key: cs for key, cs in groups.items() if cs}


def verdict(item: Ratio) -> str:
    """The report's verdict, but never a gain or a loss whose interval is missing or contains 1."""
    if item.low is None or item.high is None or item.low <= 1 <= item.high:
        return "unresolved"
    return item.verdict


def _cost(variant: VariantResult) -> str:
    """What the speed costs in quality; `and costs 0.8 % in perplexity`."""
    quality = variant.quality
    if quality is None:
        return "with its quality unknown"
    change = quality.perplexity_ratio
    if change is None:
        return f"at a KL of {figures.significant(quality.kl.value)}" if quality.kl else "with its quality unknown"
    half = figures.margin(change.se, quality.windows)
    percent = f"{figures.significant(abs(change.value - 1) * 100, 2)} %"
    if half is None or abs(change.value - 1) <= half:
        return "with no resolved change in perplexity"
    return f"and costs {percent} in perplexity" if change.value > 1 else f"and lowers perplexity by {percent}"


def _also_faster(others: Sequence[VariantResult]) -> str:
    """The other variants that beat bf16 somewhere, each with its best."""
    said = []
    for variant in others:
        wins = [(r.low or 0, c, r) for c, r in comparable(variant).items() if faster(r)]
        if wins:
            _, at, item = max(wins, key=lambda win: win[0])
            said.append(f"{variant.name} serves {figures.ratio(item.value)} times at concurrency {at}")
    if len(said) > 2:
        return f"{len(said)} other variants are faster than bf16 at some concurrency"
    return listed(said)


def _far_slower(others: Sequence[VariantResult], at: int) -> str:
    slow = [
        (v.name, r.value) for v in others if (r := comparable(v).get(at)) and slower(r) and (r.high or 1) < FAR_SLOWER
    ]
    said = [f"{name} is {_times(value)} times slower" for name, value in slow]
    return f"{listed(said)} at concurrency {at}" if said else ""


def _times(value: float) -> str:
    return figures.significant(1 / value, 2)


def _none_faster(report: Report) -> str:
    runners, at = candidates(report), tried(report)
    names = [v.name for v in runners]
    either, both = _at(at, "or"), _at(at, "and")
    seen = {key for v in runners for key in _by_verdict(v, at)}
    if len(runners) == 1:
        body = _only_one(runners[0], at)
    elif seen == {"slower"}:
        body = f"every variant ({listed(names)}) is slower than bf16 {both}"
    elif seen == {"unresolved"}:
        body = f"no difference in speed between bf16 and {listed(names, 'or')} was resolved {either}"
    else:
        body = f"no variant ({listed(names)}) is measurably faster than bf16 {either}"
    close = _closest(report)
    return f"{body}; {close}" if close else body


def _at(concurrencies: Sequence[int], word: str) -> str:
    return f"at concurrency {listed([str(c) for c in concurrencies], word)}"


def _only_one(variant: VariantResult, at: list[int]) -> str:
    groups = _by_verdict(variant, at)
    if set(groups) == {"slower"}:
        times = listed([figures.ratio(r.value) for _, r in sorted(comparable(variant).items())])
        return f"{variant.name} is slower than bf16 {_at(at, 'and')} ({times} times its tokens)"
    if set(groups) == {"unresolved"}:
        return f"no difference in speed between bf16 and {variant.name} was resolved {_at(at, 'or')}"
    said = [f"{key} {_at(cs, 'and')}" for key, cs in groups.items()]
    return f"{variant.name} is not measurably faster than bf16: {listed(said)}"


def _closest(report: Report) -> str:
    """Which variant stays closest to bf16, if the noise lets one say so, and its bytes."""
    known = [(v.quality.kl.value, v) for v in candidates(report) if v.quality and v.quality.kl]
    if not known:
        return ""
    known.sort(key=lambda item: item[0])
    best = known[0][1]
    kl = figures.significant(known[0][0])
    room = _disk_share(report, best)
    in_bytes = f" in {room} of the bytes" if room else ""
    if len(candidates(report)) == 1:
        return f"{best.name} has a KL of {kl} to bf16{in_bytes}"
    if len(known) < len(candidates(report)) or not _separate(best, known[1][1]):
        return ""
    return f"{best.name} keeps quality closest (KL {kl}){in_bytes}"


def _separate(a: VariantResult, b: VariantResult) -> bool:
    """Whether the KL intervals of two variants do not touch."""
    assert a.quality and b.quality and a.quality.kl and b.quality.kl
    margins = [figures.margin(q.kl.se, q.windows) for q in (a.quality, b.quality) if q.kl]
    known = [m for m in margins if m is not None]
    return len(known) == 2 and a.quality.kl.value + known[0] < b.quality.kl.value - known[1]


def _disk_share(report: Report, variant: VariantResult) -> str | None:
    if variant.memory is None or report.baseline.memory is None or not report.baseline.memory.disk_bytes:
        return None
    return figures.share(variant.memory.disk_bytes / report.baseline.memory.disk_bytes)


# --- the other findings ----------
def _where(report: Report, wanted: str) -> str:
    """`awq at 1 and 8; gptq at 1`: the variants and concurrencies with one verdict."""
    said = []
    for variant in candidates(report):
        at = [str(c) for c, item in sorted(comparable(variant).items()) if verdict(item) == wanted]
        said += [f"{variant.name} at {listed(at)}"] if at else []
    return "; ".join(said)


def _speeds(report: Report) -> tuple[str, ...]:
    """Where the noise hides the answer, and where speed is lost; nothing where the headline has said it of all."""
    open_, lost = _where(report, "unresolved"), _where(report, "slower")
    if not _lead(report) and not (open_ and lost):
        return ("More pairs, or longer blocks, would narrow the intervals.",) if open_ else ()
    return (
        f"Neither faster nor slower beyond the noise, by concurrency: {open_}. More pairs would tell." if open_ else "",
        f"Slower than bf16, by concurrency: {lost}." if lost else "",
    )


def _quality(report: Report) -> str:
    known = [(v.quality.kl.value, v.name, v.quality.kl) for v in candidates(report) if v.quality and v.quality.kl]
    said = [f"{name} {figures.estimate(kl)}" for _, name, kl in sorted(known, key=lambda item: item[0])]
    return f"KL to bf16 in nats, closest first: {listed(said)}." if said else ""


def _tasks(report: Report) -> str:
    """`Task scores minus bf16's: int8 on arc_easy −0.010 ± 0.008 (within noise).`; nothing where none are paired."""
    said = [
        f"{v.name} on {name} {figures.signed(task.delta)} ({against_bf16(task)})"
        for v in report.variants
        for name, task in (v.quality.tasks if v.quality else {}).items()
        if task.delta is not None
    ]
    return f"Task scores minus bf16's: {listed(said)}." if said else ""


def _bytes(report: Report) -> str:
    known = [(v.memory.disk_bytes, v) for v in candidates(report) if v.memory]
    said = [f"{v.name} {room}" for _, v in sorted(known, key=lambda item: item[0]) if (room := _disk_share(report, v))]
    return f"Weight files, as a share of bf16's: {listed(said)}." if said else ""
