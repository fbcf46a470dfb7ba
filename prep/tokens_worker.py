"""Worker: turn three files of records into token ids with a checkpoint's tokenizer. Loads no model; imports nothing
of qserve.

job: tokenizer (folder), out (folder), records (part -> JSONL of {"text"} or {"messages"}), calibration {samples,
tokens, min_tokens, seed}, quality {windows, tokens}, load {tokens}.

Conversations go through the chat template where the tokenizer has one; else their contents are joined by blank lines.
A token that begins a sequence (BOS) stands first in samples and windows where the tokenizer itself puts one; load has
none.
"""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

Emit = Callable[..., None]
Samples = list[list[int]]


def main(job: dict[str, Any], emit: Emit) -> dict[str, Any]:
    from transformers import AutoTokenizer  # here: what cuts the windows needs none

    tokenizer = AutoTokenizer.from_pretrained(job["tokenizer"])
    out, seed = Path(job["out"]), job["calibration"]["seed"]
    bos = _leading_bos(tokenizer)
    dropped = {part: Counter[str]() for part in job["records"]}
    streams = {part: _encoded(tokenizer, Path(path), seed, dropped[part]) for part, path in job["records"].items()}
    emit("step", text="tokenizing")
    samples = _samples(streams["calibration"], bos, job["calibration"], dropped["calibration"])
    windows = cut_windows(streams["quality"], bos, tokenizer.eos_token_id, job["quality"])
    stream, used = _stream(streams["load"], job["load"]["tokens"])
    _write(out / "calibration.json", samples)
    _write(out / "quality.json", windows)
    np.save(out / "load.npy", stream)
    return {
        "calibration": _facts(samples, dropped["calibration"]),
        "quality": _facts(windows, dropped["quality"]),
        "load": {
            "records": used, "tokens": len(stream), "sha256": hashlib.sha256(stream.tobytes()).hexdigest(),
            "dropped": dict(dropped["load"]),
        },
        "bos_token_id": bos,
        "vocab_size": len(tokenizer),
    }  # fmt: skip


def _leading_bos(tokenizer: Any) -> int | None:
    """The token that this tokenizer puts first, None if it puts none."""
    ids = tokenizer("a").input_ids
    return int(ids[0]) if ids and tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id else None


def _encoded(tokenizer: Any, path: Path, seed: int, dropped: Counter[str]) -> Iterator[list[int]]:
    """Token ids of the records, in an order that the seed decides. BOS is not among them, whoever put it there."""
    lines = path.read_text(encoding="utf-8").splitlines()
    random.Random(seed).shuffle(lines)
    for line in lines:
        try:
            text = _text(tokenizer, json.loads(line))
        except Exception as error:  # a template is a program: it may refuse a conversation in any way it likes
            dropped[f"chat template: {str(error)[:80]}"] += 1
            continue
        ids = list(tokenizer(text, add_special_tokens=False).input_ids)
        if ids and ids[0] == tokenizer.bos_token_id and _leading_bos(tokenizer) is not None:
            ids = ids[1:]
        yield ids


def _text(tokenizer: Any, record: dict[str, Any]) -> str:
    if "text" in record:
        return str(record["text"])
    if tokenizer.chat_template:
        return str(tokenizer.apply_chat_template(record["messages"], tokenize=False))
    return "\n\n".join(message["content"] for message in record["messages"])


def _samples(encoded: Iterator[list[int]], bos: int | None, want: dict[str, int], dropped: Counter[str]) -> Samples:
    """The first `samples` records that are long enough, each cut to `tokens`."""
    samples: Samples = []
    for ids in encoded:
        if len(samples) == want["samples"]:
            break
        ids = _begun(ids, bos)[: want["tokens"]]
        if len(ids) < want["min_tokens"]:
            dropped["too short"] += 1
        else:
            samples.append(ids)
    return samples


def cut_windows(encoded: Iterator[list[int]], bos: int | None, eos: int | None, want: dict[str, int]) -> Samples:
    """`windows` windows of exactly `tokens` ids, every one with BOS first where the tokenizer puts one. Records that
    are long enough give one each, from their start; if those do not suffice, shorter ones are joined by the end token.
    """
    room = want["tokens"] - (bos is not None)  # ids of text in a window
    windows: Samples = []
    rest: list[int] = []
    for ids in encoded:
        if len(windows) == want["windows"]:
            return windows
        if len(ids) >= room:
            windows.append(_begun(ids[:room], bos))
        elif len(rest) < want["windows"] * want["tokens"]:
            rest += [*ids, eos] if eos is not None else ids
    while len(windows) < want["windows"] and len(rest) >= room:
        windows.append(_begun(rest[:room], bos))
        rest = rest[room:]
    return windows


def _stream(encoded: Iterator[list[int]], limit: int) -> tuple[Any, int]:
    """(ids of records in a row, how many records)."""
    ids: list[int] = []
    used = 0
    for more in encoded:
        if len(ids) >= limit:
            break
        ids += more
        used += 1
    return np.asarray(ids[:limit], dtype=np.int32), used


def _begun(ids: list[int], bos: int | None) -> list[int]:
    return ids if bos is None else [bos, *ids]


def _write(path: Path, samples: Samples) -> None:
    path.write_text(json.dumps(samples, separators=(",", ":")))


def _facts(samples: Samples, dropped: Counter[str]) -> dict[str, Any]:
    text = json.dumps(samples, separators=(",", ":"))
    return {
        "records": len(samples), "tokens": sum(map(len, samples)),
        "sha256": hashlib.sha256(text.encode()).hexdigest(), "dropped": dict(dropped),
    }  # fmt: skip
