"""A deployment of one measured variant: what vLLM was started with, and what the measurement says about running it.

Pure values: the export_* files turn a Deployment into the files of one target. Where a setting has to differ from
what was measured, `changes` says so and why, and every file carries it.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qserve.artifacts import LoadSummary, Machine, Point, Report, ServerFacts, VariantResult
from qserve.errors import PreflightError, UsageError

GIB = 2**30
MODULE = "vllm.entrypoints.openai.api_server"
KV_CACHE = "VLLM_CPU_KVCACHE_SPACE"  # GiB
OWN_GPU_SHARE = "0.9"  # of a GPU that is not shared with a second server, as in `qserve serve`


@dataclass(frozen=True)
class Limit:
    """A latency at p95 that the dashboard draws and the alerts watch."""

    seconds: float
    origin: str  # "the SLO", or how it follows from the measurement


@dataclass(frozen=True)
class Wishes:
    """What the user says about a deployment; the rest is measured."""

    name: str | None = None  # None: made of the variant's name
    image: str | None = None  # None: vLLM's own image of the measured version
    model_repo: str | None = None  # OWNER/NAME on the Hub that holds the checkpoint
    port: int = 8000
    max_replicas: int = 4
    kv_cache_gib: int | None = None  # CPU; None: as measured
    slo: Mapping[str, float] = field(default_factory=dict)  # ttft_p95, itl_p95, ... -> seconds, at most


@dataclass(frozen=True)
class Deployment:
    """Everything that a target needs."""

    name: str  # RFC 1123 label
    model: str  # model id in the API
    folder: Path  # the checkpoint on the measured machine
    model_repo: str | None
    python: Path  # of the environment that was measured
    args: tuple[str, ...]  # vLLM's, without model, host and port
    env: Mapping[str, str]
    image: str
    port: int
    cuda: bool
    gpus: int
    cores: int
    memory_bytes: int | None  # what a server of its own may use at most
    disk_bytes: int
    startup_s: float  # spawn to ready, measured
    drain_s: int  # running requests may take this long to end after SIGTERM
    concurrency: int  # highest load that was measured, and meets the SLO where there is one
    ttft: Limit | None
    itl: Limit | None
    max_replicas: int
    measured: tuple[str, ...]  # sentences: which run, machine and figures this comes from
    changes: tuple[str, ...]  # sentences: what differs from what was measured, and why

    @property
    def start_timeout_s(self) -> int:
        """Three times the measured start, and at least two minutes: another machine may be slower, its disk cold."""
        return max(120, math.ceil(3 * self.startup_s))

    def command_args(self, model_path: str, host: str) -> tuple[str, ...]:
        """vLLM's arguments, complete."""
        own = ("--model", model_path, "--served-model-name", self.model, "--host", host, "--port", str(self.port))
        return (*own, *self.args)


def plan_deployment(report: Report, result: VariantResult, wishes: Wishes) -> Deployment:
    """The deployment of one variant of a run.

    Raises:
        PreflightError: it was not measured, or meets the SLO at no measured load.
        UsageError: a name that cannot be made one of Kubernetes, an image that has to be named, or a KV cache where
            there is none to set.
    """
    facts = result.server
    if result.status != "measured" or facts is None:
        why = result.problem or f"its status is {result.status!r}"
        raise PreflightError(f"{result.name} was not measured in run {report.run}: {why}; export another variant")
    if facts.engine != "vllm":
        other = _row_of_vllm(report, result.name.partition("@")[0])
        raise PreflightError(
            f"{result.name} was served by {facts.engine}, and only vLLM is exported; "
            + (f"vLLM's row of it is {other}" if other else "measure it with `qserve bench --engine vllm`")
        )
    point = _highest_load(result, wishes.slo)
    cuda, drain_s = report.machine.flavour == "cuda", _drain_s(point.variant)
    args, changes = _settings(_arguments(facts.command), point.concurrency, drain_s)
    if cuda and wishes.kv_cache_gib is not None:
        raise UsageError("--kv-cache-gib is for CPUs; on a GPU the KV cache takes what --gpu-memory-utilization leaves")
    env, kv_bytes, env_changes = _kv_cache(facts.env, wishes.kv_cache_gib)
    memory = None if result.memory is None or cuda else result.memory.peak_bytes
    return Deployment(
        name=label(wishes.name or f"qserve-{result.name}"), model=result.name,
        folder=Path(_value(facts.command, "--model") or ""), model_repo=wishes.model_repo,
        python=Path(facts.command[0]), args=args, env=env, image=wishes.image or _image(facts, cuda), port=wishes.port,
        cuda=cuda, gpus=int(_value(args, "--tensor-parallel-size") or 1), cores=report.machine.cores,
        memory_bytes=None if memory is None else _ceil_gib(memory * 1.1 + kv_bytes),
        disk_bytes=result.memory.disk_bytes if result.memory else 0, startup_s=facts.startup_s, drain_s=drain_s,
        concurrency=point.concurrency,
        ttft=_limit(wishes.slo.get("ttft_p95"), point.variant.ttft_s.p95),
        itl=_limit(wishes.slo.get("itl_p95"), point.variant.itl_s.p95),
        max_replicas=wishes.max_replicas, measured=_measured(report, result, point), changes=(*changes, *env_changes),
    )  # fmt: skip


