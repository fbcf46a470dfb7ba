"""How busy the GPUs are while a block runs, asked of the driver twice a second."""

import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

QUERY = ("nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits")


@dataclass
class Samples:
    """Utilisation of all devices, 0..1, one value a look."""

    values: list[float] = field(default_factory=list)

    def mean(self) -> float | None:
        return sum(self.values) / len(self.values) if self.values else None


@contextmanager
def gpu_utilisation(every_s: float = 0.5) -> Iterator[Samples]:
    """Sample for the length of the block; without an NVIDIA driver nothing is sampled and the mean is None."""
    samples, done = Samples(), threading.Event()
    if not shutil.which(QUERY[0]):
        yield samples
        return
    thread = threading.Thread(target=_sample, args=(samples, done, every_s), daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def _sample(samples: Samples, done: threading.Event, every_s: float) -> None:
    while not done.wait(every_s):
        out = subprocess.run(QUERY, capture_output=True, text=True, check=False).stdout
        shares = [int(line) / 100 for line in out.split() if line.isdigit()]
        if shares:
            samples.values.append(sum(shares) / len(shares))
