"""Quantize one variant: run its backend, put the checkpoint's files together, and look at what was written.

The weights are the backend's; config.json is the baseline's plus how it is quantized; all else is the baseline's.
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

from qserve.artifacts import MANIFEST_NAME, Weights
from qserve.errors import WorkerError
from qserve.packed import LOADER
from qserve.prep.context import Context
from qserve.prep.headers import INDEX
from qserve.prep.legacy_config import ON_TRANSFORMERS_4, with_older_spellings, write_view
from qserve.prep.preflight import compute_dtype
from qserve.prep.schemes import ignore_of, scheme_of
from qserve.prep.source import Model, read_config
from qserve.prep.verify import Expectation, verify
from qserve.prep.verify_bitsandbytes import verify_bitsandbytes
from qserve.prep.verify_packed import verify_packed
from qserve.runtime_spec import spec_of
from qserve.variants import (
    Awq,
    Bitsandbytes,
    Fp8,
    Gptq,
    LayerVariant,
    Mxfp4,
    Nvfp4,
    Rtn,
    backend_of,
    group_size_of,
)  # fmt: skip

# What a config may say beside how it is quantized: it holds for one machine, or repeats a field.
LOCAL_FIELDS = ("offload_to_disk_path", "model_name_or_path", "model_file_base_name")
WORSE_THAN_ROUNDING = 2.0  # this many times the error of rounding to nearest is a broken model


@dataclass(frozen=True)
class Task:
    """What is to be made. `folder`: where, not yet under its name; `calibration`: token ids, None where none are
    needed; `sample`: token ids to compare outputs on, a list of lists.
    """

    name: str
    variant: LayerVariant
    baseline: Path
    folder: Path
    calibration: Path | None
    samples: int
    sample: Path


@dataclass(frozen=True)
class Quantized:
    """What was made. `fallback`: the layers that were rounded to nearest instead."""

    targets: tuple[str, ...]
    fallback: tuple[str, ...]
    weights: Weights
    wall_s: float
    peak_memory_bytes: int | None


def quantize(context: Context, model: Model, task: Task) -> Quantized:
    """Fill `task.folder`. Raises WorkerError: the backend failed, or what it wrote is not right."""
    backend = backend_of(task.variant)
    job = _job(context, model, task) | {"out": str(task.folder / "work")}
    python = context.runtime_of(backend).python
    with ThreadPoolExecutor(1) as beside:  # its config is parsed while the worker loads the result
        parsed: list[Future[None]] = []

        def heard(event: Mapping[str, Any]) -> None:
            if event["event"] == "written":
                config = read_config(task.folder / "work")["quantization_config"]
                parsed.append(beside.submit(_parse_as_server, context, task.name, config))

        result = context.run_with(python, task.name, f"{backend}_worker.py", job, heard)
    for reading in parsed:
        reading.result()
    targets = tuple(result["targets"])
    source = read_config(task.baseline)
    config = with_older_spellings(source) if backend in ON_TRANSFORMERS_4 else source
    _assemble(task, config)
    want = Expectation(task.name, scheme_of(task.variant), targets, config, _rescales(task.variant))
    if backend == "llmcompressor":
        weights = verify(task.folder, task.baseline, want)
    else:
        if isinstance(task.variant, Bitsandbytes):
            weights = verify_bitsandbytes(task.folder, task.baseline, want, task.variant)
        else:
            weights = verify_packed(task.folder, task.baseline, want)
        _compare_outputs(context, task, want)
    fallback = tuple(result["fallback"])
    return Quantized(targets, fallback, weights, result["wall_s"], result["peak_memory_bytes"])


def _rescales(variant: LayerVariant) -> bool:
    """Whether the method moves scales between layers, norms included."""
    match variant:
        case Awq():
            return True
        case Gptq():
            return variant.smooth is not None
        case Fp8() | Rtn() | Nvfp4() | Mxfp4() | Bitsandbytes():
            return False
        case _:
            assert_never(variant)


# --- jobs ----------
def _job(context: Context, model: Model, task: Task) -> dict[str, Any]:
    """What the worker is told; its own docstring says what each field is."""
    variant, backend = task.variant, backend_of(task.variant)
    common: dict[str, Any] = {
        "source": str(task.baseline), "dtype": compute_dtype(model.outline, context.machine),
        "threads": context.threads, "samples": task.samples,
        "calibration": str(task.calibration) if task.calibration else None,
    }  # fmt: skip
    match backend:
        case "llmcompressor":
            return common | _schemes(context, model, variant)
        case "autoawq" | "autogptq":  # ON_TRANSFORMERS_4
            return common | _numbers(variant) | {"source": str(write_view(task.baseline, task.folder / "view"))}
        case "gptqmodel" | "bitsandbytes":
            return common | _numbers(variant)
        case _:
            assert_never(backend)


def _schemes(context: Context, model: Model, variant: LayerVariant) -> dict[str, Any]:
    scheme = scheme_of(variant)
    job: dict[str, Any] = {
        "method": variant.method, "ignore": list(ignore_of(variant, model.outline.config)),
        "own_ignore": [pattern for pattern in variant.ignore if pattern != "lm_head"],
        "weights": scheme.weights, "input_activations": scheme.activations, "kv_cache": scheme.kv_cache,
        "max_fallback": 0.0,
    }  # fmt: skip
    match variant:
        case Awq():
            return job | {"grid": variant.grid}
        case Gptq():
            numbers = {"dampening": variant.dampening, "max_fallback": variant.max_fallback}
            return job | numbers | {"smooth": variant.smooth}
        case Fp8() | Rtn() | Nvfp4() | Mxfp4() | Bitsandbytes():
            return job
        case _:
            assert_never(variant)


def _numbers(variant: LayerVariant) -> dict[str, Any]:
    match variant:
        case Awq():
            return {"group_size": variant.group_size, "grid": variant.grid}
        case Gptq():
            return {
                "bits": variant.bits, "group_size": group_size_of(variant), "act_order": variant.act_order,
                "dampening": variant.dampening, "max_fallback": variant.max_fallback,
            }  # fmt: skip
        case Bitsandbytes():
            return {"type": variant.type, "double_quant": variant.double_quant}
        case _:
            raise AssertionError(f"{variant.method} is made by llm-compressor alone")


# --- files ----------
def _assemble(task: Task, config: Mapping[str, object]) -> None:
    """Weights from the worker; `config` plus how it is quantized; all else byte for byte the baseline's."""
    work, baseline = task.folder / "work", task.baseline
    quantization = json.loads((work / "config.json").read_bytes()).get("quantization_config")
    for path in (*work.glob("*.safetensors"), *work.glob(INDEX)):
        path.rename(task.folder / path.name)
    for made in (work, task.folder / "view"):
        shutil.rmtree(made, ignore_errors=True)
    full = {**config, "quantization_config": _without_local_fields(quantization)}
    (task.folder / "config.json").write_text(json.dumps(full, indent=2) + "\n", encoding="utf-8")
    taken = {"config.json", INDEX, MANIFEST_NAME}
    files = [p for p in baseline.rglob("*") if p.is_file() and p.suffix != ".safetensors" and p.name not in taken]
    carry(files, baseline, task.folder)