def beyond(deployment: Deployment, machine: Machine) -> str | None:
    """Why the measured machine cannot hold this deployment, and which KV cache it can; None where it can."""
    kv_gib = int(deployment.env.get(KV_CACHE, 0))
    need = deployment.memory_bytes or kv_gib * GIB
    if need <= machine.memory_bytes:
        return None
    fits = kv_gib - math.ceil((need - machine.memory_bytes) / GIB)
    remedy = f": there --kv-cache-gib may be {fits} at most" if fits > 0 else ""
    return (
        f"with a KV cache of {kv_gib} GiB a server may use {need / GIB:.1f} GiB of memory, and the measured machine "
        f"has {machine.memory_bytes / GIB:.1f} GiB{remedy}"
    )


def label(name: str) -> str:
    """A name as Kubernetes takes it (RFC 1123 label): lower case, digits and dashes, 63 characters, a letter first.

    Raises:
        UsageError: nothing of the name is left.
    """
    made = re.sub(r"[^a-z0-9]+", "-", name.lower())[:53].strip("-")  # room for the endings that targets add
    if not re.fullmatch(r"[a-z][a-z0-9-]*", made):
        raise UsageError(f"{name!r} cannot be made a name that starts with a letter (a-z, 0-9, dash); give --name")
    return made


# --- from the report ----------
def _row_of_vllm(report: Report, variant: str) -> str | None:
    """The row of the same checkpoint under vLLM, measured."""
    rows = (report.baseline, *report.variants)
    of = (r for r in rows if r.name.partition("@")[0] == variant and r.status == "measured")
    return next((r.name for r in of if r.server and r.server.engine == "vllm"), None)


def _highest_load(result: VariantResult, slo: Mapping[str, float]) -> Point:
    """The highest concurrency with a valid measurement that meets the SLO."""
    valid = [p for p in result.points if p.variant.valid]
    if not valid:
        raise PreflightError(f"{result.name} has no valid load measurement; run `qserve bench` again")
    good = [p for p in valid if _meets(p.variant, slo)]
    if not good:
        seen = "; ".join(f"at {p.concurrency}: {_latencies(p.variant)}" for p in valid)
        raise PreflightError(
            f"{result.name} met the SLO at no measured concurrency ({seen}); ease it, or measure lower concurrencies"
        )
    return max(good, key=lambda p: p.concurrency)


def _meets(load: LoadSummary, slo: Mapping[str, float]) -> bool:
    """An unknown percentile meets no limit."""
    seen = {name: _percentile(load, name) for name in slo}
    return all(value is not None and value <= slo[name] for name, value in seen.items())


def _percentile(load: LoadSummary, name: str) -> float | None:
    """`ttft_p95` is the p95 of ttft_s."""
    latency, _, percentile = name.partition("_")
    value: float | None = getattr(getattr(load, f"{latency}_s"), percentile)
    return value


def _latencies(load: LoadSummary) -> str:
    def shown(seconds: float | None) -> str:
        return "unknown" if seconds is None else f"{seconds:.3g} s"

    return f"TTFT p95 {shown(load.ttft_s.p95)}, ITL p95 {shown(load.itl_s.p95)}"


def _limit(slo_s: float | None, measured_s: float | None) -> Limit | None:
    if slo_s is not None:
        return Limit(slo_s, "the SLO")
    return None if measured_s is None else Limit(float(f"{2 * measured_s:.2g}"), "twice the measured p95, no SLO given")


