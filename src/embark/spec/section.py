"""Base class of every section of a spec: frozen, strict, no unknown keys."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section. The docstring under a field is its help text everywhere."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False,
    )
