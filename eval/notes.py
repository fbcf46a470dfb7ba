"""The words around the figures: what went wrong and why, what each metric means, what was run."""

import shlex
from collections.abc import Iterator
from itertools import pairwise

import yaml

from qserve.artifacts import DataRecord, LoadSummary, Point, Report, VariantResult
from qserve.eval import figures, task_table
from qserve.eval.figures import UNKNOWN, count, listed
from qserve.eval.table import engines, everyone

DEFINITIONS = (
    (
        "tok/s",
        "Output tokens of all requests, by the server's own usage counts, over the time from the first send to the "
        "last byte, or to the cut. Where a server sends no usage, text deltas are counted, and the table says so.",
    ),
    (
        "÷ bf16",
        "Variant over bf16, from paired blocks: the same prompts on both servers, in alternation, on the same machine. "
        "Geometric mean of the pairs' ratios, with a 95 % t interval. Above 1 is faster for tok/s, below 1 is faster "
        "for a latency. “unresolved” means that the interval contains 1. bf16's own row pools its blocks beside every "
        "variant, so a ratio is not the quotient of two rows.",
    ),
    (
        "TTFT",
        "Time to first token: from sending a request to its first text or reasoning delta; a chunk that carries only a "
        "role does not count. Its ratio compares the blocks' means.",
    ),
    ("ITL", "Inter-token latency: between successive deltas of one request. Its ratio compares the blocks' means."),
    ("E2E", "From sending a request to its last byte; of completed requests."),
    (
        "Percentiles",
        "p95 needs 20 values and p99 needs 100; with fewer, the count is shown and no figure.",
    ),
    (
        "Cut",
        "Requests that were still running when a block's time ended: their tokens, first tokens and inter-token "
        "latencies count; E2E is of completed requests.",
    ),
    ("Perplexity", "Of held-out text, teacher-forced, as the live server scores it. Lower is better."),
    (
        "KL to bf16",
        "Mean over tokens of KL(bf16 || variant) in nats, over the tokens that both servers list among their most "
        "likely, with one bucket for all others: a lower bound of the full divergence. 0 is identical.",
    ),
    ("Top-1 as bf16", "Share of positions at which the variant's most likely token is bf16's."),
    ("±", "One standard error, between windows of text."),
    ("Disk", "Weight files, in decimal units (1 MB = 1,000,000 bytes)."),
    ("Loaded weights", "Bytes of weights in the server, from its log."),
    ("KV cache", "What the server sets aside for keys and values: a reservation, shown apart from what is used."),
    (
        "Peak memory",
        "Highest memory of the server's processes, read after each block: on a CPU their proportional set size, where "
        "shared pages are counted once; on a GPU the device memory in use.",
    ),
    (
        "Faithful",
        "Served log-probabilities against the same checkpoint in transformers (float32), on the same tokens: the mean "
        "absolute difference stays within a limit set from rounding alone, the error of bfloat16 against float32.",
    ),
)


def definitions(report: Report) -> tuple[tuple[str, str], ...]:
    return (*DEFINITIONS, *task_table.DEFINITIONS) if task_table.named(report) else DEFINITIONS


# --- what went wrong, and what to know ----------
def notes(report: Report) -> tuple[str, ...]:
    """What failed and why, what is not valid, what was cut short, where the weights came from."""
    said = [report.source_note] if report.source_note else []
    if len(used := engines(report)) > 1:
        said.append(
            f"bf16 is served by {used[0]}; a row named after {listed(used[1:], 'or')} is a checkpoint under it, "
            "and its ratios compare both at once, the checkpoint and the engine"
        )
    dtype = report.baseline.server.dtype if report.baseline.server else None
    if dtype not in (None, "bfloat16"):
        said.append(f"every variant computes in {dtype}, bf16's weights too: that is what is fastest or asked for here")
    for variant in everyone(report):
        said += list(_variant_notes(variant))
        for point in variant.points:
            said += list(_point_notes(variant.name, point))
    return tuple(text if text.endswith(".") else f"{text}." for text in said)


