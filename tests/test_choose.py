"""`qserve choose` through its front doors: the command, the recipe's section, and Python in a notebook."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "eval"))
from known_report import Truth, known

import qserve
from qserve.artifacts import Report
from qserve.bench import _run_folder, changed_recipe
from qserve.choose import floor_of, merge
from qserve.decision import Decision
from qserve.errors import UsageError
from qserve.machine import look
from qserve.measure import Inputs
from qserve.recipe import find_recipe, load_recipe
from qserve.runtimes import Runtime
from qserve.wishes import SLO_NAMES, Floor, Wishes
from qserve.workspace import Workspace


def run_choose(*words: str, cwd: Path, expect: int = 0) -> subprocess.CompletedProcess[str]:
    code = "import sys; from qserve.cli import app; sys.argv[0] = 'qserve'; app()"
    command = [sys.executable, "-c", code, "choose", *words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout}\n{done.stderr[-2000:]}"
    return done


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with one finished run, in which int8 is 1.4 times as fast as bf16."""
    save(tmp_path, known([Truth("int8", 1.4)], (1, 8), requests=40))
    return tmp_path


def save(project: Path, report: Report) -> Path:
    run = project / "qserve-workspace" / "runs" / report.run
    run.mkdir(parents=True, exist_ok=True)
    report.write(run / "measurements.json")
    return run


# --- the command ----------
def test_exit_codes_say_chosen_unresolved_nothing_qualifies(project: Path) -> None:
    assert run_choose(cwd=project).stdout.startswith("Deploy int8")
    unresolved = run_choose("--concurrency", "32", cwd=project, expect=9)
    assert "qserve bench known.yaml --concurrency 32" in unresolved.stdout
    nothing = run_choose("--slo", "itl_p95=0.0001", cwd=project, expect=10)
    assert nothing.stdout.startswith("Nothing qualifies") and nothing.stderr == ""


def test_json_is_a_decision_and_nothing_else(project: Path) -> None:
    words = ("--slo", "ttft_p95=1", "--price", "2", "--rate", "30", "--floor", "kl=0.1", "--memory-gb", "2")
    done = run_choose(*words, "--format", "json", cwd=project)
    decision = Decision.model_validate_json(done.stdout)
    assert decision.choice == "int8" and decision.wishes.traffic.requests_per_s == 30
    assert decision.wishes == Wishes.model_validate(json.loads(done.stdout)["wishes"])
    int8 = next(one for one in decision.formats if one.name == "int8")
    assert int8.cost and int8.cost.low and int8.machines and int8.machines >= 2
    assert run_choose("--format", "json", "--slo", "itl_p95=0.0001", cwd=project, expect=10).stdout.startswith("{")
    assert "| int8 | qualifies |" in run_choose("--format", "md", cwd=project).stdout


@pytest.mark.parametrize(("words", "said"), [
    (("--slo", "ttft_p59=0.5"), r"slo: unknown 'ttft_p59'; did you mean one of ttft_p50, .*e2e_p99"),
    (("--slo", "ttft_p95=-1"), r"slo\.ttft_p95: Input should be greater than 0"),
    (("--slo", "ttft_p95=nan"), r"slo\.ttft_p95: Input should be a finite number|greater than 0"),
    (("--slo", "ttft_p95"), r"--slo ttft_p95: write NAME=NUMBER"),
    (("--slo", "ttft_p95=fast"), r"--slo ttft_p95=fast: write NAME=NUMBER"),
    (("--floor", "kL=0.1"), r"--floor kL: did you mean one of kl, perplexity_ratio, top1, or task:NAME"),
    (("--floor", "kl=-0.1"), r"floor\.kl: Input should be greater than or equal to 0"),
    (("--floor", "kl=inf"), r"floor\.kl: Input should be a finite number"),
    (("--floor", "top1=90"), r"floor\.top1: Input should be less than or equal to 1"),
    (("--floor", "task:mmlu=0.5"), r"task score of mmlu is asked for, and this report has no task scores"),
    (("--concurrency", "0"), r"traffic\.concurrency: Input should be greater than or equal to 1"),
    (("--concurrency", "9" * 20), r"traffic\.concurrency: Input should be less than or equal to 10000"),
    (("--prompt-tokens", "9" * 20), r"traffic\.prompt_tokens: Input should be less than or equal to 10000000"),
    (("--rate", "1e13"), r"traffic\.requests_per_s: Input should be less than or equal to 1000000000000"),
    (("--rate", "1", "--tokens-rate", "2"), r"traffic: give the rate as requests_per_s or as output_tokens_per_s"),
    (("--price", "0"), r"price_per_hour: Input should be greater than 0"),
    (("--price", "1e300"), r"price_per_hour: Input should be less than or equal to 1"),
    (("--slo", "ttft_p95=1", "--slo", "ttft_p95=2"), r"--slo ttft_p95 is given twice"),
    (("--memory-gb", "nan"), r"memory_gb: Input should be (a finite number|greater than 0)"),
    (("--objective", "ttft"), r"objective ttft needs a concurrency"),
    (("no-such-run",), r"no-such-run/measurements\.json: No such file"),
])  # fmt: skip
def test_what_cannot_be_is_one_sentence(project: Path, words: tuple[str, ...], said: str) -> None:
    done = run_choose(*words, cwd=project, expect=2)
    assert re.search(said, done.stderr), done.stderr
    assert done.stdout == "" and len(done.stderr.splitlines()) == 1


