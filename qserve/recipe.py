"""Recipe: one YAML file that says which model, which variants, and how they are judged.

`load_recipe` is the only way in. It returns a frozen `Recipe`, or raises `UsageError` with file, line and field.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, PlainSerializer, ValidationError, field_validator

from qserve import limits
from qserve.errors import UsageError
from qserve.values import Concurrency, Frozen, Seconds, Tokens
from qserve.variants import BASELINE, METHODS, Bf16, QuantizedVariant, Variant
from qserve.wishes import Floor, Traffic, Wishes


# --- sources: where a model or a data set comes from ----------
@dataclass(frozen=True)
class HubSource:
    """A repository on the Hub, `owner/name`."""

    repo: str


@dataclass(frozen=True)
class PathSource:
    """A local file or folder."""

    path: Path


@dataclass(frozen=True)
class PackageSource:
    """A file inside a pinned PyPI package, written `pypi:NAME==VERSION/PATH/INSIDE`."""

    package: str
    version: str
    path: str


Source = HubSource | PathSource | PackageSource


def parse_source(text: object) -> Source:
    """Read the one-string spelling of a source.

    `pypi:pkg==1.0/folder/file.gguf` is a package file; something that starts with `.`, `/` or `~`, or that exists on
    disk, is a path; `owner/name` is a Hub id.
    """
    if isinstance(text, HubSource | PathSource | PackageSource):
        return text
    if not isinstance(text, str) or not text:
        raise ValueError("expected a Hub id (owner/name), a path, or pypi:NAME==VERSION/FILE")
    if text.startswith("pypi:"):
        match = re.fullmatch(r"pypi:([A-Za-z0-9._-]+)==([A-Za-z0-9.+!]+)/(.+)", text)
        if not match:
            raise ValueError(f"{text!r}: a package source is written pypi:NAME==VERSION/FILE/INSIDE")
        return PackageSource(*match.groups())
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{text!r}: there is no such home folder") from error
    if text.startswith((".", "/", "~")) or os.path.exists(path):
        return PathSource(path)
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", text):
        return HubSource(text)
    raise ValueError(f"{text!r} is no file or folder here, and no Hub id (owner/name); write ./{text} for a local path")


def source_text(source: Source) -> str:
    """The spelling that `parse_source` reads back."""
    match source:
        case HubSource(repo):
            return repo
        case PathSource(path):
            return str(path)
        case PackageSource(package, version, path):
            return f"pypi:{package}=={version}/{path}"


SourceField = Annotated[Source, BeforeValidator(parse_source), PlainSerializer(source_text, return_type=str)]


# --- data ----------
class Dataset(Frozen):
    """Text to calibrate on, to judge on, or to send as load.

    Each record belongs to exactly one of the three uses, decided by a digest of its text: so calibration, quality and
    load never share a record, whichever data sets they are read from.
    """

    dataset: SourceField
    config: str | None = None
    split: str = "train"
    column: str | None = None  # None: the first of messages, conversations, text, content that is there
    rows: int = Field(20_000, ge=1, le=limits.RECORDS)  # read at most this many rows
    skip_bad_rows: bool = False


class Calibration(Dataset):
    samples: int = Field(256, ge=1, le=limits.RECORDS)
    tokens: int = Field(512, ge=16, le=limits.TOKENS)  # each sample is cut to this many tokens
    min_tokens: Tokens = 32  # shorter records are dropped, and counted
    seed: int = 0


# --- the rest of a recipe ----------
def _on_off(value: object) -> object:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


EngineName = Literal["vllm", "llama-server", "transformers", "pipeline", "tgi", "sglang"]


# What vLLM may be asked to do to an unquantized model as it loads it; not every platform has each.
StartQuantization = Literal["fp8", "fp8_per_channel", "fp8_per_block", "int8", "bitsandbytes"]


class Serving(Frozen):
    """How every variant is served. All variants share it: only the checkpoint differs."""

    engine: EngineName = "vllm"
    max_model_len: int | None = Field(None, ge=16, le=limits.TOKENS)  # None: the model's own context
    prefix_caching: bool = True
    tensor_parallel: int = Field(1, ge=1, le=limits.PARTS)  # GPUs that share each layer
    pipeline_parallel: int = Field(1, ge=1, le=limits.PARTS)  # groups of those, each with some of the layers
    data_parallel: int = Field(1, ge=1, le=limits.PARTS)  # copies of the whole model
    executor: Literal["auto", "mp", "ray"] = "auto"  # ray: across nodes, on a Ray cluster that is running
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # auto: what is fastest on this machine
    # torch.compile; YAML reads a bare on or off as true or false
    compile: Annotated[Literal["auto", "on", "off"], BeforeValidator(_on_off)] = "auto"
    quantization: StartQuantization | None = None  # vLLM, at start-up, of a checkpoint that is not quantized
    kv_cache_gib: int | None = Field(None, ge=1, le=limits.GIB)  # on a CPU, whole GiB; None: fitted to the machine
    extra_args: tuple[str, ...] = ()  # of `engine`; another engine of the same run does not get them
    python: Path | None = None  # an environment of your own with vLLM in it, instead of the managed one
    llama_server: str | None = None  # a program of your own, by path or by its name on PATH, instead of the managed one
    tgi_image: str | None = None  # a container image of Text Generation Inference, instead of the known one
    start_timeout_s: Seconds = 1800


class Bench(Frozen):
    """The traffic. A pair is one block on bf16 and one on the variant with the same prompts, in alternating order."""

    prompt_tokens: Tokens = 128
    output_tokens: Tokens = 64
    concurrency: Annotated[tuple[Concurrency, ...], Field(min_length=1)] = (1, 4, 16)
    requests_per_slot: int = Field(2, ge=1, le=limits.REQUESTS)  # a block sends concurrency x this many requests
    pairs: int = Field(4, ge=1, le=limits.PAIRS)
    block_s: Seconds = 60  # a block is cut here
    variant_s: Seconds = 900  # a variant stops taking new pairs here
    dataset: Dataset | None = None  # None: the calibration data set (other records of it)

    @field_validator("concurrency")
    @classmethod
    def _each_once(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(value)) != len(value):
            raise ValueError("each concurrency once")
        return value


class Quality(Frozen):
    """Held-out text: `windows` windows of `tokens` tokens, scored by what is served. And tasks, where any are named."""

    dataset: Dataset | None = None  # None: the calibration data set (other records of it)
    windows: int = Field(16, ge=1, le=limits.RECORDS)
    tokens: int = Field(512, ge=16, le=limits.TOKENS)
    top_k: int = Field(64, ge=1, le=1024)
    # of lm-evaluation-harness: a name (arc_easy), or a task file of your own in its format (./mine.yaml)
    tasks: tuple[str, ...] = ()
    # at most this many of each task, drawn at random; None: all
    task_items: int | None = Field(None, ge=1, le=limits.RECORDS)
    # here a variant takes no new items: what is done by then is its score
    task_s: float = Field(900, gt=0, le=limits.SECONDS)

    @field_validator("tasks")
    @classmethod
    def _tasks_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) != len(value):
            raise ValueError("each task once")
        if not all(task.strip() for task in value):
            raise ValueError("a task has no name")
        return value


NO_TASKS = {"quality": {"tasks", "task_items", "task_s"}}


class Recipe(Frozen):
    model: SourceField
    revision: str | None = None
    calibration: Calibration
    variants: Annotated[dict[str, QuantizedVariant], Field(min_length=1)]
    serving: Serving = Serving()
    bench: Bench = Bench()
    quality: Quality = Quality()
    choose: Wishes = Wishes()  # of no influence on what is made or measured
    threads: int | None = Field(None, ge=1, le=limits.PARTS)  # None: one a physical core

    @field_validator("variants")
    @classmethod
    def _names(cls, variants: dict[str, QuantizedVariant]) -> dict[str, QuantizedVariant]:
        for name in variants:
            if name == BASELINE:
                raise ValueError(f"{BASELINE!r} is the baseline, which is always there; remove it")
            if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
                raise ValueError(f"{name!r}: use lower-case letters, digits, dot, dash and underscore")
        return variants

    def variant(self, name: str) -> Variant:
        """The variant called `name`. Raises UsageError, with the names there are, if there is none."""
        if name == BASELINE:
            return Bf16()
        if name not in self.variants:
            variant, at, engine = name.partition("@")
            if at and variant in (BASELINE, *self.variants):
                raise UsageError(
                    f"{name!r} is a row of a report, the checkpoint {variant} served by {engine}; a checkpoint goes by "
                    f"its variant's name alone: {variant} (serve and bench take --engine {engine})"
                )
            raise UsageError(f"no variant {name!r} in this recipe; it has {', '.join([BASELINE, *self.variants])}")
        return self.variants[name]

    def quality_data(self) -> Dataset:
        return self.quality.dataset or self.calibration

    def load_data(self) -> Dataset:
        return self.bench.dataset or self.calibration

    def measured(self) -> dict[str, Any]:
        """What decides the figures of a run: not what is to be chosen, and nothing of tasks where there are none."""
        return self.model_dump(mode="json", exclude={"choose": True, **({} if self.quality.tasks else NO_TASKS)})


# --- reading ----------
def shipped_recipes() -> dict[str, Path]:
    """Name -> file of the recipes that come with qserve."""
    folder = Path(str(resources.files("qserve.recipes")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_recipe(argument: str | None) -> Path:
    """The recipe to use: the argument (a file, or the name of a shipped one), else ./qserve.yaml, else quickstart."""
    shipped = shipped_recipes()
    if argument is None:
        local = Path("qserve.yaml")
        return local if local.exists() else shipped["quickstart"]
    path = Path(argument)
    if os.path.isfile(path):  # which, unlike Path.is_file, takes a name that is too long for no file
        return path
    name = argument.removeprefix("recipes/").removesuffix(".yaml")  # not Path.stem: a name may hold dots
    if name in shipped:
        return shipped[name]
    names = ", ".join(shipped)
    raise UsageError(f"no recipe {argument!r}: give a YAML file (`qserve init` writes one) or one of {names}")


def spelled(path: Path) -> str:
    """How a command names this recipe again: a shipped one by its name, another by its path from here."""
    if path in shipped_recipes().values():
        return path.name
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def load_recipe(path: Path) -> Recipe:
    """Parse a recipe file. Relative paths in it are relative to the file.

    Raises:
        UsageError: unreadable file, bad YAML, unknown or wrong field; names file, line and field.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot read the recipe ({error.strerror}); `qserve init` writes one") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no text in UTF-8, so it is no recipe; `qserve init` writes one") from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        lines = dict(_lines(node)) if node is not None else {}
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UsageError(f"{where}: not valid YAML: {problem}") from error
    except ValueError as error:  # a date that is none, an integer of thousands of digits
        raise UsageError(f"{path}: not valid YAML: {error}; quote what is meant as text") from error
    except RecursionError as error:
        raise UsageError(f"{path}: nested too deeply, or in itself; a recipe is a few levels deep") from error
    if not isinstance(data, dict):
        raise UsageError(f"{path}: a recipe is a mapping (model, calibration, variants); `qserve init` writes one")
    try:
        return Recipe.model_validate(_anchor_paths(data, path.parent))
    except ValidationError as error:
        raise UsageError("\n".join(_explain(path, lines, dict(item)) for item in error.errors())) from error


