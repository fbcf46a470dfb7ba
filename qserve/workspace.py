"""Where things lie on disk, and how they get there: complete or absent.

<workspace>/checkpoints/<variant>-<digest>/    weights, tokenizer, configs; qserve.json last
<workspace>/data/<digest>/                     token ids of the three parts
<workspace>/references/<digest>.json           log-probabilities from transformers
<workspace>/runs/<run>/                        measurements.json, requests.parquet, logs, report.*
<cache>/runtimes/, <cache>/packages/           shared between projects
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qserve.artifacts import MANIFEST_NAME, Manifest
from qserve.errors import UsageError


def cache_root() -> Path:
    """$QSERVE_CACHE, else the platform's cache folder for this user."""
    if own := os.environ.get("QSERVE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qserve"


def digest_of(value: Any) -> str:
    """12 hex digits that name a JSON-able value: the same value, the same name, on every machine."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def complete_or_absent(final: Path) -> Iterator[Path]:
    """Give a temporary sibling folder to fill; rename it to `final` on success, remove it on any failure.

    A folder that a killed process left behind is removed first.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(final.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        _sync(partial)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _sync(folder: Path) -> None:
    """Flush every file, so that a complete name never stands before its contents."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                os.fsync(file.fileno())


@dataclass(frozen=True)
class Workspace:
    """One project's folder of checkpoints and runs."""

    root: Path

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def references(self) -> Path:
        return self.root / "references"

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    def checkpoint(self, variant: str, digest: str) -> Path:
        return self.checkpoints / f"{variant}-{digest}"

    def complete(self, variant: str, digest: str) -> Manifest | None:
        """The manifest of a finished checkpoint, or None."""
        path = self.checkpoint(variant, digest) / MANIFEST_NAME
        return Manifest.read(path) if path.is_file() else None

    @contextmanager
    def only_one(self, work: str) -> Iterator[None]:
        """One `qserve <work>` at a time in a workspace: two would write to the same places.

        Raises:
            UsageError: there is one at work. The lock of a process that died is free by itself.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            lock = (self.root / f"{work}.lock").open("w")
        except OSError as error:
            raise _no_place(self.root) from error
        with lock as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"another qserve {work} is at work in {self.root}; wait for it, stop it, or use another --workspace"
                ) from None
            yield

    def latest_run(self) -> Path:
        """The newest run that has measurements. Raises UsageError if there is none."""
        found = sorted(self.runs.glob("*/measurements.json"), key=lambda p: p.stat().st_mtime)
        if not found:
            raise UsageError(f"no finished run in {self.runs}; `qserve bench` makes one")
        return found[-1].parent


def open_workspace(path: Path | None) -> Workspace:
    """The given folder, else $QSERVE_WORKSPACE, else ./qserve-workspace."""
    root = (path or Path(os.environ.get("QSERVE_WORKSPACE") or "qserve-workspace")).absolute()
    there = next(folder for folder in (root, *root.parents) if os.path.exists(folder))
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise _no_place(root)
    return Workspace(root)


def _no_place(root: Path) -> UsageError:
    return UsageError(f"the workspace {root} is no folder that can be written to; choose another with --workspace")


def free_bytes(path: Path) -> int:
    """Free space of the file system that `path` is or will be on."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free
