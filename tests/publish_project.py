"""A small project with one variant, ready to be published: real files, a real manifest, a made-up report."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hub_stand_in import Hub
from sample_report import report, variant
from tiny import llama_arrays, llama_config, write_corpus, write_llama, write_safetensors

from qserve.artifacts import MANIFEST_NAME, FileEntry, Licence, Manifest, Report, VariantResult, Weights
from qserve.machine import look as look_at_machine
from qserve.prep.checkpoint import baseline_digest, build_baseline
from qserve.prep.context import Context
from qserve.prep.source import look, open_model
from qserve.recipe import find_recipe, load_recipe
from qserve.variants import settings_of
from qserve.workspace import Workspace, sha256_file

CLI = "import sys; from qserve.cli import app; sys.argv[0] = 'qserve'; app()"
NO_SOCKETS = """
import sys
def refuse(event, args):
    if event in ("socket.connect", "socket.getaddrinfo"):
        raise RuntimeError(f"a socket was opened: {args}")
sys.addaudithook(refuse)
"""
SPEEDS = {1: (1.10, 1.04, 1.16), 8: (0.71, 0.68, 0.75)}


@dataclass(frozen=True)
class Project:
    root: Path
    folder: Path  # of the variant's checkpoint
    manifest: Manifest

    def command(self, *words: str, sockets: bool = True) -> list[str]:
        return [sys.executable, "-c", CLI if sockets else NO_SOCKETS + CLI, "publish", *words]

    def run(self, hub: Hub, *words: str, expect: int = 0, **env: str) -> str:
        """`qserve publish`; returns all that it says. Whatever happens, no token and no traceback is in it."""
        own = {**os.environ, **hub.env(self.root / "hf"), **env}
        done = subprocess.run(
            self.command(*words), cwd=self.root, env=own, capture_output=True, text=True, timeout=100, check=False
        )
        said = done.stdout + done.stderr
        assert done.returncode == expect, said
        assert own["HF_TOKEN"] not in said or not own["HF_TOKEN"]
        assert "Traceback" not in said
        if expect:
            assert sum(line.startswith("qserve: ") for line in said.splitlines()) == 1
        return said

    def interrupt(self, hub: Hub, where: str, *words: str) -> str:
        """The same, with Ctrl-C once a request that matches has begun."""
        env = {**os.environ, **hub.env(self.root / "hf")}
        pipe = subprocess.PIPE
        process = subprocess.Popen(self.command(*words), cwd=self.root, env=env, stdout=pipe, stderr=pipe, text=True)
        deadline = time.monotonic() + 60
        while not any(re.search(where, line) for line in hub.begun):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 130, out + err
        return out + err

    def measure(self, result: VariantResult, **changes: object) -> None:
        """Put a report of the variant beside it."""
        run = self.root / "qserve-workspace" / "runs" / "20261130-121500-0123456789ab"
        run.mkdir(parents=True, exist_ok=True)
        named = result.model_copy(update={"digest": self.manifest.digest, "name": "fp8"})
        made: Report = report([named], (1, 8)).model_copy(update=changes)
        made.write(run / "measurements.json")


def measured_well() -> VariantResult:
    return variant("fp8", "FP8 dynamic", SPEEDS, 0.0121, 163.2)


def write_project(root: Path, licence: str | None = "apache-2.0") -> Project:
    """A recipe, its source, the baseline, and a checkpoint in two shards named fp8."""
    source = write_llama(root / "Tiny-Llama")
    if licence:
        (source / "README.md").write_text(f"---\nlicense: {licence}\n---\n\n# The card of the source\n")
    write_corpus(root / "corpus.jsonl")
    lines = ["model: ./Tiny-Llama", "calibration: {dataset: ./corpus.jsonl}", "variants: {fp8: {method: fp8}}"]
    (root / "qserve.yaml").write_text("\n".join(lines))
    recipe, space = load_recipe(find_recipe(str(root / "qserve.yaml"))), Workspace(root / "qserve-workspace")
    context = Context(recipe, space, look_at_machine(), None, print)
    model = open_model(recipe, look(recipe, print), space)
    build_baseline(context, model, baseline_digest(context, model))
    folder = write_checkpoint(space.checkpoint("fp8", "0123456789ab"), source)
    manifest = make_manifest(folder, model.sha256, str(source), settings_of(recipe.variant("fp8")), licence)
    return Project(root, folder, manifest)


def write_checkpoint(folder: Path, source: Path) -> Path:
    """Weights in two shards that are large enough to go ahead of the commit, and the source's small files."""
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE", "generation_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    (folder / "config.json").write_text(json.dumps(llama_config() | {"quantization_config": {}}))
    arrays = llama_arrays(llama_config())
    for n in (1, 2):
        padding = {"padding": ("I8", np.random.default_rng(n).integers(-128, 127, 1_200_000))}
        write_safetensors(folder / f"model-0000{n}-of-00002.safetensors", arrays | padding)
    return folder


def make_manifest(
    folder: Path, source_sha256: str, source: str, settings: dict[str, object], licence: str | None
) -> Manifest:
    files = tuple(
        FileEntry(name=p.name, size_bytes=p.stat().st_size, sha256=sha256_file(p)) for p in sorted(folder.iterdir())
    )
    weights = Weights(
        total_bytes=163_200_000, quantized_bytes=100_000_000, embedding_bytes=50_000_000, other_bytes=13_200_000,
        parameters=134_515_008, bits_per_parameter=9.7,
    )  # fmt: skip
    manifest = Manifest(
        variant="fp8", digest="0123456789ab", settings=settings, label="FP8 dynamic", model=source, revision=None,
        source_sha256=source_sha256, source_note=None, calibration=None, runtime="llmcompressor-cpu",
        packages={"transformers": "5.17.0", "llmcompressor": "0.14.0.1"}, qserve_version="0.1.0", layers=14,
        layers_fallback=(), weights=weights, wall_s=12.25, peak_memory_bytes=None, threads=2,
        created="2026-11-30T12:00:00Z", licence=Licence(id=licence) if licence else None, files=files,
    )  # fmt: skip
    manifest.write(folder / MANIFEST_NAME)
    return manifest
