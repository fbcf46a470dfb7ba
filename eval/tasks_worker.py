"""Worker: tasks of lm-evaluation-harness (lm_eval), scored through a live server by lm_eval's own client.

Job `prepare`: {do, tasks: [name or file, ...], items: n or null}, before anything is served. Result: {tasks: [what
each task is]}, with the data at hand; or {refused: a sentence, fault: "task" or "data"}.
Job `score`: {do, tasks: [as prepared], items, url, model, checkpoint, context_tokens, budget_s}. Result: {bos, tasks:
{name: {values: {item: 0..1}, too_long, cut, prompts, problem}}}.

What lm_eval's client would choose by itself is set here: the context of the server (2048 otherwise, and what is longer
cut on the left without a word in the result), the tokenizer of the checkpoint (else it is looked up under the served
name), whether BOS stands first. An item that is too long for the context is not sent, and counted.
"""

import difflib
import hashlib
import json
import random
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.evaluator import evaluate
from lm_eval.models.dummy import DummyLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

SEED = 1234  # lm_eval's own, of the examples that stand before an item
ORDER_SEED = 0  # of the order of the items: the first n of it are a random sample of n
AT_ONCE = 8  # requests
BLOCK_S = 20.0  # a block of items aims at this
MOST_IN_BLOCK = 64
ANSWER_TOKENS = 512  # where a task sets no limit of its own; lm_eval's client would cut at 256
Item = tuple[str, int]  # task (of a group: one of its tasks), place in its documents


class Refused(Exception):
    """A task that cannot be scored; `str` is the sentence. `fault`: whether the task or the data is why."""

    def __init__(self, text: str, fault: str = "task") -> None:
        super().__init__(text)
        self.fault = fault


def main(job: dict[str, Any], emit: Any) -> dict[str, Any]:
    if job["do"] == "score":
        return score(job, emit)
    try:
        return {"tasks": list(prepare(job["tasks"], job["items"], emit))}
    except Refused as why:
        return {"refused": str(why), "fault": why.fault}


# --- before anything is served ----------
def prepare(names: list[str], items: int | None, emit: Any) -> Iterator[dict[str, Any]]:
    manager = manager_for(names)
    for spec in names:
        check_known(manager, spec)
        for leaf, config in leaves(manager, spec):
            check_config(leaf, config)
    seen: dict[str, str] = {}
    for spec in names:
        emit("progress", text=f"{spec}: loading its data")
        name, tasks = load(manager, spec)
        if name in seen:
            raise Refused(f"{seen[name]} and {spec} are both called {name}; rename one (`task:` in its file)")
        seen[name] = spec
        path = next(iter(tasks.values())).get_config("dataset_path")
        on_hub = isinstance(path, str) and path.count("/") == 1 and not is_file(spec)
        source = manager_path(manager, spec)
        yield {**describe(name, tasks, items), "source": source, "dataset": path if on_hub else None}


def manager_for(specs: list[str]) -> Any:
    """lm_eval's index of its own tasks takes a while: it reads 14,000 files. Task files need none of it."""
    return TaskManager(include_defaults=not all(is_file(spec) for spec in specs))


def is_file(spec: str) -> bool:
    return spec.endswith((".yaml", ".yml"))


def manager_path(manager: Any, spec: str) -> str:
    """The file of a single task, so that the next job needs no index; else its name."""
    if is_file(spec):
        return spec
    entry = manager.task_index[spec]
    return str(entry.yaml_path) if entry.kind.name == "TASK" and entry.yaml_path else spec


