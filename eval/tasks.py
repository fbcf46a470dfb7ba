"""From the outcome of each item to a task's score, beside bf16's on the same items."""

import math
from collections.abc import Mapping, Sequence

from pydantic import Field

from qserve.artifacts import Artifact, Estimate, TaskScore
from qserve.eval import figures
from qserve.eval.shares import items_needed, sign_test, wilson
from qserve.eval.student import samples_needed
from qserve.values import Frozen

CLEAR = 0.05  # a split of flips that is likelier than this by chance alone is noise


class Task(Frozen):
    """What a task is, as it was prepared. `source`: its file, or its name in lm-evaluation-harness."""

    name: str
    source: str
    metric: str
    filter: str  # of lm_eval: which reading of an answer counts
    items: int  # to be asked
    of_items: int
    few_shot: int
    sha256: str  # of the documents
    config: str  # sha256 of how they are asked
    dataset: str | None


class Outcomes(Frozen):
    """One task on one server. A `problem`: there are none, and this is why."""

    values: dict[str, float] = Field({})  # item -> 0..1
    too_long: int = 0  # items
    cut: int = 0  # answers that the limit of tokens ended
    prompts: str | None = None  # sha256 of all that was to be sent
    problem: str | None = None


class ArmTasks(Artifact):
    """tasks-<arm>.json in the run's folder: the outcome of every item, by task."""

    context_tokens: int | None = None
    bos: str | None = None
    tasks: dict[str, Outcomes]


def task_scores(tasks: Sequence[Task], own: ArmTasks, base: ArmTasks | None) -> dict[str, TaskScore]:
    """The scores of a server; `base`: of bf16, to pair with."""
    return {task.name: _score(task, own, base) for task in tasks}


def _score(task: Task, own: ArmTasks, base: ArmTasks | None) -> TaskScore:
    found = own.tasks.get(task.name, Outcomes(problem="it was not asked"))
    beside = base.tasks.get(task.name) if base else None
    metric = task.metric if task.filter == "none" else f"{task.metric} ({task.filter})"
    made = TaskScore(
        metric=metric, score=None, items=len(found.values), of_items=task.of_items,
        too_long=found.too_long, few_shot=task.few_shot,
        context_tokens=own.context_tokens, bos=own.bos, sha256=task.sha256, dataset=task.dataset,
        note="; ".join(_notes(task, found, own)) or None,
    )  # fmt: skip
    if found.problem or not found.values:
        return made
    values = list(found.values.values())
    scored = made.model_copy(update={"score": mean(values), "binary": set(values) <= {0.0, 1.0}})
    if beside is None or beside.prompts != found.prompts:
        same = "bf16 was asked with other prompts, so the two are not compared" if beside and beside.prompts else None
        return scored.model_copy(update={"note": "; ".join(n for n in (made.note, same) if n) or None})
    return scored.model_copy(update=_paired(found.values, beside.values))


def _paired(own: Mapping[str, float], base: Mapping[str, float]) -> dict[str, object]:
    both = [(own[item], base[item]) for item in own if item in base]
    if not both:
        return {}
    won, lost = sum(a > b for a, b in both), sum(a < b for a, b in both)
    return {"delta": mean([a - b for a, b in both]), "won": won, "lost": lost, "paired": len(both)}


def _notes(task: Task, found: Outcomes, own: ArmTasks) -> list[str]:
    said = [found.problem] if found.problem else []
    if found.too_long:
        room = f"the served context of {own.context_tokens:,} tokens" if own.context_tokens else "the served context"
        said.append(f"{figures.count(found.too_long, 'item')} longer than {room}, left out")
    left = task.items - found.too_long - len(found.values)
    if left and not found.problem:
        said.append(f"{len(found.values)} of {task.items - found.too_long} items in the time for them (quality.task_s)")
    if found.cut:
        said.append(f"{figures.count(found.cut, 'answer')} ended by the limit of tokens")
    return said


def mean(values: Sequence[float]) -> Estimate:
    """Mean over items and its standard error."""
    n = len(values)
    value = math.fsum(values) / n
    spread = math.fsum((x - value) ** 2 for x in values)
    return Estimate(value=value, se=math.sqrt(spread / (n - 1) / n) if n > 1 else None)


# --- what the figures can tell ----------
def interval(task: TaskScore) -> tuple[float, float] | None:
    """95 %: Wilson's for right or wrong, Student's t for graded items; None where the noise is not known."""
    if task.score is None or not task.items:
        return None
    if task.binary:
        return wilson(task.score.value, task.items)
    half = figures.margin(task.score.se, task.items)
    return None if half is None else (max(task.score.value - half, 0.0), min(task.score.value + half, 1.0))


def needed(task: TaskScore, limit: float) -> int | None:
    """Items that would tell a score like this one from the limit; None where no number does."""
    if task.score is None:
        return None
    if task.binary:
        return items_needed(task.score.value, limit)
    gap = abs(task.score.value - limit)
    return samples_needed((task.score.se or 0.0) * math.sqrt(task.items), gap, 0.95) if gap else None


def against_bf16(task: TaskScore) -> str | None:
    """`better`, `worse` or `within noise`; None where there is no pair."""
    if task.delta is None or task.won is None or task.lost is None or task.paired is None:
        return None
    if task.binary:
        clear = sign_test(task.won, task.lost) < CLEAR
    else:
        half = figures.margin(task.delta.se, task.paired)
        clear = half is not None and abs(task.delta.value) > half
    return "within noise" if not clear else "better" if task.delta.value > 0 else "worse"
