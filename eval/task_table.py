"""The task scores of a report, in a table and in sentences."""

from collections.abc import Iterator

from qserve.artifacts import Report, TaskScore, VariantResult
from qserve.eval import figures
from qserve.eval.figures import NONE, UNKNOWN
from qserve.eval.table import Cell, Table, everyone
from qserve.eval.tasks import against_bf16, interval

DEFINITIONS = (
    (
        "Task score",
        "Mean of the items' values, each from 0 to 1, as lm-evaluation-harness computes them from the live server's "
        "answers, without a chat template. Its 95 % interval is Wilson's where an item is right or wrong.",
    ),
    ("± of a task score", "One standard error, between items."),
    (
        "− bf16",
        "The score minus bf16's on the same items, paired item by item. Of items that are right or wrong the exact "
        "sign test on those that changed says better, worse, or within noise (5 %); of graded items the 95 % interval.",
    ),
)


def named(report: Report) -> tuple[str, ...]:
    """Every task that was asked anywhere."""
    return tuple(dict.fromkeys(name for v in everyone(report) if v.quality for name in v.quality.tasks))


def task_table(report: Report) -> Table:
    """One row a task and variant, bf16 first; no rows where no tasks were asked."""
    headers = ("Task", "Variant", "Metric", "Score", "95 %", "− bf16", "Won", "Lost", "Items", "Examples")
    rows = [
        _row(name, v, v.quality.tasks[name])
        for name in named(report)
        for v in everyone(report)
        if v.quality and name in v.quality.tasks
    ]
    return Table("Task scores", headers, tuple(rows), names=3)


def _row(name: str, variant: VariantResult, task: TaskScore) -> tuple[Cell, ...]:
    within = interval(task)
    score = Cell(figures.estimate(task.score), why=task.note) if task.score else Cell(UNKNOWN, why=task.note)
    flips = [Cell(NONE if n is None else str(n)) for n in (task.won, task.lost)]
    return (
        Cell(name), Cell(variant.name), Cell(task.metric), score,
        Cell(f"[{within[0]:.3f}, {within[1]:.3f}]" if within else UNKNOWN), _beside(task), *flips,
        Cell(f"{task.items:,} of {task.of_items:,}"), Cell(str(task.few_shot)),
    )  # fmt: skip


def _beside(task: TaskScore) -> Cell:
    if task.delta is None:
        return Cell(NONE, why="the reference, or not asked of both")
    return Cell(figures.signed(task.delta), under=against_bf16(task))


def task_notes(variant: VariantResult) -> Iterator[str]:
    """What is to be known of a variant's scores."""
    for name, task in (variant.quality.tasks if variant.quality else {}).items():
        if task.note:
            yield f"{variant.name}: {name}: {task.note}"


def task_data(report: Report) -> Iterator[str]:
    """One line a task: what was asked."""
    for name in named(report):
        scores = (v.quality.tasks[name] for v in everyone(report) if v.quality and name in v.quality.tasks)
        task = next(iter(scores))
        room = f"; context {task.context_tokens:,} tokens" if task.context_tokens else ""
        first = f"; first in a prompt: {task.bos}" if task.bos else ""
        yield (
            f"task {name}: {task.dataset or 'data of its own'}; {task.metric}, {task.few_shot} examples before each "
            f"item{room}{first}; sha256 of the documents {task.sha256}"
        )
