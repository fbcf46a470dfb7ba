"""The serving engines there are: which program each needs, and how it is opened for a model on this machine.

choose_engines    which ones a run uses, checked against what they can serve
install_engine    its program, found or built, and checked: before any work
open_engine       the engine, its settings chosen
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never, cast, get_args

from qserve.artifacts import Machine
from qserve.errors import PreflightError, UsageError
from qserve.llama_cpp import adopt_llama_server, check_llama_cpp_can_be_built, ensure_llama_cpp
from qserve.machine import look
from qserve.recipe import EngineName, Recipe, Serving
from qserve.runtime_spec import RuntimeName, sglang_spec
from qserve.runtimes import adopt, ensure, ensure_runtime
from qserve.serve import llama_server, sglang, tgi, transformers_loop, vllm
from qserve.serve.engine import Engine, Setting
from qserve.uvrun import Say
from qserve.variants import BASELINE, Bitsandbytes, Gguf, Variant


@dataclass(frozen=True)
class Installed:
    """An engine's program on this machine. `digest` tells one build of it from another."""

    name: EngineName
    program: Path  # a Python with the engine in it, the engine's own executable, or the name of its image
    digest: str


def engine_name(text: str) -> EngineName:
    """Raises UsageError, with the names there are, for another word."""
    for name in get_args(EngineName):
        if text == name:
            return cast(EngineName, name)
    raise UsageError(f"no engine {text!r}; there are {', '.join(get_args(EngineName))}")


def choose_engines(asked: Sequence[str], recipe: Recipe, names: Sequence[str]) -> tuple[EngineName, ...]:
    """The engines of a run over these variants. The first one serves the baseline. With none asked for: the recipe's,
    and llama-server where there are GGUF variants.

    Raises:
        UsageError: a word that is no engine, or the first one cannot serve the baseline.
        PreflightError: none of them reads any of the variants.
    """
    chosen = [engine_name(text) for text in asked] or [recipe.serving.engine]
    if not asked and any(isinstance(recipe.variant(name), Gguf) for name in names):
        chosen.append("llama-server")
    if reason := unservable(chosen[0], recipe.variant(BASELINE)):
        raise UsageError(f"{reason}: name it first, since every variant is held against the {BASELINE} baseline")
    _refuse_unread(chosen, [recipe.variant(name) for name in names])
    return tuple(dict.fromkeys(chosen))


def _refuse_unread(chosen: Sequence[EngineName], variants: Sequence[Variant]) -> None:
    """A run of formats that none of its engines reads. Beside others such a variant is told in the report."""
    reasons = [unservable(name, variant) for variant in variants for name in chosen]
    if reasons and all(isinstance(variant, Bitsandbytes | Gguf) for variant in variants) and all(reasons):
        raise PreflightError(f"nothing could be compared with {BASELINE}: {reasons[0]}")


def engine_for(variant: Variant, asked: str | None, recipe: Recipe) -> EngineName:
    """The engine for one variant: the one asked for, else one that reads its format.

    Raises:
        PreflightError: the one asked for cannot serve it.
    """
    name = engine_name(asked) if asked else _own_engine(variant, recipe.serving.engine)
    if reason := unservable(name, variant):
        raise PreflightError(reason)
    return name


def _own_engine(variant: Variant, usual: EngineName) -> EngineName:
    match variant:
        case Gguf():
            return "llama-server"
        case Bitsandbytes() if usual not in ("transformers", "pipeline"):
            return "transformers"
        case _:
            return usual


def unservable(name: EngineName, variant: Variant) -> str | None:
    """Why an engine cannot serve this format on this machine, known without its program; None where it can."""
    match name:
        case "vllm":
            return vllm.unservable(variant, look())
        case "llama-server":
            return llama_server.unservable(variant)
        case "transformers" | "pipeline":
            return transformers_loop.unservable(variant)
        case "tgi":
            return tgi.unservable(variant)
        case "sglang":
            return sglang.unservable(variant)
    assert_never(name)


def refuse(name: EngineName, serving: Serving, machine: Machine) -> None:
    """See to it, before anything is built, that this machine can run an engine at all.

    Raises:
        PreflightError, RuntimeBuildError: it cannot; says what it needs.
    """
    match name:
        case "tgi":
            tgi.find_image(serving.tgi_image, machine)
        case "sglang":
            sglang.need_gpu(machine)
        case "llama-server":
            if serving.llama_server is None:
                check_llama_cpp_can_be_built(machine.flavour)
        case "vllm" | "transformers" | "pipeline":
            pass  # run on any machine that qserve runs on
        case _:
            assert_never(name)


def install_engine(name: EngineName, serving: Serving, say: Say, variants: Iterable[Variant] = ()) -> Installed:
    """The program of an engine, built on first use; the user's own where `serving` names one. `variants`: what it will
    serve. If bitsandbytes is among it, all is served from the environment that has it, the baseline included.

    Raises:
        RuntimeBuildError, UsageError: it cannot be had here; says what it needs.
    """
    match name:
        case "vllm":
            runtime = ensure_runtime("vllm", look().flavour, say, serving.python)
            if look().flavour == "cpu" and vllm.tcmalloc() is None:
                say(
                    "tcmalloc is not on this system; vLLM was measured 1.2 times as fast with it (libtcmalloc-minimal4)"
                )
            return Installed(name, runtime.python, runtime.digest)
        case "transformers" | "pipeline":
            needed: RuntimeName = "llmcompressor"
            if any(isinstance(variant, Bitsandbytes) for variant in variants):
                needed = "bitsandbytes"
            runtime = ensure_runtime(needed, look().flavour, say, serving.python)
            return Installed(name, runtime.python, runtime.digest)
        case "llama-server" if serving.llama_server is not None:
            return Installed(name, *adopt_llama_server(serving.llama_server))
        case "llama-server":
            made = ensure_llama_cpp(look().flavour, say)
            return Installed(name, made.server, made.digest)
        case "tgi":
            image, image_id = tgi.find_image(serving.tgi_image, look())
            return Installed(name, Path(image), image_id)
        case "sglang":
            sglang.need_gpu(look())
            spec = sglang_spec()
            runtime = adopt(spec, serving.python) if serving.python else ensure(spec, say)
            return Installed(name, runtime.python, runtime.digest)
    assert_never(name)


def open_engine(installed: Installed, setting: Setting) -> Engine:
    """The engine for this model on this machine.

    Raises:
        PreflightError: there is no room for it; says what to change.
    """
    match installed.name:
        case "vllm":
            return vllm.open_vllm(installed.program, installed.digest, setting)
        case "transformers" | "pipeline":
            return transformers_loop.open_loop(installed.name, installed.program, installed.digest, setting)
        case "llama-server":
            return llama_server.open_llama_server(installed.program, installed.digest, setting)
        case "tgi":
            return tgi.open_tgi(str(installed.program), installed.digest, setting)
        case "sglang":
            return sglang.open_sglang(installed.program, installed.digest, setting)
    assert_never(installed.name)
