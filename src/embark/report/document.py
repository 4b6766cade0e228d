"""A report as what it says, and as a page: HTML that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Literal

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from embark.formatting import strip_control_chars
from embark.values import frozen

Tone = Literal["", "good", "warn", "bad", "live"]
GENERATOR = "Embark report"  # Marks a file as a report of Embark.


@frozen
class Words:
    """A paragraph."""

    text: str
    tone: Tone = ""
    is_small: bool = False


@frozen
class Code:
    """Commands to copy."""

    text: str


@frozen
class Tile:
    """A number that is looked at first."""

    label: str
    value: str
    note: str = ""
    tone: Tone = ""


@frozen
class Table:
    """Rows of text."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[int] = frozenset()  # Columns of numbers.
    code: frozenset[int] = frozenset()  # Columns of names that a program reads.
    tones: tuple[Tone, ...] = ()  # Tones of the rows, where they have any.


@frozen
class Key:
    """The meaning of a colour or a sign."""

    sign: str  # A class of the page: `k0` to `k7`, `dot`, `save`, `stop`, …
    words: str


@frozen
class Picture:
    """A curve."""

    title: str
    svg: Markup
    note: str = ""


@frozen
class Gallery:
    """Pictures side by side where there is room."""

    pictures: tuple[Picture, ...]
    keys: tuple[Key, ...] = ()


@frozen
class BarSegment:
    """A segment of a bar, both ends from 0 to 1."""

    start: float
    stop: float
    sign: str
    tooltip: str = ""


@frozen
class Bar:
    """A row of bars: its name, its segments, its figure."""

    label: str
    pieces: tuple[BarSegment, ...]
    value: str
    tone: Tone = ""


@frozen
class Bars:
    """Bars under one title."""

    title: str
    bars: tuple[Bar, ...]
    keys: tuple[Key, ...] = ()
    note: str = ""


@frozen
class Folded:
    """Blocks that few readers need, folded away."""

    title: str
    blocks: tuple[Block, ...]


Block = Words | Code | Table | Gallery | Bars | Folded


@frozen
class Section:
    """A chapter of a report."""

    title: str
    blocks: tuple[Block, ...]


@frozen
class Document:
    """A complete report."""

    kicker: str  # The kind of page, above its title.
    title: str
    sentence: str  # Summary in one sentence.
    badge: str
    tone: Tone
    facts: tuple[str, ...]  # One line of facts, such as location, time and machine.
    tiles: tuple[Tile, ...]
    sections: tuple[Section, ...]
    footer: str = ""


def sections_with_something(sections: Sequence[tuple[str, Sequence[Block | None]]]) -> tuple[Section, ...]:
    """Return the chapters that have something to say."""
    known = [(title, tuple(block for block in blocks if block is not None)) for title, blocks in sections]
    return tuple(Section(title, blocks) for title, blocks in known if blocks)


def html_page(document: Document) -> str:
    """Return the complete file: no script, no font, no picture from elsewhere."""
    css = Markup(files("embark.report").joinpath("style.css").read_text(encoding="utf-8"))
    return page_template().render(document=document, css=css, generator=GENERATOR) + "\n"


@cache
def page_template() -> Template:
    """Return the template, which strips control characters from text and keeps markup as it is."""
    environment = Environment(
        loader=PackageLoader("embark.report", ""), autoescape=True, undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else strip_control_chars(value))
    environment.tests["kind"] = lambda block, name: type(block).__name__ == name
    return environment.get_template("page.html.j2")
