"""SVG elements in which text from outside stays text."""

from markupsafe import Markup, escape

from embark.formatting import strip_control_chars

_EMPTY = frozenset({"br", "hr", "meta", "link", "circle", "line", "path", "polyline", "polygon", "rect", "use"})


def el(tag: str, *children: str, **attributes: str | float | None) -> Markup:
    """An element. Children that are no `Markup` are escaped; `class_` is `class`, `text_anchor` is `text-anchor`."""
    shown = "".join(f' {_name(name)}="{_value(value)}"' for name, value in attributes.items() if value is not None)
    inside = joined(*children)
    return Markup(f"<{tag}{shown}>{inside}</{tag}>" if inside or tag not in _EMPTY else f"<{tag}{shown}/>")


def joined(*children: str) -> Markup:
    """One after another."""
    return Markup("".join(child if isinstance(child, Markup) else text(child) for child in children))


def text(words: str) -> Markup:
    """Plain text as HTML: nothing in it is a tag or changes the direction of text."""
    return escape(strip_control_chars(words))


def _name(name: str) -> str:
    return name.removesuffix("_").replace("_", "-")


def _value(value: str | float) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return escape(strip_control_chars(str(value)))