def test_the_table_names_the_ratio_and_counts_machines_within_noise(project: Path) -> None:
    """Of a latency below 1 is better; just below a whole number of machines the interval asks for one more."""
    by_itl = run_choose("--concurrency", "8", "--objective", "itl", cwd=project).stdout
    (header,) = [line for line in by_itl.splitlines() if line.startswith("Format ")]
    assert header.endswith("  ITL ÷ bf16")
    decision = Decision.model_validate_json(run_choose("--format", "json", "--concurrency", "8", cwd=project).stdout)
    rate = next(one.output_tokens_per_s for one in decision.formats if one.name == "int8")
    assert rate and rate.low and rate.low < 0.999 * rate.value
    done = run_choose("--concurrency", "8", "--tokens-rate", str(2.999 * rate.value), cwd=project)
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("int8 ")]
    assert row.endswith("  3 to 4")


def test_another_version_is_named(project: Path) -> None:
    path = next(project.glob("qserve-workspace/runs/*/measurements.json"))
    path.write_text(path.read_text().replace('"format": 1,', '"format": 7,', 1))
    said = run_choose(str(path), cwd=project, expect=2).stderr
    assert f"{path}: it is of format 7, which another version of qserve writes; " in said


def test_no_run_yet_says_what_makes_one(tmp_path: Path) -> None:
    assert "`qserve bench` makes one" in run_choose(cwd=tmp_path, expect=2).stderr


def test_what_to_run_next_is_of_the_same_traffic(tmp_path: Path) -> None:
    """The run's own options stay, but for those that the open question changes."""
    report = known([Truth("int8", 1.03, noise=0.1), Truth("fp8", 0.2)], (1, 8), requests=40)
    given = ("--output-tokens", "16", "--pairs", "4", "--engine", "vllm", "--only", "int8", "--only", "fp8", "--quick")
    save(tmp_path, report.model_copy(update={"options": given}))
    said = run_choose("--concurrency", "32", cwd=tmp_path, expect=9).stdout
    (command,) = [line.strip() for line in said.splitlines() if line.startswith("    qserve bench")]
    assert command.startswith(
        "qserve bench known.yaml --output-tokens 16 --pairs 4 --only int8 --only fp8 --concurrency"
    )
    assert "--quick" not in command and "--engine" not in command
    said = run_choose("--concurrency", "8", "--slo", "itl_p95=2", cwd=tmp_path, expect=9).stdout
    (command,) = [line.strip() for line in said.splitlines() if line.startswith("    qserve bench")]
    alone = report.model_copy(update={"variants": (), "options": ("--only", "bf16", "--output-tokens", "16")})
    save(tmp_path / "alone", alone)
    said = run_choose("--concurrency", "32", cwd=tmp_path / "alone", expect=9).stdout
    assert "    qserve bench known.yaml --output-tokens 16 --concurrency 32\n" in said
    assert command.count("--pairs") == 1 and "--pairs 4" not in command and "--output-tokens 16" in command


# --- the recipe's section ----------
def test_the_section_of_the_recipe_that_was_run_is_used_and_options_override_it(tmp_path: Path) -> None:
    section = {"slo": {"itl_p95": 0.0001}, "traffic": {"concurrency": 8, "requests_per_s": 5}, "price_per_hour": 2}
    report = known([Truth("int8", 1.4)], (1, 8), requests=40)
    save(tmp_path, report.model_copy(update={"recipe": report.recipe | {"choose": section}}))
    assert "itl_p95 at concurrency 8" in run_choose(cwd=tmp_path, expect=10).stdout
    done = run_choose("--slo", "itl_p95=1", "--tokens-rate", "900", "--format", "json", cwd=tmp_path)
    wishes = Decision.model_validate_json(done.stdout).wishes
    assert wishes.traffic.model_dump(exclude_none=True) == {"concurrency": 8, "output_tokens_per_s": 900}
    assert (wishes.slo, wishes.price_per_hour) == ({"itl_p95": 1}, 2)
    assert run_choose("--recipe", "quickstart", cwd=tmp_path).stdout.startswith("Deploy int8")


