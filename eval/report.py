"""A run's report: report.md to paste, report.html to link; measurements.json, the report itself, lies beside them."""

import os
from pathlib import Path

from qserve.artifacts import Report
from qserve.errors import DamagedFile, UsageError
from qserve.eval import notes, table
from qserve.eval.findings import findings
from qserve.eval.report_html import SMOKE, model_name, to_html
from qserve.eval.table import Cell, Table
from qserve.eval.task_table import task_table

__all__ = ["read_report", "to_html", "to_json", "to_markdown", "write_report"]

SPECIAL = str.maketrans(
    {c: f"\\{c}" for c in "\\`*_[]|~#"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;", "\n": " ", "\r": " "}
)


def read_report(run: Path) -> Report:
    """The report of a run folder, or of its measurements.json.

    Raises:
        UsageError: no measurements.json there, or one that this version cannot read.
    """
    try:
        return Report.read(run if os.path.isfile(run) else run / "measurements.json")
    except DamagedFile as error:
        raise UsageError(
            f"{error.path}: {error.problem}; give the folder of a finished run, or run `qserve bench` again"
        ) from error


def write_report(report: Report, folder: Path) -> None:
    """report.md and report.html in the run's folder, each complete or absent."""
    for name, text in (("report.md", to_markdown(report)), ("report.html", to_html(report))):
        partial = folder / f"{name}.partial"
        partial.write_text(text, encoding="utf-8")
        partial.replace(folder / name)


def to_json(report: Report) -> str:
    """The report itself, and nothing that is not in it."""
    return report.model_dump_json(indent=2)


def to_markdown(report: Report) -> str:
    """Headline, tables, notes, definitions, provenance; GitHub's Markdown."""
    first, *others = findings(report)
    parts = [f"# {plain(model_name(report.model))}"]
    parts += [f"**{SMOKE}**"] if report.quick else []
    parts += [f"**{plain(first)}**", _list(others), _tables(report), _provenance(report)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _tables(report: Report) -> str:
    made = [
        table.results(report),
        task_table(report),
        table.latency(report),
        table.memory(report),
        table.fidelity(report),
    ]
    made += [table.served(report), table.requests(report)]
    told = [f"## {one.title}\n\n{markdown_table(one)}" for one in made if one.rows]
    noted = notes.notes(report)
    return "\n\n".join([told[0], *([f"### Notes\n\n{_list(noted)}"] if noted else []), *told[1:]])


def _provenance(report: Report) -> str:
    judged = notes.quality_settings(report)
    parts = ["## Definitions", _list([f"{term}: {text}" for term, text in notes.definitions(report)])]
    facts = (("Model", report.model), ("Recipe", report.recipe_file), *notes.machine(report))
    parts += ["## Machine and model", _list([f"{key}: {value}" for key, value in facts])]
    parts += ["## Settings", _code(notes.settings(report))]
    commands = [f"{plain(name)}:\n\n{_code(line)}" for name, line in notes.commands(report)]
    parts += ["## Server commands", *commands] if commands else []
    parts += ["## Data", plain(judged), _list(notes.data(report))] if judged else []
    parts += ["## Run it again", _code(notes.reproduce(report))]
    return "\n\n".join(parts)


def markdown_table(content: Table) -> str:
    """One line a row; figures are aligned to the right."""
    rule = "|" + "|".join("---" if i < content.names else "---:" for i in range(len(content.headers))) + "|"
    return "\n".join(
        [
            _row([plain(h) for h in content.headers]),
            rule,
            *(_row([_cell(cell) for cell in row]) for row in content.rows),
        ]
    )


def _cell(cell: Cell) -> str:
    text = plain(f"{cell.text} {cell.verdict}" if cell.verdict else cell.text)
    text += plain(f", {cell.under}") if cell.under else ""
    return f"**{text}**" if cell.verdict == "faster" else text


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _list(items: list[str] | tuple[str, ...]) -> str:
    return "\n".join(f"- {plain(item)}" for item in items)


def _code(text: str) -> str:
    """An indented block: no fence that the text could close."""
    return "\n".join(f"    {line}" for line in text.rstrip("\n").splitlines())


def plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return text.translate(SPECIAL)
