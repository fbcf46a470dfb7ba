"""The naive server that people start with: one `generate` at a time behind HTTP, no batching.

    python transformers_worker.py --mode transformers|pipeline --checkpoint FOLDER --loader FILE --name ID --port N ...

`transformers` streams each token as it comes. `pipeline` makes one `pipeline()` call a request, which gives its text at
the end, all at once. A request waits until the one before it is done; one whose client has left is ended.
Run with a runtime's own Python: imports nothing of qserve; loads FILE, qserve/plain_worker.py, by its path. Its first
line of log says in JSON what it serves.
"""

import argparse
import json
import os
import runpy
import select
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, GenerationConfig, StoppingCriteria, StoppingCriteriaList

UNSUPPORTED = ("stop", "echo", "logprobs", "suffix", "tools", "response_format", "logit_bias")
Put = Callable[[str, str | None, int], None]  # text, finish reason, output tokens so far


class BadRequest(Exception):
    """The client's fault; `str` is the sentence it gets."""


@dataclass(frozen=True)
class Ask:
    """One request. `ids`: the prompt as tokens; `messages`: of a chat, for the pipeline."""

    ids: list[int]
    messages: list[dict[str, str]] | None
    max_tokens: int
    temperature: float
    top_p: float
    ignore_eos: bool
    min_tokens: int
    skip_special_tokens: bool
    prompt_logprobs: int | None
    echo_logprobs: int | None  # `logprobs` where `echo` is asked for: those of the prompt, in OpenAI's old spelling
    stream: bool
    usage: bool
    usage_each_chunk: bool


@dataclass(frozen=True)
class Done:
    """Token counts of an answer, as the model saw them."""

    prompt_tokens: int
    output_tokens: int
    finish: str


