"""Do what a model card says, word for word: its Python lines, its vLLM command."""

import json
import os
import re
import shlex
import signal
import subprocess
import time
import urllib.request
from contextlib import suppress
from pathlib import Path


def blocks(card: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)\n```", card, re.S | re.M)


def run_python(card: str, python: Path, env: dict[str, str]) -> str:
    """What the card's Python lines print."""
    (code,) = blocks(card, "python")
    done = subprocess.run([python, "-c", code], env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def complete(card: str, python: Path, port: int, env: dict[str, str], log: Path) -> str:
    """One completion of the server that the card's command for CPUs starts. `python`: of an environment with vLLM."""
    lines = [line for block in blocks(card, "sh") for line in block.splitlines()]
    (words,) = [shlex.split(line) for line in lines if line.startswith("python -m vllm")]
    with log.open("w") as file:
        command = [str(python), *words[1:], "--port", str(port)]
        process = subprocess.Popen(command, env=env, stdout=file, stderr=file, start_new_session=True)
        try:
            return _ask(words[words.index("--model") + 1], port, process, log)
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _ask(model: str, port: int, process: subprocess.Popen[bytes], log: Path) -> str:
    body = json.dumps({"model": model, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0})
    address = f"http://127.0.0.1:{port}/v1/completions"
    request = urllib.request.Request(address, body.encode(), {"Content-Type": "application/json"})
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return str(json.load(reply)["choices"][0]["text"])
        except OSError:
            time.sleep(1)
    raise AssertionError(log.read_text()[-4000:])
