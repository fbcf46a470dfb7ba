"""Decision: one deployment out of a Report, with the reasons, or what must be measured before there can be one."""

from typing import Literal

from qserve.artifacts import Artifact, Machine, Ratio
from qserve.values import Frozen
from qserve.wishes import Wishes

Outcome = Literal["chosen", "unresolved", "nothing qualifies"]
State = Literal["holds", "fails", "unknown"]
Standing = Literal["qualifies", "undecided", "excluded"]


class Interval(Frozen):
    """A figure with its 95 % interval; `low` and `high` are None where fewer than two blocks gave it."""

    value: float
    low: float | None
    high: float | None


class Check(Frozen):
    """One demand on one format. `unknown`: not measured, or too close to the limit for the noise."""

    demand: str  # "served faithfully", "kl", "memory", "ttft_p95", ...
    state: State
    says: str  # a clause, with the figure
    more_windows: int | None = None  # of held-out text, that would decide it
    more_requests: int | None = None  # at this concurrency, that would decide it
    more_items: int | None = None  # of the task, that would decide it
    final: bool = False  # unknown, and no longer run of this kind would decide it


class FormatStanding(Frozen):
    """One format against the wishes, at the concurrency it would be run at."""

    name: str
    label: str
    standing: Standing
    concurrency: int | None  # None: none was measured at which it could run
    checks: tuple[Check, ...]
    gain: Ratio | None  # over bf16 at that concurrency: of throughput, or of the latency that is the objective
    output_tokens_per_s: Interval | None  # of one machine
    requests_per_s: float | None  # of one machine
    cost: Interval | None  # per million output tokens, in the currency of the price
    machines: int | None  # for the asked rate, at the value of the throughput
    machines_cautious: int | None  # the same at the low end of its interval
    faster_at: tuple[int, ...]  # concurrencies at which it beats bf16 in throughput, beyond noise
    slower_at: tuple[int, ...]
    unresolved_at: tuple[int, ...]


class Flip(Frozen):
    """One thing that would change the answer, or that would not."""

    by: Literal["concurrency", "lengths", "price", "floor", "memory", "slo"]
    says: str
    to: str | None = None  # the format that would be chosen then; None: none, or not known


class More(Frozen):
    """What to measure before the question can be answered."""

    why: tuple[str, ...]
    command: str
    pairs: int | None = None  # blocks on each side, at each concurrency
    windows: int | None = None
    task_items: int | None = None  # of each task
    concurrency: int | None = None
    loads_s: float | None = None  # that its blocks will take, by those that were measured


class Decision(Artifact):
    """What `qserve choose` prints."""

    format: Literal[1] = 1
    run: str
    model: str
    machine: Machine
    wishes: Wishes
    outcome: Outcome
    choice: str | None  # set only where chosen
    provisional: str | None  # unresolved: the format that is safe until then
    concurrency: int | None  # at which the choice runs
    sentence: str
    reasons: tuple[str, ...]
    runner_up: str | None
    runner_up_says: str | None
    formats: tuple[FormatStanding, ...]  # bf16 first
    flips: tuple[Flip, ...]
    more: More | None
