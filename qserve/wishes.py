"""Wishes: what a deployment must hold and what it is for. The `choose:` section of a recipe, the options of
`qserve choose`, and the arguments of `Report.choose` are the same value."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from qserve.values import Concurrency, Frozen, Tokens

LATENCIES = ("ttft", "itl", "tpot", "e2e")
SLO_NAMES = tuple(f"{latency}_{percentile}" for latency in LATENCIES for percentile in ("p50", "p95", "p99"))
Objective = Literal["throughput", "ttft", "itl"]
Positive = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]  # a bound, so that no quotient overflows
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Floor(Frozen):
    """The least quality that will do, beside bf16 on the same text."""

    kl: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None  # at most, nats a token
    top1: Share | None = None  # at least
    perplexity_ratio: Positive | None = None  # variant / bf16, at most
    tasks: dict[str, Share] = Field({})  # task -> score, at least


class Traffic(Frozen):
    """What is asked of the deployment. `concurrency` is of one machine; a rate is of all machines together."""

    concurrency: Concurrency | None = None  # None: the largest measured one at which the SLO holds
    requests_per_s: Positive | None = None
    output_tokens_per_s: Positive | None = None
    prompt_tokens: Tokens | None = None  # None: as measured
    output_tokens: Tokens | None = None

    @model_validator(mode="after")
    def _one_rate(self) -> "Traffic":
        if self.requests_per_s is not None and self.output_tokens_per_s is not None:
            raise ValueError("give the rate as requests_per_s or as output_tokens_per_s, not both")
        return self


class Wishes(Frozen):
    """Every field may be left out: then nothing is demanded of it."""

    slo: dict[str, Positive] = Field({})  # name of SLO_NAMES -> seconds, at most
    floor: Floor = Floor()
    memory_gb: Positive | None = None  # 10^9 bytes; of the server's peak, its KV cache included
    price_per_hour: Positive | None = None  # of one machine, in any currency
    traffic: Traffic = Traffic()
    objective: Objective = "throughput"  # what is to be best among all that qualify

    @field_validator("slo")
    @classmethod
    def _known(cls, slo: dict[str, float]) -> dict[str, float]:
        for name in slo:
            if name not in SLO_NAMES:
                raise ValueError(f"unknown {name!r}; did you mean one of {', '.join(SLO_NAMES)}?")
        return slo

    @model_validator(mode="after")
    def _where(self) -> "Wishes":
        if self.objective != "throughput" and self.traffic.concurrency is None:
            raise ValueError(f"objective {self.objective} needs a concurrency: a latency is of one concurrency")
        return self
