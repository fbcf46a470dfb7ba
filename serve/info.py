"""`qserve info URL`: what a running server is and how it is, as far as it says so itself.

Routes and names, by engine:
    vllm           /version; /metrics: vllm:cache_config_info (its labels), vllm:num_requests_running
    llama-server   /props: build_info, model_ftype; /metrics (with --metrics): llamacpp:requests_processing
    tgi            /info: max_total_tokens, max_batch_total_tokens; /metrics: tgi_batch_current_size, tgi_queue_size
    sglang         /get_server_info: server arguments, max_total_num_tokens; /metrics: sglang:num_running_reqs
    others         /v1/models
What a server does not say is None. vLLM names no quantization: it is read from the checkpoint's config where the
server and its folder are on this machine.
"""

import json
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import httpx

from qserve.errors import ServerError, UsageError
from qserve.serve.server import parse_metrics
from qserve.values import Frozen

ROUTES = ("/v1/models", "/health", "/metrics", "/version", "/info", "/props", "/get_server_info")
TIMEOUT_S = 10.0
Known = Literal["vllm", "llama-server", "tgi", "sglang", "transformers", "pipeline"]
OWNERS: Mapping[str, Known] = {
    "vllm": "vllm", "llamacpp": "llama-server", "sglang": "sglang", "transformers": "transformers",
    "pipeline": "pipeline",
}  # fmt: skip
PREFIXES: Mapping[str, Known] = {"vllm:": "vllm", "llamacpp:": "llama-server", "sglang:": "sglang", "tgi_": "tgi"}
RUNNING = (
    "vllm:num_requests_running", "llamacpp:requests_processing", "sglang:num_running_reqs", "tgi_batch_current_size",
)  # fmt: skip
WAITING = ("vllm:num_requests_waiting", "llamacpp:requests_deferred", "sglang:num_queue_reqs", "tgi_queue_size")
KV_USED = ("vllm:kv_cache_usage_perc", "sglang:token_usage")


class Info(Frozen):
    """A running server in its own words. None: it does not say."""

    url: str
    healthy: bool | None  # None: it has no /health
    engine: Known | None
    version: str | None
    model: str
    models: tuple[str, ...]  # every id it answers to
    context_tokens: int | None  # of one request, prompt and answer
    quantization: str | None
    dtype: str | None
    kv_capacity_tokens: int | None
    kv_used: float | None  # share, 0..1
    running: int | None  # requests
    waiting: int | None  # requests


@dataclass(frozen=True)
class Answers:
    """What the routes said: JSON objects, and /metrics as text."""

    statuses: Mapping[str, int]
    objects: Mapping[str, Mapping[str, object]]
    metrics: str = field(repr=False)

    def of(self, route: str, key: str) -> object:
        return self.objects.get(route, {}).get(key)

    def text(self, route: str, key: str) -> str | None:
        value = self.of(route, key)
        return value if isinstance(value, str) and value else None

    def whole(self, route: str, key: str) -> int | None:
        return _whole(self.of(route, key))

    def cards(self) -> list[Mapping[str, object]]:
        """The rows of /v1/models."""
        rows = self.of("/v1/models", "data")
        return [row for row in rows if isinstance(row, dict) and "id" in row] if isinstance(rows, list) else []


