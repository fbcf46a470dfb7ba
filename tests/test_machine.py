"""What the machine says of itself."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from qserve import machine
from qserve.errors import UsageError
from qserve.machine import available_bytes, core_ids, look


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    look.cache_clear()
    yield
    look.cache_clear()


def test_this_machine() -> None:
    here = look()
    assert 1 <= here.cores == len(core_ids()) <= (psutil.cpu_count() or 1)
    assert 0 < available_bytes() <= here.memory_bytes <= psutil.virtual_memory().total


@pytest.mark.parametrize(("text", "cores"), [("100000 100000", 1), ("50000 100000", 1), ("250000 100000", 2)])
def test_a_quota_of_cpu_time_bounds_the_cores(
    text: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    every = len(core_ids())
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert len(core_ids()) == every
    (tmp_path / "cpu.max").write_text(f"{text}\n")
    assert len(core_ids()) == min(cores, every)


def test_the_flavour_can_be_chosen_and_a_typo_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QSERVE_FLAVOUR", "cuda")
    assert look().flavour == "cuda"
    look.cache_clear()
    monkeypatch.setenv("QSERVE_FLAVOUR", "gpu")
    with pytest.raises(UsageError, match="QSERVE_FLAVOUR is 'gpu'; it may be cpu or cuda"):
        look()
