"""A/B of two ways to start vLLM on one checkpoint: alternating blocks on two live servers, as the bench does it.

    python tests/benchmarks/serving_settings.py CHECKPOINT --b-env VLLM_CPU_OMP_THREADS_BIND=0,1 --arg=--enforce-eager

A is plain vLLM, B is vLLM with `--b-env` and `--b-arg`, or (`--ours`) with what qserve would set. `--arg` and `--env`
go to both. Prints B / A for throughput, TTFT and ITL at each concurrency. Nothing else may run meanwhile.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from qserve.artifacts import Point
from qserve.eval import throughput
from qserve.machine import look
from qserve.recipe import Bench, Serving
from qserve.runtimes import ensure_runtime
from qserve.serve import server, vllm
from qserve.serve.engine import Room
from qserve.serve.kv_cache import read_config


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    for name in ("--arg", "--env", "--b-arg", "--b-env"):
        parser.add_argument(name, action="append", default=[])
    parser.add_argument("--ours", action="store_true", help="B is what `qserve serve` would start")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--compile", default="on", choices=("on", "off"), help="of B with --ours")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=32)
    return parser.parse_args()


def launches(args: argparse.Namespace) -> tuple[server.Launch, server.Launch]:
    """(A, B)"""
    machine = look()
    python = ensure_runtime("vllm", machine.flavour, print).python
    both_env = dict(pair.split("=", 1) for pair in args.env)

    def launch(name: str, more_args: list[str], more_env: dict[str, str]) -> server.Launch:
        port = server.free_port("127.0.0.1", 0)
        argv = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(args.checkpoint)]
        argv += ["--served-model-name", name, "--port", str(port), "--max-model-len", str(args.max_model_len)]
        return server.Launch(name, (*argv, *args.arg, *more_args), {**both_env, **more_env}, "127.0.0.1", port, name)

    plain = launch("plain", [], {})
    if not args.ours:
        return plain, launch("changed", args.b_arg, dict(pair.split("=", 1) for pair in args.b_env))
    serving = Serving(max_model_len=args.max_model_len, compile=args.compile)
    room = Room(2, psutil.virtual_memory().available, sum(p.stat().st_size for p in args.checkpoint.iterdir()))
    settings = vllm.choose_settings(serving, read_config(args.checkpoint), machine, room)
    at = ("127.0.0.1", server.free_port("127.0.0.1", 0))
    return plain, vllm.launch_vllm(python, args.checkpoint, "ours", settings, at)


def main() -> None:
    args = arguments()
    bench = Bench(
        prompt_tokens=args.prompt_tokens, output_tokens=args.output_tokens, concurrency=tuple(args.concurrency),
        pairs=args.pairs, block_s=300,
    )  # fmt: skip
    a, b = launches(args)
    prompts = throughput.Prompts(np.random.default_rng(time.time_ns()).integers(1000, 40_000, 500_000), None)
    with (
        tempfile.TemporaryDirectory() as logs,
        server.running(a, Path(logs) / "a", print) as plain,
        server.running(b, Path(logs) / "b", print) as other,
    ):
        print(f"start-up: A {plain.startup_s:.0f} s, B {other.startup_s:.0f} s")
        print(f"B: {' '.join(b.argv[3:])} {dict(b.env)}")
        for concurrency in bench.concurrency:
            plan = throughput.Plan(bench, prompts, float("inf"))
            print(line(throughput.point(list(throughput.measure_level(concurrency, (other, plain), plan)), args.pairs)))


def line(point: Point) -> str:
    """One concurrency: both speeds, and B / A with its interval."""
    parts = [f"{name} {item.value:.2f} [{item.low}, {item.high}]" for name, item in (
        ("throughput", point.throughput), ("TTFT", point.ttft), ("ITL", point.itl),
    ) if item]  # fmt: skip
    speeds = f"A {point.baseline.output_tokens_per_s} tok/s, B {point.variant.output_tokens_per_s} tok/s"
    return f"concurrency {point.concurrency}: {speeds}; B/A: {', '.join(parts)}"


if __name__ == "__main__":
    main()