def probe(url: str, api_key: str | None = None, key_name: str = "OPENAI_API_KEY") -> Info:
    """Ask a server what it is. `key_name`: where the key came from, for the sentence about a wrong one.

    Raises:
        UsageError: no http URL, or a key that cannot stand in a header.
        ServerError: nobody answers there, another protocol does, the key is refused, or it serves no model.
    """
    base = base_url(url)
    answers = _ask_all(base, api_key, key_name)
    cards, engine = answers.cards(), _engine(answers)
    tgi_model = answers.text("/info", "model_id") if engine == "tgi" else None
    names = tuple(str(card["id"]) for card in cards) or ((tgi_model,) if tgi_model else ())
    if not names:
        raise ServerError(
            f"{base} answers in HTTP, but it lists no model at /v1/models (HTTP {answers.statuses['/v1/models']}): is "
            "this the URL of an OpenAI API?"
        )
    card = cards[0] if cards else {}
    metrics = parse_metrics(answers.metrics)
    return Info(
        url=base, healthy=_healthy(answers), engine=engine, version=_version(answers, engine), model=names[0],
        models=names, context_tokens=_context(answers, card, engine), quantization=_quantization(answers, card, base),
        dtype=answers.text("/get_server_info", "dtype") or answers.text("/info", "model_dtype"),
        kv_capacity_tokens=_kv_capacity(answers), kv_used=first_of(metrics, KV_USED),
        running=_count(metrics, RUNNING), waiting=_count(metrics, WAITING),
    )  # fmt: skip


def base_url(url: str) -> str:
    """`http://host:port` of a URL, with or without /v1 at its end. Raises UsageError if it is none."""
    if "@" in url:
        raise UsageError("the URL has a user or a password in it; put the key into the environment")
    wrong = UsageError(f"{url!r} is no http or https URL; write http://HOST:PORT")
    try:
        parts = urlsplit(url.strip())
        httpx.URL(url.strip())
        (parts.hostname or "").encode("idna")
        _ = parts.port  # these raise: a bracket left open, an empty label, a port past 65535
    except (ValueError, httpx.InvalidURL) as error:
        raise wrong from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise wrong
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def info_text(info: Info) -> str:
    """In a few lines, for a terminal."""
    unknown = "unknown"

    def said(value: object, unit: str = "") -> str:
        return unknown if value is None else f"{value:,}{unit}" if isinstance(value, int) else f"{value}{unit}"

    health = {True: "healthy", False: "not healthy", None: unknown}[info.healthy]
    used = "" if info.kv_used is None else f", {info.kv_used:.0%} used"
    others = f" (also {', '.join(info.models[1:])})" if info.models[1:] else ""
    rows = (
        ("model", f"{info.model}{others}"), ("engine", f"{said(info.engine)} {info.version or '(version unknown)'}"),
        ("health", health), ("load", f"{said(info.running)} running, {said(info.waiting)} waiting"),
        ("context", said(info.context_tokens, " tokens")),
        ("KV cache", said(info.kv_capacity_tokens, " tokens") + used),
        ("quantization", said(info.quantization)), ("dtype", said(info.dtype)),
    )  # fmt: skip
    return "\n".join([info.url, *(f"{name:13} {text}" for name, text in rows)])


# --- asking ----------
def _ask_all(base: str, api_key: str | None, key_name: str) -> Answers:
    """Every route once. The first one, which every OpenAI server has, tells whether there is a server at all."""
    key = (api_key or "").strip()
    if not all(33 <= ord(char) <= 126 for char in key):
        raise UsageError(f"the API key in ${key_name} has characters that no header can carry; set it again")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    statuses: dict[str, int] = {}
    objects: dict[str, Mapping[str, object]] = {}
    metrics = ""
    with httpx.Client(timeout=TIMEOUT_S, trust_env=False, headers=headers) as client:
        for route in ROUTES:
            try:
                response = client.get(base + route)
            except httpx.HTTPError as error:
                if route == ROUTES[0]:
                    raise ServerError(f"{base}: {_no_answer(error)}") from error
                continue
            statuses[route] = response.status_code
            if route == ROUTES[0] and response.status_code in (401, 403):
                what = "refused the API key" if api_key else "wants an API key"
                raise ServerError(
                    f"{base}: the server {what} (HTTP {response.status_code}); put the right one into ${key_name}, or "
                    "name another variable with --api-key-env"
                )
            if response.status_code == 200 and route == "/metrics":
                metrics = response.text
            elif response.status_code == 200 and (value := _object(response.text)):
                objects[route] = value
    return Answers(statuses, objects, metrics)