class WhileThere(StoppingCriteria):  # type: ignore[misc]
    """Ends the generation when the client has hung up; knows how many tokens there are."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.first = self.tokens = 0  # after the first new token, and now

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.tokens = int(input_ids.shape[1])
        self.first = self.first or self.tokens
        return torch.full((input_ids.shape[0],), left(self.connection), device=input_ids.device)

    def done(self, max_tokens: int) -> Done:
        output = self.tokens - self.first + 1
        return Done(self.first - 1, output, "length" if output >= max_tokens else "stop")


class Deltas:
    """A streamer for `generate`: the text of each token as it comes, whole characters only."""

    def __init__(self, tokenizer: Any, ask: Ask, put: Put) -> None:
        self.tokenizer, self.ask, self.send = tokenizer, ask, put
        self.ids: list[int] = []
        self.shown = self.from_id = self.count = 0
        self.prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self.prompt:  # the first call brings the prompt
            self.prompt = False
            return
        self.ids.append(int(value.reshape(-1)[-1]))
        self.count += 1
        text = self.text()
        new = "" if text.endswith("\ufffd") else text[self.shown :]  # half a character: wait for the rest of it
        if new:
            self.shown = len(text)
            if text.endswith("\n"):  # a line is over: what stands before it never changes again
                self.from_id, self.shown = len(self.ids), 0
        self.send(new, None, self.count)

    def text(self) -> str:
        return str(self.tokenizer.decode(self.ids[self.from_id :], skip_special_tokens=self.ask.skip_special_tokens))

    def end(self) -> None:
        """Text held back to the very end."""
        self.rest = self.text()[self.shown :]


@dataclass(frozen=True)
class Naive:
    """The model, and the jobs that wait for it. One thread does them, in the order in which they came: in a
    thread of its own for each request a token took 1.6 times as long, since torch keeps a team of threads a caller."""

    name: str
    mode: str
    context: int
    model: Any
    tokenizer: Any
    pipe: Any  # None: `generate` is called
    jobs: SimpleQueue[Callable[[], None]]

    def generate(self, ask: Ask, connection: socket.socket, put: Put) -> Done:
        there = WhileThere(connection)
        settings = self.settings(ask)
        if self.pipe:
            self.call_pipeline(ask, settings, there, put)
        else:
            deltas = Deltas(self.tokenizer, ask, put)
            ids = torch.tensor([ask.ids], device=self.model.device)
            with torch.inference_mode():
                self.model.generate(
                    ids, attention_mask=torch.ones_like(ids), generation_config=settings, streamer=deltas,
                    stopping_criteria=StoppingCriteriaList([there]),
                )  # fmt: skip
            if deltas.rest:
                put(deltas.rest, None, deltas.count)
        return there.done(ask.max_tokens)

    def call_pipeline(self, ask: Ask, settings: Any, there: WhileThere, put: Put) -> None:
        """A pipeline takes text, so token ids become text first, and it tokenizes them again."""
        prompt: Any = ask.messages or self.tokenizer.decode(ask.ids)
        found = self.pipe(
            prompt, return_full_text=False, add_special_tokens=False, skip_special_tokens=ask.skip_special_tokens,
            generation_config=settings, stopping_criteria=StoppingCriteriaList([there]),
        )  # fmt: skip
        text = found[0]["generated_text"]
        put(text if isinstance(text, str) else text[-1]["content"], None, there.done(ask.max_tokens).output_tokens)

    def settings(self, ask: Ask) -> Any:
        own = self.model.generation_config
        pad = own.pad_token_id if own.pad_token_id is not None else self.tokenizer.pad_token_id
        least = ask.max_tokens if ask.ignore_eos else ask.min_tokens
        chosen = {"max_new_tokens": ask.max_tokens, "min_new_tokens": least, "pad_token_id": pad or 0}
        if ask.temperature > 0:
            chosen |= {"do_sample": True, "temperature": ask.temperature, "top_p": ask.top_p, "top_k": 0}
        else:
            chosen |= {"do_sample": False}
        return GenerationConfig(**chosen)

    def score(self, ids: list[int], top_k: int) -> list[dict[str, dict[str, Any]] | None]:
        """Log-probabilities of the prompt's tokens and of the `top_k` likeliest at each place, as vLLM spells them."""
        with torch.inference_mode():
            row = torch.tensor([ids], device=self.model.device)
            logits = self.model(row).logits[0, :-1].float().log_softmax(-1)
        top = logits.topk(max(top_k, 1), dim=-1)
        own = logits.gather(1, row[0, 1:, None])[:, 0]
        ranks = (logits > own[:, None]).sum(-1) + 1
        places: list[dict[str, dict[str, Any]] | None] = [None]
        rows = zip(ids[1:], own.tolist(), ranks.tolist(), top.indices.tolist(), top.values.tolist(), strict=True)
        for token, value, rank, best, values in rows:
            place = {str(t): {"logprob": v, "rank": n} for n, (t, v) in enumerate(zip(best, values, strict=True), 1)}
            places.append({**place, str(token): {"logprob": value, "rank": rank}} if top_k else {})
        return places

    def read(self, body: dict[str, Any], chat: bool) -> Ask:
        """Raises BadRequest, in a sentence, for what this server cannot do."""
        echo = body.get("logprobs") if body.get("echo") and not chat and not body.get("stream") else None
        known = () if echo is None else ("echo", "logprobs")
        refused = [name for name in UNSUPPORTED if body.get(name) and name not in known]
        if refused or body.get("n", 1) != 1:
            raise BadRequest(f"this server does not know {', '.join(refused) or 'n'}; leave it out")
        if body.get("model", self.name) != self.name:
            raise BadRequest(f"no model {body['model']!r}; it serves {self.name}")
        ids, messages = self.prompt(body, chat)
        room = self.context - len(ids)
        max_tokens = body.get("max_completion_tokens") or body.get("max_tokens") or (room if chat else 16)
        if not ids or max_tokens > room or max_tokens < 1:
            raise BadRequest(f"{len(ids)} prompt tokens and {max_tokens} to generate do not fit into {self.context}")
        options = body.get("stream_options") or {}
        return Ask(
            ids, messages, int(max_tokens), float(body.get("temperature", 1.0)), float(body.get("top_p", 1.0)),
            bool(body.get("ignore_eos")), int(body.get("min_tokens") or 0), body.get("skip_special_tokens", True),
            body.get("prompt_logprobs"), echo, bool(body.get("stream")), bool(options.get("include_usage")),
            bool(options.get("continuous_usage_stats")),
        )  # fmt: skip

    def prompt(self, body: dict[str, Any], chat: bool) -> tuple[list[int], list[dict[str, str]] | None]:
        if chat:
            messages = body.get("messages")
            if not messages or not isinstance(messages, list):
                raise BadRequest("a chat needs messages: a list of {role, content}")
            if not self.tokenizer.chat_template:
                raise BadRequest("this model has no chat template; use /v1/completions")
            made = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
            return list(made["input_ids"]), messages
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"]), None
        if isinstance(prompt, list) and all(isinstance(i, int) for i in prompt):
            if not all(0 <= i < self.model.config.get_text_config().vocab_size for i in prompt):
                raise BadRequest("a token id is outside the vocabulary")
            return prompt, None
        raise BadRequest("the prompt is a text or a list of token ids")


