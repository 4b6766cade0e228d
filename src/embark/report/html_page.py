"""A document as one HTML file that needs nothing else: no script, no font, no picture from elsewhere."""

from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from embark.formatting import strip_control_chars
from embark.report.document import Document

GENERATOR = "Embark report"
"""What marks a file as one of ours."""


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
