"""Task scores: intervals with known values, pairing item by item, and what the floor makes of them."""

import json
import math
from pathlib import Path

import pytest
from known_report import Truth, known, with_variant

from qserve.artifacts import Report, TaskScore
from qserve.bench import changed_recipe
from qserve.errors import UsageError
from qserve.eval.checks import task_check
from qserve.eval.decide import decide
from qserve.eval.decision_text import to_text
from qserve.eval.findings import findings
from qserve.eval.report import to_html, to_markdown
from qserve.eval.shares import items_needed, sign_test, wilson
from qserve.eval.tasks import ArmTasks, Outcomes, Task, against_bf16, interval, task_scores
from qserve.recipe import find_recipe, load_recipe
from qserve.runtimes import Runtime
from qserve.serve.server import Launch, Server
from qserve.tasks import Tasks, score_tasks
from qserve.wishes import Floor, Wishes

TASK = Task(
    name="capitals", source="/r/capitals.yaml", metric="acc", filter="none", items=100, of_items=400, few_shot=2,
    sha256="ab" * 32, config="cd" * 32, dataset=None,
)  # fmt: skip


def arm(values: dict[str, float] | None = None, **changes: object) -> ArmTasks:
    outcome = Outcomes(values=values or {}, prompts="p").model_copy(update=changes)
    return ArmTasks(context_tokens=2048, bos="none", tasks={"capitals": outcome})


def right(n: int, of: int) -> dict[str, float]:
    return {f"capitals/{i}": float(i < n) for i in range(of)}


def score(n: int, of: int = 100, base: dict[str, float] | None = None, task: Task = TASK) -> TaskScore:
    return task_scores([task], arm(right(n, of)), arm(base) if base else None)["capitals"]


# --- figures ----------
@pytest.mark.parametrize(("share", "n", "low", "high"), [  # by hand, and as in any table of Wilson's interval
    (0.8, 10, 0.4902, 0.9433), (0.35, 100, 0.2636, 0.4475), (0.0, 20, 0.0, 0.1611), (1.0, 20, 0.8389, 1.0),
    (0.5, 1000, 0.4691, 0.5309),
])  # fmt: skip
def test_wilsons_interval(share: float, n: int, low: float, high: float) -> None:
    assert wilson(share, n) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(("won", "lost", "p"), [
    (0, 5, 0.0625), (6, 0, 0.03125), (1, 9, 22 / 1024), (3, 3, 1), (0, 0, 1), (2000, 2000, 1),
])  # fmt: skip
def test_the_sign_test(won: int, lost: int, p: float) -> None:
    assert sign_test(won, lost) == pytest.approx(p)


