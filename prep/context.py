"""What every step of the prep stage works with: the recipe, the workspace, the machine, and a way to run a worker."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from qserve.artifacts import Machine
from qserve.jobs import Job, Progress, run_job
from qserve.recipe import Recipe
from qserve.runtime_spec import spec_of
from qserve.runtimes import Runtime, ensure_runtime
from qserve.uvrun import Say
from qserve.variants import Backend
from qserve.workspace import Workspace

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Context:
    """`python`: an environment of the user's own with llm-compressor in it, instead of the managed one."""

    recipe: Recipe
    workspace: Workspace
    machine: Machine
    python: Path | None
    say: Say

    @cached_property
    def runtime(self) -> Runtime:
        """The environment that workers run in; built when it is first asked for."""
        return ensure_runtime("llmcompressor", self.machine.flavour, self.say, self.python)

    def runtime_of(self, backend: Backend) -> Runtime:
        """The environment of the one who quantizes; built when it is first asked for."""
        if backend == "llmcompressor":
            return self.runtime
        return ensure_runtime(backend, self.machine.flavour, self.say)

    def digest_of_runtime(self, backend: Backend) -> str:
        """Its digest, without building it."""
        if backend == "llmcompressor" and self.python is not None:
            return self.runtime.digest
        return spec_of(backend, self.machine.flavour).digest

    @property
    def threads(self) -> int:
        return self.recipe.threads or self.machine.cores

    def run(self, what: str, worker: str, spec: dict[str, Any]) -> dict[str, Any]:
        """Run a worker file in the stage's own environment and say how far it is. Raises WorkerError."""
        return self.run_with(self.runtime.python, what, worker, spec)

    def run_with(
        self, python: Path, what: str, worker: str, spec: dict[str, Any], heard: Progress = lambda event: None
    ) -> dict[str, Any]:
        """The same with another Python. `heard` gets every event of the worker.

        A thread that waits spins for moments only, then sleeps (GOMP_SPINCOUNT): with other work on the machine,
        spinning threads take the cores from one another, and a calibration pass becomes ten times slower.
        """
        threads = str(self.threads)
        env = {"OMP_NUM_THREADS": threads, "GOMP_SPINCOUNT": "20000", "TOKENIZERS_PARALLELISM": "false"}
        env["GPTQMODEL_CPU_WORKERS"] = threads  # it would take as many as there are cores, each with its own threads
        if worker != "hub_data_worker.py":
            env["HF_HUB_OFFLINE"] = "1"

        def follow(event: Mapping[str, Any]) -> None:
            if event["event"] == "step":
                self.say(f"{what}: {event['text']}")
            elif event["event"] == "layer":
                self.say(f"{what}: part {event['done']} of {event['total']}")
            heard(event)

        log = self.workspace.root / "logs" / f"{what.replace('/', '-').replace(' ', '-')}.log"
        return run_job(Job(what, python, HERE / worker, spec, log, env), follow)
