"""What `qserve bench` was given stands in the report, so that the run can be made again.

Every option is walked here: one that is added later is either said again, or named in NOT_OF_THE_RUN.
"""

import shlex

import pytest
import typer
from sample_report import report
from typer.core import TyperOption

from qserve import limits
from qserve.app import given_options
from qserve.cli import NOT_OF_THE_RUN, app
from qserve.eval.notes import reproduce

BENCH = typer.main.get_command(app).commands["bench"]  # type: ignore[attr-defined]
OPTIONS = {option.name: option for option in BENCH.params if isinstance(option, TyperOption)}


def words_of(option: TyperOption, value: str = "7") -> tuple[str, ...]:
    return (option.opts[0],) if option.is_flag else (option.opts[0], value)


def given(*words: str) -> tuple[str, ...]:
    return given_options(BENCH.make_context("bench", ["r.yaml", *words]), NOT_OF_THE_RUN)


def test_every_option_is_said_again() -> None:
    assert {"only", "quick", "engine", "pairs", "concurrency", "prompt_tokens", "output_tokens", "windows"} <= set(
        OPTIONS
    )
    assert set(NOT_OF_THE_RUN) <= set(OPTIONS)
    for name, option in OPTIONS.items():
        assert given(*words_of(option)) == (() if name in NOT_OF_THE_RUN else words_of(option)), name
    assert given() == ()
    assert [name for name, option in OPTIONS.items() if option.is_flag] == ["quick"]  # as `choose` reads them, too


def test_the_line_in_the_report_parses_to_the_same_run() -> None:
    words = [word for option in OPTIONS.values() for word in words_of(option)]
    words += [word for option in OPTIONS.values() if option.multiple for word in words_of(option, "8")]
    line = reproduce(report([], ()).model_copy(update={"recipe_file": "r.yaml", "options": given(*words)}))
    prep, bench = (shlex.split(command) for command in line.split(" && "))
    assert prep == ["qserve", "prep", "r.yaml", "--only", "7", "--only", "8"]
    assert bench[:3] == ["qserve", "bench", "r.yaml"]
    before, again = (BENCH.make_context("bench", list(w)).params for w in (["r.yaml", *words], bench[2:]))
    assert {k: v for k, v in before.items() if k not in NOT_OF_THE_RUN} == {
        k: v for k, v in again.items() if k not in NOT_OF_THE_RUN
    }


@pytest.mark.parametrize(("option", "most"), [
    ("concurrency", limits.CONCURRENCY), ("pairs", limits.PAIRS), ("prompt_tokens", limits.TOKENS),
    ("output_tokens", limits.TOKENS), ("windows", limits.RECORDS),
])  # fmt: skip
def test_a_number_beyond_any_use_is_refused_with_its_bound(option: str, most: int) -> None:
    assert given(*words_of(OPTIONS[option], str(most)))
    with pytest.raises(Exception, match=rf"(1<=x<=|less than or equal to ){most}\b"):  # as typer's version has it
        given(*words_of(OPTIONS[option], str(most + 1)))
