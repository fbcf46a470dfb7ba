"""Dirty data: exact counts, places, and sentences."""

import csv
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from qserve.errors import UsageError
from qserve.prep.parts import PARTS, Sorted, part_of, sort_rows
from qserve.prep.records import read_rows
from qserve.recipe import Dataset


def spec(path: Path, **fields: object) -> Dataset:
    return Dataset.model_validate({"dataset": str(path), **fields})


def read(path: Path, **fields: object) -> Sorted:
    return sort_rows(spec(path, **fields), read_rows(path))


def count(found: Sorted) -> int:
    return sum(len(records) for records in found.records.values())


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def test_every_kind_of_file_gives_the_same_records(tmp_path: Path) -> None:
    texts = [f"text number {i}, with an ä" for i in range(40)]
    rows = [{"text": text} for text in texts]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    write_lines(tmp_path / "b.jsonl", *rows)
    (tmp_path / "pretty.jsonl").write_text(json.dumps(rows, indent=2))  # an array under the wrong name
    (tmp_path / "c.txt").write_text("\n\n".join(texts))
    (tmp_path / "crlf.txt").write_bytes("\r\n\r\n".join(texts).encode())
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress((tmp_path / "b.jsonl").read_bytes()))
    parquet.write_table(pa.table({"text": texts}), tmp_path / "e.parquet")
    with (tmp_path / "f.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["text", "n"], *[[text, "1"] for text in texts]])
    found = {path.name: read(path) for path in sorted(tmp_path.iterdir())}
    assert len(found) == 8
    first = found["a.json"].records
    for name, result in found.items():
        assert result.records == first, name
        assert (result.rows_read, count(result)) == (40, 40), name


def test_what_is_dropped_is_counted_by_reason(tmp_path: Path) -> None:
    rows: list[object] = [{"text": f"row {i}"} for i in range(10)]
    rows += [{"text": ""}, {"text": "  \n"}, {"text": None}, {"text": "row 3"}, {"text": 7}, [1], '{"text": "cut']
    found = read(write_lines(tmp_path / "a.jsonl", *rows), skip_bad_rows=True)
    assert found.rows_read == 17
    assert found.dropped == {"blank": 3, "duplicate": 1, "no text or conversation": 1, "bad row": 2}
    assert count(found) == 10


def test_a_bad_row_is_an_error_with_file_line_and_reason(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"text": "good"}, "", '{"text": "cut off')
    with pytest.raises(UsageError, match=r"a\.jsonl:3: not JSON: Unterminated string.*skip_bad_rows"):
        read(path)
    path = write_lines(tmp_path / "b.jsonl", {"text": "good"}, ["a", "list"])
    with pytest.raises(UsageError, match=r"b\.jsonl:2: a list where an object"):
        read(path)


def test_an_array_that_breaks_off_gives_its_whole_rows(tmp_path: Path) -> None:
    whole = json.dumps([{"text": f"row {i}"} for i in range(50)])
    path = tmp_path / "a.json"
    path.write_text(whole[:-20])  # inside the last row
    with pytest.raises(UsageError, match=r"row 50: the JSON breaks off here"):
        read(path)
    found = read(path, skip_bad_rows=True)
    assert (found.rows_read, count(found), found.dropped) == (50, 49, {"bad row": 1})
    assert count(read(path, rows=49)) == 49  # the tail is never reached


