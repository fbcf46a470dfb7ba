"""The metadata of a model card: what the Hub shows, filters and links by. Only what is known, only finite figures."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from huggingface_hub import EvalResult, ModelCardData

from qserve.artifacts import Estimate, Licence, Manifest, Quality, TaskScore
from qserve.eval.publishable import Measured, Regime
from qserve.recipe import HubSource, parse_source


@dataclass(frozen=True)
class Subject:
    """What a card is about."""

    repo: str
    manifest: Manifest
    measured: Measured | None
    regime: Regime
    licence: Licence | None
    base_model: str | None  # Hub id
    quant_method: str  # as config.json names it: compressed-tensors; or gguf
    chat: bool  # the checkpoint has a chat template
    overruled: tuple[str, ...] = ()  # objections that --force went past


def metadata(subject: Subject) -> ModelCardData:
    manifest, licence, gguf = subject.manifest, subject.licence, subject.quant_method == "gguf"
    return ModelCardData(
        base_model=subject.base_model, base_model_relation="quantized" if subject.base_model else None,
        license=licence.id if licence else None, license_name=licence.name if licence else None,
        license_link=licence.link if licence else None, library_name="gguf" if gguf else "transformers",
        pipeline_tag="text-generation",
        tags=list(_tags(subject)), datasets=_datasets(manifest), model_name=subject.repo.rpartition("/")[2],
        eval_results=list(_results(subject)) or None,
    )  # fmt: skip


def _tags(subject: Subject) -> Iterator[str]:
    yield from ("qserve", "quantized", subject.quant_method)
    backend = subject.manifest.settings.get("backend")
    if subject.quant_method not in ("gguf", "bitsandbytes"):
        yield from ("vllm", str(backend) if backend else "llm-compressor")
    words = subject.manifest.label.partition(" (")[0].lower().split()  # gptq w8a8 int8
    yield from (word for word in words if word != subject.quant_method)


def _datasets(manifest: Manifest) -> list[str] | None:
    """Of calibration, where it is on the Hub."""
    used = manifest.calibration and parse_source(manifest.calibration.dataset)
    return [used.repo] if isinstance(used, HubSource) else None


def _results(subject: Subject) -> Iterator[EvalResult]:
    quality = subject.measured.result.quality if subject.measured else None
    if quality is None or subject.measured is None or subject.measured.result.status != "measured":
        return
    known = (
        ("perplexity", "Perplexity", quality.perplexity),
        ("kl_divergence", "KL divergence to bf16, nats", quality.kl),
        ("top1_agreement", "Top-1 agreement with bf16", quality.top1),
    )
    for metric, name, estimate in known:
        if estimate is not None and math.isfinite(estimate.value):
            yield _result(metric, name, estimate, quality)
    for name, task in quality.tasks.items():
        if task.score is not None and math.isfinite(task.score.value):
            yield _task_result(name, task, task.score)


def _task_result(name: str, task: TaskScore, score: Estimate) -> EvalResult:
    """With the task's name as the configuration: results of the same data set and configuration become one entry of
    the model index, under the name, counts and hash of the first."""
    args = {"items": task.items, "of_items": task.of_items, "few_shot": task.few_shot, "sha256": task.sha256,
            "context_tokens": task.context_tokens, "first": task.bos}  # fmt: skip
    error = score.se if score.se is not None and math.isfinite(score.se) else None
    return EvalResult(
        task_type="text-generation", dataset_type=task.dataset or "custom", dataset_name=name,
        dataset_config=name, metric_type=task.metric.partition(" ")[0], metric_name=f"{name}, {task.metric}",
        metric_value=score.value, dataset_args=args, metric_args=None if error is None else {"standard_error": error},
    )  # fmt: skip


def _result(metric: str, name: str, estimate: Estimate, quality: Quality) -> EvalResult:
    data = parse_source(quality.data.dataset)
    args = {
        "windows": quality.windows, "context_tokens": quality.context_tokens, "scored_tokens": quality.tokens,
        "first": quality.bos, "sha256": quality.data.sha256,
    }  # fmt: skip
    error = estimate.se if estimate.se is not None and math.isfinite(estimate.se) else None
    return EvalResult(
        task_type="text-generation", dataset_type=data.repo if isinstance(data, HubSource) else "custom",
        dataset_name="held-out text", metric_type=metric, metric_name=name, metric_value=estimate.value,
        dataset_args=args, metric_args=None if error is None else {"standard_error": error},
    )  # fmt: skip
