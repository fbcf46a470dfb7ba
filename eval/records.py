"""What is asked of a server (Target, Request), what came of it (RequestRecord, LoadRun), and the raw records' file."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from qserve.artifacts import Dialect


@dataclass(frozen=True)
class Target:
    """An OpenAI server and the model on it.

    `fixed_length` asks for exactly `max_tokens` tokens (ignore_eos and its kin, which not every server knows);
    `usage_each_chunk` for running token counts, so that an answer that is cut has one too. Both are asked for in the
    server's dialect.
    """

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    usage_each_chunk: bool = False
    fixed_length: bool = True
    dialect: Dialect = "vllm"


@dataclass(frozen=True)
class Request:
    """A prompt for /v1/completions as token ids or text, or a text for /v1/chat/completions."""

    prompt: tuple[int, ...] | str
    max_tokens: int
    chat: bool = False


@dataclass(frozen=True)
class RequestRecord:
    """What happened to one request. What was not seen is None."""

    index: int  # in the list that was to be sent
    sent_s: float  # since the first send of the run
    ttft_s: float | None  # from send to the first delta with text, reasoning or a tool call
    e2e_s: float | None  # from send to the last byte, to the failure or to the cut
    itl_s: tuple[float, ...]  # between successive deltas; 0 for those that came in one read
    deltas: int
    prompt_tokens: int | None  # the server's usage counts
    output_tokens: int | None
    outcome: str  # "ok", "cut", or why it failed: "http 503", "timeout", "stream ended early", ...
    answer_s: float | None = None  # from send to the first content, where reasoning came first
    asked_prompt_tokens: int | None = None  # None for a text, whose tokens only the server can count
    asked_output_tokens: int | None = None


@dataclass(frozen=True)
class LoadRun:
    """One closed loop. A request that the cut kept from being sent has no record."""

    concurrency: int  # asked for
    records: tuple[RequestRecord, ...] = field(repr=False)  # by index; thousands of them
    wall_s: float  # from the first send to the last byte, or to the cut
    delivered_concurrency: float | None  # mean requests in flight while there was work left to send
    client_cpu_s: float  # of this process, all threads
    loop_lag_s: float  # the most by which the event loop came late: no latency here is finer than this


@dataclass(frozen=True)
class LabelledRecord:
    """A record and the part of the run that it belongs to."""

    variant: str
    arm: str  # "variant" or "baseline"
    concurrency: int
    block: int
    record: RequestRecord


DEFINITIONS = {
    "variant": "variant under test",
    "arm": "which server the request went to: the variant's or the baseline's",
    "concurrency": "requests kept in flight",
    "block": "number of the block within its variant and concurrency",
    "index": "position in the block's list of requests",
    "sent_s": "send time, since the block's first send",
    "ttft_s": "send to first delta with text, reasoning or a tool call; null if there was none",
    "e2e_s": "send to last byte, to the failure or to the cut",
    "itl_s": "times between successive deltas; 0 for deltas that came in one read",
    "deltas": "deltas with text, reasoning or a tool call",
    "prompt_tokens": "server's usage count; null if it sent none",
    "output_tokens": "server's usage count; null if it sent none",
    "outcome": "ok, cut (still running when the block's time ended), or why it failed",
    "answer_s": "send to first content, where reasoning came first",
    "asked_prompt_tokens": "tokens of the prompt that was sent; null for a text",
    "asked_output_tokens": "tokens asked for",
}


def write_requests(path: Path, rows: Iterable[LabelledRecord]) -> None:
    """Write raw requests as Parquet (zstd); each column's definition is in its field's metadata. Times in seconds."""
    import pyarrow as pa  # here, because it is slow to import
    import pyarrow.parquet as pq

    whole = {"concurrency", "block", "index", "deltas", "prompt_tokens", "output_tokens"}
    whole |= {"asked_prompt_tokens", "asked_output_tokens"}
    text = {"variant", "arm", "outcome"}

    def kind(name: str) -> pa.DataType:
        if name == "itl_s":
            return pa.list_(pa.float64())
        return pa.string() if name in text else pa.int64() if name in whole else pa.float64()

    fields = [pa.field(name, kind(name), metadata={"definition": what}) for name, what in DEFINITIONS.items()]
    flat = [{**vars(row.record), **vars(row)} for row in rows]  # vars(row)'s own `record` is in no field
    partial = path.with_name(path.name + ".partial")
    pq.write_table(pa.Table.from_pylist(flat, schema=pa.schema(fields)), partial, compression="zstd")
    partial.replace(path)