def _variant_notes(variant: VariantResult) -> Iterator[str]:
    if variant.status != "measured":
        why = variant.problem or "no reason was recorded"
        yield f"{variant.name}: {variant.status}: {why}"
    elif variant.problem:
        yield f"{variant.name}: {variant.problem}"
    if variant.note:
        yield f"{variant.name}: {variant.note}"
    elif variant.layers_fallback:
        of = f"{variant.layers_fallback} of {variant.layers if variant.layers is not None else UNKNOWN}"
        yield f"{variant.name}: {of} layers fell back to round-to-nearest."
    yield from task_table.task_notes(variant)


def _point_notes(name: str, point: Point) -> Iterator[str]:
    where = f"{name} at concurrency {point.concurrency}"
    for side, load in (("", point.variant), (", bf16 beside it", point.baseline)):
        if not load.valid:
            yield f"{where}{side}: not valid: {load.problem or 'no reason was recorded'}"
        if load.failed:
            yield f"{where}{side}: {_failed(load)} of {load.attempted:,} requests failed."
    if point.variant.valid and point.variant.problem:
        yield f"{where}: {point.variant.problem}"
    if point.variant.cut:
        cut, sent = point.variant.cut, point.variant.attempted
        yield f"{where}: {cut:,} of {sent:,} requests were cut at the end of a block; E2E is of the others."
    if point.note:
        yield f"{where}: {point.note}"


def _failed(load: LoadSummary) -> str:
    return listed([f"{n:,} ({reason})" for reason, n in load.failed.items()])


# --- what it was measured on ----------
def machine(report: Report) -> tuple[tuple[str, str], ...]:
    m = report.machine
    rows = [("CPU", m.cpu), ("Cores", str(m.cores)), ("Instruction sets", ", ".join(m.isa) or UNKNOWN)]
    rows.append(("Memory", figures.size(m.memory_bytes)))
    if m.gpus:
        rows += [("GPU", listed(m.gpus)), ("Memory of one GPU", figures.size(m.gpu_memory_bytes))]
        rows.append(("Compute capability", m.gpu_capability or UNKNOWN))
    return tuple(rows)


def settings(report: Report) -> str:
    """The recipe that was run, as YAML."""
    return yaml.safe_dump(report.model_dump(mode="json")["recipe"], sort_keys=False, allow_unicode=True)


def data(report: Report) -> tuple[str, ...]:
    """One line a part of the data: counts, what was dropped, hash; then one a task."""
    return (*(_record(record) for record in report.data), *task_table.task_data(report))


def _record(record: DataRecord) -> str:
    dropped = listed([f"{n:,} {reason}" for reason, n in record.dropped.items()]) or "none"
    return (
        f"{record.part}: {record.dataset}; {count(record.rows_read, 'row')} read, dropped: {dropped}; "
        f"{count(record.records, 'record')} and {count(record.tokens, 'token')} used; sha256 {record.sha256}"
    )


def quality_settings(report: Report) -> str | None:
    """How quality was scored; all variants share it."""
    quality = next((v.quality for v in everyone(report) if v.quality), None)
    if quality is None:
        return None
    return (
        f"{count(quality.windows, 'window')} of {quality.context_tokens:,} tokens, {quality.tokens:,} scored, "
        f"top {quality.top_k} log-probabilities, {quality.bos} first."
    )


def commands(report: Report) -> tuple[tuple[str, str], ...]:
    """Variant -> the command line of its server, with the environment that qserve set."""
    found = []
    for v in everyone(report):
        if v.server:
            env = [f"{key}={shlex.quote(value)}" for key, value in v.server.env.items()]
            found.append((v.name, " ".join([*env, shlex.join(v.server.command)])))
    return tuple(found)


def reproduce(report: Report) -> str:
    """The commands that make this run again."""
    if report.options is not None:
        only = [word for pair in pairwise(report.options) if pair[0] == "--only" for word in pair]
        prep = ["qserve", "prep", report.recipe_file, *only]
        return f"{shlex.join(prep)} && {shlex.join(['qserve', 'bench', report.recipe_file, *report.options])}"
    recipe = shlex.quote(report.recipe_file)
    quick = " --quick" if report.quick else ""
    used = engines(report)
    named = "".join(f" --engine {name}" for name in used) if len(used) > 1 else ""
    return f"qserve prep {recipe} && qserve bench {recipe}{named}{quick}"