def test_a_gzip_file_that_breaks_off(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps({"text": f"row {i * 7919}"}) for i in range(5000)).encode()
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(lines)[:-4000])
    with pytest.raises(UsageError, match=r"row [0-9]+: the gzip data .* here: Compressed file ended"):
        read(path)
    found = read(path, skip_bad_rows=True)
    assert found.dropped == {"bad row": 1}
    assert 0 < count(found) < 5000


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.csv.gz", "a.txt.gz"])
@pytest.mark.parametrize(("at", "value"), [(0, b"PK"), (10, b"\xff" * 40), (2000, b"\xff" * 40), (-8, b"\0" * 4)])
def test_a_gzip_file_that_is_damaged(tmp_path: Path, name: str, at: int, value: bytes) -> None:
    """No gzip at all, a first block that cannot be, one further on, and a wrong checksum at the end."""
    rows = [{"text": f"row {i * 7919}"} for i in range(5000)]
    texts = {"a.json.gz": json.dumps(rows), "a.csv.gz": "text\n" + "\n".join(row["text"] for row in rows)}
    data = bytearray(gzip.compress(texts.get(name, "\n".join(map(json.dumps, rows))).encode()))
    at = at % len(data)
    data[at : at + len(value)] = value
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=rf"{name}: row [0-9]+: the gzip data are damaged or cut off here: .*; mend"):
        read(tmp_path / name)


def test_a_first_column_without_a_name(tmp_path: Path) -> None:
    """The table of pandas' to_csv: the row's number first, under no name."""
    path = tmp_path / "a.csv"
    path.write_text(",text\n0,first\n1,second\n")
    found = read(path)
    assert sorted(str(record) for part in PARTS for record in found.records[part]) == ["first", "second"]
    assert (found.rows_read, found.dropped) == (2, {})
    path.write_text(",text\n0,first\n1,second,surplus\n")
    with pytest.raises(UsageError, match=r"a\.csv:3: more fields than the header has columns"):
        read(path)


def test_the_columns_there_are_are_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "x", "answer": "y"})
    with pytest.raises(UsageError, match="name one of these as `column`: prompt, answer"):
        read(path)
    with pytest.raises(UsageError, match="no column 'body'; there is: prompt, answer"):
        read(path, column="body")
    assert count(read(path, column="answer")) == 1


def test_nothing_usable_says_why(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", *[{"text": " "}] * 5)
    with pytest.raises(UsageError, match=r"none of 5 rows is usable \(5 blank\); its columns: text"):
        read(path)
    (tmp_path / "b.jsonl").touch()
    with pytest.raises(UsageError, match="is empty"):
        read(tmp_path / "b.jsonl")
    with pytest.raises(UsageError, match="does not exist"):
        read(tmp_path / "c.jsonl")
    (tmp_path / "d.pdf").write_text("x")
    with pytest.raises(UsageError, match="no data file that qserve reads"):
        read(tmp_path / "d.pdf")


def test_conversations_become_messages(tmp_path: Path) -> None:
    talk = [{"from": "human", "value": "Hi "}, {"from": "gpt", "value": "Hello"}, {"from": "gpt", "value": ""}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image"}]}]
    strange = [{"from": "martian", "value": "?"}]
    found = read(write_lines(tmp_path / "a.jsonl", *[{"conversations": t} for t in (talk, parts, strange)]))
    records = [record for part in PARTS for record in found.records[part]]
    assert [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}] in records
    assert [{"role": "user", "content": "Hi"}] in records
    assert found.dropped == {"no text or conversation": 1}


def test_parts_share_no_record_and_a_record_keeps_its_part(tmp_path: Path) -> None:
    rows = [{"text": f"row {i}"} for i in range(1000)]
    one = read(write_lines(tmp_path / "a.jsonl", *rows))
    two = read(write_lines(tmp_path / "b.jsonl", *rows[::-1], {"text": "another"}))
    seen = [set(one.records[part]) for part in PARTS]
    assert len(set.union(*seen)) == sum(len(s) for s in seen) == 1000
    for part, records in zip(PARTS, seen, strict=True):
        assert records == set(two.records[part]) - {"another"}
    assert 440 < len(seen[0]) < 560  # half
    assert [part_of(bytes([first])) for first in (0, 127, 128, 191, 192, 255)] == [
        "calibration", "calibration", "quality", "quality", "load", "load",
    ]  # fmt: skip