def _without_local_fields(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_local_fields(inner) for key, inner in value.items() if key not in LOCAL_FIELDS}
    return value


def carry(files: Iterable[Path], root: Path, out: Path) -> None:
    for path in files:
        inside = path.relative_to(root) if path.is_relative_to(root) else Path(path.name)
        (out / inside).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, out / inside)


# --- checks that run a worker ----------
def _parse_as_server(context: Context, name: str, config: object) -> None:
    """Let the serving environment's compressed-tensors read the config, if that environment is there already."""
    python = context.recipe.serving.python or spec_of("vllm", context.machine.flavour).folder / "bin" / "python"
    if not python.exists():
        return
    try:
        context.run_with(python, f"{name} config", "check_config_worker.py", {"quantization_config": config})
    except WorkerError as error:
        raise WorkerError(f"{name}: the serving environment does not understand its config: {error}") from error


def _compare_outputs(context: Context, task: Task, want: Expectation) -> None:
    """The weights of two layers against two of the baseline's, on a calibration sample: a backend that breaks a model
    is caught here, before anybody serves it. Plain rounding of the same layers is the measure, whatever the model and
    the bits.
    """
    scheme = want.scheme
    job = {
        "checkpoint": str(task.folder), "baseline": str(task.baseline), "layers": 2, "loader": str(LOADER),
        "ids": json.loads(task.sample.read_bytes())[0], "threads": context.threads,
        "bits": scheme.bits, "group_size": scheme.group, "symmetric": scheme.symmetric, "targets": list(want.targets),
    }  # fmt: skip
    gap = context.run(f"{task.name} output", "compare_worker.py", job)
    told = f"after two layers it is {gap['error']:.1%} from bf16, and rounding to nearest {gap['rounded']:.1%}"
    context.say(f"{task.name}: {told}")
    if not gap["error"] < WORSE_THAN_ROUNDING * gap["rounded"]:
        raise WorkerError(f"{task.name}: the checkpoint is not right and was not kept: {told}")