def test_the_items_that_are_asked_for_settle_it_and_fewer_do_not() -> None:
    """Of a share of 0.40 against 0.35: with that many items the interval leaves the limit out, even where the share
    comes out 0.842 standard errors lower (80 % power); with a fifth fewer it does not."""
    n = items_needed(0.40, 0.35)
    assert n == 727
    seen = [0.40 - 0.842 * math.sqrt(0.24 / count) for count in (n, n * 8 // 10)]
    assert wilson(seen[0], n)[0] >= 0.35 > wilson(seen[1], n * 8 // 10)[0]
    assert items_needed(0.4, 0.4) is None and items_needed(0.4, 0.4001) is None


def test_a_delta_is_paired_by_item() -> None:
    """Differences 0, +1, -1, +1 on the four items that both were asked: mean 0.25, deviation 0.957, error 0.479."""
    own = {"capitals/0": 1.0, "capitals/1": 1.0, "capitals/2": 0.0, "capitals/3": 1.0, "capitals/4": 1.0}
    base = {"capitals/0": 1.0, "capitals/1": 0.0, "capitals/2": 1.0, "capitals/3": 0.0, "capitals/9": 1.0}
    made = task_scores([TASK], arm(own), arm(base))["capitals"]
    assert made.delta
    assert (made.delta.value, made.delta.se) == pytest.approx((0.25, 0.478714), abs=1e-5)
    assert (made.won, made.lost, made.paired, made.items) == (2, 1, 4, 5)
    assert made.score and made.score.value == pytest.approx(0.8)
    assert made.score.se == pytest.approx(math.sqrt(0.8 * 0.2 / 4))
    assert against_bf16(made) == "within noise"


@pytest.mark.parametrize(("n", "said"), [(40, "within noise"), (45, "within noise"), (46, "better"), (34, "worse")])
def test_a_difference_counts_only_where_the_flips_are_too_uneven_for_chance(n: int, said: str) -> None:
    assert against_bf16(score(n, base=right(40, 100))) == said


def test_graded_items_have_students_interval() -> None:
    values = {f"capitals/{i}": (0.25, 0.75)[i % 2] for i in range(16)}
    made = task_scores([TASK], arm(values), None)["capitals"]
    assert not made.binary and made.delta is None and against_bf16(made) is None
    half = 2.131 * math.sqrt(16 * 0.0625 / 15 / 16)
    assert interval(made) == pytest.approx((0.5 - half, 0.5 + half))


def test_what_is_missing_is_said_and_no_score_is_made_up() -> None:
    none = task_scores([TASK], arm(problem="ClientResponseError: 400"), arm(right(9, 10)))["capitals"]
    assert none.score is None and none.delta is None and interval(none) is None
    assert none.note == "ClientResponseError: 400" and none.items == 0
    some = task_scores([TASK], arm(right(30, 60), too_long=3, cut=2), None)["capitals"]
    assert some.note == (
        "3 items longer than the served context of 2,048 tokens, left out; 60 of 97 items in the time for them "
        "(quality.task_s); 2 answers ended by the limit of tokens"
    )
    other = task_scores([TASK], arm(right(30, 60)), arm(right(30, 60), prompts="q"))["capitals"]
    assert other.score and other.delta is None and other.note and "other prompts" in other.note


# --- the floor ----------
def report(n: int, base: int = 40, **changes: object) -> Report:
    """int8 1.4 times as fast as bf16, with so many of 100 items right."""
    made = known([Truth("int8", 1.4)], (8,))
    quality = made.variants[0].quality
    own = made.baseline.quality
    assert quality and own
    tasks = {"capitals": score(n, base=right(base, 100)).model_copy(update=changes)}
    theirs = {"capitals": score(base).model_copy(update=changes)}
    bf16 = made.baseline.model_copy(update={"quality": own.model_copy(update={"tasks": theirs})})
    return with_variant(made, "int8", quality=quality.model_copy(update={"tasks": tasks})).model_copy(
        update={"baseline": bf16}
    )


def floor(limit: float) -> Wishes:
    return Wishes(floor=Floor(tasks={"capitals": limit}))


def test_a_floor_holds_fails_or_is_within_noise() -> None:
    low, high = wilson(0.4, 100)
    states = [task_check("capitals", report(40).variants[0].quality, f).state for f in (low - 0.01, high + 0.01, 0.38)]
    assert states == ["holds", "fails", "unknown"]


def test_a_floor_that_holds_is_a_reason_and_says_where_it_would_not() -> None:
    decision = decide(report(40), floor(0.25))
    assert decision.choice == "int8"
    assert "int8: its capitals is 0.400 [0.309, 0.498] of 100 items, at least 0.250 is asked for" in decision.reasons
    flip = next(f for f in decision.flips if "floor on task capitals above" in f.says)
    assert "above 0.498 rules int8 out; then " in flip.says


def test_bf16_itself_must_hold_it() -> None:
    decision = decide(report(70, base=20), floor(0.5))
    assert decision.choice == "int8"
    assert next(f for f in decision.formats if f.name == "bf16").standing == "excluded"
    assert decide(report(10, base=20), floor(0.5)).outcome == "nothing qualifies"


def test_without_the_floor_something_else_would_be_chosen() -> None:
    decision = decide(report(10, base=60), floor(0.4))
    assert decision.choice == "bf16"
    assert "without the floor on task capitals int8 would be chosen" in [f.says for f in decision.flips]


def test_a_floor_within_noise_asks_for_items_and_no_more_than_there_are() -> None:
    decision = decide(report(43), floor(0.3))  # bf16, with 40 of 100, holds it by a hair: [0.309, 0.498]
    assert decision.choice == "int8"
    decision = decide(report(38, base=60), floor(0.3))
    assert decision.outcome == "unresolved" and decision.more
    assert decision.more.task_items == items_needed(0.38, 0.3) == 267  # (1.95996 √0.21 + 0.842 √0.2356)² / 0.08²
    assert decision.more.command == "qserve bench known.yaml --task-items 267"
    close = decide(report(38, base=60), floor(0.36))
    assert close.more and close.more.task_items == 400  # every item that the task has
    assert "within noise" in close.sentence


@pytest.mark.parametrize(("options", "asked", "command"), [
    ((), 100, "--task-items 267"),
    ((), 200, "--task-items 267 --task-s 2644"),  # 900 s were enough for 100: 900 · 267 / 100 · 1.1
    ((), None, "--task-items 267 --task-s 2644"),
    (("--task-items", "100", "--task-s", "900"), 100, "--task-items 267 --task-s 2644"),
])  # fmt: skip
def test_items_that_the_time_ended_are_asked_for_with_the_time_for_them(
    options: tuple[str, ...], asked: int | None, command: str
) -> None:
    made = report(38, base=60)
    recipe = {**made.recipe, "quality": {**made.recipe.get("quality", {}), "task_items": asked, "task_s": 900.0}}
    decision = decide(made.model_copy(update={"recipe": recipe, "options": options}), floor(0.3))
    assert decision.more and decision.more.command == f"qserve bench known.yaml {command}"


def test_where_every_item_was_asked_no_command_is_given_that_would_tell_nothing_new() -> None:
    decision = decide(report(38, base=60, of_items=100), floor(0.36))
    assert decision.outcome == "unresolved" and decision.more is None
    assert "it has no more items" in decision.sentence
    assert "0.380 [0.291, 0.478]" in to_text(decision)


def test_a_score_that_could_not_be_had_is_unknown() -> None:
    made = report(40)
    gone = made.variants[0].quality
    assert gone
    missing = gone.tasks["capitals"].model_copy(update={"score": None, "delta": None, "items": 0, "note": "no echo"})
    check = task_check("capitals", gone.model_copy(update={"tasks": {"capitals": missing}}), 0.1)
    assert (check.state, check.says) == ("unknown", "its score on capitals was not measured: no echo")
    assert task_check("capitals", None, 0.1).state == "unknown"


def test_a_server_that_cannot_be_asked_is_not_to_be_measured_again() -> None:
    """Undecided, and could win; the same run would find the same, so no command is given."""
    made = report(40, base=60)
    theirs, quality = made.baseline.quality, made.variants[0].quality
    assert theirs and quality
    lost = quality.tasks["capitals"].model_copy(update={"score": None, "delta": None, "items": 0, "note": "no echo"})
    unasked = with_variant(made, "int8", quality=quality.model_copy(update={"tasks": {"capitals": lost}}))
    decision = decide(unasked.model_copy(update={"baseline": made.baseline}), floor(0.3))
    assert (decision.outcome, decision.provisional, decision.more) == ("unresolved", "bf16", None)
    assert "its score on capitals was not measured: no echo" in decision.sentence


# --- on paper ----------
def test_the_report_shows_the_scores_and_calls_noise_noise() -> None:
    made = report(38)
    text = to_markdown(made)
    row = next(line for line in text.splitlines() if line.startswith("| capitals | int8 |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == [
        "capitals", "int8", "acc", "0.380 ± 0.049", "\\[0.291, 0.478\\]", "−0.0200 ± 0.0141, within noise", "0", "2",
        "100 of 400", "2",
    ]  # fmt: skip
    assert any("int8 on capitals −0.0200 ± 0.0141 (within noise)" in sentence for sentence in findings(made))
    assert "task capitals: data of its own; acc, 2 examples before each item" in text
    assert "Task scores" in to_html(made) and "Wilson" in to_html(made)
    assert "± of a task score: One standard error, between items." in text


def test_a_report_without_tasks_says_nothing_of_them_and_an_old_one_loads() -> None:
    made = known([Truth("int8", 1.4)], (8,))
    old = json.loads(made.model_dump_json())
    for v in (old["baseline"], *old["variants"]):
        del v["quality"]["tasks"]
    assert Report.model_validate(old) == made
    assert "Task" not in to_markdown(made) and "Task scores" not in to_html(made)


# --- going on ----------
def test_after_an_interruption_only_the_task_that_failed_is_asked_again(tmp_path: Path) -> None:
    """By a server that cannot score: the new outcome of the task that failed says so, and the other's is as it was."""
    other = TASK.model_copy(update={"name": "rivers"})
    before = {"capitals": Outcomes(values=right(4, 10), prompts="p"), "rivers": Outcomes(problem="TimeoutError: ")}
    ArmTasks(context_tokens=2048, bos="none", tasks=before).write(tmp_path / "tasks-int8.json")
    launch = Launch("pipeline", (), {}, "127.0.0.1", 9, "int8")
    live = Server(launch, 0, tmp_path / "log", 1.0)
    asked = Tasks(
        (TASK, other), load_recipe(find_recipe("quickstart")), Runtime("lmeval", Path("/none"), "d", {}), print
    )
    scores = score_tasks(asked, tmp_path, "int8", tmp_path, live)
    assert scores["capitals"].score and scores["capitals"].score.value == pytest.approx(0.4)
    assert scores["capitals"].context_tokens == 2048
    assert scores["rivers"].score is None and "pipeline gives no log-probabilities" in str(scores["rivers"].note)


# --- the recipe ----------
def write(folder: Path, quality: str) -> Path:
    path = folder / "r.yaml"
    text = find_recipe("quickstart").read_text().replace("quality:\n", f"quality:\n{quality}")
    path.write_text(text)
    return path


def test_a_task_file_is_relative_to_the_recipe(tmp_path: Path) -> None:
    made = load_recipe(write(tmp_path, "  tasks: [arc_easy, ./tasks/mine.yaml]\n  task_items: 200\n"))
    assert made.quality.tasks == ("arc_easy", str(tmp_path / "tasks" / "mine.yaml"))
    more = changed_recipe(made, {}, None, 500).quality
    assert (more.task_items, more.task_s) == (500, made.quality.task_s * 2.5)
    longer = changed_recipe(made, {}, None, 500, 77).quality
    assert (longer.task_items, longer.task_s) == (500, 77.0)


@pytest.mark.parametrize(("given", "named"), [((9, None), "--task-items"), ((None, 9), "--task-s")])
def test_options_of_tasks_need_tasks(given: tuple[int | None, int | None], named: str) -> None:
    with pytest.raises(UsageError, match=f"{named}: the recipe names no task; add quality.tasks"):
        changed_recipe(load_recipe(find_recipe("quickstart")), {}, None, *given)


def test_without_tasks_a_run_keeps_its_name(tmp_path: Path) -> None:
    """What a run is named by is what it was before there were tasks; with tasks, they are part of it."""
    plain = load_recipe(find_recipe("quickstart"))
    measured = plain.measured()
    assert set(measured["quality"]) == {"dataset", "windows", "tokens", "top_k"} and "choose" not in measured
    with_tasks = load_recipe(write(tmp_path, "  tasks: [arc_easy]\n")).measured()
    assert with_tasks["quality"]["tasks"] == ["arc_easy"]
