"""The worker of task scores in its real environment: what it refuses, and what it sends to a server and makes of it.

The server is a stand-in on loopback that gives each token a log-probability by a rule, so the right score is known.
"""

import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from capitals import items, write_task

from qserve.errors import UsageError
from qserve.eval import tasks as tasks_module
from qserve.jobs import Job, run_job
from qserve.machine import look
from qserve.recipe import find_recipe, load_recipe
from qserve.runtimes import ensure_runtime
from qserve.tasks import ENV, check_tasks

WORKER = Path(tasks_module.__file__).with_name("tasks_worker.py")
# One process for many jobs: importing lm_eval takes seconds.
DRIVER = """
import runpy
def main(job, emit):
    worker = runpy.run_path(job["worker"])["main"]
    return {"results": [worker(one, emit) for one in job["jobs"]]}
"""
NO_HUB = {"HF_HUB_OFFLINE": "1"}  # without it the client of the Hub tries for 25 s, and the sentence is the same


def work(folder: Path, *jobs: dict[str, Any]) -> list[dict[str, Any]]:
    driver = folder / "driver.py"
    driver.write_text(DRIVER)
    python = ensure_runtime("lmeval", look().flavour, print).python
    cache = {"HF_HOME": str(folder / "hf"), **NO_HUB}
    spec = {"worker": str(WORKER), "jobs": jobs}
    return list(run_job(Job("tasks", python, driver, spec, folder / "log", ENV | cache))["results"])


def prepare(*names: str | Path, items: int | None = None) -> dict[str, Any]:
    return {"do": "prepare", "tasks": [str(name) for name in names], "items": items}