def _no_answer(error: httpx.HTTPError) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return "no TLS there, or a certificate that is not accepted; is it http instead of https?"
        cause = cause.__cause__ or cause.__context__
    match error:
        case httpx.ConnectError():
            return f"nobody answers ({error}); is the server running, and is the URL right?"
        case httpx.TimeoutException():
            return f"no answer in {TIMEOUT_S:.0f} s; is the server still starting, or the URL wrong?"
        case _:
            return f"what answers there speaks another protocol ({error}); give the URL of an OpenAI API"


def _object(text: str) -> Mapping[str, object] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


# --- reading ----------
def _engine(answers: Answers) -> Known | None:
    owners = {str(card.get("owned_by")) for card in answers.cards()}
    named = next((engine for owner, engine in OWNERS.items() if owner in owners), None)
    if named is None and answers.whole("/info", "max_total_tokens") is not None:
        return "tgi"
    return named or next((e for p, e in PREFIXES.items() if re.search(f"^{p}", answers.metrics, re.MULTILINE)), None)


def _version(answers: Answers, engine: Known | None) -> str | None:
    match engine:
        case "vllm" | "transformers" | "pipeline":
            return answers.text("/version", "version")
        case "llama-server":
            return answers.text("/props", "build_info")
        case "tgi":
            return answers.text("/info", "version")
        case "sglang":
            return answers.text("/get_server_info", "version")
        case None:
            return None


def _healthy(answers: Answers) -> bool | None:
    status = answers.statuses.get("/health")
    if status is None:
        return False  # it hung up, or took too long
    return None if status in (401, 403, 404, 405) else status == 200


def _context(answers: Answers, card: Mapping[str, object], engine: Known | None) -> int | None:
    if engine == "tgi":
        return answers.whole("/info", "max_total_tokens")
    if (length := _whole(card.get("max_model_len"))) is not None:
        return length
    settings = answers.of("/props", "default_generation_settings")
    return _whole(settings.get("n_ctx")) if isinstance(settings, dict) else None


def _kv_capacity(answers: Answers) -> int | None:
    """vLLM: what it says itself, else blocks x block size. llama-server does not say whether its slots share one."""
    labels = dict(re.findall(r'(\w+)="([^"]*)"', _line(answers.metrics, "vllm:cache_config_info")))
    numbers = {name: int(text) for name, text in labels.items() if text.isdigit()}
    if tokens := numbers.get("kv_cache_size_tokens"):
        return tokens
    if "num_gpu_blocks" in numbers and "block_size" in numbers:
        return numbers["num_gpu_blocks"] * numbers["block_size"]
    return answers.whole("/get_server_info", "max_total_num_tokens") or answers.whole("/info", "max_batch_total_tokens")


def _line(metrics: str, name: str) -> str:
    found = re.search(rf"^{name}\{{.*$", metrics, re.MULTILINE)
    return found[0] if found else ""


def _quantization(answers: Answers, card: Mapping[str, object], base: str) -> str | None:
    if said := answers.text("/props", "model_ftype") or answers.text("/get_server_info", "quantization"):
        return said
    here = urlsplit(base).hostname in ("127.0.0.1", "localhost", "::1")
    config = Path(str(card.get("root"))) / "config.json"
    if not here or not config.is_file():
        return None
    quantized = (_object(config.read_text(encoding="utf-8")) or {}).get("quantization_config")
    # vLLM may quantize as it starts, and does not say so
    return str(quantized.get("quant_method")) if isinstance(quantized, dict) else "none in the checkpoint"


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def first_of(metrics: Mapping[str, float], names: tuple[str, ...]) -> float | None:
    """The value of the first of these names that is there: an engine has one of them."""
    return next((metrics[name] for name in names if name in metrics), None)


def _count(metrics: Mapping[str, float], names: tuple[str, ...]) -> int | None:
    value = first_of(metrics, names)
    return None if value is None else int(value)
