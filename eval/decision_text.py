"""A Decision as text or Markdown to read, as HTML for a notebook, and as JSON for a pipeline."""

from collections.abc import Callable

from qserve.decision import Decision, FormatStanding, More
from qserve.eval import figures
from qserve.eval.decide import interval
from qserve.eval.figures import NONE, UNKNOWN, listed
from qserve.eval.markup import Safe, el
from qserve.eval.report import markdown_table, plain
from qserve.eval.table import Cell, Table


def to_json(decision: Decision) -> str:
    """The decision itself, and nothing that is not in it."""
    return decision.model_dump_json(indent=2)


def to_text(decision: Decision) -> str:
    """For a terminal."""
    return _lay_out(decision, str, lambda sentence: sentence, _columns(standings(decision)))


def to_markdown(decision: Decision) -> str:
    return _lay_out(decision, plain, lambda sentence: f"**{sentence}**", markdown_table(standings(decision)))


def _lay_out(decision: Decision, escape: Callable[[str], str], strong: Callable[[str], str], table: str) -> str:
    parts = [strong(escape(decision.sentence))]
    if decision.more:
        parts.append(f"{escape(run_more(decision.more))}\n\n    {decision.more.command}")
    parts.append(table)
    for title, items in sections(decision):
        parts.append(f"{title}:\n\n" + "\n".join(f"- {escape(item)}" for item in items))
    return "\n\n".join(parts) + "\n"


def run_more(more: More) -> str:
    took = f" ({figures.duration(more.loads_s)} of load, by what was measured)" if more.loads_s else ""
    return f"Run this much more{took}, then qserve choose:"


def _columns(content: Table) -> str:
    """Columns side by side, words to the left and figures to the right."""
    rows = [content.headers, *(tuple(cell.text for cell in row) for row in content.rows)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(content.headers))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if i < content.names else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def to_html(decision: Decision) -> Safe:
    """A fragment without style of its own: it takes the notebook's."""
    content = standings(decision)
    head = el("tr", *(el("th", header) for header in content.headers))
    rows = [el("tr", *(el("td", cell.text) for cell in row)) for row in content.rows]
    more = el("div", el("p", run_more(decision.more)), el("pre", decision.more.command)) if decision.more else None
    told = [el("p", f"{title}:") + el("ul", *(el("li", item) for item in items)) for title, items in sections(decision)]
    table = el("table", el("thead", head), el("tbody", *rows))
    return el("div", el("p", el("strong", decision.sentence)), more, table, *(Safe(part) for part in told))


def sections(decision: Decision) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Titles and their sentences; only those that have any."""
    runner = (f"{decision.runner_up}: {decision.runner_up_says}",) if decision.runner_up else ()
    open_ = decision.more.why if decision.more else ()
    found = (
        ("Reasons", decision.reasons),
        ("Open", open_),
        ("Runner-up", runner),
        ("Beats bf16", tuple(said for one in decision.formats[1:] if (said := beats(one)))),
        ("What would flip it", tuple(flip.says for flip in decision.flips)),
    )
    return tuple((title, items) for title, items in found if items)


def beats(one: FormatStanding) -> str | None:
    """`int8: at concurrency 8 and 16; slower at 1`, of the concurrencies that were measured; None where none count."""
    if not (one.faster_at or one.slower_at or one.unresolved_at):
        return None
    said = [f"at concurrency {_runs(one.faster_at)}"] if one.faster_at else ["nowhere that was measured"]
    said += [f"slower at {_runs(one.slower_at)}"] if one.slower_at else []
    said += [f"unresolved at {_runs(one.unresolved_at)}"] if one.unresolved_at else []
    return f"{one.name}: {'; '.join(said)}"


def _runs(concurrencies: tuple[int, ...]) -> str:
    return listed([str(c) for c in concurrencies])


def standings(decision: Decision) -> Table:
    """One row a format."""
    priced = decision.wishes.price_per_hour is not None
    rated = any(one.machines for one in decision.formats)
    ratio = {"throughput": "÷ bf16", "ttft": "TTFT ÷ bf16", "itl": "ITL ÷ bf16"}[decision.wishes.objective]
    headers = ["Format", "Standing", "At", "tok/s", ratio]
    headers += ["Per million tokens"] if priced else []
    headers += ["Machines"] if rated else []
    rows = [_row(one, priced, rated) for one in decision.formats]
    return Table("Formats", tuple(headers), tuple(rows), names=2)


def _row(one: FormatStanding, priced: bool, rated: bool) -> tuple[Cell, ...]:
    rate = interval(one.output_tokens_per_s) if one.output_tokens_per_s else UNKNOWN
    cells = [
        one.name,
        one.standing,
        str(one.concurrency or NONE),
        rate,
        figures.interval(one.gain) if one.gain else NONE,
    ]
    cells += [interval(one.cost) if one.cost else UNKNOWN] if priced else []
    cells += [_machines(one)] if rated else []
    return tuple(Cell(text) for text in cells)


def _machines(one: FormatStanding) -> str:
    """`8`, or `8 to 9` where the low end of the throughput's interval asks for more."""
    cautious = one.machines_cautious
    more = f" to {cautious:,}" if cautious and cautious != one.machines else ""
    return f"{one.machines:,}{more}" if one.machines else UNKNOWN
