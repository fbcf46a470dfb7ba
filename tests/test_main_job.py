"""The main job through the front door: real model, real llm-compressor, real vLLM, and a smoke run of the bench.

It builds the managed environments if this machine has none yet, so it takes minutes.
"""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import capitals
import httpx
import pyarrow.parquet as pq
import pytest
import use_card
from hub_stand_in import hub_stand_in

from qserve.artifacts import Manifest, Report
from qserve.eval.tasks import ArmTasks
from qserve.machine import look
from qserve.runtime_spec import spec_of
from qserve.serve.server import free_port

ROOT = Path(__file__).parents[1]


def qserve(
    *words: str, cwd: Path, expect: int = 0, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    code = "import sys; from qserve.cli import app; sys.argv[0] = 'qserve'; app()"
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout}\n{done.stderr[-4000:]}"
    return done


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project folder with a smaller quickstart: int8 from 4 short samples, one window of text."""
    folder = tmp_path_factory.mktemp("project")
    text = (ROOT / "recipes" / "quickstart.yaml").read_text()
    for old, new in (
        ("samples: 32", "samples: 4"),
        ("rows: 4000", "rows: 600"),
        ("windows: 4", "windows: 1"),
        ("quality:\n", "quality:\n  tasks: [./capitals.yaml]\n"),
    ):
        assert old in text
        text = text.replace(old, new)
    lines = [line for line in text.splitlines() if not line.strip().startswith(("awq:", "gptq:", "fp8:"))]
    (folder / "qserve.yaml").write_text("\n".join(lines))
    capitals.write_task(folder)
    return folder


@pytest.fixture(scope="module")
def prepared(project: Path) -> dict[str, Path]:
    rows = [line.split("\t") for line in qserve("prep", cwd=project).stdout.splitlines()]
    return {name: Path(folder) for name, folder in rows}


@pytest.fixture(scope="module")
def report(project: Path, prepared: dict[str, Path]) -> Report:
    assert prepared
    qserve("bench", "--quick", cwd=project)
    (path,) = project.glob("qserve-workspace/runs/*/measurements.json")
    return Report.read(path)


def test_prep_makes_the_baseline_and_the_variant(prepared: dict[str, Path]) -> None:
    assert list(prepared) == ["bf16", "int8"]
    base, int8 = (Manifest.read(folder / "qserve.json") for folder in prepared.values())
    assert base.weights.bits_per_parameter == pytest.approx(16, abs=0.01)
    assert 9 < int8.weights.bits_per_parameter < 11  # 8-bit layers, 16-bit embeddings
    assert int8.layers == 210
    assert base.source_note
    assert "Q4_1" in base.source_note
    carried = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "LICENSE")
    for name in carried:
        assert (prepared["int8"] / name).read_bytes() == (prepared["bf16"] / name).read_bytes()
    assert json.loads((prepared["bf16"] / "generation_config.json").read_text())["eos_token_id"] == 2


def test_again_does_nothing_in_two_seconds(project: Path, prepared: dict[str, Path]) -> None:
    before = {p: p.stat().st_mtime_ns for folder in prepared.values() for p in folder.iterdir()}
    began = time.perf_counter()
    qserve("prep", cwd=project)
    assert time.perf_counter() - began < 4  # under 2 s where the machine is not busy
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_what_is_served_is_what_the_checkpoint_says(report: Report) -> None:
    for result in (report.baseline, *report.variants):
        assert result.status == "measured", result.problem
        assert result.fidelity
        assert result.fidelity.faithful
    fidelity = report.baseline.fidelity
    assert fidelity
    assert fidelity.served_perplexity == pytest.approx(fidelity.reference_perplexity, rel=0.01)


def test_the_report_holds_what_was_measured(report: Report, project: Path) -> None:
    (int8,) = report.variants
    (point,) = int8.points
    assert report.quick
    assert report.options == ("--quick",)
    assert int8.quality
    assert int8.quality.kl
    assert 0 < int8.quality.kl.value < 1
    assert int8.server
    assert int8.server.quantization == "compressed-tensors"
    assert int8.server.kernels
    assert int8.memory
    assert int8.memory.kv_capacity_tokens
    assert point.throughput
    speeds = (point.variant.output_tokens_per_s, point.baseline.output_tokens_per_s)
    assert speeds[0]
    assert speeds[1]
    assert point.throughput.value == pytest.approx(speeds[0] / speeds[1])  # one pair: its ratio is the pooled one
    assert math.isfinite(point.throughput.value)
    assert point.variant.prefix_cache_hit_rate == 0
    assert point.throughput.verdict == "unresolved"
    (parquet,) = project.glob("qserve-workspace/runs/*/requests.parquet")
    rows = pq.read_table(parquet).to_pylist()
    assert len(rows) == point.variant.attempted + point.baseline.attempted
    assert sum(r["output_tokens"] for r in rows if r["arm"] == "variant") == point.variant.output_tokens


def test_tasks_are_scored_and_paired(report: Report, project: Path) -> None:
    (int8,) = report.variants
    base, own = (v.quality.tasks["capitals"] for v in (report.baseline, int8) if v.quality)
    assert base.score and own.score and own.delta, (base.note, own.note)
    assert base.score.value > 0.25 and (base.items, base.of_items, base.few_shot) == (8, 20, 0)  # better than a guess
    assert own.delta.value == pytest.approx(own.score.value - base.score.value)
    assert own.won is not None and own.lost is not None
    assert own.won - own.lost == round(8 * own.delta.value)
    assert (own.context_tokens, own.sha256) == (2048, base.sha256)
    said = qserve("choose", "--floor", "task:mmlu=0.5", cwd=project, expect=2).stderr
    assert "this report has the tasks capitals; name it in the recipe" in said


def directly(url: str, item: dict[str, Any]) -> tuple[float, float]:
    """1 if the server finds the right city the likeliest, by the sums of its `prompt_logprobs`; and by how many nats
    the best one leads."""

    def ask(text: str) -> dict[str, Any]:
        body = {"model": "int8", "prompt": text, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        reply = httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=60).raise_for_status()
        return dict(reply.json())

    context = capitals.prompt(item)
    known = ask(context)["usage"]["prompt_tokens"]
    sums = []
    for choice in item["choices"]:
        places = ask(f"{context} {choice}")["choices"][0]["prompt_logprobs"][known:]
        sums.append(sum(next(iter(place.values()))["logprob"] for place in places))
    best, second = sorted(sums, reverse=True)[:2]
    return float(sums.index(best) == item["answer"]), best - second


def test_the_report_prints_in_each_format(report: Report, project: Path) -> None:
    assert json.loads(qserve("report", "--format", "json", cwd=project).stdout)["run"] == report.run
    assert "| int8" in qserve("report", cwd=project).stdout
    assert qserve("report", "--format", "html", cwd=project).stdout.lower().startswith("<!doctype html>")


def test_serve_prints_a_curl_line_that_works_and_stops_on_ctrl_c(prepared: dict[str, Path], project: Path) -> None:
    assert prepared
    code = "import sys; from qserve.cli import app; sys.argv[0] = 'qserve'; app()"
    command = [sys.executable, "-c", code, "serve", "int8", "--port", "0"]
    process = subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        curl = process.stdout.readline().strip()
        assert curl.startswith("curl http://127.0.0.1:")
        silent = curl.replace("curl", "curl -s", 1)
        reply = subprocess.run(["bash", "-c", silent], capture_output=True, text=True, check=True)
        assert json.loads(reply.stdout)["choices"][0]["message"]["content"]
        url = curl.split()[1].split("/v1/")[0]
        words = ("--requests", "4", "--concurrency", "2", "--output-tokens", "8", "--format", "json")
        load = json.loads(qserve("load", url, *words, cwd=project).stdout)
        assert (load["summary"]["ok"], load["summary"]["output_tokens"]) == (4, 32)
        assert load["model"] == "int8"
        (path,) = project.glob("qserve-workspace/runs/*/tasks-int8.json")
        scored = ArmTasks.read(path).tasks["capitals"].values
        found = {i: directly(url, item) for i, item in enumerate(capitals.items()) if f"capitals/{i}" in scored}
        sure = {f"capitals/{i}": value for i, (value, lead) in found.items() if lead > 0.2}  # beyond rounding
        assert len(scored) == 8 and len(sure) >= 4
        assert sure.items() <= scored.items()
        metrics = subprocess.run(["curl", "-s", f"{url}/metrics"], capture_output=True, text=True, check=True).stdout
        assert "vllm:prefix_cache_queries_total" in metrics
    finally:
        process.send_signal(signal.SIGINT)
        try:
            _, said = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.terminate()
            raise
    assert process.returncode == 0, said
    assert said.rstrip().endswith("stopped")
    assert re.search(r"ready after \d+ s; kernels: \w+.*; KV cache: [\d,]+ tokens", said)


def test_what_is_published_comes_back_and_runs_as_its_card_says(
    prepared: dict[str, Path], report: Report, project: Path, tmp_path: Path
) -> None:
    """To a Hub on loopback, and from there by name: into transformers by the card's lines, into vLLM by its command."""
    assert report.quick  # so it was not measured, and takes --force
    with hub_stand_in() as hub:
        env = {**os.environ, **hub.env(tmp_path), "VLLM_CPU_KVCACHE_SPACE": "1"}
        qserve("publish", "int8", "--to", "me/smollm2-int8", "--force", cwd=project, env=env)
        there = hub.repos["me/smollm2-int8"].files
        assert there["model.safetensors"].data == (prepared["int8"] / "model.safetensors").read_bytes()
        card = there["README.md"].data.decode()
        prep, vllm = (spec_of(name, look().flavour).folder / "bin" / "python" for name in ("llmcompressor", "vllm"))
        assert "France?" in use_card.run_python(card, prep, env)
        port = free_port("127.0.0.1", 0)
        assert use_card.complete(card, vllm, port, env, tmp_path / "vllm.log").strip()


def test_no_server_is_left(report: Report, project: Path) -> None:
    assert report
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(project) not in listing


def test_errors_before_any_work_are_one_sentence(project: Path) -> None:
    bad = project / "typo.yaml"
    bad.write_text((project / "qserve.yaml").read_text().replace("windows:", "window:"))
    line = next(n for n, text in enumerate(bad.read_text().splitlines(), 1) if "window:" in text)
    assert (
        f"typo.yaml:{line}: quality.window: unknown field" in qserve("prep", "typo.yaml", cwd=project, expect=2).stderr
    )
    assert "no variant 'awk'" in qserve("prep", "--only", "awk", cwd=project, expect=2).stderr
    assert "no recipe 'nothing.yaml'" in qserve("bench", "nothing.yaml", cwd=project, expect=2).stderr
