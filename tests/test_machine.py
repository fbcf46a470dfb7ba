"""What the machine says of itself."""

from collections.abc import Iterator

import psutil
import pytest

from qserve.errors import UsageError
from qserve.machine import available_bytes, core_ids, look


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    look.cache_clear()
    yield
    look.cache_clear()


def test_this_machine() -> None:
    machine = look()
    assert 1 <= machine.cores == len(core_ids()) <= (psutil.cpu_count() or 1)
    assert 0 < available_bytes() <= machine.memory_bytes <= psutil.virtual_memory().total


def test_the_flavour_can_be_chosen_and_a_typo_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QSERVE_FLAVOUR", "cuda")
    assert look().flavour == "cuda"
    look.cache_clear()
    monkeypatch.setenv("QSERVE_FLAVOUR", "gpu")
    with pytest.raises(UsageError, match="QSERVE_FLAVOUR is 'gpu'; it may be cpu or cuda"):
        look()