def _lines(node: yaml.Node, at: tuple[object, ...] = ()) -> Iterator[tuple[tuple[object, ...], int]]:
    """(field path, 1-based line) of every node; a duplicate key is an error, as YAML itself says."""
    yield at, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a field's name is one word", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value!r} is there twice", problem_mark=key.start_mark)
            seen.add(key.value)
            yield (*at, key.value), key.start_mark.line + 1
            for where, line in _lines(value, (*at, key.value)):
                if where != (*at, key.value):
                    yield where, line
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            yield from _lines(value, (*at, i))


PLAIN = {  # pydantic says tuple and dictionary
    "tuple_type": "give a list, in [ ]", "dict_type": "give name: value pairs, in { }",
    "model_type": "give name: value pairs, in { }",
}  # fmt: skip


def _explain(path: Path, lines: Mapping[tuple[object, ...], int], item: dict[str, Any]) -> str:
    """One sentence for one pydantic error, with the line of the nearest field that is in the file."""
    loc, tag = tuple(item["loc"]), None
    if len(loc) >= 3 and loc[0] == "variants":  # drop the union's tag: variants, name, tag, field
        loc, tag = (*loc[:2], *loc[3:]), str(loc[2])
    line = next((lines[loc[:n]] for n in range(len(loc), -1, -1) if loc[:n] in lines), 1)
    name = ".".join(str(part) for part in loc)
    message = item["msg"].removeprefix("Value error, ")
    message = PLAIN.get(item["type"], message)
    if item["type"] == "extra_forbidden":
        siblings = sorted({str(p) for p in _known_fields(loc, tag)})
        message = f"unknown field; did you mean one of {', '.join(siblings)}?" if siblings else "unknown field"
    return f"{path}:{line}: {name}: {message}" if name else f"{path}:{line}: {message}"


