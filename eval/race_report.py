"""A race on a page and in a terminal: one table, one picture."""

from collections.abc import Sequence
from pathlib import Path

from qserve.eval import figures
from qserve.eval.bars import Bar, bars
from qserve.eval.compare import ratio
from qserve.eval.figures import NONE, UNKNOWN
from qserve.eval.markup import el
from qserve.eval.plots import Chart
from qserve.eval.race import NAIVE, Race, Racer
from qserve.eval.report_html import drawn, figure, head, model_name, section
from qserve.eval.table import Cell, Table, quantile

DEFINITIONS = (
    ("tok/s", "output tokens of complete and cut requests over the time of the rounds, by the server's usage counts"),
    (f"÷ {NAIVE}", f"tokens/s over those of the {NAIVE} loop in rounds with the same prompts: geometric mean and 95 % "
     "t interval"),
    ("TTFT", "send to the first text of an answer, the wait for a turn included; pipeline gives its text at the end"),
    ("start-up", "spawn to the first good answer of /health, mean of the passes"),
    ("peak", "most memory that the server's processes held after a round (proportional set size; on a GPU its memory)"),
)  # fmt: skip


def race_text(race: Race) -> str:
    """For a terminal: the headline, the table, what failed."""
    made = table(race)
    rows = [list(made.headers), *([_words(cell) for cell in row] for row in made.rows)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(made.headers))]
    lines = [
        "  ".join(f"{word:<{w}}" if i < made.names else f"{word:>{w}}" for i, (word, w) in enumerate(pairs)).rstrip()
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    ]
    return "\n".join([headline(race), "", *lines, "", *_notes(race)]).rstrip()


def headline(race: Race) -> str:
    """The finding in a sentence."""
    asked = f"{race.concurrency} at a time, {race.prompt_tokens} + {race.output_tokens} tokens"
    known = [(r, r.load.output_tokens_per_s) for r in race.racers if _valid(r) and r.load]
    if not known:
        return f"No engine gave a valid figure ({asked})."
    best, speed = max(known, key=lambda pair: pair[1] or 0.0)
    if best.throughput and best.throughput.verdict == "unresolved":
        return (
            f"Unresolved: {best.name} serves {best.served} at {figures.number(speed)} tokens/s, the most of all; "
            f"{figures.interval(best.throughput)} times the naive loop is within noise; more --rounds would tell "
            f"({asked})."
        )
    than = f": {figures.interval(best.throughput)} times the naive loop" if best.throughput else ""
    return f"{best.name} serves {best.served} fastest{than}, {figures.number(speed)} tokens/s ({asked})."


def table(race: Race) -> Table:
    headers = ("Engine", "Serves", "tok/s", f"÷ {NAIVE}", "TTFT p50", "TTFT p95", "Start-up", "Peak memory", "Requests")
    return Table("Race", headers, tuple(_row(racer, race) for racer in race.racers), names=2)


def _row(racer: Racer, race: Race) -> tuple[Cell, ...]:
    startup = sum(racer.startups_s) / len(racer.startups_s) if racer.startups_s else None
    peak = racer.memory.peak_bytes if racer.memory else None
    first = (Cell(racer.name, under=racer.version, bad=racer.status == "failed", why=racer.problem), Cell(racer.served))
    last = (Cell(figures.duration(startup)), Cell(figures.size(peak)), _requests(racer, race))
    if racer.load is None:
        return (*first, *(Cell(NONE, why=racer.problem),) * 4, *last)
    if not racer.load.valid:
        return (*first, *(Cell("not valid", bad=True, why=racer.load.problem),) * 4, *last)
    return (*first, *_speeds(racer), quantile(racer.load.ttft_s, 50), quantile(racer.load.ttft_s, 95), *last)


def _speeds(racer: Racer) -> tuple[Cell, Cell]:
    assert racer.load is not None
    speed = Cell(figures.number(racer.load.output_tokens_per_s))
    if racer.name == NAIVE:
        return speed, Cell("1", why="the naive loop itself")
    if racer.throughput is None:
        return speed, Cell(UNKNOWN, why="no naive loop to hold it against")
    return speed, Cell(figures.interval(racer.throughput), racer.throughput.verdict)


def _requests(racer: Racer, race: Race) -> Cell:
    if racer.load is None:
        return Cell(NONE)
    load, planned = racer.load, race.requests * race.rounds
    failed = ", ".join(f"{n} {reason}" for reason, n in load.failed.items())
    cut = f", {load.cut} cut" if load.cut else ""
    return Cell(f"{load.ok} of {planned}{cut}{f', {failed}' if failed else ''}", bad=bool(failed))


