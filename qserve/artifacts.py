"""The nouns that the stages hand on: Manifest (of a Checkpoint), Measurement, Report.

Everything is a frozen value that round-trips through JSON. Units are in the names (`_s`, `_bytes`, `_tokens`).
`None` means not known; 0 means measured and zero.
"""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError

from qserve.errors import DamagedFile
from qserve.values import Frozen

MANIFEST_NAME = "qserve.json"
Verdict = Literal["faster", "slower", "unresolved"]


class Artifact(Frozen):
    """A value with a file of its own."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises DamagedFile: it cannot be read, or holds something else; says what is wrong with it."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise DamagedFile(path, error.strerror or str(error)) from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            if first["loc"] == ("format",):
                said = f"it is of format {first['input']!r}, which another version of qserve writes"
                raise DamagedFile(path, said) from error
            raise DamagedFile(path, f"{where}: {first['msg']}" if where else first["msg"]) from error

    def write(self, path: Path) -> None:
        """Write under a temporary name, then rename: the file is complete or absent."""
        partial = path.with_name(path.name + ".partial")
        partial.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        partial.replace(path)


class Machine(Frozen):
    """What the figures were measured on."""

    flavour: Literal["cpu", "cuda"]
    cpu: str
    cores: int  # physical cores this process may use
    isa: tuple[str, ...]  # of the flags that kernels ask for: avx2, avx512f, avx512_vnni, avx512_bf16, amx_tile
    memory_bytes: int  # what this process may use (cgroup limit included)
    gpus: tuple[str, ...] = ()
    gpu_memory_bytes: int | None = None  # of one device
    gpu_capability: str | None = None  # "9.0"


# --- checkpoint ----------
class FileEntry(Frozen):
    name: str
    size_bytes: int
    sha256: str


class DataRecord(Frozen):
    """What was read, what was dropped and why, what was used."""

    dataset: str
    part: Literal["calibration", "quality", "load"]
    rows_read: int
    dropped: dict[str, int]  # reason -> rows
    records: int  # used
    tokens: int  # used
    sha256: str  # of the token ids that were used
    seed: int | None = None


class DataParts(Artifact):
    """data/<digest>/parts.json: three disjoint parts of the data, as token ids of the source's tokenizer.

    Beside it: calibration.json and quality.json (a list of lists of ids each: samples, windows), and load.npy (int32,
    one long stream of ids: a load prompt is a slice of it). Written last.
    """

    calibration: DataRecord
    quality: DataRecord
    load: DataRecord
    bos_token_id: int | None  # stands first in a sequence, where the tokenizer says so
    vocab_size: int


class Weights(Frozen):
    """Bytes of tensor data in the safetensors headers, by what they are."""

    total_bytes: int
    quantized_bytes: int  # packed weights, scales and zero points of quantized layers
    embedding_bytes: int  # embeddings and output head
    other_bytes: int
    parameters: int  # of the model, before quantization
    bits_per_parameter: float  # total_bytes * 8 / parameters


class Licence(Frozen):
    """Terms of a model as model cards name them: an id of huggingface.co/docs/hub/repositories-licenses. `other` has a
    name, and a link to the text."""

    id: str
    name: str | None = None
    link: str | None = None


class Manifest(Artifact):
    """qserve.json: everything that made this checkpoint. Written last, so its presence means complete."""

    format: Literal[1] = 1
    variant: str
    digest: str  # of everything that made it; the end of the folder's name
    settings: dict[str, Any]  # the variant as the recipe gave it, defaults filled in
    label: str  # "GPTQ W4A16 g64"
    model: str
    revision: str | None  # commit of a Hub model
    source_sha256: str  # of the source's weight files
    source_note: str | None  # "weights came through GGUF Q4_1"
    note: str | None = None  # what a reader of its figures should know
    calibration: DataRecord | None
    runtime: str  # "llmcompressor-cpu"
    packages: dict[str, str]  # versions in that runtime that matter
    qserve_version: str
    layers: int  # linear layers that the method was asked to quantize
    layers_fallback: tuple[str, ...]  # of those, the ones that GPTQ rounded to nearest instead
    weights: Weights
    wall_s: float
    peak_memory_bytes: int | None
    threads: int | None
    created: str  # ISO 8601, UTC
    licence: Licence | None = None  # as the source names it
    base_model: str | None = None  # Hub id of the source, where that is known
    files: tuple[FileEntry, ...]


# --- load ----------
# How a server gives the log-probabilities of a text: vLLM's `prompt_logprobs`, or of one next token after another.
Scoring = Literal["prompt_logprobs", "next_token"]
# Which wishes beyond OpenAI's API a server understands: an answer of fixed length, and running token counts.
Dialect = Literal["vllm", "llama.cpp"]


class Counters(Frozen):
    """What a server counts of its own, at one moment. None: it does not tell."""

    running: float | None = None  # requests
    waiting: float | None = None  # requests
    prefix_queries: float | None = None  # tokens looked up in the prefix cache so far
    prefix_hits: float | None = None  # tokens found there so far


class Quantiles(Frozen):
    """Order statistics of one latency, in seconds. A percentile that the sample cannot carry is None
    (p95 needs 20 values, p99 needs 100).

    The ranges are one-sided 95 % bounds, below and above, by order statistics as if the values were independent; a
    bound that the sample cannot carry is None (above p95: 59 values, above p99: 299).
    """

    n: int
    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    p50_range: tuple[float | None, float | None] = (None, None)
    p95_range: tuple[float | None, float | None] = (None, None)
    p99_range: tuple[float | None, float | None] = (None, None)


class LoadSummary(Frozen):
    """One closed-loop load, or several blocks of it pooled.

    output_tokens_per_s: tokens of completed and cut requests, by the server's usage counts, over the time from the
        first send to the last byte (or to the cut). Where a server sends no usage, text deltas are counted, and
        `counted_by` says so.
    ttft: send to first text or reasoning delta (not the role chunk). itl: between successive deltas of a request.
    tpot: (e2e - ttft) / (output tokens - 1) of a request. e2e: send to last byte.
    `cut` requests were still running when the block's time ended: their tokens, first tokens and inter-token latencies
    count (else a slow server would be judged by its quick requests alone); tpot and e2e are of completed requests.
    """

    concurrency: int  # asked for
    delivered_concurrency: float | None  # mean requests in flight, over the time in which there was work left to send
    attempted: int
    ok: int
    cut: int
    failed: dict[str, int]  # reason -> requests
    wall_s: float
    prompt_tokens: int | None
    output_tokens: int
    counted_by: Literal["usage", "deltas"]
    output_tokens_per_s: float | None
    requests_per_s: float | None
    block_tokens_per_s: tuple[float, ...] = ()  # output tokens/s of each block that is pooled here
    ttft_s: Quantiles
    itl_s: Quantiles
    tpot_s: Quantiles
    e2e_s: Quantiles
    client_cpu: float | None  # client CPU seconds per wall second
    server_cpu: float | None = None  # server CPU seconds per wall second, over the machine's cores (0..1)
    gpu: float | None = None  # mean device utilisation (0..1)
    prefix_cache_hit_rate: float | None = None  # hit tokens / queried tokens, from the server's counters
    valid: bool = True  # False: too many failures, wrong lengths or undelivered load; see `problem`
    problem: str | None = None


class Ratio(Frozen):
    """variant / bf16, from paired blocks: geometric mean of the pairs' ratios with a 95 % t interval.

    `low` and `high` are None with fewer than two pairs. The verdict is in the sense of speed: for a latency a ratio
    below 1 is faster.
    """

    value: float
    low: float | None
    high: float | None
    pairs: int
    verdict: Verdict


class Point(Frozen):
    """One concurrency: the variant, bf16 measured in alternation with it, and their ratios."""

    concurrency: int
    variant: LoadSummary
    baseline: LoadSummary
    throughput: Ratio | None
    ttft: Ratio | None
    itl: Ratio | None
    note: str | None = None  # "3 of 4 pairs: the time budget of 900 s was spent"


# --- quality and memory ----------
class Estimate(Frozen):
    """A value with its standard error (None with fewer than two windows)."""

    value: float
    se: float | None


class TaskScore(Frozen):
    """One task of lm-evaluation-harness, scored through the live server. Items are the units of all standard errors.

    score: mean over items of `metric`, each from 0 to 1; None: `note` says why there is none.
    delta: score - bf16's, on the items that both were asked, paired item by item; None of bf16 itself.
    won, lost: items on which the variant has the higher value, the lower one.
    """

    metric: str  # "acc", "exact_match (strict-match)"
    score: Estimate | None
    binary: bool = True  # every item is right (1) or wrong (0)
    delta: Estimate | None = None
    won: int | None = None
    lost: int | None = None
    items: int  # scored
    paired: int | None = None  # of those, scored on bf16 too
    of_items: int  # that the task has
    too_long: int = 0  # items that were left out, since they do not fit into the context
    few_shot: int  # worked examples before each item
    context_tokens: int | None
    bos: str | None  # what stands first in a prompt
    sha256: str  # of the documents that were to be asked
    dataset: str | None = None  # Hub id
    note: str | None = None


class Quality(Frozen):
    """Teacher-forced on held-out windows, by the live server.

    kl: mean over tokens of KL(bf16 || variant) in nats, over the tokens that both servers list in their top k, and one
        bucket for all others: a lower bound of the full divergence, tight for large k.
    top1: share of positions at which the variant's most likely token is bf16's.
    Standard errors are between windows.
    """

    perplexity: Estimate
    perplexity_ratio: Estimate | None  # variant / bf16, paired by window
    kl: Estimate | None
    top1: Estimate | None
    windows: int
    tokens: int  # scored
    context_tokens: int
    top_k: int
    bos: str  # what stands first in a window
    data: DataRecord
    tasks: dict[str, TaskScore] = Field({})  # by name


class Fidelity(Frozen):
    """Served log-probabilities against the same checkpoint in transformers (float32), on the same tokens.

    error: mean absolute difference in nats. floor: the same between transformers in bfloat16 and in float32, which is
    rounding alone, measured for this checkpoint and for bf16; the larger counts. faithful: error <= limit, and the two
    perplexities agree within 2 % or what so few tokens can tell.
    """

    faithful: bool
    error: float
    floor: float
    limit: float
    tokens: int
    reference_perplexity: float  # transformers, float32, on those tokens
    served_perplexity: float  # on those tokens


class Memory(Frozen):
    """Separate columns, never one pool reservation called memory."""

    disk_bytes: int  # weight files
    loaded_bytes: int | None  # weights in the server, from its log
    kv_capacity_tokens: int | None
    kv_bytes: int | None
    peak_bytes: int | None  # highest seen after a block: proportional set size (CPU) or device memory in use (CUDA)


class ServerFacts(Frozen):
    """What was really served: read out of the live server, its log and its command."""

    engine: str
    version: str | None
    command: tuple[str, ...]
    env: dict[str, str]  # what qserve set
    dtype: str | None
    quantization: str | None  # as the engine named it
    kernels: tuple[str, ...]
    startup_s: float
    log: str  # path in the run folder


class VariantResult(Frozen):
    """All that was measured of one variant."""

    name: str
    label: str
    digest: str | None = None  # of the checkpoint
    status: Literal["measured", "failed", "not faithful", "not servable"]  # the last: no kernel for it here
    problem: str | None = None
    note: str | None = None  # what a reader should know of the checkpoint
    bits_per_parameter: float | None = None
    layers: int | None = None
    layers_fallback: int | None = None
    prep_s: float | None = None
    server: ServerFacts | None = None
    memory: Memory | None = None
    quality: Quality | None = None
    fidelity: Fidelity | None = None
    offline_perplexity: Estimate | None = None  # in transformers (float32): known where it cannot be served, too
    points: tuple[Point, ...] = ()


class Report(Artifact):
    """measurements.json: one run of `qserve bench`."""

    format: Literal[1] = 1
    run: str
    created: str  # ISO 8601, UTC
    qserve_version: str
    recipe_file: str
    options: tuple[str, ...] | None = None  # of the command, so that it can be run again; None: an older report
    recipe: dict[str, Any]
    model: str
    source_note: str | None
    quick: bool  # a smoke run: the figures prove that it works, and no more
    machine: Machine
    data: tuple[DataRecord, ...]  # calibration, quality, load
    baseline: VariantResult  # its points: bf16 alone
    variants: tuple[VariantResult, ...]
    wall_s: float  # of the session that finished it
