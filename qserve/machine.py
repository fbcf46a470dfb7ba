"""Look at the machine: cores, instruction sets, memory, GPUs. Decides the flavour, `cpu` or `cuda`."""

import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Literal

import psutil

from qserve.artifacts import Machine
from qserve.errors import UsageError

CGROUP = Path("/sys/fs/cgroup")  # as a container sees its own
FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "asimd", "i8mm", "bf16")


@cache
def look() -> Machine:
    """This machine, as this process may use it. $QSERVE_FLAVOUR overrides the flavour."""
    model, flags = _cpu()
    gpus = _gpus()
    chosen = os.environ.get("QSERVE_FLAVOUR") or ("cuda" if gpus else "cpu")
    if chosen not in ("cpu", "cuda"):
        raise UsageError(f"QSERVE_FLAVOUR is {chosen!r}; it may be cpu or cuda")
    flavour: Literal["cpu", "cuda"] = "cuda" if chosen == "cuda" else "cpu"
    return Machine(
        flavour=flavour,
        cpu=model,
        cores=len(core_ids()),
        isa=tuple(flag for flag in FLAGS if flag in flags),
        memory_bytes=_memory(),
        gpus=tuple(name for name, _, _ in gpus),
        gpu_memory_bytes=gpus[0][1] if gpus else None,
        gpu_capability=gpus[0][2] if gpus else None,
    )


def core_ids() -> tuple[int, ...]:
    """One logical CPU of each physical core that this process may run on, ascending; no more of them than a container's
    quota of CPU time keeps busy, since a thread without time of its own makes the others wait."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    first_of: dict[str, int] = {}
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        first_of.setdefault(siblings.read_text() if siblings.exists() else str(cpu), cpu)
    return tuple(sorted(first_of.values()))[: _quota(CGROUP / "cpu.max")]


def _quota(limit: Path) -> int | None:
    """Whole CPUs that the cgroup's quota comes to, at least 1; None where there is none."""
    words = limit.read_text().split() if limit.exists() else []
    return max(int(words[0]) // int(words[1]), 1) if len(words) == 2 and words[0].isdigit() else None


def instruction_sets() -> tuple[str, ...]:
    """All that a compiler may use when it compiles for this very CPU: vector, matrix and bit instructions."""
    kinds = ("avx", "amx", "sse", "ssse", "fma", "f16c", "bmi", "asimd", "sve", "sme", "i8mm", "bf16", "fphp")
    return tuple(sorted(flag for flag in _cpu()[1] - {"smep"} if flag.startswith(kinds)))


def _cpu() -> tuple[str, frozenset[str]]:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine(), frozenset()
    fields = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
    clean = {key.strip(): value.strip() for key, value in fields.items()}
    flags = clean.get("flags") or clean.get("Features") or ""
    return clean.get("model name", platform.machine()), frozenset(flags.split())


def _memory() -> int:
    """Physical memory, or the cgroup's limit where that is lower."""
    total = psutil.virtual_memory().total
    limit = CGROUP / "memory.max"
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        return min(total, int(text))
    return total


def available_bytes() -> int:
    """Memory that can be had now: what the system has available, or what the cgroup's limit leaves."""
    available: int = psutil.virtual_memory().available
    limit, used = CGROUP / "memory.max", CGROUP / "memory.current"
    if limit.exists() and used.exists() and (text := limit.read_text().strip()).isdigit():
        return min(available, max(int(text) - int(used.read_text()), 0))
    return available


def _gpus() -> list[tuple[str, int, str]]:
    """(name, memory bytes, compute capability) of each NVIDIA GPU that the driver shows."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    try:
        out = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[part.strip() for part in line.split(",")] for line in out.splitlines() if line.count(",") == 2]
    return [(name, int(mib) * 2**20, capability) for name, mib, capability in rows if mib.isdigit()]
