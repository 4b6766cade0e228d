"""A spec as TOML text that reads back as the same spec."""

import re

import tomli_w

from embark.spec.run import RunSpec

_ARRAY = re.compile(r"^(\S+ = )\[\n((?:    .*,\n)+)\]$", re.MULTILINE)


def to_toml(spec: RunSpec, *, only_set: bool = False) -> str:
    """The resolved spec; fields without a value are left out, TOML having no null.

    With `only_set`, only the fields that the user set, so that the reader still sees which ones those are.
    """
    values = spec.model_dump(mode="json", exclude_none=True, exclude_unset=only_set)
    values = {"name": spec.name, **{key: value for key, value in values.items() if value != {}}}
    # tomli_w writes each element on its own line, and escapes line breaks in strings.
    return _ARRAY.sub(lambda match: match[1] + "[" + " ".join(line.strip() for line in match[2].split("\n"))[:-2] + "]",
                      tomli_w.dumps(values))
