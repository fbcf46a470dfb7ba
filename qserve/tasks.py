"""Tasks of lm-evaluation-harness in a run: loaded before anything is served, then scored on each live server.

The worker (eval/tasks_worker.py) runs in an environment of its own. The outcome of every item is kept in the run's
folder, so that bf16 is asked once, and an interrupted run goes on with what was scored before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from pydantic import TypeAdapter

from qserve.artifacts import TaskScore
from qserve.errors import PreflightError, ServerError, UsageError, WorkerError
from qserve.eval import figures
from qserve.eval import tasks as scoring
from qserve.eval.tasks import ArmTasks, Outcomes, Task, task_scores
from qserve.jobs import Job, run_job
from qserve.recipe import Recipe, is_task_file
from qserve.runtime_spec import Flavour
from qserve.runtimes import Runtime, ensure_runtime
from qserve.serve import server
from qserve.variants import BASELINE
from qserve.workspace import Workspace

WORKER = Path(scoring.__file__).with_name("tasks_worker.py")
# No word to anyone about what is run; no bar of progress for every request in the log; safe path: no module of qserve
# under the name of a library.
ENV = {
    "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1", "TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false",
    "PYTHONSAFEPATH": "1",
}  # fmt: skip
TASKS = TypeAdapter(tuple[Task, ...])


def check_tasks(recipe: Recipe) -> None:
    """What can be told without the environment. Raises UsageError."""
    if recipe.choose.floor.tasks and not recipe.quality.tasks:
        wanted = ", ".join(recipe.choose.floor.tasks)
        raise UsageError(f"choose.floor.tasks asks for {wanted}, and quality.tasks names no task: add quality.tasks")
    for task in recipe.quality.tasks:
        if is_task_file(task) and not Path(task).is_file():
            raise UsageError(f"quality.tasks: no file {task}; a task file is relative to the recipe")


@dataclass(frozen=True)
class Tasks:
    """The tasks of one run, and what asks them."""

    every: tuple[Task, ...]
    recipe: Recipe
    harness: Runtime
    say: server.Say

    @property
    def identity(self) -> list[Any]:
        """Everything in them that decides figures."""
        return [self.harness.digest, [task.model_dump() for task in self.every]]


def prepare_tasks(recipe: Recipe, workspace: Workspace, flavour: Flavour, say: server.Say) -> Tasks | None:
    """Every task of the recipe, loaded once, so that its data is at hand; None where it names none.

    Raises:
        UsageError: there is no such task, or it cannot be scored.
        PreflightError: its data cannot be had.
    """
    check_tasks(recipe)
    if not recipe.quality.tasks:
        return None
    harness = ensure_runtime("lmeval", flavour, say)
    spec = {"do": "prepare", "tasks": list(recipe.quality.tasks), "items": recipe.quality.task_items}
    result = _work(harness, "tasks", spec, workspace.root / "tasks.log", say)
    if refused := result.get("refused"):
        raise (UsageError if result["fault"] == "task" else PreflightError)(f"quality.tasks: {refused}")
    tasks = TASKS.validate_python(result["tasks"])
    if missing := [name for name in recipe.choose.floor.tasks if name not in {task.name for task in tasks}]:
        named = ", ".join(task.name for task in tasks)
        raise UsageError(f"choose.floor.tasks: {missing[0]} is not among quality.tasks, which are {named}")
    for task in tasks:
        shots = f", {task.few_shot} examples before each" if task.few_shot else ""
        say(f"{task.name}: {task.items:,} of {task.of_items:,} items, {task.metric}{shots}")
    return Tasks(tasks, recipe, harness, say)


def score_tasks(tasks: Tasks, run: Path, arm: str, checkpoint: Path, live: server.Server) -> dict[str, TaskScore]:
    """The scores of one server, paired with bf16's where those are there. A task that fails says why.

    Raises:
        WorkerError, ServerError: the server died.
    """
    path, base = run / f"tasks-{arm}.json", run / f"tasks-{BASELINE}.json"
    before = ArmTasks.read(path) if path.exists() else None
    kept = _scored(before)
    if missing := tuple(task for task in tasks.every if task.name not in kept):
        asked = _ask(tasks, missing, path.with_suffix(".log"), checkpoint, live)
        head = before if before and kept else asked
        head.model_copy(update={"tasks": {**kept, **asked.tasks}}).write(path)
    beside = ArmTasks.read(base) if arm != BASELINE and base.exists() else None
    scores = task_scores(tasks.every, ArmTasks.read(path), beside)
    for name, score in scores.items():
        said = figures.estimate(score.score) if score.score else "no score"
        tasks.say(f"{arm}: {name}: {score.metric} {said}{f' ({score.note})' if score.note else ''}")
    return scores


def _scored(before: ArmTasks | None) -> dict[str, Outcomes]:
    """What was scored before an interruption stays; a task that failed then is asked again."""
    return {name: found for name, found in (before.tasks if before else {}).items() if found.values}


def _ask(tasks: Tasks, missing: Sequence[Task], log: Path, checkpoint: Path, live: server.Server) -> ArmTasks:
    """The outcome of every item of these tasks on this server, in their share of the time."""
    if not live.launch.echoes:
        why = f"{live.launch.engine} gives no log-probabilities of a prompt to lm-evaluation-harness"
        return ArmTasks(tasks={task.name: Outcomes(problem=why) for task in missing})
    quality = tasks.recipe.quality
    try:
        context = _context(live)
        spec = {
            "do": "score", "tasks": [task.model_dump() for task in missing], "items": quality.task_items,
            "url": live.url, "model": live.model, "checkpoint": str(checkpoint), "context_tokens": context,
            "budget_s": quality.task_s * len(missing) / len(tasks.every),
        }  # fmt: skip
        result = _work(tasks.harness, f"tasks on {live.model}", spec, log, tasks.say)
    except (WorkerError, ServerError) as error:
        if not live.alive():
            raise
        return ArmTasks(tasks={task.name: Outcomes(problem=str(error)) for task in missing})
    found = ArmTasks.model_validate({"context_tokens": context, "bos": result["bos"], "tasks": result["tasks"]})
    if not live.alive():
        raise WorkerError(f"the server of {live.model} ended while it was asked; log: {log}")
    return found


def _context(live: server.Server) -> int:
    """Tokens that a request may have, by the server's own word. Raises ServerError."""
    url = f"{live.url}/v1/models"
    try:
        rows = server.ask(url, timeout_s=30).json()["data"]
        return int(next(row["max_model_len"] for row in rows if row["id"] == live.model))
    except (httpx.HTTPError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise ServerError(f"{url} does not say how long a request may be: {error!r}; log: {live.log}") from error


def _work(harness: Runtime, name: str, spec: Mapping[str, Any], log: Path, say: server.Say) -> dict[str, Any]:
    job = Job(name=name, python=harness.python, worker=WORKER, spec=spec, log=log, env=ENV)
    return run_job(job, lambda event: say(str(event["text"])))
