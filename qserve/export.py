"""`qserve export`: the files that a deployment of a measured variant needs, with the settings that were measured."""

import difflib
import os
import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qserve import limits
from qserve.app import WorkspaceOption, app, say
from qserve.errors import PreflightError, UsageError

if TYPE_CHECKING:
    from qserve.artifacts import Report, VariantResult
    from qserve.serve.deployment import Deployment
    from qserve.wishes import Wishes as Demands


class Target(StrEnum):
    compose = "compose"
    systemd = "systemd"
    kubernetes = "kubernetes"
    kserve = "kserve"


@app.command()
def export(
    target: Annotated[Target, typer.Option("--for", help="What it is deployed with.")],
    out: Annotated[Path, typer.Option(help="Folder to write into.")],
    variant: Annotated[
        str | None, typer.Argument(help="A measured variant, or bf16; default: what `qserve choose` chooses.")
    ] = None,
    run: Annotated[Path | None, typer.Option("--run", help="A run folder; default: the newest.")] = None,
    slo: Annotated[
        list[str] | None, typer.Option("--slo", help="NAME=SECONDS, as ttft_p95=0.5; may be given again.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the deployment [default: qserve-VARIANT]")] = None,
    image: Annotated[str | None, typer.Option(help="Container image [default: vLLM's of the measured version]")] = None,
    model_repo: Annotated[
        str | None, typer.Option(help="OWNER/NAME on the Hub with the checkpoint, for Kubernetes and KServe.")
    ] = None,
    port: Annotated[int, typer.Option(min=1024, max=65535, help="Port of the API.")] = 8000,
    max_replicas: Annotated[
        int, typer.Option(min=1, max=limits.PARTS, help="Servers at most, where there is autoscaling.")
    ] = 4,
    kv_cache_gib: Annotated[
        int | None, typer.Option(min=1, max=limits.GIB, help="KV cache on a CPU [default: as measured]")
    ] = None,
    prometheus_url: Annotated[
        str, typer.Option(help="Prometheus that KEDA asks, for KServe.")
    ] = "http://prometheus-server.monitoring.svc:80",
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that differ.")] = False,
    workspace: WorkspaceOption = None,
) -> None:
    """Write what a deployment of a measured variant needs.

    For Docker Compose, systemd, Kubernetes or KServe; with scrape config, alerts and a dashboard of the SLO.
    """
    from qserve.choose import chosen
    from qserve.eval.report import read_report
    from qserve.serve.deployment import Wishes, plan_deployment
    from qserve.workspace import open_workspace

    report = read_report(run or open_workspace(workspace).latest_run())
    if report.quick:
        raise UsageError(f"{report.run} is a smoke run, whose figures stand for nothing; run `qserve bench` in full")
    if target is Target.systemd and image:
        raise UsageError("--image is for containers; a systemd service runs the environment that was measured")
    _check_words(image, prometheus_url)
    demands = _wishes(report, slo)
    wishes = Wishes(name, image, _repo(model_repo, target), port, max_replicas, kv_cache_gib, demands.slo)
    result = _result(report, chosen(report, demands, "export") if variant is None else variant)
    deployment = plan_deployment(report, result, wishes)
    _check_checkpoint(deployment, target)
    if kv_cache_gib is not None:
        _check_memory(deployment, report, target)
    for change in deployment.changes:
        say(f"not as measured: {change}")
    for path in _write(out, _files(deployment, target, prometheus_url), force):
        typer.echo(path)


def _check_words(image: str | None, prometheus_url: str) -> None:
    if image is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.:/@-]*", image):
        raise UsageError(f"--image is {image!r}; give one as REGISTRY/NAME:TAG")
    if not re.fullmatch(r"https?://[^\s\"'<>/][^\s\"'<>]*", prometheus_url):
        raise UsageError(f"--prometheus-url is {prometheus_url!r}; give one as http://HOST:PORT")


