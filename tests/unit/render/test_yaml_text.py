"""What is written as YAML reads back as itself, whatever it holds, and comments change nothing."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from embark.render.yaml_text import header, note, plain, yaml_part

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=40) | st.sampled_from([
    "1e3", "0o7", "0x1F", "1_000", "12:30:45", "y", "No", "on", "null", "~", "", " ", "-", "- a", "? a", ": a", "a: b",
    "a #b", "!!python/object:os.system", "&a", "*a", "<<", "=", "%YAML", "---", "...", "a\nb", "a\n\n", "\n",
    " a\n b\n", "a \nb", "$(id)", "`id`", "'\"", "\\", "\x07", "\x85", "\u2028", "é\tü", "{a}", "[b]", "2026-11-15",
    ".5", "+.inf",
])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
NOTED = st.recursive(
    TEXT | st.integers(),
    lambda inner: (
        st.lists(inner | st.builds(note, inner, TEXT), max_size=3)
        | st.dictionaries(TEXT, inner | st.builds(note, inner, TEXT), max_size=3)
    ),
    max_leaves=8,
)


def yaml_text(documents, *, about: str) -> str:
    return header(about) + "---\n".join(f"{yaml_part(document)}\n" for document in documents)


@given(st.dictionaries(TEXT, VALUES, min_size=1, max_size=4))
@settings(max_examples=60)
def test_any_value_reads_back_as_itself(document):
    assert yaml.safe_load(yaml_text([document], about="x")) == document


@given(st.dictionaries(TEXT, NOTED, min_size=1, max_size=3), TEXT)
@settings(max_examples=60)
def test_comments_change_nothing_whatever_they_hold(document, about):
    assert yaml.safe_load(yaml_text([document], about=about)) == plain(document)


@given(st.lists(st.dictionaries(TEXT, VALUES, min_size=1, max_size=2), min_size=1, max_size=3))
@settings(max_examples=60)
def test_documents_stay_apart(documents):
    assert list(yaml.safe_load_all(yaml_text(documents, about="x"))) == documents


@pytest.mark.parametrize("text", ["1e3", "0o7", "12e03", "1.34", "y", "N", ".5", "-1", "+1", "no", "null"])
def test_a_text_that_another_reader_takes_for_a_number_is_in_quotes(text):
    line = yaml_text([{"key": text}], about="x").splitlines()[-1]
    assert line.removeprefix("key: ")[0] in "\"'"


def test_a_person_can_read_it():
    text = yaml_text([
        {"kind": "ConfigMap", "data": {"spec.toml": 'name = "a"\n\n[model]\nkind = "dlrm"\n'},
         "list": [note({"a": 1, "b": []}, "the first"), {"a": note(2, "two")}, "x"], "empty": {}},
        {"kind": "Job"},
    ], about="Two objects.")
    body = text.removeprefix(header("Two objects."))
    assert body == '''\
kind: ConfigMap
data:
  spec.toml: |
    name = "a"

    [model]
    kind = "dlrm"
list:
# the first
- a: 1
  b: []
# two
- a: 2
- x
empty: {}
---
kind: Job
'''
    assert text.startswith("# Two objects.\n# Written by `embark render`.")


def test_what_is_no_yaml_is_refused():
    with pytest.raises(yaml.representer.RepresenterError):
        yaml_text([{"a": object()}], about="x")