def left(connection: socket.socket) -> bool:
    """Whether the other side has closed it. A client waits for its answer, so there is nothing to read but the end."""
    try:
        readable, _, _ = select.select([connection], [], [], 0)
        return bool(readable) and connection.recv(1, socket.MSG_PEEK) == b""
    except OSError:
        return True


class Api(BaseHTTPRequestHandler):
    """/health, /version, /v1/models, /v1/completions, /v1/chat/completions."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    naive: Naive

    def do_GET(self) -> None:
        match self.path:
            case "/health":
                self.reply(200, {"status": "ok"})
            case "/version":
                self.reply(200, {"version": transformers.__version__})
            case "/v1/models":
                card = {"id": self.naive.name, "object": "model", "owned_by": self.naive.mode}
                self.reply(200, {"object": "list", "data": [{**card, "max_model_len": self.naive.context}]})
            case _:
                self.reply(404, {"error": {"message": f"no route {self.path}"}})

    def do_POST(self) -> None:
        chat = self.path == "/v1/chat/completions"
        if not chat and self.path != "/v1/completions":
            return self.reply(404, {"error": {"message": f"no route {self.path}"}})
        try:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            ask = self.naive.read(body, chat)
        except (BadRequest, ValueError, TypeError, AttributeError) as error:
            return self.reply(400, {"error": {"message": str(error), "type": "invalid_request_error"}})
        ended = threading.Event()

        def job() -> None:
            try:
                self.answer(ask, chat)
            finally:
                ended.set()

        self.naive.jobs.put(job)
        ended.wait()
        return None

    # --- answers ----------
    def answer(self, ask: Ask, chat: bool) -> None:
        """Nothing to a client that has left, in the meantime or in the middle."""
        self.close_connection = self.close_connection or left(self.connection)
        try:
            if not self.close_connection:
                self.stream(ask, chat) if ask.stream else self.whole(ask, chat)
        except OSError:
            self.close_connection = True
        except Exception:  # whatever the model raises: this request fails, the next one need not
            traceback.print_exc()
            self.close_connection = True

    def whole(self, ask: Ask, chat: bool) -> None:
        pieces: list[str] = []
        done = self.naive.generate(ask, self.connection, lambda text, *_: pieces.append(text))
        choice = {**self.part("".join(pieces), chat, whole=True), "finish_reason": done.finish}
        if ask.prompt_logprobs is not None and not chat:
            choice["prompt_logprobs"] = self.naive.score(ask.ids, ask.prompt_logprobs)
        if ask.echo_logprobs is not None:
            choice["logprobs"] = self.echo(ask, done)
        self.reply(200, {**self.head(chat, whole=True), "choices": [choice], "usage": usage(len(ask.ids), done)})

    def echo(self, ask: Ask, done: Done) -> dict[str, object]:
        """Log-probabilities of the prompt's tokens; those of the answer's are not known."""
        places = [place or {} for place in self.naive.score(ask.ids, max(ask.echo_logprobs or 1, 1))]
        own = [place[str(token)]["logprob"] if place else None for token, place in zip(ask.ids, places, strict=True)]
        top = [{f"token_id:{key}": one["logprob"] for key, one in place.items()} or None for place in places]
        unknown = [None] * done.output_tokens
        return {"token_logprobs": own + unknown, "top_logprobs": top + unknown}

    def stream(self, ask: Ask, chat: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        head = self.head(chat)

        def put(text: str, finish: str | None, tokens: int) -> None:
            counts = {"usage": usage(len(ask.ids), Done(0, tokens, ""))} if ask.usage_each_chunk else {}
            self.event({**head, "choices": [{**self.part(text, chat), "finish_reason": finish}], **counts})

        if chat:
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            self.event({**head, "choices": [role]})
        done = self.naive.generate(ask, self.connection, put)
        put("", done.finish, done.output_tokens)
        if ask.usage:
            self.event({**head, "choices": [], "usage": usage(done.prompt_tokens, done)})
        self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def event(self, value: object) -> None:
        data = f"data: {json.dumps(value)}\n\n".encode()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def head(self, chat: bool, whole: bool = False) -> dict[str, object]:
        kind = f"chat.completion{'' if whole else '.chunk'}" if chat else "text_completion"
        return {"id": uuid.uuid4().hex, "object": kind, "created": int(time.time()), "model": self.naive.name}

    def part(self, text: str, chat: bool, whole: bool = False) -> dict[str, Any]:
        if not chat:
            return {"index": 0, "text": text, "logprobs": None}
        return {"index": 0, "message" if whole else "delta": {"role": "assistant", "content": text}}

    def reply(self, status: int, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        pass  # a line a request would be a cost that the engines beside it do not have


def usage(prompt_tokens: int, done: Done) -> dict[str, int]:
    total = prompt_tokens + done.output_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": done.output_tokens, "total_tokens": total}


class Listener(ThreadingHTTPServer):
    """Every client is let in at once; their requests wait for their turn."""

    request_queue_size = 1024
    daemon_threads = True


def load(args: argparse.Namespace) -> Naive:
    torch.set_num_threads(args.threads)
    device = "cuda" if args.device == "cuda" else "cpu"
    dtype = getattr(torch, args.dtype)
    model = runpy.run_path(args.loader)["load_to_serve"](args.checkpoint, dtype, device)
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    pipe = None
    if args.mode == "pipeline":
        pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    return Naive(args.name, args.mode, args.context, model, tokenizer, pipe, SimpleQueue())


def describe(naive: Naive) -> dict[str, object]:
    model = naive.model
    quantized = getattr(model.config, "quantization_config", None)
    method = quantized.get("quant_method") if isinstance(quantized, dict) else getattr(quantized, "quant_method", None)
    named = None if method is None else str(getattr(method, "value", method))
    if expanded := getattr(model, "expanded_from", None):  # a format that transformers alone cannot read
        named = f"{expanded}, expanded"
    layers = {f"{type(m).__module__.split('.')[0]} {type(m).__name__}" for m in linear(model)}
    return {
        "version": transformers.__version__, "torch": torch.__version__, "dtype": str(model.dtype).split(".")[-1],
        "quantization": named,
        "kernels": [*sorted(layers), f"{model.config._attn_implementation} attention"],
        "loaded_bytes": int(model.get_memory_footprint()) + scale_bytes(model), "threads": torch.get_num_threads(),
    }  # fmt: skip


def linear(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, torch.nn.Linear)]


def scale_bytes(model: Any) -> int:
    """The scales of bitsandbytes' layers, which are neither parameters nor buffers."""
    found = 0
    for module in linear(model):
        state = getattr(module.weight, "quant_state", None)
        nested = getattr(state, "state2", None)
        scales = (getattr(state, "absmax", None), getattr(nested, "absmax", None), getattr(module.weight, "SCB", None))
        found += sum(scale.nbytes for scale in scales if scale is not None)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--checkpoint", "--loader", "--name", "--host", "--dtype", "--device"):
        parser.add_argument(name, required=True)
    for name in ("--port", "--context", "--threads"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--mode", choices=("transformers", "pipeline"), required=True)
    args = parser.parse_args()
    naive = load(args)
    Api.naive = naive
    print(f"serving {json.dumps(describe(naive))}", flush=True)
    Listener.address_family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    with Listener((args.host, args.port), Api) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        while True:  # one at a time: that is what makes it naive
            naive.jobs.get()()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
