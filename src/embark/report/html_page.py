"""A document as one HTML file that needs nothing else: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from embark.report.document import (
    Bar,
    Bars,
    Block,
    Code,
    Document,
    Gallery,
    Key,
    Picture,
    Section,
    Table,
    Tile,
    Tiles,
    Words,
)
from embark.report.markup import Markup, el, joined

GENERATOR = "Embark report"
"""What marks a file as one of ours."""
# Even if text became a tag, a browser would run none of it and fetch nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def html_page(document: Document) -> str:
    """The complete file."""
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="generator", content=GENERATOR),
        el("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("link", rel="icon", href="data:,"),
        el("title", f"{document.title} · {document.kicker}"),
        el("style", Markup(_css())),
    )
    body = el("body", el(
        "main", _header(document), *map(_block, document.lead), *map(_section, document.sections),
        el("footer", document.footer) if document.footer else Markup(),
    ))
    return "<!doctype html>\n" + el("html", head, "\n", body, lang="en") + "\n"


@cache
def _css() -> str:
    return files("embark.report").joinpath("style.css").read_text(encoding="utf-8")


def _header(document: Document) -> Markup:
    badge = el("span", document.badge, class_=f"badge {document.tone}") if document.badge else Markup()
    facts = el("p", *(el("span", fact) for fact in document.facts if fact), class_="facts")
    return el("header", el("p", document.kicker, class_="kicker"),
              el("div", el("h1", document.title), badge, class_="name"),
              el("p", document.sentence, class_="sentence"), facts)


def _section(section: Section) -> Markup:
    return joined("\n", el("section", el("h2", section.title), *map(_block, section.blocks)))


def _block(block: Block) -> Markup:
    if isinstance(block, Words):
        return _words(block)
    if isinstance(block, Code):
        return el("pre", el("code", block.text))
    if isinstance(block, Tiles):
        return el("div", *map(_tile, block.tiles), class_="tiles")
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Gallery):
        return joined(_keys(block.keys), el("div", *map(_picture, block.pictures), class_="gallery"))
    if isinstance(block, Bars):
        return _bars(block)
    return el("details", el("summary", block.title), *map(_block, block.blocks))


def _words(words: Words) -> Markup:
    if words.tone:
        return el("div", el("p", words.text), class_=f"callout {words.tone}")
    return el("p", words.text, class_="small" if words.is_small else None)


def _tile(tile: Tile) -> Markup:
    note = el("div", tile.note, class_="note") if tile.note else Markup()
    return el("div", el("div", tile.label, class_="label"), el("div", tile.value, class_=f"value {tile.tone}".strip()),
              note, class_="tile")


def _table(table: Table) -> Markup:
    def cell(tag: str, column: int, words: str) -> Markup:
        inside = el("code", words) if tag == "td" and column in table.code and words else words
        kind = "right" if column in table.right else _length(words) if tag == "td" else None
        return el(tag, inside, class_=kind,
                  scope="col" if tag == "th" else None)

    head = el("tr", *(cell("th", i, words) for i, words in enumerate(table.columns)))
    tones = table.tones or ("",) * len(table.rows)
    rows = [el("tr", *(cell("td", i, words) for i, words in enumerate(row)), class_=tone or None)
            for row, tone in zip(table.rows, tones, strict=True)]
    has_head = any(table.columns)
    inside = el("table", el("thead", head) if has_head else Markup(), el("tbody", *rows))
    return el("div", inside, class_="scroll" if has_head else "scroll pairs")


def _length(words: str) -> str | None:
    """A short cell is not wrapped; a long one gets a minimum width."""
    return "brief" if len(words) <= 24 else "long" if len(words) > 40 else None


def _picture(picture: Picture) -> Markup:
    note = el("span", picture.note, class_="note") if picture.note else Markup()
    return el("figure", el("figcaption", el("span", picture.title), note), _keys(picture.keys), picture.svg)


def _bars(bars: Bars) -> Markup:
    title = el("h3", bars.title) if bars.title else Markup()
    note = el("p", bars.note, class_="small") if bars.note else Markup()
    return el("div", title, _keys(bars.keys, "block "), el("div", *map(_bar, bars.bars), class_="rows"), note,
              class_="bars")


def _bar(bar: Bar) -> Markup:
    pieces = [
        el("rect", el("title", piece.tooltip) if piece.tooltip else Markup(), x=1000 * piece.start, y=0,
           width=1000 * max(0.0, piece.stop - piece.start), height=10, class_=f"piece {piece.sign}")
        for piece in bar.pieces
    ]
    drawn = el("svg", *pieces, viewBox="0 0 1000 10", preserveAspectRatio="none", role="img",
               aria_label=f"{bar.label}: {bar.value}")
    return el("div", el("span", bar.label, class_="label"), drawn,
              el("span", bar.value, class_=f"value {bar.tone}".strip()), class_="bar")


def _keys(keys: tuple[Key, ...], shape: str = "") -> Markup:
    if not keys:
        return Markup()
    return el("ul", *(el("li", el("span", class_=f"key {shape}{key.sign}"), key.words) for key in keys), class_="keys")