def _known_fields(loc: tuple[object, ...], method: str | None) -> Iterator[str]:
    """Field names that the mapping around `loc` accepts. `method`: of the variant that it is in."""
    models: dict[str, type[Frozen]] = {
        "calibration": Calibration, "serving": Serving, "bench": Bench, "quality": Quality, "dataset": Dataset,
        "choose": Wishes, "floor": Floor, "traffic": Traffic,
    }  # fmt: skip
    if method is not None:
        yield from METHODS[method].model_fields
        return
    parents = [str(part) for part in loc[:-1]]
    yield from next((models[p] for p in reversed(parents) if p in models), Recipe).model_fields


def is_task_file(task: object) -> bool:
    """A task of one's own is named by its file, one of lm-evaluation-harness by its name."""
    return isinstance(task, str) and task.endswith((".yaml", ".yml"))


def _is_beside(folder: Path, value: str) -> bool:
    return value.startswith(("./", "../")) or os.path.exists(folder / value)


def _anchor_paths(data: dict[Any, Any], folder: Path) -> dict[Any, Any]:
    """Make relative spellings of sources, and names of what lies beside the recipe, paths from its folder."""
    out: dict[Any, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            out[key] = _anchor_paths(value, folder)
        elif key in ("model", "dataset", "python") and isinstance(value, str) and _is_beside(folder, value):
            out[key] = os.path.abspath(folder / value)  # a link stays a link: a virtual environment is one
        elif key == "llama_server" and isinstance(value, str) and "/" in value and _is_beside(folder, value):
            out[key] = os.path.abspath(folder / value)  # a bare name is one on PATH, whatever lies beside the recipe
        elif key == "tasks" and isinstance(value, list):
            out[key] = [os.path.abspath(folder / t) if is_task_file(t) else t for t in value]
        else:
            out[key] = value
    return out
