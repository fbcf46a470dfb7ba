"""Worker: a safetensors folder becomes a GGUF file, by llama.cpp's own converter and quantizer.

job: source (folder), out (file), type ("Q4_K_M"), name (that the file gets), converter, quantize (paths of both
programs), threads, work (folder for the file in between). The converter is run by this very Python, which has torch and
transformers; what else it needs, its own gguf package first, lies beside it. Imports nothing of qserve.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Emit = Callable[..., None]
UNROUNDED = ("BF16", "F16")  # what the converter writes by itself


def main(job: dict[str, Any], emit: Emit) -> dict[str, Any]:
    kind, out, threads = job["type"], Path(job["out"]), str(job["threads"])
    whole = out if kind in UNROUNDED else Path(job["work"]) / "whole.gguf"
    emit("step", text="converting to GGUF")
    outtype = kind.lower() if kind in UNROUNDED else "bf16"
    arguments = [job["source"], "--outfile", str(whole), "--outtype", outtype, "--model-name", job["name"]]
    run([sys.executable, job["converter"], *arguments])
    if whole != out:
        emit("step", text=f"rounding to {kind}")
        run([job["quantize"], str(whole), str(out), kind, threads])
        whole.unlink()
    return {}


def run(command: list[str]) -> None:
    """Raises RuntimeError with the last line that it wrote. All of it goes to the log."""
    site = Path(command[1]).with_name("site")  # beside the converter
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(site)}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, check=False)
    print(done.stdout, flush=True)
    if done.returncode != 0:
        last = next((line for line in reversed(done.stdout.splitlines()) if line.strip()), "no output")
        raise RuntimeError(f"{Path(command[0]).name} ended with code {done.returncode}: {last.strip()[:300]}")
