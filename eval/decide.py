"""A Report and Wishes in, a Decision out. The rule is in settle.py; here it gets its words."""

from collections.abc import Iterator

from qserve.artifacts import Report
from qserve.decision import Check, Decision, FormatStanding, Interval
from qserve.errors import UsageError
from qserve.eval import figures
from qserve.eval.findings import verdict
from qserve.eval.flips import Ground, flips
from qserve.eval.more import more
from qserve.eval.settle import Race, Settled, settle
from qserve.eval.table import everyone
from qserve.variants import BASELINE
from qserve.wishes import Wishes


def decide(report: Report, wishes: Wishes) -> Decision:
    """One format with its reasons, or that it is unresolved, or that nothing qualifies.

    Raises:
        UsageError: a floor on what no report has.
    """
    _check_tasks(report, wishes)
    settled = settle(report, wishes)
    rival = _runner_up(report, wishes, settled)
    lead = settled.lead
    chosen = lead if settled.outcome == "chosen" else None
    return Decision(
        run=report.run, model=report.model, machine=report.machine, wishes=wishes, outcome=settled.outcome,
        choice=settled.choice, provisional=lead.name if lead and not chosen else None,
        concurrency=chosen.concurrency if chosen else None, sentence=_sentence(settled, wishes),
        reasons=tuple(_reasons(settled, wishes)), runner_up=rival.name if rival else None,
        runner_up_says=_rival_says(rival, wishes) if rival else None, formats=settled.standings,
        flips=flips(Ground(report, wishes, settled, rival or _base(settled, lead))), more=more(report, wishes, settled),
    )  # fmt: skip


def _check_tasks(report: Report, wishes: Wishes) -> None:
    """Raises UsageError for a floor on a task that was not asked at all."""
    there = {name: None for v in everyone(report) if v.quality for name in v.quality.tasks}
    if missing := [name for name in wishes.floor.tasks if name not in there]:
        has = f"has the tasks {figures.listed(list(there))}" if there else "has no task scores"
        raise UsageError(
            f"a floor on the task score of {figures.listed(missing)} is asked for, and this report {has}; name it in "
            f"the recipe (quality: {{tasks: [{missing[0]}]}}) and run `qserve bench {report.recipe_file}`"
        )


def _base(settled: Settled, lead: FormatStanding | None) -> FormatStanding | None:
    base = settled.standings[0]
    return base if lead and lead is not base else None


def _runner_up(report: Report, wishes: Wishes, settled: Settled) -> FormatStanding | None:
    """The best of the others that qualify, by value; else of those that are undecided."""
    if settled.lead is None:
        return None
    for standing in ("qualifies", "undecided"):
        rest = tuple(s for s in settled.standings if s.standing == standing and s is not settled.lead)
        if rest:
            return Race(report, wishes, rest).best(rest)
    return None


# --- the sentence ----------
def _sentence(settled: Settled, wishes: Wishes) -> str:
    lead = settled.lead
    match settled.outcome:
        case "chosen":
            assert lead
            return _chosen(lead, wishes, settled.because)
        case "unresolved":
            until = f"; until then {lead.name} is safe" if lead else ""
            why = [need.why for need in settled.needs]
            first = "; ".join(why[:2]) + (f" (and {len(why) - 2} more)" if len(why) > 2 else "")
            return f"Unresolved: {first}{until}."
        case "nothing qualifies":
            return f"Nothing qualifies: {'; '.join(_short_failure(s) for s in settled.standings)}."


def _chosen(lead: FormatStanding, wishes: Wishes, because: str) -> str:
    at = f" at concurrency {lead.concurrency}" if lead.concurrency else ""
    if lead.name == BASELINE:
        parts = [f"Keep bf16{at}: {because}"]
    else:
        parts = [f"Deploy {lead.name} ({lead.label}){at}: {_beside(lead, wishes)}"]
        parts += [because] if because else []
    if lead.cost:
        parts.append(f"{interval(lead.cost)} per million output tokens")
    if lead.machines:
        parts.append(_machines(lead))
    return "; ".join(parts) + "."


def _beside(one: FormatStanding, wishes: Wishes) -> str:
    """A format's gain over bf16 in words."""
    what = {"throughput": "the output tokens/s", "ttft": "the time to first token", "itl": "the time between tokens"}
    if one.name == BASELINE:
        return "the baseline itself"
    if one.gain is None:
        return f"{one.name} has no valid comparison with bf16"
    known = {"faster": "", "slower": ", so it is slower", "unresolved": ", so within noise"}[verdict(one.gain)]
    return f"{figures.interval(one.gain)} times {what[wishes.objective]} of bf16{known}"


def _rival_says(one: FormatStanding, wishes: Wishes) -> str:
    said = _beside(one, wishes)
    return said if one.standing == "qualifies" else f"{said}; undecided: {_first_failure(one)}"


def _machines(one: FormatStanding) -> str:
    said = f"{figures.count(one.machines or 0, 'machine')} for the asked rate"
    if one.machines_cautious and one.machines_cautious != one.machines:
        said += f" ({one.machines_cautious} at the low end of the interval)"
    return said


def interval(item: Interval) -> str:
    """`0.42 [0.40, 0.45]`."""
    if item.low is None or item.high is None:
        return f"{figures.significant(item.value)} [no interval]"
    return f"{figures.significant(item.value)} [{figures.significant(item.low)}, {figures.significant(item.high)}]"


# --- the reasons ----------
def _reasons(settled: Settled, wishes: Wishes) -> Iterator[str]:
    """What speaks for the lead, then what speaks against each of the others."""
    lead = settled.lead
    if lead:
        yield from (f"{lead.name}: {check.says}" for check in lead.checks)
        if settled.outcome == "chosen" and settled.because:
            yield f"{lead.name}: {settled.because}"
    for one in (s for s in settled.standings if s is not lead):
        if one.standing == "qualifies":
            yield f"{one.name} qualifies: {_beside(one, wishes)}"
        elif one.standing == "undecided" and settled.outcome == "chosen":
            yield f"{one.name} is undecided: {_first_failure(one)}; it could not be better by 5 % or more"
        else:
            yield f"{one.name} is {one.standing}: {_first_failure(one)}"


def _first_failure(one: FormatStanding) -> str:
    """The demand that it fails; else the one that is unknown."""
    order = sorted(one.checks, key=_gravity)
    return order[0].says if order else "nothing is known of it"


def _short_failure(one: FormatStanding) -> str:
    """Without the engine's own words where it was not served at all."""
    says = _first_failure(one)
    served = one.checks and one.checks[0].state != "fails"
    return f"{one.name}: {says}" if served else f"{one.name}: {says.split(':')[0]}"


def _gravity(check: Check) -> int:
    return {"fails": 0, "unknown": 1, "holds": 2}[check.state]
