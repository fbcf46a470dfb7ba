"""The base of every value that crosses a stage border: frozen, and closed to unknown fields; numbers with bounds."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from qserve import limits

Concurrency = Annotated[int, Field(ge=1, le=limits.CONCURRENCY)]  # requests in flight
Tokens = Annotated[int, Field(ge=1, le=limits.TOKENS)]
Seconds = Annotated[float, Field(gt=0, le=limits.SECONDS, allow_inf_nan=False)]


class Frozen(BaseModel):
    """An immutable record. A field that nobody declared is an error, so a typo cannot pass as a default."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
