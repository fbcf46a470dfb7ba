"""A Decision as Markdown to read, as HTML for a notebook, and as JSON for a pipeline."""

from qserve.decision import Decision, FormatStanding
from qserve.eval import figures
from qserve.eval.decide import interval
from qserve.eval.figures import NONE, UNKNOWN, listed
from qserve.eval.markup import Safe, el
from qserve.eval.report import markdown_table, plain
from qserve.eval.table import Cell, Table


def to_json(decision: Decision) -> str:
    """The decision itself, and nothing that is not in it."""
    return decision.model_dump_json(indent=2)


def to_markdown(decision: Decision) -> str:
    parts = [f"**{plain(decision.sentence)}**"]
    if decision.more:
        parts.append(f"Run this much more:\n\n    {decision.more.command}")
    parts.append(markdown_table(standings(decision)))
    for title, items in sections(decision):
        parts.append(f"{title}:\n\n" + "\n".join(f"- {plain(item)}" for item in items))
    return "\n\n".join(parts) + "\n"


def to_html(decision: Decision) -> Safe:
    """A fragment without style of its own: it takes the notebook's."""
    content = standings(decision)
    head = el("tr", *(el("th", header) for header in content.headers))
    rows = [el("tr", *(el("td", cell.text) for cell in row)) for row in content.rows]
    more = el("pre", decision.more.command) if decision.more else None
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
        ("Beats bf16", tuple(beats(one) for one in decision.formats[1:] if one.standing != "excluded" or one.checks)),
        ("What would flip it", tuple(flip.says for flip in decision.flips)),
    )
    return tuple((title, items) for title, items in found if items)


def beats(one: FormatStanding) -> str:
    """`int8: at concurrency 8 and 16; slower at 1`, of the concurrencies that were measured."""
    said = [f"at concurrency {_runs(one.faster_at)}"] if one.faster_at else ["nowhere that was measured"]
    said += [f"slower at {_runs(one.slower_at)}"] if one.slower_at else []
    said += [f"unresolved at {_runs(one.unresolved_at)}"] if one.unresolved_at else []
    known = one.faster_at or one.slower_at or one.unresolved_at
    return f"{one.name}: {'; '.join(said)}" if known else f"{one.name}: not known, it has no valid comparison"


def _runs(concurrencies: tuple[int, ...]) -> str:
    return listed([str(c) for c in concurrencies])


def standings(decision: Decision) -> Table:
    """One row a format."""
    priced = decision.wishes.price_per_hour is not None
    rated = any(one.machines for one in decision.formats)
    headers = ["Format", "Standing", "At", "tok/s", "÷ bf16"]
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
    cells += [str(one.machines or UNKNOWN)] if rated else []
    return tuple(Cell(text) for text in cells)
