"""The same document as Markdown, for a merge request or a wiki."""

import re
from collections.abc import Iterator

from embark.formatting import strip_control_chars, to_one_line
from embark.report.document import Bars, Block, Code, Document, Folded, Gallery, Table, Tiles, Words

_SPECIAL = re.compile(r"([\\`*_{}\[\]#|~])")
_HTML = str.maketrans({"<": "&lt;", ">": "&gt;", "&": "&amp;"})


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
