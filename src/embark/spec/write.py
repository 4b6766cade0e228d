"""A spec as TOML text that reads back as the same spec."""

from __future__ import annotations

import tomli_w

from embark.spec.run import RunSpec


def to_toml(spec: RunSpec) -> str:
    """The whole resolved spec; fields without a value are left out, TOML having no null."""
    return tomli_w.dumps(spec.model_dump(mode="json", exclude_none=True))
