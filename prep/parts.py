"""Sort a data set's rows into three disjoint parts: calibration, quality, load.

A record belongs to the part that the first byte of its text's sha256 names, so the parts share no record, whichever
files they are read from. What is dropped is counted by reason.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from qserve.errors import UsageError
from qserve.prep.records import Row
from qserve.recipe import Dataset, source_text

COLUMNS = ("messages", "conversations", "text", "content")
PARTS = ("calibration", "quality", "load")
# ShareGPT's names for who speaks
ROLES = {
    "human": "user", "user": "user", "prompter": "user", "gpt": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant", "assistant": "assistant",
    "model": "assistant", "bot": "assistant", "system": "system",
    "tool": "tool", "function": "tool",
}  # fmt: skip
Message = dict[str, str]
Record = str | list[Message]


@dataclass(frozen=True)
class Sorted:
    """The records of one part of one data set. `rows_read` and `dropped` are of the whole data set."""

    dataset: str
    rows_read: int
    dropped: Mapping[str, int]
    records: Mapping[str, tuple[Record, ...]]  # part -> its records
    column: str


def part_of(key: bytes) -> str:
    """Half of all records calibrate, a quarter judges quality, a quarter is load."""
    return "calibration" if key[0] < 128 else "quality" if key[0] < 192 else "load"


def sort_rows(spec: Dataset, rows: Iterable[Row]) -> Sorted:
    """Read up to `spec.rows` rows.

    Raises:
        UsageError: a bad row (unless `skip_bad_rows`), the column is not there (lists those that are), nothing usable.
    """
    name = source_text(spec.dataset)
    dropped: Counter[str] = Counter()
    seen: set[bytes] = set()
    records: dict[str, list[Record]] = {part: [] for part in PARTS}
    column, count, columns = spec.column, 0, tuple[str, ...]()
    for row in islice(rows, spec.rows):
        count += 1
        if row.value is None:
            _refuse_bad(spec, row)
            dropped["bad row"] += 1
            continue
        columns = columns or tuple(row.value)
        column = column or _choose(row, columns)
        if column not in row.value and column == spec.column and tuple(row.value) == columns:
            raise UsageError(f"{row.where}: no column {column!r}; there is: {', '.join(columns) or '(none)'}")
        record = _record(row.value.get(column))
        reason, key = _judge(record, seen)
        if reason:
            dropped[reason] += 1
        elif record is not None:
            seen.add(key)
            records[part_of(key)].append(record)
    if not seen:
        raise UsageError(
            f"{name}: none of {count} rows is usable ({_reasons(dropped)}); its columns: {', '.join(columns) or 'none'}"
        )
    return Sorted(name, count, dict(dropped), {part: tuple(found) for part, found in records.items()}, column or "")


def _refuse_bad(spec: Dataset, row: Row) -> None:
    if not spec.skip_bad_rows:
        raise UsageError(
            f"{row.where}: {row.problem}; mend the file, read fewer `rows`, "
            "or set skip_bad_rows: true to count and skip"
        )


def _choose(row: Row, columns: tuple[str, ...]) -> str:
    for name in COLUMNS:
        if name in columns:
            return name
    raise UsageError(
        f"{row.where}: no column {', '.join(COLUMNS)}; name one of these as `column`: {', '.join(columns) or '(none)'}"
    )


def _record(value: object) -> Record | None:
    """The text or the conversation in a cell; None if it is neither."""
    if isinstance(value, str):
        return value.strip()
    if not isinstance(value, list):
        return "" if value is None else None
    messages = [_message(item) for item in value]
    known = [message for message in messages if message is not None]
    if len(known) != len(messages):
        return None
    return [message for message in known if message["content"]]


def _message(item: object) -> Message | None:
    if not isinstance(item, dict):
        return None
    role = ROLES.get(str(item.get("role", item.get("from"))).lower())
    content = item.get("content", item.get("value"))
    if isinstance(content, list):  # parts: only the text ones
        content = "\n".join(str(part["text"]) for part in content if isinstance(part, dict) and part.get("text"))
    if role is None or not (content is None or isinstance(content, str)):
        return None
    return {"role": role, "content": (content or "").strip()}


def _judge(record: Record | None, seen: set[bytes]) -> tuple[str | None, bytes]:
    """(reason to drop it, digest of its text)."""
    if record is None:
        return "no text or conversation", b""
    if not record:
        return "blank", b""
    canonical = record if isinstance(record, str) else json.dumps(record, ensure_ascii=False, sort_keys=True)
    key = hashlib.sha256(canonical.encode("utf-8", "replace")).digest()
    return ("duplicate" if key in seen else None), key


def _reasons(dropped: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in dropped.items()) or "no rows"
