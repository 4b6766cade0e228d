"""Values as JSON can hold them."""

import dataclasses
import math
from collections.abc import Mapping
from enum import Enum
from typing import Any


def to_jsonable(value: Any) -> Any:
    """The value in JSON's own types. NaN and infinity become null; dataclass fields with `repr=False` are left out."""
    if value is None or isinstance(value, (bool, int, str)):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Enum):
        return to_jsonable(value.value)
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_jsonable(held) for held in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(to_jsonable, value), key=str)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_jsonable(getattr(value, f.name)) for f in dataclasses.fields(value) if f.repr}
    for as_plain in ("model_dump", "tolist"):  # pydantic's and numpy's own ways, with neither imported
        if hasattr(value, as_plain):
            return to_jsonable(getattr(value, as_plain)())
    return str(value)