# --- before anything is served ----------
def test_what_cannot_be_scored_is_refused_in_one_sentence(tmp_path: Path) -> None:
    good = write_task(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    same_name = write_task(other)
    broken = tmp_path / "broken.yaml"
    broken.write_text("task: [")
    no_metric = write_task(tmp_path, "graded", metric="mcc")
    no_metric.write_text(no_metric.read_text().replace("aggregation: mean, ", ""))
    no_data = write_task(tmp_path, "lost")
    (tmp_path / "lost.jsonl").unlink()
    bad_prompt = write_task(tmp_path, "bad_prompt")
    bad_prompt.write_text(bad_prompt.read_text().replace("doc_to_choice: choices", "doc_to_choice: nothing"))
    perplexity = tmp_path / "text.yaml"
    perplexity.write_text("task: text\ndataset_path: json\noutput_type: loglikelihood_rolling\n")
    cases = {
        ("arc_esy",): "no task 'arc_esy'; did you mean arc_easy",
        ("humaneval",): "humaneval runs code that the model writes",
        ("arc_easy",): "the data of arc_easy cannot be fetched",
        ("wikitext",): "wikitext is a perplexity",
        (broken,): "is no task file that lm_eval can read",
        (no_metric,): "graded has no metric that gives each item a value from 0 to 1",
        (no_data,): "lost",
        (bad_prompt,): "bad_prompt",
        (perplexity,): "is a perplexity",
        (good, same_name): "are both called capitals",
    }
    found = work(tmp_path, *(prepare(*names) for names in cases), prepare(good))
    assert len(found) == len(cases) + 1
    for (names, said), result in zip(cases.items(), found, strict=False):
        assert said in result.get("refused", ""), f"{names}: {result}"
        assert "\n" not in result["refused"]
    assert [found[i]["fault"] for i in (0, 1, 2)] == ["task", "task", "data"]
    (task,) = found[-1]["tasks"]
    assert (task["name"], task["metric"], task["items"], task["of_items"]) == ("capitals", "acc", 20, 20)


def test_what_a_task_is_and_that_fewer_items_are_the_first_of_more(tmp_path: Path) -> None:
    path = write_task(tmp_path, shots=2)
    few, many, again = work(tmp_path, prepare(path, items=5), prepare(path, items=12), prepare(path, items=5))
    assert few == again
    assert (few["tasks"][0]["items"], few["tasks"][0]["of_items"], few["tasks"][0]["few_shot"]) == (5, 20, 2)
    assert few["tasks"][0]["sha256"] != many["tasks"][0]["sha256"]


# --- a live server ----------
def logprob(tokens: list[int], at: int) -> float:
    """By a rule: of this token, given the one before it."""
    return -0.1 - (tokens[at] * 37 + tokens[at - 1] * 11) % 97 / 50


class Api(BaseHTTPRequestHandler):
    asked: list[dict[str, Any]]
    headers_seen: list[str]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        self.headers_seen.append(str(self.headers.get("Authorization")))
        choices = []
        for i, tokens in enumerate(body["prompt"]):
            values = [None, *(logprob(tokens, at) for at in range(1, len(tokens))), -1.0]
            top = [{"x": 0.0}] * len(values)
            choices.append({"index": i, "text": "", "logprobs": {"token_logprobs": values, "top_logprobs": top}})
        data = json.dumps({"choices": choices}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words: object) -> None:
        pass


@contextmanager
def stand_in() -> Iterator[str]:
    Api.asked, Api.headers_seen = [], []
    with ThreadingHTTPServer(("127.0.0.1", 0), Api) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
        httpd.shutdown()


BYTES = """
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
def main(job, emit):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)} | {"<s>": 256}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if job["bos"]:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="<s>").save_pretrained(job["folder"])
    return {"a": made.encode("Paris").ids}
"""


def tokenizer(folder: Path, bos: bool) -> Path:
    """One token a byte."""
    (folder / "bytes.py").write_text(BYTES)
    python = ensure_runtime("lmeval", look().flavour, print).python
    out = folder / f"tokenizer-{bos}"
    run_job(Job("tokenizer", python, folder / "bytes.py", {"folder": str(out), "bos": bos}, folder / "log"))
    return out


def test_a_live_server_is_asked_in_full_and_scored_by_the_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same sums made here; an item longer than the context is left out and counted; no proxy, no key."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    path = write_task(tmp_path)
    long = {**items()[0], "country": "x" * 400}
    with (tmp_path / "capitals.jsonl").open("a") as file:
        file.write(json.dumps(long) + "\n")
    folder = tokenizer(tmp_path, bos=True)
    with stand_in() as url:
        (task,) = work(tmp_path, prepare(path))[0]["tasks"]
        job = {"do": "score", "tasks": [task], "items": None, "url": url, "model": "int8", "checkpoint": str(folder),
               "context_tokens": 256, "budget_s": 60.0}  # fmt: skip
        whole, hurried, again = work(tmp_path, job, {**job, "budget_s": 0.0}, job)
        asked = list(Api.asked)
    found = whole["tasks"]["capitals"]
    assert found["problem"] is None
    assert whole["bos"] == "token 256 stands first"
    assert (len(found["values"]), found["too_long"], found["cut"]) == (20, 1, 0)
    assert set(Api.headers_seen) == {"None"}
    assert all(body["model"] == "int8" and body["echo"] and len(body["prompt"][0]) < 256 for body in asked)
    assert {body["prompt"][0][0] for body in asked} == {256}
    table = byte_table()
    expected = {f"capitals/{i}": expected_value(item, table) for i, item in enumerate(items())}
    assert found["values"] == expected
    assert 0 < sum(expected.values()) < 20
    few = hurried["tasks"]["capitals"]["values"]
    assert 0 < len(few) < 20 and few.items() <= expected.items()
    assert again["tasks"]["capitals"] == found


def byte_table() -> dict[str, int]:
    """Letter -> id: the ids of ByteLevel's alphabet, in its own order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shown = {b: chr(b) for b in printable} | {
        b: chr(256 + n) for n, b in enumerate(b for b in range(256) if b not in printable)
    }
    order = {letter: i for i, letter in enumerate(sorted(shown.values()))}
    return {chr(b): order[letter] for b, letter in shown.items()}


def expected_value(item: dict[str, Any], table: dict[str, int]) -> float:
    context = [256, *(table[c] for c in f"Question: What is the capital of {item['country']}?\nAnswer:")]
    sums = []
    for choice in item["choices"]:
        tokens = context + [table[c] for c in f" {choice}"]
        sums.append(math.fsum(logprob(tokens, at) for at in range(len(context), len(tokens))))
    return float(sums.index(max(sums)) == item["answer"])


def test_a_missing_file_is_said_at_once(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(find_recipe("quickstart").read_text().replace("quality:\n", "quality:\n  tasks: [./no.yaml]\n"))
    with pytest.raises(UsageError, match=r"quality.tasks: no file .*no\.yaml; a task file is relative to the recipe"):
        check_tasks(load_recipe(recipe))
