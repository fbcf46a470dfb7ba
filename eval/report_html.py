"""The report as one page: it loads nothing, runs no script, and reads in light, dark, wide, narrow and on paper."""

from pathlib import Path

from qserve.artifacts import Report
from qserve.eval import notes, table
from qserve.eval.findings import findings
from qserve.eval.markup import Safe, el, join
from qserve.eval.plots import Chart, charts
from qserve.eval.table import Cell, Table
from qserve.eval.task_table import task_table

SMOKE = "Smoke run: the figures show that everything works, and no more. Leave out --quick to measure."
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def to_html(report: Report) -> str:
    """One self-contained HTML page. All text from the report is escaped."""
    return (
        "<!doctype html>\n"
        + el("html", head(f"{model_name(report.model)}: qserve report"), _body(report), lang="en")
        + "\n"
    )


def head(title: str) -> Safe:
    style = Safe(Path(__file__).with_name("report.css").read_text(encoding="utf-8"))
    return el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=POLICY),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("link", rel="icon", href="data:,"),
        el("title", title),
        el("style", style),
    )


def _body(report: Report) -> Safe:
    first, *others = findings(report)
    header = el(
        "header",
        el("p", f"{model_name(report.model)} · {report.created[:10]} · run {report.run}", cls="eyebrow"),
        el("p", SMOKE, cls="banner", role="note") if report.quick else None,
        el("h1", unbroken(first)),
        _list(others, "findings"),
    )
    main = el("main", header, _results(report), _plots(report), _details(report), _provenance(report))
    return el("body", main, el("footer", el("p", f"Written by qserve {report.qserve_version} from measurements.json.")))


def model_name(model: str) -> str:
    """The last part of a Hub id or a path."""
    return model.rstrip("/").rsplit("/", 1)[-1] or model


def _list(items: list[str] | tuple[str, ...], cls: str) -> Safe | None:
    return el("ul", *(el("li", unbroken(item)) for item in items), cls=cls) if items else None


def unbroken(text: str) -> str:
    """No line break between a figure and its sign."""
    for loose, tight in ((" %", "_%"), (" ± ", "_±_"), (" nats", "_nats"), (" at ", " at_"), ("÷ ", "÷_")):
        text = text.replace(loose, tight.replace("_", "\u00a0"))
    return text


def folded(title: str, *children: str | None) -> Safe:
    """A section that is long and seldom read: closed until it is asked for, open on paper."""
    return el("section", el("details", el("summary", el("h2", title)), *children))


def section(title: str, *children: str | None) -> Safe:
    return el("section", el("h2", title), *children)


# --- figures first ----------
def _results(report: Report) -> Safe:
    told = notes.notes(report)
    heard = join(el("h3", "Notes"), _list(told, "notes")) if told else None
    return section("Results", drawn(table.results(report), slots=True), heard)


def _plots(report: Report) -> Safe:
    return section("Plots", el("div", *(figure(chart) for chart in charts(report)), cls="plots"))


def figure(chart: Chart) -> Safe:
    caption = el("figcaption", el("strong", chart.title), " ", unbroken(chart.caption))
    return el("figure", caption, chart.drawing)


def _details(report: Report) -> Safe:
    tables = (task_table, table.latency, table.memory, table.fidelity, table.served)
    shown = [section(made.title, drawn(made)) for make in tables if (made := make(report)).rows]
    sent = table.requests(report)
    return join(*shown, folded(f"{sent.title}: sent, complete, cut, failed", drawn(sent)) if sent.rows else None)


# --- what it rests on ----------
def _provenance(report: Report) -> Safe:
    rows = (("Model", report.model), ("Recipe", report.recipe_file), *notes.machine(report))
    judged = notes.quality_settings(report)
    commands = [join(el("h3", name), el("pre", el("code", line))) for name, line in notes.commands(report)]
    return join(
        section("Definitions", _terms(notes.definitions(report))),
        section("Machine and model", _terms(rows)),
        folded("Settings", el("pre", el("code", notes.settings(report)))),
        folded("Server commands", *commands) if commands else None,
        section("Data", el("p", judged) if judged else None, _list(notes.data(report), "notes")) if judged else None,
        section("Run it again", el("pre", el("code", notes.reproduce(report)))),
    )


def _terms(rows: tuple[tuple[str, str], ...]) -> Safe:
    return el("dl", *(el("div", el("dt", term), el("dd", text)) for term, text in rows))


# --- tables ----------
def drawn(content: Table, slots: bool = False) -> Safe:
    """A table in a box of its own, which scrolls where the page is narrow. `slots`: rows carry the charts' colours."""
    head = el(
        "tr", *(el("th", unbroken(text), scope="col", cls=_align(i, content)) for i, text in enumerate(content.headers))
    )
    rows = [
        el("tr", *(_cell(cell, i, content, f"s{n}" if slots else None) for i, cell in enumerate(row)))
        for n, row in enumerate(content.rows)
    ]
    caption = el("caption", content.title, cls="unseen")
    made = el("table", caption, el("thead", head), el("tbody", *rows))
    return el("div", made, cls="scroll", tabindex="0", role="region", aria_label=content.title)


def _align(column: int, content: Table) -> str | None:
    return None if column < content.names else "figure"


def _cell(cell: Cell, column: int, content: Table, slot: str | None) -> Safe:
    text = el("span", cell.text, cls="bad" if cell.bad else cell.verdict, title=cell.why)
    if cell.verdict:
        text = join(text, " ", el("span", cell.verdict, cls=f"verdict {cell.verdict}"))
    if cell.under:
        text = join(text, " ", el("span", cell.under, cls="under"))
    if column == 0:
        chip = el("i", cls=f"chip {slot}", aria_hidden="true") if slot else None
        return el("th", chip, text, scope="row")
    return el("td", text, cls=_align(column, content))
