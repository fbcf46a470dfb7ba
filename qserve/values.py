"""The base of every value that crosses a stage border: frozen, and closed to unknown fields."""

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """An immutable record. A field that nobody declared is an error, so a typo cannot pass as a default."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
