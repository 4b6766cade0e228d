"""What rendering gives: texts and where they go. Nothing here writes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class File:
    """One file to hand over."""

    path: str
    """Relative to the directory that is rendered into, with `/`."""
    text: str
    is_executable: bool = False
