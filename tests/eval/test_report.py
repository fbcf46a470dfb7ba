"""The report says what the data says, and nothing else: headlines, tables, charts, escaping."""

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
import sample_report as sample

from qserve.artifacts import Ratio, Report
from qserve.errors import UsageError
from qserve.eval import figures, labels
from qserve.eval.findings import findings, headline, machine_words
from qserve.eval.markup import el
from qserve.eval.notes import reproduce
from qserve.eval.report import read_report, to_html, to_json, to_markdown, write_report

VOID = {"meta", "link", "br", "hr"}
HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(2)">|`'
MACHINE = "On AMD EPYC 7763 (2 cores, no AVX-512), "


class Page(HTMLParser):
    """Every element with its attributes, every table row; fails on an element that is not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    def count(self, tag: str, cls: str) -> int:
        return sum(1 for name, attrs in self.elements if name == tag and (attrs.get("class") or "") == cls)


@pytest.fixture(params=sorted(sample.ALL))
def any_report(request: pytest.FixtureRequest) -> Report:
    made: Report = sample.ALL[request.param]()
    return made


# --- the headline ----------
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (
            "winner",
            "int8 serves 1.45 times (1.39 to 1.51) the tokens of bf16 at concurrency 1 (also faster at 8) "
            "and costs 0.80 % in perplexity.",
        ),
        (
            "slow_fp8",
            "int8 serves 1.45 times (1.39 to 1.51) the tokens of bf16 at concurrency 1 (also faster at 8) "
            "and costs 0.80 % in perplexity; fp8 is 20 times slower at concurrency 1.",
        ),
        (
            "none_faster",
            "every variant (awq, gptq and int8) is slower than bf16 at concurrency 1 and 8; "
            "int8 keeps quality closest (KL 0.0121) in 61 % of the bytes.",
        ),
        ("noise", "no difference in speed between bf16 and int8 or fp8 was resolved at concurrency 1 or 8."),
        (
            "with_failures",
            "int8 serves 1.43 times (1.38 to 1.49) the tokens of bf16 at concurrency 8 (no valid comparison at 1) "
            "and costs 0.80 % in perplexity; left out: awq (not faithful) and fp8 (failed).",
        ),
        ("mostly_unknown", "no difference in speed between bf16 and int8 was resolved at concurrency 8."),
    ],
)
def test_the_headline_of_each_kind(kind: str, expected: str) -> None:
    assert headline(sample.ALL[kind]()) == MACHINE + expected


def test_a_slower_and_an_unresolved_variant_are_not_called_slower_everywhere() -> None:
    report = sample.report([sample.W4, sample.AWQ])
    assert "no variant (gptq and awq) is measurably faster than bf16 at concurrency 1 or 8" in headline(report)
    alone = headline(sample.report([sample.W4]))
    assert "gptq is not measurably faster than bf16: slower at concurrency 1 and unresolved at concurrency 8" in alone


def test_each_load_may_have_a_winner_of_its_own() -> None:
    w4 = sample.variant("w4", "GPTQ W4A16 g64", {1: (1.31, 1.24, 1.38), 8: (0.70, 0.66, 0.74)}, 0.141, 113.4)
    int8 = sample.variant("int8", "GPTQ W8A8", {1: (1.01, 0.95, 1.07), 8: (1.43, 1.38, 1.49)}, 0.0121, 163.2)
    said = findings(sample.report([w4, int8]))
    assert said[0] == MACHINE + (
        "int8 serves 1.43 times (1.38 to 1.49) the tokens of bf16 at concurrency 8 (unresolved at 1) "
        "and costs 0.80 % in perplexity; w4 serves 1.31 times at concurrency 1."
    )
    assert said[1:3] == (
        "Neither faster nor slower beyond the noise, by concurrency: int8 at 1. More pairs would tell.",
        "Slower than bf16, by concurrency: w4 at 8.",
    )


def test_the_machine_is_named_by_what_decides() -> None:
    machine = sample.winner().machine
    gpu = {"flavour": "cuda", "gpus": ("NVIDIA H200", "NVIDIA H200"), "gpu_memory_bytes": 141_000_000_000}
    assert machine_words(machine.model_copy(update=gpu)) == "2 × NVIDIA H200"
    intel = {"cpu": "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "cores": 1, "isa": ("avx2", "avx512f")}
    assert machine_words(machine.model_copy(update=intel)) == "Intel Xeon Platinum 8481C (1 core)"


def test_a_smoke_run_ranks_nothing() -> None:
    found = findings(sample.one_variant(quick=True))
    assert found == ("A smoke run, whose figures rank nothing: int8 ran from start to end.",)
    page = Page(to_html(sample.one_variant(quick=True)))
    assert page.count("p", "banner") == 1
    assert not any("faster" in cell for row in page.rows for cell in row)
    assert Page(to_html(sample.one_variant())).count("p", "banner") == 0


def test_nothing_measured_is_said_as_such() -> None:
    lost = [sample.lost("awq", "AWQ", "failed", "x"), sample.lost("fp8", "FP8", "not faithful", "y")]
    assert (
        headline(sample.report(lost)) == "No variant could be compared with bf16: awq (failed) and fp8 (not faithful)."
    )
    dead = sample.lost("bf16", "bfloat16", "failed", "out of memory")
    said = headline(sample.report([sample.INT8], baseline=dead))
    assert said == "Nothing can be compared, because bf16 itself failed."


def test_bf16_alone_says_that_there_is_nothing_to_compare() -> None:
    made = sample.report([], ())
    for report in (made, made.model_copy(update={"quick": True})):
        assert findings(report) == (
            "bf16 alone was served and scored (perplexity 6.25 ± 0.31); with no variant beside it there is no speed to "
            "tell and nothing to choose from.",
        )
        page = Page(to_html(report))
        assert page.rows[1][0].startswith("bf16") and not any("tok/s" in header for header in page.rows[0])
        (drawn,) = [attrs["aria-label"] for tag, attrs in page.elements if tag == "svg"]
        assert drawn and drawn.startswith("Disk and memory. bf16: 269 MB")
        assert page.text.count("Not drawn") == 1 and "Not drawn: no load was measured." in page.text
        assert "bf16 alone was served" in to_markdown(report) and "## Latency" not in to_markdown(report)
        assert "Latency" not in page.text and "Requests: sent" not in page.text
    lost = made.model_copy(update={"baseline": sample.lost("bf16", "bfloat16", "failed", "out of memory")})
    assert headline(lost) == "No variant was asked for, and bf16 itself failed."


def test_a_gain_without_an_interval_is_not_a_win() -> None:
    claimed = Ratio(value=2.0, low=None, high=None, pairs=1, verdict="faster")
    point = sample.INT8.points[1].model_copy(update={"throughput": claimed})
    report = sample.report([sample.INT8.model_copy(update={"points": (point,)})], (8,))
    assert "no difference in speed between bf16 and int8 was resolved at concurrency 8" in headline(report)


def test_an_invalid_side_is_no_comparison() -> None:
    for side in ("variant", "baseline"):
        points = tuple(
            p.model_copy(update={side: sample.load(p.concurrency, 99.0, valid=False, problem="undelivered")})
            for p in sample.INT8.points
        )
        said = headline(sample.report([sample.INT8.model_copy(update={"points": points})]))
        assert said == "No variant could be compared with bf16: int8 (no valid comparison of speed)."


def test_a_change_of_perplexity_within_its_error_costs_nothing() -> None:
    quality = sample.quality(6.27, 0.01, (1.003, 0.004))
    said = headline(sample.report([sample.INT8.model_copy(update={"quality": quality})]))
    assert "with no resolved change in perplexity" in said
    unknown = headline(sample.report([sample.INT8.model_copy(update={"quality": None})]))
    assert "with its quality unknown" in unknown


def test_the_first_finding_is_one_sentence(any_report: Report) -> None:
    first = findings(any_report)[0]
    assert first.endswith(".") and ". " not in first and "None" not in first


# --- figures ----------
def test_unknown_is_never_zero() -> None:
    report = sample.mostly_unknown()
    page = Page(to_html(report))
    row = next(row for row in page.rows if row[0].startswith("int8"))
    assert row[1:6] == ["unknown", "1.20 [no interval, 1 pair] unresolved", "6.30 (± unknown)", "unknown", "unknown"]
    for text in (to_html(report), to_markdown(report)):
        assert "None" not in text and "nan" not in text
        assert not re.search(r"\b0\.0+\b|[>|] *0 (MB|ms|s|tok)", text)


def test_rounding_happens_once_and_keeps_small_ratios() -> None:
    assert [figures.ratio(v) for v in (1.434, 0.0549, 0.1, 12.345)] == ["1.43", "0.055", "0.10", "12.35"]
    assert figures.size(None) == "unknown" and figures.size(163_200_000) == "163 MB" and figures.size(0) == "0 MB"
    assert [figures.size(n) for n in (999_000_000, 1_000_000_000, 15_230_000_000)] == ["999 MB", "1.00 GB", "15.2 GB"]
    assert [figures.duration(v) for v in (0.0123, 1.3, 600.0)] == ["12.3 ms", "1.30 s", "10 min"]
    assert figures.listed(["a", "b", "c"]) == "a, b and c"


def test_every_ratio_in_both_tables_is_the_reports(any_report: Report) -> None:
    expected = [
        figures.interval(p.throughput)
        for v in any_report.variants
        for p in v.points
        if p.throughput and p.variant.valid and p.baseline.valid
    ]
    assert expected
    page = Page(to_html(any_report))
    results = page.rows[1 : 2 + len(any_report.variants)]
    cells = [cell for row in results for cell in row if "[" in cell]
    assert [re.sub(r" (faster|slower|unresolved)$", "", cell) for cell in cells] == expected
    markdown = to_markdown(any_report).replace("\\", "")
    assert all(markdown.count(text) >= 1 for text in expected)


def test_latency_verdicts_are_in_the_sense_of_speed() -> None:
    page = Page(to_html(sample.winner()))
    rows = {(row[0], row[1]): row for row in page.rows if len(row) == 11 and row[1] in ("1", "8")}
    assert rows["int8", "1"][5] == "0.69 [0.66, 0.72] faster"
    assert rows["awq", "1"][5] == "1.35 [1.27, 1.45] slower"


def test_two_engines_have_a_column_and_a_note() -> None:
    page = Page(to_html(sample.two_engines()))
    assert page.rows[0][:3] == ["Variant", "Engine", "tok/s at\xa01"]
    engines = {row[0].split()[0]: row[1] for row in page.rows[1:6]}
    assert engines["bf16"] == "vllm"
    assert engines["q4_k_m@llama-server"] == "llama-server"
    assert "bf16 is served by vllm; a row named after llama-server is a checkpoint under it" in page.text
    assert "--engine vllm --engine llama-server" in reproduce(sample.two_engines())
    assert "Engine" not in Page(to_html(sample.winner())).rows[0]


# --- the page ----------
def test_markdown_has_one_row_a_variant(any_report: Report) -> None:
    lines = to_markdown(any_report).split("## Results\n\n")[1].split("\n\n")[0].splitlines()
    assert len(lines) == 2 + 1 + len(any_report.variants)
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1


def test_the_page_is_balanced_and_loads_nothing(any_report: Report) -> None:
    page = Page(to_html(any_report))
    tags = {tag for tag, _ in page.elements}
    assert {"table", "figure", "h1"} <= tags and not tags & {"script", "iframe", "img", "object", "form"}
    for _, attrs in page.elements:
        assert not any(key.startswith("on") for key in attrs)
        assert (attrs.get("src"), attrs.get("href")) in ((None, None), (None, "data:,"))
    assert not re.search(r"url\(|@import|https?://", to_html(any_report))


def test_headers_have_a_scope_and_charts_a_name(any_report: Report) -> None:
    page = Page(to_html(any_report))
    assert all(attrs.get("scope") in ("col", "row") for tag, attrs in page.elements if tag == "th")
    charts = [attrs for tag, attrs in page.elements if tag == "svg"]
    assert charts and all(attrs.get("role") == "img" and attrs.get("aria-label") for attrs in charts)


def test_as_many_marks_as_valid_points() -> None:
    """with_failures: bf16 has two valid loads, int8 one and one that is not; and one point of quality against speed."""
    page = Page(to_html(sample.with_failures()))
    throughput_and_ttft, scatter = 2 * (2 + 1), 1
    assert page.count("path", "point") == throughput_and_ttft + scatter
    assert page.count("path", "point hollow") == 2
    six = Page(to_html(sample.six_variants()))
    assert six.count("path", "point") == 2 * 7 * 6 + 2 * 6 and six.count("path", "point hollow") == 0
    assert six.count("line", "join") == 2 * 7 * 5


def test_a_point_that_is_not_valid_is_not_joined() -> None:
    page = Page(to_html(sample.with_failures()))
    assert page.count("line", "join") == 2  # bf16's, in two charts


def test_ttft_falls_back_to_the_median_and_says_so() -> None:
    assert "Time to first token, p95" in to_html(sample.winner())
    assert "Time to first token, p50" in to_html(sample.slow_fp8())
    assert "not every load has the 20 values that p95 needs" in to_html(sample.slow_fp8())


def test_failures_are_shown_by_reason() -> None:
    for text in (to_html(sample.with_failures()), to_markdown(sample.with_failures())):
        for fact in (
            "21 (HTTP 503) and 2 (timeout) of 64 requests failed",
            "no kernel for FP8 on this CPU",
            "2.31 nats",
        ):
            assert fact in text.replace("\u00a0", " ")
    assert "16 of 24 requests were cut" in to_markdown(sample.slow_fp8())


def test_text_from_outside_is_text() -> None:
    """A name, label, model, reason or problem cannot become markup, in the page or in Markdown."""
    int8 = sample.INT8.model_copy(update={"name": HOSTILE, "label": HOSTILE})
    lost = sample.lost(HOSTILE, HOSTILE, "failed", HOSTILE)
    failed = sample.load(8, 100.0, failed={HOSTILE: 3}, valid=False, problem=HOSTILE)
    broken = sample.AWQ.model_copy(update={"points": (sample.AWQ.points[1].model_copy(update={"variant": failed}),)})
    report = sample.report([int8, lost, broken], model=HOSTILE, source_note=HOSTILE, recipe={HOSTILE: HOSTILE})
    page = Page(to_html(report))
    assert not {tag for tag, _ in page.elements} & {"script", "img"}
    assert HOSTILE in page.text
    outside_code = "\n".join(line for line in to_markdown(report).splitlines() if not line.startswith("    "))
    assert "<script" not in outside_code and "<img" not in outside_code
    lines = to_markdown(report).split("## Results\n\n")[1].split("\n\n")[0].splitlines()
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert el("p", "<b>", title='"<') == '<p title="&quot;&lt;">&lt;b&gt;</p>'


def test_long_names_that_look_alike_get_different_labels() -> None:
    names = [v.name for v in sample.six_variants().variants]
    made = labels.shorten(names)
    assert len(set(made.values())) == len(names) == 6
    assert all(len(label) <= 15 for label in made.values())


def test_labels_keep_apart() -> None:
    places = labels.spread([100.0, 101.0, 102.0, 250.0], 10, 254)
    assert all(b - a >= labels.LINE for a, b in pairwise(places)) and places[-1] <= 254


# --- files ----------
def test_json_is_the_report_itself(any_report: Report) -> None:
    assert Report.model_validate_json(to_json(any_report)) == any_report
    assert json.loads(to_json(any_report)) == any_report.model_dump(mode="json")


def test_a_report_is_read_from_its_run_folder(tmp_path: Path) -> None:
    sample.winner().write(tmp_path / "measurements.json")
    assert read_report(tmp_path) == sample.winner()
    (tmp_path / "measurements.json").write_text('{"format": 2}')
    with pytest.raises(UsageError, match=r"measurements.json: .*run `qserve bench` again"):
        read_report(tmp_path)
    with pytest.raises(UsageError, match="give the folder of a finished"):
        read_report(tmp_path / "absent")


def test_write_report_writes_both_files_and_nothing_else(tmp_path: Path) -> None:
    report = sample.winner()
    write_report(report, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"report.md", "report.html"}
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == to_html(report)


def test_the_report_can_be_run_again_from_what_it_says() -> None:
    text = to_markdown(sample.winner())
    assert "    qserve prep recipes/quickstart.yaml && qserve bench recipes/quickstart.yaml\n" in text
    spaced = sample.winner().model_copy(update={"recipe_file": "my recipe.yaml", "quick": True})
    assert reproduce(spaced) == "qserve prep 'my recipe.yaml' && qserve bench 'my recipe.yaml' --quick"
    given = ("--only", "int8", "--pairs", "9", "--only", "awq")
    assert reproduce(spaced.model_copy(update={"options": given})) == (
        "qserve prep 'my recipe.yaml' --only int8 --only awq && "
        "qserve bench 'my recipe.yaml' --only int8 --pairs 9 --only awq"
    )
    assert reproduce(spaced.model_copy(update={"options": ()})).endswith("qserve bench 'my recipe.yaml'")
    assert "concurrency:" in text
    assert "VLLM_CPU_OMP_THREADS_BIND=0-1 python -m vllm.entrypoints.openai.api_server" in text
    assert "5e1f" * 16 in text and "212 too short" in text
