"""Python source with values in it: they go in as literals at its head, and nowhere else."""

import ast
import pprint
from collections.abc import Mapping
from typing import Any

from embark.render.shell_text import TEMPLATES
from embark.render.yaml_text import header

PLACE = "CONSTANTS = None\n"
"""The line of a body that makes way for the values."""


def python_text(template: str, values: Mapping[str, Any], *, about: str) -> str:
    """A file of `templates/` with `NAME = literal` lines in the place of `PLACE`, under a header."""
    body = (TEMPLATES / template).read_text(encoding="utf-8")
    before, place, after = body.partition(PLACE)
    assert place, "the body has no place for its values"
    literals = {name: pprint.pformat(value, width=110, sort_dicts=False) for name, value in values.items()}
    text = header(about) + before + "".join(f"{name} = {literal}\n" for name, literal in literals.items()) + after
    ast.parse(text)
    return text
