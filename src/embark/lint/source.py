"""A file as the linter holds it: its text, and where in the text a thing stands."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """One file's text. Places in it are counted in characters."""

    path: Path
    text: str
    starts: tuple[int, ...] = field(repr=False)
    """Where each line begins."""

    @staticmethod
    def of(path: Path, text: str) -> Source:
        starts = [0]
        for index, character in enumerate(text):
            if character == "\n":
                starts.append(index + 1)
        return Source(path, text, tuple(starts))

    def line_of(self, index: int) -> int:
        """Counted from 1."""
        return bisect.bisect_right(self.starts, index)

    def line(self, number: int) -> str:
        """The text of a line, counted from 1; empty past the end."""
        if not 0 < number <= len(self.starts):
            return ""
        return self.text[self.starts[number - 1]:self.end_of_line(self.starts[number - 1])]

    def start_of_line(self, index: int) -> int:
        return self.starts[self.line_of(index) - 1]

    def end_of_line(self, index: int) -> int:
        """Past its newline."""
        line = self.line_of(index)
        return self.starts[line] if line < len(self.starts) else len(self.text)

    def column_of(self, index: int) -> int:
        return index - self.start_of_line(index)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a thing stands in a file."""

    source: Source
    start: int
    end: int

    @property
    def line(self) -> int:
        return self.source.line_of(self.start)

    @property
    def text(self) -> str:
        return self.source.text[self.start:self.end]


@dataclass(frozen=True, slots=True)
class Edit:
    """Characters of a file, and what to put there instead."""

    place: Place
    new: str
