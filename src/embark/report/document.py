"""A report as what it says, before it is HTML or Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

Tone = Literal["", "good", "warn", "bad", "live"]


@dataclass(frozen=True, slots=True)
class Words:
    """A paragraph."""

    text: str
    tone: Tone = ""
    is_small: bool = False


@dataclass(frozen=True, slots=True)
class Code:
    """Commands to copy."""

    text: str


@dataclass(frozen=True, slots=True)
class Tile:
    """A number that is looked at first."""

    label: str
    value: str
    note: str = ""
    tone: Tone = ""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Several beside each other."""

    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[int] = frozenset()
    """Columns of numbers."""
    code: frozenset[int] = frozenset()
    """Columns of names that a program reads."""
    tones: tuple[Tone, ...] = ()
    """Of the rows, where they have any."""


@dataclass(frozen=True, slots=True)
class Key:
    """What a colour or a sign stands for."""

    sign: str
    """A class of the page: `k0` to `k7`, `lost`, `dot`, `save`, `stop`, …"""
    words: str


@dataclass(frozen=True, slots=True)
class Picture:
    """A curve, and the same in letters for where there are no drawings."""

    title: str
    svg: Markup
    note: str = ""
    letters: str = ""
    keys: tuple[Key, ...] = ()


@dataclass(frozen=True, slots=True)
class Gallery:
    """Pictures side by side where there is room."""

    pictures: tuple[Picture, ...]
    keys: tuple[Key, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a bar, both ends from 0 to 1."""

    start: float
    stop: float
    sign: str
    tooltip: str = ""


@dataclass(frozen=True, slots=True)
class Bar:
    """A row: its name, its stretches, its figure."""

    label: str
    pieces: tuple[Piece, ...]
    value: str
    tone: Tone = ""


@dataclass(frozen=True, slots=True)
class Bars:
    """Rows of them under one title."""

    title: str
    bars: tuple[Bar, ...]
    keys: tuple[Key, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Folded:
    """What few look at."""

    title: str
    blocks: tuple[Block, ...]


Block = Words | Code | Tiles | Table | Gallery | Bars | Folded


@dataclass(frozen=True, slots=True)
class Section:
    """A chapter."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """The whole."""

    kicker: str
    """What kind of page it is."""
    title: str
    sentence: str
    """What there is to say, in one."""
    badge: str
    tone: Tone
    facts: tuple[str, ...]
    """Where, when, on what: a line of them."""
    lead: tuple[Block, ...]
    sections: tuple[Section, ...]
    footer: str = ""


def sections_with_something(sections: Sequence[tuple[str, Sequence[Block | None]]]) -> tuple[Section, ...]:
    """Chapters that have nothing to say are left out."""
    known = [(title, tuple(block for block in blocks if block is not None)) for title, blocks in sections]
    return tuple(Section(title, blocks) for title, blocks in known if blocks)