def check_known(manager: Any, spec: str) -> None:
    if is_file(spec):
        read_file(spec)
    elif spec not in manager.task_index:
        near = difflib.get_close_matches(spec, manager.all_tasks, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "`lm_eval ls tasks` lists them"
        raise Refused(f"lm-evaluation-harness has no task {spec!r}; {hint} A file of your own ends in .yaml")


def read_file(path: str) -> dict[str, Any]:
    """A task file, with what it names beside itself made absolute."""
    try:
        config = dict(load_yaml(path))
    except Exception as error:
        raise Refused(f"{path} is no task file that lm_eval can read: {first_line(error)}") from error
    if not isinstance(config.get("task"), str) or "group" in config or "class" in config:
        raise Refused(
            f"{path} must describe one task: `task: NAME`, dataset_path, doc_to_text, ... as lm_eval has them"
        )
    folder, data, options = Path(path).parent, str(config.get("dataset_path")), config.get("dataset_kwargs")
    if data.startswith(("./", "../")):
        config["dataset_path"] = beside(folder, data)
    if isinstance(options, dict) and "/" not in data:  # a format (json, csv, ...): its files are local ones
        names = {key: beside(folder, options[key]) for key in ("data_files", "data_dir") if key in options}
        config["dataset_kwargs"] = {**options, **names}
    return config


def beside(folder: Path, value: Any) -> Any:
    """Relative names as paths from the folder; a URL as it is."""
    if isinstance(value, dict):
        return {key: beside(folder, one) for key, one in value.items()}
    if isinstance(value, list):
        return [beside(folder, one) for one in value]
    return str(folder / value) if isinstance(value, str) and "://" not in value else value


def leaves(manager: Any, spec: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, config) of each task behind a name, a file, a group or a tag; nothing is loaded."""
    if isinstance(spec, dict):
        if isinstance(spec.get("task"), list):
            for member in spec["task"]:
                yield from leaves(manager, member)
            return
        name = spec.get("task") or spec.get("group")
        inner = dict(leaves(manager, name)) if name in manager.task_index else {str(name): {}}
        for leaf, config in inner.items():
            yield leaf, {**config, **spec}
        return
    if is_file(spec):
        yield spec, read_file(spec)
        return
    entry = manager.task_index.get(spec)
    if entry is None:
        return
    members = sorted(entry.tags) if entry.kind.name == "TAG" else (entry.cfg or {}).get("task")
    if entry.kind.name in ("TAG", "GROUP") and isinstance(members, list):
        for member in members:
            yield from leaves(manager, member)
    else:
        yield spec, entry.cfg or {}


def check_config(name: str, config: dict[str, Any]) -> None:
    """What can be told before its data is loaded."""
    if config.get("unsafe_code"):
        raise Refused(f"{name} runs code that the model writes, on this machine; qserve does not: choose another task")
    if config.get("doc_to_image") or config.get("doc_to_audio"):
        raise Refused(f"{name} is about images or sound, and text is what is served here; choose another task")
    if config.get("output_type") == "loglikelihood_rolling":
        raise Refused(
            f"{name} is a perplexity, which gives no item a value from 0 to 1; quality.dataset takes a text of your own"
        )
    if config.get("repeats", 1) != 1:
        raise Refused(f"{name} asks each item {config['repeats']} times; qserve scores one answer an item")


def load(manager: Any, spec: str) -> tuple[str, dict[str, Any]]:
    """(name, {task: Task}): more than one for a group. Raises Refused if its data cannot be had."""
    config = read_file(spec) if is_file(spec) else None
    try:
        found = manager.load([config or spec])["tasks"]
    except Exception as error:
        raise no_data(config["task"] if config else spec, error) from error
    if not found:
        raise Refused(f"{spec} has no task in it")
    for task in found.values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
    return (config["task"] if config else spec), dict(found)


OFFLINE = ("connect", "offline", "resolve", "timed out", "timeout", "network", "unreachable", "max retries", "proxy",
           "localentrynotfound", "couldn't reach")  # fmt: skip


def no_data(name: str, error: BaseException) -> Refused:
    """Why a task does not load, by the error and those behind it."""
    chain: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in chain:
        chain.append(at)
        at = at.__cause__ or at.__context__
    text = " ".join(f"{type(one).__name__}: {one}" for one in chain)
    if "gated" in text.lower():
        return Refused(
            f"the data of {name} is gated: accept its terms on the Hub and set HF_TOKEN ({first_line(error)})", "data"
        )
    if any(word in text.lower() for word in OFFLINE):
        return Refused(
            f"the data of {name} cannot be fetched ({first_line(error)}); it needs the Hub once, then it is in the "
            "cache; a task file with `dataset_path: json` and data_files of your own needs no Hub", "data",
        )  # fmt: skip
    return Refused(f"{name} does not load: {type(error).__name__}: {first_line(error)}", "data")


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def describe(name: str, tasks: dict[str, Any], items: int | None) -> dict[str, Any]:
    """What the task is; tried on two items, with made-up answers, to see that prompts and values are what they must."""
    for leaf, task in tasks.items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            check_config(leaf, {"unsafe_code": getattr(task, "UNSAFE_CODE", False), "doc_to_image": True})
    chosen, total = choose(tasks, items)
    if not chosen:
        raise Refused(f"{name} has no items", "data")
    metric = metric_of(name, tasks)
    try:
        trial = run(tasks, chosen[:2], DummyLM())
    except Exception as error:
        raise Refused(f"{name} cannot be asked: {type(error).__name__}: {first_line(error)}") from error
    which = next(iter(trial.values()))[0]["filter"]
    values_of(name, trial, metric, which)
    return {
        "name": name, "metric": metric, "filter": which, "items": len(chosen), "of_items": total,
        "few_shot": max(int(task.get_config("num_fewshot") or 0) for task in tasks.values()),
        "sha256": digest(tasks, chosen), "config": config_digest(tasks),
    }  # fmt: skip


def metric_of(name: str, tasks: dict[str, Any]) -> str:
    """The first metric that is a mean over items, the higher the better."""
    first = next(iter(tasks.values()))
    better = first.higher_is_better()
    for metric, how in first.aggregation().items():
        if getattr(how, "__name__", "") == "mean" and better.get(metric):
            return str(metric)
    has = ", ".join(map(str, first.aggregation())) or "none"
    raise Refused(f"{name} has no metric that gives each item a value from 0 to 1 and is averaged (it has {has})")


def choose(tasks: dict[str, Any], items: int | None) -> tuple[list[Item], int]:
    """Items in the order in which they are asked, and how many there are: the same for every server. With more items
    asked for, the first ones stay."""
    every = [(leaf, i) for leaf, task in tasks.items() for i in range(len(task.eval_docs))]
    random.Random(ORDER_SEED).shuffle(every)
    return every[:items], len(every)


def digest(tasks: dict[str, Any], chosen: list[Item]) -> str:
    """sha256 of the documents that are asked, in their order."""
    documents = {leaf: task.eval_docs for leaf, task in tasks.items()}
    found = hashlib.sha256()
    for leaf, i in chosen:
        found.update(json.dumps([leaf, documents[leaf][i]], sort_keys=True, default=str).encode())
    return found.hexdigest()


def config_digest(tasks: dict[str, Any]) -> str:
    """sha256 of how they are asked: prompts, examples, metrics, the source of their functions."""
    text = json.dumps({leaf: task.dump_config() for leaf, task in tasks.items()}, sort_keys=True, default=str)
    return hashlib.sha256(re.sub(r"0x[0-9a-f]+", "", text).encode()).hexdigest()


# --- a live server ----------
class Client(LocalCompletionsAPI):  # type: ignore[misc]
    """lm_eval's client, asked in blocks of whole items until the time is spent."""

    def begin(self, order: list[Item], deadline: float, report: Callable[[int], None]) -> None:
        """order: (task, running number of the item among those of its task)."""
        self.order, self.deadline, self.report = order, deadline, report
        self.done: set[Item] = set()
        self.too_long: set[Item] = set()
        self.skipped: set[Item] = set()
        self.cut = 0
        self.prompts = hashlib.sha256()

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
        return self.in_blocks(requests, partial(super().loglikelihood, disable_tqdm=True), (0.0, False))

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
        return self.in_blocks(requests, partial(super().generate_until, disable_tqdm=True), "")

    def in_blocks(self, requests: list[Any], ask: Callable[[list[Any]], list[Any]], blank: Any) -> list[Any]:
        """The answers; `blank` for an item that is too long, or that the time did not suffice for."""
        places: dict[Item, list[int]] = defaultdict(list)
        for i, request in enumerate(requests):
            places[request.task_name, request.doc_id].append(i)
            self.prompts.update(json.dumps(request.args, default=str).encode())
        answers = [blank] * len(requests)
        todo, size = [item for item in self.order if item in places], AT_ONCE // 2
        asked = False
        while todo and not (asked and time.monotonic() > self.deadline):
            block, todo = todo[:size], todo[size:]
            long = {item for item in block if any(self.length(requests[i]) > self.max_length for i in places[item])}
            sent = [i for item in block if item not in long for i in places[item]]
            began = time.monotonic()
            if sent:
                asked = True
                for i, answer in zip(sent, ask([requests[i] for i in sent]), strict=True):
                    answers[i] = answer
            took = max(time.monotonic() - began, 1e-3)
            size = max(1, min(MOST_IN_BLOCK, int(len(block) * BLOCK_S / took), 4 * size))
            self.too_long |= long
            self.done |= set(block) - long
            self.report(len(self.done))
        self.skipped |= set(todo)
        return answers

    def length(self, request: Any) -> int:
        """Tokens that a request needs, its answer included."""
        if request.request_type == "generate_until":
            context, options = request.args
            answer = options.get("max_gen_toks", options.get("max_tokens", self._max_gen_toks))
            return len(self.tok_encode(context)) + int(answer)
        context, continuation = request.args
        return len(self.tok_encode(context + continuation)) + (not context)

    def parse_generations(self, outputs: Any, **kwargs: Any) -> list[str]:
        """And count the answers that the limit of tokens cut."""
        every = outputs if isinstance(outputs, list) else [outputs]
        self.cut += sum(choice.get("finish_reason") == "length" for one in every for choice in one["choices"])
        return list(LocalCompletionsAPI.parse_generations(outputs, **kwargs))


def score(job: dict[str, Any], emit: Any) -> dict[str, Any]:
    client = connect(job)
    manager = manager_for([task["source"] for task in job["tasks"]])
    end, result = time.monotonic() + job["budget_s"], {}
    for n, task in enumerate(job["tasks"]):
        deadline = time.monotonic() + (end - time.monotonic()) / (len(job["tasks"]) - n)
        try:
            result[task["name"]] = score_one(manager, task, job["items"], client, deadline, emit)
        except Exception as error:
            result[task["name"]] = {"problem": f"{type(error).__name__}: {first_line(error)}"}
    first = f"token {client.tokenizer.bos_token_id} stands first" if client.add_bos_token else "none"
    return {"bos": first, "tasks": result}


def connect(job: dict[str, Any]) -> Client:
    client = Client(
        model=job["model"], base_url=f"{job['url']}/v1/completions", tokenizer=job["checkpoint"],
        tokenizer_backend="huggingface", tokenized_requests=True, num_concurrent=AT_ONCE, seed=SEED,
        max_length=job["context_tokens"], max_gen_toks=min(ANSWER_TOKENS, job["context_tokens"] // 4),
        timeout=1800, max_retries=2, header={"Accept": "application/json"},  # no key of the user's to a local server
    )  # fmt: skip
    ids, bos = client.tokenizer("a").input_ids, client.tokenizer.bos_token_id
    client.add_bos_token = bos is not None and len(ids) > 1 and ids[0] == bos  # where the tokenizer itself does so
    return client


def score_one(
    manager: Any, task: dict[str, Any], items: int | None, client: Client, deadline: float, emit: Any
) -> dict[str, Any]:
    name, tasks = load(manager, task["source"])
    chosen, _ = choose(tasks, items)
    if digest(tasks, chosen) != task["sha256"]:
        raise RuntimeError("its documents are no longer those that the run began with")
    places = {leaf: sorted(i for one, i in chosen if one == leaf) for leaf, _ in chosen}
    order = [(leaf, places[leaf].index(i)) for leaf, i in chosen]
    client.begin(order, deadline, lambda n: emit("progress", text=f"{task['name']}: {n} of {len(chosen)} items"))
    samples = run(tasks, chosen, client)
    asked = {(leaf, places[leaf][n]) for leaf, n in client.done - client.skipped - client.too_long}
    values = values_of(name, samples, task["metric"], task["filter"])
    return {
        "values": {f"{leaf}/{i}": values[leaf, i] for leaf, i in chosen if (leaf, i) in asked},
        "too_long": len(client.too_long), "cut": client.cut, "prompts": client.prompts.hexdigest(), "problem": None,
    }  # fmt: skip


def run(tasks: dict[str, Any], chosen: list[Item], model: Any) -> dict[str, list[dict[str, Any]]]:
    """lm_eval's evaluation of those items: {task: what it logs of each item}."""
    places = {leaf: sorted(i for one, i in chosen if one == leaf) for leaf, _ in chosen}
    random.seed(0)
    np.random.seed(SEED)
    for leaf in places:
        tasks[leaf].set_fewshot_seed(seed=SEED)
    found = evaluate(
        lm=model, task_dict={"tasks": {leaf: tasks[leaf] for leaf in places}}, samples=places, bootstrap_iters=0
    )
    return dict(found["samples"])


def values_of(name: str, samples: dict[str, list[dict[str, Any]]], metric: str, which: str) -> dict[Item, float]:
    """The value of each item. Raises Refused for one that is not from 0 to 1."""
    values = {}
    for leaf, found in samples.items():
        for one in found:
            if one["filter"] != which:
                continue
            value = one.get(metric)
            if not isinstance(value, int | float | np.number | np.bool_) or not 0 <= float(value) <= 1:
                raise Refused(f"{name} gives no item a value from 0 to 1: its {metric} is {str(value)[:60]}")
            values[leaf, int(one["doc_id"])] = float(value)
    return values
