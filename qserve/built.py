"""What is built once and kept in the cache: complete or absent, with its state in a file of its own, written last."""

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from qserve.rounding import size
from qserve.uvrun import Build, need_disk

STATE_NAME = "runtime.json"


@dataclass(frozen=True)
class State:
    """runtime.json: written last, so its presence means complete."""

    name: str
    digest: str
    packages: dict[str, str]
    size_bytes: int
    built: str
    build_s: float


@dataclass(frozen=True)
class Thing:
    """What to build: it will lie in `folder`. `need_bytes`: disk that the build takes."""

    name: str
    digest: str
    folder: Path
    need_bytes: int


def build_once(thing: Thing, build: Build, fill: Callable[[Path], dict[str, str]]) -> State:
    """Build under a temporary name, check, write the state, rename. A failure of any kind leaves nothing.

    `fill` fills a folder, sees that what it made works, and returns the versions that matter.
    """
    need_disk(thing.folder.parent, thing.need_bytes, build.label)
    partial = thing.folder.with_name(thing.folder.name + ".partial")
    started = time.monotonic()
    shutil.rmtree(partial, ignore_errors=True)  # of a build that was killed
    try:
        packages = fill(partial)
        built = time.strftime("%FT%TZ", time.gmtime())
        state = State(thing.name, thing.digest, packages, _size(partial), built, round(time.monotonic() - started, 1))
        (partial / STATE_NAME).write_text(json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8")
        os.sync()  # the name must not stand before its contents do
        shutil.rmtree(thing.folder, ignore_errors=True)  # one that no longer works
        partial.rename(thing.folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    build.say(f"built {build.label} in {state.build_s:.0f} s ({size(state.size_bytes)})")
    return state


def read_state(folder: Path) -> State | None:
    """The state of a finished build; None if there is none."""
    path = folder / STATE_NAME
    return State(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def _size(folder: Path) -> int:
    """Bytes of the files under `folder`. Hard links to uv's cache count: they are the runtime's as much."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