def _drain_s(load: LoadSummary) -> int:
    """Twice a slow request's whole time, between one minute and five: answers may be longer than those measured."""
    slow_s = load.e2e_s.p95 or load.e2e_s.mean or 0.0
    return min(300, max(60, math.ceil(2 * slow_s)))


def _arguments(command: Sequence[str]) -> tuple[str, ...]:
    """vLLM's own settings in a measured command: without Python, module, model, name, host and port."""
    rest = list(command[list(command).index(MODULE) + 1 :])
    for flag in ("--model", "--served-model-name", "--host", "--port"):
        if flag in rest:
            at = rest.index(flag)
            del rest[at : at + 2]
    return tuple(rest)


def _value(args: Sequence[str], flag: str) -> str | None:
    return args[args.index(flag) + 1] if flag in args else None


def _settings(args: tuple[str, ...], concurrency: int, drain_s: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(arguments, what was changed and why)."""
    made, changes = list(args), []
    share = _value(made, "--gpu-memory-utilization")
    if share is not None and float(share) < float(OWN_GPU_SHARE):
        made[made.index("--gpu-memory-utilization") + 1] = OWN_GPU_SHARE
        changes.append(
            f"--gpu-memory-utilization {OWN_GPU_SHARE} instead of {share}: it was measured with a second server beside "
            "it, and has the GPU to itself here, so the KV cache is larger"
        )
    if "--max-num-seqs" not in made:
        made += ["--max-num-seqs", str(concurrency)]
        changes.append(
            f"--max-num-seqs {concurrency}: the highest load that was measured and that meets the SLO, if one was "
            "given; more requests than that wait, and waiting requests are what autoscaling and alerts count"
        )
    if "--shutdown-timeout" not in made:
        made += ["--shutdown-timeout", str(drain_s)]
        changes.append(f"--shutdown-timeout {drain_s}: on SIGTERM what runs and waits is finished, not aborted")
    return tuple(made), tuple(changes)


def _kv_cache(env: Mapping[str, str], wanted_gib: int | None) -> tuple[dict[str, str], int, tuple[str, ...]]:
    """(environment, bytes by which memory grows beyond what was measured, what was changed and why)."""
    made, key = dict(env), KV_CACHE
    if key not in made or wanted_gib is None or wanted_gib == int(made[key]):
        return made, 0, ()
    grown = max(0, wanted_gib - int(made[key])) * GIB
    change = f"{key} {wanted_gib} instead of {made[key]}: asked for"
    return {**made, key: str(wanted_gib)}, grown, (change,)


def _image(facts: ServerFacts, cuda: bool) -> str:
    """vLLM's own image of the measured version: https://hub.docker.com/u/vllm, tags v<version>."""
    version = (facts.version or "").removesuffix("+cpu")
    if not re.fullmatch(r"\d+\.\d+\.\d+(\.post\d+)?", version):
        raise UsageError(f"the measured vLLM was {facts.version or 'of unknown version'}, no release: give --image")
    return f"vllm/vllm-openai{'' if cuda else '-cpu'}:v{version}"


def _ceil_gib(size_bytes: float) -> int:
    """Up to the next half GiB."""
    return math.ceil(size_bytes / GIB * 2) * GIB // 2


def _measured(report: Report, result: VariantResult, point: Point) -> tuple[str, ...]:
    facts, memory, machine, load = result.server, result.memory, report.machine, point.variant
    assert facts is not None
    peak = f"{memory.peak_bytes / GIB:.1f} GiB" if memory and memory.peak_bytes else "unknown"
    speed = "unknown" if load.output_tokens_per_s is None else f"{load.output_tokens_per_s:.3g} tokens/s"
    where = f"{', '.join(machine.gpus) or machine.cpu}, {machine.cores} cores, {machine.memory_bytes / GIB:.0f} GiB"
    lines = [
        f"{result.name} ({result.label}) of {report.model}",
        f"Run {report.run} of {report.created} on {where}.",
        f"Measured: {facts.engine} {facts.version or 'of unknown version'}, ready after {facts.startup_s:.0f} s, "
        f"highest memory {peak}.",
        f"At concurrency {point.concurrency}: {speed}, {_latencies(load)}.",
    ]
    if kv_gib := facts.env.get(KV_CACHE):
        lines.append(
            f"The KV cache had {kv_gib} GiB, chosen with a bf16 server beside it; --kv-cache-gib gives it more."
        )
    return (*lines, "A smoke run (--quick): its figures are not worth keeping.") if report.quick else tuple(lines)
