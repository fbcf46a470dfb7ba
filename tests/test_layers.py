"""The layering: who may import whom, what installs, how fast the command line starts."""

import ast
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STAGES = ("prep", "serve", "eval")
HEAVY = {
    "torch",
    "transformers",
    "llmcompressor",
    "vllm",
    "datasets",
    "compressed_tensors",
    "accelerate",
    "safetensors",
    "awq",
    "auto_gptq",
    "gptqmodel",
    "bitsandbytes",
    "lm_eval",
}


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).glob("*.py"))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def is_worker(path: Path) -> bool:
    return path.stem.endswith("worker")


def test_every_folder_was_seen() -> None:
    assert all(len(modules(folder)) >= 3 for folder in ("qserve", *STAGES))
    assert sum(is_worker(p) for folder in STAGES for p in modules(folder)) >= 4


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_imports_no_other_stage(stage: str) -> None:
    others = tuple(f"qserve.{other}" for other in STAGES if other != stage)
    upper = ("qserve.cli", "qserve.bench", "qserve.measure", "qserve.choose", "qserve.notebook", "qserve.tasks")
    bad = [f"{p.name}: {name}" for p in modules(stage) for name in imports(p) if name.startswith((*others, *upper))]
    assert bad == []


@pytest.mark.parametrize("folder", ["qserve", *STAGES])
def test_only_workers_import_heavy_libraries_and_they_import_nothing_of_qserve(folder: str) -> None:
    for path in modules(folder):
        roots = {name.split(".")[0] for name in imports(path)}
        assert not (roots & set(STAGES)), f"{path}: a stage is imported as qserve.<stage>"
        if is_worker(path):
            assert "qserve" not in roots, path
        else:
            assert not (roots & HEAVY), path


def test_the_wheel_holds_every_module_lock_and_recipe(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    missing = [
        str(path)
        for folder, package in (("qserve", "qserve"), *((s, f"qserve/{s}") for s in (*STAGES, "recipes")))
        for path in (ROOT / folder).iterdir()
        if path.suffix in (".py", ".lock", ".in", ".yaml", ".css") and f"{package}/{path.name}" not in names
    ]
    assert missing == []
    assert len([n for n in names if n.endswith(".lock")]) == 17
    assert not any(name.startswith(("prep/", "serve/", "eval/", "recipes/", "tests/")) for name in names)


def test_help_starts_at_once() -> None:
    command = [sys.executable, "-c", "import sys; from qserve.cli import app; app(['--help'])"]
    times = []
    for _ in range(5):
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        times.append(time.perf_counter() - began)
    assert all(
        word in done.stdout for word in ("prep", "bench", "serve", "load", "report", "choose", "runtimes", "init")
    )
    loaded = subprocess.run(
        [sys.executable, "-c", "import sys, qserve.cli; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert not {"pydantic", "numpy", "httpx", "pyarrow", "psutil", "huggingface_hub", "yaml"} & set(loaded)
    assert min(times) < 1.0  # under 0.3 s on a quiet machine; the modules above are what would make it slow
