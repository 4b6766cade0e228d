"""Changes of what a run learns from, accepted on resume: since which step a field has another value."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from embark.events.events import Event
from embark.formatting import format_count, to_finite, to_one_line

MAX_SHOWN = 80
_DIGEST = 64  # Characters of a SHA-256, of which a person sees the first few.


@dataclass(frozen=True, slots=True)
class Change:
    """A field, and its value before and after a resume from `step`."""

    field: str
    old: Any
    new: Any
    step: int

    def __str__(self) -> str:
        old, new = shown_value(self.old), shown_value(self.new)
        return f"{self.field}: {old} up to step {format_count(self.step)}, {new} from there on"


def changes_of(events: Iterable[Event]) -> list[Change]:
    """Those in force, oldest first: a later start from an earlier step undoes what came after that step."""
    found: list[Change] = []
    for event in events:
        if event.kind == "start":
            first_step = to_finite(event.values.get("first_step")) or 0
            found = [change for change in found if change.step <= first_step]
        elif event.kind == "change" and (step := to_finite(event.values.get("step"))) is not None:
            values = event.values
            found.append(Change(to_one_line(values.get("field", "")), values.get("old"), values.get("new"), int(step)))
    return found


def warm_start_text(values: Mapping[str, Any]) -> str:
    """Of a `warm_start` event: whose weights a run began with."""
    step, fresh, rows = (format_count(values.get(name)) for name in ("from_step", "num_fresh_rows", "num_rows"))
    return f"of {to_one_line(values.get('run', ''))} at step {step}; {fresh} of {rows} table rows are new"


def shown_value(value: Any) -> str:
    """A field's value in a sentence."""
    if isinstance(value, str) and len(value) == _DIGEST:
        return f"sha256 {to_one_line(value)[:12]}…"
    text = "none" if value in (None, "") else to_one_line(value) if isinstance(value, str) else to_one_line(repr(value))
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"
