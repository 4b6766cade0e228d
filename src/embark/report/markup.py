"""HTML and SVG in which other people's text stays text."""

from __future__ import annotations

from html import escape

from embark.formatting import strip_control_chars

_EMPTY = frozenset({"br", "hr", "meta", "link", "circle", "line", "path", "polyline", "polygon", "rect", "use"})


class Markup(str):
    """Text that is HTML already. Whatever is put together with plain strings becomes plain again, and is escaped."""

    __slots__ = ()


def el(tag: str, *children: str, **attributes: str | float | None) -> Markup:
    """An element. Children that are no `Markup` are escaped; of `class_` and `text_anchor` the name is put right."""
    told = "".join(
        f' {_name(name)}="{_value(value)}"' for name, value in attributes.items() if value is not None
    )
    inside = joined(*children)
    if not inside and tag in _EMPTY:
        return Markup(f"<{tag}{told}/>")
    return Markup(f"<{tag}{told}>{inside}</{tag}>")


def joined(*children: str) -> Markup:
    """One after another."""
    return Markup("".join(child if isinstance(child, Markup) else text(child) for child in children))


def text(words: str) -> Markup:
    """Plain text as HTML: nothing in it is a tag, and nothing in it turns the page around."""
    return Markup(escape(strip_control_chars(words), quote=True))


def _name(name: str) -> str:
    return name.removesuffix("_").replace("_", "-")


def _value(value: str | float) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return escape(strip_control_chars(str(value)), quote=True)