def _words(cell: Cell) -> str:
    return f"{cell.text} {cell.verdict}" if cell.verdict else cell.text


def _notes(race: Race) -> list[str]:
    """What failed or must be read with care, a line each."""
    told = [f"{r.name}: {r.problem}" for r in race.racers if r.problem]
    told += [f"{r.name}: {r.load.problem}" for r in race.racers if r.load and r.load.problem]
    return told


def _valid(racer: Racer) -> bool:
    return racer.load is not None and racer.load.valid and racer.load.output_tokens_per_s is not None


# --- the page ----------
def picture(race: Race) -> Chart:
    """Throughput, a bar an engine, with the interval of its rounds."""
    title = "Throughput"
    groups = [(f"{r.name} · {r.served}", (_bar(r),)) for r in race.racers if _valid(r)]
    if not groups:
        return Chart(title, "Not drawn: no engine gave a valid figure.", None)
    words = "; ".join(f"{name}: {bar.text}" for name, (bar,) in groups)
    caption = (
        f"Output tokens per second over {race.concurrency} requests at once, and the ratio to the naive loop. "
        "Whiskers: the 95 % interval over rounds."
    )
    return Chart(title, caption, bars(title, words, (), groups))


def _bar(racer: Racer) -> Bar:
    assert racer.load is not None
    speed = racer.load.output_tokens_per_s or 0.0
    rounds = ratio([(value, 1.0) for value in racer.rounds_tokens_per_s], higher_is_faster=True)
    times = f" · {figures.ratio(racer.throughput.value)} ×" if racer.throughput else ""
    whisker = None
    if rounds is not None and rounds.low is not None and rounds.high is not None:
        whisker = (rounds.low, rounds.high)
    return Bar(((speed, "loaded"),), f"{figures.number(speed)}{times}", whisker=whisker)


def to_page(race: Race) -> str:
    """One self-contained HTML page in the style of the report."""
    title = f"{model_name(race.model)}: race of {figures.count(len(race.racers), 'engine')}"
    top = el(
        "header",
        el("p", f"{model_name(race.model)} · {race.created[:10]} · run {race.run}", cls="eyebrow"),
        el("h1", headline(race)),
        el("ul", *(el("li", note) for note in _notes(race)), cls="findings") if _notes(race) else None,
    )
    what = el("dl", *(el("div", el("dt", term), el("dd", text)) for term, text in (*_how(race), *DEFINITIONS)))
    body = el(
        "main", top, section("Race", drawn(table(race))),
        section("Picture", el("div", figure(picture(race)), cls="plots")), section("Servers", drawn(servers(race))),
        section("How it was raced", what),
    )  # fmt: skip
    foot = el("footer", el("p", f"Written by qserve {race.qserve_version} from race.json."))
    return "<!doctype html>\n" + el("html", head(title), el("body", body, foot), lang="en") + "\n"


def servers(race: Race) -> Table:
    rows = [
        (Cell(r.name), Cell(r.version or UNKNOWN), Cell(", ".join(r.kernels) or UNKNOWN),
         Cell(figures.number(r.memory.kv_capacity_tokens if r.memory else None)),
         Cell(", ".join(figures.duration(s) for s in r.startups_s) or UNKNOWN))
        for r in race.racers
    ]  # fmt: skip
    return Table("Servers", ("Engine", "Version", "Kernels", "KV capacity, tokens", "Start-ups"), tuple(rows), names=3)


def _how(race: Race) -> Sequence[tuple[str, str]]:
    m = race.machine
    return (
        ("Model", race.model + (f" ({race.source_note})" if race.source_note else "")),
        ("Machine", f"{m.cpu}, {figures.count(m.cores, 'core')}, {figures.size(m.memory_bytes)}"
         + (f", {', '.join(m.gpus)}" if m.gpus else "")),
        ("Load", f"{figures.count(race.rounds, 'round')} of {race.requests} requests, {race.concurrency} at a time, "
         f"{race.prompt_tokens} prompt and {race.output_tokens} output tokens; a round is cut after "
         f"{figures.duration(race.round_limit_s)}"),
        ("Order", "one server at a time, alone on the machine; two passes in opposite order, a new start in each; the "
         "same prompts for every engine, and none sent twice to a server"),
    )  # fmt: skip


def write_race(race: Race, folder: Path) -> None:
    """race.html, then race.json: each complete or absent, the last one is the sign of a finished race."""
    partial = folder / "race.html.partial"
    partial.write_text(to_page(race), encoding="utf-8")
    partial.replace(folder / "race.html")
    race.write(folder / "race.json")
