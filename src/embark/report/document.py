"""A report as what it says, and as a page: HTML that needs nothing else, or Markdown for a merge request or a wiki."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from embark.formatting import strip_control_chars, to_one_line

Tone = Literal["", "good", "warn", "bad", "live"]
GENERATOR = "Embark report"
"""What marks a file as one of ours."""
_SPECIAL = re.compile(r"([\\`*_{}\[\]#|~])")
_HTML = str.maketrans({"<": "&lt;", ">": "&gt;", "&": "&amp;"})


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


def html_page(document: Document) -> str:
    """The complete file."""
    css = Markup(files("embark.report").joinpath("style.css").read_text(encoding="utf-8"))
    return _template().render(document=document, css=css, generator=GENERATOR) + "\n"


@cache
def _template() -> Template:
    environment = Environment(loader=PackageLoader("embark.report", ""), autoescape=True, undefined=StrictUndefined,
                              finalize=_clean)
    environment.tests["kind"] = lambda block, name: type(block).__name__ == name
    return environment.get_template("page.html.j2")


def _clean(value: Any) -> Any:
    """Text from outside cannot turn the page around; markup stays as it is."""
    return value if isinstance(value, Markup) else strip_control_chars(value)


def markdown_page(document: Document) -> str:
    """The complete file."""
    title = f"{document.title} ({document.badge})" if document.badge else document.title
    lines = ["<!-- Embark report -->", "", f"# {_text(title)}", "", _text(document.sentence), "",
             " · ".join(_text(fact) for fact in document.facts if fact), ""]
    for block in document.lead:
        lines += [*_block(block), ""]
    for section in document.sections:
        lines += [f"## {_text(section.title)}", ""]
        for block in section.blocks:
            lines += [*_block(block), ""]
    if document.footer:
        lines += ["---", "", _text(document.footer)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Words):
        yield f"> {_text(block.text)}" if block.tone else _text(block.text)
    elif isinstance(block, Code):
        yield from _fenced(block.text)
    elif isinstance(block, Tiles):
        yield from _table(Table(("", "", ""), tuple((t.label, t.value, t.note) for t in block.tiles), frozenset({1})))
    elif isinstance(block, Table):
        yield from _table(block)
    elif isinstance(block, Gallery):
        for picture in block.pictures:
            note = picture.note or ", ".join(key.words for key in picture.keys)
            yield f"**{_text(picture.title)}**" + (f": {_text(note)}" if note else "")
            yield ""
            if picture.letters:
                yield from _fenced(picture.letters)
                yield ""
    elif isinstance(block, Bars):
        if block.title:
            yield f"**{_text(block.title)}**"
            yield ""
        yield from _table(Table(("", ""), tuple((bar.label, bar.value) for bar in block.bars), frozenset({1})))
        if block.note:
            yield from ("", _text(block.note))
    else:
        yield from _folded(block)


def _folded(folded: Folded) -> Iterator[str]:
    yield f"<details><summary>{to_one_line(folded.title).translate(_HTML)}</summary>"
    yield ""
    for block in folded.blocks:
        yield from _block(block)
        yield ""
    yield "</details>"


def _table(table: Table) -> Iterator[str]:
    yield "| " + " | ".join(map(_text, table.columns)) + " |"
    yield "|" + "|".join("--:" if i in table.right else "---" for i in range(len(table.columns))) + "|"
    for row in table.rows:
        cells = [_code(cell) if i in table.code else _text(cell) for i, cell in enumerate(row)]
        yield "| " + " | ".join(cells) + " |"


def _fenced(text: str) -> Iterator[str]:
    text = strip_control_chars(text)
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    yield f"{fence}text"
    yield from text.splitlines()
    yield fence


def _code(words: str) -> str:
    """A code span; a pipe would end the cell even in there."""
    words = to_one_line(words)
    return _text(words) if not words or "`" in words or "|" in words else f"`{words}`"


def _text(words: str) -> str:
    """On one line, with nothing in it that Markdown or HTML reads."""
    return _SPECIAL.sub(r"\\\1", to_one_line(words)).translate(_HTML)
