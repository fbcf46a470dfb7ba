"""The serving engines there are: which program each needs, and how it is opened for a model on this machine.

install_engine    its program, found or built, and checked: before any work
open_engine       the engine, its settings chosen
"""

from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from qserve.machine import look
from qserve.recipe import EngineName, Serving
from qserve.runtimes import ensure_runtime
from qserve.serve.engine import Engine, Setting
from qserve.serve.transformers_loop import open_loop
from qserve.serve.vllm import open_vllm
from qserve.uvrun import Say


@dataclass(frozen=True)
class Installed:
    """An engine's program on this machine. `digest` tells one build of it from another."""

    name: EngineName
    program: Path  # a Python with the engine in it, or the engine's own executable
    digest: str


def install_engine(name: EngineName, serving: Serving, say: Say) -> Installed:
    """The program of an engine, built on first use; the user's own where `serving` names one.

    Raises:
        RuntimeBuildError, UsageError: it cannot be had here; says what it needs.
    """
    match name:
        case "vllm":
            runtime = ensure_runtime("vllm", look().flavour, say, serving.python)
            return Installed(name, runtime.python, runtime.digest)
        case "transformers" | "pipeline":
            runtime = ensure_runtime("llmcompressor", look().flavour, say, serving.python)
            return Installed(name, runtime.python, runtime.digest)
    assert_never(name)


def open_engine(installed: Installed, setting: Setting) -> Engine:
    """The engine for this model on this machine.

    Raises:
        PreflightError: there is no room for it; says what to change.
    """
    match installed.name:
        case "vllm":
            return open_vllm(installed.program, installed.digest, setting)
        case "transformers" | "pipeline":
            return open_loop(installed.name, installed.program, installed.digest, setting)
    assert_never(installed.name)
