"""Base class of every section of a spec: frozen, strict, no unknown keys."""

from collections.abc import Callable, Collection, Iterable
from functools import cache, wraps
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from embark.errors import Mistakes, conflict
from embark.values import JsonDict

NUM_REMEMBERED = 8
S = TypeVar("S", bound="Section")
R = TypeVar("R")
T = TypeVar("T")
MAX_NUMBER = 2**53  # What JSON keeps exact; TOML has 64 bits.


def _exact(value: int) -> int:
    if value > MAX_NUMBER:
        raise ValueError(f"is more than {MAX_NUMBER:,}")
    return value


PositiveInt = Annotated[int, Field(gt=0), AfterValidator(_exact)]  # A bound by `le` would override that of a field.
NonNegativeInt = Annotated[int, Field(ge=0), AfterValidator(_exact)]
Many = Annotated[tuple[T, ...], Field(strict=False)]  # TOML has lists.
Names = Many[str]


class Section(BaseModel):
    """A section. The docstring under a field is its help text everywhere."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    def changed(self, **values: Any) -> Self:
        """Return a copy with other values, which are not validated."""
        return self.model_copy(update=values)

    def has_default(self, field: str) -> bool:
        """Tell whether a field has its default, given or not."""
        return bool(getattr(self, field) == _defaults(type(self))[field])

    def unused(self, section: str, fields: Iterable[str], why: str, fix: str) -> Mistakes:
        """Report those of `fields` that were changed although nothing reads them."""
        for name in fields:
            if not self.has_default(name):
                yield conflict(f"{section}.{name}", getattr(self, name), f"has no effect {why}", fix)

    omitted: ClassVar[Collection[str]] = ()
    """Fields that are not stored while they have their defaults, so that the record of a run that does not use them
    stays the same."""

    default_of_model: ClassVar[Collection[str]] = ()
    """Fields that have another default for some models: read back, one that is stored would count as chosen."""

    def left_out(self) -> Collection[str]:
        """Name the fields that are not stored."""
        return [*filter(self.has_default, self.omitted), *({*self.default_of_model} - self.model_fields_set)]

    @model_serializer(mode="wrap")
    def _without_left_out(self, dump: SerializerFunctionWrapHandler) -> JsonDict:
        values: JsonDict = dump(self)
        left_out = self.left_out()
        return {name: value for name, value in values.items() if name not in left_out}


@cache
def _defaults(section: type[Section]) -> JsonDict:
    return {name: info.default for name, info in section.model_fields.items()}


def remembered(function: Callable[[S], R]) -> Callable[[S], R]:
    """Keep the last results of a function of a section, by identity: hashing a section takes as long as computing most
    of them. A result must not be changed."""
    known: list[tuple[S, R]] = []

    @wraps(function)
    def find(section: S) -> R:
        for one, result in known:
            if one is section:
                return result
        result = function(section)
        known[:] = [(section, result), *known[:NUM_REMEMBERED - 1]]
        return result

    return find
