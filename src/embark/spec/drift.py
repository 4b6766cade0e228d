"""`[data.drift]`: synthetic samples of a world that changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from embark.errors import Mistake
from embark.spec.section import Section

if TYPE_CHECKING:
    from embark.spec.run import RunSpec


class DriftSpec(Section):
    """`[data.drift]`: `synthetic` samples in order of time, whose ids come and go and whose teacher model changes; the
    held-out samples follow the training samples in time (docs/follow.md)."""

    samples_per_day: NonNegativeInt = 0
    """Samples in a day of the stream; 0: nothing drifts. Sample `i` has the time `i / samples_per_day`."""
    num_ids: NonNegativeInt = Field(default=0, le=1 << 31)
    """Ids of a feature that are in use at one moment; 0: as many as the table has rows. An id is a random 63-bit
    number; a table takes it modulo its rows."""
    id_churn: NonNegativeFloat = Field(default=0.1, le=100)
    """Share of the ids in use that new ids replace each day."""
    preference_drift: NonNegativeFloat = Field(default=0.2, le=100)
    """How often in a day the effect of an id, and of a dense column, becomes another, gradually."""
    head_ids: PositiveInt = 50
    """Rank by popularity at which an id's effect is half of the most popular one's."""

    @property
    def is_on(self) -> bool:
        return self.samples_per_day > 0


def drift_mistakes(spec: RunSpec) -> Iterator[Mistake]:
    """Of `[data.drift]`."""
    data, model = spec.data, spec.model
    if not data.drift.is_on:
        if data.drift != DriftSpec():
            yield _mistake("data.drift.samples_per_day", 0, "the rest of [data.drift] has no effect without it",
                           "set it, or leave [data.drift] out")
    elif data.kind != "synthetic":
        yield _mistake("data.drift", "", f'has no effect while data.kind is "{data.kind}"', "leave it out")
    elif model.tasks:
        yield _mistake("data.drift", "", "draws one label, and the model has [[model.tasks]]", "leave one of them out")


def _mistake(field: str, value: object, what: str, fix: str) -> Mistake:
    return Mistake(where="", field=field, value=str(value), what=what, fix=fix)
