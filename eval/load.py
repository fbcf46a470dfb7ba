"""Closed-loop load: so many requests in flight, each sent when the last one of its slot is answered.

The client shares the machine with the server that it measures, so it is lean: raw protocol callbacks, and no task
switch between an answer and the next request. What it could not deliver it says: mean requests in flight, its own CPU
time, and how late its event loop ran.
"""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from qserve.errors import UsageError
from qserve.eval.records import LabelledRecord, LoadRun, Request, RequestRecord, Target, write_requests
from qserve.eval.slot import Load, OnDone, Slot

__all__ = [
    "LabelledRecord", "LoadRun", "Request", "RequestRecord", "Target",
    "run", "run_load", "write_requests",
]  # fmt: skip

TICK_S = 0.02  # how often timeouts and the loop's lateness are looked at
T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, on uvloop where that is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


async def run_load(
    target: Target,
    requests: Sequence[Request],
    concurrency: int,
    *,
    cut_after_s: float | None = None,
    timeout_s: float = 600,
    on_done: OnDone | None = None,
) -> LoadRun:
    """Send all requests, at most `concurrency` at a time, and record each one. A failed request has a record too.

    Args:
        cut_after_s: then the connections are closed, and what was running is recorded as "cut".
        timeout_s: of one request, from send to last byte.
        on_done: called with each record as soon as it is complete.

    Raises:
        UsageError: a URL, key, concurrency or request that cannot be sent.
    """
    if concurrency < 1 or not requests:
        raise UsageError("a load needs at least one request and a concurrency of at least 1")
    if any(request.chat and not isinstance(request.prompt, str) for request in requests):
        raise UsageError("a chat request takes text; send token ids with chat=False")
    load = Load(target, requests, timeout_s, on_done)
    slots = [Slot(load) for _ in range(min(concurrency, len(requests)))]
    await asyncio.gather(*(slot.connect() for slot in slots))
    if all(slot.connection is None for slot in slots):
        load.refuse_all(slots[0].refusal)
    cpu_s = time.process_time()
    load.start_s = time.perf_counter()
    helpers = [asyncio.create_task(_watch(load, slots))]
    if cut_after_s is not None:
        helpers.append(asyncio.create_task(_cut(load, slots, cut_after_s)))
    try:
        await asyncio.gather(*(slot.run() for slot in slots))
    finally:
        for helper in helpers:
            helper.cancel()
        for slot in slots:
            slot.close()
    end_s = load.cut_at_s or max(end_s for _, end_s in load.spans)
    return LoadRun(
        concurrency=concurrency,
        records=tuple(sorted(load.records, key=lambda record: record.index)),
        wall_s=end_s - load.start_s,
        delivered_concurrency=mean_in_flight(load.spans, concurrency, load.cut_at_s if load.unsent else None),
        client_cpu_s=time.process_time() - cpu_s,
        loop_lag_s=load.lag_s,
    )


def mean_in_flight(spans: Sequence[tuple[float, float]], concurrency: int, cut_at_s: float | None) -> float | None:
    """Mean requests in flight from the first send to the last one (or to the cut, if work was left then).

    Where every slot sends once there is no such time: then it is the number in flight at the last send.

    Args:
        spans: (send, end) of each request, in seconds.
    """
    if not spans:
        return None
    first_s, last_s = min(sent for sent, _ in spans), cut_at_s or max(sent for sent, _ in spans)
    if len(spans) <= concurrency and cut_at_s is None:
        return float(sum(end >= last_s for _, end in spans))
    if last_s <= first_s:
        return None
    return sum(min(end, last_s) - sent for sent, end in spans if sent < last_s) / (last_s - first_s)


async def _watch(load: Load, slots: Sequence[Slot]) -> None:
    """Timeouts of all slots by one timer, which also tells how late the event loop runs."""
    while True:
        due_s = time.perf_counter() + TICK_S
        await asyncio.sleep(TICK_S)
        now_s = time.perf_counter()
        load.lag_s = max(load.lag_s, now_s - due_s)
        for slot in slots:
            if slot.overdue(now_s):
                slot.stop("timeout", now_s)


async def _cut(load: Load, slots: Sequence[Slot], after_s: float) -> None:
    await asyncio.sleep(after_s)
    load.cut_at_s = time.perf_counter()
    for slot in slots:
        slot.stop("cut", load.cut_at_s)