def _files(deployment: "Deployment", target: Target, prometheus_url: str) -> dict[str, str]:
    from qserve.serve import export_compose, export_kserve, export_kubernetes, export_systemd

    match target:
        case Target.compose:
            return export_compose.compose(deployment)
        case Target.systemd:
            return export_systemd.systemd(deployment, _owner(deployment.folder))
        case Target.kubernetes:
            return export_kubernetes.kubernetes(deployment)
        case Target.kserve:
            return export_kserve.kserve(deployment, prometheus_url)


def _owner(folder: Path) -> str:
    """Who may read the checkpoint: a name, or a number where it has none."""
    try:
        return folder.owner()
    except KeyError:
        return str(folder.stat().st_uid)


def _result(report: "Report", variant: str) -> "VariantResult":
    results = {r.name: r for r in (report.baseline, *report.variants)}
    if variant not in results:
        close = difflib.get_close_matches(variant, results, 1)
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(results)}"
        raise UsageError(f"no variant {variant!r} in run {report.run}; {hint}")
    return results[variant]


def _wishes(report: "Report", slo: list[str] | None) -> "Demands":
    """The `choose:` section of the recipe that was run, with the SLO of the command line on top."""
    from qserve.choose import merge, named_numbers, section

    return merge(section(report, None), {"slo": named_numbers("--slo", slo)})


def _repo(text: str | None, target: Target) -> str | None:
    from qserve.recipe import HubSource, parse_source

    if text is None:
        return None
    if target not in (Target.kubernetes, Target.kserve):
        raise UsageError(f"--model-repo is for kubernetes and kserve; {target} mounts the checkpoint of this machine")
    try:
        source = parse_source(text)
    except ValueError as error:
        raise UsageError(f"--model-repo {error}") from error
    if not isinstance(source, HubSource):
        raise UsageError(f"--model-repo {text}: a Hub id is written OWNER/NAME")
    return source.repo


def _check_checkpoint(deployment: "Deployment", target: Target) -> None:
    """What is mounted or copied has to be here, and be the checkpoint of that variant."""
    from qserve.artifacts import MANIFEST_NAME, Manifest

    manifest = deployment.folder / MANIFEST_NAME
    if deployment.model_repo is None and not manifest.is_file():
        raise UsageError(f"the measured checkpoint {deployment.folder} is not here; run `qserve prep` with its recipe")
    if manifest.is_file() and (found := Manifest.read(manifest).variant) != deployment.model.partition("@")[0]:
        raise UsageError(f"{deployment.folder} holds the checkpoint of {found}, not of {deployment.model}")
    if target is Target.systemd and not os.access(deployment.python, os.X_OK):
        raise UsageError(f"the measured environment {deployment.python} is not here; run `qserve runtimes build vllm`")


def _check_memory(deployment: "Deployment", report: "Report", target: Target) -> None:
    """Compose and systemd run on the measured machine; a cluster may have larger ones, and is told what it needs."""
    from qserve.serve.deployment import beyond

    if problem := beyond(deployment, report.machine):
        if target in (Target.compose, Target.systemd):
            raise PreflightError(f"{target} deploys on the measured machine: {problem}")
        say(f"a node needs that much memory free: {problem}")


def _write(folder: Path, files: dict[str, str], force: bool) -> list[Path]:
    """Write all files, each complete or absent; one that is there and says something else stays, unless forced."""
    paths = {folder / name: text for name, text in files.items()}
    try:
        other = [str(p) for p, text in paths.items() if p.exists() and p.read_bytes() != text.encode()]
        if other and not force:
            raise UsageError(f"{', '.join(other)} would change; give another --out, or --force to overwrite")
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in paths.items():
            path.with_name(path.name + ".partial").write_text(text, encoding="utf-8")
        for path in paths:
            path.with_name(path.name + ".partial").replace(path)
    except OSError as error:
        raise UsageError(f"cannot write into {folder}: {error.strerror or error}; choose another --out") from error
    return list(paths)
