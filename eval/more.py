"""From open questions to one command that answers them."""

import math
import shlex

from qserve.artifacts import Report
from qserve.decision import More
from qserve.eval.settle import PAIRS_FIRST, Need, Settled
from qserve.eval.table import concurrencies, everyone
from qserve.limits import PAIRS, RECORDS, SECONDS
from qserve.variants import BASELINE
from qserve.wishes import Wishes

SPARE = 1.1  # time for items longer than those that had time


def more(report: Report, wishes: Wishes, settled: Settled) -> More | None:
    """What to run; None where nothing is open, or no longer run would close it. The new run is judged by itself, so its
    pairs are all it has."""
    needs = settled.needs
    if all(need.final for need in needs):
        return None
    pairs = max((min(n, PAIRS) for need in needs if (n := _pairs(report, wishes, settled, need))), default=None)
    windows = max((min(need.windows, RECORDS) for need in needs if need.windows), default=None)
    items = max((min(need.items, RECORDS) for need in needs if need.items), default=None)
    concurrency = next((need.concurrency for need in needs if need.concurrency), None)
    lengths = next((need.lengths for need in needs if need.lengths), (None, None))
    if report.quick:
        pairs = None
    elif wishes.traffic.concurrency and len(concurrencies(report)) > 1:
        concurrency = wishes.traffic.concurrency  # the others would be measured for nothing
    options = [*_only(report, settled), *_engines(report, settled)]
    numbers: list[str] = []
    for name, value in (("--pairs", pairs), ("--windows", windows), ("--task-items", items),
                        ("--task-s", _task_s(report, settled, items)),
                        ("--concurrency", concurrency), ("--prompt-tokens", lengths[0]),
                        ("--output-tokens", lengths[1])):  # fmt: skip
        numbers += [name, str(value)] if value else []
    own = {"--engine"} if report.variants else {"--engine", "--only"}  # bf16 alone leaves the question as it is
    kept = _kept(report, {*options, *numbers, *own})
    command = shlex.join(["qserve", "bench", report.recipe_file, *kept, *numbers, *options])
    return More(
        why=tuple(need.why for need in needs), command=command, pairs=pairs, windows=windows, task_items=items,
        concurrency=concurrency, loads_s=_loads_s(report, settled, pairs, concurrency),
    )  # fmt: skip


def _kept(report: Report, replaced: set[str]) -> list[str]:
    """The run's own options that still hold: the new run has the same traffic. All but --quick have a value."""
    words = [word for word in report.options or () if word != "--quick"]
    pairs = zip(words[::2], words[1::2], strict=True)
    return [word for name, value in pairs if name not in replaced for word in (name, value)]


def _loads_s(report: Report, settled: Settled, pairs: int | None, concurrency: int | None) -> float | None:
    """Time of that many pairs, by the time that the measured ones took; without start-up and scoring."""
    open_ = {s.name for s in settled.standings if s.standing != "excluded"}
    took = [
        (p.variant.wall_s + p.baseline.wall_s) / p.throughput.pairs
        for v in report.variants
        for p in v.points
        if v.name in open_ and p.throughput and concurrency in (None, p.concurrency)
    ]
    return sum(took) * pairs if pairs and took else None


def _task_s(report: Report, settled: Settled, items: int | None) -> int | None:
    """Seconds for that many items of each task, by the items that had time; None where all had it, since more items
    get more by themselves unless the time was given beside them."""
    quality = report.recipe.get("quality", {})
    if items is None or not (had_s := quality.get("task_s")):
        return None
    open_ = {s.name for s in settled.standings if s.standing != "excluded"}
    times, cut = 1.0, "--task-s" in (report.options or ())
    for task in (t for v in everyone(report) if v.quality and v.name in open_ for t in v.quality.tasks.values()):
        seen, asked = task.items + task.too_long, min(quality.get("task_items") or task.of_items, task.of_items)
        if task.items:
            cut = cut or seen < asked
            times = max(times, min(items, task.of_items) / seen)
    return min(math.ceil(had_s * times * SPARE), int(SECONDS)) if cut else None


def _pairs(report: Report, wishes: Wishes, settled: Settled, need: Need) -> int | None:
    """Pairs that bring the requests that a percentile needs, or that a comparison needs."""
    if need.requests is None:
        return need.pairs
    slots = report.recipe.get("bench", {}).get("requests_per_slot") or 1
    at = wishes.traffic.concurrency or next(
        (s.concurrency for s in settled.standings if s.name in need.names and s.concurrency), 1
    )
    return max(math.ceil(need.requests / (at * slots)), need.pairs or 0, PAIRS_FIRST)


def _only(report: Report, settled: Settled) -> list[str]:
    """The formats that are still in question, unless that is all of them. An arm `int8@engine` is its variant."""
    if report.quick or not any(need.names for need in settled.needs):
        return []
    open_ = [s.name.split("@")[0] for s in settled.standings if s.standing != "excluded"]
    every = {v.name.split("@")[0] for v in report.variants} - {BASELINE}
    names = [name for name in dict.fromkeys(open_) if name != BASELINE]
    return [word for name in names for word in ("--only", name)] if names and set(names) != every else []


def _engines(report: Report, settled: Settled) -> list[str]:
    """bf16's engine, and those of the other arms in question; nothing where that is what bench takes by itself."""
    first = report.baseline.server.engine if report.baseline.server else None
    others = [s.name.split("@")[1] for s in settled.standings if "@" in s.name and s.standing != "excluded"]
    if first is None or (not others and first == report.recipe.get("serving", {}).get("engine", first)):
        return []
    return [word for name in dict.fromkeys([first, *others]) for word in ("--engine", name)]