@pytest.mark.parametrize(("old", "new", "said"), [
    ("kl: 0.1", "kL: 0.1", r"choose\.floor\.kL: unknown field; did you mean one of kl, perplexity_ratio, tasks, top1"),
    ("kl: 0.1", "kl: -1", r"choose\.floor\.kl: Input should be greater than or equal to 0"),
    ("ttft_p95: 5", "ttft_p96: 5", r"choose\.slo: unknown 'ttft_p96'; did you mean one of ttft_p50"),
    ("ttft_p95: 5", "ttft_p95: .nan", r"choose\.slo\.ttft_p95: Input should be"),
    ("traffic: {concurrency: 8}", "traffic: {users: 8}", r"choose\.traffic\.users: unknown field; .*concurrency"),
    ("choose:", "choose: []\nchosen:", r"choose: "),
])  # fmt: skip
def test_a_wrong_section_names_file_line_and_field(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "r.yaml"
    text = find_recipe("quickstart").read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    with pytest.raises(UsageError, match=rf"r\.yaml:\d+: {said}"):
        load_recipe(path)


def test_what_is_to_be_chosen_forces_no_new_run(tmp_path: Path) -> None:
    """An unfinished run goes on after the section was edited, and does not after the traffic was."""
    recipe = load_recipe(find_recipe("quickstart"))
    runtime = Runtime("llmcompressor-cpu", Path(sys.executable), "0" * 12, {})
    space = Workspace(tmp_path)
    inputs = Inputs(
        recipe=recipe, recipe_file=Path("r.yaml"), workspace=space, prepared=(), data=tmp_path, machine=look(),
        engines=(), reference=runtime, quick=False, say=lambda text: None,
    )  # fmt: skip
    first = _run_folder(inputs, ())
    edited = recipe.model_copy(update={"choose": Wishes(slo={"ttft_p95": 9})})
    assert edited.choose != recipe.choose
    assert _run_folder(replace(inputs, recipe=edited), ()) == first
    assert _run_folder(replace(inputs, recipe=changed_recipe(recipe, {"pairs": 9}, None)), ()) != first


def test_bench_takes_what_choose_asks_for() -> None:
    recipe = load_recipe(find_recipe("quickstart"))
    more = changed_recipe(recipe, {"pairs": 12, "concurrency": [4], "prompt_tokens": None}, 20)
    assert (more.bench.pairs, more.bench.concurrency, more.quality.windows) == (12, (4,), 20)
    assert more.bench.variant_s == recipe.bench.variant_s * 12 / recipe.bench.pairs
    assert more.bench.prompt_tokens == recipe.bench.prompt_tokens
    with pytest.raises(UsageError, match=r"bench\.concurrency: each concurrency once"):
        changed_recipe(recipe, {"concurrency": [4, 4]}, None)


def test_a_floor_on_one_task_leaves_the_recipes_floor_on_another() -> None:
    base = Wishes(floor=Floor(kl=0.1, tasks={"a": 0.3, "b": 0.4}))
    assert merge(base, {"floor": floor_of({"task:a": 0.5})}).floor == Floor(kl=0.1, tasks={"a": 0.5, "b": 0.4})
    assert merge(base, {"floor": floor_of({"kl": 0.2})}).floor == Floor(kl=0.2, tasks={"a": 0.3, "b": 0.4})


# --- Python ----------
def test_the_same_from_python(project: Path) -> None:
    (run,) = (project / "qserve-workspace" / "runs").iterdir()
    for path in (run, str(run), run / "measurements.json"):
        report = qserve.load_report(path)
        decision = report.choose(slo={"ttft_p95": 1.0}, traffic={"concurrency": 8})
        assert isinstance(report, Report) and isinstance(decision, Decision)
        assert decision.choice == "int8" and decision.wishes.slo == {"ttft_p95": 1.0}
    assert "<table>" in decision._repr_html_() and "Deploy int8" in decision._repr_html_()
    assert str(decision).startswith("Deploy int8") and str(report).startswith("# ")
    frame = report._repr_html_()
    assert frame.startswith("<iframe srcdoc=") and frame.count("<") == 2
    page = unescape(frame)
    assert "<svg" in page and "Throughput" in page
    with pytest.raises(UsageError, match="did you mean one of"):
        report.choose(slo={"ttft": 1.0})
    with pytest.raises(UsageError, match=r"floor\.kll: there is no such wish"):
        report.choose(floor={"kll": 1.0})
    with pytest.raises(UsageError, match="a floor on the task score of arc_easy is asked for, and this report has no"):
        report.choose(floor={"task:arc_easy": 0.4})
    assert len(SLO_NAMES) == 12


def test_the_package_stays_light_until_a_report_is_loaded() -> None:
    code = "import sys, qserve; light = len(sys.modules); qserve.load_report; print(light, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    light, loaded = done.stdout.split()
    assert int(light) < 150 and loaded == "True"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        qserve.nothing  # type: ignore[attr-defined]  # noqa: B018
